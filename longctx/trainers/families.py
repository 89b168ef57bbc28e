"""Families of models: how a collated batch becomes documents, and this rank's documents the
arguments of a model's forward.

There is a class for each family. To add one, write a class with what differs from `Causal`, and
choose it in `family_of_model`, by a trait of the model (`kinds.Traits`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.data.diffusion import Noise, weighted_by_trees
from longctx.data.packing import Ids, MicroBatch, fill, with_source
from longctx.hf.attention import model_inputs, row
from longctx.hf.indexed import indexers
from longctx.hf.vision import weights_of_images
from longctx.planning.cost.tower import TowerSpeed
from longctx.planning.layout import Layout, Span
from longctx.planning.parts import PartCosts
from longctx.planning.plan import Plan
from longctx.trainers.budget import Workload
from longctx.trainers.diffusion import for_evaluation, with_noise
from longctx.trainers.documents import (
    DOCUMENTS_IN_ROWS,
    SEGMENTS,
    CountingRows,
    Document,
    cut_rows,
    refuse_segments,
    rows_of_examples,
)
from longctx.trainers.exchange import DocumentInfo, RowExchange
from longctx.trainers.image_shares import WithImages, blocks_of, read_images, share_images
from longctx.trainers.images import (
    PIXELS,
    exchange_pixels,
    fields_of_images,
    images_of_rows,
    reading_images,
)
from longctx.trainers.kinds import Traits
from longctx.trainers.pairs import WatchingTargets, columns_of, rows_of_pairs, sharded_with_head
from longctx.trainers.prepared import replaced_method
from longctx.trainers.refusals import NO_ROUTER_LOSS, UNSUPPORTED, TrainerError

Collate = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class AttentionOptions:
    """Arguments of `model_inputs` that are the same for all micro-batches.

    Attributes:
        device: device of the model.
        kernel: kernel of attention, see `ring_attention`.
        group: all ranks; None for one process.
        ranks_per_node: ranks of a node, if K and V travel between nodes first.
        across: another group of all ranks, for messages between nodes; None on one node.
    """

    device: torch.device
    kernel: str = "auto"
    group: dist.ProcessGroup | None = None
    ranks_per_node: int | None = None
    across: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class PlannedRows:
    """The documents of a planned step, whose rows are to be exchanged.

    Attributes:
        plan: plan of the step.
        documents: the plan's documents.
        mine: documents that this rank has drawn, planned or not.
        rank: this rank.
        group: group of all ranks that exchanges tensors of the CPU; None for one process.
    """

    plan: Plan
    documents: Sequence[DocumentInfo]
    mine: Sequence[Document]
    rank: int
    group: dist.ProcessGroup | None

    def targets(self) -> list[npt.NDArray[Any]]:
        """Returns token ids and labels [tokens, 2] of this rank's documents."""
        return [np.stack([document.tokens, document.labels], axis=1) for document in self.mine]

    def exchange(
        self, rows: Sequence[npt.NDArray[Any]], layout_of: Callable[[int, int], Layout]
    ) -> tuple[RowExchange, list[MicroBatch]]:
        """Sends rows to the ranks that hold them. Collective.

        Args:
            rows: token ids and labels [tokens, 2] of the documents that this rank has drawn.
            layout_of: returns the layout of a micro-batch on a rank, given both numbers.

        Returns the exchange, and this rank's micro-batches.
        """
        micro_batches = range(len(self.plan.micro_batches))
        layouts = []
        for rank in range(self.plan.ranks):
            layouts.append([layout_of(micro_batch, rank) for micro_batch in micro_batches])
        lengths = [len(document_rows) for document_rows in rows]
        exchange = RowExchange.of(layouts, self.documents, rank=self.rank, lengths=lengths)
        drawn = np.concatenate([np.empty((0, 2), np.int64), *rows]).astype(np.int64)
        held = exchange.to_holders(torch.from_numpy(drawn), self.group).numpy()

        def read(document: int, start: int, stop: int) -> tuple[Ids, Ids]:
            first = exchange.places[document, start]
            span = held[first : first + stop - start]
            return span[:, 0], span[:, 1]

        return exchange, [fill(layout, read) for layout in layouts[self.rank]]


