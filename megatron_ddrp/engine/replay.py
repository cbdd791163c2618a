"""Replay of a step's first micro-batch, compared bit for bit: a rank that computes wrong is found.

A step with a replay runs as any other, while hooks add up the bits of the loss and of each parameter's gradient in its
first micro-batch. Just before the optimizer steps, each rank computes this micro-batch again with the same draws, and
its gradients go nowhere. A part of a pipeline starts from what it received the first time, the input from one side and
the gradient from the other. So parts do not inherit each other's faults, and all of them replay at once.

One exchange then tells all ranks of all differences. If any rank's sums differ, all ranks drop the step. The exchange
also compares the bits of weights between ranks that hold the same ones; no dropped step repairs those, so the run ends.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.config import Config
from megatron_ddrp.engine.layout import pipeline_part
from megatron_ddrp.engine.optimizer_state import whole_shape
from megatron_ddrp.engine.step import seed_dropout
from megatron_ddrp.errors import shared_error
from megatron_ddrp.model.stages import Output
from megatron_ddrp.parallel.agreement import gather_objects
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.sharding import local_parameters

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → integers with the same bits."""

Sums = dict[str, Tensor]
"""Sum of the bits of each result of one pass, by name, in the order in which they were computed."""


class Replay:
    """Context of one step with a replay. On an unrepairable difference the step raises the same error on all ranks.

    Attributes:
        fault: the ranks whose two passes differ and the first sum that does, or "". The step was then dropped.
    """

    def __init__(self, engine: Any, config: Config, ranks: Ranks, step: int) -> None:
        self.engine, self.config, self.ranks, self.step = engine, config, ranks, step
        self.part = pipeline_part(engine) if ranks.pipeline_size > 1 else None
        self.module = engine.module if self.part is None else self.part
        self.trained = {name: p for name, p in local_parameters(engine.module).items() if p.requires_grad}
        self.fault, self.passes, self.number = "", [Sums(), Sums()], 0
        self.hooks: list[Any] = []
        self.sums: Sums | None = self.passes[0]

    def __enter__(self) -> Replay:
        self.hooks.append(self.module.register_forward_hook(self._look))
        for name, parameter in self.trained.items():
            self.hooks.append(parameter.register_hook(partial(self._add, f"gradient of {name}")))
        self.engine.optimizer.step = self._compare_and_step
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        vars(self.engine.optimizer).pop("step", None)

    def _look(self, module: Any, given: tuple[Any, ...], output: Any) -> None:
        """Keep the first micro-batch's input and its output's gradient; the second one's gradient ends its pass."""
        number, self.number = self.number, self.number + 1
        if number > 1:
            return
        root = _root(output)
        keep = self._keep_gradient if number == 0 else self._end_pass
        node: Any = root.grad_fn  # its hooks run after the tensor's, with which DeepSpeed may scale the gradient
        self.hooks.append(node.register_prehook(partial(keep, root.output_nr)))
        if number == 0:
            self.given = given
            self.header: Any = None if self.part is None else self.part.courier.header
            self._note(root, given)

    def _keep_gradient(self, place: int, gradients: tuple[Tensor, ...]) -> None:
        self.gradient = gradients[place].clone()

    def _end_pass(self, *_: Any) -> None:
        self.sums = None

    def _note(self, root: Tensor, given: tuple[Any, ...]) -> None:
        """Add up the output's bits now and, in a later part of a pipeline, those of the input's gradient later."""
        self._add("loss" if self.part is None or self.part.last else "output", root)
        for floats in _learned(given):
            self.hooks.append(floats.register_hook(partial(self._add, "gradient of the input")))

    def _add(self, name: str, tensor: Tensor) -> Tensor | None:
        """Add up the bits of a result; in the replay, replace a gradient by one that needs no memory."""
        if self.sums is None:
            return None
        self.sums[name] = bit_sum(tensor)
        return tensor.new_zeros(()).expand_as(tensor) if self.sums is self.passes[1] else None

    def _compare_and_step(self, *arguments: Any, **named: Any) -> Any:
        vars(self.engine.optimizer).pop("step")
        self._repeat()
        first, second = map(_read, self.passes)
        differing = next((name for name in first | second if first.get(name) != second.get(name)), None)
        told = gather_objects((socket.gethostname(), differing, self._weights()))
        interval = self.config.training.replay_interval or 1
        refuse_other_weights([(host, weights) for host, _, weights in told], max(0, self.step - interval - 1))
        self.fault = "; ".join(
            f"the {name} of rank {rank} (host {host}) differs when computed again"
            for rank, (host, name, _) in enumerate(told)
            if name is not None
        )
        if self.fault:
            self._spoil_gradients()
        return self.engine.optimizer.step(*arguments, **named)

    def _repeat(self) -> None:
        """Run the first micro-batch again, forward and backward, with the same draws; nothing but sums remains."""
        self.hooks.pop(0).remove()  # `_look`
        self.sums = self.passes[1]
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        with torch.enable_grad(), torch.random.fork_rng(devices):
            if self.part is None:
                seed_dropout(self.config.training.seed, self.step, 0, self.ranks)
                given = self.given
                root = _root(self.module(*given))
            else:
                given = (tuple(x.detach().requires_grad_(x.requires_grad) for x in self.given[0]),)
                root = _root(self.part.again(*given, self.header))
            self._note(root, given)
            torch.autograd.grad(root, [*self.trained.values(), *_learned(given)], self.gradient, allow_unused=True)
        self.sums = None

    def _weights(self) -> dict[str, int]:
        """Return the sum of the bits of each weight that other ranks may hold too; ZeRO 3 holds each part once."""
        if self.ranks.world_size == 1 or self.engine.zero_optimization_stage() == 3:
            return {}
        place, named = f" (part {self.ranks.tensor_rank})", local_parameters(self.engine.module)
        cut = {name: getattr(p, "tensor_model_parallel", False) for name, p in named.items()}
        return _read({name + place * cut[name]: bit_sum(p) for name, p in named.items()})

    def _spoil_gradients(self) -> None:
        """Make the gradients non-finite before the optimizer sees them, so that the step changes nothing."""
        from deepspeed.utils import safe_set_full_grad

        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad.fill_(math.nan)
                continue
            spoilt = torch.full(whole_shape(parameter), math.nan, device=self.ranks.device).flatten()
            if hasattr(parameter, "ds_tensor"):  # ZeRO 3 fills up the ranks' equal parts with zeros
                spoilt = F.pad(spoilt, (0, parameter.ds_tensor.ds_numel * self.ranks.data_size - len(spoilt)))
            safe_set_full_grad(parameter, spoilt)
        norms = getattr(self.engine.optimizer, "norm_for_param_grads", {})  # of offloaded gradients, taken in the pass
        norms.update(dict.fromkeys(norms, torch.tensor(math.nan)))


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements read as integers, an int64 scalar: any one changed bit changes it."""
    return tensor.detach().view(INTEGERS[tensor.dtype.itemsize]).sum(dtype=torch.int64)


def _read(sums: Sums) -> dict[str, int]:
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))


def _root(output: Any) -> Tensor:
    """Return the tensor at which the backward pass begins: the sums of losses, or what goes to the next part."""
    return output.sums if isinstance(output, Output) else output[0]


def _learned(given: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the floats of a part's input that receive a gradient; a whole model has none."""
    return (x for x in given[0] if isinstance(x, Tensor) and x.requires_grad)


def refuse_other_weights(told: list[tuple[str, dict[str, int]]], proved: int) -> None:
    """Raise `UserError` if ranks hold the same weight with other bits; `told` has each rank's host and bit sums.

    The ranks outside of a majority with equal sums are named, or all ranks if there is no majority. After step `proved`
    all weights were still equal.
    """
    for name in dict.fromkeys(name for _, weights in told for name in weights):
        holders = {rank: weights[name] for rank, (_, weights) in enumerate(told) if name in weights}
        sums = list(holders.values())
        if len(set(sums)) == 1:
            continue
        common = max(set(sums), key=sums.count)
        right = common if 2 * sums.count(common) > len(sums) else None
        named = [f"rank {rank} (host {told[rank][0]})" for rank, own in holders.items() if own != right]
        raise shared_error(
            f"{' and '.join(named)} hold{'s' * (len(named) == 1)} other bits of {name} than the ranks that share it: a "
            f"weight has changed by itself; write the name of a checkpoint of step {proved} or earlier into "
            "DIR/latest, resume, and leave out a host that is named again"
        )
