"""Blocked attention on CPUs, a few query rows at a time, so that their logits stay in the cache.

It computes the formula of `model/attention/logits.py`, with forward and backward pass written out. Short sequences are
joined into blocks, long ones are cut into tiles of query rows, and padding at the end is cut off first. The
probabilities of short sequences are kept for the backward pass; those of long ones are recomputed. HCD's inner products
use a tile's logits before the softmax, and their gradient is added to the softmax's, so HCD needs no second QKᵀ. Under
a window, and in causal attention, a tile reads only the keys within reach of its queries.

Names: b = batch, h = heads, g = b·h, s = sequence, d = head size, n = longest sequence of a block, t = rows of a tile,
c = columns of a tile (n of them if its queries reach all), R = rows of a relative table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ddrp.model.attention.logits import Attending, in_reach, sum_of_counted
from megatron_ddrp.model.embeddings import cosine_of_gram, document_mask
from megatron_ddrp.model.positions.contract import HEAD_DIMENSIONS, UNBOUNDED, PositionTerms, reached_offsets
from megatron_ddrp.model.stages import wide

BLOCK_ELEMENTS = TILE_ELEMENTS = 3 * 2**18
"""Largest number of logits in a block of short sequences, which share the start-up cost of each operation, and in a
tile of a long sequence: 3 MiB in fp32, about the second-level caches of a few cores."""

SMALLEST_TILE = 32
"""Smallest number of query rows in a tile."""

KEPT_LENGTH = 512
"""Length of the longest block whose probabilities are kept for the backward pass; for longer ones they are recomputed.
Keeping them saves a fifth of attention's time and takes 4 bytes per pair and head (`docs/lab/benchmarks.md`)."""


class QueryTile(NamedTuple):
    """Some queries of a block, and the range of keys that contains all keys they may attend to."""

    rows: slice
    columns: slice


