"""The decoder and the chunked loss. `test_native_checkpoints` compares the decoder with the models
of transformers."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from longctx.attention import reference_attention
from longctx.config import load
from longctx.config.settings import OptimizerSection
from longctx.hf.source import NewDecoder
from longctx.model.decoder import Decoder, Embedding, rows_of
from longctx.model.families import expressed
from longctx.model.presets import PRESETS, ModelShape
from longctx.model.protocol import differences_but_rope
from longctx.model.rope import Rope, rotate
from longctx.training.checks import check_model
from longctx.training.data import RunData
from longctx.training.objectives.loss import cross_entropy_sum, log_probabilities, rows_with_labels
from longctx.training.optimizer import learning_rate, make_optimizer
from tests.training_cases import make_store

SHAPE = PRESETS["tiny"].model_copy(
    update={"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
)


def model(shape: ModelShape = SHAPE) -> Decoder:
    made = Decoder(shape).double()
    made.initialize(seed=1)
    return made


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    tokens = torch.randint(0, 50, (sum(lengths),), generator=generator)
    return tokens, torch.cat([torch.arange(length) for length in lengths])


def logits_of(
    made: Decoder, tokens: torch.Tensor, positions: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    return made(
        tokens, positions, lambda q, k, v, layer: reference_attention(q(lambda x: x), k, v, lengths)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_packed_documents_equal_each_alone(tied: bool) -> None:
    made = model(SHAPE.model_copy(update={"tie_word_embeddings": tied}))
    lengths = [7, 1, 20]
    tokens, positions = packed(lengths)
    together = logits_of(made, tokens, positions, lengths)
    alone = [
        logits_of(made, t, p, [len(t)])
        for t, p in zip(tokens.split(lengths), positions.split(lengths), strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_rope_is_exact_far_out() -> None:
    """At position 2,000,000 the angles of fast pairs keep float32 accuracy, and scores depend only
    on distance."""
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    near, far = [
        (
            rotate(q, *Rope(16, 5e5).tables(torch.tensor([p + 5])))
            * rotate(k, *Rope(16, 5e5).tables(torch.tensor([p])))
        ).sum()
        for p in (0, 2_000_000)
    ]
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)


def test_parameters_are_counted_right() -> None:
    for tied in (True, False):
        shape = SHAPE.model_copy(update={"tie_word_embeddings": tied})
        assert shape.spec.parameters == sum(p.numel() for p in Decoder(shape).parameters())


@pytest.mark.parametrize(
    ("name", "layers", "heads", "kv_heads", "head_dim", "vocabulary", "parameters", "family"),
    [
        ("llama-3.2-1b", 16, 32, 8, 64, 128_256, 1_235_814_400, "llama"),
        ("llama-3.2-3b", 28, 24, 8, 128, 128_256, 3_212_749_824, "llama"),
        ("llama-3.1-8b", 32, 32, 8, 128, 128_256, 8_030_261_248, "llama"),
        ("llama-3.1-70b", 80, 64, 8, 128, 128_256, 70_553_706_496, "llama"),
        ("llama-3.1-405b", 126, 128, 8, 128, 128_256, 405_853_388_800, "llama"),
        ("qwen3-0.6b", 28, 16, 8, 128, 151_936, 596_049_920, "qwen3"),
        ("qwen3-1.7b", 28, 16, 8, 128, 151_936, 1_720_574_976, "qwen3"),
        ("qwen3-4b", 36, 32, 8, 128, 151_936, 4_022_468_096, "qwen3"),
        ("qwen3-8b", 36, 32, 8, 128, 151_936, 8_190_735_360, "qwen3"),
        ("qwen3-14b", 40, 40, 8, 128, 151_936, 14_768_307_200, "qwen3"),
        ("qwen3-32b", 64, 64, 8, 128, 151_936, 32_762_123_264, "qwen3"),
        ("qwen3-30b-a3b", 48, 32, 4, 128, 151_936, 30_532_122_624, "qwen3_moe"),
        ("qwen3-235b-a22b", 94, 64, 4, 128, 151_936, 235_093_634_560, "qwen3_moe"),
        ("mixtral-8x7b", 32, 32, 8, 128, 32_000, 46_702_792_704, "mixtral"),
        ("gpt-oss-20b", 24, 64, 8, 64, 201_088, 20_914_757_184, None),
        ("gpt-oss-120b", 36, 64, 8, 64, 201_088, 116_829_156_672, None),
    ],
)
def test_presets_have_published_sizes(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    parameters: int,
    family: str | None,
) -> None:
    """Those of config.json on the hub, and parameters without repeated tensors; gpt-oss lacks sinks
    and biases."""
    shape = PRESETS[name].model_copy(update={"vocab_size": vocabulary})
    assert (shape.num_hidden_layers, shape.num_attention_heads) == (layers, heads)
    assert (shape.num_key_value_heads, shape.head_dim) == (kv_heads, head_dim)
    assert shape.rms_norm_eps == (1e-6 if name.startswith("qwen3") else 1e-5)
    if family is None:
        assert 0 < parameters - shape.spec.parameters < 5e-4 * parameters
    else:
        assert shape.spec.parameters == parameters
        assert expressed(shape, longest=1)[0].kind == family


@pytest.mark.parametrize(
    ("device", "dtype", "is_own"),
    [
        ("cpu", torch.bfloat16, True),
        ("cpu", torch.float32, False),
        ("meta", torch.bfloat16, False),
    ],
)
def test_only_bfloat16_on_the_cpu_has_gradients_of_its_own(
    device: str, dtype: torch.dtype, is_own: bool
) -> None:
    weight = torch.zeros(4, 2, dtype=dtype, device=device, requires_grad=True)
    rows = rows_of(weight, torch.zeros(3, dtype=torch.int64, device=device))
    assert rows.grad_fn is not None
    assert (rows.grad_fn.name() != "EmbeddingBackward0") == is_own


def test_a_limit_of_positions_changes_with_rope_alone() -> None:
    limit, rope = "max_position_embeddings is 8, not 4", "rope_theta is 2, not 1"
    assert differences_but_rope([limit]) == [limit]
    assert differences_but_rope([limit, rope]) == []


def test_lengths_are_checked_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the validation store."""
    (tmp_path / "short").mkdir()
    (tmp_path / "long").mkdir()
    long, short = make_store(tmp_path / "long"), make_store(tmp_path / "short", (250,))
    longest: list[int] = []
    monkeypatch.setattr(NewDecoder, "check_length", lambda _, length: longest.append(length))
    for store, more in (
        (short, []),
        (long, ["data.max_length=512"]),
        (long, []),
        (short, [f"eval.store={long}", "eval.every=1"]),
    ):
        config = load(
            None,
            ["data.max_length=750", "batch.tokens_per_rank=750", *more, f"data.store={store}"],
        )
        data = RunData.open(config)
        check_model(config, data, config.model_source(data.vocab_size), 1)
    assert longest[0] < 300 and longest[1:] == [512, 526, 526]


