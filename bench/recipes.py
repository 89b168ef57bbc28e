"""Writes docs/recipes.md: memory, step time and GPU-hours of examples/recipes, predicted by
`estimate` and the planner.

    python -m bench.recipes             # seconds
    python -m bench.recipes --splits    # also searches the best splits that results/recipes.csv lacks: minutes

Models are stand-ins with the published sizes and without weights. A step has one document of the
longest length and others drawn from the mix wlb_128k, cut at that length. Memory is that of a GPU's
data sheet. Nothing here was run on GPUs.
"""

import argparse
import csv
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench.harness import RESULTS, Table, facts, markdown
from longctx.comparison.mixes import load_mix
from longctx.config import Config, load
from longctx.memory.changes import changes_between
from longctx.memory.fitting import RunMemory
from longctx.memory.model import Memory
from longctx.model.published import LLAMA, PUBLISHED
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from longctx.training.described import read_described
from longctx.training.run_profile import run_profile
from longctx.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE = ROOT / "examples" / "recipes", ROOT / "docs" / "recipes.md"
SPLITS = RESULTS / "recipes.csv"
SPLIT_MODELS, SPLIT_GPUS, LONGEST = (
    ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"),
    (8, 64, 256),
    (2**15, 2**17, 2**19, 2**20),
)
COLUMNS = [
    "model",
    "longest",
    "gpus",
    "tensor",
    "pipeline",
    "expert",
    "tokens_per_rank",
    "recompute",
    "tokens_per_s_per_gpu",
]
TOKENS = 2**22
"""Tokens of a step in the search of splits."""
SPLITS_HEAD = (
    "## Model, GPUs, longest document",
    "",
    "Tokens per second and GPU of the best split, and its settings: tp, pp and ep are the sizes of "
    "tensor, pipeline and expert",
    "parallelism, then tokens per rank and recomputation. The search does not offload, as the "
    "recipe for 1M tokens does.",
    "For your documents, this prints the ten best splits and the settings of the first:",
    "",
    "```bash",
    "python bench/split.py --gpus 64 --model llama-3.1-70b --lengths lengths.txt --max-length "
    "131072",
    "```",
    "",
)


@dataclass(frozen=True)
class Recipe:
    """A task: its title, its file, and the number of GPUs."""

    title: str
    file: str
    gpus: int


RECIPES = (
    Recipe("Llama 3 8B from 8k to 64k on 8 H100s", "prolong-64k", 8),
    Recipe("Llama 3.1 8B at 128k on 8 H100s", "llama-8b-128k", 8),
    Recipe("Llama 3.1 8B at 512k on 8 H100s", "llama-8b-512k", 8),
    Recipe("Llama 3.1 8B at 1M on 8 H100s", "llama-8b-1m", 8),
    Recipe("Chat LoRA of an 8B at 32k on two A100s of 80 GB", "chat-lora-a100-80gb", 2),
    Recipe("Chat LoRA of an 8B at 32k on two A100s of 40 GB", "chat-lora-a100-40gb", 2),
    Recipe("Chat QLoRA of an 8B at 16k on one A100 of 40 GB", "chat-qlora-a100-40gb", 1),
    Recipe("An 8B from new weights at 128k on 64 H100s", "pretrain-8b-128k", 64),
    Recipe("Llama 3.1 70B at 128k on 64 H100s", "llama-70b-128k", 64),
    Recipe("Qwen3 30B-A3B at 64k on 16 H100s", "qwen3-30b-a3b-64k", 16),
    Recipe(
        "A hybrid of linear and full attention, 80B-A3B, at 128k on 64 H100s", "hybrid-80b-128k", 64
    ),
)


MODELS: dict[str, dict[str, Any]] = dict(PUBLISHED)
"""Sizes in the configs of checkpoints."""


def stand_in(name: str) -> str:
    """Returns a folder with the config of a checkpoint, and no weights."""
    return _config_folder(name).name


