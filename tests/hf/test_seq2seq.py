"""Encoder-decoders with ring attention have the loss and the gradients of one process that takes
document after document."""

from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import transformers

from longctx.data.packing import PackingError, pack_documents, pack_seq2seq
from longctx.hf.attention import HuggingFaceError, model_inputs, prepare
from longctx.planning.layout import Placement
from tests.data_cases import placed_plan
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.pretrained_cases import largest_error
from tests.project.test_examples import load
from tests.seq2seq_cases import (
    SETTINGS,
    START,
    build_seq2seq,
    documents,
    packed,
    packed_at_random,
    take_gradients,
    unpacked,
)
from tests.workers import Workers

QUICK = slow_unless(
    lambda kind, ranks: ranks == (4 if kind == "t5gemma" else 3), product(SETTINGS, (1, 2, 3, 4))
)


def ones(tokens: int) -> torch.Tensor:
    """Returns the token ids of a document."""
    return torch.ones(tokens, dtype=torch.int64)


@pytest.mark.parametrize(("kind", "ranks"), QUICK)
def test_a_step_is_that_of_transformers(workers: Workers, kind: str, ranks: int) -> None:
    """Degrees 1 to 4, sources and targets from 1 token."""
    model = build_seq2seq(kind)
    loss, expected = unpacked(model), take_gradients(model)
    for found, gradients in workers.run(packed, ranks, kind):
        assert found == pytest.approx(loss, rel=1e-5)
        assert largest_error(gradients, expected) < 1e-4


def test_random_lengths_and_plans(workers: Workers) -> None:
    random = Random(0)

    def lengths(count: int) -> tuple[int, ...]:
        return tuple(
            random.choice((1, random.randint(1, 9), random.randint(1, 100))) for _ in range(count)
        )

    drawn = [(lengths(count), lengths(count), seed) for seed, count in enumerate((1, 4, 8))]
    model = build_seq2seq()
    steps = [(unpacked(model, *documents(*each[:2])), take_gradients(model)) for each in drawn]
    for found in workers.run(packed_at_random, 3, drawn):
        for (loss, gradients), (expected_loss, expected) in zip(found, steps, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert largest_error(gradients, expected) < 1e-4


def test_activation_checkpointing_changes_nothing(workers: Workers) -> None:
    model = build_seq2seq()
    loss, expected = unpacked(model), take_gradients(model)
    for found, gradients in workers.run(packed, 2, "t5gemma", True):
        assert found == pytest.approx(loss, rel=1e-5)
        assert largest_error(gradients, expected) < 1e-4


def loss_of_one(model: Any) -> float:
    """Returns the loss of a model with ring attention on one document."""
    prepare(model)
    read, written, _ = documents((40,), (30,))
    plan = placed_plan([70], 1, [[Placement(0, 0, 1)]])
    (batch,), targets = pack_seq2seq(plan, 0, read, written, start_token=START)
    return model(**model_inputs(model, batch, targets)).loss.item()


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_windows_are_those_of_the_config(part: str) -> None:
    """An encoder's window counts the tokens on each side without the token itself, a decoder's the
    token too."""
    read, written, _ = documents((40,), (30,))
    expected = unpacked(build_seq2seq(), read, written, written)
    assert loss_of_one(build_seq2seq()) == pytest.approx(expected, rel=1e-5)
    narrow = build_seq2seq(windows={part: 8})
    narrow_loss = unpacked(narrow, read, written, written)
    assert loss_of_one(narrow) == pytest.approx(narrow_loss, rel=1e-5)
    assert abs(narrow_loss / expected - 1) > 1e-4


def test_padding_tokens_are_ordinary_tokens_of_packed_documents() -> None:
    """T5Gemma alone would hide them: pass ones as its attention_mask for the same result."""
    read, written, _ = documents((40,), (30,))
    read[0][7] = written[0][3] = 0
    model = build_seq2seq()
    inputs = torch.cat([torch.tensor([START]), written[0][:-1]])[None]
    ones = {"attention_mask": torch.ones(1, 40), "decoder_attention_mask": torch.ones(1, 30)}
    expected = model(
        input_ids=read[0][None], decoder_input_ids=inputs, labels=written[0][None], **ones
    ).loss.item()
    prepare(model)
    plan = placed_plan([70], 1, [[Placement(0, 0, 1)]])
    (batch,), targets = pack_seq2seq(plan, 0, read, written, start_token=START)
    assert model(**model_inputs(model, batch, targets)).loss.item() == pytest.approx(
        expected, rel=1e-5
    )


SIZES = {"vocab_size": 64, "d_model": 32}
SIZES_OF_BART = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    **SIZES,
}
SIZES_OF_T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, **SIZES}


