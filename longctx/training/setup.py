"""Setup: builds the parts of a run from its settings."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from longctx.config import Config
from longctx.data.loader import Loader
from longctx.data.store import Store
from longctx.model.presets import ModelShape
from longctx.model.transformer import Transformer
from longctx.parallel.mesh import Launch, Mesh, join
from longctx.parallel.recompute import apply_recompute
from longctx.parallel.sharding import initialize_sharded, shard
from longctx.parallel.tensor import parallelize
from longctx.planning.plan import Plan
from longctx.planning.planner import make_plan
from longctx.planning.profile import HardwareProfile


def join_run(config: Config, launch: Launch, device: torch.device) -> Mesh:
    """Joins the processes of a run in the mesh that `config.parallel` describes."""
    parallel = config.parallel
    return join(
        launch,
        device,
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        shard_ranks=parallel.shard_ranks,
        timeout_s=config.train.timeout_s,
    )


def build_model(shape: ModelShape, config: Config, mesh: Mesh) -> Transformer:
    """The model of a run, recomputing, split and sharded over the mesh as configured, with its first weights."""
    with torch.device("meta"):
        model = Transformer(shape)
    apply_recompute(model, config.train.recompute)
    if mesh.tensor.size() > 1:
        parallelize(model, mesh.tensor)
    shard(model, mesh.weights, getattr(torch, config.train.dtype), config.parallel.reshard_after)
    initialize_sharded(model, config.train.seed, mesh.device)
    return model


def make_planner(
    config: Config, ranks: int, *, static: bool = False, profile: HardwareProfile | None = None
) -> Callable[[Sequence[int]], Plan]:
    """The planner that `config.context` describes, for a domain of `ranks`; or that of the best static degree.

    `profile` replaces the one that is configured.
    """
    context = config.context
    return partial(
        make_plan,
        ranks=ranks,
        tokens_per_rank=config.batch.tokens_per_rank,
        profile=HardwareProfile.load(context.profile) if profile is None else profile,
        mode="static" if static else context.mode,
        degree=None if static else context.degree,
        bins=None if static else context.bins,
        max_remote_tokens=context.max_remote_tokens,
    )


def build_loader(store: Store, config: Config, mesh: Mesh, max_length: int) -> Loader:
    """The loader of this rank."""
    return Loader(
        store,
        rank=mesh.rank,
        ranks=mesh.ranks,
        planner=make_planner(config, mesh.ranks),
        global_tokens=config.batch.global_tokens,
        seed=config.train.seed,
        max_length=max_length,
        long_documents=config.data.long_documents,
        pad_to_multiple_of=math.lcm(config.batch.pad_to_multiple_of, config.parallel.tensor_parallel_size),
    )
