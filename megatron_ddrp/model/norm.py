"""The normalisation of every model here: LayerNorm, with or without a bias, or RMSNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool) -> Tensor:
    """Return LayerNorm(x) over the last dimension, or RMSNorm (Zhang and Sennrich, arXiv:1910.07467, eq. 4).

    RMSNorm divides by √(mean of squares + eps) and subtracts no mean.
    """
    if is_rms:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class Norm(nn.LayerNorm):
    """LayerNorm with or without a bias (`--bias`), or RMSNorm, which has none (`--norm`)."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        self.is_rms = config.norm == "rmsnorm"
        super().__init__(width, eps=config.layernorm_epsilon, bias=config.bias and not self.is_rms)

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, self.weight, self.bias, self.eps, self.is_rms)
