"""Sums over tensor-parallel ranks: one for autograd (g of arXiv:1909.08053), and a plain one.

Its counterpart f, whose gradient is such a sum, is in `column_maps.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ddrp.parallel.process_group import Ranks


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:  # type: ignore[override]
        return all_reduced(x, ranks)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient, None


def sum_of_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Return x summed over the tensor-parallel ranks (g). All ranks use it alike, so each x has the sum's gradient."""
    return _SumOfRanks.apply(x, ranks)


def all_reduced(x: Tensor, ranks: Ranks, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return a new tensor outside of autograd: x summed, or its maximum, over the tensor-parallel ranks."""
    result = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, operation, group=ranks.tensor_group)
    return result
