"""Cross-attention equals dense float64 attention for any lengths, rings and degrees of sources and
targets, with gradients."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.attention import Mask, RingAttention, RingSchedule, ring_attention
from longctx.attention.inputs import AttentionInputError
from longctx.planning.layout import CrossLayout, Layout, Placement
from tests.attention_cases import assert_exact, in_rounds
from tests.marks import examples
from tests.workers import Workers

several_ranks = settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EVERYTHING = Mask(causal=False)


@dataclass(frozen=True)
class Case:
    """One micro-batch: targets and sources of documents with their rings."""

    ranks: int
    target_lengths: tuple[int, ...]
    targets: tuple[Placement, ...]
    source_lengths: tuple[int, ...]
    sources: tuple[Placement, ...]
    exchange_rounds: int | tuple[int, ...] = 1
    heads: int = 4
    kv_heads: int = 2
    padding: int = 2
    keep_kv: bool = False
    softcap: float = 0.0
    sink_logits: bool = False
    ranks_per_node: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def layout(self, rank: int) -> CrossLayout:
        targets, sources = (
            in_rounds(rings, self.exchange_rounds) for rings in (self.targets, self.sources)
        )
        return CrossLayout.of(targets, self.target_lengths, sources, self.source_lengths, 0, rank)

    def inputs(self) -> list[torch.Tensor]:
        """Returns q, k, v and dout of all documents, concatenated."""
        generator = torch.Generator().manual_seed(self.seed)
        targets, sources = sum(self.target_lengths), sum(self.source_lengths)
        shapes = (
            (targets, self.heads, 8),
            (sources, self.kv_heads, 8),
            (sources, self.kv_heads, 8),
            (targets, self.heads, 8),
        )
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for shape in shapes
        ]

    def sinks(self) -> list[torch.Tensor]:
        return (
            [torch.linspace(-1, 2, self.heads, dtype=torch.float64).requires_grad_()]
            if self.sink_logits
            else []
        )

    def rows(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows in `inputs` of this rank's queries and of its keys."""
        layout = self.layout(rank)
        return rows_of(layout.targets, self.target_lengths), rows_of(
            layout.sources, self.source_lengths
        )


def rows_of(layout: Layout, lengths: tuple[int, ...]) -> torch.Tensor:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    spans = [(shard.document, span) for shard in layout.shards for span in (shard.head, shard.tail)]
    parts = [torch.arange(*span) + starts[document] for document, span in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def run_case(case: Case) -> tuple[torch.Tensor, ...]:
    """Runs on each rank: returns out, dq, dk and dv without padding rows, which must be zero, and
    the gradients of sinks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    queries, keys = case.rows(rank)
    padded = []
    for tensor, mine in zip(case.inputs(), (queries, keys, keys, queries), strict=True):
        # NaN in the padding must not reach any result.
        padding = case.padding * (2 if mine is keys else 1)
        padded.append(
            torch.cat(
                [
                    tensor[mine],
                    torch.full((padding, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype),
                ]
            )
        )
    q, k, v = (tensor.requires_grad_() for tensor in padded[:3])
    attention = RingAttention(
        case.layout(rank),
        mask=EVERYTHING,
        softcap=case.softcap,
        keep_kv=case.keep_kv,
        ranks_per_node=case.ranks_per_node,
    )
    sinks = case.sinks()
    out = attention(q, k, v, layer=0, sink_logits=sinks[0] if sinks else None)
    found = [
        out.detach(),
        *torch.autograd.grad(out, [q, k, v, *sinks], padded[3].nan_to_num(nan=0.0)),
    ]
    for part, mine in zip(found[:4], (queries, queries, keys, keys), strict=True):
        assert not part[len(mine) :].any(), "padding rows must stay zero"
    return *(
        part[: len(mine)]
        for part, mine in zip(found[:4], (queries, queries, keys, keys), strict=True)
    ), *found[4:]


def gather(case: Case, results: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Reorders the ranks' results by document, and sums gradients of sinks."""
    q, k, v, dout = case.inputs()
    whole = [torch.full_like(like, torch.nan) for like in (dout, q, k, v)]
    for rank, result in enumerate(results):
        queries, keys = case.rows(rank)
        for total, part, rows in zip(
            whole, result[:4], (queries, queries, keys, keys), strict=True
        ):
            total[rows] = part
    return (
        [*whole, torch.stack([result[4] for result in results]).sum(0)]
        if case.sink_logits
        else whole
    )


def dense(case: Case) -> list[torch.Tensor]:
    """Returns out, dq, dk, dv and the gradient of sinks by plain attention in float64, document
    after document."""
    q, k, v, dout = (tensor.double() for tensor in case.inputs())
    sinks = case.sinks()
    for tensor in (q, k, v):
        tensor.requires_grad_()
    outs = []
    parts = (
        x.split(lengths)
        for x, lengths in (
            (q, case.target_lengths),
            (k, case.source_lengths),
            (v, case.source_lengths),
        )
    )
    for queries, keys, values in zip(*(map(list, parts)), strict=True):
        ratio = case.heads // case.kv_heads
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(ratio, 1)) * 8**-0.5
        scores = case.softcap * torch.tanh(scores / case.softcap) if case.softcap else scores
        extra = [sinks[0][:, None, None].expand(-1, len(queries), 1)] if sinks else []
        weights = torch.cat([scores, *extra], -1).softmax(-1)[..., : len(keys)]
        outs.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(ratio, 1)))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *sinks], dout)]


