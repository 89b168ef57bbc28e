"""Dry run: the verdict on a run first, then its model, documents, first steps and memory by part.

Needs no processes, GPUs or run folder; free memory, kernel and run folder are checked on the
machine of the run. Lengths of documents, from a file or a mix, can stand in for data that nobody
has prepared yet.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from longctx.commands.lengths import lengths_given, read_lengths
from longctx.comparison.mixes import load_mix
from longctx.config import Config
from longctx.data.sampler import Sampler
from longctx.data.store.manifest import how_to_prepare
from longctx.data.store.store import Lengths, Store
from longctx.errors import UserError, raise_together
from longctx.hf.source import ModelSource, lines_on
from longctx.memory.fitting import RunMemory
from longctx.memory.verdict import STEPS, PredictedRun, predict
from longctx.parallel.device import assumed, choose_device
from longctx.planning.cost.published_errors import kind_of, said
from longctx.planning.plan import Plan
from longctx.training.checks import checks_of
from longctx.training.data import (
    RunData,
    first_plans,
    mix_lines,
    steps_of_epochs,
    steps_of_run,
    with_steps,
)
from longctx.training.run_profile import run_profile
from longctx.units import format_bytes, format_count

DRAWN = 10_000
"""Documents that are drawn from a mix, or more if they are fewer than STEPS steps."""


def stand_in_store(arguments: argparse.Namespace, config: Config) -> Store | None:
    """Returns documents with the lengths of --lengths or --mix, None without these options.

    Raises UserError if the vocabulary is not known, or if the settings need tokens.
    """
    if not lengths_given(arguments):
        return None
    if config.data.merge_prefixes:
        raise UserError(
            "data.merge_prefixes is true, which needs tokens, but only lengths are given: omit it, "
            "or give a store"
        )
    if config.objective.is_diffusion:
        raise UserError(
            "objective.name is block_diffusion, which needs tokens to mask, but only lengths are "
            "given: give a store"
        )
    vocabulary = vocabulary_of(config)
    if vocabulary is None:
        raise UserError(
            f"model.vocab_size is null, model.preset {config.model.preset} has no published "
            "vocabulary, and lengths have no tokenizer: set --model.vocab_size"
        )
    if arguments.lengths is not None:
        path: Path = arguments.lengths
        lengths = Store.open(path).lengths.tolist() if path.is_dir() else read_lengths(path)
        return Lengths(lengths, str(path), vocabulary)
    lengths = []
    count = DRAWN // 2
    while sum(lengths) < STEPS * config.batch.global_tokens or len(lengths) < DRAWN:
        count *= 2
        lengths = load_mix(arguments.mix).draw(count, config.order_seed)
    return Lengths(lengths, f"{len(lengths):,} documents of the mix {arguments.mix}", vocabulary)


def dry_run(config: Config, ranks: int, lengths: Store | None = None) -> None:
    """Prints a summary of the run and one line for each of its first steps; `lengths` stand in for
    the store.

    Raises UserError for settings and stores that the run would reject.
    """
    data = _run_data(config, lengths)
    store = data.store
    source = config.model_source(data.vocab_size)
    config = with_steps(config, store, ranks)
    raise_together(checks_of(config, data, source, ranks))
    of_run = RunMemory(source.spec, store, ranks, on_gpus(config))
    run = predict(config, of_run, store)
    static = list(first_plans(run.config, store, ranks, len(run.plans), static=True))
    print("\n".join(run.lines()))
    print("\n".join(_run_summary(run.config, ranks, source=source, data=data)))
    print(
        "step  documents     tokens  micro-batches  predicted   gap  idle  exposed  best static    "
        "        degrees × documents"
    )
    for number, plan in enumerate(run.plans):
        print(_step_line(number + 1, plan, static[number]))
    parts = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}"
        for name, size in run.memory.parts.items()
        if size
    )
    print(f"memory     at {run.memory.moment}: {parts}")
    print("\n".join(_run_lines(run, store, ranks, static)))
    if of_run.fused:
        kind = kind_of(source.spec, float8=config.train.float8 is not None)
        print(f"errors     {said('time', kind)}", f"           {said('memory', kind)}", sep="\n")


def vocabulary_of(config: Config) -> int | None:
    """Returns the entries of the model's embedding where no store is known; None if nobody has
    published them."""
    if config.model.from_pretrained is None:
        return config.model.published_vocabulary
    return config.model_source().spec.vocab_size or config.model.vocab_size


def _run_data(config: Config, lengths: Store | None) -> RunData:
    """Opens the store of the run, or takes `lengths` in its place."""
    if lengths is not None:
        return RunData(lengths)
    missing = [path for path in config.data.paths if not path.exists()]
    if missing:
        raise UserError(
            f"there is no store at {missing[0]}: make one with {how_to_prepare(missing[0])}; or "
            "plan without data, by --mix wlb_128k or --lengths FILE"
        )
    return RunData.open(config)


def _run_summary(
    config: Config, ranks: int, *, source: ModelSource, data: RunData
) -> Iterator[str]:
    """Yields the lines on processes, model, documents, mixture and profile."""
    store = data.store
    pretrained = config.model.from_pretrained
    weights = "new weights" if pretrained is None else f"from checkpoint {pretrained}"
    most = config.max_length(ranks)
    longest = data.longest
    if longest > most:
        # With conversations among them, planning refuses.
        fitting = f"longer ones: {config.data.long_documents or 'split'}"
    else:
        fitting = f"the longest has {longest:,}"
    yield f"dry run on {ranks} ranks{assumed(config.train.device)}"
    yield f"model      {format_count(source.spec.parameters)} parameters, {weights}"
    yield from lines_on(source, pretrained, min(most, longest))
    yield f"documents  at most {most:,} tokens ({fitting}), from {store.description}"
    yield from mix_lines(config, steps_of_run(config, store, ranks), config.train.steps)
    yield from run_profile(config, ranks, store.tokenizer.vocab_size).lines


def _step_line(number: int, plan: Plan, static: Plan) -> str:
    """Returns the row of the table on one step, and on the same at the best static degree."""
    degrees = " ".join(f"{degree}×{count}" for degree, count in plan.degrees.items())
    row = (
        f"{number:4}  {len(plan.lengths):9,}  {sum(plan.lengths):9,}  "
        f"{len(plan.micro_batches):13}  {plan.makespan_s:7.3f} s  {plan.gap:4.1%}  "
        f"{plan.idle_share:4.1%}  {plan.exposed_share:7.1%}  {static.makespan_s:7.3f} s "
        f"({static.winner})"
    )
    return f"{row:101}  {degrees}"


def _run_lines(
    run: PredictedRun, store: Store, ranks: int, static: Sequence[Plan]
) -> Iterator[str]:
    """Yields the steps of the run and of an epoch of one store, and what degrees gain."""
    steps = steps_of_run(run.config, store, ranks)
    epoch = ""
    if isinstance(steps, Sampler):
        epoch = (
            f" (an epoch has {steps_of_epochs(1.0, steps):,}, of {store.tokens_in_all:,} tokens)"
        )
    yield (
        f"run        {run.config.train.steps:,} steps{epoch}, times as of the steps above, "
        "without validation and checkpoints"
    )
    ours = sum(plan.makespan_s for plan in run.plans)
    saved = 1 - ours / sum(plan.makespan_s for plan in static)
    if saved >= 0.005:
        gain = (
            f"steps take {saved:.0%} less time than with one degree for all documents of a step, "
            "the best for each step"
        )
    else:
        gain = "none: one degree for all documents of a step would be as fast"
    yield f"gain       {gain}"


def on_gpus(config: Config) -> bool:
    return choose_device(config.train.device, 0).type == "cuda"
