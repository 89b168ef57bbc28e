"""The operator compiles without graph breaks or recompilation, and selective recomputation keeps
its outputs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from functorch.compile import make_boxed_compiler, make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from longctx.attention import OPERATORS, RingAttention, keeping, operator
from longctx.attention.exchange import Exchange, Pending
from longctx.model.compilation import compile_blocks
from longctx.model.decoder import Decoder
from longctx.model.presets import PRESETS
from longctx.model.rope import Rope
from longctx.parallel.recompute import apply_recompute
from longctx.planning.cost.spec import RECOMPUTE_MODES
from longctx.planning.layout import Layout, Placement
from tests.attention_cases import Case
from tests.workers import Workers

CASE = Case(
    2,
    (40, 9, 7),
    (Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 1, 1)),
    heads=4,
    kv_heads=2,
    head_dim=8,
)
OTHER = Case(
    2,
    (40, 9, 7),
    (Placement(0, 0, 1), Placement(1, 0, 2), Placement(2, 1, 1)),
    heads=4,
    kv_heads=2,
    head_dim=8,
)
MANY = Case(
    2,
    (9, 20, 30, 9, 9),
    tuple(Placement(i, 0, 1 + i % 2) for i in range(5)),
    heads=4,
    kv_heads=2,
    head_dim=8,
)


EMPTY = Case(2, (40,), (Placement(0, 0, 1),), heads=4, kv_heads=2, head_dim=8)
"""Rank 1 has no token."""
SINGLE = Case(2, (40, 1), (Placement(0, 0, 1), Placement(1, 1, 1)), heads=4, kv_heads=2, head_dim=8)
"""Rank 1 has one token."""


class Block(torch.nn.Module):
    """Attention between projections, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 64, bias=False)
        self.out = torch.nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor, attention: RingAttention) -> torch.Tensor:
        q, k, v = (
            self.qkv(torch.nn.functional.rms_norm(x, (32,))).view(-1, 8, 8).split([4, 2, 2], dim=1)
        )
        return x + self.out(attention(q, k, v, layer=3).flatten(1))


class Counting(Exchange):
    """Counts the exchanges that this rank starts."""

    starts = 0

    def start(self, *arguments: Any) -> Pending:
        Counting.starts += 1
        return super().start(*arguments)


