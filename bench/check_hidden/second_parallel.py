"""A second set of faults and right set-ups on two processes, by another examiner."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding, linear, pad

from bench.check_hidden import parallel
from bench.check_hidden.attend import (
    Block,
    Kernel,
    Options,
    Part,
    layout,
    merged,
    use,
    visible,
    with_sinks,
)
from bench.check_hidden.cases import IGNORED, STEPS, Batch, Row
from bench.check_hidden.loop import losses_of, packed, padded
from bench.check_hidden.parallel import (
    DDP,
    FSDP,
    HEAD,
    TENSOR,
    ULYSSES,
    Change,
    Pieced,
    checkpointed,
    copied,
    double_back,
    of_mlp,
    of_mlp_and_norms,
    summed,
    tensor_mlp,
    with_lora,
)
from bench.check_hidden.parallel_more import ENTERED, LEFT, PIPELINE, as_it_is, handed_back
from bench.check_hidden.shared import (
    CONTEXT,
    DATA,
    Index,
    TensorLoop,
    all_gather,
    by_ring,
    by_ulysses,
    exchanged,
    gathered,
    group,
    in_order,
    labels_before,
    plan,
    ring,
    slice_of,
    striped,
    sum_gradients,
    summed_back,
    to_heads,
    to_tokens,
    total_of,
    whole_row,
    zigzag,
)
from longctx.check import Probe

wrong = partial(parallel.wrong, second=True)
right = partial(parallel.right, second=True)


def last_rank() -> bool:
    """Returns whether this is the last rank."""
    rank, ranks = group()
    return rank == ranks - 1


# --- data parallelism


def shuffled_by_each_rank(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    """Deals rows after a shuffle that is another one on each rank."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(rank))
    shuffled = [rows[int(at)] for at in order]
    return shuffled[rank::ranks]


def ids_of_first_rank(model: Any) -> None:
    """Sums rows of the embedding's gradient only where the first rank has some."""
    gradient = model.get_input_embeddings().weight.grad
    there = (gradient != 0).any(1)
    dist.broadcast(there, src=0)
    gradient *= there[:, None]
    sum_gradients(model)


