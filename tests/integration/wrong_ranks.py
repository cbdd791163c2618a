"""Training in which one rank computes wrong once: a mantissa bit flips in an activation, a gradient or a weight."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.engine import nonfinite
from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel.pipeline import local_parameters, whole_name
from tests.integration.launch import TIMEOUT
from tests.integration.test_precision import allow_fp16_on_the_cpu
from tests.integration.training_runs import run_ranks, train_run

STEP = 2
"""Step in which the bit flips."""


class Fault(NamedTuple):
    """One flipped bit: what of (`activation`, `gradient` or a weight's name), on which rank, in which pass.

    Pass 0 is the training's, pass 1 the replay's. Later steps of `again` have the same fault.
    """

    kind: str
    rank: int
    number: int = 0
    again: int = 0


class Seen(NamedTuple):
    """Lines that a rank's run printed, its gradient norms, its error, and whether the faulty step kept the weights."""

    lines: list[str]
    norms: list[float]
    error: str
    kept: bool


def runs_with_faults(world_size: int, runs: list[tuple[list[str], Fault]]) -> list[list[Seen]]:
    """Return what each rank saw of each run, `pretrain_bert.py ARGUMENTS` and its fault."""
    by_rank = run_ranks(world_size, _train_all, runs, TIMEOUT)
    return [[Seen(*seen) for seen in of_ranks] for of_ranks in zip(*by_rank, strict=True)]


def _train_all(runs: list[tuple[list[str], Fault]], _: Path) -> list[Seen]:
    allow_fp16_on_the_cpu()
    return [_train(words, Fault(*fault)) for words, fault in runs]


def _train(words: list[str], fault: Fault) -> Seen:
    kept: list[bool] = []
    with (
        mock.patch.object(nonfinite, "train_step", faulty(fault, kept)),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        rows, error = [], ""
        try:
            rows = train_run(parse_arguments(words).config)
        except UserError as refusal:
            error = str(refusal) if refusal.agreed else ""
    return Seen(said.getvalue().splitlines(), [row["grad_norm"] for row in rows], error, kept[STEP - 1])


def faulty(fault: Fault, kept: list[bool]) -> Callable[..., Any]:
    """Return `train_step` with a fault; it notes in `kept` whether each step left this rank's weights as they were."""
    train_step = nonfinite.train_step

    def step_with_fault(engine: Any, micro_batches: Any, config: Any, ranks: Any, step: int, *others: Any) -> Any:
        hook: Any = contextlib.nullcontext()
        if STEP <= step <= STEP + fault.again and ranks.rank == fault.rank:
            hook = flipped(engine.module, fault)
        before = weights_of(engine.module)
        try:
            with hook:
                return train_step(engine, micro_batches, config, ranks, step, *others)
        finally:
            after = weights_of(engine.module)
            kept.append(all(torch.equal(after[name], weight) for name, weight in before.items()))

    return step_with_fault


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of this rank's weights, or of its parts of them."""
    return {name: getattr(p, "ds_tensor", p).detach().clone() for name, p in local_parameters(module).items()}


@contextlib.contextmanager
def flipped(module: nn.Module, fault: Fault) -> Any:
    """Flip the fault's bit within the context."""
    if fault.kind not in ("activation", "gradient"):
        flip(local_parameters(module)[fault.kind])
        yield
        return
    calls: list[int] = []

    def look(inner: nn.Module, given: Any, output: Tensor) -> None:
        calls.append(1)
        if len(calls) - 1 != fault.number:
            return
        if fault.kind == "activation":
            flip(output)
        else:
            output.register_hook(flip)

    named = {whole_name(inner): inner for inner in module.modules()}
    hook = named["layers.0.feed_forward.output"].register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()


def flip(tensor: Tensor) -> Tensor:
    """Flip the highest bit of the mantissa of a tensor's first number, in place, and return the tensor."""
    integers, bit = (torch.int32, 22) if tensor.dtype == torch.float32 else (torch.int16, 6)
    numbers = tensor.data.view(integers)
    numbers[(0,) * tensor.dim()] ^= 1 << bit
    return tensor


def start_wrong(fault: Fault) -> None:
    """Let this process's runs have a fault; for `before` of `start_ranks`."""
    nonfinite.train_step = faulty(fault, [])
