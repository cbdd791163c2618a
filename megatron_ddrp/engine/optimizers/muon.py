"""Muon for the hidden matrices and AdamW for everything else, as one optimizer that DeepSpeed steps at ZeRO 0.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a weight matrix by
approximately the nearest matrix with orthonormal rows or columns, in five steps of a Newton-Schulz iteration:

    B ← μB + (1 − μ)g      U = (1 − μ)g + μB      O = NewtonSchulz(U / ‖U‖)
    W ← W(1 − lr·λ) − lr·scale·√max(rows, columns)·O

With the scale 0.2 the update has the size of AdamW's, so one learning rate and one weight decay serve both (Moonlight,
Liu et al., arXiv:2502.16982); another scale gives the matrices a rate of their own. Newton-Schulz multiplies in bf16,
as its author does; on CPUs only with `--bf16`, because many of them have no products in bf16.

A matrix is the weight of one linear map: queries, keys and values are separate in our model, and so are GEGLU's two
first maps. If tensor parallelism cuts a matrix, every rank gathers the whole U, because Newton-Schulz of a part is not
the part of Newton-Schulz. Data-parallel ranks take turns: each computes O for its share of the matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron_ddrp.config import Config, Number
from megatron_ddrp.engine.optimizers.adamw import AdamW
from megatron_ddrp.engine.optimizers.contract import Groups, Optimizer
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.positions import PositionEncoding
from megatron_ddrp.parallel.process_group import Ranks, copy_from_data_rank
from megatron_ddrp.parallel.sharding import gather_whole, local_parameters, own_part, uncut_shape

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
    skips_on_device = True
    options = MappingProxyType({"scale": Number(0.2, "(0, 100]")})

    @classmethod
    def build(cls, groups: Groups, module: nn.Module, config: Config, ranks: Ranks) -> torch.optim.Optimizer:
        adamw = AdamW.build(groups, module, config, ranks)
        return cls(adamw, module, config, ranks)

    @classmethod
    def moments_of(cls, module: nn.Module) -> dict[str, tuple[str, ...]]:
        matrices = hidden_matrices(module)
        trained = super().moments_of(module)
        return {name: (MOMENTUM,) if name in matrices else AdamW.moments for name in trained}

    def __init__(self, adamw: torch.optim.Optimizer, module: nn.Module, config: Config, ranks: Ranks) -> None:
        """Move the hidden matrices of `module` from the groups of `adamw` to a group of Muon's."""
        self.encoding, self.ranks, self.matrices = config.model.position_encoding, ranks, hidden_matrices(module)
        self.found_inf = torch.zeros((), device=ranks.device)
        settings = config.optimizer
        scale = settings.numbers(self.options)["scale"]
        self.scales = {
            name: scale * math.sqrt(max(uncut_shape(name, parameter.shape, self.encoding, ranks)))
            for name, parameter in self.matrices.items()
        }
        self.dtype = torch.bfloat16 if config.training.bf16 or ranks.device.type == "cuda" else torch.float32
        taken = {id(parameter) for parameter in self.matrices.values()}
        for group in adamw.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]
        self.adamw = adamw
        own = {"params": list(self.matrices.values()), "lr": settings.lr, "weight_decay": settings.weight_decay}
        super().__init__([own, *adamw.param_groups], {})
        self.own_group = self.param_groups[0]  # DeepSpeed removes it from the list if it is empty
        adamw.state = self.state

    def update(self) -> None:
        """Update all parameters, or none if `found_inf` is 1: the device leaves them as they are."""
        stepped = [name for name, parameter in self.matrices.items() if parameter.grad is not None]
        stepped.sort(key=lambda name: self.matrices[name].shape)  # what one turn of all ranks computes costs the same
        for first in range(0, len(stepped), self.ranks.data_size):
            self._step_matrices(stepped[first : first + self.ranks.data_size])
        self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.adamw.step()

    def _step_matrices(self, names: list[str]) -> None:
        """Step the matrices of one turn, at most one for each data-parallel rank; a collective call of all ranks."""
        lr, skipped = self.own_group["lr"], self.found_inf.bool()
        kept = torch.where(skipped, 1.0, 1 - lr * self.own_group["weight_decay"])
        directions = [self._direction(name, skipped) for name in names]  # of all, because each rank keeps all momenta
        if self.ranks.data_rank < len(names):
            own = self.ranks.data_rank
            directions[own].copy_(self._orthonormal_part(names[own], directions[own]))
        for owner, (name, direction) in enumerate(zip(names, directions, strict=True)):
            copy_from_data_rank(owner, direction, self.ranks)
            self.matrices[name].mul_(kept).sub_(direction.masked_fill_(skipped, 0), alpha=lr * self.scales[name])

    def _direction(self, name: str, skipped: Tensor) -> Tensor:
        """Update the momentum of this rank's part of a matrix and return U for it, in the type of Newton-Schulz.

        In a skipped step the momentum takes the place of the gradient and so stays as it is.
        """
        parameter = self.matrices[name]
        state = self.state[parameter]
        assert parameter.grad is not None, "update() leaves out the others"
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        gradient = torch.where(skipped, state[MOMENTUM], parameter.grad)
        momentum = state[MOMENTUM].lerp_(gradient, 1 - MU)
        return gradient.lerp(momentum, MU).to(self.dtype)

    def _orthonormal_part(self, name: str, direction: Tensor) -> Tensor:
        """Return this rank's part of O for a matrix; a collective call among tensor-parallel ranks."""
        whole = gather_whole(name, direction, self.encoding, self.ranks)
        return own_part(name, orthonormal(whole), self.encoding, self.ranks)

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
    x = matrix.T if (tall := matrix.shape[0] > matrix.shape[1]) else matrix  # the smaller of the two Gram matrices
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x
