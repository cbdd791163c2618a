"""Fine-tune encoders on GLUE tasks and report the development scores.

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

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.config.reading import option, refuse
from megatron_ddrp.data.atomic import atomic_file, write_text
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json, refuse_stand_in
from megatron_ddrp.pages.markdown import Table, percent
from megatron_ddrp.run.launch import first_rank_speaks
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.options import Search, SweepOptions, parse_sweep, require, sweep_sections
from megatron_ddrp.tasks.finetune.runs import Suite, TuningRun, best_cells
from megatron_ddrp.tasks.finetune.table_files import Example, Examples, Task, TaskData, checked_rows, decode, tsv_rows
from megatron_ddrp.tasks.jobs import digest, one_at_a_time

if TYPE_CHECKING:
    from megatron_ddrp.tasks.finetune.workers import Sweep


@dataclass(frozen=True, kw_only=True)
class GlueTask(Task):
    """Row of the table `TASKS`, which states what differs from most tasks."""

    metric: str = "accuracy"
    labels: tuple[str, ...] = ("0", "1")
    text_columns: tuple[str, ...] = ("sentence1", "sentence2")
    """Columns of one sentence or of a pair, in the order in which they are encoded."""
    label_column: str = "label"
    """Column of the label."""
    dev_examples: int
    """Number of rows of the official (first) development file."""
    label_range: tuple[float, float] | None = None
    """Lowest and highest label of a regression."""
    dev_files: tuple[str, ...] = ("dev.tsv",)
    """Development files; the first one gives the task's score."""
    columns: tuple[str, ...] | None = None
    """Columns of train.tsv and dev.tsv if these have no header line; None if they have one."""
    several_tests: dict[str, str] = field(default_factory=dict)
    """Test file → its name in a submission, for a task with other files than test.tsv."""
    broken_rows: int = 0
    """Number of rows of train.tsv that may lack columns and are left out: the official QQP file has a few."""
    in_average: bool = True
    """True if the paper's eight-column average counts the task."""

    @property
    def submission_files(self) -> dict[str, str]:
        """Test file → its name in a submission; a file may be in another task's folder."""
        return self.several_tests or {"test.tsv": f"{self.name}.tsv"}


_ENTAILMENT = ("entailment", "not_entailment")

TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(name="RTE", labels=_ENTAILMENT, dev_examples=277),
        GlueTask(
            name="STS-B",
            metric="pearson",
            kind="regression",
            labels=(),
            label_column="score",
            label_range=(0.0, 5.0),
            dev_examples=1500,
        ),
        GlueTask(name="MRPC", text_columns=("#1 String", "#2 String"), label_column="Quality", dev_examples=408),
        GlueTask(
            name="CoLA",
            metric="matthews",
            text_columns=("sentence",),
            columns=("source", "label", "star", "sentence"),
            dev_examples=1043,
        ),
        GlueTask(name="SST-2", text_columns=("sentence",), dev_examples=872),
        GlueTask(name="QNLI", labels=_ENTAILMENT, text_columns=("question", "sentence"), dev_examples=5463),
        GlueTask(
            name="QQP",
            text_columns=("question1", "question2"),
            label_column="is_duplicate",
            dev_examples=40430,
            broken_rows=10,
        ),
        GlueTask(
            name="MNLI",
            labels=("contradiction", "entailment", "neutral"),
            label_column="gold_label",
            dev_examples=9815,
            dev_files=("dev_matched.tsv", "dev_mismatched.tsv"),
            several_tests={
                "test_matched.tsv": "MNLI-m.tsv",
                "test_mismatched.tsv": "MNLI-mm.tsv",
                "../diagnostic/diagnostic.tsv": "AX.tsv",
            },
        ),
        GlueTask(name="WNLI", dev_examples=71, in_average=False),
    )
}
"""Tasks by name, in the order of the paper's tables; WNLI, which is in no average, comes last.

Files, columns, labels and metric are those of the official TSV release. Files have a header line except CoLA's
train.tsv and dev.tsv. The first development file gives a task's score. The labels are in alphabetical order, which
fixes the class numbers.
"""

PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_average)


def averaged_tasks(scores: Collection[Mapping[str, float]]) -> list[str]:
    """Return the tasks of an average that all of `scores` (task → score) have, so that all averages are comparable."""
    return [task for task in PAPER_TASKS if scores and all(task in found for found in scores)]


PAPER_ROWS: tuple[tuple[str, tuple[float, ...], float], ...] = (
    ("BERT (MLM) 500k steps", (68.23, 88.92, 86.74, 57.05, 91.97, 90.41, 90.74, 83.41), 82.18),
    ("BERT (MTH) 500k steps", (71.84, 89.41, 86.76, 61.40, 92.08, 90.59, 90.76, 83.61), 83.31),
    ("BERT (MLM) 1M steps", (70.75, 89.66, 87.50, 59.65, 92.20, 91.23, 91.00, 84.33), 83.29),
    ("BERT-R (MLM) 1M steps", (71.84, 89.68, 87.99, 60.82, 92.66, 91.54, 91.13, 85.45), 83.89),
    ("TUPE (MLM) 1M steps", (68.59, 89.61, 86.02, 62.82, 92.66, 91.26, 91.04, 84.88), 83.36),
    ("DeBERTa (MLM) 1M steps", (73.28, 89.14, 87.99, 60.60, 92.66, 92.14, 91.00, 85.93), 84.09),
    ("DDRP (MLM) 1M steps", (72.20, 90.01, 88.25, 62.82, 92.41, 92.31, 91.24, 86.02), 84.41),
    ("BERT (MTH) 1M steps", (73.64, 90.16, 88.48, 62.31, 92.43, 91.21, 91.12, 84.67), 84.25),
    ("BERT (MTH without HCD) 1M steps", (73.28, 90.41, 87.25, 60.85, 92.23, 91.37, 91.00, 84.22), 83.83),
    ("DDRP (MTH) 1M steps", (75.09, 90.41, 88.72, 63.36, 92.66, 92.24, 91.22, 86.22), 85.00),
)
"""Rows of the paper's Tables 1 to 3: name, scores in the order of `PAPER_TASKS`, average of the eight as printed."""


def paper_rows() -> list[list[str]]:
    """Return a table row per row of `PAPER_ROWS`: the name, its scores and their average."""
    return [[name, *(f"{score:.2f}" for score in (*scores, average))] for name, scores, average in PAPER_ROWS]


def read_task(task: GlueTask, data_dir: Path) -> TaskData:
    """Read and check train.tsv and the development files of `data_dir/task.name`.

    Raises:
        UserError: a file is missing, truncated, empty, not UTF-8, or has a wrong column or label.
    """
    folder = data_dir / task.name
    names = _files(task)
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name}: no such file; {task.name} needs {', '.join(names)} of the GLUE release in {folder}; "
                + _remedy(data_dir)
            )
    digest = hashlib.sha256()
    found = []
    for name in names:  # each file is read once, so that the digest is that of the rows
        raw = (folder / name).read_bytes()
        digest.update(raw)
        broken_rows = task.broken_rows if name == names[0] else 0
        found.append(Examples.of(read_examples(task, folder / name, raw, broken_rows)))
    dev = dict(zip((Path(name).stem for name in task.dev_files), found[1:], strict=True))
    return TaskData(task, found[0], dev, digest.hexdigest())


def _files(task: GlueTask) -> tuple[str, ...]:
    return ("train.tsv", *task.dev_files)


def _complete(data_dir: Path) -> list[str]:
    """Return the names of the tasks whose training and development files are in `data_dir`."""
    return [
        task.name for task in TASKS.values() if all((data_dir / task.name / name).is_file() for name in _files(task))
    ]


