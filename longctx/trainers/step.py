"""A step of all ranks: their documents are counted together, planned, and sent to the ranks that hold them."""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch, fill
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Shard, Span
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan
from longctx.trainers.documents import Document
from longctx.trainers.refusals import TrainerError

TokensAndLabels = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
NOTHING: TokensAndLabels = np.empty(0, np.int64), np.empty(0, np.int64)


@dataclass(frozen=True)
class Share:
    """This rank's share of a step.

    Attributes:
        micro_batches: documents and parts of documents of this rank, for every micro-batch of the plan.
        micro_batch_targets: number of targets of every micro-batch, over all ranks.
        targets, tokens: numbers of targets and tokens of the step, over all ranks. Tokens count documents without a target,
            which are not trained.
        batches: number of batches that the rank with most batches has.
        plan: the plan; None without documents.
        documents: the documents of the plan.
    """

    micro_batches: Sequence[MicroBatch] = ()
    micro_batch_targets: Sequence[int] = ()
    targets: int = 0
    tokens: int = 0
    batches: int = 0
    plan: Plan | None = None
    documents: Sequence["Known"] = ()


@dataclass(frozen=True)
class Known:
    """What all ranks know of a document: its place and sizes."""

    rank: int
    number: int  # among the documents of its rank
    length: int
    targets: int


@dataclass
class Sharing:
    """Shares steps over the ranks of a group.

    Attributes:
        profile, tokens_per_rank, mode, degree: see `make_plan`.
        group: ranks that share steps; None for one process.
        device: device of messages.
        plans: the last plans, for reports.
    """

    profile: HardwareProfile
    tokens_per_rank: int
    mode: str
    degree: int | None
    group: dist.ProcessGroup | None
    device: torch.device
    plans: deque[Plan] = field(default_factory=lambda: deque(maxlen=100))

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def share(self, batches: Sequence[Sequence[Document]]) -> Share:
        """Returns this rank's share of the documents that all ranks have in their batches. Collective."""
        known = self._gather(batches)
        everything = list(itertools.chain.from_iterable(known))
        if not everything:
            return Share(batches=len(known))
        trained = [document for document in everything if document.targets] or everything[:1]
        plan = self._plan([document.length for document in trained])
        mine = list(itertools.chain.from_iterable(batches))
        layouts = [plan.layout(index, self.rank) for index in range(len(plan.micro_batches))]
        spans = self._exchange(plan, trained, mine)

        def read(document: int, start: int, _: int) -> TokensAndLabels:
            return spans.get((document, start), NOTHING)

        return Share(
            micro_batches=[fill(layout, read) for layout in layouts],
            micro_batch_targets=[sum(trained[placed.document].targets for placed in each) for each in plan.micro_batches],
            targets=sum(document.targets for document in trained),
            tokens=sum(document.length for document in everything),
            batches=len(known),
            plan=plan,
            documents=trained,
        )

    def _gather(self, batches: Sequence[Sequence[Document]]) -> list[list[Known]]:
        """Returns the documents of all ranks, by batch, in the order in which one process would draw them."""
        sizes = [[(len(document.tokens), document.targets) for document in batch] for batch in batches]
        gathered = [sizes]
        if self.group is not None:
            gathered = [[] for _ in range(self.ranks)]
            dist.all_gather_object(gathered, sizes, group=self.group)
        numbers = [itertools.count() for _ in gathered]
        turns = itertools.zip_longest(*gathered, fillvalue=())
        return [
            [Known(rank, next(numbers[rank]), *size) for rank, batch in enumerate(turn) for size in batch] for turn in turns
        ]

    def _plan(self, lengths: list[int]) -> Plan:
        try:
            plan = make_plan(
                lengths,
                ranks=self.ranks,
                tokens_per_rank=self.tokens_per_rank,
                profile=self.profile,
                mode=self.mode,
                degree=self.degree,
            )
        except PlanError as error:
            raise TrainerError(f"{error}; or shorten the documents, as SFTConfig's max_length does") from error
        self.plans.append(plan)
        return plan

    def _exchange(
        self, plan: Plan, documents: Sequence[Known], mine: Sequence[Document]
    ) -> dict[tuple[int, int], TokensAndLabels]:
        """Returns tokens and shifted labels of this rank's spans, by document of the plan and start of the span.

        Every rank sends each other rank the spans of its own documents that the other rank holds, and nothing else.
        """
        held = [_spans(plan, rank) for rank in range(self.ranks)]
        sent = [_read(mine, documents, [span for span in spans if documents[span[0]].rank == self.rank]) for spans in held]
        expected = [[span for span in held[self.rank] if documents[span[0]].rank == rank] for rank in range(self.ranks)]
        received = torch.cat(sent).to(self.device)
        if self.group is not None:
            counts = [sum(stop - start for _, (start, stop) in spans) for spans in expected]
            sent_rows, received = received, received.new_empty(sum(counts), 2)
            dist.all_to_all_single(received, sent_rows, counts, list(map(len, sent)), group=self.group)
        rows, at, spans_read = received.cpu().numpy(), 0, {}
        for number, (start, stop) in itertools.chain.from_iterable(expected):
            spans_read[number, start] = (rows[at : at + stop - start, 0], rows[at : at + stop - start, 1])
            at += stop - start
        return spans_read


def _spans(plan: Plan, rank: int) -> list[tuple[int, Span]]:
    """Returns the spans of documents that a rank holds, in the order of its micro-batches, without empty ones."""

    def of(shard: Shard) -> list[tuple[int, Span]]:
        return [(shard.document, span) for span in (shard.head, shard.tail) if span[0] < span[1]]

    layouts = (plan.layout(index, rank) for index in range(len(plan.micro_batches)))
    return [span for layout in layouts for shard in layout.shards for span in of(shard)]


def _read(mine: Sequence[Document], documents: Sequence[Known], spans: Sequence[tuple[int, Span]]) -> torch.Tensor:
    """Returns tokens and shifted labels of spans of this rank's documents, int64 [tokens, 2]."""
    rows = [np.empty((0, 2), np.int64)]
    for number, (start, stop) in spans:
        document = mine[documents[number].number]
        labels = np.full(stop - start, IGNORED_LABEL)
        following = document.labels[start + 1 : stop + 1]
        labels[: len(following)] = following
        rows.append(np.stack([document.tokens[start:stop], labels], 1))
    return torch.from_numpy(np.concatenate(rows))
