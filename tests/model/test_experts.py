"""Mixtures of experts: routing, experts on one and on many ranks, and balance, against plain
float64 references."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longctx.attention.kernels.grouped_product import leaves_gradients
from longctx.attention.products import PLAIN
from longctx.config import ConfigError, load
from longctx.memory.loads import Load
from longctx.memory.model import estimate
from longctx.model import experts
from longctx.model.balance import RouterWatch, RowDocuments, _losses
from longctx.model.experts import Experts, SparseMLP
from longctx.model.presets import PRESETS, ModelShape
from longctx.parallel import expert
from longctx.parallel.mesh import make_groups
from longctx.training.metrics import StepMetrics
from longctx.training.objectives.balance import STATISTICS, Balance
from tests.marks import examples
from tests.training_cases import forced, start, train, train_then_save
from tests.workers import Workers

TINY_MOE = [
    "model.preset=tiny-moe",
    "model.overrides.num_hidden_layers=4",
    "model.overrides.moe_intermediate_size=16",
    "model.overrides.shared_expert_intermediate_size=16",
    "data.max_length=600",
    "batch.global_tokens=2000",
    "balance.document_loss=0.01",
    "balance.z_loss=0.001",
    "balance.bias_rate=0.01",
]


def shape_of(**options: Any) -> ModelShape:
    """A small shape with experts."""
    sizes = {
        "hidden_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
    }
    return ModelShape.model_validate({**PRESETS["tiny"].model_dump(), **sizes, **options})


def sparse(shape: ModelShape, dtype: torch.dtype = torch.float64, seed: int = 0) -> SparseMLP:
    torch.manual_seed(seed)
    mlp = SparseMLP(shape).to(dtype)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mlp


def routed(mlp: SparseMLP, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [tokens, experts] and chosen experts, the plain way."""
    shape, logits = mlp.gate.shape, x @ mlp.gate.weight.T
    scores = logits.softmax(1) if shape.router_scores == "softmax" else logits.sigmoid()
    bias = mlp.gate.expert_bias.to(scores.dtype) if shape.router_bias else torch.zeros(())
    return scores, (scores + bias).topk(shape.num_experts_per_tok).indices


def reference(mlp: SparseMLP, x: torch.Tensor) -> torch.Tensor:
    """Token by token and expert by expert."""
    shape, width = mlp.gate.shape, mlp.gate.shape.expert_width
    scores, chosen = routed(mlp, x)
    rows = []
    for token, used in enumerate(chosen.tolist()):
        weights = scores[token, used]
        weights = weights / weights.sum() if shape.norm_topk_prob else weights
        out = torch.zeros_like(x[0])
        for weight, number in zip(weights, used, strict=True):
            gate, up = (
                each[number * width :][:width]
                for each in (mlp.experts.gate_proj, mlp.experts.up_proj)
            )
            down = mlp.experts.down_proj[number * shape.hidden_size :][: shape.hidden_size]
            out = out + weight * shape.routed_scaling_factor * (
                down @ (F.silu(gate @ x[token]) * (up @ x[token]))
            )
        rows.append(out if mlp.shared_expert is None else out + mlp.shared_expert(x[token]))
    return torch.stack(rows) if rows else x


