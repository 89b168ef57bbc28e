"""Tiny encoder-decoders of transformers, trained with ring attention over several ranks and in one
process without packing."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, T5GemmaConfig, T5GemmaForConditionalGeneration
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

from longctx.data import IGNORED_LABEL
from longctx.data.packing import pack_seq2seq
from longctx.hf.attention import model_inputs, prepare
from longctx.planning.layout import Placement
from longctx.planning.plan import Plan
from tests.data_cases import placed_plan, random_plan

VOCABULARY, START = 64, 2
SOURCES, TARGETS = (61, 1, 9, 90, 1, 2, 40), (17, 30, 1, 55, 1, 8, 2)
"""Tokens of the source and of the target of each document."""
PLACEMENTS_OF: dict[int, tuple[tuple[Placement, ...], ...]] = {
    1: (tuple(Placement(document, 0, 1) for document in range(len(SOURCES))),),
    2: (
        (Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 1, 1)),
        (Placement(3, 0, 2, reversed=True), Placement(4, 0, 2), Placement(6, 1, 1)),
        (Placement(5, 0, 1),),
    ),
    3: (
        (Placement(0, 0, 3), Placement(1, 0, 1), Placement(2, 1, 2)),
        (Placement(3, 1, 2, reversed=True), Placement(4, 0, 3), Placement(6, 0, 3)),
        (Placement(5, 2, 1),),
    ),
    4: (
        (Placement(0, 0, 4), Placement(1, 0, 3, reversed=True), Placement(2, 2, 2)),
        (Placement(3, 0, 4), Placement(4, 0, 4), Placement(6, 1, 2), Placement(5, 3, 1)),
    ),
}
"""By number of ranks: degrees 1 to 4, ranks without tokens of the source or of the target, and
without any."""
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "t5gemma": {"encoder": {}, "decoder": {}},
    "without windows and soft caps": {
        part: {
            "layer_types": ["full_attention"] * 2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }
        for part in ("encoder", "decoder")
    },
    "unbalanced": {
        "encoder": {
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "num_key_value_heads": 4,
            "sliding_window": 30,
        },
        "decoder": {"num_hidden_layers": 1},
    },
}
"""Settings of the encoder and of the decoder: T5Gemma's own kinds of layers, none of them, and an
encoder of another size."""


def build_seq2seq(
    kind: str = "t5gemma",
    windows: Mapping[str, int] | None = None,
    parts: Mapping[str, Any] | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Builds a model with eager attention; its weights are large enough for attention to matter.

    `parts`: settings of encoder and decoder."""
    size = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
    }
    sizes = {name: {**size, **given, **(parts or {})} for name, given in SETTINGS[kind].items()}
    for name, window in (windows or {}).items():
        sizes[name]["sliding_window"] = window
    torch.manual_seed(0)
    config = T5GemmaConfig(
        **{name: T5GemmaModuleConfig(**part) for name, part in sizes.items()},
        attn_implementation="eager",
        **{"vocab_size": VOCABULARY, **settings},
    )
    model: PreTrainedModel = T5GemmaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def documents(
    sources: tuple[int, ...] = SOURCES, targets: tuple[int, ...] = TARGETS
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Returns sources, targets and labels, of which every fifth is left out but those of the
    shortest; no token is padding."""
    generator = torch.Generator().manual_seed(1)
    read, written = (
        [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
        for lengths in (sources, targets)
    )
    labels = [target.clone() for target in written]
    for label in labels:
        label[4::5] = IGNORED_LABEL
    return read, written, labels


def unpacked(model: PreTrainedModel, *given: list[torch.Tensor], start: int = START) -> float:
    """Returns the loss of one process that takes one document at a time, by the model's own code;
    leaves gradients."""
    read, written, labels = given or documents()
    targets = max(1, sum(int((label != IGNORED_LABEL).sum()) for label in labels))
    loss = 0.0
    for source, target, label in zip(read, written, labels, strict=True):
        inputs = torch.cat([torch.tensor([start]), target[:-1]])[None]
        part = model(
            input_ids=source[None],
            decoder_input_ids=inputs,
            labels=label[None],
            num_items_in_batch=targets,
        ).loss
        part.backward()
        loss += part.item()
    return loss


Step = tuple[float, dict[str, torch.Tensor]]
"""Loss and gradients."""


def packed(kind: str, checkpointing: bool = False) -> Step:
    """Runs a step over the ranks of the group; the result is the same on all of them."""
    model, rank, ranks = build_seq2seq(kind), dist.get_rank(), dist.get_world_size()
    prepare(model)
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    lengths = [source + target for source, target in zip(SOURCES, TARGETS, strict=True)]
    return ring_step(model, placed_plan(lengths, ranks, PLACEMENTS_OF[ranks]), rank, documents())


def packed_at_random(drawn: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]]) -> list[Step]:
    """Runs steps on documents of drawn lengths by drawn plans."""
    model = build_seq2seq()
    prepare(model)
    steps = []
    for sources, targets, seed in drawn:
        lengths = [source + target for source, target in zip(sources, targets, strict=True)]
        plan = random_plan(lengths, dist.get_world_size(), seed)
        steps.append(ring_step(model, plan, dist.get_rank(), documents(sources, targets)))
    return steps


def ring_step(model: PreTrainedModel, plan: Plan, rank: int, given: Any) -> Step:
    read, written, labels = given
    micro_batches, targets = pack_seq2seq(
        plan, rank, read, written, start_token=START, labels=labels, pad_to_multiple_of=3
    )
    total = torch.zeros(())
    for batch in micro_batches:
        loss = model(**model_inputs(model, batch, targets)).loss
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    gradients = take_gradients(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return total.item(), gradients


def take_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the gradients, and clears them."""
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return found
