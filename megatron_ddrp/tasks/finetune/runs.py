"""Runs of a sweep, the store of finished ones, the cells of its tables, and its suite of tasks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.data.atomic import write_bytes
from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import misfit
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.metrics import MOST_RESAMPLED
from megatron_ddrp.tasks.finetune.table_files import Task, TaskData
from megatron_ddrp.tasks.jobs import Row, Store, digest
from megatron_ddrp.tasks.statistics import percentile_interval

RUNS = "runs.jsonl"


@dataclass(frozen=True)
class Point:
    """Point of the hyper-parameter grid."""

    batch_size: int
    lr: float
    epochs: int


GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "paper": {"batch_size": (16, 32), "lr": (1e-5, 2e-5, 3e-5), "epochs": (4, 6)},
    "quick": {"batch_size": (32,), "lr": (3e-5,), "epochs": (4,)},
}
"""Values of the fields of `Point`: the grid of the paper's appendix B, and a single point for a first look."""


@dataclass(frozen=True)
class TuningRun:
    """Everything that determines a score."""

    task: str
    batch_size: int
    lr: float
    epochs: int
    seed: int
    max_seq_length: int
    encoder: str
    """Fingerprint of the encoder."""
    data: str
    """Fingerprint of the task's files."""
    micro_batch_size: int
    """Rows per forward and backward pass; a batch is the sum of its micro-batches."""
    layerwise_lr_decay: float = 1.0
    precision: str = "fp32"
    max_train_examples: int | None = None
    """Number of training rows to use; None for all."""
    head: str = "common"
    """Head on top of the encoder: `common` (`TaskHead`) or `family` (the head of the encoder's family)."""

    scales_labels: bool = False
    """True if a regression learns the labels minus their mean, divided by their standard deviation."""

    @cached_property
    def name(self) -> str:
        """File name that no other run has."""
        facts = asdict(self)
        if self.head == "common":  # runs of earlier versions had no other
            del facts["head"]
        if not self.scales_labels:  # nor this
            del facts["scales_labels"]
        return f"{self.task}-b{self.batch_size}-lr{self.lr:g}-e{self.epochs}-s{self.seed}-{digest(facts)}"

    def seed_of(self, purpose: str, *counters: int) -> int:
        """Return the seed of one of the run's random draws."""
        return int(hash_uint64(self.seed, purpose, *counters).item()) >> 1

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> TuningRun:
        """Return the run of a line of runs.jsonl."""
        return cls(**{"head": "common"} | {name: row[name] for name in cls.__dataclass_fields__ if name in row})


class RunStore(Store):
    """Store of finished runs in runs.jsonl.

    One line is one finished run; weights, data, hyper-parameters and seed identify it. An undefined score counts as
    `Metric.undefined` in medians, averages and the choice of the grid point, and is marked: one seed at 0.50 with four
    collapsed seeds is worse than five seeds at 0.45.
    """

    def __init__(self, path: Path, on_damage: Callable[[str], None] | None = None, tasks: Container[str] | None = None):
        """Read the finished runs. With `tasks`, lines of other tasks count as damaged; `Store` explains `on_damage`.

        Raises:
            UserError: a line is damaged or of another task, and there is no `on_damage`.
        """

        def read(row: Row) -> Row:
            if tasks is not None and row["task"] not in tasks:
                raise ValueError(f"no task {row['task']!r}")
            return count_undefined(row)

        super().__init__(path, lambda row: TuningRun.of_row(row).name, "a run of this program", read, on_damage)


_KEYS: dict[str, Any] = {
    "task": str, "batch_size": int, "lr": float, "epochs": int, "seed": int, "max_seq_length": int, "encoder": str,
    "data": str, "micro_batch_size": int, "layerwise_lr_decay": float, "precision": str, "load": str, "metric": str,
    "train_examples": int, "dev_examples": int, "seconds": float, "score": float | None,
    "epoch_scores": Sequence[float | None],
}  # fmt: skip
"""Required key of a line → type hint of its value."""


def count_undefined(row: dict[str, Any], undefined: float = 0.0) -> dict[str, Any]:
    """Return a row with undefined scores (null) replaced by the score `undefined` and marked.

    `undefined` marks `score`; `other_undefined` lists the files with undefined `other_scores`. A row that was converted
    before stays the same. Raises KeyError, TypeError or ValueError if the row is not a finished run.
    """
    if wrong := misfit(row, _KEYS | {"other_scores": Mapping[str, float | None]} if "other_scores" in row else _KEYS):
        raise ValueError(wrong)
    epochs = [_count(score, undefined) for score in row["epoch_scores"]]
    best = max(epochs)
    counted = row | {
        "score": _count(row["score"], undefined),
        "undefined": bool(row.get("undefined", row["score"] is None)),
        "best_epoch_score": best,
        "best_epoch": epochs.index(best) + 1,
        "epoch_scores": epochs,
    }
    if "other_scores" in row:
        others = row["other_scores"]
        counted["other_scores"] = {file: _count(score, undefined) for file, score in others.items()}
        counted["other_undefined"] = row.get("other_undefined", [file for file in others if others[file] is None])
    return counted


