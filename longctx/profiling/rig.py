"""Rig: the real model and optimizer of a run, fed with random tokens, and a stopwatch."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from longctx.attention import RingAttention
from longctx.attention.exchange import Exchange
from longctx.config import Config
from longctx.model.presets import ModelShape
from longctx.model.protocol import Attention
from longctx.parallel.mesh import Mesh
from longctx.parallel.sharding import reduce_gradients
from longctx.planning.layout import Layout, Shard, head_span, tail_span
from longctx.planning.plan import Plan
from longctx.profiling.stopwatch import Stopwatch
from longctx.training.gradients import clip_gradients
from longctx.training.loss import cross_entropy_sum
from longctx.training.optimizer import make_optimizer
from longctx.training.setup import build_model


@dataclass(frozen=True)
class Measurement:
    """Some constants of a profile as measured.

    Attributes:
        constants: by their names in HardwareProfile.
        how: what was timed, in a few words.
        residual: how far the constants are from what they were fitted to (relative, root mean square).
        points: the measured times themselves.
    """

    constants: dict[str, Any]
    how: str
    residual: float
    points: list[dict[str, Any]] = field(default_factory=list)


class Rig:
    """What the measurements share. Runs the same calls as `Trainer.step`, on tokens drawn at random."""

    def __init__(self, config: Config, mesh: Mesh, shape: ModelShape, longest_s: float, ranks_per_node: int) -> None:
        """`ranks_per_node` is that of the profile: where rings cross nodes of so many, they exchange as the settings say."""
        self.config, self.mesh, self.longest_s = config, mesh, longest_s
        self.spec, self.layer = shape.spec, shape.spec.largest_layer
        self.ranks_per_node = ranks_per_node if config.context.two_level_exchange else None
        self.model, _ = build_model(shape, config, mesh)
        self.optimizer = make_optimizer(self.model, config.optimizer, mesh.device)
        self.time = Stopwatch(mesh, longest_s)
        self.dtype: torch.dtype = getattr(torch, config.train.dtype)
        self.forwards = 2 if config.train.recompute == "full" else 1
        """How often a step computes attention forward."""
        self.fetches = self.forwards + (0 if config.context.keep_kv else 1)
        """How often a step exchanges K and V; once more, it exchanges their gradients."""
        self.heads = self.layer.num_attention_heads // mesh.tensor.size()
        self.kv_heads = self.layer.num_key_value_heads // mesh.tensor.size()
        """Of one rank."""

    def attention(self, layout: Layout, exchange: type[Exchange] = Exchange) -> RingAttention:
        context, mesh = self.config.context, self.mesh
        return RingAttention(
            layout,
            group=mesh.exchange,
            kernel=context.kernel,
            keep_kv=context.keep_kv,
            ranks_per_node=self.ranks_per_node,
            device=mesh.device,
            exchange=exchange,
        )

    def random_tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions and labels, padded as tensor parallelism needs it, and the same on all ranks that share them."""
        assert self.spec.vocab_size is not None
        device, multiple = self.mesh.device, self.mesh.tensor.size()
        count = -(-count // multiple) * multiple
        generator = torch.Generator(device).manual_seed(self.mesh.rank)
        tokens, labels = torch.randint(self.spec.vocab_size, (2, count), device=device, generator=generator)
        return tokens, torch.arange(count, device=device), labels

    def micro_batch(
        self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], attention: Attention, *, last: bool = False
    ) -> None:
        """Forward and backward; the `last` micro-batch of a step reduces gradients."""
        tokens, positions, labels = batch
        reduce_gradients(self.model, in_this_backward=last)
        loss = self.model(tokens, positions, attention, partial(cross_entropy_sum, labels=labels))
        (loss / max(1, len(tokens))).backward()

    def finish_step(self) -> None:
        """What ends a step: norm, flags, optimizer."""
        clip_gradients(self.model.parameters(), self.config.optimizer.clip_grad_norm, self.mesh)
        self.mesh.gather([0.0] * 5)
        self.mesh.agree("0", "nothing")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, plan: Plan) -> None:
        """A whole step on random tokens."""
        count = len(plan.micro_batches)
        for index in range(count):
            layout = plan.layout(index, self.mesh.rank)
            self.micro_batch(self.random_tokens(layout.tokens), self.attention(layout), last=index == count - 1)
        self.finish_step()


def layout_of(rank: int, documents: int, length: int, *, degree: int = 1, ring_index: int = 0, stages: int = 1) -> Layout:
    """A layout that holds `ring_index` of so many documents of one length, all on the same ring."""
    shards: list[Shard] = []
    for document in range(documents):
        head, tail = head_span(length, degree, ring_index), tail_span(length, degree, ring_index)
        offset = shards[-1].offset + shards[-1].tokens if shards else 0
        shards.append(Shard(document, length, degree, rank - ring_index, False, ring_index, head, tail, offset))
    return Layout(0, rank, stages, tuple(shards))
