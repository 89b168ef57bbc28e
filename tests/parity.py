"""Parity: two steps of a run that is split in any way, against one loop of plain transformers,
document by document.

A case names a model, data and adapters, which the reference depends on, and a split of the ranks
and settings of the run, on which nothing may depend. Five things are always compared: losses,
gradient norms, all gradients of the first step, all weights after the second, and tokens with
degrees. `covering` chooses cases that have every pair of options, of which `chosen` takes some that
have every option.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from filelock import FileLock
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from longctx.config import Config, load
from longctx.data.diffusion import Noise
from longctx.data.pieces import Piece
from longctx.data.sampler import Sampler
from longctx.data.store.store import Store
from longctx.hf.model import OURS
from longctx.model.pretrained_decoder import PretrainedDecoder
from longctx.parallel.mesh import make_groups
from longctx.training.assembly import assemble
from longctx.training.build import sizes_of_groups
from longctx.training.run import Run
from longctx.training.saved import checkpoint
from tests.data_cases import text_of
from tests.diffusion_cases import alone
from tests.huggingface_cases import build_model
from tests.native_cases import as_saved
from tests.quantized_cases import quantize
from tests.training_cases import forced, whole
from tests.weight_cases import make_store, records, weights_said
from tests.workers import Workers

Tensors = dict[str, torch.Tensor]
LOSS, NORM, GRADIENT, WEIGHTS = 1e-5, 1e-4, 1e-4, 1e-3
"""Largest relative errors; that of weights is relative to their change."""
WINDOWS = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3 with windows, tied": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": WINDOWS,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 with experts": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "mlp_only_layers": [0],
        },
    ),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {}),
    "gpt2": ("gpt2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
"""Model type, and its configuration; the last four are run by transformers' own code."""
NATIVE = ("llama", "qwen3 with windows, tied", "mixtral", "qwen3 with experts", "phi3")
WITH_EXPERTS = ("mixtral", "qwen3 with experts")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYERS = 4
PIPELINES = {"none": (1, 1), "1f1b": (2, 1), "interleaved": (2, 2), "three stages": (3, 1)}
"""Ranks, and stages on every rank."""
TOKENS_PER_RANK = {1: 96, 2: 64, 3: 48, 4: 48}
BINS = {1: {90: 1}, 2: {45: 1, 90: 2}, 3: {30: 1, 60: 2, 90: 3}, 4: {30: 1, 60: 2, 90: 4}}
ULYSSES = "Ulysses, keys kept"
MORE = {
    "nothing": [],
    "padded, in rounds": ["context.max_remote_tokens=20"],
    ULYSSES: ["context.ulysses_degree=2", "context.keep_kv=true"],
    "replicated, in tiles": ["parallel.shard_ranks=1", "train.mlp_tile_tokens=10"],
    "replicated": ["parallel.shard_ranks=1"],
    "reduced after micro-batches": ["parallel.reduce_after=micro_batch"],
    "native": ["model.implementation=native"],
}
NOISY = ["objective.name=block_diffusion", "objective.block=7"]
BASE = [
    f"context.profile={Path(__file__).parent / 'as_given.yaml'}",
    *(
        "data.max_length=90",
        "data.long_documents=split",
        "batch.global_tokens=220",
        "train.steps=2",
        "train.device=cpu",
    ),
    *(
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=0.01",
        "optimizer.clip_grad_norm=0.7",
        "optimizer.weight_decay=0.3",
    ),
    "optimizer.groups=[{match: embed, learning_rate_ratio: 0.3, weight_decay: 0.7}, {match: norm, "
    "weight_decay: 0.2}]",
    # Else the first steps go by the sign alone of gradients that are rounding errors.
    "optimizer.eps=1e-3",
    *("checkpoint.every=null", "log.tensorboard=false"),
]


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is split."""

    model: str = "llama"
    data: str = "texts"
    adapters: str = "none"
    tensor: int = 1
    pipeline: str = "none"
    domain: int = 2
    expert: int = 1
    mode: str = "auto"
    recompute: str = "none"
    reshard_after: str = "block"
    more: str = "nothing"
    resumed: str = "no"

    def __str__(self) -> str:
        """The options that are not the first ones."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        return (
            ", ".join(f"{name} {value}" for name, value in given if value != OPTIONS[name][0])
            or "plain"
        )

    @property
    def world(self) -> int:
        return self.tensor * PIPELINES[self.pipeline][0] * self.domain

    @property
    def cost(self) -> float:
        """About the time of its run: DTensor is slow on CPUs, and a run that is resumed is two."""
        return 1 + self.world * (2 if self.tensor > 1 else 1) * (1 if self.resumed == "no" else 1.6)

    @property
    def known(self) -> tuple[str, ...]:
        """What the reference depends on."""
        return self.model, self.data, self.adapters

    @property
    def valid(self) -> bool:
        split = self.tensor * PIPELINES[self.pipeline][0] * self.expert > 1
        native = split or self.more == "native"
        return (
            (not native or (self.model in NATIVE and self.adapters == "none"))
            and (self.adapters == "none" or self.model in ("llama", "mixtral"))
            and (
                self.expert == 1 or (self.model in WITH_EXPERTS and self.domain % self.expert == 0)
            )
            and self.expert * self.tensor <= 4  # as many experts
            and (
                self.more != "Ulysses, keys kept"
                or (self.tensor == 1 and self.model not in ("gpt_oss", "gemma2", "deepseek_v3"))
            )
            and not (self.tensor > 1 and self.more in ("replicated, in tiles", "padded, in rounds"))
            and not (self.pipeline != "none" and self.more == "reduced after micro-batches")
            # refused: its MLPs return more than a tensor.
            and not (self.model == "gpt_oss" and "tiles" in self.more)
            and not (self.expert > 1 and self.more.startswith("replicated"))
            and not (self.mode == "auto" and self.domain == 1)
            and not (self.resumed == "alone" and self.more == "native")
            # the reference has a dense mask
            and not (self.data == "noisy" and self.model in ("gemma2", "gpt2", "gpt_oss"))
        )

    @property
    def forced(self) -> dict[str, Any]:
        """What it forces of Config."""
        return {"padding": 16} if self.more == "padded, in rounds" else {}

    def settings(self, checkpoint: Path, store: Path, run: Path) -> list[str]:
        ranks, chunks = PIPELINES[self.pipeline]
        merged = ["data.merge_prefixes=true"] * (self.data == "merged")
        merged += NOISY * (self.data == "noisy")
        merged += ["train.seed=3"] * (self.data == "weights")  # draws short documents too
        tokens_per_rank = TOKENS_PER_RANK[self.domain] * (2 if self.data == "noisy" else 1)
        adapters = [] if self.adapters == "none" else ["lora.rank=4", "lora.alpha=12"]
        adapters += [f"lora.base={self.adapters}"] * (self.adapters in ("nf4", "int8"))
        adapters += [f"lora.target_modules={TARGETS}".replace("'", "")] * (
            bool(adapters) and self.model == "mixtral"
        )
        degree = [f"context.degree={self.domain}"] * (self.mode == "static")
        copies = 2 if self.data == "noisy" else 1
        table = {copies * length: degree for length, degree in BINS[self.domain].items()}
        bins = [f"context.bins={table}"] * (self.mode == "bins")
        return [
            *(
                *BASE,
                f"model.from_pretrained={checkpoint}",
                f"data.store={store}",
                f"train.run_dir={run}",
            ),
            *(*merged, *adapters, *degree, *bins, *MORE[self.more]),
            *(
                f"parallel.tensor_parallel_size={self.tensor}",
                f"parallel.expert_parallel_size={self.expert}",
            ),
            *(f"parallel.pipeline_parallel_size={ranks}", f"parallel.pipeline_chunks={chunks}"),
            *(f"context.mode={self.mode}", f"batch.tokens_per_rank={tokens_per_rank}"),
            *(f"train.recompute={self.recompute}", f"parallel.reshard_after={self.reshard_after}"),
        ]


