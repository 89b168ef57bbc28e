"""Rules on float8 and fused operations."""

import importlib.util
from collections.abc import Iterator

from longctx.config.problems import Problem
from longctx.config.run import FLOAT8_ROWS, Config
from longctx.errors import install


def float8_rules(config: Config) -> Iterator[Problem]:
    """Checks that float8 is supported with the other settings."""
    recipe, train, parallel = config.train.float8, config.train, config.parallel
    if recipe is None:
        return
    if importlib.util.find_spec("torchao") is None:
        rule = "float8 needs torchao, which is not installed"
        yield Problem("train.float8", recipe, rule, f"{install('gpu')}, or omit it")
    if train.dtype == "float32":
        rule = f"everything but the linear layers must be in bfloat16, but train.dtype is {train.dtype}"
        yield Problem("train.float8", recipe, rule, "set train.dtype to bfloat16, or omit it", ("train.dtype",))
    if parallel.tensor_parallel_size > 1:
        rule = "not supported with tensor parallelism, where each rank would scale its part of a tensor differently"
        fix = "set parallel.tensor_parallel_size to 1, or omit it"
        yield Problem("train.float8", recipe, rule, fix, ("parallel.tensor_parallel_size",))
    if parallel.pipeline_parallel_size > 1 and parallel.pipeline_schedule == "zero-bubble":
        rule = "schedule zero-bubble computes weight gradients apart, which torchao's layers do not support"
        yield Problem("train.float8", recipe, rule, "use schedule 1f1b, or omit it", ("parallel.pipeline_schedule",))
    if config.lora.rank is not None:
        rule = "not supported with LoRA, whose base weights are frozen"
        yield Problem("train.float8", recipe, rule, "omit one of the two settings", ("lora.rank",))
    for key, tokens in (
        ("batch.tokens_per_rank", config.batch.tokens_per_rank),
        ("train.mlp_tile_tokens", train.mlp_tile_tokens or 0),
    ):
        if tokens % FLOAT8_ROWS:
            rule = f"float8 products need a multiple of {FLOAT8_ROWS} tokens, to which the tokens of each rank are padded"
            fix = f"set it to {tokens + -tokens % FLOAT8_ROWS}, or omit train.float8"
            yield Problem(key, tokens, rule, fix, ("train.float8",))


def fused_rules(config: Config) -> Iterator[Problem]:
    """Checks that fused operations are installed and supported with the other settings."""
    if not config.train.fused:
        return
    if importlib.util.find_spec("liger_kernel") is None:
        rule = "fused operations need liger-kernel, which is not installed"
        yield Problem("train.fused", True, rule, f"{install('gpu')}, or omit it")
    if config.train.compile:
        rule = "compiled blocks fuse these operations themselves"
        yield Problem("train.fused", True, rule, "omit one of the two settings", ("train.compile",))
    if config.splits_blocks:
        rule = "not supported with tensor parallelism, nor with schedule zero-bubble"
        others = ("parallel.tensor_parallel_size", "parallel.pipeline_schedule")
        yield Problem("train.fused", True, rule, "omit it", others)
