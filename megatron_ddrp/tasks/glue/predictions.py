"""Predictions as files: one per run for the development sets, and GLUE's submission archive for the test sets.

OUT/predictions/RUN.tsv has the columns file, index (the row's number from 0), prediction and label, classes by their
official names and numbers in full, so that anybody can recompute a score; a prediction that is not finite is `nan`. A
submission is a folder of TASK.tsv with `index` and `prediction`, and the same files zipped, as gluebenchmark.com takes
them.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.tasks.glue.tasks import TASKS, Task

SUBMISSION = tuple(name for task in TASKS.values() for name in task.submission_files.values())
"""All files that the server wants, whichever tasks one cares for."""


HEADER = "file\tindex\tprediction\tlabel"

Scored = dict[str, tuple[np.ndarray, np.ndarray]]
"""Development file → (targets, predictions), each `[examples]` in the file's order."""


def write_predictions(path: Path, task: Task, scored: Scored) -> str:
    """Write a run's predictions; return the file's CRC-32, eight hexadecimal digits."""
    lines = [HEADER]
    for file, (targets, predictions) in scored.items():
        pairs = zip(_spelled(task, predictions), _spelled(task, targets), strict=True)
        lines += [f"{file}\t{index}\t{prediction}\t{label}" for index, (prediction, label) in enumerate(pairs)]
    return _write(path, lines)


def read_predictions(content: bytes, task: Task) -> Scored:
    """Return what `write_predictions` wrote. Raises ValueError where `content` is nothing that it writes."""
    header, *lines = content.decode().removesuffix("\n").split("\n")
    if header != HEADER:
        raise ValueError(f"its first line is {header[:80]!r}")
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        file, index, prediction, label = line.split("\t")
        rows = found.setdefault(file, [])
        if int(index) != len(rows):
            raise ValueError(f"row {index} of {file} stands where row {len(rows)} should")
        rows.append((_value(task, label), _value(task, prediction)))
    return {file: tuple(np.array(rows).T) for file, rows in found.items()}  # type: ignore[misc]


def write_test_predictions(path: Path, task: Task, predictions: np.ndarray) -> None:
    """Write one test set's file for the server; numbers are brought into the task's range, as it asks for.

    The server takes no nan: a row without a prediction gets 0, or the first class.
    """
    predictions = np.nan_to_num(predictions)
    if task.label_range is not None:
        predictions = np.clip(predictions, *task.label_range)
    spelled = _spelled(task, predictions)
    _write(path, ["index\tprediction", *(f"{index}\t{text}" for index, text in enumerate(spelled))])


def pack_submission(folder: Path) -> list[str]:
    """Zip the folder's files into submission.zip; return the names that the server wants and that are not there."""
    present = [name for name in SUBMISSION if (folder / name).is_file()]
    with AtomicFile(folder / "submission.zip") as output, zipfile.ZipFile(output.stream, "w") as archive:
        for name in present:
            archive.write(folder / name, name, zipfile.ZIP_DEFLATED)
    return [name for name in SUBMISSION if name not in present]


def _spelled(task: Task, values: np.ndarray) -> Iterable[str]:
    if task.is_regression:
        return (repr(float(value)) for value in values)
    return (task.labels[int(value)] if math.isfinite(value) else "nan" for value in values)


def _value(task: Task, text: str) -> float:
    return float(text) if task.is_regression or text == "nan" else float(task.labels.index(text))


def _write(path: Path, lines: list[str]) -> str:
    content = ("\n".join(lines) + "\n").encode()
    with AtomicFile(path) as output:
        output.write(content)
    return f"{zlib.crc32(content):08x}"
