"""Runs of other trainers as they published them, and our predictions of their speed; of their
memory: bench/published_memory.py.

`published_runs.csv` has a run per line: its source, model, GPUs and split, what was measured, and
what was assumed. Sources:

- TRL, pull request 6845 and, with activations on the host, accelerate's 4175: in float32, which
  accelerate casts to (fsdp_utils.py); from 30B on with weights and optimizer on the host, and the
  32B's MLP cut by a function that keeps what it cut (TRL's 6846)
- torchtune, README.md at 0031bfb, which says that it is compiled
- ms-swift, examples/ and its quick start: long_text/ring_attention/ and ulysses/ at f9afe2d,
  long_text/zero3.sh at 9d09048 and e3f2708, which became liger_kernel.sh. Its log has the most that
  the allocator reserved in GiB (swift/trainers/mixin.py), but its scripts say GB of some. A loss of
  sequence parallelism has logits in two bytes, its softmax and gradients too (6 in all); by chunks
  of 2,048 of 64,000 tokens, gradients replace logits (2.19; trainers/sequence_parallel/utils.py).
  Liger's norms and MLP (`liger`) are taken to be as fast as compiled ones. Megatron's selective
  recomputation computes attention alone again: 4.5 passes in place of 3.5 (`attention=1.29`)
- torchtitan, benchmarks/ at 31a17bf and 1af2937; its attention is FlashAttention 2
  (models/attention.py there), its float8 torchao's (`casts`); selective recomputation computes
  every second product again (`every_second`; parallelize_llama.py at 9dec370), and the loss is
  compiled from 2025 on (components/loss.py at e7c0cae)
- llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48: every row in bf16 on H100s and A100s
  of 80 GB, from 1B and from 2,048 tokens
- NeMo AutoModel, docs/performance-summary.mdx (softmax attention) and examples/llm_benchmark/ at
  36044ad: DeepEP sends a row once to each GPU with experts of it, one or two by their balanced gate
  (`expert_ranks`); adapters by `use_triton` (`triton_lora`); Megatron Bridge,
  docs/performance-summary-archive.md at 067f987 (H100s: 25.11, and later releases with other
  batches; without Qwen3 in float8, and without 25.11's gpt-oss, whose accumulation contradicts its
  split); NeMo 24.07, docs/source/performance/ at 070a0bb and 0aa2671. Both compute tensor-parallel
  products while their messages travel (`tp_overlap`; "Communication Overlap" in their guides)
- prime-rl, benchmarks/baselines/ at 559b447: Qwen3 on H100s and H200s, every run that succeeded;
  its head, loss and experts are src/prime_rl/trainer/models/layers/lm_head.py, utils.py and
  layers/moe.py at a127150
- ml-engineering, insights/when-to-upgrade-gpus/README.md at 744d01e: DeepSpeed on H200s and B200s.
  FlashAttention 3, as prime-rl's, takes 0.92 of cuDNN's time (its paper, figures 5 and 6: heads of
  128, 16k tokens, 648 against 595 TFLOP/s forward, 561 against 516 backward)
- InternEvo, doc/en/train_performance.md at c628a8c: 7B on A100s, with optimizer states sharded in a
  node
- XTuner, docs/zh_cn/legacy/acceleration/benchmark.rst at b934f46: DeepSpeed on A100s

Nothing is fitted to a run that is predicted: see bench/published_fit.py. `published_hidden.csv` has
the runs of a source that was kept hidden: fms-fsdp, README.md at 5a296af.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.recipes import MODELS, stand_in
from longctx.config import Config, load
from longctx.errors import UserError
from longctx.model.published import LLAMA, LLAMA_70B, QWEN3
from longctx.planning.assignment import Assignment, Integers
from longctx.planning.cost.fixed import ShardedStates, with_fixed_costs
from longctx.planning.cost.model import score
from longctx.planning.cost.published_errors import kind_of
from longctx.planning.cost.scaling import scale
from longctx.planning.cost.spec import Matrix, ModelSpec
from longctx.planning.cost.traffic import BACKWARD, ROUTING, Traffic, adapter_values, float8_casts
from longctx.planning.cost.work import RankWork
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.training.described import Described, read_described
from longctx.training.run_profile import states_of_run, work_of_run

RUNS = Path(__file__).with_suffix(".csv")
HIDDEN = RUNS.with_name("published_hidden.csv")
"""Runs of a source that was not looked at before everything was set."""
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
    "internlm-7b": (4096, 11008, 32, 32, 32, 103168),
    "yi-34b": (7168, 20480, 60, 56, 8, 64000),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "code-llama-34b": (8192, 22016, 48, 64, 8, 32000),
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
    if "qwen2" in name
}
MODELS |= {
    "qwen3-30b-a3b": MODELS["Qwen/Qwen3-30B-A3B-Base"],
    "qwen3-8b": MODELS["Qwen/Qwen3-8B"],
    "qwen3-32b": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
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
    def memory_unit_bytes(self) -> float:
        return 2**30 if self.memory_unit == "GiB" else 1e9

    @property
    def tokens_per_rank(self) -> int:
        return self.at_once * -(-self.length // self.cp)


def runs(path: Path = RUNS) -> list[Run]:
    """Returns the published runs."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    numbers = ("gpus", "length", "documents", "at_once", "tp", "pp", "chunks", "cp")
    other = dict(word.partition("=")[::2] for word in row["other"].split())
    values: dict[str, Any] = row | {name: int(row[name]) for name in numbers}
    values |= {"other": other, "speed": float(row["speed"])}
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
        "offload_optimizer": {"train.offload_optimizer": "true"},
        "eager": {"train.compile": "false"},
        "composed": {"train.compile": "false"},
        "reduce": {"parallel.reduce_after": "micro_batch"},
        "shard": {"parallel.shard_ranks": run.other.get("shard")},
        "mlp_tile": {"train.mlp_tile_tokens": 2048},
        "gathered_kv": {"context.max_remote_tokens": run.tokens_per_rank},
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
    if "composed" in run.other:
        return {
            "model.from_pretrained": stand_in(run.model),
            "model.implementation": "transformers",
        }
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


