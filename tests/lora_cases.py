"""LoRA on tiny checkpoints: runs of the trainer over several ranks, and plain peft and transformers
over unpacked documents."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from longctx.config import Config, load
from longctx.data.sampler import Sampler
from longctx.data.store.store import Store
from longctx.hf.lora import write_adapter
from longctx.hf.model import OURS
from longctx.model.compilation import compile_blocks
from longctx.training import build
from longctx.training.optimizer import learning_rate
from longctx.training.trainer import Trainer
from tests.huggingface_cases import build_model
from tests.training_cases import SMALL, start, whole

RANK, ALPHA = 4, 12.5  # neither alpha nor the scale is a whole number
SETTINGS = [
    f"lora.rank={RANK}",
    f"lora.alpha={ALPHA}",
    "data.max_length=300",
    "batch.global_tokens=700",
    "optimizer.learning_rate=0.02",
    "checkpoint.every=5",
]
STEPS = 3
Tensors = dict[str, torch.Tensor]


def make_checkpoint(folder: Path, kind: str, **settings: Any) -> Path:
    """Builds a model whose weights depend only on its type, with the vocabulary of a byte-level
    store."""
    build_model(
        kind, "eager", **{"vocab_size": 260, "num_hidden_layers": 3, **settings}
    ).save_pretrained(folder / kind)
    return folder / kind


def settings_of(checkpoint: Path, *others: str) -> list[str]:
    """Returns the settings for a checkpoint, without the SMALL ones of the native model."""
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    return [
        *(f"model.overrides.{name}=null" for name in sizes),
        f"model.from_pretrained={checkpoint}",
        *SETTINGS,
        *others,
    ]


def draw(model: torch.nn.Module) -> Tensors:
    """Returns values of every parameter and persistent buffer: the checkpoint's, and adapters with
    visible effect."""
    generator = torch.Generator().manual_seed(0)
    values = {
        name: model.initial_value(name, weight.detach(), 3)
        for name, weight in model.named_parameters()
    }
    for name, value in values.items():
        if "lora_" in name:
            noise = torch.randn(value.shape, generator=generator)
            values[name] = 0.1 * noise
    return values


def loaded_by_peft(
    folder: Path, checkpoint: Path, model: torch.nn.Module, values: Tensors, dtype: str
) -> PeftModel:
    """Writes the adapter, and returns peft's model of it after comparing the adapter's values."""
    write_adapter(folder, model, {name: value for name, value in values.items() if "lora_" in name})
    base = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=getattr(torch, dtype)
    )
    loaded = PeftModel.from_pretrained(base, folder).eval()
    theirs = {
        name.removeprefix("base_model.model."): weight
        for name, weight in loaded.named_parameters()
        if "lora_" in name
    }
    assert theirs.keys() == {name.removeprefix(OURS) for name in values if "lora_" in name}
    for name, value in theirs.items():
        assert torch.equal(value.float(), values[f"{OURS}{name}"]), name
    return loaded


def weights_of(trainer: Trainer) -> tuple[Tensors, Tensors]:
    """Returns trained and frozen weights, whole, by the names of transformers."""
    named = [(name.removeprefix(OURS), weight) for name, weight in trainer.model.named_parameters()]
    trained, frozen = (
        {name: whole(w) for name, w in named if w.requires_grad is wanted}
        for wanted in (True, False)
    )
    return trained, frozen


def run(
    store: Path, folder: Path, settings: list[str], steps: int = STEPS, resume: bool = False
) -> dict[str, Any]:
    """Returns on each rank the results of a run of `steps` steps."""
    trainer = start(store, folder, settings, resume=resume)
    _, frozen = weights_of(trainer)
    with trainer.loader:
        losses = [trainer.step().loss for _ in range(steps)]
    last, frozen_after = weights_of(trainer)
    same = all(torch.equal(frozen[name], weight) for name, weight in frozen_after.items())
    dtypes = (
        {str(weight.dtype) for weight in frozen.values()},
        {str(weight.dtype) for weight in last.values()},
    )
    states = [
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if value.numel() > 1
    ]
    return {
        "losses": losses,
        "last": last,
        "frozen stays": same,
        "dtypes": dtypes,
        "moments": sum(value.numel() for value in states),
    }


def run_compiled(
    store: Path, folder: Path, settings: list[str], steps: int
) -> tuple[list[float], int, int]:
    """Returns losses with blocks compiled by a backend that counts, and the numbers of graphs and
    of graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounter()
    build.compile_blocks = partial(compile_blocks, backend=counter)
    try:
        losses = run(store, folder, [*settings, "train.compile=true"], steps)["losses"]
    finally:
        build.compile_blocks = compile_blocks
    return losses, counter.frame_count, sum(torch._dynamo.utils.counters["graph_break"].values())


