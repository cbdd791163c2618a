"""Measure how far the gradients that engines step with are from the exact sums of their backward passes' gradients, and
collect what a run says of engines whose gradients were changed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.loader import BatchLoader
from megatron_ddrp.engine.build import build_engine
from megatron_ddrp.engine.proofs import GradientProof
from megatron_ddrp.engine.step import train_step, training_inputs
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model
from megatron_ddrp.parallel.pipeline import local_parameters
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid, sum_over_ranks
from tests.integration.launch import TIMEOUT
from tests.integration.training_runs import forget_layout, run_ranks


def errors_by(world_size: int, command_lines: list[list[str]]) -> list[list[float]]:
    """For each `pretrain_bert.py ARGUMENTS`, the relative error of the first step's gradients on each rank."""
    by_rank = run_ranks(world_size, _first_steps, command_lines, TIMEOUT)
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def _first_steps(command_lines: list[list[str]], _: Path) -> list[float]:
    return [error_of_first_step(parse_arguments(words).config) for words in command_lines]


def error_of_first_step(config: Config) -> float:
    """Return ‖g − Σ‖ ÷ ‖Σ‖ over this rank's parameters; Σ adds up each micro-batch's gradient in float64."""
    engine, loader, config, ranks = _built(config)
    is_serial = type(engine.optimizer).__name__ == "BF16_Optimizer"
    assert is_serial == (ranks.pipeline_size > 1), "only a pipeline has the optimizer that overlaps nothing"
    parameters = local_parameters(engine.module)
    found: list[float] = []
    sums = {name: _exact_sum(parameter) for name, parameter in parameters.items()}
    take_step = engine._take_model_step

    def compare_first(*arguments: Any, **named: Any) -> Any:
        found.append(_relative_error(parameters, sums, ranks))
        return take_step(*arguments, **named)

    engine._take_model_step = compare_first
    train_step(engine, training_inputs(loader.step(0), config, 1, ranks.device), config, ranks, 1)
    engine.destroy()
    forget_layout()
    return found[0]


def _built(config: Config) -> tuple[Any, BatchLoader, Config, Ranks]:
    """Return the engine of this rank, its samples, the whole configuration and the place of the rank."""
    ranks = place_in_grid(torch.device("cpu"), config.parallel)
    corpus = Corpus.open(config)
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    loader = corpus.loader("train", ranks.data_rank, ranks.data_size)
    torch.manual_seed(0)
    model = build_model(config.model, objective=config.objective)
    return build_engine(model, config, ranks, loader.num_micro_batches), loader, config, ranks


class Proved(NamedTuple):
    """Words of a proof about a step, and about the next one, in which one gradient was changed."""

    lines: list[str]
    error: str
    compared: list[str]
    """Names of this rank's compared parameters."""


def proofs_by(world_size: int, runs: list[tuple[list[str], str]]) -> list[list[Proved]]:
    """For each run, `pretrain_bert.py ARGUMENTS` and the parameter to change, what each rank's proof says."""
    by_rank = run_ranks(world_size, _all_proofs, runs, TIMEOUT)
    return [[Proved(*proved) for proved in of_ranks] for of_ranks in zip(*by_rank, strict=True)]


def _all_proofs(runs: list[tuple[list[str], str]], _: Path) -> list[Proved]:
    return [_proofs(parse_arguments(words).config, changed) for words, changed in runs]


def _proofs(config: Config, changed: str) -> Proved:
    engine, loader, config, ranks = _built(config)
    inputs = training_inputs(loader.step(0), config, 1, ranks.device)
    parameters, lines = local_parameters(engine.module), []
    hooks = {name: len(parameter._backward_hooks or ()) for name, parameter in parameters.items()}
    proof = GradientProof(engine, config, ranks, lines.append)
    train_step(engine, inputs, config, ranks, 1)
    assert "_take_model_step" not in vars(engine) or engine._take_model_step == proof.take_step
    assert hooks == {name: len(parameter._backward_hooks or ()) for name, parameter in parameters.items()}
    GradientProof(engine, config, ranks, lines.append)
    seen: list[int] = []

    def lose_a_tenth(gradient: Tensor) -> Tensor:
        """Change the first micro-batch's gradient, as an engine might; the proof's own hook has run before."""
        seen.append(1)
        return gradient * 0.9 if len(seen) == 1 else gradient

    if changed in parameters and ranks.rank == ranks.world_size - 1:
        parameters[changed].register_hook(lose_a_tenth)
    error = ""
    try:
        train_step(engine, inputs, config, ranks, 2)
    except UserError as refusal:
        error = str(refusal) if refusal.agreed else ""
    engine.destroy()
    forget_layout()
    return Proved(lines, error, list(proof.parameters))


def _exact_sum(parameter: Tensor) -> Tensor:
    """Return a float64 tensor to which every gradient of a parameter is added from now on."""
    total = torch.zeros(getattr(parameter, "ds_shape", parameter.shape), dtype=torch.float64)

    def add(gradient: Tensor) -> None:
        total.add_(gradient.double())

    parameter.register_hook(add)
    return total


def _relative_error(parameters: dict[str, nn.Parameter], sums: dict[str, Tensor], ranks: Ranks) -> float:
    """Compare what DeepSpeed steps with; a pipeline adds other stages' gradients to a tied weight's."""
    from deepspeed.utils import safe_get_full_grad

    difference = size = 0.0
    for name, parameter in parameters.items():
        exact = sum_over_ranks(sums[name], ranks.data_group) / ranks.data_size
        taken = safe_get_full_grad(parameter)
        if ranks.pipeline_size == 1 or name != "embeddings.token.weight":
            difference += float((taken.double() - exact).pow(2).sum())
            size += float(exact.pow(2).sum())
    return (difference / size) ** 0.5
