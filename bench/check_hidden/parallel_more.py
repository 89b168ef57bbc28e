"""More faults of loops on several processes: small ones, wrappers, pipelines, and two at once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bench.check_hidden.attend import Block, Options, Part, layout, merged, visible
from bench.check_hidden.cases import PROMPTS, SHORT, STEPS, Batch, Row
from bench.check_hidden.loop import losses_of, shifted
from bench.check_hidden.parallel import (
    DDP,
    FSDP,
    ULYSSES,
    all_but_one,
    alone,
    averaged,
    half_of_ranks,
    labels_after,
    own_back,
    plan_one_document,
    positions_of_rank,
    right,
    twice,
    wrong,
)
from bench.check_hidden.plain import tiled
from bench.check_hidden.shared import (
    CONTEXT,
    DATA,
    TensorLoop,
    by_ring,
    exchanged,
    filled,
    group,
    in_order,
    ring,
    sum_gradients,
    summed_back,
    whole_row,
    zigzag,
)

# --- wrappers


def ddp_with(hook: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Returns what wraps a model by DDP with a hook of communication."""

    def wrap(model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(model)
        hook(wrapped)
        return wrapped

    return wrap


def finished(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def compressed(wrapped: Any) -> None:
    """Takes means in bfloat16, as the hooks of compression."""

    def reduced(
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        _, ranks = group()
        buffer = bucket.buffer()
        rounded_buffer = (buffer / ranks).bfloat16()
        dist.all_reduce(rounded_buffer)
        return finished(rounded_buffer.to(buffer.dtype))

    wrapped.register_comm_hook(None, reduced)


def low_rank(wrapped: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    state = PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    state.iter = 10
    wrapped.register_comm_hook(state, powerSGD_hook)


def rank_0_only(wrapped: Any) -> None:
    """Sends buckets of the first rank in place of a mean."""

    def reduced(
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        dist.broadcast(buffer, src=0)
        return finished(buffer)

    wrapped.register_comm_hook(None, reduced)


def fsdp_in(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Returns what wraps a model by FSDP that sums gradients in a dtype."""

    def wrap(model: Any) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    return wrap


def fsdp_last_not_synchronized(model: Any, number: int, steps: int) -> None:
    model.set_requires_gradient_sync(number < steps - 1)


wrong(
    "DDP, compressed to bfloat16",
    "DDP sums gradients in bfloat16",
    DDP,
    wrap=ddp_with(compressed),
)
wrong(
    "DDP, PowerSGD",
    "DDP sums approximations of gradients of rank 1",
    DDP,
    wrap=ddp_with(low_rank),
)
wrong(
    "DDP, hook sends the first rank's",
    "DDP's hook sends the first rank's gradients in place of a mean",
    DDP,
    wrap=ddp_with(rank_0_only),
)
wrong(
    "FSDP, reduced in bfloat16",
    "FSDP sums gradients in bfloat16",
    FSDP,
    wrap=fsdp_in(torch.bfloat16),
)
wrong(
    "FSDP, last micro-batch not synchronized",
    "FSDP does not synchronize the last micro-batch: its gradients are lost",
    FSDP,
    "huggingface/accelerate#3762",
    probes=(STEPS,),
    before=fsdp_last_not_synchronized,
)


# --- data parallelism


def first_layer_of_last_rank_lost(model: Any) -> None:
    """Leaves the last rank's share of the first layer out of the sum."""
    rank, ranks = group()
    if rank == ranks - 1:
        for weight in model.model.layers[0].parameters():
            weight.grad.zero_()
    sum_gradients(model)


def one_row_of_embedding_lost(model: Any) -> None:
    """Leaves one id of one rank out of the sum."""
    rank, _ = group()
    if rank == 0:
        model.get_input_embeddings().weight.grad[20].zero_()
    sum_gradients(model)


def last_rank_a_bit_off(model: Any) -> None:
    rank, ranks = group()
    if rank == ranks - 1:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.001)


def experts_twice(model: Any) -> None:
    sum_gradients(model)
    for name, weight in model.named_parameters():
        if "experts" in name:
            weight.grad *= 2


def experts_of_rank(model: Any) -> None:
    """Lets a rank's tokens have its own half of experts only: none are sent to other ranks."""
    rank, ranks = group()

    def own(module: Any, inputs: Any, output: Any) -> Any:
        logits, scores, experts = output
        share = logits.shape[-1] // ranks
        mine = (experts >= rank * share) & (experts < (rank + 1) * share)
        return logits, scores * mine, experts

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(own)


def last_rank_repeats(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    """Gives the last rank the first one's row in place of its last."""
    mine = rows[rank::ranks]
    if rank == ranks - 1 and mine:
        return [*mine[:-1], rows[0]]
    return mine


def halved_but_one(model: Any) -> None:
    """Halves all, and does not sum one part."""
    all_but_one(model)
    for weight in filled(model):
        weight.grad /= 2


def counts_by_largest(own: float, number: int) -> float:
    """Divides by the largest number of targets of a rank, times ranks."""
    _, ranks = group()
    largest = torch.tensor(float(own))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest) * ranks


def last_step_of_last_rank(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Shifts labels twice on the last rank."""
    rank, ranks = group()
    return losses_of(logits, shifted(wanted) if rank == ranks - 1 else wanted)


wrong(
    "DP, first layer of the last rank lost",
    "the last rank's gradients of the first layer are not in the sum",
    DATA,
    sync=first_layer_of_last_rank_lost,
)
wrong(
    "DP, one id's embedding lost",
    "the first rank's gradient of one id's embedding is not in the sum",
    DATA,
    sync=one_row_of_embedding_lost,
)
wrong(
    "DP, last rank's embedding 0.1 % larger",
    "the last rank computes with an embedding that is 0.1 % larger",
    DATA,
    prepare=last_rank_a_bit_off,
)
wrong(
    "EP, gradients of experts doubled, Mixtral",
    "gradients of experts are twice as large as they should be",
    DATA,
    kind="mixtral",
    sync=experts_twice,
)
wrong(
    "EP, experts of other ranks not asked, Mixtral",
    "a rank's tokens get its own half of experts only",
    DATA,
    kind="mixtral",
    prepare=experts_of_rank,
)
wrong(
    "DP, last rank repeats the first row",
    "the last rank has the first document in place of its last one",
    DATA,
    share=last_rank_repeats,
)
wrong(
    "DP, divided by the largest rank's targets",
    "the loss is divided by the largest number of targets of a rank, times ranks",
    DATA,
    count=counts_by_largest,
)
wrong(
    "DP, last rank shifts labels twice",
    "on the last rank tokens predict the one after the next",
    DATA,
    losses=last_step_of_last_rank,
)
wrong(
    "two: DP, one part not summed, all halved",
    "one part is not summed over ranks, and all gradients are halved",
    DATA,
    sync=halved_but_one,
)


# --- context parallelism


def labels_as_if_contiguous(labels: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Takes labels of a contiguous split."""
    rank, ranks = group()
    return shifted(labels).chunk(ranks, dim=1)[rank]


def one_late(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Writes keys of other ranks into buffers one token late."""
    rank, _ = group()
    blocks = []
    for block in exchanged(keys, values):
        if block.source != rank:
            late = replace(block, keys=block.keys.roll(1, 2), values=block.values.roll(1, 2))
            blocks.append(late)
        else:
            blocks.append(block)
    return in_order(blocks)


STALE: dict[tuple[int, int], Block] = {}


def of_batch_before(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Uses the keys that other ranks sent for the micro-batch before."""
    rank, _ = group()
    used = []
    for block in exchanged(keys, values):
        place = (options.layer, block.source)
        before = STALE.get(place)
        detached = replace(block, keys=block.keys.detach(), values=block.values.detach())
        STALE[place] = detached
        if block.source == rank or before is None or before.keys.shape != block.keys.shape:
            used.append(block)
        else:
            used.append(replace(block, keys=before.keys, values=before.values))
    return in_order(used)


def one_head_averaged(parts: list[Part], options: Options) -> Part:
    """Averages steps in the last head."""
    output, total = merged(parts, options)
    mean, _ = averaged(parts, options)
    output = output.clone()
    output[:, -1] = mean[:, -1]
    return output, total


def lost_in_second_layer(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Loses gradients of keys from other ranks in the second layer."""
    if options.layer != 1:
        return ring(keys, values, options)
    return in_order(exchanged(keys, values, own_back))


def one_percent_back(gradients: torch.Tensor, rank: int) -> torch.Tensor:
    return summed_back(gradients, rank) * 1.01


def ring_one_percent(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    return in_order(exchanged(keys, values, one_percent_back))


def one_ahead_in_steps(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Lets tokens see one later key of other ranks."""
    if block.source == layout.rank:
        return visible(block, options, heads)
    distance = layout.at[:, None] - block.at[None, :]
    together = layout.documents[:, None] == block.documents[None, :]
    return (together & (distance >= -1))[None].repeat(heads, 1, 1)


def steps_of_last_rank_only(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Lets one token of the last rank not see one key of the first."""
    rank, ranks = group()
    mask = visible(block, options, heads)
    if rank == ranks - 1 and block.source == 0:
        mask[:, 3, -2] = False
    return mask


def one_step_less(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    return ring(keys, values, options)[:-1]


def wide_row(probe: Any, rows: list[Row], multiple: int) -> Batch:
    return whole_row(probe, rows, 40)


wrong(
    "CP zigzag, labels as if contiguous",
    "labels are split contiguously, ids in zigzag",
    CONTEXT,
    split=zigzag,
    labels=labels_as_if_contiguous,
)
wrong(
    "CP, positions of the rank, GPT-2",
    "positions begin at 0 on each rank, not with documents",
    CONTEXT,
    kind="gpt2",
    positions=positions_of_rank,
)
wrong(
    "ring, keys one token late",
    "keys of other ranks are one token late in their buffers",
    CONTEXT,
    before=by_ring(blocks=one_late),
)
wrong(
    "ring, keys of the micro-batch before",
    "keys of other ranks are those of the micro-batch before",
    CONTEXT,
    probes=(STEPS,),
    row=wide_row,
    before=by_ring(blocks=of_batch_before),
)
wrong(
    "ring, one head averaged",
    "in the last head outputs of steps are averaged, not weighted",
    CONTEXT,
    before=by_ring(merged=one_head_averaged),
)
wrong(
    "ring, gradients of keys lost in one layer",
    "in the second layer gradients of keys do not come back from other ranks",
    CONTEXT,
    before=by_ring(blocks=lost_in_second_layer),
)
wrong(
    "ring, gradients of keys 1 % larger",
    "gradients of keys and values are 1 % too large",
    CONTEXT,
    before=by_ring(blocks=ring_one_percent),
)
wrong(
    "ring, zigzag, one ahead in steps",
    "tokens see one later key of other ranks",
    CONTEXT,
    split=zigzag,
    before=by_ring(visible=one_ahead_in_steps),
)
wrong(
    "ring, one token, one key",
    "one token of the last rank does not see one key of the first",
    CONTEXT,
    before=by_ring(visible=steps_of_last_rank_only),
)
wrong(
    "ring, key heads tiled",
    "heads of queries use wrong heads of keys",
    CONTEXT,
    before=by_ring(repeat=tiled),
)
wrong(
    "ring on 3, zigzag, one step less",
    "the last step of the ring is left out",
    CONTEXT,
    processes=3,
    probes=(SHORT, PROMPTS),
    split=zigzag,
    before=by_ring(blocks=one_step_less),
)
wrong(
    "two: CP, no exchange, loss halved",
    "each rank sees its own keys only, and the loss is halved",
    CONTEXT,
    before=by_ring(blocks=alone),
    count=half_of_ranks,
)
wrong(
    "two: CP, labels after the split, documents forgotten",
    "labels are shifted after the split, and documents of a row see each other",
    CONTEXT,
    labels=labels_after,
    plan=plan_one_document,
)
wrong(
    "two: Ulysses, summed twice, labels after the split",
    "gradients are summed twice, and labels are shifted after the split",
    ULYSSES,
    labels=labels_after,
    sync=twice,
)


# --- a row-parallel bias


def bias_on_each_rank(model: Any) -> None:
    """Adds the bias of each down projection once for each rank."""
    _, ranks = group()

    def more(module: Any, inputs: Any, output: Any) -> Any:
        return output + (ranks - 1) * module.bias

    for layer in model.model.layers:
        layer.mlp.c_proj.register_forward_hook(more)


def of_none(name: str) -> bool:
    return False


WHOLE = TensorLoop(parts=of_none)

wrong(
    "TP, bias on each rank, StarCoder 2",
    "biases of down projections are added once for each rank",
    WHOLE,
    kind="starcoder2",
    divide=bias_on_each_rank,
)


def as_it_is(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


# --- a pipeline of two stages: the first rank has the embedding and the first layer


Handed = Callable[[torch.Tensor], torch.Tensor]
ENTERED: list[torch.Tensor] = []  # what the second stage got
LEFT: list[torch.Tensor] = []  # what the first stage gave


def handed_over(forth: Handed) -> Callable[[Any], None]:
    """Returns what hands hidden states over after the first layer."""

    def divide(model: Any) -> None:
        def hand(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            rank, _ = group()
            sent = output.detach().clone()
            dist.broadcast(sent, src=0)
            if rank == 0:
                LEFT.append(output)
                return output.detach().requires_grad_()  # later layers are the other stage's
            entered = forth(sent).requires_grad_()
            ENTERED.append(entered)
            return entered

        model.model.layers[0].register_forward_hook(hand)

    return divide


def handed_back(back: Handed) -> Callable[[Any], None]:
    """Returns what hands gradients back, and puts those of both stages together."""

    def after(model: Any) -> None:
        rank, _ = group()
        if rank == 0:
            model.zero_grad()
        for number in range(max(len(ENTERED), len(LEFT))):
            if rank == 0:
                gradient = torch.zeros_like(LEFT[number])
                dist.broadcast(gradient, src=1)
                LEFT[number].backward(back(gradient))
            else:
                entered: Any = ENTERED[number]
                dist.broadcast(entered.grad, src=1)
        ENTERED.clear()
        LEFT.clear()
        sum_gradients(model)

    return after


def rounded(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.bfloat16().to(hidden.dtype)


def doubled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def of_next_row(gradient: torch.Tensor) -> torch.Tensor:
    """Gives each row the next one's gradient."""
    return gradient.roll(1, dims=0)


PIPELINE = replace(WHOLE, divide=handed_over(as_it_is), after=handed_back(as_it_is))


wrong(
    "PP, hand-over in bfloat16",
    "hidden states are handed over in bfloat16",
    PIPELINE,
    divide=handed_over(rounded),
)
wrong(
    "PP, gradient handed back in bfloat16",
    "gradients are handed back in bfloat16",
    PIPELINE,
    after=handed_back(rounded),
)
wrong(
    "PP, gradient handed back doubled",
    "gradients that are handed back are doubled",
    PIPELINE,
    "pytorch/torchtitan#2972",
    after=handed_back(doubled),
)
wrong(
    "PP, gradients of other rows handed back",
    "gradients that are handed back are of other rows",
    PIPELINE,
    after=handed_back(of_next_row),
)
right("pipeline", PIPELINE)