class Causal:
    """Causal language models, and what all families have in common.

    Attributes:
        model: the model of transformers, inside the trainer's model and its adapters.
        fields: names of the fields of a batch that the family reads besides tokens and labels.
        token_field: the field whose tokens get logits where a batch has no labels.
        labels_in_place: whether a label stands in the place of its token, so that the trainer's
            own loss, which would shift them, is not used.
        drops_padded_labels: whether labels on padding, which plain training counts, are dropped.
        length_fields: columns of a data set that make up a document.
        merges_prefixes: whether sequences with a common prefix can be computed as a tree.
        last_token_is_found: whether a head that classifies rows looks for their last token.
    """

    fields: tuple[str, ...] = ()
    token_field = "input_ids"
    labels_in_place = False
    drops_padded_labels = True
    length_fields: tuple[str, ...] = ("input_ids",)
    merges_prefixes = True
    last_token_is_found = True

    def __init__(self, model: Any = None) -> None:
        self.model = model
        if model is not None and indexers(model):
            self.merges_prefixes = False  # they select keys by their place in one sequence

    @classmethod
    def of(cls, model: Any, workload: Workload) -> "Causal":
        """Returns the family for a model, whose tokens cost what a workload says."""
        return cls(model)

    @staticmethod
    def problems(traits: Traits) -> Iterator[str]:
        """Yields why a trainer with a model of this family would not be exact."""
        yield from _sum_problems(traits)
        if traits.model.base_model is traits.model and not traits.has_own_loss:
            yield (
                f"{type(traits.model).__name__} has no head, and so no loss: use a model with one, "
                "such as those for causal language models"
            )

    def watched(self, collate: Collate) -> Collate:
        """Wraps a data collator: the batch tells what `rows_of` needs to know of its examples."""
        return CountingRows(collate)

    def used_by(self, models: Sequence[Any], *, sharded: bool) -> AbstractContextManager[Any]:
        """Replaces what models need to read batches of this family. `sharded`: by FSDP2."""
        return nullcontext()

    def rows_of(self, batch: Mapping[str, Any], training: bool = True) -> list[list[Document]]:
        """Returns the documents of every row, or of every example, that a batch was collated from.

        Raises TrainerError for what would be lost.
        """
        return rows_of_examples(cut_rows(batch), batch.get(DOCUMENTS_IN_ROWS))

    def kept(
        self, batch: Mapping[str, Any], rows: Sequence[Sequence[Document]], targets: torch.Tensor
    ) -> torch.Tensor:
        """Returns a mask of the columns [rows, tokens] that are in documents.

        `rows` are the documents of the batch, `targets` its labels [rows, tokens].
        """
        mask: torch.Tensor | None = batch.get("attention_mask")
        return torch.ones_like(batch["input_ids"]) if mask is None else mask

    def costs(self, documents: Sequence[DocumentInfo]) -> dict[str, Any]:
        """Returns arguments of `make_plan`: what it needs to know of documents but lengths."""
        trees = {}
        for index, document in enumerate(documents):
            if document.tree is not None:
                trees[index] = document.tree
        return {"trees": trees}

    def micro_batches(self, planned: PlannedRows) -> tuple[RowExchange, list[MicroBatch]]:
        """Returns the exchange of rows (of targets, for an encoder-decoder) and this rank's
        micro-batches. Collective."""
        return planned.exchange(planned.targets(), planned.plan.layout)

    def inputs(self, model: Any, batch: MicroBatch, options: AttentionOptions) -> dict[str, Any]:
        """Returns the arguments of a model's forward, with labels."""
        return model_inputs(model, batch, 1, **vars(options))


