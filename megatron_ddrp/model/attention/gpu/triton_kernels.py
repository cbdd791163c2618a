"""The Triton kernels of attention: forward pass, and the gradients of queries, keys and the bias.

This is flash attention (Dao 2023, arXiv:2307.08691) with the position terms of `positions/contract.py`:

    A[i,j] = (Q_i·K_j + P^q[i, r(i,j)] + P^k[j, r(i,j)] + v[r(i,j)]/scale) · scale + B[i,j]
    P^q = Q·T^qᵀ,  P^k = K·T^kᵀ

Each kernel owns a block of queries (or of keys) of one head of one sequence and walks over the tiles of its row (or
column) of A. It skips tiles that the block cannot reach: other documents before or after its own, and places outside
the window. Every result has one writer and sums have a fixed order, so a run repeats to the last bit.

A tile of A is computed in registers and never stored. r(i,j) = clip(i − j, lowest, highest) − lowest depends on i − j
alone, so a row of tiles falls into three runs, of which kernels take the band first. Before the band every pair is in
the bin of the largest offset, so one value per row is broadcast. In the band each pair looks up its own value. After
the band every pair is in the bin of the smallest offset. The gradient of P needs no atomics: between the bins a cell
(row, offset) has one pair, hence one writer; the bins are summed in registers.

The softmax works in base 2. Dropout's decision is a hash of (seed, head and sequence, row i, column j), so tiles of any
shape agree.

Memory layouts: queries, keys, values and context `[b, s, h, d]`; P `[h, b, s, TABLE_ROWS]`; v/scale `[h, TABLE_ROWS]`,
fp32; row statistics `[h, b, s]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


# Position of a tile: across the band, or entirely in the bin of the largest or of the smallest offset.
BAND: tl.constexpr = tl.constexpr(0)
ABOVE: tl.constexpr = tl.constexpr(1)
BELOW: tl.constexpr = tl.constexpr(2)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


jit_kernel = triton.jit(
    do_not_specialize=("B", "H", "drop_below", "documents"), do_not_specialize_on_alignment=("heads",)
)
"""Decorator of the kernels that are launched.

