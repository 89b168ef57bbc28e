"""Ring attention over packed documents of any length and degree, usable without the rest of the
toolkit.

    layout = plan.layout(micro_batch, rank)
    out = ring_attention(q, k, v, layout, group=group)

`RingAttention(layout, group=...)` is a callable that reuses the message schedule for all layers of
a micro-batch. Call `warm_up(group, device)` once before the first one.

The modules stand side by side, each a step of one path: `masks` and `segments` say what is visible,
`ring_schedule` who sends what, `exchange` sends it, `ring_pass` and `operator` compute, `ulysses`
and `by_layer` vary that. `longctx.hf` puts it into models of transformers.
"""

if __name__ != "longctx.attention":
    raise ImportError(
        "import this package as `longctx.attention`, not by its folder's bare name `attention`"
    )


from longctx.attention.by_layer import LayerAttention, PackedAttention, by_layer
from longctx.attention.exchange import ExchangeError, warm_up
from longctx.attention.masks import Mask
from longctx.attention.reference import reference_attention
from longctx.attention.ring import RingAttention, ring_attention
from longctx.attention.ring_schedule import RingSchedule
from longctx.attention.ulysses import OPERATORS, HybridAttention, packed_attention

__all__ = [
    "OPERATORS",
    "ExchangeError",
    "HybridAttention",
    "LayerAttention",
    "Mask",
    "PackedAttention",
    "RingAttention",
    "RingSchedule",
    "by_layer",
    "packed_attention",
    "reference_attention",
    "ring_attention",
    "warm_up",
]
