"""The file that first_contact.py writes: what was predicted beside what was measured, or "not
measured"."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from attention_checks import masks
from attention_times import FIRST, SMOKE
from harness import markdown
from longctx.config import load
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.training.described import read_described
from longctx.training.run_profile import default_profile, run_profile
from several_gpus import CLAIMS
from training_rows import FASTEST, VOCABULARY, Gpu, runs

Rows = list[dict[str, str]]
RING_AIM, MEMORY_AIM = 0.9, 0.1
MFU_AIMS = {"32768": 0.5, "131072": 0.55}
UNKNOWN: dict[str, Any] = {
    "device": "unknown device",
    "memory": 80e9,
    "peak": 989e12,
    "attention": "flash-attn 4",
}
"""What is taken for a device that did not say what it is: an H100."""
NONE = "not measured"
VALUES = "predicted", "measured"


class Page:
    """The sections about the files OUT-*; what cannot be read or predicted is named in `failures`,
    and the others stay."""

    def __init__(self, out: Path, calibration: Sequence[str], *, small: bool = False) -> None:
        """`calibration` has the settings of the part `profile`; the files of `small` parts have
        rows of a tiny model."""
        self.out, self.calibration, self.small, self.failures = out, calibration, small, list[str]()
        path = Path(f"{out}-device.json")
        self.about = UNKNOWN
        with suppress(OSError, ValueError):
            self.about = json.loads(path.read_text(encoding="utf-8"))
        self.gpu = Gpu(self.about["memory"], self.about["peak"], self.about["attention"])
        self.assumed = default_profile(
            "cpu" if self.about["device"].startswith("CPU") else "cuda", self.about["device"]
        )

    def lines(self) -> Iterator[str]:
        aims = ", ".join(f"{aim:.0%} at {n} tokens" for n, aim in MFU_AIMS.items())
        sections: dict[str, Callable[[], list[str]]] = {
            "Does what the README says hold here?": self.claims,
            "How long do attention kernels compile, once?": self.compilation,
            "Does every kernel agree with float64?": lambda: kernels(self.read("attention-checks")),
            f"What does a ring cost over one call? (aim: at least {RING_AIM:.0%} at 8,192 tokens "
            "per rank)": self.rings,
            f"How fast does a model train? (aim: {aims})": self.models,
            "Do messages between GPUs work?": self.messages,
            "What are the planner's constants here?": self.constants,
            "What do several GPUs gain?": self.several,
        }
        for title, answer in sections.items():
            try:
                found = answer()
            except Exception as error:  # any error: the other answers are sent all the same
                self.failures.append(
                    f"{title} {type(error).__name__}: {' '.join(str(error).split())}"
                )
                found = [f"**Failed** {self.failures[-1]}"]
            yield from ("", f"## {title}", "", *found)

    def claims(self) -> list[str]:
        """Returns a verdict for each claim: holds, fails, or not measured."""
        checks = [row["right"] == "True" for row in self.read("attention-checks")]
        trained = [row for row in self.read("training") if not row["failed"] and row["step_s"]]
        off = [
            abs(float(row["estimate_gib"]) / float(row["peak_gib"]) - 1) <= MEMORY_AIM
            for row in trained
            if row["peak_gib"] and row["estimate_gib"]
        ]
        messages = [line for line in self.messages() if line != NONE]
        passed = [" passed" in line and " failed" not in line for line in messages]
        rows = [
            ["Kernels agree with float64, in rings as in one call", verdict(checks)],
            [f"A ring reaches {RING_AIM:.0%} of one call", verdict(self.reached(rings=True))],
            ["A 1B model reaches the MFU below", verdict(self.reached(rings=False))],
            [f"Memory is within {MEMORY_AIM:.0%} of the estimate", verdict(off)],
            ["Several GPUs give what one process gives", verdict(passed)],
        ]
        for claim in CLAIMS:
            rows.append([claim, verdict([row["holds"] == "True" for row in self.found(claim)])])
        return markdown(["claim", "verdict"], rows)

    def found(self, claim: str) -> Rows:
        """Returns what was measured on several GPUs for a claim: the last row that did not fail."""
        rows = [row for row in self.read("several") if row["what"] == claim and not row["failed"]]
        return rows[-1:]

    def several(self) -> list[str]:
        """Returns what was measured on several GPUs beside its prediction."""
        lines = []
        for claim in CLAIMS:
            tried = [row for row in self.read("several") if row["what"] == claim]
            for row in self.found(claim) or tried[-1:]:
                values = [f"{float(row[name]):.4g}" if row[name] else "" for name in VALUES]
                lines.append([claim, *values, row["failed"]])
        return markdown(["claim", *VALUES, ""], lines, 1) if lines else [NONE]

    def reached(self, *, rings: bool) -> list[bool]:
        """Returns whether each row with an aim reached it."""
        found = []
        part = "attention" if rings else "training"
        for row in self.read(part):
            if row["failed"]:
                continue
            if rings:
                said = ring(row, "")[-1]
            else:
                said = trained(row, "")[-1]
            if "reached" in said:
                found.append("not reached" not in said)
        return found

    def missing(self) -> Iterator[str]:
        """Yields what a dry run should have and does not: rows that failed or that no time was left
        for, and whole files."""
        for name in (
            "attention-checks",
            "attention",
            "attention-elementwise",
            "training",
            "several",
        ):
            rows = self.read(name)
            yield from [] if rows else [f"{name}: no rows"]
            yield from (f"{name}: {' '.join(row.values())}"[:300] for row in rows if row["failed"])
        claims = set(self.claims())
        for line in self.lines():
            if line not in claims and (NONE in line or "not checked" in line):
                yield line

    def read(self, name: str) -> Rows:
        """Returns the complete rows of a file: a part may have been ended while it wrote one."""
        path = Path(f"{self.out}-{name}.csv")
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if None not in row.values()]

    def profile(self, settings: Sequence[str]) -> HardwareProfile:
        """Returns the profile from which is predicted, scaled to a run with these settings; nothing
        asks the GPU."""
        words = [word.removeprefix("--") for word in settings]
        config = load(None, [*words, f"context.profile={self.assumed}", "train.device=cpu"])
        return run_profile(config, 1, VOCABULARY).profile

    def rings(self) -> list[str]:
        profile, described = read_described(self.assumed)
        assert described is not None  # all shipped profiles name their model
        # Forward and backward on documents of 8,192 tokens and more: 3.5 times 4 operations for
        # half of all pairs of tokens.
        expected = f"{7 * described.work.attention / profile.attention_s_per_token2 / 1e12:.3g}"
        rows, sizes = self.read("attention"), SMOKE if self.small else FIRST
        names = list(dict.fromkeys(row["kernel"] for row in rows if row["tokens"])) or [
            self.gpu.attention
        ]
        lines = [ring(row, expected) for row in rows]
        measured = {(row["kernel"], row["tokens"], row["degree"]) for row in rows}
        for name, tokens, degree in product(names, sizes.tokens, sizes.degrees):
            if (name, str(tokens), str(degree)) not in measured:
                lines.append(
                    ring(
                        {
                            "kernel": name,
                            "tokens": str(tokens),
                            "degree": str(degree),
                            "failed": NONE,
                        },
                        expected,
                    )
                )
        head = [
            "kernel",
            "tokens per rank",
            "degree",
            "predicted, one call, TFLOP/s",
            "one call",
            "forward",
            "backward",
        ]
        return markdown([*head, "ring, forward", "ring, backward", "calls alone", ""], lines, 3)

    def models(self) -> list[str]:
        rows, lines = self.read("training"), list[list[str]]()
        for run in runs(self.gpu, smoke=self.small, first=True):
            mine = [
                row
                for row in rows
                if (row["tokens"], row["chosen"]) == (str(run.tokens), run.chosen)
            ]
            for row in mine or [{}]:
                named = [
                    option for option in run.options if option.name == row.get("options")
                ] or run.fitting(self.gpu)
                if not named:
                    lines.append(
                        [str(run.tokens), run.chosen, *[""] * 8, f"{NONE}: no settings fit"]
                    )
                    continue
                profile = self.profile(run.arguments(named[0], 1))
                plan = make_plan([run.tokens], ranks=1, tokens_per_rank=run.tokens, profile=profile)
                head = [
                    str(run.tokens),
                    named[0].name,
                    row.get("attention", ""),
                    f"{plan.makespan_s:.4g}",
                ]
                lines.append([*head, *trained(row, f"{run.bytes(named[0]) / 2**30:.1f}")])
        names = [
            "tokens",
            "settings",
            "attention",
            "predicted step, s",
            "step, s",
            "tokens/s",
            "MFU",
            "estimate, GiB",
        ]
        return markdown([*names, "peak, GiB", ""], lines, 3)

    def messages(self) -> list[str]:
        """Returns the last line of the tests."""
        return [line.strip("= ") for line in self.log("messages") if line.startswith("=")][-1:] or [
            NONE
        ]

    def passed_over(self) -> list[str]:
        """Returns which kernels do not run here, and why."""
        start = f"{NONE}: "
        lines = [line for line in self.log("attention") if line.startswith(start)]
        return [line.removeprefix(start) for line in lines]

    def compilation(self) -> list[str]:
        """Returns the seconds of each part's kernels."""
        path = Path(f"{self.out}-compile.json")
        if not path.exists():
            return [NONE]
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [[part, each["kernel"], str(each["seconds"])] for part, each in found.items()]
        return markdown(["kernels of", "kernel", "seconds"], rows)

    def log(self, part: str) -> list[str]:
        path = Path(f"{self.out}-{part}.log")
        return (
            path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        )

    def constants(self) -> list[str]:
        """Says what was predicted beside what was measured, and adds the profile itself: a file to
        send is one file."""
        path, expected = Path(f"{self.out}-profile.yaml"), self.profile(self.calibration)
        here = HardwareProfile.load(str(path)) if path.exists() else None
        names = "linear_s_per_token", "attention_s_per_token2", "launch_s", "step_s"
        names = *names, "intra_node_bytes_per_s", "latency_s", "overlap"
        rows = [
            [
                name,
                *(
                    NONE if each is None else f"{getattr(each, name):.4g}"
                    for each in (expected, here)
                ),
            ]
            for name in names
        ]
        table = markdown(["constant", f"predicted by {self.assumed}", "here"], rows, 1)
        if here is None:
            return table
        text = path.read_text(encoding="utf-8").rstrip()
        return [
            *table,
            "",
            f"{path.name}: `--context.profile {path.name}`",
            "",
            "```yaml",
            text,
            "```",
        ]