def _count(score: float | None, undefined: float) -> float:
    return undefined if score is None else float(score)


@dataclass(frozen=True)
class Cell:
    """Result of one encoder on one task at its best grid point."""

    task: str
    rows: list[dict[str, Any]]
    """Lines of runs.jsonl in the form of `RunStore`, one per seed."""
    left_out: int = 0
    """Number of the encoder's runs on the task under other conditions."""

    @property
    def scores(self) -> list[float]:
        """Last epoch's scores as fractions, one per seed."""
        return [row["score"] for row in self.rows]

    @property
    def median(self) -> float:
        """Median of the scores."""
        return statistics.median(self.scores)

    @property
    def undefined(self) -> int:
        """Number of undefined scores, which count as `Metric.undefined`."""
        return sum(row["undefined"] for row in self.rows)

    @property
    def metric(self) -> str:
        """Name of the scores' metric."""
        return str(self.rows[0]["metric"])

    @property
    def score_name(self) -> str:
        """Metric as the tables show it (`Kind.score_name`); GLUE's keep its plain name."""
        facts = self.rows[0].get("facts")
        return KINDS[facts["kind"]].score_name(Task.of(facts)) if facts and facts["kind"] in KINDS else self.metric

    @property
    def others(self) -> dict[str, Cell]:
        """Results of the same runs on further files, such as MNLI's mismatched one or a test file, by their names."""
        return {
            file: Cell(f"{self.task} ({file})", [_on_file(row, file) for row in self.rows])
            for file in self.rows[0].get("other_scores", {})
        }

    @property
    def beside(self) -> dict[str, list[float]]:
        """Scores by further metrics; an undefined score counts as 0."""
        rows = [row.get("beside", {}) for row in self.rows]
        return {name: [row[name] or 0.0 for row in rows] for name in rows[0] if all(name in row for row in rows)}

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Data, row length, number of training rows and scaling of labels; scores are comparable if these are equal."""
        return _conditions(TuningRun.of_row(self.rows[0]))


def _on_file(row: dict[str, Any], file: str) -> dict[str, Any]:
    """Return a line of runs.jsonl as if a further file were its first one."""
    undefined, examples = file in row["other_undefined"], row.get("other_examples", {}).get(file, "")
    score = row["other_scores"][file]
    return row | {"file": file, "score": score, "undefined": undefined, "dev_examples": examples, "baseline": None}


Cells = dict[str, Cell]


def best_cells(
    rows: Iterable[dict[str, Any]], order: Sequence[str] = (), asked: Iterable[TuningRun] = ()
) -> dict[str, Cells]:
    """Return encoder's name → task → cell at the best grid point, tasks in `order`, others after them.

    A cell has only runs with the `conditions` under which most of the encoder's runs on the task were made, the newest
    of several. If some of its runs are `asked` for, it has no others.

    A grid point is every setting of a run except its seed. The best point is the one with the highest median of the
    last epoch's scores among the points with the most seeds.
    """
    known = {TuningRun.of_row(row): row for row in rows}  # the same run in two folders counts once
    wanted = {run for run in asked if run in known}
    places = {(run.encoder, run.task) for run in wanted}
    known = {run: row for run, row in known.items() if run in wanted or (run.encoder, run.task) not in places}
    # One median must not mix scores from different data, row lengths, numbers of training rows or scales of labels.
    counts = Counter((run.encoder, run.task, _conditions(run)) for run in known)
    most = {place[:2]: place[2] for place in sorted(counts, key=counts.__getitem__)}
    known = {run: row for run, row in known.items() if _conditions(run) == most[run.encoder, run.task]}
    loads = {run.encoder: row["load"] for run, row in known.items()}  # the newest path of each encoder
    groups: dict[str, dict[str, dict[TuningRun, list[dict[str, Any]]]]] = {}
    for run, row in known.items():
        load = loads[run.encoder]
        name = f"{load} ({run.encoder[:8]})" if [*loads.values()].count(load) > 1 else load
        groups.setdefault(name, {}).setdefault(run.task, {}).setdefault(replace(run, seed=0), []).append(row)
    return {
        name: {task: _best(task, tasks[task], counts) for task in dict.fromkeys([*order, *tasks]) if task in tasks}
        for name, tasks in groups.items()
    }


def task_order(encoders: dict[str, Cells], order: Sequence[str]) -> list[str]:
    """Return the tasks of all encoders, in `order`, others after them."""
    found = dict.fromkeys(task for cells in encoders.values() for task in cells)
    return [task for task in dict.fromkeys([*order, *found]) if task in found]


def _conditions(run: TuningRun) -> tuple[Any, ...]:
    return run.data, run.max_seq_length, run.max_train_examples, run.scales_labels


def _best(task: str, points: dict[TuningRun, list[dict[str, Any]]], counts: Counter[tuple[Any, ...]]) -> Cell:
    def rank(point: TuningRun) -> tuple[int, float, int]:
        cell = Cell(task, points[point])
        return len(cell.rows), cell.median, -cell.undefined

    point = max(sorted(points, key=lambda run: (run.batch_size, run.lr, run.epochs, run.name)), key=rank)
    others = [key for key in counts if key[:2] == (point.encoder, task) and key[2] != _conditions(point)]
    left_out = sum(counts[key] for key in others)
    return Cell(task, sorted(points[point], key=lambda row: row["seed"]), left_out)


@dataclass(frozen=True)
class Suite:
    """Set of tasks with one page. It is sent to worker processes, so its functions are importable by name."""

    program: str
    """Name of the command in messages."""
    title: str
    """Heading of the page."""
    about: str
    """Explanation of the scores in Markdown, shown above the tables."""
    read: Callable[[], dict[str, TaskData]] = dict
    """Function that reads and checks all files of the tasks. It raises `UserError` for invalid files."""
    finish: Callable[[Any], list[str]] | None = None
    """Function that finishes a `Sweep` after its report, on every rank, and returns lines to print."""
    kept: tuple[str, ...] = ()
    """Tasks for which the fine-tuned model of the best run is kept."""
    second: Suite | None = None
    """Suite of a second sweep, from each encoder's best model of the first task in `kept`."""
    head: str = "family"
    """Value of `TuningRun.head` for its runs."""
    scales_labels: bool = False
    """Value of `TuningRun.scales_labels` for its regressions."""
    known: Mapping[str, Task] | None = None
    """Tasks that its runs.jsonl may contain, in the order of the tables; None for tasks of the user, any of them."""
    official_sizes: Mapping[str, int] = field(default_factory=dict)
    """Task → number of rows of its official development file."""
    pooled: Mapping[str, str] = field(default_factory=dict)
    """Task → further development file whose mean with the first one is shown too."""
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a mean in the table → its scores: a task, or `TASK (FILE)` for a further development file."""
    published: Table | None = None
    """Published scores, with tasks as columns, to compare the encoders with."""

    @property
    def order(self) -> Sequence[str]:
        """Tasks in the order of the tables; others follow."""
        return list(self.known or ())

    def task(self, row: dict[str, Any]) -> Task:
        """Return the task of a line of runs.jsonl. Raises `UserError` for an unknown task."""
        if self.known is not None:
            return self.known[row["task"]]
        try:
            task = Task.of(row["facts"])
        except (KeyError, TypeError):
            raise UserError(f"its line has no facts about the task {row['task']}") from None
        if task.kind not in KINDS or task.metric not in KINDS[task.kind].metrics:
            raise UserError(f"its kind {task.kind} and metric {task.metric} are a plug-in's: give its --plugin again")
        return task

    def means(self, cells: Cells) -> dict[str, float | None]:
        """Return name in `averages` → mean; None if a score is missing."""
        scores = {task: cell.median for task, cell in cells.items()}
        for cell in cells.values():
            scores |= {other.task: other.median for other in cell.others.values()}
        return {
            name: statistics.fmean(scores[part] for part in parts) if scores.keys() >= set(parts) else None
            for name, parts in self.averages.items()
        }

    def combined(self, cell: Cell) -> dict[str, list[float]]:
        """Return the mean of a cell's score and that of its `pooled` file: label → one score per seed."""
        if (other := cell.others.get(self.pooled.get(cell.task, ""))) is None:
            return {}
        pairs = zip(cell.scores, other.scores, strict=True)
        return {f"{cell.task} (mean of both)": [statistics.fmean(pair) for pair in pairs]}

    def published_table(self, encoders: dict[str, Cells]) -> Table | None:
        """Return `published` if an encoder was scored on one of its tasks with rows of the official number."""
        is_official = self.published is not None and any(
            task in self.published.header and cell.rows[0]["dev_examples"] == self.official_sizes[task]
            for cells in encoders.values()
            for task, cell in cells.items()
        )
        return self.published if is_official else None