class Encoder(Causal):
    """Encoders: tokens see later ones, and a label is that of its own token."""

    fields = (SEGMENTS,)
    labels_in_place = True
    drops_padded_labels = False
    merges_prefixes = False
    last_token_is_found = False

    @staticmethod
    def problems(traits: Traits) -> Iterator[str]:
        if traits.trl_class:
            yield (
                f"{traits.trl_class} trains causal models, but the model is an encoder: use "
                "transformers.Trainer with a collator that masks"
            )

    def rows_of(self, batch: Mapping[str, Any], training: bool = True) -> list[list[Document]]:
        refuse_segments(batch)
        rows = cut_rows(batch, more_fields=self.fields, labels_in_place=True)
        return rows_of_examples(rows, batch.get(DOCUMENTS_IN_ROWS))

    def inputs(self, model: Any, batch: MicroBatch, options: AttentionOptions) -> dict[str, Any]:
        inputs = model_inputs(model, batch, **vars(options))
        inputs["labels"] = copy_to(batch.labels, options.device).unsqueeze(0)
        return inputs


class BlockDiffusion(Causal):
    """Causal models that learn block diffusion: documents are trees of clean and noisy blocks, and
    a label is that of its own token.

    Attributes:
        traits: the trainer, which knows the epoch, and its collator, which knows the noise.
    """

    labels_in_place = True
    drops_padded_labels = False
    merges_prefixes = False

    def __init__(self, traits: Traits) -> None:
        super().__init__(traits.model)
        self.traits = traits
        self.noise: Noise = traits.trainer.data_collator.noise

    @staticmethod
    def problems(traits: Traits) -> Iterator[str]:
        """Yields why block diffusion would not be exact."""
        if traits.trl_class or traits.kind != "step":
            yield (
                f"{type(traits.trainer).__name__} has a loss of its own, but the data collator "
                "asks for block diffusion: use transformers.Trainer and a causal model of text"
            )
        if traits.encoder or traits.encoder_decoder or traits.images or indexers(traits.model):
            yield (
                f"{type(traits.model).__name__} is no causal model of text that sees all keys, as "
                "block diffusion needs: use such a model"
            )
        if traits.args.label_smoothing_factor:
            yield UNSUPPORTED.format("label_smoothing_factor", traits.args.label_smoothing_factor)
        if traits.balances:
            yield NO_ROUTER_LOSS.format(type(traits.args).__name__)
        if traits.noisy:
            yield (
                "dropout and NEFTune go by the place of a token in its document, which noisy "
                "blocks share with clean ones: omit them"
            )

    def watched(self, collate: Collate) -> Collate:
        return CountingRows(self.traits.trainer.data_collator.collate)

    def rows_of(self, batch: Mapping[str, Any], training: bool = True) -> list[list[Document]]:
        rows = cut_rows(batch, labels_in_place=True)
        noise = self.noise if training else for_evaluation(self.noise)
        epoch = int(self.traits.trainer.state.epoch or 0) if training else 0
        noisy = list[list[Document]]()
        for documents in rows_of_examples(rows, batch.get(DOCUMENTS_IN_ROWS)):
            noisy.append([with_noise(document, noise, epoch) for document in documents])
        return noisy

    def kept(
        self, batch: Mapping[str, Any], rows: Sequence[Sequence[Document]], targets: torch.Tensor
    ) -> torch.Tensor:
        raise TrainerError(
            "rows with noise have no predictions: evaluate the loss alone, without compute_metrics "
            "and with prediction_loss_only=True"
        )

    def micro_batches(self, planned: PlannedRows) -> tuple[RowExchange, list[MicroBatch]]:
        exchange, micro_batches = super().micro_batches(planned)
        return exchange, list(map(weighted_by_trees, micro_batches))

    def inputs(self, model: Any, batch: MicroBatch, options: AttentionOptions) -> dict[str, Any]:
        inputs = model_inputs(model, batch, **vars(options))
        assert batch.weights is not None
        inputs["labels"] = copy_to(batch.labels, options.device).unsqueeze(0)
        inputs["loss_weights"] = copy_to(batch.weights, options.device)
        return inputs


