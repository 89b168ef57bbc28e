"""A step of all ranks: their documents are counted together, planned, and sent to the ranks that
hold them."""

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.data.packing import MicroBatch
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan
from longctx.trainers.agreement import attempted, end_all, raise_on_all, said_by, text_of
from longctx.trainers.documents import Document
from longctx.trainers.exchange import DocumentInfo, RowExchange
from longctx.trainers.families import AttentionOptions, Causal, PlannedRows
from longctx.trainers.refusals import TrainerError
from longctx.trainers.riders import Rider
from longctx.trainers.router_loss import without_router_loss

PLANS_KEPT = 100


@dataclass(frozen=True)
class RankStep:
    """What one rank computes of a step.

    Attributes:
        micro_batches: documents and parts of documents of this rank, for every micro-batch of the
            plan.
        micro_batch_targets: number of targets of every micro-batch, over all ranks.
        targets: number of targets of the step, over all ranks.
        tokens: number of tokens of the step, over all ranks, also of documents without a target.
        batches: number of batches that the rank with most batches has.
        tokens_read: tokens of this rank's batches, or of their sources.
        exchange: the exchange of rows; None without documents.
        plan: the plan; None without documents.
    """

    micro_batches: Sequence[MicroBatch] = ()
    micro_batch_targets: Sequence[int] = ()
    targets: int = 0
    tokens: int = 0
    batches: int = 0
    tokens_read: int = 0
    exchange: RowExchange | None = None
    plan: Plan | None = None


@dataclass(frozen=True)
class Planning:
    """How steps are planned; see `make_plan`."""

    profile: HardwareProfile
    tokens_per_rank: int
    mode: str = "auto"
    degree: int | None = None


