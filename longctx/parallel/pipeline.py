"""Pipeline parallelism: stages of consecutive layers, run by the schedules of
`torch.distributed.pipelining`.

The schedule tells a stage only the number of a micro-batch, and each stage looks up layout,
positions and labels itself. So no metadata is sent, and all messages between stages have one shape:
a stage pads hidden states to the token budget on exit and cuts them to the real tokens on entry.

Ring attention inside stages cannot deadlock. All ranks of a domain run the same schedule over the
same number of micro-batches, including empty ones, so they reach the exchange of every (stage,
micro-batch, pass) in the same order; and exchange, gathering of weights and messages between stages
have separate communicators. For the schedule, the ranks of a domain act as one: a circular wait
between ranks would be one between the stages of a single pipeline, which never happens.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.profiler import record_function

from longctx.attention import PackedAttention
from longctx.model.balance import RowDocuments
from longctx.model.protocol import Head, StagedModel
from longctx.parallel.mesh import Mesh
from longctx.parallel.sharding import accumulate_gradients
from longctx.parallel.timing import Clock, Spans
from longctx.parallel.torch_stage import LeanStage
from longctx.planning.pipeline import Pipeline

SCHEDULE = "schedule"
COMPUTE = "compute"


@dataclass(frozen=True)
class Inputs:
    """Inputs of a rank for one micro-batch, for any of its stages.

    Attributes:
        head: computes the loss from final hidden states and output weight.
        documents: documents of the rows, for a mixture of experts.
    """

    name: str
    tokens: torch.Tensor
    positions: torch.Tensor
    attention: PackedAttention
    head: Head
    documents: RowDocuments | None = None


class Stage(nn.Module):
    """Consecutive blocks of a model; the first stage includes the embedding, the last one the head.

    The modules are shared with the model. Hidden states are received and sent as [wire_rows,
    hidden].
    """

    def __init__(self, model: StagedModel, index: int, layers: range) -> None:
        super().__init__()
        self.index = index
        self.run = model.run
        self.embed = model.embed
        blocks = dict(model.layers.named_children())
        self.layers = nn.ModuleList(blocks[str(layer)] for layer in layers)
        self.is_first = layers.start == 0
        self.is_last = layers.stop == len(model.spec.layers)
        if self.is_first or (self.is_last and model.spec.tie_word_embeddings):
            self.embed_tokens = model.embed_tokens
        if self.is_last:
            self.norm = model.norm
            self.lm_head = model.lm_head
        self.inputs: Callable[[int], Inputs]
        self.micro_batch: int
        """The next one; not an argument, as FSDP would copy it to the GPU, where reading it makes
        the host wait."""
        self.wire_rows: int
        self.tensor_ranks: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Runs the micro-batch number `micro_batch` through this stage. Returns hidden states for
        the next stage, or the loss.

        The first stage ignores `hidden`.
        """
        mine = self.inputs(self.micro_batch)
        if self.is_first:
            x = self.embed(mine.tokens)
        else:
            x = hidden[: len(mine.tokens) // self.tensor_ranks]
        head = mine.head if self.is_last else None
        out = self.run(self.layers, x, mine.positions, mine.attention, head, mine.documents)
        if self.is_last:
            return out
        return F.pad(out, (0, 0, 0, self.wire_rows - out.shape[0]))


def idle(schedule: Spans) -> tuple[float, float]:
    """Returns idle seconds of this rank in a schedule (bubble and waiting for messages), and their
    share of it."""
    spent = schedule.seconds()
    return spent[SCHEDULE], spent[SCHEDULE] / sum(spent.values())


class PipelineRun:
    """The stages of one rank, and the schedule that runs micro-batches through all of them.

    Args:
        stages: this rank's stages, in ascending order.
        wire_rows: rows of hidden states in every message between stages: the maximum tokens of a
            micro-batch per rank.
        dtype: dtype of these messages, the compute dtype.
    """

    def __init__(
        self,
        model: StagedModel,
        stages: Sequence[Stage],
        pipeline: Pipeline,
        mesh: Mesh,
        wire_rows: int,
        dtype: torch.dtype,
    ) -> None:
        assert mesh.pipeline is not None
        self.model = model
        self.stages = stages
        self.pipeline = pipeline
        self.mesh = mesh
        self.group = mesh.pipeline
        self.dtype = dtype
        self.clock = Clock(mesh.device)
        """Measures each schedule, for `idle`."""
        self.inputs: dict[int, Inputs] = {}
        """Inputs of the micro-batches that this rank has begun."""
        self.last: tuple[int, int, str] | None = None
        """Last micro-batch, stage and pass that this rank entered."""
        tensor = mesh.tensor.size()
        self.wire_rows = -(-wire_rows // tensor)
        for stage in stages:
            stage.wire_rows = self.wire_rows
            stage.tensor_ranks = tensor
        self._schedule: tuple[int, Any] | None = None

    @property
    def has_head(self) -> bool:
        """Whether this rank has the head, and so the losses."""
        return self.stages[-1].is_last

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """Parameter that the first stage has too: a tied embedding used as the head; None without
        one."""
        tied = self.has_head and self.model.spec.tie_word_embeddings
        if tied:
            return next(self.model.lm_head.parameters())
        return None

    def where(self) -> str:
        """Last position of this rank in the schedule, for error messages."""
        if self.last is None:
            return "before the first stage"
        micro_batch, stage, name = self.last
        running = self.inputs.get(micro_batch)
        attention = "" if running is None else f", attention last in {running.attention.last}"
        return f"micro-batch {micro_batch}, stage {stage}, {name}{attention}"

    def forward_backward(self, micro_batches: int, inputs: Callable[[int], Inputs]) -> torch.Tensor:
        """Runs all micro-batches through all stages and reduces the gradients. Returns the losses
        [micro_batches].

        `inputs` returns this rank's inputs for a micro-batch, by its number; from `micro_batches`
        on, these are empty ones that the schedule needs. All ranks of the pipeline and of the
        domain must call it with the same number. Losses are 0 on ranks without the head.
        """
        runs = self.pipeline.runs(micro_batches)
        self.inputs = {}
        self.last = None

        def prepare(number: int) -> Inputs:
            if number not in self.inputs:
                self.inputs[number] = inputs(number)
            return self.inputs[number]

        for stage in self.stages:
            stage.inputs = prepare
        ignored = torch.empty(runs, device=self.mesh.device)
        losses: list[torch.Tensor] = []
        schedule = self._schedule_of(runs)
        hidden = (ignored,) if self.stages[0].is_first else ()
        self.clock.spans.clear()  # of an earlier schedule whose times were not taken
        with self.clock.span(SCHEDULE):
            schedule.step(*hidden, target=ignored, losses=losses, return_outputs=False)
        self._add_up_tied_gradient()
        if not self.has_head:
            return torch.zeros(micro_batches, device=self.mesh.device)
        return torch.stack(losses[:micro_batches]).detach()

    @torch.no_grad()
    def forward(self, micro_batches: int, inputs: Callable[[int], Inputs]) -> list[torch.Tensor]:
        """Returns the output of the head for each micro-batch, without gradients; zeros [tokens] on
        ranks without the head.

        All ranks of the pipeline and of the domain must call it with the same number. Micro-batches
        run through all stages one after the other; with one stage per rank they overlap. In this
        order no rank sends a message alone that another one does not receive next; with stages in
        the outer loop, two ranks of several chunks would wait for each other on NCCL. No more than
        two outputs are kept until they are sent.
        """
        every_input = [inputs(number) for number in range(micro_batches)]
        for stage in self.stages:
            stage.inputs = every_input.__getitem__
        scores = [torch.zeros(len(one.tokens), device=self.mesh.device) for one in every_input]
        place = self.mesh.pipeline_rank
        ranks = self.pipeline.ranks
        before, after = (
            dist.get_global_rank(self.group, (place + step) % ranks) for step in (-1, 1)
        )
        sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

        def wait_for_sent(left: int) -> None:
            while len(sent) > left:
                work, _ = sent.popleft()
                if work is not None:
                    work.wait()

        for number, stage in itertools.product(range(micro_batches), self.stages):
            hidden = self.hidden(self.mesh.device)
            if not stage.is_first:
                dist.recv(hidden, before, group=self.group)
            stage.micro_batch = number
            wait_for_sent(1)
            out = stage(hidden)
            if stage.is_last:
                scores[number] = out
            else:
                sent.append((dist.isend(out, after, group=self.group), out))
        wait_for_sent(0)
        return scores

    def hidden(self, device: torch.device) -> torch.Tensor:
        """Returns an empty buffer for the hidden states of a micro-batch, or their gradients,
        between stages."""
        return torch.empty(
            self.wire_rows, self.model.spec.hidden_size, dtype=self.dtype, device=device
        )

    def _schedule_of(self, runs: int) -> Any:
        """Returns the schedule for `runs` micro-batches; cached until the number changes."""
        if self._schedule is None or self._schedule[0] != runs:
            hidden = self.hidden(torch.device("meta")).requires_grad_()
            ignored = torch.empty(1, device="meta")
            loss = torch.empty(
                (),
                dtype=torch.promote_types(self.dtype, torch.float32),
                device="meta",
                requires_grad=True,
            )
            stages = [
                _WatchedStage(
                    self,
                    stage,
                    input_args=ignored if stage.is_first else hidden,
                    output_args=loss if stage.is_last else hidden,
                )
                for stage in self.stages
            ]
            # The last stage computes the loss itself.
            options: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
            made: ScheduleInterleaved1F1B | Schedule1F1B
            if self.pipeline.chunks > 1:
                made = ScheduleInterleaved1F1B([*stages], runs, **options)
            else:
                made = Schedule1F1B(stages[0], runs, **options)
            self._schedule = runs, made
        return self._schedule[1]

    @torch.no_grad()
    def _add_up_tied_gradient(self) -> None:
        """Sums the gradients of a tied embedding over the first and the last stage, which both have
        it."""
        if self.mesh.ends is None or not self.model.spec.tie_word_embeddings:
            return
        gradient = self.model.embed_tokens.weight.grad
        assert isinstance(gradient, DTensor)
        # NCCL cannot sum in host memory, where offloaded gradients are.
        total = gradient.to_local().to(self.mesh.device)
        dist.all_reduce(total, group=self.mesh.ends)
        gradient.to_local().copy_(total)


class _WatchedStage(LeanStage):
    """A stage that measures its compute time, and records its position for error messages."""

    def __init__(self, run: PipelineRun, stage: Stage, **examples: torch.Tensor) -> None:
        super().__init__(
            run.hidden,
            stage,
            stage.index,
            run.pipeline.stages,
            run.mesh.device,
            group=run.group,
            **examples,
        )
        self.run = run
        self.stage = stage

    @contextmanager
    def _watch(self, micro_batch: int, what: str) -> Iterator[None]:
        self.run.last = micro_batch, self.stage_index, what
        with self.run.clock.span(COMPUTE):
            name = self.stage.inputs(micro_batch).name
            with record_function(f"stage {self.stage_index}, {what}, {name}"):
                yield

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        self.stage.micro_batch = fwd_chunk_id
        with self._watch(fwd_chunk_id, "forward pass"):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        with self._watch(bwd_chunk_id, "backward pass"):
            super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
            accumulate_gradients(self.stage)
