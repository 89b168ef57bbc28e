"""Room: the least memory that a rank needs to train a model whole, for ways to train that are
compared.

The estimate is that of `longctx estimate`, with all that saves memory at little cost: every block
is recomputed, and gradients are reduced after every micro-batch where ranks share them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from longctx.config import Config, load
from longctx.config.settings import ModelSection
from longctx.memory.loads import Load, loads
from longctx.memory.model import estimate
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.plan import Plan
from longctx.training.described import Described, read_described


@dataclass(frozen=True)
class Room:
    """Memory of ranks that train a model, all its weights.

    Attributes:
        available: bytes of a rank by its data sheet.
    """

    spec: ModelSpec
    dtype: str
    device: str
    ranks: int
    available: int

    @classmethod
    def of(cls, profile: str, preset: str | None, ranks: int) -> "Room | None":
        """Returns the memory of a profile's ranks, which train a preset (None: the profile's own
        model); None if the profile names no model or no size of its memory, or is of several GPUs
        a rank."""
        _, described = read_described(profile)
        if described is None or described.memory_gb is None:
            return None
        if described.tensor_parallel_size > 1:
            return None
        return cls(
            spec=_spec(described, preset),
            dtype=described.dtype,
            device=described.device,
            ranks=ranks,
            available=int(1e9 * described.memory_gb),
        )

    def of_whole(self, tokens: int, micro_batches: int, *, shards: bool) -> int:
        """Returns the bytes of a rank that computes `tokens` of whole documents; with `shards`
        ranks share weights, gradients and optimizer state, else each has all."""
        config = _config(self, shards=shards, reshard_after="block", splits=False)
        load = Load(
            tokens=tokens,
            remote=0,
            sent=0,
            held=0,
            fullest=0,
            micro_batches=micro_batches,
            first=micro_batches == 1,
        )
        return self._bytes(config, [load])

    def of_plans(self, plans: Sequence[Plan], *, keeps_weights: bool = False) -> int:
        """Returns the bytes of the fullest rank under plans; with `keeps_weights` each has all
        weights and gradients during a step, and a share of the optimizer state."""
        reshard_after = "step" if keeps_weights else "block"
        splits = any(max(plan.degrees) > 1 for plan in plans)
        config = _config(self, shards=True, reshard_after=reshard_after, splits=splits)
        of_ranks = loads(plans, config)
        fullest = max(of_ranks, key=_local_first)
        most_received = max(of_ranks, key=_remote_first)
        return self._bytes(config, {fullest, most_received})

    def _bytes(self, config: Config, candidates: Iterable[Load]) -> int:
        on_gpu = self.device == "cuda"
        return estimate(self.spec, config, self.ranks, list(candidates), fused=on_gpu).total


def _local_first(load: Load) -> tuple[int, int]:
    return load.tokens, load.held


def _remote_first(load: Load) -> tuple[int, int]:
    return load.held, load.tokens


def _spec(described: Described, preset: str | None) -> ModelSpec:
    """Returns the sizes of a preset, or of the model of a profile."""
    if preset is None:
        return described.model.spec
    spec = ModelSection(preset=preset).sizes().spec
    if spec.vocab_size is None:
        return replace(spec, vocab_size=described.model.vocab_size)
    return spec


@lru_cache(maxsize=16)
def _config(room: Room, *, shards: bool, reshard_after: str, splits: bool) -> Config:
    """Returns settings that need least memory, for ranks that share weights or have all, and that
    split documents, for which NCCL has more buffers, or none."""
    reduces = shards and reshard_after == "block"
    settings = [
        f"train.device={room.device}",
        f"train.dtype={room.dtype}",
        "train.recompute=full",
        f"parallel.shard_ranks={room.ranks if shards else 1}",
        f"parallel.reshard_after={reshard_after}",
        f"parallel.reduce_after={'micro_batch' if reduces else 'step'}",
    ]
    if not splits:
        settings += ["context.mode=static", "context.degree=1"]
    return load(None, settings, world_size=room.ranks)
