"""Between relative offsets and pairs without a gather: `[.., n, num_relative]` ↔ `[.., n, n]`.

`spread(p, lowest, highest)[.., i, j] = p[.., i, clip(i − j, lowest, highest) − lowest]`. In a buffer whose rows are
`num_relative − 1` longer than n, the offsets of row i stand side by side and one row's band begins one place to the
right of the last row's: the band is a strided view, the two clipped bins are what is left and right of it. So spreading
is two writes and its adjoint, `collect`, one read and two sums; indexed gathers and scatters cost several times more.

Offsets are taken between *rows*. Within a document positions run 0, 1, …, so i − j of the rows is i − j of the
positions; pairs of two documents get a value that the attention mask then removes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _band(padded: Tensor, num_relative: int) -> Tensor:
    """View `[.., n, num_relative]` of a contiguous `[.., n, n + num_relative − 1]`, largest offset first."""
    *leading, n, width = padded.shape
    return padded.as_strided(
        (*leading, n, num_relative), (*padded.stride()[:-2], width + 1, 1), padded.storage_offset()
    )


def _left_of_band(n: int, num_relative: int, device: torch.device) -> Tensor:
    """bool `[n, n + num_relative − 1]`: columns before the band of their row."""
    column = torch.arange(n + num_relative - 1, device=device)
    return column < torch.arange(n, device=device)[:, None]


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
