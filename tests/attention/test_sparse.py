"""Sparse kernels of packages equal the kernel that hides other keys, and a package of another
interface is not used."""

import logging
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.attention.kernels import Options, reference, sparse
from longctx.attention.kernels.selected import SelectedKernel
from longctx.attention.kernels.sparse import SparseFunctions, SparseKernel, sparse_functions
from longctx.attention.segments import Segment
from tests import sparse_package

FUNCTIONS = SparseFunctions(sparse_package.sparse_mla_fwd_interface, sparse_package.sparse_mla_bwd)


@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    most=st.integers(1, 7),
    heads=st.sampled_from([1, 3, 4]),
    causal=st.booleans(),
    gap=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
def test_both_kernels_are_equal(
    lengths: list[int], most: int, heads: int, causal: bool, gap: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    segments = []
    selected = []
    positions = []
    place = gap
    for length in lengths:
        hi = 0 if causal else None
        segments.append(Segment(place, place + length, place, place + length, hi=hi))
        selected += [torch.full((gap, most), -1)]
        order = torch.rand(length, max(length, most), generator=generator).argsort(1)[:, :most]
        selected += [order.masked_fill(order >= length, -1)]
        positions += [torch.zeros(gap), torch.randperm(length, generator=generator)]
        place += length + gap
    selected.append(torch.full((gap, most), -1))
    positions.append(torch.zeros(gap))
    rows = place
    q = torch.randn(rows, heads, 5, dtype=torch.float64, generator=generator)
    k = torch.randn(rows, 1, 5, dtype=torch.float64, generator=generator)
    v = k[:, :, :3]
    dout = torch.randn(rows, heads, 3, dtype=torch.float64, generator=generator)
    given = torch.cat(selected).int(), torch.cat(positions).long()
    longest = max(lengths)

    def is_long(segment: Segment) -> bool:
        return segment.q_stop - segment.q_start > most

    dense = SelectedKernel(*given, longest=longest, has_selection=is_long, dense=lambda: reference)
    kernel = SparseKernel(FUNCTIONS, *given, longest=longest, has_selection=is_long)
    options = Options(0.3)
    out, lse = kernel.forward(q, k, v, segments, options)
    wanted_out, wanted_lse = dense.forward(q, k, v, segments, options)
    assert torch.allclose(out, wanted_out, atol=1e-12)
    assert torch.allclose(lse, wanted_lse, atol=1e-12)
    # The final lse of a query that saw keys in another call; -inf: outside all segments.
    elsewhere = (wanted_lse < -1e9) & wanted_lse.isfinite()
    final = torch.where(elsewhere, 0.5, wanted_lse)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, final, segments, options)
    theirs = dense.backward(dout, q, k, v, out, final, segments, options)
    assert torch.allclose(dq, theirs[0], atol=1e-12)
    of_keys = theirs[1] + torch.nn.functional.pad(theirs[2], (0, 2))
    assert torch.allclose(dk + torch.nn.functional.pad(dv, (0, 2)), of_keys, atol=1e-12)


def test_a_call_without_segments_needs_no_package() -> None:
    kernel = SparseKernel(
        FUNCTIONS,
        torch.zeros(2, 1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        longest=1,
        has_selection=lambda _: True,
    )
    q, k = torch.randn(2, 1, 4), torch.randn(0, 1, 4)
    out, lse = kernel.forward(q, k, k, [], Options(1.0))
    assert not out.any() and (lse == float("-inf")).all()
    dq, dk, _ = kernel.backward(out, q, k, k, out, lse, [], Options(1.0))
    assert not dq.any() and dk.shape == k.shape


PAIR = ("tests.sparse_package.sparse_mla_fwd_interface", "tests.sparse_package.sparse_mla_bwd")


def found(monkeypatch: pytest.MonkeyPatch, *packages: tuple[str, str]) -> SparseFunctions | None:
    monkeypatch.setattr(sparse, "PACKAGES", packages)
    sparse_functions.cache_clear()
    try:
        return sparse_functions()
    finally:
        sparse_functions.cache_clear()


@pytest.mark.parametrize(
    ("backward", "text"),
    [
        ("other_bwd", r"sparse_package.other_bwd: it takes q, kv, o, do, top, lse, not q, kv, o"),
        ("missing", "tests.sparse_package has no such function"),
    ],
)
def test_another_interface_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backward: str, text: str
) -> None:
    wrong = PAIR[0], f"tests.sparse_package.{backward}"
    with caplog.at_level(logging.WARNING):
        assert found(monkeypatch, wrong) is None
    assert text in caplog.text
    assert found(monkeypatch, wrong, PAIR) == FUNCTIONS


def test_a_package_without_what_it_needs_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sparse_package, "HAVE_TILELANG", False)
    assert found(monkeypatch, PAIR) is None
    assert "HAVE_TILELANG is false, install tilelang" in caplog.text


def test_what_is_not_installed_is_not_mentioned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(monkeypatch, ("not_installed.forward", "not_installed.backward")) is None
    assert not caplog.text


def test_flash_mla_is_used_once_it_has_a_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = ModuleType("flash_mla")
    package.flash_mla_sparse_fwd = FUNCTIONS.forward
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    assert found(monkeypatch, *sparse.PACKAGES) is None
    assert "flash_mla.flash_mla_sparse_bwd: flash_mla has no such function" in caplog.text
    package.flash_mla_sparse_bwd = FUNCTIONS.backward
    assert found(monkeypatch, *sparse.PACKAGES) == FUNCTIONS


@pytest.mark.parametrize(
    ("heads", "width", "device", "deterministic"),
    [(65, 8, "cpu", False), (4, 9, "cpu", False), (4, 8, "meta", False), (4, 8, "cpu", True)],
)
def test_other_sizes_are_left_to_other_kernels(
    monkeypatch: pytest.MonkeyPatch, heads: int, width: int, device: str, deterministic: bool
) -> None:
    for name, value in {"DEVICE": "cpu", "DTYPE": torch.float32, "LATENT": 8, "ROTARY": 2}.items():
        monkeypatch.setattr(sparse, name, value)
    monkeypatch.setattr(sparse, "sparse_functions", lambda: FUNCTIONS)

    def fits(heads: int, width: int, device: str, deterministic: bool) -> bool:
        q = torch.empty(3, heads, 6, device=device)
        first, second = torch.empty(3, width, device=device), torch.empty(3, 2, device=device)
        return sparse.usable(q, first, second, deterministic=deterministic)

    assert fits(128, 8, "cpu", False)
    assert not fits(heads, width, device, deterministic)