def verdict(found: Sequence[bool]) -> str:
    """Says whether a claim holds in all that was measured."""
    if not found:
        return NONE
    if all(found):
        return f"holds ({len(found)} of {len(found)})"
    return f"**fails** ({sum(found)} of {len(found)} hold)"


def kernels(rows: Rows) -> list[str]:
    """One line per kernel: checks passed, and the largest error of a ring over that of one call,
    both against float64."""
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        good = [row for row in mine if row["right"] == "True"]
        ratios = [
            float(row["ring"]) / float(row["single"])
            for row in mine
            if row["single"] and float(row["single"])
        ]
        passes = dict.fromkeys(row["deterministic"] for row in mine)
        different = set()
        for deterministic in passes:
            which = ", deterministic" if deterministic == "True" and len(passes) > 1 else ""
            of_pass = [row for row in mine if row["deterministic"] == deterministic]
            different |= {
                f"{row['mask']} {row['tensor']}{which} {row['failed']}".strip()
                for row in of_pass
                if row["right"] != "True"
            }
            reached = {row["mask"] for row in of_pass}
            # No time was left.
            different |= {f"not checked: {mask}{which}" for mask in masks(1) if mask not in reached}
        if "True" not in passes and "False" in passes:
            different.add("two runs may differ")
        worst = f"{max(ratios):.2f}" if ratios else ""
        lines.append([kernel, f"{len(good)} of {len(mine)}", worst, "; ".join(sorted(different))])
    names = ["kernel", "checks passed", "largest error, ring / one call", "failed, remarks"]
    return markdown(names, lines) if lines else [NONE]


