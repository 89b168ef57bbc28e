"""What every mode of recomputation repeats in backward, with and without compilation, and with
block inputs in host memory; gradients are the same."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from longctx.attention import RingAttention, keeping, operator
from longctx.attention.kernels import cpu
from longctx.attention.products import KEPT as KEPT_PRODUCTS
from longctx.config import load
from longctx.model.compilation import compile_blocks
from longctx.model.decoder import Decoder
from longctx.model.experts import SparseMLP
from longctx.model.presets import PRESETS, ModelShape
from longctx.parallel import offload as offloading
from longctx.parallel.offload import Offload
from longctx.parallel.recompute import _contexts, apply_recompute
from longctx.planning.cost.spec import RECOMPUTE_MODES
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout, Placement
from longctx.planning.planners.planner import make_plan
from longctx.training import build
from tests.fake_cuda import fake_cuda

LAYERS, TOKENS = 2, 48
ATTENTION = "longctx.ring_attention.default"
SHAPE = PRESETS["tiny"].model_copy(
    update={"vocab_size": 50, "num_hidden_layers": LAYERS, "qkv_bias": True}
)
MIXTURE = SHAPE.model_copy(
    update={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
)
UNALIGNED = {"moe_intermediate_size": 23}
"""Sizes for which torch has no grouped product."""
REPEATED = {"none": 0, "norms": 0, "mlp": 2, "selective": 6, "full": 6}
"""Matrices of a block that backward computes again: gate and up, or all but the last."""


Counts = Counter[str]


class Counting(TorchDispatchMode):
    """Counts what is computed: recomputation returns what it kept without calling this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counts = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        self.calls[str(function)] += 1
        return function(*given, **(named or {}))


def train(
    mode: str,
    backend: Any = None,
    tiles: int | None = None,
    offload: Offload | None = None,
    device: str = "cpu",
    shape: ModelShape = SHAPE,
    most_rows: int | None = None,
) -> list[torch.Tensor]:
    """Returns the gradients of a step."""
    model = Decoder(shape)
    model.initialize(0)
    for module in model.modules():
        if isinstance(module, SparseMLP):
            module.most_rows = most_rows
    model.to(device)
    apply_recompute(model, mode, mlp_tile_tokens=tiles, offload=offload)
    if backend is not None:
        torch._dynamo.reset()
        compile_blocks(model, backend=backend)
    plan = make_plan(
        [TOKENS], ranks=1, tokens_per_rank=TOKENS, profile=HardwareProfile.load("cpu-2core")
    )
    attention = RingAttention(
        plan.layout(0, 0), device=device, kernel="auto" if device == "cpu" else "reference"
    )
    tokens = torch.arange(TOKENS, device=device)
    model(tokens, tokens, attention, lambda hidden, _: hidden.square().sum()).backward()
    return [
        parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    ]


def train_counted(
    mode: str, tiles: int | None = None, shape: ModelShape = SHAPE
) -> tuple[list[torch.Tensor], Counts]:
    with Counting() as counting, mock.patch.object(cpu, "forward", wraps=cpu.forward) as attention:
        gradients = train(mode, tiles=tiles, shape=shape)
    # Not of what returns outputs that were kept.
    return gradients, counting.calls | {ATTENTION: attention.call_count}


def train_compiled(mode: str, tiles: int | None = None) -> tuple[list[torch.Tensor], Counts]:
    """Partitions the blocks as inductor does; returns the calls in the forward and backward of one
    block."""
    calls: Counts = Counter()

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    return train(mode, backend, tiles), calls


