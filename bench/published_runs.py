"""Runs of other trainers as they published them, and our predictions of their speed and memory.

`published_runs.csv` has a run per line: its source, model, GPUs and split, what was measured, and
what was assumed. Sources:

- TRL, pull request 6845; torchtune, README.md at 0031bfb; ms-swift, examples/ and its quick start
- torchtitan, benchmarks/ at 31a17bf and 1af2937
- llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48: every row in bf16 on H100s and A100s
  of 80 GB, from 1B and from 2,048 tokens
- NeMo AutoModel, docs/performance-summary.mdx (softmax attention); Megatron Bridge,
  docs/performance-summary-archive.md (25.11, H100s, without Qwen3 in float8); NeMo 24.07,
  docs/source/performance/ at 070a0bb and 0aa2671

Held out, by a rule made before anything was fitted: every second run of a source in the order of
its tables. TRL's runs are all fitted, as they set the attention of the H100.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.recipes import MODELS, stand_in
from longctx.config import Config, load
from longctx.errors import UserError
from longctx.memory.loads import full_loads
from longctx.memory.model import _moments
from longctx.model.published import LLAMA, LLAMA_70B
from longctx.planning.planners.planner import make_plan
from longctx.training.run_profile import in_float8, run_profile

RUNS = Path(__file__).with_suffix(".csv")
MLP = 8 / 3
"""Width of an MLP of three matrices that has the parameters of two, four times as wide as the
model; over the model's."""
MPT = {
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
}
SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    **{
        f"mpt-{name}": (h, round(MLP * h), layers, heads, heads, 50368)
        for name, (h, layers, heads) in MPT.items()
    },
    "mpt-70b": (8192, round(MLP * 8192), 80, 64, 64, 50368),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064),
}
"""Width, width of the MLP, layers, heads, KV heads and vocabulary of models that are no preset."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
MODELS |= {"llama-3.1-8b": LLAMA, "llama-3.1-70b": LLAMA_70B}
MODELS |= {
    name: {"model_type": "qwen2", **dict(zip(SIZES, sizes, strict=True))}
    for name, sizes in SHAPES.items()
    if "qwen" in name
}
VOCABULARIES = {"llama": 128256, "qwen3": 151936, "gpt": 201088}


@dataclass(frozen=True)
class Run:
    """A published run. `at_once` are documents per rank and micro-batch; `other` are further
    settings by name."""

    source: str
    model: str
    gpu: str
    gpus: int
    length: int
    documents: int
    at_once: int
    tp: int
    pp: int
    chunks: int
    cp: int
    recompute: str
    other: dict[str, str]
    speed: float
    speed_unit: str
    memory: float | None
    memory_unit: str
    held_out: bool
    assumed: str

    @property
    def what(self) -> str:
        split = "".join(
            f", {name} {value}"
            for name, value in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp))
            if value > 1
        )
        return (
            f"{self.model}, {self.length:,} tokens, {self.gpus:,} "
            f"GPUs{split}{', float8' * ('float8' in self.other)}"
        )

    @property
    def tokens_per_rank(self) -> int:
        return self.at_once * -(-self.length // self.cp)


def runs() -> list[Run]:
    """Returns the published runs."""
    with RUNS.open(encoding="utf-8", newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    numbers = ("gpus", "length", "documents", "at_once", "tp", "pp", "chunks", "cp")
    other = dict(word.partition("=")[::2] for word in row["other"].split())
    values: dict[str, Any] = row | {name: int(row[name]) for name in numbers}
    values |= {"other": other, "speed": float(row["speed"]), "held_out": row["held_out"] == "yes"}
    return Run(**values | {"memory": float(row["memory"]) if row["memory"] else None})


def settings(run: Run) -> tuple[Config, int]:
    """Returns the settings of a run for longctx, and the size of the vocabulary."""
    vocabulary = (
        SHAPES[run.model][-1] if run.model in SHAPES else VOCABULARIES[run.model.split("-")[0]]
    )
    given = _model(run, vocabulary)
    given |= {
        "batch.tokens_per_rank": run.tokens_per_rank,
        "batch.global_tokens": run.documents * run.length,
    }
    given |= {
        "context.mode": "static",
        "context.degree": run.cp,
        "context.profile": run.gpu,
        "train.device": "cuda",
    }
    given |= {
        "train.recompute": run.recompute,
        "parallel.tensor_parallel_size": run.tp,
        "data.max_length": run.length,
    }
    if run.pp > 1:
        given |= {"parallel.pipeline_parallel_size": run.pp, "parallel.pipeline_chunks": run.chunks}
    known = {
        "ep": {"parallel.expert_parallel_size": run.other.get("ep")},
        "lora": {"lora.rank": run.other.get("lora")},
        "offload": {"train.offload_activations": "true"},
        "eager": {"train.compile": "false"},
        "reduce": {"parallel.reduce_after": "micro_batch"},
        "mlp_tile": {"train.mlp_tile_tokens": 2048},
    }
    given |= {name: value for key in run.other for name, value in known.get(key, {}).items()}
    return load(
        None, [f"{name}={value}" for name, value in given.items()], world_size=run.gpus
    ), vocabulary


def _model(run: Run, vocabulary: int) -> dict[str, Any]:
    """Returns the settings of a run's model: a preset, sizes, or with adapters a checkpoint without
    values."""
    if "lora" in run.other:
        return {"model.from_pretrained": stand_in(run.model)}
    if run.model not in SHAPES:
        return {"model.preset": run.model, "model.vocab_size": vocabulary}
    hidden, mlp, layers, heads, keys, _ = SHAPES[run.model]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
    }
    sizes |= {
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": hidden // heads,
    }
    sizes["tie_word_embeddings"] = run.model.startswith("mpt")
    overrides = {f"model.overrides.{name}": value for name, value in sizes.items()}
    return {"model.preset": "llama-3.1-8b", "model.vocab_size": vocabulary, **overrides}


def step_s(run: Run) -> float:
    """Predicts the seconds of a step."""
    config, vocabulary = settings(run)
    profile = run_profile(config, run.gpus, vocabulary).profile
    profile = in_float8(profile) if "float8" in run.other else profile
    slower = float(run.other.get("attention", 1))
    plan = make_plan(
        [run.length] * run.documents,
        ranks=config.domain(run.gpus),
        tokens_per_rank=config.batch.tokens_per_rank,
        profile=replace(profile, attention_s_per_token2=slower * profile.attention_s_per_token2),
        mode="static",
        degree=run.cp,
        pipeline=config.pipeline,
    )
    return plan.makespan_s


def peak_bytes(run: Run) -> int:
    """Predicts the peak of the allocator on the fullest GPU.

    With `whole_logits` the loss keeps all logits and their gradients, in bfloat16 and in float32;
    with `bf16_states` weights, gradients and moments have two bytes instead of four.
    """
    config, vocabulary = settings(run)
    logits = 12 * run.tokens_per_rank * vocabulary // run.tp if "whole_logits" in run.other else 0
    found = []
    for moment in _moments(
        config.model_source(vocabulary).spec,
        config,
        run.gpus,
        list(full_loads(config, run.gpus)),
        True,
    ):
        states = moment.parameters + moment.optimizer + moment.gradients
        saved = states // 2 if "bf16_states" in run.other and "lora" not in run.other else 0
        found.append(
            moment.total - moment.device - saved + (logits if moment.moment == "loss" else 0)
        )
    return max(found)


def figures() -> Iterator[tuple[Run, str, float, float | None]]:
    """Yields a run, a unit, and what was measured and predicted in it: None for a run whose
    settings are refused here."""
    for run in runs():
        try:
            settings(run)
        except UserError:
            yield run, run.speed_unit, run.speed, None
            continue
        seconds, tokens = step_s(run), run.documents * run.length
        done = flops(run) / 1e12 if run.speed_unit.startswith("TFLOP") else tokens
        predicted = seconds if run.speed_unit.startswith("s ") else done / seconds / run.gpus
        yield run, run.speed_unit, run.speed, predicted
        if run.memory is not None:
            unit = 2**30 if run.memory_unit == "GiB" else 1e9
            yield run, f"{run.memory_unit} per GPU", run.memory, peak_bytes(run) / unit


def flops(run: Run) -> float:
    """Returns the operations of a step as NVIDIA counts them for Llama 2: all pairs of tokens, no
    recomputation."""
    hidden, mlp, layers, _, _, vocabulary = SHAPES[run.model]
    token = 24 * hidden**2 + 18 * hidden * mlp + 12 * run.length * hidden
    return run.documents * run.length * (layers * token + 6 * hidden * vocabulary)
