"""Declares the settings: one class per section, one field per setting, each with type, default,
bounds and description."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
    field_validator,
)
from pydantic_core import ErrorDetails

from longctx.config.problems import ConfigError, Problem, plain
from longctx.hf.lora_options import Lora
from longctx.model.context_extension import ROPE_KEYS, shape_of_rope
from longctx.model.presets import MOST_ENTRIES, PRESETS, PUBLISHED_VOCABULARIES, ModelShape
from longctx.paths import expanded, local_path
from longctx.planning.check import MOST_RANKS, MOST_TOKENS
from longctx.planning.cost.spec import Recompute
from longctx.planning.plan import Mode
from longctx.remote import any_path

LARGEST = MOST_TOKENS
"""Upper bound on tokens, steps and other numbers; keeps costs within 64 bits."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Beta = Annotated[float, Field(ge=0, lt=1)]
AnyPath = Annotated[Path, Field(strict=False), AfterValidator(local_path)]
AnyStore = Annotated[Path, Field(strict=False), AfterValidator(any_path)]
PathOrName = Annotated[str, AfterValidator(expanded)]

LORA_RATE = 2e-4
"""Default peak learning rate of adapters."""


class Section(BaseModel):
    """Base of all sections. Rejects unknown keys and values of another type, such as `steps: true`
    or `steps: "20"`.

    Docstrings of fields are their descriptions.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    def written(self) -> dict[str, Any]:
        """Returns the settings as they are written in YAML, those of mappings that are given."""
        return {key: plain(value) for key, value in self}


def _given(value: Any) -> Any:
    """Returns a mapping as it is given; null, as of one whose keys are commented out, is empty."""
    if value is None:
        return {}
    return value


class Keyed(Section):
    """Base of settings that have keys of their own. None is a key that is not given."""

    def written(self) -> dict[str, Any]:
        """Returns the keys that are given."""
        return self.model_dump(exclude_none=True)


class RopeScaling(Keyed):
    """RoPE scaling, by the keys of transformers' configs"""

    rope_type: Literal["default", "linear", "ntk", "yarn", "llama3"] | None = None
    """type of the scaling; default: none; ntk: a larger base instead"""
    factor: float | None = Field(None, ge=1)
    """new context length / original context length"""
    original_max_position_embeddings: int | None = Field(None, ge=1, le=MOST_ENTRIES)
    """original context length in tokens (yarn, llama3)"""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3: frequencies with fewer rotations are divided by factor"""
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3: frequencies with more rotations are kept"""
    beta_fast: float | None = Field(None, gt=0)
    """yarn: frequencies with more rotations are kept"""
    beta_slow: float | None = Field(None, gt=0)
    """yarn: frequencies with fewer rotations are divided by factor"""


_NO_SIZES = {"vocab_size", *ROPE_KEYS.values()}
_SIZES: dict[str, Any] = {
    name: (
        size.annotation | None,
        Field(None, description=f"{size.description} (null: the preset's)"),
    )
    for name, size in ModelShape.model_fields.items()
    if size.annotation and name not in _NO_SIZES
}
"""A key, such as `hidden_size`, for each field of ModelShape, which has its bounds, but for those
of RoPE and of the tokenizer."""


class Overrides(create_model("_Sizes", __base__=Keyed, **_SIZES)):  # type: ignore[misc]  # mypy follows no fields from there
    """sizes of a new model, by the keys of transformers' configs where they have one"""


