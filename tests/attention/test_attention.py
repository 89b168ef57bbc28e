"""Ring attention equals dense float64 attention for any lengths, degrees, rings, GQA ratios and
rounds, with gradients."""

import os
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.attention import (
    Mask,
    RingAttention,
    RingSchedule,
    reference_attention,
    ring_attention,
    ring_pass,
)
from longctx.attention.inputs import AttentionInputError
from longctx.attention.kernels import (
    KERNELS,
    KernelError,
    KernelRequest,
    Options,
    choose_kernel,
    contract,
    cpu,
)
from longctx.attention.masks import MaskError
from longctx.attention.segments import Segment, visible
from longctx.planning.layout import Layout, Placement, head_span, tail_span
from tests.attention_cases import Case, assert_exact, gather, relative_errors, run_case
from tests.marks import examples, slow_unless
from tests.workers import Workers

# One group of ranks serves all examples of a property test, and the fixture is meant to be shared.
several_ranks = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 6) -> Case:
    ranks = draw(st.integers(1, max_ranks))
    lengths = draw(
        st.lists(st.one_of(st.integers(1, 12), st.integers(1, 150)), min_size=1, max_size=8)
    )
    placements = []
    for document in range(len(lengths)):
        degree = draw(st.integers(1, ranks))
        first_rank = draw(st.integers(0, ranks - degree))
        placements.append(Placement(document, first_rank, degree, draw(st.booleans())))
    kv_heads = draw(st.integers(1, 3))
    return Case(
        ranks,
        tuple(lengths),
        tuple(placements),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8, 16])),
        exchange_rounds=tuple(draw(st.integers(1, 6)) for _ in lengths),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**31)),
    )


MIXED = Case(
    ranks=4,
    lengths=(37, 100, 3, 1, 64, 17),
    placements=(
        Placement(0, 0, 3, True),
        Placement(1, 0, 4),
        Placement(2, 1, 3),
        Placement(3, 0, 1),
        Placement(4, 2, 2),
        Placement(5, 1, 2, True),
    ),
    heads=4,
    kv_heads=2,
    padding=2,
)