OPTIONS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "data": ("texts", "weights", "merged", "noisy"),
    "adapters": ("none", "lora", "nf4", "int8"),
    "tensor": (1, 2),
    "pipeline": tuple(PIPELINES),
    "domain": (2, 1, 3),
    "expert": (1, 2),
    "mode": ("auto", "static", "bins"),
    "recompute": ("none", "norms", "mlp", "selective", "full"),
    "reshard_after": ("block", "micro_batch", "step"),
    "more": tuple(MORE),
    "resumed": ("no", "here", "alone"),
}
WIDE = OPTIONS | {"domain": (2, 1, 3, 4), "expert": (1, 2, 4)}
"""For more than four ranks."""
UNRELATED = {
    *itertools.product(("data",), ("recompute", "reshard_after", "more", "expert", "resumed")),
    *itertools.product(("model",), ("reshard_after", "mode", "recompute", "resumed", "more")),
    *itertools.product(("adapters",), ("domain", "mode", "more")),
    *itertools.product(("mode", "recompute", "reshard_after", "more"), ("resumed",)),
    *itertools.product(("mode",), ("recompute", "reshard_after")),
    *itertools.product(("data", "adapters"), ("tensor",)),
    *itertools.product(("tensor",), ("mode", "reshard_after", "resumed", "recompute")),
}
"""Options whose pairs are not all drawn: a case has each of them, with some of the other's."""
RELATED = [pair for pair in itertools.combinations(OPTIONS, 2) if pair not in UNRELATED]
Pair = frozenset[tuple[str, object]]


