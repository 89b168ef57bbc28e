"""Latent attention of transformers: split documents exchange latents, and train as in one process
without longctx."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from longctx.attention.expansion import Compressed
from longctx.attention.inputs import AttentionInputError
from longctx.attention.ring import RingAttention
from longctx.config import load
from longctx.config.problems import ConfigError
from longctx.hf.attention import HuggingFaceError, prepare, replace_attention
from longctx.hf.latents import Latents, has_latents, latents_of
from longctx.hf.spec import spec_of
from longctx.model.compilation import compile_blocks
from longctx.planning.cost.scaling import scale
from longctx.planning.cost.spec import NO_LATENT, Matrix, ModelSpec
from longctx.planning.cost.work import work_of
from longctx.planning.layout import Layout, Placement
from longctx.trainers.prepared import prepared
from longctx.training.described import read_described
from tests.huggingface_cases import SPECIAL, build_model
from tests.latent_cases import DENSE, Case, expected, first_micro_batch, placements, run_step, steps
from tests.lora_cases import make_checkpoint
from tests.memory_cases import peak_and_estimate
from tests.pretrained_cases import SETTINGS, largest_error, reference
from tests.training_cases import SMALL, make_store
from tests.workers import Workers

LOSS, GRADIENT = 1e-5, 1e-4
CASES = {
    "plain": Case(),
    "adapters": Case(lora={}),
    "without a latent for queries": Case(settings={"q_lora_rank": None, "rope_interleave": False}),
    "received rows are kept": Case(options={"keep_kv": True}),
    "two levels": Case(options={"ranks_per_node": 2}),
    "recomputation": Case(recompute=True),
    "adapters, recomputation and two levels": Case(
        lora={}, recompute=True, options={"ranks_per_node": 2, "keep_kv": True}
    ),
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


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_transformers_on_documents_one_by_one(
    workers: Workers, ranks: int
) -> None:
    names = list(CASES)[: len(CASES) if ranks == 4 else 2]
    by_rank = workers.run(steps, ranks, [CASES[name] for name in names])
    for number, name in enumerate(names):
        assert_equal([found[number] for found in by_rank], CASES[name])


@pytest.mark.slow
def test_messages_of_deepseek_v3s_sizes_have_a_71st_of_the_bytes(workers: Workers) -> None:
    """576 values a token, not 128 heads x (192 + 128)."""
    sizes = {
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
    }
    sizes |= {
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "head_dim": 64,
        "num_hidden_layers": 1,
        **DENSE,
    }
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


def test_latents_under_autocast_are_sent_and_expanded_in_its_dtype(workers: Workers) -> None:
    """As K and V are. Backward, which autocast does not reach, expands in the same dtype."""
    latents = Case(settings=DENSE, dtype=torch.float32, autocast=True)
    exact, keys = replace(latents, autocast=False), replace(latents, keys=True)
    by_rank = workers.run(steps, 2, [latents, keys, exact])
    sent, of_keys, in_float32 = (
        bytes_of([found[number] for found in by_rank]) for number in range(3)
    )
    assert in_float32 == 2 * sent and sent < of_keys
    errors = [error_of(by_rank[0][number][1], by_rank[0][2][1]) for number in range(2)]
    assert 0 < errors[0] < 1.5 * errors[1] < 0.3


def error_of(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    one, other = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, exact))
    return float((one - other).norm() / other.norm())


def test_adapters_that_drop_at_random_send_keys(workers: Workers) -> None:
    """Their expansion in backward would be another one than in forward."""
    case = Case(lora={"lora_dropout": 0.5})
    by_rank = workers.run(steps, 2, [case, replace(case, keys=True), replace(case, lora={})])
    dropping, keys, latents = (
        bytes_of([found[number] for found in by_rank]) for number in range(3)
    )
    assert dropping == keys > latents


def test_a_plain_call_of_a_prepared_model_leaves_its_latents() -> None:
    """They are sent in the next step as before."""
    model = build_model("deepseek_v3", "eager")
    layers = [layer for layer in model.modules() if has_latents(layer)]
    with prepared(model):
        for _ in range(2):
            assert all(isinstance(layer.expand_kv, Latents) for layer in layers)
            model(torch.ones(1, 4, dtype=torch.int64))
    assert layers and not any(isinstance(layer.expand_kv, Latents) for layer in layers)


def as_fsdp_1_does(projection: torch.nn.Linear) -> None:
    """Its weight is a view of a parameter elsewhere, which a module does not list among its own."""
    weight = projection._parameters.pop("weight")
    assert weight is not None
    projection.weight = weight.view_as(weight)  # type: ignore[assignment]  # as it is there


def as_deepspeed_does(projection: torch.nn.Linear) -> None:
    """Its weight is empty until it is used."""
    projection.weight.data = torch.empty(0)


@pytest.mark.parametrize("hold", [as_fsdp_1_does, as_deepspeed_does])
def test_weights_that_backward_may_not_find_send_keys(
    hold: Callable[[torch.nn.Linear], None],
) -> None:
    """Their gradients would lack those of received rows without an error."""
    layer = build_model("deepseek_v3", "longctx").model.layers[0].self_attn
    key, value = layer.expand_kv(torch.ones(1, 1, 2, 16), torch.ones(1, 1, 2, 8))
    taken = layer.expand_kv.last
    assert latents_of(layer, key, value, key.dtype) is not None
    assert latents_of(layer, key, value, key.dtype) is None, "nothing holds them any longer"
    layer.expand_kv.last = taken
    hold(layer.kv_b_proj)
    assert latents_of(layer, key, value, key.dtype) is None


def scaled(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A method of which a layer changes the result before it calls attention."""
    key, value = DeepseekV3Attention.expand_kv(*arguments)
    return key, 1.0 * value


