"""Random float64 tensors that need a gradient, and the comparison of two results in values and in gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor


def random(*shape: int) -> Tensor:
    """Return the next values of torch's own generator."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    """Return the first values of a generator of this seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def assert_same(
    fast: Tensor, slow: Tensor, inputs: Sequence[Tensor], atol: float = 1e-11, *, may_be_unused: bool = False
) -> None:
    """Equal values and equal gradients of a random weighted sum, for each of `inputs`."""
    torch.testing.assert_close(fast, slow, rtol=0, atol=atol)
    weight = torch.randn_like(slow)
    fast_gradients, slow_gradients = (
        torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True, materialize_grads=may_be_unused)
        for x in (fast, slow)
    )
    for got, expected in zip(fast_gradients, slow_gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=atol)
