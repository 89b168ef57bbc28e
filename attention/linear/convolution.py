"""Short causal convolutions over packed documents: every segment is computed with its halo, the
rows before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from longctx.attention.linear.segments import Messages, RankSegments, halo_messages
from longctx.attention.linear.sending import MakeExchange, receive
from longctx.attention.segment_builder import row_index


@dataclass(frozen=True)
class Halo:
    """Index tensors of one convolution.

    Attributes:
        messages: the halo's rows that other ranks hold.
        gathered: rows of [own rows; received rows; a row of zeros] that follow each other in the
            convolution's input: every segment after its halo, which is zero before the first token
            of a document.
        outputs: place of every row in that input, less the width of a halo.
    """

    messages: Messages
    gathered: Tensor
    outputs: Tensor

    @classmethod
    def build(cls, segments: RankSegments, width: int, device: torch.device | str) -> "Halo":
        """Builds the halo of `width` rows of every segment; index tensors are on `device`."""
        messages = halo_messages(segments, width, device)
        rows = sum(len(segment.rows) for segment in segments.own)
        zero = rows + messages.hop.received_rows
        gathered: list[range] = []
        outputs: list[range] = []
        place = 0
        for segment in segments.own:
            halo: Sequence[int] = ()
            if segment.place:
                halo = segments.shards[segment.document].before(segment.start, width)
            gathered += [range(zero, zero + 1)] * (width - len(halo))
            for position in halo:
                item = segment.document, position
                if item in messages.received:
                    row = rows + messages.received[item]
                else:
                    row = segments.shards[segment.document].rows(position, position + 1).start
                gathered.append(range(row, row + 1))
            gathered.append(segment.rows)
            outputs.append(range(place, place + len(segment.rows)))
            place += width + len(segment.rows)
        return cls(messages, row_index(gathered, device), row_index(outputs, device))


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, halo: Halo, make: MakeExchange
) -> Tensor:
    """Returns the causal convolution of each channel inside each document; arguments as in
    `Recurrence.convolve`."""
    if not len(x):
        return x
    _, x, received = receive(x, x, halo.messages.hop, make)
    table = torch.cat([x, received, x.new_zeros(1, x.shape[1])])
    gathered = table.index_select(0, halo.gathered).to(weight.dtype)
    channels = gathered.t().unsqueeze(0)
    out = F.conv1d(channels, weight.unsqueeze(1), bias, groups=len(weight))[0].t()
    return out.index_select(0, halo.outputs).to(x.dtype)