HEADER = "file\tindex\tprediction\tlabel"

Scored = dict[str, tuple[Any, Any]]
"""Development file → (labels, predictions) in the form that the task's metric takes."""


def predictions_file(folder: Path, run: TuningRun) -> Path:
    """Return the file of a run's predictions in an output folder."""
    return folder / "predictions" / f"{run.name}.tsv"


def write_predictions(path: Path, task: Task, scored: Scored) -> None:
    """Write a run's predictions.

    The file, OUT/predictions/RUN.tsv, has the columns file, index (the row's number from 0), prediction and label.
    Classes are written by name, numbers with all digits, and a prediction that is not finite as `nan`.
    """
    kind, lines = KINDS[task.kind], [HEADER]
    for file, sides in scored.items():
        texts = (map(kind.text_of, kind.as_values(task, side)) for side in sides)
        lines += [f"{file}\t{row}\t{told}\t{label}" for row, (label, told) in enumerate(zip(*texts, strict=True))]
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def read_predictions(content: bytes, task: Task) -> Scored:
    """Return the predictions in a file of `write_predictions`. Raises ValueError for any other content."""
    header, *lines = content.decode().removesuffix("\n").split("\n")
    if header != HEADER:
        raise ValueError(f"its first line is {header[:80]!r}")
    kind = KINDS[task.kind]
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for line in lines:
        file, index, prediction, label = line.split("\t")
        labels, predictions = found.setdefault(file, ([], []))
        if index != str(len(labels)):
            raise ValueError(f"{file}: row {index} is at the place of row {len(labels)}")
        labels.append(kind.value_of(task, label))
        predictions.append(kind.value_of(task, prediction))
    return {file: kind.read(task, *sides) for file, sides in found.items()}


