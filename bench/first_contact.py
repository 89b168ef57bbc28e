"""The first minutes on GPUs: is it right, how fast is it, does the memory estimate hold. Needs one GPU, and no network.

    python bench/first_contact.py                  # 9 minutes on one GPU, 14 on two and more
    python bench/first_contact.py --minutes 25     # more rows
    python bench/first_contact.py --smoke          # tiny, on any machine: tests the script, no figures

Answers, in this order, in OUT.md, which is rewritten after every part:
  attention  Does every kernel agree with float64? How fast is it, and what does a ring cost over one call (attention_gpu.py)?
  training   How fast does a 1B model train on documents of 32,768 and 131,072 tokens, does it take the memory that was
             estimated, and which recomputation and compilation are best (training_gpu.py)?
  messages   On two and more GPUs: do rings, pipelines and training over NCCL give what one process gives (pytest -m gpu)?
  profile    What are the constants of this machine for the planner (longctx calibrate), on two and more GPUs those of messages
             between them too?

Each part is a process of its own, with a share of the time: if one fails, OUT.md says so, and the others run. Rows are appended
to OUT-attention*.csv and OUT-training.csv as they are measured; the same command continues with those that are missing.
docs/gpu.md says how to read the answers.
"""

import csv
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from attention_checks import masks
from harness import command, device_facts, facts, markdown, median_s, options
from longctx.planning.hardware_profile import HardwareProfile
from longctx.training.run_profile import default_profile
from training_rows import FASTEST

HERE = Path(__file__).parent
Rows = list[dict[str, str]]
SHARES = {"attention": 0.4, "training": 0.8, "profile": 1.0}
"""Share of the time that has passed at the end of each part."""
OF_SEVERAL = {"attention": 0.3, "training": 0.6, "messages": 0.8, "profile": 1.0}
"""The same on two and more GPUs."""
MINUTES, MINUTES_OF_SEVERAL = 9.0, 14.0
PRODUCT_ROWS = 8192
RING_AIM, MEMORY_AIM = 0.9, 0.1
MFU_AIMS = {"32768": 0.5, "131072": 0.55}


def main() -> None:
    gpus = torch.cuda.device_count()
    parser = options(__doc__, "first-contact", minutes=MINUTES_OF_SEVERAL if gpus > 1 else MINUTES)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also on a CPU")
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.smoke:
        parser.error("no GPU is available: run this on a machine with a GPU, or use --smoke to test the script")
    began, failures = time.monotonic(), list[str]()
    about = facts("longctx", "torch", "triton", "flash-attn-4", "flash-attn-3", "flash-attn", "torchao")
    with ProcessPoolExecutor(1, get_context("spawn")) as other:  # the memory that it takes on the GPU is given back with it
        about |= other.submit(device_rates, small=given.smoke).result()
    page = given.out.with_suffix(".md")
    for part, share in (OF_SEVERAL if gpus > 1 else SHARES).items():
        left = began + share * given.minutes * 60 - time.monotonic()
        why = run(commands(part, given.out, left / 60, smoke=given.smoke, gpus=gpus), left)
        failures += [f"{part}: {why}"] if why else []
        page.write_text("\n".join(answers(given.out, about, failures)) + "\n", encoding="utf-8")
    print(page.read_text(encoding="utf-8"))
    sys.exit(1 if failures else 0)


