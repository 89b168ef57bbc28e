"""The settings themselves: one class a section, one line a setting, each with type, default, bounds and description."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from longctx.config.problems import ConfigError, Problem
from longctx.model.adapters import Lora
from longctx.model.context_extension import ROPE_SETTINGS
from longctx.model.presets import PRESETS, ModelShape

LARGEST = 1 << 40
"""More tokens than any step or rank has; keeps costs within 64 bits."""


class Section(BaseModel):
    """Unknown keys are refused, and a value must be of its type: `steps: true` and `steps: "20"` are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _path(default: str | None, description: str) -> Any:
    return Field(None if default is None else Path(default), strict=False, description=description)


_SIZES: dict[str, Any] = {
    "preset": (str, Field("tiny", description=f"sizes of a new model: {', '.join(PRESETS)}")),
    "from_pretrained": (
        str | None,
        Field(None, description="checkpoint to start from: a folder, or OWNER/NAME on the Hugging Face hub (null: none)"),
    ),
    "implementation": (
        Literal["auto", "native", "transformers"],
        Field("auto", description="whose code runs a checkpoint; auto: native where matrices or layers are split over ranks"),
    ),
    **{
        name: (size.annotation | None, Field(None, description=f"{size.description} (null: the preset's)"))
        for name, size in ModelShape.model_fields.items()
        if size.annotation
    },
    "vocab_size": (int | None, Field(None, description="entries of the embedding (null: those of the store's tokenizer)")),
}
"""Settings that replace the sizes of the preset. ModelShape holds their bounds."""


class ModelSection(create_model("Sizes", __base__=Section, **_SIZES)):  # type: ignore[misc]  # a setting for each size
    """the decoder: a preset, and sizes that replace the preset's"""

    @property
    def changed_rope(self) -> tuple[tuple[str, Any], ...]:
        """Settings of RoPE that go before those of a checkpoint, with their values."""
        return tuple((name, value) for name in ROPE_SETTINGS if (value := getattr(self, name)) is not None)

    def sizes(self) -> ModelShape:
        """The preset with the sizes set here, before the tokenizer is known. Raises ConfigError if they do not fit together."""
        if self.preset not in PRESETS:
            fix = f"choose one of {', '.join(PRESETS)}"
            raise ConfigError.of([Problem("model.preset", self.preset, "there is no such preset", fix)], "the model section")
        replaced = self.model_dump(exclude={"preset", "from_pretrained", "implementation"}, exclude_none=True)
        try:
            return ModelShape.model_validate({**PRESETS[self.preset].model_dump(), **replaced})
        except ValidationError as error:
            problems = []
            for details in error.errors():
                key = ".".join(["model", *map(str, details["loc"])])
                value = details["input"] if details["loc"] else replaced
                rule = details["msg"].removeprefix("Value error, ").replace("Input should", "must")
                problems.append(Problem(key, value, rule, f"leave it out to keep what preset {self.preset} has"))
            raise ConfigError.of(problems, "the model section") from error

    def shape(self, vocab_size: int) -> ModelShape:
        """The model for a tokenizer of `vocab_size` entries; a greater `model.vocab_size` pads the embedding.

        Raises ConfigError if the sizes do not fit together or entries of the tokenizer would have no embedding.
        """
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            rule = f"the store's tokenizer has {vocab_size} entries, and each needs an embedding"
            problem = Problem("model.vocab_size", self.vocab_size, rule, f"give {vocab_size} or more, or leave it out")
            raise ConfigError.of([problem], "the model section")
        return self.sizes().model_copy(update={"vocab_size": self.vocab_size or vocab_size})


class LoraSection(Section):
    """small trained matrices beside the frozen weights of a checkpoint, by peft"""

    rank: int | None = Field(None, ge=1, description="of the trained matrices (null: all weights are trained, without LoRA)")
    alpha: float | None = Field(None, gt=0, description="what they add is scaled by alpha / rank (null: 2 · rank)")
    dropout: float = Field(0.0, ge=0, le=1, description="must be 0: it would depend on how documents are split")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="last parts of the names of linear layers, such as [q_proj, v_proj]; all-linear: all but the output head "
        "(experts that are one parameter are no linear layers)",
    )

    @property
    def adapters(self) -> Lora | None:
        """None without LoRA."""
        if self.rank is None:
            return None
        targets = self.target_modules if isinstance(self.target_modules, str) else tuple(self.target_modules)
        return Lora(self.rank, self.alpha or 2.0 * self.rank, targets)


