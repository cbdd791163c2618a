"""Steps whose loss or gradients are not finite: skipped in every layout and explained; several in a row end the run.

DeepSpeed leaves parameters and optimizer unchanged if the global gradient norm is not finite. At ZeRO 0
`engine/layout.py` does the same, and it makes the gradients of a non-finite loss non-finite too. The norm is equal on
all ranks, so each of them skips. The step is then repeated with hooks on every tensor: a passing fault does not
return, any other is located. fp16's own overflows, which lower its loss scale, do not count.

Reading the norm waits for the GPU, so it is read after the next step was launched. A non-finite step is then repeated
after that next step: the two updates change places, and each uses gradients of weights that differ by one update from
those without the wait. No step is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.engine.optimizer_state import get_loss_scaler, set_loss_scaler
from megatron_ddrp.engine.proofs import Replay
from megatron_ddrp.engine.step import MicroBatch, StepResult, rest_or_learn, train_step
from megatron_ddrp.errors import shared_error
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.parallel.pipeline import local_parameters, whole_name
from megatron_ddrp.parallel.process_group import gather_objects


@dataclass(frozen=True)
class Launched:
    """A step that the device may still be computing."""

    micro_batches: list[MicroBatch]
    step: int
    scaler: dict[str, float] | None
    """State of fp16's loss scale before the step."""
    result: StepResult
    fault: str = ""
    """Difference that a replay found; the step was dropped."""


def reads_late(setup: Setup) -> bool:
    """Return whether a step's numbers are read after the next step was launched.

    It is false on CPUs, which compute in order; in fp16, whose next loss scale depends on these numbers; and with
    notes, which the next step reads.
    """
    config = setup.config
    return setup.ranks.device.type != "cpu" and not config.training.fp16 and not config.objective.notes


class FiniteSteps:
    """Training steps, with a count of those skipped in a row."""

    def __init__(
        self, engine: Any, setup: Setup, say: Callable[[str], None], notes: NoteDictionary | None = None
    ) -> None:
        self.engine, self.setup, self.say, self.notes = engine, setup, say, notes
        self.training, self.ranks = setup.config.training, setup.ranks
        self.skipped = 0

    def launch(self, micro_batches: list[MicroBatch], step: int) -> Launched:
        """Start a step; `finish` reads its numbers."""
        if self.training.new_head_iters:
            rest_or_learn(self.engine, step, self.training.new_head_iters)
        scaler, interval = get_loss_scaler(self.engine), self.training.replay_interval
        if interval is None or (step % interval and not self.skipped):
            return Launched(micro_batches, step, scaler, self._try(micro_batches, step))
        with Replay(self.engine, self.setup, step) as replay:
            result = self._try(micro_batches, step)
        return Launched(micro_batches, step, scaler, result, replay.fault)

    def finish(self, launched: Launched) -> StepResult:
        """Return the result of a step, which is repeated if it was not finite.

        Raise `UserError` after `--max-skipped-steps` skipped steps in a row.
        """
        step, result = launched.step, launched.result
        if launched.fault:
            set_loss_scaler(self.engine, launched.scaler)
            self._skip(step, launched.fault, "were computed wrong", "without the host that computes wrong")
        elif math.isfinite(result.grad_norm):
            self.skipped = 0
        elif not self._is_overflow(result, launched.scaler):
            set_loss_scaler(self.engine, launched.scaler)
            with Watch(self.engine.module) as watch:
                result = self._try(launched.micro_batches, step)
            where, rank = _first(gather_objects((watch.found, self.ranks.pipeline_rank, watch.looked)))
            if math.isfinite(result.grad_norm):
                self.say(f"step {step}: not finite, but finite when tried again: taken")
                self.skipped = 0
            else:
                cause = f"{where} on rank {rank} is the first that is not finite"
                self._skip(step, cause, "were not finite", "with a lower --lr or without the data of these steps")
        return result

    def _skip(self, step: int, cause: str, what: str, remedy: str) -> None:
        """Report a skipped step, and raise `UserError` after too many in a row."""
        self.skipped += 1
        self.say(f"step {step} skipped, parameters and optimizer unchanged: {cause}")
        if self.skipped >= self.training.max_skipped_steps:
            raise shared_error(
                f"{self.skipped} steps in a row {what}, the last of them step {step}: {cause}; resume from the last "
                f"checkpoint {remedy} (--max-skipped-steps)"
            )

    def _try(self, micro_batches: list[MicroBatch], step: int) -> StepResult:
        return train_step(self.engine, micro_batches, self.setup, step, self.notes)

    def _is_overflow(self, result: StepResult, scaler: dict[str, float] | None) -> bool:
        """Return whether fp16's loss scale was too large and can still be lowered."""
        if scaler is None or scaler["cur_scale"] <= self.engine.optimizer.loss_scaler.min_scale:
            return False
        return all(math.isfinite(loss) for loss in result.losses.values())


def _first(found: list[tuple[str | None, int, int]]) -> tuple[str, int]:
    """Return the first non-finite place and its rank, from each rank's (place, stage, finite tensors before it).

    Outputs come before gradients. Outputs pass from the first stage to the last, gradients from the last to the first.
    """
    order = []
    for rank, (where, stage, looked) in enumerate(found):
        if where:
            is_output = where.startswith("output")
            order.append((not is_output, stage if is_output else -stage, looked, rank, where))
    *_, rank, where = min(order, default=(0, "gradient norm"))  # type: ignore[type-var]
    return str(where), int(rank)


class Watch:
    """Hooks that find the first tensor of a pass that is not finite: an output of the forward pass, else a gradient.

    The hooks of an inner module run before those of the module around it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: str | None = None
        self.looked = 0
        """Number of finite tensors before the one found."""
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        for name, module in self.module.named_modules():
            known = whole_name(module)
            hook = self._output_hook((name if known is None else known) or "the model")
            self._hooks.append(module.register_forward_hook(hook))
        for name, parameter in local_parameters(self.module).items():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._gradient_hook(f"gradient of {name}")))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _output_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            for tensor in filter(Tensor.is_floating_point, tensors):
                self._look(tensor, f"output of {name}")
                if tensor.requires_grad:
                    self._hooks.append(tensor.register_hook(self._gradient_hook(f"gradient of the output of {name}")))

        return look

    def _gradient_hook(self, what: str) -> Callable[[Tensor], None]:
        return lambda gradient: self._look(gradient, what)

    def _look(self, tensor: Tensor, what: str) -> None:
        if self.found is not None:
            return
        if bool(tensor.detach().isfinite().all()):
            self.looked += 1
        else:
            self.found = what
