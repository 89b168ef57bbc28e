"""The first steps of a run, known without running it: their documents and their plans."""

from dataclasses import dataclass

from longctx.config import Config
from longctx.data.sampler import Sampler, held_out
from longctx.data.store import Store
from longctx.planning.plan import Plan
from longctx.training.run_profile import run_profile
from longctx.training.setup import make_planner


@dataclass(frozen=True)
class PlannedStep:
    """The plan of a step as configured, and the same step at the best static degree."""

    plan: Plan
    static: Plan


def step_lengths(config: Config, store: Store, ranks: int, steps: int) -> list[list[int]]:
    """The lengths of the documents of the first steps of a run on `ranks` processes."""
    sampler = Sampler(
        store.lengths,
        global_tokens=config.batch.global_tokens,
        seed=config.train.seed,
        max_length=config.max_length(ranks),
        long_documents=config.data.long_documents,
        name=store.name,
        left_out=held_out(store.names, config.data.held_out) if config.data.held_out else None,
        pairs=store.pairs,
    )
    return sampler.first_lengths(steps)


def plan_steps(config: Config, store: Store, ranks: int, steps: int) -> list[PlannedStep]:
    """Plans the first steps of a run on `ranks` processes."""
    domain, profile = config.domain(ranks), run_profile(config, ranks, store.tokenizer.vocab_size).profile
    configured, static = make_planner(config, domain, profile), make_planner(config, domain, profile, static=True)
    return [PlannedStep(configured(lengths), static(lengths)) for lengths in step_lengths(config, store, ranks, steps)]
