"""Plans of encoder-decoders: what tokens of sources and of targets cost, and how even the ranks
are."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

from longctx import make_plan
from longctx.config import load
from longctx.hf.spec import spec_of_seq2seq
from longctx.planning.cost.rounds import plan_score
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.work_overrides import WorkOverrides
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.plan import Plan, PlanError
from longctx.training.run_profile import scaled_profile
from tests.data_cases import PROFILE


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    """Sizes of T5Gemma with an encoder like Gemma 2 9B and a decoder like Gemma 2 2B."""
    both = {"head_dim": 256, "vocab_size": 256_000}
    encoder = {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
    }
    decoder = {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    }
    parts = {
        "encoder": encoder | both | {"num_key_value_heads": 8},
        "decoder": decoder | both | {"num_key_value_heads": 4},
    }
    with torch.device("meta"):
        return spec_of_seq2seq(
            T5GemmaForConditionalGeneration(T5GemmaConfig(**parts, vocab_size=256_000))
        )


def test_windows_count_the_token_itself(spec: ModelSpec) -> None:
    """That of the encoder's config leaves it out."""
    windows = [layer.window for layer in spec.layers]
    assert set(windows[: spec.encoder_layers]) == {None, 4097}
    assert set(windows[spec.encoder_layers :]) == {None, 4096}


def products(spec: ModelSpec, source: int, target: int) -> int:
    """Returns parameters times the tokens that they multiply: encoder and crossed K and V those of
    the source."""
    encoder, decoder = spec.layers[: spec.encoder_layers], spec.layers[spec.encoder_layers :]
    crossed = sum(layer.source_parameters for layer in decoder)
    of_target = (
        sum(layer.matrix_parameters for layer in decoder) - crossed + spec.vocabulary_parameters
    )
    return (
        sum(layer.matrix_parameters for layer in encoder) + crossed
    ) * source + of_target * target


