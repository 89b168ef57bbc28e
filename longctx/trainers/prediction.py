"""Prediction of training inside TRL, by the config of a checkpoint: `longctx estimate --trl`.

Settings are those of a run like the trainer's (`longctx.trainers.budget`), whose memory is not
changed by itself: what is not sharded and not recomputed there stays so.
"""

from dataclasses import dataclass
from typing import Literal

from longctx.config import Config
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.memory.fitting import ROOM, RunMemory
from longctx.memory.verdict import STEPS, Verdict, degrees_of, longest_documents, verdict_of
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.layout import longest_document
from longctx.trainers.budget import UNIT, RankNeeds
from longctx.training.data import first_plans, with_steps
from longctx.training.described import RunProfile
from longctx.training.run_profile import scaled_profile

Sharding = Literal["ddp", "fsdp2"]
NAMES: dict[Sharding, str] = {"ddp": "DDP", "fsdp2": "FSDP2"}
FSDP2 = "FSDP2 (--trl fsdp2)"
ADAPTERS = "adapters (--lora.rank 16)"
ALWAYS = "more GPUs or shorter documents (--data.max_length)"


@dataclass(frozen=True)
class PredictedTrainer:
    """Training inside TRL as it would start.

    Attributes:
        config: settings of a run like the trainer's, with its tokens per rank.
        named: hardware profile, scaled to the model.
        documents: those that its steps are drawn from.
        verdict: the sum of it.
        sharding: of its weights.
    """

    config: Config
    named: RunProfile
    documents: Store
    verdict: Verdict
    sharding: Sharding

    def lines(self) -> list[str]:
        """Returns the verdict, and what would make the run fit if it does not."""
        lines = [self.verdict.line()]
        if not self.verdict.fits:
            lines.append(self._ways_out())
        return lines

    def _ways_out(self) -> str:
        ways = []
        if self.sharding != "fsdp2":
            ways.append(FSDP2)
        if self.config.lora.rank is None:
            ways.append(ADAPTERS)
        ways.append(ALWAYS)
        return f"use {', '.join(ways)}"


def predict_trl(
    given: Config, spec: ModelSpec, documents: Store | None, ranks: int, sharding: Sharding
) -> PredictedTrainer:
    """Predicts TRL's trainer of sequences after `dynamic_context_parallel`, in bfloat16 on GPUs.

    `documents` None: all of the maximum length. Without batch.tokens_per_rank it has what memory
    holds, or what the longest document needs. Raises UserError for settings that trainers lack.
    """
    config = _as_trainer(given, ranks, sharding)
    on_gpus = config.train.device == "cuda"
    of_run = RunMemory(spec, documents, ranks, on_gpus)
    named = scaled_profile(config, spec, ranks, queries_first=True)
    needs = RankNeeds(
        spec,
        config.changed({"data.max_length": None}),  # a rank may hold more than a document needs
        profile=named.profile,
        ranks=ranks,
        device=config.train.device,
        logits="tile",
    )
    tokens = given.batch.tokens_per_rank
    if "tokens_per_rank" not in given.batch.model_fields_set:
        available = of_run.available(config)[0] or 0
        most = needs.most_tokens(int(ROOM * available))
        tokens = max(most, _least_tokens(config, documents, ranks))
    config = config.changed({"batch.tokens_per_rank": tokens})
    if documents is None:
        vocabulary = spec.vocab_size or 0
        documents = longest_documents(config, ranks, vocabulary)
    else:
        config = with_steps(config, documents, ranks)
    steps = min(STEPS, config.train.steps)
    plans = list(first_plans(config, documents, ranks, steps))
    words = [NAMES[sharding]]
    if config.train.recompute == "full":
        words.append("gradient checkpointing")
    words += [f"{tokens:,} tokens per rank", degrees_of(plans)]
    needed = needs.bytes(tokens)
    verdict = verdict_of(config, of_run, plans=plans, needed=needed, chosen=", ".join(words))
    return PredictedTrainer(config, named, documents=documents, verdict=verdict, sharding=sharding)


def _as_trainer(given: Config, ranks: int, sharding: Sharding) -> Config:
    """Returns the settings of a run like the trainer's. Raises UserError."""
    parallel = given.parallel
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if getattr(parallel, name) > 1:
            raise UserError(
                f"parallel.{name} is {getattr(parallel, name)}, but trainers of TRL do not split "
                "the model so: omit it, or omit --trl"
            )
    recompute = "full"  # SFTConfig's default
    if "recompute" in given.train.model_fields_set:
        recompute = given.train.recompute
    if recompute not in ("none", "full"):
        raise UserError(
            f"train.recompute is {recompute}, but gradient_checkpointing of trainers is full or "
            "none: give one of the two, or omit --trl"
        )
    long_documents = "error"
    if given.data.max_length is not None:  # at which TRL cuts documents
        long_documents = "truncate_right"
    shard_ranks = ranks
    if sharding == "ddp":
        shard_ranks = 1
    return given.changed(
        {
            "data.long_documents": long_documents,
            "parallel.shard_ranks": shard_ranks,
            "train.recompute": recompute,
            "train.compile": False,
            "train.fit_memory": False,
        }
    )


def _least_tokens(config: Config, documents: Store | None, ranks: int) -> int:
    """Returns the fewest tokens per rank, in units, that hold the longest document."""
    longest = config.data.max_length or 1
    if documents is not None:
        known = documents.longest
        longest = min(known, config.data.max_length or known)
    tokens = UNIT
    while longest_document(ranks, tokens) < longest:
        tokens += UNIT
    return tokens
