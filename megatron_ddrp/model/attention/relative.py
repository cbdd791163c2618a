"""Conversion between relative offsets and pairs without a gather: `[.., n, num_relative]` ↔ `[.., n, n]`.

The rows of a relative table serve the offsets i − j = highest, …, lowest. Take a buffer of n rows, each
n + num_relative − 1 long. The offsets of a row are adjacent, and each row's band begins one place to the right of the
band above, so the band is a strided view, with one clipped bin on its left and one on its right. Spreading offsets over
pairs takes two writes, and its adjoint one read and two sums, without the atomic additions of a scatter on GPUs.

Offsets are differences of *rows*. Within a document positions are 0, 1, …, so i − j of the rows equals i − j of the
positions; pairs of two documents get a value that the attention mask removes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def _band(padded: Tensor, num_relative: int) -> Tensor:
    """Return a view `[.., t, num_relative]` of a contiguous `[.., t, t + num_relative − 1]`, largest offset first."""
    *leading, rows, width = padded.shape
    strides = (*padded.stride()[:-2], width + 1, 1)
    return padded.as_strided((*leading, rows, num_relative), strides)


@functools.lru_cache(maxsize=64)
def _left_of_band(rows: int, num_relative: int, device: torch.device) -> Tensor:
    """Mark the columns before each row's band, bool `[t, t + num_relative − 1]`."""
    column = torch.arange(rows + num_relative - 1, device=device)
    return column < torch.arange(rows, device=device)[:, None]


def spread_values(per_offset: Tensor, highest: int) -> Tensor:
    """Spread `[.., n, num_relative]` to `[.., n, n]` (a view with longer rows), without autograd."""
    n, num_relative = per_offset.shape[-2:]
    left = _left_of_band(n, num_relative, per_offset.device)
    # `where` keeps the strides of a transposed input, but the band's strides need a contiguous buffer.
    padded = torch.where(left, per_offset[..., -1:], per_offset[..., :1]).contiguous()  # [.., n, n + num_relative − 1]
    _band(padded, num_relative).copy_(per_offset.flip(-1))
    return padded[..., highest : highest + n]


def collect_values(per_pair: Tensor, num_relative: int, highest: int) -> Tensor:
    """Sum the pairs of each offset, `[.., n, n]` → `[.., n, num_relative]`: the adjoint of `spread_values`."""
    n = per_pair.shape[-1]
    padded = per_pair.new_zeros(*per_pair.shape[:-1], n + num_relative - 1)
    padded[..., highest : highest + n] = per_pair
    per_offset = _band(padded, num_relative).flip(-1)
    left = _left_of_band(n, num_relative, per_pair.device)
    dtype = torch.promote_types(per_pair.dtype, torch.float32)  # `after` is a difference, so it needs precision
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
    """Spread `[.., n, num_relative]` to `[.., n, n]`: entry (i, j) is column clip(i − j, lowest, highest) − lowest."""
    assert lowest <= 0 <= highest, f"offset 0 needs a row of its own, got {lowest} … {highest}"
    assert per_offset.shape[-1] == highest - lowest + 1, (per_offset.shape, lowest, highest)
    return _Spread.apply(per_offset, highest)