def over_micro_batch(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Divides by the targets that all ranks have in this one of three micro-batches."""
    targets = total_of(float((wanted != IGNORED).sum()))
    return losses_of(logits, wanted) / targets / 3


def one(own: float, number: int) -> float:
    return 1.0


def half_on_last_rank(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    losses = losses_of(logits, wanted)
    return losses / 2 if last_rank() else losses


def adapters_of_each_rank(model: Any) -> None:
    """Gives the last rank's adapters other weights: they were not sent."""
    if not last_rank():
        return
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name:
                weight += 0.1 * torch.randn(weight.shape, generator=generator)


def all_but_experts(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(weight.grad)


wrong(
    "DP, ranks shuffle by themselves",
    "ranks deal documents after shuffles of their own: some are on both, some on none",
    DATA,
    share=shuffled_by_each_rank,
)
wrong(
    "DP, ids of the first rank only",
    "the embedding's gradient is summed only for ids that the first rank has",
    DATA,
    sync=ids_of_first_rank,
)
wrong(
    "DP, targets counted by micro-batch",
    "the loss is a mean of means of micro-batches, each over all ranks",
    DATA,
    probes=(STEPS,),
    losses=over_micro_batch,
    count=one,
)
wrong(
    "DP, last rank's scale half",
    "the last rank's loss counts half: its loss scale is another one",
    DATA,
    losses=half_on_last_rank,
)
wrong(
    "DP, adapters of each rank",
    "the last rank's A matrices of LoRA are other ones than the first rank's",
    DATA,
    adapt=with_lora,
    prepare=adapters_of_each_rank,
)
wrong(
    "EP, experts not summed, Mixtral",
    "gradients of experts are not summed over ranks",
    DATA,
    kind="mixtral",
    sync=all_but_experts,
)


# --- context parallelism


EDGES = Probe("a document begins at the edge", lengths=(12, 8, 12, 8))  # of two ranks
IDS: list[torch.Tensor] = []  # whole rows, to take labels of other ranks from


def row_remembered(probe: Probe, rows: list[Row], multiple: int) -> Batch:
    batch = whole_row(probe, rows, multiple)
    IDS.append(batch["input_ids"])
    return batch


def edge_from_ids(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Takes the next rank's first id for the last label, though it may have none."""
    ids = IDS.pop(0)
    own = labels_before(labels, mine).clone()
    following = int(mine[-1]) + 1
    if following < ids.shape[1]:
        own[0, -1] = ids[0, following]
    return own


def first_five_masked(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Masks a prompt of 5 tokens at the beginning of each rank's part."""
    own = labels_before(labels, mine).clone()
    own[:, :5] = IGNORED
    return own


def row_with_first_label(probe: Probe, rows: list[Row], multiple: int) -> Batch:
    """Gives the first token of a row its label."""
    batch = whole_row(probe, rows, multiple)
    batch["labels"][0, 0] = batch["input_ids"][0, 0]
    return batch


def labels_rolled_whole(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Rolls labels of the whole row: its last token predicts its first one."""
    return labels.roll(-1, 1)[:, mine]


def plan_one_late(batch: Batch, index: Index, rank: int) -> None:
    """Takes bounds of documents in keys of other ranks one token late."""
    plan(batch, index, rank)
    assert layout.keys_documents is not None
    for source, documents in enumerate(layout.keys_documents):
        if source != rank:
            layout.keys_documents[source] = torch.cat([documents[:1], documents[:-1]])


def half_window_in_steps(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Takes windows of 8 for keys of other ranks."""
    if block.source == layout.rank or options.window is None:
        return visible(block, options, heads)
    return visible(block, replace(options, window=options.window - 8), heads)


def outputs_rounded(parts: list[Part], options: Options) -> Part:
    rounded = [(output.bfloat16().float(), total) for output, total in parts]
    return merged(rounded, options)


def sinks_on_last_rank(part: Part, options: Options) -> torch.Tensor:
    if last_rank():
        return with_sinks(part, options)
    return part[0]


def seen_from_the_left(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Masks all keys as if a rank's queries were the first of the row."""
    queries = torch.arange(len(layout.at))
    keys = torch.arange(len(block.at))
    together = layout.documents[:, None] == block.documents[None, :]
    mask = together & (keys[None, :] <= queries[:, None])
    return mask[None].repeat(heads, 1, 1)


def first_half_back(gradients: torch.Tensor, rank: int) -> torch.Tensor:
    """Loses what other ranks have for the second half of a rank's keys."""
    own = gradients[rank].clone()
    others = summed_back(gradients.clone(), rank) - own
    half = others.shape[-2] // 2
    others[..., half:, :] = 0
    return own + others


def ring_first_half_back(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    return in_order(exchanged(keys, values, first_half_back))


wrong(
    "CP, label at the edge from ids",
    "the last token of the first rank predicts the next rank's first one, which has no label",
    CONTEXT,
    probes=(EDGES,),
    row=row_remembered,
    labels=edge_from_ids,
)
wrong(
    "CP, prompt masked on each rank",
    "the first 5 tokens of each rank's part have no loss",
    CONTEXT,
    labels=first_five_masked,
)
wrong(
    "CP, whole rows rolled",
    "the last token of each row predicts the row's first one",
    CONTEXT,
    row=row_with_first_label,
    labels=labels_rolled_whole,
)
wrong(
    "CP, bounds of other ranks one late",
    "keys of other ranks are taken for those of documents whose bounds are one token late",
    CONTEXT,
    plan=plan_one_late,
)
wrong(
    "ring, windows half in steps, Mistral",
    "windows have 8 keys fewer for keys of other ranks",
    CONTEXT,
    "open-lm-engine/lm-engine#447",
    kind="mistral",
    before=by_ring(visible=half_window_in_steps),
)
wrong(
    "ring, outputs of steps rounded",
    "outputs of steps are rounded to bfloat16 before they are merged",
    CONTEXT,
    before=by_ring(merged=outputs_rounded),
)
wrong(
    "ring, sinks on the last rank only, gpt-oss",
    "tokens of the first rank have no sinks",
    CONTEXT,
    kind="gpt_oss",
    before=by_ring(sinks=sinks_on_last_rank),
)
wrong(
    "ring, gradients of later keys lost",
    "gradients of the second half of a rank's keys do not come back from other ranks",
    CONTEXT,
    before=by_ring(blocks=ring_first_half_back),
)
wrong(
    "all-gather, causal from the left",
    "queries of all ranks are masked as if they were the first of the row",
    CONTEXT,
    before=by_ring(blocks=all_gather, visible=seen_from_the_left),
)


# --- Ulysses


def to_heads_double(own: torch.Tensor) -> torch.Tensor:
    """Doubles the gradients that come back."""
    rank, ranks = group()
    whole = torch.cat(gathered(own, double_back), dim=2)
    return whole.chunk(ranks, dim=1)[rank]


def with_first_sinks(model: Any) -> Any:
    """Makes a model use Ulysses, with the first rank's sinks on all ranks."""
    inner = Kernel()

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        s_aux: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        _, ranks = group()
        sinks = s_aux.chunk(ranks)[0]
        output, _ = inner(
            module, to_heads(query), to_heads(key), to_heads(value), mask, s_aux=sinks, **options
        )
        return to_tokens(output), None

    return use(model, attention)


wrong(
    "Ulysses, gradients of queries doubled",
    "gradients of queries are counted once for each rank: twice",
    ULYSSES,
    "deepspeedai/DeepSpeed#5248",
    before=by_ulysses(queries=to_heads_double),
)
wrong(
    "Ulysses, first rank's sinks, gpt-oss",
    "all ranks use the sinks of the first rank's heads",
    ULYSSES,
    kind="gpt_oss",
    before=with_first_sinks,
)


# --- tensor parallelism


def losses_of_gathered(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Sums exponentials of whole logits over two ranks, as if they were shares: the loss is
    log(2) too large, and what the softmax gives back is half."""
    total = logits.logsumexp(-1)
    halved = (total + total.detach()) / 2
    chosen = logits.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return (halved - chosen) * (wanted != IGNORED)


def split_embedding(masked: bool) -> Callable[[Any], None]:
    """Returns what makes each rank look up its share of ids, and sums over ranks."""

    def divide(model: Any) -> None:
        module = model.get_input_embeddings()
        rows = slice_of(module.weight.shape[0])

        def forward(ids: torch.Tensor) -> torch.Tensor:
            inside = (ids >= rows.start) & (ids < rows.stop)
            local = (ids - rows.start).clamp(min=0, max=rows.stop - rows.start - 1)
            found = embedding(local, module.weight[rows])
            if masked:
                found = found * inside[..., None]
            return summed(found)

        module.forward = forward

    return divide


def of_embedding(name: str) -> bool:
    return "embed_tokens" in name


EMBEDDING = TensorLoop(divide=split_embedding(masked=True), parts=of_embedding)


def crossed_mlp(model: Any) -> None:
    """Lets each rank multiply its columns of the gate by the other's of the up projection."""
    rank, ranks = group()
    for layer in model.model.layers:
        mlp = layer.mlp
        columns = slice_of(mlp.gate_proj.weight.shape[0])
        gates = mlp.gate_proj.weight.chunk(ranks)
        ups = mlp.up_proj.weight.chunk(ranks)
        layer.mlp.forward = partial(crossed, mlp, gates[rank], ups[rank - 1], columns)


def crossed(
    mlp: Any, gates: torch.Tensor, ups: torch.Tensor, columns: slice, hidden: torch.Tensor
) -> torch.Tensor:
    whole = copied(hidden)
    product = mlp.act_fn(linear(whole, gates)) * linear(whole, ups)
    return summed(linear(product, mlp.down_proj.weight[:, columns]))


def norms_of_shares(model: Any) -> None:
    """Computes norms on shares of tokens, whose gradients do not reach other ranks."""
    tensor_mlp()(model)
    norms = [model.model.norm]
    for layer in model.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:
        norm.forward = partial(on_own_share, norm.forward)


def on_own_share(norm: Change, hidden: torch.Tensor) -> torch.Tensor:
    rank, ranks = group()
    tokens = hidden.shape[1]
    whole = pad(hidden, (0, 0, 0, -tokens % ranks))
    own = norm(whole.chunk(ranks, dim=1)[rank].contiguous())
    pieces: torch.Tensor = Pieced.apply(own, 1)  # type: ignore[no-untyped-call]
    return pieces[:, :tokens]


wrong(
    "vocabulary split, logits gathered before",
    "the loss takes whole logits for a share: the softmax counts half in the gradient",
    HEAD,
    "NVIDIA/Megatron-LM#7452",
    losses=losses_of_gathered,
)
wrong(
    "embedding split, other ids not masked",
    "ids of other ranks add the first or last row of a rank's share of the embedding",
    EMBEDDING,
    divide=split_embedding(masked=False),
)
wrong(
    "TP, gate and up of other columns",
    "columns of the gate meet the other rank's columns of the up projection",
    TENSOR,
    divide=crossed_mlp,
    parts=of_mlp,
)
wrong(
    "SP, gradients of norms stay on their rank",
    "gradients that norms send back are of a rank's tokens only",
    TENSOR,
    divide=norms_of_shares,
    parts=of_mlp_and_norms,
)


# --- pipelines


def labels_of_other_rows(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Gives the last stage the labels of other rows."""
    return losses_of(logits, wanted.roll(1, 0) if last_rank() else wanted)


def last_stage_share_lost(model: Any) -> None:
    """Loses what the last stage's head has for the tied weight."""
    if last_rank():
        model.get_input_embeddings().weight.grad.zero_()
    handed_back(as_it_is)(model)


def last_micro_batch_kept(model: Any) -> None:
    """Does not hand the last micro-batch's gradient back."""
    del ENTERED[-1:], LEFT[-1:]
    handed_back(as_it_is)(model)


TIED_PIPELINE = replace(PIPELINE, sizes={"tie_word_embeddings": True})

wrong(
    "PP, labels of other rows",
    "the last stage has the labels of other rows",
    PIPELINE,
    losses=labels_of_other_rows,
)
wrong(
    "PP, tied, last stage's share lost",
    "weights are tied, and the last stage's share of their gradient is lost",
    TIED_PIPELINE,
    after=last_stage_share_lost,
)
wrong(
    "PP, last micro-batch not handed back",
    "the first stage gets no gradient of the last micro-batch",
    PIPELINE,
    probes=(STEPS,),
    after=last_micro_batch_kept,
)


# --- small ones: one layer, one head, one edge, one parameter


def one_head_sent_twice(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Takes the first head of keys for the second one in blocks of other ranks, in one layer."""
    rank, _ = group()
    blocks = []
    for block in ring(keys, values, options):
        if block.source != rank and options.layer == 1:
            first = block.keys[:, :1].expand_as(block.keys)
            blocks.append(replace(block, keys=first))
        else:
            blocks.append(block)
    return blocks


def key_at_edge_twice(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Counts the last key of each block of other ranks twice."""
    rank, _ = group()
    blocks = []
    for block in ring(keys, values, options):
        if block.source == rank:
            blocks.append(block)
            continue
        longer = replace(
            block,
            keys=torch.cat([block.keys, block.keys[:, :, -1:]], dim=2),
            values=torch.cat([block.values, block.values[:, :, -1:]], dim=2),
            at=torch.cat([block.at, block.at[-1:]]),
            documents=torch.cat([block.documents, block.documents[-1:]]),
        )
        blocks.append(longer)
    return blocks


def one_norm_averaged(model: Any) -> None:
    """Takes the mean over ranks for one norm, and sums all others."""
    _, ranks = group()
    sum_gradients(model)
    model.model.layers[0].input_layernorm.weight.grad /= ranks


def summed_in_bfloat16(part: torch.Tensor) -> torch.Tensor:
    """Sums outputs that are rounded to bfloat16 first, as ranks send them."""
    return summed(part.bfloat16().float())


wrong(
    "ring, one head of keys sent twice",
    "in the second layer the second head of keys of other ranks is their first one",
    CONTEXT,
    before=by_ring(blocks=one_head_sent_twice),
)
wrong(
    "ring, key at the edge twice",
    "the last key of other ranks is counted twice",
    CONTEXT,
    before=by_ring(blocks=key_at_edge_twice),
)
wrong(
    "DP, one norm averaged",
    "the gradient of the first layer's first norm is a mean over ranks, not a sum",
    DATA,
    sync=one_norm_averaged,
)
wrong(
    "TP, outputs sent in bfloat16",
    "outputs of ranks' MLPs are rounded to bfloat16 before they are summed",
    TENSOR,
    divide=tensor_mlp(left=summed_in_bfloat16),
)


# --- right set-ups


def packed_on_last_rank(probe: Probe, rows: list[Row]) -> Batch:
    """Packs rows on the last rank, pads them on others."""
    if not last_rank():
        return padded(probe, rows)
    batch = packed(probe, rows)
    del batch["documents"]
    return batch


def there_and_back(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    """Deals rows forth and back, as cards."""
    round_of_rows = 2 * ranks
    return [
        row
        for number, row in enumerate(rows)
        if number % round_of_rows in (rank, round_of_rows - 1 - rank)
    ]


def by_static_ddp(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def by_searching_ddp(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, find_unused_parameters=True)


def adapters_by_fsdp(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def padding_first(probe: Probe, rows: list[Row], multiple: int) -> Batch:
    """Fills a row up at its beginning, with documents of one token of padding."""
    batch = whole_row(probe, rows, multiple)
    missing = batch["input_ids"].shape[1] - sum(len(row["input_ids"]) for row in rows)
    return {name: values.roll(missing, 1) for name, values in batch.items()}


def ring_in_eights(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Returns blocks of 8 tokens of all ranks."""
    blocks = []
    for block in ring(keys, values, options):
        for part in torch.arange(len(block.at)).split(8):
            small = replace(
                block,
                keys=block.keys[:, :, part],
                values=block.values[:, :, part],
                at=block.at[part],
                documents=block.documents[part],
            )
            blocks.append(small)
    return blocks


right("data parallel, packed on one rank, padded on the other", DATA, collate=packed_on_last_rank)
right("data parallel, rows dealt forth and back", DATA, share=there_and_back)
right("DDP, static graph", DDP, wrap=by_static_ddp)
right("DDP, unused parameters searched, Mixtral", DDP, kind="mixtral", wrap=by_searching_ddp)
right("FSDP, LoRA", FSDP, adapt=with_lora, wrap=adapters_by_fsdp)
right("ring, GPT-2, striped", CONTEXT, kind="gpt2", split=striped)
right("ring in blocks of 8, zigzag", CONTEXT, split=zigzag, before=by_ring(blocks=ring_in_eights))
right(
    "all-gather, padding in front",
    CONTEXT,
    multiple=40,
    row=padding_first,
    before=by_ring(blocks=all_gather),
)
right("Ulysses, zigzag, Gemma 2", ULYSSES, kind="gemma2", split=zigzag)
right("Ulysses, Qwen 3, checkpointing", ULYSSES, kind="qwen3", prepare=checkpointed)
right("embedding split", EMBEDDING)
right("pipeline, tied", TIED_PIPELINE)