class ModelSection(Section):
    """a new model of a preset, whose sizes can be replaced, or a checkpoint"""

    preset: str = Field("tiny", description=f"sizes of a new model: {', '.join(PRESETS)}")
    from_pretrained: PathOrName | None = None
    """checkpoint to start from: a folder, or OWNER/NAME on the Hugging Face hub (null: a new
    model)"""
    new_tokens: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1)
    """tokens, such as ["<note>"], that the data's tokenizer adds to the checkpoint's; entries that
    the embedding and an untied head lack are added, trained and exported with the tokenizer (null:
    the tokenizers are the same)"""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """code that runs the checkpoint: transformers' own or the native decoder; auto: native with
    tensor or pipeline parallelism, otherwise transformers"""
    vocab_size: int | None = Field(None, ge=2, le=MOST_ENTRIES)
    """entries of the embedding (null: size of the store's tokenizer)"""
    rope_theta: float | None = Field(None, gt=0)
    """base of the rotary position embedding (null: the preset's or the checkpoint's)"""
    rope_scaling: Annotated[RopeScaling, BeforeValidator(_given)] = RopeScaling()
    """RoPE for longer documents, of a new model or a checkpoint, in the words of transformers'
    configs: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8192}; what is not
    named stays the preset's or the checkpoint's"""
    overrides: Annotated[Overrides, BeforeValidator(_given)] = Overrides()
    """sizes of a new model that replace those of the preset: {hidden_size: 64, num_hidden_layers:
    2}"""

    @property
    def changed_rope(self) -> tuple[tuple[str, Any], ...]:
        """RoPE settings that override those of the checkpoint, as (key of transformers, value)."""
        theta = {} if self.rope_theta is None else {"rope_theta": self.rope_theta}
        return (*theta.items(), *self.rope_scaling.written().items())

    @property
    def published_vocabulary(self) -> int | None:
        """Entries of the embedding where no store is known: the setting, or those of the model
        that the preset is named after; None for one that nobody has published."""
        return self.vocab_size or PUBLISHED_VOCABULARIES.get(self.preset)

    def sizes(self) -> ModelShape:
        """Returns the preset with the sizes set here, without the tokenizer's. Raises ConfigError
        if they are inconsistent."""
        if self.preset not in PRESETS:
            fix = f"choose one of {', '.join(PRESETS)}"
            problem = Problem("model.preset", self.preset, "unknown preset", fix)
            raise ConfigError.of([problem], "the model section")
        replaced = self.overrides.written()
        if self.vocab_size is not None:
            replaced["vocab_size"] = self.vocab_size
        rope = shape_of_rope(dict(self.changed_rope))
        preset = PRESETS[self.preset].model_dump()
        try:
            return ModelShape.model_validate({**preset, **replaced, **rope})
        except ValidationError as error:
            problems = [self._problem_of_size(details) for details in error.errors()]
            raise ConfigError.of(problems, "the model section") from error

    def _problem_of_size(self, details: ErrorDetails) -> Problem:
        """Returns the problem of a size that is out of range, or of sizes that do not go
        together."""
        fix = f"omit it to keep the value of preset {self.preset}"
        rule = details["msg"].removeprefix("Value error, ").replace("Input should", "must")
        if details["loc"]:
            key = f"model.overrides.{details['loc'][0]}"
            return Problem(key, details["input"], rule, fix)
        given = {"overrides": self.overrides.written(), "rope_scaling": self.rope_scaling.written()}
        value = {name: keys for name, keys in given.items() if keys}
        return Problem("model", value, rule, fix)

    def shape(self, vocab_size: int) -> ModelShape:
        """Returns the sizes for a tokenizer of `vocab_size` entries, which `model.vocab_size` may
        pad. Raises ConfigError."""
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            rule = f"must be at least the size of the store's tokenizer, {vocab_size}"
            problem = Problem(
                "model.vocab_size",
                self.vocab_size,
                rule,
                f"set it to {vocab_size} or more, or omit it",
            )
            raise ConfigError.of([problem], "the model section")
        return self.sizes().model_copy(update={"vocab_size": self.vocab_size or vocab_size})


class LoraSection(Section):
    """LoRA adapters (by peft) on the frozen weights of a checkpoint"""

    rank: Count | None = None
    """rank of the adapters (null: no LoRA, all weights are trained); changes the default of
    optimizer.learning_rate"""
    alpha: float | None = Field(None, gt=0)
    """adapter outputs are scaled by alpha / rank (null: 2 · rank)"""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """linear layers that get adapters, by the last part of their names, such as [q_proj, v_proj];
    all-linear: every linear layer but the output head (experts stored as one parameter are not
    linear layers); of a model that reads images those of its language model"""
    base: Literal["nf4", "int8"] | None = None
    """quantize the frozen linear layers of the blocks by torchao (extra `gpu`), as QLoRA does: nf4
    takes 0.52 bytes per weight, int8 1 byte; sharded like other weights, and expanded for each
    product (null: in train.dtype)"""

    @property
    def adapters(self) -> Lora | None:
        """Adapters to add; None without LoRA."""
        if self.rank is None:
            return None
        named = self.target_modules
        targets = named if isinstance(named, str) else tuple(named)
        return Lora(self.rank, self.alpha or 2.0 * self.rank, targets, self.base)


