"""The flash kernel with every library, on the CPU: fakes have the libraries' arguments and pitfalls
(`flash_fakes`)."""

import itertools
import logging
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.attention.kernels import (
    KERNELS,
    KernelError,
    ahead,
    choose_kernel,
    compilation,
    flash,
    flash_4,
    flash_libraries,
    flash_library,
    kernel_name,
    reference,
    repeatability,
)
from longctx.attention.kernels.compilation import compile_variants
from longctx.attention.kernels.contract import KernelRequest, Options, request_of
from longctx.attention.kernels.flash import Flash
from longctx.attention.kernels.flash_libraries import LIBRARIES
from longctx.attention.kernels.flash_library import Library
from longctx.attention.masks import Mask
from longctx.attention.ring_schedule import RingSchedule
from longctx.attention.segments import Segment
from longctx.errors import UserError
from longctx.planning.layout import Layout, Placement
from longctx.planning.tree import Tree
from tests.attention_cases import Case
from tests.block_cases import comb
from tests.flash_fakes import deterministic_calls, installed, margins, module_of
from tests.marks import examples
from tests.tree_cases import TURNS

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


def of(dim: int, v_dim: int | None = None, **options: bool) -> KernelRequest:
    return KernelRequest("cuda", torch.bfloat16, dim, v_dim or dim, **options)


BF16 = of(128)
NAMES = [library.name for library in LIBRARIES]


@pytest.fixture(autouse=True, scope="module")
def fakes() -> Iterator[None]:
    with installed():
        flash_library.import_error.cache_clear()
        yield
    flash_library.import_error.cache_clear()


@pytest.fixture(params=LIBRARIES, ids=NAMES)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.param
    return found


class Over(Flash):
    """The flash kernel with one library, on any device."""

    def _choose(self, request: KernelRequest) -> Library:
        return self.libraries[0]


Drawn = tuple[list[Segment], int, int]
"""Segments, and the numbers of rows of q and k."""


@st.composite
def segment_lists(draw: st.DrawFn) -> Drawn:
    """Draws disjoint segments in any order of queries and keys, with gaps."""
    shapes = draw(
        st.lists(st.tuples(*[st.integers(0, 3), st.integers(1, 9)] * 2), min_size=1, max_size=5)
    )
    bands = draw(st.sampled_from(["causal", "dense", "any"]))
    key_order = draw(st.permutations(range(len(shapes))))
    keys, k_stop = {}, 0
    for index in key_order:
        gap, count = shapes[index][2:]
        count = shapes[index][1] if bands == "causal" else count
        keys[index] = k_stop + gap, k_stop + gap + count
        k_stop += gap + count
    segments, q_stop = [], 0
    for index, (gap, count, _, _) in enumerate(shapes):
        lo, hi = {"causal": (None, 0), "dense": (None, None)}.get(bands) or (
            draw(st.none() | st.integers(-9, 9)),
            draw(st.none() | st.integers(-9, 9)),
        )
        segment = Segment(q_stop + gap, q_stop + gap + count, *keys[index], lo, hi)
        whole = segment.cut((segment.q_start, segment.q_stop), (segment.k_start, segment.k_stop))
        # Queries that see a key, including keys that no query sees and limits that hide nothing.
        shift = whole.q_start - segment.q_start
        if not whole.empty:
            segments.append(
                segment._replace(
                    q_start=whole.q_start,
                    q_stop=whole.q_stop,
                    lo=None if lo is None else lo + shift,
                    hi=None if hi is None else hi + shift,
                )
            )
        q_stop += gap + count
    return (
        draw(st.permutations(segments)),
        q_stop + draw(st.integers(0, 2)),
        k_stop + draw(st.integers(0, 2)),
    )