class DpoSection(Section):
    """preference tuning by DPO: pairs of a chosen and a rejected completion, beside the model as it was when the run began"""

    beta: float | None = Field(
        None, gt=0, description="how closely the model keeps to what it was; usual is 0.1 (null: no preference tuning)"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of the pairs that may be labelled the wrong way round, as in conservative DPO"
    )


class StoreSetting(Section):
    """one of several stores"""

    path: Path = Field(strict=False)
    weight: float | None = Field(None, gt=0)
    epochs: float | None = Field(None, gt=0)


class DataSection(Section):
    """what is read"""

    store: Path | None = _path("stores/python-stdlib", "folder that `longctx prepare` wrote (null: several, by data.stores)")
    stores: list[StoreSetting] | None = Field(
        None,
        description="several in place of data.store, mixed by tokens: [{path: stores/a, weight: 3}, {path: stores/b, weight: "
        "1}]; with epochs in place of all weights, how often each is passed while the others are passed as often as they say",
    )
    tokenizer: Path | None = _path(None, "tokenizer.json that the store must have been made with (null: not checked)")
    long_documents: Literal["split", "drop", "error"] = Field(
        "split", description="what happens to documents longer than max_length; pairs of DPO are never split: drop or error"
    )
    max_length: int | None = Field(
        None, ge=1, description="tokens of the longest document (null: as many as the domain can hold)"
    )
    held_out: float = Field(
        0.0, ge=0, lt=1, description="share of the documents, by a hash of their names, that is evaluated and never trained on"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_or_several(cls, values: Any) -> Any:
        """The default store goes where several are given."""
        if isinstance(values, dict) and values.get("stores") is not None and "store" not in values:
            return {**values, "store": None}
        return values

    @property
    def paths(self) -> list[Path]:
        """Of all stores."""
        return [self.store] if self.store is not None else [one.path for one in self.stores or ()]

    @property
    def said(self) -> str:
        """The stores in words."""
        return ", ".join(map(str, self.paths))


class BatchSection(Section):
    """what a step and a rank hold"""

    global_tokens: int = Field(
        65536, ge=1, le=LARGEST, description="a step takes documents until it has this many tokens, over all ranks"
    )
    tokens_per_rank: int = Field(8192, ge=1, le=LARGEST, description="most tokens that a rank holds in a micro-batch")
    pad_to_multiple_of: int = Field(1, ge=1, description="a rank's tokens are padded to a multiple of this")


class ContextSection(Section):
    """context parallelism: how many ranks a document is split over"""

    mode: Literal["auto", "static", "bins"] = Field(
        "auto", description="auto: the planner chooses for every document; static: one degree for all; bins: by a table"
    )
    degree: int | None = Field(None, ge=1, description="the degree of mode static (null: the best one for each step)")
    bins: dict[int, int] | None = Field(
        None, description="the table of mode bins, {longest length: degree, ...} (null: derived from the profile)"
    )
    profile: str | None = Field(
        None,
        description="constants of the cost model: a shipped name, or a YAML or JSON file; what it describes is scaled to the "
        "model and split of the run (null: by the device, cpu-2core on a CPU, h200-nvlink-ib on an H200, h100-nvlink-ib on "
        "other GPUs)",
    )
    recalibrate: bool = Field(
        False,
        description="refine the profile's linear, attention and launch times by the measured times of the last steps; plans "
        "then depend on timing, so two runs agree to rounding, not bit by bit",
    )
    max_remote_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of other ranks whose K and V an exchange stage should hold; less memory, more stages (null: all at "
        "once); two stages are held at a time, and with two_level_exchange three, where a stage of a ring that crosses nodes "
        "also takes all of a node's rows at least",
    )
    keep_kv: bool = Field(
        False, description="hold the K and V that were received until backward, instead of receiving them again: more memory"
    )
    two_level_exchange: bool = Field(
        True,
        description="where a ring crosses nodes (of the profile's ranks_per_node), send K and V once to each node, and on "
        "inside it; false: straight to every rank",
    )
    ulysses_degree: Literal["auto"] | int = Field(
        1,
        description="so many neighbouring ranks swap heads for tokens around ring attention (Ulysses); auto: as the cost model "
        "chooses for every micro-batch; 1: plain rings",
    )
    kernel: Literal["auto", "flash", "cpu", "triton", "reference"] = Field(
        "auto",
        description="attention kernel; flash: the best flash attention installed (`pip install longctx[flash]`), or torch's "
        "own; cpu: torch's flash attention for CPUs; triton: our own for GPUs; reference: dense, slow, float64",
    )


class ParallelSection(Section):
    """the mesh; what it leaves of the world is the domain, the ranks of data and context parallelism"""

    tensor_parallel_size: int = Field(
        1, ge=1, description="ranks that share every weight matrix, and hold the same documents; divides the kv heads"
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, description="ranks that share the layers: each runs its stages of consecutive layers, and hands on the results"
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b",
        description="order of forward and backward passes in a pipeline; gpipe: all forward, then all backward; 1f1b: in "
        "turns, holding fewest activations; interleaved: the same with several stages on every rank, which wait less; "
        "zero-bubble: gradients of weights are computed while a rank would wait",
    )
    pipeline_chunks: int = Field(
        1, ge=1, description="stages on every rank of a pipeline, for the schedules interleaved (2 or more) and zero-bubble"
    )
    shard_ranks: int | None = Field(
        None,
        ge=1,
        description="consecutive ranks of the domain that share one copy of weights, gradients and moments, as those of a node "
        "(null: all of them; 1: every rank holds all, for small models)",
    )
    reshard_after: Literal["block", "micro_batch", "step"] = Field(
        "block",
        description="how long gathered weights stay; block: gathered for a block's forward and again for its backward; "
        "micro_batch: once for both; step: once a step; later ones need more memory and gather less often",
    )
    reduce_after: Literal["micro_batch", "step"] = Field(
        "step",
        description="when gradients are summed over ranks; step: once, and until then each rank holds all of them in float32; "
        "micro_batch: more messages, and each rank holds its shard",
    )


class TrainSection(Section):
    """the run"""

    steps: int = Field(100, ge=1, description="optimizer steps")
    seed: int = Field(0, ge=0, le=(1 << 32) - 1, description="of the initial weights and the order of the documents")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the computation")
    compile: bool = Field(False, description="compile the blocks of the model with torch.compile; the first steps take longer")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="what backward computes anew to save memory; selective: everything but attention"
    )
    mlp_tile_tokens: int | None = Field(
        None,
        ge=1,
        description="the MLP takes so many tokens at a time and computes them again in backward, so that its intermediates "
        "exist for these alone (null: all tokens at once)",
    )
    offload_activations: bool = Field(
        False, description="keep the inputs of blocks that recompute in host memory (no effect on a CPU)"
    )
    offload_optimizer: bool = Field(
        False,
        description="keep weights, gradients and moments in host memory, where the optimizer computes (no effect on a CPU)",
    )
    peak_flops: float | None = Field(
        None,
        gt=0,
        description="operations a second that a device can do, for the utilisation in the metrics (null: by the name of the "
        "GPU; unknown on a CPU)",
    )
    run_dir: Path = _path("runs/default", "folder for metrics, checkpoints and the resolved settings")
    timeout_s: float = Field(600.0, gt=0, le=30 * 86400, description="seconds after which a silent rank is taken for dead")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is one")


