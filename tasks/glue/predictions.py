"""Predictions as files: one a run for the development sets, and GLUE's submission archive for the test sets.

OUT/predictions/RUN.tsv has the columns file, index (the row's number from 0), prediction and label, classes by their
official names and numbers in full, so that anybody can recompute a score. A submission is a folder of TASK.tsv with
`index` and `prediction`, and the same files zipped, as gluebenchmark.com takes them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron_ddrp.data.atomic import AtomicFile
from tasks.glue.tasks import TASKS, Task

SUBMISSION = tuple(name for task in TASKS.values() for name in task.submission_files.values())
"""All files that the server wants, whichever tasks one cares for."""


def write_predictions(path: Path, task: Task, scored: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Write file → (targets, predictions), each `[examples]` in the file's order."""
    lines = ["file\tindex\tprediction\tlabel"]
    for file, (targets, predictions) in scored.items():
        pairs = zip(_spelled(task, predictions), _spelled(task, targets), strict=True)
        lines += [f"{file}\t{index}\t{prediction}\t{label}" for index, (prediction, label) in enumerate(pairs)]
    _write(path, lines)


def write_test_predictions(path: Path, task: Task, predictions: np.ndarray) -> None:
    """Write one test set's file for the server; numbers are brought into the task's range, as it asks for."""
    if task.label_range is not None:
        predictions = np.clip(predictions, *task.label_range)
    spelled = _spelled(task, predictions)
    _write(path, ["index\tprediction", *(f"{index}\t{text}" for index, text in enumerate(spelled))])


def pack_submission(folder: Path) -> list[str]:
    """Zip the folder's files into submission.zip; returns the names that the server wants and that are not there."""
    present = [name for name in SUBMISSION if (folder / name).is_file()]
    with AtomicFile(folder / "submission.zip") as output, zipfile.ZipFile(output.stream, "w") as archive:
        for name in present:
            archive.write(folder / name, name, zipfile.ZIP_DEFLATED)
    return [name for name in SUBMISSION if name not in present]


def _spelled(task: Task, values: np.ndarray) -> Iterable[str]:
    if task.is_regression:
        return (repr(float(value)) for value in values)
    return (task.labels[int(value)] for value in values)


def _write(path: Path, lines: list[str]) -> None:
    with AtomicFile(path) as output:
        output.write(("\n".join(lines) + "\n").encode())