def check(case: Case, results: list[tuple[torch.Tensor, ...]]) -> None:
    assert_exact(gather(case, results), dense(case))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 4))
    count = draw(st.integers(1, 6))
    length = st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 90))

    def placed() -> tuple[Placement, ...]:
        found = []
        for document in draw(st.permutations(range(count))):
            degree = draw(st.integers(1, ranks))
            found.append(
                Placement(
                    document, draw(st.integers(0, ranks - degree)), degree, draw(st.booleans())
                )
            )
        return tuple(found)

    targets = placed()
    return Case(
        ranks,
        tuple(draw(st.lists(length, min_size=count, max_size=count))),
        targets,
        tuple(draw(st.lists(length, min_size=count, max_size=count))),
        targets if draw(st.booleans()) else placed(),
        exchange_rounds=tuple(draw(st.integers(1, 5)) for _ in range(count)),
        padding=draw(st.integers(0, 2)),
        keep_kv=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        sink_logits=draw(st.booleans()),
        ranks_per_node=draw(st.none() | st.integers(1, 3)),
        seed=draw(st.integers(0, 2**31)),
    )


@several_ranks
@given(case=cases())
def test_equals_dense_float64(workers: Workers, case: Case) -> None:
    """Source and target of a document on the same ring or on any two, which may not touch, in one
    or two levels."""
    check(case, workers.run(run_case, case.ranks, case))


@pytest.mark.parametrize(
    ("degree", "lengths"), list(product((1, 2, 3, 4), ((1, 1), (1, 50), (50, 1), (3, 2))))
)
def test_short_sources_and_targets_on_every_degree(
    workers: Workers, degree: int, lengths: tuple[int, int]
) -> None:
    """Ranks with queries and no keys, with keys and no queries, and with neither, alone and beside
    a document on all ranks."""
    same = Placement(0, 0, degree), Placement(1, 0, 4, True)
    for count in (1, 2):
        case = Case(
            4,
            (lengths[0], 17)[:count],
            same[:count],
            (lengths[1], 30)[:count],
            same[:count],
            dtype=torch.float64,
        )
        check(case, workers.run(run_case, 4, case))


def test_source_and_target_have_their_own_degree(workers: Workers) -> None:
    """A long source on four ranks, and a short target on the last one, and the other way round,
    without a rank in common."""
    targets = Placement(0, 3, 1), Placement(1, 0, 4), Placement(2, 0, 1)
    sources = Placement(2, 2, 2, True), Placement(1, 1, 1), Placement(0, 0, 4)
    case = Case(4, (5, 90, 20), targets, (120, 3, 20), sources, exchange_rounds=2)
    check(case, workers.run(run_case, 4, case))
    sent: list[list[int]] = []
    for rank in range(4):
        rounds = RingSchedule.build(case.layout(rank)).rounds
        sent.append([sum(hop.sent_rows for hop in each.hops) for each in rounds])
    # Every key goes once to every other rank with queries, over three ranks in the second round.
    assert sent == [[0, 30], [30 + 3 + 3, 3], [30 + 10, 0], [10, 0]]


def test_queries_only_see_their_own_source() -> None:
    case = Case(
        1,
        (3, 4),
        (Placement(0, 0, 1), Placement(1, 0, 1)),
        (5, 2),
        (Placement(0, 0, 1), Placement(1, 0, 1)),
    )
    q, k, v, _ = case.inputs()
    before = ring_attention(q, k, v, case.layout(0), mask=EVERYTHING)
    v[5:] += 1
    after = ring_attention(q, k, v, case.layout(0), mask=EVERYTHING)
    assert torch.equal(before[:3], after[:3]) and not torch.isclose(before[3:], after[3:]).any()


def test_what_does_not_fit_is_refused() -> None:
    place = (Placement(0, 0, 1),)
    case = Case(1, (3,), place, (5,), place)
    q, k, v, _ = case.inputs()
    with pytest.raises(
        AttentionInputError,
        match=r"tokens of a target see all tokens of its source: give mask=Mask\(causal=F",
    ):
        ring_attention(q, k, v, case.layout(0))
    with pytest.raises(
        AttentionInputError, match=r"k has 4 tokens, but the layout of micro-batch 0, rank 0 has 5"
    ):
        ring_attention(q, k[:4], v[:4], case.layout(0), mask=EVERYTHING)
    with pytest.raises(
        AttentionInputError,
        match=r"q, k and v must have the same number of tokens.*only cross-attention",
    ):
        ring_attention(q, k, v, Layout.of(place, (3,), 0, 0))
    with pytest.raises(
        ValueError, match=r"document 0 has 0 source and 3 target tokens: needs one or more of each"
    ):
        CrossLayout.of(place, (3,), place, (0,), 0, 0)
    with pytest.raises(ValueError, match=r"targets are of documents \[0\], sources of \[1\]"):
        CrossLayout.of(place, (3, 3), (Placement(1, 0, 1),), (5, 5), 0, 0)


def away() -> str:
    """Returns the error of a rank whose keys are all on another one, if there is no process
    group."""
    layout = CrossLayout.of((Placement(0, 0, 1),), (3,), (Placement(0, 1, 1),), (3,), 0, 0)
    none: Any = torch.zeros(0, 1, 8)
    with pytest.raises(AttentionInputError) as refused:
        ring_attention(torch.zeros(3, 1, 8), none, none, layout, mask=EVERYTHING)
    return str(refused.value)


def test_keys_on_another_rank_need_a_process_group() -> None:
    assert "torch.distributed is not initialized" in away()