def device_rates(*, small: bool) -> dict[str, str]:
    """Returns the device, and the rates of a large matrix product and of a copy: nothing on this device runs faster."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = 64 if small else PRODUCT_ROWS
    a, b, c = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(3))
    product_s = median_s(lambda: torch.mm(a, b, out=c), device, 0.3)
    source, target = (torch.randn(8 * rows * rows, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy_s = median_s(lambda: target.copy_(source), device, 0.3)
    found = f"{2 * rows**3 / product_s / 1e12:.4g} TFLOP/s", f"{2 * source.nbytes / copy_s / 1e9:.4g} GB/s"
    return {**device_facts(), "matrix product": found[0], "copy": found[1]}


def commands(part: str, out: Path, minutes: float, *, smoke: bool, gpus: int) -> list[str]:
    """Returns the command of a part on so many GPUs."""
    if part == "messages":
        return ["-m", "pytest", "-q", "-m", "gpu", str(HERE.parent / "tests" / "test_two_devices.py")]
    small = ["--smoke"] if smoke else []
    if part == "profile":
        model = "tiny" if smoke else "llama-3.2-1b"
        several = [f"--processes={gpus}"] if gpus > 1 else []
        settings = [f"--model.preset={model}", "--train.dtype=bfloat16", f"--batch.tokens_per_rank={256 if smoke else 16384}"]
        return ["-m", "longctx", "calibrate", *settings, "--out", f"{out}-profile.yaml", *several]
    script = [str(HERE / f"{part}_gpu.py"), "--first", *small, "--minutes", f"{minutes:.2f}", "--out", f"{out}-{part}"]
    if part == "training":
        return [*script, "--steps", "2" if smoke else "5"]
    return [*script, "--append", *(["--kernels", "cpu"] if not torch.cuda.is_available() else [])]


def run(words: Sequence[str], seconds: float) -> str:
    """Runs a part with its output shown. Returns the reason if it failed, otherwise ""."""
    try:
        # A part ends by itself when its time is over, but not in the middle of a row.
        code = subprocess.run([sys.executable, *words], timeout=max(1.0, seconds + 60)).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {seconds + 60:.0f} s"
    return f"exit status {code}: its output says why" if code else ""


def answers(out: Path, about: dict[str, str], failures: Sequence[str]) -> list[str]:
    """Returns the lines of OUT.md."""
    checks, attention, training = (read(Path(f"{out}-{name}.csv")) for name in ("attention-checks", "attention", "training"))
    return [
        f"# First contact: {about['device']}",
        "",
        f"`{command(out)}`; " + "; ".join(f"{name}: {value}" for name, value in about.items() if name != "device"),
        *("", *(f"**Failed** {failure}" for failure in failures)) * bool(failures),
        *("", "## Does every kernel agree with float64?", "", *kernels(checks)),
        *("", f"## What does a ring cost over one call? (aim: at least {RING_AIM:.0%} at 8,192 tokens per rank)", ""),
        *rings(attention),
        *("", f"## How fast does a model train? (aim: {', '.join(f'{aim:.0%} at {n} tokens' for n, aim in MFU_AIMS.items())})"),
        *("", *models(training)),
        *("", "## What are the planner's constants here?", ""),
        *constants(Path(f"{out}-profile.yaml"), about["device"]),
    ]


def constants(path: Path, device: str) -> list[str]:
    """Says where the profile is, and what was predicted of messages beside what it has: the same if they were not measured."""
    if not path.exists():
        return ["not measured"]
    expected = HardwareProfile.load(default_profile("cpu" if device.startswith("CPU") else "cuda", device))
    found, names = HardwareProfile.load(str(path)), ("intra_node_bytes_per_s", "latency_s", "overlap")
    rows = [[name, *(f"{getattr(profile, name):.4g}" for profile in (expected, found))] for name in names]
    return [f"{path.name}: `--context.profile {path.name}`", "", *markdown(["of messages", "predicted", "here"], rows, 1)]


def kernels(rows: Rows) -> list[str]:
    """One line per kernel: checks passed, and the largest error of a ring over that of one call, both against float64."""
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        good = [row for row in mine if row["right"] == "True"]
        ratios = [float(row["ring"]) / float(row["single"]) for row in mine if row["single"] and float(row["single"])]
        different = {f"{row['mask']} {row['tensor']} {row['failed']}".strip() for row in mine if row["right"] != "True"}
        reached = {row["mask"] for row in mine}
        different |= {f"not checked: {mask}" for mask in masks(1) if mask not in reached}  # no time was left
        different |= {"two runs may differ" for row in mine if row["deterministic"] == "False"}
        worst = f"{max(ratios):.2f}" if ratios else ""
        lines.append([kernel, f"{len(good)} of {len(mine)}", worst, "; ".join(sorted(different))])
    names = ["kernel", "checks passed", "largest error, ring / one call", "failed, remarks"]
    return markdown(names, lines) if lines else ["not measured"]


def rings(rows: Rows) -> list[str]:
    lines = []
    for row in rows:
        head = [row["kernel"], row["tokens"], row["degree"]]
        if row["failed"]:
            lines.append([*head, "", "", "", "", row["failed"]])
            continue
        ways = "forward", "backward"
        rates = [f"{float(row[f'{way}_single_tflops']):.0f}" for way in ways]
        shares = [float(row[f"{way}_ring_share"]) for way in ways]
        aimed = row["tokens"] == "8192" and int(row["degree"]) > 1
        verdict = ("reached" if min(shares) >= RING_AIM else "not reached") if aimed else ""
        lines.append([*head, *rates, *(f"{share:.0%}" for share in shares), verdict])
    names = ["kernel", "tokens per rank", "degree", *(f"one call, {way}, TFLOP/s" for way in ("forward", "backward"))]
    return markdown([*names, "ring, forward", "ring, backward", ""], lines, 3) if lines else ["not measured"]


def models(rows: Rows) -> list[str]:
    lines = []
    for row in rows:
        head = [row["tokens"], row["options"] or row["chosen"], row["attention"]]
        if row["failed"] or not row["step_s"]:
            lines.append([*head, "", "", "", "", "", row["failed"]])
            continue
        mfu, peak, estimate = (float(row[name]) if row[name] else None for name in ("mfu", "peak_gib", "estimate_gib"))
        verdicts = []
        if mfu is not None and row["chosen"] == FASTEST and row["tokens"] in MFU_AIMS:
            verdicts.append(f"MFU {'reached' if mfu >= MFU_AIMS[row['tokens']] else 'not reached'}")
        if peak and estimate and abs(estimate / peak - 1) > MEMORY_AIM:
            verdicts.append(f"estimate off by {estimate / peak - 1:+.0%}")
        cells = [row["tokens_per_s"], "" if mfu is None else f"{mfu:.1%}", *(f"{x:.1f}" if x else "" for x in (peak, estimate))]
        lines.append([*head, row["step_s"], *cells, ", ".join(verdicts)])
    names = ["tokens", "settings", "attention", "step, s", "tokens/s", "MFU", "peak, GiB", "estimate, GiB", ""]
    return markdown(names, lines, 3) if lines else ["not measured"]


def read(path: Path) -> Rows:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
