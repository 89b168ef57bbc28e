"""Config: all settings of a run, by section, and values derived from them."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict

from longctx.config import settings
from longctx.hf.source import ModelSource, NewDecoder, adapted, pretrained
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.layout import longest_document
from longctx.planning.pipeline import Pipeline

FLOAT8_ROWS = 16
"""Sizes of float8 products must be multiples of this."""


class Config(BaseModel):
    """All settings of a run. Made by `longctx.config.load`, which also checks constraints across
    settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    expert_max_load: ClassVar[float] = 2.0
    """Rows that the experts of a rank compute at once, as a multiple of an even share. If routing
    is less even, all ranks compute in turns, and again in backward: no token is dropped."""

    model: settings.ModelSection = settings.ModelSection()
    lora: settings.LoraSection = settings.LoraSection()
    data: settings.DataSection = settings.DataSection()
    batch: settings.BatchSection = settings.BatchSection()
    context: settings.ContextSection = settings.ContextSection()
    parallel: settings.ParallelSection = settings.ParallelSection()
    balance: settings.BalanceSection = settings.BalanceSection()
    objective: settings.ObjectiveSection = settings.ObjectiveSection()
    train: settings.TrainSection = settings.TrainSection()
    optimizer: settings.OptimizerSection = settings.OptimizerSection()
    eval: settings.EvalSection = settings.EvalSection()
    checkpoint: settings.CheckpointSection = settings.CheckpointSection()
    log: settings.LogSection = settings.LogSection()

    def changed(self, changes: Mapping[str, Any]) -> "Config":
        """Returns the settings with new values by dotted name; rules are not checked."""
        config = self
        for name, value in changes.items():
            config = _replaced(config, name.split("."), value)
        return config

    def value_of(self, name: str) -> Any:
        """Returns the value of a setting, or of a key of one, by dotted name."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def model_source(self, vocab_size: int | None = None) -> ModelSource:
        """Returns the source of the model. `vocab_size` is the size of the store's tokenizer, None
        if not known yet.

        Raises ConfigError if the sizes are inconsistent, PretrainedError if the checkpoint cannot
        be used.
        """
        if self.model.from_pretrained is None:
            return NewDecoder(
                self.model.sizes() if vocab_size is None else self.model.shape(vocab_size)
            )
        parallel = self.parallel
        split = (
            parallel.tensor_parallel_size
            * parallel.pipeline_parallel_size
            * parallel.expert_parallel_size
            > 1
        )
        source = self.model.from_pretrained
        rope = self.model.changed_rope
        if self.lora.adapters is not None:
            return adapted(source, rope, self.lora.adapters, self.dtype)
        entries = (vocab_size or 0) if self.model.new_tokens is not None else 0
        return pretrained(
            source, rope, implementation=self.model.implementation, split=split, entries=entries
        )

    @property
    def dtype(self) -> str:
        """Dtype of forward and backward: `train.dtype`, or else its default on the device of this
        process."""
        train = self.train
        if train.dtype is not None or train.float8 is not None or train.device == "cpu":
            return train.dtype or ("float32" if train.float8 is None else "bfloat16")
        import torch  # planning reads settings without it

        if train.device == "cuda" or torch.cuda.is_available():
            return "bfloat16"
        return "float32"

    @property
    def pipeline(self) -> Pipeline:
        """Pipeline that micro-batches run through; one stage without pipeline parallelism."""
        parallel = self.parallel
        return Pipeline(parallel.pipeline_parallel_size, parallel.pipeline_chunks)

    @property
    def padding(self) -> int:
        """Multiple to which the tokens per rank of every micro-batch are padded."""
        float8 = 1 if self.train.float8 is None else FLOAT8_ROWS
        return math.lcm(self.parallel.tensor_parallel_size, float8)

    @property
    def schedule_steps(self) -> int:
        """Steps over which the learning rate decays."""
        return self.optimizer.decay_steps or self.train.steps

    @property
    def bias_rate(self) -> float:
        """How far the biases of experts move per step: `balance.bias_rate`, or else its default."""
        default = 0.0 if self.model.from_pretrained is not None else 0.001
        if self.balance.bias_rate is None:
            return default
        return self.balance.bias_rate

    def compiles(self, device: str, spec: ModelSpec | None = None) -> bool:
        """Returns whether blocks of a model are compiled on a device of type `device`:
        `train.compile`, or else its default."""
        if self.train.compile is not None:
            return self.train.compile
        if device != "cuda":
            return False
        if spec is not None and not spec.compiled_by_default:
            return False
        # Tiles would compile every block again for every number of tiles.
        return self.parallel.tensor_parallel_size == 1 and self.train.mlp_tile_tokens is None

    def domain(self, world_size: int) -> int:
        """Returns N, the number of ranks in the domain of a run on `world_size` processes."""
        return world_size // (
            self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size
        )

    @property
    def order_seed(self) -> int:
        """Seed of the order of documents."""
        if self.data.seed is None:
            return self.train.seed
        return self.data.seed

    def max_length(self, world_size: int) -> int:
        """Returns the maximum document length in tokens on `world_size` processes:
        `data.max_length`, or else `capacity`."""
        return self.data.max_length or self.capacity(world_size)

    def capacity(self, world_size: int) -> int:
        """Returns the tokens of the longest document that `world_size` processes can hold in
        `context.mode`."""
        domain = self.domain(world_size)
        context = self.context
        if context.mode == "static" and context.degree is not None:
            degree = context.degree
        else:
            degree = domain
        longest = longest_document(min(degree, domain), self.batch.tokens_per_rank)
        if context.mode == "bins" and context.bins:
            longest = min(longest, max(context.bins))
        if self.objective.is_diffusion:  # with a noisy copy
            return longest // 2
        return longest

    def to_yaml(self) -> str:
        """Returns every setting with its value as YAML; `load` reads it back as an equal Config."""
        values = {section: getattr(self, section).written() for section in SECTIONS}
        return yaml.safe_dump(values, sort_keys=False)


def _replaced(model: Any, path: list[str], value: Any) -> Any:
    """Returns a copy of a model of pydantic with another value where a path of names leads to."""
    key, *rest = path
    if rest:
        value = _replaced(getattr(model, key), rest, value)
    return model.model_copy(update={key: value})


SECTIONS: dict[str, type[settings.Section]] = {
    name: type(field.default)
    for name, field in Config.model_fields.items()
    if isinstance(field.default, settings.Section)
}
"""Sections by name."""
