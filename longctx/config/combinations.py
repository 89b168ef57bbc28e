"""What does not go with what: a table of rows, from which problems, their ways out and a table of
the guide follow.

A condition is text: `SETTING is VALUE`, `SETTING is not VALUE` or `SETTING > NUMBER`; several are
joined by `and`. Besides settings, conditions name facts of the model (`FACTS`), which for a
checkpoint are those of its files. A way out is an override.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from longctx.config.names import FIELDS
from longctx.config.problems import Problem, plain, yaml_text
from longctx.config.run import Config
from longctx.model.presets import EXPERT_OPTIONS
from longctx.planning.cost.spec import ModelSpec
from longctx.safe_yaml import parse

A_CHECKPOINT = "a checkpoint"
A_STORE = "a folder written by `longctx prepare`"


class Where(NamedTuple):
    """A condition, and overrides with any of which it no longer holds."""

    condition: str
    ways_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A setting that is refused under a condition on other settings.

    Attributes:
        refused: the condition on the setting at fault.
        where: the condition on other settings or on the model.
        why: why both do not go together.
        instead: what the setting can be set to, if not to its default.
    """

    refused: str
    where: Where
    why: str
    instead: str | None = None

    @property
    def key(self) -> str:
        """The setting at fault."""
        return _conditions(self.refused)[0].name

    @property
    def ways_out(self) -> tuple[str, ...]:
        """Overrides, each of which is enough."""
        default = yaml_text(FIELDS[self.key].default)
        return f"{self.key}={self.instead or default}", *self.where.ways_out

    @property
    def fix(self) -> str:
        """The ways out in words."""
        texts = []
        for way_out in self.ways_out:
            name, _, value = way_out.partition("=")
            name = "it" if name == self.key else name
            texts.append(f"omit {name}" if value == "null" else f"set {name} to {value}")
        return ", or ".join(texts)

    def problem(self, config: Config, spec: ModelSpec | None) -> Problem | None:
        """Returns the problem if the settings have it. Without `spec`, nothing is known of the
        model."""
        values = {}
        for condition in _conditions(self.refused) + _conditions(self.where.condition):
            name = condition.name
            if name in FACTS and spec is None:
                return None
            values[name] = _value(name, config, spec)
            if not condition.holds(values[name]):
                return None
        value = values.pop(self.key)
        where = " and ".join(f"{name} is {yaml_text(other)}" for name, other in values.items())
        others = tuple(FACTS[name][0] if name in FACTS else name for name in values)
        return Problem(
            self.key,
            value,
            rule=f"not possible where {where}: {self.why}",
            fix=self.fix,
            others=others,
        )


class _Condition(NamedTuple):
    name: str
    operator: str
    operand: Any

    def holds(self, value: Any) -> bool:
        if self.operator == ">":
            return value is not None and bool(value > self.operand)
        return bool(plain(value) == self.operand) == (self.operator == "is")


@cache
def _conditions(text: str) -> tuple[_Condition, ...]:
    parts = [re.split(" (is not|is|>) ", part) for part in text.split(" and ")]
    return tuple(_Condition(name, operator, parse(operand)) for name, operator, operand in parts)


def _value(name: str, config: Config, spec: ModelSpec | None) -> Any:
    if name in FACTS and spec is not None:
        return FACTS[name][1](config, spec)
    return config.value_of(name)


FACTS: dict[str, tuple[str, Callable[[Config, ModelSpec], Any]]] = {
    "the number of experts": (
        "model.overrides.num_experts",
        lambda config, spec: spec.experts,
    ),
    "the bias of the router": (  # which no family of checkpoints that the native decoder runs has
        "model.overrides.router_bias",
        lambda config, spec: (
            config.model.from_pretrained is None and config.model.sizes().router_bias
        ),
    ),
    "linear attention": (
        "model.from_pretrained",
        lambda config, spec: any(layer.scan for layer in spec.layers),
    ),
}
"""What conditions say of the model, by name: the setting that may decide on it, and the function
that tells it."""