class StoreSetting(Section):
    """one of several stores"""

    path: AnyStore
    weight: float | None = Field(None, gt=0)
    epochs: float | None = Field(None, gt=0)


def _kind_of_store(value: Any) -> str | None:
    """Returns the tag of a value of data.store; None if it is of no kind."""
    if isinstance(value, str | Path):
        return "<path>"
    if isinstance(value, list):
        return "<mix>"
    return None


OneStore = Annotated[AnyStore, Tag("<path>")]
MixedStores = Annotated[list[StoreSetting], Tag("<mix>")]
STORE_KINDS = Discriminator(
    _kind_of_store,
    custom_error_type="store_kind",
    custom_error_message="Input should be a path, or a list of {path, weight}",
)


class DataSection(Section):
    """training documents"""

    store: Annotated[OneStore | MixedStores, STORE_KINDS] = Path("stores/python-stdlib")
    """folder written by `longctx prepare`, or its address in object storage, such as
    s3://bucket/store; or several, mixed by tokens: [{path: stores/a, weight:
    3}, {path: stores/b, weight: 1}]; epochs instead of weight, for all stores, sets the relative
    number of passes over each store"""
    long_documents: Literal["split", "drop", "error", "truncate_left", "truncate_right"] | None = (
        None
    )
    """treatment of documents longer than max_length; truncate_left keeps the end (null: error for
    conversations and other documents with tokens without loss, split for the others)"""
    seed: int | None = Field(None, ge=0, le=(1 << 32) - 1)
    """seed of the order of documents (null: train.seed)"""
    max_length: Count | None = None
    """maximum document length in tokens (null: the most that the domain can hold)"""
    merge_prefixes: bool = False
    """compute what documents of a step have in common at their beginning once, as a tree; loss and
    gradients stay the same. All documents of the step that share at least an eighth of their mean
    length are merged"""
    held_out: float = Field(0.0, ge=0, lt=1)
    """share of documents, chosen by a hash of their names, held out for validation and never
    trained on"""
    cache_dir: AnyPath | None = None
    """folder on each machine, shared by its processes, through which stores in object storage are
    read (null: ~/.cache/longctx)"""
    cache_gib: float = Field(100.0, gt=0)
    """maximum size of the pieces in data.cache_dir, in GiB; those that were not used for longest
    are removed"""

    @property
    def mix(self) -> list[StoreSetting] | None:
        """Stores that are mixed; None if there is a single one."""
        if isinstance(self.store, list):
            return self.store
        return None

    @property
    def paths(self) -> list[Path]:
        """Folders of the stores to train on."""
        if isinstance(self.store, list):
            return [store.path for store in self.store]
        return [self.store]

    @property
    def description(self) -> str:
        return ", ".join(map(str, self.paths))


class BatchSection(Section):
    """tokens per step and per rank"""

    global_tokens: Count = 65536
    """tokens per step, over all ranks: documents are drawn until a step has at least this many"""
    tokens_per_rank: Count = 8192
    """token budget: maximum tokens per rank in one micro-batch"""


