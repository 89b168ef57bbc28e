"""Setup: builds the parts of a run from its settings."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention import HybridAttention, Mask, RingAttention, packed_attention
from longctx.attention.exchange import Exchange
from longctx.attention.kernels import Request, kernel_name
from longctx.config import Config, ConfigError
from longctx.config.rules import leaves_rank_empty
from longctx.config.run import FLOAT8_ROWS
from longctx.data.checkpoint import Checkpoint as CheckpointTokenizer
from longctx.data.loader import Loader
from longctx.data.manifest import TOKENIZER
from longctx.data.masking import Masking
from longctx.data.store import Store
from longctx.data.tokenizer import TokenizerError, same_tokens
from longctx.errors import UserError, shell
from longctx.model.decoder import Decoder
from longctx.model.protocol import MakeAttention, Model, StagedModel
from longctx.model.source import ModelSource
from longctx.model.spec import LayerSpec, ModelSpec
from longctx.parallel.compilation import compile_blocks
from longctx.parallel.expert import sparse_layers, split_experts
from longctx.parallel.float8 import convert_to_float8
from longctx.parallel.host_memory import returned_when_freed
from longctx.parallel.mesh import Launch, Mesh, host_threads, join, share_compilers
from longctx.parallel.offload import Offload
from longctx.parallel.pipeline import PipelineRun, Stage, split_layers
from longctx.parallel.recompute import apply_recompute
from longctx.parallel.sharding import initialize_sharded, reshard, shard
from longctx.parallel.tensor import parallelize
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.ulysses import choose_ulysses_degree
from longctx.planning.layout import Layout
from longctx.planning.plan import Plan
from longctx.planning.planner import make_plan
from longctx.training.checkpoint import Checkpoint
from longctx.training.clock import StepClock
from longctx.training.run_profile import run_profile


def join_run(
    config: Config, launch: Launch, device: torch.device, check: Callable[[dist.ProcessGroup], None] | None = None
) -> Mesh:
    """Joins the processes of a run in the mesh that `config.parallel` describes, after a `check` by all ranks."""
    return join(launch, device, **sizes_of_groups(config), timeout_s=config.train.timeout_s, check=check)


def sizes_of_groups(config: Config) -> dict[str, Any]:
    """Returns the sizes of the groups of a run, as arguments of `make_groups`."""
    parallel = config.parallel
    mixture = config.model_source().spec.largest_layer.experts or config.watches_checkpoint
    return {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "shard_ranks": parallel.shard_ranks,
        "expert": parallel.expert_parallel_size if mixture else None,
    }


def build_model(source: ModelSource, config: Config, mesh: Mesh) -> tuple[Model, PipelineRun | None]:
    """Builds the model of a run with its initial weights, split and sharded over the mesh as configured.

    Returns (the model, None), or in a pipeline (the part of this rank, the PipelineRun that runs it).
    """
    pipeline, position = config.pipeline, mesh.stage
    splits = split_layers(source.spec, pipeline.stages, keys=config.batch.tokens_per_rank // 2)
    own_stages = range(position, pipeline.stages, pipeline.ranks)
    with torch.device("meta"):
        model = source.build([layer for index in own_stages for layer in splits[index]])
    train, on_gpu = config.train, mesh.device.type == "cuda"
    if train.float8 is not None:
        if not isinstance(model, Decoder):
            raise UserError(
                f"train.float8 is {train.float8}, but transformers' own code runs this model, for which float8 is not tested: "
                "omit it, or set model.implementation to native where the family has it"
            )
        convert_to_float8(model, train.float8, mesh.device, FLOAT8_ROWS)
    if config.fuses(mesh.device.type, source.spec):
        _fuse(model, config, mesh.device)
    offload = Offload() if train.offload_activations and on_gpu else None
    apply_recompute(model, train.recompute, mlp_tile_tokens=train.mlp_tile_tokens, offload=offload)
    if mesh.tensor.size() > 1:
        assert isinstance(model, StagedModel)  # `model_source` returns such models for tensor parallelism
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
    reshard_after = config.parallel.reshard_after
    shard(model, mesh.weights, mesh.copies, dtype, reshard_after, stages, in_host_memory, mesh.experts)
    with returned_when_freed():
        initialize_sharded(model, train.seed, mesh.device, stages, keep_on=torch.device("cpu") if in_host_memory else None)
        model.finish(mesh.device, dtype)
        reshard(model)  # `finish` may have run the model; the optimizer needs the shards
    if stages is None:
        return model, None
    assert isinstance(model, StagedModel)
    return model, PipelineRun(model, stages, pipeline, mesh, config.batch.tokens_per_rank, dtype)


def attention_requests(config: Config, spec: ModelSpec, device: str) -> dict[LayerSpec, Request]:
    """Returns what the attention kernel has to support on a device of type `device`, for each kind of layer."""
    dtype, deterministic, softcap = getattr(torch, config.dtype), config.context.deterministic, bool(spec.attention_softcap)
    return {
        layer: Request(device, dtype, layer.head_dim, layer.head_dim, layer.window is not None, softcap, deterministic)
        for layer in dict.fromkeys(spec.layers)
    }


def computed_by(config: Config, spec: ModelSpec, device: str) -> str:
    """Returns in words what computes on a device of type `device`: device, dtype, compiled blocks and attention kernels."""
    requests = attention_requests(config, spec, device).values()
    kernels = dict.fromkeys(kernel_name(config.context.kernel, request) for request in requests)
    float8 = "" if config.train.float8 is None else f", float8 {config.train.float8}"
    compiled = ", compiled blocks" * config.compiles(device, spec)
    return f"{device}, {config.dtype}{float8}{compiled}, attention by {' and '.join(kernels)}"


def limit_rows(model: Model, config: Config) -> None:
    """Sets how many rows the experts of a rank compute at once."""
    train, parallel = config.train, config.parallel
    for layer in sparse_layers(model):
        tokens = train.mlp_tile_tokens
        if layer.send is not None:
            even = math.ceil(parallel.expert_max_load * config.batch.tokens_per_rank / parallel.tensor_parallel_size)
            tokens = min(even, tokens or even)
        layer.most_rows = None if tokens is None else tokens * layer.gate.shape.num_experts_per_tok


def _fuse(model: Model, config: Config, device: torch.device) -> None:
    """Fuses operations of the native decoder. Raises UserError for other models and devices if `train.fused` is set."""
    if isinstance(model, Decoder):
        from longctx.model.fused import check_device, fuse

        check_device(device)
        fuse(model)
    elif config.train.fused:
        raise UserError("train.fused is set, but transformers' own code runs this model: set train.compile instead")


def make_planner(
    config: Config, ranks: int, profile: HardwareProfile, *, static: bool = False
) -> Callable[[Sequence[int]], Plan]:
    """Makes the planner of `config.context` for a domain of `ranks`; with `static` that of the best static degree.

    `profile` must be scaled to the run's model, parallel sizes and exchange, see `run_profile`.
    """
    context = config.context
    return partial(
        make_plan,
        ranks=ranks,
        tokens_per_rank=config.batch.tokens_per_rank,
        profile=profile,
        mode="static" if static else context.mode,
        degree=None if static else context.degree,
        bins=None if static else context.bins,
        max_remote_tokens=context.max_remote_tokens,
        pipeline=config.pipeline,
    )


def open_data(config: Config) -> Store:
    """Opens the store of a run, or its stores joined. Raises StoreError if a store is damaged or tokenizers differ."""
    opened = [Store.open(path, tokenizer=config.data.tokenizer) for path in config.data.paths]
    if config.data.store is not None:
        return opened[0]
    stores = config.data.stores or ()
    unit = "epochs" if any(store.epochs is not None for store in stores) else "weight"
    return Store.join(opened, [store.epochs or store.weight or 0.0 for store in stores], unit)


def build_loader(store: Store, config: Config, mesh: Mesh, max_length: int) -> Loader:
    """Makes the loader of this rank. Collective: raises ProfilesDiffer if ranks have different profiles."""
    profile = run_profile(config, mesh.world_size, store.tokenizer.vocab_size).agreed(mesh)
    return Loader(
        store,
        rank=mesh.rank,
        ranks=mesh.ranks,
        planner=make_planner(config, mesh.ranks, profile),
        global_tokens=config.batch.global_tokens,
        seed=config.train.seed,
        max_length=max_length,
        long_documents=config.data.long_documents,
        held_out_share=config.data.held_out,
        pad_to_multiple_of=padding(config),
        masking=make_masking(config, store, config.train.seed),
        ahead=0 if config.model.from_pretrained is not None else config.model.sizes().num_nextn_predict_layers,
    )


def make_masking(config: Config, store: Store, seed: int) -> Masking | None:
    """Returns the masks of an encoder's tokens; None if next tokens are predicted.

    Raises UserError if the tokenizer of the store has no mask token, or the store has preference pairs.
    """
    masked, tokenizer = config.masked, store.tokenizer
    if masked.share is None:
        return None
    if store.pairs:
        raise UserError(f"masked.share is {masked.share:g}, but {store.path} contains preference pairs: omit one of the two")
    try:
        token = tokenizer.mask_token(masked.token)
    except TokenizerError as error:
        raise UserError(f"masked.share is {masked.share:g}, but in the tokenizer of {config.data.said} {error}") from error
    return Masking(seed, masked.share, token, tokenizer.ordinary, masked.random, masked.kept)


def choose_max_length(config: Config, world_size: int, resume_from: Checkpoint | None, longest: int | None = None) -> int:
    """Returns the maximum document length in tokens: `data.max_length`, or that of the checkpoint, or what the domain can hold.

    A run that resumes on another number of ranks must see the same documents, so it keeps the length of the checkpoint, which
    may be above what the domain can hold if the `longest` document is not (None: unknown). Raises ConfigError otherwise.
    """
    capacity = config.capacity(world_size)
    if config.data.max_length is not None or resume_from is None:
        return config.max_length(world_size)
    previous = int(resume_from.state["data"]["max_length"])
    wanted = min(previous, longest or previous)
    if wanted > capacity:
        count = f"{world_size} rank" if world_size == 1 else f"{world_size} ranks"
        least = _budget_for(config, wanted, world_size)
        way_out = f"set it to {least}" if least else f"give context.bins an entry of {wanted} tokens or more"
        raise ConfigError(
            f"{resume_from.folder} was trained on documents of at most {previous} tokens, but {count} with "
            f"batch.tokens_per_rank {config.batch.tokens_per_rank} can hold only {capacity}: {way_out}, or start more "
            "processes (--processes)"
        )
    return previous


def _budget_for(config: Config, length: int, world_size: int) -> int | None:
    """Returns the least batch.tokens_per_rank at which a document of `length` tokens fits; None if it never does."""

    def holds(tokens: int) -> bool:
        batch = config.batch.model_copy(update={"tokens_per_rank": tokens})
        return config.model_copy(update={"batch": batch}).capacity(world_size) >= length

    step = padding(config)
    budgets = range(0, length + step, step)
    return budgets[bisect_left(budgets, True, key=holds)] if holds(budgets[-1]) else None


def padding(config: Config) -> int:
    """Returns the multiple to which the tokens per rank of every micro-batch are padded."""
    float8 = 1 if config.train.float8 is None else FLOAT8_ROWS
    return math.lcm(config.batch.pad_to_multiple_of, config.parallel.tensor_parallel_size, float8)


def check_vocabulary(config: Config, spec: ModelSpec) -> None:
    """Raises UserError if tensor parallelism leaves a rank without entries of the vocabulary."""
    assert spec.vocab_size is not None
    ranks, entries = config.parallel.tensor_parallel_size, spec.vocab_size
    if leaves_rank_empty(entries, ranks):
        share = -(-entries // ranks)
        divisors = (n for n in range(ranks, 0, -1) if spec.largest_layer.num_key_value_heads % n == 0)
        fewer = (n for n in divisors if not leaves_rank_empty(entries, n))
        raise UserError(
            f"parallel.tensor_parallel_size is {ranks}, but with {share} of {entries} vocabulary entries per rank the last "
            f"rank has none: set it to {next(fewer)}, or model.vocab_size to {ranks * share}"
        )


def check_pairs(config: Config, store: Store) -> None:
    """Raises UserError if stores have preference pairs without DPO, or DPO is set for stores without pairs."""
    beta = config.dpo.beta
    if beta is not None and len(store.sources) > 1:
        raise UserError(f"dpo.beta is {beta:g}, but DPO does not support several stores: set data.store to one store of pairs")
    stores = {"data.store": store}
    if config.eval.every is not None and config.eval.store is not None:
        stores["eval.store"] = Store.open(config.eval.store)
    for key, given in stores.items():
        if given.pairs and beta is None:
            raise UserError(
                f"{key} {given.path} contains preference pairs, but dpo.beta is null: set dpo.beta (0.1 is usual) to train by "
                "DPO, or use a store without pairs"
            )
        if beta is not None and not given.pairs:
            raise UserError(
                f"dpo.beta is {beta:g}, but {key} {given.path} contains no preference pairs: prepare records with `chosen` and "
                "`rejected` (longctx prepare --source), or omit dpo.beta"
            )


def check_model(config: Config, store: Store, ranks: int) -> None:
    """Raises UserError if the model does not fit the stores.

    Documents are too long; or a checkpoint has another tokenizer, or one without mask token where tokens are to be masked.
    """
    source = config.model_source(store.tokenizer.vocab_size)
    if config.model.from_pretrained is not None:
        _check_tokenizer(config, store, source, config.model.from_pretrained)
        make_masking(config, store, config.train.seed)
    source.check_length(min(config.max_length(ranks), longest_of(config, store)))


def longest_of(config: Config, store: Store) -> int:
    """Returns the tokens of the longest document of the stores for training and for validation."""
    longest = int(store.lengths.max())
    if config.eval.every is not None and config.eval.store is not None:
        longest = max(longest, int(Store.open(config.eval.store).lengths.max()))
    return longest


def _check_tokenizer(config: Config, store: Store, source: ModelSource, name: str) -> None:
    entries, embedded = store.tokenizer.vocab_size, source.spec.vocab_size
    own = _own_tokenizer(source.files.folder) if source.files is not None else None
    if own is not None and not same_tokens(own, store.tokenizer.text):
        raise UserError(
            f"{config.data.said} was prepared with another tokenizer than {name}: prepare it with the tokenizer of the "
            f"checkpoint (longctx prepare --tokenizer {shell(name)})"
        )
    if embedded is not None and entries > embedded and config.masked.share is None:
        entries = store.largest_token + 1  # only masks may be any token
    if embedded is not None and entries > embedded:
        raise UserError(
            f"token {entries - 1} of {config.data.said} ({store.tokenizer.decode([entries - 1])!r}) is beyond the embedding of "
            f"{name}, which has {embedded:,} entries: remove text with it, add entries with transformers "
            "(resize_token_embeddings), or use the tokenizer that the model was trained with"
        )


def _own_tokenizer(folder: Path) -> str | None:
    """Returns the tokenizer.json of a checkpoint as transformers builds it, which may differ from the file."""
    try:
        return CheckpointTokenizer.load(str(folder)).tokenizer.text
    except TokenizerError:  # it has no end of documents, or is not one for transformers
        return (folder / TOKENIZER).read_text("utf-8") if (folder / TOKENIZER).is_file() else None


def ulysses_degree(config: Config, spec: ModelSpec, plan: Plan, micro_batch: int) -> int:
    """Returns the Ulysses degree of a micro-batch, from the settings or by the cost model."""
    wanted, tensor = config.context.ulysses_degree, config.parallel.tensor_parallel_size
    if wanted != "auto":
        return wanted
    layer = spec.largest_layer
    return choose_ulysses_degree(plan, micro_batch, layer.num_attention_heads // tensor, layer.num_key_value_heads // tensor)


def make_attention(
    config: Config,
    mesh: Mesh,
    spec: ModelSpec,
    plan: Plan,
    layout: Layout,
    clock: StepClock | None = None,
    exchange: type[Exchange] = Exchange,
) -> MakeAttention:
    """Makes the attention of this rank in one micro-batch of a plan, as configured in `config.context`; timed by `clock`."""
    timed: dict[str, Any] = {"exchange": exchange}
    if clock is not None:
        timed = {"watch": clock.attention, "exchange": clock.exchange}
    context, degree = config.context, ulysses_degree(config, spec, plan, layout.micro_batch)

    def make(scale: float | None, softcap: float, window: int | None) -> RingAttention | HybridAttention:
        return packed_attention(
            layout,
            degree,
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
