"""Proof of a run's first gradients: DeepSpeed steps with the sums of what the backward passes gave.

Versions of DeepSpeed have lost micro-batches, ranks or precision on the way from the backward passes to the optimizer,
without a word. So the first step of a run, and of a resumed one, adds up the gradients of a few parameters once more,
one of each kind, by hooks and in fp32. Just before the optimizer steps, after DeepSpeed has accumulated and reduced and
before anyone clips, each rank compares its sums with what DeepSpeed is about to step with. Later steps have no trace
of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ddrp.config import Config
from megatron_ddrp.engine.deepspeed_file import LOWEST_DEEPSPEED, deepspeed_version
from megatron_ddrp.engine.optimizer_state import whole_shape
from megatron_ddrp.errors import shared_error
from megatron_ddrp.parallel.agreement import gather_objects
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks
from megatron_ddrp.parallel.sharding import local_parameters

KINDS = ("generator", "position", "embeddings.absolute", "norm", "embeddings.token", "bias", "attention")
"""Parts of names; a parameter is of the first kind whose word its name has."""

SAMPLE = 1024
"""About the number of elements that are compared of each parameter, spread evenly over it."""

SAID = 1e-3
"""Relative error above which a run says what its low precision costs."""


class GradientProof:
    """Comparison of the engine's first gradients with sums of our own; it ends by itself after the first finite step.

    On a failure, `engine` raises the same `UserError` on all ranks in the place of its step.
    """

    def __init__(self, engine: Any, config: Config, ranks: Ranks, say: Callable[[str], None]) -> None:
        """Begin; `say` gets the line of a run whose gradients are summed in a low precision, as it asked for."""
        self.engine, self.config, self.ranks, self.say = engine, config, ranks, say
        self.parameters = chosen(engine.module)
        sizes = [len(sampled(torch.empty(whole_shape(p), device="meta"))) + 1 for p in self.parameters.values()]
        self.flat = torch.zeros(sum(sizes), device=ranks.device)
        self.sums = dict(zip(self.parameters, self.flat.split(sizes), strict=True))
        """Name → sum of the sampled gradient and, in the last place, the sum of its norms."""
        self.hooks = [p.register_hook(partial(self._add, self.sums[name])) for name, p in self.parameters.items()]
        self.take_step = engine._take_model_step
        engine._take_model_step = self._prove_and_step

    @staticmethod
    def _add(total: Tensor, gradient: Tensor) -> None:
        sample = sampled(gradient.detach()).float()
        total[:-1] += sample
        total[-1] += sample.norm()

    def _prove_and_step(self, *arguments: Any, **named: Any) -> Any:
        if self._is_proved():
            for hook in self.hooks:
                hook.remove()
            self.engine._take_model_step = self.take_step
        taken = self.take_step(*arguments, **named)
        self.flat.zero_()  # after the step, in which a replay may run the hooks once more
        return taken

    def _is_proved(self) -> bool:
        """Return False if the gradients are not finite, so that the step will be skipped; a collective call."""
        compared = self._compare()
        all_found = gather_objects(compared)
        if not all(math.isfinite(error) for found in all_found for _, error, _ in found):
            return False
        off = [(error / allowed, error, name) for found in all_found for name, error, allowed in found]
        excess, error, name = max(off)
        precision = self.config.training.precision
        if excess > 1:
            shape, parallel = self.ranks, self.config.parallel
            raise shared_error(
                f"DeepSpeed {deepspeed_version()} is about to step with wrong gradients: that of {name} is off by "
                f"{error:.2g} of its size from the sum over {self.num_micro_batches} micro-batches (ZeRO "
                f"{parallel.zero_stage}, {precision}, {shape.tensor_size} tensor x {shape.pipeline_size} pipeline x "
                f"{shape.data_size} data ranks); pip install 'deepspeed>={LOWEST_DEEPSPEED}', or give another layout "
                "(--no-gradient-proof trains on with them)"
            )
        summed, reduced = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        reduced = "few bits" if self.engine.zero_quantized_gradients() else reduced
        worst = max(error for _, error, _ in off)
        if worst > SAID and {summed, reduced} != {"float32"}:
            self.say(
                f"gradients are added up in {summed} and reduced in {reduced}: those of the first step are off by "
                f"{worst:.1%}"
            )
        return True

    @property
    def num_micro_batches(self) -> int:
        return self.engine.gradient_accumulation_steps()

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Precisions in which the engine was asked to add up and to reduce gradients."""
        return self.engine.get_data_types()[1], self.engine.communication_data_type

    def _compare(self) -> list[tuple[str, float, float]]:
        """Return (name, relative error, its bound) of each parameter; a collective call.

        The error is ‖g − Σ‖ ÷ ‖Σ‖; of a gradient of 0 it is 0, or 1 for one that DeepSpeed gives another value.
        """
        from deepspeed.utils import safe_get_full_grad

        if self.ranks.data_size > 1:
            sum_over_ranks(self.flat, self.ranks.data_group)
        self.flat /= self.ranks.data_size
        if self.ranks.pipeline_size > 1:
            self._add_other_stages()
        numbers = []
        for name, parameter in self.parameters.items():
            taken, (*_, total), exact = safe_get_full_grad(parameter), self.sums[name], self.sums[name][:-1]
            taken = torch.zeros_like(exact) if taken is None else sampled(taken).to(exact)
            numbers.append(torch.stack([(taken - exact).norm(), exact.norm(), total]))
        compared = []
        for (name, sums), (difference, size, total) in zip(
            self.sums.items(), torch.stack(numbers).tolist(), strict=True
        ):
            bound = self.bound(total, len(sums) - 1)
            error, allowed = (difference / size, bound / size) if size else (float(difference > bound), 0.5)
            compared.append((name, error, allowed))
        return compared

    def bound(self, total: float, size: int) -> float:
        """Return the largest ‖g − Σ‖ that rounding explains, from Σ‖g_i‖ = `total` over gradients of `size` elements.

        A sum of n numbers in a precision with unit roundoff u is off by at most (n − 1)·u·Σ|x_i| to first order
        (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), in whatever order it is taken. The engine
        adds up N micro-batches in one precision, then, in another, R data ranks with up to three roundings more: the
        conversion, the division by R, and a second stage's share of tied weights. Our own sum has N + R summands in
        fp32. Below the smallest normal number, a rounding is off by up to half of the smallest subnormal one instead.
        Quantized gradients have no such bound.
        """
        if self.engine.zero_quantized_gradients():
            return math.inf
        summed, reduced = map(torch.finfo, self.dtypes)
        micro_batches, ranks = self.num_micro_batches, self.ranks.data_size + 3
        ours = (micro_batches + ranks) * torch.finfo(torch.float32).eps
        relative = (micro_batches * summed.eps + ranks * reduced.eps + ours) / 2
        smallest = micro_batches * summed.tiny * summed.eps + ranks * reduced.tiny * reduced.eps
        return relative * total + smallest / 2 * size**0.5

    def _add_other_stages(self) -> None:
        """Add the sums of other stages of this pipeline, which hold the same tied weights; a collective call."""
        place = (self.ranks.tensor_rank, self.ranks.data_rank)
        own = {name: sums.cpu() for name, sums in self.sums.items()}
        for rank, (there, theirs) in enumerate(gather_objects((place, own))):
            if there == place and rank != self.ranks.rank:
                for name in own.keys() & theirs.keys():
                    self.sums[name] += theirs[name].to(self.ranks.device)


def chosen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the smallest trained parameter of each kind by its name; no key bias, whose gradient is 0 in theory."""
    found: dict[str, tuple[int, str, nn.Parameter]] = {}
    for name, parameter in local_parameters(module).items():
        kind = next((kind for kind in KINDS if kind in name), None)
        size = torch.Size(whole_shape(parameter)).numel()
        if kind and parameter.requires_grad and not name.endswith("key.bias"):
            found[kind] = min(found.get(kind, (size, name, parameter)), (size, name, parameter), key=lambda one: one[0])
    return {name: parameter for _, name, parameter in found.values()}


def sampled(gradient: Tensor) -> Tensor:
    """Return some elements of a gradient, evenly spread; all of them if there are at most `SAMPLE`."""
    return gradient.reshape(-1)[:: max(1, gradient.numel() // SAMPLE)]