class ContextSection(Section):
    """context parallelism; the degree of a document is the number of ranks that it is split over"""

    mode: Mode = "auto"
    """auto: the planner chooses the degree of every document; static: one degree for all documents;
    bins: the degree by document length, from a table"""
    degree: Ranks | None = None
    """degree in mode static (null: the best degree of every step)"""
    bins: dict[Count, Ranks] | None = None
    """table of mode bins, {maximum length: degree, ...} (null: derived from the profile)"""
    profile: PathOrName | None = None
    """hardware profile, the constants of the cost model: a shipped name, or a YAML or JSON file, in
    the working directory or beside the configuration file; constants are scaled to the model and
    parallel sizes of the run (null: the shipped one for the device by its name, cpu-2core on a CPU;
    for a GPU without one h100-nvlink-ib, with a warning)"""
    max_remote_tokens: Count | None = None
    """split the exchange of K and V into rounds of at most about this many remote tokens; fewer
    tokens need less memory and more rounds (null: as many rounds as hide the exchange best). Two
    rounds are in memory at a time, three with two_level_exchange; a rank receives all tokens of its
    own node in one round"""
    keep_kv: bool | None = None
    """keep received K and V until backward instead of receiving them again; needs more memory
    (null: only where train.fit_memory finds room)"""
    two_level_exchange: bool = True
    """in rings that cross nodes (see the profile's ranks_per_node), send K and V once to each node
    and forward them inside the node; false: send them to every rank directly"""
    ulysses_degree: Ranks = 1
    """Ulysses degree: number of neighboring ranks that exchange heads for tokens (all-to-all)
    around ring attention: a divisor of the KV heads, or a multiple of them that divides the query
    heads, which copies KV heads; 1: rings only"""
    kernel: Literal["auto", "flash", "cpu", "triton", "reference"] = "auto"
    """attention kernel; auto: the first of the others that supports the model and device; flash:
    the best installed flash-attn (extra `flash`), otherwise torch's flash attention; cpu: torch's
    flash attention for CPUs; triton: longctx's own for GPUs; reference: dense float64, slow"""
    deterministic: bool = False
    """use the deterministic backward of flash attention on GPUs, which is slower: two runs, or a
    run and its resumption, are then bit-identical on GPUs too; false: they agree to rounding there
    (no effect on a CPU, where they always are bit-identical, and on the kernel triton)"""


class ParallelSection(Section):
    """tensor and pipeline parallelism, and sharding; the remaining ranks form the domain (data and
    context parallelism)"""

    tensor_parallel_size: Ranks = 1
    """tensor parallel size: ranks that each weight matrix is split over; must divide the KV
    heads"""
    pipeline_parallel_size: Ranks = 1
    """pipeline parallel size: ranks that the layers are split over"""
    pipeline_chunks: Ranks = 1
    """pipeline stages per rank; with several, whose forward and backward passes are interleaved,
    the bubble is smaller"""
    expert_parallel_size: Ranks = 1
    """expert parallel size: consecutive ranks of the domain that the experts of a mixture are split
    over, in addition to tensor parallel ranks; tokens travel to their experts"""
    shard_ranks: Ranks | None = None
    """number of consecutive ranks of the domain over which weights, gradients and optimizer state
    are sharded, such as the ranks of a node; other ranks hold replicas (null: all ranks; 1: no
    sharding, for small models)"""
    reshard_after: Literal["block", "micro_batch", "step"] = "block"
    """how long gathered weights stay in memory; block: gathered for the forward of a block and
    again for its backward; micro_batch: gathered once per micro-batch; step: gathered once per
    step; micro_batch and step need more memory and less communication"""
    reduce_after: Literal["micro_batch", "step"] = "step"
    """when gradients are reduced over ranks; step: once per step, with unsharded float32 gradients
    per rank until then; micro_batch: after every micro-batch, with sharded gradients and more
    communication"""


class BalanceSection(Section):
    """balance of the experts of a mixture; the same whatever the plan"""

    bias_rate: float | None = Field(None, ge=0)
    """how far the bias of each expert moves per step, towards an even use of experts over all
    tokens of the step; without effect on models without such a bias (null: 0.001 as in DeepSeek-V3,
    0 for a checkpoint)"""
    document_loss: float = Field(0.0, ge=0)
    """factor of the balance loss of each document, the sequence-wise loss of DeepSeek-V3 (0:
    none)"""
    z_loss: float = Field(0.0, ge=0)
    """factor of the mean of log²Σexp of the router's logits (0: none)"""


