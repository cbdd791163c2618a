"""Fine-tune encoders on your own tasks and report the validation scores.

A task is a training file and a validation file with a column of texts and a column of labels. Flags describe it, or a
YAML file with the same names. The command runs every task at every grid point with every seed. OUT/runs.jsonl has one
line per finished run; a restarted command does only the missing runs, and several commands may share one OUT.
OUT/table.md has the medians over seeds, OUT/predictions/ the predictions of each run, OUT/models/ the best model as a
Hugging Face folder.

  one task       megatron-ddrp finetune --train train.csv --valid valid.csv --load runs/ddrp --output-dir OUT
  check it       … --dry-run                     columns, class counts, score of the most frequent class, hours
  several        megatron-ddrp finetune --task-file intent.yaml ner.yaml --load runs/bert runs/ddrp --output-dir OUT
  baseline       … --random-init
  label a file   megatron-ddrp finetune predict --load OUT/models/TASK-… --input new.csv --output labelled.csv
  score a file   megatron-ddrp finetune evaluate --load OUT/models/TASK-… --input labelled.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ddrp.cli import ArgumentParser, Subcommand, given_options, parse_subcommand
from megatron_ddrp.config.reading import COUNT, option, refuse
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.run.launch import first_rank_speaks
from megatron_ddrp.tasks.finetune.options import (
    Search,
    SweepOptions,
    TaskFiles,
    parse_sweep,
    read_task_file,
    sweep_sections,
)
from megatron_ddrp.tasks.finetune.runs import GRIDS, Suite
from megatron_ddrp.tasks.finetune.table_files import TaskData


def use_models(sweep: Any) -> list[str]:
    """Predict the test files without labels; return lines that name the kept models and the predictions."""
    from megatron_ddrp.tasks.finetune import task_files  # here, because it imports torch

    return task_files.use_models(sweep)


OWN_TASKS = Suite(
    "megatron-ddrp finetune",
    "Fine-tuning scores",
    "Each score is the last epoch's on the validation rows at the best grid point, the median over seeds, x 100. "
    "An undefined score (the correlation of a constant guess, or training that diverged) counts as 0, by a "
    "plug-in's metric as -100, and is marked.",
    finish=use_models,
    scales_labels=True,
)
"""Suite of a user's own tasks, without its files."""


def read_tasks(tasks: Sequence[TaskFiles]) -> dict[str, TaskData]:
    """Read and check all files of some tasks; return name → data. Raises `UserError` for two tasks of one name."""
    from megatron_ddrp.tasks.finetune.task_files import read_task  # here, because it imports torch

    found: dict[str, TaskData] = {}
    for data in map(read_task, tasks):
        if found.setdefault(data.task.name, data) is not data:
            raise UserError(f"two tasks are called {data.task.name}: give one of them another name", exit_code=2)
    return found


PREDICT = """Label a file with a model that finetune kept. The output has the same rows and a column `prediction`.

  megatron-ddrp finetune predict --load OUT/models/TASK-… --input new.jsonl --output labelled.jsonl
"""
EVALUATE = """Score models that finetune kept, or their graphs, on a labelled file, with 95 % intervals over its rows.

  megatron-ddrp finetune evaluate --load OUT/models/TASK-A OUT/models/TASK-B --input labelled.csv --groups field

Models after the first are also compared with it on the same rows.
"""


FILES = {"train": "train", "validation": "valid", "valid": "valid", "dev": "valid", "test": "test"}
"""Name of a file in other programs, as in `--validation-file` → our flag."""


@dataclass(frozen=True)
class TaskList:
    """task files and kept models"""

    task_file: tuple[Path, ...] | None = option(
        None, "tasks as YAML; keys are a task's flags, paths are relative to the file", nargs="+", metavar="T.yaml"
    )
    keep_models: bool = option(True, "keep an encoder's best model of a task in OUT/models/ (never with --random-init)")