def run_with_checkpoints(store: Path, folder: Path, settings: list[str]) -> Tensors:
    """Runs the real loop to its end; returns the trained weights."""
    trainer = start(store, folder, settings)
    trainer.train()
    return weights_of(trainer)[0]


def resumed(store: Path, folder: Path, settings: list[str]) -> Tensors:
    trainer = start(store, folder, settings, resume=True)
    assert 0 < trainer.steps_done < trainer.config.train.steps
    trainer.train()
    return weights_of(trainer)[0]


def resuming_fails(store: Path, folder: Path, settings: list[str]) -> str:
    try:
        start(store, folder, settings, resume=True)
    except ValueError as error:
        return str(error)
    raise AssertionError("a checkpoint of other adapters must be refused")


def reference(
    checkpoint: Path,
    store: Path,
    settings: list[str],
    first: Tensors,
    target_modules: Any = "all-linear",
    quantize: Callable[[Any], None] = lambda blocks: None,
    **options: Any,
) -> tuple[list[float], Tensors]:
    """Returns losses and adapters of one process on one document after another, with plain peft and
    eager attention."""
    config = load(None, [*SMALL, *settings, f"data.store={store}"])
    hf = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    quantize(hf.base_model)
    lora = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=target_modules, lora_dropout=0.0, **options
    )
    model = get_peft_model(hf, lora).eval()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.removeprefix("base_model.model.") for name in trained} == set(first)
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(first[name.removeprefix("base_model.model.")])
    losses = plain_loop(model, trained, config, store)
    return losses, {
        name.removeprefix("base_model.model."): weight.detach() for name, weight in trained.items()
    }


def plain_loop(
    model: torch.nn.Module, trained: Tensors, config: Config, store: Path, steps: int = STEPS
) -> list[float]:
    """Returns losses of `steps` steps of one process on one document after another, by a model of
    transformers.

    The cross-entropy is computed in float64: in float32, torch's own is off by 8e-6 for a
    vocabulary of 49,152 entries.
    """
    given = config.optimizer
    optimizer = torch.optim.AdamW(
        trained.values(), betas=given.betas, eps=given.eps, weight_decay=given.weight_decay
    )
    losses = []
    for step, documents in enumerate(documents_of(config, store, steps), start=1):
        losses.append(0.0)
        targets = sum(int((labels >= 0).sum()) for _, labels in documents)
        for tokens, labels in documents:
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].double()
            loss = (
                torch.nn.functional.cross_entropy(
                    logits, labels, ignore_index=-100, reduction="sum"
                )
                / targets
            )
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(trained.values(), given.clip_grad_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(step, config.train.steps, given)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def documents_of(
    config: Config, store: Path, count: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yields tokens and shifted labels of every document of `count` steps."""
    opened, given = Store.open(store), config.data
    assert given.max_length is not None
    sampler = Sampler(
        opened,
        global_tokens=config.batch.global_tokens,
        seed=config.train.seed,
        max_length=given.max_length,
    )
    steps, cursor = [], 0
    for _ in range(count):
        pieces, cursor = sampler.step(cursor)
        spans = (
            opened.read(piece.document, piece.start, piece.stop, end=piece.stop) for piece in pieces
        )
        steps.append(
            [(torch.from_numpy(tokens), torch.from_numpy(labels)) for tokens, labels in spans]
        )
    return steps


def gathered_losses(results: list[dict[str, Any]]) -> list[float]:
    assert all(result["losses"] == results[0]["losses"] for result in results)
    return list(results[0]["losses"])
