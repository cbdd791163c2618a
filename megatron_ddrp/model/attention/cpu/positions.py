"""The position terms of blocked attention: what they add to a tile of logits, and their gradients.

Pairs beyond the clip are most of a long row, so nothing is added to them one by one. Softmax does not see a constant of
a row: the query table is taken relative to the table row that serves all far keys on the left, which leaves nothing to
add there, and the far keys on the right carry the difference themselves, K_j + T^q[right] − T^q[left]. What remains is
the band around the diagonal, read aslant from Q·Tᵀ, and a triangle beside it. Of the heads that HCD compares before the
softmax the keys carry the constant too.

Names as in `blocked.py`. Tables are turned to have the largest offset first where queries use them.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from megatron_ddrp.model.attention.cpu.scratch import product, scratch
from megatron_ddrp.model.attention.relative import BandTile


def _for_all(table: Tensor, count: int) -> Tensor:
    """`[1 or h, R, d]` → `[g, R, d]`, the heads over and over."""
    if len(table) == 1:
        return table.expand(count, -1, -1)
    return table if len(table) == count else table.repeat(count // len(table), 1, 1)


class QueryTable:
    """Q_i·T^q[r(i,j)] of one block and the gradients of one backward pass over it; up to a constant for each query, but
    in the heads `whole`."""

    def __init__(self, table: Tensor, query: Tensor, key: Tensor, num_heads: int, whole: Tensor) -> None:
        """`table` `[1 or h, R, d]`; `query`, times scale, and `key` `[g, n, d]`; `whole` `[m′]`, maybe none."""
        self.table, self.query, self.key, self.num_heads, self.whole = table, query, key, num_heads, whole
        largest_first = table.flip(1)
        relative = largest_first - largest_first[:, :1]
        self.relative = _for_all(relative, len(query))
        """`[g, R, d]`: T^q, largest offset first, less its first row."""
        constant = self.relative.new_zeros(num_heads, 1, key.shape[-1])
        if len(whole):
            constant[whole] = table[:, -1:] if len(table) == 1 else table[whole, -1:]
        self.constant = _for_all(constant, len(query))
        """`[g, 1, d]`: T^q far on the left, which the keys of `whole` carry beside what they are."""
        self.shifted_from = 0

    @cached_property
    def unshifted(self) -> Tensor:
        """`[g, n, d]`: the keys, those of `whole` with their constant."""
        return self.key + self.constant if len(self.whole) else self.key

    @cached_property
    def shifted(self) -> Tensor:
        """`[g, n, d]`: the keys, those right of the bands of the tile last asked for shifted."""
        return self.key + (self.relative[:, -1:] + self.constant)

    @cached_property
    def d_relative(self) -> Tensor:
        """The gradient of `relative`."""
        return torch.zeros_like(self.relative, memory_format=torch.contiguous_format)

    def keys_of(self, tile: BandTile, d_key: Tensor | None = None) -> Tensor:
        """The keys for the queries of `tile`; tiles come in ascending order.

        In a backward pass, `d_key` `[g, n, d]` is what the tiles before this one gave to the keys: what those that are
        now shifted no more got until here is also the shift's.
        """
        if self.shifted_from == 0 and tile.near.stop == self.key.shape[1]:
            return self.unshifted  # no band ends before the last key
        arrived = slice(self.shifted_from, tile.near.stop)
        torch.add(self.key[:, arrived], self.constant, out=self.shifted[:, arrived])
        if d_key is not None:
            self.d_relative[:, -1] += d_key[:, arrived].sum(1)
        self.shifted_from = tile.near.stop
        return self.shifted

    def add(self, logits: Tensor, rows: slice, tile: BandTile) -> None:
        """Add to the logits `[g, t, n]` of Q and `keys_of(tile)`."""
        by_query = torch.bmm(self.query[:, rows], self.relative.transpose(1, 2)).to(logits.dtype)  # [g, t, R]
        near, (_, band, right) = logits[..., tile.near], tile.masks(logits)
        near.addcmul_(tile.slanted(by_query), band)
        near[..., tile.can_be_right].addcmul_(by_query[..., -1:], right[:, tile.can_be_right])

    def collect(self, d_logits: Tensor, rows: slice, tile: BandTile, d_query: Tensor) -> None:
        """The adjoint of `add`, for `d_logits` as `BandTile.band` wants it; adds to `d_query` `[g, t, d]`."""
        right = tile.masks(d_logits)[2][:, tile.can_be_right]
        d_right = (d_logits[..., tile.near][..., tile.can_be_right] * right).sum(-1, keepdim=True)  # [g, t, 1]
        d_by_query, d_right = tile.band(d_logits).to(d_query.dtype), d_right.to(d_query.dtype)  # [g, t, R]
        query = self.query[:, rows]
        d_query.baddbmm_(d_by_query, self.relative).addcmul_(d_right, self.relative[:, -1:])
        self.d_relative.baddbmm_(d_by_query.transpose(1, 2), query)
        self.d_relative[:, -1] += (d_right * query).sum(1)

    def gradient(self, d_key: Tensor) -> Tensor:
        """That of the table, `[1 or h, R, d]`, once all tiles are in and gave `d_key` `[g, n, d]` to the keys."""
        d_relative = self.d_relative
        if len(self.table) == 1:
            d_table = d_relative.sum(0, keepdim=True)
        else:
            d_table = d_relative.unflatten(0, (-1, self.num_heads)).sum(0)
        d_table[:, 0] -= d_table.sum(1)
        if len(self.whole):
            d_left = d_key.sum(1).unflatten(0, (-1, self.num_heads)).sum(0)[self.whole]  # [m′, d]
            d_table[:, 0].index_add_(0, self.whole if len(d_table) > 1 else torch.zeros_like(self.whole), d_left)
        return d_table.flip(1)


class KeyTable:
    """K_j·T^k[r(i,j)] of one block, and the gradients of one backward pass over it."""

    def __init__(self, table: Tensor, key: Tensor, lowest: int, highest: int, num_heads: int) -> None:
        """`table` `[1 or h, R, d]`; `key` `[g, n, d]`, times scale."""
        self.key, self.num_heads, self.shared = key, num_heads, len(table) == 1
        self.table = _for_all(table, len(key))  # [g, R, d]
        self.wide = torch.promote_types(key.dtype, torch.float32)
        self.shape = (len(key), highest + key.shape[1] - lowest, table.shape[1])
        self.real = slice(highest, highest + key.shape[1])

    @cached_property
    def by_key(self) -> Tensor:
        """`[g, highest + n − lowest, R]`; what stands beyond the keys is read but does not count."""
        by_key = scratch.take("by key", self.shape, self.wide)
        by_key[:, : self.real.start], by_key[:, self.real.stop :] = 0, 0
        product(self.key, self.table, out=by_key[:, self.real])
        return by_key

    @cached_property
    def far(self) -> Tensor:
        """`[2, g, 1, n]`: what each key adds far on the left, far on the right."""
        by_key = self.by_key[:, self.real]
        return torch.stack((by_key[..., -1], by_key[..., 0])).unsqueeze(2)

    @cached_property
    def d_by_key(self) -> Tensor:
        """The gradient of `by_key`."""
        return scratch.take("gradient by key", self.shape, self.wide).zero_()

    @cached_property
    def d_far(self) -> Tensor:
        """The gradient of `far`."""
        return self.key.new_zeros(2, len(self.key), 1, self.key.shape[1], dtype=self.wide)

    def add(self, logits: Tensor, tile: BandTile) -> None:
        """Add to the logits `[g, t, n]`."""
        near, (left, band, right) = logits[..., tile.near], tile.masks(logits)
        near.addcmul_(tile.slanted_by_key(self.by_key), band)
        for far, side, can_be, by_key in self._sides(tile, left, right, self.far):
            logits[..., far] += by_key[..., far]
            near[..., can_be].addcmul_(by_key[..., tile.near][..., can_be], side[:, can_be])

    def collect(self, d_logits: Tensor, tile: BandTile) -> None:
        """The adjoint of `add`, for `d_logits` as `BandTile.band` wants it."""
        near, (left, _, right) = d_logits[..., tile.near], tile.masks(d_logits)
        tile.band_by_key(self.d_by_key).add_(tile.band(d_logits))
        for far, side, can_be, d_by_key in self._sides(tile, left, right, self.d_far):
            d_by_key[..., far] += d_logits[..., far].sum(1, keepdim=True)
            d_by_key[..., tile.near][..., can_be] += (near[..., can_be] * side[:, can_be]).sum(1, keepdim=True)

    @staticmethod
    def _sides(
        tile: BandTile, left: Tensor, right: Tensor, by_side: Tensor
    ) -> tuple[tuple[slice, Tensor, slice, Tensor], ...]:
        """Far keys, mask, near places that it can hold, and its part of `[2, ..]`, of both sides."""
        before, after = slice(0, tile.near.start), slice(tile.near.stop, None)
        return (before, left, tile.can_be_left, by_side[0]), (after, right, tile.can_be_right, by_side[1])

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of the table `[1 or h, R, d]` and of the scaled key `[g, n, d]`, once all tiles are in."""
        for column, part in zip((-1, 0), self.d_far, strict=True):
            self.d_by_key[:, self.real, column] += part.squeeze(1)
        d_by_key = self.d_by_key[:, self.real].to(self.key.dtype)
        d_table = torch.bmm(d_by_key.transpose(1, 2), self.key)  # [g, R, d]
        d_table = d_table.sum(0, keepdim=True) if self.shared else d_table.unflatten(0, (-1, self.num_heads)).sum(0)
        return d_table, torch.bmm(d_by_key, self.table)
