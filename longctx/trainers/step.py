"""A step of all ranks: their documents are counted together, planned, and sent to the ranks that
hold them."""

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.data.packing import MicroBatch, fill, with_source
from longctx.hf.attention import model_inputs, row
from longctx.planning.cost.tower import TowerSpeed
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan
from longctx.trainers.agreement import end_all, raise_on_all, said_by, text_of
from longctx.trainers.chunked_loss import ChunkedLoss
from longctx.trainers.documents import Document
from longctx.trainers.exchange import Known, RowExchange
from longctx.trainers.image_shares import WithImages, blocks_of, read_images, share_images
from longctx.trainers.images import exchange_pixels
from longctx.trainers.noise import Noise
from longctx.trainers.refusals import TrainerError
from longctx.trainers.router_loss import RouterLoss, without_router_loss
from longctx.training.objectives.loss import rows_with_labels

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """This rank's share of a step.

    Attributes:
        micro_batches: documents and parts of documents of this rank, for every micro-batch of the
            plan.
        micro_batch_targets: number of targets of every micro-batch, over all ranks.
        targets, tokens: numbers of targets and tokens of the step, over all ranks. Tokens count
            documents without a target.
        batches: number of batches that the rank with most batches has.
        read: tokens of this rank's batches, or of their sources.
        exchange: how rows travel; None without documents.
        plan: the plan; None without documents.
    """

    micro_batches: Sequence[MicroBatch] = ()
    micro_batch_targets: Sequence[int] = ()
    targets: int = 0
    tokens: int = 0
    batches: int = 0
    read: int = 0
    exchange: RowExchange | None = None
    plan: Plan | None = None