def small(kind: str) -> Any:
    """Builds an encoder-decoder that is not supported."""
    if kind == "bert":
        size = {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        }
        parts = (
            transformers.BertConfig(**size),
            transformers.BertConfig(**size, is_decoder=True, add_cross_attention=True),
        )
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
        return transformers.EncoderDecoderModel(config).eval()
    config = transformers.AutoConfig.for_model(
        kind, **(SIZES_OF_T5 if "t5" in kind else SIZES_OF_BART)
    )
    return transformers.AutoModelForSeq2SeqLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "t5",
            "T5Attention adds a bias by relative position to the scores, as in T5, which no "
            "attention kernel here supports",
        ),
        ("umt5", "UMT5Attention adds a bias by relative position"),
        ("bart", "BartAttention is of a model whose decoder takes no decoder_position_ids"),
        ("led", "computes attention itself, not through transformers' attention interface"),
        ("bert", "the model does not pass keyword arguments to its attention and is not supported"),
    ],
)
def test_other_families_are_refused(kind: str, message: str) -> None:
    model = small(kind)
    before = model.config._attn_implementation
    with pytest.raises(HuggingFaceError, match=message):
        prepare(model)
    assert model.config._attn_implementation == before


def test_settings_that_would_change_results_are_refused() -> None:
    with pytest.raises(
        HuggingFaceError,
        match="T5GemmaModel does not return logits for every token: use an encoder-decoder",
    ):
        prepare(build_seq2seq().model)
    chunked = build_seq2seq()
    chunked.model.decoder.config.layer_types = ["chunked_attention"] * 2
    with pytest.raises(HuggingFaceError, match="layers of type chunked_attention"):
        prepare(chunked)
    dropping = build_seq2seq(attention_dropout=0.1)
    prepare(dropping)
    (batch,), targets = pack_one()
    with pytest.raises(HuggingFaceError, match=r"attention dropout 0\.1"):
        dropping.train()(**model_inputs(dropping, batch, targets))


def pack_one() -> tuple[Any, int]:
    read, written, _ = documents((4,), (3,))
    return pack_seq2seq(
        placed_plan([7], 1, [[Placement(0, 0, 1)]]), 0, read, written, start_token=START
    )


def test_batches_of_other_models_are_refused() -> None:
    model, causal = build_seq2seq(), build_model("llama", "longctx")
    prepare(model)
    (batch,), targets = pack_one()
    with pytest.raises(
        HuggingFaceError,
        match="is no encoder-decoder, but the batch has a source: make it with pack_documents",
    ):
        model_inputs(causal, batch, targets)
    plan = placed_plan([7], 1, [[Placement(0, 0, 1)]])
    (plain,), targets = pack_documents(plan, 0, [ones(7)])
    with pytest.raises(
        HuggingFaceError,
        match="is an encoder-decoder, but the batch has no source: make it with pack_seq2seq",
    ):
        model_inputs(model, plain, targets)


def test_sources_too_long_for_dynamic_rope_are_refused() -> None:
    """Encoder and decoder have RoPE of their own."""
    plan = placed_plan([40], 1, [[Placement(0, 0, 1)]])
    for part, length in (("encoder", 36), ("decoder", 4)):
        model = build_seq2seq()
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        getattr(model.model, part).config.update(
            {"rope_parameters": rope, "max_position_embeddings": length}
        )
        prepare(model)
        (batch,), targets = pack_seq2seq(plan, 0, [ones(36)], [ones(4)], start_token=START)
        model_inputs(model, batch, targets)
        longer = [37, 3] if part == "encoder" else [35, 5]
        (batch,), targets = pack_seq2seq(
            plan, 0, [ones(longer[0])], [ones(longer[1])], start_token=START
        )
        with pytest.raises(
            HuggingFaceError, match=rf"a document has {length + 1} tokens, but RoPE of type dynamic"
        ):
            model_inputs(model, batch, targets)


def test_documents_that_do_not_match_the_plan_are_refused() -> None:
    plan = placed_plan([7], 1, [[Placement(0, 0, 1)]])
    four, three, none = ones(4), ones(3), ones(0)
    for given, message in (
        (([four], [four]), r"4 source and 4 target tokens, but in the plan 7: .* plan their sum"),
        (([ones(7)], [none]), r"7 source and 0 target tokens, .* give one or more of each"),
        (
            ([four, four], [three]),
            r"2 sources, 1 targets and 1 labels, but the plan has 1 documents",
        ),
        (([four[None]], [three]), r"sources\[0\] has shape \[1, 4\]"),
        (([four], [three], [four]), r"labels of \[4\]: give one axis"),
    ):
        with pytest.raises(PackingError, match=message):
            pack_seq2seq(
                plan, 0, *given[:2], start_token=START, labels=given[2] if len(given) > 2 else None
            )


def step_of_the_example() -> tuple[float, dict[str, torch.Tensor], dict[int, int]]:
    example = load("encoder_decoder")
    model = example.build_model()
    prepare(model)
    loss, plan = example.forward_backward(model, *example.read_parts(0))
    return loss, take_gradients(model), plan.degrees


@pytest.mark.slow
def test_the_example_equals_one_process(workers: Workers) -> None:
    example = load("encoder_decoder")
    model = example.build_model()
    model.set_attn_implementation("eager")
    sources, targets = example.read_parts(0)
    loss, expected = unpacked(model, sources, targets, targets), take_gradients(model)
    for found, gradients, degrees in workers.run(step_of_the_example, 2):
        assert found == pytest.approx(loss, rel=1e-5)
        assert largest_error(gradients, expected) < 1e-4
        assert degrees == {1: 8, 2: 1}