Triton compiles a kernel anew where an integer becomes 1 or a multiple of 16. The named ones change during a run, and
`heads` is one row of a table, which lies at any address.
"""


@triton.jit
def load_rows(matrix, places, S, stride, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return rows `places` of a matrix `[S, D]`, zero outside: `[BLOCK, D_PAD]`."""
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
    """Return this program's first place, its (head, sequence) pair number, sequence, head, and the pair's first row."""
    num_blocks = tl.cdiv(S, BLOCK)
    pair = tl.program_id(0) // num_blocks
    b = (pair % B).to(tl.int64)
    return tl.program_id(0) % num_blocks * BLOCK, pair, b, (pair // B).to(tl.int64), pair.to(tl.int64) * S


@triton.jit
def load_ids(ids, places, S):
    return tl.load(ids + places, mask=places < S, other=0).to(tl.int32)


@triton.jit
def partners(ids, own_ids, first, S, S_PAD: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range of places that contains every partner of a block of OWN places from `first`.

    `own_ids` are the block's documents. The range begins at a tile border; it is empty for a block of padding.
    """
    places = tl.arange(0, S_PAD)
    if WINDOW is not None:  # S_PAD covers the block and its window on both sides
        places += first - WINDOW
        places = tl.where((places >= 0) & (places < first + OWN + WINDOW), places, S)
    all_ids = load_ids(ids, places, S)
    first_id = tl.min(tl.where(own_ids > 0, own_ids, 2147483647), 0)
    shared = (all_ids >= first_id) & (all_ids <= tl.max(own_ids, 0))
    start = tl.min(tl.where(shared, places, S), 0)
    return start // BLOCK * BLOCK, tl.max(tl.where(shared, places + 1, 0), 0)


@triton.jit
def run_of_tiles(
    first, start, end, LEFT: tl.constexpr, RIGHT: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
    RUNS: tl.constexpr, WHICH: tl.constexpr,
):  # fmt: skip
    """Return the part of [start, end) whose tiles contain the band (WHICH = 0), or lie before it (1) or after it (2).

    The block has OWN places from `first`. A place before the band is at least LEFT places before each of them; a place
    after it, at least RIGHT places after each of them. With RUNS = 1 return the whole range.
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
    q, k, rows, columns, row_ids, column_ids, by_query, by_key, line, offset_bias, bias, scale, S,
    TABLE_ROWS: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, WINDOW: tl.constexpr, WHERE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of A in base 2, −inf at forbidden pairs: `[BLOCK_M, BLOCK_N]`, fp32."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    in_rows = rows < S
    in_columns = columns < S
    inside = in_rows[:, None] & in_columns[None, :]
    # Only the scalar base is a 64-bit sum; the matrices of places stay 32 bits wide.
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
        if offset_bias is not None:
            logits += tl.load(offset_bias + index)
    else:
        bin: tl.constexpr = HIGHEST - LOWEST if WHERE == ABOVE else 0
        if by_query is not None:
            of_row = tl.load(by_query + (rows * TABLE_ROWS + bin), mask=in_rows, other=0.0)
            logits += of_row.to(tl.float32)[:, None]
        if by_key is not None:
            of_column = tl.load(by_key + (columns * TABLE_ROWS + bin), mask=in_columns, other=0.0)
            logits += of_column.to(tl.float32)[None, :]
        if offset_bias is not None:
            logits += tl.load(offset_bias + bin)
    logits *= scale * LOG2_E
    if bias is not None:
        of_pair = tl.load(bias + (rows[:, None] * S + columns[None, :]), mask=inside, other=0.0)
        logits += of_pair.to(tl.float32) * LOG2_E
    allowed = (row_ids[:, None] == column_ids[None, :]) & (row_ids > 0)[:, None]
    if WINDOW is not None:
        allowed &= tl.abs(rows[:, None] - columns[None, :]) <= WINDOW
    return tl.where(allowed, logits, float("-inf"))


@triton.jit
def mix(x):
    """Mix the bits of uint32 numbers with two multiplications, as in SplitMix's finaliser."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def keep_tile(seed, pair, rows, first_column, drop_below, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the entries that dropout keeps, bool `[BLOCK_M, BLOCK_N]`.

    Philox gives two uint32 keys per row for the (head, sequence) pair. A hash of the keys and the column gives 32 bits
    per two columns; the high bits of its products with two odd numbers decide one column each.
    """
    first, second, _, _ = tl.philox(tl.load(seed), pair, 0, 0, 0)
    keys = mix(first.to(tl.uint32) + rows.to(tl.uint32))
    more = mix(keys ^ second.to(tl.uint32))
    columns = (first_column // 2 + tl.arange(0, BLOCK_N // 2)).to(tl.uint32) * 0x9E3779B1
    x = (keys[:, None] ^ columns[None, :]) * 0x21F0AAAD + more[:, None]
    x ^= x >> 16
    both = tl.reshape(tl.join(x * 0xD35A2D97, x * 0xAC564B05), (BLOCK_M, BLOCK_N))
    return both >= (drop_below.to(tl.uint32) << 16)


@triton.jit
def enlargement(seed, drop_below):
    """Return the factor by which kept entries grow."""
    factor = 1.0
    if seed is not None:
        factor = 65536.0 / (65536 - drop_below)
    return factor


@triton.jit
def slot_of(heads, h, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr):
    """Return the index of head `h` among the heads that HCD compares, or −1."""
    slots = tl.arange(0, COUNT_PAD)
    numbers = tl.load(heads + slots, mask=slots < COUNT, other=-1)
    return tl.max(tl.where(numbers == h, slots, -1), 0)


@triton.jit
def compare_tile(logits, total, pulls, slot, b, rows, columns, B, S, COUNT: tl.constexpr):
    """Return HCD's gradient of a tile of a compared head's A: toward·T − away·A, `[BLOCK_M, BLOCK_N]`.

    `total` is T, `[B, S, S]`; `pulls` holds toward and away of each query, `[2, COUNT, B, S]`; see `triton_heads.py`.
    """
    in_rows = rows < S
    own = pulls + (slot * B + b) * S + rows
    toward = tl.load(own, mask=in_rows, other=0.0)
    away = tl.load(own + COUNT * B * S, mask=in_rows, other=0.0)
    inside = in_rows[:, None] & (columns < S)[None, :]
    sums = tl.load(total + b * S * S + (rows[:, None] * S + columns[None, :]), mask=inside, other=0.0).to(tl.float32)
    return tl.where(logits == float("-inf"), 0.0, toward[:, None] * sums - away[:, None] * logits)


@triton.jit
def gradient_tile(
    logits, v, d_out, lse, delta, seed, pair, rows, first_column, drop_below,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the probabilities that dropout keeps, and the gradient of A: both `[BLOCK_M, BLOCK_N]`, fp32.

    Neither includes dropout's factor yet. `delta` is flash attention's delta divided by that factor.
    """
    p = tl.exp2(logits - lse[:, None])
    d_p = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
    kept = p
    if seed is not None:
        keep = keep_tile(seed, pair, rows, first_column, drop_below, BLOCK_M, BLOCK_N)
        kept = tl.where(keep, p, 0.0)
        d_p = tl.where(keep, d_p, 0.0)
    return kept, p * (d_p - delta[:, None])


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
    """Write a tile's gradients of P between the bins to `cells + offset`; return the sums of the bins so far.

    `cells` points to P's rows; P belongs to the rows of A for AXIS = 1, to its columns for AXIS = 0.
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
def clear_cells(
    cells, places, S, low, high, SIGN: tl.constexpr, TABLE_ROWS: tl.constexpr, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
):  # fmt: skip
    """Write 0 to the cells between the bins without a partner in the band's tiles [low, high), and to the padding.

    `cells` points to P's rows, which belong to the rows of A for SIGN = 1, to its columns for SIGN = −1.
    """
    for first in range(0, TABLE_ROWS, 32):
        column = first + tl.arange(0, 32)[None, :]
        partner = places[:, None] - SIGN * (column + LOWEST)
        alone = (partner < low) | (partner >= tl.minimum(high, S))
        empty = (alone & (column > 0) & (column < HIGHEST - LOWEST)) | (column > HIGHEST - LOWEST)
        inside = (places < S)[:, None] & (column < TABLE_ROWS)
        tl.store(cells + places[:, None] * TABLE_ROWS + column, tl.zeros_like(partner), mask=empty & inside)


@triton.jit
def store_bins(cells, above, below, inside, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """Write the two bins (one if LOWEST = HIGHEST) to the rows at `cells` `[BLOCK]`."""
    dtype = cells.dtype.element_ty
    if LOWEST == HIGHEST:
        tl.store(cells, (above + below).to(dtype), mask=inside)
    else:
        tl.store(cells + (HIGHEST - LOWEST), above.to(dtype), mask=inside)
        tl.store(cells, below.to(dtype), mask=inside)


# mypy: ignore-errors


@jit_kernel
def forward_kernel(
    query, key, value, by_query, by_key, offset_bias, bias, ids, seed, scale, drop_below,
    context, lse, squares, heads,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, TABLE_ROWS: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, WINDOW: tl.constexpr, RUNS: tl.constexpr, BIAS_BATCHED: tl.constexpr,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the context and base-2 log-sum-exp of BLOCK_M queries; both are 0 for queries that may attend to nothing.

    For the compared `heads`, also write the sum of squares of each query's allowed logits.
    """
    first_row, pair, b, h, line = locate(S, B, BLOCK_M)
    origin = (b * S * H + h) * D
    ids += b * S
    if offset_bias is not None:
        offset_bias += h * TABLE_ROWS
    if bias is not None:
        bias += ((b * H if BIAS_BATCHED else 0) + h) * S * S
    rows = first_row + tl.arange(0, BLOCK_M)
    row_ids = load_ids(ids, rows, S)
    q = load_rows(query + origin, rows, S, H * D, D, D_PAD)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    row_squares = tl.zeros((BLOCK_M,), tl.float32)
    if squares is not None:
        slot = slot_of(heads, h, COUNT, COUNT_PAD)
    start, end = partners(ids, row_ids, first_row, S, S_PAD, BLOCK_M, BLOCK_N, WINDOW)
    for where in tl.static_range(RUNS):
        low, high = run_of_tiles(first_row, start, end, HIGHEST, -LOWEST, BLOCK_M, BLOCK_N, RUNS, where)
        for first_column in range(low, high, BLOCK_N):
            columns = first_column + tl.arange(0, BLOCK_N)
            column_ids = load_ids(ids, columns, S)
            k = load_rows(key + origin, columns, S, H * D, D, D_PAD)
            logits = logits_tile(
                q, k, rows, columns, row_ids, column_ids, by_query, by_key, line, offset_bias, bias, scale, S,
                TABLE_ROWS, LOWEST, HIGHEST, WINDOW, where, PRECISION,
            )  # fmt: skip
            if squares is not None:  # noqa: SIM102
                if slot >= 0:
                    finite = tl.where(logits == float("-inf"), 0.0, logits)
                    row_squares += tl.sum(finite * finite, 1)
            new_largest = tl.maximum(largest, tl.max(logits, 1))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            p = tl.exp2(logits - shift[:, None])
            shrink = tl.exp2(largest - shift)
            largest = new_largest
            total = total * shrink + tl.sum(p, 1)
            if seed is not None:
                p = tl.where(keep_tile(seed, pair, rows, first_column, drop_below, BLOCK_M, BLOCK_N), p, 0.0)
            v = load_rows(value + origin, columns, S, H * D, D, D_PAD)
            sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    empty = total == 0.0
    factor = enlargement(seed, drop_below) / tl.where(empty, 1.0, total)
    store_rows(context + origin, rows, S, H * D, sums * factor[:, None], D, D_PAD)
    row_lse = tl.where(empty, 0.0, largest + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + line + rows, row_lse, mask=rows < S)
    if squares is not None:
        tl.store(squares + line + rows, row_squares, mask=rows < S)


@jit_kernel
def query_gradient_kernel(
    query, key, value, by_query, by_key, offset_bias, bias, ids, seed, scale, drop_below,
    context, d_context, lse, delta, d_query, d_by_query, heads, total, pulls,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, TABLE_ROWS: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, WINDOW: tl.constexpr, RUNS: tl.constexpr, BIAS_BATCHED: tl.constexpr,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_M queries and their P^q, and each row's delta = Σ_j p·dp for the other kernels."""
    first_row, pair, b, h, line = locate(S, B, BLOCK_M)
    origin = (b * S * H + h) * D
    ids += b * S
    if offset_bias is not None:
        offset_bias += h * TABLE_ROWS
    if bias is not None:
        bias += ((b * H if BIAS_BATCHED else 0) + h) * S * S
    rows = first_row + tl.arange(0, BLOCK_M)
    row_ids = load_ids(ids, rows, S)
    q = load_rows(query + origin, rows, S, H * D, D, D_PAD)
    d_out = load_rows(d_context + origin, rows, S, H * D, D, D_PAD)
    out = load_rows(context + origin, rows, S, H * D, D, D_PAD)
    enlarge = enlargement(seed, drop_below)
    row_delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1) / enlarge
    tl.store(delta + line + rows, row_delta, mask=rows < S)
    row_lse = tl.load(lse + line + rows, mask=rows < S, other=0.0)
    d_q = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    above = tl.zeros((BLOCK_M,), tl.float32)
    below = tl.zeros((BLOCK_M,), tl.float32)
    if total is not None:
        slot = slot_of(heads, h, COUNT, COUNT_PAD)
    start, end = partners(ids, row_ids, first_row, S, S_PAD, BLOCK_M, BLOCK_N, WINDOW)
    for where in tl.static_range(RUNS):
        low, high = run_of_tiles(first_row, start, end, HIGHEST, -LOWEST, BLOCK_M, BLOCK_N, RUNS, where)
        for first_column in range(low, high, BLOCK_N):
            columns = first_column + tl.arange(0, BLOCK_N)
            column_ids = load_ids(ids, columns, S)
            k = load_rows(key + origin, columns, S, H * D, D, D_PAD)
            v = load_rows(value + origin, columns, S, H * D, D, D_PAD)
            logits = logits_tile(
                q, k, rows, columns, row_ids, column_ids, by_query, by_key, line, offset_bias, bias, scale, S,
                TABLE_ROWS, LOWEST, HIGHEST, WINDOW, where, PRECISION,
            )  # fmt: skip
            _, gradient = gradient_tile(
                logits, v, d_out, row_lse, row_delta, seed, pair, rows, first_column, drop_below,
                BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
            gradient *= scale * enlarge
            if total is not None:  # noqa: SIM102
                if slot >= 0:
                    gradient += compare_tile(logits, total, pulls, slot, b, rows, columns, B, S, COUNT) * scale
            d_q += tl.dot(gradient.to(k.dtype), k, input_precision=PRECISION)
            if d_by_query is not None:
                above, below = collect(
                    gradient, d_by_query + line * TABLE_ROWS, above, below, rows, columns, S,
                    TABLE_ROWS, LOWEST, HIGHEST, where, 1,
                )  # fmt: skip
    store_rows(d_query + origin, rows, S, H * D, d_q, D, D_PAD)
    if d_by_query is not None:
        low, high = run_of_tiles(first_row, start, end, HIGHEST, -LOWEST, BLOCK_M, BLOCK_N, RUNS, 0)
        cells = d_by_query + line * TABLE_ROWS
        clear_cells(cells, rows, S, low, high, 1, TABLE_ROWS, LOWEST, HIGHEST)
        store_bins(d_by_query + (line + rows) * TABLE_ROWS, above, below, rows < S, LOWEST, HIGHEST)


@jit_kernel
def key_gradient_kernel(
    query, key, value, by_query, by_key, offset_bias, bias, ids, seed, scale, drop_below,
    d_context, lse, delta, d_key, d_value, d_by_key, heads, total, pulls,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, TABLE_ROWS: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, WINDOW: tl.constexpr, RUNS: tl.constexpr, BIAS_BATCHED: tl.constexpr,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_N keys, of their values and of their P^k."""
    first_column, pair, b, h, line = locate(S, B, BLOCK_N)
    origin = (b * S * H + h) * D
    ids += b * S
    if offset_bias is not None:
        offset_bias += h * TABLE_ROWS
    if bias is not None:
        bias += ((b * H if BIAS_BATCHED else 0) + h) * S * S
    columns = first_column + tl.arange(0, BLOCK_N)
    column_ids = load_ids(ids, columns, S)
    k = load_rows(key + origin, columns, S, H * D, D, D_PAD)
    v = load_rows(value + origin, columns, S, H * D, D, D_PAD)
    enlarge = enlargement(seed, drop_below)
    if total is not None:
        slot = slot_of(heads, h, COUNT, COUNT_PAD)
    d_k = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    d_v = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    above = tl.zeros((BLOCK_N,), tl.float32)
    below = tl.zeros((BLOCK_N,), tl.float32)
    start, end = partners(ids, column_ids, first_column, S, S_PAD, BLOCK_N, BLOCK_M, WINDOW)
    for where in tl.static_range(RUNS):
        # Small offsets come first here: rows before a key have i − j < 0.
        low, high = run_of_tiles(first_column, start, end, -LOWEST, HIGHEST, BLOCK_N, BLOCK_M, RUNS, (3 - where) % 3)
        for first_row in range(low, high, BLOCK_M):
            rows = first_row + tl.arange(0, BLOCK_M)
            row_ids = load_ids(ids, rows, S)
            q = load_rows(query + origin, rows, S, H * D, D, D_PAD)
            d_out = load_rows(d_context + origin, rows, S, H * D, D, D_PAD)
            row_lse = tl.load(lse + line + rows, mask=rows < S, other=0.0)
            row_delta = tl.load(delta + line + rows, mask=rows < S, other=0.0)
            logits = logits_tile(
                q, k, rows, columns, row_ids, column_ids, by_query, by_key, line, offset_bias, bias, scale, S,
                TABLE_ROWS, LOWEST, HIGHEST, WINDOW, where, PRECISION,
            )  # fmt: skip
            kept, gradient = gradient_tile(
                logits, v, d_out, row_lse, row_delta, seed, pair, rows, first_column, drop_below,
                BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
            gradient *= scale * enlarge
            if total is not None:  # noqa: SIM102
                if slot >= 0:
                    gradient += compare_tile(logits, total, pulls, slot, b, rows, columns, B, S, COUNT) * scale
            d_v += tl.dot(tl.trans(kept.to(d_out.dtype)), d_out, input_precision=PRECISION)
            d_k += tl.dot(tl.trans(gradient.to(q.dtype)), q, input_precision=PRECISION)
            if by_key is not None:
                above, below = collect(
                    gradient, d_by_key + line * TABLE_ROWS, above, below, rows, columns, S,
                    TABLE_ROWS, LOWEST, HIGHEST, where, 0,
                )  # fmt: skip
    store_rows(d_key + origin, columns, S, H * D, d_k, D, D_PAD)
    store_rows(d_value + origin, columns, S, H * D, d_v * enlarge, D, D_PAD)
    if by_key is not None:
        low, high = run_of_tiles(first_column, start, end, -LOWEST, HIGHEST, BLOCK_N, BLOCK_M, RUNS, 0)
        cells = d_by_key + line * TABLE_ROWS
        clear_cells(cells, columns, S, low, high, -1, TABLE_ROWS, LOWEST, HIGHEST)
        store_bins(d_by_key + (line + columns) * TABLE_ROWS, above, below, columns < S, LOWEST, HIGHEST)


@jit_kernel
def bias_gradient_kernel(
    query, key, value, by_query, by_key, offset_bias, bias, ids, seed, scale, drop_below,
    d_context, lse, delta, d_bias, heads, total, pulls,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, TABLE_ROWS: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, WINDOW: tl.constexpr, RUNS: tl.constexpr, BIAS_BATCHED: tl.constexpr,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of the bias, summed over the sequences in order unless each has its own bias."""
    column_blocks = tl.cdiv(S, BLOCK_N)
    tile = tl.program_id(0) % (column_blocks * tl.cdiv(S, BLOCK_M))
    matrix = tl.program_id(0) // (column_blocks * tl.cdiv(S, BLOCK_M))
    first_row, first_column = tile // column_blocks * BLOCK_M, tile % column_blocks * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    h = matrix % H
    first_sequence = matrix // H
    last_sequence = first_sequence + 1 if BIAS_BATCHED else B
    if WINDOW is not None:
        near = (first_row < first_column + BLOCK_N + WINDOW) & (first_column < first_row + BLOCK_M + WINDOW)
        last_sequence = tl.where(near, last_sequence, first_sequence)
    if offset_bias is not None:
        offset_bias += h * TABLE_ROWS
    bias += matrix.to(tl.int64) * S * S
    enlarge = enlargement(seed, drop_below)
    if total is not None:
        slot = slot_of(heads, h, COUNT, COUNT_PAD)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for sequence in range(first_sequence, last_sequence):
        b = tl.cast(sequence, tl.int64)
        pair = h * B + sequence
        line = tl.cast(pair, tl.int64) * S
        origin = (b * S * H + h) * D
        row_ids = load_ids(ids + b * S, rows, S)
        column_ids = load_ids(ids + b * S, columns, S)
        q = load_rows(query + origin, rows, S, H * D, D, D_PAD)
        k = load_rows(key + origin, columns, S, H * D, D, D_PAD)
        v = load_rows(value + origin, columns, S, H * D, D, D_PAD)
        d_out = load_rows(d_context + origin, rows, S, H * D, D, D_PAD)
        row_lse = tl.load(lse + line + rows, mask=rows < S, other=0.0)
        row_delta = tl.load(delta + line + rows, mask=rows < S, other=0.0)
        logits = logits_tile(
            q, k, rows, columns, row_ids, column_ids, by_query, by_key, line, offset_bias, bias, scale, S,
            TABLE_ROWS, LOWEST, HIGHEST, WINDOW, 0, PRECISION,
        )  # fmt: skip
        _, gradient = gradient_tile(
            logits, v, d_out, row_lse, row_delta, seed, pair, rows, first_column, drop_below,
            BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
        gradient *= enlarge
        if total is not None:  # noqa: SIM102
            if slot >= 0:
                gradient += compare_tile(logits, total, pulls, slot, b, rows, columns, B, S, COUNT)
        sums += gradient
    inside = (rows < S)[:, None] & (columns < S)[None, :]
    cells = d_bias + matrix.to(tl.int64) * S * S + rows[:, None] * S + columns[None, :]
    tl.store(cells, sums.to(d_bias.dtype.element_ty), mask=inside)