def test_first_weights_depend_on_seed_and_name_alone() -> None:
    one, two, other = (Decoder(SHAPE) for _ in range(3))
    one.initialize(3)
    two.initialize(3)
    other.initialize(4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)
    assert not torch.equal(
        one.layers[0].self_attn.q_proj.weight, one.layers[1].self_attn.q_proj.weight
    )


@pytest.mark.parametrize("plain_head", [True, False])
def test_logits_are_computed_where_there_are_labels_alone(plain_head: bool) -> None:
    """The answers of long conversations are a few percent of their tokens."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 6), torch.randn(11, 6)
    hidden[5:] = torch.inf  # would make the loss NaN
    labels = torch.tensor([1, 2, 3, 4, 5]).repeat(60).where(torch.arange(300) < 5, -100)
    head = weight if plain_head else lambda some: some @ weight.T
    loss = cross_entropy_sum(hidden, head, labels, rows=rows_with_labels(labels))
    torch.testing.assert_close(
        loss, F.cross_entropy(hidden[:5] @ weight.T, labels[:5], reduction="sum")
    )
    seen = log_probabilities(hidden, head, labels)
    assert seen.isfinite().all()
    torch.testing.assert_close(-seen.sum(), loss)
    assert rows_with_labels(labels[:5]) is None


def test_cross_entropy_in_bfloat16_sums_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 16).bfloat16(), torch.randn(40, 16).bfloat16()
    labels = torch.randint(0, 40, (300,))
    loss = cross_entropy_sum(hidden, weight, labels, chunk_tokens=64)
    wanted = F.cross_entropy(hidden.double() @ weight.double().T, labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=2e-3, atol=0)


def test_gradients_in_bfloat16_are_not_scaled_by_a_rounded_factor() -> None:
    """1 / 16,421 rounded to bfloat16 is 0.33 % off, for every gradient alike."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 16).bfloat16().requires_grad_() for rows in (300, 40))
    labels = torch.randint(0, 40, (300,))
    whole = torch.autograd.grad(
        cross_entropy_sum(*(x.float() for x in (hidden, weight)), labels), (hidden, weight)
    )
    part = torch.autograd.grad(cross_entropy_sum(hidden, weight, labels, 16_421), (hidden, weight))
    for a, b in zip(whole, part, strict=True):
        assert float(b.double().norm() * 16_421 / a.double().norm()) == pytest.approx(1, abs=1e-3)


