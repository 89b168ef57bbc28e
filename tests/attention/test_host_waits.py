"""Inside a step the host never waits for a GPU: it reads loss and gradient norm once, after the
optimizer. Optimizers that cannot leave out an update wait for whether these are finite."""

import itertools
from pathlib import Path

import pytest
import torch

from longctx.attention.linear.scan import Scan
from longctx.attention.linear.segments import RankSegments
from longctx.data.packing import pack_documents
from longctx.hf.attention import model_inputs, prepare
from longctx.planning.layout import Layout, Placement
from longctx.planning.planners.planner import make_plan
from longctx.training.objectives.loss import log_probabilities, rows_with_labels
from tests.data_cases import placed_plan
from tests.host_waits import HostWaits, waits_of_a_step, waits_of_the_loop
from tests.workers import Workers

READ = {"cpu at read", "clock at _gather"}
"""After the optimizer."""
ONCE = READ | {"__bool__ at _update"}
"""With AdamW on a CPU, which is not fused."""
IDLE = {"clock at idle"}
"""Of a pipeline, beside the loss."""
RING = ["batch.tokens_per_rank=376"]
MIXTURE = [
    *(
        "model.preset=tiny-moe",
        "model.overrides.num_hidden_layers=2",
        "model.overrides.first_dense_layers=0",
        "model.overrides.moe_intermediate_size=16",
    ),
    *("balance.document_loss=0.1", "balance.z_loss=0.1", *RING),
]
RUNS = {
    "ring, recompute selective, bfloat16": (
        2,
        [*RING, "train.recompute=selective", "train.dtype=bfloat16"],
    ),
    "two levels, keys kept": (4, [*RING, "context.keep_kv=true", "parallel.reshard_after=step"]),
    "tensor parallel": (2, ["parallel.tensor_parallel_size=2"]),
    "MLP in tiles": (1, ["train.mlp_tile_tokens=100"]),
    "experts over ranks": (2, [*MIXTURE, "parallel.expert_parallel_size=2"]),
    "pipeline": (2, ["parallel.pipeline_parallel_size=2", "model.overrides.num_hidden_layers=4"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_waits_once(workers: Workers, store: Path, tmp_path: Path, name: str) -> None:
    ranks, settings = RUNS[name]
    found = workers.run(waits_of_a_step, ranks, store, tmp_path, settings)
    # The last one beside the loss.
    of_experts = {"cpu at _of_all_ranks"} if "expert" in name else set()
    assert set().union(*found) == ONCE | of_experts | (IDLE if name == "pipeline" else set())


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, [*RING, "train.dtype=bfloat16"]),
        (2, [*RING, "optimizer.name=muon"]),
        pytest.param(2, MIXTURE, marks=pytest.mark.slow),
        pytest.param(2, RUNS["pipeline"][1], marks=pytest.mark.slow),
        pytest.param(2, ["parallel.tensor_parallel_size=2"], marks=pytest.mark.slow),
        pytest.param(1, [], marks=pytest.mark.slow),
    ],
)
def test_nothing_is_read_between_backward_and_optimizer(
    workers: Workers, store: Path, tmp_path: Path, ranks: int, settings: list[str]
) -> None:
    """With the optimizer of GPUs, which leaves out updates there."""
    for between, later in workers.run(waits_of_the_loop, ranks, store, tmp_path, settings):
        assert between == set()
        assert later - {"clock at idle"} == READ


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_a_step_of_transformers_waits_once(
    workers: Workers, store: Path, tmp_path: Path, kind: str
) -> None:
    from tests.lora_cases import make_checkpoint, settings_of

    settings = settings_of(make_checkpoint(tmp_path, kind), "batch.tokens_per_rank=250")
    found = workers.run(waits_of_a_step, 2, store, tmp_path / "run", settings)
    assert set().union(*found) == ONCE


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "roberta", "mamba2"])
def test_a_step_of_a_trainer_waits_nowhere_in_longctx(
    workers: Workers, tmp_path: Path, kind: str
) -> None:
    from tests.trainer_cases import train

    options = {"watched": True, "max_steps": 2, "eval_strategy": "no"}
    found = [each["waits"] for each in workers.run(train, 2, tmp_path, kind, 1, True, options)]
    assert set().union(*found) == set()


