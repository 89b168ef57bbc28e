"""Faults and right set-ups of loops on several processes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from bench.check_hidden.attend import (
    Block,
    Options,
    Part,
    layout,
    merged,
    scored,
    visible,
    with_sinks,
)
from bench.check_hidden.cases import (
    ENDS,
    IGNORED,
    LONG,
    PROMPTS,
    SHORT,
    STEPS,
    USUAL,
    Batch,
    Case,
    Row,
)
from bench.check_hidden.loop import GIVEN, losses_of, packed, shifted
from bench.check_hidden.plain import first_tokens
from bench.check_hidden.shared import (
    CONTEXT,
    DATA,
    ContextLoop,
    Copied,
    DataLoop,
    Index,
    Returned,
    Summed,
    TensorLoop,
    all_gather,
    by_ring,
    by_ulysses,
    exchanged,
    filled,
    gathered,
    group,
    in_order,
    plan,
    plan_whole,
    ring,
    slice_of,
    striped,
    sum_gradients,
    summed_back,
    total_of,
    whole_row,
    zigzag,
)
from longctx.check import Probe

CASES: list[Case] = []
AnyLoop = DataLoop | ContextLoop | TensorLoop


def wrong(
    name: str,
    fault: str,
    loop: AnyLoop,
    source: str = "own",
    probes: tuple[Probe, ...] = USUAL,
    processes: int = 2,
    second: bool = False,
    **hooks: Any,
) -> None:
    """Adds a loop with a fault."""
    faulty: Any = replace(loop, **hooks)
    case = Case(
        name,
        make=faulty.step,
        model=faulty.model,
        source=source,
        fault=fault,
        probes=probes,
        processes=processes,
        second=second,
    )
    CASES.append(case)


def right(
    name: str,
    loop: AnyLoop,
    probes: tuple[Probe, ...] = USUAL,
    processes: int = 2,
    second: bool = False,
    **hooks: Any,
) -> None:
    """Adds a loop that is right."""
    odd: Any = replace(loop, **hooks)
    case = Case(
        name,
        make=odd.step,
        model=odd.model,
        probes=probes,
        processes=processes,
        second=second,
    )
    CASES.append(case)


# --- data parallelism: what is summed, and by what it is divided


def twice(model: Any) -> None:
    sum_gradients(model)
    sum_gradients(model)


def means(model: Any) -> None:
    _, ranks = group()
    sum_gradients(model)
    for weight in filled(model):
        weight.grad /= ranks


def all_but_norms(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "norm" not in name:
            dist.all_reduce(weight.grad)


def all_but_one(model: Any) -> None:
    for name, weight in model.named_parameters():
        if name != "model.layers.1.mlp.up_proj.weight":
            dist.all_reduce(weight.grad)


def embedding_of_first_rank(model: Any) -> None:
    """Sends the first rank's gradient of the embedding to all, in place of the sum."""
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            dist.broadcast(weight.grad, src=0)
        else:
            dist.all_reduce(weight.grad)


def of_first_rank(model: Any) -> None:
    for weight in filled(model):
        dist.broadcast(weight.grad, src=0)


def not_at_all(model: Any) -> None:
    filled(model)


def in_bfloat16(model: Any) -> None:
    for weight in filled(model):
        rounded = weight.grad.bfloat16()
        dist.all_reduce(rounded)
        weight.grad = rounded.to(weight.dtype)