def ring(row: dict[str, str], expected: str) -> list[str]:
    """Returns the cells of a row of attention, measured or not."""
    head = [row["kernel"], row["tokens"], row["degree"], expected]
    if row["failed"]:
        return [*head, *[""] * 6, row["failed"]]
    ways = "forward", "backward"
    rates = [float(row[f"{way}_single_tflops"]) for way in ways]
    both = 3.5 / (1 / rates[0] + 2.5 / rates[1])
    shares, calls = (
        [float(row[f"{way}_{what}_share"]) for way in ways] for what in ("ring", "calls")
    )
    aimed = row["tokens"] == "8192" and int(row["degree"]) > 1
    verdict = ("reached" if min(shares) >= RING_AIM else "not reached") if aimed else ""
    cells = (
        *(f"{rate:.0f}" for rate in (both, *rates)),
        *(f"{share:.0%}" for share in shares),
        f"{min(calls):.0%}",
    )
    return [*head, *cells, verdict]


def trained(row: dict[str, str], estimated: str) -> list[str]:
    """Returns the cells of a row of training, measured or not, after those of its settings."""
    if not row or row["failed"] or not row["step_s"]:
        return ["", "", "", estimated, "", row["failed"] if row else NONE]
    mfu, peak, estimate = (
        float(row[name]) if row[name] else None for name in ("mfu", "peak_gib", "estimate_gib")
    )
    verdicts = []
    if mfu is not None and row["chosen"] == FASTEST and row["tokens"] in MFU_AIMS:
        verdicts.append(f"MFU {'reached' if mfu >= MFU_AIMS[row['tokens']] else 'not reached'}")
    if peak and estimate and abs(estimate / peak - 1) > MEMORY_AIM:
        verdicts.append(f"estimate off by {estimate / peak - 1:+.0%}")
    cells = [
        row["step_s"],
        row["tokens_per_s"],
        "" if mfu is None else f"{mfu:.1%}",
        estimated,
        f"{peak:.1f}" if peak else "",
    ]
    return [*cells, ", ".join([*verdicts, *[row["note"]] * bool(row["note"])])]
