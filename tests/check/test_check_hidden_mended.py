"""Faults of bench/check_hidden that check-step called otherwise at first sight are named, and
nothing else is said of them; right set-ups that were alarms or refused are right."""

import pytest

from bench.check_hidden import parallel, parallel_more, plain, plain_more, second, second_parallel
from bench.check_hidden.cases import Case
from longctx.check import check_step
from longctx.check.attention import (
    HEADS,
    KEYS,
    OTHER_SINKS,
    ROUNDED_OUTPUTS,
    ROUNDED_SCORES,
    SCALE_OF_SCORES,
    SOFT_MASK,
)
from longctx.check.backward import (
    BACKWARD_WRONG,
    BEFORE,
    CLIPPED,
    DECAY,
    ROUNDED_STATES,
    SIGNS,
    THINNED,
)
from longctx.check.backward_ways import ADAPTERS_BACK, FIRST_HEADS, ROOT, TIED, TIED_TWICE
from longctx.check.causes import PART_CHANGED
from longctx.check.contexts import ONE_PADDING, ORDER, TWICE
from longctx.check.documents import MISSING
from longctx.check.places import HIDDEN
from longctx.check.scale import SCALE
from longctx.check.split_variants import EMBEDDED, OTHER_COLUMNS, ROUNDED_SUMS
from longctx.check.variants import ACTIVATION, ADAPTERS, CAPS, EXPERTS, ROTARY, WEIGHTS
from longctx.check.verdict import NO_GRADIENT, OBJECTIVE_OTHER, OTHER_WEIGHTS
from longctx.check.weights import REPEATED
from tests.marks import slow_unless
from tests.trainer_cases import as_rank
from tests.workers import Workers

