"""The Triton kernels of attention: forward pass, and the gradients of queries, keys, values and P.

This is flash attention (Dao 2023, arXiv:2307.08691) with the position terms of `positions/contract.py`:

    A[i,j] = (Q_i·K_j + P^q[i, i − j] + P^k[j, i − j] + v[i − j]/scale) · scale + B[i,j]
    P^q = Q·T^qᵀ,  P^k = K·T^kᵀ

Each kernel owns a block of queries (or of keys) of one head of one sequence and walks over the tiles of its row (or
column) of A. It skips tiles that the block cannot reach: other documents before or after its own, and places outside
the window. Every result has one writer and sums have a fixed order, so a run repeats to the last bit.

The forward pass computes each tile of A in registers and stores none. The backward pass recomputes each tile once, with
keys as rows, so that the products take tiles of probabilities and gradients from registers; it stores the gradient of
A in the dtype of the queries. The gradients of queries, P^q, B and v are linear in it and read it as a stream.

P is read and written in groups of eight numbers, 16 bytes in half precision. Row i of P^q lies at [i mod 8, h, b,
i div 8] and holds CELLS numbers. The pair (i, j) reads cell CENTER + j − 8·(i div 8), so keys that are neighbours are
neighbours in memory, and a group of eight of them begins at a multiple of eight. Cells beyond the offsets of the
encoding repeat the first or the last offset, and keys still further away read the first or the last group of the row.
P^k is laid out in the same way with i and j exchanged; v in either way, but without b and i div 8.

The softmax works in base 2. Dropout's decision is a hash of (seed, head and sequence, row i, column j), so tiles of any
shape agree.

Memory layouts: queries, keys, values and context `[b, s, h, d]`; P `[8, h, b·s/8, CELLS]`; v/scale `[8, h, CELLS]`,
fp32; row statistics `[h, b, s]`; the gradient of A `[pairs of head and sequence, s, s]`. s is a multiple of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


jit_kernel = triton.jit(
    do_not_specialize=("B", "H", "drop_below", "documents", "first_pair"), do_not_specialize_on_alignment=("heads",)
)
"""Decorator of the kernels that are launched.

