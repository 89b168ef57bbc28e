"""Config: all settings of a run, by section, and what follows from them."""

from bisect import bisect_right
from itertools import accumulate

import yaml
from pydantic import BaseModel, ConfigDict, Field

from longctx.config.problems import plain
from longctx.config.settings import (
    BatchSection,
    CheckpointSection,
    ContextSection,
    DataSection,
    DpoSection,
    EvalSection,
    LogSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    Section,
    TrainSection,
)
from longctx.config.stages import Stage, laid_over
from longctx.model.source import ModelSource, NewDecoder, adapted, pretrained
from longctx.planning.cost.pipeline import Pipeline
from longctx.planning.layout import longest_document


class Config(BaseModel):
    """All settings of a run. Made by `longctx.config.load`, which also checks what spans several settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    dpo: DpoSection = DpoSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    context: ContextSection = ContextSection()
    parallel: ParallelSection = ParallelSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    stages: tuple[Stage, ...] = Field(
        (),
        description="parts of the run, one after the other, with settings of their own in place of the run's: [{steps: 900}, "
        "{steps: 100, data: {max_length: 32768}, model: {rope_theta: 1.0e+6}}, ..]. train.steps is their sum, and the learning "
        "rate follows the whole run. A stage may replace settings of batch and context, model.rope_*, the stores, max_length "
        "and long_documents of data, and what saves memory: reshard_after, reduce_after, recompute, mlp_tile_tokens and "
        "offload_activations. A store whose documents are not cut at another length goes on where it stopped; another one, "
        "and one that is read alone in one stage and in a mix in the other, begins its next epoch",
    )

    def at_stage(self, number: int) -> "Config":
        """The settings of a stage, counted from 0, or from -1 backwards; those of a run without stages are the same."""
        if not self.stages:
            return self
        return Config.model_validate(laid_over(self.model_dump(), self.stages[number].model_dump()))

    @property
    def stage_ends(self) -> list[int]:
        """How many steps are done at the end of every stage; a run without stages is one."""
        return list(accumulate(stage.steps for stage in self.stages)) or [self.train.steps]

    def steps_of(self, stage: int) -> int:
        """How many steps a stage has."""
        return self.stage_ends[stage] - (self.stage_ends[stage - 1] if stage else 0)

    def stage_after(self, step: int) -> int:
        """The stage that goes on when so many steps are done, the last one when all are."""
        return min(bisect_right(self.stage_ends, step), len(self.stage_ends) - 1)

    def model_source(self, vocab_size: int | None = None) -> ModelSource:
        """Where the model comes from; `vocab_size` is that of the store's tokenizer, as far as one is known.

        Raises ConfigError if the sizes do not fit together, PretrainedError for a checkpoint that cannot be used.
        """
        if self.model.from_pretrained is None:
            return NewDecoder(self.model.sizes() if vocab_size is None else self.model.shape(vocab_size))
        split = self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size > 1
        if self.lora.adapters is not None:
            return adapted(self.model.from_pretrained, self.model.changed_rope, self.lora.adapters, self.train.dtype)
        return pretrained(self.model.from_pretrained, self.model.changed_rope, self.model.implementation, split)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that micro-batches go through; of one stage if there is none."""
        parallel = self.parallel
        return Pipeline(parallel.pipeline_parallel_size, parallel.pipeline_chunks, parallel.pipeline_schedule)

    def domain(self, world_size: int) -> int:
        """N, the ranks of the domain in a world of `world_size` processes."""
        return world_size // (self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size)

    def max_length(self, world_size: int) -> int:
        """Tokens of the longest document that a run on `world_size` processes takes: `data.max_length`, or what fits."""
        return self.data.max_length or self.capacity(world_size)

    def capacity(self, world_size: int) -> int:
        """Tokens of the longest document that `world_size` processes can hold in this mode."""
        domain, context = self.domain(world_size), self.context
        degree = context.degree if context.mode == "static" and context.degree is not None else domain
        longest = longest_document(min(degree, domain), self.batch.tokens_per_rank)
        return min(longest, max(context.bins)) if context.mode == "bins" and context.bins else longest

    def to_yaml(self) -> str:
        """Every setting with its value; `load` reads it back as an equal Config."""
        return yaml.safe_dump(plain(self.model_dump()), sort_keys=False)


SECTIONS: dict[str, type[Section]] = {
    name: type(field.default) for name, field in Config.model_fields.items() if isinstance(field.default, Section)
}
"""The class of every section."""
