"""Steps of models with indexed attention, over several ranks and in one process, with what the
exchange sends, and with faults that tests must see."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import PreTrainedModel

from longctx.attention.exchange import Exchange
from longctx.attention.indexed import LongDocuments, queries_of
from longctx.attention.keeping import contexts
from longctx.attention.kernels import sparse
from longctx.attention.kernels.selected import SelectedKernel
from longctx.attention.kernels.sparse import SparseKernel
from longctx.data.packing import pack_documents
from longctx.hf.attention import model_inputs, prepare
from longctx.hf.indexed import Selection
from longctx.planning.layout import Placement, Shard
from tests import sparse_package
from tests.data_cases import placed_plan
from tests.family_cases import build
from tests.huggingface_cases import gradients, make_documents, shard, unpacked

KINDS = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text", "mistral_large4")
LENGTHS = (61, 1, 24, 90, 13, 2, 130)
_OF_MISTRAL = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "kv_source_layers": [0, 1, 0, 1],
    "indexer_types": ["full", "full", "full", "shared"],
}
"""Layers that share the latents of another one, with an indexer of their own or without."""
PROJECTIONS = ["kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj", "o_proj"]


def placements(ranks: int) -> list[list[Placement]]:
    """Returns three micro-batches: degrees 1 to 3 side by side, one reversed, one in two rounds,
    and one that leaves ranks without tokens."""
    if ranks == 1:
        return [[Placement(document, 0, 1) for document in group] for group in GROUPS]
    if ranks == 2:
        return [
            [Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 1, 1)],
            [Placement(3, 0, 2, reversed=True), Placement(4, 1, 1), Placement(6, 0, 2)],
            [Placement(5, 0, 1)],
        ]
    return [
        [Placement(0, 0, 3), Placement(1, 0, 1), Placement(2, 1, 2)],
        [
            Placement(3, 0, 2, reversed=True),
            Placement(4, 2, 1),
            Placement(6, 0, 3, rounds=2),
        ],
        [Placement(5, 0, 1)],
    ]


GROUPS = ((0, 1, 2), (3, 4, 6), (5,))


@dataclass(frozen=True)
class Case:
    """A model, and how ring attention runs it."""

    kind: str = "deepseek_v32"
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS
    lora: bool = False
    recompute: bool = False
    kept: bool = False
    """Whether recomputation keeps what attention returned."""
    sharded: bool = False
    fault: str = ""
    sparse: bool = False
    """Whether a package has sparse kernels."""
    dtype: torch.dtype = torch.float32


def make_model(case: Case) -> PreTrainedModel:
    settings = dict(case.settings)
    if case.kind == "mistral_large4":
        settings["text_config"] = {**_OF_MISTRAL, **settings.get("text_config", {})}
    model = build(case.kind, "eager", **settings)
    if case.lora:
        torch.manual_seed(1)
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=PROJECTIONS), model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.copy_(0.2 * torch.randn_like(weight))
    if case.dtype != torch.float32:
        model.set_experts_implementation("eager")  # the others have no float64
    return model.to(case.dtype)


def expected(case: Case) -> tuple[float, list[Tensor]]:
    """Returns loss and gradients of one process that trains one document at a time, without
    longctx."""
    return unpacked(make_model(case), make_documents(case.lengths))


def step(case: Case) -> tuple[float, list[Tensor], dict[str, int]]:
    """Runs on each rank: returns loss and gradients, summed over ranks, and the bytes that this
    rank sent in each pass."""
    model = make_model(case)
    prepare(model)
    if case.recompute:
        options = {"use_reentrant": False} | ({"context_fn": contexts} if case.kept else {})
        model.gradient_checkpointing_enable(options)
    if case.sharded:
        shard(model)
    ranks = dist.get_world_size()
    plan = placed_plan(case.lengths, ranks, placements(ranks))
    documents = make_documents(case.lengths)
    micro_batches, targets = pack_documents(plan, dist.get_rank(), documents)
    parts = []
    with counted() as sent, fault(case.fault), package(model, case.sparse):
        for batch in micro_batches:
            inputs = model_inputs(model, batch, targets, **case.options)
            parts.append(model(**inputs).loss)
            if not case.recompute:
                parts[-1].backward()
        for part in reversed(parts if case.recompute else []):
            part.backward()
    loss = torch.stack(parts).detach().sum()
    dist.all_reduce(loss)
    found = gradients(model)
    if case.sharded:
        return loss.item(), [gradient.full_tensor() for gradient in found], sent
    for gradient in found:
        dist.all_reduce(gradient)
    return loss.item(), found, sent


def alone(case: Case) -> list[Tensor]:
    """Returns the logits of each document in one process, without longctx."""
    model = make_model(case)
    logits = []
    with torch.no_grad():
        for document in make_documents(case.lengths):
            logits.append(model(input_ids=document.unsqueeze(0), use_cache=False).logits[0])
    return logits


def shared(case: Case) -> list[tuple[int, tuple[int, int], Tensor]]:
    """Runs on each rank: returns the logits of its tokens, with their document and positions."""
    model = make_model(case)
    prepare(model)
    ranks = dist.get_world_size()
    plan = placed_plan(case.lengths, ranks, placements(ranks))
    micro_batches, _ = pack_documents(plan, dist.get_rank(), make_documents(case.lengths))
    found = []
    with torch.no_grad(), fault(case.fault):
        for batch in micro_batches:
            logits = model(**model_inputs(model, batch)).logits[0]
            for held in batch.layout.shards:
                for rows, span in queries_of(held):
                    found.append((held.document, span, logits[rows.start : rows.stop]))
    return found


def steps(cases: Sequence[Case]) -> list[tuple[float, list[Tensor], dict[str, int]]]:
    return [step(case) for case in cases]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Collects the bytes of this rank's messages, by pass."""
    sent = {"index": 0, "forward": 0, "backward": 0}
    start = Exchange.start

    def counting(self: Exchange, outgoing: Sequence[tuple[int, Tensor]], *others: Any) -> Any:
        (name,) = (name for name in sent if f", {name} pass" in self.where)
        sent[name] += sum(tensor.numel() * tensor.element_size() for _, tensor in outgoing)
        return start(self, outgoing, *others)

    with mock.patch.object(Exchange, "start", counting):
        yield sent