def check(libraries: Sequence[Library], drawn: Drawn, seed: int = 0, **options: Any) -> None:
    """Checks forward and backward against the reference, with a log-sum-exp that includes other
    calls."""
    segments, q_rows, k_rows = drawn
    asked = Options(0.4, **options)
    generator = torch.Generator().manual_seed(seed)
    q, dout = (torch.randn(q_rows, 4, 8, generator=generator) for _ in range(2))
    # strided, as rows of an exchange are.
    k, v = torch.randn(k_rows, 2, 16, generator=generator).split(8, dim=2)
    out, lse = reference.forward(q, k, v, segments, asked)
    tensors = dout, q, k, v, out * 0.6, lse + 0.5
    gradients = reference.backward(*tensors, segments, asked)
    for library in libraries:
        kernel = Over([library])
        torch.testing.assert_close(kernel.forward(q, k, v, segments, asked), (out, lse))
        torch.testing.assert_close(kernel.backward(*tensors, segments, asked), gradients)


@given(drawn=segment_lists(), seed=st.integers(0, 1000), cap=st.sampled_from([0.0, 3.0]))
@settings(max_examples=examples(100), deadline=None)
def test_every_library_computes_the_segments(drawn: Drawn, seed: int, cap: float) -> None:
    capped = KernelRequest("cuda", torch.bfloat16, 8, 8, softcap=bool(cap))
    check(
        [library for library in LIBRARIES if not cap or not library.refusal(capped, HOPPER)],
        drawn,
        seed,
        softcap=cap,
    )


@pytest.mark.parametrize(
    "drawn",
    [
        # Unlimited to the right for no query, though the limit reaches all keys.
        ([Segment(0, 9, 0, 3, None, 0)], 10, 9),
        ([Segment(0, 9, 0, 3, -8, None)], 10, 9),  # the other side limited
        ([Segment(0, 9, 0, 3, -8, 1)], 10, 9),
        ([Segment(0, 3, 0, 9, 2, None)], 10, 9),
        ([Segment(0, 1, 0, 4), Segment(2, 3, 4, 5)], 3, 6),  # single queries with grouped heads
        ([], 3, 2),
        ([Segment(0, 3, 1, 1), Segment(1, 1, 0, 2)], 3, 2),  # none with queries and keys
    ],
)
def test_bands_and_segments_at_the_edge(drawn: Drawn) -> None:
    check(LIBRARIES, drawn)


@pytest.mark.parametrize("tree", [TURNS, comb(60, 7)], ids=["turns", "blocks"])
@pytest.mark.parametrize("mask", [Mask(), Mask(window=9, sinks=2)], ids=["whole", "window"])
def test_segments_of_trees(mask: Mask, tree: Tree) -> None:
    for rank in range(3):
        layout = Layout.of([Placement(0, 0, 3)], [tree.length], 0, rank, {0: tree})
        for call in RingSchedule.build(layout, mask=mask).calls:
            rows = [
                max(stops)
                for stops in zip(
                    *((each.q_stop, each.k_stop) for each in call.segments), strict=True
                )
            ]
            check(LIBRARIES, (list(call.segments), rows[0], rows[1]))


@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_is_deterministic_if_asked(library: Library, deterministic: bool) -> None:
    deterministic_calls.clear()
    check([library], ([Segment(0, 5, 0, 5, None, 0)], 5, 5), deterministic=deterministic)
    assert deterministic_calls == [(library.name, deterministic)]


@pytest.mark.parametrize("overlapped", [False, True])
def test_flash_3_leaves_processors_to_messages(overlapped: bool) -> None:
    margins.clear()
    flash_3 = LIBRARIES[NAMES.index("flash-attn 3")]
    check([flash_3], ([Segment(0, 5, 0, 5, None, 0)], 5, 5), overlapped=overlapped)
    assert margins == [16 * overlapped] * 2


