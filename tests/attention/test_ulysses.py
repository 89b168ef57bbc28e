"""Which rings swap heads for tokens, which rows they send, and which degrees share heads out
evenly."""

import pytest
import torch

from longctx.attention.exchange import Exchange
from longctx.attention.ulysses import HeadSwap, _repeated
from longctx.planning.cost.ulysses import swaps_heads, ulysses_degrees
from longctx.planning.layout import Layout, Placement


def test_rings_of_whole_groups_swap_heads() -> None:
    assert swaps_heads(100, 4, 8, 4) and not swaps_heads(100, 4, 8, 1)
    assert not swaps_heads(100, 2, 8, 4) and not swaps_heads(100, 4, 6, 4)
    assert not swaps_heads(15, 4, 8, 4), "a rank would have no tokens of it"


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_group_has_its_rows_in_order_of_position(is_reversed: bool) -> None:
    """In rings from either end; ring indices have from 1 to 3 tokens."""
    ring = Placement(0, 0, 4, is_reversed)
    layouts = [Layout.of([ring], [9], 0, rank) for rank in range(4)]
    for rank, layout in enumerate(layouts):
        swap = HeadSwap(layout, list(layout.shards), 2, group=None, device="cpu", exchange=Exchange)
        parts = [layouts[mate].shards[0] for mate in swap.mates]
        assert swap.counts == [part.tokens for part in parts], f"rank {rank}"
        sent = [torch.arange(*span) for part in parts for span in (part.head, part.tail)]
        positions = torch.cat(sent)[swap.order]
        assert torch.equal(positions, positions.sort().values), f"rank {rank}"


def test_copies_of_a_head_are_neighbours() -> None:
    """Each rank of a group gets those that its queries see."""
    heads = torch.arange(3).view(1, 3, 1).expand(5, 3, 2)
    assert _repeated(heads, 2)[0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert _repeated(heads, 1) is heads


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "degrees"),
    [(32, 8, [1, 2, 4, 8, 16, 32]), (6, 2, [1, 2, 6]), (4, 1, [1, 2, 4]), (9, 3, [1, 3, 9])],
)
def test_degrees_share_heads_out_evenly(
    query_heads: int, kv_heads: int, degrees: list[int]
) -> None:
    assert ulysses_degrees(query_heads, kv_heads) == degrees
