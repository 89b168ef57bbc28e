"""First steps of a run, computed without running it: documents and plans."""

from dataclasses import dataclass

from longctx.config import Config
from longctx.data.mixture import Mixture, make_steps
from longctx.data.sampler import Steps, first_lengths
from longctx.data.store import Store
from longctx.planning.plan import Plan
from longctx.training.data import make_planner
from longctx.training.run_profile import run_profile


@dataclass(frozen=True)
class PlannedStep:
    """Plans of one step: as configured, and at the best static degree."""

    plan: Plan
    static: Plan


def steps_of_run(config: Config, store: Store, ranks: int) -> Steps:
    """Returns the documents of every step of a run on `ranks` processes."""
    return make_steps(
        store,
        global_tokens=config.batch.global_tokens,
        seed=config.train.seed,
        max_length=config.max_length(ranks),
        long_documents=config.data.long_documents,
        held_out_share=config.data.held_out,
        masked=config.masked.share is not None,
    )


def step_lengths(config: Config, store: Store, ranks: int, steps: int) -> list[list[int]]:
    """Returns the document lengths of the first `steps` steps of a run on `ranks` processes."""
    return first_lengths(steps_of_run(config, store, ranks), steps)


def mix_lines(config: Config, steps: Steps, count: int) -> list[str]:
    """Returns one line per store on its share of `count` steps; no lines for a single store."""
    return steps.lines(count * config.batch.global_tokens) if isinstance(steps, Mixture) else []


def plan_steps(config: Config, store: Store, ranks: int, steps: int) -> list[PlannedStep]:
    """Plans the first `steps` steps of a run on `ranks` processes."""
    domain, profile = config.domain(ranks), run_profile(config, ranks, store.tokenizer.vocab_size).profile
    configured, static = make_planner(config, domain, profile), make_planner(config, domain, profile, static=True)
    return [PlannedStep(configured(lengths), static(lengths)) for lengths in step_lengths(config, store, ranks, steps)]
