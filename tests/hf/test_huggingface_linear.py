"""Models with gated delta nets, Kimi Delta Attention and Mamba-2 over split documents equal their
own code in one process."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from longctx import make_plan
from longctx.config import load
from longctx.data.packing import pack_documents
from longctx.hf.attention import HuggingFaceError, model_inputs, prepare
from longctx.planning.assignment import Assignment
from longctx.planning.cost.model import score
from longctx.planning.cost.scaling import scale
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.work import work_of
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Placement
from tests.data_cases import placed_plan
from tests.family_cases import build, largest_error
from tests.huggingface_cases import gradients, make_documents, unpacked
from tests.marks import slow_unless
from tests.pretrained_cases import SETTINGS, assert_step, reference, step
from tests.workers import Workers

H100 = HardwareProfile.load("h100-nvlink-ib")
KINDS = ("qwen3_next", "kimi_linear", "mamba2", "falcon_h1")
LENGTHS = (97, 1, 5, 61, 3, 130, 2, 8)
PLACEMENTS = (
    (
        Placement(0, 0, 4),
        Placement(1, 1, 3),
        Placement(2, 0, 4, True),
        Placement(3, 1, 2),
        Placement(4, 0, 3),
    ),
    (Placement(5, 0, 3, True), Placement(6, 0, 2)),
    (Placement(7, 2, 1),),
)
"""Degrees 1 to 4 side by side, documents with fewer tokens than chunks, and ranks without
tokens."""


def split_step(kind: str, recompute: bool) -> tuple[float, list[torch.Tensor]]:
    """Runs on each rank: loss and gradients of a step; with `recompute`, all forward passes come
    before the first backward."""
    model = build(kind, "eager")
    prepare(model)
    if recompute:
        model.gradient_checkpointing_enable()
    plan = placed_plan(LENGTHS, dist.get_world_size(), PLACEMENTS)
    micro_batches, targets = pack_documents(plan, dist.get_rank(), make_documents(LENGTHS))
    losses = []
    for batch in micro_batches:
        losses.append(model(**model_inputs(model, batch, targets)).loss)
        if not recompute:
            losses[-1].backward()
    for loss in reversed(losses if recompute else []):
        loss.backward()
    total = torch.stack(losses).detach().sum()
    dist.all_reduce(total)
    found = gradients(model)
    for gradient in found:
        dist.all_reduce(gradient)
    return total.item(), found


@pytest.mark.parametrize(
    ("kind", "recompute"),
    slow_unless(
        lambda kind, recompute: recompute and kind == "mamba2",
        product(KINDS, (False, True)),
    ),
)
def test_split_documents_train_as_in_one_process(
    workers: Workers, kind: str, recompute: bool
) -> None:
    loss, expected = unpacked(build(kind, "eager"), make_documents(LENGTHS))
    for found_loss, found in workers.run(split_step, 4, kind, recompute):
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert largest_error(found, expected) < 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        build(kind, "eager").save_pretrained(folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "mamba2", KINDS))
def test_a_step_of_the_trainer_is_that_of_transformers(
    workers: Workers, checkpoints: dict[str, Path], kind: str
) -> None:
    assert_step(workers.run(step, 3, checkpoints[kind], []), reference(checkpoints[kind]))


OPTIONS = {
    "recompute": ["train.recompute=full"],
    "recompute, attention kept": ["train.recompute=selective"],
    "recompute the MLP": ["train.recompute=mlp", "context.ulysses_degree=2"],
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "recompute the MLP", OPTIONS))
def test_settings_change_nothing(workers: Workers, checkpoints: dict[str, Path], name: str) -> None:
    assert_step(
        workers.run(step, 2, checkpoints["qwen3_next"], OPTIONS[name]),
        reference(checkpoints["qwen3_next"]),
    )


def spec_of(folder: Path) -> ModelSpec:
    return (
        load(None, [*SETTINGS, f"model.from_pretrained={folder}"], world_size=1).model_source().spec
    )


def test_layers_without_attention_cost_no_attention(checkpoints: dict[str, Path]) -> None:
    spec = spec_of(checkpoints["qwen3_next"])
    linear, full = spec.layers
    assert (linear.attends, full.attends) == (False, True)
    assert linear.attention_flops(1000) == 0 < full.attention_flops(1000)
    config = transformers.AutoConfig.from_pretrained(checkpoints["qwen3_next"])
    k_dim, v_dim, heads = (
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_num_value_heads,
    )
    assert linear.scan.state_size == heads * k_dim * (k_dim + v_dim) and full.scan is None
    work = work_of(spec, "float32")
    assert work.attention == full.num_attention_heads * full.head_dim
    assert work.kv_bytes == work_of(replace(spec, layers=(full,)), "float32").kv_bytes
    # A head and a tail of float32 states, in forward and in backward, and again if backward
    # recomputes the block.
    assert work.state_bytes == 2 * 4 * linear.scan.state_size * 2
    assert (
        work_of(spec, "float32", recompute="full").state_bytes == 2 * 4 * linear.scan.state_size * 3
    )
    mamba = spec_of(checkpoints["mamba2"])
    assert not any(layer.attends for layer in mamba.layers)
    profile = scale(H100, work_of(spec, "float32"), work_of(mamba, "float32"))
    plan = make_plan([4000, 300, 20], ranks=4, tokens_per_rank=2000, profile=profile)
    assert plan.degrees and profile.state_bytes == work_of(mamba, "float32").state_bytes > 0


def test_states_cost_the_same_for_every_length_and_nothing_hides_them() -> None:
    ring = Assignment(np.array([0]), np.array([0]), np.array([4]), np.array([False]))
    for length in (1000, 64_000):
        times = [
            score(replace(H100, latency_s=0.0, state_bytes=each), np.array([length]), ring, 4).time
            for each in (0.0, 1e6)
        ]
        assert (times[1] - times[0])[0].tolist() == [
            pytest.approx(3e6 / H100.intra_node_bytes_per_s * 1e9, abs=3)
        ] * 4


def test_a_linear_layer_without_a_layout_is_an_error() -> None:
    model = build("mamba2", "eager")
    ids = torch.arange(8)[None]
    before = model(input_ids=ids, use_cache=False).logits
    prepare(model)
    with pytest.raises(HuggingFaceError, match="Mamba2Mixer was called without a layout"):
        model(input_ids=ids, use_cache=False)
    other = build("mamba2", "eager")  # of the same class, not prepared
    assert torch.equal(other(input_ids=ids, use_cache=False).logits, before)
