"""Data of a run: its stores, opened once, the length of its documents, planner, loader and first
steps."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from longctx.config import Config, ConfigError
from longctx.data.diffusion import Noise, noise_pieces
from longctx.data.loader import Loader, Merging, Planner, merge_pieces, plan_step
from longctx.data.mixture import Mixture, Order, Steps, make_steps
from longctx.data.orders import ORDER
from longctx.data.position import order_of
from longctx.data.sampler import Sampler
from longctx.data.store.cache import Cache
from longctx.data.store.store import Store
from longctx.parallel.mesh import Mesh
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from longctx.training.run_profile import run_profile
from longctx.training.saved.checkpoint import Checkpoint

COUNTED = 1 << 17
"""Documents from which on steps are estimated, as counting them takes long."""


@dataclass(frozen=True)
class RunData:
    """The stores of a run, each opened once.

    Attributes:
        store: documents for training: one store, or several joined.
        validation: store of `eval.store`; None if it is not set, or if nothing is validated.
    """

    store: Store
    validation: Store | None = None

    @classmethod
    def open(cls, config: Config) -> "RunData":
        """Opens the stores. Raises StoreError if one is damaged, or if tokenizers of joined stores
        differ."""
        cache = Cache(config.data.cache_dir, config.data.cache_gib)
        opened = [Store.open(path, cache=cache) for path in config.data.paths]
        validated = config.eval.every is not None and config.eval.store is not None
        if validated and config.eval.store is not None:
            validation = Store.open(config.eval.store, cache=cache)
        else:
            validation = None
        stores = config.data.mix
        if stores is None:
            return cls(opened[0], validation)
        unit = "epochs" if any(store.epochs is not None for store in stores) else "weight"
        return cls(
            Store.join(opened, [store.epochs or store.weight or 0.0 for store in stores], unit),
            validation,
        )

    @property
    def longest(self) -> int:
        return max(store.longest for store in (self.store, self.validation) if store is not None)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprint of every store."""
        return [source.fingerprint for source in self.store.sources]

    @property
    def vocab_size(self) -> int:
        return self.store.tokenizer.vocab_size


def choose_max_length(
    config: Config, world_size: int, resume_from: Checkpoint | None, longest: int | None = None
) -> int:
    """Returns the maximum document length in tokens: `data.max_length`, or that of the checkpoint,
    or what the domain can hold.

    A run that resumes on another number of ranks must see the same documents, so it keeps the
    length of the checkpoint, which may be above what the domain can hold if the `longest` document
    is not (None: unknown). Raises ConfigError otherwise.
    """
    capacity = config.capacity(world_size)
    if config.data.max_length is not None or resume_from is None:
        return config.max_length(world_size)
    previous = int(resume_from.state["data"]["max_length"])
    needed = min(previous, longest or previous)
    if needed > capacity:
        count = f"{world_size} rank" if world_size == 1 else f"{world_size} ranks"
        least = _budget_for(config, needed, world_size)
        if least:
            way_out = f"set it to {least}"
        else:
            way_out = f"give context.bins an entry of {needed} tokens or more"
        raise ConfigError(
            f"{resume_from.folder} was trained on documents of at most {previous} tokens, but "
            f"{count} with batch.tokens_per_rank {config.batch.tokens_per_rank} can hold only "
            f"{capacity}: {way_out}, or start more processes (--processes)"
        )
    return previous


def _budget_for(config: Config, length: int, world_size: int) -> int | None:
    """Returns the least batch.tokens_per_rank at which a document of `length` tokens fits; None if
    it never does."""

    def holds(tokens: int) -> bool:
        return config.changed({"batch.tokens_per_rank": tokens}).capacity(world_size) >= length

    step = config.padding
    budgets = range(0, length + step, step)
    if holds(budgets[-1]):
        return budgets[bisect_left(budgets, True, key=holds)]
    return None


def make_merging(config: Config, world_size: int, store: Store) -> Merging | None:
    """Returns what merges documents of a step that begin alike, or gives all of them noise; None if
    they stay apart. Raises ConfigError for a mask token that is none."""
    objective = config.objective
    if objective.is_diffusion:
        noise = Noise(
            mask_token=mask_token_of(config, store),
            block=objective.block,
            largest_block=objective.largest_block or 0,
            least=objective.least_noise,
            most=objective.most_noise,
            next_token=objective.next_token_weight,
            per_document=objective.per_document,
            seed=config.train.seed,
        )
        return partial(noise_pieces, noise=noise)
    if not config.data.merge_prefixes:
        return None
    return partial(
        merge_pieces,
        most_tokens=config.capacity(world_size),
        tokens_per_rank=config.batch.tokens_per_rank,
    )


def mask_token_of(config: Config, store: Store) -> int:
    """Returns the id of `objective.mask_token`."""
    name = config.objective.mask_token
    if name is None:
        return store.tokenizer.end_of_document
    tokens = store.tokenizer.encode(name, special=True)
    if len(tokens) != 1:
        raise ConfigError(
            f"objective.mask_token is {name!r}, which is {len(tokens)} tokens of the tokenizer of "
            f"{store.description}: name one, or omit it"
        )
    return int(tokens[0])


