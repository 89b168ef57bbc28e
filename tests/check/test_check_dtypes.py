"""Steps as people train are judged as in float32: weights in bfloat16 or float16, autocast, and
compiled models; what rounding hides is said."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from longctx.check import CheckError, Probe, Step, check_step, record
from longctx.check.backward import BACKWARD_WRONG
from longctx.check.contexts import NO_WINDOW, ROW
from longctx.check.scale import SCALE
from longctx.check.targets import NOT_SHIFTED
from longctx.check.weights import MEAN_OF_MEANS
from tests.check_cases import SHORT, trainer

WAYS = ("bfloat16", "float16", "autocast")
LOSS_SCALE = 1024.0
"""As a scaler of gradients multiplies, where float16 would lose small ones."""


def step(
    probe: Probe,
    *,
    way: str,
    kind: str = "mistral",
    packed: bool = False,
    shift: int = 1,
    factor: float = 1.0,
    means: bool = False,
    change: Callable[[Any], None] = lambda model: None,
    spoil: Callable[[Any], None] = lambda model: None,
    **sizes: Any,
) -> Step:
    """A right step, one document a call, but for what arguments change: `packed`: one row, in which
    documents see each other; `means`: of documents."""
    if way in ("bfloat16", "float16"):
        probe = replace(probe, dtype=way)
    model = probe.model(kind, **sizes)
    called = torch.compile(model, backend="aot_eager", dynamic=True) if way == "compiled" else model
    documents = [ids for ids in probe.documents if len(ids) > 1]
    targets = sum(len(ids) - 1 for ids in documents)
    rows = [[token for ids in documents for token in ids]] if packed else documents
    edges = {ids[-1] for ids in documents[:-1]}
    with record(model) as seen:
        change(model)
        for ids in rows:
            precision = torch.autocast("cpu", torch.bfloat16) if way == "autocast" else None
            with precision or nullcontext():
                output = called(input_ids=torch.tensor([ids]), use_cache=False)
            labels = torch.tensor(
                [-100 if ids[at] in edges else ids[at + 1] for at in range(len(ids) - 1)]
            )
            if not shift:
                labels = torch.tensor(ids[:-1])
            entropy = cross_entropy(output.logits[0, :-1].float(), labels, reduction="sum")
            divisor = len(documents) * (len(ids) - 1) if means else targets
            (entropy / divisor * factor * LOSS_SCALE).backward()
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad /= LOSS_SCALE
        spoil(model)
        return seen.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_right_step_is_right(way: str) -> None:
    (verdict,) = check_step(partial(step, way=way), [SHORT]).verdicts
    assert [str(finding) for finding in verdict.findings] == []
    hidden = [what for what in verdict.not_tested if what.startswith("hidden states that are off")]
    assert len(hidden) == 1


@pytest.mark.slow
def test_a_compiled_step_is_judged() -> None:
    """Hooks that were there before are compiled, too."""
    few = Probe("few", lengths=(9, 17))
    make = partial(step, way="compiled", num_hidden_layers=1)
    (verdict,) = check_step(make, [few]).verdicts
    assert [str(finding) for finding in verdict.findings] == []
    (verdict,) = check_step(partial(make, factor=1.1), [few]).verdicts
    assert [finding.kind for finding in verdict.findings] == [SCALE]


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe", "gpt2"])
def test_other_models_are_right_in_bfloat16(kind: str) -> None:
    """Routers take all experts: two are often within rounding."""
    sizes = {"num_experts": 4} if kind == "qwen3_moe" else {}
    (verdict,) = check_step(partial(step, way="bfloat16", kind=kind, **sizes), [SHORT]).verdicts
    assert [str(finding) for finding in verdict.findings] == []


def halved(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.weight.grad.mul_(0.5)


def without_windows(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    model.config.sliding_window = None


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({"packed": True}, ROW),
    "no shift": ({"shift": 0}, NOT_SHIFTED),
    "means": ({"means": True}, MEAN_OF_MEANS.format("micro-batches")),
    "a factor": ({"factor": 1.1}, SCALE),
    "half a gradient": ({"spoil": halved}, BACKWARD_WRONG),
    "no windows": ({"change": without_windows}, NO_WINDOW),
}


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, way: str) -> None:
    changed, kind = FAULTS[fault]
    (verdict,) = check_step(partial(step, way=way, **changed), [SHORT]).verdicts
    assert verdict.findings[0].kind == kind


def test_a_trainer_in_bfloat16_is_judged() -> None:
    (verdict,) = check_step(partial(trainer, bf16=True), [SHORT]).verdicts
    assert [str(finding) for finding in verdict.findings] == []
    assert any("bfloat16" in why for why in verdict.not_tested.values())


def test_routers_that_choose_are_refused_where_dtypes_round() -> None:
    make = partial(step, way="bfloat16", kind="qwen3_moe", num_experts=4, num_experts_per_tok=2)
    said = r"in bfloat16 routers choose other .*probe.model\(.., num_experts_per_tok=4\)"
    with pytest.raises(CheckError, match=said):
        check_step(make, [SHORT])


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 700},
    "deepseek_v3": {},
    "phi3": {"tie_word_embeddings": True},
    "cohere2": {"logit_scale": 0.5},
    "granite": {"attention_multiplier": 0.1, "residual_multiplier": 0.3},
    "gpt2": {},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_small_model_of_an_own_config_keeps_what_is_special(kind: str) -> None:
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    given = config.to_dict()
    model = SHORT.model(config=config)
    small = model.config
    assert config.to_dict() == given, "the user's config stays as it is"
    assert sum(weight.numel() for weight in model.parameters()) < 120_000
    assert small.hidden_size == 32 and small.tie_word_embeddings == config.tie_word_embeddings
    for name in ("logit_scale", "attention_multiplier", "residual_multiplier", "rms_norm_eps"):
        assert getattr(small, name, None) == getattr(config, name, None), name
    kinds = getattr(config, "layer_types", None)
    if kinds:
        assert set(small.layer_types) == set(kinds)
        assert len(small.layer_types) == small.num_hidden_layers
    if "sliding_window" in CONFIGS[kind]:
        assert small.sliding_window == 16, "so that the probe shows it"
    (verdict,) = check_step(partial(step, way="float32", config=config), [SHORT]).verdicts
    assert [str(finding) for finding in verdict.findings] == []


def test_a_config_is_read_from_its_folder(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", rope_theta=7e5).save_pretrained(tmp_path)
    assert SHORT.model(config=str(tmp_path)).config.model_type == "qwen3"
