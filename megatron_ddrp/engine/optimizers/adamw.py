"""AdamW (Loshchilov and Hutter, arXiv:1711.05101): torch's fused one."""

from __future__ import annotations

import torch
from torch import nn

from megatron_ddrp.config import Config
from megatron_ddrp.engine.optimizers.contract import Groups, Optimizer
from megatron_ddrp.parallel.process_group import Ranks


class AdamW(Optimizer):
    """AdamW; its numbers have flags of their own."""

    moments = ("exp_avg", "exp_avg_sq")

    @classmethod
    def build(cls, groups: Groups, module: nn.Module, config: Config, ranks: Ranks) -> torch.optim.Optimizer:
        own = config.optimizer
        betas = (own.adam_beta1, own.adam_beta2)
        return torch.optim.AdamW(groups, lr=own.lr, betas=betas, eps=own.adam_eps, fused=True)