@dataclass(frozen=True)
class Block:
    """Some rows of the batch, cut to their longest sequence."""

    rows: slice
    length: int
    document_ids: Tensor
    """`[b, n]`."""
    unmasked: bool
    """True if every pair of the block within reach is allowed."""
    reached: tuple[int, int]
    """Smallest and largest i − j over which a query attends, at most as far as the block is long."""

    @property
    def is_kept(self) -> bool:
        """True if the probabilities are kept for the backward pass."""
        return self.length <= KEPT_LENGTH

    def take(self, tensor: Tensor) -> Tensor:
        """Return the block's part of `[batch, h, s, d]`, `[g, n, d]`."""
        return tensor[self.rows, :, : self.length].flatten(0, 1)

    def tiles(self, num_heads: int) -> Iterator[QueryTile]:
        """Cut the query rows into tiles of about `TILE_ELEMENTS` logits.

        A tile of t rows that reach 2w keys besides their own has t + 2w columns. At t = w it computes three logits per
        two allowed ones.
        """
        half = (self.reached[1] - self.reached[0]) // 2
        width = min(self.length, 3 * half + 1)
        rows = TILE_ELEMENTS // (len(self.document_ids) * num_heads * width)
        if not self.reaches_all:
            rows = min(rows, half)
        count = -(-self.length // max(SMALLEST_TILE, rows))
        rows = -(-self.length // count)
        for start in range(0, self.length, rows):
            end = min(start + rows, self.length)
            yield QueryTile(slice(start, end), self._columns(start, end))

    @property
    def reaches_all(self) -> bool:
        """True if every query reaches the whole block."""
        return self.reached == (1 - self.length, self.length - 1)

    def _columns(self, start: int, end: int) -> slice:
        lowest, highest = self.reached
        return slice(max(start - highest, 0), min(end - lowest, self.length))

    def offsets(self, tile: QueryTile) -> Tensor:
        """Return i − j of each pair of a tile, int64 `[t, c]`."""
        place = torch.arange(self.length)
        return place[tile.rows, None] - place[tile.columns]

    def forbidden_pairs(self, tile: QueryTile) -> Tensor | None:
        """Mark pairs of two documents, with padding or out of reach; return None if there are none.

        The result is bool `[b, 1, t, c]`, or `[1, 1, t, c]` if it is the same for all rows of the batch.
        """
        far = None
        if not self.reaches_all:
            far = ~in_reach(self.offsets(tile), self.reached)[None, None]
        if self.unmasked:
            return far
        own = self.document_ids[:, tile.rows].unsqueeze(-1)
        apart = ((own != self.document_ids[:, tile.columns].unsqueeze(-2)) | (own == 0)).unsqueeze(1)
        return apart if far is None else apart | far


def cut(document_ids: Tensor, num_heads: int, reached: tuple[int, int] = (-UNBOUNDED, UNBOUNDED)) -> Iterator[Block]:
    """Cut the batch into blocks of at most `BLOCK_ELEMENTS` logits or of one row; `reached` as `reached_offsets`."""
    batch, seq = document_ids.shape
    place = torch.arange(1, seq + 1, device=document_ids.device)
    lengths = ((document_ids > 0) * place).amax(-1).clamp_min(1).tolist()
    start = 0
    while start < batch:
        end, longest = start + 1, lengths[start]
        while end < batch:
            longer = max(longest, lengths[end])
            if (end + 1 - start) * num_heads * longer**2 > BLOCK_ELEMENTS:
                break
            end, longest = end + 1, longer
        ids = document_ids[start:end, :longest]
        in_block = max(reached[0], 1 - longest), min(reached[1], longest - 1)
        yield Block(slice(start, end), longest, ids, bool((ids == 1).all()), in_block)
        start = end


RUN_OF_KEYS = 128
"""Number of keys multiplied at a time with the rows of a table of buckets."""

Tensors = Sequence[Tensor | None]
"""Type of the tensor fields of `PositionTerms`, or of their gradients, in the order of `HEAD_DIMENSIONS`."""


class BlockPositions:
    """Position terms of one block, and their gradients in one backward pass.

    A table is multiplied with queries or keys once per row of the table, R products per query or key instead of n. A
    tile then gathers the products by the clipped offset of each of its pairs.
    """

    def __init__(self, terms: PositionTerms, block: Block, query: Tensor, key: Tensor, num_heads: int) -> None:
        """Prepare the tables. `query` (times scale) and `key` are `[g, n, d]`."""
        self.terms, self.block, self.num_heads = terms, block, num_heads
        self.query_table = None if terms.query_table is None else QueryTable(terms.query_table, query)
        self.key_table = None
        if terms.key_table is not None:
            self.key_table = KeyTable(terms.key_table, key * terms.scale, list(self._runs_of_keys()))
        self.offset_bias = None if terms.offset_bias is None else OffsetBias(terms, block.length)

    def add(self, logits: Tensor, tile: QueryTile) -> None:
        """Add all terms but Q·K to the logits `[g, t, c]` of a tile."""
        by_head = logits.unflatten(0, (-1, self.num_heads))  # [b, h, t, c]
        if self.query_table is not None:
            read = self._read(tile)
            index = (self._index(tile) - read.start).expand_as(logits)
            logits += self.query_table.by_query(tile.rows, read).gather(-1, index)
        if self.key_table is not None:
            logits += self.key_table.by_key[..., tile.columns].gather(1, self._index(tile).expand_as(logits))
        if self.terms.bias is not None:
            by_head += self._own(self.terms.bias)[:, :, tile.rows, tile.columns]
        if self.offset_bias is not None:
            by_head += self.offset_bias.of_pairs(tile)

    def collect(self, d_logits: Tensor, tile: QueryTile, d_query: Tensor, d_tensors: Tensors) -> None:
        """Apply the adjoint of `add`: add to `d_query` `[g, t, d]` and to the gradient of the bias.

        `finish` adds to the other gradients.
        """
        _, _, d_bias, d_offset_bias = d_tensors
        if self.query_table is not None:
            read = self._read(tile)
            index = (self._index(tile) - read.start).expand_as(d_logits)
            self.query_table.collect(d_logits, index, tile.rows, read, d_query)
        if self.key_table is not None:
            d_by_key = self.key_table.d_by_key[..., tile.columns]
            d_by_key.scatter_add_(1, self._index(tile).expand_as(d_logits), d_logits)
        by_head = d_logits.unflatten(0, (-1, self.num_heads))  # [b, h, t, c]
        if d_bias is not None:
            into = self._own(d_bias)[:, :, tile.rows, tile.columns]
            into += by_head.sum_to_size(into.shape)
        if self.offset_bias is not None and d_offset_bias is not None:
            self.offset_bias.collect(by_head.sum_to_size(1, len(d_offset_bias), *d_logits.shape[1:])[0], tile)

    def finish(self, d_key: Tensor, d_tensors: Tensors) -> None:
        """Add to the tables' gradients and to `d_key` `[g, n, d]`, after the last tile."""
        d_query_table, d_key_table, _, d_offset_bias = d_tensors
        if self.query_table is not None and d_query_table is not None:
            d_query_table += _of_table(self.query_table.d_table, d_query_table)
        if self.key_table is not None:
            of_table, of_key = self.key_table.gradients()
            d_key.add_(of_key, alpha=self.terms.scale)
            if d_key_table is not None:
                d_key_table += _of_table(of_table, d_key_table)
        if self.offset_bias is not None and d_offset_bias is not None:
            self.offset_bias.add_gradient(d_offset_bias)

    def _index(self, tile: QueryTile) -> Tensor:
        """Return the table row of each pair of a tile: `[t, c]`."""
        row = _clip(self.block.offsets(tile), self.terms)
        return row if self.terms.table_row is None else self.terms.table_row[row]

    def _read(self, tile: QueryTile) -> slice:
        """Return the range of table rows that the pairs of a tile read."""
        return self._rows(tile.rows.start - tile.columns.stop + 1, tile.rows.stop - 1 - tile.columns.start)

    def _rows(self, smallest: int, largest: int) -> slice:
        """Return the table rows for the offsets from `smallest` to `largest`.

        A table of buckets may have hundreds of rows, of which a tile reads about two thirds. Other tables are small, so
        all their rows are returned.
        """
        row, lowest, highest = self.terms.table_row, self.terms.lowest, self.terms.highest
        if row is None:
            return slice(0, highest - lowest + 1)
        first, last = (min(max(offset, lowest), highest) - lowest for offset in (smallest, largest))
        least, most = (int(x) for x in row[first : last + 1].aminmax())
        return slice(least, most + 1)

    def _runs_of_keys(self) -> Iterator[tuple[slice, slice]]:
        """Yield the keys in runs, each with the range of table rows that queries read for them."""
        length, size = self.block.length, RUN_OF_KEYS if self.terms.table_row is not None else self.block.length
        lowest, highest = self.block.reached
        for start in range(0, length, size):
            end = min(start + size, length)
            yield slice(start, end), self._rows(max(1 - end, lowest), min(length - 1 - start, highest))

    def _own(self, bias: Tensor) -> Tensor:
        return bias if len(bias) == 1 else bias[self.block.rows]


def _clip(offset: Tensor, terms: PositionTerms) -> Tensor:
    """Return r(i,j), the row of each offset i − j."""
    return offset.clamp(terms.lowest, terms.highest) - terms.lowest


def _length(places: slice) -> int:
    return int(places.stop - places.start)


def _for_all(table: Tensor, count: int) -> Tensor:
    """Repeat a table's heads for every row of the block: `[1 or h, R, d]` → `[g, R, d]`."""
    return table.expand(count, -1, -1) if len(table) == 1 else table.repeat(count // len(table), 1, 1)


def _of_table(d_for_all: Tensor, table: Tensor) -> Tensor:
    """Apply the adjoint of `_for_all`: sum `[g, R, d]` to the shape of `table`."""
    return d_for_all.unflatten(0, (-1, len(table))).sum(0)


class QueryTable:
    """Products Q_i·T^q[r] of one block for every row r, and the table's gradient in one backward pass."""

    def __init__(self, table: Tensor, query: Tensor) -> None:
        """Keep `table` `[1 or h, R, d]` and `query` `[g, n, d]`, which is scaled already."""
        self.query, self.table = query, _for_all(table, len(query))

    def by_query(self, rows: slice, read: slice) -> Tensor:
        """Return the products of a tile with the rows `read` of the table, `[g, t, R′]`."""
        return wide(torch.bmm(self.query[:, rows], self.table[:, read].transpose(1, 2)))

    @cached_property
    def d_table(self) -> Tensor:
        """Gradient of the repeated table, `[g, R, d]`."""
        return torch.zeros_like(self.table, memory_format=torch.contiguous_format)

    def collect(self, d_logits: Tensor, index: Tensor, rows: slice, read: slice, d_query: Tensor) -> None:
        """Add a tile's gradient to the gradients of the table and of the tile's queries `[g, t, d]`."""
        d_by_query = d_logits.new_zeros(*d_logits.shape[:2], read.stop - read.start)
        d_by_query = d_by_query.scatter_add_(-1, index, d_logits).to(d_query.dtype)
        d_query.baddbmm_(d_by_query, self.table[:, read])
        self.d_table[:, read].baddbmm_(d_by_query.transpose(1, 2), self.query[:, rows])


class KeyTable:
    """Products K_j·T^k[r] of one block for every row r, and the gradients in one backward pass."""

    def __init__(self, table: Tensor, key: Tensor, runs: list[tuple[slice, slice]]) -> None:
        """Keep `table` `[1 or h, R, d]`, scaled `key` `[g, n, d]`, and the runs of keys with their table rows."""
        self.key, self.table, self.runs = key, _for_all(table, len(key)), runs

    @cached_property
    def by_key(self) -> Tensor:
        """Products `[g, R, n]`; only those that some tile reads are written."""
        if len(self.runs) == 1:
            return wide(torch.bmm(self.table, self.key.transpose(1, 2)))
        products = self._empty()
        for keys, rows in self.runs:
            products[:, rows, keys] = torch.bmm(self.table[:, rows], self.key[:, keys].transpose(1, 2))
        return products

    @cached_property
    def d_by_key(self) -> Tensor:
        """Gradient of `by_key`."""
        return self._empty().zero_()

    def _empty(self) -> Tensor:
        shape = len(self.key), self.table.shape[1], self.key.shape[1]
        return self.key.new_empty(shape, dtype=torch.promote_types(self.key.dtype, torch.float32))

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the table `[g, R, d]` and of the scaled key `[g, n, d]`, after the last tile."""
        d_by_key = self.d_by_key.to(self.key.dtype)
        if len(self.runs) == 1:
            return torch.bmm(d_by_key, self.key), torch.bmm(d_by_key.transpose(1, 2), self.table)
        d_table, d_key = torch.zeros_like(self.table, memory_format=torch.contiguous_format), torch.empty_like(self.key)
        for keys, rows in self.runs:
            part = d_by_key[:, rows, keys]
            d_table[:, rows].baddbmm_(part, self.key[:, keys])
            d_key[:, keys] = torch.bmm(part.transpose(1, 2), self.table[:, rows])
        return d_table, d_key


class OffsetBias:
    """v of one block for every pair, and its gradient in one backward pass.

    Read a tile's rows from the last to the first: each row reads the same numbers as the row before, shifted by one
    place. So one strided view serves all rows, where a gather would cost more than QKᵀ.
    """

    def __init__(self, terms: PositionTerms, length: int) -> None:
        self.length = length
        self.index = _clip(torch.arange(length - 1, -length, -1), terms)  # from offset n − 1 down to −(n − 1)
        assert terms.offset_bias is not None
        self.by_offset = terms.offset_bias.index_select(1, self.index)  # [1 or h, 2n − 1]

    def of_pairs(self, tile: QueryTile) -> Tensor:
        """Return v of a tile, `[1 or h, t, c]`."""
        shape = (len(self.by_offset), _length(tile.rows), _length(tile.columns))
        upwards = self.by_offset.as_strided(shape, (self.by_offset.shape[1], 1, 1), self._first(tile))
        return upwards.flip(1)

    def _first(self, tile: QueryTile) -> int:
        """Return the column of `by_offset` that the tile's last row reads in its first column."""
        return self.length - tile.rows.stop + tile.columns.start

    @cached_property
    def d_by_offset(self) -> Tensor:
        """Gradient of `by_offset`."""
        return wide(torch.zeros_like(self.by_offset))

    def collect(self, d_pairs: Tensor, tile: QueryTile) -> None:
        """Add the gradient of a tile, `[1 or h, t, c]`."""
        heads, rows, columns = d_pairs.shape
        width, first = rows + columns - 1, self._first(tile)
        by_row = d_pairs.new_zeros(heads, rows, width)
        by_row.as_strided((heads, rows, columns), (rows * width, width + 1, 1)).copy_(d_pairs.flip(1))
        self.d_by_offset[:, first : first + width] += by_row.sum(1)

    def add_gradient(self, d_offset_bias: Tensor) -> None:
        """Add to the gradient of v `[1 or h, num_relative]`, after the last tile."""
        d_offset_bias.index_add_(1, self.index, self.d_by_offset.to(d_offset_bias.dtype))


class ComparedHeads:
    """HCD's heads in the tiles of one block: their logits, the inner products, and the gradient.

    For the backward pass a tile keeps one matrix per head: the logits of the m′ heads that HCD compares, and the
    probabilities of all other heads. A softmax turns the kept logits into probabilities again.
    """

    def __init__(self, heads: Tensor, block: Block, num_heads: int) -> None:
        self.heads, self.block, self.num_heads = heads, block, num_heads

    def logits(self, logits: Tensor, tile: QueryTile) -> Tensor:
        """Return a copy of the compared heads of `[g, t, c]`, with zeros at forbidden pairs: `[b, m′, t, c]`."""
        chosen = self._by_head(logits).index_select(1, self.heads)
        forbidden = self.block.forbidden_pairs(tile)
        return chosen if forbidden is None else chosen.masked_fill_(forbidden, 0.0)

    def products(self, chosen: Tensor) -> Tensor:
        """Return the inner products of each query's logits: `[b, m′, t, c]` → `[b, t, m′, m′]`."""
        by_query = chosen.transpose(1, 2)  # [b, t, m′, c]
        return by_query @ by_query.transpose(-1, -2)

    def gradient(self, chosen: Tensor, d_products: Tensor) -> Tensor:
        """Apply the adjoint of `products` to `d_products` plus its transpose, `[b, t, m′, m′]`."""
        return (d_products @ chosen.transpose(1, 2)).transpose(1, 2)

    def collect(self, d_chosen: Tensor, d_logits: Tensor) -> None:
        """Add the gradient of the compared heads to the gradient of all logits, `[g, t, c]`."""
        self._by_head(d_logits).index_add_(1, self.heads, d_chosen)

    def keep(self, chosen: Tensor, probabilities: Tensor) -> None:
        """Overwrite the compared heads' probabilities in `[g, t, c]` with their logits."""
        self._by_head(probabilities).index_copy_(1, self.heads, chosen)

    def restore(self, kept: Tensor, tile: QueryTile, d_products: Tensor) -> Tensor:
        """Undo `keep`, in place, and return the `gradient` of the kept logits."""
        chosen, forbidden = self._by_head(kept).index_select(1, self.heads), self.block.forbidden_pairs(tile)
        d_chosen = self.gradient(chosen, d_products)
        if forbidden is not None:
            chosen.masked_fill_(forbidden, torch.finfo(chosen.dtype).min)
        self.keep(torch.softmax(chosen, -1, out=chosen), kept)
        return d_chosen

    def _by_head(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, self.num_heads))  # [b, h, t, c]


def by_document(products: Tensor, documents: Tensor) -> Tensor:
    """Sum each query's products over its document: `[batch, s, m′, m′]` → `[batch, documents, m′, m′]`.

    `documents` bool `[batch, documents, s]`.
    """
    return (documents.to(products.dtype) @ products.flatten(2)).unflatten(-1, products.shape[2:])


def by_query(gram: Tensor, documents: Tensor) -> Tensor:
    """Give each query its document's matrix: `[batch, documents, m′, m′]` → `[batch, s, m′, m′]`."""
    return (documents.to(gram.dtype).transpose(1, 2) @ gram.flatten(2)).unflatten(-1, gram.shape[2:])


def _kept_scale(tensor: Tensor, dropout: float) -> Tensor:
    """Apply dropout's 1/(1−p) factor to the values instead of the probabilities: there are fewer of them."""
    return tensor / (1 - dropout) if dropout else tensor


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ rightᵀ` in fp32 or wider: `[g, t, d]`, `[g, c, d]` → `[g, t, c]`."""
    return wide(torch.bmm(left, right.transpose(1, 2)))


def _softmax_backward_(gradient: Tensor, probabilities: Tensor) -> None:
    """Turn the gradient of the probabilities into the gradient of the logits, in place, with torch's own kernel."""
    torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, gradient.dtype, grad_input=gradient)


def _attend(
    query: Tensor,
    keys: Tensor,
    tile: QueryTile,
    positions: BlockPositions,
    compared: ComparedHeads | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities `[g, t, c]` of a tile, and the compared heads' logits before the softmax.

    `query` `[g, t, d]`, `keys` `[g, c, d]`.
    """
    logits = _product(query, keys)
    positions.add(logits, tile)
    chosen = None if compared is None else compared.logits(logits, tile)
    forbidden = positions.block.forbidden_pairs(tile)
    if forbidden is not None:
        logits.unflatten(0, (-1, positions.num_heads)).masked_fill_(forbidden, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, -1, out=logits), chosen


def _draw_kept(probabilities: Tensor, dropout: float) -> Tensor:
    """Draw bool `[g, t, c]`, True with probability 1 − dropout up to 2⁻¹⁶. Each 64-bit number gives four decisions."""
    count, drop_below = probabilities.numel(), min(round(dropout * 2**16), 2**16 - 1)
    bits = torch.empty(-(-count // 4), dtype=torch.int64, device=probabilities.device).random_(-(2**63), None)
    return (bits.view(torch.int16)[:count] >= drop_below - 2**15).view_as(probabilities)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attending: Attending, training: bool, query, key, value, *tensors):  # type: ignore[override]
        terms = attending.terms.with_tensors(tensors)
        document_ids, heads, dropout, *_ = attending[4:]
        reached = reached_offsets(attending.window, attending.causal)
        batch, num_heads, seq = query.shape[:3]
        context = torch.empty_like(value)
        kind = torch.promote_types(query.dtype, torch.float32)
        products = query.new_zeros(batch, seq, len(heads), len(heads), dtype=kind)
        kept: list[Tensor] = []  # per tile: probabilities (for HCD's heads the logits); dropout's decisions
        for block in cut(document_ids, num_heads, reached):
            q, k, v = block.take(query) * terms.scale, block.take(key), _kept_scale(block.take(value), dropout)
            positions = BlockPositions(terms, block, q, k, num_heads)
            compared = ComparedHeads(heads, block, num_heads) if len(heads) else None
            for tile in block.tiles(num_heads):
                rows, columns = tile
                keep = training and block.is_kept
                probabilities, chosen = _attend(q[:, rows], k[:, columns], tile, positions, compared)
                if keep:
                    kept.append(probabilities)
                dropped = probabilities
                if dropout:
                    kept.append(_draw_kept(probabilities, dropout))
                    dropped = probabilities * kept[-1]
                part = torch.bmm(dropped.to(v.dtype), v[:, columns])  # [g, t, d]
                context[block.rows, :, rows] = part.unflatten(0, (-1, num_heads))
                if compared is not None and chosen is not None:
                    products[block.rows, rows] = compared.products(chosen)
                    if keep:
                        compared.keep(chosen, probabilities)
            context[block.rows, :, block.length :] = 0
        ctx.save_for_backward(query, key, value, document_ids, heads, *tensors, *kept)
        ctx.terms, ctx.dropout = terms.with_tensors([None] * len(tensors)), dropout
        ctx.reached = reached
        ctx.logits_are_kept = len(heads) > 0
        return context, by_document(products, document_mask(document_ids, attending.num_documents))

    @staticmethod
    def backward(ctx, context_gradient, gram_gradient):  # type: ignore[override]
        query, key, value, document_ids, heads, *rest = ctx.saved_tensors
        tensors, kept = rest[: len(HEAD_DIMENSIONS)], rest[len(HEAD_DIMENSIONS) :]
        terms = ctx.terms.with_tensors(tensors)
        num_heads, keep = query.shape[1], iter(kept)
        whole = [torch.empty_like(x) for x in (query, key, value)]
        kind = torch.promote_types(query.dtype, torch.float32)  # for long sums
        needed = ctx.needs_input_grad[-len(tensors) :]
        d_tensors = [torch.zeros_like(x, dtype=kind) if need else None for x, need in zip(tensors, needed, strict=True)]
        both_ways = gram_gradient + gram_gradient.transpose(-1, -2)
        d_products = by_query(both_ways, document_mask(document_ids, gram_gradient.shape[1]))
        again = len(heads) > 0 and not ctx.logits_are_kept  # the first backward pass restored the probabilities
        ctx.logits_are_kept = False
        for block in cut(document_ids, num_heads, ctx.reached):
            q, k, v = block.take(query) * terms.scale, block.take(key), block.take(value)
            d_out = _kept_scale(block.take(context_gradient), ctx.dropout)
            positions = BlockPositions(terms, block, q, k, num_heads)
            compared = ComparedHeads(heads, block, num_heads) if len(heads) else None
            d_key, d_value = torch.zeros_like(k), torch.zeros_like(v)
            for tile in block.tiles(num_heads):
                rows, columns = tile
                probabilities, d_chosen = next(keep) if block.is_kept else None, None
                if probabilities is None or again:
                    probabilities, chosen = _attend(q[:, rows], k[:, columns], tile, positions, compared)
                    if compared is not None and chosen is not None:
                        d_chosen = compared.gradient(chosen, d_products[block.rows, rows])
                elif compared is not None:  # .data: autograd refuses to write to a tensor that it saved
                    d_chosen = compared.restore(probabilities.data, tile, d_products[block.rows, rows])
                # This is the gradient of the probabilities until `_softmax_backward_` below.
                d_logits = _product(d_out[:, rows], v[:, columns])
                dropped = probabilities
                if ctx.dropout:
                    kept_here = next(keep)
                    dropped = probabilities * kept_here
                    d_logits.mul_(kept_here)
                d_value[:, columns].baddbmm_(dropped.to(v.dtype).transpose(1, 2), d_out[:, rows])
                _softmax_backward_(d_logits, probabilities)
                if compared is not None and d_chosen is not None:
                    compared.collect(d_chosen, d_logits)
                narrow = d_logits.to(q.dtype)
                d_tile = torch.bmm(narrow, k[:, columns])
                d_key[:, columns].baddbmm_(narrow.transpose(1, 2), q[:, rows])
                positions.collect(d_logits, tile, d_tile, d_tensors)
                whole[0][block.rows, :, rows] = d_tile.mul_(terms.scale).unflatten(0, (-1, num_heads))
            positions.finish(d_key, d_tensors)
            whole[1][block.rows, :, : block.length] = d_key.unflatten(0, (-1, num_heads))
            whole[2][block.rows, :, : block.length] = d_value.unflatten(0, (-1, num_heads))
            for into in whole:
                into[block.rows, :, block.length :] = 0
        return (None, None, *whole, *d_tensors)


def blocked_attention(attending: Attending) -> tuple[Tensor, Tensor | None]:
    """Compute attention tile by tile; arguments and results are those of every backend."""
    query, key, value, terms = attending[:4]
    context, gram = _BlockedAttention.apply(attending, torch.is_grad_enabled(), query, key, value, *terms.tensors)
    return context, sum_of_counted(cosine_of_gram(gram), attending) if len(attending.heads) else None
