"""More faults of loops on one process: small ones, and two at once."""

import math
from typing import Any

import torch
from torch.nn.functional import linear

from bench.check_hidden.attend import Block, Kernel, Options, layout, scored, use, visible
from bench.check_hidden.cases import ENDS, IGNORED, PROMPTS, STEPS, Batch, Row
from bench.check_hidden.loop import PACKED, PADDED, Amounts, forward_masked, losses_of, summed
from bench.check_hidden.plain import (
    KERNEL,
    clipped,
    first_layer,
    forward_causal,
    hidden_of,
    hooked,
    last_dropped,
    layers,
    left_without_mask,
    mean_of_documents,
    means_of_steps,
    not_capped,
    one_percent,
    padding_trained,
    shifted_twice,
    tied,
    with_kernel,
    with_lora,
    without_window,
    wrong,
)
from longctx.check import Probe

# --- small


def eps_a_bit_larger(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 2e-6


def loss_1e_3(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return 1.001 * summed(losses, wanted, amounts)


def loss_1e_4(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return 1.0001 * summed(losses, wanted, amounts)


def loss_1e_5(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return 1.00001 * summed(losses, wanted, amounts)


def element_a_bit_larger(model: Any) -> None:
    """Makes the largest element of one gradient 2 % larger."""
    gradient = layers(model)[0].mlp.gate_proj.weight.grad
    largest = gradient.abs().argmax()
    gradient.view(-1)[largest] *= 1.02


def part_a_bit_larger(model: Any) -> None:
    layers(model)[0].self_attn.v_proj.weight.grad *= 1.0005


def hidden_1e_4(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 1.0001


def like_tf32(hidden: torch.Tensor) -> torch.Tensor:
    """Rounds to 10 bits, as tensor cores do."""
    scale = 2.0**13 + 1
    big = hidden * scale
    return big - (big - hidden)


def gemma_normalizer_rounded(hidden: torch.Tensor) -> torch.Tensor:
    root = math.sqrt(hidden.shape[-1])
    rounded = float(torch.tensor(root).bfloat16())
    return hidden * (rounded / root)


def embedding_of(model: Any) -> Any:
    return model.get_input_embeddings()


def last_norm_of(model: Any) -> Any:
    return model.model.norm


def weights_rounded(queries: torch.Tensor, block: Block, options: Options) -> torch.Tensor:
    """Rounds scores to bfloat16."""
    return scored(queries, block, options).bfloat16().float()


def one_score_more(queries: torch.Tensor, block: Block, options: Options) -> torch.Tensor:
    """Adds to the score of one pair of tokens in one head of the second layer."""
    scores = scored(queries, block, options)
    if options.layer != 1:
        return scores
    change = torch.zeros_like(scores)
    change[0, 2, 30, 20] = 0.5
    return scores + change


def dropout_1e_2(hidden: torch.Tensor) -> torch.Tensor:
    return torch.dropout(hidden, 0.01, True)


def one_more_one_less(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Counts one token twice and another one not at all."""
    weights = torch.ones_like(losses)
    row = int((wanted != IGNORED).sum(1).argmax())
    weights[row, 3] = 2
    weights[row, 9] = 0
    return (losses * weights).sum() / amounts.targets


wrong(
    "norms with twice the epsilon",
    "norms have an epsilon of 2e-6 in place of 1e-6",
    PADDED,
    prepare=eps_a_bit_larger,
)
wrong("loss 0.1 % larger", "the loss is multiplied by 1.001", PADDED, total=loss_1e_3)
wrong("loss 0.01 % larger", "the loss is multiplied by 1.0001", PADDED, total=loss_1e_4)
wrong("loss 0.001 % larger", "the loss is multiplied by 1.00001", PADDED, total=loss_1e_5)
wrong(
    "one element 2 % larger",
    "the largest element of one gradient is 2 % larger",
    PADDED,
    after=element_a_bit_larger,
)
wrong(
    "one part 0.05 % larger",
    "the first layer's value projection has a gradient 0.05 % too large",
    PADDED,
    after=part_a_bit_larger,
)
wrong(
    "hidden states 0.01 % larger",
    "the first layer's output is multiplied by 1.0001",
    PADDED,
    prepare=hooked(first_layer, hidden_1e_4),
)
wrong(
    "hidden states like TF32",
    "hidden states before the head are rounded to 10 bits",
    PADDED,
    prepare=hooked(last_norm_of, like_tf32),
)
wrong(
    "scale of embeddings rounded, Gemma",
    "the embeddings' factor, the root of the width, is rounded to bfloat16",
    PADDED,
    "Gemma's normalizer in many trainers",
    kind="gemma",
    prepare=hooked(embedding_of, gemma_normalizer_rounded),
)
wrong(
    "scores rounded",
    "scores of attention are rounded to bfloat16",
    KERNEL,
    before=with_kernel(scored=weights_rounded),
)
wrong(
    "one score of one head",
    "one score of one head of the second layer is 0.5 larger",
    KERNEL,
    before=with_kernel(scored=one_score_more),
)
wrong(
    "dropout of 1 % by hand",
    "the first layer's output has a dropout of 1 %",
    PADDED,
    prepare=hooked(first_layer, dropout_1e_2),
)
wrong(
    "one token twice, one not at all",
    "one token's loss counts twice, another one's not at all",
    PADDED,
    total=one_more_one_less,
)


# --- what counts


PROMPT_LENGTHS: list[int] = []


def prompts_remembered(probe: Probe) -> list[Row]:
    """Gives prompts labels, and remembers how long they are."""
    PROMPT_LENGTHS.clear()
    rows = []
    for row in probe.rows:
        PROMPT_LENGTHS.append(row["labels"].count(IGNORED))
        rows.append({**row, "labels": row["input_ids"]})
    return rows


def prompts_at_a_tenth(
    losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts
) -> torch.Tensor:
    """Weighs tokens of prompts by 0.1, and divides by answers' tokens."""
    columns = torch.arange(losses.shape[1])[None] + 1
    prompts = columns < torch.tensor(PROMPT_LENGTHS)[:, None]
    weights = torch.where(prompts, 0.1, 1.0) * (wanted != IGNORED)
    answers = ((wanted != IGNORED) & ~prompts).sum()
    return (losses * weights).sum() / answers


def ends_twice(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Weighs ends of texts twice."""
    weights = 1.0 + (wanted == 1)
    return (losses * weights).sum() / amounts.targets


def some_dropped(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Leaves out a tenth of all tokens by chance."""
    generator = torch.Generator().manual_seed(4)
    kept = torch.rand(losses.shape, generator=generator) > 0.1
    return (losses * kept).sum() / amounts.targets


def by_id(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Weighs even ids more."""
    weights = torch.where(wanted % 2 == 0, 1.1, 1.0)
    return (losses * weights).sum() / amounts.targets


def preference(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Prefers even rows to odd ones, as DPO without a reference."""
    rows = losses.sum(1)
    margin = rows[1::2].sum() - rows[0::2].sum()
    return -torch.nn.functional.logsigmoid(0.1 * margin)


def unlikely_again(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Adds a loss of saying id 7."""
    chance = logits.softmax(-1)[..., 7]
    penalty = -torch.log1p(-chance)
    return losses_of(logits, wanted) + penalty * (wanted != IGNORED)


def half_of_a_teacher(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Takes half of the loss from a teacher's distribution."""
    teacher = (0.5 * logits.detach().roll(1, dims=-1)).softmax(-1)
    divergence = -(teacher * logits.log_softmax(-1)).sum(-1)
    trained = wanted != IGNORED
    return 0.5 * losses_of(logits, wanted) + 0.5 * divergence * trained


wrong(
    "prompts weigh a tenth",
    "tokens of prompts are trained with a weight of 0.1",
    PADDED,
    probes=(PROMPTS,),
    rows=prompts_remembered,
    total=prompts_at_a_tenth,
)
wrong(
    "ends weigh twice",
    "ends of texts are trained with a weight of 2",
    PADDED,
    probes=(ENDS,),
    total=ends_twice,
)
wrong(
    "a tenth of tokens dropped",
    "a tenth of all tokens, by chance, has no loss",
    PADDED,
    total=some_dropped,
)
wrong("even ids weigh more", "even ids are trained with a weight of 1.1", PADDED, total=by_id)
wrong(
    "preference in place of a loss",
    "odd documents are unlearnt for even ones: a preference loss",
    PADDED,
    "DPO",
    total=preference,
)
wrong("one id made unlikely", "a loss of saying id 7 is added", PADDED, losses=unlikely_again)
wrong(
    "half of a teacher",
    "half of the loss is of a teacher's distribution",
    PADDED,
    "MakazhanAlpamys/Soup#720",
    losses=half_of_a_teacher,
)


# --- parts of models


def residual_whole(model: Any) -> None:
    for layer in layers(model):
        layer.residual_multiplier = 1.0


def not_normed(model: Any, batch: Batch) -> torch.Tensor:
    """Takes hidden states before the last norm."""
    caught: list[torch.Tensor] = []

    def catch(module: Any, inputs: Any) -> None:
        caught.append(inputs[0])

    handle = model.model.norm.register_forward_pre_hook(catch)
    hidden_of(model, batch)
    handle.remove()
    logits: torch.Tensor = model.lm_head(caught[0]).float()
    return logits


def scores_swapped(model: Any) -> None:
    """Gives the two experts of a token each other's weight."""

    def swapped(module: Any, inputs: Any, output: Any) -> Any:
        logits, scores, experts = output
        return logits, scores.flip(-1), experts

    for layer in layers(model):
        layer.mlp.gate.register_forward_hook(swapped)


def capacity_of_30(model: Any) -> None:
    """Lets an expert have 30 tokens at most; what comes later is dropped."""

    def limited(module: Any, inputs: Any, output: Any) -> Any:
        logits, scores, experts = output
        kept = torch.ones_like(scores)
        for expert in range(logits.shape[-1]):
            mine = experts == expert
            place = mine.flatten().cumsum(0).view_as(experts)
            kept = kept.masked_fill(mine & (place > 30), 0.0)
        return logits, scores * kept, experts

    for layer in layers(model):
        layer.mlp.gate.register_forward_hook(limited)


def keys_not_normed(model: Any) -> None:
    for layer in layers(model):
        layer.self_attn.k_norm.forward = as_it_is


def as_it_is(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def not_transposed(kernel: Kernel) -> Any:
    """Returns attention that puts heads and tokens together without a transposition."""

    def attention(module: Any, *inputs: Any, **options: Any) -> tuple[torch.Tensor, None]:
        output, _ = kernel(module, *inputs, **options)
        by_heads = output.transpose(1, 2).contiguous()
        return by_heads.view(output.shape), None

    return attention


def heads_and_tokens_mixed(model: Any) -> Any:
    return use(model, not_transposed(Kernel()))


def biases_lost(model: Any) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.grad = torch.zeros_like(weight)


def adapters_dropped_out(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(0.05).train()


def head_twice(model: Any, batch: Batch) -> torch.Tensor:
    """Counts the head's share of a tied weight twice."""
    weight = model.lm_head.weight
    doubled = 2 * weight - weight.detach()
    return linear(hidden_of(model, batch), doubled).float()


wrong(
    "factor of residuals ignored, Granite",
    "what layers add is not multiplied by the model's residual_multiplier of 0.5",
    PADDED,
    kind="granite",
    sizes={"residual_multiplier": 0.5},
    prepare=residual_whole,
)
wrong(
    "divisor of logits ignored, Granite",
    "logits are not divided by the model's logits_scaling of 4",
    PADDED,
    kind="granite",
    sizes={"logits_scaling": 4.0},
    forward=not_capped,
)
wrong(
    "factor of logits ignored, Cohere 2",
    "logits are not multiplied by the model's logit_scale",
    PADDED,
    kind="cohere2",
    forward=not_capped,
)
wrong("last norm left out", "the head gets what the last norm gets", PADDED, forward=not_normed)
wrong(
    "weights of experts swapped, Mixtral",
    "a token's two experts have each other's weight",
    PADDED,
    kind="mixtral",
    prepare=scores_swapped,
)
wrong(
    "capacity of experts, Mixtral",
    "tokens beyond 30 of an expert are dropped",
    PADDED,
    kind="mixtral",
    prepare=capacity_of_30,
)
wrong(
    "keys not normed, Qwen 3",
    "the norm of keys is left out (and gets no gradient)",
    PADDED,
    kind="qwen3",
    prepare=keys_not_normed,
)
wrong(
    "heads and tokens mixed",
    "outputs of heads are not transposed before they are put together",
    KERNEL,
    before=heads_and_tokens_mixed,
)
wrong(
    "biases lost, StarCoder 2",
    "gradients of all biases are zero",
    PADDED,
    kind="starcoder2",
    after=biases_lost,
)
wrong(
    "LoRA with dropout put in",
    "LoRA's adapters have a dropout of 5 %",
    PADDED,
    adapt=with_lora,
    prepare=adapters_dropped_out,
)
wrong(
    "tied, head's share twice",
    "the head's share of a tied weight's gradient counts twice",
    PADDED,
    adapt=tied,
    forward=head_twice,
)


# --- what is stale


BEFORE: list[torch.Tensor] = []


def forward_bounds_before(model: Any, batch: Batch) -> torch.Tensor:
    """Uses the bounds of documents of the micro-batch before, as far as they go."""
    documents = batch["documents"].clone()
    used = documents
    if BEFORE:
        stale = BEFORE[-1]
        common = min(stale.shape[1], documents.shape[1])
        used = documents + 100
        used[:, :common] = stale[:, :common]
    BEFORE.append(documents)
    if len(BEFORE) == 3:
        BEFORE.clear()
    return forward_masked(model, {**batch, "documents": used})


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def forgotten_before_backward(
    losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts
) -> torch.Tensor:
    """Forgets documents before layers are computed again."""
    layout.documents = torch.zeros_like(layout.documents)
    layout.at = torch.arange(len(layout.at))
    return summed(losses, wanted, amounts)


def largest_tenth(model: Any) -> None:
    """Keeps the largest tenth of each gradient."""
    for weight in model.parameters():
        size = weight.grad.abs()
        least = size.flatten().kthvalue(int(0.9 * size.numel()) + 1).values
        weight.grad = weight.grad * (size >= least)


def signs(model: Any) -> None:
    for weight in model.parameters():
        weight.grad = weight.grad.sign() * weight.grad.abs().mean()


def each_of_length_1(model: Any) -> None:
    for weight in model.parameters():
        weight.grad = weight.grad / weight.grad.norm().clamp(min=1e-12)


wrong(
    "bounds of the micro-batch before",
    "attention has the bounds of documents of the micro-batch before",
    PACKED,
    probes=(STEPS,),
    forward=forward_bounds_before,
)
wrong(
    "bounds forgotten when layers are computed again",
    "layers are computed again in backward without bounds of documents",
    KERNEL,
    before=with_kernel(),
    prepare=checkpointed,
    total=forgotten_before_backward,
)
wrong(
    "gradients clipped before they are given",
    "gradients are clipped to a norm of 0.5 (the checker wants them not clipped)",
    PADDED,
    after=clipped,
)
wrong(
    "largest tenth of gradients",
    "only the largest tenth of each gradient is kept",
    PADDED,
    after=largest_tenth,
)
wrong("signs of gradients", "gradients are signs times a mean", PADDED, after=signs)
wrong(
    "each gradient of length 1",
    "each parameter's gradient is divided by its norm",
    PADDED,
    after=each_of_length_1,
)


# --- two at once


def steps_once_more(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return summed(losses, wanted, amounts) / amounts.steps


wrong(
    "two: documents forgotten, divided by steps",
    "tokens see earlier documents, and the loss is divided by steps once more",
    PACKED,
    probes=(STEPS,),
    forward=forward_causal,
    total=steps_once_more,
)
wrong(
    "two: padding trained, documents alike",
    "padding is trained, and each row counts the same",
    PADDED,
    collate=padding_trained,
    total=mean_of_documents,
)
wrong(
    "two: shifted twice, last document dropped",
    "labels are shifted twice, and the last document is dropped",
    PADDED,
    wanted=shifted_twice,
    rows=last_dropped,
)
wrong(
    "two: padding seen, 1 % too much",
    "tokens see padding at their left, and the loss is 1 % too large",
    PADDED,
    collate=left_without_mask,
    total=one_percent,
)
wrong(
    "two: windows ignored, means of micro-batches",
    "sliding windows are ignored, and the loss is a mean of means of micro-batches",
    KERNEL,
    probes=(STEPS,),
    kind="mistral",
    before=with_kernel(options=without_window),
    total=means_of_steps,
)


def ahead_and_rounded(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Lets the first head of the second layer see one token ahead."""
    mask = visible(block, options, heads)
    if options.layer == 1:
        distance = layout.at[:, None] - block.at[None, :]
        together = layout.documents[:, None] == block.documents[None, :]
        mask[0] = together & (distance >= -1)
    return mask


def decayed_and_scaled(model: Any) -> None:
    for weight in model.parameters():
        weight.grad = 0.5 * weight.grad + 0.01 * weight.detach()


wrong(
    "two: one head ahead, MLP detached",
    "one head of the second layer sees one token ahead; the first layer's output is detached",
    KERNEL,
    before=with_kernel(visible=ahead_and_rounded),
    prepare=hooked(first_layer, torch.Tensor.detach),
)
wrong(
    "two: half a gradient and decay",
    "gradients are halved, and 0.01 of the weights is added",
    PADDED,
    after=decayed_and_scaled,
)