class OptimizerSection(Section):
    """AdamW, with linear warm-up and cosine decay"""

    learning_rate: float = Field(3e-4, gt=0, description="its greatest value")
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1, description="its last value, as a share of the greatest")
    warmup_steps: int = Field(10, ge=0, description="steps until the greatest value is reached")
    weight_decay: float = Field(0.1, ge=0, description="decoupled, as in AdamW")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="decay of the two moments, each in [0, 1)")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    clip_grad_norm: float | None = Field(1.0, gt=0, description="greatest norm of the gradient (null: not clipped)")


class EvalSection(Section):
    """validation: the loss of documents that the model is not trained on"""

    every: int | None = Field(
        None, ge=1, description="steps between two validations; the last step, or that of every stage, has one too (null: none)"
    )
    store: Path | None = _path(None, "folder that `longctx prepare` wrote (null: the documents of data.held_out)")
    documents: int | None = Field(
        None, ge=1, description="the first so many of these documents, in the order of their stores (null: all)"
    )


class CheckpointSection(Section):
    """what survives the run"""

    every: int | None = Field(
        100,
        ge=1,
        description="steps between two checkpoints; the last one, or that of every stage, has one too (null: none, for trials)",
    )
    keep: int | None = Field(3, ge=1, description="how many of the latest stay (null: all)")
    export: Path | None = _path(None, "folder that the last one is exported to for transformers, at the end (null: none)")


class LogSection(Section):
    """what can be watched; the console line and metrics.jsonl are always written"""

    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: str | None = Field(
        None, description="project of Weights & Biases to log to; requires the package wandb (null: none)"
    )