def _remedy(data_dir: Path) -> str:
    """Return the advice for a task that `data_dir` lacks: the tasks it has, a folder nearby that has some, the site."""
    if tasks := _complete(data_dir):
        return f"complete there: --tasks {' '.join(tasks)}"
    for folder in (*sorted(data_dir.glob("*/")), data_dir.parent):
        if tasks := _complete(folder):
            return f"use --data-dir {folder}, which has {', '.join(tasks)}"
    return "get the files from gluebenchmark.com/tasks"


def read_test(task: GlueTask, data_dir: Path) -> dict[str, Examples]:
    """Read the task's test sets; return name in a submission → examples, whose labels are nan.

    A missing diagnostic set is left out.

    Raises:
        UserError: another file is missing, or a file is not as released.
    """
    found = {}
    for file, name in task.submission_files.items():
        path = data_dir / task.name / file
        if not path.is_file():
            if file.startswith(".."):
                continue
            raise UserError(f"{path}: no such file; --predict-test needs the test sets of the GLUE release")
        found[name] = Examples.of(read_examples(task, path, path.read_bytes(), labelled=False))
    return found


def read_examples(task: GlueTask, path: Path, raw: bytes, broken_rows: int = 0, labelled: bool = True) -> list[Example]:
    """Return the rows of a file with the content `raw`, without up to `broken_rows` rows that lack columns.

    Tabs alone separate cells: quotation marks are text, also QQP's doubled ones. MRPC's files begin with a byte-order
    mark. Without `labelled` the file is a test set; test sets always have a header line, and the labels become nan.
    """
    refuse_stand_in(raw, path)
    lines = decode(str(path), raw).removeprefix("\ufeff").removesuffix("\n").split("\n")
    header = task.columns or () if labelled else ()
    columns = (*task.text_columns, *[task.label_column] * labelled)
    return [
        Example(
            tuple(row.cells[name] for name in task.text_columns),
            _parse_label(task, row.cells[task.label_column], row.where) if labelled else math.nan,
        )
        for row in checked_rows(str(path), tsv_rows(str(path), lines, header, broken_rows), columns)
    ]


def _parse_label(task: GlueTask, text: str, where: str) -> float:
    if task.labels:
        if text not in task.labels:
            raise UserError(f"{where}: label {text!r}, expected one of {', '.join(task.labels)}")
        return task.labels.index(text)
    assert task.label_range is not None
    lowest, highest = task.label_range
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not lowest <= value <= highest:
        raise UserError(f"{where}: label {text!r}, expected a number from {lowest:g} to {highest:g}")
    return value


MISMATCHED = "dev_mismatched"
STARTED = ("RTE", "MRPC", "STS-B")
"""Tasks that --start-from-task starts from another task's model, as RoBERTa (arXiv:1907.11692) did from MNLI's."""


def read_tasks(tasks: Sequence[str], data_dir: Path, with_tests: bool) -> dict[str, TaskData]:
    """Read and check all files of some tasks; return name → data. `with_tests` reads the test sets too."""
    tests = {name: read_test(TASKS[name], data_dir) for name in tasks} if with_tests else {}
    return {name: read_task(TASKS[name], data_dir)._replace(tests=tests.get(name, {})) for name in tasks}


GLUE = Suite(
    "megatron-ddrp glue",
    "GLUE development scores",
    "Each score is the last epoch's at the best grid point, the median over seeds, x 100: Matthews' correlation "
    "for CoLA, Pearson's for STS-B, accuracy otherwise; MNLI is the matched set. The average of 8 is defined as in "
    "the DDRP+MTH paper. An undefined score (a constant guess, or training that diverged) counts as 0 and is "
    "marked.",
    head="common",
    known=TASKS,
    official_sizes={name: task.dev_examples for name, task in TASKS.items()},
    pooled={"MNLI": MISMATCHED},
    averages={"average of 8": PAPER_TASKS, "average of 9": (*PAPER_TASKS, f"MNLI ({MISMATCHED})")},
    published=Table(
        ["the paper's encoder", *PAPER_TASKS, "average of 8"],
        [[f"{name} (paper)", *scores] for name, *scores in paper_rows()],
    ),
)
"""Suite of the nine GLUE tasks (Wang et al., arXiv:1804.07461), without its files.

The tables have two averages, each shown only if all of its tasks are there: of 8 numbers, as the paper prints it, with
MNLI as one number (the matched set), and of 9, with matched and mismatched as two. The paper's scores follow in a table
of their own if a development set has the official size. All encoders get the same head, so that a comparison measures
pre-training.
"""


