"""Compares the Triton kernel with the float64 reference kernel, on a GPU if available, else under
Triton's interpreter."""

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.attention.kernels import (
    KERNELS,
    KernelError,
    KernelRequest,
    Options,
    choose_kernel,
    triton,
)
from longctx.attention.merge import merge_fused_, merge_plain_
from longctx.attention.segments import Segment, visible
from longctx.planning.layout import Placement
from tests.attention_cases import Case, gather, run_case
from tests.marks import examples
from tests.workers import Workers

if sys.platform != "linux":
    pytest.skip("Triton has no other systems", allow_module_level=True)
from triton import OutOfResources

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and version("triton").startswith("3.6."):
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """Fills new tensors, so that rows that a kernel does not write are noticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Inputs:
    """Random tensors for a set of segments; rows outside all segments are NaN."""

    segments: tuple[Segment, ...]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    v_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    seed: int = 0
    scale: float = 0.3

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """dout, q, k, v."""
        generator = torch.Generator().manual_seed(self.seed)
        queries = 1 + max((s.q_stop for s in self.segments), default=0)
        keys = 2 + max((s.k_stop for s in self.segments), default=0)
        shapes = [
            (queries, self.heads, self.v_dim),
            (queries, self.heads, self.dim),
            (keys, self.kv_heads, self.dim),
        ]
        tensors = []
        for shape in (*shapes, (keys, self.kv_heads, self.v_dim)):
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            covered = torch.zeros(shape[0], dtype=torch.bool)
            for s in self.segments:
                covered[
                    slice(s.k_start, s.k_stop) if shape[0] == keys else slice(s.q_start, s.q_stop)
                ] = True
            tensors.append(torch.where(covered[:, None, None], x, float("nan")))
        return tuple(tensors)


def run(kernel: str, inputs: Inputs, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Returns out, lse, dq, dk, dv; backward gets a larger log-sum-exp, as if other calls had seen
    more keys."""
    dout, q, k, v = (x.double() if kernel == "reference" else x.to(DEVICE) for x in tensors)
    out, lse = KERNELS[kernel].forward(
        q, k, v, inputs.segments, Options(inputs.scale, inputs.softcap)
    )
    merged = (out * 0.6).to(out.dtype), lse + 0.5
    gradients = KERNELS[kernel].backward(
        dout, q, k, v, *merged, inputs.segments, Options(inputs.scale, inputs.softcap)
    )
    return [x.cpu() for x in (out, lse, *gradients)]


def assert_equals_reference(inputs: Inputs) -> None:
    tensors = inputs.tensors()
    ours, wanted = run("triton", inputs, tensors), run("reference", inputs, tensors)
    least = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}[inputs.dtype]
    for part, exact in zip(ours, wanted, strict=True):
        assert (
            part.dtype == (torch.float32 if part.dim() == 2 else inputs.dtype)
            and part.shape == exact.shape
        )
        assert torch.equal(part.isneginf(), exact.isneginf())
        part, exact = (x.double().masked_fill(x.isneginf(), 0.0) for x in (part, exact))
        outside = tensors[1 if len(part) == len(tensors[1]) else 2][:, 0, 0].isnan()
        assert not part[outside].any()
        assert float((part - exact).norm()) <= least * max(
            float(exact.norm()), 1e-2 * exact.numel() ** 0.5
        )


CAUSAL = (
    Segment(0, 70, 0, 70, hi=0),
    Segment(70, 73, 70, 73, hi=0),
    Segment(75, 100, 73, 98, hi=0),
)
DENSE = (Segment(2, 50, 0, 67), Segment(51, 52, 67, 68), Segment(52, 85, 70, 73))
WINDOWS = (Segment(0, 80, 0, 80, lo=-20, hi=0), Segment(80, 130, 85, 130, lo=-6, hi=9))
OFFSET = (
    Segment(0, 40, 20, 100, lo=5, hi=44),
    Segment(40, 90, 100, 160, lo=-3),
    Segment(93, 95, 0, 19, hi=7),
)


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs(CAUSAL),
        Inputs(DENSE, heads=4, kv_heads=2),
        Inputs(WINDOWS),
        Inputs(OFFSET, heads=2, kv_heads=2),
        Inputs(WINDOWS, softcap=0.7),
        Inputs(CAUSAL, dim=24, v_dim=40, heads=1),
        pytest.param(Inputs(CAUSAL, dim=96, v_dim=16, heads=1), marks=pytest.mark.slow),
        Inputs(DENSE, dim=192, v_dim=128, heads=1, scale=0.1),
        Inputs(DENSE, dim=8, v_dim=3),
        pytest.param(Inputs(OFFSET, dtype=torch.float16, dim=64, v_dim=64), marks=pytest.mark.slow),
        Inputs(CAUSAL, dtype=torch.float16, softcap=2.0, heads=1),
        Inputs(WINDOWS, dtype=torch.bfloat16, dim=80, v_dim=80),
        Inputs((Segment(3, 3, 0, 4), Segment(0, 4, 5, 5))),
        Inputs(()),
    ],
    ids=lambda inputs: (
        f"{inputs.segments and inputs.segments[0]} {inputs.dim} {inputs.v_dim} {inputs.dtype} "
        f"{inputs.softcap}"
    ),
)
def test_equals_reference(inputs: Inputs) -> None:
    assert_equals_reference(inputs)


