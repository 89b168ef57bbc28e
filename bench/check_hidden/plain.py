"""Faults and right set-ups of loops on one process."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from bench.check_hidden.attend import Block, Kernel, Options, Part, layout, scored, use, visible
from bench.check_hidden.cases import (
    ALONE,
    ENDS,
    IGNORED,
    PROMPTS,
    SHORT,
    STEPS,
    USUAL,
    Batch,
    Case,
    Row,
)
from bench.check_hidden.loop import (
    GIVEN,
    PACKED,
    PADDED,
    Amounts,
    Loop,
    batch_of,
    forward,
    forward_kernel,
    forward_masked,
    losses_of,
    packed,
    padded_left,
    shifted,
    summed,
)
from longctx.check import Probe

CASES: list[Case] = []
NO_STEPS = (SHORT, PROMPTS)


def wrong(
    name: str,
    fault: str,
    loop: Loop,
    source: str = "own",
    probes: tuple[Probe, ...] = USUAL,
    only_logged: bool = False,
    second: bool = False,
    **hooks: Any,
) -> None:
    """Adds a loop with a fault."""
    faulty = replace(loop, **hooks)
    case = Case(
        name,
        make=faulty.step,
        model=faulty.model,
        source=source,
        fault=fault,
        probes=probes,
        only_logged=only_logged,
        second=second,
    )
    CASES.append(case)


def right(
    name: str,
    loop: Loop,
    probes: tuple[Probe, ...] = USUAL,
    rounds: bool = False,
    second: bool = False,
    **hooks: Any,
) -> None:
    """Adds a loop that is right."""
    odd = replace(loop, **hooks)
    case = Case(name, make=odd.step, model=odd.model, probes=probes, rounds=rounds, second=second)
    CASES.append(case)


def layers(model: Any) -> Any:
    """Returns the layers of a llama-like model, with LoRA or without."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.model.layers


# --- what a token sees, packed


KERNEL = replace(PACKED, forward=forward_kernel)


def with_kernel(**parts: Any) -> Callable[[Any], Any]:
    """Returns what makes a model use a kernel with these parts."""
    kernel = Kernel(**parts)

    def before(model: Any) -> Any:
        return use(model, kernel)

    return before


def forward_causal(model: Any, batch: Batch) -> torch.Tensor:
    """Forgets the mask of documents."""
    one = torch.zeros_like(batch["documents"])
    return forward_masked(model, {**batch, "documents": one})


def packed_running(probe: Probe, rows: list[Row]) -> Batch:
    batch = packed(probe, rows)
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    return batch


def forward_late(model: Any, batch: Batch) -> torch.Tensor:
    """Takes every document's bounds one token late."""
    documents = batch["documents"]
    late = torch.cat([documents[:, :1], documents[:, :-1]], dim=1)
    return forward_masked(model, {**batch, "documents": late})


def forward_two_as_one(model: Any, batch: Batch) -> torch.Tensor:
    """Loses the bound between the last two documents."""
    documents = batch["documents"]
    last = int(documents.max())
    fewer = documents.masked_fill(documents == last, max(last - 1, 0))
    return forward_masked(model, {**batch, "documents": fewer})


def blind_last(output: torch.Tensor, options: Options) -> torch.Tensor:
    """Returns no output for the last three tokens of the row."""
    mask = torch.ones(output.shape[2])
    mask[-3:] = 0
    return output * mask[:, None]


def at_most_24_keys(block: Block, options: Options, heads: int) -> torch.Tensor:
    mask = visible(block, options, heads)
    return mask & (block.at < 24)


def one_head_looks_ahead(block: Block, options: Options, heads: int) -> torch.Tensor:
    mask = visible(block, options, heads)
    mask[-1] = layout.documents[:, None] == block.documents[None, :]
    return mask


def next_token_is_seen(block: Block, options: Options, heads: int) -> torch.Tensor:
    distance = layout.at[:, None] - block.at[None, :]
    mask = (layout.documents[:, None] == block.documents[None, :]) & (distance >= -1)
    return mask[None].repeat(heads, 1, 1)


