"""What a GPU's stream of returning gradients reads stays in memory until it ends, on every ring;
checked on the CPU.

The host is far ahead of such a stream: memory that is freed before the end would be used again
while the stream reads it.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx.attention import Mask, RingAttention, exchange
from longctx.attention.exchange import Exchange, Pending
from longctx.planning.layout import CrossLayout, Placement
from tests.attention.test_exchange_order import Batches
from tests.attention_cases import Case, in_rounds


class Touched(TorchDispatchMode):
    """Records all storages that operations and messages within it touch, but for those that are
    allocated within it."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, StorageWeakRef] = {}
        self.inside: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.add(tree_leaves((args, kwargs)), self.outside)
        out = func(*args, **(kwargs or {}))
        self.add(tree_leaves(out), self.inside)
        return out

    def add(self, values: Iterable[Any], to: dict[int, StorageWeakRef]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes():
                storage = StorageWeakRef(value.untyped_storage())
                if storage.cdata not in self.outside and storage.cdata not in self.inside:
                    to[storage.cdata] = storage


class OnGpu(Exchange):
    """Runs hops beside the computation as on a GPU, where the host goes on before they have run,
    and checks what they touch."""

    passes = 0

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        touched = Touched()
        wait = Pending.wait

        def waited(pending: Pending) -> torch.Tensor:
            touched.add([pending.incoming, *pending.sent], touched.outside)
            return wait(pending)

        def in_stream(hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
            with pytest.MonkeyPatch.context() as patch, touched:
                patch.setattr(Pending, "wait", waited)
                hops()
            return lambda: None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "_in_stream", in_stream)
            end = super().beside(hops, torch.device("cuda"))

        def checked() -> None:
            assert touched.outside
            freed = [storage for storage in touched.outside.values() if storage.expired()]
            assert not freed, (
                f"{len(freed)} of {len(touched.outside)} storages are freed before the stream has "
                "read them"
            )
            end()
            OnGpu.passes += 1

        return checked


def run(case: Case) -> None:
    """Runs every rank forward and backward, alone."""
    for rank in range(case.ranks):
        with pytest.MonkeyPatch.context() as patch:
            Batches(patch, rank, case.ranks)
            q, k, v, dout = (tensor[case.rows(rank)].requires_grad_() for tensor in case.inputs())
            case.attention(rank, OnGpu)(q, k, v).backward(dout.detach())


@pytest.mark.parametrize("per_node", [None, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_rings_of_all_places(per_node: int | None, rounds: int) -> None:
    """Also of those of which a node holds one rank alone, that passes on rows without need of
    them."""
    OnGpu.passes = 0
    for degree, first in product(range(2, 8), range(per_node or 1)):
        ring = (Placement(0, first, degree),)
        run(
            Case(
                first + degree,
                (4 * degree,),
                ring,
                exchange_rounds=rounds,
                ranks_per_node=per_node,
                dtype=torch.bfloat16,
            )
        )
    assert OnGpu.passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_relay_that_receives_nothing_itself(keep_kv: bool, dtype: torch.dtype) -> None:
    """Rank 8 has no queries that see rows that it passes on; in float32 their gradients are added
    up in place."""
    case = Case(
        10,
        (3000, 40),
        (Placement(0, 7, 3), Placement(1, 0, 8)),
        ranks_per_node=8,
        keep_kv=keep_kv,
        dtype=dtype,
    )
    run(case)


def test_swapped_heads() -> None:
    run(
        Case(
            12,
            (96,),
            (Placement(0, 0, 12),),
            heads=4,
            kv_heads=2,
            ranks_per_node=4,
            ulysses_degree=2,
        )
    )


def test_cross_attention() -> None:
    """A target and its source on other ranks of two nodes."""
    for targets, sources in (((0, 5), (2, 3)), ((3, 2), (0, 5)), ((0, 1), (1, 4))):
        rings = [in_rounds([Placement(0, *ring)], 1) for ring in (targets, sources)]
        for rank in range(5):
            with pytest.MonkeyPatch.context() as patch:
                Batches(patch, rank, 5)
                layout = CrossLayout.of(rings[0], (40,), rings[1], (30,), 0, rank)
                rows = layout.tokens, layout.key_tokens, layout.key_tokens
                q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in rows)
                attention = RingAttention(
                    layout, exchange=OnGpu, mask=Mask(causal=False), ranks_per_node=2
                )
                attention(q, k, v).sum().backward()
