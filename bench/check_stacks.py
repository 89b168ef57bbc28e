"""What `longctx check-step` says of public trainers, for docs/check-step.md:

python -m bench.check_stacks                                                # one process
torchrun --standalone --nproc-per-node 2 -m bench.check_stacks              # two
python -m bench.check_stacks --stack axolotl                               # with an environment of bench/check_stacks_others.py

Writes a row of bench/results/check_stacks.md for each set-up: its faults on each probe, in words,
the seconds it took, and the most memory that rank 0 held.
"""

import argparse
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any

from longctx.check import PROBES, CheckError, Probe, check_step
from longctx.check.probe import END
from longctx.check.trainer import arguments

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.simplefilter("ignore")
PACKED_TOKENS = 256
"""Of rows that hold a probe's documents, packed."""
Make = Callable[[Probe], Any]
ASKED = [probe for probe in PROBES if probe.name != "few documents"]


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def of_step(probe: Probe, **more: Any) -> dict[str, Any]:
    """Arguments for a step of all documents."""
    size = max(1, len(probe.lengths) // probe.micro_batches // ranks())
    return arguments(
        **{"per_device_train_batch_size": size, "gradient_accumulation_steps": probe.micro_batches}
        | more
    )


def tokenizer(probe: Probe, side: str = "right") -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(probe.vocab_size)}
    names = {"pad_token": f"<{probe.pad}>", "eos_token": f"<{END}>", "padding_side": side}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<0>")), **names)


def trainer(collator: Callable[[Probe], Any], kind: str = "qwen3", **more: Any) -> Make:
    def make(probe: Probe) -> Any:
        from transformers import Trainer, TrainingArguments

        collate = collator(probe)
        rows = (
            [{"input_ids": ids} for ids in probe.documents]
            if "LanguageModeling" in type(collate).__name__
            else probe.rows
        )
        return Trainer(
            probe.model(kind), TrainingArguments(**of_step(probe, **more)), collate, rows
        )

    return make


def padded(side: str = "right") -> Callable[[Probe], Any]:
    def collator(probe: Probe) -> Any:
        from transformers import DataCollatorForSeq2Seq

        return DataCollatorForSeq2Seq(tokenizer(probe, side))

    return collator


def for_language_models(probe: Probe) -> Any:
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(tokenizer(probe), mlm=False)


def flattening(probe: Probe) -> Any:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()


