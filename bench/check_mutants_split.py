"""Loops of context parallelism by hand, with one fault each, for bench/check_mutants.py."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface

from longctx.check import Probe, record

Make = Callable[[Probe], Any]
IGNORED = -100


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    return int(os.environ.get("RANK", 0))


class Gather(torch.autograd.Function):
    """Tensors of all ranks, stacked; its gradient is summed at the rank that owns it, if
    `summed`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, summed: bool) -> torch.Tensor:
        ctx.summed, parts = summed, [torch.empty_like(x) for _ in range(ranks())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        if ctx.summed:
            dist.all_reduce(grad)
        return grad[rank()], None


class Split:
    """Who holds which tokens of a row of documents, and which fault attention has."""

    def __init__(self, documents: torch.Tensor, zigzag: bool, way: str, fault: str) -> None:
        chunks = torch.arange(len(documents)).chunk(ranks() * 2)
        pairs = [
            (at, 2 * ranks() - 1 - at) if zigzag else (2 * at, 2 * at + 1) for at in range(ranks())
        ]
        self.orders = [torch.cat([chunks[first], chunks[second]]) for first, second in pairs]
        self.documents, self.way, self.fault = documents, way, fault
        self.mine = self.orders[0 if fault == "same part" else rank()]

    def sees(
        self, queries: torch.Tensor, keys: torch.Tensor, window: int | None, alone: bool = True
    ) -> torch.Tensor:
        seen = keys <= queries[:, None]
        if alone:
            seen &= self.documents[queries][:, None] == self.documents[keys]
        return seen & (queries[:, None] - keys < window) if window else seen

    def whole(self, x: torch.Tensor, summed: bool = True) -> torch.Tensor:
        stack = Gather.apply(x, summed)
        orders = self.orders[::-1] if self.fault == "ranks swapped" else self.orders
        back = torch.cat(orders).argsort()
        return torch.cat(list(stack), 2)[
            :, :, torch.arange(len(back)) if self.fault == "not reordered" else back
        ]

    def gathered(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any, **more: Any
    ) -> torch.Tensor:
        k, v = (self.whole(x, self.fault != "gradient not returned") for x in (k, v))
        seen = self.sees(self.mine, torch.arange(k.shape[2]), window)
        return scaled_dot_product_attention(q, k, v, seen, **more)

    def ulysses(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any, **more: Any
    ) -> torch.Tensor:
        q, k, v = (self.whole(x).chunk(ranks(), 1)[rank()] for x in (q, k, v))
        tokens = torch.arange(q.shape[2])
        out = Gather.apply(
            scaled_dot_product_attention(q, k, v, self.sees(tokens, tokens, window), **more),
            self.fault != "own heads",
        )
        heads = list(out)[::-1] if self.fault == "heads swapped" else list(out)
        heads = (
            torch.stack(heads, 2).flatten(1, 2)
            if self.fault == "heads interleaved"
            else torch.cat(heads, 1)
        )
        return heads[:, :, self.mine]

    def ring(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any, **more: Any
    ) -> torch.Tensor:
        keys, values = (Gather.apply(x, True) for x in (k, v))
        outs, sums = [], []
        for step in range(1 if self.fault == "own part" else ranks()):
            owner = (rank() - step) % ranks()
            window = None if step and self.fault == "window in the first step" else window
            seen = self.sees(
                self.mine,
                self.orders[owner],
                window,
                not step or self.fault != "documents in the first step",
            )
            if step and self.fault == "mask in each step":
                seen = seen & torch.ones_like(seen).tril()
            if step and self.fault == "one late":
                seen[:, -1] = False
            if step and self.fault == "future":
                seen = self.documents[self.mine][:, None] == self.documents[self.orders[owner]]
            if self.fault == "wrong rank":
                owner = (owner + step + 1) % ranks()
            key, value = keys[owner], values[owner]
            if self.fault == "stale in backward":
                key, value = (
                    stack[owner].detach() + own - own.detach()
                    for stack, own in ((keys, k), (values, v))
                )
            scores = (q @ key.transpose(2, 3) * more["scale"]).masked_fill(~seen, -1e30)
            outs.append(scores.softmax(-1) @ value * seen.any(1)[:, None])
            sums.append(scores.logsumexp(-1, keepdim=True))
            if self.fault == "no rescaling":
                sums[-1] = (~seen.any(1)[:, None] * -60.0).expand_as(sums[-1])
        return (torch.stack(outs) * torch.stack(sums).softmax(0)).sum(0)


SPLIT: list[Split] = []


def attend(
    module: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    scaling: Any = None,
    sliding_window: Any = None,
    **_: Any,
) -> Any:
    times, now = q.shape[1] // k.shape[1], SPLIT[-1]
    if now.fault == "heads tiled":
        k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
    else:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return getattr(now, now.way)(q, k, v, sliding_window, scale=scaling).transpose(
        1, 2
    ).contiguous(), None


AttentionInterface.register("bench_split", attend)


def split(
    way: str = "gathered",
    fault: str = "",
    zigzag: bool = True,
    kind: str = "llama",
    each: bool = False,
    **sizes: Any,
) -> Make:
    """A step on one row, split over ranks."""
    each, windowed = fault in ("each document padded", "padding predicted"), "window" in fault

    def make(probe: Probe) -> Any:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        table = []
        for number, row in enumerate(probe.rows):
            ids, labels = row["input_ids"], [*row["labels"][1:], IGNORED]
            more = -len(ids) % (2 * ranks()) if each else 0
            if more and fault == "padding predicted":
                labels[-1] = probe.pad
            table += zip(
                [*ids, *[probe.pad] * more],
                [*labels, *[IGNORED] * more],
                range(len(ids) + more),
                [number] * 999,
                strict=False,
            )
        end = -len(table) % (2 * ranks())
        table += [
            (probe.pad, probe.pad if fault == "padding trained" else IGNORED, at, -1)
            for at in range(end)
        ]
        ids, labels, positions, documents = torch.tensor(table).T
        model = probe.model("mistral", sliding_window=16) if windowed else probe.model("llama")
        model.set_attn_implementation("bench_split")
        if fault == "bounds divided":
            part = torch.searchsorted(
                documents.unique_consecutive(return_counts=True)[1].cumsum(0) // ranks(),
                torch.arange(len(ids)) + 1,
            )
            documents = part[: len(ids) // ranks()].repeat(ranks())
        now = Split(documents, zigzag, way, fault)
        SPLIT[:] = [now]
        mine, targets, where = now.mine, labels[now.mine], positions[now.mine]
        own = labels.roll(1)[mine]
        plain = torch.arange(len(ids)).chunk(ranks())[rank()]
        if fault == "shifted after the split":
            targets = torch.cat([own[1:], torch.tensor([IGNORED])])
        if fault == "rolled after the split":
            targets = own.roll(-1)
        if fault == "labels of another split":
            targets = labels[plain]
        if fault == "positions of the part":
            where = torch.arange(len(mine))
        if fault == "positions of another split":
            where = positions[plain]
        if fault == "positions begin with the part":
            where = positions[mine] - positions[mine][0] * (documents[mine] == documents[mine][0])
        if fault == "an offset is wrong":
            where = where + (documents[mine] == len(probe.rows) - 1) * (where > 8)
        total = (labels != IGNORED).sum()
        with record(model) as seen:
            logits = model(
                input_ids=ids[mine][None], position_ids=where[None], use_cache=False
            ).logits[0]
            loss = cross_entropy(logits, targets, reduction="sum") / total
            if fault == "means of ranks":
                loss = cross_entropy(logits, targets) / ranks()
            loss.backward()
            factors = {"mean of gradients": 1 / ranks(), "loss of all ranks": ranks()}
            for name, parameter in model.named_parameters():
                if fault != "not reduced" and not (fault == "norms not reduced" and "norm" in name):
                    dist.all_reduce(parameter.grad)
                parameter.grad *= (
                    1 / ranks()
                    if fault == "norms averaged" and "norm" in name
                    else factors.get(fault, 1)
                )
            total_loss = loss.detach().clone()
            dist.all_reduce(total_loss)
            logged = loss if fault == "loss of one rank" else total_loss
            return seen.step(loss=float(logged) * factors.get(fault, 1), rows=[ids])

    return make


# fmt: off
BY_HAND: list[tuple[str, bool, str, str]] = [  # way, zigzag, fault, words of a right name
    ("gathered", True, "not reordered", "order|causal|zigzag"),
    ("gathered", False, "ranks swapped", "order|causal|rank"),
    # NVIDIA/Megatron-LM 1464
    ("gathered", True, "gradient not returned", "parameters|backward"),
    ("gathered", False, "same part", "repeated|no call|twice"),
    ("ring", False, "own part", "own part"),
    ("ring", False, "mask in each step", "mask|own part"),
    ("ring", False, "one late", "see"),
    ("ring", False, "future", "not causal"),
    ("ring", False, "wrong rank", "rank|order"),
    ("ring", False, "no rescaling", "attention|log-sum-exp"),
    ("ring", True, "no rescaling", "attention|log-sum-exp"),
    # huggingface/diffusers 14265
    ("ring", False, "stale in backward", "parameters|backward"),
    ("ring", False, "documents in the first step", "see each other"),
    ("ring", True, "documents in the first step", "see each other"),
    ("ring", False, "window in the first step", "window"),
    # NVIDIA-NeMo/Speech 9540
    ("ring", False, "bounds divided", "see each other|cut"),
    ("ulysses", False, "heads swapped", "attention|heads"),
    ("ulysses", False, "heads interleaved", "attention|heads"),
    # vllm-project/vllm-omni 5716
    ("ulysses", False, "heads tiled", "attention|heads"),
    ("ulysses", False, "own heads", "parameters|backward"),
    ("ulysses", False, "ranks swapped", "order|causal"),
    # huggingface/transformers 36607, NVIDIA-BioNeMo/bionemo-recipes 1449, alibaba/ChatLearn 343
    ("gathered", False, "shifted after the split", "shifted after|later parts"),
    ("gathered", True, "shifted after the split", "shifted after|later parts"),
    ("gathered", False, "rolled after the split", "after the split|predict"),
    ("gathered", True, "labels of another split", "labels|predict"),
    # NVIDIA/Megatron-LM 560, 5243
    ("gathered", False, "positions of the part", "positions"),
    ("gathered", True, "positions of another split", "positions"),
    ("gathered", False, "positions begin with the part", "positions"),
    ("gathered", False, "an offset is wrong", "positions"),
    # PrimeIntellect-ai/prime-rl 1957, pytorch/torchtitan 2206
    ("gathered", False, "means of ranks", "mean of means"),
    # NVIDIA/Megatron-LM 673, 906
    ("gathered", True, "mean of gradients", "scale|factor"),
    ("gathered", True, "loss of all ranks", "scale|factor"),
    ("gathered", True, "not reduced", "differ"),
    ("gathered", True, "norms not reduced", "differ"),
    ("gathered", True, "norms averaged", "parameters|backward"),
    # NVIDIA/Megatron-LM 1669
    ("gathered", True, "padding trained", "padding"),
    ("gathered", True, "padding predicted", "padding"),
    # modelscope/ms-swift 9152
    ("gathered", False, "loss of one rank", "logged loss"),
    *((way, zigzag, "", "") for way in ("gathered", "ring", "ulysses") for zigzag in (False, True)),
    ("ring", True, "window", ""),
    ("ring", True, "each document padded", ""),
]
# fmt: on
