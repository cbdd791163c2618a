"""File of a run's predictions for the development sets, from which its scores can be recomputed.

OUT/predictions/RUN.tsv has the columns file, index (the row's number from 0), prediction and label. Classes are written
by name, numbers with all digits, and a prediction that is not finite as `nan`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.data.sealed import content_sum
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import Line
from megatron_ddrp.tasks.finetune.task import Task

HEADER = "file\tindex\tprediction\tlabel"

Scored = dict[str, tuple[Any, Any]]
"""Development file → (labels, predictions) in the form that the task's metric takes."""


def write_predictions(path: Path, task: Task, scored: Scored) -> str:
    """Write a run's predictions; return the file's CRC-32 as eight hexadecimal digits."""
    lines = [HEADER]
    for file, (answers, predictions) in scored.items():
        lines += ["\t".join((file, *line)) for line in KINDS[task.kind].lines(task, answers, predictions)]
    content = ("\n".join(lines) + "\n").encode()
    with AtomicFile(path) as output:
        output.write(content)
    return content_sum(content)


def read_predictions(content: bytes, task: Task) -> Scored:
    """Return the predictions in a file of `write_predictions`. Raises ValueError for any other content."""
    header, *lines = content.decode().removesuffix("\n").split("\n")
    if header != HEADER:
        raise ValueError(f"its first line is {header[:80]!r}")
    found: dict[str, list[Line]] = {}
    for line in lines:
        file, index, prediction, label = line.split("\t")
        found.setdefault(file, []).append((index, prediction, label))
    return {file: _read_lines(file, task, rows) for file, rows in found.items()}


def _read_lines(file: str, task: Task, rows: list[Line]) -> tuple[Any, Any]:
    try:
        return KINDS[task.kind].read_lines(task, rows)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
