"""Rules on mixtures of experts."""

from collections.abc import Iterator

from longctx.config.problems import Problem
from longctx.config.run import Config
from longctx.model.options import ROUTERS, WITH_BIAS
from longctx.model.presets import EXPERT_OPTIONS
from longctx.model.spec import ModelSpec
from longctx.planning.layout import divisors


def expert_rules(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    """Checks that experts can be split over ranks, and that settings for experts have some."""
    parallel, experts = config.parallel, spec.largest_layer.experts
    expert, tensor = parallel.expert_parallel_size, parallel.tensor_parallel_size
    others = ("model.num_experts", "parallel.tensor_parallel_size")
    if not experts:
        yield from _without_experts(config)
        return
    rule = f"{experts} experts cannot be split evenly over {expert} × {tensor} expert and tensor parallel ranks"
    if experts % tensor:
        fix = f"set it to {_listed(divisors(experts))}"
        yield Problem("parallel.tensor_parallel_size", tensor, rule, fix, (others[0], "parallel.expert_parallel_size"))
    elif experts % (expert * tensor):
        yield Problem(
            "parallel.expert_parallel_size", expert, rule, f"set it to {_listed(divisors(experts // tensor))}", others
        )
    if expert * tensor == 1 and parallel.expert_max_load != type(parallel).model_fields["expert_max_load"].default:
        rule = "has no effect, as experts are not split over ranks"
        yield Problem("parallel.expert_max_load", parallel.expert_max_load, rule, "omit it", ("parallel.expert_parallel_size",))
    if config.balance.bias_rate and not _has_bias(config):
        rule = "has no effect: the router has no bias"
        yield Problem("balance.bias_rate", config.balance.bias_rate, rule, "omit it, or set model.router_bias", others[:1])
    if config.train.float8 is not None:
        rule = "float8 is not supported for mixtures of experts"
        yield Problem("train.float8", config.train.float8, rule, "omit it", others[:1])
    if config.train.compile:
        rule = "blocks with experts cannot be compiled: their numbers of rows depend on data"
        yield Problem("train.compile", True, rule, "omit it, or set it to false", others[:1])


def _without_experts(config: Config) -> Iterator[Problem]:
    """Checks the settings of a model without experts, or of one that transformers' own code runs."""
    model, expert = config.model, config.parallel.expert_parallel_size
    if expert > 1:
        rule = "only applies to mixtures of experts, and this model is none"
        yield Problem(
            "parallel.expert_parallel_size", expert, rule, "omit it, or set model.num_experts", ("model.num_experts",)
        )
    if model.from_pretrained is None:
        for name in sorted(EXPERT_OPTIONS & model.model_fields_set):
            if (value := getattr(model, name)) is not None:
                rule = "only applies to mixtures of experts, and this model is none"
                yield Problem(f"model.{name}", value, rule, "omit it, or set model.num_experts", ("model.num_experts",))
    given = {f"balance.{name}": value for name, value in config.balance if value}
    if not given:
        return
    kind = _kind_of_checkpoint(config)
    if kind in ROUTERS:
        yield from _watched(config, kind, *next(iter(given.items())))
        return
    which = "this model is none" if kind is None else f"model_type {kind} is not one of {', '.join(ROUTERS)}"
    for key, value in given.items():
        rule = f"only applies to mixtures of experts, and {which}"
        yield Problem(key, value, rule, "omit it", ("model.num_experts",) if model.from_pretrained is None else ())


def _watched(config: Config, kind: str, key: str, value: float) -> Iterator[Problem]:
    """Checks that routers of transformers' own code can be watched, as the setting `key` wants."""
    train = config.train
    if config.lora.rank is not None:
        yield Problem(
            key, value, "not supported with LoRA, which freezes routers", "omit it, or omit lora.rank", ("lora.rank",)
        )
    if train.compile:
        rule = "blocks of checkpoints whose routers are watched cannot be compiled"
        yield Problem("train.compile", True, rule, f"set it to false, or omit {key}", (key,))
    if train.mlp_tile_tokens is not None:
        rule = "routers that are watched cannot run in tiles in transformers' own code"
        yield Problem("train.mlp_tile_tokens", train.mlp_tile_tokens, rule, f"omit it, or omit {key}", (key,))
    if config.balance.bias_rate and kind not in WITH_BIAS:
        rule = f"has no effect: routers of {kind} have no bias"
        yield Problem("balance.bias_rate", config.balance.bias_rate, rule, "omit it")


def _kind_of_checkpoint(config: Config) -> str | None:
    """Returns the model type of the initial checkpoint; None for a new model."""
    files = config.model_source().files
    return None if files is None else str(files.config.get_text_config().model_type)


def expert_mesh_rules(config: Config, world_size: int) -> Iterator[Problem]:
    """Checks that the expert parallel size divides the ranks that share a copy of the weights."""
    expert, domain = config.parallel.expert_parallel_size, config.domain(world_size)
    own = config.parallel.shard_ranks
    shards = own or domain
    if shards % expert:
        what = "parallel.shard_ranks" if own else "the number of ranks in the domain"
        more = f"set parallel.shard_ranks to a multiple of {expert}" if own else "start more processes"
        fix = f"set it to a divisor of {shards} that divides the experts, or {more}"
        yield Problem("parallel.expert_parallel_size", expert, f"must divide {what}, {shards}", fix)


def _has_bias(config: Config) -> bool:
    """Returns whether the routers of the native decoder have a bias; no family of checkpoints that it runs has one."""
    return config.model.from_pretrained is None and config.model.sizes().router_bias


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
