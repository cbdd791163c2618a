"""Row of a run, read from the outputs of its finished jobs; the only module that knows what these outputs look like."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.config import load_config
from megatron_ddrp.foreign import read_json
from megatron_ddrp.lab.compare.measures import Measure, Work
from megatron_ddrp.lab.compare.rows import Samples
from megatron_ddrp.lab.compare.runs import TrainingRun
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.run.plateau import stored_level
from megatron_ddrp.tasks.finetune.cells import Cell, best_cells
from megatron_ddrp.tasks.finetune.own_tasks import OwnTasks
from megatron_ddrp.tasks.finetune.predictions import Items
from megatron_ddrp.tasks.finetune.runs import RUNS, RunStore
from megatron_ddrp.tasks.glue.suite import Glue
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
from megatron_ddrp.tasks.minimal_pairs.results import SCORES_FILE, PairStore, resampled_means
from megatron_ddrp.tasks.minimal_pairs.results import cell as cell_of_pairs

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
        self._consumed = {0: 0} | {row["iteration"]: row["consumed_tokens"] for row in rows if "consumed_tokens" in row}
        self.tokens = max(self._consumed.values())
        losses = [row["valid_lm_loss"] for row in rows if "valid_lm_loss" in row]
        times = [row["step_time"] for row in rows if row["iteration"] > WARM_UP * run.steps and "step_time" in row]
        self.values |= {LOSS: losses[-1]} if losses else {}
        self.values |= {STEP_SECONDS: statistics.median(times)} if times else {}
        self.values[TOKENS] = float(self.tokens)
        for name, key in ((TRAINING_LOSS, "lm_loss"), (LOSS, "valid_lm_loss")):
            self.add_curve(name, [(row["iteration"], row[key]) for row in rows if row.get(key)])

    def add_curve(self, measure: str, by_step: Sequence[tuple[float, float]]) -> None:
        """Add a curve, converted from steps to tokens."""
        self.curves[measure] = [(self.tokens_at(step), round(value, DIGITS)) for step, value in by_step]

    def tokens_at(self, step: float) -> int:
        """Return the tokens consumed up to a step; between two logged ones, each step counts the same."""
        steps = sorted(self._consumed)
        return round(np.interp(step, steps, [self._consumed[one] for one in steps]))

    def add_score(self, task: str, cell: Cell) -> None:
        """Add a task's score, the sizes of its data, and the number of undefined runs."""
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
    measures = [one for one in work.measures if one.run == run and one.job.name in finished]
    found = Recording(work, run)
    for measure in measures:
        READERS[measure.job.kind](found, measure)
    jobs = [run.job.name, *(measure.job.name for measure in measures)]
    return found.more | {
        "run": run.job.name,
        "jobs": jobs,
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
        "seconds": sum(finished[name]["seconds"] for name in jobs),
        "tokens": found.tokens,
        "unigram_loss": stored_level(run.folder) or 0.0,
        "values": {name: value if _is_finite(value) else None for name, value in found.values.items()},
        "curves": {name: points for name, points in found.curves.items() if points},
    }


def draw_samples(work: Work, run: TrainingRun) -> Samples:
    """Return the values on bootstrap samples of a run's test items, as far as outputs of jobs are there."""
    found = {}
    for measure in (one for one in work.measures if one.run == run):
        folder = measure.job.output.parent
        if measure.job.name not in work.store or not folder.is_dir():
            continue
        if measure.job.kind == "minimal-pairs":
            found[MINIMAL_PAIRS] = _pair_samples(folder)
        elif measure.job.kind in ("glue", "finetune"):
            items = Items(Glue() if measure.job.kind == "glue" else OwnTasks())
            found |= {name: items.samples(cell) for name, cell in _cells(work, measure)}
    return {name: samples for name, samples in found.items() if samples is not None}


def _pair_samples(folder: Path) -> np.ndarray | None:
    """Return the accuracy on resampled pairs of a single paradigm; None for several, which are resampled themselves.

    `folder` is the output of `megatron-ddrp minimal-pairs` with one encoder.
    """
    rows = list(PairStore(folder / SCORES_FILE))
    return resampled_means(cell_of_pairs(rows[0]).right) if len(rows) == 1 else None


