"""Block diffusion of models of transformers: loss and gradients of packed documents are those of
every document alone with a dense mask, under any split."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longctx.data.diffusion import Noise, noise_documents
from longctx.data.trees import pack_merged
from longctx.hf.attention import model_inputs, prepare
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from tests.diffusion_cases import MASK, alone
from tests.family_cases import build, largest_error
from tests.huggingface_cases import gradients
from tests.marks import slow_unless
from tests.workers import Workers

H100 = HardwareProfile.load("h100-nvlink-ib")
LENGTHS = (50, 131, 7, 64)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    """Returns documents without the mask token."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, MASK, (length,), generator=generator) for length in lengths]


def diffusion_step(
    kind: str, degree: int, noise: Noise, lengths: tuple[int, ...] = LENGTHS
) -> tuple[float, list[torch.Tensor]]:
    """Runs on each rank: the loss of a step, and its gradients."""
    model: Any = build(kind, "eager").double()
    prepare(model)
    noised = noise_documents(documents(lengths), noise=noise)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plan = make_plan(
        noised.lengths,
        ranks=ranks,
        tokens_per_rank=max(noised.lengths) + 20,
        profile=H100,
        mode="static",
        degree=degree,
        trees=noised.trees,
    )
    packed, divisor = pack_merged(plan, rank, noised)
    total = torch.zeros((), dtype=torch.float64)
    for batch in packed:
        assert batch.weights is not None
        logits = model(**model_inputs(model, batch)).logits[0, : len(batch.tokens)]
        losses = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none")
        loss = (losses * batch.weights).sum() / divisor
        (loss + 0 * sum(p.sum() for p in model.parameters())).backward()
        total += loss.detach()
    found = gradients(model)
    for tensor in (total, *found):
        dist.all_reduce(tensor)
    return float(total), found


@cache
def one_by_one(
    kind: str, noise: Noise, lengths: tuple[int, ...] = LENGTHS, attention: str = "eager"
) -> tuple[float, list[torch.Tensor]]:
    model: Any = build(kind, attention).double()
    texts = documents(lengths)
    noised = noise_documents(texts, noise=noise)
    divisor = sum(length - 1 for length in lengths)
    total = 0.0
    for number, text in enumerate(texts):
        document = noise.document(text.numpy(), trained=text.numpy() >= 0, key=(number,))
        assert document.tokens.tolist() == noised.tokens[number].tolist()
        loss = alone(model, document, text, block=noise.block, noise=noise) / divisor
        loss.backward()
        total += float(loss.detach())
    return total, gradients(model)


CASES = [
    ("llama", 1, 1, 4, 0.0),
    ("qwen3", 2, 2, 64, 0.0),
    ("qwen3", 3, 3, 7, 0.5),
    ("llama", 3, 2, 16, 0.0),
    ("mistral", 2, 2, 9, 0.0),
]


@pytest.mark.parametrize(
    ("kind", "ranks", "degree", "block", "next_token"),
    slow_unless(lambda *case: case in CASES[2:4], CASES),
)
def test_equal_to_every_document_alone(
    workers: Workers, kind: str, ranks: int, degree: int, block: int, next_token: float
) -> None:
    noise = Noise(MASK, block=block, next_token=next_token)
    loss, expected = one_by_one(kind, noise)
    for found, found_gradients in workers.run(diffusion_step, ranks, kind, degree, noise):
        assert found == pytest.approx(loss, rel=1e-6)
        assert largest_error(found_gradients, expected) <= 1e-6


@pytest.mark.slow
def test_long_documents(workers: Workers) -> None:
    lengths = (50, 3997, 700)
    noise = Noise(MASK, block=4)
    loss, expected = one_by_one("qwen3", noise, lengths, "sdpa")
    for found, found_gradients in workers.run(diffusion_step, 3, "qwen3", 3, noise, lengths):
        assert found == pytest.approx(loss, rel=1e-6)
        assert largest_error(found_gradients, expected) <= 1e-5
