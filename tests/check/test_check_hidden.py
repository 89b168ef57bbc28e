"""Faults of bench/check_hidden, written by somebody who had not read the check, are named."""

import pytest

from bench.check_hidden import parallel, parallel_more, plain, plain_more
from bench.check_hidden.cases import Case
from longctx.check import check_step
from longctx.check.attention import (
    DISTANCES,
    HEADS,
    KEYS,
    MERGED,
    ROUNDED_KEYS,
    SCALE_OF_SCORES,
    SINKS,
)
from longctx.check.backward import BACKWARD_WRONG, CHANGED, DECAY, ROUTERS
from longctx.check.causes import PART_CHANGED, TOKENS_SWAPPED
from longctx.check.variants import (
    ADAPTERS,
    CAPS,
    EPSILON,
    EXPERTS,
    MULTIPLIER,
    NO_NORM,
    ROTARY,
    WEIGHTS,
    WINDOW,
)
from longctx.check.verdict import NOT_FINITE, OBJECTIVE_OTHER, WEIGHTS_CHANGED
from tests.marks import slow_unless
from tests.trainer_cases import as_rank
from tests.workers import Workers

MORE = (plain_more, parallel_more)  # which add to the cases of the others
OF_WEIGHTS = "weights of predictions differ"
ONE: dict[str, tuple[str, str]] = {
    "LoRA off in one part": (ADAPTERS, "that of q_proj is left out"),
    "LoRA scaled by alpha": (ADAPTERS, "alpha, and not alpha / r"),
    "MLP 1 % larger": (PART_CHANGED, "the output of model.layers.1.mlp is added 1.01 times"),
    "RoPE backwards": (ROTARY, "RoPE turns backwards"),
    "RoPE in bfloat16": (ROTARY, "sines and cosines of RoPE are rounded to bfloat16"),
    "scaling of RoPE dropped": (ROTARY, "RoPE has a theta of 10,000 and no scaling"),
    "cap of logits ignored, Gemma 2": (OBJECTIVE_OTHER, "logits that are not scaled or capped"),
    "cap of scores ignored, Gemma 2": (CAPS, "not at all"),
    "decay in gradients": (DECAY, "0.01 times"),
    "dropout by hand": (PART_CHANGED, "of its elements: dropout"),
    "focal loss": (OF_WEIGHTS, "those of a focal loss, with γ = 2"),
    "gradient of an absent id": (BACKWARD_WRONG, "another in 1 of 128 rows, first in row 120"),
    "hand-over between layers rounded": (PART_CHANGED, "rounded to bfloat16"),
    "hidden states rolled": (TOKENS_SWAPPED, "each has that of the one before it"),
    "keys not normed, Qwen 3": (NO_NORM, "model.layers.0.self_attn.k_norm"),
    "factor of residuals ignored, Granite": (MULTIPLIER, "residual_multiplier of 0.5"),
    "key heads tiled": (HEADS, "keys of heads 0, 2, 0, 3 and values of heads 0, 2, 0, 3 are at"),
    "norms with another epsilon": (EPSILON, "0.001"),
    "norms zeroed": (BACKWARD_WRONG, "model.norm.weight: none; 4 before it are off, too"),
    "one expert in place of two, Mixtral": (EXPERTS, "1 for each token"),
    "one token is NaN": (NOT_FINITE, "first in the input of model.layers.1"),
    "optimizer steps after each micro-batch": (WEIGHTS_CHANGED, "before call"),
    "packed, max_seqlen too small": (KEYS, "keys from token 24 of a document on are hidden"),
    "packed, one head looks ahead": (KEYS, "they see all later ones of their document, in head 3"),
    "packed, one key of the row lost": (KEYS, "does not see token 4 of document 6"),
    "packed, token does not see itself": (KEYS, "they do not see their own key"),
    "penalty on logits": (OBJECTIVE_OTHER, "squares of logits"),
    "query projection transposed": (BACKWARD_WRONG, "in layer 0: transposed"),
    "routers' loss, Mixtral": (ROUTERS, "0.02 times"),
    "scores 1 % larger": (SCALE_OF_SCORES, "1.01 times what it should be"),
    "slopes on scores": (DISTANCES, "by 0.02, 0.02, 0.02, 0.02 for each token"),
    "softmax has a one too much": (SINKS, "one too many"),
    "temperature": (OBJECTIVE_OTHER, "logits that are divided by 0.9"),
    "vocabulary cut": (OBJECTIVE_OTHER, "a softmax without 8 of 128 ids"),
    "weights of one MLP rounded": (WEIGHTS, "rounded to bfloat16"),
    "window one wider, Mistral": (WINDOW, "17 tokens, and not 16"),
}
"""Names of faults on one process, with the kind of the first finding and words in it."""
TWO: dict[str, tuple[str, str]] = {
    "CP, no exchange in the second layer": (KEYS, "they see keys of their own rank alone"),
    "ring, keys rounded": (ROUNDED_KEYS, "to bfloat16"),
    "ring, last key lost": (KEYS, "token 11 of document 4 does not see token 10 of document 4"),
    "DP, summed in bfloat16": (CHANGED, "differs by 2."),
    "ring, outputs added": (MERGED, "1, 1 in place of"),
    "Ulysses, other heads of values": (HEADS, "values of heads 2, 2, 0, 0 are at heads 0, 1, 2, 3"),
}
"""The same on two."""
RIGHT_ON_TWO = ("tensor parallel MLPs", "sequence parallel norms", "vocabulary split")
QUICK = ("LoRA off in one part", "RoPE backwards", "focal loss", "packed, one head looks ahead")
QUICK += (
    "norms zeroed",
    "norms with another epsilon",
    "slopes on scores",
    "temperature",
    "hidden states rolled",
)
QUICK += ("softmax has a one too much", "dropout by hand", "one token is NaN", "vocabulary cut")


def case_of(name: str, cases: list[Case]) -> Case:
    return next(each for each in cases if each.name == name)


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, ONE))
def test_a_fault_is_named(name: str) -> None:
    case = case_of(name, plain.CASES)
    kind, words = ONE[name]
    finding = check_step(case.make, case.probes[-1:]).verdicts[0].findings[0]
    assert finding.kind == kind and words in finding.details


def found_on_ranks(names: list[str]) -> dict[str, list[str]]:
    """On each rank: what is said of cases."""
    as_rank()
    found = {}
    for name in names:
        case = case_of(name, parallel.CASES)
        (verdict,) = check_step(case.make, case.probes[:1]).verdicts
        found[name] = [str(finding) for finding in verdict.findings]
    return found


def test_faults_on_two_ranks_are_named(workers: Workers) -> None:
    names = [*TWO, *RIGHT_ON_TWO]
    for found in workers.run(found_on_ranks, 2, names, timeout_s=240.0):
        for name, (kind, words) in TWO.items():
            assert found[name][0].startswith(f"{kind}: ") and words in found[name][0]
        assert [found[name] for name in RIGHT_ON_TWO] == [[], [], []]
