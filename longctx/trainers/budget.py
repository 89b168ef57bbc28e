"""What a trainer's model is to planner and memory model: its sizes, its speed, and the default of
`tokens_per_rank`.

The default is what the memory of a rank holds by the estimate that `longctx estimate` prints.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from longctx.config import Config, load
from longctx.errors import UserError, brief
from longctx.hf.lora import with_adapters
from longctx.hf.model import block_name
from longctx.hf.spec import spec_of, spec_of_seq2seq
from longctx.hf.vision import weights_of_images, with_tower
from longctx.memory.fitting import ROOM, available_bytes
from longctx.memory.loads import full_loads
from longctx.memory.model import estimate
from longctx.parallel.environment import processes_per_node
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.tower import TowerSpeed
from longctx.planning.cost.work import work_of
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.kinds import Traits
from longctx.trainers.prepared import prepared
from longctx.trainers.refusals import TrainerError
from longctx.training.described import RunProfile
from longctx.training.run_profile import scaled_profile
from longctx.units import format_bytes

UNIT = 1024
MAX_UNITS = 1024
"""A budget is 1 to 1,024 times 1,024 tokens."""
LOGITS_BYTES = 16
"""Bytes per logit in transformers' own loss: log-softmax, and logits and gradients in bfloat16 and
in float32."""
TILE_TOKENS = 4096
TILE_VOCABULARY = 32768
"""Sizes of the tile that TRL's fused head computes at once."""
TILE_BYTES = {"cuda": 4, "cpu": 28}
"""Bytes per logit of a tile: one buffer, or torch's."""