MORE = (plain_more, parallel_more, second, second_parallel)  # which add to the cases of the others
Said = list[tuple[str, str]]
"""Kinds of all findings, each with words of its details."""
FROM_PADDING = "first tokens are predicted from padding"
ROLLED = "last tokens of rows predict the first one of their row"
ONE: dict[str, Said] = {
    "a real id taken for padding": [(BACKWARD_WRONG, "none in 1 of 128 rows (20)")],
    "activations kept in bfloat16": [(ROUNDED_STATES, "to bfloat16")],
    "backward of norms without the root": [(ROOT, "")],
    "biases of experts in full, gpt-oss": [(EXPERTS, "the last biases of experts are added in")],
    "cap before the scale, Gemma 2": [(CAPS, "before they are scaled")],
    "clipped by value": [(CLIPPED, "each element, to 0.01")],
    "each gradient of length 1": [(CLIPPED, "each parameter's is divided by its norm")],
    "first tokens twice": [(TWICE, "token 0 of document 3; in documents 1, 2, 3, 4 and 3 more")],
    "gate and up swapped": [(ACTIVATION, "that of the up projection, and not of the gate")],
    "gradients not zeroed before": [(BEFORE, "")],
    "gradients of keys from one head of a group": [(FIRST_HEADS, "")],
    "hidden states 0.01 % larger": [(PART_CHANGED, "103 of 103 tokens")],
    "MLPs swapped": [(BACKWARD_WRONG, "up_proj.weight in layer 1: that of model.layers.0.mlp.up")],
    "no gradient back through adapters": [(ADAPTERS_BACK, "")],
    "norms without one, Gemma": [(WEIGHTS, "by their weight, and not by 1 + weight")],
    "one adapter 1 % larger": [(ADAPTERS, "layers.1.self_attn.v_proj, 1.01 times what it should")],
    "one expert's gradient halved, Mixtral": [(BACKWARD_WRONG, "0.5 times what it should be in 1")],
    "one head sharper": [(SCALE_OF_SCORES, "1.05 times what it should be in head 2")],
    "one token of padding seen": [(ONE_PADDING, "")],
    "partial RoPE ignored, Phi 3": [(ROTARY, "RoPE turns all dimensions of heads")],
    "RoPE cuts the gradient, LoRA": [(NO_GRADIENT, "4 of them"), (BACKWARD_WRONG, "in layer 0")],
    "RoPE of neighbours": [(ROTARY, "RoPE turns pairs of neighbours, and not of halves")],
    "router by sigmoid, Mixtral": [(EXPERTS, "of sigmoids that sum to 1, not of a softmax")],
    "soft mask of documents": [(SOFT_MASK, "by 8")],
    "tied, embedding's share lost": [(TIED, "that of the embedding")],
    "two tokens exchanged": [(ORDER, "token 10 of document 2 comes after token 11")],
    "two: half a gradient and decay": [(DECAY, "0.01 times"), (SCALE, "× 0.5")],
    "weights of experts rounded, Mixtral": [(EXPERTS, "weights of experts are rounded")],
    "largest tenth of gradients": [(THINNED, "11% of all are kept")],
    "scores rounded": [(ROUNDED_SCORES, "to bfloat16")],
    "signs of gradients": [(SIGNS, "")],
    "tied, head's share lost": [(TIED, "that of the output layer")],
    "tied, head's share twice": [(TIED_TWICE, "that of the output layer")],
    "weights of experts swapped, Mixtral": [(EXPERTS, "have each other's weights")],
    "packed, last tokens without attention": [(PART_CHANGED, "0, as attention to no key returns")],
    "mask from ids, padding is the end": [],
    "embedding as a product": [],
    "padded, BLOOM": [],
}
"""What is said of cases on one process, on their last probe."""
QUICK = (
    "clipped by value",
    "embedding as a product",
    "first tokens twice",
    "gradients not zeroed before",
    "mask from ids, padding is the end",
    "no gradient back through adapters",
    "RoPE of neighbours",
    "soft mask of documents",
    "two tokens exchanged",
)
TWO: dict[str, Said] = {
    "CP zigzag, taken for contiguous": [(HIDDEN, "")],
    "CP, whole rows rolled": [(FROM_PADDING, ""), (ROLLED, "2 predictions, documents 5, 6")],
    "DP, adapters of each rank": [(OTHER_WEIGHTS, "lora_A")],
    "DP, ids of the first rank only": [(BACKWARD_WRONG, "without that of rank 1")],
    "DP, ranks shuffle by themselves": [(MISSING, "2 of 8"), (REPEATED, "documents 2, 6, 7")],
    "PP, last micro-batch not handed back": [(BACKWARD_WRONG, "without that of micro-batch 2")],
    "PP, tied, last stage's share lost": [(TIED, "that of the output layer")],
    "ring, first query alone": [(KEYS, "they see keys of their own rank alone")],
    "SP, norms averaged": [(BACKWARD_WRONG, "model.norm.weight: 0.5 times what it should be")],
    "TP, gate and up of other columns": [(OTHER_COLUMNS, "")],
    "TP, outputs sent in bfloat16": [(ROUNDED_SUMS, "to bfloat16")],
    "Ulysses, first rank's sinks, gpt-oss": [(OTHER_SINKS, "those of heads 0, 1, 0, 1 are at")],
    "embedding split, other ids not masked": [(EMBEDDED, "of 2 ranks")],
    "ring, key at the edge twice": [(KEYS, "counts token 9 of document 6 twice")],
    "ring, one head of keys sent twice": [(HEADS, "keys of heads 0, 1, 0, 0 of other ranks are")],
    "ring, outputs of steps rounded": [(ROUNDED_OUTPUTS, "to bfloat16")],
    "ring, sinks in each step, gpt-oss": [(OTHER_SINKS, "counted 2 times")],
    "ring, windows half in steps, Mistral": [(KEYS, "from token 0 of document 6 to token 2 of")],
    "vocabulary split, only owners have gradients": [(OBJECTIVE_OTHER, "share of ids alone")],
    "vocabulary split, logits gathered before": [(OBJECTIVE_OTHER, "the softmax counts 0.5")],
    "embedding split": [],
}
"""The same on two."""
QUICK_ON_TWO = (
    "CP, whole rows rolled",
    "DP, adapters of each rank",
    "SP, norms averaged",
    "ring, first query alone",
    "ring, key at the edge twice",
)


def findings_of(case: Case) -> list[tuple[str, str]]:
    (verdict,) = check_step(case.make, case.probes[-1:]).verdicts
    return [(finding.kind, finding.details) for finding in verdict.findings]


def require_said(found: list[tuple[str, str]], said: Said) -> None:
    assert [kind for kind, _ in found] == [kind for kind, _ in said]
    for (_, details), (_, words) in zip(found, said, strict=True):
        assert words in details


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, ONE))
def test_what_is_said_on_one_process(name: str) -> None:
    case = next(each for each in plain.CASES if each.name == name)
    require_said(findings_of(case), ONE[name])


def found_on_ranks(names: list[str]) -> dict[str, list[tuple[str, str]]]:
    """On each rank: what is said of cases."""
    as_rank()
    cases = {case.name: case for case in parallel.CASES}
    return {name: findings_of(cases[name]) for name in names}


def require_said_on_two(workers: Workers, names: list[str]) -> None:
    for found in workers.run(found_on_ranks, 2, names, timeout_s=600.0):
        for name in names:
            require_said(found[name], TWO[name])


def test_what_is_said_on_two_processes(workers: Workers) -> None:
    require_said_on_two(workers, list(QUICK_ON_TWO))


@pytest.mark.slow
def test_what_is_said_of_the_others_on_two_processes(workers: Workers) -> None:
    require_said_on_two(workers, [name for name in TWO if name not in QUICK_ON_TWO])
