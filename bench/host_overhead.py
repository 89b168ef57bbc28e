"""Host time of one layer and micro-batch, forward and backward, on a CPU: what a GPU would wait for
if its work were shorter.

    python bench/host_overhead.py --label before      # two minutes, one thread

Rank 0 of a group of four that sends nothing, so that all messages are posted and none is waited
for; hidden size 64, 64 tokens per rank, bfloat16. Attention is our whole flash kernel around a
library that computes nothing. Norms of the native decoder are one operation, as on CUDA. A row is
the slope of process time between two depths, the median of seven rounds in which all ways take
turns; `ratio` is over transformers' own layer, under FSDP2 over that under FSDP2. Appends to
OUT.csv, and prints the tokens per rank at which host time equals GPU time, for layers of given
sizes at the matrix rate of the H100's profile.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness import Table, facts, markdown, options
from longctx.attention.exchange import Exchange
from longctx.attention.kernels import KERNELS
from longctx.attention.kernels.contract import KernelRequest
from longctx.attention.kernels.flash import Flash
from longctx.attention.kernels.flash_library import Library, Sequences
from longctx.attention.ring import RingAttention
from longctx.attention.ring_schedule import RingSchedule
from longctx.hf.attention import Rings, prepare
from longctx.model.decoder import Decoder
from longctx.model.presets import PRESETS
from longctx.parallel.recompute import apply_recompute
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout, Placement

RANKS, TOKENS, HIDDEN, HEADS, ROUNDS, DTYPE = 4, 64, 64, 4, 7, torch.bfloat16
DEPTHS = 2, 6
COLUMNS = ["label", "way", "host_us", "lowest_us", "highest_us", "ratio"]
LAYERS = {"8B": 218e6, "mixture, 3B active": 62e6, "1B": 61e6, "0.6B": 16e6}
"""Parameters of a layer that a token is multiplied with."""
OWN, OWN_SHARDED = "transformers", "transformers, FSDP2"
Step = Callable[[], object]


def main() -> None:
    parser = options(__doc__, "host-overhead")
    parser.add_argument("--label", default="now", help="name of the code that is measured")
    parser.add_argument(
        "--steps", type=int, default=15, help="steps of a way in each round and depth"
    )
    parser.add_argument("--only", nargs="*", help="words of the ways to measure; all if omitted")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    KERNELS["nothing"] = Nothing()
    ways = {
        way: [make(depth) for depth in DEPTHS]
        for way, make in all_ways().items()
        if wanted(way, given.only)
    }
    measured: dict[str, list[float]] = {way: [] for way in ways}
    for each in range(1 + ROUNDS):
        for way, steps in ways.items():
            few, many = (median_s(step, given.steps) for step in steps)
            if each:  # the first round warms up
                measured[way].append((many - few) / (DEPTHS[1] - DEPTHS[0]) * 1e6)
    measured |= schedules()
    table = Table(given.out.with_suffix(".csv"), COLUMNS, facts("longctx", "torch", "transformers"))
    for row in rows_of(measured):
        table.append({"label": given.label, **row})
    print("\n".join(printed(measured)))


def wanted(way: str, only: list[str] | None) -> bool:
    return only is None or any(word in way for word in only) or way in (OWN, OWN_SHARDED)


def all_ways() -> dict[str, Callable[[int], Step]]:
    """Returns functions of the number of layers that build a step, by name."""
    whole, ring = Layout.of([Placement(i, 0, 1) for i in range(8)], [8] * 8, 0, 0), ring_of(4)
    ways: dict[str, Callable[[int], Step]] = {}
    for sharded in (False, True):
        name = ", FSDP2" if sharded else ""
        ways[f"transformers{name}"] = lambda depth, s=sharded: transformers_step(depth, None, s)
        ways[f"transformers under our attention{name}"] = lambda depth, s=sharded: (
            transformers_step(depth, whole, s)
        )
        ways[f"native{name}"] = lambda depth, s=sharded: native_step(depth, whole, s)
        ways[f"native, ring of 4{name}"] = lambda depth, s=sharded: native_step(depth, ring, s)
        ways[f"native, selective{name}"] = lambda depth, s=sharded: native_step(
            depth, whole, s, "selective"
        )
    ways["transformers under our attention, ring of 4"] = lambda depth: transformers_step(
        depth, ring, False
    )
    ways["native, full"] = lambda depth: native_step(depth, whole, False, "full")
    ways["native, mixture"] = lambda depth: native_step(depth, whole, False, experts=4)
    for mode in ("norms", "mlp"):
        ways[f"native, {mode}"] = lambda depth, m=mode: native_step(depth, whole, False, m)
        ways[f"native, mixture, {mode}"] = lambda depth, m=mode: native_step(
            depth, whole, False, m, experts=4
        )
    ways["native, selective, ring of 4, FSDP2"] = lambda depth: native_step(
        depth, ring, True, "selective"
    )
    return ways


def schedules() -> dict[str, list[float]]:
    """Returns the µs, not per layer, in which the schedule of a micro-batch with so many whole
    documents is built."""
    found = {}
    for documents in (8, 32, 256):
        layout = Layout.of(
            [Placement(i, 0, 1) for i in range(documents)], [TOKENS] * documents, 0, 0
        )
        times = [
            median_s(lambda layout=layout: RingSchedule.build(layout), 15) * 1e6
            for _ in range(ROUNDS)
        ]
        found[f"schedule of {documents} documents"] = times
    return found


def ring_of(degree: int) -> Layout:
    return Layout.of([Placement(0, 0, degree)], [degree * TOKENS], 0, 0)


def native_step(
    depth: int, layout: Layout, sharded: bool, recompute: str = "none", experts: int = 0
) -> Step:
    shape = PRESETS["tiny"].model_copy(
        update=sizes(depth)
        | ({"num_experts": experts, "moe_intermediate_size": HIDDEN} if experts else {})
    )
    model = Decoder(shape)
    model.initialize(0)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):  # one operation, as RMSNorm is on CUDA only
                setattr(module, name, nn.LayerNorm(child.normalized_shape, bias=False))
    apply_recompute(model, recompute)
    prepared(model, model.layers, sharded)
    tokens = torch.arange(TOKENS)

    def step() -> None:
        attention = RingAttention(layout, kernel="nothing", exchange=InStream)
        model(tokens, tokens, attention, lambda hidden, _: hidden.sum()).backward()
        model.zero_grad()

    return step


def transformers_step(depth: int, layout: Layout | None, sharded: bool) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes(depth), attn_implementation="sdpa", max_position_embeddings=4096)
    whole = LlamaForCausalLM(config)
    if layout is not None:
        prepare(whole)
    model = whole.model
    prepared(model, model.layers, sharded)
    tokens = torch.arange(TOKENS)[None]

    def step() -> None:
        named: dict[str, Any] = {}
        if layout is not None:
            named["ring_attention"] = Rings(
                lambda scale, softcap, window, device: RingAttention(
                    layout, scale=scale, kernel="nothing", exchange=InStream
                )
            )
        model(tokens, position_ids=tokens, use_cache=False, **named)[0].sum().backward()
        model.zero_grad()

    return step


def sizes(depth: int) -> dict[str, int]:
    heads = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HIDDEN // HEADS,
    }
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": depth,
        "vocab_size": 64,
        **heads,
    }


def prepared(model: nn.Module, layers: nn.ModuleList, sharded: bool) -> None:
    """Casts the model, or shards each layer as training does."""
    if not sharded:
        model.to(DTYPE)
        return
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPE, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)


class InStream(Exchange):
    """As on a GPU, where a stream of its own waits for the messages and no thread is started."""

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        self.held = []
        hops()

        def end() -> None:
            self.held = None

        return end


class Nothing(Flash):
    """The flash kernel around a library that computes nothing."""

    def refusal(self, request: KernelRequest) -> str | None:
        return None

    def _choose(self, request: KernelRequest) -> Library:
        return Library(
            "nothing",
            lambda: None,
            lambda *_: None,
            _forward,
            _backward,
            lambda _: 0,
            made_for_hopper=True,
        )


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Sequences | Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)


def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def median_s(step: Step, count: int) -> float:
    """Returns the median of the process time of `count` steps."""

    def timed() -> Iterator[float]:
        for _ in range(count):
            began = time.process_time()
            step()
            yield time.process_time() - began

    return statistics.median(timed())


def rows_of(measured: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    for way, found in measured.items():
        base = statistics.median(measured[OWN_SHARDED if way.endswith("FSDP2") else OWN])
        middle = statistics.median(found)
        yield {
            "way": way,
            "host_us": middle,
            "lowest_us": min(found),
            "highest_us": max(found),
            "ratio": middle / base,
        }


def printed(measured: dict[str, list[float]]) -> Iterator[str]:
    """Yields the lines of two tables: host time by way, and the tokens per rank at which a GPU
    takes as long."""
    rows = list(rows_of(measured))
    cells = [
        [row["way"], *(f"{row[name]:,.0f}" for name in COLUMNS[2:5]), f"{row['ratio']:.2f}"]
        for row in rows
    ]
    yield from markdown(["way", "host, µs", "lowest", "highest", "ratio"], cells, 1)
    yield ""
    per_layer_s = HardwareProfile.load("h100-nvlink-ib").linear_s_per_token / 32
    tokens = [
        [
            row["way"],
            *(
                f"{row['host_us'] * 1e-6 / per_layer_s * LAYERS['8B'] / each:,.0f}"
                for each in LAYERS.values()
            ),
        ]
        for row in rows
    ]
    yield from markdown(["tokens per rank at which host = GPU", *LAYERS], tokens, 1)


if __name__ == "__main__":
    main()