def dense(case: Case, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Returns out, dq, dk, dv of dense attention in `dtype` on the same (already rounded)
    inputs."""
    q, k, v, dout = (tensor.to(dtype) for tensor in case.inputs())
    for tensor in (q, k, v):
        tensor.requires_grad_()
    sinks = case.sinks()
    out = reference_attention(
        q, k, v, case.lengths, mask=case.mask, softcap=case.softcap, sink_logits=sinks
    )
    return [
        out.detach(),
        *torch.autograd.grad(out, [x for x in (q, k, v, sinks) if x is not None], dout),
    ]


def check(workers: Workers, case: Case) -> None:
    assert_exact(gather(case, workers.run(run_case, case.ranks, case)), dense(case))


@several_ranks
@given(case=cases())
def test_equals_dense_float64(workers: Workers, case: Case) -> None:
    check(workers, case)


@st.composite
def masks(draw: st.DrawFn, lengths: tuple[int, ...]) -> Mask:
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 12) | st.integers(1, 150))
    sinks = 0 if window is None else draw(st.integers(0, 20))
    prompts = (
        draw(st.dictionaries(st.integers(0, len(lengths) - 1), st.integers(0, 150)))
        if causal
        else {}
    )
    if not causal or sinks or any(prompts.values()) or draw(st.booleans()):
        return Mask(causal, window, sinks, prompts)
    spans = {}
    for document, length in enumerate(lengths):
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        spans[document] = list(zip(edges[::2], edges[1::2], strict=False))
    if window is None and draw(st.booleans()):  # the first token is seen by all
        return Mask(
            hidden={
                document: [(max(1, start), stop) for start, stop in each]
                for document, each in spans.items()
            }
        )
    return Mask(causal, window, blocks=spans)


@st.composite
def swapped(draw: st.DrawFn, case: Case) -> Case:
    """Changes the case to Ulysses, where some rings consist of whole groups and others do not."""
    u = draw(st.integers(2, 3))
    ranks = -(-case.ranks // u) * u
    placements = []
    for placement in case.placements:
        if draw(st.booleans()):
            groups = draw(st.integers(1, ranks // u))
            first = u * draw(st.integers(0, ranks // u - groups))
            placement = replace(placement, first_rank=first, degree=groups * u)
        placements.append(placement)
    kv_heads = draw(st.sampled_from([1, u, 2 * u]))  # 1: each rank of a group has a copy
    heads = max(u, kv_heads) * draw(st.integers(1, 2))
    return replace(
        case,
        ranks=ranks,
        placements=tuple(placements),
        ulysses_degree=u,
        heads=heads,
        kv_heads=kv_heads,
    )


@several_ranks
@given(data=st.data(), case=cases(max_ranks=5))
@pytest.mark.parametrize("swaps", [False, True])
def test_every_option_equals_dense_float64(
    workers: Workers, swaps: bool, data: st.DataObject, case: Case
) -> None:
    """Any mask and degrees, with learned sinks, soft caps, kept keys, different head sizes of v and
    two-level exchange.

    Also for groups of ranks that swap heads for tokens, next to plain rings.
    """
    case = replace(
        data.draw(swapped(case)) if swaps else case,
        mask=data.draw(masks(case.lengths)),
        softcap=data.draw(st.sampled_from([0.0, 0.0, 1.5])),
        v_head_dim=data.draw(st.sampled_from([None, None, 6])),
        sink_logits=data.draw(st.booleans()),
        keep_kv=data.draw(st.booleans()),
        ranks_per_node=data.draw(st.none() | st.integers(1, 4)),
    )
    check(workers, case)


@settings(parent=several_ranks, max_examples=8)
@given(case=cases(max_ranks=4))
def test_reference_kernel_gives_the_same(workers: Workers, case: Case) -> None:
    case = replace(case, kernel="reference", dtype=torch.float64)
    got = gather(case, workers.run(run_case, case.ranks, case))
    for part, reference in zip(got, dense(case), strict=True):
        torch.testing.assert_close(part, reference, rtol=1e-10, atol=1e-12)


def test_sinks_of_one_rank_equal_dense_float64() -> None:
    """Also gradients, of the sinks too."""
    places = Placement(0, 0, 1), Placement(1, 0, 1)
    case = Case(1, (40, 3), places, dtype=torch.float64, sink_logits=True)
    for part, reference in zip(gather(case, [run_case(case)]), dense(case), strict=True):
        torch.testing.assert_close(part, reference, rtol=1e-10, atol=1e-12)


def test_fewer_kv_heads_than_ranks_of_a_group_equal_dense_float64(workers: Workers) -> None:
    """Two KV heads for four ranks, each with its own sinks."""
    case = replace(MIXED, heads=8, ulysses_degree=4, sink_logits=True, dtype=torch.float64)
    found = gather(case, workers.run(run_case, case.ranks, case))
    for part, reference in zip(found, dense(case), strict=True):
        torch.testing.assert_close(part, reference, rtol=1e-10, atol=1e-12)


LONG_RING = Case(6, (700,), (Placement(0, 0, 6),), exchange_rounds=5)
WAYS: dict[str, dict[str, Any]] = {
    "causal": {},
    "rounds": {"exchange_rounds": 3},
    "window": {"mask": Mask(window=90)},
    "window and sinks": {"mask": Mask(window=40, sinks=10), "sink_logits": True},
    "dense": {"mask": Mask(causal=False)},
    "prefix": {"mask": Mask(prefix={0: 150, 1: 77})},
    "images": {"mask": Mask(window=90, blocks={0: ((10, 60), (95, 190)), 1: ((5, 330),)})},
    "hidden": {"mask": Mask(window=90, hidden={0: ((10, 60), (95, 150)), 1: ((5, 80),)})},
    "two levels": {"ranks_per_node": 2},
    "keys kept": {"keep_kv": True},
    "Ulysses": {"ulysses_degree": 2},
}


def run_twice(case: Case) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    return run_case(case), run_case(case)


LARGER = replace(MIXED, lengths=(200, 333, 50, 1, 256, 90))
CONTRACT = [
    (ways, dtype, case)
    for ways in WAYS
    for dtype, case in ((torch.bfloat16, LARGER), (torch.float16, LONG_RING))
]


@pytest.mark.parametrize(
    ("ways", "dtype", "case"),
    slow_unless(lambda ways, dtype, case: case is LARGER or ways == "rounds", CONTRACT),
)
def test_every_way_keeps_the_precision_contract(
    workers: Workers, ways: str, dtype: torch.dtype, case: Case
) -> None:
    """With every mask and exchange, the error is at most twice that of one device, and a second run
    is bitwise identical."""
    case = replace(case, **WAYS[ways], dtype=dtype, head_dim=32, heads=4, kv_heads=2)
    exact = dense(case)
    got, again = (
        gather(case, list(results))
        for results in zip(*workers.run(run_twice, case.ranks, case), strict=True)
    )
    single = relative_errors(single_device(case), exact)
    for ring_error, single_error in zip(relative_errors(got, exact), single, strict=True):
        assert 0 < ring_error <= 2 * single_error
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@st.composite
def sizes(draw: st.DrawFn, case: Case) -> Case:
    """Varies heads and exchange, with at least 16 tokens per document, as errors of a few numbers
    mean little.

    Windows have at least 8 tokens, as the output of a token that sees only itself is exact.
    """
    window = draw(st.none() | st.integers(8, 150))
    mask = Mask(draw(st.booleans()), window, draw(st.integers(0, 10)) if window else 0)
    return replace(
        case,
        lengths=tuple(length + 15 for length in case.lengths),
        head_dim=draw(st.sampled_from([8, 16, 24, 32, 64, 128])),
        mask=mask,
        keep_kv=draw(st.booleans()),
        ranks_per_node=draw(st.none() | st.integers(2, 4)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
    )


def single_device(case: Case) -> list[torch.Tensor]:
    """Returns out, dq, dk, dv of the same kernel on unsplit documents."""
    whole = tuple(Placement(document, 0, 1) for document in range(len(case.lengths)))
    alone = replace(
        case, ranks=1, placements=whole, padding=0, ranks_per_node=None, ulysses_degree=1
    )
    return gather(alone, [run_case(alone)])


MOST = {"cpu": (2.0, 2.0, 2.0, 2.0), "reference": (1.01, 1.01, 2.0, 2.0)}
"""Maximum ratio of the errors of out, dq, dk and dv to those of one device. `reference` rounds
nothing that a rank merges or accumulates, so only gradients from other ranks are rounded more than
once."""


@settings(parent=several_ranks, max_examples=examples(12))
@given(data=st.data(), case=cases(max_ranks=5))
@pytest.mark.parametrize("kernel", MOST)
def test_precision_contract_at_any_size(
    workers: Workers, kernel: str, data: st.DataObject, case: Case
) -> None:
    """Norms of errors meet the contract, and no element is off by more than four units in the last
    place of the largest.

    Maximum errors are not compared: for a few elements, the maximum on one device may be very small
    by chance.
    """
    case = replace(data.draw(sizes(case)), kernel=kernel)
    exact = dense(case)
    got, single = gather(case, workers.run(run_case, case.ranks, case)), single_device(case)
    errors = zip(
        relative_errors(got, exact), relative_errors(single, exact), MOST[kernel], strict=True
    )
    assert all(ring <= most * alone for ring, alone, most in errors)
    unit = torch.finfo(case.dtype).eps
    assert all(
        float((g - e).abs().max() / e.abs().max()) <= 4 * unit
        for g, e in zip(got, exact, strict=True)
    )


PREFIX = Case(
    6,
    (700,),
    (Placement(0, 0, 6),),
    4,
    2,
    32,
    dtype=torch.bfloat16,
    kernel="reference",
    mask=Mask(prefix={0: 400}),
)


def test_parts_of_a_gradient_are_rounded_once(workers: Workers) -> None:
    """Several calls of a round add to the same rows: 1.34 times the error of one device, 1.5 if
    every part is rounded."""
    schedules = [
        RingSchedule.build(PREFIX.layout(rank), mask=PREFIX.mask) for rank in range(PREFIX.ranks)
    ]
    assert any(call.again for schedule in schedules for call in schedule.rounds[0].calls)
    exact = dense(PREFIX)
    ring = relative_errors(gather(PREFIX, workers.run(run_case, PREFIX.ranks, PREFIX)), exact)
    for ring_error, single_error in zip(
        ring[2:], relative_errors(single_device(PREFIX), exact)[2:], strict=True
    ):
        assert ring_error <= 1.42 * single_error


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_kernels_do_not_round_what_they_add_up(kernel: str) -> None:
    """Gradients of keys that several blocks of queries see are summed and returned in float32."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(600, 2, 16).bfloat16() for _ in range(4))
    window = [Segment(0, 600, 0, 600, -400, 0)]
    out, lse = KERNELS[kernel].forward(q, k, v, window, Options(0.25))
    _, dk, dv = KERNELS[kernel].backward(dout, q, k, v, out.bfloat16(), lse, window, Options(0.25))
    assert not torch.equal(dk, dk.bfloat16()) and not torch.equal(dv, dv.bfloat16())


def test_long_sums_stay_well_inside_the_contract(workers: Workers) -> None:
    """After ten merges in float32: 1.13, 1.13, 0.68, 0.67 of one device's error. In bfloat16 it is
    1.45, 1.30, 0.85, 0.81."""
    case = replace(LONG_RING, dtype=torch.bfloat16, head_dim=32, heads=4, kv_heads=2)
    exact = dense(case)
    ring = relative_errors(gather(case, workers.run(run_case, case.ranks, case)), exact)
    errors = zip(
        ring, relative_errors(single_device(case), exact), (1.28, 1.22, 0.77, 0.74), strict=True
    )
    assert all(0 < several < most * single for several, single, most in errors)


def run_inputs(
    case: Case, inputs: list[tuple[torch.Tensor, ...]]
) -> list[tuple[torch.Tensor, ...]]:
    return [run_case(case, each) for each in inputs]


def test_documents_do_not_see_each_other(workers: Workers) -> None:
    """Perturbing one document changes that document and no bit of any other document."""
    own = torch.arange(len(MIXED.lengths)).repeat_interleave(torch.tensor(MIXED.lengths))
    changed = [
        tuple(
            torch.where((own == document)[:, None, None], tensor * 1.5 + 1, tensor)
            for tensor in MIXED.inputs()
        )
        for document in range(len(MIXED.lengths))
    ]
    by_rank = workers.run(run_inputs, MIXED.ranks, MIXED, [MIXED.inputs(), *changed])
    before, *after = (gather(MIXED, list(results)) for results in zip(*by_rank, strict=True))
    for document, parts in enumerate(after):
        mine = own == document
        assert all(torch.equal(a[~mine], b[~mine]) for a, b in zip(before, parts, strict=True))
        assert not torch.equal(before[0][mine], parts[0][mine])


@given(
    data=st.data(),
    length=st.integers(1, 150),
    degree=st.integers(1, 12),
    rounds=st.integers(1, 12),
    reverse=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_messages_carry_what_a_mask_shows(
    data: st.DataObject, length: int, degree: int, rounds: int, reverse: bool
) -> None:
    """A rank receives exactly the remote keys that one of its queries sees, and none outside the
    window."""
    case = Case(degree, (length,), (Placement(0, 0, degree, reverse),), exchange_rounds=rounds)
    mask = data.draw(masks(case.lengths))
    for rank in range(degree):
        mine = torch.zeros(length, dtype=torch.bool)
        mine[case.rows(rank)] = True
        seen = mask.visible(0, length)[mine].any(dim=0) & ~mine
        schedule = RingSchedule.build(case.layout(rank), mask=mask)
        assert schedule.received_rows == seen.sum()
        assert len(schedule.rounds) <= min(rounds, degree - 1)


@pytest.mark.parametrize("way", WAYS)
def test_areas_are_what_a_mask_shows(way: str) -> None:
    mask = WAYS[way].get("mask", Mask())
    pairs = torch.zeros(200, 200, dtype=torch.int64)
    for area in mask.areas(0, 200):
        pairs[area.queries, area.keys] += visible(area, torch.device("cpu"))
    assert torch.equal(pairs, mask.visible(0, 200).long())


@given(data=st.data(), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4))
@settings(max_examples=examples(60), deadline=None)
def test_segments_of_whole_documents_are_what_a_mask_shows(
    data: st.DataObject, lengths: list[int]
) -> None:
    """Every visible pair is in one segment, and no other."""
    mask = data.draw(masks(tuple(lengths)))
    layout = Layout.of([Placement(number, 0, 1) for number in range(len(lengths))], lengths, 0, 0)
    pairs = torch.zeros(layout.tokens, layout.tokens, dtype=torch.int64)
    for call in RingSchedule.build(layout, mask=mask).local:
        for segment in call.segments:
            pairs[segment.queries, segment.keys] += visible(segment, torch.device("cpu"))
    for shard in layout.shards:
        own = slice(shard.offset, shard.offset + shard.tokens)
        assert torch.equal(pairs[own, own], mask.visible(shard.document, shard.length).long())
        pairs[own, own] = 0
    assert not pairs.any()


def test_a_whole_document_costs_the_host_few_calls() -> None:
    """The thread that trains builds a schedule for every micro-batch: 69 calls of Python took 23 µs
    a document."""

    def calls(documents: int) -> int:
        layout = Layout.of(
            [Placement(number, 0, 1) for number in range(documents)], [64] * documents, 0, 0
        )
        made = [0]
        sys.setprofile(
            lambda frame, event, argument: made.__setitem__(0, made[0] + (event == "call"))
        )
        try:
            RingSchedule.build(layout)
        finally:
            sys.setprofile(None)
        return made[0]

    assert (calls(40) - calls(8)) / 32 <= 15


@given(case=cases(max_ranks=12))
@settings(deadline=None)
def test_causal_calls_are_few(case: Case) -> None:
    """Local keys need one causal segment per document, and a round at most two calls with dense
    segments."""
    for rank in range(case.ranks):
        schedule = RingSchedule.build(case.layout(rank))
        assert len(schedule.local) == bool(schedule.layout.shards)
        for local in schedule.local:
            assert len(local.segments) == len(schedule.layout.shards)
            assert all(
                segment.causal or segment.q_stop == segment.q_start + 1
                for segment in local.segments
            )
        assert all(len(round_.calls) <= 2 for round_ in schedule.rounds)
        assert all(
            segment.dense
            for round_ in schedule.rounds
            for call in round_.calls
            for segment in call.segments
        )


@given(length=st.integers(1, 400), degree=st.integers(1, 40))
def test_chunks_cover_the_document_once(length: int, degree: int) -> None:
    spans = [span(length, degree, r) for r in range(degree) for span in (head_span, tail_span)]
    assert sorted(token for start, stop in spans for token in range(start, stop)) == list(
        range(length)
    )


ALONE = Case(1, (4,), (Placement(0, 0, 1),))


FITS = torch.zeros(4, 2, 8)


@pytest.mark.parametrize(
    ("q", "k", "v", "says"),
    [
        (torch.zeros(4, 3, 8), FITS, FITS, "3 heads, which is not a multiple of the 2 kv heads"),
        (
            FITS,
            torch.zeros(4, 2, 4),
            FITS,
            "the same number of tokens and heads, .* same head size",
        ),
        (
            FITS,
            torch.zeros(5, 2, 8),
            FITS,
            "the same number of tokens and heads, .* same head size",
        ),
        (FITS[None], FITS, FITS, r"\[tokens, heads, head_dim\]"),
        (FITS, FITS.bfloat16(), FITS, "share dtype and device"),
        (FITS[1:], FITS[1:], FITS[1:], "q has 3 tokens, but the layout .* has 4"),
        (FITS, torch.zeros(4, 8, 2).mT, FITS, r"call \.contiguous\(\)"),
        (FITS[:, :, :0], FITS[:, :, :0], FITS, "a head size of 1 or more"),
        (FITS.int(), FITS.int(), FITS.int(), "floating-point"),
        (FITS, FITS, torch.zeros(4, 1, 8), "the same number of tokens and heads"),
    ],
)
def test_inputs_that_do_not_fit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, says: str
) -> None:
    with pytest.raises(AttentionInputError, match=says):
        ring_attention(q, k, v, ALONE.layout(0))


