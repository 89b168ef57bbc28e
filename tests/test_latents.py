"""Latent attention of transformers: split documents exchange latents, and train as in one process without longctx."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from longctx.attention.huggingface import HuggingFaceError, prepare
from longctx.attention.huggingface_latents import Latents
from tests.huggingface_cases import SPECIAL, build_model
from tests.latent_cases import DENSE, Case, expected, first_micro_batch, placements, run_step, steps
from tests.pretrained_cases import largest_error, reference
from tests.workers import Workers

LOSS, GRADIENT = 1e-5, 1e-4
CASES = {
    "plain": Case(),
    "adapters": Case(lora={}),
    "without a latent for queries": Case(settings={"q_lora_rank": None, "rope_interleave": False}),
    "received rows are kept": Case(options={"keep_kv": True}),
    "two levels": Case(options={"ranks_per_node": 2}),
    "recomputation": Case(recompute=True),
    "adapters, recomputation and two levels": Case(lora={}, recompute=True, options={"ranks_per_node": 2, "keep_kv": True}),
    "some documents swap heads": Case(options={"ulysses_degree": 2}),
    "another model": Case("minicpm3", SPECIAL["deepseek_v3"]),
}


def assert_equal(found: list[tuple[float, list[torch.Tensor], int]], case: Case) -> None:
    loss, gradients = expected(case)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 0.01
    for ring_loss, ring_gradients, _ in found:
        assert ring_loss == pytest.approx(loss, abs=LOSS)
        for mine, theirs in zip(ring_gradients, gradients, strict=True):
            assert float((mine - theirs).norm()) <= GRADIENT * float(theirs.norm()) + 1e-9


def bytes_of(found: list[tuple[float, list[torch.Tensor], int]]) -> int:
    return sum(sent for *_, sent in found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_and_gradients_are_those_of_transformers_on_documents_one_by_one(workers: Workers, ranks: int) -> None:
    names = list(CASES)[: len(CASES) if ranks == 4 else 2]
    by_rank = workers.run(steps, ranks, [CASES[name] for name in names])
    for number, name in enumerate(names):
        assert_equal([found[number] for found in by_rank], CASES[name])


def test_messages_of_deepseek_v3s_sizes_have_a_71st_of_the_bytes(workers: Workers) -> None:
    """576 values a token, not 128 heads x (192 + 128)."""
    sizes = {"num_attention_heads": 128, "num_key_value_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    sizes |= {"v_head_dim": 128, "kv_lora_rank": 512, "head_dim": 64, "num_hidden_layers": 1, **DENSE}
    latents = Case(settings=sizes, dtype=torch.float32, lengths=(33, 1, 7, 40, 9, 2))
    keys = replace(latents, keys=True)
    by_rank = workers.run(steps, 2, [latents, keys])
    sent, before = (bytes_of([found[number] for found in by_rank]) for number in range(2))
    assert sent > 0 and before / sent == 40_960 / 576
    for (loss, gradients, _), (loss_before, gradients_before, _) in by_rank:
        assert loss == pytest.approx(loss_before, abs=LOSS)
        for mine, theirs in zip(gradients, gradients_before, strict=True):
            assert float((mine - theirs).norm()) <= GRADIENT * float(theirs.norm()) + 1e-7


def test_other_documents_change_by_no_bit(workers: Workers) -> None:
    """Neither logits nor gradients of their embedded tokens."""
    case = Case(settings=DENSE)
    by_rank = workers.run(first_micro_batch, 3, [case, replace(case, changed=0)])
    held = placements(3)[0]
    compared = 0
    for rank, (before, after) in enumerate(by_rank):
        start = 0
        for placement in held:  # a rank has its tokens document by document
            index = rank - placement.first_rank
            length = case.lengths[placement.document]
            cuts = [i * length // (2 * placement.degree) for i in range(2 * placement.degree + 1)]
            count = 0
            if 0 <= index < placement.degree:
                tail = 2 * placement.degree - 1 - index
                count = cuts[index + 1] - cuts[index] + cuts[tail + 1] - cuts[tail]
            rows = slice(start, start + count)
            start += count
            for one, other in zip(before, after, strict=True):
                same = torch.equal(one[rows], other[rows])
                assert same == (placement.document != 0 or not count)
            compared += count * (placement.document != 0)
    assert compared == case.lengths[1] + case.lengths[2]


def test_adapters_that_drop_at_random_send_keys(workers: Workers) -> None:
    """Their expansion in backward would be another one than in forward."""
    case = Case(lora={"lora_dropout": 0.5})
    by_rank = workers.run(steps, 2, [case, replace(case, keys=True), replace(case, lora={})])
    dropping, keys, latents = (bytes_of([found[number] for found in by_rank]) for number in range(3))
    assert dropping == keys > latents


def scaled(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A method of which a layer changes the result before it calls attention."""
    key, value = DeepseekV3Attention.expand_kv(*arguments)
    return key, 1.0 * value


def mixing(self: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A method whose results of a token depend on the one before; uses self.kv_b_proj."""
    key, value = DeepseekV3Attention.expand_kv(self, latent, rotary)
    return key, value + self.kv_b_proj.weight.sum() * torch.arange(latent.shape[2])[:, None].to(value)


def with_method(method: Callable[..., Any]) -> Any:
    model = build_model("deepseek_v3", "eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Other", (DeepseekV3Attention,), {"expand_kv": method})
    return model


def test_keys_and_values_that_depend_on_other_tokens_are_refused() -> None:
    model = with_method(mixing)
    with pytest.raises(HuggingFaceError, match="expands the latents of a token to other keys and values beside other tokens"):
        prepare(model)
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_a_method_of_another_form_stays() -> None:
    """It uses no submodule, as far as its code tells: its weights would get no gradient."""
    model = with_method(scaled)
    prepare(model)
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_a_copy_of_a_prepared_model_expands_its_own_latents() -> None:
    model = build_model("deepseek_v3", "longctx")
    layer, copied = model.model.layers[0].self_attn, deepcopy(model).model.layers[0].self_attn
    assert isinstance(layer.expand_kv, Latents)
    assert not isinstance(copied.expand_kv, Latents)
    with torch.no_grad():
        copied.kv_b_proj.weight.zero_()
    rows = torch.ones(1, 1, 2, 16), torch.ones(1, 1, 2, 8)
    assert float(copied.expand_kv(*rows)[1].abs().max()) == 0.0 < float(layer.expand_kv(*rows)[1].abs().max())


@pytest.mark.parametrize(
    "settings",
    [[], ["train.recompute=full", "context.two_level_exchange=false"], ["train.recompute=selective", "context.keep_kv=true"]],
)
def test_longctx_train_sends_latents(workers: Workers, tmp_path: Path, settings: list[str]) -> None:
    """With sharded weights: those of `kv_b_proj` are gathered when backward expands received rows."""
    build_model("deepseek_v3", "eager").save_pretrained(tmp_path)
    loss, gradients, _ = reference(tmp_path)
    by_rank = workers.run(run_step, 2, tmp_path, settings, False)
    for found_loss, found_gradients, _ in by_rank:
        assert found_loss == pytest.approx(loss, rel=LOSS)
        assert largest_error(found_gradients, gradients) < GRADIENT
    keys = sum(sent for *_, sent in workers.run(run_step, 2, tmp_path, settings, True))
    assert 0 < sum(sent for *_, sent in by_rank) < keys / 5  # 24 values a token, not 4 x (24 + 12)
