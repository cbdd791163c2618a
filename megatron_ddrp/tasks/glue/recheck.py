"""Before a report: does each line of runs.jsonl agree with its file of predictions?"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.tasks.finetune.metrics import METRICS
from megatron_ddrp.tasks.glue.predictions import read_predictions
from megatron_ddrp.tasks.glue.runs import RUNS, Run, RunStore
from megatron_ddrp.tasks.glue.tasks import TASKS


class Trusted(NamedTuple):
    """What an output folder holds that a table may be made of."""

    rows: list[dict[str, Any]]
    left_out: list[str]
    """One sentence per damaged line, or per run whose predictions tell another score."""
    unchecked: list[str]
    """Sentences about runs that are in `rows` though nothing confirms their scores, and about half a line."""


def trusted_runs(folder: Path) -> Trusted:
    """Return the runs of OUT whose scores their predictions confirm, and name the others."""
    left_out: list[str] = []
    store = RunStore(folder / RUNS, lambda told: left_out.append(f"{told}; the line is left out"))
    rows, missing = [], []
    for row in store:
        path = folder / "predictions" / f"{Run.of_row(row).name}.tsv"
        if not path.is_file():
            missing.append(path)
        elif reason := _disagreement(row, path.read_bytes()):
            left_out.append(f"{path}: {reason}; its run is left out")
            continue
        rows.append(row)
    unchecked = []
    if missing:
        more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
        unchecked.append(f"{missing[0]}{more}: missing; what was predicted is unknown, the score is not checked")
    if store.ends_in_half_a_line:
        unchecked.append(f"{store.path}: its last line is cut off and counts as no run")
    return Trusted(rows, left_out, unchecked)


def _disagreement(row: dict[str, Any], content: bytes) -> str | None:
    """Return how a run's predictions differ from its row; None where they do not."""
    expected = row.get("predictions_crc32")
    if expected is not None and f"{zlib.crc32(content):08x}" != expected:
        return "changed since the run wrote it (its sum does not match)"
    task = TASKS[row["task"]]
    try:
        found = read_predictions(content, task)
    except ValueError as error:
        return f"no predictions of tasks.glue ({error})"
    scoring, *others = (Path(name).stem for name in task.dev_files)
    told = {scoring: row["score"]} | {name: row.get("other_scores", {}).get(name) for name in others}
    if found.keys() != told.keys():
        return f"holds predictions for {', '.join(found) or 'nothing'}, not for {', '.join(told)}"
    for name, (targets, predictions) in found.items():
        score = METRICS[task.metric](targets, predictions) or 0.0
        if told[name] is None or not math.isclose(score, told[name], rel_tol=0, abs_tol=1e-9):
            return f"gives {name} a {task.metric} of {score:.6f}, runs.jsonl says {told[name]}"
    if len(found[scoring][0]) != row["dev_examples"]:
        return f"holds {len(found[scoring][0])} rows of {scoring}, runs.jsonl says {row['dev_examples']}"
    return None
