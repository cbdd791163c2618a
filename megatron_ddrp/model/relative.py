"""Between relative offsets and pairs without a gather: `[.., n, num_relative]` ↔ `[.., n, n]`.

The rows of a relative table serve the offsets i − j = highest, …, lowest. In a buffer of t query rows that is
`num_relative − 1` longer than t, the offsets of row i stand side by side and one row's band begins one place to the
right of the last row's: the band is a strided view, the two clipped bins are what is left and right of it. So spreading
offsets over pairs is two writes, and its adjoint one read and two sums; indexed gathers and scatters cost several times
more.

Offsets are taken between *rows*. Within a document positions run 0, 1, …, so i − j of the rows is i − j of the
positions; pairs of two documents get a value that the attention mask then removes.

`spread` does whole matrices under autograd; `BandTile` does some query rows at a time, without autograd, for attention
that writes its own gradient.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def _band(padded: Tensor, num_relative: int) -> Tensor:
    """View `[.., t, num_relative]` of a contiguous `[.., t, t + num_relative − 1]`, largest offset first."""
    *leading, rows, width = padded.shape
    strides = (*padded.stride()[:-2], width + 1, 1)
    return padded.as_strided((*leading, rows, num_relative), strides, padded.storage_offset())


@functools.lru_cache(maxsize=64)
def _left_of_band(rows: int, num_relative: int, device: torch.device) -> Tensor:
    """bool `[t, t + num_relative − 1]`: columns before the band of their row."""
    column = torch.arange(rows + num_relative - 1, device=device)
    return column < torch.arange(rows, device=device)[:, None]


def spread_values(per_offset: Tensor, highest: int) -> Tensor:
    """`[.., n, num_relative]` → `[.., n, n]` (a view with longer rows), without autograd."""
    n, num_relative = per_offset.shape[-2:]
    left = _left_of_band(n, num_relative, per_offset.device)
    # `where` keeps the strides of a transposed input; the band's strides hold for a contiguous buffer only.
    padded = torch.where(left, per_offset[..., -1:], per_offset[..., :1]).contiguous()  # [.., n, n + num_relative − 1]
    _band(padded, num_relative).copy_(per_offset.flip(-1))
    return padded[..., highest : highest + n]


def collect_values(per_pair: Tensor, num_relative: int, highest: int) -> Tensor:
    """Adjoint of `spread_values`: `[.., n, n]` → `[.., n, num_relative]`, the sum over the pairs of each offset."""
    n = per_pair.shape[-1]
    padded = per_pair.new_zeros(*per_pair.shape[:-1], n + num_relative - 1)
    padded[..., highest : highest + n] = per_pair
    per_offset = _band(padded, num_relative).flip(-1)
    left = _left_of_band(n, num_relative, per_pair.device)
    dtype = torch.promote_types(per_pair.dtype, torch.float32)  # `after` is a difference: half precision would cancel
    before = padded.masked_fill(~left, 0).sum(-1, dtype=dtype)  # [.., n]
    after = per_pair.sum(-1, dtype=dtype) - per_offset.sum(-1, dtype=dtype) - before
    per_offset[..., -1] += before
    per_offset[..., 0] += after
    return per_offset


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, per_offset: Tensor, highest: int) -> Tensor:  # type: ignore[override]
        ctx.num_relative, ctx.highest = per_offset.shape[-1], highest
        return spread_values(per_offset, highest)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return collect_values(gradient, ctx.num_relative, ctx.highest), None


def spread(per_offset: Tensor, lowest: int, highest: int) -> Tensor:
    """`[.., n, highest − lowest + 1]` → `[.., n, n]`: entry (i, j) is column clip(i − j, lowest, highest) − lowest."""
    assert lowest <= 0 <= highest, f"offset 0 needs a row of its own, got {lowest} … {highest}"
    assert per_offset.shape[-1] == highest - lowest + 1, (per_offset.shape, lowest, highest)
    return _Spread.apply(per_offset, highest)


class BandTile:
    """Query rows [start, start + t) against n keys, for tables with largest offset first.

    Two sources add to the logits `[g, t, n]`: `by_query` `[g, t, R]`, a value for each query and offset, and `by_key`
    `[g, highest + n − lowest, R]`, a value for each key and offset, the keys padded by `highest` rows before and
    `−lowest` after.
    """

    def __init__(self, start: int, rows: int, num_keys: int, lowest: int, highest: int, device: torch.device) -> None:
        self.start, self.rows, self.num_relative = start, rows, highest - lowest + 1
        self.width = rows + self.num_relative - 1
        first_key = start - highest  # what column 0 of the padded buffer stands for
        self.low, self.high = max(0, first_key), min(num_keys, first_key + self.width)
        self.inside = slice(self.low - first_key, self.high - first_key)
        self.highest = highest
        self.left = _left_of_band(rows, self.num_relative, device)[:, self.inside]  # [t, high − low]

    def add(self, logits: Tensor, by_query: Tensor | None, by_key: Tensor | None) -> None:
        """Add both sources to `logits`, in place."""
        if by_query is not None:
            padded = self._padded(by_query, torch.where(self.left, by_query[..., :1], by_query[..., -1:]))
            _band(padded, self.num_relative).copy_(by_query)
            logits[..., : self.low] += by_query[..., :1]
            logits[..., self.high :] += by_query[..., -1:]
            logits[..., self.low : self.high] += padded[..., self.inside]
        if by_key is not None:
            near = by_key[:, self.start : self.start + self.width]  # [g, width, R]
            first, last = near[:, self.inside, 0].unsqueeze(1), near[:, self.inside, -1].unsqueeze(1)
            padded = self._padded(near, torch.where(self.left, first, last))
            _band(padded, self.num_relative).copy_(self._by_row(near))
            keys = by_key[:, self.highest : self.highest + logits.shape[-1]]  # [g, n, R]
            logits[..., : self.low] += keys[:, : self.low, 0].unsqueeze(1)
            logits[..., self.high :] += keys[:, self.high :, -1].unsqueeze(1)
            logits[..., self.low : self.high] += padded[..., self.inside]

    def _padded(self, like: Tensor, inside: Tensor) -> Tensor:
        """A buffer `[g, t, width]` with `inside` `[g, t, high − low]` where there are keys, 0 elsewhere."""
        padded = like.new_empty(len(like), self.rows, self.width)
        padded[..., : self.inside.start] = 0
        padded[..., self.inside] = inside
        padded[..., self.inside.stop :] = 0
        return padded

    def _by_row(self, near: Tensor) -> Tensor:
        """View of `[g, width, R]` as `[g, t, R]`: entry (r, b) is (r + b, b), the key at place b of row r's band."""
        group, row, column = near.stride()
        strides = (group, row, row + column)
        return near.as_strided((len(near), self.rows, self.num_relative), strides, near.storage_offset())

    def collect(self, gradient: Tensor, by_key_gradient: Tensor | None, wants_query: bool) -> Tensor | None:
        """Adjoint of `add` for the gradient of the logits `[g, t, n]`.

        Returns the gradient of `by_query` where wanted; adds that of `by_key` into `by_key_gradient`.
        """
        padded = self._padded(gradient, gradient[..., self.low : self.high])
        band = _band(padded, self.num_relative)  # [g, t, R]
        left = gradient[..., self.low : self.high].masked_fill(~self.left, 0)
        by_query = None
        if wants_query:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            before = gradient[..., : self.low].sum(-1, dtype=dtype) + left.sum(-1, dtype=dtype)  # [g, t]
            after = gradient.sum(-1, dtype=dtype) - before - band.sum(-1, dtype=dtype)
            by_query = band.clone(memory_format=torch.contiguous_format)
            by_query[..., 0] += before
            by_query[..., -1] += after
        if by_key_gradient is not None:
            near = by_key_gradient[:, self.start : self.start + self.width]
            keys = by_key_gradient[:, self.highest : self.highest + gradient.shape[-1]]
            keys[:, : self.low, 0] += gradient[..., : self.low].sum(-2)
            keys[:, self.high :, -1] += gradient[..., self.high :].sum(-2)
            near[:, self.inside, 0] += left.sum(-2)
            self._by_row(near).add_(band)
            band.zero_()
            near[:, self.inside, -1] += padded[..., self.inside].masked_fill(self.left, 0).sum(-2)
        return by_query