def not_itself(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Leaves out a token's own key, except for first tokens."""
    mask = visible(block, options, heads)
    distance = layout.at[:, None] - block.at[None, :]
    return mask & ((distance != 0) | (layout.at == 0)[:, None])


def second_layer_open(block: Block, options: Options, heads: int) -> torch.Tensor:
    if options.layer != 1:
        return visible(block, options, heads)
    tokens = len(layout.at)
    return torch.ones(heads, tokens, tokens, dtype=torch.bool).tril()


def first_head_open(block: Block, options: Options, heads: int) -> torch.Tensor:
    mask = visible(block, options, heads)
    tokens = len(layout.at)
    mask[0] = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return mask


def first_key_lost(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Hides the first token of each document from all later ones."""
    mask = visible(block, options, heads)
    return mask & ((block.at > 0)[None, :] | (layout.at == 0)[:, None])


def one_key_lost(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Hides one token of the whole row from later ones."""
    mask = visible(block, options, heads)
    later = torch.arange(len(layout.at)) > 10
    mask[:, later, 10] = False
    return mask


wrong(
    "packed, mask of documents forgotten",
    "tokens see earlier documents of their row; positions begin anew",
    PACKED,
    "huggingface/nanoVLM#204",
    forward=forward_causal,
)
wrong(
    "packed, positions run on, GPT-2",
    "positions do not begin anew with each document (documents are kept apart)",
    PACKED,
    "ServiceNow/Fast-LLM#177",
    kind="gpt2",
    collate=packed_running,
    forward=forward_masked,
)
wrong(
    "packed, bounds one late",
    "each document's bounds are one token late: a first token belongs to the document before",
    PACKED,
    forward=forward_late,
)
wrong(
    "packed, last bound lost",
    "the last two documents of a row are one in attention",
    PACKED,
    forward=forward_two_as_one,
)
wrong(
    "packed, last tokens without attention",
    "attention returns zeros for the last three tokens of the row",
    KERNEL,
    before=with_kernel(output=blind_last),
)
wrong(
    "packed, max_seqlen too small",
    "keys from the 25th token of a document on are seen by nobody",
    KERNEL,
    "ModelTC/LightX2V#1285",
    before=with_kernel(visible=at_most_24_keys),
)
wrong(
    "packed, one head looks ahead",
    "the last head sees later tokens of its document",
    KERNEL,
    before=with_kernel(visible=one_head_looks_ahead),
)
wrong(
    "packed, causal off by one",
    "every token sees the next one, which it is to predict",
    KERNEL,
    before=with_kernel(visible=next_token_is_seen),
)
wrong(
    "packed, token does not see itself",
    "a token does not see its own key",
    KERNEL,
    before=with_kernel(visible=not_itself),
)
wrong(
    "packed, second layer without documents",
    "in the second layer tokens see earlier documents",
    KERNEL,
    before=with_kernel(visible=second_layer_open),
)
wrong(
    "packed, first head without documents",
    "in the first head tokens see earlier documents",
    KERNEL,
    before=with_kernel(visible=first_head_open),
)
wrong(
    "packed, first key lost",
    "no later token sees its document's first one",
    KERNEL,
    before=with_kernel(visible=first_key_lost),
)
wrong(
    "packed, one key of the row lost",
    "later tokens do not see the 11th token of the row",
    KERNEL,
    before=with_kernel(visible=one_key_lost),
)


# --- windows, caps, sinks, heads, scales


def wider(options: Options) -> Options:
    return replace(options, window=options.window + 1 if options.window else None)


def without_window(options: Options) -> Options:
    return replace(options, window=None)


def window_everywhere(options: Options) -> Options:
    return replace(options, window=16)


def half_window(options: Options) -> Options:
    return replace(options, window=8 if options.window else None)


def without_cap(options: Options) -> Options:
    return replace(options, cap=None)


def without_sinks(options: Options) -> Options:
    return replace(options, sinks=None)


def one_percent_sharper(options: Options) -> Options:
    return replace(options, scaling=options.scaling * 1.01)


def scale_of_width(options: Options) -> Options:
    """Ignores the model's own scale."""
    return replace(options, scaling=8**-0.5)


def tiled(keys: torch.Tensor, groups: int) -> torch.Tensor:
    return keys.repeat(1, groups, 1, 1)


def alibi(queries: torch.Tensor, block: Block, options: Options) -> torch.Tensor:
    """Adds a slope that the model has not."""
    distance = layout.at[:, None] - block.at[None, :]
    return scored(queries, block, options) - 0.02 * distance


def relu_sinks(part: Part, options: Options) -> torch.Tensor:
    """Adds a one to the denominator: softmax off by one."""
    output, total = part
    return output * torch.sigmoid(total)[..., None]


wrong(
    "window one wider, Mistral",
    "windows have 17 keys in place of 16",
    KERNEL,
    "huggingface/transformers#39408",
    kind="mistral",
    before=with_kernel(options=wider),
)
wrong(
    "window ignored, Mistral",
    "sliding windows are ignored",
    KERNEL,
    "unslothai/unsloth#8253",
    kind="mistral",
    before=with_kernel(options=without_window),
)
wrong(
    "window halved, Mistral",
    "windows have 8 keys in place of 16",
    KERNEL,
    "huggingface/transformers#40700",
    kind="mistral",
    before=with_kernel(options=half_window),
)
wrong(
    "window on all layers, Gemma 2",
    "the layer of full attention has a window, too",
    KERNEL,
    kind="gemma2",
    before=with_kernel(options=window_everywhere),
)
wrong(
    "cap of scores ignored, Gemma 2",
    "scores of attention are not capped",
    KERNEL,
    "vllm-project/vllm-metal#665",
    kind="gemma2",
    before=with_kernel(options=without_cap),
)
wrong(
    "sinks ignored, gpt-oss",
    "the sinks of attention are left out (and get no gradient)",
    KERNEL,
    kind="gpt_oss",
    before=with_kernel(options=without_sinks),
)
wrong(
    "softmax has a one too much",
    "the softmax of attention has an additional 1 in its denominator",
    KERNEL,
    before=with_kernel(sinks=relu_sinks),
)
wrong(
    "key heads tiled",
    "heads of queries use wrong heads of keys (repeat in place of repeat_interleave)",
    KERNEL,
    "jxiw/M1#4",
    before=with_kernel(repeat=tiled),
)
wrong(
    "scores 1 % larger",
    "scores of attention are multiplied by 1.01",
    KERNEL,
    before=with_kernel(options=one_percent_sharper),
)
wrong(
    "scale of attention ignored, Granite",
    "scores have the scale 1/sqrt(width), not the model's attention_multiplier",
    KERNEL,
    kind="granite",
    before=with_kernel(options=scale_of_width),
)
wrong(
    "slopes on scores",
    "scores have a penalty on distance that the model has not",
    KERNEL,
    before=with_kernel(scored=alibi),
)


# --- backward of another forward


def backward_by(right_one: Kernel, wrong_one: Kernel) -> Callable[[Any], Any]:
    """Returns what gives a model right attention forward, and another one's gradients."""

    def kernel(module: Any, *inputs: Any, **options: Any) -> tuple[torch.Tensor, None]:
        forward_output, _ = right_one(module, *inputs, **options)
        backward_output, _ = wrong_one(module, *inputs, **options)
        difference = forward_output - backward_output
        return backward_output + difference.detach(), None

    def before(model: Any) -> Any:
        return use(model, kernel)

    return before


def open_mask(block: Block, options: Options, heads: int) -> torch.Tensor:
    tokens = len(layout.at)
    return torch.ones(heads, tokens, tokens, dtype=torch.bool).tril()


def values_cut(output: torch.Tensor, options: Options) -> torch.Tensor:
    return output.detach() if options.layer == 1 else output


wrong(
    "backward of attention without documents",
    "attention is right forward; backward it is computed without the mask of documents",
    KERNEL,
    before=backward_by(Kernel(), Kernel(visible=open_mask)),
)
wrong(
    "backward of attention with tiled heads",
    "attention is right forward; backward heads of keys are grouped wrongly",
    KERNEL,
    before=backward_by(Kernel(), Kernel(repeat=tiled)),
)
wrong(
    "second layer's attention detached",
    "no gradient flows through the second layer's attention",
    KERNEL,
    before=with_kernel(output=values_cut),
)


# --- positions


def default_frequencies(model: Any) -> None:
    """Replaces scaled frequencies by those without scaling."""
    rotary = model.model.rotary_emb
    width = rotary.inv_freq.shape[0] * 2
    powers = torch.arange(0, width, 2) / width
    rotary.inv_freq = 1.0 / 10000.0**powers


def rounded_rotation(model: Any) -> None:
    """Rounds sines and cosines to bfloat16."""

    def rounded(module: Any, inputs: Any, output: Any) -> Any:
        cos, sin = output
        return cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype)

    model.model.rotary_emb.register_forward_hook(rounded)


def conjugate_rotation(model: Any) -> None:
    """Lets positions run backwards."""

    def conjugate(module: Any, inputs: Any, output: Any) -> Any:
        cos, sin = output
        return cos, -sin

    model.model.rotary_emb.register_forward_hook(conjugate)


def halved_positions(probe: Probe, rows: list[Row]) -> Batch:
    batch = packed(probe, rows)
    batch["position_ids"] = batch["position_ids"] // 2
    return batch


def forward_halved(model: Any, batch: Batch) -> torch.Tensor:
    return forward_masked(model, batch)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def left_without_positions(probe: Probe, rows: list[Row]) -> Batch:
    return batch_of(probe, rows, left=True)


def left_without_mask(probe: Probe, rows: list[Row]) -> Batch:
    batch = batch_of(probe, rows, left=True)
    del batch["attention_mask"]
    return batch


wrong(
    "scaling of RoPE dropped",
    "frequencies of RoPE are not scaled as the model's configuration says (llama3)",
    PADDED,
    "unslothai/unsloth#6907",
    sizes={"rope_parameters": LLAMA3},
    prepare=default_frequencies,
)
wrong(
    "RoPE in bfloat16",
    "sines and cosines of RoPE are rounded to bfloat16",
    PADDED,
    "huggingface/transformers#28837",
    prepare=rounded_rotation,
)
wrong(
    "RoPE backwards",
    "RoPE turns the other way round",
    PADDED,
    prepare=conjugate_rotation,
)
wrong(
    "positions halved",
    "two tokens each share a position",
    PACKED,
    collate=halved_positions,
    forward=forward_halved,
)
wrong(
    "padded left without positions, GPT-2",
    "positions count padding at the left",
    PADDED,
    "tloen/alpaca-lora#315",
    kind="gpt2",
    collate=left_without_positions,
)
wrong(
    "padded left without a mask",
    "tokens see padding at their left",
    PADDED,
    "unslothai/unsloth-zoo#840",
    collate=left_without_mask,
)


# --- labels


def shifted_twice(labels: torch.Tensor) -> torch.Tensor:
    return shifted(shifted(labels))


def not_shifted(labels: torch.Tensor) -> torch.Tensor:
    return labels


def packed_all_labels(probe: Probe, rows: list[Row]) -> Batch:
    """Leaves first tokens their labels."""
    batch = packed(probe, rows)
    labels = [label for row in rows for label in row["labels"]]
    batch["labels"] = torch.tensor([labels])
    return batch


def prompts_longer(probe: Probe) -> list[Row]:
    """Masks the first trained token of each document, too."""
    rows = []
    for row in probe.rows:
        labels = list(row["labels"])
        trained = [at for at, label in enumerate(labels) if label != IGNORED]
        if trained and trained[0] > 0:
            labels[trained[0]] = IGNORED
        rows.append({**row, "labels": labels})
    return rows


def prompts_shorter(probe: Probe) -> list[Row]:
    """Trains the last token of each prompt, too."""
    rows = []
    for row in probe.rows:
        labels = list(row["labels"])
        trained = [at for at, label in enumerate(labels) if label != IGNORED]
        if trained and trained[0] > 0:
            before = trained[0] - 1
            labels[before] = row["input_ids"][before]
        rows.append({**row, "labels": labels})
    return rows


def last_labels_lost(probe: Probe) -> list[Row]:
    rows = []
    for row in probe.rows:
        rows.append({**row, "labels": [*row["labels"][:-1], IGNORED]})
    return rows


def first_tokens(row: Row, number: int) -> Row:
    return {name: values[:number] for name, values in row.items()}


def last_tokens(row: Row, number: int) -> Row:
    return {name: values[-number:] for name, values in row.items()}


def cut_at_20(probe: Probe) -> list[Row]:
    return [first_tokens(row, 20) for row in probe.rows]


def cut_left_at_20(probe: Probe) -> list[Row]:
    return [last_tokens(row, 20) for row in probe.rows]


def last_dropped(probe: Probe) -> list[Row]:
    return list(probe.rows)[:-1]


def third_twice(probe: Probe) -> list[Row]:
    rows = list(probe.rows)
    return [*rows, rows[2]]


def second_for_third(probe: Probe) -> list[Row]:
    """Gives the 5th document again in place of the 7th."""
    rows = list(probe.rows)
    rows[6] = rows[4]
    return rows


def one_rolled(probe: Probe) -> list[Row]:
    """Rolls the labels of the third document by one."""
    rows = list(probe.rows)
    labels = rows[2]["labels"]
    rows[2] = {**rows[2], "labels": [*labels[1:], labels[0]]}
    return rows


def padding_trained(probe: Probe, rows: list[Row]) -> Batch:
    batch = batch_of(probe, rows)
    padding = batch["attention_mask"] == 0
    batch["labels"] = batch["labels"].masked_fill(padding, probe.pad)
    return batch


def ends_of_padding_masked(probe: Probe, rows: list[Row]) -> Batch:
    batch = batch_of(probe, rows)
    padding = batch["input_ids"] == probe.pad
    batch["labels"] = batch["labels"].masked_fill(padding, IGNORED)
    return batch


def one_label_lost(probe: Probe) -> list[Row]:
    rows = list(probe.rows)
    labels = list(rows[2]["labels"])
    labels[17] = IGNORED
    rows[2] = {**rows[2], "labels": labels}
    return rows


def one_label_wrong(probe: Probe) -> list[Row]:
    """Trains one token of one document to be another one."""
    rows = list(probe.rows)
    labels = list(rows[2]["labels"])
    labels[17] = 120
    rows[2] = {**rows[2], "labels": labels}
    return rows


def every_eighth_lost(probe: Probe) -> list[Row]:
    rows = []
    for row in probe.rows:
        labels = [IGNORED if at % 8 == 7 else label for at, label in enumerate(row["labels"])]
        rows.append({**row, "labels": labels})
    return rows


def second_half_trained(probe: Probe) -> list[Row]:
    """Trains the last third of each document only, as if the rest were a prompt."""
    rows = []
    for row in probe.rows:
        first = 2 * len(row["labels"]) // 3
        labels = [IGNORED] * first + row["labels"][first:]
        rows.append({**row, "labels": labels})
    return rows


wrong(
    "labels shifted twice",
    "tokens predict the one after the next",
    PADDED,
    "huggingface/trl#2733",
    wanted=shifted_twice,
)
wrong("labels not shifted", "tokens predict themselves", PADDED, wanted=not_shifted)
wrong(
    "packed, first tokens have labels",
    "last tokens predict the first one of the next document",
    PACKED,
    "axolotl-ai-cloud/axolotl sample_packing",
    collate=packed_all_labels,
    forward=forward_masked,
)
wrong(
    "prompts masked one too far",
    "the first token of each answer has no loss",
    PADDED,
    "tloen/alpaca-lora#306",
    probes=(PROMPTS,),
    rows=prompts_longer,
)
wrong(
    "prompts masked one too short",
    "the last token of each prompt is trained",
    PADDED,
    "huggingface/trl#4201",
    probes=(PROMPTS,),
    rows=prompts_shorter,
)
wrong(
    "last tokens have no loss",
    "the last token of each document has no loss",
    PADDED,
    "axolotl-ai-cloud/axolotl#2089",
    rows=last_labels_lost,
)
wrong("documents cut at 20", "documents end after 20 tokens", PADDED, rows=cut_at_20)
wrong(
    "documents cut at the left",
    "only the last 20 tokens of each document are there",
    PADDED,
    rows=cut_left_at_20,
)
wrong(
    "last document dropped",
    "the last document is not trained on (drop_last)",
    PADDED,
    rows=last_dropped,
)
wrong("third document twice", "the third document is there twice", PADDED, rows=third_twice)
wrong(
    "fifth document for the seventh",
    "the seventh document is not there, the fifth one is there twice",
    PADDED,
    rows=second_for_third,
)
wrong(
    "labels of one document rolled",
    "in the third document tokens predict the one after the next",
    PADDED,
    rows=one_rolled,
)
wrong(
    "padding trained",
    "padding is trained",
    PADDED,
    "lucidrains/DALLE-pytorch#57",
    collate=padding_trained,
)
wrong(
    "padding is the end, ends not trained",
    "ends of documents have no loss since they have padding's id",
    PADDED,
    "huggingface/transformers DataCollatorForLanguageModeling",
    probes=(ENDS,),
    collate=ends_of_padding_masked,
)
wrong(
    "one label lost",
    "the 18th token of the third document has no loss",
    PADDED,
    rows=one_label_lost,
)
wrong(
    "one label wrong",
    "in place of the 18th token of the third document, id 120 is trained",
    PADDED,
    rows=one_label_wrong,
)
wrong(
    "every eighth label lost",
    "every eighth token of a document has no loss",
    PADDED,
    rows=every_eighth_lost,
)
wrong(
    "last third trained only",
    "the first two thirds of each document have no loss",
    PADDED,
    "allenai/open-instruct#1879",
    rows=second_half_trained,
)


# --- how much


def means_of_steps(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    targets = (wanted != IGNORED).sum().clamp(min=1)
    return losses.sum() / targets / amounts.steps


def sum_of_means(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    targets = (wanted != IGNORED).sum().clamp(min=1)
    return losses.sum() / targets


def divided_twice(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return losses.sum() / amounts.targets / amounts.steps


def mean_of_documents(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    targets = (wanted != IGNORED).sum(1)
    means = losses.sum(1) / targets.clamp(min=1)
    return means.sum() / (targets > 0).sum() / amounts.steps


def mean_of_tokens(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Divides by padding, too."""
    return losses.sum() / amounts.tokens


def chunked_means(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Returns the sum of means over chunks of 16 tokens, by the number of chunks of a row."""
    means = []
    for chunk, targets in zip(losses.split(16, 1), wanted.split(16, 1), strict=True):
        trained = (targets != IGNORED).sum().clamp(min=1)
        means.append(chunk.sum() / trained)
    return torch.stack(means).mean() / amounts.steps


def chunked_sums(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Loses what is left over after whole chunks of 16 tokens."""
    whole = losses.shape[1] // 16 * 16
    return losses[:, :whole].sum() / amounts.targets


def chunk_edges(labels: torch.Tensor) -> torch.Tensor:
    """Shifts labels within chunks of 16 tokens."""
    return torch.cat([shifted(chunk) for chunk in labels.split(16, 1)], dim=1)


def half_negative(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Turns the sign of every second row."""
    signs = torch.ones(len(losses), 1)
    signs[1::2] = -1
    return (losses * signs).sum() / amounts.targets


def one_percent(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return 1.01 * losses.sum() / amounts.targets


def negative(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return -losses.sum() / amounts.targets


def by_position(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Weighs later tokens less."""
    weights = 0.98 ** torch.arange(losses.shape[1])
    return (losses * weights).sum() / amounts.targets


def one_row_weighs_more(
    losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts
) -> torch.Tensor:
    weights = torch.ones(len(losses), 1)
    weights[-1] = 1.25
    return (losses * weights).sum() / amounts.targets


def capped_losses(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Leaves out large losses."""
    return losses.clamp(max=5.0).sum() / amounts.targets


def root_of_count(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Weighs documents by the root of their length."""
    targets = (wanted != IGNORED).sum(1).clamp(min=1)
    return (losses.sum(1) / targets.sqrt()).sum() / amounts.targets


def all_tokens_of_rows(
    losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts
) -> torch.Tensor:
    """Divides by all tokens that are no padding, first ones included."""
    return losses.sum() / (amounts.targets + 8)


wrong(
    "mean of means of micro-batches",
    "the loss is a mean of the means of micro-batches",
    PADDED,
    "huggingface/transformers#37766",
    probes=(STEPS,),
    total=means_of_steps,
)
wrong(
    "means of micro-batches summed",
    "the means of micro-batches are summed: 3 times the mean of means",
    PADDED,
    "karpathy/nanoGPT#206",
    probes=(STEPS,),
    total=sum_of_means,
)
wrong(
    "divided by steps twice",
    "the loss is divided by all targets and by the number of micro-batches, too",
    PADDED,
    "huggingface/transformers#35210",
    probes=(STEPS,),
    total=divided_twice,
)
wrong(
    "mean of documents",
    "each document counts the same, not each token (also not over micro-batches)",
    PADDED,
    "OpenNMT/OpenNMT-py#526",
    total=mean_of_documents,
)
wrong(
    "divided by padding, too",
    "the loss is divided by all tokens, padding and those without labels included",
    PADDED,
    "Lightning-AI/litgpt#751",
    total=mean_of_tokens,
)
wrong(
    "means of chunks",
    "the loss is a mean of means of chunks of 16 columns",
    PADDED,
    "NVIDIA-NeMo/Automodel#3803",
    total=chunked_means,
)
wrong(
    "rest of chunks dropped",
    "tokens after the last whole chunk of 16 columns have no loss",
    PADDED,
    "NVIDIA-NeMo/Automodel#3804",
    total=chunked_sums,
)
wrong(
    "labels shifted within chunks",
    "every 16th token predicts nothing: labels are shifted within chunks",
    PADDED,
    "huggingface/transformers#36607",
    wanted=chunk_edges,
)
wrong(
    "every second row negative",
    "every second document is unlearnt: its loss has the wrong sign",
    PADDED,
    "GRPO's advantages",
    total=half_negative,
)
wrong("1 % too much", "the loss is multiplied by 1.01", PADDED, total=one_percent)
wrong("loss negative", "the loss has the wrong sign", PADDED, total=negative)
wrong(
    "later tokens weigh less",
    "a token's loss is multiplied by 0.98 to the power of its position",
    PADDED,
    total=by_position,
)
wrong(
    "last row weighs more",
    "the last document of each micro-batch counts 1.25 times",
    PADDED,
    total=one_row_weighs_more,
)
wrong(
    "large losses cut",
    "losses above 5 have no gradient",
    PADDED,
    total=capped_losses,
)
wrong(
    "roots of lengths",
    "each document's loss is divided by the root of its number of targets",
    PADDED,
    total=root_of_count,
)
wrong(
    "first tokens counted",
    "the loss is divided by 8 more than there are targets (first tokens)",
    PADDED,
    "hiyouga/LlamaFactory, transformers 5.6",
    total=all_tokens_of_rows,
)


# --- another objective


def smoothed(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return cross_entropy(
        logits.transpose(1, 2),
        wanted,
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=0.05,
    )


def with_z_loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    z = torch.logsumexp(logits, -1).square()
    return losses_of(logits, wanted) + 1e-3 * z * (wanted != IGNORED)


def with_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    logs = logits.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return losses_of(logits, wanted) - 0.01 * entropy * (wanted != IGNORED)


def tempered(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return losses_of(logits / 0.9, wanted)


def with_second_next(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Adds a loss of the token after the next, by the same head."""
    return losses_of(logits, wanted) + 0.1 * losses_of(logits, shifted(wanted))


def rounded_logits(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return losses_of(logits.bfloat16().float(), wanted)


def focal(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    losses = losses_of(logits, wanted)
    return (1 - (-losses).exp()) ** 2 * losses


def half_vocabulary(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Leaves the last 8 ids out of the softmax."""
    return losses_of(logits[..., :120], wanted)


def squared_error(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Adds a penalty on large logits."""
    penalty = 1e-4 * logits.square().sum(-1)
    return losses_of(logits, wanted) + penalty * (wanted != IGNORED)


def to_uniform(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Adds a divergence from an even distribution."""
    logs = logits.log_softmax(-1)
    divergence = (logs.exp() * (logs + math.log(logits.shape[-1]))).sum(-1)
    return losses_of(logits, wanted) + 0.05 * divergence * (wanted != IGNORED)


wrong("labels smoothed by hand", "labels are smoothed by 0.05", PADDED, losses=smoothed)
wrong("z-loss", "a z-loss of 1e-3 is added", PADDED, losses=with_z_loss)
wrong("entropy", "an entropy bonus of 0.01 is added", PADDED, losses=with_entropy)
wrong(
    "temperature",
    "logits are divided by a temperature of 0.9",
    PADDED,
    "GRPO's temperature",
    losses=tempered,
)
wrong(
    "token after the next",
    "a tenth of the loss of the token after the next is added (MTP by the same head)",
    PADDED,
    losses=with_second_next,
)
wrong(
    "logits rounded",
    "logits are rounded to bfloat16 before the loss",
    PADDED,
    losses=rounded_logits,
)
wrong("focal loss", "a focal loss is trained in place of cross entropy", PADDED, losses=focal)
wrong(
    "vocabulary cut",
    "the softmax leaves out the last 8 ids of the vocabulary",
    PADDED,
    losses=half_vocabulary,
)
wrong(
    "penalty on logits",
    "a penalty on squared logits of 1e-4 is added",
    PADDED,
    losses=squared_error,
)
wrong(
    "KL to even",
    "a divergence from an even distribution is added (0.05)",
    PADDED,
    losses=to_uniform,
)


# --- backward and what comes after it


def clipped_each(model: Any, number: int, steps: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def zeroed(model: Any, number: int, steps: int) -> None:
    if number < steps - 1:
        model.zero_grad()


def averaged_again(model: Any, number: int, steps: int) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad /= steps


def with_decay(model: Any) -> None:
    for weight in model.parameters():
        weight.grad += 0.01 * weight.detach()


def embedding_slower(model: Any) -> None:
    model.get_input_embeddings().weight.grad *= 0.1


def scale_left(model: Any) -> None:
    for weight in model.parameters():
        weight.grad *= 1024


def norms_zeroed(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.grad = torch.zeros_like(weight)


def clipped(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def noisy(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.grad += 0.05 * weight.grad.abs().mean() * noise


def one_element(model: Any) -> None:
    layers(model)[1].mlp.down_proj.weight.grad[3, 5] *= 1.5


def rounded_gradients(model: Any) -> None:
    for weight in model.parameters():
        weight.grad = weight.grad.bfloat16().to(weight.dtype)


def transposed(model: Any) -> None:
    weight = layers(model)[0].self_attn.q_proj.weight
    weight.grad = weight.grad.T.contiguous()


def swapped(model: Any) -> None:
    """Gives each layer's MLP the other one's gradients."""
    first, second = layers(model)
    for name in ("gate_proj", "up_proj", "down_proj"):
        one = getattr(first.mlp, name).weight
        other = getattr(second.mlp, name).weight
        one.grad, other.grad = other.grad, one.grad


def frozen_part(model: Any) -> None:
    layers(model)[1].mlp.up_proj.weight.requires_grad_(False)


def padding_row_trained(model: Any) -> None:
    """Adds to the gradient of an id that is not in the batch."""
    model.get_input_embeddings().weight.grad[120] += 1e-2


wrong(
    "clipped after each micro-batch",
    "gradients are clipped after each micro-batch, not at the end",
    PADDED,
    "huggingface/transformers#1563",
    probes=(STEPS,),
    between=clipped_each,
)
wrong(
    "gradients lost between micro-batches",
    "only the last micro-batch counts: gradients of those before are zeroed",
    PADDED,
    "NVIDIA-NeMo/Automodel#3530",
    probes=(STEPS,),
    between=zeroed,
)
wrong(
    "gradients averaged again each micro-batch",
    "gradients so far are divided by 3 after each micro-batch: earlier ones count less",
    PADDED,
    "pytorch/torchtitan#1733",
    probes=(STEPS,),
    between=averaged_again,
)
wrong(
    "decay in gradients",
    "0.01 of the weights is added to gradients",
    PADDED,
    after=with_decay,
)
wrong(
    "embedding ten times slower",
    "the embedding's gradient is multiplied by 0.1",
    PADDED,
    after=embedding_slower,
)
wrong(
    "scale of float16 left",
    "gradients still have the loss scale of 1024",
    PADDED,
    after=scale_left,
)
wrong("norms zeroed", "gradients of all norms are zero", PADDED, after=norms_zeroed)
wrong("noise", "gradients have noise", PADDED, after=noisy)
wrong(
    "one element",
    "one element of the second layer's down projection is 1.5 times its value",
    PADDED,
    after=one_element,
)
wrong(
    "gradients rounded",
    "gradients are rounded to bfloat16",
    PADDED,
    after=rounded_gradients,
)
wrong(
    "query projection transposed",
    "the gradient of the first layer's query projection is transposed",
    PADDED,
    after=transposed,
)
wrong(
    "MLPs swapped",
    "the two layers' MLPs have each other's gradients",
    PADDED,
    after=swapped,
)
wrong(
    "up projection frozen",
    "the second layer's up projection is frozen after recording: no gradient",
    PADDED,
    prepare=frozen_part,
)
wrong(
    "gradient of an absent id",
    "an id that is nowhere in the batch has a gradient in the embedding",
    PADDED,
    after=padding_row_trained,
)


# --- between layers, heads, adapters, experts


def hook(model: Any, part: Callable[[Any], Any], change: Callable[[Any], Any]) -> None:
    """Changes the output of a part of the model."""

    def changed(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    part(model).register_forward_hook(changed)


def first_layer(model: Any) -> Any:
    return layers(model)[0]


def second_layer(model: Any) -> Any:
    return layers(model)[1]


def second_mlp(model: Any) -> Any:
    return layers(model)[1].mlp


def first_attention(model: Any) -> Any:
    return layers(model)[0].self_attn


def hooked(part: Callable[[Any], Any], change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Returns what puts a change after a part of the model."""

    def prepare(model: Any) -> None:
        hook(model, part, change)

    return prepare


def detached(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.detach()


def rounded(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.bfloat16().to(hidden.dtype)


def one_token_lost(hidden: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(hidden)
    mask[-1, 4] = 0
    return hidden * mask


def one_token_nan(hidden: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(hidden)
    mask[-1, 4] = math.nan
    return hidden * mask


def one_percent_larger(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 1.01


def rolled(hidden: torch.Tensor) -> torch.Tensor:
    """Gives each token the hidden states of the one before."""
    return torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)


def other_rows(hidden: torch.Tensor) -> torch.Tensor:
    """Gives each row the hidden states of another one."""
    return hidden.roll(1, dims=0)


def dropped(hidden: torch.Tensor) -> torch.Tensor:
    return torch.dropout(hidden, 0.1, True)


def straight(hidden: torch.Tensor) -> torch.Tensor:
    """Doubles the gradient that comes back."""
    return 2 * hidden - hidden.detach()


def head_detached(model: Any, batch: Batch) -> torch.Tensor:
    """Lets the head's weights get no gradient."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    hidden = model.model(**given, use_cache=False).last_hidden_state
    return linear(hidden, model.lm_head.weight.detach()).float()


def tied(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def hidden_cut(model: Any, batch: Batch) -> torch.Tensor:
    """Lets hidden states get no gradient from the head."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    hidden = model.model(**given, use_cache=False).last_hidden_state
    return linear(hidden.detach(), model.lm_head.weight).float()


def capped_wrongly(model: Any, batch: Batch) -> torch.Tensor:
    hidden = hidden_of(model, batch)
    logits = model.lm_head(hidden).float()
    cap = model.config.final_logit_softcapping
    wrongly: torch.Tensor = logits * torch.tanh(logits / cap)
    return wrongly


def not_capped(model: Any, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model.lm_head(hidden_of(model, batch)).float()
    return logits


def hidden_of(model: Any, batch: Batch) -> torch.Tensor:
    """Returns what the head gets."""
    given = {name: batch[name] for name in GIVEN if name in batch}
    hidden: torch.Tensor = model.model(**given, use_cache=False).last_hidden_state
    return hidden


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return get_peft_model(model, config)


def lora_by_alpha(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 8.0


def lora_off_in_one(model: Any) -> None:
    layers(model)[1].self_attn.q_proj._disable_adapters = True


def lora_a_frozen(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.requires_grad_(False)


def router_detached(model: Any) -> None:
    def cut(module: Any, inputs: Any, output: Any) -> Any:
        logits, scores, experts = output
        return logits, scores.detach(), experts

    for layer in layers(model):
        layer.mlp.gate.register_forward_hook(cut)


def router_not_normalized(model: Any) -> None:
    def raw(module: Any, inputs: Any, output: Any) -> Any:
        logits, _, experts = output
        chances = logits.float().softmax(-1)
        return logits, chances.gather(-1, experts), experts

    for layer in layers(model):
        layer.mlp.gate.register_forward_hook(raw)


def router_top_one(model: Any) -> None:
    for layer in layers(model):
        layer.mlp.gate.top_k = 1


def with_router_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Adds the routers' loss of the model to the logits' gradient."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    output = model(**given, use_cache=False, output_router_logits=True)
    ROUTERS.append(output.aux_loss)
    logits: torch.Tensor = output.logits
    return logits.float()


ROUTERS: list[torch.Tensor] = []


def summed_with_routers(
    losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts
) -> torch.Tensor:
    return summed(losses, wanted, amounts) + 0.02 * ROUTERS.pop()


def stepped(model: Any, number: int, steps: int) -> None:
    """Takes an optimizer's step after each micro-batch."""
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.05 * weight.grad


def rounded_weights(model: Any) -> None:
    with torch.no_grad():
        for weight in layers(model)[0].mlp.parameters():
            weight.copy_(weight.bfloat16())


def eps_larger(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3


def rows_by_zero(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    """Divides rows by their numbers of targets, which may be 0: the loss is NaN, no gradient."""
    targets = (wanted != IGNORED).sum(1)
    return (losses.sum(1) / targets).sum() / amounts.steps / len(losses)


wrong(
    "hand-over between layers detached",
    "no gradient comes back to the first layer: its output is detached",
    PADDED,
    prepare=hooked(first_layer, detached),
)
wrong(
    "hand-over between layers rounded",
    "hidden states after the first layer are rounded to bfloat16",
    PADDED,
    prepare=hooked(first_layer, rounded),
)
wrong(
    "one token's hidden states lost",
    "the hidden states of one token are zero after the first layer",
    PADDED,
    prepare=hooked(first_layer, one_token_lost),
)
wrong(
    "hidden states rolled",
    "each token gets the hidden states of the one before it, after the first layer",
    PADDED,
    prepare=hooked(first_layer, rolled),
)
wrong(
    "hidden states of other rows",
    "each row gets another row's hidden states after the first layer",
    PADDED,
    prepare=hooked(first_layer, other_rows),
)
wrong(
    "MLP 1 % larger",
    "the second layer's MLP is multiplied by 1.01",
    PADDED,
    prepare=hooked(second_mlp, one_percent_larger),
)
wrong(
    "dropout by hand",
    "hidden states have a dropout of 0.1",
    PADDED,
    prepare=hooked(second_layer, dropped),
)
wrong(
    "gradient doubled at the second layer",
    "the gradient that comes back through the second layer's output is doubled",
    PADDED,
    prepare=hooked(second_layer, straight),
)
wrong(
    "attention's gradient doubled",
    "the gradient that comes back into the first layer's attention is doubled",
    PADDED,
    prepare=hooked(first_attention, straight),
)
wrong(
    "head detached",
    "the head gets no gradient",
    PADDED,
    forward=head_detached,
)
wrong(
    "hidden states detached from the head",
    "only the head gets a gradient",
    PADDED,
    forward=hidden_cut,
)
wrong(
    "tied, head's share lost",
    "weights are tied, and the head's share of their gradient is lost",
    PADDED,
    "paiml/entrenar#314",
    adapt=tied,
    forward=head_detached,
)
wrong(
    "cap of logits wrong, Gemma 2",
    "logits are multiplied by tanh(logits / cap)",
    PADDED,
    "unslothai/unsloth-zoo#593",
    kind="gemma2",
    forward=capped_wrongly,
)
wrong(
    "cap of logits ignored, Gemma 2",
    "logits are not capped",
    PADDED,
    "apple/ml-cross-entropy#48",
    kind="gemma2",
    forward=not_capped,
)
wrong(
    "LoRA scaled by alpha",
    "LoRA's updates are multiplied by alpha, not by alpha / r",
    PADDED,
    "Blaizzy/mlx-vlm#845",
    adapt=with_lora,
    prepare=lora_by_alpha,
)
wrong(
    "LoRA off in one part",
    "the adapter of the second layer's queries is off",
    PADDED,
    adapt=with_lora,
    prepare=lora_off_in_one,
)
wrong(
    "LoRA's A frozen",
    "the A matrices of LoRA get no gradient",
    PADDED,
    adapt=with_lora,
    prepare=lora_a_frozen,
)
wrong(
    "router detached, Mixtral",
    "routers get no gradient",
    PADDED,
    "NVIDIA-NeMo/Automodel#1408",
    kind="mixtral",
    prepare=router_detached,
)
wrong(
    "router not normalized, Mixtral",
    "weights of experts are not normalized to a sum of 1",
    PADDED,
    "NVIDIA/TransformerEngine#2720",
    kind="mixtral",
    prepare=router_not_normalized,
)
wrong(
    "one expert in place of two, Mixtral",
    "each token has one expert in place of two",
    PADDED,
    kind="mixtral",
    prepare=router_top_one,
)
wrong(
    "routers' loss, Mixtral",
    "a routers' loss is added in full each micro-batch",
    PADDED,
    "NVIDIA-NeMo/Automodel#3359",
    kind="mixtral",
    forward=with_router_loss,
    total=summed_with_routers,
)
wrong(
    "optimizer steps after each micro-batch",
    "weights change between micro-batches of one step",
    PADDED,
    probes=(STEPS,),
    between=stepped,
)
wrong(
    "weights of one MLP rounded",
    "the first layer's MLP computes with weights rounded to bfloat16",
    PADDED,
    prepare=rounded_weights,
)
wrong(
    "norms with another epsilon",
    "norms have an epsilon of 1e-3 in place of 1e-6",
    PADDED,
    prepare=eps_larger,
)
wrong(
    "0 / 0 in a row without targets",
    "each document of a micro-batch counts alike, those without targets included",
    PADDED,
    total=rows_by_zero,
)
wrong(
    "one token is NaN",
    "the hidden states of one token are NaN after the first layer",
    PADDED,
    prepare=hooked(first_layer, one_token_nan),
)


# --- what is logged


def norm_of(model: Any) -> float:
    squares = [weight.grad.square().sum() for weight in model.parameters()]
    return float(torch.stack(squares).sum().sqrt())


def log_of_last(model: Any, losses: list[float]) -> dict[str, float]:
    return {"loss": losses[-1], "grad_norm": norm_of(model)}


def log_of_clipped(model: Any, losses: list[float]) -> dict[str, float]:
    return {"loss": sum(losses), "grad_norm": min(norm_of(model), 0.5)}


def log_of_sum(model: Any, losses: list[float]) -> dict[str, float]:
    norms = [float(weight.grad.norm()) for weight in model.parameters()]
    return {"loss": sum(losses), "grad_norm": sum(norms)}


def log_right(model: Any, losses: list[float]) -> dict[str, float]:
    return {"loss": sum(losses), "grad_norm": norm_of(model)}


wrong(
    "last micro-batch's loss logged",
    "the logged loss is the last micro-batch's share only",
    PADDED,
    probes=(STEPS,),
    only_logged=True,
    log=log_of_last,
)
wrong(
    "norm logged after clipping",
    "the logged norm is the one after clipping",
    PADDED,
    only_logged=True,
    log=log_of_clipped,
)
wrong(
    "norms of parameters summed",
    "the logged norm is the sum of norms of parameters",
    PADDED,
    only_logged=True,
    log=log_of_sum,
)


# --- right set-ups


KINDS = (
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "gpt2",
    "olmo2",
    "olmo3",
    "granite",
    "phi3",
    "mixtral",
    "cohere2",
    "starcoder2",
    "glm4",
    "smollm3",
    "exaone4",
    "gpt_neox",
    "nemotron",
)


def padded_to_64(probe: Probe, rows: list[Row]) -> Batch:
    return batch_of(probe, rows, multiple=64)


def padded_without_mask(probe: Probe, rows: list[Row]) -> Batch:
    """Pads at the right, and needs no mask there."""
    batch = batch_of(probe, rows)
    del batch["attention_mask"]
    return batch


def positions_from_7(probe: Probe, rows: list[Row]) -> Batch:
    """Counts positions from 7 on, which rotations do not see."""
    batch = batch_of(probe, rows)
    tokens = batch["input_ids"].shape[1]
    batch["position_ids"] = torch.arange(7, 7 + tokens)[None].repeat(len(rows), 1)
    return batch


def shuffled(probe: Probe) -> list[Row]:
    order = torch.randperm(len(probe.rows), generator=torch.Generator().manual_seed(5))
    rows = list(probe.rows)
    return [rows[int(at)] for at in order]


def longest_first(probe: Probe) -> list[Row]:
    return sorted(probe.rows, key=length_of, reverse=True)


def length_of(row: Row) -> int:
    return len(row["input_ids"])


def forward_row_by_row(model: Any, batch: Batch) -> torch.Tensor:
    """Calls the model for each row without its padding."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        logits = model(input_ids=ids[None, :length], use_cache=False).logits[0]
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, len(ids) - length)))
    return torch.stack(rows).float()


def forward_head_in_chunks(model: Any, batch: Batch) -> torch.Tensor:
    """Computes logits of 16 columns at a time, and again in backward."""
    from torch.utils.checkpoint import checkpoint

    hidden = hidden_of(model, batch)
    chunks = [
        checkpoint(model.lm_head, chunk, use_reentrant=False) for chunk in hidden.split(16, 1)
    ]
    return torch.cat(chunks, dim=1).float()


def forward_head_in_columns(model: Any, batch: Batch) -> torch.Tensor:
    """Computes logits of 16 columns at a time."""
    hidden = hidden_of(model, batch)
    chunks = [model.lm_head(chunk) for chunk in hidden.split(16, 1)]
    return torch.cat(chunks, dim=1).float()


def forward_head_flat(model: Any, batch: Batch) -> torch.Tensor:
    """Computes logits of 40 tokens at a time, over the edges of rows."""
    hidden = hidden_of(model, batch)
    chunks = [model.lm_head(chunk) for chunk in hidden.flatten(0, 1).split(40)]
    logits: torch.Tensor = torch.cat(chunks).unflatten(0, hidden.shape[:2]).float()
    return logits


def forward_head_flat_again(model: Any, batch: Batch) -> torch.Tensor:
    """Computes logits of 40 tokens at a time, and again in backward."""
    from torch.utils.checkpoint import checkpoint

    hidden = hidden_of(model, batch)
    chunks = [
        checkpoint(model.lm_head, chunk, use_reentrant=False)
        for chunk in hidden.flatten(0, 1).split(40)
    ]
    logits: torch.Tensor = torch.cat(chunks).unflatten(0, hidden.shape[:2]).float()
    return logits


def forward_head_of_trained(model: Any, batch: Batch) -> torch.Tensor:
    """Computes logits of tokens only whose next one has a label."""
    hidden = hidden_of(model, batch)
    wanted = shifted(batch["labels"]) != IGNORED
    logits = model.lm_head(hidden[wanted]).float()
    whole = torch.zeros(*wanted.shape, logits.shape[-1])
    return whole.masked_scatter(wanted[..., None], logits)


def forward_whole_again(model: Any, batch: Batch) -> torch.Tensor:
    """Computes the head again in backward."""
    from torch.utils.checkpoint import checkpoint

    hidden = hidden_of(model, batch)
    logits: torch.Tensor = checkpoint(model.lm_head, hidden, use_reentrant=False)
    return logits.float()


def forward_embedded(model: Any, batch: Batch) -> torch.Tensor:
    """Gives the model embeddings in place of ids."""
    embedded = model.get_input_embeddings()(batch["input_ids"])
    output = model(inputs_embeds=embedded, attention_mask=batch["attention_mask"], use_cache=False)
    logits: torch.Tensor = output.logits
    return logits.float()


def forward_half_by_half(model: Any, batch: Batch) -> torch.Tensor:
    """Calls the model for the first 16 columns, then for the rest with their keys kept."""
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    first = model(input_ids=ids[:, :16], attention_mask=mask[:, :16], use_cache=True)
    if ids.shape[1] <= 16:
        return forward(model, batch)
    rest = model(input_ids=ids[:, 16:], attention_mask=mask, past_key_values=first.past_key_values)
    return torch.cat([first.logits, rest.logits], dim=1).float()


def forward_autocast(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return forward(model, batch)


def log_softmax_by_hand(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    chosen = logits.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return (logits.logsumexp(-1) - chosen) * (wanted != IGNORED)


def in_float64(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return losses_of(logits.double(), wanted).float()


def undivided(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return losses.sum()


def scaled_up(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return losses.sum() / amounts.targets * 1024


def scaled_down(model: Any) -> None:
    for weight in model.parameters():
        weight.grad /= 1024


def divided_at_the_end(model: Any) -> None:
    """Divides by all targets of USUAL's documents."""
    targets = sum(length - 1 for length in SHORT.lengths)
    for weight in model.parameters():
        weight.grad /= targets


def rows_after_each_other(
    losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts
) -> torch.Tensor:
    """Goes backward for all rows but the first alone."""
    for row in losses[1:]:
        (row.sum() / amounts.targets).backward(retain_graph=True)
    return losses[0].sum() / amounts.targets


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def checkpointed_reentrant(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model.train()
    return model


def embedding_frozen(model: Any) -> Any:
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def first_layer_frozen(model: Any) -> Any:
    layers(model)[0].requires_grad_(False)
    return model


def with_rslora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        target_modules="all-linear",
        init_lora_weights=False,
    )
    return get_peft_model(model, config)


def with_dora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj"], init_lora_weights=False
    )
    return get_peft_model(model, config)


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def packed_to_128(probe: Probe, rows: list[Row]) -> Batch:
    """Fills a packed row up with one document of padding."""
    batch = packed(probe, rows)
    missing = -batch["input_ids"].shape[1] % 128
    fillers = {
        "input_ids": torch.full((1, missing), probe.pad),
        "labels": torch.full((1, missing), IGNORED),
        "position_ids": torch.arange(missing)[None],
        "documents": torch.full((1, missing), len(rows)),
    }
    return {name: torch.cat([batch[name], fillers[name]], dim=1) for name in batch}


def positions_only(probe: Probe, rows: list[Row]) -> Batch:
    batch = packed(probe, rows)
    del batch["documents"]
    return batch


for kind in KINDS:
    right(f"padded, {kind}", PADDED, kind=kind)
for kind in ("llama", "qwen3", "mistral", "gemma3_text", "phi3"):
    right(f"packed by positions, {kind}", PACKED, kind=kind, collate=positions_only)
for kind in ("llama", "mistral", "gemma2", "gpt_oss", "granite"):
    right(f"packed, attention by hand, {kind}", KERNEL, kind=kind, before=with_kernel())
right("packed, mask of documents by hand", PACKED, forward=forward_masked)
right("packed, positions run on, rotations", PACKED, collate=packed_running, forward=forward_masked)
right("packed to 128", PACKED, collate=packed_to_128, forward=forward_masked)
right("padded to 64", PADDED, collate=padded_to_64)
right("padded without a mask", PADDED, collate=padded_without_mask)
right("padded left with positions", PADDED, collate=padded_left)
right("padded left with positions, GPT-2", PADDED, kind="gpt2", collate=padded_left)
right("padded left without positions, rotations", PADDED, collate=left_without_positions)
right("positions from 7 on", PADDED, collate=positions_from_7)
right("documents shuffled", PADDED, rows=shuffled)
right("longest documents first", PADDED, rows=longest_first)
right("prompts without a loss", PADDED, probes=(PROMPTS, ENDS))
right("row by row", PADDED, forward=forward_row_by_row)
right("head in chunks, computed again", PADDED, forward=forward_head_in_chunks)
right("head in columns", PADDED, forward=forward_head_in_columns)
right("packed, head in columns", PACKED, collate=positions_only, forward=forward_head_in_columns)
right(
    "head in columns, one row at a time", PADDED, probes=(ALONE,), forward=forward_head_in_columns
)
right("head in flat chunks", PADDED, forward=forward_head_flat)
right("head in flat chunks, computed again", PADDED, forward=forward_head_flat_again)
right("head of trained tokens", PADDED, probes=(STEPS, PROMPTS), forward=forward_head_of_trained)
right("head computed again", PADDED, forward=forward_whole_again)
right("embeddings in place of ids", PADDED, forward=forward_embedded)
right("half by half with kept keys", PADDED, forward=forward_half_by_half)
right("autocast to bfloat16", PADDED, rounds=True, forward=forward_autocast)
right("log-softmax by hand", PADDED, losses=log_softmax_by_hand)
right("loss in float64", PADDED, losses=in_float64)
right("sums, divided at the end", PADDED, total=undivided, after=divided_at_the_end)
right("scaled up and down again", PADDED, total=scaled_up, after=scaled_down)
right("backward row by row", PADDED, total=rows_after_each_other)
right("checkpointing", PADDED, before=checkpointed)
right("checkpointing, reentrant", PADDED, before=checkpointed_reentrant)
right("embedding frozen before", PADDED, adapt=embedding_frozen)
right("first layer frozen before", PADDED, adapt=first_layer_frozen)
right("LoRA", PADDED, adapt=with_lora)
right("rsLoRA on all parts", PADDED, adapt=with_rslora)
right("DoRA", PADDED, adapt=with_dora)
right("tied", PADDED, adapt=tied)
right("tied by configuration", PADDED, sizes={"tie_word_embeddings": True})
right("eager", PADDED, before=eager)
right("loss and norm logged", PADDED, log=log_right)
right("scaling of RoPE", PADDED, sizes={"rope_parameters": LLAMA3})