class Pairs(Causal):
    """Encoder-decoders: a document is a source and a target, each split by its own length.

    Attributes:
        parts: what tokens of sources and of targets cost.
    """

    token_field = "decoder_input_ids"
    drops_padded_labels = False
    length_fields = ("input_ids", "labels")

    def __init__(self, model: Any, parts: PartCosts) -> None:
        super().__init__(model)
        self.parts = parts

    @classmethod
    def of(cls, model: Any, workload: Workload) -> Causal:
        return cls(model, workload.spec.parts)

    @staticmethod
    def problems(traits: Traits) -> Iterator[str]:
        yield from _sum_problems(traits)
        if traits.trl_class:
            yield (
                f"{traits.trl_class} makes batches without sources, but the model is an "
                "encoder-decoder: use Seq2SeqTrainer"
            )
        elif traits.args.label_smoothing_factor:
            yield UNSUPPORTED.format("label_smoothing_factor", traits.args.label_smoothing_factor)
        if traits.noisy:
            yield (
                "the model is an encoder-decoder, whose dropout and NEFTune would depend on how "
                "documents are split: omit them"
            )

    def watched(self, collate: Collate) -> Collate:
        return WatchingTargets(collate)

    def used_by(self, models: Sequence[Any], *, sharded: bool) -> AbstractContextManager[Any]:
        return sharded_with_head(self.model) if sharded else nullcontext()

    def rows_of(self, batch: Mapping[str, Any], training: bool = True) -> list[list[Document]]:
        return rows_of_pairs(batch, self.model, training)

    def kept(
        self, batch: Mapping[str, Any], rows: Sequence[Sequence[Document]], targets: torch.Tensor
    ) -> torch.Tensor:
        return columns_of(rows, targets)

    def costs(self, documents: Sequence[DocumentInfo]) -> dict[str, Any]:
        return {"sources": [document.source for document in documents], "parts": self.parts}

    def micro_batches(self, planned: PlannedRows) -> tuple[RowExchange, list[MicroBatch]]:
        plan = planned.plan

        def target_layout(micro_batch: int, rank: int) -> Layout:
            return plan.cross_layout(micro_batch, rank).targets

        def source_layout(micro_batch: int, rank: int) -> Layout:
            return plan.cross_layout(micro_batch, rank).sources

        source_rows = []
        for document in planned.mine:
            if document.source is not None:
                source_rows.append(np.stack([document.source, document.source], axis=1))
        exchange, targets = planned.exchange(planned.targets(), target_layout)
        _, sources = planned.exchange(source_rows, source_layout)
        hidden: dict[int, Sequence[Span]] = {}
        for index, info in enumerate(planned.documents):
            if info.hidden:
                hidden[index] = info.hidden
        micro_batches = []
        for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
            cross = plan.cross_layout(number, planned.rank)
            micro_batches.append(with_source(target, source, cross, hidden=hidden))
        return exchange, micro_batches


