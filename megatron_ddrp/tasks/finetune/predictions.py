"""File of a run's predictions for the development sets, and the check of runs.jsonl against it before a report.

OUT/predictions/RUN.tsv has the columns file, index (the row's number from 0), prediction and label. Classes are written
by name, numbers with all digits, and a prediction that is not finite as `nan`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.data.atomic import write_bytes
from megatron_ddrp.data.sealed import content_sum
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import Line
from megatron_ddrp.tasks.finetune.runs import RUNS, Run, RunStore
from megatron_ddrp.tasks.finetune.suite import Suite
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
    write_bytes(path, content)
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


class Trusted(NamedTuple):
    """Runs of an output folder that a table may show, and sentences about the others."""

    rows: list[dict[str, Any]]
    left_out: list[str]
    """One sentence per damaged line and per run whose predictions contradict its line."""
    unchecked: list[str]
    """Sentences about runs in `rows` without a file of predictions, and about a cut-off last line."""


def trusted_runs(folder: Path, suite: Suite) -> Trusted:
    """Return the runs of an output folder, without those whose predictions contradict their scores."""
    left_out: list[str] = []
    store = RunStore(folder / RUNS, lambda told: left_out.append(f"{told}; the line is left out"), suite.known)
    rows, missing = [], []
    for row in store:
        path = folder / "predictions" / f"{Run.of_row(row).name}.tsv"
        if not path.is_file():
            missing.append(path)
        elif reason := _reason(row, path.read_bytes(), suite):
            left_out.append(f"{path}: {reason}; its run is left out")
            continue
        rows.append(row)
    unchecked = []
    if missing:
        more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
        unchecked.append(f"{missing[0]}{more}: missing; without predictions the score is not checked")
    if store.ends_in_half_a_line:
        unchecked.append(f"{store.path}: its last line is cut off and counts as no run")
    return Trusted(rows, left_out, unchecked)


def _reason(row: dict[str, Any], content: bytes, suite: Suite) -> str | None:
    try:
        task = suite.task(row)
    except UserError as error:
        return str(error)
    return _disagreement(row, content, task, suite.program)


def _disagreement(row: dict[str, Any], content: bytes, task: Task, program: str) -> str | None:
    """Return a sentence about the difference between a run's predictions and its row; None if they agree."""
    expected = row.get("predictions_crc32")
    if expected is not None and content_sum(content) != expected:
        return "changed since the run wrote it (its sum does not match)"
    try:
        found = read_predictions(content, task)
        scores = {name: KINDS[task.kind].score(task.metric, *sides) or 0.0 for name, sides in found.items()}
    except ValueError as error:
        return f"no predictions of {program} ({error})"
    others = row.get("other_scores", {})
    scoring = next((name for name in found if name not in others), "no scoring file")
    told = {scoring: row["score"]} | others
    if found.keys() != told.keys():
        return f"holds predictions for {', '.join(found) or 'nothing'}, not for {', '.join(told)}"
    for name, score in scores.items():
        if told[name] is None or not math.isclose(score, told[name], rel_tol=0, abs_tol=1e-9):
            return f"gives {name} a {task.metric} of {score:.6f}, runs.jsonl says {told[name]}"
    if len(found[scoring][0]) != row["dev_examples"]:
        return f"holds {len(found[scoring][0])} rows of {scoring}, runs.jsonl says {row['dev_examples']}"
    return None
