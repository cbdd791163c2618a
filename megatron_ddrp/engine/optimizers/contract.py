"""Contract of an optimizer: one class that says what it keeps of each parameter.

    class Lion(Optimizer):
        moments = ("exp_avg",)
        options = {"beta1": Number(0.9, "[0, 1)"), "beta2": Number(0.99, "[0, 1)")}
        def __init__(self, groups, lr, beta1, beta2): …
        def update(self): …

Checkpoints in every layout, ZeRO's shards, the estimate of memory and `--dry-run` follow from `moments`. At ZeRO 1 to 3
DeepSpeed gives an optimizer flat fp32 parts of parameters in place of the parameters. That is right for a rule that
acts on each element alone; any other one has `zero_stages = (0,)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from megatron_ddrp.config import Config, Number
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.sharding import local_parameters

Groups = list[dict[str, Any]]
"""Groups of parameters, `params`, each with its `weight_decay`: those that decay, and the others."""


class Optimizer(torch.optim.Optimizer):
    """Base of optimizers."""

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
        if self.skips_on_device or not float(getattr(self, "found_inf", 0.0)):
            self.update()

    def update(self) -> None:
        """Update all parameters that have a gradient, without recording for autograd. Each optimizer has its own."""
        raise NotImplementedError(f"{type(self).__name__} has no update()")