@dataclass
class Sharing:
    """Shares steps over ranks: what dynamic context parallelism adds to a trainer.

    Attributes:
        profile, tokens_per_rank, mode, degree, parts: see `make_plan`.
        kernel, device: of attention.
        group: ranks that share steps, for rings and values; None for one process.
        ids_group: the same ranks, for lengths and token ids, which travel between CPUs while models
            run.
        across: another group of them, for messages of rings between nodes; None on one node.
        plans: the last plans, for reports.
        undo: what `restore` closes.
        vision: the model of transformers, if it reads images.
        tower: its encoder, whose work is planned, too.
        seq2seq: the model of transformers, if it is an encoder-decoder.
        predicts_masked: whether the model is an encoder, whose labels are the masked tokens
            themselves.
        router_loss: that of a mixture, if its model is to have it.
        chunked_loss: that of a model whose loss needs no logits.
        noise: random numbers of its dropout and of NEFTune, if it has one of them.
    """

    profile: HardwareProfile
    tokens_per_rank: int
    mode: str
    degree: int | None
    kernel: str
    device: torch.device
    group: dist.ProcessGroup | None = None
    ids_group: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    plans: deque[Plan] = field(default_factory=lambda: deque(maxlen=100))
    undo: ExitStack = field(default_factory=ExitStack)
    vision: Any = None
    tower: TowerSpeed | None = None
    seq2seq: Any = None
    parts: PartCosts = EQUAL_PARTS
    predicts_masked: bool = False
    router_loss: RouterLoss | None = None
    chunked_loss: ChunkedLoss | None = None
    noise: Noise | None = None

    def __post_init__(self) -> None:
        # One thread, so that all ranks share in the same order.
        self._thread = ThreadPoolExecutor(1, "longctx-share")
        self.undo.callback(self._thread.shutdown)

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def start(self, *given: Any, **named: Any) -> Future[Share]:
        """Begins `share` in a thread."""
        return self._thread.submit(self.share, *given, **named)

    def end_all(self, error: Exception | None) -> None:
        """Raises an error of one rank on all ranks, after what is being shared. Collective."""
        self._thread.submit(end_all, error, self.ids_group).result()

    def share(
        self,
        batches: Sequence[Sequence[Document]],
        every: bool = False,
        failed: Exception | None = None,
    ) -> Share:
        """Returns this rank's share of the documents that all ranks have in their batches.
        Collective.

        Documents without a target are left out, unless `every` document is needed, as for the loss
        of routers. `failed`: what was raised in place of this rank's batches; all ranks raise an
        error then.
        """
        known = self._gather(batches, failed)
        everything = list(itertools.chain.from_iterable(known))
        if not everything:
            return Share(batches=len(known))
        every = every or self.router_loss is not None
        planned = [document for document in everything if every or document.targets] or everything[
            :1
        ]
        plan = self._plan(planned)
        mine = list(itertools.chain.from_iterable(batches))
        exchange, filled = self._micro_batches(plan, planned, mine)
        return Share(
            micro_batches=self._with_images(plan, planned, mine, filled),
            micro_batch_targets=[
                sum(planned[placed.document].targets for placed in each)
                for each in plan.micro_batches
            ],
            targets=sum(document.targets for document in planned),
            tokens=sum(document.length for document in everything),
            batches=len(known),
            read=sum(
                len(document.tokens if document.source is None else document.source)
                for document in mine
            ),
            exchange=exchange,
            plan=plan,
        )

    def _micro_batches(
        self, plan: Plan, planned: Sequence[Known], mine: Sequence[Document]
    ) -> tuple[RowExchange, list[MicroBatch]]:
        """Returns how rows travel, or those of targets, and this rank's micro-batches.
        Collective."""
        written = [np.stack([document.tokens, document.labels], 1) for document in mine]
        numbers = range(len(plan.micro_batches))
        if self.seq2seq is None:
            layouts = [
                [plan.layout(number, rank) for number in numbers] for rank in range(self.ranks)
            ]
            return self._filled(layouts, planned, written)
        cross = [
            [plan.cross_layout(number, rank) for number in numbers] for rank in range(self.ranks)
        ]
        exchange, targets = self._filled(
            [[each.targets for each in of_rank] for of_rank in cross], planned, written
        )
        read = [
            np.stack([document.source] * 2, 1) for document in mine if document.source is not None
        ]
        _, sources = self._filled(
            [[each.sources for each in of_rank] for of_rank in cross], planned, read
        )
        hidden = {
            number: document.hidden for number, document in enumerate(planned) if document.hidden
        }
        parts = zip(targets, sources, cross[self.rank], strict=True)
        return exchange, [
            with_source(target, source, each, hidden=hidden) for target, source, each in parts
        ]

    def _filled(
        self,
        layouts: Sequence[Sequence[Layout]],
        planned: Sequence[Known],
        drawn: Sequence[npt.NDArray[Any]],
    ) -> tuple[RowExchange, list[MicroBatch]]:
        """Sends drawn rows to their holders. Returns the exchange, and this rank's micro-batches.
        Collective.

        `layouts` are those of every rank, `drawn` the tokens and labels [tokens, 2] of this rank's
        documents.
        """
        exchange = RowExchange.of(layouts, planned, self.rank, list(map(len, drawn)))
        rows = np.concatenate([np.empty((0, 2), np.int64), *drawn]).astype(np.int64)
        held = exchange.to_holders(torch.from_numpy(rows), self.ids_group).numpy()

        def read(document: int, start: int, stop: int) -> tuple[Ids, Ids]:
            at = exchange.places[document, start]
            return held[at : at + stop - start, 0], held[at : at + stop - start, 1]

        return exchange, [fill(layout, read) for layout in layouts[self.rank]]

    def _with_images(
        self,
        plan: Plan,
        planned: Sequence[Known],
        mine: Sequence[Document],
        micro_batches: list[MicroBatch],
    ) -> list[MicroBatch]:
        """Returns the micro-batches with their images, whose pixels travel to the ranks that encode
        them. Collective."""
        places = {
            number: document.places for number, document in enumerate(planned) if document.places
        }
        if not places:
            return micro_batches
        own = {
            number: document.images
            for number, document in enumerate(mine)
            if document.images is not None
        }
        read = exchange_pixels(self.vision, plan, planned, own, self.rank, self.ids_group)
        shares = [share_images(plan, each.layout, places, read) for each in micro_batches]
        pairs = zip(micro_batches, shares, strict=True)
        return [
            each if share is None else WithImages(**vars(each), images=share)
            for each, share in pairs
        ]

    def inputs(self, model: Any, batch: MicroBatch, call: int = 0) -> dict[str, Any]:
        """Returns the arguments of a model's forward with labels, whose number trainers divide by
        themselves."""
        blocks = blocks_of(batch, self.vision)
        targets = None if self.predicts_masked else 1
        options: dict[str, Any] = {
            "group": self.group,
            "kernel": self.kernel,
            "device": self.device,
            "blocks": blocks,
        }
        if self.profile.exchange_levels == 2:
            options |= {"ranks_per_node": self.profile.ranks_per_node, "across": self.across}
        with without_router_loss(
            next(module for module in model.modules() if hasattr(module, "get_input_embeddings"))
        ):
            inputs = model_inputs(model, batch, targets, **options)
        if self.predicts_masked:
            inputs["labels"] = copy_to(batch.labels, self.device).unsqueeze(0)
        inputs.pop("num_items_in_batch", None)
        if self.router_loss is not None:
            self.router_loss.rows = batch.layout.tokens
        if self.chunked_loss is not None:
            rows = rows_with_labels(batch.labels)
            self.chunked_loss.rows = None if rows is None else copy_to(rows, self.device)
        if self.noise is not None and model.training:
            self.noise.begin(batch.layout, call)
        if isinstance(batch, WithImages):
            inputs["images"], positions = read_images(batch, self.vision, self.group, self.device)
            inputs["position_ids"] = row(positions)
        return inputs

    def rows_of_batch(
        self,
        share: Share,
        values: Sequence[torch.Tensor],
        mask: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns values of the tokens of this rank's batch, [*mask.shape, ..]; 0 where no token is
        kept. Collective. The mask is in host memory, or the host waits.

        `values` are those of the share's micro-batches, [tokens, ..] each, in which padding comes
        last. Differentiable. `rows` are those of the batch's tokens in this rank's documents, one
        after the other; None: the same.
        """
        assert share.exchange is not None  # a batch has a document
        counts = [batch.layout.tokens for batch in share.micro_batches]
        held = torch.cat([of_batch[:count] for of_batch, count in zip(values, counts, strict=True)])
        own = share.exchange.to_owners(held, self.group)
        own = own if rows is None else own[copy_to(rows, own.device)]
        places = torch.nonzero(mask.cpu())[: len(own)]  # rows without documents come last
        row, place = copy_to(places.T.contiguous(), own.device)
        return own.new_zeros(*mask.shape, *own.shape[1:]).index_put((row, place), own)

    def _gather(
        self, batches: Sequence[Sequence[Document]], failed: Exception | None
    ) -> list[list[Known]]:
        """Returns the documents of all ranks, by batch, in the order in which one process would
        draw them."""
        sizes = [[_sizes(document) for document in batch] for batch in batches]
        told: list[Any] = [(sizes, text_of(failed))]
        if self.ids_group is not None:
            dist.all_gather_object(told := told * self.ranks, told[0], group=self.ids_group)
        gathered, texts = zip(*told, strict=True)
        raise_on_all(texts, failed)
        numbers = [itertools.count() for _ in gathered]
        turns = itertools.zip_longest(*gathered, fillvalue=())
        return [
            [
                Known(rank, next(numbers[rank]), *size)
                for rank, batch in enumerate(turn)
                for size in batch
            ]
            for turn in turns
        ]

    def _plan(self, documents: Sequence[Known]) -> Plan:
        try:
            plan = make_plan(
                [document.length for document in documents],
                trees={
                    number: document.tree
                    for number, document in enumerate(documents)
                    if document.tree is not None
                },
                sources=[] if self.seq2seq is None else [document.source for document in documents],
                parts=self.parts,
                ranks=self.ranks,
                tokens_per_rank=self.tokens_per_rank,
                profile=self.profile,
                mode=self.mode,
                degree=self.degree,
                images={
                    n: [place[1:3] for place in known.places]
                    for n, known in enumerate(documents)
                    if known.places
                },
                tower=self.tower,
            )
        except PlanError as error:
            refused = TrainerError(
                f"{error}; or shorten the documents, as SFTConfig's max_length does"
            )
            raise (refused if self.group is None else said_by(0, refused)) from error
        self.plans.append(plan)
        return plan


def _sizes(document: Document) -> tuple[Any, ...]:
    """Returns what other ranks know of a document."""
    of_images = (
        ((), None) if document.images is None else (document.images.places, document.images.kind)
    )
    source = 0 if document.source is None else len(document.source)
    return (
        source + len(document.tokens),
        document.targets,
        document.tree,
        *of_images,
        source,
        document.hidden,
    )