SUBMISSION = tuple(name for task in TASKS.values() for name in task.submission_files.values())
"""Files that the server wants, including those of tasks that were not run."""
PLAIN = "submission"
"""Name of the folder of a single encoder."""
OWNER = "encoder.json"
"""File of a folder that names the encoder of its predictions."""


def write_submissions(sweep: Sweep) -> list[str]:
    """Write a folder and a zip archive per encoder from the test sets; return lines that name them.

    A submission is a folder of files TASK.tsv with the columns `index` and `prediction`, and a zip of them for
    gluebenchmark.com, which alone has the labels. Each folder has the predictions of one encoder; its file encoder.json
    says of which. A sweep keeps scores, not weights. Therefore each task's best run (the best seed at the best grid
    point) is repeated; its seed makes it the same run. At its end it predicts the test set. A task is skipped if the
    predictions of its best run on the same test set exist.

    The folder is OUT/submission, or OUT/submission-FINGERPRINT for several encoders or if OUT/submission has another
    encoder's predictions. An encoder that --start-from-task made shares the submission of the encoder that it was made
    from. Other commands with the same output folder wait meanwhile.
    """
    with one_at_a_time(sweep.options.output_dir, "submission") if sweep.speaks else contextlib.nullcontext():
        return _write_submissions(sweep)


def _write_submissions(sweep: Sweep) -> list[str]:
    sweep.store.refresh()
    made_from = sweep.options.made_from
    output, alone = sweep.options.output_dir, len(sweep.encoders) == 1
    owners = {number: made_from.get(encoder.folder, number) for number, encoder in sweep.encoders.items()}
    folders = {number: _folder(output, owner, alone) for number, owner in owners.items()}
    own = set(sweep.runs)
    cells = best_cells(row for row in sweep.store if TuningRun.of_row(row) in own)
    jobs: list[tuple[Path, TuningRun]] = []
    for tasks in cells.values():
        for cell in tasks.values():
            run = TuningRun.of_row(max(cell.rows, key=lambda row: (row["score"], not row["undefined"])))
            jobs.append((folders[run.encoder], run))
    digests = {
        task: digest({name: [row.texts for row in rows] for name, rows in data.tests.items()})
        for task, data in sweep.data.items()
    }
    todo = [
        (folder, run)
        for folder, run in jobs
        if not _says(_marker(folder, run), {"run": run.name, "test": digests[run.task]})
    ]
    if sweep.ranks:
        from megatron_ddrp.parallel.process_group import gather_objects  # here, because --help must not import torch

        todo = gather_objects(todo)[0]  # found after the first rank has the lock, and before it writes
    for number, (folder, run) in enumerate(todo, 1):
        task = TASKS[run.task]
        train, dev = sweep.encoded(run)
        test = {name: sweep.encode(run, rows, name) for name, rows in sweep.data[run.task].tests.items()}
        result = sweep.finetune(run, train, dev, test)
        if not sweep.speaks:
            continue
        if not _says(folder / OWNER, {"encoder": owners[run.encoder]}):
            _write_object(folder / OWNER, {"encoder": owners[run.encoder], "name": sweep.encoders[run.encoder].name})
        for name in test:
            write_test_predictions(folder / name, task, result.predictions[name])
        score = result.scores[next(iter(dev))][-1] or 0.0  # an undefined score counts as 0
        _write_object(_marker(folder, run), {"run": run.name, "dev_score": score, "test": digests[run.task]})
        print(f"test predictions [{number}/{len(todo)}]: {run.name}, development score {percent(score)}", flush=True)
    lines = []
    for folder, run in dict(jobs).items() if sweep.speaks else ():
        missing = pack_submission(folder)
        lacks = f"; the server also wants {', '.join(missing)}" if missing else ""
        other = f"; {output / PLAIN} keeps those of another encoder" if alone and folder.name != PLAIN else ""
        name = sweep.encoders[run.encoder].name
        lines.append(f"test predictions of {name}: written to {folder / 'submission.zip'}{other}{lacks}")
    return lines


