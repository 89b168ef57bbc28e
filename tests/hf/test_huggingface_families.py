"""Every causal language model of the installed transformers is exact, refused with a reason, or not
buildable when tiny.

docs/families.md has the results. To write it again (takes minutes), run

    python -m tests.hf.test_huggingface_families
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.family_cases import FAMILIES, GRADIENT_TOLERANCE, LOSS_TOLERANCE, MIXING, classify
from tests.workers import Workers

TABLE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
OUTCOMES = ("exact", "refused", "not buildable")
HEADER = """\
# Models of transformers

All {types} model types with a causal language model in transformers {transformers} (torch {torch}): {counts}.

Each was built tiny, with random weights and every kind of layer of its default config, and trained a step on six documents
of 1 to 90 tokens over two gloo processes: three micro-batches, degrees 1 and 2 side by side, one micro-batch without a token
on one process.

- `exact`: loss and gradients are those of one process that takes document after document with the model's own attention, the
  loss to {loss:.0e} and the gradient of each parameter to {gradients:.0e}, relatively, in float32. `mixed` is the error of the
  gradients if documents saw each other.
- `refused`: `prepare(model)` raises `HuggingFaceError` with this text.
- `not buildable`: transformers cannot build or run the tiny model; `prepare` checks larger ones as it does any model.

Models with [indexed attention](transformers.md#indexed-attention) (DeepSeek V3.2, GLM 5) may select other keys at near ties.

BERT and its like are built with `is_decoder=True`, models of several modalities take text alone. A config may have other layers
than its default: `prepare` looks at the model that it is given, not at its name.

They train under FSDP2 and context parallelism; tensor, pipeline and expert parallelism need
[the native decoder](transformers.md).

Written by `python -m tests.hf.test_huggingface_families`, checked by `pytest -m slow tests/hf/test_huggingface_families.py`.

| model type | class | outcome | error of loss | of gradients | mixed | note |
|---|---|---|---:|---:|---:|---|
"""


def find_all(
    workers: Workers,
    families: dict[str, str] = FAMILIES,
    classify: Callable[[str], dict[str, Any]] = classify,
) -> dict[str, dict[str, Any]]:
    """Returns the outcome of each model type; a crash or a disagreement between ranks is a separate
    outcome."""
    findings = {}
    for kind in families:
        try:
            ranks = workers.run(classify, 2, kind)
        except AssertionError as error:
            findings[kind] = {"kind": "CRASH", "text": str(error)}
            continue
        outcomes = {finding["kind"] for finding in ranks}
        findings[kind] = (
            ranks[0] if len(outcomes) == 1 else {"kind": f"RANKS DIFFER: {outcomes}", "text": ""}
        )
    return findings


def render(
    findings: dict[str, dict[str, Any]], header: str = HEADER, families: dict[str, str] = FAMILIES
) -> str:
    counts = Counter(finding["kind"] for finding in findings.values())
    lines = header.format(
        types=len(families),
        transformers=transformers.__version__,
        torch=torch.__version__,
        counts=", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES),
        loss=LOSS_TOLERANCE,
        gradients=GRADIENT_TOLERANCE,
    ).splitlines()
    for kind, finding in findings.items():
        exact = finding["kind"] == "exact"
        errors = [
            f"{finding[name]:.1e}" if exact else ""
            for name in ("loss_error", "gradient_error", "mixing")
        ]
        text = re.sub(r"([|<\[])", r"\\\1", " ".join(finding["text"].split()))
        lines.append(
            f"| {' | '.join([kind, families[kind], finding['kind'], *errors, text])} |".replace(
                "  ", " "
            )
        )
    return "\n".join(lines) + "\n"


def outcomes(table: str) -> dict[str, tuple[str, ...]]:
    """Returns class, outcome and text by model type: everything except the measured errors."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    return {row[0]: (row[1], row[2], row[6]) for row in cells[1:]}


@pytest.mark.slow
def test_every_causal_model_is_exact_or_refused(workers: Workers) -> None:
    findings = find_all(workers)
    wrong = {kind: finding for kind, finding in findings.items() if finding["kind"] not in OUTCOMES}
    assert not wrong
    blind = {
        kind: finding["mixing"] for kind, finding in findings.items() if finding["kind"] == "exact"
    }
    assert min(blind.values()) > MIXING, (
        "a tiny model that is not affected by other documents proves nothing"
    )
    written = TABLE.read_text("utf-8")
    if f"transformers {transformers.__version__} " in written:
        assert outcomes(render(findings)) == outcomes(written), (
            "write it again: python -m tests.hf.test_huggingface_families"
        )


def test_the_table_lists_every_model_type() -> None:
    """The table covers all types of its version of transformers and has no unexpected outcome."""
    written = TABLE.read_text("utf-8")
    rows = outcomes(written)
    assert {outcome for _, outcome, _ in rows.values()} == set(OUTCOMES)
    assert all(text for _, outcome, text in rows.values() if outcome != "exact")
    if f"transformers {transformers.__version__} " in written:
        assert {kind: name for kind, (name, _, _) in rows.items()} == FAMILIES


def main() -> None:
    workers = Workers()
    try:
        TABLE.write_text(render(find_all(workers)), "utf-8")
    finally:
        workers.stop()


if __name__ == "__main__":
    main()