def mixing(
    self: Any, latent: torch.Tensor, rotary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A method whose results of a token depend on the one before; uses self.kv_b_proj."""
    key, value = DeepseekV3Attention.expand_kv(self, latent, rotary)
    return key, value + self.kv_b_proj.weight.sum() * torch.arange(latent.shape[2])[:, None].to(
        value
    )


def with_method(method: Callable[..., Any]) -> Any:
    model = build_model("deepseek_v3", "eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Other", (DeepseekV3Attention,), {"expand_kv": method})
    return model


def test_keys_and_values_that_depend_on_other_tokens_are_refused() -> None:
    model = with_method(mixing)
    with pytest.raises(
        HuggingFaceError,
        match="expands the latents of a token to other keys and values beside other tokens",
    ):
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
    mine, theirs = (each.expand_kv(*rows)[1].detach().abs().max() for each in (copied, layer))
    assert float(mine) == 0.0 < float(theirs)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["train.recompute=full", "context.two_level_exchange=false"],
        ["train.recompute=selective", "context.keep_kv=true"],
        pytest.param(["train.compile=true"], marks=pytest.mark.slow),
    ],
)
def test_longctx_train_sends_latents(workers: Workers, tmp_path: Path, settings: list[str]) -> None:
    """With sharded weights: those of `kv_b_proj` are gathered when backward expands received
    rows."""
    without_experts = DENSE if "train.compile=true" in settings else {}
    build_model("deepseek_v3", "eager", **without_experts).save_pretrained(tmp_path)
    loss, gradients, _ = reference(tmp_path)
    by_rank = workers.run(run_step, 2, tmp_path, settings, False)
    for found_loss, found_gradients, _ in by_rank:
        assert found_loss == pytest.approx(loss, rel=LOSS)
        assert largest_error(found_gradients, gradients) < GRADIENT
    keys = sum(sent for *_, sent in workers.run(run_step, 2, tmp_path, settings, True))
    assert 0 < sum(sent for *_, sent in by_rank) < keys / 5  # 24 values a token, not 4 x (24 + 12)


@pytest.mark.parametrize("base", ["null", "int8"])
def test_adapted_and_quantized_layers_expand_as_they_compute(
    workers: Workers, tmp_path: Path, base: str
) -> None:
    """Gradients of the adapters are those where K and V travel."""
    build_model("deepseek_v3", "eager", **DENSE).save_pretrained(tmp_path)
    settings = [
        "lora.rank=2",
        "lora.target_modules=[kv_a_proj_with_mqa,kv_b_proj,q_b_proj]",
        f"lora.base={base}",
    ]
    latents, keys = (workers.run(run_step, 2, tmp_path, settings, way)[0] for way in (False, True))
    assert latents[2] < keys[2] / 5
    assert latents[0] == pytest.approx(keys[0], rel=LOSS)
    found, expected = (
        {name: each for name, each in run[1].items() if "lora_" in name} for run in (latents, keys)
    )
    assert largest_error(found, expected) < GRADIENT
    assert [
        float(each.norm()) > 0 for name, each in expected.items() if "kv_b_proj.lora_B" in name
    ] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3])
def test_memory_of_latents_is_that_of_the_allocator(
    workers: Workers, tmp_path: Path, rounds: int
) -> None:
    """Received rows are small; the keys and values of a round, expanded, and their gradients are
    not."""
    store = make_store(tmp_path)
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
    }
    sizes |= {
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "v_head_dim": 48,
        "num_hidden_layers": 2,
        **DENSE,
    }
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "deepseek_v3", **sizes)
    none = [f"{each.partition('=')[0]}=null" for each in SMALL if each.startswith("model.")]
    settings = [
        *none,
        f"model.from_pretrained={checkpoint}",
        "context.mode=static",
        "context.degree=4",
        "batch.tokens_per_rank=512",
    ]
    settings += [
        "train.recompute=full",
        "context.two_level_exchange=false",
        f"context.max_remote_tokens={1536 // rounds}",
    ]
    measured, memory = peak_and_estimate(workers, store, tmp_path / "run", 4, settings)
    print(f"{rounds} rounds: measured {measured}, estimate {memory.total}: {memory}")
    assert memory.total == pytest.approx(measured, rel=0.1)


def spec_of_deepseek_v3() -> ModelSpec:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("deepseek_v3"), dtype=torch.bfloat16
        )
    replace_attention(model)
    return spec_of(model, model.model.layers)


def test_work_counts_latents_and_what_expands_them() -> None:
    """In 61 layers; backward expands again, for adapters without the gradient of the weights."""
    spec = spec_of_deepseek_v3()
    keys = replace(spec, layers=tuple(replace(layer, latent=NO_LATENT) for layer in spec.layers))
    adapted = replace(
        spec,
        layers=tuple(
            replace(layer, matrices=(*layer.matrices, Matrix(1, 1, role="adapter")))
            for layer in spec.layers
        ),
    )
    products = 61 * 512 * 128 * (128 + 128)
    assert spec.parameters == pytest.approx(671e9, rel=0.001)
    for each, recompute, passes, received in (
        (spec, "selective", 3, 4 / 3 * products),
        (spec, "full", 4, 5 / 3 * products),
        (adapted, "selective", 3, products),
    ):
        work = work_of(each, "bfloat16", recompute=recompute)
        assert work.kv_bytes == 61 * 576 * 2 * passes
        assert work.received == pytest.approx(received)
    plain = work_of(keys, "bfloat16")
    assert plain.kv_bytes == 61 * 40_960 * 2 * 3 and plain.received == 0
    profile, described = read_described("h100-nvlink-ib")
    assert described is not None
    scaled = scale(profile, described.work, work_of(spec, "bfloat16"))
    moved_s = sum(plain.traffic) / profile.memory_bytes_per_s
    products_s = scale(profile, described.work, plain).linear_s_per_token - moved_s
    share = 4 / 3 * products / plain.computed
    assert scaled.received_s_per_token / products_s == pytest.approx(share)


def test_heads_of_models_with_latents_are_not_swapped(tmp_path: Path) -> None:
    build_model("deepseek_v3", "eager").save_pretrained(tmp_path)
    source = f"model.from_pretrained={tmp_path}"
    with pytest.raises(
        ConfigError, match=r"split documents of this model send latents.*\n.*set it to 1"
    ):
        load(None, [source, "context.ulysses_degree=2"], world_size=2)


@pytest.mark.slow
def test_blocks_compile_once_for_all_layers(tmp_path: Path) -> None:
    """And once more for the first layer, whose number 0 is a constant for torch."""
    torch._dynamo.reset()
    build_model(
        "deepseek_v3", "eager", num_hidden_layers=4, first_k_dense_replace=4
    ).save_pretrained(tmp_path)
    model = load(None, [*SETTINGS, f"model.from_pretrained={tmp_path}"]).model_source().build()
    model.finish(torch.device("cpu"), torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compile_blocks(model, backend=counter)
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    for length in (40, 30, 77):

        def make(
            scale: float | None, softcap: float, window: int | None, length: int = length
        ) -> RingAttention:
            attention = RingAttention(
                Layout.of((Placement(0, 0, 1),), (length,), 0, 0), scale=scale
            )
            attention.exchanges = True  # as in a split document
            return attention

        attention, places = model.attention(make), torch.arange(length)
        model(places % 16, places, attention).sum().backward()
    assert not breaks and len(counter.graphs) <= 2


def test_what_travels_must_match_the_keys() -> None:
    q, k, v = (torch.zeros(4, 2, 8) for _ in range(3))
    attention = RingAttention(Layout.of((Placement(0, 0, 1),), (4,), 0, 0))
    layer = build_model("deepseek_v3", "longctx").model.layers[0].self_attn
    for rows in (torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.float64)):
        with pytest.raises(AttentionInputError, match="must share its 4 tokens, dtype and device"):
            attention(q, k, v, compressed=Compressed(rows, rows, layer.expand_kv))
