"""A plain reference of multi-token prediction, and training with it over several ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from longctx.attention import packed_attention
from longctx.data import IGNORED_LABEL
from longctx.data.packing import pack_documents
from longctx.model.decoder import Decoder, PredictionBlock
from longctx.model.presets import ModelShape
from longctx.planning.layout import Placement
from longctx.training.objectives.loss import cross_entropy_sum
from longctx.training.objectives.multi_token import MultiTokenLoss
from tests.data_cases import placed_plan

FACTOR = 0.3
TINY_MTP = [
    "model.num_nextn_predict_layers=2",
    f"train.mtp_loss={FACTOR}",
    "model.num_hidden_layers=2",
    "data.max_length=600",
    "batch.global_tokens=2000",
]


def decoder(blocks: int, **options: Any) -> Decoder:
    """Returns a decoder in float64, whose norms are not all 1."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 23}
    given = {"hidden_size": 12, "intermediate_size": 20, "num_nextn_predict_layers": blocks, **shape, **options}
    made = Decoder(ModelShape(**given)).double()
    made.initialize(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return made


def document(made: Decoder, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sums of the main loss and of the blocks' losses over one document, by the formulas of DeepSeek-V3 (§2.2)."""
    count = len(tokens)
    attention = packed_attention(placed_plan([count], 1, [[Placement(0, 0, 1)]]).layout(0, 0), 1, kernel="reference")
    cos, sin = made.rope.tables(torch.arange(count))

    def loss(hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(hidden @ made.lm_head.weight.T, wanted, ignore_index=IGNORED_LABEL, reduction="sum")

    x, later = made.embed_tokens(tokens), torch.zeros((), dtype=torch.float64)
    main = None
    for layer, block in enumerate(made.layers.children()):
        further = layer - made.shape.num_hidden_layers + 1
        if further == 1:
            main = loss(made.norm(x), labels)
        if not isinstance(block, PredictionBlock):
            x = block(x, cos, sin, attention)
            continue
        x = x[: max(0, count - further)]  # tokens with one that is so much later
        if not len(x):
            break
        attention = packed_attention(placed_plan([len(x)], 1, [[Placement(0, 0, 1)]]).layout(0, 0), 1, kernel="reference")
        embedded = made.embed_tokens(tokens[further:])
        x = block.eh_proj(torch.cat([block.enorm(embedded), block.hnorm(x)], dim=-1))
        inner = super(PredictionBlock, block).forward
        x = inner(x, cos[: len(x)], sin[: len(x)], attention, None)
        later = later + loss(block.norm(x), labels[further:])
    assert main is not None
    return main, later


def in_one_buffer(
    made: Decoder, documents: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """Returns the loss of packed documents on one rank, and that of multi-token prediction."""
    plan = placed_plan([len(each) for each in documents], 1, [[Placement(n, 0, 1) for n in range(len(documents))]])
    blocks = made.spec.predictions
    (batch,), targets = pack_documents(plan, 0, documents, labels, ahead=blocks)

    def head(hidden: torch.Tensor, weight: Any, **given: Any) -> torch.Tensor:
        return cross_entropy_sum(hidden, weight, **{"labels": batch.labels, "divisor": max(1, targets), **given})

    extra = MultiTokenLoss(blocks, FACTOR)
    later = extra.later(batch, head, max(1, targets), torch.device("cpu"))
    attention = packed_attention(batch.layout, 1, kernel="reference")
    loss = made(batch.tokens, batch.positions, attention, head, None, later)
    return loss, extra.end_step()
