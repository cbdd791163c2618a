"""Masked LM's loss of half-precision logits on GPUs, in Triton: no logit is copied to fp32.

    loss = Σ_t lse_t − x_t[label_t],  lse_t = log Σ_v exp x_t[v]
    its gradient:  ∂loss/∂x_t[v] = exp(x_t[v] − lse_t) − [v = label_t]

The forward pass reads the logits once and keeps lse. The backward pass reads them once more and writes the gradient: 6
bytes per logit, where torch's conversion, cross entropy and their gradients move 30. Sums are taken in fp32 and in a
fixed order. Each program serves one token.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.attention.gpu.triton_attention import launch

IGNORED: tl.constexpr = tl.constexpr(IGNORED_LABEL)
OPTIONS = {"BLOCK_N": 4096, "num_warps": 8, "num_stages": 2}
"""Pieces per iteration, and the options of a launch."""


@triton.jit
def load_pieces(logits, pieces, places):
    """Return the logits of some pieces in fp32, −inf beyond the last piece."""
    return tl.load(logits + places, mask=places < pieces, other=float("-inf")).to(tl.float32)


@triton.jit
def loss_kernel(logits, labels, losses, lse, pieces, BLOCK_N: tl.constexpr):
    """Write a token's loss, 0 if its label is ignored and NaN if no piece has it, and its log-sum-exp."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * pieces
    largest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, pieces, BLOCK_N):
        x = load_pieces(logits, pieces, first + tl.arange(0, BLOCK_N))
        new_largest = tl.maximum(largest, x)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = new_largest
    top = tl.max(largest, 0)
    of_token = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    label = tl.load(labels + token)
    own = tl.load(logits + label, mask=(label >= 0) & (label < pieces), other=float("nan")).to(tl.float32)
    tl.store(lse + token, of_token)
    tl.store(losses + token, tl.where(label == IGNORED, 0.0, of_token - own))


@triton.jit
def loss_gradient_kernel(logits, labels, lse, d_loss, d_logits, pieces, BLOCK_N: tl.constexpr):
    """Write the gradient of a token's logits; it is 0 if the token's label is ignored."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * pieces
    d_logits += token * pieces
    of_token, label = tl.load(lse + token), tl.load(labels + token)
    factor = tl.where(label == IGNORED, 0.0, tl.load(d_loss))
    for first in range(0, pieces, BLOCK_N):
        places = first + tl.arange(0, BLOCK_N)
        gradient = tl.exp(load_pieces(logits, pieces, places) - of_token) - tl.where(places == label, 1.0, 0.0)
        tl.store(d_logits + places, (gradient * factor).to(d_logits.dtype.element_ty), mask=places < pieces)


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits, (tokens, pieces) = logits.contiguous(), logits.shape
        losses, lse = (logits.new_empty(tokens, dtype=torch.float32) for _ in range(2))
        launch(loss_kernel, tokens, (logits, labels, losses, lse, pieces), OPTIONS)
        ctx.save_for_backward(logits, labels, lse)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor):  # type: ignore[override]
        logits, labels, lse = ctx.saved_tensors
        d_logits = torch.empty_like(logits)
        launch(loss_gradient_kernel, len(logits), (logits, labels, lse, d_loss, d_logits, logits.shape[1]), OPTIONS)
        return d_logits, None


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of −log p(label), an fp32 scalar: `logits` `[n, pieces]`, `labels` int64 `[n]`."""
    return _SumOfLosses.apply(logits, labels.contiguous())
