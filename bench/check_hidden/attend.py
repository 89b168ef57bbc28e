"""Attention by hand over blocks of keys, with places where faults are put in.

A loop says in `layout` which documents its tokens belong to, as loops do that call
`update_ring_flash_attn_params`; `use` makes a model of transformers use a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface


@dataclass
class Layout:
    """Which tokens a rank has, and where all keys are.

    Attributes:
        at: position of each query in its document, [tokens].
        documents: document of each query, [tokens].
        keys_at, keys_documents: the same of the keys of each block; None: those of the queries.
        rank: whose queries these are.
    """

    at: torch.Tensor
    documents: torch.Tensor
    keys_at: list[torch.Tensor] | None = None
    keys_documents: list[torch.Tensor] | None = None
    rank: int = 0


layout = Layout(at=torch.zeros(0), documents=torch.zeros(0))


@dataclass
class Block:
    """Keys and values of one block (a step of a ring), [rows, heads, keys, width], and where they
    are."""

    keys: torch.Tensor
    values: torch.Tensor
    at: torch.Tensor
    documents: torch.Tensor
    source: int


@dataclass(frozen=True)
class Options:
    """What a layer asks of its attention, and what a fault may change.

    Attributes:
        layer: its number.
        scaling: what scores are multiplied by.
        window: how many keys a query sees, itself included; None: all.
        cap: of scores; None: none.
        sinks: logits that take part in the softmax, [heads]; None: none.
    """

    layer: int
    scaling: float
    window: int | None
    cap: float | None
    sinks: torch.Tensor | None


def same_options(options: Options) -> Options:
    return options


def one_block(keys: torch.Tensor, values: torch.Tensor, options: Options) -> list[Block]:
    """Returns the keys and values of the rank itself, as one block."""
    return [Block(keys, values, layout.at, layout.documents, source=layout.rank)]


def repeated(keys: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns keys of each head of queries."""
    return keys.repeat_interleave(groups, dim=1)


def visible(block: Block, options: Options, heads: int) -> torch.Tensor:
    """Returns which keys each query sees, [heads, queries, keys]."""
    distance = layout.at[:, None] - block.at[None, :]
    mask = (layout.documents[:, None] == block.documents[None, :]) & (distance >= 0)
    if options.window is not None:
        mask = mask & (distance < options.window)
    return mask[None].repeat(heads, 1, 1)


def scored(queries: torch.Tensor, block: Block, options: Options) -> torch.Tensor:
    """Returns scores, [rows, heads, queries, keys]."""
    scores = queries @ block.keys.transpose(-1, -2) * options.scaling
    if options.cap is not None:
        scores = torch.tanh(scores / options.cap) * options.cap
    return scores


Part = tuple[torch.Tensor, torch.Tensor]


def merged(parts: list[Part], options: Options) -> Part:
    """Returns outputs and log-sum-exps of all blocks together."""
    outputs = torch.stack([output for output, _ in parts])
    sums = torch.stack([total for _, total in parts])
    whole = torch.logsumexp(sums, dim=0)
    shares = (sums - whole).exp().nan_to_num(0.0)
    return (outputs * shares[..., None]).sum(0), whole


def with_sinks(part: Part, options: Options) -> torch.Tensor:
    """Returns outputs to which sinks have added nothing but to the denominator."""
    output, total = part
    if options.sinks is None:
        return output
    sinks = options.sinks.to(total.dtype)[None, :, None]
    return output * torch.sigmoid(total - sinks)[..., None]


def unchanged(output: torch.Tensor, options: Options) -> torch.Tensor:
    return output


@dataclass(frozen=True)
class Kernel:
    """Attention by parts, each of which a fault may replace."""

    options: Callable[[Options], Options] = same_options
    blocks: Callable[[torch.Tensor, torch.Tensor, Options], list[Block]] = one_block
    repeat: Callable[[torch.Tensor, int], torch.Tensor] = repeated
    visible: Callable[[Block, Options, int], torch.Tensor] = visible
    scored: Callable[[torch.Tensor, Block, Options], torch.Tensor] = scored
    merged: Callable[[list[Part], Options], Part] = merged
    sinks: Callable[[Part, Options], torch.Tensor] = with_sinks
    output: Callable[[torch.Tensor, Options], torch.Tensor] = unchanged

    def part(self, queries: torch.Tensor, block: Block, options: Options) -> Part:
        """Returns output and log-sum-exp of one block; zeros where a query sees nothing."""
        heads = queries.shape[1]
        groups = heads // block.keys.shape[1]
        block = replace(
            block,
            keys=self.repeat(block.keys, groups),
            values=self.repeat(block.values, groups),
        )
        mask = self.visible(block, options, heads)
        scores = self.scored(queries, block, options)
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest)
        total = torch.logsumexp(scores, dim=-1)
        weights = (scores - total[..., None]).exp() * mask
        nothing = ~mask.any(-1)
        total = total.masked_fill(nothing, -1e9)
        return weights @ block.values, total

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns outputs, [rows, tokens, heads, width], as transformers wants them."""
        asked = Options(
            layer=module.layer_idx,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            cap=softcap,
            sinks=s_aux,
        )
        options = self.options(asked)
        dtype = query.dtype
        query = query.float()
        blocks = self.blocks(key.float(), value.float(), options)
        parts = [self.part(query, block, options) for block in blocks]
        whole = self.merged(parts, options)
        output = self.output(self.sinks(whole, options), options)
        return output.transpose(1, 2).contiguous().to(dtype), None


def use(model: Any, kernel: Callable[..., Any]) -> Any:
    """Returns the model, whose attention is this kernel now."""
    name = f"hidden_{id(kernel)}"
    AttentionInterface.register(name, kernel)
    KEPT.append(kernel)
    model.set_attn_implementation(name)
    return model


KEPT: list[Callable[..., Any]] = []  # so that no id is used again