def write_test_predictions(path: Path, task: GlueTask, predictions: np.ndarray) -> None:
    """Write one test set's file for the server, which wants numbers within the task's range.

    The server refuses nan: a row without a prediction gets 0 or the first class.
    """
    predictions = np.nan_to_num(predictions)
    if task.label_range is not None:
        predictions = np.clip(predictions, *task.label_range)
    kind = KINDS[task.kind]
    told = enumerate(map(kind.text_of, kind.as_values(task, predictions)))
    text = "\n".join(["index\tprediction", *(f"{index}\t{prediction}" for index, prediction in told)])
    write_text(path, f"{text}\n")


def pack_submission(folder: Path) -> list[str]:
    """Zip the folder's files into submission.zip; return the names of missing files that the server wants."""
    present = [name for name in SUBMISSION if (folder / name).is_file()]
    with atomic_file(folder / "submission.zip") as output, zipfile.ZipFile(output, "w") as archive:
        for name in present:
            archive.write(folder / name, name, zipfile.ZIP_DEFLATED)
    return [name for name in SUBMISSION if name not in present]


def _folder(output: Path, owner: str, alone: bool) -> Path:
    """Return the folder for an encoder's predictions. Every rank finds the same, even after rank 0 has begun to write.

    Predictions in OUT/submission without encoder.json count as another encoder's.
    """
    plain = output / PLAIN
    is_free = not any((plain / name).exists() for name in SUBMISSION)
    return plain if alone and (is_free or _says(plain / OWNER, {"encoder": owner})) else output / f"{PLAIN}-{owner}"


def _marker(folder: Path, run: TuningRun) -> Path:
    return folder / f"{run.task}.json"


def _says(path: Path, facts: dict[str, str]) -> bool:
    """Return whether a file is a JSON object with these facts; False for a missing or damaged file."""
    try:
        return bool(parse_json(path.read_bytes()).items() >= facts.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _write_object(path: Path, facts: dict[str, Any]) -> None:
    write_text(path, f"{json.dumps(facts)}\n")


@dataclass(frozen=True)
class GlueTasks:
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


SECTIONS = sweep_sections((GlueTasks,), Search)


def parse_arguments(arguments: Sequence[str] | None = None) -> SweepOptions:
    """Parse and check the command line."""
    return parse_sweep(ArgumentParser(description=__doc__), SECTIONS, Search, _glue, arguments)


def _glue(options: argparse.Namespace) -> Suite:
    require(options, "data_dir")
    first, tasks = options.start_from_task, dict.fromkeys(options.tasks)
    started = [task for task in tasks if first and task in STARTED and task != first]
    if first and not started:
        others = ", ".join(task for task in STARTED if task != first)
        refuse(f"--start-from-task {first}: --tasks must name at least one of {others}, which can start from it")
    kept = (first,) if first else ()
    read = partial(read_tasks, data_dir=options.data_dir, with_tests=options.predict_test)
    suite = replace(GLUE, finish=write_submissions if options.predict_test else None)
    second = replace(suite, read=partial(read, started)) if first else None
    own = [task for task in dict.fromkeys((*tasks, *kept)) if task not in started]
    return replace(suite, read=partial(read, own), kept=kept, second=second)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the inputs, do the missing runs, and report. Return 1 if --report leaves damaged runs out."""
    with first_rank_speaks():
        options = parse_arguments(arguments)
    from megatron_ddrp.tasks.finetune.workers import run  # here, because it imports torch

    return run(options)