def pairs_of(case: Case) -> set[Pair]:
    """Every two of its options."""
    return {frozenset((name, getattr(case, name)) for name in pair) for pair in RELATED}


@cache
def covering(ranks: int = 4, tries: int = 25) -> tuple[Case, ...]:
    """Cases that together have every pair of options that a valid case of so many ranks has; always
    the same ones."""
    options, random = OPTIONS if ranks <= 4 else WIDE, Random(0)
    every = (((a, x), (b, y)) for a, b in RELATED for x in options[a] for y in options[b])
    left, cases = {frozenset(pair): None for pair in every}, list[Case]()
    while left:
        wanted = next(iter(left))
        drawn = (
            Case(**{n: random.choice(options[n]) for n in options} | dict(wanted))
            for _ in range(40 * tries)
        )
        found = list(
            itertools.islice((case for case in drawn if case.world <= ranks and case.valid), tries)
        )
        left.pop(wanted)
        if found:
            cases.append(
                max(found, key=lambda case: len(pairs_of(case) & left.keys()) / case.cost**0.5)
            )
            for pair in pairs_of(cases[-1]):
                left.pop(pair, None)
    return tuple(cases)


def options_of(case: Case) -> set[tuple[object, ...]]:
    """Its options, and whether documents, experts with matrices, and a tied embedding are split."""
    tied = "tied" in case.model and case.pipeline != "none"
    splits = (
        (case.model, case.domain > 1),
        ("tied", tied),
        ("experts", case.expert > 1 and case.tensor > 1),
    )
    return {
        *((name, getattr(case, name)) for name in OPTIONS),
        *(split for split in splits if split[1]),
    }


def chosen(cases: Iterable[Case], count: int) -> list[Case]:
    """Returns so many cases: those that have options which none before has, and the most pairs for
    their time."""
    left, taken, options, pairs = list(cases), list[Case](), set[object](), set[Pair]()

    def gain(case: Case) -> float:
        new = 5 * len(options_of(case) - options) + len(pairs_of(case) - pairs)
        return new / (case.cost + 3 * (case.adapters in ("nf4", "int8"))) ** 0.75

    while left and len(taken) < count:
        best = max(left, key=gain)
        left.remove(best)
        taken.append(best)
        options |= options_of(best)
        pairs |= pairs_of(best)
    return taken


# --- checkpoints, stores and references, which all processes of the tests share


