"""Training through the DeepSpeed engine with emulated CUDA graphs, in a rank's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.engine import build
from megatron_ddrp.model import graphs
from tests.emulated_graphs import Emulator, captured_shapes
from tests.integration.training_runs import train_run


def train_emulated(command_lines: list[list[str]], _: Path) -> list[Any]:
    """Train each `pretrain_bert.py ARGUMENTS`; return the steps' rows and the number of captured shapes."""
    answers: list[Any] = []
    for words in command_lines:
        made: list[graphs.ModelGraphs] = []

        def make(made: list[graphs.ModelGraphs] = made) -> graphs.ModelGraphs:
            made.append(graphs.ModelGraphs(Emulator))
            return made[-1]

        as_on_a_gpu = mock.patch.object(graphs, "why_not_graphs", lambda *_: None)
        with as_on_a_gpu, mock.patch.object(build, "ModelGraphs", make):
            rows = train_run(parse_arguments(words).config)
        answers.append([rows, [captured_shapes(each) for each in made]])
    return answers
