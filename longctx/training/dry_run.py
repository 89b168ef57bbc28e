"""Dry run: everything that `train` checks, and the plans of some steps, without processes, GPUs or a run folder."""

from dataclasses import dataclass
from itertools import islice

from rich.console import Console
from rich.table import Table

from longctx.config import Config
from longctx.data.sampler import Sampler
from longctx.data.store import Store
from longctx.planning.plan import Plan
from longctx.training.checks import check_store
from longctx.training.setup import make_planner

STEPS = 5


@dataclass(frozen=True)
class PlannedStep:
    """The plan of a step as configured, and the same step at the best static degree."""

    plan: Plan
    static: Plan


def plan_steps(config: Config, store: Store, ranks: int, steps: int) -> list[PlannedStep]:
    """Plans the first steps of a run on `ranks` processes."""
    domain = config.domain(ranks)
    sampler = Sampler(
        store.lengths,
        global_tokens=config.batch.global_tokens,
        seed=config.train.seed,
        max_length=config.max_length(ranks),
        long_documents=config.data.long_documents,
        name=store.name,
    )
    configured, static = make_planner(config, domain), make_planner(config, domain, static=True)
    planned, cursor = [], 0
    for _ in range(steps):
        pieces, cursor = sampler.step(cursor)
        lengths = [piece.length for piece in pieces]
        planned.append(PlannedStep(configured(lengths), static(lengths)))
    return planned


def dry_run(config: Config, ranks: int) -> None:
    """Prints the shape of the run and a line for each of its first steps. Raises what the run itself would refuse."""
    store = Store.open(config.data.store)
    check_store(config, store)
    shape = config.model.shape(store.tokenizer.vocab_size)
    console = Console()
    planned = plan_steps(config, store, ranks, min(STEPS, config.train.steps))
    states_gib = 16 * shape.parameters() / ranks / 2**30
    console.print(
        f"[bold]dry run[/bold] on {ranks} ranks: {shape.parameters() / 1e9:.3f}B parameters; weights, gradients and two moments "
        f"in float32 take {states_gib:.2f} GiB a rank; documents of up to {config.max_length(ranks):,} tokens "
        f"(longer ones: {config.data.long_documents}); profile {config.context.profile}",
        highlight=False,
    )
    table = Table(
        "step", "documents", "tokens", "micro-batches", "degrees", "predicted", "gap", "idle", "exposed", "best static"
    )
    for number, step in enumerate(islice(planned, STEPS), start=1):
        plan = step.plan
        table.add_row(
            str(number),
            f"{len(plan.lengths):,}",
            f"{sum(plan.lengths):,}",
            str(len(plan.micro_batches)),
            " ".join(f"{degree}×{count}" for degree, count in plan.degrees.items()),
            f"{plan.makespan_s:.3f} s",
            f"{plan.gap:.1%}",
            f"{plan.idle_share:.1%}",
            f"{plan.exposed_share:.1%}",
            f"{step.static.makespan_s:.3f} s ({step.static.winner})",
        )
    console.print(table)
    ours, static = (sum(getattr(step, which).makespan_s for step in planned) for which in ("plan", "static"))
    console.print(
        f"mode {config.context.mode}: {static / ours:.2f}× as fast as the best static degree, by the cost model",
        highlight=False,
    )