def test_tensors_on_another_device_than_the_schedule() -> None:
    x = torch.zeros(4, 2, 8, device="meta")
    with pytest.raises(
        AttentionInputError,
        match=r"on meta, but this attention was built for cpu: build it with device",
    ):
        RingAttention(ALONE.layout(0))(x, x, x)
    real = torch.zeros(4, 2, 8)
    with pytest.raises(
        AttentionInputError, match=r"sink_logits .* \[2\], .* on cpu, not \[2\] on meta"
    ):
        RingAttention(ALONE.layout(0))(real, real, real, sink_logits=x[0, :, 0])


def test_no_tokens_need_no_stride() -> None:
    """A rank without tokens may pass any strides, as .contiguous() does not change those of an
    empty tensor."""
    x = torch.zeros(0, 8, 2).mT.contiguous()
    assert ring_attention(x, x, x, Case(1, (), ()).layout(0)).shape == (0, 2, 8)


def test_head_exchange_checks_the_whole_layout() -> None:
    """Also if no plain ring is left, and for rows of documents that are swapped."""
    case = Case(2, (64,), (Placement(0, 0, 2),), heads=2, kv_heads=2, ulysses_degree=2)
    with pytest.raises(AttentionInputError, match="not initialized"):
        case.attention(0)
    case = Case(
        2, (5, 64), (Placement(0, 0, 1), Placement(1, 0, 2)), heads=2, kv_heads=2, ulysses_degree=2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_rank", lambda group: 0)
        attention = case.attention(0)
    x = torch.zeros(30, 2, 8)
    with pytest.raises(AttentionInputError, match=r"q has 30 tokens, but the layout .* has 37"):
        attention(x, x, x)


def test_settings_that_do_not_fit() -> None:
    x = torch.zeros(4, 2, 8)
    with pytest.raises(KernelError, match=r"choose auto, flash, .*cpu, .*reference"):
        ring_attention(x, x, x, ALONE.layout(0), kernel="flash9")
    with pytest.raises(KernelError, match="equal head sizes"):
        choose_kernel("cpu", KernelRequest("cpu", torch.float32, 8, 4))
    with pytest.raises(KernelError, match="runs on the CPU, not on cuda"):
        choose_kernel("cpu", KernelRequest("cuda", torch.float32, 8, 8))
    with pytest.raises(ValueError, match="rounds is 0: must be at least 1"):
        ring_attention(x, x, x, replace(ALONE, exchange_rounds=0).layout(0))
    with pytest.raises(AttentionInputError, match="not initialized"):
        RingAttention(MIXED.layout(0))


def of_the_wrong_rank(case: Case) -> str:
    try:
        RingAttention(case.layout((dist.get_rank() + 1) % case.ranks))
    except AttentionInputError as error:
        return str(error)
    return ""


def test_layout_of_another_rank(workers: Workers) -> None:
    answers = workers.run(
        of_the_wrong_rank,
        2,
        replace(MIXED, ranks=2, placements=(Placement(0, 0, 2),), lengths=(9,)),
    )
    assert all("the layout is for rank" in answer for answer in answers)


def stay_away(case: Case) -> None:
    if dist.get_rank() == 1:
        time.sleep(3)
    else:
        run_case(case)


def die(case: Case) -> None:
    dist.barrier()  # otherwise the other rank may still be connecting
    if dist.get_rank() == 1:
        os._exit(9)
    run_case(case)


PAIR = Case(2, (64,), (Placement(0, 0, 2),))
WHERE = (
    "rank 0 of the domain: exchange with rank(s) 1 failed in micro-batch 0, layer 0, forward pass"
)


def test_a_message_that_never_comes(workers: Workers) -> None:
    """The error names rank, peer, micro-batch, layer and pass, and is raised after the group's
    timeout."""
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        workers.run(stay_away, 2, PAIR, timeout_s=1.0)
    assert WHERE in str(caught.value)
    assert time.monotonic() - start < 30


def test_a_rank_that_dies(workers: Workers) -> None:
    with pytest.raises(AssertionError, match="process of rank 1 died") as caught:
        workers.run(die, 2, PAIR)
    assert WHERE in str(caught.value)


def run_over_two_groups(case: Case) -> tuple[torch.Tensor, ...]:
    return run_case(replace(case, across=dist.new_group()))


def test_a_group_for_messages_between_nodes_changes_no_bit(workers: Workers) -> None:
    case = replace(MIXED, ranks_per_node=2, exchange_rounds=2, dtype=torch.bfloat16)
    for one, two in zip(
        workers.run(run_case, 4, case), workers.run(run_over_two_groups, 4, case), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_kernels_are_chosen_by_the_sizes_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash libraries are not used for tensors that 32 bits cannot count."""
    asked: set[int] = set()
    monkeypatch.setattr(contract, "MOST_ELEMENTS", 8)
    monkeypatch.setattr(
        ring_pass, "choose_kernel", lambda name, request: (asked.add(request.elements), cpu)[1]
    )
    case = Case(1, (40, 3), (Placement(0, 0, 1), Placement(1, 0, 1)))
    run_case(case)
    padded = 43 + 128 * (2 * 2 + 1)
    assert asked == {padded * 2 * 8}


@pytest.mark.parametrize("spans", [((5, 8), (1, 3)), ((8, 5),), ((5, 8), (7, 9)), ((1, 2, 3),)])
def test_spans_of_masks_are_ascending(spans: tuple[tuple[int, int], ...]) -> None:
    """Others would be areas that overlap."""
    for name in ("blocks", "hidden"):
        with pytest.raises(
            MaskError, match=r"spans of a document are .*: give each as \(start, stop\), ascending"
        ):
            replace(Mask(), **{name: {0: spans}})
