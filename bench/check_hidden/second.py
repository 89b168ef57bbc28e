"""A second set of faults and right set-ups on one process, by another examiner.

They are no faults of the first set in other words; where somebody has reported one, it is named.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.functional import kl_div, one_hot, silu

from bench.check_hidden import plain
from bench.check_hidden.attend import (
    Block,
    Options,
    Part,
    layout,
    repeated,
    scored,
    visible,
    with_sinks,
)
from bench.check_hidden.cases import ENDS, IGNORED, LENGTHS, PROMPTS, STEPS, Batch, Row
from bench.check_hidden.loop import (
    PACKED,
    PADDED,
    Amounts,
    batch_of,
    block_mask,
    forward,
    forward_masked,
    losses_of,
    packed,
    padded_left,
    summed,
    table,
)
from bench.check_hidden.plain import (
    KERNEL,
    layers,
    positions_only,
    tied,
    with_dora,
    with_kernel,
    with_lora,
)
from longctx.check import Probe

wrong = partial(plain.wrong, second=True)
right = partial(plain.right, second=True)


def as_trained(model: Any) -> Any:
    """Gives norms and biases weights of their own: new models have zeros and ones."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


# --- packing, padding and masks


def in_pieces_of_24(probe: Probe) -> list[Row]:
    """Lets documents go on as new ones after each 24 tokens."""
    pieces = []
    for row in probe.rows:
        for start in range(0, len(row["input_ids"]), 24):
            piece = {name: values[start : start + 24] for name, values in row.items()}
            pieces.append(piece)
    return pieces


def forward_prefix(model: Any, batch: Batch) -> torch.Tensor:
    """Lets the tokens of a prompt see each other, also later ones."""
    tokens = batch["input_ids"].shape[1]
    unlabeled = (batch["labels"] == IGNORED).long().cumprod(1).sum(1)
    prompts = torch.minimum(unlabeled, batch["attention_mask"].sum(1))
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    inside = torch.arange(tokens)[None] < prompts[:, None]
    seen = causal | (inside[:, :, None] & inside[:, None, :])
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -1e9)
    return forward(model, {**batch, "attention_mask": mask[:, None]})


def two_rows(probe: Probe, rows: list[Row]) -> Batch:
    """Packs documents into two rows of one length; padding is a document of its own."""
    halves = [part for part in (rows[0::2], rows[1::2]) if part]
    packs = [packed(probe, half) for half in halves]
    longest = max(pack["input_ids"].shape[1] for pack in packs)
    fillers = {"input_ids": probe.pad, "labels": IGNORED, "position_ids": 0, "documents": -1}
    whole = {}
    for name, filler in fillers.items():
        values = [pack[name][0].tolist() for pack in packs]
        whole[name] = table(values, filler, left=False, length=longest)
    return whole


def forward_first_rows_bounds(model: Any, batch: Batch) -> torch.Tensor:
    """Takes the bounds of the first row for all rows."""
    documents = batch["documents"]
    return forward_masked(model, {**batch, "documents": documents[:1].expand_as(documents)})


def one_padding_seen(probe: Probe, rows: list[Row]) -> Batch:
    """Pads at the left, with a mask that begins one token too early."""
    batch = padded_left(probe, rows)
    mask = batch["attention_mask"]
    early = mask.clone()
    early[:, :-1] |= mask[:, 1:]
    batch["attention_mask"] = early
    return batch


def forward_soft_mask(model: Any, batch: Batch) -> torch.Tensor:
    """Hides other documents by -8, later tokens by -1e9."""
    tokens = batch["input_ids"].shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mask = block_mask(batch["documents"]).clamp(min=-8.0)
    mask = mask.masked_fill(later, -1e9).to(next(model.parameters()).dtype)
    return forward(model, {**batch, "attention_mask": mask})


wrong(
    "long documents go on as new ones",
    "documents go on as new ones after each 24 tokens: later tokens do not see the ones before, "
    "the 25th has no loss",
    PACKED,
    "huggingface/trl packing_strategy wrapped",
    rows=in_pieces_of_24,
    forward=forward_masked,
)
wrong(
    "prompts see both ways",
    "tokens of prompts see later tokens of their prompt",
    PADDED,
    "huggingface/transformers, token_type_ids of Gemma 3",
    probes=(PROMPTS,),
    forward=forward_prefix,
)
wrong(
    "bounds of the first row for all rows",
    "the second packed row of a micro-batch has the first one's bounds of documents",
    PACKED,
    "axolotl-ai-cloud/axolotl#1375",
    collate=two_rows,
    forward=forward_first_rows_bounds,
)
wrong(
    "one token of padding seen",
    "tokens see one token of the padding at their left",
    PADDED,
    collate=one_padding_seen,
)
wrong(
    "soft mask of documents",
    "other documents are hidden by -8 only, so that a bit of them is seen",
    PACKED,
    forward=forward_soft_mask,
)