class ObjectiveSection(Section):
    """what a step minimizes"""

    name: Literal["next_token", "block_diffusion"] = "next_token"
    """next_token: the loss of the next token; block_diffusion: that of tokens hidden in noisy
    copies of blocks, beside clean ones, which need twice the tokens (BD3-LM)"""
    mask_token: str | None = None
    """token in place of hidden ones (null: the one that ends documents)"""
    block: Count = 32
    """tokens of a block"""
    largest_block: Count | None = None
    """draw the size of the blocks of every document between block and this one (null: block)"""
    least_noise: float = Field(0.001, gt=0, le=1)
    """least share of a block's tokens that is hidden, on average"""
    most_noise: float = Field(1.0, gt=0, le=1)
    """largest share; validation always has shares of 0.001 to 1, for a bound on the perplexity"""
    next_token_weight: float = Field(0.0, ge=0)
    """weight of the loss of the next token on clean blocks, which then are causal (0: none)"""
    per_document: bool = False
    """each document counts alike, not each token"""

    @property
    def is_diffusion(self) -> bool:
        return self.name == "block_diffusion"


class TrainSection(Section):
    """steps, precision, memory and the run folder"""

    steps: Count = 100
    """number of optimizer steps"""
    epochs: float | None = Field(None, gt=0, allow_inf_nan=False)
    """passes over the documents, instead of steps; several stores have epochs of their own (null:
    steps)"""
    seed: int = Field(0, ge=0, le=(1 << 32) - 1)
    """seed of the initial weights, and of the order of documents unless data.seed is set"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of forward and backward; trained weights and optimizer state stay float32 (null:
    bfloat16 on GPUs and with float8, float32 on a CPU)"""
    float8: Literal["tensorwise", "rowwise"] | None = None
    """compute the linear layers of the blocks in float8 by torchao (extra `gpu`); tensorwise: one
    scale per tensor, faster; rowwise: one per row and column, more accurate; all else stays in
    dtype, which must be bfloat16. Needs GPUs of compute capability 8.9 or higher (Ada, Hopper);
    emulated on a CPU, slowly (null: no float8)"""
    compile: bool | None = None
    """compile each block and the loss with torch.compile; the first steps take longer (null: on
    GPUs, but not with tensor parallelism, which cannot be compiled, nor with mlp_tile_tokens)"""
    recompute: Recompute = "none"
    """activation checkpointing: part of each block that backward recomputes, in ascending order;
    norms: norms, RoPE and activation functions, which take little time; mlp: also the matrices of
    the MLP; selective: everything but attention; full: the whole block"""
    mlp_tile_tokens: Count | None = None
    """run the MLP on tiles of this many tokens and recompute each tile in backward, to save
    activation memory (null: no tiles)"""
    offload_activations: bool = False
    """keep what recomputed blocks keep in host memory: their inputs, and with recompute selective
    attention's results (no effect on a CPU)"""
    offload_optimizer: bool = False
    """keep weights, gradients and optimizer state in host memory and run the optimizer there (no
    effect on a CPU)"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """what a loss or gradient that is not finite does: stop the run, or skip the update, naming the
    documents; a fourth such step in a row stops the run"""
    fit_memory: bool | None = None
    """use the memory of each rank by estimate, with room to spare: keep received K and V unless
    context.keep_kv says otherwise, and if the run does not fit, make the cheapest changes with
    which it does: recomputation, exchange rounds, resharding and others (null: on GPUs)"""
    run_dir: AnyPath = Path("runs/default")
    """folder for metrics, checkpoints and the resolved settings"""
    timeout_s: float = Field(600.0, gt=0, le=30 * 86400)
    """timeout of collectives in seconds; a rank silent for longer counts as dead"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if available, otherwise cpu"""


class ParameterGroup(Section):
    """parameters with settings of their own"""

    match: str = Field(min_length=1)
    learning_rate_ratio: float = Field(1.0, ge=0)
    weight_decay: float | None = Field(None, ge=0)


def _kind_of_warmup(value: Any) -> str:
    """Returns the tag of a value of optimizer.warmup_steps."""
    if isinstance(value, float):
        return "<share>"
    return "<steps>"


WarmupSteps = Annotated[int, Field(ge=0, le=LARGEST), Tag("<steps>")]
WarmupShare = Annotated[float, Field(ge=0, lt=1), Tag("<share>")]
WARMUP_KINDS = Discriminator(_kind_of_warmup)


