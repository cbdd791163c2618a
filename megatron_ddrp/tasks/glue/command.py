"""`megatron-ddrp glue`: fine-tune encoders on GLUE over a grid and seeds, and report the medians."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.config.option import option, refuse
from megatron_ddrp.run.launch import first_rank_speaks
from megatron_ddrp.tasks.finetune.options import Search, SweepOptions, parse_sweep, require, sweep_sections
from megatron_ddrp.tasks.glue.suite import STARTED, Glue
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS, TASKS

DESCRIPTION = """Fine-tune encoders on GLUE tasks and report the development scores.

The command runs every task at every grid point with every seed. OUT/runs.jsonl has one line per finished run; a
restarted command does only the missing runs, and several commands may share one OUT. OUT/table.md has the medians over
seeds, OUT/table.json the same numbers for programs, OUT/predictions/ the predictions of each run. Recipe and grid are
those of the DDRP+MTH paper (Zhang et al., "Better Pre-Training by Reducing Representation Confusion", appendix B).

  first look     megatron-ddrp glue --tasks RTE CoLA --data-dir glue --load runs/ddrp --output-dir OUT --grid quick
  plan alone     … --grid paper --dry-run
  all GPUs       … --grid paper                  one worker per GPU; --workers N on CPUs
  one big run    torchrun --nproc-per-node 2 -m megatron_ddrp glue …     each run data-parallel, with the same scores
  compare        … --load runs/bert runs/ddrp    or megatron-ddrp glue --report OUT1 OUT2 --output-dir BOTH
"""


@dataclass(frozen=True)
class What:
    """tasks"""

    tasks: tuple[str, ...] = option(
        PAPER_TASKS,
        f"tasks among {', '.join(TASKS)} (default: the eight of the DDRP+MTH paper, all but WNLI)",
        nargs="+",
        choices=tuple(TASKS),
        metavar="TASK",
    )
    data_dir: Path | None = option(None, "GLUE's folder: TASK/train.tsv, TASK/dev.tsv, … as released", metavar="DIR")
    start_from_task: str | None = option(
        None,
        f"run this task (usually MNLI) first, then fine-tune {', '.join(STARTED)} from each encoder's best model of "
        "it; tables show the result as another encoder",
        choices=tuple(TASKS),
        metavar="TASK",
    )
    predict_test: bool = option(
        False, "at the end repeat each task's best run and write OUT/submission/ and its zip for gluebenchmark.com"
    )


SECTIONS = sweep_sections((What,), Search)


def parse_arguments(arguments: Sequence[str] | None = None) -> SweepOptions:
    """Parse and check the command line."""
    return parse_sweep(ArgumentParser(description=DESCRIPTION), SECTIONS, Search, _glue, arguments)


def _glue(options: argparse.Namespace) -> Glue:
    require(options, "data_dir")
    first = options.start_from_task
    suite = Glue(options.tasks, options.data_dir or Path(), options.predict_test, first)
    if first and not suite.started:
        others = ", ".join(task for task in STARTED if task != first)
        refuse(f"--start-from-task {first}: --tasks must name at least one of {others}, which can start from it")
    return suite


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the inputs, do the missing runs, and report. Return 1 if --report leaves damaged runs out."""
    with first_rank_speaks():
        options = parse_arguments(arguments)
    from megatron_ddrp.tasks.finetune.workers import run  # here, because it imports torch

    return run(options)