@cache
def _config_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    """Makes the folder, which is removed when Python ends."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    folder = tempfile.TemporaryDirectory()
    values = dict(MODELS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    kind = AutoModelForMaskedLM if config.model_type == "modernbert" else AutoModelForCausalLM
    config.architectures = [kind._model_mapping[type(config)].__name__]
    config.save_pretrained(folder.name)
    save_file({}, f"{folder.name}/model.safetensors")
    return folder


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a recipe: settings that fit, memory of the fullest GPU, a step, and what
    it is planned for."""

    recipe: Recipe
    config: Config
    changes: str
    memory: Memory
    available: int
    plan: Plan

    @property
    def hours_per_billion_tokens(self) -> float:
        tokens = sum(self.plan.lengths)
        return self.plan.makespan_s * self.recipe.gpus / 3600 * 1e9 / tokens


def predict(recipe: Recipe) -> Prediction:
    """Predicts a recipe with the settings that `train.fit_memory` chooses on its GPUs. Raises
    UserError if they are wrong."""
    path = FOLDER / f"{recipe.file}.yaml"
    named = yaml.safe_load(path.read_text("utf-8"))["model"].get("from_pretrained")
    model = [] if named is None else [f"model.from_pretrained={stand_in(named)}"]
    asked = load(path, model, world_size=recipe.gpus)
    profile = asked.context.profile
    assert profile is not None
    _, described = read_described(profile)
    assert described is not None and described.memory_gb is not None
    available = int(1e9 * described.memory_gb)
    vocabulary = (LLAMA if named is None else MODELS[named]).get("vocab_size")
    spec = asked.model_source(vocabulary).spec
    of_run = RunMemory(spec, None, recipe.gpus, True)
    config = of_run.fitted(asked, available)
    longest = config.max_length(recipe.gpus)
    plan = make_plan(
        lengths(longest, config.batch.global_tokens),
        ranks=config.domain(recipe.gpus),
        tokens_per_rank=config.batch.tokens_per_rank,
        profile=run_profile(config, recipe.gpus, vocabulary).profile,
        max_remote_tokens=config.context.max_remote_tokens,
    )
    memory = of_run.peak(config)
    return Prediction(recipe, config, changes_between(asked, config), memory, available, plan)


def lengths(longest: int, tokens: int) -> list[int]:
    """Returns the tokens of the documents of a step: the longest, and others until there are at
    least `tokens`."""
    drawn = (min(length, longest) for length in load_mix("wlb_128k").draw(100_000, seed=0))
    taken, total = [longest], longest
    while total < tokens:
        taken.append(next(drawn))
        total += taken[-1]
    return taken


def commands(recipe: Recipe) -> list[str]:
    """Returns the commands in the comment at the top of a recipe."""
    lines = (FOLDER / f"{recipe.file}.yaml").read_text("utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return [line.removeprefix("#").strip() for line in comment if line.startswith(("#   ", "# On"))]


def page(predictions: Sequence[Prediction]) -> str:
    """Returns the generated part of the page: a table of all recipes, and a section for each."""
    rows = [
        [
            f"[{each.recipe.title}](#{anchor(each.recipe.title)})",
            f"{each.memory.total / 2**30:.1f} of {each.available / 2**30:.1f} GiB",
            f"{each.plan.makespan_s:,.1f} s",
            f"{sum(each.plan.lengths):,}",
            f"{each.hours_per_billion_tokens:,.0f}",
        ]
        for each in predictions
    ]
    head = (
        "task",
        "memory per GPU",
        "time of a step",
        "tokens of a step",
        "GPU-hours per billion tokens",
    )
    sections = itertools.chain(*map(section, predictions))
    return "\n".join(
        [*markdown(head, rows, numbers_from=1), "", *sections, *SPLITS_HEAD, *splits(), ""]
    )


def anchor(title: str) -> str:
    return "".join(
        letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-"
    )


def section(each: Prediction) -> Iterator[str]:
    """Yields the lines of a recipe: commands, settings, and memory part by part."""
    file = f"{each.recipe.file}.yaml"
    yield from (f"## {each.recipe.title}", "")
    yield from (
        "```bash",
        *(f"# {line}" if line.startswith("On") else line for line in commands(each.recipe)),
        "```",
        "",
    )
    parts = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}"
        for name, size in each.memory.parts.items()
        if size
    )
    chosen = each.changes.removeprefix("train.fit_memory: ")
    yield f"- Settings: [{file}](../examples/recipes/{file})" + (
        f"; `train.fit_memory` adds `{chosen}`" if chosen else ""
    )
    yield f"- Memory of the fullest GPU, {each.memory.moment}: {parts}"
    yield ""


