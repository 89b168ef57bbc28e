"""Parts of check-step alone: what counts as a prediction, and what logits are made of."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longctx.check.aim import Aim
from longctx.check.causes import _by_variant, _largest_difference
from longctx.check.contexts import Sequence
from longctx.check.facts import Facts
from longctx.check.off import FirstOff
from longctx.check.probe import Tokens
from longctx.check.reference import Reference
from longctx.check.tolerances import FLOAT32
from longctx.check.variant import Variant
from longctx.check.variants import EPSILON
from tests.check_cases import SHORT
from tests.huggingface_cases import build_model


@pytest.mark.parametrize(
    ("weight", "counts"), [(0.5 * FLOAT32.weights, False), (1.0, True), (math.nan, True)]
)
def test_a_weight_that_is_not_known_to_be_zero_counts(weight: float, counts: bool) -> None:
    tokens = Tokens(SHORT)
    pair = 0, tokens.ids[1]
    wanted = sum(length - 1 for length in SHORT.lengths)
    record: Any = SimpleNamespace(
        tokens=tokens,
        calls=[],
        rows=[],
        documents=range(len(SHORT.lengths)),
        tolerances=FLOAT32,
        aim=Aim(),
    )
    fit: Any = SimpleNamespace(
        roughly=False,
        shown=None,
        contexts={},
        unseen=set[int](),
        pairs=lambda: {pair: weight / wanted},
    )
    reference: Any = None
    assert (pair in Facts(record, reference, fit).kept) == counts


@pytest.mark.parametrize(
    "changed", [None, "final_logit_softcapping", "logit_scale", "logits_scaling"]
)
def test_logits_that_a_config_changes_are_no_plain_product(changed: str | None) -> None:
    model = build_model("llama", "eager")
    if changed is not None:
        setattr(model.config, changed, 0.5)
    name = "lm_head.weight"
    record: Any = SimpleNamespace(
        tokens=Tokens(SHORT), reference=model, gradients={name: model.lm_head.weight}
    )
    assert (Reference(record).matrix is None) == (changed is not None)


def test_a_variant_that_gives_nan_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's max overlooks NaN, so that such a variant was the nearest of all."""
    numbers = tuple(range(3))
    sequence = Sequence(numbers, numbers)
    ones = torch.ones(3, 4, dtype=torch.float64)
    off = FirstOff(
        "output of model.layers.0.mlp",
        list(numbers),
        found=2 * ones,
        right=ones,
        wrong=list(numbers),
        sequences=[sequence],
        limit=1e-3,
    )
    given = {off.part: ones * math.nan}
    reference: Any = SimpleNamespace(parts=lambda _: given)
    monkeypatch.setattr(
        "longctx.check.causes.variants", lambda *_, **__: [Variant(EPSILON, "0", settings=[])]
    )
    assert math.isnan(_largest_difference(off, reference))
    assert _by_variant(off, Tokens(SHORT), reference, ranks=1) is None
    given[off.part] = 2 * ones
    assert _by_variant(off, Tokens(SHORT), reference, ranks=1) is None, (
        "the reference has it already"
    )