NEW_MODEL = Where("model.from_pretrained is null", (f"model.from_pretrained={A_CHECKPOINT}",))
CHECKPOINT = Where("model.from_pretrained is not null", ("model.from_pretrained=null",))
LORA = Where("lora.rank is not null", ("lora.rank=null",))
NO_LORA = Where("lora.rank is null", ("lora.rank=8",))
TENSOR = Where("parallel.tensor_parallel_size > 1", ("parallel.tensor_parallel_size=1",))
PIPELINE = Where("parallel.pipeline_parallel_size > 1", ("parallel.pipeline_parallel_size=1",))
EXPERTS = Where("the number of experts > 0")
NO_EXPERTS = Where("the number of experts is 0")
NEW_WITHOUT_EXPERTS = Where(
    "the number of experts is 0 and model.from_pretrained is null",
    ("model.overrides.num_experts=8",),
)
SPLIT = ("parallel.tensor_parallel_size > 1", "parallel.pipeline_parallel_size > 1")
BALANCE = ("balance.bias_rate", "balance.document_loss", "balance.z_loss")


def _rows() -> Iterator[Row]:
    """Yields all rows, by what conflicts: rows of one section may be in several of these
    functions."""
    yield Row(
        "model.implementation is not auto", NEW_MODEL, "only a checkpoint can be run by other code"
    )
    yield Row(
        "model.new_tokens is not null",
        NEW_MODEL,
        "a new model has all entries of the data's tokenizer",
    )
    yield Row(
        "model.new_tokens is not null",
        LORA,
        "the embedding is frozen, and the adapters could not carry its new rows",
    )
    for condition in ("model.overrides is not {}", "model.vocab_size is not null"):
        yield Row(condition, CHECKPOINT, "sizes are taken from the checkpoint")
    yield from _lora()
    yield from _data()
    yield from _parallelism()
    yield from _experts()
    yield from _optimizers()
    yield from _train()


def _lora() -> Iterator[Row]:
    for setting in ("alpha is not null", "target_modules is not all-linear"):
        yield Row(f"lora.{setting}", NO_LORA, "it has no effect without LoRA")
    yield Row("lora.base is not null", NO_LORA, "weights that are trained cannot be quantized")
    yield Row(
        "lora.rank is not null", NEW_MODEL, "adapters are trained on the weights of a checkpoint"
    )
    yield Row("model.implementation is native", LORA, "the native decoder has no adapters")
    for setting in SPLIT:
        yield Row(
            setting,
            LORA,
            "the frozen weights of LoRA are sharded over all ranks and have no gradients",
        )


def _data() -> Iterator[Row]:
    no_documents = Where(
        "eval.store is null and data.held_out is 0", ("data.held_out=0.01", f"eval.store={A_STORE}")
    )
    yield Row("eval.every is not null", no_documents, "there are no documents to validate on")
    other_store = Where("eval.store is not null", ("eval.store=null",))
    yield Row(
        "data.held_out > 0",
        other_store,
        "validation uses eval.store, and held-out documents would never be used",
    )
    epochs = Where("train.epochs is not null", ("train.epochs=null",))
    yield Row("train.steps is not 100", epochs, "epochs give the number of steps")
    no_checkpoints = Where("checkpoint.every is null", ("checkpoint.every=100",))
    yield Row("checkpoint.export is not null", no_checkpoints, "the last checkpoint is exported")
    yield Row("checkpoint.best is true", no_checkpoints, "the best checkpoint is one of these")
    no_validation = Where("eval.every is null", ("eval.every=100",))
    yield Row(
        "checkpoint.best is true",
        no_validation,
        "the best checkpoint is told by the validation loss",
    )
    yield from _merging()
    yield from _diffusion()


def _diffusion() -> Iterator[Row]:
    next_token = Where("objective.name is next_token", ("objective.name=block_diffusion",))
    for setting in (
        "mask_token is not null",
        "block is not 32",
        "largest_block is not null",
        "least_noise is not 0.001",
        "most_noise is not 1.0",
        "next_token_weight > 0",
        "per_document is true",
    ):
        yield Row(f"objective.{setting}", next_token, "it has no effect")
    diffusion = "objective.name is block_diffusion"
    merged = Where("data.merge_prefixes is true", ("data.merge_prefixes=false",))
    yield Row(diffusion, merged, "noisy blocks have no common beginning")
    yield Row(
        diffusion,
        Where("linear attention is true"),
        "states of linear layers know only earlier tokens",
    )
    for name in BALANCE[1:]:
        balanced = Where(f"{name} > 0", (f"{name}=0.0",))
        yield Row(diffusion, balanced, "it goes by the tokens of every document")