def products(calls: Counts) -> int:
    return calls["aten.mm.default"] + calls["aten.addmm.default"]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_only_what_the_mode_says_is_repeated(compiled: bool) -> None:
    runs = {
        mode: train_compiled(mode) if compiled else train_counted(mode) for mode in RECOMPUTE_MODES
    }
    wanted, plain = runs["none"]
    layers = plain[ATTENTION]
    assert layers == (1 if compiled else LAYERS), "compiled once for all layers"
    for mode, (gradients, calls) in runs.items():
        assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True)), mode
        assert products(calls) - products(plain) == layers * REPEATED[mode], mode
        assert calls[ATTENTION] == layers * (2 if mode == "full" else 1), mode


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tiles": {"tiles": 16},
    "mixture": {"shape": MIXTURE},
    # 48 tokens of two experts each.
    "mixture in turns": {"shape": MIXTURE, "most_rows": 40},
    "mixture, a product for each expert": {"shape": MIXTURE.model_copy(update=UNALIGNED)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
def test_the_host_enters_no_mode_that_sees_every_operation(mode: str, kind: str) -> None:
    """Torch's own selective recomputation has one in forward and one in backward, which cost more
    than the block."""
    wanted = train("none", **KINDS[kind])
    with mock.patch.object(TorchDispatchMode, "__enter__", side_effect=AssertionError("a mode")):
        gradients = train(mode, **KINDS[kind])
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_products_of_experts_are_not_repeated() -> None:
    _, plain = train_counted("none", shape=MIXTURE)
    _, kept = train_counted("norms", shape=MIXTURE)
    _, selective = train_counted("selective", shape=MIXTURE)
    grouped = "aten._grouped_mm.default"
    assert kept[grouped] == plain[grouped] > 0
    assert products(kept) == products(plain)
    assert selective[grouped] == plain[grouped] + 3 * LAYERS


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_whole_documents_need_one_node_of_autograd(mode: str) -> None:
    """And none of torch's registered operators, which look up and check what never changes."""
    with mock.patch.object(
        type(operator.begin), "__call__", side_effect=AssertionError("a registered operator")
    ):
        train(mode)
    x = torch.randn(TOKENS, 2, 8, requires_grad=True)
    attention = RingAttention(Layout.of((Placement(0, 0, 1),), (TOKENS,), 0, 0))
    out = attention(x, x, x)
    assert out.grad_fn is not None
    assert {type(node).__name__ for node, _ in out.grad_fn.next_functions if node is not None} == {
        "AccumulateGrad"
    }


def test_what_is_kept_serves_one_backward() -> None:
    """It is freed as it is used: a second backward would otherwise compute with nothing, or hold
    all of it."""
    x = torch.randn(TOKENS, 2, 8, requires_grad=True)
    attention = RingAttention(Layout.of((Placement(0, 0, 1),), (TOKENS,), 0, 0))
    out = checkpoint(
        lambda x: attention(x * 2, x, x).square(),
        x,
        use_reentrant=False,
        context_fn=keeping.contexts,
    ).sum()
    torch.autograd.grad(out, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"recomputed twice.*without retain_graph"):
        torch.autograd.grad(out, x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (2, 0, 7)])
