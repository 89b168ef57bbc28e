"""The operator's outputs match what torch.compile is told, and it holds no more memory than it
needs."""

from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.attention import RingAttention, RingSchedule, operator
from longctx.attention.exchange import Exchange, Pending
from longctx.attention.kernels import KERNELS, Options, choose_kernel, cpu
from longctx.attention.ring_pass import NO_LAYER
from longctx.planning.layout import Placement
from tests.attention_cases import Case
from tests.workers import Workers

PLAIN: dict[str, Any] = operator.expansion_arguments(None)
"""Arguments of the operators without an expansion."""
RING = Case(6, (600,), (Placement(0, 0, 6),), exchange_rounds=5, head_dim=16)


class Watching(Exchange):
    """Counts the message buffers that are alive at once, including those just posted."""

    buffers: ClassVar[list[StorageWeakRef]] = []
    most = 0

    def start(self, outgoing: Any, incoming: torch.Tensor, rows: Any) -> Pending:
        alive = {
            ref.cdata: ref
            for ref in [*Watching.buffers, StorageWeakRef(incoming.untyped_storage())]
            if not ref.expired()
        }
        Watching.buffers = list(alive.values())
        Watching.most = max(Watching.most, len(alive))
        return super().start(outgoing, incoming, rows)


def run_watched() -> tuple[int, int]:
    """Returns the maximum number of live buffers in forward and in backward."""
    rank = dist.get_rank()
    attention = RingAttention(RING.layout(rank), exchange=Watching)
    q, k, v, dout = (tensor[RING.rows(rank)].requires_grad_() for tensor in RING.inputs())
    Watching.buffers, Watching.most = [], 0
    out = attention(q, k, v)
    forward, Watching.buffers, Watching.most = Watching.most, [], 0
    out.backward(dout.detach())
    return forward, Watching.most


def test_few_rounds_are_held_at_once(workers: Workers) -> None:
    """Holds keys of the current and the next round; in backward also gradients of two rounds in
    flight."""
    results = workers.run(run_watched, 6)
    assert all(forward <= 2 and backward <= 4 for forward, backward in results), results


def run_with_options(deterministic: bool, keep_kv: bool) -> tuple[list[Options], list[Options]]:
    """Returns the options of the kernel calls of forward and of backward."""
    options: list[Options] = []

    class Recording:
        refusal = staticmethod(cpu.refusal)

        def forward(self, *arguments: Any) -> Any:
            options.append(arguments[-1])
            return cpu.forward(*arguments)

        def backward(self, *arguments: Any) -> Any:
            options.append(arguments[-1])
            return cpu.backward(*arguments)

    rank = dist.get_rank()
    q, k, v, dout = (tensor[RING.rows(rank)].requires_grad_() for tensor in RING.inputs())
    with mock.patch.dict(KERNELS, {"recording": Recording()}):
        choose_kernel.cache_clear()
        attention = RingAttention(
            RING.layout(rank), kernel="recording", deterministic=deterministic, keep_kv=keep_kv
        )
        out = attention(q, k, v)
        forward = options.copy()
        options.clear()
        out.backward(dout.detach())
    choose_kernel.cache_clear()
    return forward, options


@pytest.mark.parametrize(("deterministic", "keep_kv"), [(False, False), (True, True)])
def test_kernels_are_told_how_to_run(workers: Workers, deterministic: bool, keep_kv: bool) -> None:
    """Each call is told whether messages are in flight: of the next round's keys, or in backward of
    gradients."""
    for rank, options in enumerate(workers.run(run_with_options, 6, deterministic, keep_kv)):
        schedule = RingSchedule.build(RING.layout(rank))
        calls = [len(schedule.local), *(len(round_.calls) for round_ in schedule.rounds)]
        fetching = [True] * (len(calls) - 1) + [False]
        returning = [False, False] + [True] * (len(calls) - 2)
        backward = (
            returning if keep_kv else [a or b for a, b in zip(fetching, returning, strict=True)]
        )
        for made, wanted in zip(options, (fetching, backward), strict=True):
            told = [flag for flag, count in zip(wanted, calls, strict=True) for _ in range(count)]
            assert [(each.deterministic, each.overlapped) for each in made] == [
                (deterministic, flag) for flag in told
            ]


class Zeros(TorchDispatchMode):
    """Records the sizes of tensors that autograd fills with zeros for missing gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.zeros.default:
            self.sizes.append(tuple(out.shape))
        return out


def run_kept() -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Returns the size of the kept K and V, and of the zeros created in backward."""
    rank = dist.get_rank()
    attention = RingAttention(RING.layout(rank), keep_kv=True)
    q, k, v, _ = (tensor[RING.rows(rank)].requires_grad_() for tensor in RING.inputs())
    handles = {"attention_handle": attention.handle, "layer": NO_LAYER}
    ticket = operator.begin(k, v, None, **handles)
    out, _, kept = operator.forward(q, k, v, None, ticket, **PLAIN, **handles)
    total = out.sum()
    with Zeros() as zeros:
        total.backward()
    return tuple(kept.shape), zeros.sizes


def test_kept_keys_get_no_gradient_as_large_as_they_are(workers: Workers) -> None:
    for kept, made in workers.run(run_kept, 6):
        assert kept[0] >= 250 and kept not in made


class Repeated(dict[int, Any]):
    """Begins the pass anew each time that it is taken, as checks run the operator several times."""

    def __init__(self, attention: RingAttention, k: torch.Tensor, v: torch.Tensor) -> None:
        self.given = attention, k, v

    def pop(self, layer: int) -> Any:  # type: ignore[override]  # what the operator uses of it
        return operator.BegunForward.on(*self.given, layer)


ALONE = Case(1, (4, 3), (Placement(0, 0, 1), Placement(1, 0, 1)), heads=4, kv_heads=2)


@pytest.mark.parametrize("case", [ALONE, Case(1, (), ())])
@pytest.mark.parametrize("heads_first", [False, True])
def test_sizes_and_strides_are_those_told_to_the_compiler(case: Case, heads_first: bool) -> None:
    """Compiled code relies on sizes and strides; inputs are split projections, or have heads before
    tokens."""
    attention = RingAttention(case.layout(0))
    tensors = [torch.randn(7 * bool(case.lengths), heads, 8) for heads in (4, 2, 2)]
    if heads_first:
        tensors = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in tensors]
    q, k, v = tensors
    handles = {"attention_handle": attention.handle, "layer": NO_LAYER}
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.longctx.ring_attention_begin.default,
        (k, v, None),
        handles,
        test_utils=checks,
    )
    attention.begun = Repeated(attention, k, v)
    ticket = torch.empty(0)
    torch.library.opcheck(
        torch.ops.longctx.ring_attention.default,
        (q, k, v, None, ticket),
        {**PLAIN, **handles},
        test_utils=checks,
    )
    out, lse, kept = operator.forward(q, k, v, None, ticket, **PLAIN, **handles)
    dout = torch.randn_like(out)
    torch.library.opcheck(
        torch.ops.longctx.ring_attention_backward.default,
        (dout, q, k, v, out, lse, kept, False),
        {**PLAIN, **handles},
        test_utils=checks,
    )
    gradients = operator.finish(ticket, k, v, **handles)
    assert [x.dtype for x in gradients] == [k.dtype, v.dtype]


def test_an_attention_that_nobody_holds_is_named() -> None:
    handle = RingAttention(ALONE.layout(0)).handle
    q = torch.zeros(7, 4, 8)
    with pytest.raises(RuntimeError, match="keep a reference to it until backward is done"):
        operator.begin(q, q, None, attention_handle=handle, layer=NO_LAYER)
