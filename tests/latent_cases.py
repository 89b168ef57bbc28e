"""A step of a model with latent attention, over several ranks and in one process, with the bytes
that its exchange sends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from transformers import PreTrainedModel

from longctx.attention.exchange import Exchange
from longctx.attention.ulysses import packed_attention
from longctx.data.packing import pack_documents
from longctx.hf import attention as hf_attention
from longctx.hf.attention import Rings, model_inputs, prepare
from longctx.hf.latents import send_keys
from longctx.model.compilation import compile_blocks
from longctx.planning.layout import Placement
from longctx.training import build
from tests import pretrained_cases
from tests.data_cases import placed_plan
from tests.huggingface_cases import LENGTHS, build_model, gradients, make_documents, unpacked

DENSE = {"first_k_dense_replace": 2}
"""Settings of a DeepSeek V3 without experts."""
PROJECTIONS = ["kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj", "o_proj"]


@dataclass(frozen=True)
class Case:
    """A model, and how ring attention runs it."""

    kind: str = "deepseek_v3"
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    recompute: bool = False
    autocast: bool = False
    keys: bool = False
    """Whether K and V are sent."""
    dtype: torch.dtype = torch.float64
    lengths: tuple[int, ...] = LENGTHS
    changed: int | None = None
    """Document with other tokens."""


def placements(ranks: int) -> list[list[Placement]]:
    """Returns three micro-batches: the longest documents on all ranks or all but one, the others on
    one rank each."""
    shorter = max(1, ranks - 1)
    return [
        [
            Placement(0, 0, ranks, rounds=max(1, ranks - 1)),
            Placement(1, 0, 1),
            Placement(2, ranks - 1, 1),
        ],
        [Placement(3, ranks - shorter, shorter, reversed=True), Placement(4, 0, min(2, ranks))],
        [Placement(5, 0, 1)],
    ]


def make_model(case: Case, attention: str) -> PreTrainedModel:
    model = build_model(case.kind, attention, **case.settings)
    if case.lora is not None:
        torch.manual_seed(1)
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=PROJECTIONS, **case.lora), model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.copy_(0.2 * torch.randn_like(weight))
    model.set_experts_implementation("eager")  # the others have no float64
    return model.to(case.dtype).train()


def documents_of(case: Case) -> list[torch.Tensor]:
    documents = make_documents(case.lengths)
    if case.changed is not None:
        documents[case.changed] = (documents[case.changed] + 7) % 64
    return documents


def expected(case: Case) -> tuple[float, list[torch.Tensor]]:
    """Returns loss and gradients of one process that trains one document at a time, without
    longctx."""
    return unpacked(make_model(case, "eager"), documents_of(case))


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collects the bytes of this rank's messages."""
    sent, start = [0], Exchange.start

    def counting(self: Exchange, outgoing: Sequence[tuple[int, torch.Tensor]], *others: Any) -> Any:
        sent[0] += sum(tensor.numel() * tensor.element_size() for _, tensor in outgoing)
        return start(self, outgoing, *others)

    with mock.patch.object(Exchange, "start", counting):
        yield sent


def step(case: Case) -> tuple[float, list[torch.Tensor], int]:
    """Runs on each rank: returns loss and gradients, summed over ranks, and the bytes that this
    rank sent."""
    model = make_model(case, "longctx")
    prepare(model)
    if case.keys:
        send_keys(model)
    if case.recompute:
        model.gradient_checkpointing_enable()
    parts = []
    with counted() as sent:
        for inputs in inputs_of(case, model):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                parts.append(model(**inputs).loss)
            if not case.recompute:
                parts[-1].backward()
        for part in reversed(parts if case.recompute else []):
            part.backward()
    loss = torch.stack(parts).detach().sum()
    found = gradients(model)
    for tensor in (loss, *found):
        dist.all_reduce(tensor)
    return loss.item(), found, sent[0]


def inputs_of(case: Case, model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yields the inputs of every micro-batch of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    micro_batches, targets = pack_documents(
        placed_plan(case.lengths, ranks, placements(ranks)), rank, documents_of(case)
    )
    for batch in micro_batches:
        inputs = model_inputs(model, batch, targets)
        if case.options:

            def make(
                scale: float | None,
                softcap: float,
                window: int | None,
                device: torch.device,
                layout: Any = batch.layout,
            ) -> Any:
                return packed_attention(
                    layout, scale=scale, softcap=softcap, device=device, **case.options
                )

            inputs["ring_attention"] = Rings(make)
        yield inputs


def steps(cases: Sequence[Case]) -> list[tuple[float, list[torch.Tensor], int]]:
    return [step(case) for case in cases]


def first_micro_batch(cases: Sequence[Case]) -> list[list[torch.Tensor]]:
    """Runs on each rank: returns, for each case, logits and gradients of the embedded tokens of the
    first micro-batch."""
    results = []
    for case in cases:
        model = make_model(case, "longctx")
        prepare(model)
        embedded: list[torch.Tensor] = []

        def keep(
            _module: Any,
            _inputs: Any,
            output: torch.Tensor,
            embedded: list[torch.Tensor] = embedded,
        ) -> None:
            output.retain_grad()
            embedded.append(output)

        model.get_input_embeddings().register_forward_hook(keep)
        output = model(**next(inputs_of(case, model)))
        output.loss.backward()
        gradient = embedded[0].grad
        assert gradient is not None
        results.append([output.logits[0].detach(), gradient[0]])
    return results


def run_step(
    folder: Path, settings: list[str], keys: bool
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Returns loss and gradients of a step of `longctx train`, and the bytes that this rank sent;
    `keys`: K and V were."""
    compiled = mock.patch.object(
        build, "compile_blocks", partial(compile_blocks, backend="aot_eager")
    )
    with (
        counted() as sent,
        compiled,
        mock.patch.object(hf_attention, "send_latents") if keys else nullcontext(),
    ):
        loss, gradients, _ = pretrained_cases.step(folder, settings)
    return loss, gradients, sent[0]