def test_a_deterministic_backward_is_tried(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash-attn 3 up to 2.8.3 takes `deterministic=True` and ignores it: a few calls tell."""
    monkeypatch.setattr(repeatability, "TOKENS", 12)
    monkeypatch.setattr(repeatability, "REPEATS", 4)
    request = KernelRequest("cpu", torch.float32, 8, 8, deterministic=True)
    assert repeatability.differs(library, request) is None
    calls = itertools.count()

    def backward(*arguments: Any) -> Any:
        """Adds another rounding error to one number of dk, in the last of the windows only."""
        dq, dk, dv = library.backward(*arguments)
        if arguments[6].left is not None:
            dk[7, 1, 3] *= 1 + 2**-23 * (next(calls) % 5)
        return dq, dk, dv

    why = repeatability.differs(replace(library, backward=backward), request)
    assert (
        why
        == "its deterministic backward gave another dk for the same inputs: install a newer version"
    )


def test_a_library_that_is_not_deterministic_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr(
        flash,
        "differs",
        lambda library, request: "differs" if library.name == "flash-attn 4" else None,
    )
    chosen = [
        Flash().library(BF16._replace(deterministic=deterministic))
        for deterministic in (False, True)
    ]
    assert [library.name for library in chosen if isinstance(library, Library)] == [
        "flash-attn 4",
        "flash-attn 3",
    ]


def test_unequal_head_sizes() -> None:
    """flash-attn 3 takes head sizes 192 and 128."""
    library = LIBRARIES[NAMES.index("flash-attn 3")]
    assert library.refusal(KernelRequest("cuda", torch.bfloat16, 192, 128), HOPPER) is None
    kernel = Over([library])
    q, k, v, dout = (
        torch.randn(5, 2, 24),
        torch.randn(5, 1, 24),
        torch.randn(5, 1, 16),
        torch.randn(5, 2, 16),
    )
    segments = [Segment(1, 5, 1, 5, hi=0)]
    out, lse = reference.forward(q, k, v, segments, Options(0.3))
    torch.testing.assert_close(kernel.forward(q, k, v, segments, Options(0.3)), (out, lse))
    torch.testing.assert_close(
        kernel.backward(dout, q, k, v, out, lse, segments, Options(0.3)),
        reference.backward(dout, q, k, v, out, lse, segments, Options(0.3)),
    )


def calls_made(
    segments: list[Segment] | tuple[Segment, ...],
) -> list[tuple[int | None, int | None]]:
    return [window for window, _ in flash._groups(segments)]


def test_one_call_for_each_call_of_a_ring() -> None:
    """For any degrees: local calls with documents of one token and more, the rounds' calls, and a
    window that is longer than some documents and shorter than others."""
    assert calls_made([Segment(a, b, a, b, hi=0) for a, b in pairwise((0, 1, 6, 7, 307))]) == [
        (None, 0)
    ]
    lengths = (1, 40, 60, 90)
    placements = (Placement(0, 1, 1), Placement(1, 0, 2), Placement(2, 1, 3), Placement(3, 0, 4))
    case = Case(4, lengths, placements, exchange_rounds=2)
    for rank in range(4):
        schedule = RingSchedule.build(case.layout(rank))
        for call in (
            *schedule.local,
            *(call for round_ in schedule.rounds for call in round_.calls),
        ):
            assert len(calls_made(call.segments)) == 1
            plan = flash._plans(call.segments, 1000, 1000, torch.device("cpu"), None)[0]
            assert plan.k_rows is None, "nothing is gathered"
    windowed = [area for length in (1, 9, 16, 17, 90) for area in Mask(window=16).areas(0, length)]
    starts = accumulate((area.q_stop for area in windowed), initial=0)
    packed = [
        Segment(s, s + a.q_stop, s, s + a.k_stop, a.lo, a.hi)
        for s, a in zip(starts, windowed, strict=False)
    ]
    assert calls_made(packed) == [(15, 0)]


def test_tables_are_made_once() -> None:
    segments = (Segment(0, 3, 0, 3, hi=0), Segment(3, 7, 3, 7, hi=0))
    flash._plans.cache_clear()
    for _ in range(3):
        check(LIBRARIES[:1], (list(segments), 7, 7))
    assert flash._plans.cache_info().misses == 1


@pytest.mark.parametrize(
    ("request_", "capability", "wanted"),
    [
        (BF16, HOPPER, "flash-attn 4"),
        (BF16, BLACKWELL, "flash-attn 4"),
        (BF16, AMPERE, "flash-attn 2"),
        (BF16, (12, 0), "flash-attn 2"),
        (KernelRequest("cuda", torch.float16, 192, 192), HOPPER, "flash-attn 3"),
        (of(192, 128), HOPPER, "flash-attn 3"),
        (of(192, 128), BLACKWELL, "flash-attn 4"),
        (of(192, 128, bands=True, softcap=True), BLACKWELL, "flash-attn 4"),
        (of(256), HOPPER, "flash-attn 4"),
        (of(256, bands=True, softcap=True), HOPPER, "flash-attn 4"),
        (of(256, deterministic=True), HOPPER, "flash-attn 2"),
        (of(256), BLACKWELL, "flash-attn 4"),
        (of(256, bands=True), BLACKWELL, "flash-attn 2"),
        (of(256, deterministic=True), BLACKWELL, "flash-attn 2"),
        (of(192), BLACKWELL, "flash-attn 2"),
        (of(64, bands=True, softcap=True), HOPPER, "flash-attn 4"),
    ],
)
def test_the_best_library_is_chosen_and_named(
    request_: KernelRequest,
    capability: tuple[int, int],
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(flash, "differs", lambda library, request: None)
    with caplog.at_level(logging.INFO):
        found = Flash().library(request_)
    assert isinstance(found, Library) and found.name == wanted
    assert f": {wanted}" in caplog.text
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    slow = capability in (HOPPER, BLACKWELL) and wanted == "flash-attn 2"
    assert len(warned) == slow, "slow on Hopper and Blackwell, and said once"
    way_out = (
        "pip install '.[flash]' in the folder of longctx's source code (flash-attn 4: "
        "supports head sizes "
    )
    assert all(way_out in message for message in warned)
    monkeypatch.setitem(KERNELS, "flash", Flash())
    choose_kernel.cache_clear()
    assert kernel_name("auto", request_) == wanted, "as the first line of a run says"
    choose_kernel.cache_clear()


def test_tensors_that_32_bits_cannot_count_go_to_other_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries, keys that were received for a ring, and strides; what a library pads counts too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr(flash, "differs", lambda library, request: None)
    choose_kernel.cache_clear()

    def request(
        q: int, keys: int, heads: int = 32, packed: int = 1, segments: int = 1
    ) -> KernelRequest:
        shapes = (q, heads, 128), (keys, packed, 8, 128), (keys, packed, 8, 128)
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        whole = [x if x.dim() == 3 else x[:, 0] for x in tensors]
        made = request_of(
            *whole, (Segment(0, 1, 0, 1),) * segments, softcap=False, deterministic=False
        )
        return made._replace(device="cuda")

    queries, keys, strided, padded = (
        (600_000, 600_000),
        (300_000, 2_100_000),
        (9, 1_100_000, 32, 2),
        (500_000, 9, 32, 1, 100),
    )
    for large in (request(*queries), request(*keys), request(*strided), request(*padded)):
        assert choose_kernel("auto", large) is KERNELS["triton"]
        with pytest.raises(
            KernelError,
            match=r"less than 2,147,483,648 elements.*at least 2,\d{3},\d{3},\d{3}: use fewer",
        ):
            choose_kernel("flash", large)
    for small in (request(500_000, 500_000), request(9, 1_000_000, packed=2)):
        assert choose_kernel("auto", small) is KERNELS["flash"]
    monkeypatch.setattr(
        flash,
        "request_of",
        lambda *given, **more: request_of(*given, **more)._replace(device="cuda"),
    )
    q = torch.empty(600_000, 32, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UserError, match="less than 2,147,483,648 elements"):
        Flash().forward(q, q, q, (Segment(0, 600_000, 0, 600_000, None, 0),), Options(1.0))
    choose_kernel.cache_clear()


@pytest.mark.parametrize(
    ("request_", "capability", "parts"),
    [
        (KernelRequest("cpu", torch.bfloat16, 64, 64), HOPPER, ["not on cpu"]),
        (KernelRequest("cuda", torch.float32, 64, 64), HOPPER, ["not torch.float32"]),
        (of(60), HOPPER, ["divisible by 8"]),
        (of(64, 128), HOPPER, ["flash-attn 4: needs equal", "flash-attn 3: supports head sizes"]),
        (
            of(512),
            HOPPER,
            [f"flash-attn {number}: supports head sizes up to 256, not 512" for number in (2, 3)],
        ),
        (
            of(512, deterministic=True),
            HOPPER,
            ["flash-attn 3: supports head sizes up to 192, not 512, with a deterministic"],
        ),
        (BF16, (7, 5), ["flash-attn 3: supports only Hopper", "flash-attn 2: needs Ampere"]),
    ],
)
def test_refusals_say_why(
    request_: KernelRequest,
    capability: tuple[int, int],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    why = Flash().library(request_)
    assert isinstance(why, str)
    assert all(part in why for part in parts)


@pytest.mark.parametrize(
    ("request_", "capability", "part"),
    [
        (of(192, 128), HOPPER, "needs equal head sizes of k and v, not 192 and 128"),
        (of(256, softcap=True), BLACKWELL, "256 and 256 on Blackwell only without windows"),
        (of(256, bands=True), BLACKWELL, "256 and 256 on Blackwell only without windows"),
        (of(192, 128, deterministic=True), BLACKWELL, "192 and 128 only without a determin"),
        (of(192), HOPPER, "up to 128, not 192"),
        (of(128, 256), BLACKWELL, "needs equal head sizes"),
    ],
)
def test_flash_4_refuses_what_does_not_compile(
    request_: KernelRequest, capability: tuple[int, int], part: str
) -> None:
    """Seen with the real library and fake tensors."""
    assert part in str(flash_4.refusal(request_, capability))


@pytest.mark.parametrize(
    ("lo", "capability", "wanted"),
    [
        (None, BLACKWELL, "flash-attn 4"),
        (-3, BLACKWELL, "flash-attn 2"),
        (-3, HOPPER, "flash-attn 4"),
    ],
)
def test_calls_with_a_window_choose_for_themselves(
    monkeypatch: pytest.MonkeyPatch, lo: int | None, capability: tuple[int, int], wanted: str
) -> None:
    """As layers with windows and without them may have the same large heads."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(
        flash,
        "request_of",
        lambda *given, **more: request_of(*given, **more)._replace(device="cuda"),
    )
    q = torch.empty(9, 2, 256, dtype=torch.bfloat16)
    segments = (Segment(0, 9, 0, 9, lo, 0),)
    plans = flash.library_calls(segments, 9, 9, device=torch.device("cpu"))
    library = Flash()._library_for(q, q, q, segments, options=Options(1.0), plans=plans)
    assert library.name == wanted