class OptimizerSection(Section):
    """optimizer, and the schedule of its learning rate, which begins with a linear warm-up"""

    name: Literal["adamw", "muon", "adamw-8bit"] = "adamw"
    """adamw: AdamW; muon: Muon for the matrices of the blocks, each expert's by itself, and AdamW
    for embeddings, head, norms and biases; Muon's updates are as large as AdamW's, so that
    learning_rate serves both; adamw-8bit: AdamW by codes of torchao (extra `gpu`), whose moments
    are 8-bit for matrices of 4,096 numbers or more; tensor ranks must have whole blocks of 256
    columns"""
    learning_rate: float = Field(3e-4, gt=0)
    """peak learning rate; with lora.rank 2e-4 by default"""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """learning rate after the warm-up; linear, cosine: decay to the end; wsd: constant, then decay
    (warm-up, stable, decay); inverse_sqrt: peak · √(warm-up / step)"""
    decay_share: float = Field(0.2, ge=0, le=1)
    """share of the whole schedule in which wsd decays, at its end"""
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """final learning rate as a share of the peak, of inverse_sqrt the least"""
    warmup_steps: Annotated[WarmupSteps | WarmupShare, WARMUP_KINDS] = 10
    """steps until the learning rate reaches its peak; below 1: a share of the whole schedule"""
    decay_steps: Count | None = None
    """steps of the whole schedule, if another run continues this one (null: train.steps)"""
    weight_decay: float = Field(0.1, ge=0)
    """decoupled weight decay of matrices, embeddings and the head; norms and biases have none"""
    groups: list[ParameterGroup] = []
    """parameters with another learning rate or weight decay: [{match: "embed|lm_head",
    learning_rate_ratio: 0.5, weight_decay: 0.0}]; match is a regular expression that is searched in
    names such as layers.0.self_attn.q_proj.weight; the first group that matches counts"""
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    """decay rates of AdamW's two moments, each in [0, 1)"""
    eps: float = Field(1e-8, gt=0)
    """added to the square root of AdamW's second moment"""
    clip_grad_norm: float | None = Field(1.0, gt=0)
    """maximum norm of the gradient (null: no clipping)"""


class EvalSection(Section):
    """validation on documents that are not trained on"""

    every: Count | None = None
    """steps between validations; the last step of the run is always validated (null: never)"""
    store: AnyStore | None = None
    """folder written by `longctx prepare` (null: the documents held out by data.held_out)"""
    documents: Count | None = None
    """number of documents to validate on, the first ones of the store or stores (null: all)"""


class CheckpointSection(Section):
    """checkpoints of the run"""

    every: Count | None = 100
    """steps between checkpoints; the last step of the run is always saved (null: never, for
    trials)"""
    keep: Count | None = 3
    """number of latest checkpoints to keep (null: all)"""
    best: bool = False
    """also save after each validation with the lowest loss so far, and keep that checkpoint in the
    folder best of the run"""
    asynchronous: bool = True
    """train on while a copy in host memory is written"""
    export: AnyPath | None = None
    """folder to export the final model to, for transformers (null: no export)"""


class WandbSetting(Section):
    """a run of Weights & Biases"""

    project: str
    name: str | None = None
    entity: str | None = None
    tags: list[str] = []


class LogSection(Section):
    """logging; the console line and metrics.jsonl are always written"""

    tensorboard: bool = True
    """write TensorBoard events"""
    wandb: WandbSetting | None = None
    """log to Weights & Biases: {project: mine, name: first, entity: team, tags: [long]}; only the
    project must be given, the name is otherwise that of the run folder; requires the package wandb
    (null: none)"""
    every: Count = 1
    """steps between lines on the console, which also shows the first and the last step, those with
    a validation or without an update; metrics.jsonl has all steps"""

    @field_validator("wandb", mode="before")
    @classmethod
    def _project(cls, value: Any) -> Any:
        """Takes the name of a project for the whole."""
        if isinstance(value, str):
            return {"project": value}
        return value
