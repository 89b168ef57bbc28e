"""Dry run: checks settings and stores, plans the first steps, and predicts time and memory of the run.

Needs no processes, GPUs or run folder; free memory, kernel and run folder are checked on the machine of the run.
"""

from longctx.config import Config
from longctx.data.sampler import Sampler
from longctx.data.store.store import Store
from longctx.hf.source import lines_on
from longctx.memory.advisor import verdict
from longctx.memory.loads import loads
from longctx.memory.model import estimate
from longctx.parallel.device import assumed, choose_device
from longctx.training.checks import check_model, check_vocabulary
from longctx.training.data import RunData, mix_lines, plan_steps, steps_of_epochs, steps_of_run, with_steps
from longctx.training.run_profile import run_profile
from longctx.units import format_bytes, format_count

STEPS = 5


def dry_run(config: Config, ranks: int) -> None:
    """Prints a summary of the run and one line for each of its first steps.

    Raises UserError for settings and stores that the run would reject.
    """
    data = RunData.open(config)
    store, source, config = data.store, config.model_source(data.vocab_size), with_steps(config, data.store, ranks)
    spec, pretrained = source.spec, config.model.from_pretrained
    unset = "refused" if store.partly_trained.any() else "split"
    check_vocabulary(config, spec)
    check_model(config, data, source, ranks)
    print(
        f"dry run on {ranks} ranks{assumed(config.train.device)}\n"
        f"model      {format_count(spec.parameters)} parameters, "
        f"{'new weights' if pretrained is None else f'from checkpoint {pretrained}'}",
        *lines_on(source, pretrained, min(config.max_length(ranks), data.longest)),
        f"documents  at most {config.max_length(ranks):,} tokens (longer ones: {config.data.long_documents or unset}), "
        f"from {config.data.said}",
        *mix_lines(config, steps_of_run(config, store, ranks), config.train.steps),
        *run_profile(config, ranks, store.tokenizer.vocab_size).lines,
        sep="\n",
    )
    planned = plan_steps(config, store, ranks, min(STEPS, config.train.steps))
    print(
        "step  documents     tokens  micro-batches  predicted   gap  idle  exposed  best static            degrees × documents"
    )
    for number, step in enumerate(planned, start=1):
        plan, static = step.plan, step.static
        degrees = " ".join(f"{degree}×{count}" for degree, count in plan.degrees.items())
        print(
            f"{number:4}  {len(plan.lengths):9,}  {sum(plan.lengths):9,}  {len(plan.micro_batches):13}  "
            f"{plan.makespan_s:7.3f} s  {plan.gap:4.1%}  {plan.idle_share:4.1%}  {plan.exposed_share:7.1%}  "
            f"{static.makespan_s:7.3f} s ({static.winner})".ljust(101)
            + f"  {degrees}"
        )
    fused = choose_device(config.train.device, 0).type == "cuda"
    memory = estimate(spec, config, ranks, list(loads((step.plan for step in planned), config)), fused=fused)
    fits, *changes = verdict(spec, config, store, ranks, memory, fused=fused)
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in memory.parts.items() if size)
    print(f"memory     {fits}: {parts}", *changes, sep="\n")
    print(_run_line(config, store, ranks, sum(step.plan.makespan_s for step in planned) / len(planned)))


def _run_line(config: Config, store: Store, ranks: int, step_s: float) -> str:
    """Returns the number of steps of the run, and of an epoch of one store, and the time that they take."""
    count, steps = config.train.steps, steps_of_run(config, store, ranks)
    epoch = f" (an epoch has {steps_of_epochs(1.0, steps):,})" if isinstance(steps, Sampler) else ""
    seconds = count * step_s
    size, unit = (3600, "hours") if seconds > 7200 else (60, "minutes") if seconds > 120 else (1, "seconds")
    took = f"{seconds / size:,.1f} {unit} as predicted for the steps above, without validation and checkpoints"
    return f"run        {count:,} steps{epoch}, {took}"
