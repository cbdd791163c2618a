"""Row of a run, read from the outputs of its finished jobs; the only module that knows what these outputs look like."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.config import load_config
from megatron_ddrp.foreign import read_json
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.compare.items import pair_samples, task_samples
from megatron_ddrp.tasks.compare.jobs import Job
from megatron_ddrp.tasks.compare.runs import TrainingRun
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.finetune.cells import Cell, best_cells
from megatron_ddrp.tasks.finetune.runs import RUNS, RunStore
from megatron_ddrp.tasks.glue.tasks import averaged_tasks
from megatron_ddrp.tasks.jobs.store import Row
from megatron_ddrp.tasks.measures import (
    DIRECTION,
    GLUE,
    HEAD_SIMILARITY,
    LOSS,
    MINIMAL_PAIRS,
    SPACE,
    STEP_SECONDS,
    TOKEN_SIMILARITY,
    TOKENS,
    TRAINING_LOSS,
    TRIANGLE,
)

DIGITS = 5
"""Decimal places of curves."""
WARM_UP = 0.1
"""Share of a run's first steps whose times are left out, because memory, caches and compilers warm up."""


class Recording:
    """Results of the finished jobs of a run."""

    def __init__(self, work: Work, run: TrainingRun):
        """Read the metrics of the run itself; `READERS` add what its other jobs have measured."""
        self.work, self.run = work, run
        self.values: dict[str, float | None] = {}
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.more: Row = {}
        rows = read_rows(run.folder)
        self.tokens = max((row["consumed_tokens"] for row in rows if "consumed_tokens" in row), default=0)
        losses = [row["valid_lm_loss"] for row in rows if "valid_lm_loss" in row]
        times = [row["step_time"] for row in rows if row["iteration"] > WARM_UP * run.steps and "step_time" in row]
        self.values |= {LOSS: losses[-1]} if losses else {}
        self.values |= {STEP_SECONDS: statistics.median(times)} if times else {}
        self.values[TOKENS] = float(self.tokens)
        for name, key in ((TRAINING_LOSS, "lm_loss"), (LOSS, "valid_lm_loss")):
            self.add_curve(name, [(row["iteration"], row[key]) for row in rows if row.get(key)])

    def add_curve(self, measure: str, by_step: Sequence[tuple[float, float]]) -> None:
        """Add a curve, converted from steps to tokens."""
        per_step = self.tokens / self.run.steps
        self.curves[measure] = [(round(step * per_step), round(value, DIGITS)) for step, value in by_step]

    def add_score(self, task: str, cell: Cell) -> None:
        """Add a task's score, the sizes of its data, and the number of undefined runs, which count as 0."""
        self.values[task] = cell.median
        facts = {key: cell.rows[0][key] for key in ("train_examples", "dev_examples")} | {"undefined": cell.undefined}
        self.more.setdefault("tasks", {})[task] = facts


def make_row(work: Work, run: TrainingRun) -> Row:
    """Return the row of a finished run with the results of those of its jobs that are finished."""
    plan = work.plan
    config = load_config(run.folder)  # unlike the plan's, it has the size of the vocabulary
    parameters, _ = count_parameters(on_meta_device(config.model, config.objective))
    finished = {row["job"]: row for row in work.store}
    course = finished[run.job.name]
    jobs = [job for job in work.jobs_of(run) if job.name in finished]
    found = Recording(work, run)
    for job in jobs:
        if job.kind in READERS:
            READERS[job.kind](found, job)
    return found.more | {
        "run": run.job.name,
        "jobs": [job.name for job in jobs],
        "model": run.model.name,
        "half": run.half,
        "encoding": run.model.encoding,
        "objective": run.model.objective,
        "flags": dict(run.model.flags),
        "baseline": plan.baseline or plan.models[0].name,
        "check": plan.check,
        "seed": run.seed,
        "budget": str(plan.budget),
        "planned_tokens": planned_tokens(work, run),
        "steps": run.steps,
        "parameters": parameters,
        "common": dict(plan.flags),
        "hardware": course["hardware"],
        "versions": course["versions"],
        "workers": course["workers"],
        "seconds": sum(finished[job.name]["seconds"] for job in jobs),
        "tokens": found.tokens,
        "values": {name: value if _is_finite(value) else None for name, value in found.values.items()},
        "curves": {name: points for name, points in found.curves.items() if points},
    }


def draw_samples(work: Work, run: TrainingRun) -> dict[str, np.ndarray]:
    """Return measure → value on each bootstrap sample of its test items, as far as outputs of jobs are there."""
    found = {}
    for job in work.jobs_of(run):
        folder = job.output.parent
        if job.name not in work.store or not folder.is_dir():
            continue
        if job.kind == "minimal-pairs":
            found[MINIMAL_PAIRS] = pair_samples(folder)
        elif job.kind in ("glue", "finetune"):
            found |= {name: task_samples(cell, folder) for name, cell in _cells(work, run, job)}
    return {name: samples for name, samples in found.items() if samples is not None}


