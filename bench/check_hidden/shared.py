"""Training loops on several processes, with a place for each fault: data, context, tensor and
pipeline parallelism by hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bench.check_hidden.attend import Block, Kernel, Options, layout, use
from bench.check_hidden.cases import IGNORED, Batch, Row, cast
from bench.check_hidden.loop import forward, losses_of, nothing, packed, padded, same, shifted
from longctx.check import Probe, Step, record

Index = list[torch.Tensor]  # of each rank: which columns of a whole row it has


def group() -> tuple[int, int]:
    """Returns rank and number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def total_of(number: float) -> float:
    """Returns the sum of a number over all ranks."""
    tensor = torch.tensor(float(number))
    dist.all_reduce(tensor)
    return float(tensor)


# --- gradients over ranks


def filled(model: Any) -> list[Any]:
    """Returns trained parameters, each with a gradient, zeros if backward has brought none."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    return trained


def sum_gradients(model: Any) -> None:
    for weight in filled(model):
        dist.all_reduce(weight.grad)


def nothing_between(model: Any, number: int, steps: int) -> None:
    """Changes nothing after a micro-batch."""


# --- data parallelism


def every_rank(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    return rows[rank::ranks]


def all_targets(own: float, number: int) -> float:
    return total_of(own)


@dataclass(frozen=True)
class DataLoop:
    """Each rank trains on rows of its own.

    Attributes:
        share: returns a rank's rows of a micro-batch.
        wrap: wraps the model after it is recorded.
        count: returns what the loss is divided by, from the rank's targets.
        factor: of the loss, for wrappers that take means over ranks.
        sync: makes gradients of all ranks one, after all micro-batches.
    """

    kind: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    adapt: Callable[[Any], Any] = same
    share: Callable[[list[Row], int, int], list[Row]] = every_rank
    collate: Callable[[Probe, list[Row]], Batch] = padded
    prepare: Callable[[Any], None] = nothing
    wrap: Callable[[Any], Any] = same
    forward: Callable[[Any, Batch], torch.Tensor] = forward
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = losses_of
    count: Callable[[float, int], float] = all_targets
    factor: Callable[[int], float] = float
    means: bool = False
    before: Callable[[Any, int, int], None] = nothing_between
    between: Callable[[Any, int, int], None] = nothing_between
    sync: Callable[[Any], None] = sum_gradients

    def model(self, probe: Probe) -> Any:
        model = cast(probe.model(self.kind, **self.sizes))
        return self.adapt(model)

    def step(self, probe: Probe) -> Step:
        """Returns one optimizer step on the probe's rows."""
        rank, ranks = group()
        model = self.model(probe)
        batches = []
        for number in range(probe.micro_batches):
            rows = list(probe.rows)[number :: probe.micro_batches]
            mine = self.share(rows, rank, ranks)
            if mine:
                batches.append(self.collate(probe, mine))
        wanted = [shifted(batch["labels"]) for batch in batches]
        targets = sum(int((labels != IGNORED).sum()) for labels in wanted)
        count = self.count(targets, len(batches))
        with record(model) as seen:
            self.prepare(model)
            wrapped = self.wrap(model)
            for number, batch in enumerate(batches):
                self.before(wrapped, number, len(batches))
                logits = self.forward(wrapped, batch)
                losses = self.losses(logits, wanted[number])
                loss = losses.sum() / count
                if self.means:
                    trained = (wanted[number] != IGNORED).sum().clamp(min=1)
                    loss = losses.sum() / trained / len(batches)
                (loss * self.factor(ranks)).backward()
                self.between(wrapped, number, len(batches))
            self.sync(model)
            return seen.step()


def one(ranks: int) -> float:
    return 1.0


DATA = DataLoop(factor=one)


# --- exchange with gradients


Returned = Callable[[torch.Tensor, int], torch.Tensor]