@pytest.mark.parametrize("trained", ["x", "weight", "both"])
def test_gradients_of_kept_products_are_those_of_torch(
    shape: tuple[int, ...], trained: str, bias: bool
) -> None:
    """Bit by bit, also with frozen weights or a frozen input, of which nothing is saved."""
    layer = torch.nn.Linear(7, 3, bias=bias).to(torch.bfloat16).requires_grad_(trained != "x")
    given = torch.randn(shape, dtype=torch.bfloat16)
    dout = torch.randn(*shape[:-1], 3, dtype=torch.bfloat16)

    def gradients(linear: Any) -> list[torch.Tensor]:
        x = given.clone().requires_grad_(trained != "weight")
        forward, again = keeping.contexts(products="all")
        with forward:
            linear(x, layer.weight, layer.bias)
        with again:
            out = linear(x, layer.weight, layer.bias)
        needed = [each for each in (x, *layer.parameters()) if each.requires_grad]
        return [out, *torch.autograd.grad(out, needed, dout)]

    pairs = zip(gradients(KEPT_PRODUCTS.linear), gradients(F.linear), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def in_place_before(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return KEPT_PRODUCTS.linear(x, weight, None).add_(1).square()


def in_place_at_the_end(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = KEPT_PRODUCTS.linear(x.square(), weight, None)
    out += x
    return out


def under_autocast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return KEPT_PRODUCTS.linear(x.square(), weight, None).float()


def of_a_vector(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return KEPT_PRODUCTS.linear(x[0].square(), weight, None)


@pytest.mark.parametrize(
    "block", [in_place_before, in_place_at_the_end, under_autocast, of_a_vector]
)
def test_products_that_cannot_be_kept_are_computed_again(
    block: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Their outputs change in place, or torch computes them itself."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    contexts = partial(keeping.contexts, products="all")
    wanted = torch.autograd.grad(block(x, weight).sum(), (x, weight))
    out = checkpoint(block, x, weight, use_reentrant=False, context_fn=contexts).sum()
    for found, right in zip(torch.autograd.grad(out, (x, weight)), wanted, strict=True):
        assert torch.equal(found, right)


def test_other_outputs_that_are_kept_may_not_change_in_place() -> None:
    """They may have sent messages, which others do not await again."""
    x = torch.randn(3, 4, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return keeping.kept(torch.mul)(x, 2).add_(1).square()

    out = checkpoint(block, x, use_reentrant=False, context_fn=keeping.contexts).sum()
    with pytest.raises(RuntimeError, match="changed in place"):
        out.backward()


class InPlace(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).add_(1).square())
        return out


@pytest.mark.parametrize("mode", ["norms", "mlp"])
def test_offloaded_blocks_may_change_products_in_place(mode: str) -> None:
    torch.manual_seed(0)
    block = InPlace()
    x = torch.randn(3, 4, requires_grad=True)
    wanted = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    model: Any = SimpleNamespace(layers=[block])
    apply_recompute(model, mode, offload=Offload())
    found = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    for ours, right in zip(found, wanted, strict=True):
        assert torch.equal(ours, right)


def test_with_tiles_the_mlp_is_repeated_by_tile_only() -> None:
    """Twice, tile by tile: when the block is recomputed, and in the backward of each tile."""
    wanted, (_, tiled) = train("none"), train_counted("none", tiles=16)
    for mode in ("norms", "mlp"):
        gradients, calls = train_counted(mode, tiles=16)
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b)
        assert products(calls) - products(tiled) == LAYERS * 3 * 2, mode


@pytest.mark.slow
def test_tiles_compile_once_for_all_layers() -> None:
    wanted, plain = train_counted("selective", tiles=16)
    gradients, calls = train_compiled("selective", tiles=16)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert calls[ATTENTION] == 1 and plain[ATTENTION] == LAYERS


def test_the_outputs_of_adapters_are_not_kept() -> None:
    """They are as large as the output of the matrix that they adapt, and cost little."""
    x, down, up = torch.randn(4, 64), torch.randn(64, 4), torch.randn(4, 64)
    forward, again = _contexts("norms")
    with forward:
        wanted = x @ down @ up
    with Counting() as counting, again:
        found = x @ down @ up
    assert torch.equal(found, wanted)
    assert counting.calls["aten.mm.default"] == 1


KEPT = {
    "full": SHAPE.hidden_size,
    "mlp": SHAPE.hidden_size,
    "selective": SHAPE.hidden_size
    + SHAPE.num_attention_heads * (SHAPE.spec.layers[0].head_dim + 1),
}
"""Values of a token that a block keeps in host memory: its input, and attention's output and
log-sum-exp."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", KEPT)
def test_what_blocks_keep_in_host_memory_changes_nothing(mode: str, device: str) -> None:
    offload = Offload()
    plain, offloaded = train(mode, device=device), train(mode, device=device, offload=offload)
    assert offload.moved_bytes == LAYERS * TOKENS * KEPT[mode] * 4, "and no more"
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_blocks_keep_the_same_in_host_memory(mode: str) -> None:
    """Neither weights, which sharding frees, nor tables that all blocks share."""
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    offload = Offload()
    plain, offloaded = train(mode, backend), train(mode, backend, offload=offload)
    assert offload.moved_bytes == LAYERS * TOKENS * KEPT[mode] * 4
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


def test_weights_stay_on_the_device() -> None:
    """Though they have as many rows as there are tokens: sharding frees them by itself."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(8, 8, requires_grad=True)
    offload = Offload()
    offload.outputs = True
    offload(lambda x: (x @ weight).tanh(), x).sum().backward()
    assert offload.moved_bytes == 2 * x.nbytes, "the input and the result of tanh"


@pytest.mark.parametrize(("mode", "tensors"), [("full", 1), ("selective", 3)])
def test_tensors_of_a_block_come_back_while_backward_is_in_the_block_after(
    monkeypatch: pytest.MonkeyPatch, mode: str, tensors: int
) -> None:
    """With streams and events that do nothing, on a CPU."""
    kept: list[Any] = []
    log: list[tuple[str, int]] = []

    class Logged(offloading.Kept):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kept.append(self)

        def start(self) -> Any:
            if self.back is None:
                log.append(("start", kept.index(self)))
            return super().start()

        def take(self) -> torch.Tensor:
            tensor = super().take()
            log.append(("use", kept.index(self)))
            return tensor

    plain = train(mode)
    monkeypatch.setattr(offloading, "Kept", Logged)
    monkeypatch.setattr(offloading, "_has_stream", lambda tensor: True)
    with fake_cuda():
        offloaded = train(mode, offload=Offload())
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    of_block = [list(range(n * tensors, (n + 1) * tensors)) for n in range(LAYERS)]
    expected = [("start", each) for each in of_block[-1]]
    for n in reversed(range(LAYERS)):
        first, *others = of_block[n]
        if n:
            expected += [("start", each) for each in of_block[n - 1]]
        expected += [("use", each) for each in (first, *others)]
    assert log == expected
    assert all(each.back is None for each in kept), "autograd has the tensors now"


@pytest.mark.parametrize(
    ("offload", "free", "expected"), [(True, 5, [5]), (True, None, []), (False, 5, [])]
)
def test_an_offloaded_optimizer_uses_the_cores(
    monkeypatch: pytest.MonkeyPatch, offload: bool, free: int | None, expected: list[int]
) -> None:
    """torchrun leaves every process one thread, which would take seconds for a step of billions of
    weights."""
    used: list[int] = []

    def stop(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("that is enough")

    monkeypatch.setattr(build, "host_threads", lambda: free)
    monkeypatch.setattr(build, "shard", stop)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    config = load(
        None, ["model.preset=tiny", "model.vocab_size=100", f"train.offload_optimizer={offload}"]
    )
    one = SimpleNamespace(size=lambda: 1)
    mesh = SimpleNamespace(
        device=torch.device("cuda"),
        pipeline_rank=0,
        tensor=one,
        weights=one,
        copies=one,
        experts=None,
    )
    with pytest.raises(RuntimeError, match="that is enough"):
        build.build_model(config.model_source(), config, cast(Any, mesh))
    assert used == expected
