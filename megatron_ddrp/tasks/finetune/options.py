"""Flags of all commands that fine-tune."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.config.option import COUNT, check_ranges, option, refuse
from megatron_ddrp.run.launch import launched_world_size
from megatron_ddrp.tasks.finetune.runs import GRIDS, grid


@dataclass(frozen=True)
class Search:
    """grid and seeds"""

    grid: str = option(
        "paper",
        "paper: batch 16, 32 x lr 1e-5, 2e-5, 3e-5 x 4, 6 epochs; quick: batch 32, lr 3e-5, 4 epochs",
        choices=tuple(GRIDS),
    )
    batch_size: tuple[int, ...] | None = option(
        None, "replaces the grid's batch sizes", nargs="+", metavar="N", within=COUNT, distinct=True
    )
    lr: tuple[float, ...] | None = option(
        None, "replaces the grid's learning rates", nargs="+", metavar="X", within="(0, inf)", distinct=True
    )
    epochs: tuple[int, ...] | None = option(
        None, "replaces the grid's epochs", nargs="+", metavar="N", within=COUNT, distinct=True
    )
    seeds: int = option(5, "runs per grid point, with seeds 1 to N", within=COUNT)
    max_train_examples: int | None = option(None, "train on only N rows per task", within=COUNT)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Training:
    """training"""

    max_seq_length: int = option(128, "longest row in pieces, including special ones", within="[8, 2147483648)")
    micro_batch_size: int | None = option(
        None,
        "rows per forward and backward pass; a batch is the sum of its micro-batches (default: the batch divided by "
        "the ranks; on CPUs at most half a batch, so that 1 and 2 ranks compute the same)",
        within=COUNT,
    )
    layerwise_lr_decay: float = option(
        1.0,
        "factor X on the learning rate from each layer to the layer below it, down to the embeddings (1: same rate)",
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
    wait: bool = option(
        True,
        "wait for runs that other commands on the same OUT are doing; --no-wait exits instead, and the command that "
        "finishes last writes the tables (for job arrays)",
    )
    dry_run: bool = option(False, "check the files, print the plan (runs, hours) and stop; write nothing")

    def __post_init__(self) -> None:
        check_ranges(self)


def parse_options(
    parser: ArgumentParser,
    sections: Sequence[Any],
    check: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
) -> argparse.Namespace:
    """Parse and check a command line of these sections. The result also has the grid's `points`."""
    for name in ("--local-rank", "--deepspeed"):  # flags that launchers add
        parser.add_argument(name, nargs="?", help=argparse.SUPPRESS)

    def check_all(options: argparse.Namespace) -> None:
        check(options)
        _check_grid(options)

    return parse_sections(parser, sections, arguments, check_all)


def require(options: argparse.Namespace, *names: str) -> None:
    """Raise `UserError` if one of the options `names` is missing, unless the command line has --report."""
    if options.report is None and (missing := [name for name in names if not getattr(options, name)]):
        refuse(f"--{missing[0].replace('_', '-')} is needed (or --report OUT… to run nothing)")


def _check_grid(options: argparse.Namespace) -> None:
    """Raise `UserError` for contradicting options; add the points of the grid."""
    ranks = launched_world_size()
    if options.workers and ranks > 1:
        refuse(f"--workers {options.workers} under a launcher with {ranks} ranks: choose one of the two")
    chosen = GRIDS[options.grid]
    options.names = {}  # folder → name in tables, if it is not the folder's
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
            f"ranks ({ranks}): use at most {smallest // ranks}"
        )