class Parity:
    """What cases need, made once in a folder that all test processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _once(self, name: str, make: Callable[[Path], object]) -> Path:
        """Returns a file or folder, which only the first process to need it makes."""
        path = self.folder / name
        with FileLock(f"{path}.lock"):
            if not path.exists():
                make(partial := path.with_name(f"{name}.partial"))
                partial.rename(path)
        return path

    def checkpoint(self, model: str) -> Path:
        kind, given = MODELS[model]
        sizes = {"vocab_size": 260, "num_hidden_layers": LAYERS if model in NATIVE else 2}
        more = {"bos_token_id": None, "eos_token_id": 1, "hidden_size": 32}
        return self._once(
            model,
            lambda folder: build_model(kind, "eager", **more, **sizes, **given).save_pretrained(
                folder
            ),
        )

    def store(self, data: str) -> Path:
        made = {"weights": records, "texts": texts, "merged": alike, "noisy": texts}
        given = made[data]
        return self._once(f"of-{data}", lambda folder: _moved(folder, given())) / "store"

    def expected(self, case: Case) -> dict[str, Any]:
        """Returns the outcome of one plain process."""

        def make(path: Path) -> None:
            checkpoint, store = self.checkpoint(case.model), self.store(case.data)
            plain = Case(*case.known, domain=1, mode="static")
            torch.save(plain_steps(plain, checkpoint, store, self.folder), path)

        with FileLock(f"{self.folder / 'references'}.lock"):  # one at a time: two cores
            path = self._once(", ".join(case.known) + ".pt", make)
        found: dict[str, Any] = torch.load(path, weights_only=False)
        return found


def _moved(folder: Path, given: list[dict[str, Any]]) -> None:
    folder.mkdir()
    make_store(folder, given, "store")


def texts() -> list[dict[str, Any]]:
    """One long document for every three short ones, so that degrees differ within a step."""
    return [
        {"text": text_of(length - 1, number)} for number, length in enumerate((5, 37, 90, 20) * 6)
    ]


def alike() -> list[dict[str, Any]]:
    """Documents that begin alike, some of which count more."""
    return [
        {
            "text": text_of(30, group) + text_of(7 + 13 * place, 10 * group + place),
            "weight": 1 + place % 3,
        }
        for group in range(6)
        for place in range(4)
    ]


def plain_steps(case: Case, checkpoint: Path, store: Path, folder: Path) -> dict[str, Any]:
    """Two steps of one process, document by document, by transformers, peft, torchao and torch;
    cross-entropy in float64."""
    config = load(None, case.settings(checkpoint, store, folder), world_size=1)
    hf: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    model, prefix = hf.eval(), ""
    if case.adapters in ("nf4", "int8"):
        quantize(case.adapters, hf.base_model)
    if case.adapters != "none":
        targets = TARGETS if case.model == "mixtral" else "all-linear"
        model, prefix = (
            get_peft_model(hf, LoraConfig(r=4, lora_alpha=12, target_modules=targets)).eval(),
            "base_model.model.",
        )
        ours = config.model_source(257).build()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    weight.copy_(
                        ours.initial_value(
                            OURS + name.removeprefix(prefix), weight, config.train.seed
                        )
                    )
    trained = {
        name.removeprefix(prefix): weight
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    optimizer = _adamw(config, trained)
    outcome: dict[str, Any] = {"losses": [], "norms": [], "tokens": [], "before": _copies(trained)}
    for documents in documents_of(config, store, case.data == "weights"):
        divisor = sum(float(document.weights.sum()) for document in documents)
        loss = 0.0
        for document in documents:
            if case.data == "noisy":
                part = noisy_loss(model, document, config, store) / divisor
            else:
                logits = model(input_ids=document.tokens[None], use_cache=False).logits[0].double()
                losses = F.cross_entropy(
                    logits, document.labels, ignore_index=-100, reduction="none"
                )
                part = (losses * document.weights).sum() / divisor
            part.backward()
            loss += part.item()
        outcome["losses"].append(loss)
        outcome["tokens"].append(sum(len(document.tokens) for document in documents))
        assert config.optimizer.clip_grad_norm is not None
        outcome["norms"].append(
            float(nn.utils.clip_grad_norm_(trained.values(), config.optimizer.clip_grad_norm))
        )
        outcome.setdefault(
            "gradients", _copies({name: weight.grad for name, weight in trained.items()})
        )
        optimizer.step()
        optimizer.zero_grad()
    return {**outcome, "after": _copies(trained)}


def _adamw(config: Config, trained: Tensors) -> torch.optim.Optimizer:
    """Torch's own, at the peak rate; the settings have a cosine schedule of two steps, which
    `lr_lambda` follows."""
    given, groups = config.optimizer, list[dict[str, Any]]()
    for name, weight in trained.items():
        group = next((group for group in given.groups if group.match in name), None)
        decay = given.weight_decay if weight.dim() > 1 else 0.0
        decay = decay if group is None or group.weight_decay is None else group.weight_decay
        rate = given.learning_rate * (1.0 if group is None else group.learning_rate_ratio)
        groups.append({"params": [weight], "lr": rate, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=given.betas, eps=given.eps)
    least = given.min_learning_rate_ratio

    def lr_lambda(step: int) -> float:
        return least + (1 - least) * (1 + math.cos(math.pi * (step + 1) / config.train.steps)) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class Plain(NamedTuple):
    """A document of a step: tokens, shifted labels and their weights."""

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    piece: Piece


def noisy_loss(model: Any, document: Plain, config: Config, store: Path) -> torch.Tensor:
    """Returns the sum of the loss of block diffusion of a document alone."""
    noise = Noise(
        mask_token=Store.open(store).tokenizer.end_of_document,
        block=config.objective.block,
        seed=config.train.seed,
    )
    piece = document.piece
    key = (piece.document, piece.start, piece.epoch)
    tokens = document.tokens.numpy()
    noised = noise.document(tokens, trained=tokens >= 0, key=key)
    return alone(model, noised, document.tokens, block=noise.block, noise=noise)


def documents_of(config: Config, path: Path, weighted: bool) -> list[list[Plain]]:
    """Returns every document of all steps."""
    store, steps, cursor = Store.open(path), [], 0
    assert config.data.max_length is not None
    limits = {"max_length": config.data.max_length, "long_documents": config.data.long_documents}
    sampler = Sampler(
        store, global_tokens=config.batch.global_tokens, seed=config.train.seed, **limits
    )
    for _ in range(config.train.steps):
        pieces, cursor = sampler.step(cursor)
        step = []
        for piece in pieces:
            ids, labels = map(
                torch.from_numpy,
                store.read(piece.document, piece.start, piece.stop, end=piece.stop),
            )
            weights = torch.full(
                (len(ids),), float(store.weights[piece.document]), dtype=torch.float64
            )
            if weighted:
                said = weights_said(store, piece.document)[piece.start + 1 : piece.stop]
                weights = torch.tensor([*said, 0.0], dtype=torch.float64)
            counted = weights.where(labels >= 0, 0)
            step.append(Plain(ids.long(), labels.long(), counted, piece))
        steps.append(step)
    return steps


def _copies(tensors: Any) -> Tensors:
    return {
        name: torch.zeros(()) if tensor is None else tensor.detach().clone()
        for name, tensor in tensors.items()
    }


# --- the run


def found(
    workers: Workers, case: Case, checkpoint: Path, store: Path, run: Path
) -> list[dict[str, Any]]:
    """Returns the outcome of every rank; of a run that is resumed, of the ranks that go on."""
    settings = case.settings(checkpoint, store, run)
    if case.resumed == "no":
        return workers.run(steps_of, case.world, settings, run, 2, False, case.forced)
    first = workers.run(steps_of, case.world, settings, run, 1, False, case.forced)[0]
    other = case if case.resumed == "here" else Case(*case.known, domain=1, mode="static")
    other_settings = other.settings(checkpoint, store, run)
    if first["native"] and other.world == 1:
        other_settings.append("model.implementation=native")
    last = workers.run(steps_of, other.world, other_settings, run, 1, True, other.forced)
    joined = {
        name: [first[name] + outcome[name] for outcome in last]
        for name in ("losses", "norms", "tokens")
    }
    kept = {name: first[name] for name in ("before", "gradients", "degrees", "native")}
    merged = {"merged": first["merged"] or last[0]["merged"]}
    return [
        {**outcome, **kept, **merged, **{k: values[rank] for k, values in joined.items()}}
        for rank, outcome in enumerate(last)
    ]


def steps_of(
    settings: list[str],
    run: Path,
    count: int,
    resume: bool = False,
    values: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """On each rank: the outcome of `count` steps, by the names of transformers; the first of two
    runs ends in a checkpoint."""
    with forced(**(values or {})):
        return _steps_of(settings, run, count, resume)


def _steps_of(settings: list[str], run: Path, count: int, resume: bool) -> dict[str, Any]:
    config = load(None, settings, world_size=dist.get_world_size())
    mesh = make_groups(torch.device("cpu"), **sizes_of_groups(config), timeout_s=60.0)
    run.mkdir(parents=True, exist_ok=True)
    saved = checkpoint.newest(run)[0] if resume else None
    trainer = assemble(Run.open(config, checkpoint=saved), mesh)
    model, outcome = trainer.model, dict[str, Any]()

    def named(value: Callable[[Any], Any]) -> Tensors:
        trained = (
            (name, weight) for name, weight in model.named_parameters() if weight.requires_grad
        )
        tensors = {
            name: whole(torch.zeros_like(weight) if (one := value(weight)) is None else one)
            for name, weight in trained
        }
        if not isinstance(model, PretrainedDecoder):
            return {name.removeprefix(OURS): tensor for name, tensor in tensors.items()}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, model.to_checkpoint(tensors))
        return {name: tensor for part in parts for name, tensor in part.items()}

    def look(*_: Any) -> None:
        outcome.setdefault("gradients", named(lambda weight: weight.grad))

    trainer.optimizer.register_step_pre_hook(look)
    outcome["before"] = named(lambda weight: weight)
    with trainer.loader:
        steps = [trainer.step() for _ in range(count)]
        if count == 1 and not resume:
            trainer.save()
    outcome |= {
        "losses": [m.loss for m in steps],
        "norms": [m.grad_norm for m in steps],
        "tokens": [m.tokens for m in steps],
    }
    degrees = {int(degree) for metrics in steps for degree in metrics.degrees}
    outcome["merged"] = any((m.computed_tokens or m.tokens) < m.tokens for m in steps)
    return outcome | {
        "after": named(lambda weight: weight),
        "degrees": degrees,
        "native": isinstance(model, PretrainedDecoder),
    }


# --- the comparison


def assert_same(case: Case, ours: list[dict[str, Any]], expected: dict[str, Any]) -> list[float]:
    """Compares every rank with the reference. The error tells what to run, and what differs most.

    Returns the largest errors of losses, norms, gradients and weights.
    """
    first, kind = ours[0], MODELS[case.model][0]
    if first["native"]:
        expected = expected | {
            name: as_saved(kind, expected[name]) for name in ("before", "gradients", "after")
        }
    problems = list(_problems(case, first, expected))
    for rank, outcome in enumerate(ours[1:], start=1):
        for name in ("losses", "norms", "tokens"):
            if outcome[name] != first[name]:
                problems.append(
                    f"rank {rank}: {name} {outcome[name]}, but rank 0 has {first[name]}"
                )
    if problems:
        run = f"pytest tests/training/test_parity.py -k '{case}'"
        raise AssertionError("\n".join([f"differs from one plain process: {run}", *problems[:8]]))
    numbers = (zip(first[name], expected[name], strict=True) for name in ("losses", "norms"))
    parts = ((what, first[what], expected[what]) for what in ("gradients", "after"))
    tensors = (
        [_error(what, name, one[name], other[name], expected) for name in one]
        for what, one, other in parts
    )
    return [max(abs(one / other - 1) for one, other in steps) for steps in numbers] + list(
        map(max, tensors)
    )


def _problems(case: Case, found: dict[str, Any], expected: dict[str, Any]) -> Iterable[str]:
    if found["tokens"] != expected["tokens"]:
        yield f"tokens of the steps: {found['tokens']}, not {expected['tokens']}"
    if found["merged"] != (case.data == "merged"):
        yield f"documents that begin alike were {'' if found['merged'] else 'not '}merged"
    if case.mode == "static" and found["degrees"] != {case.domain}:
        yield f"degrees: {found['degrees']}, not {case.domain}"
    if (
        case.mode == "bins"
        and case.domain > 1
        and case.resumed == "no"
        and len(found["degrees"]) < 2
    ):
        yield f"degrees: {found['degrees']}, though the bins have several"
    for name, most in (("losses", LOSS), ("norms", NORM)):
        for step, (ours, theirs) in enumerate(
            zip(found[name], expected[name], strict=True), start=1
        ):
            if not abs(ours / theirs - 1) <= most:
                yield (
                    f"{name} of step {step}: {ours:.9g}, not {theirs:.9g}: "
                    f"{abs(ours / theirs - 1):.1e} is over {most:g}"
                )
    for what, most in (("before", 0.0), ("gradients", GRADIENT), ("after", WEIGHTS)):
        ours, theirs = found[what], expected[what]
        if lost := (theirs.keys() ^ ours.keys()) - {"lm_head.weight"}:
            yield f"{what}: parameters {', '.join(sorted(lost)[:3])} are on one side alone"
            continue
        errors = {name: _error(what, name, ours[name], theirs[name], expected) for name in ours}
        worst = sorted((error, name) for name, error in errors.items() if not error <= most)
        if worst:
            names = ", ".join(f"{name} ({error:.1e})" for error, name in worst[:-4:-1])
            yield (
                f"{what}: {len(worst)} of {len(errors)} tensors are off by more than {most:g}: "
                f"{names}"
            )


def _error(
    what: str, name: str, ours: torch.Tensor, theirs: torch.Tensor, expected: dict[str, Any]
) -> float:
    """Returns the error relative to the gradient or the change of a weight, or to a thousandth of
    the largest."""
    sizes = expected["gradients"].values()
    scale = float(theirs.norm())
    if what == "before":
        return float((ours.float() - theirs.float()).abs().max())
    if what == "after":
        before = expected["before"]
        scale = float((theirs - before[name]).norm())
        sizes = [expected["after"][each] - before[each] for each in before]
    return float((ours - theirs).norm()) / max(
        scale, 1e-3 * max(float(each.norm()) for each in sizes)
    )
