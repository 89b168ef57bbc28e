"""Every row of the rules of settings refuses an example."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from longctx import config
from longctx.config import ConfigError, process_rules, rules
from longctx.training.build import sizes_of_groups
from tests.config import test_config
from tests.family_cases import build

MIXTURE = "model.preset=tiny-moe"
IN_8_BITS = ["optimizer.name=adamw-8bit", "parallel.tensor_parallel_size=2"]
IN_FLOAT8 = ["train.float8=rowwise", "train.dtype=bfloat16"]
LLAMA = "model.from_pretrained=llama"
WIDE = [*IN_8_BITS, "model.overrides.hidden_size=1024"]
EXAMPLES: dict[str, tuple[list[str], int | None, str, str]] = {
    "a pattern": (
        ["optimizer.groups=[{match: '('}]"],
        None,
        "optimizer.groups",
        "not a regular expression: missing )",
    ),
    "experts": (
        [MIXTURE, "parallel.expert_parallel_size=3"],
        None,
        "parallel.expert_parallel_size",
        "8 experts cannot be split evenly over 3 × 1",
    ),
    "experts in a domain": (
        [MIXTURE, "parallel.expert_parallel_size=4"],
        6,
        "parallel.expert_parallel_size",
        "must divide the number of ranks in the domain, 6",
    ),
    "experts in a copy": (
        [MIXTURE, "parallel.expert_parallel_size=4", "parallel.shard_ranks=2"],
        4,
        "parallel.expert_parallel_size",
        "must divide parallel.shard_ranks, 2",
    ),
    "processes": ([], 10**7, "the number of processes", "must be at most 1,048,576"),
    "float8": (
        [*IN_FLOAT8, "batch.tokens_per_rank=8200"],
        None,
        "batch.tokens_per_rank",
        "float8 products need a multiple of 16 tokens",
    ),
    "float8 in tiles": (
        [*IN_FLOAT8, "train.mlp_tile_tokens=100"],
        None,
        "train.mlp_tile_tokens",
        "float8 products need a multiple of 16 tokens",
    ),
    "8 bits": (IN_8_BITS, None, "optimizer.name", "has 64 of 128 columns of a parameter"),
    "8 bits of an MLP": (
        [*WIDE, "model.overrides.intermediate_size=4352"],
        None,
        "optimizer.name",
        "has 2176 of 4352 columns of a parameter",
    ),
    "8 bits of a shared expert": (
        [*WIDE, MIXTURE, "model.overrides.shared_expert_intermediate_size=4224"],
        None,
        "optimizer.name",
        "has 2112 of 4224 columns of a parameter",
    ),
    "RoPE": (
        [LLAMA, "model.rope_scaling.rope_type=yarn"],
        None,
        "model.rope_scaling",
        "give a factor greater than 1",
    ),
    "a folder": (
        ["model.from_pretrained=nowhere"],
        None,
        "model.from_pretrained",
        "no folder nowhere",
    ),
    "targets": (
        [LLAMA, "lora.rank=2", "lora.target_modules=[nothing]"],
        None,
        "lora.target_modules",
        "no layer is called nothing",
    ),
    "quantized": (
        ["model.from_pretrained=gpt2", "lora.rank=2", "lora.base=nf4"],
        None,
        "lora.base",
        "GPT2LMHeadModel has no linear layers of torch in its blocks",
    ),
    "latents": (
        ["model.from_pretrained=deepseek_v3", "context.ulysses_degree=2"],
        None,
        "context.ulysses_degree",
        "split documents of this model send latents",
    ),
    "compiled indexers": (
        ["model.from_pretrained=deepseek_v32", "train.compile=true"],
        None,
        "train.compile",
        "indexers select other keys in every micro-batch",
    ),
    "merged prefixes with indexers": (
        ["model.from_pretrained=deepseek_v32", "data.merge_prefixes=true"],
        None,
        "data.merge_prefixes",
        "select keys by their place in one sequence",
    ),
    "epochs of a mix": (
        ["data.store=[{path: a, weight: 3}]", "train.epochs=2"],
        None,
        "train.epochs",
        "stores of a mix have epochs of their own",
    ),
    "tokens of tensor ranks": (
        ["parallel.tensor_parallel_size=2", "batch.tokens_per_rank=8193"],
        None,
        "batch.tokens_per_rank",
        "must be a multiple of 2, to which parallel.tensor_parallel_size pads",
    ),
    "a package": ([LLAMA, "lora.rank=2"], None, "lora.rank", "needs peft, which is not installed"),
}
"""Settings that a rule refuses, on how many processes, at which key, and in which words."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in ("llama", "gpt2", "deepseek_v3", "deepseek_v32"):
        build(family, "eager").save_pretrained(folder / family)
    return folder


