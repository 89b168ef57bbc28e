"""Libraries of rings, for `bench.check_stacks`: they call flash-attn, of which extras/flash_attn_cpu
has a stand-in.

A loop around each splits documents as the library asks for.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from bench.check_stacks import ASKED, Make, ranks
from longctx.check import Probe, Step, record

IGNORED = -100
WINDOW = 16
PACKED = tuple(probe for probe in ASKED if probe.micro_batches == 1 and not probe.ends)
"""Probes for a step on one row, whose ids tell their places also where a rank has a part of each
document."""
Attention = Callable[..., torch.Tensor]
"""Takes q, k and v as [tokens, heads, width], and `window_size`."""


@dataclass(frozen=True)
class Tokens:
    """A row of documents: each of its columns is [tokens]; `ends` is where documents end.

    Labels are those of the next token already.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    ends: list[int]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor([0, *self.ends], dtype=torch.int32)

    def at(self, places: torch.Tensor) -> "Tokens":
        """Returns the tokens at these places; `ends` stay those of the whole row."""
        return Tokens(
            self.ids[places],
            self.labels[places],
            positions=self.positions[places],
            ends=self.ends,
        )


def packed(probe: Probe, documents: Sequence[int], multiple: int) -> Tokens:
    """Returns documents one after another, each filled up with padding to a multiple."""
    ids = list[int]()
    labels = list[int]()
    positions = list[int]()
    ends = list[int]()
    for number in documents:
        row = probe.rows[number]
        more = -len(row["input_ids"]) % multiple
        length = len(row["input_ids"]) + more
        ids += [*row["input_ids"], *[probe.pad] * more]
        labels += [*row["labels"][1:], IGNORED, *[IGNORED] * more]
        positions += range(length)
        ends.append(len(ids))
    return Tokens(
        torch.tensor(ids), torch.tensor(labels), positions=torch.tensor(positions), ends=ends
    )


def contiguous(length: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns the places of a rank's part."""
    return torch.arange(length).chunk(ranks)[rank]


def zigzag(length: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns the places of a rank's early and late part."""
    parts = torch.arange(length).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])


def striped(length: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns every place that is a rank's in turn."""
    return torch.arange(rank, length, ranks)


Layout = Callable[[int, int, int], torch.Tensor]


def of_documents(tokens: Tokens, layout: Layout) -> torch.Tensor:
    """Returns the places of this rank where each document is split by itself."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    places = []
    for start, end in pairwise([0, *tokens.ends]):
        places.append(start + layout(end - start, rank, ranks))
    return torch.cat(places)


def step(
    model: Any,
    rows: Sequence[Tokens],
    splits: Sequence[torch.Tensor],
    attentions: Sequence[Attention],
) -> Step:
    """Returns a step on rows, each with an attention of its own, of which this rank has the places
    `splits`."""
    from transformers import AttentionInterface

    targets = sum(int((row.labels != IGNORED).sum()) for row in rows)
    with record(model) as seen:
        for row, split, attention in zip(rows, splits, attentions, strict=True):
            AttentionInterface.register("bench_ring", _as_transformers_call_it(attention))
            model.set_attn_implementation("bench_ring")
            mine = row.at(split)
            logits = model(
                input_ids=mine.ids[None], position_ids=mine.positions[None], use_cache=False
            ).logits[0]
            loss = cross_entropy(logits, mine.labels, reduction="sum") / targets
            loss.backward()
        add_up(model)
        return seen.step(rows=[row.ids for row in rows])


def _as_transformers_call_it(attention: Attention) -> Callable[..., Any]:
    """Returns an attention function of [1, heads, tokens, width]."""

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        window = (sliding_window - 1, 0) if sliding_window else (-1, -1)
        tensors = [each[0].transpose(0, 1).contiguous() for each in (query, key, value)]
        return attention(*tensors, causal=True, window_size=window)[None], None

    return attend


def _llama3(row: Tokens) -> Attention:
    from ring_flash_attn.llama3_flash_attn_varlen import (
        llama3_flash_attn_prepare_cu_seqlens,
        llama3_flash_attn_varlen_func,
    )

    prepared = llama3_flash_attn_prepare_cu_seqlens(
        row.cu_seqlens, True, dist.get_rank(), dist.get_world_size()
    )
    *sequences, keys = prepared

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rules: Any) -> torch.Tensor:
        found: torch.Tensor = llama3_flash_attn_varlen_func(
            q, k, v, *sequences, heads_k_stride=1, local_k_slice=keys, **rules
        )
        return found

    return attend


def _ring(row: Tokens) -> Attention:
    from ring_flash_attn import ring_flash_attn_varlen_func

    return _of_documents_by(ring_flash_attn_varlen_func, row)


def _zigzag(row: Tokens) -> Attention:
    from ring_flash_attn import zigzag_ring_flash_attn_varlen_func

    return _of_documents_by(zigzag_ring_flash_attn_varlen_func, row)


def _of_documents_by(function: Callable[..., torch.Tensor], row: Tokens) -> Attention:
    """Returns an attention of which each rank has a share of every document."""
    ends = row.cu_seqlens // dist.get_world_size()
    longest = int(ends.diff().max())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rules: Any) -> torch.Tensor:
        return function(q, k, v, ends, longest, **rules)

    return attend


def _stripe(row: Tokens) -> Attention:
    from ring_flash_attn import stripe_flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rules: Any) -> torch.Tensor:
        found: torch.Tensor = stripe_flash_attn_func(q[None], k[None], v[None], **rules)[0]
        return found

    return attend


class _Buffer(torch.Tensor):
    """A tensor whose `to` is a copy, also where the dtype stays."""

    def to(self, *args: Any, **named: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone().to(*args, **named)


@contextmanager
def mended() -> Iterator[None]:
    """Lets ring-flash-attn's gradients be right in float32.

    Its rings add up gradients in what is their buffer too if `.to(torch.float32)` copies nothing,
    and one rounds the gradient of queries to bfloat16, whatever the dtype.
    """

    def empty(*args: Any, **named: Any) -> torch.Tensor:
        return torch.empty(*args, **named).as_subclass(_Buffer)

    theirs = SimpleNamespace(**vars(torch) | {"empty": empty, "bfloat16": torch.float32})
    modules = [
        module for name, module in sys.modules.items() if name.startswith("ring_flash_attn.")
    ]
    rings = [module for module in modules if hasattr(module, "torch")]
    with ExitStack() as patches:
        for module in rings:
            patches.enter_context(patch.object(module, "torch", theirs))
        yield


FUNCTIONS: dict[str, Callable[[Tokens], Attention]] = {
    "llama3": _llama3,
    "ring": _ring,
    "zigzag": _zigzag,
    "stripe": _stripe,
}


def ring_flash_attn(way: str, *, window: bool = False, as_it_is: bool = False) -> Make:
    """One of the library's four ways, in float32: `mended`, or `as_it_is`."""

    def make(probe: Probe) -> Step:
        connect()
        let_ring_flash_attn_import()
        everyone = range(len(probe.rows))
        multiple = 2 * dist.get_world_size()
        model = probe.model("mistral", sliding_window=WINDOW) if window else probe.model("llama")
        if way == "stripe":  # it knows no documents: one after another
            rows = [packed(probe, [number], multiple) for number in everyone]
            splits = [of_documents(row, striped) for row in rows]
        else:
            rows = [packed(probe, everyone, multiple)]
            splits = [_split(rows[0], way)]
        attentions = [FUNCTIONS[way](row) for row in rows]
        if as_it_is:
            return step(model, rows, splits, attentions)
        with mended():
            return step(model, rows, splits, attentions)

    return make


def let_ring_flash_attn_import() -> None:
    """Gives transformers a name that they no longer have, as OpenRLHF does."""
    import transformers.modeling_flash_attention_utils as flash

    vars(flash).setdefault("is_flash_attn_greater_or_equal_2_10", True)
    import ring_flash_attn  # noqa: F401


@cache
def substitute() -> None:
    """Lets flash attention of transformers be the library's llama3, for all that follows."""
    from flash_attn.transformers_on_cpu import allow

    allow()
    let_ring_flash_attn_import()
    from ring_flash_attn import substitute_hf_flash_attn

    substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)


