"""Device code of the Triton kernel: FlashAttention-2 (Dao, 2023) over tiles of segments.

One program computes one tile, a row of the table built by `longctx.attention.kernels.triton`: a
block of rows (queries in `forward_kernel` and `dq_kernel`, keys in `dkv_kernel`) with the columns
(keys or queries) that its band reaches:

    row_first, row_stop     rows, at most one block
    col_first, col_stop     columns that some row sees
    full_first, full_stop   whole blocks of columns that every row sees, without a mask; the
                            blocks before and after are masked
    lo, hi                  column c and row r see each other iff lo ≤ c - r ≤ hi

All are row indices of the tensors. Scores are in units of log 2, because the hardware has exp2: q·k
· score_scale with score_scale = scale · log2(e), or with a soft cap, cap · tanh(q·k · score_scale)
with cap = softcap · log2(e) and score_scale = scale / softcap. There are no atomics, so results are
bitwise reproducible.
"""

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(8)
# Maximum of an empty set: finite, so that its difference from itself is 0, not NaN.
LOWEST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(
    base, rows, row_stride, stop, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr
):
    """Loads [rows, BLOCK_DIM] from `base`; dimensions from DIM on, and if MASKED rows from `stop`
    on, are 0 and not read."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = base + (rows[:, None] * row_stride + dims[None, :])
    if DIM != BLOCK_DIM:
        keep = dims[None, :] < DIM
        if MASKED:
            keep = keep & (rows[:, None] < stop)
        block = tl.load(pointers, mask=keep, other=0.0)
    elif MASKED:
        block = tl.load(pointers, mask=rows[:, None] < stop, other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def _store(base, block, rows, row_stride, stop, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Writes the first `stop` rows and DIM dimensions of `block`, in the dtype of `base`."""
    dims = tl.arange(0, BLOCK_DIM)
    keep = rows[:, None] < stop
    if DIM != BLOCK_DIM:
        keep = keep & (dims[None, :] < DIM)
    tl.store(
        base + (rows[:, None] * row_stride + dims[None, :]),
        block.to(base.dtype.element_ty),
        mask=keep,
    )