def planned_tokens(work: Work, run: TrainingRun) -> int:
    """Return the tokens of the budget; of steps it is steps x batch x sequence length."""
    of_steps = work.steps[run.model.name] * run.config.training.global_batch_size * run.config.mean_seq_length
    return work.plan.budget.tokens or round(of_steps)


def _is_finite(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


def _json(measure: Measure) -> Any:
    return read_json(measure.job.output)


def _planned(found: Recording, measure: Measure) -> list[dict[str, Any]]:
    """Return an analysis's rows of the planned checkpoints. A run that was stopped has one more than other seeds."""
    return [row for row in _json(measure)["checkpoints"] if row["iteration"] in found.run.checkpoints]


def _similarity(found: Recording, measure: Measure) -> None:
    rows = _planned(found, measure)
    for name, key in ((TOKEN_SIMILARITY, "token_similarity"), (HEAD_SIMILARITY, "head_similarity")):
        found.add_curve(name, [(row["iteration"], row[key]) for row in rows])
        found.values[name] = float(rows[-1][key])


def _space(found: Recording, measure: Measure) -> None:
    last_layer = _planned(found, measure)[-1]["layers"][-1]  # earlier versions had fewer keys
    found.values |= {measure: last_layer[key] for measure, key in SPACE.items() if last_layer.get(key) is not None}


def _direction(found: Recording, measure: Measure) -> None:
    models = _json(measure)["models"]
    values = {measure: models[place][key] for measure, (place, key) in DIRECTION.items()}
    found.values |= {measure: value for measure, value in values.items() if value is not None}


def _triangle(found: Recording, measure: Measure) -> None:
    found.values[TRIANGLE] = _json(measure)["models"][0]["share"]


def _maps(found: Recording, measure: Measure) -> None:
    found.more["maps"] = str(measure.job.output.relative_to(found.work.folder))


def _throughput(found: Recording, measure: Measure) -> None:
    """Keep the results of all models that were timed together."""
    labels = {run.folder.name: run.arm.label for run in found.work.runs}
    found.more["throughput"] = {
        labels[Path(encoder["checkpoint"]).parent.name]: encoder["lengths"] for encoder in _json(measure)["encoders"]
    }


def _pairs(found: Recording, measure: Measure) -> None:
    (encoder,) = _json(measure)["encoders"]
    found.values[MINIMAL_PAIRS] = encoder["macro_average"]
    paradigms = {name: one["accuracy"] for name, one in encoder["paradigms"].items()}
    counts = {name: one["pairs"] for name, one in encoder["paradigms"].items()}
    same = max(counts.values(), default=0) if len(set(counts.values())) < 2 else counts
    found.more |= {"paradigms": paradigms, "pairs": same}
    found.more["fields"] = (encoder["fields"] or paradigms) | {"all": encoder["macro_average"]}


def _scores(found: Recording, measure: Measure) -> None:
    cells = dict(_cells(found.work, measure))
    is_last = measure.step == found.run.steps
    if measure.job.kind == "glue" and (averaged := averaged_tasks([{task: one.median for task, one in cells.items()}])):
        average = statistics.fmean(cells[task].median for task in averaged)
        point = (found.tokens_at(measure.step), round(average, DIGITS))
        found.curves[GLUE] = sorted([*found.curves.get(GLUE, []), point])
        found.values |= {GLUE: average} if is_last else {}
    for task, cell in cells.items() if is_last else ():
        found.add_score(task, cell)


def _cells(work: Work, measure: Measure) -> Iterator[tuple[str, Cell]]:
    """Yield the task and the best grid point of a fine-tuning job."""
    folder = measure.job.output.parent
    rows = [row | {"folder": str(folder)} for row in RunStore(folder / RUNS)]
    if work.plan.glue and not measure.task:
        rows = [row for row in rows if row["task"] in work.plan.glue.tasks]
    for cells in best_cells(rows).values():  # one encoder per folder
        for task, cell in cells.items():
            yield measure.task or task, cell


READERS: dict[str, Callable[[Recording, Measure], None]] = {
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
