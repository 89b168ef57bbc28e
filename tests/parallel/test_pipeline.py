"""What is special about pipelines: messages, buffers, checkpoints, failures. `tests.parity`
compares their losses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from longctx.config import load
from longctx.model.presets import PRESETS
from longctx.parallel.pipeline import PipelineRun, Stage
from longctx.planning.cost.work import split_layers
from longctx.training.metrics import StepMetrics
from longctx.training.objectives.objective import StepWeights
from longctx.training.runner import ModelRunner
from tests import training_cases
from tests.training_cases import train
from tests.workers import Workers

LAYERS = "model.overrides.num_hidden_layers=4"


@pytest.fixture(scope="module")
def alone(
    workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[StepMetrics]:
    """Results of three steps of one process."""
    return workers.run(train, 1, store, tmp_path_factory.mktemp("alone"), [LAYERS], 3)[0]


def pipeline(ranks: int, chunks: int = 1) -> list[str]:
    return [
        LAYERS,
        f"parallel.pipeline_parallel_size={ranks}",
        f"parallel.pipeline_chunks={chunks}",
    ]


HALF, STATIC = "batch.tokens_per_rank=376", ["context.mode=static", "context.degree=2"]


TENSOR = "parallel.tensor_parallel_size=2"


RESUMED = {
    "into an interleaved one": ((1, [LAYERS]), (2, pipeline(2, 2))),
    "into one with tensor ranks": (
        (3, [LAYERS, "batch.tokens_per_rank=250"]),
        (4, [*pipeline(2), TENSOR]),
    ),
    "from tensor ranks": (
        (6, [LAYERS, TENSOR, "batch.tokens_per_rank=250"]),
        (4, [*pipeline(2), HALF]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", RESUMED)
def test_resume_under_another_split(
    workers: Workers, store: Path, tmp_path: Path, alone: list[StepMetrics], way: str
) -> None:
    """Documents and losses equal those of one process that never stopped."""
    saved, resumed = RESUMED[way]
    workers.run(training_cases.train_then_save, saved[0], store, tmp_path, saved[1], 1)
    found = workers.run(train, resumed[0], store, tmp_path, resumed[1], 2, True)[0]
    assert [(m.step, m.tokens, m.target_tokens) for m in found] == [
        (m.step, m.tokens, m.target_tokens) for m in alone[1:]
    ]
    assert [m.loss for m in found] == pytest.approx([m.loss for m in alone[1:]], rel=1e-5)
    assert [m.grad_norm for m in found] == pytest.approx([m.grad_norm for m in alone[1:]], rel=1e-4)


@pytest.mark.slow
def test_buffers_exist_for_micro_batches_under_way(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    """Not for all micro-batches of a step: hidden states and gradients of two, and one message that
    is still being sent."""
    settings = [*pipeline(2), "batch.tokens_per_rank=750", "batch.global_tokens=10000"]
    for micro_batches, most in workers.run(
        training_cases.buffers_of_a_pipeline, 2, store, tmp_path, settings
    ):
        assert micro_batches > 8
        assert most <= 5


def test_blocks_are_resharded_after_their_backward(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    """As without a pipeline, if the settings say so; otherwise all weights of a rank stay gathered
    for the step."""
    for when, expected in (("block", 0), ("step", 2)):
        settings = [*pipeline(2, 2), HALF, *STATIC, f"parallel.reshard_after={when}"]
        for gathered in workers.run(
            training_cases.gathered_blocks_in_a_pipeline, 4, store, tmp_path / when, settings
        ):
            assert len(gathered) > 2
            assert max(gathered) == expected


def test_gradients_are_added_up_in_float32(workers: Workers, store: Path, tmp_path: Path) -> None:
    settings = [*pipeline(2, 2), "parallel.reshard_after=step", "batch.global_tokens=9000"]
    settings.append("train.dtype=bfloat16")
    for unsummed in workers.run(
        training_cases.unsummed_gradients_in_a_pipeline, 2, store, tmp_path, settings
    ):
        assert len(unsummed) >= 6
        assert max(unsummed) == 0


def test_empty_micro_batches_are_for_the_device_and_the_kernel_of_the_run() -> None:
    config = load(None, ["data.store=store", "context.kernel=reference"], world_size=1)
    mesh, model = SimpleNamespace(device=torch.device("meta"), rank=0), SimpleNamespace(spec=None)
    balance = SimpleNamespace(documents=lambda *_: None)
    passes = SimpleNamespace(config=config, mesh=mesh, model=model, balance=balance)
    batch = SimpleNamespace(micro_batches=(), plan=SimpleNamespace(micro_batches=()))
    given = ModelRunner.inputs(passes, batch, StepWeights(1.0), 0)
    assert len(given.tokens) == len(given.positions) == 0
    assert given.attention.device == given.tokens.device == torch.device("meta")
    assert given.attention.kernel == "reference"


def test_tensor_ranks_receive_their_share_of_the_rows() -> None:
    """Messages have room for the largest micro-batch; this one has 6 tokens for 2 ranks."""
    seen: list[torch.Tensor] = []

    def run(layers: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(x)
        return x + 1

    spec = SimpleNamespace(layers=range(3), tie_word_embeddings=False)
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    model: Any = SimpleNamespace(run=run, embed=None, layers=layers, spec=spec)
    stage = Stage(model, 1, range(1, 2))
    mine: Any = SimpleNamespace(
        tokens=torch.zeros(6), positions=None, attention=None, head=None, documents=None
    )
    stage.inputs = lambda number: mine
    stage.micro_batch, stage.wire_rows, stage.tensor_ranks = 0, 8, 2
    hidden = torch.arange(8.0)[:, None]
    sent = stage(hidden)
    assert torch.equal(seen[0], hidden[:3])
    assert sent[:, 0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_a_tied_gradient_is_summed_over_first_and_last_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages between them have no embedding, and take no part."""
    gradient = MagicMock()
    gradient.to_local.return_value = torch.tensor([1.0, 2.0])
    monkeypatch.setattr("longctx.parallel.pipeline.DTensor", MagicMock)
    monkeypatch.setattr(
        dist, "all_reduce", lambda total, group: total.mul_({"ends": 10, "stages": 100}[group])
    )
    run: Any = SimpleNamespace(
        mesh=SimpleNamespace(ends="ends", pipeline="stages", device=torch.device("cpu")),
        model=SimpleNamespace(
            spec=SimpleNamespace(tie_word_embeddings=True),
            embed_tokens=SimpleNamespace(weight=SimpleNamespace(grad=gradient)),
        ),
    )
    PipelineRun._add_up_tied_gradient(run)
    assert gradient.to_local().tolist() == [10, 20]


def test_stages_by_cost() -> None:
    """The last stage has the head, which costs as much as several small blocks; attention over long
    documents outweighs it."""
    shape = PRESETS["llama-3.2-1b"].model_copy(update={"vocab_size": 128_256})
    assert [len(layers) for layers in split_layers(shape.spec, 4, keys=0)] == [5, 5, 5, 1]
    assert [len(layers) for layers in split_layers(shape.spec, 4, keys=10_000_000)] == [4, 4, 4, 4]
    for stages in (1, 5, 16):
        layers = split_layers(shape.spec, stages, keys=4096)
        assert all(len(stage) > 0 for stage in layers)
        assert [layer for stage in layers for layer in stage] == list(range(16))


def test_a_rank_that_fails(workers: Workers, store: Path, tmp_path: Path) -> None:
    """The other ranks end within the timeout, with an error that names step, micro-batch, stage and
    layer."""
    settings = [*pipeline(2), HALF, *STATIC]
    with pytest.raises(AssertionError) as caught:
        workers.run(training_cases.with_rank_1_failing, 4, store, tmp_path, "dies", settings)
    assert (
        "rank 0: step 2, micro-batch 0, stage 0, forward pass, attention last in layer 1, forward "
        "pass" in str(caught.value)
    )
