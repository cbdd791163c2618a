"""Memory that attention on CPUs keeps from call to call."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`left @ rightᵀ`, `[g, t, d]`, `[g, n, d]` → `out` `[g, t, n]`, which may be of a wider type."""
    if left.dtype == out.dtype:
        return torch.bmm(left, right.transpose(1, 2), out=out)
    return out.copy_(torch.bmm(left, right.transpose(1, 2)))


class Scratch(threading.local):
    """Memory kept from call to call, by purpose: page faults on a fresh tile cost more than the product it holds."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype, margin: int = 0) -> Tensor:
        """Contiguous and uninitialised, between two margins of zeros; valid until the purpose is taken again."""
        size = math.prod(shape)
        buffer = self.buffers.get((purpose, dtype))
        if buffer is None or len(buffer) < size + 2 * margin:
            with torch.inference_mode(False):  # a tensor made in inference mode could serve no training later
                buffer = self.buffers[purpose, dtype] = torch.empty(size + 2 * margin, dtype=dtype)
        buffer[:margin] = 0
        buffer[margin + size : 2 * margin + size] = 0
        return buffer[margin : margin + size].view(shape)

    def product(self, purpose: str, left: Tensor, right: Tensor, margin: int = 0) -> Tensor:
        """`left @ rightᵀ`, `[g, t, d]`, `[g, n, d]` → `[g, t, n]`, in fp32 at least; see `take`."""
        wide = torch.promote_types(left.dtype, torch.float32)
        into = self.take(purpose, (len(left), left.shape[1], right.shape[1]), wide, margin)
        return product(left, right, into)


scratch = Scratch()