def _merging() -> Iterator[Row]:
    merged = "data.merge_prefixes is true"
    by_default = (
        "balance.bias_rate is null and the bias of the router is true and "
        "model.from_pretrained is null"
    )
    for condition, name in [
        *((f"{name} > 0", name) for name in BALANCE),
        (by_default, "balance.bias_rate"),
    ]:
        yield Row(
            merged, Where(condition, (f"{name}=0.0",)), "it goes by the tokens of every document"
        )


def _parallelism() -> Iterator[Row]:
    not_static = Where("context.mode is not static", ("context.mode=static",))
    yield Row("context.degree is not null", not_static, "only mode static takes a degree")
    yield Row(
        "context.bins is not null",
        Where("context.mode is not bins", ("context.mode=bins",)),
        "only mode bins takes a table",
    )
    yield Row("context.kernel is cpu", Where("train.device is cuda"), "this kernel runs on a CPU")
    yield Row("context.kernel is flash", Where("train.device is cpu"), "this kernel runs on GPUs")
    yield Row(
        "parallel.reduce_after is micro_batch",
        PIPELINE,
        "a pipeline reduces gradients once per step",
    )
    yield Row(
        "train.compile is true",
        TENSOR,
        "torch.compile cannot trace it with a varying number of tokens",
    )
    yield Row(
        "train.mlp_tile_tokens is not null",
        TENSOR,
        "the output of the whole MLP is scattered over its ranks",
    )


def _experts() -> Iterator[Row]:
    yield Row("parallel.expert_parallel_size > 1", NO_EXPERTS, "the model has no experts")
    for name in sorted(EXPERT_OPTIONS):
        yield Row(
            f"model.overrides.{name} is not null",
            NEW_WITHOUT_EXPERTS,
            "it has no effect without experts",
        )
    yield Row(
        "train.float8 is not null", EXPERTS, "float8 is not supported for mixtures of experts"
    )
    yield Row("train.compile is true", EXPERTS, "numbers of rows of experts depend on data")
    for name in BALANCE:
        yield Row(
            f"{name} > 0",
            NO_EXPERTS,
            "only experts of the native decoder are balanced (model.implementation native)",
        )
    no_bias = (
        "the bias of the router is false and the number of experts > 0 and model.from_pretrained is"
    )
    yield Row(
        "balance.bias_rate > 0",
        Where(f"{no_bias} null", ("model.overrides.router_bias=true",)),
        "the router has no bias to move",
    )
    yield Row(
        "balance.bias_rate > 0", Where(f"{no_bias} not null"), "the router has no bias to move"
    )


def _optimizers() -> Iterator[Row]:
    not_wsd = Where("optimizer.schedule is not wsd", ("optimizer.schedule=wsd",))
    yield Row("optimizer.decay_share is not 0.2", not_wsd, "it has no effect")
    constant = Where("optimizer.schedule is constant", ("optimizer.schedule=cosine",))
    yield Row("optimizer.min_learning_rate_ratio is not 0.1", constant, "it has no effect")
    eight_bit = Where("optimizer.name is adamw-8bit", ("optimizer.name=adamw",))
    yield Row("train.offload_optimizer is true", eight_bit, "8-bit moments stay on the device")


def _train() -> Iterator[Row]:
    yield Row(
        "train.compile is true",
        Where("linear attention is true"),
        "chunks and messages differ between micro-batches",
    )
    float32 = Where("train.dtype is float32", ("train.dtype=bfloat16",))
    yield Row(
        "train.float8 is not null", float32, "everything but the linear layers must be in bfloat16"
    )
    yield Row(
        "train.float8 is not null", TENSOR, "each rank would scale its part of a tensor differently"
    )
    yield Row("train.float8 is not null", LORA, "base weights are frozen")
    whole_blocks = Where("train.recompute is none", ("train.recompute=selective",))
    yield Row(
        "train.offload_activations is true",
        whole_blocks,
        "only what recomputed blocks keep is offloaded",
    )


ROWS = tuple(_rows())
"""The table."""