CAUSES = (*Traffic._fields, "loss", "gathers", "updates")
"""What takes time beside the operations of products and attention, in the order in which the page
adds it: parts of `Traffic`, the loss of a stack, gathers and reductions, updates."""
LOG_PROBABILITIES = 120
"""Bytes per logit that prime-rl's head moves beside: in float32, one operation at a time, forward
56 and backward 64."""
READ_S = 15e-6
"""Seconds in which the CPU has a kernel compare one value and waits for the answer, a guess: 5 to
launch it, 10 to copy the result. prime-rl's RL step does so for every token, to find where
documents begin: get_response_lengths, src/prime_rl/trainer/utils.py at a127150."""
ROWS = {
    "titan": (21.0, 34.0),
    "deepep": (2.25, 4.5),
}
"""Passes over the rows of experts forward and backward, by what `rows` says of a run, in place of
`traffic.ROUTING`. titan: prime-rl's MoE and torchtitan's expert_parallel, one operation at a time:
rows are gathered (2), padded (2), permuted (2), put back (2), weighed in float32 (10) and added to
the residual stream (3); backward 3, 0, 4, 4 and 3 for the slice, 18, 2. deepep: rows are written
from those that arrive, once for eight, and summed by weight."""
TRITON_ADAPTERS = (4, 2), (1, 6)
"""Passes over outputs and over inputs that LoRA adds, forward and backward, with the Triton kernels
of NeMo AutoModel (components/_peft/lora_kernel.py at 36044ad): one computes both products and
scales; two read the gradient of outputs, and inputs, and write the gradient of inputs."""
HOST_BYTES = 34
"""Bytes of host memory per parameter of an update on CPUs: 28 of AdamW in float32, and gradients
and weights in bfloat16, sent and received."""
HOST_BYTES_PER_S = 300e9
"""Rate of a node's host memory, a guess: two sockets with eight channels of DDR5 have twice that
by their data sheets."""
GPUS_OF_NODE = 8
WHOLE_LOGITS = 20
"""Bytes per logit of a loss that casts all logits to float32, beside: 6 for the cast, 4 to read
them, 6 for the cast of gradients, 4 to write them."""


class LossWork(NamedTuple):
    """What a stack's own loss adds per token: parameters computed, bytes moved, and seconds of the
    CPU that nothing hides."""

    computed: float = 0.0
    moved: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True)
