"""Muon for the hidden matrices and AdamW for everything else, as one optimizer that DeepSpeed steps at ZeRO 0.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a weight matrix by
approximately the nearest matrix with orthonormal rows or columns, in five steps of a Newton-Schulz iteration:

    B ← μB + (1 − μ)g      U = (1 − μ)g + μB      O = NewtonSchulz(U / ‖U‖)
    W ← W(1 − lr·λ) − lr·scale·√max(rows, columns)·O

With the scale 0.2 the update has the size of AdamW's, so one learning rate and one weight decay serve both (Moonlight,
Liu et al., arXiv:2502.16982); another scale gives the matrices a rate of their own. Newton-Schulz multiplies in bf16 on
GPUs, as its author does, and in fp32 on CPUs, many of which have no products in bf16.

A matrix is the weight of one linear map: queries, keys and values are separate in our model, and so are GEGLU's two
first maps. If tensor parallelism cuts a matrix, every rank gathers the whole one, because Newton-Schulz of a part is
not the part of Newton-Schulz. All data-parallel ranks do the same work.
"""

from __future__ import annotations

import math
from collections import Counter
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron_ddrp.config import Config, Number, OptimizerConfig
from megatron_ddrp.engine.optimizers.adamw import AdamW
from megatron_ddrp.engine.optimizers.contract import Groups, Optimizer
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.positions import PositionEncoding
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.sharding import gather_whole, local_parameters, own_part

MOMENTUM = "momentum_buffer"
"""Name of Muon's state of a parameter, also in checkpoints."""
MU = 0.95
A, B, C = 3.4445, -4.7750, 2.0315
"""Factors of a Newton-Schulz step, X ← aX + b(XXᵀ)X + c(XXᵀ)²X (Jordan's)."""
NEWTON_SCHULZ_STEPS = 5
SMALLEST_NORM = 1e-7


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that Muon steps, by whole names: linear maps in the layers and projections of positions.

    AdamW steps embeddings, tables of positions, heads, norms, biases and learned factors.
    """
    homes = [module for module in model.modules() if isinstance(module, (EncoderLayer, PositionEncoding))]
    maps = [module for home in homes for module in home.modules() if isinstance(module, nn.Linear)]
    taken = {id(each.weight) for each in maps if each.weight.requires_grad}
    return {name: parameter for name, parameter in local_parameters(model).items() if id(parameter) in taken}


class Muon(Optimizer):
    """Two optimizers as one: the first group is Muon's, the others are AdamW's own, with AdamW's state.

    The state of a matrix is its momentum, cut like the matrix.
    """

    moments = (*AdamW.moments, MOMENTUM)
    zero_stages = (0,)
    why_zero_stages = "Muon needs whole matrices, and ZeRO cuts them into flat parts"
    options = MappingProxyType({"scale": Number(0.2, "(0, 100]")})

    @classmethod
    def build(cls, groups: Groups, module: nn.Module, config: Config, ranks: Ranks) -> torch.optim.Optimizer:
        adamw = AdamW.build(groups, module, config, ranks)
        return cls(adamw, module, config.optimizer, config.model.position_encoding, ranks)

    @classmethod
    def moments_of(cls, module: nn.Module) -> dict[str, tuple[str, ...]]:
        matrices = hidden_matrices(module)
        trained = super().moments_of(module)
        return {name: (MOMENTUM,) if name in matrices else AdamW.moments for name in trained}

    def __init__(
        self, adamw: torch.optim.Optimizer, module: nn.Module, config: OptimizerConfig, encoding: str, ranks: Ranks
    ) -> None:
        """Move the hidden matrices of `module` from the groups of `adamw` to a group of Muon's."""
        self.encoding, self.ranks, self.matrices = encoding, ranks, hidden_matrices(module)
        self.scale = config.numbers(self.options)["scale"]
        taken = {id(parameter) for parameter in self.matrices.values()}
        for group in adamw.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]
        self.adamw = adamw
        own = {"params": list(self.matrices.values()), "lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__([own, *adamw.param_groups], {})
        self.own_group = self.param_groups[0]  # DeepSpeed removes it from the list if it is empty
        adamw.state = self.state

    def update(self) -> None:
        for name, parameter in self.matrices.items():
            if parameter.grad is not None:
                self._step_matrix(name, parameter, parameter.grad)
        self.adamw.step()

    def _step_matrix(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Step a matrix as a whole; a collective call among tensor-parallel ranks."""
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        weight, whole_gradient, momentum = (
            gather_whole(name, tensor, self.encoding, self.ranks)
            for tensor in (parameter.data, gradient, state[MOMENTUM])
        )
        momentum.lerp_(whole_gradient, 1 - MU)
        update = orthonormal(whole_gradient.lerp(momentum, MU))
        lr = self.own_group["lr"]
        weight.mul_(1 - lr * self.own_group["weight_decay"])
        weight.sub_(update, alpha=lr * self.scale * math.sqrt(max(weight.shape)))
        if self.ranks.tensor_size > 1:
            parameter.copy_(own_part(name, weight, self.encoding, self.ranks))
            state[MOMENTUM].copy_(own_part(name, momentum, self.encoding, self.ranks))

    @classmethod
    def remarks(cls, module: nn.Module) -> tuple[str, ...]:
        """Return a line that counts the matrices of a whole model that Muon steps."""
        matrices = hidden_matrices(module)
        kinds = Counter(".".join(word for word in name.split(".")[:-1] if not word.isdigit()) for name in matrices)
        size = sum(matrix.numel() for matrix in matrices.values())
        taken = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        return (
            f"optimizer: muon for {len(matrices):,} matrices with {size:,} parameters ({taken}), adamw for the other "
            f"{len(local_parameters(module)) - len(matrices):,} tensors",
        )


def orthonormal(matrix: Tensor) -> Tensor:
    """Return approximately the nearest matrix with orthonormal rows or columns, whichever are fewer (Newton-Schulz)."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    if tall := x.shape[0] > x.shape[1]:
        x = x.T  # the smaller of the two Gram matrices
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return (x.T if tall else x).to(matrix.dtype)
