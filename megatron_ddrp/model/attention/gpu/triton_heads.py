"""Kernels of HCD (eq. 18) beside those of `triton_kernels.py`: no logits are stored, only one sum over heads.

    T = Σ_a Â_a,  Â_a = A_a/‖A_a‖ within each document;  mean pairwise cosine = (Σ_a ⟨Â_a, T⟩ − m)/(m(m − 1))
    its gradient of A_a:  2/(m(m − 1)) · (T − ⟨Â_a, T⟩ Â_a)/‖A_a‖

for the m compared heads a. The forward kernel of attention computes ‖A_a‖² per query. `compare_kernel` computes T one
tile at a time and each query's share of the cosine. In the backward pass `pull_kernel` writes T, `[b, s, s]`, for the
gradient kernels, and the factors that pull each query's logits toward T and away from themselves. Each program owns a
block of queries of one sequence.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megatron_ddrp.model.attention.gpu.triton_kernels import (
    LOG2_E,
    jit_kernel,
    load_ids,
    load_own_ids,
    load_rows,
    logits_tile,
    partners,
)

SMALLEST_SQUARE: tl.constexpr = tl.constexpr(1e-24)


@triton.jit
def sum_of_document(by_query, ids, row_ids, S, documents, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the sum of `by_query` `[S]` over the document of each of BLOCK_M queries; nothing reads that of padding.

    Documents of places are compared only if rows hold several.
    """
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, S, BLOCK_N):
        places = first + tl.arange(0, BLOCK_N)
        theirs, their_ids = tl.load(by_query + places, mask=places < S, other=0.0), load_ids(ids, places, S)
        if documents > 1:
            total += tl.sum(tl.where(row_ids[:, None] == their_ids[None, :], theirs[None, :], 0.0), 1)
        else:
            total += tl.sum(tl.where(their_ids > 0, theirs, 0.0), 0)
    return total


@triton.jit
def column_of(matrix, a, COUNT_PAD: tl.constexpr):
    """Return column `a` of `[BLOCK_M, COUNT_PAD]`."""
    return tl.sum(tl.where(tl.arange(0, COUNT_PAD)[None, :] == a, matrix, 0.0), 1)