def test_on_the_cpu_it_is_refused() -> None:
    q = torch.randn(3, 2, 8)
    with pytest.raises(UserError, match="kernel flash runs on CUDA devices, not on cpu"):
        Flash().forward(q, q, q, [Segment(0, 3, 0, 3)], Options(1.0))


def test_refusals_of_torch() -> None:
    """Torch's operators do not support a soft cap, and this machine's build may lack the
    operators."""
    library = LIBRARIES[NAMES.index("torch's flash operators")]
    assert library.refusal(BF16, AMPERE) is None
    assert (
        library.refusal(KernelRequest("cuda", torch.bfloat16, 64, 64, softcap=True), AMPERE)
        == "does not support a soft cap"
    )
    missing = library.missing()
    assert (missing is None) == torch.backends.cuda.is_flash_attention_available()


def test_a_library_that_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = dict(zip(NAMES, LIBRARIES, strict=True))
    assert by_name["flash-attn 2"].missing() is None
    monkeypatch.setattr(sys.modules["flash_attn"], "__version__", "2.5.9.post1")
    assert by_name["flash-attn 2"].missing() == "2.5.9.post1 is too old: install 2.8 or newer"
    flash_library.import_error.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    why = by_name["flash-attn 4"].missing()
    assert why is not None and why.endswith("pip install flash-attn-4==4.0.0b36")
    flash_library.import_error.cache_clear()