# --- attention


def windows_of_other_layers(options: Options) -> Options:
    return replace(options, window=None if options.window else 16)


def in_chunks_of_16(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Lets tokens see keys of their chunk of 16, as Llama 4 does, in place of the last 16."""
    mask = visible(block, replace(options, window=None), heads)
    chunks = layout.at[:, None] // 16 == block.at[None, :] // 16
    return mask & chunks


def capped_before_scale(queries: torch.Tensor, block: Block, options: Options) -> torch.Tensor:
    scores = queries @ block.keys.transpose(-1, -2)
    if options.cap is not None:
        scores = torch.tanh(scores / options.cap) * options.cap
    return scores * options.scaling


def sinks_detached(part: Part, options: Options) -> torch.Tensor:
    sinks = None if options.sinks is None else options.sinks.detach()
    return with_sinks(part, replace(options, sinks=sinks))


def first_of_group(keys: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeats keys for heads of queries; only the first head of each group gives a gradient."""
    others = [keys.detach()] * (groups - 1)
    return torch.stack([keys, *others], dim=2).flatten(1, 2)


wrong(
    "windows of the other layers, Gemma 2",
    "the layer of full attention has a window, and the one with a window has none",
    KERNEL,
    kind="gemma2",
    before=with_kernel(options=windows_of_other_layers),
)
wrong(
    "chunks in place of windows, Mistral",
    "tokens see keys of their own chunk of 16, not the last 16",
    KERNEL,
    kind="mistral",
    before=with_kernel(visible=in_chunks_of_16),
)
wrong(
    "cap before the scale, Gemma 2",
    "scores are capped before they are scaled",
    KERNEL,
    kind="gemma2",
    before=with_kernel(scored=capped_before_scale),
)
wrong(
    "sinks without a gradient, gpt-oss",
    "sinks take part in attention, but get no gradient",
    KERNEL,
    kind="gpt_oss",
    before=with_kernel(sinks=sinks_detached),
)
wrong(
    "gradients of keys from one head of a group",
    "keys and values get gradients of the first head of queries of each group only",
    KERNEL,
    "marin-community/levanter#449",
    before=with_kernel(repeat=first_of_group),
)


# --- positions


def in_pairs(model: Any) -> None:
    """Turns pairs of neighbours by RoPE: scores are the same if both are permuted alike."""
    width = model.config.head_dim
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])

    def permuted(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = output.unflatten(-1, (-1, width))
        return heads[..., order].flatten(-2)

    for layer in layers(model):
        layer.self_attn.q_proj.register_forward_hook(permuted)
        layer.self_attn.k_proj.register_forward_hook(permuted)


HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def all_turned(model: Any) -> None:
    """Turns all dimensions of heads by RoPE, whatever the model's factor is."""
    width = model.config.hidden_size // model.config.num_attention_heads
    powers = torch.arange(0, width, 2) / width
    model.model.rotary_emb.inv_freq = 1.0 / 10000.0**powers


def without_factor_of_yarn(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.0


def frequencies_rounded(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


def positions_from_1(probe: Probe, rows: list[Row]) -> Batch:
    batch = batch_of(probe, rows)
    tokens = batch["input_ids"].shape[1]
    batch["position_ids"] = torch.arange(1, 1 + tokens)[None].repeat(len(rows), 1)
    return batch


wrong(
    "RoPE of neighbours",
    "RoPE turns pairs of neighbours, not of the two halves of a head",
    PADDED,
    "PaddlePaddle/PaddleFleet#678",
    prepare=in_pairs,
)
wrong(
    "partial RoPE ignored, Phi 3",
    "RoPE turns all dimensions of heads, not the first half of them",
    PADDED,
    "AI-Hypercomputer/maxtext#4742",
    kind="phi3",
    sizes={"rope_parameters": HALF_ROTARY},
    prepare=all_turned,
)
wrong(
    "factor of YaRN ignored",
    "sines and cosines are not multiplied by YaRN's factor (its frequencies are right)",
    PADDED,
    sizes={"rope_parameters": YARN},
    prepare=without_factor_of_yarn,
)
wrong(
    "frequencies of RoPE rounded",
    "frequencies of RoPE are rounded to bfloat16: the model was cast",
    PADDED,
    prepare=frequencies_rounded,
)
wrong(
    "positions from 1 on, GPT-2",
    "positions are one too large",
    PADDED,
    kind="gpt2",
    collate=positions_from_1,
)


# --- norms, MLPs, routers


Computed = Callable[[Any, torch.Tensor], torch.Tensor]


def norms_by(computed: Computed) -> Callable[[Any], None]:
    """Returns what makes all norms of hidden states compute in another way."""

    def prepare(model: Any) -> None:
        for name, module in model.named_modules():
            if "norm" in name:
                module.forward = partial(computed, module)

    return prepare


def without_one(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Multiplies by Gemma's weight as if it were Llama's."""
    output: torch.Tensor = norm._norm(hidden.float()) * norm.weight.float()
    return output.type_as(hidden)


def weight_first(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Multiplies by the weight, and normalizes what comes out."""
    product: torch.Tensor = hidden.float() * norm.weight.float()
    variance = product.square().mean(-1, keepdim=True)
    output = product * torch.rsqrt(variance + norm.variance_epsilon)
    return output.type_as(hidden)


def constant_root(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Takes the root for a constant in backward."""
    wide = hidden.float()
    variance = wide.detach().square().mean(-1, keepdim=True)
    output: torch.Tensor = wide * torch.rsqrt(variance + norm.variance_epsilon) * norm.weight
    return output.type_as(hidden)


def gate_and_up_swapped(model: Any) -> None:
    def swapped(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
        product = silu(mlp.up_proj(hidden)) * mlp.gate_proj(hidden)
        output: torch.Tensor = mlp.down_proj(product)
        return output

    for layer in layers(model):
        layer.mlp.forward = partial(swapped, layer.mlp)


def router_by_sigmoid(model: Any) -> None:
    """Takes sigmoids of a token's two experts, made to sum to 1, in place of a softmax."""

    def by_sigmoid(module: Any, inputs: Any, output: Any) -> Any:
        logits, _, experts = output
        chosen = logits.float().sigmoid().gather(-1, experts)
        return logits, chosen / chosen.sum(-1, keepdim=True), experts

    for layer in layers(model):
        layer.mlp.gate.register_forward_hook(by_sigmoid)


def expert_biases_whole(model: Any) -> None:
    """Adds the last bias of each expert of a token in full, not by the router's weight."""

    def more(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        _, experts, weights = inputs
        rest: torch.Tensor = (1 - weights)[..., None] * module.down_proj_bias[experts]
        return output + rest.sum(1)

    for layer in layers(model):
        layer.mlp.experts.register_forward_hook(more)


wrong(
    "norms without one, Gemma",
    "norms multiply by their weight, not by 1 + weight",
    PADDED,
    "pytorch/executorch#19901",
    kind="gemma",
    adapt=as_trained,
    prepare=norms_by(without_one),
)
wrong(
    "norms multiply first",
    "norms multiply by their weight before they normalize",
    PADDED,
    "vllm-project/tpu-inference#3040",
    adapt=as_trained,
    prepare=norms_by(weight_first),
)
wrong(
    "backward of norms without the root",
    "norms are right forward; backward their root is taken for a constant",
    PADDED,
    "tenstorrent/tt-metal#28803",
    adapt=as_trained,
    prepare=norms_by(constant_root),
)
wrong(
    "gate and up swapped",
    "the activation is of the up projection, not of the gate",
    PADDED,
    prepare=gate_and_up_swapped,
)
wrong(
    "router by sigmoid, Mixtral",
    "weights of experts are of sigmoids, not of a softmax",
    PADDED,
    "flashinfer-ai/flashinfer#2889",
    kind="mixtral",
    prepare=router_by_sigmoid,
)
wrong(
    "biases of experts in full, gpt-oss",
    "the last biases of experts are added in full, not by the router's weights",
    PADDED,
    "NVIDIA-NeMo/Automodel#2591",
    kind="gpt_oss",
    adapt=as_trained,
    prepare=expert_biases_whole,
)


# --- adapters and ties


def lora_inputs_detached(model: Any) -> None:
    """Lets no gradient flow back through adapters into what comes before them."""

    def cut(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0].detach(), *inputs[1:])

    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.lora_A["default"].register_forward_pre_hook(cut)


def queries_detached(model: Any) -> None:
    def cut(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.detach()

    for layer in layers(model):
        layer.self_attn.q_proj.register_forward_hook(cut)


def dora_as_lora(model: Any) -> None:
    """Adds updates as LoRA does, without DoRA's magnitudes."""
    for layer in layers(model):
        layer.self_attn.q_proj.lora_variant.clear()


def forward_embedding_detached(model: Any, batch: Batch) -> torch.Tensor:
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
    mask = batch["attention_mask"]
    output = model(inputs_embeds=embedded, attention_mask=mask, use_cache=False)
    logits: torch.Tensor = output.logits
    return logits.float()


def real_id_as_padding(model: Any) -> None:
    model.get_input_embeddings().padding_idx = 20


wrong(
    "no gradient back through adapters",
    "LoRA's updates send no gradient back into hidden states",
    PADDED,
    adapt=with_lora,
    prepare=lora_inputs_detached,
)
wrong(
    "RoPE cuts the gradient, LoRA",
    "queries send no gradient back: their adapters have none",
    PADDED,
    "paiml/aprender#2092",
    adapt=with_lora,
    prepare=queries_detached,
)
wrong(
    "DoRA taken for LoRA",
    "DoRA's magnitudes are left out (and get no gradient)",
    PADDED,
    "ooples/AiDotNet#256",
    adapt=with_dora,
    prepare=dora_as_lora,
)
wrong(
    "tied, embedding's share lost",
    "weights are tied, and the embedding's share of their gradient is lost",
    PADDED,
    adapt=tied,
    forward=forward_embedding_detached,
)
wrong(
    "a real id taken for padding",
    "the embedding of id 20 gets no gradient: it is the embedding's padding_idx",
    PADDED,
    prepare=real_id_as_padding,
)


# --- labels and rows


def longest_prompt_for_all(probe: Probe) -> list[Row]:
    """Masks as many tokens of each document as the longest prompt has."""
    longest = max(row["labels"].count(IGNORED) for row in probe.rows)
    rows = []
    for row in probe.rows:
        ids = row["input_ids"]
        labels = [IGNORED] * min(longest, len(ids)) + ids[longest:]
        rows.append({**row, "labels": labels})
    return rows


def labels_at_the_other_side(probe: Probe, rows: list[Row]) -> Batch:
    """Pads ids at the left, labels at the right."""
    batch = padded_left(probe, rows)
    labels = [row["labels"] for row in rows]
    batch["labels"] = table(labels, IGNORED, left=False, length=batch["labels"].shape[1])
    return batch


def first_tokens_twice(probe: Probe) -> list[Row]:
    """Puts the first token of each document in front of it once more."""
    rows = []
    for row in probe.rows:
        first = row["input_ids"][0]
        rows.append({"input_ids": [first, *row["input_ids"]], "labels": [first, *row["labels"]]})
    return rows


def some_ids_masked(probe: Probe) -> list[Row]:
    """Masks ids from 10 to 14, as if they were special ones."""
    rows = []
    for row in probe.rows:
        labels = [IGNORED if 10 <= label <= 14 else label for label in row["labels"]]
        rows.append({**row, "labels": labels})
    return rows


def two_tokens_exchanged(probe: Probe) -> list[Row]:
    """Exchanges the 11th and 12th token of the third document."""
    rows = list(probe.rows)
    changed = {name: list(values) for name, values in rows[2].items()}
    for values in changed.values():
        values[10], values[11] = values[11], values[10]
    rows[2] = changed
    return rows


wrong(
    "longest prompt masked in all documents",
    "as many tokens have no loss in each document as the longest prompt has",
    PADDED,
    probes=(PROMPTS,),
    rows=longest_prompt_for_all,
)
wrong(
    "ids padded left, labels right",
    "labels are padded at the right though ids are padded at the left",
    PADDED,
    collate=labels_at_the_other_side,
)
wrong(
    "first tokens twice",
    "each document begins with its first token twice (and predicts it)",
    PADDED,
    rows=first_tokens_twice,
)
wrong(
    "some ids have no loss",
    "ids from 10 to 14 have no loss where they are to be predicted",
    PADDED,
    rows=some_ids_masked,
)
wrong(
    "two tokens exchanged",
    "the 11th and 12th token of the third document have each other's place",
    PADDED,
    rows=two_tokens_exchanged,
)


# --- how much, and what comes after backward


FIRST: list[int] = []  # the number of targets of the first micro-batch of a step


def first_targets_times_steps(
    losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts
) -> torch.Tensor:
    FIRST.append(int((wanted != IGNORED).sum()))
    return losses.sum() / (FIRST[0] * amounts.steps)


def forget_first(model: Any) -> None:
    FIRST.clear()


def means_by_rows(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Weighs means of micro-batches by their numbers of rows."""
    mean = losses.sum() / (wanted != IGNORED).sum()
    return mean * len(losses) / len(LENGTHS)


def dynamic_fine_tuning(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Weighs each loss by its token's probability, which is taken for a constant."""
    losses = losses_of(logits, wanted)
    return losses * (-losses).exp().detach()


def clipped_by_value(model: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def gradients_left(model: Any) -> Any:
    """Leaves the gradients of another batch there, as if nobody had zeroed them."""
    ids = torch.arange(106, 126)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.mul(0.1).backward()
    return model


def kept_in_bfloat16(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """Rounds what backward needs of activations, not weights; returns the dtype, too."""
    if tensor.is_leaf or tensor.dtype != torch.float32:
        return tensor, tensor.dtype
    return tensor.bfloat16(), tensor.dtype


def taken_out(kept: tuple[torch.Tensor, torch.dtype]) -> torch.Tensor:
    tensor, dtype = kept
    return tensor.to(dtype)


def forward_kept_in_bfloat16(model: Any, batch: Batch) -> torch.Tensor:
    with saved_tensors_hooks(kept_in_bfloat16, taken_out):
        return forward(model, batch)


wrong(
    "first micro-batch's targets times steps",
    "the loss is divided by the first micro-batch's number of targets, times 3",
    PADDED,
    probes=(STEPS,),
    total=first_targets_times_steps,
    after=forget_first,
)
wrong(
    "means of micro-batches by rows",
    "means of micro-batches are weighted by their numbers of rows, not of targets",
    PADDED,
    probes=(STEPS,),
    total=means_by_rows,
)
wrong(
    "dynamic fine-tuning",
    "each token's loss is multiplied by its probability",
    PADDED,
    "hiyouga/LlamaFactory, use_dft_loss",
    losses=dynamic_fine_tuning,
)
wrong(
    "clipped by value",
    "each element of gradients is clipped to 0.01",
    PADDED,
    after=clipped_by_value,
)
wrong(
    "gradients not zeroed before",
    "a tenth of the gradients of another batch is there from before the step",
    PADDED,
    before=gradients_left,
)
wrong(
    "activations kept in bfloat16",
    "activations are rounded to bfloat16 for backward",
    PADDED,
    forward=forward_kept_in_bfloat16,
)


# --- small ones: one layer, one head, one edge, one percent


def window_of_first_layer_only(options: Options) -> Options:
    return replace(options, window=None) if options.layer == 1 else options


def one_head_sharper(queries: torch.Tensor, block: Block, options: Options) -> torch.Tensor:
    """Multiplies scores of the third head of the second layer by 1.05."""
    scores = scored(queries, block, options)
    if options.layer != 1:
        return scores
    factors = torch.tensor([1.0, 1.0, 1.05, 1.0])
    return scores * factors[:, None, None]


def tiles_look_ahead(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Lets the last token of each tile of 16 see the next one of its document."""
    mask = visible(block, options, heads)
    together = layout.documents[:, None] == block.documents[None, :]
    following = layout.at[:, None] + 1 == block.at[None, :]
    last_of_tile = layout.at % 16 == 15
    return mask | (together & following & last_of_tile[:, None])


def one_expert_halved(model: Any) -> None:
    layers(model)[1].mlp.experts.down_proj.grad[1] *= 0.5


def one_adapter_larger(model: Any) -> None:
    layers(model)[1].self_attn.v_proj.scaling["default"] *= 1.01


def router_rounded(model: Any) -> None:
    """Rounds weights of experts to bfloat16."""

    def rounded(module: Any, inputs: Any, output: Any) -> Any:
        logits, scores, experts = output
        return logits, scores.bfloat16().to(scores.dtype), experts

    for layer in layers(model):
        layer.mlp.gate.register_forward_hook(rounded)


def first_padding_trained(probe: Probe, rows: list[Row]) -> Batch:
    """Gives the first token of padding after each document a label."""
    batch = batch_of(probe, rows)
    for number, row in enumerate(rows):
        end = len(row["input_ids"])
        batch["labels"][number, end : end + 1] = probe.pad
    return batch


def one_percent_less(model: Any, number: int, steps: int) -> None:
    """Makes gradients so far 1 % smaller before the next micro-batch."""
    if number == steps - 1:
        return
    for weight in model.parameters():
        weight.grad *= 0.99


wrong(
    "window ignored in one layer, Mistral",
    "the second layer has no window",
    KERNEL,
    kind="mistral",
    before=with_kernel(options=window_of_first_layer_only),
)
wrong(
    "one head sharper",
    "scores of the third head of the second layer are multiplied by 1.05",
    KERNEL,
    before=with_kernel(scored=one_head_sharper),
)
wrong(
    "edges of tiles see ahead",
    "every 16th token of a document sees the next one",
    KERNEL,
    before=with_kernel(visible=tiles_look_ahead),
)
wrong(
    "one expert's gradient halved, Mixtral",
    "the down projection of one expert of the second layer has half its gradient",
    PADDED,
    kind="mixtral",
    after=one_expert_halved,
)
wrong(
    "one adapter 1 % larger",
    "the update of the adapter of the second layer's values is multiplied by 1.01",
    PADDED,
    adapt=with_lora,
    prepare=one_adapter_larger,
)
wrong(
    "weights of experts rounded, Mixtral",
    "weights of experts are rounded to bfloat16",
    PADDED,
    kind="mixtral",
    prepare=router_rounded,
)
wrong(
    "first token of padding trained",
    "the last token of each padded document predicts padding",
    PADDED,
    collate=first_padding_trained,
)
wrong(
    "1 % less with each micro-batch",
    "gradients of earlier micro-batches are 1 % smaller with each later one",
    PADDED,
    probes=(STEPS,),
    between=one_percent_less,
)


# --- right set-ups


def mask_from_ids(probe: Probe, rows: list[Row]) -> Batch:
    """Takes ends of documents for padding in the mask, where nothing comes after them."""
    batch = batch_of(probe, rows)
    batch["attention_mask"] = (batch["input_ids"] != probe.pad).long()
    return batch


def padded_both(probe: Probe, rows: list[Row]) -> Batch:
    """Pads three tokens at the left, and the rest at the right."""
    batch = batch_of(probe, rows)
    fillers = {"input_ids": probe.pad, "labels": IGNORED, "attention_mask": 0}
    whole = {}
    for name, filler in fillers.items():
        left = torch.full((len(rows), 3), filler)
        whole[name] = torch.cat([left, batch[name]], dim=1)
    whole["labels"][:, 3] = IGNORED
    whole["position_ids"] = (whole["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return whole


def scaled_queries(queries: torch.Tensor, block: Block, options: Options) -> torch.Tensor:
    """Scales queries before they meet keys."""
    return scored(queries * options.scaling, block, replace(options, scaling=1.0))


def blocks_of_16(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Returns keys and values of 16 tokens at a time."""
    parts = zip(
        keys.split(16, dim=2),
        values.split(16, dim=2),
        layout.at.split(16),
        layout.documents.split(16),
        strict=True,
    )
    return [
        Block(own_keys, own_values, at, documents, source=layout.rank)
        for own_keys, own_values, at, documents in parts
    ]


class LossWithGradient(torch.autograd.Function):
    """Losses whose gradients are computed forward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        trained = wanted != IGNORED
        targets = one_hot(wanted.clamp(min=0), logits.shape[-1])
        ctx.save_for_backward((logits.softmax(-1) - targets) * trained[..., None])
        return losses_of(logits, wanted)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (computed,) = ctx.saved_tensors
        return computed * gradient[..., None], None


def with_gradient(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = LossWithGradient.apply(logits, wanted)  # type: ignore[no-untyped-call]
    return losses


def as_divergence(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Takes the divergence from the one right id."""
    targets = one_hot(wanted.clamp(min=0), logits.shape[-1]).float()
    divergence = kl_div(logits.log_softmax(-1), targets, reduction="none").sum(-1)
    return divergence * (wanted != IGNORED)


BUFFERS: dict[str, torch.Tensor] = {}
SCALE = 1024.0


def scaled_loss(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return SCALE * summed(losses, wanted, amounts)


def to_buffers(model: Any, number: int, steps: int) -> None:
    """Adds a micro-batch's gradients, unscaled, to buffers of their own."""
    for name, weight in model.named_parameters():
        if weight.grad is None:
            continue
        own = weight.grad.float() / SCALE
        BUFFERS[name] = BUFFERS[name] + own if name in BUFFERS else own
        weight.grad = None


def from_buffers(model: Any) -> None:
    for name, weight in model.named_parameters():
        weight.grad = BUFFERS.pop(name).to(weight.dtype)


def in_two_halves(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Goes backward twice, for half of the loss each."""
    half = summed(losses, wanted, amounts) / 2
    half.backward(retain_graph=True)
    return half


def forward_one_hot(model: Any, batch: Batch) -> torch.Tensor:
    """Embeds tokens by a product with the embedding's weight."""
    weight = model.get_input_embeddings().weight
    chosen = one_hot(batch["input_ids"], weight.shape[0]).to(weight.dtype)
    mask = batch["attention_mask"]
    output = model(inputs_embeds=chosen @ weight, attention_mask=mask, use_cache=False)
    logits: torch.Tensor = output.logits
    return logits.float()


def forward_functional(model: Any, batch: Batch) -> torch.Tensor:
    """Calls the model with its parameters given, as torch.func does."""
    parameters = dict(model.named_parameters())
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    output = functional_call(model, parameters, kwargs={**given, "use_cache": False})
    logits: torch.Tensor = output.logits
    return logits.float()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def forward_offloaded(model: Any, batch: Batch) -> torch.Tensor:
    """Keeps copies of what backward needs, as offloading does."""
    with saved_tensors_hooks(copied, as_it_is):
        return forward(model, batch)


def filled_to_8(probe: Probe, rows: list[Row]) -> Batch:
    """Packs documents of which each is filled up to a multiple of 8 tokens, as rings want them."""
    filled = []
    for row in rows:
        missing = -len(row["input_ids"]) % 8
        ids = [*row["input_ids"], *[probe.pad] * missing]
        labels = [*row["labels"], *[IGNORED] * missing]
        filled.append({"input_ids": ids, "labels": labels})
    return packed(probe, filled)


def with_ia3(model: Any) -> Any:
    from peft import IA3Config, get_peft_model

    config = IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    return as_trained_ia3(get_peft_model(model, config))


def as_trained_ia3(model: Any) -> Any:
    """Gives IA3's factors values of their own."""
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ia3" in name:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def row_of_padding(probe: Probe) -> list[Row]:
    """Adds a row of nothing but padding."""
    filler = {"input_ids": [probe.pad] * 6, "labels": [IGNORED] * 6}
    return [*probe.rows, filler]


right("mask from ids, padding is the end", PADDED, probes=(ENDS,), collate=mask_from_ids)
right("packed in two rows", PACKED, collate=two_rows, forward=forward_masked)
right("padded at both sides", PADDED, collate=padded_both)
right("scale in queries, Gemma 2", KERNEL, kind="gemma2", before=with_kernel(scored=scaled_queries))
right(
    "attention in blocks of 16, gpt-oss",
    KERNEL,
    kind="gpt_oss",
    before=with_kernel(blocks=blocks_of_16, repeat=repeated),
)
right("loss with its gradient", PADDED, losses=with_gradient)
right("loss as a divergence", PADDED, losses=as_divergence)
right(
    "buffers of gradients, scaled",
    PADDED,
    total=scaled_loss,
    between=to_buffers,
    after=from_buffers,
)
right("backward in two halves", PADDED, total=in_two_halves)
right("embedding as a product", PADDED, forward=forward_one_hot)
right("functional call", PADDED, forward=forward_functional)
right("activations offloaded", PADDED, forward=forward_offloaded)
right("packed, documents filled to 8", PACKED, collate=filled_to_8, forward=forward_masked)
right("packed, mask by hand, GPT-2", PACKED, kind="gpt2", forward=forward_masked)
right("IA3", PADDED, adapt=with_ia3)
right("a row of nothing but padding", PADDED, rows=row_of_padding)
right("padded, BLOOM", PADDED, kind="bloom")
right(
    "packed by positions, GLM, trained",
    PACKED,
    kind="glm",
    adapt=as_trained,
    collate=positions_only,
)
