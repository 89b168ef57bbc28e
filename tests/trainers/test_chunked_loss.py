"""The loss of transformers.Trainer in chunks: no logits of all tokens, the same losses, and models
that keep their logits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.trainers import dynamic_context_parallel, restore
from longctx.trainers.chunked_loss import ChunkedLoss
from longctx.training.objectives import loss
from tests.trainer_cases import PROFILE, VOCABULARY, documents, model, train
from tests.trainers.test_trainers import FSDP2, trainer
from tests.workers import Workers

CHUNK = 48
"""More than the hidden size, the rows of the head's transposed weight."""


class Logits(TorchDispatchMode):
    """Remembers the most rows of a tensor [.., vocabulary] that an operation returned."""

    rows = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[-1] == VOCABULARY:
            self.rows = max(self.rows, result.numel() // VOCABULARY)
        return result


def with_other_logits(kind: str) -> Any:
    """A small model with logits that are bounded (Gemma 2) or scaled (Granite), or with a bias."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    if kind == "gemma2":
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, head_dim=8))
    if kind == "granite":
        return transformers.GraniteForCausalLM(
            transformers.GraniteConfig(**sizes, logits_scaling=8.0)
        )
    made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    made.lm_head = torch.nn.Linear(32, VOCABULARY)
    return made


def losses(folder: Path, of: Any, **options: Any) -> tuple[list[float], int]:
    """Returns the losses of two steps and an evaluation, and the most rows of logits."""
    ours = trainer(folder, of=of, max_steps=2, logging_steps=1, **options)
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    with Logits() as logits:
        ours.train()
        evaluated = ours.evaluate(ours.train_dataset[:5])["eval_loss"]
    restore(ours)
    return [entry["loss"] for entry in ours.state.log_history if "loss" in entry] + [
        evaluated
    ], logits.rows


@pytest.mark.parametrize("kind", ["qwen2", "gpt_oss", "tied", "few labels"])
def test_logits_of_all_tokens_never_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    data = documents()
    if kind == "few labels":  # rows without one have no logits at all
        for row in data:
            row["labels"] = [
                label if place % 5 == 1 else -100 for place, label in enumerate(row["labels"])
            ]

    def made() -> Any:
        each = model(kind if kind == "gpt_oss" else "qwen2")
        if kind == "tied":
            each.config.tie_word_embeddings = True
            each.tie_weights()
        return each

    with monkeypatch.context() as patch:
        patch.setattr("longctx.trainers.dynamic.ChunkedLoss.of", lambda *_: None)
        expected, rows = losses(tmp_path / "all", made(), data=data)
    assert rows > 100
    monkeypatch.setattr("longctx.training.objectives.loss.CHUNK_TOKENS", CHUNK)
    found, rows = losses(tmp_path / "chunks", made(), data=data)
    assert found == pytest.approx(expected, rel=1e-6)
    assert rows <= CHUNK


def test_rows_are_those_of_the_micro_batch_that_runs() -> None:
    """Few rows with a label, and then many, of which none may be left out."""
    chunked = ChunkedLoss(model(), torch.device("cpu"))
    few = torch.full((64,), -100)
    few[[3, 50]] = 7
    chunked.begin(SimpleNamespace(labels=few), 0)
    assert chunked.rows is not None and chunked.rows.tolist() == [3, 50]
    chunked.begin(SimpleNamespace(labels=torch.ones(64, dtype=torch.int64)), 0)
    assert chunked.rows is None


@pytest.mark.parametrize("kind", ["gemma2", "granite", "bias"])
def test_other_logits_and_losses_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("longctx.training.objectives.loss.CHUNK_TOKENS", CHUNK)
    assert losses(tmp_path, with_other_logits(kind))[1] > 100


def rows_of_rank(folder: Path, options: dict[str, Any]) -> int:
    """Returns the most rows of logits of a run with evaluations on this rank."""
    loss.CHUNK_TOKENS, before = CHUNK, loss.CHUNK_TOKENS
    try:
        with Logits() as logits:
            train(folder, "qwen2", 1, True, options)
    finally:
        loss.CHUNK_TOKENS = before
    return logits.rows


@pytest.mark.parametrize("options", [{}, FSDP2], ids=["replicated", "sharded"])
def test_nor_on_several_ranks(workers: Workers, tmp_path: Path, options: dict[str, Any]) -> None:
    """The losses of these runs are compared in `test_trainers`."""
    assert (
        workers.run(
            rows_of_rank, 2, tmp_path, options | {"max_steps": 2, "prediction_loss_only": True}
        )
        == [CHUNK] * 2
    )


def test_gradients_of_the_head_are_added_in_float32_without_a_product_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By an operation that only GPUs have: its arguments are those of torch's schema."""
    known = [
        schema
        for schema in torch._C._jit_get_schemas_for_operator("aten::addmm")
        if schema.overload_name == "dtype_out"
    ]
    assert len(known) == 1 and {"out_dtype", "out"} <= {
        argument.name for argument in known[0].arguments
    }
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "addmm", lambda *given, **options: calls.append((given, options)))
    with FakeTensorMode(), Products() as products:
        total, a, b = (torch.empty(*shape, device="cuda") for shape in ((8, 4), (8, 3), (3, 4)))
        loss._add_product(total, a.bfloat16(), b.bfloat16())
        assert not products.seen
        (((sum_, *_), options),) = calls
        assert sum_ is options["out"] is total and options["out_dtype"] == torch.float32
    total, a, b = torch.ones(8, 4), torch.randn(8, 3), torch.randn(3, 4)
    with Products() as products:
        loss._add_product(total, a, b)
    assert products.seen == {"aten::addmm_"} and torch.allclose(total, 1 + a @ b)
    loss._add_product(total, a.bfloat16(), b.bfloat16())
    assert torch.allclose(total, 1 + 2 * (a @ b), atol=0.1)


class Products(TorchDispatchMode):
    """Remembers operations that multiply matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.seen |= {function._schema.name} & {"aten::mm", "aten::addmm", "aten::addmm_"}
        return function(*arguments, **(named or {}))
