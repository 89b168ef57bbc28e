"""Profiled run: a trainer with the run's model and optimizer, which measurements run on random tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from longctx.attention import RingAttention
from longctx.attention.exchange import Exchange
from longctx.calibration.stopwatch import Stopwatch
from longctx.config import Config
from longctx.data.packing import MicroBatch, StepBatch
from longctx.model.presets import ModelShape
from longctx.model.protocol import Attention
from longctx.model.source import NewDecoder
from longctx.parallel.mesh import Mesh
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout, Placement
from longctx.planning.plan import Plan, PlanCost
from longctx.training.build import make_attention
from longctx.training.objectives.objective import StepWeights
from longctx.training.trainer import Trainer


@dataclass(frozen=True)
class Measurement:
    """Constants of a profile.

    Attributes:
        constants: values by name in HardwareProfile.
        how: short description of the timed work, or of the source of the values.
        residual: relative root mean square error of the fit; None if model, settings or launcher give the values.
    """

    constants: dict[str, Any]
    how: str
    residual: float | None = None


class ProfiledRun:
    """The model, trainer and stopwatch shared by all measurements.

    Measures plain rings (`context.ulysses_degree` is set to 1), as the cost model expects, and attention without windows.
    """

    def __init__(self, config: Config, mesh: Mesh, shape: ModelShape, longest_s: float, profile: HardwareProfile) -> None:
        """Builds the trainer. `profile` gives the number of ranks per node."""
        self.config, self.mesh, self.longest_s = config.changed({"context.ulysses_degree": 1}), mesh, longest_s
        self.spec, self.layer = shape.spec, replace(shape.spec.largest_layer, window=None)
        self.trainer = Trainer.build(self.config, mesh, NewDecoder(shape))
        self.time = Stopwatch(mesh, longest_s)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.forwards = 2 if config.train.recompute == "full" else 1
        """Number of attention forward passes per step."""
        self.fetches = self.forwards + (0 if config.context.keep_kv else 1)
        """Number of exchanges of K and V per step; one more exchange returns their gradients."""
        self.heads = self.layer.num_attention_heads // mesh.tensor.size()
        self.kv_heads = self.layer.num_key_value_heads // mesh.tensor.size()
        """Heads per tensor-parallel rank."""
        budget = config.batch.tokens_per_rank
        self.no_plan = Plan("static", "none", mesh.ranks, budget, (), (), profile, cost=PlanCost(0.0, 0.0, 0.0, 0.0))

    def attention(self, layout: Layout, exchange: type[Exchange] = Exchange) -> RingAttention:
        """Returns the run's attention for `layout`, in a layer without a window."""
        make = make_attention(self.config, self.mesh, self.spec, self.no_plan, layout, exchange=exchange)
        attention = make(None, 0.0, None)
        assert isinstance(attention, RingAttention)
        return attention

    def kv_rows(self, count: int) -> torch.Tensor:
        """Returns a buffer for the K and V of `count` rows in one layer: [count, 2 · kv heads · head_dim]."""
        return torch.zeros(count, 2 * self.kv_heads * self.layer.head_dim, dtype=self.dtype, device=self.mesh.device)

    def batch(self, layouts: Sequence[Layout], tokens: Sequence[int], plan: Plan | None = None) -> StepBatch:
        """Returns a step of micro-batches with these layouts and random tokens, padded for tensor parallelism.

        Tensor-parallel ranks get the same tokens.
        """
        assert self.spec.vocab_size is not None
        multiple = self.mesh.tensor.size()
        generator, micro_batches = torch.Generator().manual_seed(self.mesh.rank), []
        for number, (layout, count) in enumerate(zip(layouts, tokens, strict=True)):
            rows = -(-count // multiple) * multiple
            ids, labels = torch.randint(self.spec.vocab_size, (2, rows), generator=generator)
            micro_batches.append(MicroBatch(number, layout, ids, labels, torch.arange(rows)))
        plan = self.no_plan if plan is None else plan
        total = self.mesh.ranks * sum(tokens)
        return StepBatch(1, plan, tuple("random" for _ in plan.lengths), total, max(1, total), tuple(micro_batches))

    def planned(self, plan: Plan) -> StepBatch:
        """Returns a step of random tokens with the layouts of a plan."""
        layouts = [plan.layout(number, self.mesh.rank) for number in range(len(plan.micro_batches))]
        return self.batch(layouts, [layout.tokens for layout in layouts], plan)

    def micro_batch(self, tokens: int, attention: Attention | None = None) -> Callable[[], None]:
        """Builds a run of forward and backward on `tokens` tokens, in a micro-batch that is not the last of its step.

        The layout holds no document, so the run's attention computes nothing; `attention` replaces it.
        """
        batch = self.batch([no_documents(self.mesh.rank)] * 2, [tokens, 0])
        weights = StepWeights(batch.target_tokens)

        def run() -> None:
            self.trainer.passes.micro_batch(batch, 0, weights, attention)

        return run

    def step(self, batch: StepBatch) -> Callable[[], None]:
        """Builds a run of a whole training step."""

        def run() -> None:
            self.trainer.step(batch)

        return run


def no_documents(rank: int) -> Layout:
    """Returns the layout of a rank that holds no tokens."""
    return Layout(0, rank, ())


def layout_of(rank: int, documents: int, length: int, *, degree: int = 1, ring_index: int = 0, rounds: int = 1) -> Layout:
    """Returns a layout that holds `ring_index` of several documents of one length, all on the same ring."""
    placements = [Placement(document, rank - ring_index, degree, rounds=rounds) for document in range(documents)]
    return Layout.of(placements, [length] * documents, 0, rank)