OF_FLASH_2 = {
    "_flash_attn_fwd": """q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, page_table=None,
        softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None""",
    "_flash_attn_bwd": "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0",
}
"""The functions of flash_attn.cute.interface that flash-attn 2.8.3 installs, with the arguments
that matter."""


def test_only_the_tested_flash_4_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are private, and flash-attn 2.8.3 has modules of the same names. The extra
    installs it."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["flash"] == [f"flash-attn-4=={flash_4.TESTED}"]

    def never_called(arguments: object) -> None:
        raise AssertionError

    assert flash_4.missing() is None
    with monkeypatch.context() as patch:
        name = "flash_attn.cute.interface"
        patch.setitem(sys.modules, name, module_of(name, OF_FLASH_2, never_called, never_called))
        why = flash_4.missing()
        assert why is not None and "another package replaced its modules (_flash_attn_fwd" in why

        def none(name: str) -> str:
            raise PackageNotFoundError(name)

        patch.setattr(flash_4, "version", none)
        assert flash_4.missing() == "not installed: pip install flash-attn-4==4.0.0b36"
    monkeypatch.setattr(flash_4, "version", lambda name: "4.0.0b37")
    why = flash_4.missing()
    assert why is not None and why.startswith(
        "4.0.0b37 is installed, but only 4.0.0b36 is known to work"
    )