@triton.jit
def _tanh(x):
    """Computes tanh; returns ±1 where exp2 overflows or underflows."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def _masked_block(i, col_first, full_first, full_stop, BLOCK: tl.constexpr):
    """Returns the first column of masked block i; the blocks before the whole blocks count first,
    then those after."""
    before = (full_first - col_first) // BLOCK
    return tl.where(i < before, col_first + i * BLOCK, full_stop + (i - before) * BLOCK)


@triton.jit
def _masked_blocks(col_first, full_first, full_stop, col_stop, BLOCK: tl.constexpr):
    return (full_first - col_first) // BLOCK + (col_stop - full_stop + BLOCK - 1) // BLOCK


@triton.jit
def _visible(col, columns, row_first, rows, col_stop, lo, hi):
    """Returns the visibility of `columns` to `rows` (both relative to the block), in their
    broadcast shape."""
    distance = (col - row_first) + columns - rows
    return (distance >= lo) & (distance <= hi) & (columns < col_stop - col)


@triton.jit
def _forward_step(
    acc, total, top, q_block, k, v, k_row, v_row, row_first, col, col_stop, lo, hi, score_scale,
    cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Updates the running numerator, denominator and maximum of the softmax with one block of
    keys."""
    rows, columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    k_block = _load(
        k + col * tl.cast(k_row, tl.int64), columns, k_row, col_stop - col, DIM, BLOCK_DIM, MASKED
    )
    scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
    if CAPPED:
        scores = cap * _tanh(scores * score_scale)
    if MASKED:
        scores = tl.where(
            _visible(col, columns[None, :], row_first, rows[:, None], col_stop, lo, hi),
            scores,
            float("-inf"),
        )
    if CAPPED:
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
    else:
        new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
        p = tl.exp2(scores * score_scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    v_block = _load(
        v + col * tl.cast(v_row, tl.int64),
        columns,
        v_row,
        col_stop - col,
        V_DIM,
        BLOCK_V_DIM,
        MASKED,
    )
    acc = tl.dot(p.to(v_block.dtype), v_block, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new_top


@triton.jit
def forward_kernel(
    q, k, v, out, lse, tiles,
    q_row, q_head, k_row, k_head, v_row, v_head,
    heads, group, score_scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes out and lse (both contiguous) of one tile of queries and one head. Grid: tiles ·
    heads, heads innermost."""
    head = tl.cast(tl.program_id(0) % heads, tl.int64)
    tile = tiles + tl.program_id(0) // heads * TILE_FIELDS
    row_first, row_stop, col_first, col_stop = (
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 2),
        tl.load(tile + 3),
    )
    full_first, full_stop, lo, hi = (
        tl.load(tile + 4),
        tl.load(tile + 5),
        tl.load(tile + 6),
        tl.load(tile + 7),
    )
    row = row_first.to(tl.int64)
    rows, count = tl.arange(0, BLOCK_Q), row_stop - row_first
    k += head // group * k_head
    v += head // group * v_head

    q_block = _load(q + row * q_row + head * q_head, rows, q_row, count, DIM, BLOCK_DIM, True)
    acc = tl.zeros([BLOCK_Q, BLOCK_V_DIM], dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    top = tl.full([BLOCK_Q], LOWEST, dtype=tl.float32)
    for col in range(full_first, full_stop, BLOCK_K):
        acc, total, top = _forward_step(
            acc, total, top, q_block, k, v, k_row, v_row, row_first, col, col_stop, lo, hi,
            score_scale, cap,
            DIM, V_DIM, BLOCK_DIM, BLOCK_V_DIM, BLOCK_Q, BLOCK_K, CAPPED, False, PRECISION,
        )  # fmt: skip
    for i in range(_masked_blocks(col_first, full_first, full_stop, col_stop, BLOCK_K)):
        col = _masked_block(i, col_first, full_first, full_stop, BLOCK_K)
        acc, total, top = _forward_step(
            acc, total, top, q_block, k, v, k_row, v_row, row_first, col, col_stop, lo, hi,
            score_scale, cap,
            DIM, V_DIM, BLOCK_DIM, BLOCK_V_DIM, BLOCK_Q, BLOCK_K, CAPPED, True, PRECISION,
        )  # fmt: skip

    seen = total != 0  # also where it is NaN, which must stay
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    lse_block = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))
    out_row = heads * V_DIM
    _store(out + row * out_row + head * V_DIM, acc, rows, out_row, count, V_DIM, BLOCK_V_DIM)
    tl.store(lse + row * heads + head + rows * heads, lse_block, mask=rows < count)


@triton.jit
def _probabilities(scores, lse, score_scale, cap, CAPPED: tl.constexpr):
    """Returns exp(score - lse) and the derivative of the score by q·k · scale; `scores` is q·k, lse
    in units of log 2."""
    if CAPPED:
        bent = _tanh(scores * score_scale)
        p = tl.exp2(cap * bent - lse)
        slope = 1.0 - bent * bent
    else:
        p = tl.exp2(scores * score_scale - lse)
        slope = 1.0
    return p, slope


@triton.jit
def _dq_step(
    dq_block, q_block, dout_block, lse_block, delta, k, v, k_row, v_row, row_first, col, col_stop,
    lo, hi,
    score_scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one block of keys to dQ, without the factor scale."""
    rows, columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    k_block = _load(
        k + col * tl.cast(k_row, tl.int64), columns, k_row, col_stop - col, DIM, BLOCK_DIM, MASKED
    )
    v_block = _load(
        v + col * tl.cast(v_row, tl.int64),
        columns,
        v_row,
        col_stop - col,
        V_DIM,
        BLOCK_V_DIM,
        MASKED,
    )
    scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
    p, slope = _probabilities(scores, lse_block[:, None], score_scale, cap, CAPPED)
    if MASKED:
        p = tl.where(
            _visible(col, columns[None, :], row_first, rows[:, None], col_stop, lo, hi), p, 0.0
        )
    dp = tl.dot(dout_block, tl.trans(v_block), input_precision=PRECISION)
    dscores = p * (dp - delta[:, None]) * slope
    return tl.dot(dscores.to(k_block.dtype), k_block, dq_block, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tokens"])  # it changes from one micro-batch to the next
def dq_kernel(
    dout, q, k, v, out, lse, dq, statistics, tiles,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, lse_row,
    lse_head,
    tokens, heads, group, scale, score_scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dq (contiguous) of one tile of queries and one head, and the statistics that
    `dkv_kernel` needs.

    statistics [2, heads, tokens], float32: lse in units of log 2, and delta, the sum of dout · out
    over the head dimension.
    """
    head = tl.cast(tl.program_id(0) % heads, tl.int64)
    tile = tiles + tl.program_id(0) // heads * TILE_FIELDS
    row_first, row_stop, col_first, col_stop = (
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 2),
        tl.load(tile + 3),
    )
    full_first, full_stop, lo, hi = (
        tl.load(tile + 4),
        tl.load(tile + 5),
        tl.load(tile + 6),
        tl.load(tile + 7),
    )
    row = row_first.to(tl.int64)
    rows, count = tl.arange(0, BLOCK_Q), row_stop - row_first
    k += head // group * k_head
    v += head // group * v_head

    dout_block = _load(
        dout + row * dout_row + head * dout_head, rows, dout_row, count, V_DIM, BLOCK_V_DIM, True
    )
    out_block = _load(
        out + row * out_row + head * out_head, rows, out_row, count, V_DIM, BLOCK_V_DIM, True
    )
    delta = tl.sum(dout_block.to(tl.float32) * out_block.to(tl.float32), 1)
    # Beyond the last query, an infinite lse makes every probability 0.
    lse_block = (
        tl.load(
            lse + row * lse_row + head * lse_head + rows * lse_row,
            mask=rows < count,
            other=float("inf"),
        )
        * LOG2_E
    )
    statistics += head * tokens + row
    tl.store(statistics + rows, lse_block, mask=rows < count)
    tl.store(statistics + tl.cast(heads, tl.int64) * tokens + rows, delta, mask=rows < count)

    q_block = _load(q + row * q_row + head * q_head, rows, q_row, count, DIM, BLOCK_DIM, True)
    dq_block = tl.zeros([BLOCK_Q, BLOCK_DIM], dtype=tl.float32)
    for col in range(full_first, full_stop, BLOCK_K):
        dq_block = _dq_step(
            dq_block, q_block, dout_block, lse_block, delta, k, v, k_row, v_row, row_first, col,
            col_stop, lo, hi,
            score_scale, cap, DIM, V_DIM, BLOCK_DIM, BLOCK_V_DIM, BLOCK_Q, BLOCK_K, CAPPED, False,
            PRECISION,
        )  # fmt: skip
    for i in range(_masked_blocks(col_first, full_first, full_stop, col_stop, BLOCK_K)):
        col = _masked_block(i, col_first, full_first, full_stop, BLOCK_K)
        dq_block = _dq_step(
            dq_block, q_block, dout_block, lse_block, delta, k, v, k_row, v_row, row_first, col,
            col_stop, lo, hi,
            score_scale, cap, DIM, V_DIM, BLOCK_DIM, BLOCK_V_DIM, BLOCK_Q, BLOCK_K, CAPPED, True,
            PRECISION,
        )  # fmt: skip
    dq_row = heads * DIM
    _store(dq + row * dq_row + head * DIM, dq_block * scale, rows, dq_row, count, DIM, BLOCK_DIM)


@triton.jit
def _dkv_step(
    dk_block, dv_block, k_block, v_block, q, dout, statistics, tokens, heads, head, q_row, q_head,
    dout_row, dout_head,
    row_first, col, col_stop, lo, hi, score_scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one block of queries of one head to dV and dK (without the factor
    scale).

    Scores are transposed: keys by queries.
    """
    rows, columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_Q)
    left = col_stop - col
    q_base = q + col * tl.cast(q_row, tl.int64) + head * q_head
    q_block = _load(q_base, columns, q_row, left, DIM, BLOCK_DIM, MASKED)
    dout_base = dout + col * tl.cast(dout_row, tl.int64) + head * dout_head
    dout_block = _load(dout_base, columns, dout_row, left, V_DIM, BLOCK_V_DIM, MASKED)
    statistics += head * tokens + col
    if MASKED:
        lse_block = tl.load(statistics + columns, mask=columns < left, other=float("inf"))
        delta = tl.load(
            statistics + tl.cast(heads, tl.int64) * tokens + columns, mask=columns < left, other=0.0
        )
    else:
        lse_block = tl.load(statistics + columns)
        delta = tl.load(statistics + tl.cast(heads, tl.int64) * tokens + columns)
    scores = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
    p, slope = _probabilities(scores, lse_block[None, :], score_scale, cap, CAPPED)
    if MASKED:
        p = tl.where(
            _visible(col, columns[None, :], row_first, rows[:, None], col_stop, lo, hi), p, 0.0
        )
    dv_block = tl.dot(p.to(dout_block.dtype), dout_block, dv_block, input_precision=PRECISION)
    dp = tl.dot(v_block, tl.trans(dout_block), input_precision=PRECISION)
    dscores = p * (dp - delta[None, :]) * slope
    dk_block = tl.dot(dscores.to(q_block.dtype), q_block, dk_block, input_precision=PRECISION)
    return dk_block, dv_block


@triton.jit(do_not_specialize=["tokens"])  # it changes from one micro-batch to the next
def dkv_kernel(
    dout, q, k, v, dk, dv, statistics, tiles,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head,
    tokens, heads, group, scale, score_scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv (both contiguous) of one tile of keys and one kv head, summed over its
    query heads."""
    kv_heads = heads // group
    kv_head = tl.cast(tl.program_id(0) % kv_heads, tl.int64)
    tile = tiles + tl.program_id(0) // kv_heads * TILE_FIELDS
    row_first, row_stop, col_first, col_stop = (
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 2),
        tl.load(tile + 3),
    )
    full_first, full_stop, lo, hi = (
        tl.load(tile + 4),
        tl.load(tile + 5),
        tl.load(tile + 6),
        tl.load(tile + 7),
    )
    row = row_first.to(tl.int64)
    rows, count = tl.arange(0, BLOCK_K), row_stop - row_first

    k_block = _load(k + row * k_row + kv_head * k_head, rows, k_row, count, DIM, BLOCK_DIM, True)
    v_block = _load(
        v + row * v_row + kv_head * v_head, rows, v_row, count, V_DIM, BLOCK_V_DIM, True
    )
    dk_block = tl.zeros([BLOCK_K, BLOCK_DIM], dtype=tl.float32)
    dv_block = tl.zeros([BLOCK_K, BLOCK_V_DIM], dtype=tl.float32)
    # One loop over heads and blocks, as Triton prefetches loads only within a loop.
    blocks = (full_stop - full_first) // BLOCK_Q
    for i in range(group * blocks):
        head = kv_head * group + i // tl.maximum(blocks, 1)
        col = full_first + i % tl.maximum(blocks, 1) * BLOCK_Q
        dk_block, dv_block = _dkv_step(
            dk_block, dv_block, k_block, v_block, q, dout, statistics, tokens, heads, head, q_row,
            q_head, dout_row, dout_head,
            row_first, col, col_stop, lo, hi, score_scale, cap,
            DIM, V_DIM, BLOCK_DIM, BLOCK_V_DIM, BLOCK_Q, BLOCK_K, CAPPED, False, PRECISION,
        )  # fmt: skip
    blocks = _masked_blocks(col_first, full_first, full_stop, col_stop, BLOCK_Q)
    for i in range(group * blocks):
        head = kv_head * group + i // tl.maximum(blocks, 1)
        col = _masked_block(i % tl.maximum(blocks, 1), col_first, full_first, full_stop, BLOCK_Q)
        dk_block, dv_block = _dkv_step(
            dk_block, dv_block, k_block, v_block, q, dout, statistics, tokens, heads, head, q_row,
            q_head, dout_row, dout_head,
            row_first, col, col_stop, lo, hi, score_scale, cap,
            DIM, V_DIM, BLOCK_DIM, BLOCK_V_DIM, BLOCK_Q, BLOCK_K, CAPPED, True, PRECISION,
        )  # fmt: skip
    dk_row, dv_row = kv_heads * DIM, kv_heads * V_DIM
    _store(dk + row * dk_row + kv_head * DIM, dk_block * scale, rows, dk_row, count, DIM, BLOCK_DIM)
    _store(dv + row * dv_row + kv_head * V_DIM, dv_block, rows, dv_row, count, V_DIM, BLOCK_V_DIM)
