"""Between relative offsets and pairs without a gather: `[.., n, num_relative]` ↔ `[.., n, n]`.

The rows of a relative table serve the offsets i − j = highest, …, lowest. In a buffer of t query rows that is
`num_relative − 1` longer than t, the offsets of row i stand side by side and one row's band begins one place to the
right of the last row's: the band is a strided view, the two clipped bins are what is left and right of it. So spreading
offsets over pairs is two writes, and its adjoint one read and two sums; indexed gathers and scatters cost several times
more.

Offsets are taken between *rows*. Within a document positions run 0, 1, …, so i − j of the rows is i − j of the
positions; pairs of two documents get a value that the attention mask then removes.

`spread` does whole matrices under autograd; `BandTile` is the geometry of some query rows, for attention that writes
its own gradient tile by tile. A value that depends on the offset alone needs no row of its own per query: `diagonals`
lays it out by j − i once, of which every row of a matrix is a window (`toeplitz`).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
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


def diagonals(per_offset: Tensor, lowest: int, highest: int, n: int) -> Tensor:
    """Lay out `[.., num_relative]` by j − i for n places: `[.., 2·n − 1]`, j − i = 1 − n first."""
    offset = torch.arange(n - 1, -n, -1, device=per_offset.device)  # i − j
    return per_offset.index_select(-1, offset.clamp(lowest, highest) - lowest)


def toeplitz(by_diagonal: Tensor, rows: slice) -> Tensor:
    """Return `rows` of the matrix whose diagonals `[.., 2·n − 1]` are given: `[.., t, n]`."""
    n = (by_diagonal.shape[-1] + 1) // 2
    return by_diagonal.unfold(-1, n, 1)[..., n - rows.stop : n - rows.start, :].flip(-2)


def add_diagonal_sums(per_pair: Tensor, rows: slice, by_diagonal: Tensor) -> None:
    """The adjoint of `toeplitz`: add the sum of each diagonal of `[.., t, n]` to `[.., 2·n − 1]`, in place."""
    t, n = per_pair.shape[-2:]
    # With t zeros behind each row, taken from the last row upwards, rows of t + n − 1 hold a diagonal per column.
    skewed = F.pad(per_pair.flip(-2), (0, t)).flatten(-2)[..., :-t].unflatten(-1, (t, t + n - 1))
    by_diagonal[..., n - rows.stop : 2 * n - 1 - rows.start] += skewed.sum(-2)


@functools.lru_cache(maxsize=64)
def _side_masks(rows: int, num_relative: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """0/1 `[t, t + num_relative − 1]`: left of the band of each row, in it, right of it."""
    place = torch.arange(rows + num_relative - 1, device=device) - torch.arange(rows, device=device)[:, None]
    sides = place < 0, (place >= 0) & (place < num_relative), place >= num_relative
    return tuple(side.to(dtype) for side in sides)


class BandTile:
    """Query rows [start, start + t) against n keys: which keys stand in the band of some row.

    Place x of the tile is key start − highest + x; the band of row r is the places r … r + num_relative − 1, largest
    offset first. `near` are the keys in the band of any row; keys before them are `highest` or more to the left of
    every row, keys after them `−lowest` or more to the right.
    """

    def __init__(self, start: int, rows: int, num_keys: int, lowest: int, highest: int) -> None:
        self.start, self.rows, self.num_keys = start, rows, num_keys
        self.highest, self.num_relative = highest, highest - lowest + 1
        self.width = rows + self.num_relative - 1
        first = start - highest
        self.near = slice(max(0, first), min(num_keys, first + self.width))
        self.places = slice(self.near.start - first, self.near.stop - first)
        self.can_be_left = slice(0, max(0, rows - 1 - self.places.start))
        self.can_be_right = slice(max(0, self.num_relative - self.places.start), None)
        """Those of `near` that some row has on the left, on the right of its band."""

    def masks(self, like: Tensor) -> tuple[Tensor, ...]:
        """0/1 `[t, near]`: left of the band, in it, right of it."""
        masks = _side_masks(self.rows, self.num_relative, like.dtype, like.device)
        return tuple(mask[:, self.places] for mask in masks)

    def slanted(self, per_offset: Tensor) -> Tensor:
        """Contiguous `[g, t, num_relative]` as `[g, t, near]`: meaningful in the band only."""
        strides = (per_offset.stride(0), self.num_relative - 1, 1)
        offset = per_offset.storage_offset() + self.places.start
        return per_offset.as_strided((len(per_offset), self.rows, self.near.stop - self.near.start), strides, offset)

    def slanted_by_key(self, per_offset: Tensor) -> Tensor:
        """Contiguous `[g, highest + n − lowest, num_relative]`, smallest offset first, as `[g, t, near]`."""
        steps = self.num_relative - 1
        offset = per_offset.storage_offset() + self.start * self.num_relative + steps + self.places.start * steps
        size = (len(per_offset), self.rows, self.near.stop - self.near.start)
        return per_offset.as_strided(size, (per_offset.stride(0), 1, steps), offset)

    def band_by_key(self, per_offset: Tensor) -> Tensor:
        """The band of `slanted_by_key` as `[g, t, num_relative]`, largest offset first; no entry stands in it twice."""
        steps = self.num_relative - 1
        offset = per_offset.storage_offset() + self.start * self.num_relative + steps
        size = (len(per_offset), self.rows, self.num_relative)
        return per_offset.as_strided(size, (per_offset.stride(0), self.num_relative, steps), offset)

    def band(self, per_pair: Tensor) -> Tensor:
        """Contiguous `[g, t, n]` as its band `[g, t, num_relative]`, largest offset first, 0 where no key is.

        A view where every row's band has all its keys. Around `per_pair` the storage must hold `num_relative` more
        finite numbers on either side, which are read but do not count.
        """
        strides = (per_pair.stride(0), self.num_keys + 1, 1)
        offset = per_pair.storage_offset() + self.start - self.highest
        band = per_pair.as_strided((len(per_pair), self.rows, self.num_relative), strides, offset)
        if self.places == slice(0, self.width):
            return band
        key = torch.arange(self.rows, device=per_pair.device)[:, None] + torch.arange(
            self.start - self.highest, self.start - self.highest + self.num_relative, device=per_pair.device
        )
        return band * ((key >= 0) & (key < self.num_keys)).to(per_pair.dtype)