def split_over_ranks(
    tokens: list[int], groups: int, favourite: int | None, most_rows: int | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Output and gradients on this rank, if each of `groups` of neighbouring ranks has all experts:
    of x, router, own experts.

    `favourite`: an expert that every token chooses first. Also returns the rows of every call of
    the experts.
    """
    shape, ranks, rank = shape_of(), dist.get_world_size() // groups, dist.get_rank()
    mesh = init_device_mesh("cpu", (groups, ranks), mesh_dim_names=("other", "expert"))
    whole = sparse(shape)
    mlp = sparse(shape)
    mlp.experts = Experts(shape, shape.num_experts // ranks).double()
    mlp.send, mlp.most_rows = (
        expert.dispatch(mesh.get_group("expert"), [mesh.get_group("other")]),
        most_rows,
    )
    for name, weight in mlp.experts.named_parameters():
        every = getattr(whole.experts, name)
        weight.data = every.data.tensor_split(ranks)[rank % ranks].clone()
    rows: list[int] = []
    mlp.experts.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    x, gradient = inputs(sum(tokens))
    if favourite is not None:
        mlp.gate.weight.data[favourite] = 50 * x.detach().mean(0)
    mine = x.detach().split(tokens)[rank].requires_grad_()
    out = mlp(mine)
    wanted = [mine, mlp.gate.weight, *mlp.experts.parameters()]
    found = torch.autograd.grad(out, wanted, gradient.split(tokens)[rank])
    return [out.detach()], list(found), rows


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(tokens, 16, dtype=torch.float64) + 0.5
    return x.requires_grad_(), torch.randn(tokens, 16, dtype=torch.float64)


def split_documents(
    lengths: list[int], cut: list[int], share: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of the logits, counts and losses on this rank of documents, each cut into one part
    per rank at `cut`.

    Without `share`, one process has all of them.
    """
    shape, rank = shape_of(), dist.get_rank()
    mlp = sparse(shape)
    mlp.gate.watch.document_loss, mlp.gate.watch.z_loss = 0.3, 0.2
    if share:
        mlp.gate.watch.begin_sum = lambda tensor: dist.all_reduce(tensor, async_op=True).wait
    torch.manual_seed(2)
    rows, logits = [], []
    for document, length in enumerate(lengths):
        of_document = 3 * torch.randn(length, 6, dtype=torch.float64)
        first, last = (
            (length * cut[place] // cut[-1] for place in (rank, rank + 1)) if share else (0, length)
        )
        rows += [document] * (last - first)
        logits.append(of_document[first:last])
    rows += [len(lengths)] * 2  # padding
    given = torch.cat([*logits, torch.randn(2, 6, dtype=torch.float64)]).requires_grad_()
    documents = RowDocuments(
        torch.tensor(rows),
        torch.tensor(lengths, dtype=torch.float32),
        len(lengths),
        2 * sum(lengths),
    )
    (gradient,) = torch.autograd.grad(mlp.gate.routes(given, documents)[1].sum(), given)
    counts, losses = mlp.gate.watch.counts, mlp.gate.watch.losses
    assert counts is not None and losses is not None
    if share:
        dist.all_reduce(counts)
        dist.all_reduce(losses)
    return gradient[:-2], counts, losses


def moe_steps(
    store: Path, run: Path, settings: list[str], steps: int, max_load: float = 2.0
) -> list[StepMetrics]:
    with forced(expert_max_load=max_load):
        return train(store, run, [*TINY_MOE, *settings], steps)


def statistics_of_counts() -> tuple[dict[str, float], list[list[float]]]:
    """Returns statistics and biases after a step with known counts of 2 layers with 4 experts."""
    mesh = make_groups(
        torch.device("cpu"), timeout_s=60.0, tensor=1, pipeline=1, shard_ranks=None, expert=1
    )
    gates = [sparse(shape_of(router_bias=True, num_experts=4)).gate for _ in range(2)]
    for gate, counts, losses in zip(
        gates, ([4, 0, 4, 0], [1, 2, 2, 3]), ([1.0, 2.0], [3.0, 4.0]), strict=True
    ):
        gate.watch.add(torch.tensor(counts), torch.tensor(losses, dtype=torch.float64))
    balance = Balance([gate.watch for gate in gates], 0.25, mesh)
    found = dict(zip(STATISTICS, balance.end_step().tolist(), strict=True))
    assert not any(gate.expert_bias.any() for gate in gates), "a step that is skipped moves no bias"
    balance.move_biases(torch.tensor(False))
    assert not any(gate.expert_bias.any() for gate in gates)
    balance.move_biases(torch.tensor(True))
    return found, [gate.expert_bias.tolist() for gate in gates]


def skipped_step(store: Path, run: Path) -> list[bool]:
    """Trains with an infinite loss, but a finite gradient, in the first of two steps. Returns in
    which the biases moved."""
    trainer = start(store, run, [*TINY_MOE, "train.on_nonfinite=skip"])
    original, moved = trainer.runner.forward_backward, []
    infinite = mock.patch.object(
        trainer.runner, "forward_backward", lambda *arguments: original(*arguments) * math.inf
    )
    biases = [
        getattr(*router.bias)
        for router in trainer.runner.balance.routers
        if router.bias is not None
    ]
    with trainer.loader:
        for skipped in (True, False):
            before = [bias.clone() for bias in biases]
            with infinite if skipped else nullcontext():
                metrics = trainer.step()
            assert metrics.skipped == skipped and math.isfinite(metrics.grad_norm)
            moved.append(
                any(not torch.equal(bias, old) for bias, old in zip(biases, before, strict=True))
            )
    return moved


def chosen_experts(store: Path, run: Path, settings: list[str]) -> list[tuple[Any, ...]]:
    """What each layer's router chose in the first step: document, position, experts of every token
    of this rank."""
    trainer = start(store, run, [*TINY_MOE, *settings])
    layers = expert.sparse_layers(trainer.model)
    seen: list[list[Any]] = [[] for _ in layers]
    for layer, found in zip(layers, seen, strict=True):
        original = layer.gate.routes

        def routes(
            logits: torch.Tensor, documents: Any, original: Any = original, found: Any = found
        ) -> Any:
            chosen, weights = original(logits, documents)
            found.append(chosen.sort(1).values)
            return chosen, weights

        layer.gate.routes = routes  # type: ignore[method-assign]  # only of this layer
    with trainer.loader:
        batch = next(trainer.loader)
        trainer.step(batch)
    found = []
    for layer_number, of_layer in enumerate(seen):
        for micro_batch, chosen in zip(batch.micro_batches, of_layer, strict=True):
            for shard in micro_batch.layout.shards:
                positions = [*range(*shard.head), *range(*shard.tail)]
                for row, position in enumerate(positions, start=shard.offset):
                    found.append(
                        (
                            layer_number,
                            batch.documents[shard.document],
                            position,
                            tuple(chosen[row].tolist()),
                        )
                    )
    return found


# --- tests

KINDS: list[dict[str, Any]] = [
    {},
    {"norm_topk_prob": False},
    {
        "router_scores": "sigmoid",
        "router_bias": True,
        "routed_scaling_factor": 2.5,
        "shared_expert_intermediate_size": 5,
    },
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: ", ".join(kind) or "mixtral")
@given(
    tokens=st.integers(0, 9),
    number=st.integers(1, 7),
    hidden=st.integers(1, 17),
    width=st.integers(1, 9),
    most_rows=st.sampled_from([None, 1, 4]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    data=st.data(),
)
@settings(max_examples=examples(25), deadline=None)
def test_every_token_uses_its_experts(
    kind: dict[str, Any],
    tokens: int,
    number: int,
    hidden: int,
    width: int,
    most_rows: int | None,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    chosen = data.draw(st.integers(1, number))
    sizes = {
        "num_experts": number,
        "num_experts_per_tok": chosen,
        "hidden_size": hidden,
        "moe_intermediate_size": width,
    }
    mlp = sparse(shape_of(**sizes, **kind), dtype)
    mlp.most_rows = most_rows
    if mlp.gate.shape.router_bias:
        mlp.gate.expert_bias.copy_(torch.randn(number))
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    calls: list[int] = []
    mlp.experts.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    out, wanted = mlp(x), reference(mlp, x)
    assert len(calls) == (1 if most_rows is None else max(1, -(-tokens * chosen // most_rows))), (
        "no more turns than needed"
    )
    gradient, tensors = torch.randn_like(out), [x, *mlp.parameters()]
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(out, wanted, **bound)
    found = torch.autograd.grad(out, tensors, gradient)
    if tokens:
        for a, b in zip(found, torch.autograd.grad(wanted, tensors, gradient), strict=True):
            torch.testing.assert_close(a, b, **bound)
    else:
        assert not any(each.any() for each in found)


def test_grouped_product_is_used_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped product")
    rows, counts = torch.randn(9, 8), torch.tensor([4, 0, 5])
    weight = torch.randn(3 * 12, 8)
    assert experts._is_grouped(rows, weight.unflatten(0, (3, 12)))
    assert not experts._is_grouped(rows, weight.unflatten(0, (4, 9)))
    found = experts.grouped_product(rows, weight, counts, PLAIN)
    monkeypatch.setattr(experts, "_is_grouped", lambda *_: False)
    separate = experts.grouped_product(rows, weight, counts, PLAIN)
    torch.testing.assert_close(found, separate)


class OfBlackwell(torch.autograd.Function):
    """The grouped product as on Blackwell, where gradients of matrices without rows are what was in
    memory."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        groups = zip(rows.split(ctx.sizes), matrices, strict=True)
        return torch.cat([group @ matrix for group, matrix in groups])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, matrices = ctx.saved_tensors
        each = list(zip(rows.split(ctx.sizes), gradient.split(ctx.sizes), matrices, strict=True))
        of_matrices = [
            a.T @ b if len(a) else torch.full_like(matrix, torch.nan) for a, b, matrix in each
        ]
        return torch.cat([b @ matrix.T for _, b, matrix in each]), torch.stack(of_matrices), None


@pytest.mark.parametrize("most_rows", [None, 2])
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_experts_without_tokens_have_no_gradient_on_blackwell(
    tokens: int, most_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on ranks and in micro-batches without tokens."""
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda a, b, offs: OfBlackwell.apply(a, b, offs)
    )
    monkeypatch.setattr(experts, "_is_grouped", lambda *_: True)
    mlp = sparse(shape_of())
    mlp.most_rows = most_rows
    x = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
    weights = list(mlp.experts.parameters())
    wanted = torch.autograd.grad(
        reference(mlp, x).sum(), weights, allow_unused=True, materialize_grads=True
    )
    assert any(gradient.isnan().any() for gradient in torch.autograd.grad(mlp(x).sum(), weights))
    monkeypatch.setattr(experts, "leaves_gradients", lambda: True)
    for gradient, correct in zip(torch.autograd.grad(mlp(x).sum(), weights), wanted, strict=True):
        torch.testing.assert_close(gradient, correct)


@pytest.mark.parametrize(
    ("capability", "leaves"), [(None, False), ((9, 0), False), ((10, 0), True), ((10, 3), True)]
)
def test_which_gpus_leave_gradients(
    capability: tuple[int, int] | None, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert leaves_gradients.__wrapped__() == leaves


def test_experts_are_chosen_in_float32_under_bfloat16() -> None:
    """Rounded logits would choose others where experts are almost equally likely."""
    gate = sparse(shape_of(), torch.bfloat16).gate
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = gate(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(x.float(), gate.weight.float()))
    assert gate.routes(logits, None)[1].dtype == torch.float32


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_losses_are_those_of_the_papers(scores: str) -> None:
    mlp = sparse(shape_of(router_scores=scores))
    watch = mlp.gate.watch
    watch.document_loss, watch.z_loss = 0.3, 0.2
    lengths, logits = [5, 1, 7], torch.randn(14, 6, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([0] * 5 + [1] + [2] * 7 + [3])  # the last one is padding
    documents = RowDocuments(rows, torch.tensor(lengths, dtype=torch.float32), 0, 20)
    chosen, weights = mlp.gate.routes(logits, documents)
    gradient = torch.randn_like(weights)
    (found,) = torch.autograd.grad(weights, logits, gradient)

    probabilities = (
        logits.softmax(1)
        if scores == "softmax"
        else logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    )
    document_loss = torch.zeros((), dtype=torch.float64)
    for document, of_document in enumerate(torch.arange(13).split(lengths)):
        share = torch.zeros(6, dtype=torch.float64).index_add_(
            0, chosen[of_document].flatten(), torch.ones(3 * len(of_document)).double()
        )
        share = share * 6 / (3 * lengths[document])
        document_loss = (
            document_loss
            + lengths[document] / 20 * (share * probabilities[of_document].mean(0)).sum()
        )
    z_loss = logits[:13].logsumexp(1).square().sum() / 20
    plain = mlp.gate.routes(logits, None)[1]
    (wanted,) = torch.autograd.grad(
        (plain * gradient).sum() + 0.3 * document_loss + 0.2 * z_loss, logits
    )
    torch.testing.assert_close(found, wanted)
    assert watch.losses is not None and watch.counts is not None
    torch.testing.assert_close(watch.losses, torch.stack([document_loss, z_loss]).detach())
    assert watch.counts.tolist() == torch.bincount(chosen[:13].flatten(), minlength=6).tolist()


def test_losses_of_16_bit_logits_are_computed_in_float32() -> None:
    logits = torch.randn(6, 4).bfloat16()
    documents = RowDocuments(torch.zeros(6, dtype=torch.int64), torch.tensor([6.0]), 0, 6)
    watch, shares = RouterWatch(4, 2, "softmax"), torch.tensor([[5.0, 3.0, 3.0, 1.0]])
    found, wanted = (
        _losses(each, documents.rows, shares, documents, watch) for each in (logits, logits.float())
    )
    assert found.dtype == torch.float32 and torch.equal(found, wanted)


def test_losses_are_the_same_however_documents_are_cut(workers: Workers) -> None:
    lengths = [7, 3, 11]
    ((wanted, counts, losses),) = workers.run(split_documents, 1, lengths, [0, 1], False)
    for cut in ([0, 1, 2, 3], [0, 0, 1, 7], [0, 5, 5, 6]):
        found = workers.run(split_documents, 3, lengths, cut, True)
        parts = [
            gradient.split(
                [
                    length * cut[rank + 1] // cut[-1] - length * cut[rank] // cut[-1]
                    for length in lengths
                ]
            )
            for rank, (gradient, *_) in enumerate(found)
        ]
        whole = torch.cat(
            [part for of_document in zip(*parts, strict=True) for part in of_document]
        )
        torch.testing.assert_close(whole, wanted)
        for _, its_counts, its_losses in found:
            assert torch.equal(its_counts, counts)
            torch.testing.assert_close(its_losses, losses)


def test_bias_moves_towards_even_use() -> None:
    router = sparse(shape_of(router_bias=True)).gate
    router.watch.move_bias(torch.tensor([4, 0, 2, 2, 2, 2]), 0.5)
    assert router.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_a_skipped_step_moves_no_bias(workers: Workers, store: Path, tmp_path: Path) -> None:
    assert workers.run(skipped_step, 2, store, tmp_path) == [[False, True]] * 2


def test_statistics_of_a_step(workers: Workers) -> None:
    statistics, biases = workers.run(statistics_of_counts, 1)[0]
    assert statistics == {
        "expert_layers": 2.0,
        "expert_imbalance": 2.0 + 1.5,
        "unused_experts": 0.5 + 0.0,
        "document_loss": 1.0 + 3.0,
        "z_loss": 2.0 + 4.0,
    }
    assert biases == [[-0.25, 0.25, -0.25, 0.25], [0.25, 0.0, 0.0, -0.25]]


@pytest.mark.parametrize("most_rows", [None, 1])
@pytest.mark.parametrize(
    ("tokens", "groups", "favourite"),
    [
        ([4, 5, 3], 1, None),
        ([9, 0, 1], 1, None),
        ([0, 0, 0], 1, None),
        ([5, 4, 6], 1, 3),
        ([1, 0, 0], 1, 5),
        ([1, 0, 9, 4], 2, None),
    ],
    ids=["even", "a rank without tokens", "no tokens", "one favourite", "one token", "two groups"],
)
def test_experts_on_other_ranks(
    workers: Workers, tokens: list[int], groups: int, favourite: int | None, most_rows: int | None
) -> None:
    found = workers.run(split_over_ranks, len(tokens), tokens, groups, favourite, most_rows)
    mlp, (x, gradient) = sparse(shape_of()), inputs(sum(tokens))
    if favourite is not None:
        mlp.gate.weight.data[favourite] = 50 * x.detach().mean(0)
        assert (routed(mlp, x)[1] == favourite).any(1).all()
    out = mlp(x)
    torch.testing.assert_close(torch.cat([own for (own,), _, _ in found]), out)
    wanted = torch.autograd.grad(out, [x, mlp.gate.weight, *mlp.experts.parameters()], gradient)
    gradients = [own for _, own, _ in found]
    torch.testing.assert_close(torch.cat([own[0] for own in gradients]), wanted[0])
    torch.testing.assert_close(sum(own[1] for own in gradients), wanted[1])
    for place in range(2, len(wanted)):
        of_groups = torch.cat([own[place] for own in gradients]).chunk(groups)
        torch.testing.assert_close(sum(of_groups), wanted[place])
    calls = [rows for *_, rows in found]
    assert len(set(map(len, calls))) == 1, (
        "each call gathers weights from all ranks, so all call equally often"
    )
    if most_rows is not None:
        # A row more from each rank by rounding.
        assert max(map(max, calls)) <= most_rows + len(tokens) // groups


TWO_LAYERS = ["model.overrides.num_hidden_layers=2", "model.overrides.first_dense_layers=0"]
IN_TILES = ["train.mlp_tile_tokens=50", "parallel.reduce_after=micro_batch"]
SHARDED = ["parallel.expert_parallel_size=2", "parallel.shard_ranks=2", "train.mlp_tile_tokens=40"]
IN_STAGES = ["parallel.pipeline_parallel_size=2", "parallel.expert_parallel_size=2"]
SPLITS = [(3, IN_TILES, 2.0), (4, SHARDED, 2.0), (4, IN_STAGES, 1.0)]
"""Ranks, settings and the most load, with losses and statistics of balance, which plain
transformers lack."""


@pytest.mark.slow
def test_training_is_the_same_however_it_is_split(
    store: Path, tmp_path: Path, workers: Workers
) -> None:
    wanted = workers.run(
        moe_steps, 1, store, tmp_path / "alone", [*TWO_LAYERS, "batch.tokens_per_rank=600"], 2
    )[0]
    assert wanted[-1].document_loss and wanted[-1].z_loss and wanted[-1].expert_imbalance
    for number, (ranks, options, most_load) in enumerate(SPLITS):
        given = [*TWO_LAYERS, "batch.tokens_per_rank=400", *options]
        found = workers.run(moe_steps, ranks, store, tmp_path / str(number), given, 2, most_load)[0]
        for one, other in zip(wanted, found, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-5), options
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4), options
            assert one.document_loss == pytest.approx(other.document_loss, rel=1e-5), options
            assert one.z_loss == pytest.approx(other.z_loss, rel=1e-5), options
            assert one.expert_imbalance == pytest.approx(other.expert_imbalance, rel=1e-12), options
            assert one.unused_experts == other.unused_experts, options


def test_routing_is_the_same_however_documents_are_split(
    store: Path, tmp_path: Path, workers: Workers
) -> None:
    wanted = workers.run(
        chosen_experts, 1, store, tmp_path / "alone", [*TWO_LAYERS, "batch.tokens_per_rank=600"]
    )[0]
    for ranks, degree in ((2, 2), (4, 4)):
        options = [
            *TWO_LAYERS,
            "batch.tokens_per_rank=400",
            "context.mode=static",
            f"context.degree={degree}",
        ]
        expert = "parallel.expert_parallel_size=2"
        found = workers.run(chosen_experts, ranks, store, tmp_path / str(ranks), [*options, expert])
        assert sorted(token for own in found for token in own) == sorted(wanted)


@pytest.mark.slow
def test_checkpoints_continue_under_other_splits(
    store: Path, tmp_path: Path, workers: Workers
) -> None:
    expert = [
        *TINY_MOE,
        *TWO_LAYERS,
        "parallel.expert_parallel_size=2",
        "batch.tokens_per_rank=400",
    ]
    wanted = workers.run(train, 2, store, tmp_path / "whole", expert, 3)[0][1:]
    workers.run(train_then_save, 2, store, tmp_path / "saved", expert, 1)
    alone = workers.run(
        train,
        1,
        store,
        tmp_path / "saved",
        [*TINY_MOE, *TWO_LAYERS, "batch.tokens_per_rank=600"],
        2,
        True,
    )[0]
    again = workers.run(train, 2, store, tmp_path / "saved", expert, 2, True)[0]
    # Bit by bit, the bias of the experts included.
    assert [step.loss for step in again] == [step.loss for step in wanted]
    for one, other in zip(wanted, alone, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_a_checkpoint_without_native_decoder_cannot_be_split(tmp_path: Path) -> None:
    from tests.family_cases import build

    build("olmoe", "eager").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"and parallel\.expert_parallel_size to 1"):
        load(
            None,
            [f"model.from_pretrained={tmp_path}", "parallel.expert_parallel_size=2"],
            world_size=2,
        )


def test_an_expert_of_all_tokens_is_not_in_tiles() -> None:
    kept = []
    for shared in (0, 4096):
        options = [
            f"model.overrides.shared_expert_intermediate_size={shared}",
            "train.mlp_tile_tokens=128",
            "model.vocab_size=300",
        ]
        config = load(None, ["model.preset=tiny-moe", *options], world_size=1)
        tokens = Load(tokens=8192, remote=0, sent=0, held=0, fullest=0, micro_batches=1)
        kept.append(
            estimate(config.model.sizes().spec, config, 1, [tokens], fused=True).activations
        )
    # In two layers: gate, up and their product, in float32.
    assert kept[1] - kept[0] >= 2 * 3 * 8192 * 4096 * 4


def test_sizes_of_presets() -> None:
    """Published numbers of parameters, all and per token."""
    for name, vocabulary, parameters, used in (
        ("mixtral-8x7b", 32000, 46.7e9, 12.9e9),
        ("qwen3-30b-a3b", 151936, 30.5e9, 3.3e9),
    ):
        spec = PRESETS[name].model_copy(update={"vocab_size": vocabulary}).spec
        assert spec.parameters == pytest.approx(parameters, rel=0.002)
        assert spec.multiplied_parameters + spec.vocabulary_parameters == pytest.approx(
            used, rel=0.02
        )


@pytest.mark.parametrize(
    ("given", "ranks", "said"),
    [
        (["parallel.expert_parallel_size=3"], 3, "8 experts cannot be split evenly over 3 × 1"),
        (
            ["parallel.expert_parallel_size=4"],
            6,
            "must divide the number of ranks in the domain, 6",
        ),
        (
            ["parallel.expert_parallel_size=2", "parallel.shard_ranks=1"],
            4,
            "divide parallel.shard_ranks, 1\n.* multiple of 2",
        ),
        (
            ["model.overrides.num_experts=3", "parallel.tensor_parallel_size=2"],
            2,
            "tensor_parallel_size = 2\n.*3 experts .*\n.*set it to 1, 3",
        ),
        (
            [
                "model.overrides.shared_expert_intermediate_size=1",
                "parallel.tensor_parallel_size=2",
            ],
            2,
            "shared_expert_intermediate_size = 1",
        ),
        (
            ["model.overrides.intermediate_size=1", "parallel.tensor_parallel_size=2"],
            2,
            r"model\.overrides\.intermediate_size = 1",
        ),
        (["model.overrides.num_experts_per_tok=9"], 1, "there are only 8 experts"),
        (["model.overrides.first_dense_layers=3"], 1, "leaves none of 3 layers"),
    ],
)
def test_what_cannot_be_is_refused(given: list[str], ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(None, ["model.preset=tiny-moe", *given], world_size=ranks)