def summed_back(gradients: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns the sum of what all ranks have for this one's share."""
    total = gradients.contiguous()
    dist.all_reduce(total)
    return total[rank]


class Gather(torch.autograd.Function):
    """Shares of all ranks, [ranks, ..]; `returned` makes a share's gradient of theirs."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, returned: Returned) -> torch.Tensor:
        ctx.returned = returned
        _, ranks = group()
        shares = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(shares, own.contiguous())
        return torch.stack(shares)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        rank, _ = group()
        return ctx.returned(gradients, rank), None


def gathered(own: torch.Tensor, returned: Returned = summed_back) -> list[torch.Tensor]:
    """Returns the shares of all ranks."""
    shares: torch.Tensor = Gather.apply(own, returned)  # type: ignore[no-untyped-call]
    return list(shares.unbind(0))


class Copied(torch.autograd.Function):
    """The same on all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor) -> torch.Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class Summed(torch.autograd.Function):
    """The sum over ranks; each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        total = part.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


# --- context parallelism


def contiguous(tokens: int, ranks: int) -> Index:
    return list(torch.arange(tokens).chunk(ranks))


def zigzag(tokens: int, ranks: int) -> Index:
    """Gives a rank one chunk from the front and one from the back."""
    chunks = torch.arange(tokens).chunk(2 * ranks)
    last = 2 * ranks - 1
    return [torch.cat([chunks[rank], chunks[last - rank]]) for rank in range(ranks)]


def striped(tokens: int, ranks: int) -> Index:
    return [torch.arange(rank, tokens, ranks) for rank in range(ranks)]


def whole_row(probe: Probe, rows: list[Row], multiple: int) -> Batch:
    """Returns one row of all documents, filled up with documents of one token of padding."""
    batch = packed(probe, rows)
    missing = -batch["input_ids"].shape[1] % multiple
    last = len(rows)
    fillers = {
        "input_ids": torch.full((1, missing), probe.pad),
        "labels": torch.full((1, missing), IGNORED),
        "position_ids": torch.zeros(1, missing, dtype=torch.int64),
        "documents": torch.arange(last, last + missing)[None],
    }
    return {name: torch.cat([batch[name], fillers[name]], dim=1) for name in batch}


def labels_before(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Returns a rank's share of what tokens are to predict, shifted before the split."""
    return shifted(labels)[:, mine]


def positions_in_documents(batch: Batch, mine: torch.Tensor) -> torch.Tensor:
    return batch["position_ids"][:, mine]


def plan(batch: Batch, index: Index, rank: int) -> None:
    """Says to attention where all tokens are."""
    positions = batch["position_ids"][0]
    documents = batch["documents"][0]
    layout.rank = rank
    layout.at = positions[index[rank]]
    layout.documents = documents[index[rank]]
    layout.keys_at = [positions[columns] for columns in index]
    layout.keys_documents = [documents[columns] for columns in index]


def plan_whole(batch: Batch, index: Index, rank: int) -> None:
    """Says to attention of Ulysses where tokens are, of all ranks in a row."""
    order = torch.cat(index)
    layout.rank = rank
    layout.at = batch["position_ids"][0, order]
    layout.documents = batch["documents"][0, order]


def exchanged(
    keys: torch.Tensor, values: torch.Tensor, returned: Returned = summed_back
) -> list[Block]:
    """Returns the blocks of all ranks, by rank."""
    width = keys.shape[-1]
    both = torch.cat([keys, values], dim=-1)
    blocks = []
    for source, share in enumerate(gathered(both, returned)):
        assert layout.keys_at is not None and layout.keys_documents is not None
        block = Block(
            keys=share[..., :width],
            values=share[..., width:],
            at=layout.keys_at[source],
            documents=layout.keys_documents[source],
            source=source,
        )
        blocks.append(block)
    return blocks


def in_order(blocks: Sequence[Block]) -> list[Block]:
    """Returns blocks in the order of a ring: one's own first, then those of ranks before."""
    rank, ranks = group()
    return [blocks[(rank - step) % ranks] for step in range(ranks)]


