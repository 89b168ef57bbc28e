"""Builds the parts of a run that compute: its groups, model and attention."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention import HybridAttention, Mask, RingAttention, packed_attention
from longctx.config import Config
from longctx.config.run import FLOAT8_ROWS
from longctx.errors import UserError
from longctx.hf.source import ModelSource
from longctx.model.compilation import compile_blocks
from longctx.model.decoder import Decoder
from longctx.model.protocol import MakeAttention, Model, StagedModel
from longctx.parallel.environment import Launch, host_threads, share_compilers
from longctx.parallel.expert import sparse_layers, split_experts
from longctx.parallel.float8 import convert_to_float8
from longctx.parallel.host_memory import returned_when_freed
from longctx.parallel.mesh import Mesh, join
from longctx.parallel.offload import Offload
from longctx.parallel.pipeline import PipelineRun, Stage
from longctx.parallel.recompute import apply_recompute
from longctx.parallel.sharding import initialize_sharded, reshard, shard
from longctx.parallel.tensor import parallelize
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.work import split_layers
from longctx.planning.layout import CrossLayout, Layout
from longctx.planning.plan import Plan
from longctx.training.clock import StepClock


def join_run(
    config: Config,
    launch: Launch,
    device: torch.device,
    check: Callable[[dist.ProcessGroup], None] | None = None,
) -> Mesh:
    """Joins the processes of a run in the mesh that `config.parallel` describes, after a `check` by
    all ranks."""
    return join(
        launch, device, **sizes_of_groups(config), timeout_s=config.train.timeout_s, check=check
    )


def sizes_of_groups(config: Config) -> dict[str, Any]:
    """Returns the sizes of the groups of a run, as arguments of `make_groups`."""
    parallel = config.parallel
    mixture = config.model_source().spec.experts
    return {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "shard_ranks": parallel.shard_ranks,
        "expert": parallel.expert_parallel_size if mixture else None,
    }


def build_model(
    source: ModelSource, config: Config, mesh: Mesh
) -> tuple[Model, PipelineRun | None]:
    """Builds the model of a run with its initial weights, split and sharded over the mesh as
    configured.

    Returns (the model, None), or in a pipeline (the part of this rank, the PipelineRun that runs
    it).
    """
    pipeline = config.pipeline
    position = mesh.pipeline_rank
    splits = split_layers(source.spec, pipeline.stages, keys=config.batch.tokens_per_rank // 2)
    own_stages = range(position, pipeline.stages, pipeline.ranks)
    with torch.device("meta"):
        model = source.build([layer for index in own_stages for layer in splits[index]])
    train = config.train
    on_gpu = mesh.device.type == "cuda"
    if train.float8 is not None:
        if not isinstance(model, Decoder):
            raise UserError(
                f"train.float8 is {train.float8}, but transformers' own code runs this model, for "
                "which float8 is not tested: omit it, or set model.implementation to native where "
                "the family has it"
            )
        convert_to_float8(model, train.float8, mesh.device, FLOAT8_ROWS)
    offload = Offload() if train.offload_activations and on_gpu else None
    apply_recompute(model, train.recompute, mlp_tile_tokens=train.mlp_tile_tokens, offload=offload)
    if mesh.tensor.size() > 1:
        # `model_source` returns such models for tensor parallelism.
        assert isinstance(model, StagedModel)
        parallelize(model, mesh.tensor)
    if mesh.experts is not None:
        split_experts(model, mesh.experts)
    limit_rows(model, config)
    if config.compiles(mesh.device.type, source.spec):
        share_compilers()
        compile_blocks(model)
    stages = None
    if pipeline.ranks > 1:
        assert isinstance(model, StagedModel)
        stages = [Stage(model, index, splits[index]) for index in own_stages]
    dtype = getattr(torch, config.dtype)
    in_host_memory = train.offload_optimizer and on_gpu
    if in_host_memory and (threads := host_threads()) is not None:
        torch.set_num_threads(threads)  # else the optimizer would use one core
    shard(
        model,
        mesh,
        dtype=dtype,
        reshard_after=config.parallel.reshard_after,
        stages=stages,
        offload_optimizer=in_host_memory,
    )
    with returned_when_freed():
        initialize_sharded(
            model,
            train.seed,
            mesh.device,
            stages,
            keep_on=torch.device("cpu") if in_host_memory else None,
        )
        model.finish(mesh.device, dtype)
        reshard(model)  # `finish` may have run the model; the optimizer needs the shards
    if stages is None:
        return model, None
    assert isinstance(model, StagedModel)
    return model, PipelineRun(
        model,
        stages,
        pipeline=pipeline,
        mesh=mesh,
        wire_rows=config.batch.tokens_per_rank,
        dtype=dtype,
    )


def limit_rows(model: Model, config: Config) -> None:
    """Sets how many rows the experts of a rank compute at once."""
    train = config.train
    parallel = config.parallel
    for layer in sparse_layers(model):
        tokens = train.mlp_tile_tokens
        if layer.send is not None:
            even = math.ceil(
                config.expert_max_load
                * config.batch.tokens_per_rank
                / parallel.tensor_parallel_size
            )
            tokens = min(even, tokens or even)
        layer.most_rows = None if tokens is None else tokens * layer.gate.shape.num_experts_per_tok


def make_attention(
    config: Config,
    mesh: Mesh,
    spec: ModelSpec,
    plan: Plan,
    layout: Layout | CrossLayout,
    clock: StepClock | None = None,
) -> MakeAttention:
    """Makes the attention of this rank in one micro-batch of a plan, as configured in
    `config.context`; timed by `clock`."""
    timed: dict[str, Any] = (
        {} if clock is None else {"watch": clock.attention, "exchange": clock.exchange}
    )
    context = config.context

    def make(
        scale: float | None, softcap: float, window: int | None
    ) -> RingAttention | HybridAttention:
        return packed_attention(
            layout,
            context.ulysses_degree,
            group=mesh.exchange,
            across=mesh.across,
            mask=Mask(causal=spec.causal, window=window),
            scale=scale,
            softcap=softcap,
            kernel=context.kernel,
            keep_kv=bool(context.keep_kv),
            deterministic=context.deterministic,
            ranks_per_node=plan.profile.ranks_per_node if context.two_level_exchange else None,
            device=mesh.device,
            **timed,
        )

    return make
