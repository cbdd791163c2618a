"""Learning rates, the contract of an optimizer, AdamW and Muon.

The learning rate is a pure function of the step, so that a resumed run needs no scheduler state. A schedule is a
function `(step, warmup, last, config) -> share` of a step after the `warmup` steps: the remaining share of the peak's
height above `--min-lr`, usually from 1 to 0 at step `last`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_ddrp.config import Config, Number, OptimizerConfig
from megatron_ddrp.config.reading import as_number
from megatron_ddrp.config.registry import SCHEDULES
from megatron_ddrp.errors import shared_error
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.positions import PositionEncoding
from megatron_ddrp.parallel.pipeline import gather_whole, local_parameters, own_part, uncut_shape
from megatron_ddrp.parallel.process_group import Ranks, copy_from_data_rank

WSD_DECAY_SHARE = 0.1
"""Share of the steps after the warm-up in which warm-up–stable–decay decays, unless a number of steps is given."""


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step 1, 2, …, `total_steps`: linear warm-up to `lr`, then decay to `min_lr`.

    After step `decay_steps` + 1 the rate stays at `min_lr`, as in Megatron-LM, unless it is constant.
    """
    warmup, last = config.warmup_steps(total_steps), config.decay_steps(total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    if step - 1 > last and config.lr_decay_style != "constant":
        return config.min_lr
    given = SCHEDULES.find(config.lr_decay_style)(step, warmup, last, config)
    share = as_number(given)
    if share is None or not 0 <= share < math.inf:
        raise shared_error(
            f"--lr-decay-style {config.lr_decay_style} gave {given!r:.60} for step {step}: expected a share of at "
            "least 0"
        )
    return config.min_lr + (config.lr - config.min_lr) * share


def finished_share(step: int, warmup: int, last: int) -> float:
    """Return the share of the steps after the warm-up that are done before a step."""
    return min(1.0, (step - 1 - warmup) / max(1, last - warmup))


def linear(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    return 1 - finished_share(step, warmup, last)


def cosine(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    return 0.5 * (1 + math.cos(math.pi * finished_share(step, warmup, last)))


def constant(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    return 1.0


def inverse_square_root(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    return math.sqrt(max(1, warmup) / max(1, step - 1))


def wsd(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    left = (1 - finished_share(step, warmup, last)) / WSD_DECAY_SHARE
    if config.lr_wsd_decay_iters is not None:
        left = max(0, last + 1 - step) / config.lr_wsd_decay_iters
    left = min(1.0, left)
    return 1 - math.sqrt(1 - left) if config.lr_wsd_decay_style == "minus_sqrt" else left


Groups = list[dict[str, Any]]
"""Groups of parameters, `params`, each with its `weight_decay`: those that decay, and the others."""
OF_TABLES = "of_tables"
"""Key that marks the group of an encoding's tables in a run with a causal phase, in which they do not decay."""


class Optimizer(torch.optim.Optimizer):
    """Contract and base class of optimizers: one class that says what it keeps of each parameter.

        class Lion(Optimizer):
            moments = ("exp_avg",)
            options = {"beta1": Number(0.9, "[0, 1)"), "beta2": Number(0.99, "[0, 1)")}
            def __init__(self, groups, lr, beta1, beta2): …
            def update(self): …

    Checkpoints in every layout, ZeRO's shards, the estimate of memory and `--dry-run` follow from `moments`. At ZeRO 1
    to 3 DeepSpeed gives an optimizer flat fp32 parts of parameters in place of the parameters. That is right for a rule
    that acts on each element alone; any other one has `zero_stages = (0,)`.
    """

    moments: ClassVar[tuple[str, ...]]
    """Names of the tensors in a parameter's state, each of the parameter's shape and 0 before the first step. A number
    of steps under the name `step` is kept too, and nothing else."""
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    """Values of `--zero-stage` at which it works."""
    skips_on_device: ClassVar[bool] = False
    """True if `update` itself changes nothing where `found_inf` is not 0, so that the host need not wait."""
    options: ClassVar[Mapping[str, Number]] = MappingProxyType({})
    """Its own numbers by name, for `--optimizer-options`; the class is called with them."""

    @classmethod
    def build(cls, groups: Groups, module: nn.Module, config: Config, ranks: Ranks) -> torch.optim.Optimizer:
        """Return the optimizer of this rank's part of a model, `module`, whose trained parameters are in `groups`.

        Other classes of torch may be returned if their `step` does nothing where their attribute `found_inf` is not 0.
        """
        numbers: dict[str, Any] = config.optimizer.numbers(cls.options)
        return cls(groups, lr=config.optimizer.lr, **numbers)  # type: ignore[call-arg]

    @classmethod
    def moments_of(cls, module: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return name of each trained parameter of a model, or of a part of one → names of its moments."""
        return {name: cls.moments for name, held in local_parameters(module).items() if held.requires_grad}

    @classmethod
    def remarks(cls, module: nn.Module) -> tuple[str, ...]:
        """Return lines for the user about the optimizer of a whole model."""
        return ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters, or none if the gradients are not finite (`engine/layout.py`).

        The host waits for the device to know, unless `skips_on_device`.
        """
        assert closure is None, "DeepSpeed gives none"
        if self.skips_on_device or not float(vars(self).pop("found_inf", 0.0)):
            self.update()

    def __init_subclass__(cls) -> None:
        update: Any = cls.update
        if getattr(update, "hooked", False):  # a step of torch's, whose hooks would run twice
            cls.update = update.__wrapped__  # type: ignore[method-assign]

    def update(self) -> None:
        """Update all parameters that have a gradient, without recording for autograd. Each optimizer has its own."""
        raise shared_error(f"{type(self).__name__}, the class of --optimizer, has no update()")


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), torch's fused one; its numbers have flags of their own."""

    moments = ("exp_avg", "exp_avg_sq")

    @classmethod
    def build(cls, groups: Groups, module: nn.Module, config: Config, ranks: Ranks) -> torch.optim.Optimizer:
        own = config.optimizer
        betas = (own.adam_beta1, own.adam_beta2)
        return torch.optim.AdamW(groups, lr=own.lr, betas=betas, eps=own.adam_eps, fused=True)


MOMENTUM = "momentum_buffer"
"""Name of Muon's state of a parameter, also in checkpoints."""
MU = 0.95
A, B, C = 3.4445, -4.7750, 2.0315
"""Factors of a Newton-Schulz step, X ← aX + b(XXᵀ)X + c(XXᵀ)²X (Jordan's)."""
NEWTON_SCHULZ_STEPS = 5
EPSILON = 1e-7  # added to the norm, as in Jordan's released code; torch's own Muon takes the larger one
LARGEST_STACK = 2**25
"""Elements of the largest stack of matrices; but a stack has as many matrices as there are data-parallel ranks."""


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that Muon steps, by whole names: linear maps in the layers and projections of positions.

    AdamW steps embeddings, tables of positions, heads, norms, biases and learned factors.
    """
    homes = [module for module in model.modules() if isinstance(module, (EncoderLayer, PositionEncoding))]
    maps = [module for home in homes for module in home.modules() if isinstance(module, nn.Linear)]
    taken = {id(each.weight) for each in maps if each.weight.requires_grad}
    return {name: parameter for name, parameter in local_parameters(model).items() if id(parameter) in taken}


class Muon(Optimizer):
    """Muon for the hidden matrices and AdamW for everything else, as one optimizer that DeepSpeed steps at ZeRO 0.

    Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a weight matrix by
    approximately the nearest matrix with orthonormal rows or columns, in five steps of a Newton-Schulz iteration, with
    ε = 1e-7 as in the released code:

        B ← μB + (1 − μ)g      U = (1 − μ)g + μB      O = NewtonSchulz(U / (‖U‖ + ε))
        W ← W(1 − lr·λ) − lr·scale·√max(rows, columns)·O

    With the scale 0.2 the update has the size of AdamW's, so one learning rate and one weight decay serve both
    (Moonlight, Liu et al., arXiv:2502.16982); another scale gives the matrices a rate of their own. Newton-Schulz
    multiplies in bf16, as its author does; on CPUs only with `--bf16`, because many of them have no products in bf16.

    A matrix is the weight of one linear map: queries, keys and values are separate in our model, and so are GEGLU's two
    first maps. If tensor parallelism cuts a matrix, every rank gathers the whole U, because Newton-Schulz of a part is
    not the part of Newton-Schulz. Data-parallel ranks take turns: each computes O for its share of the matrices.
    Matrices of one shape are stepped as one stack, so a GPU gets few launches.

    The first group is Muon's; the others are AdamW's own, with AdamW's state. The state of a matrix is its momentum,
    cut like the matrix.
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
        self.encoding, self.ranks, self.matrices = config.model.encoding, ranks, hidden_matrices(module)
        self.found_inf = torch.zeros((), device=ranks.device)
        settings = config.optimizer
        scale = settings.numbers(self.options)["scale"]
        self.scales = {
            name: scale * math.sqrt(max(uncut_shape(name, parameter.shape, self.encoding, ranks)))
            for name, parameter in self.matrices.items()
        }
        self.multiplies_stacks = ranks.device.type == "cuda" and ranks.tensor_size == 1  # CPUs gain nothing by it
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
        begin = 0
        for alike in self._by_shape(stepped):
            most = max(self.ranks.data_size, LARGEST_STACK // self.matrices[alike[0]].numel())
            for first in range(0, len(alike), most):
                self._step_stack(alike[first : first + most], begin + first)
            begin += len(alike)
        self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.adamw.step()

    def _by_shape(self, names: list[str]) -> list[list[str]]:
        """Return the names of matrices in lists of one shape, of which every rank has the same part."""
        found: dict[Any, list[str]] = {}
        for name in names:
            shape = self.matrices[name].shape
            found.setdefault((shape, uncut_shape(name, shape, self.encoding, self.ranks)), []).append(name)
        return list(found.values())

    def _step_stack(self, names: list[str], begin: int) -> None:
        """Step some matrices of one shape, `[k, rows, columns]` in one stack; a collective call of all ranks.

        Data-parallel ranks take turns, matrix by matrix; the first of these is matrix `begin` of the step.
        """
        lr, skipped, turns = self.own_group["lr"], self.found_inf.bool(), self.ranks.data_size
        stack = self._directions(names, skipped)  # of all, because each rank keeps all momenta
        for owner in range(turns):
            share = slice((owner - begin) % turns, None, turns)
            if not names[share]:
                continue
            part = stack[share].contiguous()
            if owner == self.ranks.data_rank:
                part = self._orthonormal_parts(names[share], part)
            copy_from_data_rank(owner, part, self.ranks)
            stack[share] = part
        matrices: list[Tensor] = [self.matrices[name] for name in names]
        changes = stack.masked_fill_(skipped, 0).to(matrices[0].dtype).unbind()
        torch._foreach_mul_(matrices, torch.where(skipped, 1.0, 1 - lr * self.own_group["weight_decay"]))
        torch._foreach_add_(matrices, changes, alpha=-lr * self.scales[names[0]])

    def _directions(self, names: list[str], skipped: Tensor) -> Tensor:
        """Update the momenta of this rank's parts of matrices and return U for them, in the type of Newton-Schulz.

        In a skipped step a momentum takes the place of its gradient and so stays as it is.
        """
        for parameter in (self.matrices[name] for name in names):
            if MOMENTUM not in self.state[parameter]:
                self.state[parameter][MOMENTUM] = torch.zeros_like(parameter)
        momenta = [self.state[self.matrices[name]][MOMENTUM] for name in names]
        given = torch.stack([self.matrices[name].grad for name in names])  # type: ignore[misc]
        gradients = torch.where(skipped, torch.stack(momenta), given)
        torch._foreach_lerp_(momenta, gradients.unbind(), 1 - MU)
        return gradients.lerp(torch.stack(momenta), MU).to(self.dtype)

    def _orthonormal_parts(self, names: list[str], directions: Tensor) -> Tensor:
        """Return this rank's parts of O for matrices; a collective call among tensor-parallel ranks."""
        if self.multiplies_stacks:
            return orthonormal(directions)
        parts = []
        for name, direction in zip(names, directions, strict=True):
            whole = orthonormal(gather_whole(name, direction, self.encoding, self.ranks))
            parts.append(own_part(name, whole, self.encoding, self.ranks))
        return torch.stack(parts)

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


def orthonormal(matrices: Tensor) -> Tensor:
    """Return approximately the nearest matrices with orthonormal rows or columns, whichever are fewer (Newton-Schulz).

    `matrices` are `[rows, columns]` or a stack `[k, rows, columns]`.
    """
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    x = matrices.mT if (tall := matrices.shape[-2] > matrices.shape[-1]) else matrices  # the smaller Gram matrices
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + EPSILON)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x