def planned_tokens(work: Work, run: TrainingRun) -> int:
    """Return the tokens of the budget; of steps or minutes it is steps x batch x sequence length."""
    if work.plan.budget.kind == "tokens":
        return round(work.plan.budget.amount)
    training = run.config.training
    return round(work.steps[run.model.name] * training.global_batch_size * run.config.mean_seq_length)


def _is_finite(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


def _json(job: Job) -> Any:
    return read_json(job.output)


def _planned(found: Recording, job: Job) -> list[dict[str, Any]]:
    """Return an analysis's rows of the planned checkpoints. A run that was stopped has one more than other seeds."""
    return [row for row in _json(job)["checkpoints"] if row["iteration"] in found.run.checkpoints]


def _similarity(found: Recording, job: Job) -> None:
    rows = _planned(found, job)
    for measure, key in ((TOKEN_SIMILARITY, "token_similarity"), (HEAD_SIMILARITY, "head_similarity")):
        found.add_curve(measure, [(row["iteration"], row[key]) for row in rows])
        found.values[measure] = float(rows[-1][key])


def _space(found: Recording, job: Job) -> None:
    last_layer = _planned(found, job)[-1]["layers"][-1]  # earlier versions had fewer keys
    found.values |= {measure: last_layer[key] for measure, key in SPACE.items() if last_layer.get(key) is not None}


def _direction(found: Recording, job: Job) -> None:
    models = _json(job)["models"]
    values = {measure: models[place][key] for measure, (place, key) in DIRECTION.items()}
    found.values |= {measure: value for measure, value in values.items() if value is not None}


def _triangle(found: Recording, job: Job) -> None:
    found.values[TRIANGLE] = _json(job)["models"][0]["share"]


def _maps(found: Recording, job: Job) -> None:
    found.more["maps"] = str(job.output.relative_to(found.work.folder))


def _throughput(found: Recording, job: Job) -> None:
    """Keep the results of all models that were timed together."""
    labels = {run.folder.name: run.arm.label for run in found.work.runs}
    found.more["throughput"] = {
        labels[Path(encoder["checkpoint"]).parent.name]: encoder["lengths"] for encoder in _json(job)["encoders"]
    }


def _pairs(found: Recording, job: Job) -> None:
    (encoder,) = _json(job)["encoders"]
    found.values[MINIMAL_PAIRS] = encoder["macro_average"]
    paradigms = {name: one["accuracy"] for name, one in encoder["paradigms"].items()}
    counts = {name: one["pairs"] for name, one in encoder["paradigms"].items()}
    same = max(counts.values(), default=0) if len(set(counts.values())) < 2 else counts
    found.more |= {"paradigms": paradigms, "pairs": same}
    found.more["fields"] = (encoder["fields"] or paradigms) | {"all": encoder["macro_average"]}


def _scores(found: Recording, job: Job) -> None:
    cells = dict(_cells(found.work, found.run, job))
    if job.kind == "finetune":
        for name, cell in cells.items():
            found.add_score(name, cell)
        return
    step = next(score.step for score in found.work.scores if score.job.name == job.name)
    averaged = averaged_tasks([{task: cell.median for task, cell in cells.items()}])
    average = {GLUE: statistics.fmean(cells[task].median for task in averaged)} if averaged else {}
    for value in average.values():
        point = (round(step * found.tokens / found.run.steps), round(value, DIGITS))
        found.curves[GLUE] = sorted([*found.curves.get(GLUE, []), point])
    if step == found.run.steps:
        for task, cell in cells.items():
            found.add_score(task, cell)
        found.values |= average


def _cells(work: Work, run: TrainingRun, job: Job) -> Iterator[tuple[str, Cell]]:
    """Yield the task and the best grid point of a fine-tuning job of the last checkpoint, and of GLUE on any."""
    rows = list(RunStore(job.output.parent / RUNS))
    if job.kind == "glue" and work.plan.glue:
        rows = [row for row in rows if row["task"] in work.plan.glue.tasks]
    own = {measure.job.name: measure.task.name for measure in work.tasks}
    for cells in best_cells(rows).values():  # one encoder per folder
        for task, cell in cells.items():
            yield own.get(job.name, task), cell


READERS: dict[str, Callable[[Recording, Job], None]] = {
    "self-similarity": _similarity,
    "space": _space,
    "direction": _direction,
    "triangle": _triangle,
    "attention-maps": _maps,
    "throughput": _throughput,
    "minimal-pairs": _pairs,
    "glue": _scores,
    "finetune": _scores,
}
"""Kind of job → function that adds what its output says."""