@st.composite
def random_inputs(draw: st.DrawFn) -> Inputs:
    segments = []
    row, key = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 3))):
        queries, keys = draw(st.integers(1, 50)), draw(st.integers(1, 50))
        # Bands in which every query sees a key: lo ≤ 0 at the last key, hi ≥ 0 at the first.
        lo = draw(
            st.none()
            | st.integers(-60, 0).map(lambda n, keys=keys, queries=queries: min(n, keys - queries))
        )
        hi = draw(st.none() | st.integers(0, 60))
        segments.append(Segment(row, row + queries, key, key + keys, lo, hi))
        row, key = row + queries + draw(st.integers(0, 2)), key + keys + draw(st.integers(0, 2))
    return Inputs(
        tuple(segments), softcap=draw(st.sampled_from([0.0, 1.5])), seed=draw(st.integers(1, 1000))
    )


@given(inputs=random_inputs())
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
def test_random_segments_equal_reference(inputs: Inputs) -> None:
    assert_equals_reference(inputs)


@given(
    inputs=random_inputs(),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    by_keys=st.booleans(),
)
@settings(max_examples=examples(60))
def test_tiles_hold_what_segments_show(
    inputs: Inputs, rows: int, columns: int, by_keys: bool
) -> None:
    """Every row is in one tile, its columns cover everything visible, and unmasked blocks are fully
    visible."""
    table, covered = triton.tile_table(inputs.segments, by_keys, rows, columns)
    size = max(max(s.q_stop, s.k_stop) for s in inputs.segments)
    wanted = torch.zeros(size, size, dtype=torch.bool)
    for s in inputs.segments:
        wanted[s.q_start : s.q_stop, s.k_start : s.k_stop] = visible(s, torch.device("cpu"))
    wanted = wanted.T if by_keys else wanted
    shown, times = torch.zeros_like(wanted), torch.zeros(size, dtype=torch.int64)
    work = []
    for row, row_stop, column, column_stop, full, full_stop, lo, hi in table.tolist():
        assert row < row_stop <= row + rows and column <= full <= full_stop <= column_stop
        assert (full - column) % columns == 0 and (full_stop - full) % columns == 0
        assert wanted[row:row_stop, full:full_stop].all()
        distance = torch.arange(column, column_stop)[None] - torch.arange(row, row_stop)[:, None]
        shown[row:row_stop, column:column_stop] = (lo <= distance) & (distance <= hi)
        times[row:row_stop] += 1
        work.append(column_stop - column)
    assert torch.equal(shown, wanted)
    assert times.max() == 1 and times.sum() == covered == sum(
        s.k_stop - s.k_start if by_keys else s.q_stop - s.q_start for s in inputs.segments
    )
    assert work == sorted(work, reverse=True)