@pytest.mark.parametrize(("mode", "writable"), [(None, False), (0o777, True), (0o701, False)])
def test_flash_4_keeps_compiled_kernels(
    mode: int | None, writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of this user alone: others must not put code there. What is set already wins."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        os, "environ", environment := {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "elsewhere"}
    )
    folder = tmp_path / f"longctx-{os.getuid()}"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    assert flash_4.missing() is None
    assert environment.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == (None if writable else "1")
    assert environment["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == "elsewhere"
    if not writable:
        assert folder.stat().st_mode & 0o777 == (mode or 0o700)
        monkeypatch.setattr(os, "environ", environment := {})
        assert flash_4.missing() is None
        assert environment["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(folder / "flash-attn-4")


Variant = tuple[bool, ...]
RATIO = 2
"""Query heads of a key head."""


def variants(segments: Any, q_rows: int, k_rows: int) -> dict[str, set[Variant]]:
    """Returns by what flash-attn 4 compiles the calls for some segments.

    Of both passes: causal, limited to the left and to the right, and whether there are more than
    256 sequences. Forward also by the queries of one block, or of two on Blackwell; backward by
    queries and keys of one block, for all sizes of these blocks.
    """
    seen: dict[str, set[Variant]] = {"forward": set(), "backward": set()}
    for plan in flash._plans(tuple(segments), q_rows, k_rows, torch.device("cpu"), None):
        calls = plan.sequences
        both = (
            calls.causal,
            calls.left is not None,
            calls.right is not None,
            len(calls.edges_q) > 257,
        )
        seen["forward"].add((*both, *(RATIO * calls.longest_q <= rows for rows in (128, 192, 256))))
        seen["backward"].add(
            (*both, *(calls.longest_q <= rows for rows in (64, 80, 128)), calls.longest_k <= 128)
        )
    return seen


class Variants:
    """A kernel that records the variants that it is called for, instead of compiling."""

    def __init__(self) -> None:
        self.seen: dict[str, set[Variant]] = {"forward": set(), "backward": set()}

    refusal = staticmethod(reference.refusal)

    def record(
        self, way: str, q: torch.Tensor, k: torch.Tensor, segments: Any, options: Options
    ) -> None:
        assert (q.shape[1], k.shape[1]) == (2 * RATIO, 2) and options.deterministic
        self.seen[way] |= variants(segments, len(q), len(k))[way]

    def forward(self, q: Any, k: Any, v: Any, segments: Any, options: Options) -> Any:
        self.record("forward", q, k, segments, options)
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, segments: Any, *rest: Any
    ) -> Any:
        self.record("backward", q, k, segments, rest[-1])


@cache
def compiled(window: bool) -> dict[str, set[Variant]]:
    kernel = Variants()
    with mock.patch.dict(KERNELS, {"variants": kernel}):  # type: ignore[dict-item]  # it only records
        choose_kernel.cache_clear()
        request = KernelRequest("cpu", torch.float32, 8, 8, deterministic=True)
        compile_variants("variants", request, (2 * RATIO, 2), window=window)
    choose_kernel.cache_clear()
    return kernel.seen


BLOCKS: list[Any] = [
    ("forward", 4),
    ("forward", 5),
    ("forward", 4, 6),
    *(("backward", place, 7) for place in (4, 5, 6)),
]
"""A pass, and the places in its variants that depend on the blocks of some GPU and head size."""


def same(a: Variant, b: Variant, places: list[int]) -> bool:
    return all(a[place] == b[place] for place in places)


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    short=st.sampled_from([0, 0, 1, 250, 300]),
    degree=st.integers(1, 6),
    window=st.none() | st.integers(1, 200),
)
@settings(max_examples=examples(80), deadline=None)
def test_all_variants_of_a_ring_are_compiled(
    lengths: list[int], short: int, degree: int, window: int | None
) -> None:
    """A GPU has one size of each block."""
    rings = [Placement(i, 0, degree) for i in range(len(lengths))]
    rings += [Placement(len(lengths) + i, i % 2 % degree, 1) for i in range(short)]
    case = Case(degree, (*lengths, *[2] * short), tuple(rings), exchange_rounds=2)
    known = compiled(window is not None)
    for rank in range(degree):
        schedule = RingSchedule.build(case.layout(rank), mask=Mask(window=window))
        tokens = schedule.layout.tokens
        for call in schedule.calls:
            made = variants(call.segments, tokens, tokens if call.rows is None else len(call.rows))
            for way, *block in BLOCKS:
                for variant in made[way]:
                    assert any(
                        same(variant, other, [0, 1, 2, 3, *block]) for other in known[way]
                    ), (way, block, variant)


