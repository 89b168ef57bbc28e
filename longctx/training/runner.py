"""Runner: runs the model of this rank over the micro-batches of a step, forward and backward, or
forward alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from longctx.attention import RingAttention
from longctx.attention.host_to_device import copy_to
from longctx.config import Config
from longctx.data.packing import MicroBatch, StepBatch, empty_micro_batch
from longctx.hf.source import ModelSource
from longctx.model.protocol import Attention
from longctx.parallel.mesh import Mesh
from longctx.parallel.pipeline import Inputs
from longctx.parallel.sharding import reduce_gradients, reshard
from longctx.planning.layout import Layout
from longctx.planning.plan import Plan
from longctx.training.build import build_model, make_attention
from longctx.training.clock import StepClock
from longctx.training.objectives.balance import Balance
from longctx.training.objectives.loss import (
    cross_entropy_sum,
    labelled_rows,
    log_probabilities,
    rows_with_labels,
)
from longctx.training.objectives.objective import StepWeights, token_mean
from longctx.training.optimizer import make_optimizer
from longctx.training.trace import micro_batch_name

Scorer = Callable[[StepBatch], list[torch.Tensor]]
"""A pass without gradients, `ModelRunner.log_probabilities`."""


@dataclass(frozen=True, kw_only=True)
class ReadyMicroBatch(MicroBatch):
    """A micro-batch with its attention: schedules of messages and kernel calls. One pass takes it,
    as index tensors stay on the device as long as the attention does."""

    ready: list[Any]

    @classmethod
    def of(cls, micro_batch: MicroBatch, attention: Any) -> "ReadyMicroBatch":
        fields = vars(micro_batch)
        return cls(**fields, ready=[attention])

    def take_attention(self) -> Any:
        """Returns the attention the first time, None afterwards."""
        if not self.ready:
            return None
        return self.ready.pop()


class Position:
    """What a rank does now, for those who wait for it.

    Attributes:
        task: such as "gradient norm"; empty if the place says it.
        place: returns where the rank is in its task. Another thread calls it, also while what it
            reads changes.
    """

    def __init__(self) -> None:
        self.task = "starting"
        self.place: Callable[[], str] = str

    def begin(self, task: str, place: Callable[[], str] = str) -> None:
        """Says what this rank does from now on."""
        self.task = task
        self.place = place

    def text(self) -> str:
        """Returns what this rank does: its task, and the micro-batch, layer and pass."""
        return ", ".join(filter(None, [self.task, self.place()]))


class ModelRunner:
    """The model of a run on this rank, and its passes. Every method is collective.

    Attributes:
        pipeline: what runs the model in a pipeline; None without one.
        position: what this rank does now.
    """

    def __init__(self, config: Config, mesh: Mesh, source: ModelSource) -> None:
        self.config = config
        self.mesh = mesh
        self.model, self.pipeline = build_model(source, config, mesh)
        self.clock = StepClock(mesh.device)
        self.balance = Balance.of(self.model, config, mesh)
        self.position = Position()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Builds the optimizer of the model, by the settings of the run."""
        return make_optimizer(
            self.model, self.config.optimizer, device=self.mesh.device, stage=self.mesh.stage
        )

    @torch.no_grad()
    def log_probabilities(self, batch: StepBatch) -> list[torch.Tensor]:
        """Returns log p of every label, [T] for each of this rank's micro-batches, by a pass
        without gradients; 0 without a label.

        Pipeline ranks without the head return zeros.
        """

        def inputs(number: int) -> Inputs:
            self.position.place = lambda: f"micro-batch {number}"
            labels = batch.micro_batches[number].labels
            device = self.mesh.device
            rows = copy_to(labelled_rows(labels), device)
            head = partial(log_probabilities, labels=copy_to(labels, device), rows=rows)
            return replace(self.inputs(batch, StepWeights(1.0), number), head=head)

        if self.pipeline is not None:
            return self.pipeline.forward(len(batch.micro_batches), inputs)
        values = []
        for number in range(len(batch.micro_batches)):
            given = inputs(number)
            values.append(self.model(given.tokens, given.positions, given.attention, given.head))
        return values

    def after_scoring(self) -> None:
        """Reshards the model and resets the clock after passes without gradients."""
        # Otherwise blocks that stay gathered until backward would stay so until the next backward.
        reshard(self.model)
        self.clock.cut()

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Returns this rank's part of the loss in every micro-batch. FSDP sums gradients over the
        domain, inside backward (`parallel.sharding`)."""
        weights = token_mean(batch)
        if self.pipeline is None:
            return torch.stack(
                [
                    self.micro_batch(batch, number, weights)
                    for number in range(len(batch.micro_batches))
                ]
            )
        self.position.begin("", self.pipeline.where)
        return self.pipeline.forward_backward(
            len(batch.micro_batches), partial(self.inputs, batch, weights)
        )

    def micro_batch(
        self,
        batch: StepBatch,
        number: int,
        weights: StepWeights,
        attention: Attention | None = None,
    ) -> torch.Tensor:
        """Runs forward and backward of a micro-batch; gradients are reduced in the last one, or in
        each.

        `attention` replaces that of the settings, for measurements.
        """
        last = number == len(batch.micro_batches) - 1
        parallel = self.config.parallel
        reduce_gradients(
            self.model,
            in_this_backward=last or parallel.reduce_after == "micro_batch",
            keep_gathered=not last and parallel.reshard_after == "step",
        )
        inputs = self.inputs(batch, weights, number)
        used: Any = inputs.attention if attention is None else attention
        self.position.begin(f"micro-batch {number}", lambda: f"attention last in {used.last}")
        with record_function(inputs.name):
            loss: torch.Tensor = self.model(
                inputs.tokens, inputs.positions, used, inputs.head, inputs.documents
            )
            loss.backward()
        return loss.detach()

    def inputs(self, batch: StepBatch, weights: StepWeights, number: int) -> Inputs:
        """Returns the inputs of this rank for a micro-batch; after the batch's last one, the inputs
        of an empty micro-batch."""
        device = self.mesh.device
        counted = None
        if number < len(batch.micro_batches):
            micro_batch = batch.micro_batches[number]
            attention = None
            if isinstance(micro_batch, ReadyMicroBatch):
                attention = micro_batch.take_attention()
            if attention is None:
                attention = self._attention(batch.plan, micro_batch.layout)
            counted = None if weights.tokens is None else copy_to(weights.tokens[number], device)
        else:
            micro_batch = empty_micro_batch(number, self.mesh.rank)
            context = self.config.context
            attention = RingAttention(
                micro_batch.layout,
                kernel=context.kernel,
                deterministic=context.deterministic,
                device=device,
            )
        rows = rows_with_labels(micro_batch.labels)
        head = partial(
            cross_entropy_sum,
            labels=copy_to(micro_batch.labels, device),
            divisor=weights.divisor,
            weights=counted,
            rows=None if rows is None else copy_to(rows, device),
            compiled=self.config.compiles(device.type, self.model.spec),
        )
        tokens = copy_to(micro_batch.tokens, device)
        positions = copy_to(micro_batch.positions, device)
        documents = self.balance.documents(batch.plan, micro_batch.layout, len(tokens))
        return Inputs(
            micro_batch_name(batch, number),
            tokens,
            positions=positions,
            attention=attention,
            head=head,
            documents=documents,
        )

    def make_ready(self, batch: StepBatch) -> StepBatch:
        """Returns a step with the attention of its micro-batches, which takes milliseconds of
        Python: the loader calls it in its thread, a step ahead."""
        ready = []
        for micro_batch in batch.micro_batches:
            attention = self._attention(batch.plan, micro_batch.layout)
            ready.append(ReadyMicroBatch.of(micro_batch, attention))
        return replace(batch, micro_batches=tuple(ready))

    def _attention(self, plan: Plan, layout: Layout) -> Any:
        make = make_attention(
            self.config,
            self.mesh,
            spec=self.model.spec,
            plan=plan,
            layout=layout,
            clock=self.clock,
        )
        return self.model.attention(make)