def ring(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Returns one block for each step of a ring."""
    return in_order(exchanged(keys, values))


def joined(blocks: Sequence[Block]) -> Block:
    """Returns one block of all keys."""
    rank, _ = group()
    return Block(
        keys=torch.cat([block.keys for block in blocks], dim=2),
        values=torch.cat([block.values for block in blocks], dim=2),
        at=torch.cat([block.at for block in blocks]),
        documents=torch.cat([block.documents for block in blocks]),
        source=rank,
    )


def all_gather(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    return [joined(exchanged(keys, values))]


def by_ring(**parts: Any) -> Callable[[Any], Any]:
    """Returns what makes a model use a ring with these parts."""
    kernel = Kernel(**{"blocks": ring, **parts})

    def before(model: Any) -> Any:
        return use(model, kernel)

    return before


def to_heads(own: torch.Tensor) -> torch.Tensor:
    """Returns all tokens of a rank's heads, [rows, heads / ranks, all tokens, width]."""
    rank, ranks = group()
    whole = torch.cat(gathered(own), dim=2)
    return whole.chunk(ranks, dim=1)[rank]


def to_tokens(output: torch.Tensor) -> torch.Tensor:
    """Returns a rank's tokens of all heads, [rows, tokens, heads, width]."""
    rank, ranks = group()
    whole = torch.cat(gathered(output), dim=2)
    return whole.chunk(ranks, dim=1)[rank]


Exchange = Callable[[torch.Tensor], torch.Tensor]


def by_ulysses(
    kernel: Kernel | None = None,
    queries: Exchange = to_heads,
    keys: Exchange = to_heads,
    values: Exchange = to_heads,
    outputs: Exchange = to_tokens,
) -> Callable[[Any], Any]:
    """Returns what makes a model exchange tokens for heads around attention."""
    inner = Kernel() if kernel is None else kernel

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        s_aux: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        rank, ranks = group()
        sinks = None if s_aux is None else s_aux.chunk(ranks)[rank]
        output, _ = inner(
            module, queries(query), keys(key), values(value), mask, s_aux=sinks, **options
        )
        return outputs(output), None

    def before(model: Any) -> Any:
        return use(model, attention)

    return before


@dataclass(frozen=True)
class ContextLoop:
    """Each rank has a part of every row.

    Attributes:
        multiple: of tokens that a row is filled up to, for each rank.
        split: returns the columns of each rank.
        labels: returns a rank's share of what is to be predicted.
        positions: returns a rank's positions.
        plan: says to attention where tokens are.
    """

    kind: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    adapt: Callable[[Any], Any] = same
    before: Callable[[Any], Any] = field(default_factory=by_ring)
    prepare: Callable[[Any], None] = nothing
    multiple: int = 2
    row: Callable[[Probe, list[Row], int], Batch] = whole_row
    split: Callable[[int, int], Index] = contiguous
    labels: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = labels_before
    positions: Callable[[Batch, torch.Tensor], torch.Tensor] = positions_in_documents
    plan: Callable[[Batch, Index, int], None] = plan
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = losses_of
    count: Callable[[float, int], float] = all_targets
    factor: float = 1.0
    means: bool = False
    between: Callable[[Any, int, int], None] = nothing_between
    sync: Callable[[Any], None] = sum_gradients

    def model(self, probe: Probe) -> Any:
        model = cast(probe.model(self.kind, **self.sizes))
        return self.adapt(model)

    def step(self, probe: Probe) -> Step:
        """Returns one optimizer step on the probe's rows."""
        rank, ranks = group()
        model = self.before(self.model(probe))
        wholes = []
        for number in range(probe.micro_batches):
            rows = list(probe.rows)[number :: probe.micro_batches]
            if rows:
                wholes.append(self.row(probe, rows, self.multiple * ranks))
        index = [self.split(whole["input_ids"].shape[1], ranks) for whole in wholes]
        wanted = [
            self.labels(whole["labels"], columns[rank])
            for whole, columns in zip(wholes, index, strict=True)
        ]
        targets = sum(int((labels != IGNORED).sum()) for labels in wanted)
        count = self.count(targets, len(wholes))
        with record(model) as seen:
            self.prepare(model)
            for number, whole in enumerate(wholes):
                mine = index[number][rank]
                self.plan(whole, index[number], rank)
                own = {
                    "input_ids": whole["input_ids"][:, mine],
                    "position_ids": self.positions(whole, mine),
                }
                logits = forward(model, own)
                losses = self.losses(logits, wanted[number])
                loss = losses.sum() / count
                if self.means:
                    trained = (wanted[number] != IGNORED).sum().clamp(min=1)
                    loss = losses.sum() / trained / len(wholes) / ranks
                (loss * self.factor).backward()
                self.between(model, number, len(wholes))
            self.sync(model)
            return seen.step(rows=[whole["input_ids"][0] for whole in wholes])


CONTEXT = ContextLoop()


# --- the same batch on all ranks: tensor and pipeline parallelism


def slice_of(size: int) -> slice:
    """Returns a rank's share of a dimension."""
    rank, ranks = group()
    share = math.ceil(size / ranks)
    return slice(rank * share, (rank + 1) * share)


@dataclass(frozen=True)
class TensorLoop:
    """All ranks have the whole batch, and a part of the model each.

    Attributes:
        divide: makes a rank compute its part only.
        parts: says of a parameter's name whether ranks have parts of its gradient.
        logits: returns all logits.
    """

    kind: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    divide: Callable[[Any], None] = nothing
    parts: Callable[[str], bool] = bool
    logits: Callable[[Any, Batch], torch.Tensor] = forward
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = losses_of
    after: Callable[[Any], None] = nothing

    def model(self, probe: Probe) -> Any:
        return cast(probe.model(self.kind, **self.sizes))

    def step(self, probe: Probe) -> Step:
        """Returns one optimizer step on the probe's rows."""
        model = self.model(probe)
        batches = []
        for number in range(probe.micro_batches):
            rows = list(probe.rows)[number :: probe.micro_batches]
            batches.append(padded(probe, rows))
        wanted = [shifted(batch["labels"]) for batch in batches]
        targets = sum(int((labels != IGNORED).sum()) for labels in wanted)
        with record(model) as seen:
            self.divide(model)
            for batch, labels in zip(batches, wanted, strict=True):
                logits = self.logits(model, batch)
                losses = self.losses(logits, labels)
                (losses.sum() / targets).backward()
            for name, weight in model.named_parameters():
                if self.parts(name):
                    dist.all_reduce(weight.grad)
            self.after(model)
            rows_before = [row for batch in batches for row in batch["input_ids"]]
            return seen.step(rows=rows_before)
