"""The command line of `python -m tasks.glue`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.cli import ArgumentParser, add_flags, add_plugin_flag, given_options
from megatron_ddrp.config.option import COUNT, check_ranges, option, refuse
from megatron_ddrp.errors import UserError
from megatron_ddrp.run.launch import launched_world_size
from megatron_ddrp.tasks.glue.runs import GRIDS, grid
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS, TASKS

DESCRIPTION = """Fine-tune encoders on GLUE tasks and report development scores.

Every task is run at every grid point with every seed. OUT/runs.jsonl holds one line per finished run; a restarted
command does what is missing, and several commands may share one OUT. OUT/table.md holds the medians over the
seeds, OUT/table.json the same for programs, OUT/predictions/ what each run predicted.

  first look     python -m tasks.glue --tasks RTE CoLA --data-dir glue --load runs/ddrp --output-dir OUT --grid quick
  what it costs  … --grid paper --dry-run
  all GPUs       … --grid paper                  one worker per GPU; --workers N on CPUs
  one big run    torchrun --nproc-per-node 2 -m tasks.glue …     each run data-parallel, the same scores
  compare        … --load runs/bert runs/ddrp    or python -m tasks.glue --report OUT1 OUT2 --output-dir BOTH
"""


@dataclass(frozen=True)
class What:
    """what to run"""

    output_dir: Path = option(MISSING, "for runs.jsonl and the tables", metavar="OUT")
    tasks: tuple[str, ...] = option(
        PAPER_TASKS,
        f"of {', '.join(TASKS)} (default: the paper's eight, all but WNLI)",
        nargs="+",
        choices=tuple(TASKS),
        metavar="TASK",
    )
    data_dir: Path | None = option(None, "GLUE's folder: TASK/train.tsv, TASK/dev.tsv, … as released", metavar="DIR")
    load: tuple[Path, ...] | None = option(
        None,
        "training checkpoint (pretrain_bert.py --save) or Hugging Face folder; several to compare them",
        nargs="+",
        metavar="DIR",
    )
    random_init: bool = option(False, "baseline: the same architecture and tokenizer with new random weights")
    predict_test: bool = option(
        False, "then repeat each task's best run and write OUT/submission/ and its zip for gluebenchmark.com"
    )
    report: tuple[Path, ...] | None = option(
        None, "run nothing: one table over these --output-dir folders", nargs="+", metavar="OUT"
    )


@dataclass(frozen=True)
class Search:
    """grid and seeds"""

    grid: str = option(
        "paper",
        "paper: batch 16, 32 x lr 1e-5, 2e-5, 3e-5 x 4, 6 epochs; quick: batch 32, lr 3e-5, 4 epochs",
        choices=tuple(GRIDS),
    )
    batch_size: tuple[int, ...] | None = option(
        None, "instead of the grid's", nargs="+", metavar="N", within=COUNT, distinct=True
    )
    lr: tuple[float, ...] | None = option(
        None, "instead of the grid's", nargs="+", metavar="X", within="(0, inf)", distinct=True
    )
    epochs: tuple[int, ...] | None = option(
        None, "instead of the grid's", nargs="+", metavar="N", within=COUNT, distinct=True
    )
    seeds: int = option(5, "runs per grid point, with seeds 1 to N", within=COUNT)
    max_train_examples: int | None = option(None, "train on N rows of each task only", within=COUNT)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Training:
    """training"""

    max_seq_length: int = option(128, "longest row in pieces, specials included", within="[8, 2147483648)")
    micro_batch_size: int | None = option(
        None,
        "rows of one forward and backward pass; a batch is the sum of its micro-batches (default: a GPU's share "
        "of the batch; half a batch on CPUs, so that 1 and 2 ranks do the same)",
        within=COUNT,
    )
    layerwise_lr_decay: float = option(
        1.0,
        "each layer learns at X times the rate of the one above it, the embeddings at the least (1: all alike)",
        within="(0, 1]",
    )
    bf16: bool = option(False, "bf16 arithmetic with fp32 weights")
    fp16: bool = option(False, "fp16 with loss scaling and fp32 weights; GPUs only")

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.bf16 and self.fp16:
            refuse("--bf16 and --fp16 exclude each other: choose one")


@dataclass(frozen=True)
class Machine:
    """machine"""

    workers: int | None = option(None, "processes that share the sweep (default: one per GPU, else 1)", within=COUNT)
    dry_run: bool = option(False, "check the files, print the plan (runs, hours) and stop; write nothing")

    def __post_init__(self) -> None:
        check_ranges(self)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; `points` are the grid's."""
    parser = ArgumentParser(prog="python -m tasks.glue", description=DESCRIPTION)
    for name in ("--local-rank", "--deepspeed"):  # the launchers' own
        parser.add_argument(name, nargs="?", help=argparse.SUPPRESS)
    sections: tuple[Any, ...] = (What, Search, Training, Machine)
    add_flags(parser, *sections)
    add_plugin_flag(parser)
    given = parser.parse_args(arguments)
    options = argparse.Namespace()
    try:
        for section in sections:
            vars(options).update(vars(given_options(section, given)))
        _check(options)
    except UserError as error:
        parser.error(str(error))
    return options


def _check(options: argparse.Namespace) -> None:
    """Refuse what does not go together, and add the points of the grid."""
    if options.report is None and (missing := [flag for flag in ("data_dir", "load") if not getattr(options, flag)]):
        refuse(f"--{missing[0].replace('_', '-')} is needed (or --report OUT… to run nothing)")
    ranks = launched_world_size()
    if options.workers and ranks > 1:
        refuse(f"--workers {options.workers} under a launcher with {ranks} ranks: choose one of the two")
    chosen = GRIDS[options.grid]
    options.points = grid(
        dict.fromkeys(options.batch_size or chosen["batch_sizes"]),
        dict.fromkeys(options.lr or chosen["lrs"]),
        dict.fromkeys(options.epochs or chosen["epochs"]),
    )
    smallest = min(point.batch_size for point in options.points)
    if smallest < ranks:
        refuse(f"a batch of {smallest} on {ranks} ranks: use fewer ranks, or --workers")
    if options.micro_batch_size and -(-smallest // options.micro_batch_size) < ranks:
        refuse(
            f"--micro-batch-size {options.micro_batch_size} cuts a batch of {smallest} into fewer parts than there are "
            f"ranks ({ranks}): at most {smallest // ranks}"
        )
