"""Kernels of `flash-linear-attention` in place of our scan: on a GPU, and by loops over tokens with
their signature."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from longctx.attention.linear import fused, scan
from longctx.planning.layout import Placement
from tests.attention_cases import Case
from tests.linear_cases import NAMES, gather, run_linear, token_by_token
from tests.workers import Workers

RULES = ("delta", "kimi")
CASES = {
    "whole": Case(
        1, (70, 1, 9), (Placement(0, 0, 1), Placement(1, 0, 1), Placement(2, 0, 1)), padding=2
    ),
    "split": Case(
        3,
        (90, 20, 1, 7),
        (Placement(0, 0, 3), Placement(1, 0, 2, True), Placement(2, 2, 1), Placement(3, 1, 2)),
    ),
}


def looping(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `chunk_gated_delta_rule` and `chunk_kda`, with the arguments that `fused` gives, whose
    shapes it checks."""
    heads, k_dim = k.shape[2:]
    assert (
        len(q) == 1
        and scale is not None
        and output_final_state
        and cu_seqlens is not None
        and cu_seqlens_cpu is not None
    )
    assert (
        cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        and cu_seqlens[-1] == q.shape[1] == v.shape[1] == beta.shape[1]
    )
    assert (
        g.shape == (k.shape if g.dim() == 4 else k.shape[:3])
        and beta.shape == k.shape[:3]
        and q.dtype == k.dtype == v.dtype
    )
    assert initial_state is None or initial_state.shape == (
        len(cu_seqlens) - 1,
        heads,
        k_dim,
        v.shape[-1],
    )
    outs, ends = [], []
    for segment, (start, stop) in enumerate(
        zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    ):
        state = (
            v.new_zeros(heads, k_dim, v.shape[-1])
            if initial_state is None
            else initial_state[segment]
        )
        for t in range(start, stop):
            state = state * g[0, t].exp().reshape(heads, -1, 1)
            new = beta[0, t][:, None] * (v[0, t] - torch.einsum("hkv,hk->hv", state, k[0, t]))
            state = state + k[0, t][:, :, None] * new[:, None]
            outs.append(scale * torch.einsum("hkv,hk->hv", state, q[0, t]))
        ends.append(state)
    return torch.stack(outs)[None].to(q.dtype), torch.stack(ends)


def run_fused(case: Case, rule: str, dtype: torch.dtype, calls: int) -> list[torch.Tensor]:
    """Runs on each rank, as `run_linear`; `calls` of the kernel for the rule, and none of the
    other."""
    kernels = [mock.Mock(side_effect=looping), mock.Mock(side_effect=looping)]
    with (
        mock.patch.object(fused, "kernels", return_value=tuple(kernels)),
        mock.patch.object(scan, "dtype_of", return_value=dtype),
    ):
        found = run_linear(case, 3, rule, dtype)
    assert [kernel.call_count for kernel in kernels] == (
        [calls, 0] if rule == "delta" else [0, calls]
    )
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_documents_equal_a_loop_over_tokens(workers: Workers, name: str, rule: str) -> None:
    """Forward and gradients; ranks call a kernel for segments that begin a document, and for all
    others."""
    case = CASES[name]
    found = gather(
        case,
        workers.run(run_fused, case.ranks, case, rule, torch.float64, 1 if name == "whole" else 2),
    )
    expected = token_by_token(case, 3, rule)
    for key in NAMES:
        assert (found[key] - expected[key]).norm() <= 1e-10 * expected[key].norm()


def test_kernels_run_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
        return SimpleNamespace(device=torch.device(device), dtype=dtype)

    beta: Any = object()
    monkeypatch.setattr(fused, "kernels", lambda: (looping, looping))
    assert fused.dtype_of(given(), 128, beta) == torch.bfloat16 and fused.dtype_of(
        given(dtype=torch.float16), 256, beta
    )
    ours: list[tuple[Any, int, Any]] = [
        (given("cpu"), 128, beta),
        (given("meta"), 128, beta),
        (given(dtype=torch.float32), 128, beta),
        (given(), 257, beta),
        (given(), 128, None),
    ]
    assert [fused.dtype_of(*each) for each in ours] == [None] * len(ours)
    assert fused.run_in(torch.bfloat16, "cuda") and not fused.run_in(torch.bfloat16, "cpu")
    monkeypatch.setattr(fused, "kernels", lambda: None)
    assert fused.dtype_of(given(), 128, beta) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("initial", [False, True])
def test_kernels_equal_our_scan(rule: str, initial: bool) -> None:
    """In bfloat16 on a GPU, with transitions as in split documents: outputs, ends and gradients."""
    pytest.importorskip("fla")
    heads, dim, lengths = 4, 128, (1000, 1, 300)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, *shape, generator=generator, device="cuda")

    q, k, v = draw(dim) / dim**0.5, torch.nn.functional.normalize(draw(dim), dim=-1), draw(dim)
    decay = -draw(dim if rule == "kimi" else 1).exp() / 8
    tensors = [x.bfloat16().float().requires_grad_() for x in (q, k, v, decay, draw().sigmoid())]
    rows = [
        range(start, start + length) for start, length in zip((0, 1000, 1001), lengths, strict=True)
    ]
    segments: Any = [SimpleNamespace(rows=each) for each in rows]
    group = scan.Group.of(segments, "cuda")
    assert group is not None
    results: list[list[torch.Tensor]] = []
    for dtype in (None, torch.bfloat16):
        run: Callable[..., Any] = scan._affine if initial else group.run
        found = run(group, tuple(tensors), dtype) if initial else run(tuple(tensors), dtype)
        gradients = torch.autograd.grad(sum((x * x).sum() for x in found), tensors)
        results.append([*found, *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() < 2e-2 * ours.norm()
