"""Small mixtures of experts, their reference, and the code that the ranks of a test run."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longctx.model.balance import RowDocuments
from longctx.model.experts import Experts, SparseMLP
from longctx.model.presets import PRESETS, ModelShape
from longctx.parallel import expert
from longctx.parallel.mesh import make_groups
from longctx.training.metrics import StepMetrics
from longctx.training.objectives.balance import Balance
from tests.training_cases import start, train

TINY_MOE = [
    "model.preset=tiny-moe",
    "model.num_hidden_layers=4",
    "model.moe_intermediate_size=16",
    "model.shared_expert_intermediate_size=16",
    "data.max_length=600",
    "batch.global_tokens=2000",
    "balance.document_loss=0.01",
    "balance.z_loss=0.001",
    "balance.bias_rate=0.01",
]


def shape_of(**options: Any) -> ModelShape:
    """A small shape with experts."""
    sizes = {"hidden_size": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
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
    for token, experts in enumerate(chosen.tolist()):
        weights = scores[token, experts]
        weights = weights / weights.sum() if shape.norm_topk_prob else weights
        out = torch.zeros_like(x[0])
        for weight, number in zip(weights, experts, strict=True):
            gate, up = (each[number * width :][:width] for each in (mlp.experts.gate_proj, mlp.experts.up_proj))
            down = mlp.experts.down_proj[number * shape.hidden_size :][: shape.hidden_size]
            out = out + weight * shape.routed_scaling_factor * (down @ (F.silu(gate @ x[token]) * (up @ x[token])))
        rows.append(out if mlp.shared_expert is None else out + mlp.shared_expert(x[token]))
    return torch.stack(rows) if rows else x


def split_over_ranks(
    tokens: list[int], groups: int, favourite: int | None, most_rows: int | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Output and gradients on this rank, if each of `groups` of neighbouring ranks has all experts: of x, router, own experts.

    `favourite`: an expert that every token chooses first. Also returns the rows of every call of the experts.
    """
    shape, ranks, rank = shape_of(), dist.get_world_size() // groups, dist.get_rank()
    mesh = init_device_mesh("cpu", (groups, ranks), mesh_dim_names=("other", "expert"))
    whole = sparse(shape)
    mlp = sparse(shape)
    mlp.experts = Experts(shape, shape.num_experts // ranks).double()
    mlp.send, mlp.most_rows = expert.dispatch(mesh.get_group("expert"), [mesh.get_group("other")]), most_rows
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


def split_documents(lengths: list[int], cut: list[int], share: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of the logits, counts and losses on this rank of documents, each cut into one part per rank at `cut`.

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
        first, last = (length * cut[place] // cut[-1] for place in (rank, rank + 1)) if share else (0, length)
        rows += [document] * (last - first)
        logits.append(of_document[first:last])
    rows += [len(lengths)] * 2  # padding
    given = torch.cat([*logits, torch.randn(2, 6, dtype=torch.float64)]).requires_grad_()
    documents = RowDocuments(torch.tensor(rows), torch.tensor(lengths, dtype=torch.float32), len(lengths), 2 * sum(lengths))
    (gradient,) = torch.autograd.grad(mlp.gate.routes(given, documents)[1].sum(), given)
    counts, losses = mlp.gate.watch.counts, mlp.gate.watch.losses
    assert counts is not None and losses is not None
    if share:
        dist.all_reduce(counts)
        dist.all_reduce(losses)
    return gradient[:-2], counts, losses


def moe_steps(store: Path, run: Path, settings: list[str], steps: int) -> list[StepMetrics]:
    return train(store, run, [*TINY_MOE, *settings], steps)


def statistics_of_counts() -> tuple[dict[str, float], list[list[float]]]:
    """Returns statistics and biases after a step with known counts of 2 layers with 4 experts."""
    mesh = make_groups(torch.device("cpu"), timeout_s=60.0, tensor=1, pipeline=1, shard_ranks=None, expert=1)
    gates = [sparse(shape_of(router_bias=True, num_experts=4)).gate for _ in range(2)]
    for gate, counts, losses in zip(gates, ([4, 0, 4, 0], [1, 2, 2, 3]), ([1.0, 2.0], [3.0, 4.0]), strict=True):
        gate.watch.add(torch.tensor(counts), torch.tensor(losses, dtype=torch.float64))
    balance = Balance([gate.watch for gate in gates], 0.25, mesh)
    found = balance.end_step()
    assert not any(gate.expert_bias.any() for gate in gates), "a step that is skipped moves no bias"
    balance.move_biases()
    return found, [gate.expert_bias.tolist() for gate in gates]


def skipped_step(store: Path, run: Path) -> list[bool]:
    """Trains with an infinite loss, but a finite gradient, in the first of two steps. Returns in which the biases moved."""
    trainer = start(store, run, [*TINY_MOE, "train.on_nonfinite=skip"])
    original, moved = trainer.passes.forward_backward, []
    infinite = mock.patch.object(trainer.passes, "forward_backward", lambda *arguments: original(*arguments) * math.inf)
    biases = [getattr(*router.bias) for router in trainer.passes.balance.routers if router.bias is not None]
    with trainer.loader:
        for skipped in (True, False):
            before = [bias.clone() for bias in biases]
            with infinite if skipped else nullcontext():
                metrics = trainer.step()
            assert metrics.skipped == skipped and math.isfinite(metrics.grad_norm)
            moved.append(any(not torch.equal(bias, old) for bias, old in zip(biases, before, strict=True)))
    return moved


def chosen_experts(store: Path, run: Path, settings: list[str]) -> list[tuple[Any, ...]]:
    """What each layer's router chose in the first step: document, position, experts of every token of this rank."""
    trainer = start(store, run, [*TINY_MOE, *settings])
    layers = expert.sparse_layers(trainer.model)
    seen: list[list[Any]] = [[] for _ in layers]
    for layer, found in zip(layers, seen, strict=True):
        original = layer.gate.routes

        def routes(logits: torch.Tensor, documents: Any, original: Any = original, found: Any = found) -> Any:
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
                    found.append((layer_number, batch.documents[shard.document], position, tuple(chosen[row].tolist())))
    return found


def largest_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    from tests.pretrained_cases import largest_error

    return largest_error(found, wanted)
