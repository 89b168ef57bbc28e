"""Rows that are one range are sent and read in place; others are copied. Both give the same
numbers."""

from collections import Counter
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.attention import RingSchedule
from longctx.attention.segment_builder import RowSet, row_index
from longctx.comparison.mixes import load_mix
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Placement
from longctx.planning.planners.planner import make_plan
from tests.attention_cases import Case


@given(
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=5),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 99),
)
def test_reading_writing_and_adding(sizes: list[tuple[int, int]], order: Random, seed: int) -> None:
    """Ranges with or without gaps, in any order; equal bit by bit to indexing with all rows."""
    ranges, stop = [], 0
    for gap, count in sizes:
        ranges.append(range(stop + gap, stop + gap + count))
        stop += gap + count
    order.shuffle(ranges)
    rows, index = RowSet.of(ranges, "cpu"), row_index(ranges, "cpu")
    generator = torch.Generator().manual_seed(seed)
    buffer, values = (
        torch.randn(stop + 1, 3, generator=generator),
        torch.randn(len(index), 3, generator=generator),
    )
    assert len(rows) == len(index)
    torch.testing.assert_close(rows.read(buffer), buffer[index], rtol=0, atol=0)
    written, added = buffer.clone(), buffer.clone()
    rows.write(written, values)
    rows.add(added, values)
    torch.testing.assert_close(written, buffer.index_copy(0, index, values), rtol=0, atol=0)
    torch.testing.assert_close(added, buffer.index_add(0, index, values), rtol=0, atol=0)
    is_range = all(b - a == 1 for a, b in zip(index.tolist(), index.tolist()[1:], strict=False))
    in_place = rows.read(buffer).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert in_place == is_range


def copied_rows(schedules: list[RingSchedule]) -> Counter[str]:
    """Returns the rows that ranks send and give to kernel calls, and how many of them are copied
    for it."""
    counts: Counter[str] = Counter()
    for round_ in (round_ for schedule in schedules for round_ in schedule.rounds):
        sent = [rows for hop in round_.hops for _, rows in hop.sends]
        called = [call.rows for call in round_.calls if call.rows is not None]
        for name, sets in (("sent", sent), ("called", called)):
            counts[name] += sum(map(len, sets))
            counts[f"{name}, copied"] += sum(
                len(rows) for rows in sets if isinstance(rows.index, torch.Tensor)
            )
    return counts


def test_a_document_alone_is_sent_without_copies() -> None:
    """Ranks send their head, or head and tail, which are side by side; heads of earlier ranks are
    read in place."""
    chunk, degree = 5, 8
    case = Case(degree, (2 * degree * chunk,), (Placement(0, 0, degree),))
    counts = copied_rows([RingSchedule.build(case.layout(rank)) for rank in range(degree)])
    exchanged = 3 * degree * (degree - 1) // 2 * chunk
    # Keys of later ranks, but of the last rank alone, are not in the order of positions.
    copied = (degree * (degree - 1) - 2) * chunk
    assert counts == {
        "sent": exchanged,
        "sent, copied": 0,
        "called": exchanged,
        "called, copied": copied,
    }


def test_copies_of_a_published_mix() -> None:
    profile = HardwareProfile.load("h100-nvlink-ib")
    plan = make_plan(
        load_mix("wlb_128k").draw(64, seed=1), ranks=16, tokens_per_rank=16384, profile=profile
    )
    counts: Counter[str] = Counter()
    for number in range(len(plan.micro_batches)):
        layouts = [plan.layout(number, rank) for rank in range(16)]
        counts.update(
            copied_rows(
                [
                    RingSchedule.build(layout, ranks_per_node=profile.ranks_per_node)
                    for layout in layouts
                ]
            )
        )
    assert max(plan.degrees) == 16
    assert counts["sent"] == counts["called"] > 10**6
    # Documents in rings of the same two ranks share a message; their rows lie between others.
    assert counts["sent, copied"] < 0.25 * counts["sent"]
