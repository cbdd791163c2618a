"""Muon for the hidden matrices and AdamW for everything else, as one optimizer that DeepSpeed steps at ZeRO 0.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a weight matrix by the
nearest matrix with orthonormal rows or columns, nearly, by five steps of a Newton-Schulz iteration:

    B ← μB + (1 − μ)g      U = (1 − μ)g + μB      O = NewtonSchulz(U / ‖U‖)
    W ← W(1 − lr·λ) − lr·0.2·√max(rows, columns)·O

The factor gives the update the size of AdamW's, so that its learning rate and weight decay serve both (Moonlight, Liu
et al., arXiv:2502.16982). `torch.optim.Muon` does the arithmetic; it multiplies in bf16.

A matrix is what one linear map applies. Queries, keys and values are apart in our model; GEGLU's first map holds two,
of which each is orthogonalised on its own. Where tensor parallelism cuts a matrix, every rank gathers the whole one:
Newton-Schulz of a part is not the part of Newton-Schulz. All data-parallel ranks do the same work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_ddrp.config import Config, ModelConfig, OptimizerConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.positions import PositionEncoding
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.sharding import gather_whole, local_parameters, own_part

MOMENTUM = "momentum_buffer"
"""Name of Muon's state of a parameter, in checkpoints too."""


def hidden_matrices(model: nn.Module, config: ModelConfig) -> dict[str, int]:
    """Return the whole name of each weight that Muon takes, and how many matrices lie in it, one below the other.

    These are the weights of linear maps in the layers and of an encoding's projections. Embeddings, tables of
    positions, heads, norms, biases and learned factors are AdamW's.
    """
    names = {id(parameter): name for name, parameter in local_parameters(model).items()}
    homes = [module for module in model.modules() if isinstance(module, (EncoderLayer, PositionEncoding))]
    maps = [module for home in homes for module in home.modules() if isinstance(module, nn.Linear)]
    taken = [names[id(each.weight)] for each in maps if each.weight.requires_grad]
    return {name: 2 if config.ffn == "geglu" and name.endswith("feed_forward.input.weight") else 1 for name in taken}


class MuonBesideAdamW(torch.optim.Optimizer):
    """One optimizer of two: its first group is Muon's, the others are AdamW's own, with AdamW's state.

    The state of a matrix is its momentum, cut as the matrix is.
    """

    def __init__(
        self, adamw: torch.optim.Optimizer, module: nn.Module, config: OptimizerConfig, model: ModelConfig, ranks: Ranks
    ) -> None:
        """Take the hidden matrices of `module` out of the groups of `adamw`, which goes on with the rest."""
        refuse_old_torch()
        parameters, self.model, self.ranks = local_parameters(module), model, ranks
        self.matrices = {name: (parameters[name], count) for name, count in hidden_matrices(module, model).items()}
        weights = [parameter for parameter, _ in self.matrices.values()]
        taken = {id(parameter) for parameter in weights}
        for group in adamw.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]
        self.adamw = adamw
        own = {"params": weights, "lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__([own, *adamw.param_groups], {})
        self.own_group = self.param_groups[0]  # DeepSpeed drops it from the list where it is empty
        adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all parameters, or none where the gradients' norm is not finite (`GradientClipping`)."""
        assert closure is None, "DeepSpeed gives none"
        if getattr(self, "found_inf", None):
            return
        for name, (parameter, count) in self.matrices.items():
            if parameter.grad is not None:
                self._step_matrices(name, parameter, parameter.grad, count)
        self.adamw.step()

    def _step_matrices(self, name: str, parameter: nn.Parameter, gradient: Tensor, count: int) -> None:
        """Step the matrices that lie in a parameter; a collective call among tensor-parallel ranks."""
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        weights, gradients, momenta = (
            gather_whole(name, tensor, self.model, self.ranks).chunk(count)
            for tensor in (parameter.data, gradient, state[MOMENTUM])
        )
        muon = torch.optim.Muon(
            weights, self.own_group["lr"], self.own_group["weight_decay"], adjust_lr_fn="match_rms_adamw"
        )
        for weight, of_weight, momentum in zip(weights, gradients, momenta, strict=True):
            weight.grad, muon.state[weight][MOMENTUM] = of_weight, momentum
        muon.step()
        if self.ranks.tensor_size > 1:
            for tensor, pieces in ((parameter, weights), (state[MOMENTUM], momenta)):
                tensor.copy_(own_part(name, torch.cat(pieces), self.model, self.ranks))


def refuse_old_torch() -> None:
    """Raise `UserError` where torch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"--optimizer muon needs torch 2.9 or newer, this is {torch.__version__}: upgrade, or use adamw"
        )


def optimizer_remarks(model: nn.Module, config: Config) -> tuple[str, ...]:
    """Return a line on what Muon takes of a whole model; nothing under `--optimizer adamw`."""
    if config.optimizer.optimizer != "muon":
        return ()
    parameters, matrices = local_parameters(model), hidden_matrices(model, config.model)
    kinds: Counter[str] = Counter()
    for name, count in matrices.items():
        kinds[".".join(word for word in name.split(".")[:-1] if not word.isdigit())] += count
    size = sum(parameters[name].numel() for name in matrices)
    taken = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    return (
        f"optimizer: muon for {sum(matrices.values()):,} matrices with {size:,} parameters ({taken}), adamw for the "
        f"other {len(parameters) - len(matrices):,} tensors",
    )
