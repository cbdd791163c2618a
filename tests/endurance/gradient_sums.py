"""Errors of each layout's sums of bf16 gradients, in fp32 and in bf16: the table of docs/lab/agreement.md.

    python -m tests.endurance.gradient_sums

One step of 32 micro-batches on two ranks. A cell is the largest relative error over the ranks of the gradient that the
optimizer steps with, against the sum in float64 of the gradients that the backward passes gave.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ddrp.engine.step import train_step, training_inputs
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.parallel.pipeline import local_parameters
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks
from tests.endurance.layouts import make_corpus
from tests.integration.conftest import PIPELINE, TENSOR, TINY, command_line
from tests.integration.inside_engines import built
from tests.integration.launch import json_file
from tests.integration.test_gradients import IN_BF16, RUN
from tests.integration.training_runs import forget_layout, of_each_run

RANKS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "tensor 2, ZeRO 1": TENSOR | {"zero_stage": 1},
    "pipeline 2, ZeRO 1": PIPELINE | {"zero_stage": 1},
    "ZeRO 3": {"zero_stage": 3},
}
SUMS = {"in fp32": {}, "in fp32, reduced in bf16": {"communication_data_type": "bf16"}, "in bf16": IN_BF16}
"""Column → what a file of `--deepspeed_config` says."""


def error_of_first_step(words: list[str]) -> float:
    """Return ‖g − Σ‖ ÷ ‖Σ‖ over this rank's parameters in the first step of `pretrain_bert.py WORDS`; Σ adds up each
    micro-batch's gradient in float64."""
    engine, loader, setup = built(words)
    parameters, found = local_parameters(engine.module), list[float]()
    sums = {name: exact_sum(parameter) for name, parameter in parameters.items()}
    take_step = engine._take_model_step

    def compare_first(*arguments: Any, **named: Any) -> Any:
        found.append(relative_error(parameters, sums, setup.ranks))
        return take_step(*arguments, **named)

    engine._take_model_step = compare_first
    train_step(engine, training_inputs(loader.step(0), setup, 1), setup, 1)
    forget_layout(engine)
    return found[0]


def exact_sum(parameter: Tensor) -> Tensor:
    """Return a float64 tensor to which every gradient of a parameter is added from now on."""
    total = torch.zeros(getattr(parameter, "ds_shape", parameter.shape), dtype=torch.float64)

    def add(gradient: Tensor) -> None:
        total.add_(gradient.double())

    parameter.register_hook(add)
    return total


def relative_error(parameters: dict[str, nn.Parameter], sums: dict[str, Tensor], ranks: Ranks) -> float:
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


def main() -> None:
    """Print the table as Markdown."""
    cells: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        common = TINY | RUN | {"global_batch_size": 32} | make_corpus(Path(folder))
        wanted = [(layout, column) for layout in LAYOUTS for column in SUMS]
        command_lines = []
        for number, (layout, column) in enumerate(wanted):
            path = json_file(Path(folder) / f"{number}.json", SUMS[column])
            command_lines.append(command_line(common | LAYOUTS[layout] | {"deepspeed_config": path}))
        for key, errors in zip(wanted, of_each_run(RANKS, command_lines, error_of_first_step), strict=True):
            cells[key] = f"{max(errors):.1e}"
    print(Table(["layout", *SUMS], [[layout, *(cells[layout, column] for column in SUMS)] for layout in LAYOUTS]))


if __name__ == "__main__":
    main()
