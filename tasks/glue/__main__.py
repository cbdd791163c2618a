"""`python -m tasks.glue`: fine-tune an encoder on GLUE over a grid and seeds, and print the medians."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.errors import run_command
from tasks.glue.data import Encoded, Example, TaskData, encode, read_task
from tasks.glue.report import percent, table
from tasks.glue.runs import GRIDS, Point, Run, RunStore, grid
from tasks.glue.tasks import PAPER_TASKS, TASKS

DESCRIPTION = """Fine-tune an encoder on GLUE tasks and report development scores.

Every task is run at every grid point with every seed. OUT/runs.jsonl holds one line a finished run; a restarted
command goes on with what is missing. OUT/table.md holds the medians over the seeds.

  python -m tasks.glue --tasks RTE CoLA --data-dir glue --load runs/ddrp --output-dir runs/ddrp/glue --grid quick
"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = ArgumentParser(prog="python -m tasks.glue", description=DESCRIPTION)
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
        "--data-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="GLUE's folder: TASK/train.tsv, TASK/dev.tsv, … as released",
    )
    what.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="DIR",
        help="training checkpoint (pretrain_bert.py --save) or Hugging Face folder",
    )
    what.add_argument("--output-dir", type=Path, required=True, metavar="OUT", help="for runs.jsonl and table.md")
    what.add_argument(
        "--random-init",
        action="store_true",
        help="baseline: the same architecture and tokenizer with new random weights",
    )
    search = parser.add_argument_group("grid and seeds")
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
    model = parser.add_argument_group("input")
    model.add_argument(
        "--max-seq-length", type=_positive, default=128, metavar="N", help="longest row in pieces, specials included"
    )
    parsed = parser.parse_args(arguments)
    if parsed.max_seq_length < 8:
        parser.error(f"--max-seq-length {parsed.max_seq_length}: must be at least 8, room for a pair of sentences")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Read everything, then run what is missing."""
    options = parse_arguments(arguments)
    data = {name: read_task(TASKS[name], options.data_dir) for name in dict.fromkeys(options.tasks)}
    store = RunStore(options.output_dir / "runs.jsonl")
    Sweep(options, data, store).run()
    text = table(store)
    (options.output_dir / "table.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {options.output_dir / 'table.md'}")


class Sweep:
    """Grid × seeds × tasks for one encoder."""

    def __init__(self, options: argparse.Namespace, data: dict[str, TaskData], store: RunStore):
        """Load the encoder and encode `data` for it."""
        import torch

        from tasks.glue.encoder import load_encoder

        self.store = store
        self.data = data
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.encoder = load_encoder(options.load, options.random_init)
        self.max_length = min(options.max_seq_length, self.encoder.max_length)
        if self.max_length < options.max_seq_length:
            print(f"rows are cut to {self.max_length} pieces: {self.encoder.name} knows no more positions")
        chosen = GRIDS[options.grid]
        points = grid(
            options.batch_size or chosen["batch_sizes"], options.lr or chosen["lrs"], options.epochs or chosen["epochs"]
        )
        self.runs = [
            self._run(task, point, seed)
            for task, point, seed in itertools.product(data, points, range(1, options.seeds + 1))
        ]

    def run(self) -> None:
        """Do the runs that the store lacks, telling each score as it comes."""
        missing = [run for run in self.runs if run not in self.store]
        print(
            f"{self.encoder.name}: {len(missing)} of {len(self.runs)} runs to do on {self.device.type} "
            "(loaded: the encoder; new: pooler and classifier)",
            flush=True,
        )
        start = time.perf_counter()
        encoded: dict[str, tuple[Encoded, dict[str, Encoded]]] = {}
        for number, run in enumerate(missing, 1):
            if run.task not in encoded:
                encoded = {run.task: self._encode(run.task)}
            self._finetune(run, *encoded[run.task])
            left = (time.perf_counter() - start) / number * (len(missing) - number)
            row = self.store.rows[-1]
            print(
                f"[{number}/{len(missing)}] {run.task} batch {run.batch_size} lr {run.lr:g} epochs {run.epochs} seed "
                f"{run.seed}: {row['metric']} {percent(row['score'])} (best epoch {percent(row['best_epoch_score'])}), "
                f"{row['seconds']:.0f} s, eta {left / 60:.1f} min",
                flush=True,
            )

    def _run(self, task: str, point: Point, seed: int) -> Run:
        return Run(
            task, **asdict(point), seed=seed, max_seq_length=self.max_length, encoder=self.encoder.fingerprint,
            data=self.data[task].digest[:16],
        )  # fmt: skip

    def _encode(self, name: str) -> tuple[Encoded, dict[str, Encoded]]:
        data = self.data[name]

        def encoded(examples: list[Example]) -> Encoded:
            return encode(data.task, examples, self.encoder.tokenizer, self.max_length)

        return encoded(data.train), {file: encoded(examples) for file, examples in data.dev.items()}

    def _finetune(self, run: Run, train: Encoded, dev: dict[str, Encoded]) -> None:
        from tasks.glue.finetune import finetune

        task = TASKS[run.task]
        module = self.encoder.fresh(run.seed, self.device)
        point = Point(run.batch_size, run.lr, run.epochs)
        result = finetune(task, module, self.encoder.hidden_size, train, dev, point, run.seed)
        scoring, *others = dev
        scores = result.scores[scoring]
        row = asdict(run) | {
            "load": self.encoder.name,
            "metric": task.metric,
            "score": scores[-1],
            "best_epoch_score": max((score for score in scores if score is not None), default=None),
            "dev_examples": len(dev[scoring]),
            "steps": result.steps,
            "seconds": round(result.seconds, 3),
        }
        if others:
            row["other_scores"] = {file: result.scores[file][-1] for file in others}
        self.store.append(row)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


if __name__ == "__main__":
    run_command(main, "tasks.glue")