@triton.jit
def logits_of(
    a, query, key, by_query, by_key, offset_bias, bias, ids, scale, heads, b, rows, row_ids, columns,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, CENTER: tl.constexpr, CELLS: tl.constexpr, WINDOW: tl.constexpr,
    BIAS_BATCHED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of the logits of the `a`-th compared head in base 2, with 0 at forbidden pairs."""
    h = tl.load(heads + a)
    origin = (b * S * H + h) * D
    bias = None if bias is None else bias + ((b * H if BIAS_BATCHED else 0) + h) * S * S
    q = load_rows(query + origin, rows, S, H * D, D, D_PAD)
    k = load_rows(key + origin, columns, S, H * D, D, D_PAD)
    logits = logits_tile(
        q, k, rows, columns, row_ids, load_ids(ids, columns, S), by_query, by_key, offset_bias, bias, h, b, scale,
        B, H, S, CENTER, CELLS, WINDOW, False, PRECISION,
    )  # fmt: skip
    return tl.where(logits == float("-inf"), 0.0, logits * (scale * LOG2_E))


@triton.jit
def sum_tile(
    inverse, query, key, by_query, by_key, offset_bias, bias, ids, scale, heads, b, rows, row_ids, columns,
    B, H, S, D: tl.constexpr, D_PAD: tl.constexpr, CENTER: tl.constexpr, CELLS: tl.constexpr, WINDOW: tl.constexpr,
    BIAS_BATCHED: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of T; `inverse` is 1/‖A_a‖ of each query's document, `[BLOCK_M, COUNT_PAD]`."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for a in range(COUNT):
        logits = logits_of(
            a, query, key, by_query, by_key, offset_bias, bias, ids, scale, heads, b, rows, row_ids, columns,
            B, H, S, D, D_PAD, CENTER, CELLS, WINDOW, BIAS_BATCHED, PRECISION,
        )  # fmt: skip
        total += column_of(inverse, a, COUNT_PAD)[:, None] * logits
    return total


@jit_kernel
def compare_kernel(
    query, key, by_query, by_key, offset_bias, bias, ids, scale, heads, squares, counted,
    inverse, inner, shares,
    B, H, S, documents, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, CENTER: tl.constexpr,
    CELLS: tl.constexpr, WINDOW: tl.constexpr, BIAS_BATCHED: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write each query's share of HCD's sum, `[B, S]`, and its 1/‖A_a‖ and part of ⟨Â_a, T⟩, `[COUNT, B, S]` each."""
    b = (tl.program_id(0) // tl.cdiv(S, BLOCK_M)).to(tl.int64)
    first_row = tl.program_id(0) % tl.cdiv(S, BLOCK_M) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    ids += b * S
    row_ids = load_own_ids(ids, rows, S)
    slots = tl.arange(0, COUNT_PAD)[None, :]
    inverses = tl.zeros((BLOCK_M, COUNT_PAD), tl.float32)
    own = tl.zeros((BLOCK_M, COUNT_PAD), tl.float32)  # this query's part of ⟨Â_a, Â_a⟩ = 1
    for a in range(COUNT):
        of_head = squares + (tl.load(heads + a) * B + b) * S
        square = sum_of_document(of_head, ids, row_ids, S, documents, BLOCK_M, BLOCK_N)
        root = tl.rsqrt(tl.maximum(square, SMALLEST_SQUARE))
        inverses += tl.where(slots == a, root[:, None], 0.0)
        part = root * root * tl.load(of_head + rows, mask=rows < S, other=0.0)
        own += tl.where(slots == a, part[:, None], 0.0)
    products = tl.zeros((BLOCK_M, COUNT_PAD), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    start, end = partners(ids, row_ids, first_row, S, S_PAD, BLOCK_M, BLOCK_N, WINDOW)
    for first_column in range(start, end, BLOCK_N):
        columns = tl.multiple_of(first_column, BLOCK_N) + tl.arange(0, BLOCK_N)
        total = sum_tile(
            inverses, query, key, by_query, by_key, offset_bias, bias, ids, scale, heads, b, rows, row_ids, columns,
            B, H, S, D, D_PAD, CENTER, CELLS, WINDOW, BIAS_BATCHED, COUNT, COUNT_PAD, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
        norm += tl.sum(total * total, 1)
        if COUNT > 2:
            for a in range(COUNT):
                logits = logits_of(
                    a, query, key, by_query, by_key, offset_bias, bias, ids, scale, heads, b, rows, row_ids, columns,
                    B, H, S, D, D_PAD, CENTER, CELLS, WINDOW, BIAS_BATCHED, PRECISION,
                )  # fmt: skip
                product = column_of(inverses, a, COUNT_PAD) * tl.sum(logits * total, 1)
                products += tl.where(slots == a, product[:, None], 0.0)
    between = norm - tl.sum(own, 1)  # Σ_{a≠b} ⟨Â_a, Â_b⟩
    if COUNT == 2:
        products = own + 0.5 * between[:, None]
    weight = tl.load(counted + b * documents + row_ids - 1, mask=row_ids > 0, other=0.0)
    tl.store(shares + b * S + rows, weight * between / (COUNT * (COUNT - 1)), mask=rows < S)
    inside = (rows < S)[:, None] & (slots < COUNT)
    cells = (slots * B + b) * S + rows[:, None]
    tl.store(inverse + cells, inverses, mask=inside)
    tl.store(inner + cells, products, mask=inside)


@jit_kernel
def pull_kernel(
    query, key, by_query, by_key, offset_bias, bias, ids, scale, heads, counted, inverse, inner, d_sum,
    total, pulls,
    B, H, S, documents, D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, CENTER: tl.constexpr,
    CELLS: tl.constexpr, WINDOW: tl.constexpr, BIAS_BATCHED: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write T `[B, S, S]`, and the factors of T and of A in each query's gradient of A, `[2, COUNT, B, S]`."""
    b = (tl.program_id(0) // tl.cdiv(S, BLOCK_M)).to(tl.int64)
    first_row = tl.program_id(0) % tl.cdiv(S, BLOCK_M) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    ids += b * S
    row_ids = load_own_ids(ids, rows, S)
    slots = tl.arange(0, COUNT_PAD)[None, :]
    weight = tl.load(counted + b * documents + row_ids - 1, mask=row_ids > 0, other=0.0)
    weight *= tl.load(d_sum) * (2 * LOG2_E / (COUNT * (COUNT - 1)))
    for a in range(COUNT):
        of_head = (a * B + b) * S
        root = tl.load(inverse + of_head + rows, mask=rows < S, other=0.0)
        away = root * sum_of_document(inner + of_head, ids, row_ids, S, documents, BLOCK_M, BLOCK_N)
        tl.store(pulls + of_head + rows, weight * root, mask=rows < S)
        tl.store(pulls + COUNT * B * S + of_head + rows, weight * root * away, mask=rows < S)
    cells = (slots * B + b) * S + rows[:, None]
    inverses = tl.load(inverse + cells, mask=(rows < S)[:, None] & (slots < COUNT), other=0.0)
    start, end = partners(ids, row_ids, first_row, S, S_PAD, BLOCK_M, BLOCK_N, WINDOW)
    for first_column in range(start, end, BLOCK_N):
        columns = tl.multiple_of(first_column, BLOCK_N) + tl.arange(0, BLOCK_N)
        tile = sum_tile(
            inverses, query, key, by_query, by_key, offset_bias, bias, ids, scale, heads, b, rows, row_ids, columns,
            B, H, S, D, D_PAD, CENTER, CELLS, WINDOW, BIAS_BATCHED, COUNT, COUNT_PAD, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
        inside = (rows < S)[:, None] & (columns < S)[None, :]
        into = total + b * S * S + (rows[:, None] * S + columns[None, :])
        tl.store(into, tile.to(total.dtype.element_ty), mask=inside)