def by_the_adapter(*, window: int | None = None) -> Make:
    """`substitute_hf_flash_attn` on one row of whole documents."""

    def make(probe: Probe) -> Step:
        connect()
        substitute()
        from ring_flash_attn import update_ring_flash_attn_params

        given = {"sliding_window": window} if window else {}
        model = probe.model("mistral" if window else "llama", **given)
        model.set_attn_implementation("flash_attention_2")
        row = packed(probe, range(len(probe.rows)), 2 * dist.get_world_size())
        mine = row.at(_split(row, "llama3"))
        targets = int((row.labels != IGNORED).sum())
        update_ring_flash_attn_params(row.cu_seqlens, dist.group.WORLD)
        with record(model) as seen:
            logits = model(
                input_ids=mine.ids[None], position_ids=mine.positions[None], use_cache=False
            ).logits[0]
            (cross_entropy(logits, mine.labels, reduction="sum") / targets).backward()
            add_up(model)
            return seen.step(rows=[row.ids])

    return make


def connect(*, alone: bool = False) -> tuple[int, int]:
    """Starts a process group where there are several processes, or also `alone`; returns rank and
    their number."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if ranks() > 1:
        dist.init_process_group("gloo")
    elif alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return int(os.environ.get("RANK", "0")), ranks()


def add_up(model: Any) -> None:
    """Sums the gradients of all ranks."""
    for weight in model.parameters():
        dist.all_reduce(weight.grad)


def _split(row: Tokens, way: str) -> torch.Tensor:
    """Returns the places of this rank, as a way of the library wants them."""
    if way == "llama3":
        return contiguous(len(row.ids), dist.get_rank(), dist.get_world_size())
    return of_documents(row, zigzag if way == "zigzag" else contiguous)


RING_FLASH_ATTN: dict[str, Make] = {
    "ring-flash-attn, llama3": ring_flash_attn("llama3"),
    "ring-flash-attn, llama3, Mistral with windows": ring_flash_attn("llama3", window=True),
}
for way in ("ring", "zigzag", "stripe"):
    RING_FLASH_ATTN |= {
        f"ring-flash-attn, {way}, in float32": ring_flash_attn(way, as_it_is=True),
        f"ring-flash-attn, {way}, its gradients copied": ring_flash_attn(way),
        f"ring-flash-attn, {way}, its gradients copied, Mistral with windows": ring_flash_attn(
            way, window=True
        ),
    }
RING_FLASH_ATTN |= {
    "ring-flash-attn, `substitute_hf_flash_attn`": by_the_adapter(),
    "ring-flash-attn, `substitute_hf_flash_attn`, Mistral with windows": by_the_adapter(
        window=WINDOW
    ),
}
