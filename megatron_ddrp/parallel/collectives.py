"""Exchange between tensor-parallel ranks inside of autograd: f and g of arXiv:1909.08053, and linear maps with f.

g is a sum over the ranks (`sum_of_ranks`); f has such a sum as its gradient (`enter`). A linear map of which this rank
has some rows exchanges its gradient beside the weights' gradients:

    forward     x → whole rows (f, or an all-gather) → x Wᵢᵀ + bᵢ           for all maps i of one input
    backward    dx = Σᵢ gᵢ Wᵢ;  start to sum dx over the ranks;  dWᵢ = gᵢᵀ x, dbᵢ = Σ gᵢ;  wait for dx

Maps that share an input, such as query, key and value, are one node of the graph, so their dx is one tensor that is
exchanged once. On GPUs the exchange runs beside the products of dWᵢ, half of the backward pass's work in these maps.

Seeds of torch's random draws: dropout of a micro-batch, of a rank, of a fine-tuning step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.fused import gradient_of_input, gradients_of_parameters
from megatron_ddrp.parallel.process_group import Ranks


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:  # type: ignore[override]
        return all_reduce(x, ranks)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient, None


def sum_of_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Return x summed over the tensor-parallel ranks (g). All ranks use it alike, so each x has the sum's gradient."""
    return _SumOfRanks.apply(x, ranks)


def all_reduce(x: Tensor, ranks: Ranks, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return a new tensor outside of autograd: x summed, or its maximum, over the tensor-parallel ranks."""
    result = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, operation, group=ranks.tensor_group)
    return result


Wait = Callable[[], Tensor]
"""Function that waits for a running exchange and returns its result."""


class Entrance(NamedTuple):
    """Entry of a tensor into a region whose ranks use it differently, so that their gradients must be summed."""

    there: Callable[[Tensor], Tensor]
    """Function that returns the tensor for use on the ranks."""
    back: Callable[[Tensor], Wait]
    """Function that starts to sum that tensor's gradients into the original's gradient. May overwrite its argument."""


def replicated_entrance(ranks: Ranks) -> Entrance:
    """Return the entrance of a tensor that is equal on all tensor-parallel ranks (f in the paper)."""
    return Entrance(lambda x: x.view_as(x), partial(_start_sum, ranks=ranks))


def _start_sum(gradient: Tensor, ranks: Ranks) -> Wait:
    gradient = gradient.contiguous()
    work = dist.all_reduce(gradient, group=ranks.tensor_group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return gradient

    return wait


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, entrance: Entrance) -> Tensor:  # type: ignore[override]
        ctx.entrance = entrance
        return entrance.there(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return ctx.entrance.back(gradient.clone())(), None


class _ColumnMaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, entrance: Entrance, *weights_and_biases: Tensor):  # type: ignore[override]
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        entered = entrance.there(x)
        ctx.entrance, ctx.has_bias = entrance, [bias is not None for bias in biases]
        ctx.save_for_backward(entered, *weights)
        return tuple(F.linear(entered, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[override]
        entered, *weights = ctx.saved_tensors
        flat = [gradient.flatten(0, -2) for gradient in gradients]  # [tokens, out] each
        of_input = gradient_of_input(None, flat, weights)
        assert of_input is not None
        wait = ctx.entrance.back(of_input.view_as(entered))
        of_parameters = gradients_of_parameters(entered.flatten(0, -2), flat, ctx.has_bias)
        return wait(), None, *of_parameters


def enter(x: Tensor, entrance: Entrance) -> Tensor:
    """Return the tensor that the ranks use of `x`, for any use."""
    return _Enter.apply(x, entrance)


def column_map(x: Tensor, entrance: Entrance, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return this rank's part of a linear map's output; `x` `[.., in]`, `weight` `[out / tensor_size, in]`."""
    return _ColumnMaps.apply(x, entrance, weight, bias)[0]


def column_maps(x: Tensor, entrance: Entrance, maps: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Return this rank's part of the outputs of maps that share an input."""
    if any(hasattr(each.weight, "ds_id") for each in maps):  # ZeRO 3 gathers weights only for a module's own call
        entered = enter(x, entrance)
        return tuple(each(entered) for each in maps)
    return _ColumnMaps.apply(x, entrance, *(parameter for each in maps for parameter in (each.weight, each.bias)))


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed torch's draws on the CPU and on `device`, as `torch.manual_seed(seed)` does.

    `torch.manual_seed` seeds every kind of device that torch knows, and keeps a stack trace for each kind that this
    machine lacks. That takes a millisecond, enough time to compute a small layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