def test_the_switch_of_torch_is_set_back() -> None:
    memory: Any = torch.utils.deterministic

    def state() -> tuple[int, bool]:
        return torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory

    before = state()
    with flash_libraries._deterministic():
        assert state() == (2, False)
    assert state() == before


def recorded(calls: list[Any]) -> tuple[Any, Any]:
    """Returns the functions of a library that keeps the shapes and sequences of its calls."""

    def said(way: str, tensors: Sequence[torch.Tensor], sequences: Any, options: Options) -> None:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        sizes = sequences.longest_q, sequences.longest_k, sequences.left, sequences.right
        edges = tuple(sequences.edges_q.shape), tuple(sequences.edges_k.shape)
        calls.append((way, shapes, sizes, edges, options))

    def forward(q: Any, k: Any, v: Any, sequences: Any, options: Options) -> Any:
        said("forward", [q, k, v], sequences, options)
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
        return out, torch.zeros(q.shape[1], q.shape[0])

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, sequences: Any, options: Options
    ) -> Any:
        said("backward", [dout, q, k, v, out, lse], sequences, options)
        return torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)

    return forward, backward


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (32, 4)])
def test_calls_that_are_compiled_ahead_are_those_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, window: bool, heads: tuple[int, int]
) -> None:
    """On fake tensors of a GPU that is not here, with the same shapes, sequences and options."""
    real: list[Any] = []
    forward, backward = recorded(real)
    library = replace(LIBRARIES[0], forward=forward, backward=backward)
    request = KernelRequest("cpu", torch.float32, 8, 16)
    compilation.run_variants(Over([library]), request, heads, window=window)
    fake: list[Any] = []
    forward, backward = recorded(fake)
    monkeypatch.setattr(flash_4, "forward", forward)
    monkeypatch.setattr(flash_4, "backward", backward)
    ahead.compile_ahead(request._replace(device="cuda"), heads, window=window)
    assert real and fake == real
