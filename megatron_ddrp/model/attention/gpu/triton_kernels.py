"""Kernels of `triton_attention.py`: the forward pass, and the gradients of queries, keys and the bias.

Flash attention (Dao 2023, arXiv:2307.08691) with the position terms of `positions.contract`; `triton_tiles.py` computes
the tiles, their position terms and dropout. Each kernel owns a block of queries (or of keys) of one head of one
sequence and walks over the tiles of its row (or column) of A in three runs: the band, then each clipped bin. It skips
tiles that the block cannot reach: other documents before or after its own, and places outside the window. Every result
has one writer and sums have a fixed order, so a run repeats to the last bit.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton.language as tl

from megatron_ddrp.model.attention.gpu.triton_tiles import (
    clear_cells,
    collect,
    compare_tile,
    enlargement,
    gradient_tile,
    jit_kernel,
    keep_tile,
    load_ids,
    load_rows,
    locate,
    logits_tile,
    partners,
    run_of_tiles,
    slot_of,
    store_bins,
    store_rows,
)


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