def test_a_call_of_a_trainer_of_sequences_waits_for_its_batch_alone(
    workers: Workers, tmp_path: Path
) -> None:
    """And once a step for transformers' count of targets, inside the call that draws the batches on
    all ranks."""
    from tests.trainer_cases import prefer

    found = [
        each["waits"]
        for each in workers.run(prefer, 2, tmp_path, "DPO", True, {"watched": True, "lora": 0.05})
    ]
    # TRL's metrics, within its training_step.
    of_trl = {f"{read} at averaging" for read in ("__bool__", "index", "item")}
    assert set().union(*found) - of_trl == {
        "cpu at host_field",
        "cpu at values_of",
        "pageable copy by to at attempted",
    }


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_an_own_loop_reads_nothing_of_a_micro_batch(kind: str) -> None:
    """Bare `model(**model_inputs(..))`: transformers would look for packed sequences in the
    positions."""
    from transformers import masking_utils

    from tests.huggingface_cases import build_model, make_documents

    model = build_model(kind, "longctx")
    everything = [[Placement(0, 0, 1), Placement(1, 0, 1)]]
    (batch,), targets = pack_documents(
        placed_plan((9, 20), 1, everything), 0, make_documents((9, 20))
    )
    watch = HostWaits()
    with watch.watching(itertools.chain(model.parameters(), model.buffers())):
        for _ in range(2):
            model(**model_inputs(model, batch, targets, device=torch.device("cpu"))).loss.backward()
    assert watch.found == set() and watch.on_device
    derive = masking_utils.find_packed_sequence_indices
    assert derive(torch.tensor([[0, 1, 0]])).tolist() == [[0, 0, 1]], (
        "plain calls of transformers are as before"
    )


def test_a_step_with_images_and_videos_reads_no_masks(workers: Workers, tmp_path: Path) -> None:
    """Transformers' own code reads its grids there."""
    from tests import vision_cases
    from tests.vision_trainer_cases import train

    model = vision_cases.save_model(tmp_path / "model", "qwen2_5_vl")
    options = {"videos": True, "watched": True, "max_steps": 2}
    found = set().union(
        *(
            each["waits"]
            for each in workers.run(train, 2, tmp_path / "run", model, "qwen2_5_vl", True, options)
        )
    )
    assert "tolist at _encode" in found and not found & {"index at _encode", "__bool__ at _encode"}


def test_waits_are_found() -> None:
    labels, hidden, weight = torch.tensor([-100, 1, -100, -100]), torch.ones(4, 2), torch.ones(3, 2)
    watch = HostWaits()
    with watch.watching(iter([labels, hidden, weight])):
        rows_with_labels(labels)
    assert watch.found == {"nonzero at labelled_rows"}
    watch = HostWaits()
    with watch.watching(iter([labels, hidden, weight])):
        log_probabilities(hidden, weight, labels, rows=torch.tensor([1]))
    assert watch.found == set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scan_is_built_without_pageable_copies(rank: int) -> None:
    layout = Layout.of(
        (Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 1, 1)), (40, 9, 7), 0, rank
    )
    watch = HostWaits()
    with watch.watching(iter([])):
        Scan.build(RankSegments.of(layout, layout.tokens), torch.device("cpu"))
    assert watch.found == set() and watch.on_device


def test_inputs_of_a_prepared_model_are_no_pageable_copies() -> None:
    from tests.trainer_cases import PROFILE, model

    watch, made = HostWaits(), model()
    prepare(made)
    (batch,), targets = pack_documents(
        make_plan([3], ranks=1, tokens_per_rank=8, profile=PROFILE), 0, [[0, 1, 2]], [[0, 1, 2]]
    )
    with watch.watching(iter([])):
        inputs = model_inputs(made, batch, targets, device=torch.device("cpu"))
    assert watch.found == set() and watch.on_device and inputs["input_ids"].tolist() == [[0, 1, 2]]