def test_most_blocks_need_no_mask() -> None:
    """In a causal document only the blocks on the diagonal are masked; with a window, only those at
    its two edges."""
    (document,), _ = triton.tile_table([Segment(0, 1000, 0, 1000, hi=0)], False, 1000, 100)
    assert document.tolist()[:6] == [0, 1000, 0, 1000, 0, 0]
    table, _ = triton.tile_table([Segment(0, 1024, 0, 1024, hi=0)], False, 128, 64)
    assert all(
        stop - full_stop == 128 and full == 0
        for _, _, _, stop, full, full_stop, _, _ in table.tolist()
    )
    table, _ = triton.tile_table([Segment(0, 1024, 0, 1024, lo=-511, hi=0)], False, 128, 64)
    assert all(
        stop - first <= 511 + 128 and full_stop - full == 384
        for _, _, first, stop, full, full_stop, _, _ in table.tolist()[:4]
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other")
def test_two_runs_are_bit_identical() -> None:
    inputs = Inputs(WINDOWS, heads=4, kv_heads=2, dtype=torch.float16)
    first, second = (run("triton", inputs, inputs.tensors()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_strided_inputs() -> None:
    """Views into larger rows, heads before tokens, and an expanded gradient give the same
    results."""
    inputs = Inputs(CAUSAL[:1], heads=4, kv_heads=2, dim=16, v_dim=32)
    dout, q, k, v = inputs.tensors()
    dout = torch.ones(()).expand(dout.shape)
    packed = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    k_view, v_view = packed[:, :32].view(-1, 2, 16), packed[:, 32:].view(-1, 2, 32)
    q_view = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not (k_view.is_contiguous() or v_view.is_contiguous() or q_view.is_contiguous())
    plain = run("triton", inputs, (dout.contiguous(), q, k, v))
    strided = run("triton", inputs, (dout, q_view, k_view, v_view))
    for a, b in zip(plain, strided, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def run_case_anywhere(case: Case) -> tuple[torch.Tensor, ...]:
    """Allows the kernel on a CPU, where the test interprets it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "refusal", lambda request: None)
        return run_case(case)


def test_ring_over_the_kernel(workers: Workers) -> None:
    """Runs on two ranks, including the merge of partial results."""
    placements = (Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 0, 2, True))
    case = Case(
        2, (70, 9, 33), placements, heads=2, kv_heads=1, head_dim=16, padding=2, kernel="triton"
    )
    ours = gather(case, workers.run(run_case_anywhere, 2, case))
    exact = replace(case, kernel="reference", dtype=torch.float64)
    wanted = gather(exact, workers.run(run_case, 2, exact))
    for part, reference in zip(ours, wanted, strict=True):
        torch.testing.assert_close(part.double(), reference, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float16, 16), (torch.bfloat16, 24), (torch.float32, 5)]
)
def test_fused_merge_equals_the_plain_one(dtype: torch.dtype, dim: int) -> None:
    """Also for parts that are views; rows outside all segments stay unchanged, even NaN."""
    segments = (
        Segment(2, 50, 0, 9),
        Segment(50, 51, 9, 10),
        Segment(53, 90, 10, 11),
        Segment(91, 91, 11, 12),
    )
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(92, 3, dim, generator=generator).to(DEVICE)
    lse, part_lse = (torch.randn(92, 3, generator=generator).to(DEVICE) * 20 for _ in range(2))
    lse[0], out[-1] = float("-inf"), float("nan")
    part = torch.randn(3, 92, dim, generator=generator).to(DEVICE, dtype).transpose(0, 1)
    fused, plain = (out.clone(), lse.clone()), (out.clone(), lse.clone())
    merge_fused_(*fused, part, part_lse, segments)
    merge_plain_(*plain, part, part_lse, segments)
    for ours, wanted in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, wanted, equal_nan=True)
    assert not torch.equal(fused[0][2:50], out[2:50])
    merge_fused_(*fused, part, part_lse, ())
    torch.testing.assert_close(fused[0], plain[0], equal_nan=True)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    request = KernelRequest("cuda", torch.bfloat16, 128, 64, bands=True, softcap=True)
    assert triton.refusal(request) is None
    assert "float64" in str(triton.refusal(request._replace(dtype=torch.float64)))
    assert "up to 256" in str(triton.refusal(request._replace(v_head_dim=257)))
    with pytest.raises(KernelError, match="triton runs on GPUs, not on cpu"):
        choose_kernel("triton", request._replace(device="cpu", dtype=torch.float32))
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    assert "pip install triton" in str(triton.refusal(request))
    x = torch.zeros(4, 1, 16)
    with pytest.raises(ValueError, match="positive"):
        triton.forward(x, x, x, (Segment(0, 4, 0, 4),), Options(-1.0))


MOST_SPILLED = 64
"""Bytes of a thread that go through memory instead of registers, at most."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--heads", heads, *more, "--gpus", *gpus), marks=pytest.mark.slow)
        for heads in ("64:64", "128:128", "192:128", "256:256")
        for more, gpus in (((), ("80", "90", "100")), (("--softcap",), ("80", "89", "90", "100")))
    ],
)
def test_it_compiles_for_gpus(options: tuple[str, ...], repository: Path) -> None:
    """With the blocks chosen for each GPU, programs fit into shared memory and spill at most
    MOST_SPILLED bytes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(repository / "tests" / "triton_resources.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = list(csv.DictReader(done.stdout.splitlines()))
    assert {line["program"] for line in lines} == {"forward", "dq", "dkv"}
    assert all(
        int(line["spilled"]) <= MOST_SPILLED
        and 0 < int(line["shared"]) <= int(line["shared_limit"])
        for line in lines
    ), lines


def test_a_program_that_does_not_fit_gets_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of Triton may need more shared memory. Stages change no result; a program
    that never fits is an error."""
    monkeypatch.setattr(triton, "_fewer_stages", {})
    monkeypatch.setattr(
        triton._KernelLaunch, "blocks", lambda run, program: triton.BLOCKS[program, 64]
    )
    tried: list[int] = []

    class Program:
        def __init__(self, fits: int) -> None:
            self.fits = fits

        def __getitem__(self, grid: Any) -> Any:
            def launched(*arguments: Any, num_stages: int, **named: Any) -> None:
                tried.append(num_stages)
                if num_stages > self.fits:
                    raise OutOfResources(2, 1, "shared memory")

            return launched

    q = torch.zeros(4, 2, 64)
    run = triton._KernelLaunch(q, q, q, (Segment(0, 4, 0, 4, None, 0),), Options(1.0))
    device = SimpleNamespace(OutOfResources=OutOfResources)
    run.device_code = SimpleNamespace(
        triton=device, forward_kernel=Program(1), dq_kernel=Program(0)
    )  # type: ignore[assignment]  # stands in for the module
    for _ in range(2):
        run.launch("forward", run.tiles("forward"), 2, (q,))
    assert tried == [3, 2, 1, 1]
    with pytest.raises(OutOfResources):
        run.launch("dq", run.tiles("dq"), 2, (q,))
