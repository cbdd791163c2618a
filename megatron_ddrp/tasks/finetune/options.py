"""Flags of all commands that fine-tune, and the description of a user's own task by flags or by a YAML file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from itertools import product, starmap
from pathlib import Path
from typing import Any

from megatron_ddrp.cli import ArgumentParser, given_options, parse_sections
from megatron_ddrp.config import registry
from megatron_ddrp.config.reading import (
    COUNT,
    POSITIVE,
    Place,
    Section,
    flag,
    load_values,
    option,
    read_section,
    refuse,
)
from megatron_ddrp.errors import UserError
from megatron_ddrp.run.launch import launched_world_size
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import GRIDS, Point, Suite
from megatron_ddrp.tasks.jobs import WorkerOptions

HINTS = {
    "learning-rate": "use --lr",
    "num-train-epochs": "use --epochs",
    "per-device-train-batch-size": "use --batch-size",
    "per-gpu-train-batch-size": "use --batch-size",
    "train-batch-size": "use --batch-size",
    "gradient-accumulation-steps": "use --micro-batch-size, the rows of a part of a batch",
    "seed": "use --seeds N, which runs the seeds 1 to N",
    "max-length": "use --max-seq-length",
    "max-train-samples": "use --max-train-examples",
    "model-name-or-path": "use --load with a folder",
    "output": "use --output-dir",
    "save": "use --output-dir",
}
"""Name of a flag of other programs (Hugging Face's examples, our `pretrain`) → what to do instead."""


@dataclass(frozen=True)
class Encoders:
    """encoders and output"""

    output_dir: Path = option(MISSING, "folder for runs.jsonl, the tables and all other output", metavar="OUT")
    load: tuple[Path, ...] | None = option(
        None,
        "training checkpoint (megatron-ddrp pretrain --save) or Hugging Face folder; give several to compare them",
        nargs="+",
        metavar="DIR",
    )
    random_init: bool = option(False, "baseline: the same architecture and tokenizer with new random weights")
    report: tuple[Path, ...] | None = option(
        None, "run nothing; write one table over these --output-dir folders", nargs="+", metavar="OUT"
    )


@dataclass(frozen=True)
class Search(Section):
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
        None, "replaces the grid's learning rates", nargs="+", metavar="X", within=POSITIVE, distinct=True
    )
    epochs: tuple[int, ...] | None = option(
        None, "replaces the grid's epochs", nargs="+", metavar="N", within=COUNT, distinct=True
    )
    seeds: int = option(5, "runs per grid point, with seeds 1 to N", within=COUNT)
    max_train_examples: int | None = option(None, "train on only N rows per task", within=COUNT)

    @property
    def points(self) -> tuple[Point, ...]:
        """Points of the grid."""
        values = (getattr(self, name) or own for name, own in GRIDS[self.grid].items())
        return tuple(starmap(Point, product(*values)))