def test_gradients_of_the_head_are_summed_over_chunks_in_float32() -> None:
    """200 chunks alike: in bfloat16 the sum stops growing long before the last."""
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(4, 16).bfloat16().repeat(200, 1),
        torch.randn(40, 16).bfloat16().requires_grad_(),
    )
    labels = torch.randint(0, 40, (4,)).repeat(200)
    (chunked,) = torch.autograd.grad(
        cross_entropy_sum(hidden, weight, labels, chunk_tokens=4), weight
    )
    exact = weight.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(
        F.cross_entropy(hidden.double() @ exact.T, labels, reduction="sum"), exact
    )
    assert float((chunked.double() - wanted).norm() / wanted.norm()) < 0.01


def test_learning_rate() -> None:
    section = OptimizerSection(learning_rate=1.0, min_learning_rate_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(step, 10, section) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(1, 1, OptimizerSection(warmup_steps=0)) == pytest.approx(3e-5)
    assert [learning_rate(step, 2, section) for step in (1, 2)] == [0.5, 1.0], (
        "a warm-up of 4 steps in a run of 2"
    )


def test_norms_do_not_decay() -> None:
    optimizer = make_optimizer(
        Decoder(SHAPE), OptimizerSection(weight_decay=0.3), torch.device("cpu")
    )
    decay = {
        parameter.dim(): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decay == {2: 0.3, 1: 0.0}


def test_gradient_of_frequent_entries_in_bfloat16() -> None:
    """An entry that occurs 4,000 times in a text gets the sum of 4,000 gradients, too many to add
    one by one in bfloat16."""
    embedding = Embedding(5, 8).to(torch.bfloat16)
    tokens = torch.arange(16_000) % 4
    gradient = torch.rand(16_000, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    embedding(tokens).backward(gradient)
    exact = torch.zeros(5, 8).index_add_(0, tokens, gradient.float())
    torch.testing.assert_close(embedding.weight.grad.float(), exact, rtol=1e-2, atol=0)
    assert torch.equal(embedding(tokens), F.embedding(tokens, embedding.weight))


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_ntk_turns_the_slowest_frequency_as_linear_scaling_does() -> None:
    shape = ModelShape(**SIZES, head_dim=8, vocab_size=50)
    plain, ntk, linear = (
        Decoder(
            shape.model_copy(update={"rope_scaling": kind, "rope_factor": 4.0})
        ).rope.frequencies(torch.device("cpu"))
        for kind in ("none", "ntk", "linear")
    )
    assert ntk[0] == plain[0] and float(ntk[-1]) == pytest.approx(float(linear[-1]), rel=1e-12)
    assert ((ntk[1:-1] < plain[1:-1]) & (ntk[1:-1] > linear[1:-1])).all()


def test_first_values_of_biases_are_0_and_of_norms_1() -> None:
    model = Decoder(ModelShape(**SIZES, head_dim=8, vocab_size=50, qkv_bias=True, qk_norm=True))
    model.initialize(0)
    values = {
        name: weight.unique().tolist()
        for name, weight in model.named_parameters()
        if weight.dim() == 1
    }
    assert {name.rpartition(".")[2]: value for name, value in values.items()} == {
        "bias": [0.0],
        "weight": [1.0],
    }
    assert {tuple(value) for name, value in values.items() if name.endswith("bias")} == {(0.0,)}


def test_a_checkpoint_of_another_model_is_told_apart() -> None:
    model = Decoder(ModelShape(**SIZES, head_dim=8, vocab_size=50, qk_norm=True))
    older = {**SIZES, "head_dim": 8, "vocab_size": 50, "rope_theta": 1e4}
    assert model.differences(older) == [
        "qk_norm is True, was False",
        "rope_theta is 500000.0, was 10000.0",
    ]