def validation_noise(config: Config, store: Store) -> Merging | None:
    """Returns what makes documents noisy for validation: with all levels of noise, so that the loss
    is a bound; None if they are not."""
    if not config.objective.is_diffusion:
        return None
    block = config.objective.block
    noise = Noise(mask_token=mask_token_of(config, store), block=block)
    return partial(noise_pieces, noise=noise)


def make_planner(
    config: Config, ranks: int, profile: HardwareProfile, *, static: bool = False
) -> Planner:
    """Makes the planner of `config.context` for a domain of `ranks`; with `static` that of the best
    static degree.

    `profile` must be scaled to the run's model, parallel sizes and exchange, see `run_profile`.
    """
    context = config.context
    spec = config.model_source().spec
    return partial(
        make_plan,
        ranks=ranks,
        tokens_per_rank=config.batch.tokens_per_rank,
        profile=profile,
        mode="static" if static else context.mode,
        degree=None if static else context.degree,
        bins=None if static else context.bins,
        max_remote_tokens=context.max_remote_tokens,
        pipeline=config.pipeline,
        parts=spec.parts,
    )


def build_loader(store: Store, config: Config, mesh: Mesh, max_length: int) -> Loader:
    """Makes the loader of this rank. Collective: raises ProfilesDiffer if ranks have different
    profiles."""
    profile = run_profile(config, mesh.world_size, store.tokenizer.vocab_size).agreed(mesh.control)
    return Loader(
        store,
        rank=mesh.rank,
        ranks=mesh.ranks,
        planner=make_planner(config, mesh.ranks, profile),
        pad_to_multiple_of=config.padding,
        merging=make_merging(config, mesh.world_size, store),
        **_order(config, max_length),
    )


def _order(config: Config, max_length: int, order: str = ORDER) -> Order:
    return {
        "global_tokens": config.batch.global_tokens,
        "seed": config.order_seed,
        "max_length": max_length,
        "long_documents": config.data.long_documents,
        "held_out_share": config.data.held_out,
        "order": order,
    }


def steps_of_run(config: Config, store: Store, ranks: int, order: str = ORDER) -> Steps:
    """Returns the documents of every step of a run on `ranks` processes, by the name of the order
    of its epochs."""
    return make_steps(store, **_order(config, config.max_length(ranks), order))


def steps_of_epochs(epochs: float, steps: Sampler) -> int:
    """Returns the fewest steps that take the documents `epochs` times; of many documents, by the
    steps of the first ones.

    A step has more than its tokens: it takes whole documents.
    """
    pieces = math.ceil(epochs * steps.pieces)
    count = 0
    cursor = steps.start
    while cursor < min(pieces, COUNTED):
        cursor = steps.step(cursor)[1]
        count += 1
    if cursor < pieces:
        count = math.ceil(pieces / cursor * count)
    return count


def with_steps(config: Config, store: Store, ranks: int, begun: Checkpoint | None = None) -> Config:
    """Returns the settings with the steps that `train.epochs` are on `ranks` processes, of a run
    that has `begun` in the order of its checkpoint."""
    if config.train.epochs is None:
        return config
    order = ORDER
    if begun is not None:
        order = order_of(begun.state["data"])
    steps = steps_of_run(config, store, ranks, order)
    assert isinstance(steps, Sampler), "several stores are refused: see the rows of `combinations`"
    return config.changed(
        {"train.steps": steps_of_epochs(config.train.epochs, steps), "train.epochs": None}
    )


def first_plans(
    config: Config, store: Store, ranks: int, steps: int, *, static: bool = False
) -> Iterator[Plan]:
    """Yields the plans of the first `steps` steps of a run on `ranks` processes; with `static` at
    the best static degree."""
    profile = run_profile(config, ranks, store.tokenizer.vocab_size).profile
    planner = make_planner(config, config.domain(ranks), profile, static=static)
    merging = make_merging(config, ranks, store)
    steps_of = steps_of_run(config, store, ranks)
    cursor = steps_of.start
    for _ in range(steps):
        pieces, cursor = steps_of.step(cursor)
        yield plan_step(store, pieces, planner, merging)[0]


def mix_lines(config: Config, steps: Steps, count: int) -> list[str]:
    """Returns one line per store on its share of `count` steps; no lines for a single store."""
    if isinstance(steps, Mixture):
        return steps.lines(count * config.batch.global_tokens)
    return []


@dataclass(frozen=True)
class StepPlans:
    plan: Plan
    static: Plan


def plan_steps(config: Config, store: Store, ranks: int, steps: int) -> list[StepPlans]:
    """Plans the first steps of a run: as configured, and with the best degree for all documents."""
    configured = first_plans(config, store, ranks, steps, static=False)
    static = first_plans(config, store, ranks, steps, static=True)
    return [StepPlans(plan, best) for plan, best in zip(configured, static, strict=True)]
