"""Tiles of the attention of `triton_kernels.py`: logits, dropout, gradients, as Triton functions.

    A[i,j] = (Q_i·K_j + P^q[i, r(i,j)] + P^k[j, r(i,j)]) · scale + B[i,j],    P^q = Q·T^qᵀ, P^k = K·T^kᵀ

A tile of A is made in registers and never stored. r(i,j) = clip(i − j, lowest, highest) − lowest depends on i − j
alone, so a row of tiles falls into three runs: before the band (every pair is in the bin of the largest offset, one
value a row is broadcast), the band (each pair looks up its own value), after the band (the bin of the smallest). The
gradient of P needs no atomics: between the bins a cell (row, offset) has one pair, hence one writer; the bins are sums
in registers.

The softmax works in base 2. Dropout draws 16 bits a pair from Philox at the counter (column j // 8, row i, head and
sequence), so that tiles of any shape agree, and a call serves eight pairs.

Memory: queries, keys, values and context `[b, s, h, d]`; P `[h, b, s, TABLE_ROWS]`; row statistics `[h, b, s]`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

# Where a tile lies: across the band, or wholly in the bin of the largest or of the smallest offset.
BAND: tl.constexpr = tl.constexpr(0)
ABOVE: tl.constexpr = tl.constexpr(1)
BELOW: tl.constexpr = tl.constexpr(2)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Philox with 7 rounds passes BigCrush (Salmon et al. 2011); Triton's default of 10 is a safety margin.
ROUNDS: tl.constexpr = tl.constexpr(7)


@triton.jit
def load_rows(matrix, places, S, stride, D: tl.constexpr, D_PAD: tl.constexpr):
    """Rows `places` of a matrix `[S, D]`, zero outside: `[BLOCK, D_PAD]`."""
    dims = tl.arange(0, D_PAD)
    inside = (places < S)[:, None] & (dims < D)[None, :]
    return tl.load(matrix + places[:, None] * stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(matrix, places, S, stride, values, D: tl.constexpr, D_PAD: tl.constexpr):
    dims = tl.arange(0, D_PAD)
    inside = (places < S)[:, None] & (dims < D)[None, :]
    tl.store(matrix + places[:, None] * stride + dims[None, :], values.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def locate(S, B, BLOCK: tl.constexpr):
    """First place of this program's block; number of its (head, sequence) pair, sequence and head; its first row."""
    num_blocks = tl.cdiv(S, BLOCK)
    pair = tl.program_id(0) // num_blocks
    b = (pair % B).to(tl.int64)
    return tl.program_id(0) % num_blocks * BLOCK, pair, b, (pair // B).to(tl.int64), pair.to(tl.int64) * S


@triton.jit
def load_ids(ids, places, S):
    return tl.load(ids + places, mask=places < S, other=0).to(tl.int32)


@triton.jit
def partners(ids, own_ids, S, S_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """From which tile border up to which place documents of `own_ids` can reach; an empty range for padding alone."""
    places = tl.arange(0, S_PAD)
    all_ids = load_ids(ids, places, S)
    first_id = tl.min(tl.where(own_ids > 0, own_ids, 2147483647), 0)
    shared = (all_ids >= first_id) & (all_ids <= tl.max(own_ids, 0))
    start = tl.min(tl.where(shared, places, S), 0)
    return start // BLOCK * BLOCK, tl.max(tl.where(shared, places + 1, 0), 0)


@triton.jit
def run_of_tiles(
    first,
    start,
    end,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    WHICH: tl.constexpr,
):
    """The part of [start, end) whose tiles hold the band (WHICH = 0), or lie before it (1) or after it (2).

    For a block of OWN places from `first`. Before the band: LEFT or more places before each of the block; after it:
    RIGHT or more places after each. With one run only, it is everything.
    """
    if RUNS == 1:
        low, high = start, end
    else:
        before = tl.maximum(first - LEFT + 1, 0) // BLOCK * BLOCK
        before = tl.minimum(tl.maximum(before, start), end)
        after = (first + OWN - 1 + RIGHT + BLOCK - 1) // BLOCK * BLOCK
        after = tl.minimum(tl.maximum(after, before), end)
        if WHICH == 0:
            low, high = before, after
        elif WHICH == 1:
            low, high = start, before
        else:
            low, high = after, end
    return low, high


@triton.jit
def logits_tile(
    q,
    k,
    rows,
    columns,
    row_ids,
    column_ids,
    by_query,
    by_key,
    line,
    bias,
    scale,
    S,
    TABLE_ROWS: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    WHERE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of A in base 2, −inf for forbidden pairs: `[BLOCK_M, BLOCK_N]`, fp32."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    in_rows = rows < S
    in_columns = columns < S
    inside = in_rows[:, None] & in_columns[None, :]
    # 64-bit sums on the scalar base only: those of the matrices of places stay 32 bits wide.
    if by_query is not None:
        by_query += line * TABLE_ROWS
    if by_key is not None:
        by_key += line * TABLE_ROWS
    if WHERE == BAND:
        index = tl.minimum(tl.maximum(rows[:, None] - columns[None, :], LOWEST), HIGHEST) - LOWEST
        if by_query is not None:
            logits += tl.load(by_query + (rows[:, None] * TABLE_ROWS + index), mask=inside, other=0.0).to(tl.float32)
        if by_key is not None:
            logits += tl.load(by_key + (columns[None, :] * TABLE_ROWS + index), mask=inside, other=0.0).to(tl.float32)
    else:
        bin: tl.constexpr = HIGHEST - LOWEST if WHERE == ABOVE else 0
        if by_query is not None:
            of_row = tl.load(by_query + (rows * TABLE_ROWS + bin), mask=in_rows, other=0.0)
            logits += of_row.to(tl.float32)[:, None]
        if by_key is not None:
            of_column = tl.load(by_key + (columns * TABLE_ROWS + bin), mask=in_columns, other=0.0)
            logits += of_column.to(tl.float32)[None, :]
    logits *= scale * LOG2_E
    if bias is not None:
        of_pair = tl.load(bias + (rows[:, None] * S + columns[None, :]), mask=inside, other=0.0)
        logits += of_pair.to(tl.float32) * LOG2_E
    allowed = (row_ids[:, None] == column_ids[None, :]) & (row_ids > 0)[:, None]
    return tl.where(allowed, logits, float("-inf"))


@triton.jit
def keep_tile(seed, pair, rows, first_column, drop_below, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which entries dropout keeps, bool `[BLOCK_M, BLOCK_N]`: a Philox call gives 16 bits to each of 8 columns."""
    group = first_column // 8 + tl.arange(0, BLOCK_N // 8)
    zero = tl.zeros((BLOCK_M, BLOCK_N // 8), tl.int32)
    a, b, c, d = tl.philox(
        tl.load(seed), zero + group[None, :], zero + rows[:, None], zero + pair, zero, n_rounds=ROUNDS
    )
    words = tl.join(tl.join(a, b), tl.join(c, d))  # [BLOCK_M, BLOCK_N / 8, 2, 2]
    halves = tl.join(words & 0xFFFF, words >> 16)  # [BLOCK_M, BLOCK_N / 8, 2, 2, 2]
    return tl.reshape(halves, (BLOCK_M, BLOCK_N)).to(tl.int32) >= drop_below


@triton.jit
def gradient_tile(
    logits,
    v,
    d_out,
    lse,
    delta,
    seed,
    pair,
    rows,
    first_column,
    drop_below,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Probabilities after dropout, and the gradient of A: both `[BLOCK_M, BLOCK_N]`, fp32."""
    p = tl.exp2(logits - lse[:, None])
    d_p = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
    dropped = p
    if seed is not None:
        enlarge = 65536.0 / (65536 - drop_below)
        keep = keep_tile(seed, pair, rows, first_column, drop_below, BLOCK_M, BLOCK_N)
        dropped = tl.where(keep, p * enlarge, 0.0)
        d_p = tl.where(keep, d_p * enlarge, 0.0)
    return dropped, p * (d_p - delta[:, None])


@triton.jit
def collect(
    gradient,
    cells,
    above,
    below,
    rows,
    columns,
    S,
    TABLE_ROWS: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    WHERE: tl.constexpr,
    AXIS: tl.constexpr,
):
    """Write the gradients of P between the bins, one tile's, to `cells + offset`; return the sums of the bins so far.

    `cells`: the pointer to P's rows; P belongs to the rows of A for AXIS = 1, to its columns for AXIS = 0.
    """
    if WHERE == ABOVE:
        above += tl.sum(gradient, AXIS)
    elif WHERE == BELOW:
        below += tl.sum(gradient, AXIS)
    else:
        offset = rows[:, None] - columns[None, :]
        is_above = offset >= HIGHEST
        is_below = (offset <= LOWEST) & (offset < HIGHEST)
        above += tl.sum(tl.where(is_above, gradient, 0.0), AXIS)
        below += tl.sum(tl.where(is_below, gradient, 0.0), AXIS)
        between = (offset > LOWEST) & (offset < HIGHEST) & (rows < S)[:, None] & (columns < S)[None, :]
        owner = rows[:, None] if AXIS == 1 else columns[None, :]
        cell = owner * TABLE_ROWS + (offset - LOWEST)
        tl.store(cells + cell, gradient.to(cells.dtype.element_ty), mask=between)
    return above, below


@triton.jit
def store_bins(cells, above, below, inside, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """Write the two bins, or the one there is, to the rows at `cells` `[BLOCK]`."""
    dtype = cells.dtype.element_ty
    if LOWEST == HIGHEST:
        tl.store(cells, (above + below).to(dtype), mask=inside)
    else:
        tl.store(cells + (HIGHEST - LOWEST), above.to(dtype), mask=inside)
        tl.store(cells, below.to(dtype), mask=inside)