Triton compiles a kernel anew where an integer becomes 1 or a multiple of 16. The named ones change during a run, and
`heads` is one row of a table, which lies at any address.
"""


@triton.jit
def load_rows(matrix, places, S, stride, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return rows `places` of a matrix `[S, D]`, zero outside: `[BLOCK, D_PAD]`."""
    dims = tl.arange(0, D_PAD)
    inside = (places < S)[:, None]
    if D != D_PAD:
        inside &= (dims < D)[None, :]
    return tl.load(matrix + places[:, None] * stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(matrix, places, S, stride, values, D: tl.constexpr, D_PAD: tl.constexpr):
    dims = tl.arange(0, D_PAD)
    inside = (places < S)[:, None] & (dims < D)[None, :]
    tl.store(matrix + places[:, None] * stride + dims[None, :], values.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def locate(first_pair, S, B, BLOCK: tl.constexpr):
    """Return this program's first place, its (head, sequence) pair number, sequence, head, and the pair's first row.

    The programs of a launch serve the pairs from `first_pair` on.
    """
    num_blocks = tl.cdiv(S, BLOCK)
    pair = first_pair + tl.program_id(0) // num_blocks
    b = (pair % B).to(tl.int64)
    return tl.program_id(0) % num_blocks * BLOCK, pair, b, (pair // B).to(tl.int64), pair.to(tl.int64) * S


@triton.jit
def load_ids(ids, places, S):
    """Return the documents of some places, int32; 0 for padding."""
    return tl.load(ids + places, mask=places < S, other=0)


@triton.jit
def load_own_ids(ids, places, S):
    """Return the documents of a block's places; −1 for padding, which so has no partner."""
    own_ids = load_ids(ids, places, S)
    return tl.where(own_ids > 0, own_ids, -1)


@triton.jit
def partners(
    ids, own_ids, first, S, S_PAD: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    BY_KEY: tl.constexpr = False,
):  # fmt: skip
    """Return the range of places that contains every partner of a block of OWN places from `first`.

    `own_ids` are the block's documents. The range begins at a tile border; it is empty for a block of padding. WINDOW
    is the number of places before and after a query that it attends to, None without a limit; with BY_KEY the block
    holds keys.
    """
    if ids is None:
        start, end = 0, S
    else:
        places = tl.arange(0, S_PAD)
        if WINDOW is not None:  # S_PAD covers the block and its window on both sides
            before, after = WINDOW[1 if BY_KEY else 0], WINDOW[0 if BY_KEY else 1]
            places += first - before
            places = tl.where((places >= 0) & (places < first + OWN + after), places, S)
        all_ids = load_ids(ids, places, S)
        first_id = tl.min(tl.where(own_ids > 0, own_ids, 2147483647), 0)
        shared = (all_ids >= first_id) & (all_ids <= tl.max(own_ids, 0))
        start = tl.min(tl.where(shared, places, S), 0) // BLOCK * BLOCK
        end = tl.max(tl.where(shared, places + 1, 0), 0)
    return start, end


@triton.jit
def allowed_pairs(own_ids, other_ids, offset, WINDOW: tl.constexpr):
    """Return the pairs of an offset i − j that may attend to each other; own ids are those of `load_own_ids`."""
    allowed = own_ids == other_ids
    if WINDOW is not None:
        allowed &= (offset <= WINDOW[0]) & (offset >= -WINDOW[1])
    return allowed


@triton.jit
def cell_rows(own, h, b, B, H, S, CELLS: tl.constexpr):
    """Return where the rows of P of some places begin, int64 `[BLOCK]`; places beyond the row repeat its last one."""
    own = tl.minimum(own, S - 1)
    rows = ((own % 8) * H + h.to(tl.int32)) * (B * (S // 8)) + b.to(tl.int32) * (S // 8) + own // 8
    return rows.to(tl.int64) * CELLS


@triton.jit
def load_cells(matrix, rows, own, other, CENTER: tl.constexpr, CELLS: tl.constexpr, TURN: tl.constexpr):
    """Return the numbers of a tile's pairs, fp32 `[OWN, OTHER]`, or `[OTHER, OWN]` with TURN.

    `rows` `[OWN]` are the places in `matrix` where the rows of `own` begin.
    """
    group = CENTER - (own // 8 * 8)[:, None] + (other // 8 * 8)[None, :]
    cell = tl.minimum(tl.maximum(group, 0), CELLS - 8) + (other % 8)[None, :]
    tile = tl.load((matrix + rows)[:, None] + cell).to(tl.float32)
    if TURN:
        tile = tl.trans(tile)
    return tile


@triton.jit
def logits_tile(
    q, k, rows, columns, row_ids, column_ids, by_query, by_key, offset_bias, bias, h, b, scale, B, H, S,
    CENTER: tl.constexpr, CELLS: tl.constexpr, WINDOW: tl.constexpr, TURN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of A/scale, −inf at forbidden pairs: fp32 `[BLOCK_M, BLOCK_N]`, or `[BLOCK_N, BLOCK_M]` with TURN.

    `offset_bias` is laid out like P^q, with TURN like P^k. If ids are None, each row is one document.
    """
    if TURN:
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    else:
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    of_rows = cell_rows(rows, h, b, B, H, S, CELLS)
    # The compiler keeps the layout of the products if the tile that is turned is added first.
    if TURN and by_query is not None:
        logits += load_cells(by_query, of_rows, rows, columns, CENTER, CELLS, True)
    if by_key is not None:
        of_columns = cell_rows(columns, h, b, B, H, S, CELLS)
        logits += load_cells(by_key, of_columns, columns, rows, CENTER, CELLS, not TURN)
    if not TURN and by_query is not None:
        logits += load_cells(by_query, of_rows, rows, columns, CENTER, CELLS, False)
    if offset_bias is not None:
        own, other = (columns, rows) if TURN else (rows, columns)
        of_own = ((own % 8) * H + h.to(tl.int32)) * CELLS
        logits += load_cells(offset_bias, of_own, own, other, CENTER, CELLS, False)
    if bias is not None:
        inside = (rows < S)[:, None] & (columns < S)[None, :]
        of_pair = tl.load(bias + (rows[:, None] * S + columns[None, :]), mask=inside, other=0.0)
        if TURN:
            of_pair = tl.trans(of_pair)
        logits += of_pair.to(tl.float32) * (1.0 / scale)
    if row_ids is not None:
        if TURN:
            offset = rows[None, :] - columns[:, None]
            allowed = allowed_pairs(column_ids[:, None], row_ids[None, :], offset, WINDOW)
        else:
            offset = rows[:, None] - columns[None, :]
            allowed = allowed_pairs(row_ids[:, None], column_ids[None, :], offset, WINDOW)
        logits = tl.where(allowed, logits, float("-inf"))
    return logits


@triton.jit
def mix(x):
    """Mix the bits of uint32 numbers with two multiplications, as in SplitMix's finaliser."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def row_keys(seed, pair, rows):
    """Return two uint32 keys of dropout per row: Philox gives two for the (head, sequence) pair."""
    first, second, _, _ = tl.philox(tl.load(seed), pair, 0, 0, 0)
    keys = mix(first.to(tl.uint32) + rows.to(tl.uint32))
    return keys, mix(keys ^ second.to(tl.uint32))


@triton.jit
def keep_tile(keys, more, first_column, drop_below, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURN: tl.constexpr):
    """Return the pairs that dropout keeps: bool `[BLOCK_M, BLOCK_N]`, or `[BLOCK_N, BLOCK_M]` with TURN.

    A hash of a row's two keys and the column gives 32 bits per two columns; the high bits of its products with two odd
    numbers decide one column each. The two are eight columns apart: one thread holds both in either orientation.
    """
    keys, more = keys.to(tl.uint32, bitcast=True), more.to(tl.uint32, bitcast=True)
    half = tl.arange(0, BLOCK_N // 2)
    columns = ((first_column // 16 + half // 8) * 8 + half % 8).to(tl.uint32) * 0x9E3779B1
    if TURN:
        x = (keys[None, :] ^ columns[:, None]) * 0x21F0AAAD + more[None, :]
    else:
        x = (keys[:, None] ^ columns[None, :]) * 0x21F0AAAD + more[:, None]
    x ^= x >> 16
    both = tl.join(x * 0xD35A2D97, x * 0xAC564B05)
    if TURN:
        both = tl.permute(tl.reshape(both, (BLOCK_N // 16, 8, BLOCK_M, 2)), (0, 3, 1, 2))
        both = tl.reshape(both, (BLOCK_N, BLOCK_M))
    else:
        both = tl.permute(tl.reshape(both, (BLOCK_M, BLOCK_N // 16, 8, 2)), (0, 1, 3, 2))
        both = tl.reshape(both, (BLOCK_M, BLOCK_N))
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
def compare_tile(logits, total, pulls, slot, b, rows, columns, scale, B, S, COUNT: tl.constexpr):
    """Return HCD's gradient of A/scale in a turned tile of a compared head: toward·T − away·A, `[BLOCK_N, BLOCK_M]`.

    `total` is T, `[B, S, S]`; `pulls` holds toward and away of each query, `[2, COUNT, B, S]`; see `triton_heads.py`.
    """
    in_rows = rows < S
    own = pulls + (slot * B + b) * S + rows
    toward = tl.load(own, mask=in_rows, other=0.0) * scale
    away = tl.load(own + COUNT * B * S, mask=in_rows, other=0.0) * (scale * scale * LOG2_E)
    inside = in_rows[:, None] & (columns < S)[None, :]
    sums = tl.load(total + b * S * S + (rows[:, None] * S + columns[None, :]), mask=inside, other=0.0)
    gradient = toward[None, :] * tl.trans(sums).to(tl.float32) - away[None, :] * logits
    return tl.where(logits == float("-inf"), 0.0, gradient)


@triton.jit
def add_bins(
    tile, above, below, first_own, first_other, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr,
):  # fmt: skip
    """Add the pairs of a tile `[OWN, OTHER]` beyond the offsets LOWEST … HIGHEST to the two sums of each own place."""
    farthest = first_own - first_other + OWN - 1
    nearest = first_own - first_other - OTHER + 1
    if nearest > HIGHEST:
        above += tl.sum(tile, 1)
    elif farthest < LOWEST:
        below += tl.sum(tile, 1)
    elif (farthest > HIGHEST) | (nearest < LOWEST):
        offset = (first_own + tl.arange(0, OWN))[:, None] - (first_other + tl.arange(0, OTHER))[None, :]
        above += tl.sum(tl.where(offset > HIGHEST, tile, 0.0), 1)
        below += tl.sum(tl.where(offset < LOWEST, tile, 0.0), 1)
    return above, below


@triton.jit
def store_cells(
    matrix, d_logits, own, above, below, ids, own_ids, h, b, B, H, S, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    CENTER: tl.constexpr, CELLS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the rows of P of `own` places from the stored gradient of A, `[S, S]`.

    The first and the last cell get the sums of the pairs beyond the offsets; cells without a pair get 0.
    """
    rows = cell_rows(own, h, b, B, H, S, CELLS)
    for first in range(0, CELLS, BLOCK):
        cells = first + tl.arange(0, BLOCK)
        other = (cells - CENTER)[None, :] + (own // 8 * 8)[:, None]
        offset = own[:, None] - other
        inside = (other >= 0) & (other < S) & (own < S)[:, None] & (cells < CELLS)[None, :]
        inner = inside & (offset >= LOWEST) & (offset <= HIGHEST)
        if ids is not None:
            other_ids = tl.load(ids + other, mask=inside, other=0)
            inner &= allowed_pairs(own_ids[:, None], other_ids, -offset if BY_KEY else offset, WINDOW)
        if BY_KEY:
            turned = (cells - CENTER)[:, None] + (own // 8 * 8)[None, :]
            in_row = (turned >= 0) & (turned < S) & (own < S)[None, :] & (cells < CELLS)[:, None]
            tile = tl.trans(tl.load(d_logits + turned * S + own[None, :], mask=in_row, other=0.0))
        else:
            tile = tl.load(d_logits + own[:, None] * S + other, mask=inside, other=0.0)
        tile = tl.where(inner, tile, 0.0)
        tile = tl.where((cells == 0)[None, :], above[:, None].to(tile.dtype), tile)
        tile = tl.where((cells == CELLS - 1)[None, :], below[:, None].to(tile.dtype), tile)
        into = (matrix + rows)[:, None] + cells[None, :]
        tl.store(into, tile, mask=(own < S)[:, None] & (cells < CELLS)[None, :])


@jit_kernel
def forward_kernel(
    query, key, value, by_query, by_key, offset_bias, bias, ids, seed, scale, drop_below,
    context, lse, squares, heads,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, CENTER: tl.constexpr, CELLS: tl.constexpr,
    WINDOW: tl.constexpr, BIAS_BATCHED: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the context and base-2 log-sum-exp of BLOCK_M queries; both are 0 for queries that may attend to nothing.

    For the compared `heads`, also write the sum of squares of each query's allowed logits, in base 2.
    """
    first_row, pair, b, h, line = locate(0, S, B, BLOCK_M)
    origin = (b * S * H + h) * D
    ids = None if ids is None else ids + b * S
    bias = None if bias is None else bias + ((b * H if BIAS_BATCHED else 0) + h) * S * S
    rows = first_row + tl.arange(0, BLOCK_M)
    row_ids = None if ids is None else load_own_ids(ids, rows, S)
    q = load_rows(query + origin, rows, S, H * D, D, D_PAD)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    row_squares = tl.zeros((BLOCK_M,), tl.float32)
    if squares is not None:
        slot = slot_of(heads, h, COUNT, COUNT_PAD)
    if seed is not None:
        keys, more = row_keys(seed, pair, rows)
    base_2 = scale * LOG2_E
    start, end = partners(ids, row_ids, first_row, S, S_PAD, BLOCK_M, BLOCK_N, WINDOW)
    for first_column in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        first_column = tl.multiple_of(first_column, BLOCK_N)
        columns = first_column + tl.arange(0, BLOCK_N)
        k = load_rows(key + origin, columns, S, H * D, D, D_PAD)
        column_ids = None if ids is None else load_ids(ids, columns, S)
        logits = logits_tile(
            q, k, rows, columns, row_ids, column_ids, by_query, by_key, offset_bias, bias, h, b, scale,
            B, H, S, CENTER, CELLS, WINDOW, False, PRECISION,
        )  # fmt: skip
        if squares is not None:  # noqa: SIM102
            if slot >= 0:
                finite = logits if ids is None else tl.where(logits == float("-inf"), 0.0, logits)
                row_squares += tl.sum(finite * finite, 1)
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        shift = new_largest
        if ids is not None:
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        p = tl.exp2(logits * base_2 - (shift * base_2)[:, None])
        shrink = tl.exp2((largest - shift) * base_2)
        largest = new_largest
        total = total * shrink + tl.sum(p, 1)
        if seed is not None:
            p = tl.where(keep_tile(keys, more, first_column, drop_below, BLOCK_M, BLOCK_N, False), p, 0.0)
        v = load_rows(value + origin, columns, S, H * D, D, D_PAD)
        sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
    empty = total == 0.0
    factor = enlargement(seed, drop_below) / tl.where(empty, 1.0, total)
    store_rows(context + origin, rows, S, H * D, sums * factor[:, None], D, D_PAD)
    row_lse = tl.where(empty, 0.0, largest * base_2 + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + line + rows, row_lse, mask=rows < S)
    if squares is not None:
        tl.store(squares + line + rows, row_squares * (base_2 * base_2), mask=rows < S)


@jit_kernel
def rows_kernel(
    context, d_context, lse, seed, shift, delta, keys, scale, drop_below,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the numbers of BLOCK_M queries that every tile of their gradient needs.

    They are `shift`, for which exp2(A − shift) is the probability times the gradient's factors; delta = Σ_j p·dp
    without the factor of dropout; and the two keys of dropout, `[2, h, b, s]`.
    """
    first_row, pair, b, h, line = locate(0, S, B, BLOCK_M)
    origin = (b * S * H + h) * D
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < S
    out = load_rows(context + origin, rows, S, H * D, D, D_PAD).to(tl.float32)
    d_out = load_rows(d_context + origin, rows, S, H * D, D, D_PAD).to(tl.float32)
    enlarge = enlargement(seed, drop_below)
    row_lse = tl.load(lse + line + rows, mask=inside, other=0.0)
    tl.store(shift + line + rows, row_lse - tl.log2(scale * enlarge), mask=inside)
    tl.store(delta + line + rows, tl.sum(out * d_out, 1) / enlarge, mask=inside)
    if seed is not None:
        first, second = row_keys(seed, pair, rows)
        tl.store(keys + line + rows, first.to(tl.int32, bitcast=True), mask=inside)
        tl.store(keys + B.to(tl.int64) * H * S + line + rows, second.to(tl.int32, bitcast=True), mask=inside)


@jit_kernel
def key_gradient_kernel(
    query, key, value, by_query, by_key, offset_bias, bias, ids, seed, scale, drop_below,
    d_context, shift, delta, keys, d_key, d_value, d_by_key, d_logits, reach, heads, total, pulls, first_pair,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, CENTER: tl.constexpr, CELLS: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, WINDOW: tl.constexpr, BIAS_BATCHED: tl.constexpr,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_N keys, of their values and P^k, and that of their columns of A, times the scale."""
    first_column, pair, b, h, line = locate(first_pair, S, B, BLOCK_N)
    origin = (b * S * H + h) * D
    d_logits += (pair - first_pair).to(tl.int64) * S * S
    ids = None if ids is None else ids + b * S
    bias = None if bias is None else bias + ((b * H if BIAS_BATCHED else 0) + h) * S * S
    columns = first_column + tl.arange(0, BLOCK_N)
    column_ids = None if ids is None else load_own_ids(ids, columns, S)
    k = load_rows(key + origin, columns, S, H * D, D, D_PAD)
    v = load_rows(value + origin, columns, S, H * D, D, D_PAD)
    if total is not None:
        slot = slot_of(heads, h, COUNT, COUNT_PAD)
    d_k = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    d_v = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    above = tl.zeros((BLOCK_N,), tl.float32)
    below = tl.zeros((BLOCK_N,), tl.float32)
    start, end = partners(ids, column_ids, first_column, S, S_PAD, BLOCK_N, BLOCK_M, WINDOW, True)
    if reach is not None:  # the range of the rows that are written, int32 [b, key blocks, 2]
        of_block = reach + (b * tl.cdiv(S, BLOCK_N) + first_column // BLOCK_N) * 2
        is_first = pair - first_pair < B  # programs of other heads would write the same
        tl.store(of_block, start, mask=is_first)
        tl.store(of_block + 1, tl.cdiv(end, BLOCK_M) * BLOCK_M, mask=is_first)
    for first_row in tl.range(start, end, BLOCK_M, num_stages=STAGES):
        first_row = tl.multiple_of(first_row, BLOCK_M)
        rows = first_row + tl.arange(0, BLOCK_M)
        inside = rows < S
        q = load_rows(query + origin, rows, S, H * D, D, D_PAD)
        row_ids = None if ids is None else load_ids(ids, rows, S)
        logits = logits_tile(
            q, k, rows, columns, row_ids, column_ids, by_query, by_key, offset_bias, bias, h, b, scale,
            B, H, S, CENTER, CELLS, WINDOW, True, PRECISION,
        )  # fmt: skip
        row_shift = tl.load(shift + line + rows, mask=inside, other=0.0)
        p = tl.exp2(logits * (scale * LOG2_E) - row_shift[None, :])
        kept = p
        if seed is not None:
            first = tl.load(keys + line + rows, mask=inside, other=0)
            second = tl.load(keys + B.to(tl.int64) * H * S + line + rows, mask=inside, other=0)
            kept = tl.where(keep_tile(first, second, first_column, drop_below, BLOCK_M, BLOCK_N, True), p, 0.0)
        d_out = load_rows(d_context + origin, rows, S, H * D, D, D_PAD)
        d_v = tl.dot(kept.to(d_out.dtype), d_out, d_v, input_precision=PRECISION)
        d_p = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
        gradient = kept * d_p - p * tl.load(delta + line + rows, mask=inside, other=0.0)[None, :]
        if total is not None:  # noqa: SIM102
            if slot >= 0:
                gradient += compare_tile(logits, total, pulls, slot, b, rows, columns, scale, B, S, COUNT)
        stored = gradient.to(q.dtype)
        d_k = tl.dot(stored, q, d_k, input_precision=PRECISION)
        into = d_logits + rows[:, None] * S + columns[None, :]
        tl.store(into, tl.trans(stored), mask=inside[:, None] & (columns < S)[None, :])
        if by_key is not None:
            above, below = add_bins(
                gradient, above, below, first_column, first_row, -HIGHEST, -LOWEST, BLOCK_N, BLOCK_M
            )
    store_rows(d_key + origin, columns, S, H * D, d_k, D, D_PAD)
    store_rows(d_value + origin, columns, S, H * D, d_v * (1.0 / scale), D, D_PAD)
    if by_key is not None:
        tl.debug_barrier()  # the program reads what its other threads wrote
        store_cells(
            d_by_key, d_logits, columns, above, below, ids, column_ids, h, b, B, H, S, -HIGHEST, -LOWEST, CENTER,
            CELLS, WINDOW, BLOCK_M, True,
        )  # fmt: skip


@jit_kernel
def query_gradient_kernel(
    key, ids, d_logits, reach, d_query, d_by_query, first_pair,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, CENTER: tl.constexpr, CELLS: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_M queries and of their P^q, from that of their rows of A.

    BLOCK_K is the number of keys per program of the kernel that wrote it.
    """
    first_row, pair, b, h, line = locate(first_pair, S, B, BLOCK_M)
    origin = (b * S * H + h) * D
    d_logits += (pair - first_pair).to(tl.int64) * S * S
    ids = None if ids is None else ids + b * S
    rows = first_row + tl.arange(0, BLOCK_M)
    row_ids = None if ids is None else load_own_ids(ids, rows, S)
    d_q = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    above = tl.zeros((BLOCK_M,), tl.float32)
    below = tl.zeros((BLOCK_M,), tl.float32)
    start, end = partners(ids, row_ids, first_row, S, S_PAD, BLOCK_M, BLOCK_N, WINDOW)
    for first_column in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        first_column = tl.multiple_of(first_column, BLOCK_N)
        columns = first_column + tl.arange(0, BLOCK_N)
        k = load_rows(key + origin, columns, S, H * D, D, D_PAD)
        in_rows = rows < S
        if reach is not None:
            of_block = reach + (b * tl.cdiv(S, BLOCK_K) + first_column // BLOCK_K) * 2
            in_rows &= (rows >= tl.load(of_block)) & (rows < tl.load(of_block + 1))
        into = d_logits + rows[:, None] * S + columns[None, :]
        tile = tl.load(into, mask=in_rows[:, None] & (columns < S)[None, :], other=0.0)
        d_q = tl.dot(tile, k, d_q, input_precision=PRECISION)
        if d_by_query is not None:
            above, below = add_bins(
                tile.to(tl.float32), above, below, first_row, first_column, LOWEST, HIGHEST, BLOCK_M, BLOCK_N
            )
    store_rows(d_query + origin, rows, S, H * D, d_q, D, D_PAD)
    if d_by_query is not None:
        store_cells(
            d_by_query, d_logits, rows, above, below, ids, row_ids, h, b, B, H, S, LOWEST, HIGHEST, CENTER, CELLS,
            WINDOW, BLOCK_N, False,
        )  # fmt: skip
