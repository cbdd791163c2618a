"""Two proofs that a run computes what it should: of its first gradients, and of a micro-batch computed again."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.engine.layout import LOWEST_DEEPSPEED, Setup, deepspeed_version, pipeline_part
from megatron_ddrp.engine.optimizer_state import whole_shape
from megatron_ddrp.engine.step import seed_dropout
from megatron_ddrp.errors import shared_error
from megatron_ddrp.model.stages import ModelOutput
from megatron_ddrp.parallel.pipeline import local_parameters
from megatron_ddrp.parallel.process_group import gather_objects, sum_over_ranks

KINDS = ("generator", "position", "embeddings.absolute", "norm", "embeddings.token", "bias", "attention")
"""Parts of names; a parameter is of the first kind whose word its name has."""

SAMPLE = 1024
"""About the number of elements that are compared of each parameter, spread evenly over it."""

SAID = 1e-3
"""Relative error above which a run says what its low precision costs."""


class GradientProof:
    """Proof of the first gradients: DeepSpeed steps with the sums of what the backward passes gave.

    Versions of DeepSpeed have lost micro-batches, ranks or precision on the way from the backward passes to the
    optimizer, without a word. So the first step of a run, and of a resumed one, adds up the gradients of a few
    parameters once more, one of each kind, by hooks and in fp32. Just before the optimizer steps, after DeepSpeed has
    accumulated and reduced and before anyone clips, each rank compares its sums with what DeepSpeed is about to step
    with. The proof ends by itself after the first finite step; later steps have no trace of it.

    On a failure, `engine` raises the same `UserError` on all ranks in the place of its step.
    """

    def __init__(self, engine: Any, setup: Setup, say: Callable[[str], None]) -> None:
        """Begin; `say` gets the line of a run whose gradients are summed in a low precision, as it asked for."""
        self.engine, self.config, self.ranks, self.say = engine, setup.config, setup.ranks, say
        self.parameters = chosen(engine.module)
        sizes = [len(sampled(torch.empty(whole_shape(p), device="meta"))) + 1 for p in self.parameters.values()]
        self.flat = torch.zeros(sum(sizes), device=self.ranks.device)
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
        if not self.engine.resting and self._is_proved():  # in the first step in which the encoder learns
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


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → integers with the same bits."""

Sums = dict[str, Tensor]
"""Sum of the bits of each result of one pass, by name, in the order in which they were computed."""


class Replay:
    """Replay of a step's first micro-batch, compared bit for bit: a rank that computes wrong is found.

    The step runs as any other, while hooks add up the bits of the loss and of each parameter's gradient in its first
    micro-batch. Just before the optimizer steps, each rank computes this micro-batch again with the same draws, and its
    gradients go nowhere. A part of a pipeline starts from what it received the first time, the input from one side and
    the gradient from the other. So parts do not inherit each other's faults, and all of them replay at once.

    One exchange then tells all ranks of all differences. If any rank's sums differ, all ranks drop the step. The
    exchange also compares the bits of weights between ranks that hold the same ones; no dropped step repairs those, so
    the run ends with the same error on all ranks.

    Attributes:
        fault: the ranks whose two passes differ and the first sum that does, or "". The step was then dropped.
    """

    def __init__(self, engine: Any, setup: Setup, step: int) -> None:
        self.engine, self.config, self.ranks, self.step = engine, setup.config, setup.ranks, step
        self.part = pipeline_part(engine) if self.ranks.pipeline_size > 1 else None
        self.module = engine.module if self.part is None else self.part
        self.trained = {name: p for name, p in local_parameters(engine.module).items() if p.requires_grad}
        self.fault, self.passes, self.number = "", [Sums(), Sums()], 0
        self.hooks: list[Any] = []
        self.sums: Sums | None = self.passes[0]

    def __enter__(self) -> Replay:
        self.hooks.append(self.module.register_forward_hook(self._look))
        for name, parameter in self.trained.items():
            self.hooks.append(parameter.register_hook(partial(self._add, f"gradient of {name}")))
        optimizer = self.engine.optimizer
        self.take_step, self.own_step = optimizer.step, vars(optimizer).get("step")  # `build.grow_scale_after_steps`
        optimizer.step = self._compare_and_step
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        vars(self.engine.optimizer).pop("step")
        if self.own_step is not None:
            self.engine.optimizer.step = self.own_step

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
        return self.take_step(*arguments, **named)

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
    return output.sums if isinstance(output, ModelOutput) else output[0]


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
