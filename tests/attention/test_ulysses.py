"""Which rings swap heads for tokens, and which degrees share heads out evenly."""

import pytest

from longctx.planning.cost.ulysses import swaps_heads, ulysses_degrees


def test_rings_of_whole_groups_swap_heads() -> None:
    assert swaps_heads(100, 4, 8, 4) and not swaps_heads(100, 4, 8, 1)
    assert not swaps_heads(100, 2, 8, 4) and not swaps_heads(100, 4, 6, 4)
    assert not swaps_heads(15, 4, 8, 4), "a rank would have no tokens of it"


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "degrees"),
    [(32, 8, [1, 2, 4, 8, 16, 32]), (6, 2, [1, 2, 6]), (4, 1, [1, 2, 4]), (9, 3, [1, 3, 9])],
)
def test_degrees_share_heads_out_evenly(
    query_heads: int, kv_heads: int, degrees: list[int]
) -> None:
    assert ulysses_degrees(query_heads, kv_heads) == degrees