def flops_of(spec: ModelSpec, source: int, target: int) -> int:
    """Returns the operations of a forward pass over a source and its target."""
    heads = [layer.num_attention_heads * layer.head_dim for layer in spec.layers]
    read, written = sum(heads[: spec.encoder_layers]), sum(heads[spec.encoder_layers :])
    pairs = read * source**2 + written * (target * (target + 1) // 2 + source * target)
    return 2 * products(spec, source, target) + 4 * pairs


def test_plans_count_the_attention_of_encoder_and_decoder() -> None:
    """In pairs of a query and a key: all of the source, half of the target, all of both."""
    pairs = WorkOverrides.of(
        np.array([30, 7]), sources=(10, 6), parts=PartCosts(attention=1.5)
    ).pairs
    assert pairs.tolist() == [2 * (1.5 * 100 + 200 + 10 * 20), 2 * (1.5 * 36 + 0.5 + 6)]
    options = {"ranks": 4, "tokens_per_rank": 4000, "profile": PROFILE}
    plan = make_plan([4000, 4000, 500], sources=[3900, 100, 400], **options)
    assert (
        plan.sources == (3900, 100, 400)
        and plan.hash != make_plan([4000, 4000, 500], **options).hash
    )
    longest = [
        make_plan([60_000], sources=[source], ranks=64, tokens_per_rank=60_000, profile=PROFILE)
        for source in (1, 59_999)
    ]
    assert longest[1].makespan_s > longest[0].makespan_s
    with pytest.raises(PlanError, match="document 1 has 5 tokens, 5 of the source"):
        make_plan([4, 5], sources=[1, 5], **options)
    with pytest.raises(PlanError, match="1 sources and 0 trees, but 2 documents"):
        make_plan([4, 5], sources=[1], **options)


def test_tokens_cost_what_their_blocks_do(spec: ModelSpec) -> None:
    """Matrices: operations without attention. K and V: those of the encoder and of cross-attention,
    or of the decoder."""
    lengths, sources = np.array([900, 1000, 64]), (700, 10, 32)
    overrides = WorkOverrides.of(lengths, sources=sources, parts=spec.parts)
    written = [
        (length - source, source) for length, source in zip(lengths.tolist(), sources, strict=True)
    ]
    matrices = [products(spec, s, t) for t, s in written]
    assert overrides.products is not None and overrides.keys is not None
    np.testing.assert_allclose(
        lengths + overrides.products, 2 * np.array(matrices) / products(spec, 1, 1), rtol=1e-12
    )
    of_source, of_target = 42 * 2048 + 26 * 1024, 26 * 1024
    bytes_of_keys = np.array([of_source * s + of_target * t for t, s in written])
    np.testing.assert_allclose(
        overrides.keys, bytes_of_keys * 2 / (of_source + of_target), rtol=1e-12
    )


@pytest.mark.parametrize("mode", ["auto", "static", "bins"])
def test_predicted_times_are_at_least_the_bound(mode: str) -> None:
    draw = random.Random(5)
    for _ in range(20):
        lengths = [draw.choice([2, 3, draw.randint(2, 4000)]) for _ in range(draw.randint(1, 30))]
        sources = [draw.randint(1, length - 1) for length in lengths]
        parts = PartCosts(draw.uniform(0.2, 3), draw.uniform(0.1, 1.9), draw.uniform(0.1, 1.9))
        options = {
            "ranks": draw.randint(1, 7),
            "tokens_per_rank": 4000,
            "profile": PROFILE,
            "mode": mode,
        }
        plan = make_plan(lengths, sources=sources, parts=parts, **options)
        assert plan_score(plan).makespan_ns / 1e9 == plan.makespan_s >= plan.lower_bound_s


def test_ranks_are_even_by_the_operations_of_both_parts(spec: ModelSpec) -> None:
    draw = random.Random(1)
    lengths = [round(2 ** draw.uniform(6, 13)) for _ in range(600)]
    sources = [draw.randint(1, length - 1) for length in lengths]
    config = load(
        None, ["context.profile=h100-nvlink-ib", "train.dtype=bfloat16", "train.device=cpu"]
    )
    profile = scaled_profile(config, spec, 16, queries_first=True).profile
    options = {"ranks": 16, "tokens_per_rank": 16384, "profile": profile, "sources": sources}
    imbalance = [
        uneven(spec, make_plan(lengths, parts=parts, **options))
        for parts in (EQUAL_PARTS, spec.parts)
    ]
    assert imbalance[1] < 1.02 < 1.15 < imbalance[0]


def uneven(spec: ModelSpec, plan: Plan) -> float:
    """Returns the operations of the busiest ranks of all micro-batches over their mean."""
    ranks = np.zeros((len(plan.micro_batches), plan.ranks))
    for number, placements in enumerate(plan.micro_batches):
        for place in placements:
            source = plan.sources[place.document]
            flops = flops_of(spec, source, plan.lengths[place.document] - source)
            ranks[number, list(place.ring)] += flops / place.degree
    return float(ranks.max(axis=1).sum() / ranks.mean(axis=1).sum())


@pytest.mark.parametrize("mode", ["auto", "static"])
def test_plans_count_the_keys_and_the_matrices_of_both_parts(mode: str) -> None:
    """A record on two ranks whose exchange, or whose matrices, take all the time."""
    length, source = 8000, 6000
    cases = (
        (PartCosts(keys=1.5), {"linear_s_per_token": 1e-30}),
        (PartCosts(products=1.5), {"kv_bytes_per_token": 1e-30}),
    )
    zero = dict.fromkeys(("latency_s", "launch_s", "step_s", "split_document_s"), 0.0)
    nothing = {"attention_s_per_token2": 1e-30, **zero}
    for parts, more in cases:
        profile = replace(PROFILE, **nothing, **more)
        options = {
            "ranks": 2,
            "tokens_per_rank": 4000,
            "profile": profile,
            "mode": mode,
            "sources": [source],
        }
        alike, apart = (make_plan([length], parts=each, **options) for each in (EQUAL_PARTS, parts))
        expected = (1.5 * source + 0.5 * (length - source)) / length
        assert apart.makespan_s / alike.makespan_s == pytest.approx(expected, rel=1e-3)