def run_compiled(
    cases: list[Case], recompute: str
) -> tuple[list[tuple[torch.Tensor, ...]], int, int, list[int]]:
    """Returns out, dx and dweight of plain and of compiled blocks, for each micro-batch.

    Then the numbers of graphs and graph breaks, and of exchanges started without and with
    compilation.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = PRESETS["tiny"].model_copy(update={"num_hidden_layers": 3, "vocab_size": 8})
    model = Decoder(shape)
    model.initialize(0)
    apply_recompute(model, recompute)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    results, starts = [], []
    for compiled in (False, True):
        if compiled:
            compile_blocks(model, backend=counter)
        Counting.starts = 0
        for case in cases:
            layout = case.layout(dist.get_rank())
            attention = RingAttention(layout, exchange=Counting)
            spans = [
                torch.arange(*span) for shard in layout.shards for span in (shard.head, shard.tail)
            ]
            positions = torch.cat([torch.zeros(0, dtype=torch.int64), *spans])
            tables = Rope(shape.head_dim, shape.rope_theta).tables(positions)
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(layout.tokens, shape.hidden_size, generator=generator).requires_grad_()
            out = x
            for block in model.layers:
                out = block(out, *tables, attention)
            weight = model.layers[0].self_attn.q_proj.weight
            results.append(
                (out.detach(), *torch.autograd.grad(out.square().sum() / 49, (x, weight)))
            )
        starts.append(Counting.starts)
    return (
        results,
        len(counter.graphs),
        sum(torch._dynamo.utils.counters["graph_break"].values()),
        starts,
    )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_blocks_compile_once_for_all_layers_and_micro_batches(
    workers: Workers, recompute: str
) -> None:
    """For any number of documents and tokens, although torch treats 0 and 1 as constants."""
    cases = [EMPTY, CASE, SINGLE, OTHER, MANY]
    for results, graphs, breaks, (plain_starts, compiled_starts) in workers.run(
        run_compiled, 2, cases, recompute
    ):
        for plain, compiled in zip(results[: len(cases)], results[len(cases) :], strict=True):
            for a, b in zip(plain, compiled, strict=True):
                torch.testing.assert_close(a, b)
        assert compiled_starts == plain_starts, (
            "compilation must not change what is kept and recomputed"
        )
        assert breaks == 0
        assert 1 <= graphs <= 2  # of three layers and five layouts


def test_only_tokens_layer_and_attention_are_variables_of_a_program() -> None:
    """Kernels that know the size of heads need no divisions to find their place."""
    torch._dynamo.reset()
    model = Decoder(
        PRESETS["tiny"].model_copy(
            update={"num_hidden_layers": 3, "vocab_size": 8, "qk_norm": True}
        )
    )
    model.initialize(0)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compile_blocks(model, backend=counter)
    for length in (40, 30, 2):
        attention = RingAttention(Layout.of((Placement(0, 0, 1),), (length,), 0, 0))
        x = torch.randn(length, model.spec.hidden_size).requires_grad_()
        tables = model.rope.tables(torch.arange(length))
        for block in model.layers:
            x = block(x, *tables, attention)
        x.sum().backward()
    assert len(counter.graphs) <= 2
    for graph in counter.graphs:
        variables = set()
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta["example_value"]
            for size in value.shape if isinstance(value, torch.Tensor) else [value]:
                variables |= (
                    size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()
                )
        assert len(variables) <= 3


EXCHANGES = {f"longctx.{name}.default" for name in ("gather_tokens", "gather_heads")}
EXCHANGES |= {
    f"longctx.ring_attention{part}.default" for part in ("", "_begin", "_backward", "_finish")
}


def run_traced(case: Case, recomputed: bool) -> list[tuple[list[str], bool]]:
    """Returns the exchanges of the forward and the backward graph, and whether each one needs the
    result of that before."""
    torch._dynamo.reset()
    found: list[tuple[list[str], bool]] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        needed: dict[torch.fx.Node, set[torch.fx.Node]] = {}
        for node in graph.graph.nodes:
            needed[node] = set(node.all_input_nodes).union(
                *(needed[other] for other in node.all_input_nodes)
            )
        nodes = [node for node in graph.graph.nodes if str(node.target) in EXCHANGES]
        ordered = all(before in needed[after] for before, after in pairwise(nodes))
        found.append(([str(node.target).split(".")[1] for node in nodes], ordered))
        return graph

    block = Block()
    forward = partial(checkpoint, block, use_reentrant=False) if recomputed else block
    backend = aot_autograd(fw_compiler=make_boxed_compiler(look))
    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=True)
    rank = dist.get_rank()
    attention = case.attention(rank)
    compiled(
        torch.randn(len(case.rows(rank)), 32).requires_grad_(), attention
    ).square().sum().backward()
    return found


@pytest.mark.parametrize("recomputed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compilers_cannot_move_exchanges(workers: Workers, recomputed: bool) -> None:
    """Ranks whose exchanges have another order wait for each other. CASE has swapped rings, on rank
    0 besides plain ones."""
    ring = (
        ["ring_attention_begin", "ring_attention"],
        ["ring_attention_backward", "ring_attention_finish"],
    )
    swapped = (
        ["gather_tokens", *ring[0], "gather_heads"],
        ["gather_tokens", *ring[1], "gather_heads"],
    )
    forward, backward = [*swapped[0], *ring[0]], [*ring[1], *swapped[1]]
    for found in workers.run(run_traced, 2, replace(CASE, ulysses_degree=2), recomputed):
        names, ordered = zip(*found, strict=True)
        assert all(ordered)
        assert list(names) == [forward, [*forward, *backward] if recomputed else backward]


def run_frozen(compiled: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Gradients of the queries alone, with and without those of K and V, and the number of passes
    that nobody finished."""
    torch._dynamo.reset()
    attention, rank = CASE.attention(dist.get_rank()), dist.get_rank()
    found = []
    for frozen in (True, False):
        q, k, v, _ = (tensor[CASE.rows(rank)] for tensor in CASE.inputs())
        q, k, v = q.requires_grad_(), k.requires_grad_(not frozen), v.requires_grad_(not frozen)
        run = (
            torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
        )
        found.append(
            torch.autograd.grad(run(q, k, v).square().sum(), [q] if frozen else [q, k, v])[0]
        )
    return *found, len(operator.unfinished)


@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_keys_leave_nothing_behind(workers: Workers, compiled: bool) -> None:
    """As with adapters of the queries alone, whose first layer has K and V that need no
    gradient."""
    for alone, together, unfinished in workers.run(run_frozen, 2, compiled):
        torch.testing.assert_close(alone, together)
        assert unfinished == 0