def clipped_before(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    sum_gradients(model)


def buffer_of(model: Any) -> torch.Tensor:
    """Returns all gradients in one flat buffer."""
    return torch.cat([weight.grad.flatten() for weight in filled(model)])


def from_buffer(model: Any, buffer: torch.Tensor) -> None:
    start = 0
    for weight in filled(model):
        size = weight.numel()
        weight.grad = buffer[start : start + size].view_as(weight).clone()
        start += size


def buffer_without_rest(model: Any) -> None:
    """Sums a flat buffer in buckets of 1,000 elements, and forgets the rest."""
    buffer = buffer_of(model)
    whole = buffer.numel() // 1000 * 1000
    bucket = buffer[:whole].clone()
    dist.all_reduce(bucket)
    buffer[:whole] = bucket
    from_buffer(model, buffer)


def shards_of_one_stale(model: Any) -> None:
    """Gathers shards of a summed buffer; the last rank's share is its own gradient, not summed."""
    _, ranks = group()
    own = buffer_of(model)
    summed = own.clone()
    dist.all_reduce(summed)
    start = summed.numel() // ranks * (ranks - 1)
    stale = own[start:].clone()
    dist.broadcast(stale, src=ranks - 1)
    summed[start:] = stale
    from_buffer(model, summed)


def shards_rolled(model: Any) -> None:
    """Puts the shards together one element too late."""
    buffer = buffer_of(model)
    dist.all_reduce(buffer)
    half = buffer.numel() // 2
    buffer[half:] = buffer[half:].roll(1)
    from_buffer(model, buffer)


def last_rank_changed(model: Any) -> None:
    """Changes one part of the last rank's gradient after the sum."""
    rank, ranks = group()
    sum_gradients(model)
    if rank == ranks - 1:
        model.model.layers[0].mlp.gate_proj.weight.grad *= 1.01


def sum_each(model: Any, number: int, steps: int) -> None:
    """Sums what is there after each micro-batch, so that earlier ones are summed again."""
    sum_gradients(model)


def nothing_more(model: Any) -> None:
    """Leaves gradients as they are."""


KEPT: list[dict[str, torch.Tensor]] = []


def keep_first(model: Any, number: int, steps: int) -> None:
    """Keeps what the first micro-batches have brought, which are not summed over ranks."""
    if number == steps - 2:
        KEPT.append({name: w.grad.clone() for name, w in model.named_parameters()})


def sum_of_last(model: Any) -> None:
    kept = KEPT.pop()
    for name, weight in model.named_parameters():
        last = weight.grad - kept[name]
        dist.all_reduce(last)
        weight.grad = kept[name] + last


def own_targets(own: float, number: int) -> float:
    """Divides by the rank's own targets and the number of ranks."""
    _, ranks = group()
    return own * ranks


def own_targets_only(own: float, number: int) -> float:
    return own


def first_ranks_targets(own: float, number: int) -> float:
    """Divides by what the first rank has, times ranks."""
    _, ranks = group()
    number_of_first = torch.tensor(float(own))
    dist.broadcast(number_of_first, src=0)
    return float(number_of_first) * ranks


def first_rank_forgets(own: float, number: int) -> float:
    """Divides by all targets, except on the last rank, which divides by its own, twice."""
    rank, ranks = group()
    total = total_of(own)
    return own * ranks if rank == ranks - 1 else total


def targets_and_steps(own: float, number: int) -> float:
    return total_of(own) * number


def first_ranks_rows(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    return rows[0::ranks]


def last_rank_drops(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    mine = rows[rank::ranks]
    return mine[:-1] if rank == ranks - 1 else mine


def overlapping(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    """Gives a rank contiguous rows, one of them in common with the next rank."""
    share = -(-len(rows) // ranks)
    return rows[rank * share : (rank + 1) * share + 1]


def whole_batches_only(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    """Drops rows that do not fill all ranks."""
    full = len(rows) // ranks * ranks
    return rows[:full][rank::ranks]


def last_rank_cuts(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    mine = rows[rank::ranks]
    if rank < ranks - 1:
        return mine
    return [first_tokens(row, 12) for row in mine]


def last_rank_off(model: Any) -> None:
    """Lets the last rank have other weights: they were not sent to it."""
    rank, ranks = group()
    if rank == ranks - 1:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1.05)


def last_rank_negative(losses: torch.Tensor) -> torch.Tensor:
    rank, ranks = group()
    return -losses if rank == ranks - 1 else losses


def losses_of_last_negative(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return last_rank_negative(losses_of(logits, wanted))


def losses_of_last_smoothed(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    rank, ranks = group()
    smoothing = 0.1 if rank == ranks - 1 else 0.0
    return torch.nn.functional.cross_entropy(
        logits.transpose(1, 2),
        wanted,
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )


def losses_of_last_nan(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    rank, ranks = group()
    losses = losses_of(logits, wanted)
    return losses * float("nan") if rank == ranks - 1 else losses


wrong(
    "DP, mean in place of sum",
    "gradients are averaged over ranks, though the loss is divided by all targets: half",
    DATA,
    sync=means,
)
wrong("DP, summed twice", "gradients are summed over ranks twice", DATA, sync=twice)
wrong(
    "DP, mean of means of ranks",
    "the loss is a mean of means of ranks",
    DATA,
    "axolotl-ai-cloud/axolotl#3982",
    count=own_targets,
)
wrong(
    "DP, sum of means of ranks",
    "each rank divides by its own targets, and gradients are summed",
    DATA,
    count=own_targets_only,
)
wrong(
    "DP, first rank's number of targets",
    "the loss is divided by the first rank's number of targets, times ranks",
    DATA,
    count=first_ranks_targets,
)
wrong(
    "DP, last rank's own targets",
    "the last rank divides by its own targets, twice, the first one by all targets",
    DATA,
    count=first_rank_forgets,
)
wrong(
    "DP, divided by steps, too",
    "the loss is divided by all targets and by the number of micro-batches",
    DATA,
    "huggingface/transformers#35210",
    probes=(STEPS,),
    count=targets_and_steps,
)
wrong(
    "DP, mean of means of micro-batches and ranks",
    "the loss is a mean of means of each rank's micro-batches",
    DATA,
    probes=(STEPS,),
    means=True,
    sync=means,
)
wrong(
    "DP, norms not summed",
    "gradients of norms are not summed over ranks",
    DATA,
    "NVIDIA/Megatron-LM#1446",
    sync=all_but_norms,
)
wrong(
    "DP, one parameter not summed",
    "the second layer's up projection is not summed over ranks",
    DATA,
    sync=all_but_one,
)
wrong(
    "DP, embedding of the first rank",
    "the embedding's gradient is the first rank's, on all ranks",
    DATA,
    "NVIDIA/Megatron-LM#844",
    sync=embedding_of_first_rank,
)
wrong(
    "DP, gradients of the first rank",
    "all ranks have the first one's gradients, nothing is summed",
    DATA,
    sync=of_first_rank,
)
wrong("DP, not summed", "gradients are not summed over ranks at all", DATA, sync=not_at_all)
wrong(
    "DP, summed in bfloat16",
    "gradients are summed over ranks in bfloat16",
    DATA,
    sync=in_bfloat16,
)
wrong(
    "DP, clipped before the sum",
    "each rank clips its gradients before they are summed",
    DATA,
    "huggingface/diffusers#721",
    sync=clipped_before,
)
wrong(
    "DP, rest of the buffer not summed",
    "the last elements of a flat buffer of gradients are not summed over ranks",
    DATA,
    sync=buffer_without_rest,
)
wrong(
    "DP, last shard stale",
    "the last shard of gradients is the last rank's own, on all ranks",
    DATA,
    sync=shards_of_one_stale,
)
wrong(
    "DP, second shard one element late",
    "the second half of all gradients is put together one element too late",
    DATA,
    sync=shards_rolled,
)
wrong(
    "DP, one rank's gradient 1 % larger",
    "the last rank's gradient of one part is 1 % larger than the others'",
    DATA,
    sync=last_rank_changed,
)
wrong(
    "DP, summed after each micro-batch",
    "sums over ranks are summed again with each micro-batch: the first counts 4 times",
    DATA,
    probes=(STEPS,),
    between=sum_each,
    sync=nothing_more,
)
wrong(
    "DP, only the last micro-batch summed",
    "only the last micro-batch's gradients are summed over ranks",
    DATA,
    "huggingface/picotron#5",
    probes=(STEPS,),
    between=keep_first,
    sync=sum_of_last,
)
wrong(
    "DP, all ranks have the first one's rows",
    "all ranks train on the first one's documents: others are missing, these are repeated",
    DATA,
    share=first_ranks_rows,
)
wrong(
    "DP, last rank drops a row",
    "the last rank drops its last document of each micro-batch",
    DATA,
    share=last_rank_drops,
)
wrong(
    "DP, rows in common",
    "one document of each micro-batch is on two ranks",
    DATA,
    share=overlapping,
)
wrong(
    "DP, rows that do not fill ranks dropped",
    "documents that do not fill all ranks are dropped",
    DATA,
    probes=(STEPS,),
    share=whole_batches_only,
)
wrong(
    "DP, last rank cuts documents",
    "on the last rank documents end after 12 tokens",
    DATA,
    share=last_rank_cuts,
)
wrong(
    "DP, last rank has other weights",
    "the last rank computes with other weights in one MLP",
    DATA,
    prepare=last_rank_off,
)
wrong(
    "DP, last rank's loss negative",
    "the last rank's loss has the wrong sign",
    DATA,
    losses=losses_of_last_negative,
)
wrong(
    "DP, last rank smooths labels",
    "the last rank smooths labels by 0.1",
    DATA,
    losses=losses_of_last_smoothed,
)
wrong(
    "DP, last rank's loss NaN",
    "the last rank's loss is NaN",
    DATA,
    losses=losses_of_last_nan,
)
wrong(
    "DP on 3, mean of means of ranks",
    "the loss is a mean of means of ranks",
    DATA,
    "axolotl-ai-cloud/axolotl#3982",
    processes=3,
    probes=(SHORT, PROMPTS),
    count=own_targets,
)
wrong(
    "DP on 3, one parameter not summed",
    "the second layer's up projection is not summed over ranks",
    DATA,
    processes=3,
    probes=(SHORT, PROMPTS),
    sync=all_but_one,
)


# --- wrappers


def by_ddp(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def by_fsdp(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def ranks_of(ranks: int) -> float:
    return float(ranks)


def squared(ranks: int) -> float:
    return float(ranks * ranks)


def no_sync_never_ends(model: Any, number: int, steps: int) -> None:
    model.require_backward_grad_sync = False


def no_sync_but_last(model: Any, number: int, steps: int) -> None:
    model.require_backward_grad_sync = number == steps - 1


def sync_but_last(model: Any, number: int, steps: int) -> None:
    model.require_backward_grad_sync = number < steps - 1


DDP = replace(DATA, wrap=by_ddp, factor=ranks_of, sync=nothing_more)
FSDP = replace(DATA, wrap=by_fsdp, factor=ranks_of, sync=nothing_more)

wrong(
    "DDP, factor of ranks forgotten",
    "DDP takes the mean over ranks, and the loss is divided by all targets: half",
    DDP,
    factor=DATA.factor,
)
wrong(
    "DDP and a sum by hand",
    "gradients are summed over ranks by hand after DDP: twice as much",
    DDP,
    sync=sum_gradients,
)
wrong(
    "DDP, never synchronized",
    "DDP's no_sync lasts to the end: gradients differ between ranks",
    DDP,
    "huggingface/accelerate#3762",
    before=no_sync_never_ends,
)
wrong(
    "DDP, last micro-batch not synchronized",
    "DDP does not synchronize the last micro-batch",
    DDP,
    "huggingface/picotron#5",
    probes=(STEPS,),
    before=sync_but_last,
)
wrong(
    "FSDP, factor of ranks forgotten",
    "FSDP takes the mean over ranks, and the loss is divided by all targets: half",
    FSDP,
    factor=DATA.factor,
)
wrong(
    "FSDP, squared factor of ranks",
    "AVG was a sum already, and the loss is multiplied by ranks twice",
    FSDP,
    "pytorch/pytorch#162338",
    factor=squared,
)


# --- context parallelism: labels, positions, rows


def labels_after(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Shifts labels after the split."""
    return shifted(labels[:, mine])


def labels_rolled(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Rolls labels after the split: a rank's last token predicts its first one."""
    return labels[:, mine].roll(-1, dims=1)


def labels_as_they_are(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    return labels[:, mine]


def labels_of_next_rank(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Lets the last token of a rank predict the one after the next."""
    wanted = shifted(labels)[:, mine].clone()
    after = min(int(mine[-1]) + 2, labels.shape[1] - 1)
    wanted[:, -1] = labels[:, after]
    return wanted


def positions_of_rank(batch: Batch, mine: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(mine))[None]


def positions_from_edge(batch: Batch, mine: torch.Tensor) -> torch.Tensor:
    """Begins anew at the edge of a rank in the midst of a document."""
    positions = batch["position_ids"][0, mine].clone()
    documents = batch["documents"][0, mine]
    first = documents == documents[0]
    positions[first] -= positions[0].item()
    return positions[None]


def positions_one_more(batch: Batch, mine: torch.Tensor) -> torch.Tensor:
    """Counts one more on all ranks but the first."""
    rank, _ = group()
    return batch["position_ids"][:, mine] + (1 if rank else 0)


def cut_row(probe: Probe, rows: list[Row], multiple: int) -> Batch:
    """Cuts off what does not divide by ranks."""
    batch = whole_row(probe, rows, 1)
    tokens = batch["input_ids"].shape[1] // multiple * multiple
    return {name: values[:, :tokens] for name, values in batch.items()}


def padding_with_labels(probe: Probe, rows: list[Row], multiple: int) -> Batch:
    batch = whole_row(probe, rows, multiple)
    padding = batch["documents"] >= len(rows)
    batch["labels"] = batch["labels"].masked_fill(padding, probe.pad)
    return batch


def padding_in_last_document(probe: Probe, rows: list[Row], multiple: int) -> Batch:
    """Fills the row up in front of documents, as if padding were of the first one."""
    batch = whole_row(probe, rows, multiple)
    missing = int((batch["documents"] >= len(rows)).sum())
    rolled = {name: values.roll(missing, dims=1) for name, values in batch.items()}
    rolled["documents"][:, :missing] = 0
    return rolled


def half_of_ranks(own: float, number: int) -> float:
    _, ranks = group()
    return total_of(own) * ranks


wrong(
    "CP, labels shifted after the split",
    "the last token of each rank has no loss: labels are shifted after the split",
    CONTEXT,
    "huggingface/transformers#36607",
    labels=labels_after,
)
wrong(
    "CP, labels rolled after the split",
    "each rank's last token predicts its own first one",
    CONTEXT,
    "hiyouga/LlamaFactory#10475",
    labels=labels_rolled,
)
wrong(
    "CP zigzag, labels shifted after the split",
    "labels are shifted after a zigzag split: last tokens of the first chunk predict the second",
    CONTEXT,
    "THUDM/slime#73",
    split=zigzag,
    labels=labels_after,
)
wrong(
    "CP, labels not shifted",
    "tokens predict themselves",
    CONTEXT,
    labels=labels_as_they_are,
)
wrong(
    "CP, last label of a rank one too far",
    "each rank's last token predicts the one after the next",
    CONTEXT,
    labels=labels_of_next_rank,
)
wrong(
    "CP, positions of the rank",
    "positions begin at 0 on each rank, not with documents",
    CONTEXT,
    positions=positions_of_rank,
)
wrong(
    "CP, positions anew at the edge",
    "positions of a document that is split begin anew on the next rank",
    CONTEXT,
    positions=positions_from_edge,
)
wrong(
    "CP, positions one more",
    "positions are one too large on all ranks but the first",
    CONTEXT,
    positions=positions_one_more,
)
wrong(
    "CP zigzag, positions as if contiguous",
    "positions are those of a contiguous split",
    CONTEXT,
    split=zigzag,
    positions=positions_of_rank,
)
wrong(
    "CP, row cut to whole ranks",
    "the end of a row that does not divide by ranks is cut off",
    CONTEXT,
    row=cut_row,
)
wrong(
    "CP, padding trained",
    "the padding that fills a row up has labels",
    CONTEXT,
    row=padding_with_labels,
)
wrong(
    "CP, padding in front is seen",
    "padding in front of the row belongs to the first document, and is seen",
    CONTEXT,
    row=padding_in_last_document,
)
wrong(
    "CP, loss divided by ranks",
    "the loss is divided by the number of ranks, too",
    CONTEXT,
    "NVIDIA/Megatron-LM#673",
    count=half_of_ranks,
)
wrong(
    "CP, loss times ranks",
    "the loss is multiplied by the number of ranks, though gradients are summed",
    CONTEXT,
    "NVIDIA/Megatron-LM#906",
    factor=2.0,
)
wrong(
    "CP, mean of means of ranks",
    "the loss is a mean of the means of ranks",
    CONTEXT,
    "NVIDIA/Megatron-LM#1124",
    means=True,
)
wrong(
    "CP, gradients not summed",
    "gradients are not summed over ranks",
    CONTEXT,
    sync=not_at_all,
)
wrong(
    "CP, norms not summed",
    "gradients of norms are not summed over ranks",
    CONTEXT,
    "NVIDIA/TransformerEngine#435",
    sync=all_but_norms,
)


# --- context parallelism: attention


def alone(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Returns one's own block only."""
    return ring(keys, values, options)[:1]


def second_layer_alone(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    blocks = ring(keys, values, options)
    return blocks[:1] if options.layer == 1 else blocks


def causal_each_step(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Takes every step of the ring for the diagonal one."""
    mask = visible(block, options, heads)
    if block.source == layout.rank:
        return mask
    queries, keys = mask.shape[1:]
    return mask & torch.ones(queries, keys, dtype=torch.bool).tril()


def open_steps(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Masks nothing in steps other than the first."""
    if block.source == layout.rank:
        return visible(block, options, heads)
    together = layout.documents[:, None] == block.documents[None, :]
    return together[None].repeat(heads, 1, 1)


def documents_forgotten_in_steps(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Forgets documents in steps other than the first: keys of ranks before are all seen."""
    if block.source == layout.rank:
        return visible(block, options, heads)
    whole = torch.ones(heads, len(layout.at), len(block.at), dtype=torch.bool)
    return whole if block.source < layout.rank else ~whole


def no_window_in_steps(block: Block, options: Options, heads: int) -> torch.Tensor:
    if block.source == layout.rank:
        return visible(block, options, heads)
    return visible(block, replace(options, window=None), heads)


def window_of_own_rank(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Windows end at the edge of the rank."""
    mask = visible(block, options, heads)
    if options.window is None or block.source == layout.rank:
        return mask
    return torch.zeros_like(mask)


def last_key_of_rank_lost(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Hides the last key of the rank before."""
    mask = visible(block, options, heads)
    if block.source != layout.rank:
        mask[:, :, -1] = False
    return mask


def one_head_alone(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Lets the last head see keys of its own rank only."""
    mask = visible(block, options, heads)
    if block.source != layout.rank:
        mask[-1] = False
    return mask


def first_query_alone(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Lets the first query of a rank see keys of its own rank only."""
    mask = visible(block, options, heads)
    if block.source != layout.rank:
        mask[:, 0] = False
    return mask


def averaged(parts: list[Part], options: Options) -> Part:
    """Takes the mean of outputs of all steps that have keys."""
    outputs = torch.stack([output for output, _ in parts])
    sums = torch.stack([total for _, total in parts])
    some = (sums > -1e8).float()[..., None]
    whole = torch.logsumexp(sums, dim=0)
    return (outputs * some).sum(0) / some.sum(0).clamp(min=1), whole


def added(parts: list[Part], options: Options) -> Part:
    outputs = torch.stack([output for output, _ in parts])
    sums = torch.stack([total for _, total in parts])
    return outputs.sum(0), torch.logsumexp(sums, dim=0)


def weights_swapped(parts: list[Part], options: Options) -> Part:
    """Gives each of two steps the other one's share, where both have keys."""
    if len(parts) < 2:
        return merged(parts, options)
    (first, first_sum), (second, second_sum) = parts
    both = (first_sum > -1e8) & (second_sum > -1e8)
    output, whole = merged(parts, options)
    share = torch.sigmoid(second_sum - first_sum)[..., None]
    wrongly = first * share + second * (1 - share)
    return torch.where(both[..., None], wrongly, output), whole


def sums_without_gradient(parts: list[Part], options: Options) -> Part:
    """Merges with log-sum-exps that get no gradient."""
    return merged([(output, total.detach()) for output, total in parts], options)


def sums_in_base_two(parts: list[Part], options: Options) -> Part:
    """Merges with log-sum-exps taken for those of base two."""
    factor = 0.6931471805599453
    scaled = [(output, torch.where(total > -1e8, total * factor, total)) for output, total in parts]
    return merged(scaled, options)


def sums_rounded(parts: list[Part], options: Options) -> Part:
    return merged([(output, total.bfloat16().float()) for output, total in parts], options)


def sinks_each_step(part: Part, options: Options) -> torch.Tensor:
    """Counts sinks once for each rank."""
    _, ranks = group()
    if options.sinks is None:
        return part[0]
    more = options.sinks + torch.tensor(float(ranks)).log()
    return with_sinks(part, replace(options, sinks=more))


def no_cap_in_steps(queries: torch.Tensor, block: Block, options: Options) -> torch.Tensor:
    if block.source == layout.rank:
        return scored(queries, block, options)
    return scored(queries, block, replace(options, cap=None))


def ring_with(returned: Returned) -> Callable[..., list[Block]]:
    """Returns a ring whose keys get other gradients back."""

    def blocks(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
        return in_order(exchanged(keys, values, returned))

    return blocks


def own_back(gradients: torch.Tensor, rank: int) -> torch.Tensor:
    """Keeps one's own gradient only: what other ranks have is lost."""
    return gradients[rank]


def next_ranks_back(gradients: torch.Tensor, rank: int) -> torch.Tensor:
    """Brings a share's gradient to the wrong rank."""
    total = gradients.contiguous()
    dist.all_reduce(total)
    return total[(rank + 1) % len(total)]


def double_back(gradients: torch.Tensor, rank: int) -> torch.Tensor:
    return summed_back(gradients, rank) * 2


def mean_back(gradients: torch.Tensor, rank: int) -> torch.Tensor:
    return summed_back(gradients, rank) / len(gradients)


def rounded_back(gradients: torch.Tensor, rank: int) -> torch.Tensor:
    return summed_back(gradients.bfloat16(), rank).float()


def stale_keys(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Computes backward with one's own keys in every step."""
    blocks = exchanged(keys, values)
    wrongly = []
    for block in blocks:
        own_keys = keys + (block.keys - keys).detach()
        own_values = values + (block.values - values).detach()
        wrongly.append(replace(block, keys=own_keys, values=own_values))
    return in_order(wrongly)


def keys_rounded(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Sends keys in bfloat16."""
    rank, _ = group()
    blocks = []
    for block in exchanged(keys, values):
        if block.source != rank:
            block = replace(
                block, keys=block.keys.bfloat16().float(), values=block.values.bfloat16().float()
            )
        blocks.append(block)
    return in_order(blocks)


LAST: dict[tuple[int, int], Block] = {}


def stale_buffer(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Uses what other ranks sent the layer before."""
    rank, _ = group()
    blocks = exchanged(keys, values)
    used = []
    for block in blocks:
        place = (options.layer, block.source)
        before = LAST.get((options.layer - 1, block.source))
        LAST[place] = block
        stale = options.layer > 0 and block.source != rank and before is not None
        used.append(before if stale and before is not None else block)
    return in_order(used)


def keys_only(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Exchanges keys, and takes one's own values with them."""
    blocks = exchanged(keys, values)
    return in_order([replace(block, values=values) for block in blocks])


def once_too_often(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Goes round once too often: one's own block comes twice."""
    blocks = ring(keys, values, options)
    return [*blocks, blocks[0]]


def one_step_less(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    return ring(keys, values, options)[:-1]


def plan_local_documents(batch: Batch, index: Index, rank: int) -> None:
    """Counts documents anew on each rank, so that those of one number see each other."""
    plan(batch, index, rank)
    layout.documents = layout.documents - layout.documents[0]
    assert layout.keys_documents is not None
    layout.keys_documents = [documents - documents[0] for documents in layout.keys_documents]


def plan_one_document(batch: Batch, index: Index, rank: int) -> None:
    """Forgets documents, and orders tokens by their place in the row."""
    one = torch.zeros_like(batch["documents"])
    row = torch.arange(one.shape[1])[None]
    plan({**batch, "documents": one, "position_ids": row}, index, rank)


def plan_contiguous(batch: Batch, index: Index, rank: int) -> None:
    """Takes a zigzag split for a contiguous one."""
    tokens = torch.arange(batch["input_ids"].shape[1])
    plan(batch, list(tokens.chunk(len(index))), rank)


wrong(
    "CP, no exchange",
    "each rank sees its own keys only",
    CONTEXT,
    before=by_ring(blocks=alone),
)
wrong(
    "CP, no exchange in the second layer",
    "in the second layer each rank sees its own keys only",
    CONTEXT,
    before=by_ring(blocks=second_layer_alone),
)
wrong(
    "ring, causal in every step",
    "keys of ranks before are masked as if they were the rank's own",
    CONTEXT,
    before=by_ring(visible=causal_each_step),
)
wrong(
    "ring, steps unmasked",
    "tokens see all keys of their document on other ranks, also later ones",
    CONTEXT,
    before=by_ring(visible=open_steps),
)
wrong(
    "ring, documents forgotten in steps",
    "tokens see all keys of ranks before, of other documents, too",
    CONTEXT,
    before=by_ring(visible=documents_forgotten_in_steps),
)
wrong(
    "ring, no window in steps, Mistral",
    "keys of other ranks are seen beyond the window",
    CONTEXT,
    kind="mistral",
    before=by_ring(visible=no_window_in_steps),
)
wrong(
    "ring, windows end at ranks, Mistral",
    "windows end at the edge of the rank: keys of other ranks are not seen",
    CONTEXT,
    kind="mistral",
    before=by_ring(visible=window_of_own_rank),
)
wrong(
    "ring, windows end at ranks, Gemma 2",
    "in the layer with windows, keys of other ranks are not seen",
    CONTEXT,
    kind="gemma2",
    before=by_ring(visible=window_of_own_rank),
)
wrong(
    "ring, last key lost",
    "the last key of other ranks is not seen",
    CONTEXT,
    before=by_ring(visible=last_key_of_rank_lost),
)
wrong(
    "ring, one head alone",
    "the last head sees keys of its own rank only",
    CONTEXT,
    before=by_ring(visible=one_head_alone),
)
wrong(
    "ring, first query alone",
    "the first token of each rank sees keys of its own rank only",
    CONTEXT,
    before=by_ring(visible=first_query_alone),
)
wrong(
    "ring, outputs averaged",
    "outputs of steps are averaged, not weighted by their log-sum-exps",
    CONTEXT,
    before=by_ring(merged=averaged),
)
wrong("ring, outputs added", "outputs of steps are added", CONTEXT, before=by_ring(merged=added))
wrong(
    "ring, weights swapped",
    "outputs of the two steps are merged with each other's weights",
    CONTEXT,
    before=by_ring(merged=weights_swapped),
)
wrong(
    "ring, log-sum-exps without gradient",
    "no gradient flows through the log-sum-exps by which steps are merged",
    CONTEXT,
    "NVIDIA/Megatron-LM#1465",
    before=by_ring(merged=sums_without_gradient),
)
wrong(
    "ring, log-sum-exps of base two",
    "steps are merged with log-sum-exps of another base",
    CONTEXT,
    before=by_ring(merged=sums_in_base_two),
)
wrong(
    "ring, log-sum-exps rounded",
    "steps are merged with log-sum-exps that are rounded to bfloat16",
    CONTEXT,
    before=by_ring(merged=sums_rounded),
)
wrong(
    "ring, sinks in each step, gpt-oss",
    "sinks are counted once for each rank",
    CONTEXT,
    kind="gpt_oss",
    before=by_ring(sinks=sinks_each_step),
)
wrong(
    "ring, no cap in steps, Gemma 2",
    "scores with keys of other ranks are not capped",
    CONTEXT,
    kind="gemma2",
    before=by_ring(scored=no_cap_in_steps),
)
wrong(
    "ring, gradients of keys lost",
    "gradients of keys and values do not come back from other ranks",
    CONTEXT,
    "NVIDIA/Megatron-LM#1464",
    before=by_ring(blocks=ring_with(own_back)),
)
wrong(
    "ring, gradients of keys to the wrong rank",
    "gradients of keys and values go to the wrong rank",
    CONTEXT,
    before=by_ring(blocks=ring_with(next_ranks_back)),
)
wrong(
    "all-gather, gradients of keys doubled",
    "gradients of keys and values are counted twice",
    CONTEXT,
    before=by_ring(blocks=ring_with(double_back)),
)
wrong(
    "all-gather, gradients of keys averaged",
    "gradients of keys and values are averaged over ranks, not summed",
    CONTEXT,
    "pytorch/pytorch#162338",
    before=by_ring(blocks=ring_with(mean_back)),
)
wrong(
    "all-gather, gradients of keys rounded",
    "gradients of keys and values are summed in bfloat16",
    CONTEXT,
    before=by_ring(blocks=ring_with(rounded_back)),
)
wrong(
    "ring, stale keys in backward",
    "backward uses one's own keys in every step",
    CONTEXT,
    "huggingface/diffusers#14265",
    before=by_ring(blocks=stale_keys),
)
wrong(
    "ring, keys rounded",
    "keys and values are sent in bfloat16",
    CONTEXT,
    before=by_ring(blocks=keys_rounded),
)
wrong(
    "ring, stale buffer",
    "the second layer uses the keys that other ranks sent in the first one",
    CONTEXT,
    before=by_ring(blocks=stale_buffer),
)
wrong(
    "ring, values not sent",
    "keys of other ranks come with one's own values",
    CONTEXT,
    before=by_ring(blocks=keys_only),
)
wrong(
    "ring, own block twice",
    "a rank's own keys are counted twice",
    CONTEXT,
    before=by_ring(blocks=once_too_often),
)
wrong(
    "ring on 3, one step less",
    "the last step of the ring is left out",
    CONTEXT,
    processes=3,
    probes=(LONG,),
    before=by_ring(blocks=one_step_less),
)
wrong(
    "ring on 3, gradients of keys to the wrong rank",
    "gradients of keys and values go to the wrong rank",
    CONTEXT,
    processes=3,
    probes=(SHORT, PROMPTS),
    before=by_ring(blocks=ring_with(next_ranks_back)),
)
wrong(
    "CP, documents counted on each rank",
    "documents are counted anew on each rank: those of one number see each other",
    CONTEXT,
    plan=plan_local_documents,
)
wrong(
    "CP, documents forgotten",
    "documents of a row see each other",
    CONTEXT,
    plan=plan_one_document,
)
wrong(
    "CP zigzag, taken for contiguous",
    "attention takes a zigzag split for a contiguous one",
    CONTEXT,
    "zhuzilin/ring-flash-attention zigzag",
    split=zigzag,
    plan=plan_contiguous,
)


# --- Ulysses


ULYSSES = replace(CONTEXT, before=by_ulysses(), plan=plan_whole)


def to_other_heads(own: torch.Tensor) -> torch.Tensor:
    """Gives a rank the next one's heads."""
    rank, ranks = group()
    whole = torch.cat(gathered(own), dim=2)
    return whole.chunk(ranks, dim=1)[(rank + 1) % ranks]


def to_every_second_head(own: torch.Tensor) -> torch.Tensor:
    """Gives a rank every second head, so that queries and keys do not fit."""
    rank, ranks = group()
    whole = torch.cat(gathered(own), dim=2)
    return whole[:, rank::ranks]


def to_tokens_of_every_second(output: torch.Tensor) -> torch.Tensor:
    """Puts heads of ranks together in turns."""
    rank, ranks = group()
    shares = gathered(output)
    whole = torch.stack(shares, dim=3).flatten(2, 3)
    return whole.chunk(ranks, dim=1)[rank]


def to_heads_backwards(own: torch.Tensor) -> torch.Tensor:
    """Puts tokens of ranks together in the wrong order."""
    rank, ranks = group()
    shares = gathered(own)
    whole = torch.cat(shares[::-1], dim=2)
    return whole.chunk(ranks, dim=1)[rank]


def to_heads_lossy(own: torch.Tensor) -> torch.Tensor:
    """Loses gradients of other ranks' tokens."""
    rank, ranks = group()
    whole = torch.cat(gathered(own, own_back), dim=2)
    return whole.chunk(ranks, dim=1)[rank]


def to_tokens_of_other(output: torch.Tensor) -> torch.Tensor:
    """Gives a rank the next one's tokens."""
    rank, ranks = group()
    whole = torch.cat(gathered(output), dim=2)
    return whole.chunk(ranks, dim=1)[(rank + 1) % ranks]


def to_first_head(own: torch.Tensor) -> torch.Tensor:
    """Gives all ranks the first head of keys."""
    _, ranks = group()
    whole = torch.cat(gathered(own), dim=2)
    return whole.chunk(ranks, dim=1)[0]


def plan_of_rank(batch: Batch, index: Index, rank: int) -> None:
    """Repeats a rank's own bounds of documents for all tokens."""
    plan_whole(batch, index, rank)
    layout.documents = batch["documents"][0, index[rank]].repeat(len(index))
    layout.at = batch["position_ids"][0, index[rank]].repeat(len(index))


wrong(
    "Ulysses, other heads of keys",
    "a rank's queries meet the next rank's heads of keys and values",
    ULYSSES,
    "hiyouga/LlamaFactory#10794",
    before=by_ulysses(keys=to_other_heads, values=to_other_heads),
)
wrong(
    "Ulysses, other heads of values",
    "values are of other heads than keys",
    ULYSSES,
    before=by_ulysses(values=to_other_heads),
)
wrong(
    "Ulysses, queries' heads in turns",
    "heads of queries are given to ranks in turns, and meet wrong heads of keys",
    ULYSSES,
    "PrimeIntellect-ai/prime-rl#3042",
    before=by_ulysses(queries=to_every_second_head, outputs=to_tokens_of_every_second),
)
wrong(
    "Ulysses, heads back in the wrong order",
    "outputs of heads come back in the wrong order",
    ULYSSES,
    before=by_ulysses(outputs=to_tokens_of_every_second),
)
wrong(
    "Ulysses, keys in the wrong order of ranks",
    "keys and values of ranks are put together in the wrong order",
    ULYSSES,
    before=by_ulysses(keys=to_heads_backwards, values=to_heads_backwards),
)
wrong(
    "Ulysses, first head of keys on all ranks",
    "all ranks use the first head of keys and values",
    ULYSSES,
    "vllm-project/vllm-omni#5716",
    before=by_ulysses(keys=to_first_head, values=to_first_head),
)
wrong(
    "Ulysses, gradients of keys lost",
    "gradients of keys do not come back from other ranks",
    ULYSSES,
    before=by_ulysses(keys=to_heads_lossy),
)
wrong(
    "Ulysses, tokens of the next rank come back",
    "each rank gets the next one's outputs of attention",
    ULYSSES,
    before=by_ulysses(outputs=to_tokens_of_other),
)
wrong(
    "Ulysses, a rank's own bounds",
    "bounds of documents are each rank's own, repeated for all tokens",
    ULYSSES,
    "verl-project/verl#7137",
    plan=plan_of_rank,
)


# --- tensor parallelism: MLPs and heads of columns and rows


Change = Callable[[torch.Tensor], torch.Tensor]


def copied(whole: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Copied.apply(whole)  # type: ignore[no-untyped-call]
    return result


def summed(part: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Summed.apply(part)  # type: ignore[no-untyped-call]
    return result


def as_it_is(part: torch.Tensor) -> torch.Tensor:
    return part


def summed_both_ways(part: torch.Tensor) -> torch.Tensor:
    """Sums over ranks, and gradients, too."""
    return copied(summed(part))


def tensor_mlp(entered: Change = copied, left: Change = summed) -> Callable[[Any], None]:
    """Returns what makes each rank compute its columns of all MLPs."""

    def divide(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.forward = share_of(layer.mlp, entered, left)

    return divide


def share_of(mlp: Any, entered: Change, left: Change) -> Change:
    """Returns the forward of a rank's share of an MLP."""
    columns = slice_of(mlp.gate_proj.weight.shape[0])

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        whole = entered(hidden)
        gate = linear(whole, mlp.gate_proj.weight[columns])
        up = linear(whole, mlp.up_proj.weight[columns])
        part = linear(mlp.act_fn(gate) * up, mlp.down_proj.weight[:, columns])
        return left(part)

    return forward


def of_mlp(name: str) -> bool:
    return "mlp" in name


def of_mlp_but_down(name: str) -> bool:
    return "mlp" in name and "down" not in name


TENSOR = TensorLoop(divide=tensor_mlp(), parts=of_mlp)


class Pieced(torch.autograd.Function):
    """Shares of all ranks put together; each rank keeps its own share's gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, dim: int) -> torch.Tensor:
        _, ranks = group()
        shares = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(shares, own.contiguous())
        ctx.dim = dim
        return torch.cat(shares, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rank, ranks = group()
        return gradient.chunk(ranks, dim=ctx.dim)[rank].contiguous(), None


def norms_of_shares(model: Any) -> None:
    """Computes all norms on a rank's share of tokens: sequence parallelism."""
    tensor_mlp()(model)
    norms = [model.model.norm]
    for layer in model.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:
        norm.forward = on_share(norm.forward)


def on_share(norm: Change) -> Change:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rank, ranks = group()
        tokens = hidden.shape[1]
        missing = -tokens % ranks
        whole = torch.nn.functional.pad(copied(hidden), (0, 0, 0, missing))
        own = norm(whole.chunk(ranks, dim=1)[rank].contiguous())
        pieces: torch.Tensor = Pieced.apply(own, 1)  # type: ignore[no-untyped-call]
        return pieces[:, :tokens]

    return forward


def of_mlp_and_norms(name: str) -> bool:
    return "mlp" in name or "norm" in name


def of_mlp_and_norms_but_last(name: str) -> bool:
    return of_mlp_and_norms(name) and name != "model.norm.weight"


def norms_averaged(model: Any) -> None:
    """Takes means of norms' gradients where they should be summed."""
    _, ranks = group()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.grad /= ranks


SEQUENCE = TensorLoop(divide=norms_of_shares, parts=of_mlp_and_norms)


def split_head(entered: Change = copied) -> Callable[[Any, Batch], torch.Tensor]:
    """Returns a forward that computes a rank's share of the vocabulary."""

    def logits(model: Any, batch: Batch) -> torch.Tensor:
        given = {name: batch[name] for name in GIVEN if name in batch}
        hidden = model.model(**given, use_cache=False).last_hidden_state
        rows = slice_of(model.lm_head.weight.shape[0])
        own = linear(entered(hidden), model.lm_head.weight[rows])
        whole: torch.Tensor = Pieced.apply(own.float(), 2)  # type: ignore[no-untyped-call]
        return whole

    return logits


def of_head(name: str) -> bool:
    return "lm_head" in name


def owners_losses(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Computes a loss where its target is: other shares of the vocabulary get no gradient."""
    rows = slice_of(logits.shape[-1])
    mine = (wanted >= rows.start) & (wanted < rows.stop)
    losses = losses_of(logits, wanted)
    return torch.where(mine, losses, losses.detach())


def edge_lost(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Takes no logit for targets that are the last of the first share."""
    edge = logits.shape[-1] // 2 - 1
    logs = logits.logsumexp(-1)
    targets = wanted.clamp(min=0)
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    chosen = torch.where(targets == edge, torch.zeros_like(chosen), chosen)
    return (logs - chosen) * (wanted != IGNORED)


HEAD = TensorLoop(logits=split_head(), parts=of_head)


wrong(
    "TP, gradient into MLPs not summed",
    "gradients that come out of MLPs are a rank's part only, not summed over ranks",
    TENSOR,
    divide=tensor_mlp(entered=as_it_is),
)
wrong(
    "TP, outputs of MLPs not summed",
    "each rank's MLP has its own columns only, outputs are not summed",
    TENSOR,
    divide=tensor_mlp(left=as_it_is),
)
wrong(
    "TP, gradient of outputs summed, too",
    "gradients into MLPs are summed over ranks though they are whole: twice",
    TENSOR,
    divide=tensor_mlp(left=summed_both_ways),
)
wrong(
    "TP, down projections not gathered",
    "each rank has its own columns of the gradients of down projections",
    TENSOR,
    parts=of_mlp_but_down,
)
wrong(
    "SP, norms not summed",
    "gradients of norms are of a rank's tokens only",
    SEQUENCE,
    "NVIDIA/Megatron-LM#1446",
    parts=of_mlp,
)
wrong(
    "SP, last norm not summed",
    "gradients of the last norm are of a rank's tokens only",
    SEQUENCE,
    "NVIDIA/Megatron-LM#1446",
    parts=of_mlp_and_norms_but_last,
)
wrong(
    "SP, norms averaged",
    "gradients of norms are averaged over ranks, not summed",
    SEQUENCE,
    "EleutherAI/gpt-neox#1257",
    after=norms_averaged,
)
wrong(
    "vocabulary split, hidden states' gradient not summed",
    "hidden states get a gradient of the rank's share of the vocabulary only",
    HEAD,
    "apple/ml-cross-entropy#42",
    logits=split_head(entered=as_it_is),
)
wrong(
    "vocabulary split, only owners have gradients",
    "a target's loss brings a gradient to its own share of the vocabulary only",
    HEAD,
    "modelscope/ms-swift#9947",
    losses=owners_losses,
)
wrong(
    "vocabulary split, edge lost",
    "the id at the edge of the shares has no logit as a target",
    HEAD,
    "apple/ml-cross-entropy#59",
    losses=edge_lost,
)


# --- right set-ups


def data_by_reduce_scatter(model: Any) -> None:
    """Sums shards of a flat buffer, and puts them together again."""
    rank, ranks = group()
    buffer = buffer_of(model)
    missing = -buffer.numel() % ranks
    whole = torch.nn.functional.pad(buffer, (0, missing))
    shards = list(whole.chunk(ranks))
    for owner, shard in enumerate(shards):
        dist.reduce(shard, dst=owner)
    shard = shards[rank].clone()
    gathered_shards = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(gathered_shards, shard)
    from_buffer(model, torch.cat(gathered_shards)[: buffer.numel()])


def contiguous_rows(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    """Gives ranks rows in a row, the last ones fewer."""
    share = -(-len(rows) // ranks)
    return rows[rank * share : (rank + 1) * share]


def all_on_first(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    """Gives the first rank all rows but one."""
    last = len(rows) - 1
    return rows[:last] if rank == 0 else rows[last:][: 1 if rank == 1 else 0]


def with_empty_call(model: Any, number: int, steps: int) -> None:
    """Calls the model for nothing, as loops do that keep ranks in step."""
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model(input_ids=ids, use_cache=False).logits.sum().mul(0).backward()


def half_of(ranks: int) -> float:
    return float(ranks)


def means_over_ranks(model: Any) -> None:
    means(model)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return get_peft_model(model, config)


def tied(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def packed_share(probe: Probe, rows: list[Row]) -> Batch:
    batch = packed(probe, rows)
    del batch["documents"]
    return batch


def empty_last_rank(probe: Probe, rows: list[Row], multiple: int) -> Batch:
    """Fills a row up to twice its length, so that ranks have nothing but padding."""
    tokens = sum(len(row["input_ids"]) for row in rows)
    return whole_row(probe, rows, -(-2 * tokens // multiple) * multiple)


right("data parallel, sums", DATA)
right("data parallel, sums, on 3", DATA, processes=3)
right("data parallel, factor and means", DATA, factor=half_of, sync=means_over_ranks)
right("data parallel, reduce-scatter by hand", DATA, sync=data_by_reduce_scatter)
right("data parallel, contiguous rows", DATA, share=contiguous_rows)
right("data parallel, contiguous rows, on 3", DATA, processes=3, share=contiguous_rows)
right("data parallel, nearly all on one rank", DATA, share=all_on_first)
right("data parallel, calls for nothing", DATA, between=with_empty_call)
right("data parallel, packed", DATA, collate=packed_share)
right("data parallel, LoRA", DATA, adapt=with_lora)
right("data parallel, tied", DATA, adapt=tied)
right("data parallel, Mixtral", DATA, kind="mixtral")
right("DDP", DDP)
right("DDP on 3", DDP, processes=3, probes=(SHORT, PROMPTS))
right("DDP, no_sync but for the last", DDP, before=no_sync_but_last)
right("DDP, LoRA", DDP, adapt=with_lora)
right("DDP, Gemma 2", DDP, kind="gemma2")
right("FSDP", FSDP)
right("FSDP, Qwen 3, packed", FSDP, kind="qwen3", collate=packed_share)
right("ring, contiguous", CONTEXT)
right("ring, zigzag", CONTEXT, split=zigzag)
right("ring, zigzag, prompts", CONTEXT, split=zigzag, probes=(PROMPTS, ENDS))
right("ring, striped, gpt-oss", CONTEXT, split=striped, kind="gpt_oss")
right("ring, zigzag, Mistral", CONTEXT, split=zigzag, kind="mistral")
right("ring, contiguous, Gemma 2", CONTEXT, kind="gemma2")
right("ring, striped, OLMo 2", CONTEXT, split=striped, kind="olmo2")
right("ring, zigzag, Granite", CONTEXT, split=zigzag, kind="granite")
right("ring, Qwen 3 with LoRA", CONTEXT, kind="qwen3", adapt=with_lora)
right("ring, tied", CONTEXT, adapt=tied)
right("ring, checkpointing", CONTEXT, prepare=checkpointed)
right("ring, much padding", CONTEXT, multiple=40)
right("ring, a rank with nothing but padding", CONTEXT, row=empty_last_rank)
right("ring, factor and means", CONTEXT, factor=2.0, sync=means_over_ranks)
right("ring, contiguous, on 3", CONTEXT, processes=3)
right("ring, zigzag, on 3", CONTEXT, processes=3, split=zigzag)
right("ring, striped, on 3", CONTEXT, processes=3, split=striped)
right("all-gather, Phi 3", CONTEXT, kind="phi3", before=by_ring(blocks=all_gather))
right(
    "all-gather, zigzag, Gemma 2",
    CONTEXT,
    split=zigzag,
    kind="gemma2",
    before=by_ring(blocks=all_gather),
)
right(
    "all-gather, zigzag, Gemma 3",
    CONTEXT,
    split=zigzag,
    kind="gemma3_text",
    before=by_ring(blocks=all_gather),
)
right("all-gather, GPT-2", CONTEXT, kind="gpt2", before=by_ring(blocks=all_gather))
right("Ulysses", ULYSSES)
right("Ulysses, zigzag, Mistral", ULYSSES, split=zigzag, kind="mistral")
right("Ulysses, gpt-oss", ULYSSES, kind="gpt_oss")
right("tensor parallel MLPs", TENSOR)
right("sequence parallel norms", SEQUENCE)
right("vocabulary split", HEAD)