@dataclass
class StepExchange:
    """Plans steps and exchanges their documents between ranks: what dynamic context parallelism
    adds to a trainer.

    Attributes:
        planning: how steps are planned.
        attention: how attention runs; its group has the ranks that share steps.
        ids_group: the same ranks, for lengths, token ids and errors, which travel between CPUs
            while models run; None for one process.
        family: how batches become documents, and documents arguments of the model.
        riders: what goes along with micro-batches.
        undo: what `restore` closes.
        plans: the last plans, for reports.
    """

    planning: Planning
    attention: AttentionOptions
    ids_group: dist.ProcessGroup | None = None
    family: Causal = field(default_factory=Causal)
    riders: Sequence[Rider] = ()
    undo: ExitStack = field(default_factory=ExitStack)
    plans: deque[Plan] = field(init=False, default_factory=lambda: deque(maxlen=PLANS_KEPT))

    def __post_init__(self) -> None:
        # One thread, so that all ranks exchange steps in the same order.
        self._thread = ThreadPoolExecutor(1, "longctx-share")
        self.undo.callback(self._thread.shutdown)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Group of all ranks; None for one process."""
        return self.attention.group

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def start(self, *given: Any, **named: Any) -> Future[RankStep]:
        """Begins `plan_and_exchange` in a thread."""
        return self._thread.submit(self.plan_and_exchange, *given, **named)

    def end_all(self, error: Exception | None) -> None:
        """Raises an error of one rank on all ranks, after what is being exchanged. Collective."""
        self._thread.submit(end_all, error, self.ids_group).result()

    def plan_and_exchange(
        self,
        batches: Sequence[Sequence[Document]],
        every: bool = False,
        failed: Exception | None = None,
    ) -> RankStep:
        """Plans a step and sends its documents to the ranks that compute them. Collective.

        Args:
            batches: the documents of this rank's batches.
            every: documents without a target are planned, too.
            failed: what was raised in place of this rank's batches; all ranks then raise an error.

        Returns what this rank computes of the step.
        """
        turns = self._gathered(batches, failed)
        everything = list(itertools.chain.from_iterable(turns))
        if not everything:
            return RankStep(batches=len(turns))
        planned = everything
        if not every and not any(rider.needs_every_document for rider in self.riders):
            with_targets = [document for document in everything if document.targets]
            planned = with_targets or everything[:1]  # a plan has a document
        plan = self._plan(planned)
        mine = list(itertools.chain.from_iterable(batches))
        rows = PlannedRows(
            plan=plan, documents=planned, mine=mine, rank=self.rank, group=self.ids_group
        )
        exchange, micro_batches = self.family.micro_batches(rows)
        return RankStep(
            micro_batches=micro_batches,
            micro_batch_targets=_targets_by_micro_batch(plan, planned),
            targets=sum(document.targets for document in planned),
            tokens=sum(document.length for document in everything),
            batches=len(turns),
            tokens_read=sum(document.tokens_read for document in mine),
            exchange=exchange,
            plan=plan,
        )

    def inputs(self, model: Any, batch: MicroBatch, call: int = 0) -> dict[str, Any]:
        """Returns the arguments of a model's forward for a micro-batch, and gets all riders ready.

        They have labels, but not their number, by which trainers divide themselves. `call` is the
        number of the call of the model in its step.
        """
        with without_router_loss(_model_of_transformers(model)):
            inputs = self.family.inputs(model, batch, self.attention)
        inputs.pop("num_items_in_batch", None)
        for rider in self.riders:
            rider.begin(batch, call)
        return inputs

    def rows_of_batch(
        self, step: RankStep, values: Sequence[torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        """Returns values of the tokens of this rank's batch, [*mask.shape, ..]; 0 where no token is
        kept. Collective, differentiable.

        Args:
            step: the step that the batch was exchanged for.
            values: of the step's micro-batches, [tokens, ..] each, in which padding comes last.
            mask: 1 for tokens of documents [rows, tokens]; in host memory, or the host waits.
        """
        return placed(self.to_owners(step, values), mask)

    def to_owners(self, step: RankStep, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns values of the tokens of this rank's documents, one after the other, [tokens, ..].
        Collective, differentiable.

        Args:
            step: the step that the documents were exchanged for.
            values: of the step's micro-batches, [tokens, ..] each, in which padding comes last.
        """
        assert step.exchange is not None  # a batch has a document
        without_padding = []
        for batch, batch_values in zip(step.micro_batches, values, strict=True):
            without_padding.append(batch_values[: batch.layout.tokens])
        return step.exchange.to_owners(torch.cat(without_padding), self.group)

    def told_by_all(self, told: Any) -> list[Any]:
        """Returns what every rank tells, by rank. Collective."""
        everyone: list[Any] = [told] * self.ranks
        if self.ids_group is not None:
            dist.all_gather_object(everyone, told, group=self.ids_group)
        return everyone

    def all_agree(self, agrees: bool) -> bool:
        """Returns whether all ranks agree. Collective."""
        if self.ids_group is None:
            return agrees
        least = torch.tensor(agrees, dtype=torch.int32)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.ids_group)
        return bool(least)

    def _gathered(
        self, batches: Sequence[Sequence[Document]], failed: Exception | None
    ) -> list[list[DocumentInfo]]:
        """Returns the documents of all ranks, by batch, in the order in which one process would
        draw them. Raises an error of one rank on all. Collective."""

        def infos() -> list[list[DocumentInfo]]:
            indices = itertools.count()
            by_batch = []
            for batch in batches:
                by_batch.append([document.info(self.rank, next(indices)) for document in batch])
            return by_batch

        mine, unknown = attempted(infos, [])
        failed = failed or unknown
        everyone = self.told_by_all((mine, text_of(failed)))
        raise_on_all([text for _, text in everyone], failed)
        by_rank = [by_batch for by_batch, _ in everyone]
        turns = itertools.zip_longest(*by_rank, fillvalue=())
        return [list(itertools.chain.from_iterable(turn)) for turn in turns]

    def _plan(self, documents: Sequence[DocumentInfo]) -> Plan:
        planning = self.planning
        lengths = [document.length for document in documents]
        if self.ranks == 1 and planning.mode == "auto" and sum(lengths) <= planning.tokens_per_rank:
            planning = replace(planning, mode="static", degree=1)  # there is no other plan
        try:
            plan = make_plan(
                lengths,
                ranks=self.ranks,
                tokens_per_rank=planning.tokens_per_rank,
                profile=planning.profile,
                mode=planning.mode,
                degree=planning.degree,
                **self.family.costs(documents),
            )
        except PlanError as error:
            refused = TrainerError(
                f"{error}; or shorten the documents, as max_length does, or max_completion_length"
            )
            # All ranks plan the same.
            raise (refused if self.group is None else said_by(0, refused)) from error
        self.plans.append(plan)
        return plan


def placed(own: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns values [*mask.shape, ..] of tokens [tokens, ..], one row after the other; 0 where
    none is.

    `mask` is 1 for tokens [rows, tokens], in host memory, or the host waits.
    """
    places = torch.nonzero(mask.cpu())[: len(own)]  # rows without documents come last
    row, column = copy_to(places.T.contiguous(), own.device)
    return own.new_zeros(*mask.shape, *own.shape[1:]).index_put((row, column), own)


def _targets_by_micro_batch(plan: Plan, documents: Sequence[DocumentInfo]) -> list[int]:
    counts = []
    for micro_batch in plan.micro_batches:
        counts.append(sum(documents[placed.document].targets for placed in micro_batch))
    return counts


def _model_of_transformers(model: Any) -> Any:
    """Returns the outermost model of transformers or peft in what a trainer has wrapped."""
    return next(module for module in model.modules() if hasattr(module, "get_input_embeddings"))
