"""--predict-test: predictions for the test sets, whose labels only gluebenchmark.com knows.

A sweep keeps scores, not weights. Each task's best run (the best seed at the best grid point) is therefore repeated,
which its seed makes the same run, and predicts the test set at its end. A task whose predictions are there is skipped
while the same run is the best.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_ddrp.tasks.glue.cells import best_cells
from megatron_ddrp.tasks.glue.data import read_test
from megatron_ddrp.tasks.glue.predictions import pack_submission, write_test_predictions
from megatron_ddrp.tasks.glue.report import percent
from megatron_ddrp.tasks.glue.runs import Run
from megatron_ddrp.tasks.glue.sweep import Sweep
from megatron_ddrp.tasks.glue.tasks import TASKS
from megatron_ddrp.tasks.jobs.store import Store


def write_submissions(sweep: Sweep, store: Store) -> None:
    """Write a folder and archive per encoder: OUT/submission, or OUT/submission-FINGERPRINT for several encoders."""
    store.refresh()
    own = set(sweep.runs)
    cells = best_cells(row for row in store.rows if Run.of_row(row) in own)
    jobs: list[tuple[Path, Run]] = []
    for tasks in cells.values():
        for cell in tasks.values():
            run = Run.of_row(max(cell.rows, key=lambda row: (row["score"], not row["undefined"])))
            name = "submission" if len(cells) == 1 else f"submission-{run.encoder}"
            jobs.append((sweep.options.output_dir / name, run))
    todo = [(folder, run) for folder, run in jobs if not _is_there(folder, run)]  # before anybody writes
    for number, (folder, run) in enumerate(todo, 1):
        task = TASKS[run.task]
        train, dev = sweep.encoded(run)
        test = {name: sweep.encode(run, rows) for name, rows in read_test(task, sweep.options.data_dir).items()}
        result = sweep.finetune(run, train, dev, test)
        if not sweep.speaks:
            continue
        for name in test:
            write_test_predictions(folder / name, task, result.predictions[name])
        score = result.scores[next(iter(dev))][-1] or 0.0  # 0 where it is undefined
        _marker(folder, run).write_text(json.dumps({"run": run.name, "dev_score": score}) + "\n", encoding="utf-8")
        print(f"test predictions [{number}/{len(todo)}]: {run.name}, development score {percent(score)}", flush=True)
    for folder in dict.fromkeys(folder for folder, _ in jobs) if sweep.speaks else ():
        missing = pack_submission(folder)
        lacks = f"; the server also wants {', '.join(missing)}" if missing else ""
        print(f"written to {folder / 'submission.zip'}{lacks}")


def _marker(folder: Path, run: Run) -> Path:
    return folder / f"{run.task}.json"


def _is_there(folder: Path, run: Run) -> bool:
    try:
        return json.loads(_marker(folder, run).read_text(encoding="utf-8"))["run"] == run.name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
