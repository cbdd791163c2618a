"""--predict-test: predictions for the test sets, whose labels only gluebenchmark.com has.

A submission is a folder of files TASK.tsv with the columns `index` and `prediction`, and a zip of them for the server.

Each folder has the predictions of one encoder; its file encoder.json says of which.

A sweep keeps scores, not weights. Therefore each task's best run (the best seed at the best grid point) is repeated;
its seed makes it the same run. At its end it predicts the test set. A task is skipped if the predictions of its best
run on the same test set exist.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ddrp.data.atomic import atomic_file, write_text
from megatron_ddrp.foreign import parse_json
from megatron_ddrp.pages.markdown import percent
from megatron_ddrp.tasks.finetune.cells import best_cells
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Examples
from megatron_ddrp.tasks.glue.tasks import TASKS, GlueTask
from megatron_ddrp.tasks.jobs.store import Store, digest, one_at_a_time

if TYPE_CHECKING:
    from megatron_ddrp.tasks.finetune.sweep import Sweep

SUBMISSION = tuple(name for task in TASKS.values() for name in task.submission_files.values())
"""Files that the server wants, including those of tasks that were not run."""
PLAIN = "submission"
"""Name of the folder of a single encoder."""
OWNER = "encoder.json"
"""File of a folder that names the encoder of its predictions."""


def write_submissions(sweep: Sweep, store: Store, made_from: Mapping[Path, str]) -> list[str]:
    """Write a folder and a zip archive per encoder from the test sets; return lines that name them.

    The folder is OUT/submission, or OUT/submission-FINGERPRINT for several encoders or if OUT/submission has another
    encoder's predictions. `made_from` is the folder of an encoder that --start-from-task made → the fingerprint of the
    encoder that it was made from; both share a submission. Other commands with the same output folder wait meanwhile.
    """
    with one_at_a_time(sweep.options.output_dir, "submission") if sweep.speaks else contextlib.nullcontext():
        return _write_submissions(sweep, store, made_from)


def _write_submissions(sweep: Sweep, store: Store, made_from: Mapping[Path, str]) -> list[str]:
    store.refresh()
    output, alone = sweep.options.output_dir, len(sweep.encoders) == 1
    owners = {number: made_from.get(encoder.folder, number) for number, encoder in sweep.encoders.items()}
    folders = {number: _folder(output, owner, alone) for number, owner in owners.items()}
    own = set(sweep.runs)
    cells = best_cells(row for row in store.rows if Run.of_row(row) in own)
    jobs: list[tuple[Path, Run]] = []
    for tasks in cells.values():
        for cell in tasks.values():
            run = Run.of_row(max(cell.rows, key=lambda row: (row["score"], not row["undefined"])))
            jobs.append((folders[run.encoder], run))
    digests = {run.task: _digest(sweep.data[run.task].tests) for _, run in jobs}
    todo = [job for job in jobs if not _is_there(*job, digests[job[1].task])]
    if sweep.ranks:
        from megatron_ddrp.parallel.agreement import gather_objects  # here, because --help must not import torch

        todo = gather_objects(todo)[0]  # found after the first rank has the lock, and before it writes
    for number, (folder, run) in enumerate(todo, 1):
        task = TASKS[run.task]
        train, dev = sweep.encoded(run)
        test = {name: sweep.encode(run, rows, name) for name, rows in sweep.data[run.task].tests.items()}
        result = sweep.finetune(run, train, dev, test)
        if not sweep.speaks:
            continue
        if not _says(folder / OWNER, "encoder", owners[run.encoder]):
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
    return plain if alone and (is_free or _says(plain / OWNER, "encoder", owner)) else output / f"{PLAIN}-{owner}"


def _marker(folder: Path, run: Run) -> Path:
    return folder / f"{run.task}.json"


def _is_there(folder: Path, run: Run, test: str) -> bool:
    marker = _marker(folder, run)
    return _says(marker, "run", run.name) and _says(marker, "test", test)


def _digest(tests: Mapping[str, Examples]) -> str:
    """Return the fingerprint of a task's test sets."""
    return digest({name: [row.texts for row in rows] for name, rows in tests.items()})


def _says(path: Path, key: str, value: str) -> bool:
    """Return whether a file is a JSON object with this value; False for a missing or damaged file."""
    try:
        return bool(parse_json(path.read_bytes())[key] == value)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_object(path: Path, facts: dict[str, Any]) -> None:
    write_text(path, f"{json.dumps(facts)}\n")