class Case:
    """A published run, with what does not depend on the constants of a profile.

    Attributes:
        described: what the profile of its GPU is for.
        work: work of a rank.
        loss_work: what the stack's own loss adds.
        lengths, assignment: documents of a step and their places.
        measured_s: seconds of a step, as published.
        host_s: seconds of an update on CPUs, where the stack has its optimizer there.
    """

    run: Run
    config: Config
    spec: ModelSpec
    described: Described
    work: RankWork
    loss_work: LossWork
    states: ShardedStates
    lengths: Integers
    assignment: Assignment
    measured_s: float
    host_s: float

    @property
    def kind(self) -> str:
        return kind_of(self.spec, float8="float8" in self.run.other)

    def seconds(
        self, profile: HardwareProfile, *, float8: float, causes: tuple[str, ...] = CAUSES
    ) -> float:
        """Predicts a step by a profile of the run's GPU; products in float8 take `float8` of their
        time. The profile's linear time must be that of `described_work(causes)`."""
        run = self.run
        scaled = scale(
            self._profile_of_stack(profile),
            self.described_work(causes),
            self._work(causes, float8=float8 if "float8" in run.other else 1.0),
        )
        states = self.states if "gathers" in causes else replace(self.states, gathers=0)
        if "gathers" not in causes:
            states = replace(states, shards=1, trained=states.trained / states.shards)
        if "updates" not in causes:
            states = replace(states, trained=0.0)
        scaled = with_fixed_costs(scaled, self.work, states, run.tokens_per_rank)
        if "loss" in causes:
            waited_s = self.loss_work.host_s * run.tokens_per_rank
            scaled = replace(scaled, launch_s=scaled.launch_s + waited_s)
        ranks = self.config.domain(run.gpus)
        if "updates" in causes:
            scaled = replace(scaled, step_s=scaled.step_s + self.host_s)
        times = score(scaled, self.lengths, self.assignment, ranks, self.config.pipeline)
        return times.makespan_ns / 1e9

    def described_work(self, causes: tuple[str, ...]) -> RankWork:
        """Returns the work that the profile is for, with the traffic of these causes."""
        work = self.described.work
        return replace(work, traffic=_only(work.traffic, causes))

    def _profile_of_stack(self, profile: HardwareProfile) -> HardwareProfile:
        """Returns the profile with the stack's own attention; where weights are kept whole, kernels
        are queued ahead."""
        slower = float(self.run.other.get("attention", 1))
        return replace(
            profile,
            attention_s_per_token2=slower * profile.attention_s_per_token2,
            launch_s=0.0 if "whole_weights" in self.run.other else profile.launch_s,
        )

    def _work(self, causes: tuple[str, ...], *, float8: float) -> RankWork:
        traffic = _only(self.work.traffic, causes)
        computed = self.work.computed
        if "loss" in causes:
            computed += self.loss_work.computed
            traffic = traffic._replace(head=traffic.head + self.loss_work.moved)
        return replace(self.work, computed=float8 * computed, traffic=traffic)


def _only(traffic: Traffic, causes: tuple[str, ...]) -> Traffic:
    parts = {name: part for name, part in traffic._asdict().items() if name in causes}
    return Traffic(**parts)


def cases(path: Path = RUNS) -> list[Case]:
    """Returns the published runs that settings accept."""
    found = []
    for run in runs(path):
        try:
            config, vocabulary = settings(run)
        except UserError:
            continue
        found.append(_case(run, config, vocabulary))
    return found


def _case(run: Run, config: Config, vocabulary: int) -> Case:
    profile, described = read_described(run.gpu)
    assert described is not None
    spec = config.model_source(vocabulary).spec
    spec = replace(spec, vocab_size=vocabulary)
    spec = _with_expert_roles(spec)
    if "expert_adapters" in run.other:
        spec = _with_expert_adapters(spec, int(run.other["lora"]))
    work = work_of_run(config, spec, run.gpus, "cuda")
    if "fused" in run.other:
        compiled = config.changed({"train.compile": True})
        work = work_of_run(compiled, spec, run.gpus, "cuda")
    work = _of_stack(run, spec, work)
    states = states_of_run(config, spec, run.gpus, work)
    whole = "whole_weights" in run.other
    gathers = 0 if whole else states.gathers
    plan = make_plan(
        [run.length] * run.documents,
        ranks=config.domain(run.gpus),
        tokens_per_rank=config.batch.tokens_per_rank,
        profile=scale(profile, described.work, work),
        mode="static",
        degree=run.cp,
        pipeline=config.pipeline,
    )
    return Case(
        run,
        config,
        spec=spec,
        described=described,
        work=work,
        loss_work=_loss_work(run, spec, tensor=work.tensor),
        states=replace(states, gathers=gathers, reduces_each=not whole),
        lengths=np.array(plan.lengths),
        assignment=Assignment.of(plan),
        measured_s=_measured_s(run),
        host_s=_host_s(run, spec),
    )


