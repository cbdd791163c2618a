"""How far the gradients that engines step with are from the exact sums of what their backward passes gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.engine.build import build_engine
from megatron_ddrp.engine.inputs import training_inputs
from megatron_ddrp.engine.step import train_step
from megatron_ddrp.model import build_model
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid, sum_over_ranks
from megatron_ddrp.parallel.sharding import local_parameters
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
    ranks = place_in_grid(torch.device("cpu"), config.parallel)
    corpus = Corpus.open(config)
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    loader = corpus.loader("train", ranks.data_rank, ranks.data_size)
    torch.manual_seed(0)
    model = build_model(config.model, objective=config.objective)
    engine = build_engine(model, config, ranks, loader.num_micro_batches)
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