def by_trl(**more: Any) -> Make:
    def make(probe: Probe) -> Any:
        import datasets
        from trl import SFTConfig, SFTTrainer

        given = of_step(probe, **{"max_length": None, "gradient_checkpointing": False, **more})
        if more.get("packing"):
            packs = PACKED_TOKENS // more["max_length"]
            given["per_device_train_batch_size"] = -(-packs // probe.micro_batches // ranks())
        rows = datasets.Dataset.from_list(
            probe.rows if probe.prompt else [{"input_ids": ids} for ids in probe.documents]
        )
        return SFTTrainer(
            probe.model("qwen3"),
            SFTConfig(**given),
            train_dataset=rows,
            processing_class=tokenizer(probe),
        )

    return make


def ours(make: Make) -> Make:
    def made(probe: Probe) -> Any:
        from longctx.trainers import dynamic_context_parallel

        found = make(probe)
        dynamic_context_parallel(found, tokens_per_rank=256, profile="cpu-2core")
        return found

    return made


def evaluated(make: Make) -> Make:
    """Evaluates before the first step, as to know the loss of a checkpoint."""

    def made(probe: Probe) -> Any:
        found = make(probe)
        found.evaluate(found.train_dataset)
        return found

    return made


def without(name: str) -> None:
    """Puts an empty module in the place of one that no CPU build has, and that a step on a CPU does not
    need."""
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    sys.modules.setdefault(name, module)


STACKS: dict[str, Make] = {
    "Trainer, padded at the right": trainer(padded()),
    "Trainer, padded at the left": trainer(padded("left")),
    "Trainer, `DataCollatorForLanguageModeling`": trainer(for_language_models),
    "Trainer, padded, GPT-2": trainer(padded(), "gpt2"),
    "Trainer, padded, BART's decoder": trainer(padded(), "bart"),
    "Trainer, `average_tokens_across_devices=False`": trainer(
        padded(), average_tokens_across_devices=False
    ),
    "Trainer, `evaluate` before": evaluated(trainer(padded())),
    "Trainer, `DataCollatorWithFlattening`, Qwen 3": trainer(flattening),
    "Trainer, `DataCollatorWithFlattening`, GPT-2": trainer(flattening, "gpt2"),
    "Trainer, `DataCollatorWithFlattening`, gpt-oss": trainer(flattening, "gpt_oss"),
    "Trainer, `DataCollatorWithFlattening`, OPT": trainer(flattening, "opt"),
    "Trainer, `DataCollatorWithFlattening`, Jamba": trainer(flattening, "jamba"),
    "TRL, padded": by_trl(),
    "TRL, `padding_free`": by_trl(padding_free=True),
    "TRL, packing `bfd`": by_trl(packing=True, packing_strategy="bfd", max_length=64),
    "TRL, packing `bfd_split`": by_trl(packing=True, packing_strategy="bfd_split", max_length=32),
    "TRL, packing `wrapped`": by_trl(packing=True, packing_strategy="wrapped", max_length=32),
    "TRL, `evaluate` before": evaluated(by_trl()),
    "TRL, `chunked_nll`": by_trl(loss_type="chunked_nll"),
    "longctx in Trainer": ours(trainer(padded())),
    "longctx in Trainer, flattened": ours(trainer(flattening)),
    "longctx in TRL": ours(by_trl()),
    "longctx in TRL, `evaluate` before": evaluated(ours(by_trl())),
}
if ranks() > 1:
    STACKS["Trainer, padded, batches that do not fill the ranks"] = trainer(
        padded(), per_device_train_batch_size=5, gradient_accumulation_steps=2
    )


RESULTS = Path(__file__).parent / "results" / "check_stacks.md"


def write(title: str, lines: Sequence[str]) -> None:
    """Puts a section into the results, in the place of the one with its title."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    parts = {
        part.partition("\n")[0]: part.rstrip() for part in re.split("(?m)^(?=## )", text) if part
    }
    parts[f"## {title}"] = "\n".join([f"## {title}", "", *lines])
    RESULTS.write_text("\n\n".join(parts[name] for name in sorted(parts)) + "\n", encoding="utf-8")


def said(name: str, make: Make, probes: Sequence[Probe]) -> str:
    """Returns the faults of a set-up, each with the probes that show it, if these are not all."""
    try:
        verdicts = check_step(
            make, probes, ["prompts are trained"] if "LanguageModeling" in name else ()
        ).verdicts
    except (CheckError, ValueError) as error:
        return f"refused: {str(error).splitlines()[0]}"
    found = [(verdict.probe.name, each.kind) for verdict in verdicts for each in verdict.findings]
    kinds = {kind: [probe for probe, other in found if other == kind] for _, kind in found}
    where = {
        kind: f" ({', '.join(names)})" if len(names) < len(probes) else ""
        for kind, names in kinds.items()
    }
    return "; ".join(f"{kind}{where[kind]}" for kind in kinds) or "right"


def forget_peak() -> None:
    """Lets the peak of this process's memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Returns the most memory that this process held since `forget_peak`, in MiB."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kilobytes[0]) // 1024


def row(name: str, make: Make, probes: Sequence[Probe]) -> str:
    """Returns the row of a set-up: name, verdict, seconds, MiB."""
    forget_peak()
    begun = time.monotonic()
    verdict = said(name, make, probes)
    seconds = time.monotonic() - begun
    return f"| {name} | {verdict} | {seconds:.0f} | {peak():,} |"


def versions(stack: str) -> str:
    """Returns the versions of the packages that a stack consists of."""
    from bench.check_stacks_others import PACKAGES

    names = ("torch", "transformers", *PACKAGES.get(stack, ("accelerate", "trl")))
    return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in names)


def main() -> None:
    from bench.check_stacks_others import OTHERS, PROBES_OF

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stack", choices=("transformers", *OTHERS), default="transformers")
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="only set-ups whose name matches: they are printed, not written",
    )
    chosen = parser.parse_args()
    stacks = OTHERS.get(chosen.stack, STACKS)
    probes = PROBES_OF.get(chosen.stack, ASKED)
    first = os.environ.get("RANK", "0") == "0"
    title = f"{chosen.stack}, {ranks()} process{'es' * (ranks() > 1)}"
    head = "| set-up | verdict | s | MiB |"
    lines = [f"{date.today()}: {versions(chosen.stack)}", "", head, "|---|---|---:|---:|"]
    for name, make in stacks.items():
        if re.search(chosen.only, name):
            lines.append(row(name, make, probes))
            if first:
                print(lines[-1], flush=True)
    if first and not chosen.only:
        write(title, lines)


if __name__ == "__main__":
    main()
