"""The two operators of tensor parallelism, each the other's gradient (f and g of arXiv:1909.08053), and plain sums."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ddrp.parallel.process_group import Ranks


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return all_reduced(gradient, ctx.ranks), None


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:  # type: ignore[override]
        return all_reduced(x, ranks)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient, None


def copy_to_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """f: x itself, used by each tensor-parallel rank in its own way; its gradient is the sum of theirs."""
    return _CopyToRanks.apply(x, ranks)


def sum_of_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """g: the sum of the tensor-parallel ranks' x, used by all of them alike, so that its gradient is that of each."""
    return _SumOfRanks.apply(x, ranks)


def all_reduced(x: Tensor, ranks: Ranks, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """A new tensor: x summed (or its largest) over the tensor-parallel ranks, outside of autograd."""
    result = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, operation, group=ranks.tensor_group)
    return result