class Vision(Causal):
    """Models that read images and videos, whose pixels travel to the ranks that encode them.

    Attributes:
        tower: encoder of images, whose work is planned, too; None: it takes no time.
    """

    def __init__(self, model: Any, tower: TowerSpeed | None) -> None:
        super().__init__(model)
        self.fields = fields_of_images(model)
        self.tower = tower

    @classmethod
    def of(cls, model: Any, workload: Workload) -> Causal:
        return cls(model, workload.tower)

    @staticmethod
    def problems(traits: Traits) -> Iterator[str]:
        yield from Causal.problems(traits)
        if traits.balances and traits.kind != "hidden_states":
            yield NO_ROUTER_LOSS.format(type(traits.args).__name__)
        trains_tower = any(weight.requires_grad for weight in weights_of_images(traits.model))
        if trains_tower and traits.uses_ddp and not traits.finds_unused:
            yield (
                "ddp_find_unused_parameters is off, but documents without images give the encoder "
                "of images no gradient: set it to True, with "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or freeze the encoder"
            )

    @contextmanager
    def used_by(self, models: Sequence[Any], *, sharded: bool) -> Iterator[None]:
        with ExitStack() as undo:
            for model in models:
                undo.enter_context(replaced_method(model, "forward", reading_images))
            yield

    def rows_of(self, batch: Mapping[str, Any], training: bool = True) -> list[list[Document]]:
        """Returns one document for every row of a batch with images or videos."""
        rows = cut_rows(batch, more_fields=self.fields)
        if all(batch.get(name) is None for name in PIXELS):
            return rows_of_examples(rows, batch.get(DOCUMENTS_IN_ROWS))
        if batch.get("position_ids") is not None or DOCUMENTS_IN_ROWS in batch:
            raise TrainerError(
                "a batch has images or videos and packed rows: leave out packing, padding_free and "
                "position_ids"
            )
        documents = [document for documents_of_row in rows for document in documents_of_row]
        images = images_of_rows(self.model, batch, [document.tokens for document in documents])
        remaining = iter(images)
        rows_with_images = []
        for documents_of_row in rows:
            shown = [replace(each, images=next(remaining)) for each in documents_of_row]
            rows_with_images.append(shown)
        return rows_with_images

    def costs(self, documents: Sequence[DocumentInfo]) -> dict[str, Any]:
        images = {}
        for index, document in enumerate(documents):
            if document.places:
                images[index] = [(place.tokens, place.grid) for place in document.places]
        return {**super().costs(documents), "images": images, "tower": self.tower}

    def micro_batches(self, planned: PlannedRows) -> tuple[RowExchange, list[MicroBatch]]:
        exchange, micro_batches = super().micro_batches(planned)
        places = {}
        for index, info in enumerate(planned.documents):
            if info.places:
                places[index] = info.places
        if not places:
            return exchange, micro_batches
        own = {}
        for index, document in enumerate(planned.mine):
            if document.images is not None:
                own[index] = document.images
        read = exchange_pixels(
            self.model,
            planned.plan,
            documents=planned.documents,
            own=own,
            rank=planned.rank,
            group=planned.group,
        )
        with_images = []
        for batch in micro_batches:
            images = share_images(planned.plan, batch.layout, places=places, read=read)
            if images is None:
                with_images.append(batch)
            else:
                with_images.append(WithImages(**vars(batch), images=images))
        return exchange, with_images

    def inputs(self, model: Any, batch: MicroBatch, options: AttentionOptions) -> dict[str, Any]:
        blocks = blocks_of(batch, self.model)
        inputs = model_inputs(model, batch, 1, blocks=blocks, **vars(options))
        if isinstance(batch, WithImages):
            images, positions = read_images(
                batch, self.model, group=options.group, device=options.device
            )
            inputs["images"] = images
            inputs["position_ids"] = row(positions)
        return inputs


def _sum_problems(traits: Traits) -> Iterator[str]:
    """Yields why the loss of a step cannot be a sum over its tokens."""
    sums = traits.trainer.model_accepts_loss_kwargs or traits.kind != "step"
    if not sums and not traits.means_of_batches:
        yield (
            f"the forward of {type(traits.trainer.model).__name__} takes no num_items_in_batch: "
            "use a causal model of transformers"
        )


def family_of_model(traits: Traits) -> type[Causal]:
    """Returns the family of a trainer's whole model."""
    if traits.diffusion:
        return BlockDiffusion
    if traits.masked:
        return Encoder
    if traits.encoder_decoder:
        return Pairs
    return Vision if traits.images else Causal


def family_of(traits: Traits, workload: Workload) -> Causal:
    """Returns the family of the models whose calls are planned.

    Where the loss needs hidden states, this is the base model alone, which reads tokens.
    """
    if traits.diffusion:
        return BlockDiffusion(traits)
    if traits.kind != "hidden_states":
        return family_of_model(traits).of(traits.model, workload)
    base_family = Encoder if traits.encoder else Causal
    return base_family(traits.model)
