"""Flash kernel: runs segments with the best installed library of variable-length flash attention
(`flash_libraries`).

These libraries take contiguous sequences with boundaries `cu_seqlens`, and one window per call,
aligned to the bottom right. Segments are mapped to sequences as follows, once per tuple of
segments:

- Rows of q outside all segments become a sequence without keys, rows of k a sequence without
  queries. Nothing is copied. Libraries write different results for such rows, so these are set to 0
  (log-sum-exp: -inf) afterwards. Some libraries load whole tiles and multiply foreign rows by 0:
  rows outside all segments must be finite.
- If the keys are not in the order of the queries, k and v are gathered.
- Segments with incompatible windows go to different calls. Every band becomes a window once keys
  that no query sees are cut off, because each query sees at least one key.

Backward uses the backward function of each library with the merged out and log-sum-exp; a
deterministic one if asked.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from longctx.attention.host_to_device import copy_to
from longctx.attention.kernels.contract import (
    MOST_ELEMENTS,
    BackwardSizes,
    Gradients,
    KernelRequest,
    Options,
    request_of,
)
from longctx.attention.kernels.flash_4 import LARGE
from longctx.attention.kernels.flash_libraries import LIBRARIES
from longctx.attention.kernels.flash_library import (
    HOPPER_OR_BLACKWELL,
    Capability,
    Library,
    Sequences,
)
from longctx.attention.kernels.repeatability import differs
from longctx.attention.segment_builder import row_index
from longctx.attention.segments import Segment, Segments
from longctx.errors import UserError, install

log = logging.getLogger(__name__)


class Flash:
    """A kernel that uses the first of several libraries that supports the request."""

    def __init__(self, libraries: Sequence[Library] = LIBRARIES) -> None:
        self.libraries = libraries
        self.library = cache(self._choose)
        """Returns the library for a request and logs it once, or the reason why none supports
        it."""

    def refusal(self, request: KernelRequest) -> str | None:
        """Implements `contract`."""
        library = self.library(_told_apart(request))
        return library if isinstance(library, str) else None

    def chosen(self, request: KernelRequest) -> Library:
        """Returns the library that runs a request. Raises UserError if none supports it."""
        library = self.library(_told_apart(request))
        if isinstance(library, str):
            raise UserError(f"kernel flash {library}; use kernel=auto")
        return library

    def workspace(self, sizes: BackwardSizes) -> int:
        """Implements `contract`. Without a GPU, the last library is assumed: it is always there,
        and needs the most."""
        library = self.chosen(sizes.request) if torch.cuda.is_available() else self.libraries[-1]
        return library.workspace(sizes)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Implements `contract`."""
        plans = _plans_for(q, k, segments)
        library = self._library_for(q, k, v, segments, options=options, plans=plans)
        out = lse = None
        for plan in plans:
            keys, values = plan.gather(k), plan.gather(v)
            part, heads_lse = library.forward(q, keys, values, plan.sequences, options)
            part_lse = heads_lse.transpose(0, 1).contiguous()
            _fill(plan.q_gaps, (part, 0.0), (part_lse, float("-inf")))
            # Calls cover disjoint queries and leave 0 and -inf elsewhere, so these operations are
            # exact.
            out = part if out is None else out.add_(part)
            lse = part_lse if lse is None else torch.maximum(lse, part_lse, out=lse)
        if out is None or lse is None:
            tokens, heads, _ = q.shape
            out = q.new_zeros(tokens, heads, v.shape[2])
            lse = q.new_full((tokens, heads), float("-inf"), dtype=torch.float32)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        options: Options,
    ) -> Gradients:
        """Implements `contract`."""
        plans = _plans_for(q, k, segments)
        library = self._library_for(q, k, v, segments, options=options, plans=plans)
        heads_lse = lse.transpose(0, 1).contiguous()
        total: tuple[Tensor, ...] = ()
        for plan in plans:
            keys, values = plan.gather(k), plan.gather(v)
            dq, dk, dv = library.backward(
                dout, q, keys, values, out, heads_lse, plan.sequences, options
            )
            _fill(plan.q_gaps, (dq, 0.0))
            _fill(plan.k_gaps, (dk, 0.0), (dv, 0.0))
            part: tuple[Tensor, ...] = (dq, plan.scatter(dk, k), plan.scatter(dv, v))
            # Exact as in forward: calls cover disjoint queries and keys.
            if total:
                part = tuple(a.add_(b) for a, b in zip(total, part, strict=True))
            total = part
        dq, dk, dv = total or (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        return dq, dk, dv

    def _library_for(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        *,
        options: Options,
        plans: Sequence["LibraryCall"],
    ) -> Library:
        request = request_of(
            q,
            k,
            v,
            segments,
            bands=any(plan.sequences.has_window for plan in plans),
            softcap=bool(options.softcap),
            deterministic=options.deterministic,
        )
        library = self.library(_told_apart(request))
        return library if isinstance(library, Library) else self.chosen(request)

    def _choose(self, request: KernelRequest) -> Library | str:
        if request.device != "cuda":
            return f"runs on CUDA devices, not on {request.device}"
        if request.dtype not in (torch.bfloat16, torch.float16):
            return f"supports bfloat16 and float16, not {request.dtype}"
        if request.head_dim % 8 or request.v_head_dim % 8:
            return (
                f"needs head sizes divisible by 8, not {request.head_dim} and {request.v_head_dim}"
            )
        if request.elements:  # flash-attention issue 2611, and pull requests 1500 and 2260
            return (
                f"supports tensors of less than {MOST_ELEMENTS:,} elements, as its libraries "
                f"count in 32 bits, and one has at least {request.elements:,}: use fewer tokens "
                "per rank, or another kernel, which is slower"
            )
        capability = torch.cuda.get_device_capability()
        refusals: list[str] = []
        for library in self.libraries:
            why = library.missing() or library.refusal(request, capability)
            if why is None and request.deterministic:
                why = differs(library, request)
            if why is None:
                _log_choice(library, request, capability, refusals)
                return library
            refusals.append(f"{library.name}: {why}")
        return f"has no library that supports these tensors: {'; '.join(refusals)}"


def _told_apart(request: KernelRequest) -> KernelRequest:
    """Returns a request as libraries tell them apart: all support windows, but of large heads."""
    if (request.head_dim, request.v_head_dim) in LARGE:
        return request
    return request._replace(bands=False)


def _log_choice(
    library: Library, request: KernelRequest, capability: Capability, refusals: Sequence[str]
) -> None:
    passed_over = f" ({'; '.join(refusals)})" if refusals else ""
    chosen = f"{library.name}{passed_over}"
    log.info("flash attention of %s, head size %d: %s", request.dtype, request.head_dim, chosen)
    fast_gpu = capability[0] in HOPPER_OR_BLACKWELL
    if fast_gpu and refusals and not library.made_for_hopper:
        # H100, head size 128, causal, 8192 tokens, forward and deterministic backward: flash-attn 2
        # 306 and 166 TFLOP/s, flash-attn 3 660 and 474 (flash-attention pull request 1893).
        faster = "flash-attn 4 or 3" if capability[0] == 9 else "flash-attn 4"
        remedy = f"install it, such as by {install('flash')}{passed_over}"
        log.warning(
            "attention runs on %s, at most half as fast as %s on this GPU: %s",
            library.name,
            faster,
            remedy,
        )


@dataclass(frozen=True)
class LibraryCall:
    """One library call.

    Attributes:
        sequences: its sequences.
        q_gaps, k_gaps: rows outside all segments, or None; `k_gaps` index the gathered rows.
        k_rows: rows of k and v to gather; None: all rows, in place.
    """

    sequences: Sequences
    q_gaps: Tensor | None
    k_gaps: Tensor | None
    k_rows: Tensor | None

    def gather(self, x: Tensor) -> Tensor:
        return x if self.k_rows is None else x.index_select(0, self.k_rows)

    def scatter(self, gradient: Tensor, like: Tensor) -> Tensor:
        if self.k_rows is None:
            return gradient
        return torch.zeros_like(like).index_copy_(0, self.k_rows, gradient)


def _fill(rows: Tensor | None, *tensors: tuple[Tensor, float]) -> None:
    if rows is not None:
        for tensor, value in tensors:
            tensor.index_fill_(0, rows, value)


def _plans_for(q: Tensor, k: Tensor, segments: Segments) -> tuple[LibraryCall, ...]:
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else None
    return _plans(tuple(segments), len(q), len(k), q.device, stream)  # keywords slow its cache


# All layers and both passes use the same segments; a classic ring of 64 has up to 127 tuples of
# them.
@lru_cache(maxsize=256)
def _plans(
    segments: tuple[Segment, ...],
    q_rows: int,
    k_rows: int,
    device: torch.device,
    stream: int | None,
) -> tuple[LibraryCall, ...]:
    """Returns the calls for `segments`, with tables on `device`; use them only on `stream`, which
    copies the tables."""
    return library_calls(segments, q_rows, k_rows, device=device)


def library_calls(
    segments: Segments, q_rows: int, k_rows: int, *, device: torch.device
) -> tuple[LibraryCall, ...]:
    """Returns the calls of a library for `segments`, with tables on `device`."""
    return tuple(
        _plan(group, window, q_rows=q_rows, k_rows=k_rows, device=device)
        for window, group in _groups(segments)
    )


Window = tuple[int | None, int | None]
"""Number of keys before and after its diagonal key that a query sees (bottom-right alignment);
None: all."""


def _groups(segments: Sequence[Segment]) -> list[tuple[Window, list[Segment]]]:
    """Groups segments by window. A segment that a limit does not affect joins a group where it
    fits, to save calls."""
    groups: list[tuple[Window, list[Segment]]] = []
    cut = [s.cut((s.q_start, s.q_stop), (s.k_start, s.k_stop)) for s in segments]
    not_empty = [segment for segment in cut if not segment.empty]
    for segment in sorted(not_empty, key=lambda s: (s.lo is None) + (s.hi is None)):
        queries, keys = segment.q_stop - segment.q_start, segment.k_stop - segment.k_start
        before = None if segment.lo is None else keys - queries - segment.lo
        after = None if segment.hi is None else segment.hi - (keys - queries)
        for window, group in groups:
            fits_before = _fits(window[0], before, most=keys - 1)
            if fits_before and _fits(window[1], after, most=queries - 1):
                group.append(segment)
                break
        else:
            groups.append(((before, after), [segment]))
    return groups


def _fits(limit: int | None, wanted: int | None, *, most: int) -> bool:
    """Returns whether a side of a window does for a segment that wants another limit: no limit, and
    so many keys at most."""
    if limit == wanted:
        return True
    return wanted is None and limit is not None and limit >= most


def _plan(
    segments: Sequence[Segment],
    window: Window,
    *,
    q_rows: int,
    k_rows: int,
    device: torch.device,
) -> LibraryCall:
    segments = sorted(segments)
    gathered = any(before.k_stop > after.k_start for before, after in pairwise(segments))
    edges_q, edges_k = [0], [0]
    q_gaps: list[range] = []
    k_gaps: list[range] = []

    def add(queries: int, keys: int) -> None:
        if queries or keys:
            if not keys:
                q_gaps.append(range(edges_q[-1], edges_q[-1] + queries))
            if not queries:
                k_gaps.append(range(edges_k[-1], edges_k[-1] + keys))
            edges_q.append(edges_q[-1] + queries)
            edges_k.append(edges_k[-1] + keys)

    for segment in segments:
        add(segment.q_start - edges_q[-1], 0)
        add(0, 0 if gathered else segment.k_start - edges_k[-1])
        add(segment.q_stop - segment.q_start, segment.k_stop - segment.k_start)
    add(q_rows - edges_q[-1], 0)
    add(0, 0 if gathered else k_rows - edges_k[-1])
    left, right = window
    sequences = Sequences(
        edges_q=copy_to(torch.tensor(edges_q, dtype=torch.int32), device),
        edges_k=copy_to(torch.tensor(edges_k, dtype=torch.int32), device),
        longest_q=_longest(edges_q),
        longest_k=_longest(edges_k),
        left=left,
        right=right,
    )
    gathered_rows = (
        [range(segment.k_start, segment.k_stop) for segment in segments] if gathered else []
    )
    return LibraryCall(
        sequences,
        q_gaps=_rows(q_gaps, device),
        k_gaps=_rows(k_gaps, device),
        k_rows=_rows(gathered_rows, device),
    )


def _longest(edges: Sequence[int]) -> int:
    return max(after - before for before, after in pairwise(edges))


def _rows(ranges: Sequence[range], device: torch.device) -> Tensor | None:
    return row_index(ranges, device) if ranges else None