Interval = tuple[float, float]


class Resampled(NamedTuple):
    """Run on resampled rows of one file."""

    samples: np.ndarray
    """Score on each bootstrap sample, `[samples]`."""
    guess: float | None
    """Score of a constant guess on all rows; None for kinds of tasks without one."""


class Items:
    """Runs on resampled rows, each read when it is first needed."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._found: dict[tuple[Path, str | None], Resampled | None] = {}

    def of_run(self, row: dict[str, Any]) -> Resampled | None:
        """Return the run of a line that has its `folder`, on its `file`, by default the first one.

        None if its predictions are missing, damaged or too many.
        """
        path = predictions_file(Path(row.get("folder", "")), TuningRun.of_row(row))
        key = path, row.get("file")
        if key not in self._found:
            self._found[key] = self._read(row, path)
        return self._found[key]

    def _read(self, row: dict[str, Any], path: Path) -> Resampled | None:
        try:
            task = self._suite.task(row)
            files = read_predictions(path.read_bytes(), task)
            answers, predictions = files[row.get("file") or next(iter(files))]
        except (KeyError, OSError, StopIteration, UserError, ValueError):
            return None
        if len(answers) > MOST_RESAMPLED:
            return None
        kind, guess = KINDS[task.kind], row.get("baseline")
        if guess is None:
            guess = kind.constant_guess(task, answers)
        return Resampled(kind.resampled_scores(task, answers, predictions), guess)

    def samples(self, cell: Cell) -> np.ndarray | None:
        """Return a cell's median over seeds on each bootstrap sample, `[samples]`; None if predictions are missing."""
        found = [self.of_run(row) for row in cell.rows]
        samples = [each.samples for each in found if each]
        return np.median(samples, axis=0) if len(samples) == len(found) else None

    def of_cell(self, cell: Cell) -> Interval | None:
        """Return the 95 % interval of a cell's median over seeds; None if predictions are missing."""
        samples = self.samples(cell)
        return None if samples is None else percentile_interval(samples)

    def guess(self, cell: Cell) -> float | None:
        """Return the score of a constant guess on a cell's task; None if it is unknown."""
        found = self.of_run(cell.rows[0])
        return found.guess if found else cell.rows[0].get("baseline")

    def of_difference(self, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Interval | None:
        """Return the 95 % interval of the mean difference over pairs of runs; None if predictions are missing.

        Both runs of a pair are scored on the same samples.
        """
        found = [(self.of_run(first), self.of_run(second)) for first, second in pairs]
        differences = [first.samples - second.samples for first, second in found if first and second]
        return percentile_interval(np.mean(differences, axis=0)) if len(differences) == len(found) else None