def run_recomputed(keep_kv: bool, policy: str) -> tuple[list[torch.Tensor], int]:
    """Returns the gradients of a block and the number of exchanges that this rank started."""
    torch.manual_seed(0)
    block = Block()
    rank = dist.get_rank()
    attention = RingAttention(CASE.layout(rank), exchange=Counting, keep_kv=keep_kv)
    x = torch.randn(
        len(CASE.rows(rank)), 32, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    Counting.starts = 0
    if policy == "none":
        out = block(x, attention)
    elif policy == "full":
        out = checkpoint(block, x, attention, use_reentrant=False)
    else:
        of_torch = partial(create_selective_checkpoint_contexts, OPERATORS)
        contexts = of_torch if policy == "selective by torch" else keeping.contexts
        out = checkpoint(block, x, attention, use_reentrant=False, context_fn=contexts)
    gradients = torch.autograd.grad(out.square().sum(), (x, block.qkv.weight))
    return list(gradients), Counting.starts


def test_selective_recomputation_never_repeats_the_exchange(workers: Workers) -> None:
    """One exchange in forward, one to fetch again unless kept, one to return gradients; full
    recomputation adds one."""
    starts = {}
    wanted = None
    for keep_kv in (False, True):
        for policy in ("none", "selective", "selective by torch", "full"):
            results = workers.run(run_recomputed, 2, keep_kv, policy)
            starts[keep_kv, policy] = results[0][1]
            wanted = wanted or [gradients for gradients, _ in results]
            for (gradients, _), other in zip(results, wanted, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(gradients, other, strict=True))
    assert starts == {
        (False, "none"): 3,
        (False, "selective"): 3,
        (False, "selective by torch"): 3,
        (False, "full"): 4,
        (True, "none"): 2,
        (True, "selective"): 2,
        (True, "selective by torch"): 2,
        (True, "full"): 3,
    }


class Telling(Exchange):
    """Tells when messages are posted and waited for."""

    events: ClassVar[list[str]] = []

    def start(self, *arguments: Any) -> Pending:
        Telling.events.append("post")
        pending = super().start(*arguments)
        wait = pending.wait
        vars(pending)["wait"] = lambda: Telling.events.append("wait") or wait()
        return pending

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        end = super().beside(hops, device)
        return lambda: Telling.events.append("end") or end()


def run_told(keys_need_gradients: bool) -> tuple[list[str], list[str]]:
    """Returns what happens in forward and in backward, in order, around the queries."""
    rank = dist.get_rank()
    q, k, v, dout = (tensor[CASE.rows(rank)] for tensor in CASE.inputs())
    for tensor in (k, v):
        tensor.requires_grad_(keys_need_gradients)
    weight = torch.ones(8, requires_grad=True)

    def queries(sent: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        Telling.events.append("queries")
        product = q * sent(weight)
        product.register_hook(lambda _: Telling.events.append("queries' gradient"))
        return product

    Telling.events.clear()
    out = RingAttention(CASE.layout(rank), exchange=Telling, keep_kv=True)(queries, k, v)
    forward = Telling.events.copy()
    Telling.events.clear()
    out.backward(dout)
    assert weight.grad is not None
    return forward, Telling.events


def test_messages_travel_while_queries_are_computed(workers: Workers) -> None:
    """In backward those of the last gradients, unless K and V need none: then the other ranks wait
    for them all the same."""
    for forward, backward in workers.run(run_told, 2, True):
        assert forward == ["post", "queries", "wait"]
        backward.remove("wait")  # in a thread, at any time
        assert backward == ["post", "queries' gradient", "end"]
    for forward, backward in workers.run(run_told, 2, False):
        assert forward == ["post", "queries", "wait"]
        assert backward == ["post", "wait", "queries' gradient"]


def test_compiled_blocks_await_the_last_gradients_after_those_of_the_queries() -> None:
    """The operator that waits depends on a product of the queries' backward, so that no compiler
    can move it before."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    model = Decoder(PRESETS["tiny"].model_copy(update={"num_hidden_layers": 1, "vocab_size": 8}))
    model.initialize(0)
    compile_blocks(
        model,
        backend=aot_autograd(
            fw_compiler=make_boxed_compiler(lambda graph, _: graph), bw_compiler=keep
        ),
    )
    attention = RingAttention(Layout.of([Placement(0, 0, 1)], [40], 0, 0))
    model(torch.zeros(40, dtype=torch.int64), torch.arange(40), attention).sum().backward()

    def before(name: str) -> set[torch.fx.Node]:
        """Returns what an operator depends on."""
        (last,) = [node for node in graphs[0].graph.nodes if name in str(node.target)]
        found, new = set(), {last}
        while new:
            found |= new
            new = {other for node in new for other in node.all_input_nodes} - found
        return found

    between = before("ring_attention_finish") - before("ring_attention_backward")
    assert "aten.mm.default" in {str(node.target) for node in between}