@dataclass(frozen=True)
class Training(Section):
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
        super().__post_init__()
        if self.bf16 and self.fp16:
            refuse("--bf16 and --fp16 exclude each other: choose one")

    @property
    def precision(self) -> str:
        """Precision of the arithmetic: bf16, fp16 or fp32."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True)
class SweepOptions:
    """Command line of a sweep, or of one of its stages. Raises `UserError` for a grid that the ranks cannot share."""

    suite: Suite
    output_dir: Path
    load: tuple[Path, ...]
    """Folders of the encoders."""
    random_init: bool
    search: Search
    training: Training
    machine: WorkerOptions
    report: tuple[Path, ...] | None = None
    """Folders of earlier sweeps to report about; None to run a sweep."""
    names: Mapping[Path, str] = field(default_factory=dict)
    """Folder of an encoder → its name in tables, if it is not the folder's."""
    made_from: Mapping[Path, str] = field(default_factory=dict)
    """Folder of an encoder of a second sweep → fingerprint of the encoder that it was made from."""

    def __post_init__(self) -> None:
        ranks, workers, size = launched_world_size(), self.machine.workers, self.training.micro_batch_size
        if workers and ranks > 1:
            refuse(f"--workers {workers} under a launcher with {ranks} ranks: choose one of the two")
        smallest = min(point.batch_size for point in self.search.points)
        if smallest < ranks:
            refuse(f"a batch of {smallest} on {ranks} ranks: use fewer ranks, or --workers")
        if size and -(-smallest // size) < ranks:
            refuse(
                f"--micro-batch-size {size} cuts a batch of {smallest} into fewer parts than there are ranks "
                f"({ranks}): use at most {smallest // ranks}"
            )


def sweep_sections(own: Sequence[Any], search: type[Search]) -> tuple[Any, ...]:
    """Return the dataclasses of a command's options: its own and those of every sweep."""
    return (Encoders, *own, search, Training, WorkerOptions)


def parse_sweep(
    parser: ArgumentParser,
    sections: Sequence[Any],
    search: type[Search],
    make_suite: Callable[[argparse.Namespace], Suite],
    arguments: Sequence[str] | None,
) -> SweepOptions:
    """Parse and check a command line with the options of some `sweep_sections`.

    `make_suite` gets the options of all sections.
    """
    parser.hints = {**HINTS, **parser.hints}
    for name in ("--local-rank", "--deepspeed"):  # flags that launchers add
        parser.add_argument(name, nargs="?", help=argparse.SUPPRESS)
    options = parse_sections(parser, sections, arguments)
    try:
        require(options, "load")
        return SweepOptions(
            make_suite(options),
            options.output_dir,
            options.load or (),
            options.random_init,
            given_options(search, options),
            given_options(Training, options),
            given_options(WorkerOptions, options),
            options.report,
        )
    except UserError as error:
        parser.error(str(error))


def require(options: argparse.Namespace, name: str) -> None:
    """Raise `UserError` if the option `name` is missing, unless the command line has --report."""
    if options.report is None and not getattr(options, name):
        refuse(f"{flag(name)} is needed (or --report OUT… to run nothing)")


@dataclass(frozen=True)
class TaskFiles:
    """task"""

    train: Path | None = option(None, "training rows: .jsonl, .csv, .tsv, .parquet, .conll, SQuAD's .json", metavar="F")
    valid: Path | None = option(None, "validation rows, which give the score and select the grid point", metavar="F")
    test: tuple[str, ...] | None = option(
        None,
        "further rows: with labels they are scored too, without labels the best run predicts them; several files are "
        "named, or have the names of their files",
        nargs="+",
        metavar="[NAME=]F",
    )
    test_groups: str | None = option(
        None, "column of the test files: the rows of each of its values also have a score of their own", metavar="C"
    )
    pretraining_text: tuple[str, ...] | None = option(
        None, "text of pre-training: the plan counts the rows of the task that stand in it", nargs="+", metavar="F"
    )
    kind: str | None = option(
        None, "kind of prediction (default: guessed from columns and labels)", choices=registry.KINDS
    )
    metric: str | None = option(
        None,
        "; ".join(f"{name}: {', '.join(kind.metrics)}" for name, kind in KINDS.items())
        + " (default: the kind's first)",
        metavar="M",
    )
    text_column: str | None = option(None, "column of the text (default: text, sentence, sentence1, …)", metavar="C")
    text_pair_column: str | None = option(None, "column of the second text of a pair", metavar="C")
    label_column: str | None = option(None, "column of the label (default: label, labels, score, …)", metavar="C")
    name: str | None = option(
        None,
        "name of the task in tables and folders (default: from the training file's name; its folder's for train.csv)",
        metavar="NAME",
    )

    @property
    def task_name(self) -> str:
        """Name of the task, usable as a file name."""
        train = self.train or Path("task")
        stem = re.sub(r"[-_]train$", "", train.name.partition(".")[0])
        words = self.name or (train.resolve().parent.name if re.fullmatch("|train([-_].*)?", stem) else stem)
        return re.sub(r"[^\w.-]+", "-", words).strip("-.") or "task"

    @property
    def tests(self) -> dict[str, Path]:
        """Files of `--test` by name: NAME of NAME=FILE, else `test` for one file and the file's name for several.

        Raises `UserError` for a name that is there twice, or that is `train` or `valid`.
        """
        found: dict[str, Path] = {}
        for word in self.test or ():
            name, _, path = word.partition("=") if re.match(r"[^=/]+=", word) else ("", "", word)
            name = name or ("test" if self.test == (word,) else Path(path).name.partition(".")[0])
            if name in ("train", "valid", *found):
                refuse(f"--test {word}: there is a file called {name} already; give this one a name: NAME={path}")
            found[name] = Path(path)
        return found

    def test_facts(self, unlabelled: Container[str] = ()) -> list[str | None]:
        """Return the names of the labelled test files and the column of groups; [] for one file `test` without."""
        facts = [*(name for name in self.tests if name not in unlabelled), self.test_groups]
        return [] if facts in ([None], ["test", None]) else facts

    def require(self) -> None:
        """Raise `UserError` for a task without a training or a validation file."""
        if self.train is None or self.valid is None:
            refuse(f"--{'train' if self.train is None else 'valid'} is needed, or a --task-file that names it")
        if self.test_groups and not self.test:
            refuse("--test-groups needs --test, whose rows it divides: give both, or leave it out")


def read_task_file(path: Path) -> TaskFiles:
    """Return the task of a YAML file. Its keys are the names of the flags; its paths are relative to the file.

    Raises:
        UserError: one line with the file, the key and the allowed values.
    """
    place = Place(str(path))
    if not path.is_file():
        raise place.error("no such file; expected YAML with keys such as train, valid, kind, text-column, label-column")
    files = read_section(TaskFiles, load_values(path, place), place)
    found = {name: getattr(files, name) for name in ("train", "valid")}
    moved: dict[str, Any] = {name: path.parent / file for name, file in found.items() if file is not None}
    moved["test"] = tuple(f"{name}={path.parent / file}" for name, file in files.tests.items()) or None
    moved["pretraining_text"] = tuple(str(path.parent / text) for text in files.pretraining_text or ()) or None
    return replace(files, name=files.name or path.stem, **moved)