def _of_stack(run: Run, spec: ModelSpec, work: RankWork) -> RankWork:
    """Returns the work of a rank as the stack of a run does it: messages that it hides, or sends
    once per rank and not per expert; kernels of its adapters; casts to float8."""
    traffic = work.traffic
    if "tp_overlap" in run.other:
        work = replace(work, tensor_bytes=0.0)
    if "expert_ranks" in run.other:
        sent = int(run.other["expert_ranks"]) / spec.largest_layer.experts_per_token
        work = replace(work, expert_bytes=sent * work.expert_bytes)
    if "rows" in run.other:
        forward, backward = ROWS[run.other["rows"]]
        forwards = 1 + (run.recompute != "none")
        passes = forward * forwards + backward - ROUTING * (forwards + BACKWARD)
        values = sum(layer.experts_per_token * layer.hidden_size for layer in spec.layers)
        moved = 2 * passes * values / work.tensor
        traffic = traffic._replace(elementwise=traffic.elementwise + moved)
    if "triton_lora" in run.other:
        moved = adapter_values(spec.layers, TRITON_ADAPTERS, repeated=run.recompute == "full")
        traffic = traffic._replace(adapters=2 * moved / work.tensor)
    if "every_second" in run.other:
        work = replace(work, computed=work.computed + _every_second(spec) / 3 / work.tensor)
    if "casts" in run.other:
        casts = float8_casts(spec.layers, run.recompute, tensor=work.tensor)
        traffic = traffic._replace(products=traffic.products + casts)
    return replace(work, traffic=traffic)


def _every_second(spec: ModelSpec) -> int:
    """Returns the parameters whose products torchtitan's selective recomputation computes again,
    less those of `mlp`: every second product of a block (K, output and gate), in place of the
    MLP's first two."""
    parameters = 0
    for layer in spec.layers:
        keys = layer.num_key_value_heads * layer.head_dim
        values = layer.num_attention_heads * layer.head_dim
        parameters += layer.hidden_size * (keys + values - layer.intermediate_size)
    return parameters


def _loss_work(run: Run, spec: ModelSpec, *, tensor: int) -> LossWork:
    """Returns what the stack's own loss adds to ours: prime-rl's backward multiplies by the head
    again."""
    assert spec.vocab_size is not None
    logits = spec.vocab_size / tensor
    if "log_probabilities" in run.other:
        again = spec.vocabulary_parameters / 3 / tensor
        return LossWork(again, LOG_PROBABILITIES * logits, host_s=READ_S)
    if "whole_logits" in run.other:
        return LossWork(moved=WHOLE_LOGITS * logits)
    return LossWork()


def _with_expert_roles(spec: ModelSpec) -> ModelSpec:
    """Returns a model whose stacked matrices are experts, also where transformers runs it."""
    layers = []
    for layer in spec.layers:
        matrices = tuple(
            replace(matrix, role="expert") if matrix.count > 1 else matrix
            for matrix in layer.matrices
        )
        layers.append(replace(layer, matrices=matrices))
    return replace(spec, layers=tuple(layers))


def _with_expert_adapters(spec: ModelSpec, rank: int) -> ModelSpec:
    """Returns a model whose experts have adapters too, which ours have not."""
    layers = []
    for layer in spec.layers:
        adapters = []
        for matrix in layer.of("expert"):
            first = Matrix(rank, matrix.columns, matrix.count, matrix.used, role="lora_a")
            second = Matrix(matrix.rows, rank, matrix.count, matrix.used, role="adapter")
            adapters += [first, second]
        layers.append(replace(layer, matrices=(*layer.matrices, *adapters)))
    return replace(spec, layers=tuple(layers))


def _host_s(run: Run, spec: ModelSpec) -> float:
    """Returns the seconds of an update on CPUs."""
    if "offload_optimizer" not in run.other:
        return 0.0
    nodes = run.gpus / GPUS_OF_NODE
    return HOST_BYTES * spec.trained_parameters / nodes / HOST_BYTES_PER_S


def _measured_s(run: Run) -> float:
    if run.speed_unit.startswith("s "):
        return run.speed
    done = flops(run) / 1e12 if run.speed_unit.startswith("TFLOP") else run.documents * run.length
    return done / run.speed / run.gpus


def flops(run: Run) -> float:
    """Returns the operations of a step as NVIDIA counts them for Llama 2: all pairs of tokens, no
    recomputation."""
    hidden, mlp, layers, _, _, vocabulary = SHAPES[run.model]
    token = 24 * hidden**2 + 18 * hidden * mlp + 12 * run.length * hidden
    return run.documents * run.length * (layers * token + 6 * hidden * vocabulary)