@dataclass(frozen=True)
class OwnSearch(Search):
    """grid and seeds"""

    grid: str = option(
        "quick",
        "quick: batch 32, lr 3e-5, 4 epochs; paper: batch 16, 32 x lr 1e-5, 2e-5, 3e-5 x 4, 6 epochs",
        choices=tuple(GRIDS),
    )
    seeds: int = option(3, "runs per grid point, with seeds 1 to N", within=COUNT)


@dataclass(frozen=True)
class Evaluation:
    """models and rows"""

    load: tuple[Path, ...] = option(
        MISSING, "folders in OUT/models, or graphs of them (.onnx)", nargs="+", metavar="DIR"
    )
    input: Path = option(MISSING, "labelled rows, in any format that training reads", metavar="F")
    groups: str | None = option(
        None, "column: the rows of each of its values have scores of their own too", metavar="C"
    )


@dataclass(frozen=True)
class Prediction:
    """model and files"""

    load: Path = option(MISSING, "folder in OUT/models, or a graph of it (.onnx)", metavar="DIR")
    input: Path = option(MISSING, "rows to label, in any format that training reads", metavar="F")
    output: Path = option(
        MISSING,
        "output with the same rows and their predictions: .jsonl, .csv or .tsv; also .conll for tokens, .json for qa",
        metavar="G",
    )


@dataclass(frozen=True)
class TextColumns:
    """columns"""

    text_column: str | None = option(None, "column of the text (default: as in training)", metavar="C")
    text_pair_column: str | None = option(None, "column of the second text (default: as in training)", metavar="C")


SUBCOMMANDS = {
    "predict": Subcommand("label a file", PREDICT, (Prediction, TextColumns)),
    "evaluate": Subcommand("score kept models on a labelled file", EVALUATE, (Evaluation, TextColumns)),
}
SECTIONS = sweep_sections((TaskList, TaskFiles), OwnSearch)


def parse_arguments(arguments: Sequence[str] | None = None) -> SweepOptions:
    """Parse and check the command line."""
    parser = ArgumentParser(description=__doc__)
    parser.hints = {f"{file}-file": f"use --{name}" for file, name in FILES.items()} | {"task-name": "use --name"}
    return parse_sweep(parser, SECTIONS, OwnSearch, _own_tasks, arguments)


def _own_tasks(options: argparse.Namespace) -> Suite:
    given = given_options(TaskFiles, options)
    if options.task_file and given != TaskFiles():
        refuse("--task-file and the flags of a task exclude each other: write the flags into the file")
    tasks = tuple(map(read_task_file, options.task_file)) if options.task_file else (given,)
    if options.report is None:
        for task in tasks:
            task.require()
    keeps = options.keep_models and not options.random_init
    kept = tuple(task.task_name for task in tasks) if keeps else ()
    return replace(OWN_TASKS, read=partial(read_tasks, tasks), kept=kept)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune, report, predict or evaluate. Return 1 if --report leaves damaged runs out."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in SUBCOMMANDS:
        return use_kept(parse_subcommand(__doc__ or "", SUBCOMMANDS, words))
    with first_rank_speaks():
        options = parse_arguments(words)
    from megatron_ddrp.tasks.finetune.workers import run  # here, because it imports torch

    return run(options)


def use_kept(options: argparse.Namespace) -> int:
    """Label a file with a model that finetune kept, or score such models on it."""
    from megatron_ddrp.tasks.finetune.task_files import evaluate_file, predict_file  # here, because it imports torch
    from megatron_ddrp.tasks.jobs import device_of

    given = device_of(0), (options.text_column, options.text_pair_column)
    if options.command == "evaluate":
        print(evaluate_file(options.load, options.input, *given, options.groups))
    elif options.output.exists():
        raise UserError(f"--output {options.output}: exists already; give another name, or remove it", WRONG_ARGUMENTS)
    else:
        print(f"{predict_file(options.load, options.input, options.output, *given):,} rows written to {options.output}")
    return 0