@contextmanager
def package(model: PreTrainedModel, is_there: bool = True) -> Iterator[None]:
    """Puts `sparse_package` in place of the packages with sparse kernels, for the sizes of a model
    on CPUs."""
    config = model.config.get_text_config()
    changes: dict[str, Any] = {"DEVICE": "cpu", "DTYPE": model.dtype}
    changes |= {"LATENT": config.kv_lora_rank, "ROTARY": config.qk_rope_head_dim}
    names = "sparse_mla_fwd_interface", "sparse_mla_bwd"
    changes["PACKAGES"] = (tuple(f"{sparse_package.__name__}.{name}" for name in names),)
    with ExitStack() as stack:
        if is_there:
            sparse.sparse_functions.cache_clear()
            stack.callback(sparse.sparse_functions.cache_clear)
            stack.enter_context(mock.patch.multiple(sparse, **changes))
        yield


@contextmanager
def fault(name: str) -> Iterator[None]:
    """Puts a fault into indexed attention.

    "ignored": each query sees all keys. "ring order": index keys of a document stand in the order
    of its ranks, not of its tokens. "ties": of keys with equal scores, the last are selected.
    "shifted": each query sees the key before each selected one. "one key less": sparse kernels do not
    see the last row that was selected.
    """
    gather = LongDocuments.gather
    run = Selection._run
    seen = SelectedKernel._seen
    indices = SparseKernel._indices

    def in_ring_order(self: LongDocuments, keys: Tensor, layer: int | None) -> Any:
        return [(held, _by_rank(held, whole)) for held, whole in gather(self, keys, layer)]

    def last_of_ties(self: Selection, rows: slice, mask: Tensor | None, cache: Any) -> Tensor:
        if mask is None:
            return run(self, rows, mask, cache)
        backwards = type(cache)(cache.keys.flip(0))
        return mask.shape[-1] - 1 - run(self, rows, mask.flip(-1), backwards)

    def shifted(self: SelectedKernel, part: Any) -> Tensor:
        return seen(self, part).roll(1, dims=1)

    def without_one(self: SparseKernel, rows: int, segments: Any) -> Tensor:
        found = indices(self, rows, segments)
        return found.masked_fill(found == found.max(), -1)

    faults = {
        "ignored": (Selection, "attention", lambda self, ring, layer, functions: ring),
        "ring order": (LongDocuments, "gather", in_ring_order),
        "ties": (Selection, "_run", last_of_ties),
        "shifted": (SelectedKernel, "_seen", shifted),
        "one key less": (SparseKernel, "_indices", without_one),
    }
    with ExitStack() as stack:
        if name:
            stack.enter_context(mock.patch.object(*faults[name]))
        yield


def _by_rank(held: Shard, whole: Tensor) -> Tensor:
    parts = []
    for index in range(held.degree):
        part = held.at(index, held.degree)
        parts += [whole[slice(*part.head)], whole[slice(*part.tail)]]
    return torch.cat(parts)
