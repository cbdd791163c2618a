"""Position terms of blocked attention: their contribution to a tile of logits, and their gradients.

A table is multiplied with queries or keys once per row of the table, R products per query or key instead of n. A tile
then gathers the products by the clipped offset of each of its pairs.

Names as in `blocked.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from megatron_ddrp.model.attention.cpu.blocks import Block, Tile
from megatron_ddrp.model.positions.contract import PositionTerms

RUN_OF_KEYS = 128
"""Number of keys multiplied at a time with the rows of a table of buckets."""

Tensors = Sequence[Tensor | None]
"""Type of the tensor fields of `PositionTerms`, or of their gradients, in the order of `HEAD_DIMENSIONS`."""


class BlockPositions:
    """Position terms of one block, and their gradients in one backward pass."""

    def __init__(self, terms: PositionTerms, block: Block, query: Tensor, key: Tensor, num_heads: int) -> None:
        """Prepare the tables. `query` (times scale) and `key` are `[g, n, d]`."""
        self.terms, self.block, self.num_heads = terms, block, num_heads
        self.query_table = None if terms.query_table is None else QueryTable(terms.query_table, query)
        self.key_table = None
        if terms.key_table is not None:
            self.key_table = KeyTable(terms.key_table, key * terms.scale, list(self._runs_of_keys()))
        self.offset_bias = None if terms.offset_bias is None else OffsetBias(terms, block.length)

    def add(self, logits: Tensor, tile: Tile) -> None:
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

    def collect(self, d_logits: Tensor, tile: Tile, d_query: Tensor, d_tensors: Tensors) -> None:
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

    def _index(self, tile: Tile) -> Tensor:
        """Return the table row of each pair of a tile: `[t, c]`."""
        row = _clip(self.block.offsets(tile), self.terms)
        return row if self.terms.table_row is None else self.terms.table_row[row]

    def _read(self, tile: Tile) -> slice:
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
        reach = length - 1 if self.block.window is None else self.block.window
        for start in range(0, length, size):
            end = min(start + size, length)
            yield slice(start, end), self._rows(max(1 - end, -reach), min(length - 1 - start, reach))

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


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class QueryTable:
    """Products Q_i·T^q[r] of one block for every row r, and the table's gradient in one backward pass."""

    def __init__(self, table: Tensor, query: Tensor) -> None:
        """Keep `table` `[1 or h, R, d]` and `query` `[g, n, d]`, which is scaled already."""
        self.query, self.table = query, _for_all(table, len(query))

    def by_query(self, rows: slice, read: slice) -> Tensor:
        """Return the products of a tile with the rows `read` of the table, `[g, t, R′]`."""
        return _wide(torch.bmm(self.query[:, rows], self.table[:, read].transpose(1, 2)))

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
            return _wide(torch.bmm(self.table, self.key.transpose(1, 2)))
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

    def of_pairs(self, tile: Tile) -> Tensor:
        """Return v of a tile, `[1 or h, t, c]`."""
        shape = (len(self.by_offset), _length(tile.rows), _length(tile.columns))
        upwards = self.by_offset.as_strided(shape, (self.by_offset.shape[1], 1, 1), self._first(tile))
        return upwards.flip(1)

    def _first(self, tile: Tile) -> int:
        """Return the column of `by_offset` that the tile's last row reads in its first column."""
        return self.length - tile.rows.stop + tile.columns.start

    @cached_property
    def d_by_offset(self) -> Tensor:
        """Gradient of `by_offset`."""
        return _wide(torch.zeros_like(self.by_offset))

    def collect(self, d_pairs: Tensor, tile: Tile) -> None:
        """Add the gradient of a tile, `[1 or h, t, c]`."""
        heads, rows, columns = d_pairs.shape
        width, first = rows + columns - 1, self._first(tile)
        by_row = d_pairs.new_zeros(heads, rows, width)
        by_row.as_strided((heads, rows, columns), (rows * width, width + 1, 1)).copy_(d_pairs.flip(1))
        self.d_by_offset[:, first : first + width] += by_row.sum(1)

    def add_gradient(self, d_offset_bias: Tensor) -> None:
        """Add to the gradient of v `[1 or h, num_relative]`, after the last tile."""
        d_offset_bias.index_add_(1, self.index, self.d_by_offset.to(d_offset_bias.dtype))
