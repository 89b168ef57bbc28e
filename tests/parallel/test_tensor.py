"""What is special about tensor parallelism: sizes, vocabulary, checkpoints. `tests.parity` compares
losses of splits."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import _CachingTorchDispatchMode

from longctx.attention.products import KEPT
from longctx.model.decoder import Decoder
from longctx.parallel.expert import sparse_layers
from longctx.parallel.mesh import make_groups
from longctx.parallel.sharding import local_part
from longctx.parallel.tensor import ENDS
from longctx.training.metrics import StepMetrics
from longctx.training.objectives.loss import cross_entropy_sum, rows_with_labels
from tests import calibration_cases
from tests.training_cases import start, train, train_and_save, train_then_save
from tests.workers import Workers

WITHOUT = "parallel.tensor_parallel_size=1"
TWO = "parallel.tensor_parallel_size=2"
FOUR = "parallel.tensor_parallel_size=4"
UNTIED = "model.overrides.tie_word_embeddings=false"


def assert_equal(split: list[StepMetrics], alone: list[StepMetrics]) -> None:
    """The steps of a split run equal those of one process."""
    alone = alone[: len(split)]
    assert [m.tokens for m in split] == [m.tokens for m in alone]
    assert [m.target_tokens for m in split] == [m.target_tokens for m in alone]
    assert [m.loss for m in split] == pytest.approx([m.loss for m in alone], rel=1e-5)
    assert [m.grad_norm for m in split] == pytest.approx([m.grad_norm for m in alone], rel=1e-4)


ODD = [
    "model.vocab_size=271",
    "model.overrides.intermediate_size=67",
    "model.overrides.hidden_size=37",
    "model.overrides.num_key_value_heads=4",
]
"""Only the heads are divisible by the tensor ranks; no other size is, nor a tensor rank's part by
the domain."""


@pytest.fixture(scope="module")
def alone_odd(
    workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[StepMetrics]:
    return workers.run(train, 1, store, tmp_path_factory.mktemp("alone-odd"), ODD, 3)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (8, [FOUR, "batch.tokens_per_rank=376"]),
        (8, [TWO, "batch.tokens_per_rank=250", "parallel.shard_ranks=2"]),
    ],
)
def test_sizes_need_not_be_divisible(
    workers: Workers,
    store: Path,
    alone_odd: list[StepMetrics],
    tmp_path: Path,
    ranks: int,
    settings: list[str],
) -> None:
    assert_equal(workers.run(train, ranks, store, tmp_path, [*ODD, *settings], 2)[0], alone_odd)


@pytest.mark.slow
def test_resume_of_sizes_that_are_not_divisible(
    workers: Workers, store: Path, alone_odd: list[StepMetrics], tmp_path: Path
) -> None:
    settings = [*ODD, TWO, "batch.tokens_per_rank=376"]
    workers.run(train_then_save, 4, store, tmp_path / "saved", settings, 1)
    for ranks, other in (
        (1, [WITHOUT, "batch.tokens_per_rank=750"]),
        (2, ["batch.tokens_per_rank=750"]),
    ):
        run = shutil.copytree(tmp_path / "saved", tmp_path / f"on-{ranks}")
        assert_equal(
            workers.run(train, ranks, store, run, [*settings, *other], 2, True)[0], alone_odd[1:]
        )


def test_tokens_are_counted_once(workers: Workers, store: Path, tmp_path: Path) -> None:
    for metrics in workers.run(train, 2, store, tmp_path, [TWO], 1)[0]:
        padding = metrics.tokens % 2
        assert metrics.micro_batches == 1
        assert metrics.padding_share == padding / (metrics.tokens + padding)
        assert metrics.tokens_per_s_per_rank == pytest.approx(
            metrics.tokens / metrics.step_time_s / 2
        )


def first_weights(store: Path, run: Path, settings: list[str]) -> tuple[float, int]:
    """Returns the share of the model's parameters on this rank, and the maximum length of
    documents."""
    trainer = start(
        store, run, [TWO, UNTIED, "data.max_length=null", "batch.tokens_per_rank=350", *settings]
    )
    trainer.loader.close()
    whole = Decoder(trainer.model.shape)
    whole.initialize(trainer.config.train.seed)
    for (name, mine), wanted in zip(
        trainer.model.named_parameters(), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.full_tensor(), wanted, rtol=0, atol=0, msg=name)
    held = sum(parameter.to_local().numel() for parameter in trainer.model.parameters())
    return held / trainer.model.spec.parameters, int(trainer.loader.state_dict()["max_length"])


@pytest.mark.parametrize(("ranks", "settings"), [(4, []), (6, ODD)])
def test_first_weights_and_documents_do_not_depend_on_the_split(
    workers: Workers, store: Path, tmp_path: Path, ranks: int, settings: list[str]
) -> None:
    answers = workers.run(first_weights, ranks, store, tmp_path, settings)
    shares = [share for share, _ in answers]
    assert sum(shares) == pytest.approx(1, abs=0.02), "only norms are on both ranks of the axis"
    assert max(shares) < 1.08 / ranks
    assert {longest for _, longest in answers} == {350 * ranks // 2}, (
        "the ranks of the domain hold a document, not all of them"
    )


def loss_over_a_split_vocabulary() -> None:
    """Loss and gradients in float64, chunk by chunk, against those of one process; 11 entries are
    not divisible."""
    ranks = dist.get_world_size()
    mesh = make_groups(torch.device("cpu"), tensor=ranks).tensor
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(6 * ranks, 5, dtype=torch.float64),
        torch.randn(11, 5, dtype=torch.float64),
    )
    for valid in (0.7, 0.3, 0.0):
        labels = torch.randint(0, 11, (6 * ranks,)).where(torch.rand(6 * ranks) < valid, -100)
        plain = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        wanted = cross_entropy_sum(plain[0], plain[1], labels, 7)
        (2 * wanted).backward()
        split = [
            distribute_tensor(tensor, mesh, [Shard(0)]).requires_grad_()
            for tensor in (hidden, weight)
        ]
        found = cross_entropy_sum(
            split[0], split[1], labels, 7, chunk_tokens=4, rows=rows_with_labels(labels)
        )
        (2 * found).backward()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        for mine, whole in zip(split, plain, strict=True):
            assert isinstance(mine.grad, DTensor)
            assert mine.grad.placements == (Shard(0),)
            torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("ranks", [2, 3])
def test_cross_entropy_over_a_split_vocabulary(workers: Workers, ranks: int) -> None:
    workers.run(loss_over_a_split_vocabulary, ranks)


def gradient_of_a_split_embedding() -> None:
    mesh = make_groups(torch.device("cpu"), tensor=dist.get_world_size()).tensor
    entries, tokens = 5, torch.tensor([0, 4, 4, 2])
    model = nn.Module()
    model.embed_tokens = nn.Embedding(entries, 3)
    parallelize_module(model, mesh, {"embed_tokens": ENDS["embed_tokens"]})
    weight = model.embed_tokens.weight
    whole = weight.full_tensor().detach().requires_grad_()
    F.embedding(tokens, whole).square().sum().backward()
    out = model.embed_tokens(tokens)
    assert torch.equal(out, F.embedding(tokens, whole).chunk(mesh.size())[mesh.get_local_rank()])
    out.square().sum().backward()
    assert weight.grad.placements == (Shard(0),), (
        "a whole gradient on every rank would take its size in memory"
    )
    assert len(weight.grad.to_local()) == len(weight.to_local())
    assert torch.equal(weight.grad.full_tensor(), whole.grad)


def test_the_gradient_of_a_split_embedding_is_split(workers: Workers) -> None:
    workers.run(gradient_of_a_split_embedding, 2)


def gradient_of_frequent_entries() -> None:
    mesh = make_groups(torch.device("cpu"), tensor=dist.get_world_size()).tensor
    tokens = torch.arange(16_000) % 4
    model = nn.Module()
    model.embed_tokens = nn.Embedding(5, 3, dtype=torch.bfloat16)
    parallelize_module(model, mesh, {"embed_tokens": ENDS["embed_tokens"]})
    out = model.embed_tokens(tokens)
    gradient = torch.rand(16_000, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    out.backward(gradient.chunk(mesh.size())[mesh.get_local_rank()])
    exact = torch.zeros(5, 3).index_add_(0, tokens, gradient.float())
    torch.testing.assert_close(
        model.embed_tokens.weight.grad.full_tensor().float(), exact, rtol=1e-2, atol=0
    )


def test_gradient_of_frequent_entries_of_a_split_embedding_in_bfloat16(workers: Workers) -> None:
    """As without tensor parallelism: 4,000 gradients are too many to add one by one in bfloat16."""
    workers.run(gradient_of_frequent_entries, 2)


def test_one_process_writes_the_run_folder(workers: Workers, store: Path, tmp_path: Path) -> None:
    assert workers.run(
        train_and_save, 2, store, tmp_path, [TWO, "train.steps=1", "checkpoint.every=1"]
    ) == [True, True]
    assert [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == [1]
    assert (tmp_path / "latest" / "state.json").is_file()


@pytest.mark.slow
def test_a_profile_is_of_a_ranks_own_heads(workers: Workers) -> None:
    two, _ = workers.run(calibration_cases.measure_profile, 2, [0, 1], [TWO])
    assert two["profile"]["kv_bytes_per_token"] == 2 * 8 * 4 * 3, "of one of two heads"
    assert two["run"]["ranks"] == 1, "of the domain"


def gradients_of_recomputation(store: Path, run: Path, settings: list[str], mode: str) -> None:
    """Gradients of a step are those without recomputation, bit by bit, and the host enters none of
    torch's modes of selective recomputation."""
    found = []
    no_modes = mock.patch.object(
        _CachingTorchDispatchMode, "__enter__", side_effect=AssertionError("a mode")
    )
    for each in ("none", mode):
        trainer = start(store, run / each, [*settings, f"train.recompute={each}"])
        with trainer.loader, no_modes:
            trainer.runner.forward_backward(next(trainer.loader))
        for layer in sparse_layers(trainer.model):
            assert (layer.experts.products is KEPT) == (each in ("norms", "mlp"))
        named = trainer.model.named_parameters()
        found.append({name: local_part(weight.grad) for name, weight in named})
    wanted, gradients = found
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


MIXTURE = ["model.preset=tiny-moe", "model.overrides.moe_intermediate_size=16"]


@pytest.mark.parametrize("mode", ["norms", pytest.param("mlp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, [TWO]),
        (2, [*MIXTURE, "parallel.expert_parallel_size=2", "train.mlp_tile_tokens=100"]),
        pytest.param(2, [*MIXTURE, "parallel.expert_parallel_size=2"], marks=pytest.mark.slow),
        pytest.param(4, [*MIXTURE, TWO], marks=pytest.mark.slow),
        pytest.param(4, [TWO, *ODD, "batch.tokens_per_rank=376"], marks=pytest.mark.slow),
    ],
)
def test_split_layers_are_recomputed_without_modes(
    workers: Workers, store: Path, tmp_path: Path, ranks: int, settings: list[str], mode: str
) -> None:
    workers.run(gradients_of_recomputation, ranks, store, tmp_path, settings, mode)
