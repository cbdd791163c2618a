"""The command line of `python -m tasks.glue`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.run.launch import launched_world_size
from megatron_ddrp.tasks.glue.runs import GRIDS, grid
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS, TASKS

DESCRIPTION = """Fine-tune encoders on GLUE tasks and report development scores.

Every task is run at every grid point with every seed. OUT/runs.jsonl holds one line a finished run; a restarted
command goes on with what is missing, and several commands may share one OUT. OUT/table.md holds the medians over the
seeds, OUT/table.json the same for programs, OUT/predictions/ what each run predicted.

  first look     python -m tasks.glue --tasks RTE CoLA --data-dir glue --load runs/ddrp --output-dir OUT --grid quick
  what it costs  … --grid paper --dry-run
  all GPUs       … --grid paper                  one worker a GPU; --workers N on CPUs
  one big run    torchrun --nproc-per-node 2 -m tasks.glue …     each run data-parallel, the same scores
  compare        … --load runs/bert runs/ddrp    or python -m tasks.glue --report OUT1 OUT2 --output-dir BOTH
"""


def build_parser() -> ArgumentParser:
    """All flags, by concern."""
    parser = ArgumentParser(prog="python -m tasks.glue", description=DESCRIPTION)
    for name in ("--local-rank", "--deepspeed"):  # the launchers' own
        parser.add_argument(name, nargs="?", help=argparse.SUPPRESS)
    what = parser.add_argument_group("what to run")
    what.add_argument(
        "--tasks",
        nargs="+",
        choices=list(TASKS),
        default=list(PAPER_TASKS),
        metavar="TASK",
        help=f"of {', '.join(TASKS)} (default: the paper's eight, all but WNLI)",
    )
    what.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="GLUE's folder: TASK/train.tsv, TASK/dev.tsv, … as released"
    )
    what.add_argument(
        "--load",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="training checkpoint (pretrain_bert.py --save) or Hugging Face folder; several to compare them",
    )
    what.add_argument("--output-dir", type=Path, required=True, metavar="OUT", help="for runs.jsonl and the tables")
    what.add_argument(
        "--random-init",
        action="store_true",
        help="baseline: the same architecture and tokenizer with new random weights",
    )
    what.add_argument("--max-train-examples", type=_positive, metavar="N", help="train on N rows of each task only")
    what.add_argument(
        "--predict-test",
        action="store_true",
        help="then repeat each task's best run and write OUT/submission/ and its zip for gluebenchmark.com",
    )
    what.add_argument(
        "--report", type=Path, nargs="+", metavar="OUT", help="run nothing: one table over these --output-dir folders"
    )
    _add_search(parser.add_argument_group("grid and seeds"))
    _add_training(parser.add_argument_group("training"))
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--workers", type=_positive, metavar="N", help="processes that share the sweep (default: one a GPU, else 1)"
    )
    machine.add_argument(
        "--dry-run", action="store_true", help="check the files, print the plan (runs, hours) and stop; write nothing"
    )
    return parser


def _add_search(search: argparse._ArgumentGroup) -> None:
    search.add_argument(
        "--grid",
        choices=list(GRIDS),
        default="paper",
        help="paper: batch 16, 32 x lr 1e-5, 2e-5, 3e-5 x 4, 6 epochs; quick: batch 32, lr 3e-5, 4 epochs",
    )
    search.add_argument("--seeds", type=_positive, default=5, metavar="N", help="runs a grid point, with seeds 1 to N")
    search.add_argument("--batch-size", type=_positive, nargs="+", metavar="N", help="instead of the grid's")
    search.add_argument("--lr", type=_positive_float, nargs="+", metavar="X", help="instead of the grid's")
    search.add_argument("--epochs", type=_positive, nargs="+", metavar="N", help="instead of the grid's")


def _add_training(training: argparse._ArgumentGroup) -> None:
    training.add_argument(
        "--max-seq-length", type=_positive, default=128, metavar="N", help="longest row in pieces, specials included"
    )
    training.add_argument(
        "--micro-batch-size",
        type=_positive,
        metavar="N",
        help="rows of one forward and backward pass; a batch is the sum of its micro-batches (default: a GPU's share "
        "of the batch; half a batch on CPUs, so that 1 and 2 ranks do the same)",
    )
    training.add_argument(
        "--layerwise-lr-decay",
        type=_share,
        default=1.0,
        metavar="X",
        help="each layer learns at X times the rate of the one above it, the embeddings at the least (1: all alike)",
    )
    precision = training.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true", help="bf16 arithmetic with fp32 weights")
    precision.add_argument("--fp16", action="store_true", help="fp16 with loss scaling and fp32 weights; GPUs only")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; `points` are the grid's."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.report is None and (missing := [flag for flag in ("data_dir", "load") if not getattr(parsed, flag)]):
        parser.error(f"--{missing[0].replace('_', '-')} is needed (or --report OUT… to run nothing)")
    if parsed.max_seq_length < 8:
        parser.error(f"--max-seq-length {parsed.max_seq_length}: must be at least 8, room for a pair of sentences")
    ranks = launched_world_size()
    if ranks > 1 and parsed.workers:
        parser.error(f"--workers {parsed.workers} under a launcher with {ranks} ranks: choose one of the two")
    chosen = GRIDS[parsed.grid]
    parsed.points = grid(
        dict.fromkeys(parsed.batch_size or chosen["batch_sizes"]),
        dict.fromkeys(parsed.lr or chosen["lrs"]),
        dict.fromkeys(parsed.epochs or chosen["epochs"]),
    )
    smallest = min(point.batch_size for point in parsed.points)
    if parsed.micro_batch_size and -(-smallest // parsed.micro_batch_size) < ranks:
        parser.error(
            f"--micro-batch-size {parsed.micro_batch_size} cuts a batch of {smallest} into fewer parts than there are "
            f"ranks ({ranks}): at most {smallest // ranks}"
        )
    if smallest < ranks:
        parser.error(f"a batch of {smallest} on {ranks} ranks: use fewer ranks, or --workers")
    return parsed


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def _positive_float(text: str) -> float:
    value = _float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def _share(text: str) -> float:
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0 and up to 1")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
