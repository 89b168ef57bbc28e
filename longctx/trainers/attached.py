"""What dynamic context parallelism adds to a trainer."""

from dataclasses import dataclass, field
from typing import Any

from longctx.trainers.fused_head import PlannedHead
from longctx.trainers.step import Sharing


@dataclass
class Attached:
    """The state of a trainer with dynamic context parallelism.

    Attributes:
        sharing: plans and shares documents.
        ring_options: keyword arguments of `model_inputs`.
        attentions: name of the previous attention of every model.
        heads: the planned heads of trainers that need whole sequences.
    """

    sharing: Sharing
    ring_options: dict[str, Any]
    attentions: list[tuple[Any, str]]
    heads: list[PlannedHead] = field(default_factory=list)
