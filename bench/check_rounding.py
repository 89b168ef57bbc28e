"""What right steps leave of each number that `longctx check-step` compares, by dtype and model, beside
its limits (longctx/check/tolerances.py):

python -m bench.check_rounding            # about a minute
"""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers.utils import logging

from longctx.check import PROBES, Probe, Step, record
from longctx.check.contexts import contexts
from longctx.check.facts import Facts
from longctx.check.gathered import gather
from longctx.check.probe import Tokens
from longctx.check.reference import Reference
from longctx.check.shown import fit_shown

KINDS = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "qwen3_moe",
    "granite",
    "olmo2",
    "phi3",
    "cohere",
    "gpt2",
)
WAYS = ("float32", "bfloat16", "autocast to bfloat16", "float16")
OF_WEIGHTS = ("bfloat16", "float16")
"""Ways that are dtypes of weights."""


class Left(NamedTuple):
    """What a right step leaves, named as limits are."""

    states: float
    objective: float
    after: float
    weights: float
    backward: float
    logged: float


def step(probe: Probe, kind: str, way: str) -> Step:
    """A right step, one document a call."""
    model = probe.model(kind)
    scale = 1024.0 if way == "float16" else 1.0
    rows = [row for row in probe.rows if len(row["input_ids"]) > 1]
    count = sum(len(row["input_ids"]) - 1 for row in rows)
    total = 0.0
    with record(model) as seen, torch.autocast("cpu", torch.bfloat16, enabled="auto" in way):
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            loss = cross_entropy(logits, ids[0, 1:], reduction="sum") / count
            (loss * scale).backward()
            total += float(loss.detach())
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad /= scale
        return seen.step(loss=total)


def left(kind: str, way: str) -> Left:
    """Returns what a right step leaves."""
    probe = replace(PROBES[0], dtype=way if way in OF_WEIGHTS else "float32")
    record = gather(step(probe, kind, way), Tokens(probe))
    assert record.looked is not None
    reference = Reference(record)
    right = contexts(record, windows=False)[0]
    fit = fit_shown(record, record.looked, reference=reference, candidates=[right])
    assert fit.shown is not None
    facts = Facts(record, reference, fit)
    states = []
    for row in record.calls:
        sequence = next(each for each in right.sequences if each.numbers == tuple(row.numbers))
        states.append(reference.states(sequence))
    expected_states = torch.cat(states)
    apart = (record.looked[0].states - expected_states).norm(dim=1) / expected_states.norm(dim=1)
    wanted = dict.fromkeys(fit.weights, 1 / len(facts.wanted)) if fit.weights else {}
    loss = reference.loss(wanted)
    expected = reference.gradients(wanted).of
    sizes = {name: float(value.norm()) for name, value in expected.items()}
    least = 1e-3 * max(sizes.values())
    backward = max(
        float((record.gradients[name] - value).norm()) / max(sizes[name], least)
        for name, value in expected.items()
    )
    weights = max((abs(weight - 1) for weight in facts.kept.values()), default=float("nan"))
    assert record.loss is not None
    return Left(
        float(apart.max()),
        max(record.looked[0].left),
        after=float("nan") if fit.shown.after is None else fit.shown.after,
        weights=weights,
        backward=backward,
        logged=abs(record.loss / loss - 1),
    )


def rows(only: str = "") -> Iterator[list[Any]]:
    for way in WAYS:
        for kind in KINDS:
            if only in f"{way} {kind}":
                try:
                    yield [way, kind, *(f"{value:.1e}" for value in left(kind, way))]
                except Exception as error:
                    yield [way, kind, repr(error)[:150]]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    print(f"| way | model | {' | '.join(Left._fields)} |")
    for row in rows(*sys.argv[1:2]):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