def replaced(text: str, name: str, generated: str) -> str:
    """Returns a page with the part between the comments `name` and `end of name` replaced."""
    before, rest = text.split(begin := f"<!-- {name} -->\n")
    return before + begin + generated + (end := f"<!-- end of {name} -->\n") + rest.split(end)[1]


def search_splits() -> None:
    """Searches the best split of every model, number of GPUs and longest document that SPLITS
    lacks."""
    table = Table(SPLITS, COLUMNS, facts("longctx") | {"profile": "h100-nvlink-ib"})
    for model, longest, gpus in itertools.product(SPLIT_MODELS, LONGEST, SPLIT_GPUS):
        wanted = {"model": model, "longest": longest, "gpus": gpus}
        if not table.find(**wanted):
            table.append(wanted | best_split(model, longest, gpus))


def best_split(model: str, longest: int, gpus: int) -> dict[str, Any]:
    """Returns the best split for a step; only its name if none holds the longest document."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(map(str, lengths(longest, TOKENS))))
        file.flush()
        given = [
            "--lengths",
            file.name,
            "--global-tokens",
            str(TOKENS),
            "--steps",
            "1",
            "--max-length",
            str(longest),
        ]
        script = [sys.executable, str(ROOT / "bench" / "split.py")]
        done = subprocess.run(
            [*script, "--gpus", str(gpus), "--model", model, *given, "--json"],
            stdout=subprocess.PIPE,
            check=False,
        )
    best = json.loads(done.stdout)["best"] if done.stdout else []
    if not best:
        return {}
    settings = best[0]["settings"]
    sizes = {
        name: settings[f"parallel.{name}_parallel_size"]
        for name in ("tensor", "pipeline", "expert")
    }
    speed = {
        "recompute": settings["train.recompute"],
        "tokens_per_s_per_gpu": best[0]["tokens_per_s_per_gpu"],
    }
    return {**sizes, "tokens_per_rank": settings["batch.tokens_per_rank"], **speed}


def splits() -> list[str]:
    """Returns the table of the best splits, from SPLITS."""
    with SPLITS.open(newline="", encoding="utf-8") as file:
        rows = {
            (row["model"], int(row["longest"]), int(row["gpus"])): row
            for row in csv.DictReader(file)
        }
    lines = [
        [
            model,
            f"{longest // 1024}k",
            *(cell(rows.get((model, longest, gpus))) for gpus in SPLIT_GPUS),
        ]
        for model, longest in itertools.product(SPLIT_MODELS, LONGEST)
    ]
    return markdown(("model", "longest document", *(f"{gpus} H100s" for gpus in SPLIT_GPUS)), lines)


def cell(row: dict[str, str] | None) -> str:
    if row is None:
        return "not searched"
    if not row["tensor"]:
        return "does not fit"
    sizes = [
        f"{short} {row[name]}"
        for short, name in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"))
        if row[name] != "1"
    ]
    split = ", ".join(
        [*sizes, f"{int(row['tokens_per_rank']) // 1024}k per rank", row["recompute"]]
    )
    return f"{float(row['tokens_per_s_per_gpu']):,.0f} ({split})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--splits", action="store_true", help="search the splits that results/recipes.csv lacks"
    )
    if parser.parse_args().splits:
        search_splits()
    generated = page([predict(recipe) for recipe in RECIPES])
    PAGE.write_text(replaced(PAGE.read_text("utf-8"), "recipes", generated), "utf-8")


if __name__ == "__main__":
    main()