@dataclass(frozen=True)
class RankNeeds:
    """What a rank inside a trainer needs, by its tokens.

    Attributes:
        spec: sizes of the model with its adapters.
        config: settings of a run like the trainer's.
        profile: hardware profile, scaled to the model.
        ranks: number of ranks.
        device: type of the device.
        logits: those that are there at once: of `all` tokens, a chunk's, which is part of the
            estimate, or a `tile` of TRL's fused head, of which a divergence has two.
    """

    spec: ModelSpec
    config: Config
    profile: HardwareProfile
    ranks: int
    device: str
    logits: Literal["all", "chunk", "tile", "two tiles"]

    def bytes(self, tokens: int) -> int:
        """Returns the bytes that a rank of so many tokens needs."""
        config = self.config.changed({"batch.tokens_per_rank": tokens})
        loads = []
        for full in full_loads(config, self.ranks, self.profile):
            # A trainer reduces gradients at the end of a step: before, FSDP2 keeps whole ones. How
            # many micro-batches a step has is not known yet.
            several = max(2, full.micro_batches)
            loads.append(replace(full, micro_batches=several, first=False))
        if self.spec.encoder_layers:  # as if sources were as long as targets
            loads = [replace(load, source=load.tokens // 2) for load in loads]
        fused = self.device == "cuda"
        memory = estimate(self.spec, config, self.ranks, loads, fused=fused)
        return memory.total + self._logits(tokens)

    def _logits(self, tokens: int) -> int:
        vocabulary = self.spec.vocab_size or 0
        if self.logits == "all":
            return LOGITS_BYTES * tokens * vocabulary
        if self.logits == "chunk":
            return 0
        entries = min(vocabulary, TILE_VOCABULARY)
        tile = TILE_BYTES[self.device] * min(tokens, TILE_TOKENS) * entries
        return 2 * tile if self.logits == "two tiles" else tile

    def most_tokens(self, limit: int) -> int:
        """Returns the largest multiple of `UNIT` tokens that need at most `limit` bytes; 0 if none
        does."""
        fitting = 0
        failing = MAX_UNITS + 1
        while failing - fitting > 1:
            units = (fitting + failing) // 2
            if self.bytes(units * UNIT) <= limit:
                fitting = units
            else:
                failing = units
        return fitting * UNIT


@dataclass(frozen=True)
class Workload:
    """A trainer's model as plans and estimates see it.

    Attributes:
        traits: the trainer and its model.
        spec: sizes of the model with its adapters.
        config: settings of a run like the trainer's.
        named: hardware profile, scaled to the model unless it was given as a value.
        tower: encoder of images, as fast per operation as the matrices of the model; None if it has
            none.
    """

    traits: Traits
    spec: ModelSpec
    config: Config
    named: RunProfile
    tower: TowerSpeed | None

    @classmethod
    def of(cls, traits: Traits, profile: HardwareProfile | str | None) -> "Workload":
        """Raises TrainerError for a model without blocks of a known kind, ProfileError for a
        profile that cannot be used."""
        args = traits.args
        ranks = args.world_size
        spec = _spec_of(traits)
        in_bfloat16 = args.bf16 or next(traits.model.parameters()).dtype == torch.bfloat16
        settings = [
            f"train.device={args.device.type}",
            f"train.dtype={'bfloat16' if in_bfloat16 else 'float32'}",
            f"train.recompute={'full' if traits.recomputes else 'none'}",
            "train.compile=false",  # which is refused
            f"parallel.shard_ranks={ranks if traits.trainer.is_fsdp_enabled else 1}",
        ]
        config = load(None, settings, world_size=ranks)
        if isinstance(profile, HardwareProfile):
            named = RunProfile("given", profile, ("profile: given as a value, used unscaled",))
        else:
            named = scaled_profile(
                config.changed({"context.profile": profile}), spec, ranks, queries_first=True
            )
        tower = None
        if spec.tower is not None:
            operations = 6 * work_of(spec, config.dtype, recompute=config.train.recompute).computed
            tower = TowerSpeed(
                spec.tower, spec.tower_backward, named.profile.linear_s_per_token / operations
            )
        return cls(traits, spec, config, named, tower)

    def agreed(self, group: dist.ProcessGroup | None) -> "Workload":
        """Returns the workload with the profile that all ranks agree on, as on nodes of different
        sizes. Collective."""
        if group is None:
            return self
        return replace(self, named=replace(self.named, profile=self.named.agreed(group)))

    def tokens_that_fit(self, group: dist.ProcessGroup | None, *, chunks: bool) -> int:
        """Returns the largest `tokens_per_rank` that the memory of the fullest rank of `group`
        holds by estimate. Collective.

        `chunks`: whether this rank computes the loss without logits of all tokens. Raises
        TrainerError for less than 1,024.
        """
        args = self.traits.args
        ranks = args.world_size
        available = available_bytes(args.device, processes_per_node(ranks) or ranks) or 0
        fewest = torch.tensor([available, chunks])  # all ranks must find the same
        if group is not None:
            dist.all_reduce(fewest, dist.ReduceOp.MIN, group=group)
        limit = int(ROOM * int(fewest[0])) - bytes_beside(self.traits)
        needs = self._needs(chunks=bool(fewest[1]))
        tokens = needs.most_tokens(limit)
        if not tokens:
            raise TrainerError(
                f"{UNIT:,} tokens per rank need {format_bytes(needs.bytes(UNIT))} by "
                f"estimate, but only {format_bytes(limit)} of a rank's memory are to be filled: "
                "use FSDP2, gradient_checkpointing or adapters, or give tokens_per_rank if you "
                "know that it fits"
            )
        return tokens

    def _needs(self, *, chunks: bool) -> RankNeeds:
        args = self.traits.args
        logits: Literal["all", "chunk", "tile", "two tiles"] = "chunk" if chunks else "all"
        if self.traits.kind == "divergence":
            logits = "two tiles"
        elif self.traits.trl_class is not None:
            logits = "tile"
        return RankNeeds(
            self.spec,
            self.config,
            profile=self.named.profile,
            ranks=args.world_size,
            device=args.device.type,
            logits=logits,
        )


def bytes_beside(traits: Traits) -> int:
    """Returns the bytes of a rank's part of a reference or a teacher beside the trained model, on a
    GPU; free memory of a machine has none of them."""
    if traits.args.device.type == "cpu":
        return 0
    size = 0
    for name in ("ref_model", "teacher_model"):
        beside = getattr(traits.trainer, name, None)
        if beside is not None:
            for weight in beside.parameters():
                if isinstance(weight, DTensor):
                    weight = weight.to_local()
                size += weight.nbytes
    return size


def _spec_of(traits: Traits) -> ModelSpec:
    """Returns the sizes of the trainer's model with its adapters. Raises TrainerError."""
    try:
        return _sizes(traits)
    except UserError:
        raise
    except Exception as error:  # models of other things than tokens have no such parts
        name = type(traits.model).__name__
        raise TrainerError(
            f"{name} has no embedding of tokens and blocks of attention whose sizes can be read "
            f"({brief(error)}): it is not supported"
        ) from error


def _sizes(traits: Traits) -> ModelSpec:
    """Returns the sizes of the trainer's model with its adapters. Raises what its code raises for
    models without blocks."""
    model = traits.model
    if traits.encoder_decoder:
        with prepared(model):  # refuses those that have no such blocks
            blocks = [*model.get_encoder().layers, *model.get_decoder().layers]
            spec = spec_of_seq2seq(model)
    else:
        blocks = model.get_submodule(block_name(model))
        spec = with_tower(spec_of(model, blocks, causal=not traits.encoder), model)
        if model.get_output_embeddings() is None:  # as if it had one token, which a head multiplies
            spec = replace(spec, vocab_size=1, encoder_root_parameters=spec.vocabulary_parameters)
    if traits.adapters:
        return with_adapters(spec, blocks, model)
    if traits.images:
        frozen = [weight for weight in weights_of_images(model) if not weight.requires_grad]
        return replace(spec, frozen_tower=sum(weight.numel() for weight in frozen))
    return spec
