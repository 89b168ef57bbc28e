"""Default of `tokens_per_rank`: what the memory of a rank holds by the estimate that `longctx estimate` prints."""

from dataclasses import replace
from typing import Any

from longctx.config import load
from longctx.memory.fitting import ROOM
from longctx.memory.loads import full_loads
from longctx.memory.model import estimate
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.kinds import trainer_of_trl
from longctx.trainers.refusals import TrainerError
from longctx.units import format_bytes

UNIT, MOST = 1024, 1024
"""A budget is 1 to 1,024 times 1,024 tokens."""
LOGITS_BYTES = 16
"""Bytes per logit in transformers' own loss: log-softmax, and logits and gradients in bfloat16 and in float32."""
TILE, TILE_BYTES = (4096, 32768), {"cuda": 4, "cpu": 28}
"""Tokens and vocabulary of the tile that TRL's fused head computes at once, and its bytes per logit: one buffer, or torch's."""


def tokens_that_fit(
    trainer: Any, spec: ModelSpec, dtype: str, profile: HardwareProfile, available: int, *, all_logits: bool
) -> int:
    """Returns the largest `tokens_per_rank` that `available` bytes of a rank hold by estimate.

    `all_logits`: whether a trainer of transformers has those of all tokens at once, or those of a chunk, which are estimated.
    Raises TrainerError if they do not hold 1,024 tokens.
    """
    ranks, device = trainer.args.world_size, trainer.args.device.type
    config = load(
        None,
        [
            f"train.device={device}",
            f"train.dtype={dtype}",
            f"train.recompute={'full' if trainer.args.gradient_checkpointing else 'none'}",
            f"parallel.shard_ranks={ranks if trainer.is_fsdp_enabled else 1}",
        ],
        world_size=ranks,
    )
    vocabulary, fused_head = spec.vocab_size or 0, trainer_of_trl(trainer) is not None

    def needed(units: int) -> int:
        tokens = units * UNIT
        changed = config.changed({"batch.tokens_per_rank": tokens})
        loads = list(full_loads(changed, ranks, profile))
        if spec.encoder_layers:  # as if sources were as long as targets
            loads = [replace(load, source=load.tokens // 2) for load in loads]
        logits = LOGITS_BYTES * tokens * vocabulary if all_logits else 0
        if fused_head:
            logits = TILE_BYTES[device] * min(tokens, TILE[0]) * min(vocabulary, TILE[1])
        return estimate(spec, changed, ranks, loads, fused=device == "cuda").total + logits

    most = int(ROOM * available)
    fitting, failing = 0, MOST + 1
    while failing - fitting > 1:
        units = (fitting + failing) // 2
        fitting, failing = (units, failing) if needed(units) <= most else (fitting, units)
    if not fitting:
        raise TrainerError(
            f"{UNIT:,} tokens per rank need {format_bytes(needed(1))} by estimate, but only {format_bytes(most)} of a rank's "
            "memory are to be filled: use FSDP2, gradient_checkpointing or adapters, or give tokens_per_rank if you know that "
            "it fits"
        )
    return fitting * UNIT