@pytest.fixture(autouse=True)
def packages(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that are not installed, for which this test stands in the checkpoints' folder."""
    lacking: set[str] = set()
    find = importlib.util.find_spec

    def found(name: str) -> Any:
        if name in lacking:
            return None
        return name == "torchao" or find(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.chdir(checkpoints)
    return lacking


def refused(overrides: list[str], world_size: int | None) -> dict[str, list[str]]:
    """Returns the texts of all problems of settings by their keys; there must be one."""
    with pytest.raises(ConfigError) as caught:
        config.load(None, [test_config.PROFILE, *overrides], world_size=world_size)
    texts: dict[str, list[str]] = {}
    for problem in caught.value.problems:
        texts.setdefault(problem.key, []).append(str(problem))
    return texts


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_refused_in_words(name: str, packages: set[str]) -> None:
    overrides, world_size, key, words = EXAMPLES[name]
    if name == "a package":
        packages.add("peft")
    texts = refused(overrides, world_size)
    assert list(texts) == [key] and words in "".join(texts[key])


def examples_of_settings() -> Iterator[tuple[list[str], int | None]]:
    """Yields the examples of the tests of settings."""
    for override, _ in given(test_config.test_each_rule):
        yield [override], None
    for bins, _ in given(test_config.test_invalid_tables_of_bins):
        yield ["context.mode=bins", f"context.bins={bins}"], None
    for stores, _ in given(test_config.test_invalid_lists_of_stores):
        yield [f"data.store={stores}"], None
    for overrides, world_size, *_ in given(test_config.test_rules_on_processes_and_stages):
        yield overrides, world_size


def given(test: Any) -> list[Any]:
    """Returns what a test is parametrized with."""
    (mark,) = test.pytestmark
    return list(mark.args[1])


@pytest.mark.parametrize("module", [rules, process_rules], ids=["rules", "process_rules"])
def test_every_row_refuses_an_example(module: ModuleType, packages: set[str]) -> None:
    """A new row needs an example; without a row its example is accepted, which fails above."""
    assert module.__file__ is not None
    ran: set[int] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        ran.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for overrides, world_size in examples_of_settings():
            refused(overrides, world_size)
        for name, (overrides, world_size, *_) in EXAMPLES.items():
            packages.update({"peft"} if name == "a package" else ())
            refused(overrides, world_size)
            packages.clear()
    finally:
        sys.settrace(before)
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    rows = [node for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    without = [row for row in rows if not ran & set(range(row.lineno, (row.end_lineno or 0) + 1))]
    assert len(rows) > 3 and not [ast.unparse(row) for row in without]


def test_experts_count_where_the_first_layer_is_the_largest() -> None:
    """A dense one, as in DeepSeek's models. Its experts are split over ranks, and evenly."""
    given = [MIXTURE, "model.vocab_size=100", "model.overrides.moe_intermediate_size=16"]
    found = config.load(None, [*given, "data.store=unused"])
    assert found.model.sizes().spec.largest_layer.experts == 0
    over_two = [*given, "data.store=unused", "parallel.expert_parallel_size=2"]
    assert sizes_of_groups(config.load(None, over_two, world_size=2))["expert"] == 2
    over_three = [*given, "data.store=unused", "parallel.expert_parallel_size=3"]
    with pytest.raises(ConfigError, match="expert_parallel_size"):
        config.load(None, over_three, world_size=3)
