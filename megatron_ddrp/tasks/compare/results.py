"""Values measured so far, by arm and seed, read from finished jobs only."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.compare.items import Items, read_right
from megatron_ddrp.tasks.compare.measures import Measure, TaskMeasure
from megatron_ddrp.tasks.compare.plan import Plan
from megatron_ddrp.tasks.compare.runs import TrainingRun
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.finetune.cells import Cell, best_cells
from megatron_ddrp.tasks.finetune.runs import RUNS, RunStore
from megatron_ddrp.tasks.glue.tasks import averaged_tasks
from megatron_ddrp.tasks.ladder.measures import (
    DIRECTION,
    GLUE,
    HEAD_SIMILARITY,
    LOSS,
    MINIMAL_PAIRS,
    SPACE,
    STEP_SECONDS,
    TOKEN_SIMILARITY,
    TOKENS,
    TRIANGLE,
)
from megatron_ddrp.tasks.ladder.rows import Arm
from megatron_ddrp.tasks.statistics import BySeed

WARM_UP = 0.1
"""Share of a run's first steps whose times are left out, because memory, caches and compilers warm up."""

Curve = list[tuple[float, float]]
"""Pairs (step, value)."""
Scores = dict[str, float]
"""Task → score; an undefined score counts as 0."""
M = TypeVar("M", Measure, TaskMeasure)


class Results:
    """Values from the finished jobs of a plan."""

    def __init__(self, work: Work, only: TrainingRun | None = None):
        """Read the values of all finished runs, or of one."""
        self.plan: Plan = work.plan
        self.runs = [run for run in ([only] if only else work.runs) if run.job.name in work.store]
        self.values: dict[str, dict[Arm, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self.curves: dict[str, dict[Arm, dict[int, Curve]]] = defaultdict(lambda: defaultdict(dict))
        self.not_finite: dict[tuple[Arm, int], list[str]] = defaultdict(list)
        """Arm and seed → measures whose value is not finite; these have no value."""
        self.undefined: dict[str, dict[Arm, int]] = defaultdict(lambda: defaultdict(int))
        """Task → arm → number of undefined fine-tuning runs on the last checkpoints."""
        self.maps: dict[Arm, Path] = {}
        self.speeds: dict[Arm, dict[int, dict[str, Any]]] = {}
        """Arm → row length → result of `megatron-ddrp analyze throughput`."""
        self.items = Items()
        self.fields: dict[Arm, dict[int, dict[str, float]]] = defaultdict(dict)
        """Arm → seed → field of minimal pairs → accuracy; paradigm instead of field if the pairs have no fields."""
        self.facts: dict[str, dict[str, Any]] = {}
        """Task → one of its lines in runs.jsonl, which has the sizes of the data."""

        def finished(measures: Iterable[M]) -> list[M]:
            return [m for m in measures if m.run in self.runs and m.job.name in work.store]

        for run in self.runs:
            self._read_metrics(run)
        for analysis in finished(work.analyses):
            self._read_analysis(analysis.run, analysis.job.kind, analysis.job.output)
        scores: dict[TrainingRun, dict[int, Scores]] = defaultdict(dict)
        for score in finished(work.scores):
            if found := self._read_scores(score):
                scores[score.run][score.step] = found
        self.averaged = self._average_last(scores)
        """Tasks of the GLUE averages."""
        self.averaged_on_the_way = self._average_curves(scores)
        """Tasks of the GLUE averages on several checkpoints of a run."""
        for pairs in finished(work.pairs):
            self._read_pairs(pairs)
        for task in finished(work.tasks):
            self._read_task(task)

    @property
    def baseline(self) -> Arm:
        """Arm with which the others are compared."""
        return (self.plan.named(self.plan.baseline) if self.plan.baseline else self.plan.models[0]).arm()

    @property
    def arms(self) -> list[Arm]:
        """Arms with at least one finished run, in the plan's order."""
        names = [model.name for model in self.plan.rows]
        return sorted({run.arm for run in self.runs}, key=lambda arm: (names.index(arm.name), arm.half))

    def of(self, measure: str, arm: Arm) -> BySeed:
        """Return seed → value; empty if nothing is measured."""
        return dict(self.values.get(measure, {}).get(arm, {}))

    def _read_metrics(self, run: TrainingRun) -> None:
        rows = read_rows(run.folder)
        losses = [(float(row["iteration"]), row["valid_lm_loss"]) for row in rows if "valid_lm_loss" in row]
        if losses and losses[-1][1] is None:
            self.not_finite[run.arm, run.seed].append(LOSS)
        elif losses:
            self.values[LOSS][run.arm][run.seed] = losses[-1][1]
            self.curves[LOSS][run.arm][run.seed] = [point for point in losses if point[1] is not None]
        times = [row["step_time"] for row in rows if row["iteration"] > WARM_UP * run.steps and "step_time" in row]
        if times:
            self.values[STEP_SECONDS][run.arm][run.seed] = statistics.median(times)
        tokens = [row["consumed_tokens"] for row in rows if "consumed_tokens" in row]
        if tokens:
            self.values[TOKENS][run.arm][run.seed] = float(tokens[-1])

    def _read_analysis(self, run: TrainingRun, kind: str, output: Path) -> None:
        if kind == "attention-maps":
            self.maps[run.arm] = output
            return
        found = json.loads(output.read_text(encoding="utf-8"))
        if kind == "throughput":
            self._read_throughput(found["encoders"])
        elif kind == "self-similarity":
            self._read_similarities(run, found)
        else:
            for measure, value in LAST_VALUES[kind](run, found):
                if value is not None:  # earlier versions had fewer keys
                    self.values[measure][run.arm][run.seed] = value

    def _read_similarities(self, run: TrainingRun, found: dict[str, Any]) -> None:
        rows = _planned(run, found)
        for measure, key in ((TOKEN_SIMILARITY, "token_similarity"), (HEAD_SIMILARITY, "head_similarity")):
            curve = [(float(row["iteration"]), float(row[key])) for row in rows]
            self.curves[measure][run.arm][run.seed] = curve
            self.values[measure][run.arm][run.seed] = curve[-1][1]

    def _read_throughput(self, encoders: list[dict[str, Any]]) -> None:
        by_folder = {run.folder.name: run for run in self.runs}
        for encoder in encoders:
            arm = by_folder[Path(encoder["checkpoint"]).parent.name].arm
            self.speeds[arm] = {row["length"]: row for row in encoder["lengths"]}

    def _read_scores(self, score: Measure) -> Scores:
        assert self.plan.glue is not None
        folder = score.job.output.parent
        rows = [row for row in RunStore(folder / RUNS) if row["task"] in self.plan.glue.tasks]
        cells = [{}, *best_cells(rows).values()][-1]  # one encoder per folder, or none
        self.facts |= {task: cell.rows[0] for task, cell in cells.items()}
        if score.step == score.run.steps:
            for task, cell in cells.items():
                self._take_cell(task, score.run, cell, folder)
        return {task: cell.median for task, cell in cells.items()}

    def _take_cell(self, task: str, run: TrainingRun, cell: Cell, folder: Path) -> None:
        self.undefined[task][run.arm] += cell.undefined
        self.items.add_cell(task, run, cell, folder)

    def _read_task(self, measure: TaskMeasure) -> None:
        folder = measure.job.output.parent
        for cells in best_cells(RunStore(folder / RUNS)).values():
            for cell in cells.values():  # one encoder and one task per folder
                self.values[measure.task.name][measure.run.arm][measure.run.seed] = cell.median
                self._take_cell(measure.task.name, measure.run, cell, folder)

    def _read_pairs(self, measure: Measure) -> None:
        (found,) = json.loads(measure.job.output.read_text(encoding="utf-8"))["encoders"]
        arm, seed = measure.run.arm, measure.run.seed
        paradigms = {name: paradigm["accuracy"] for name, paradigm in found["paradigms"].items()}
        self.values[MINIMAL_PAIRS][arm][seed] = found["macro_average"]
        self.fields[arm][seed] = (found["fields"] or paradigms) | {"all": found["macro_average"]}
        self.items.add_pairs(measure.run, read_right(measure.job.output.parent))

    def _average_last(self, scores: Mapping[TrainingRun, Mapping[int, Scores]]) -> list[str]:
        """Store the scores of last checkpoints and their averages; return the tasks that all of them have."""
        last = {run: by_step[run.steps] for run, by_step in scores.items() if run.steps in by_step}
        tasks = averaged_tasks(last.values())
        for run, found in last.items():
            for task, score in found.items():
                self.values[task][run.arm][run.seed] = score
            if tasks:
                self.values[GLUE][run.arm][run.seed] = _mean(found, tasks)
        return tasks

    def _average_curves(self, scores: Mapping[TrainingRun, Mapping[int, Scores]]) -> list[str]:
        """Store the averages of runs with several scored checkpoints; return the tasks that all of these have."""
        curves = {run: by_step for run, by_step in scores.items() if len(by_step) > 1}
        tasks = averaged_tasks([found for by_step in curves.values() for found in by_step.values()])
        for run, by_step in curves.items() if tasks else ():
            points = [(float(step), _mean(by_step[step], tasks)) for step in sorted(by_step)]
            self.curves[GLUE][run.arm][run.seed] = points
        return tasks


def _mean(scores: Scores, tasks: list[str]) -> float:
    return statistics.fmean(scores[task] for task in tasks)


def _planned(run: TrainingRun, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an analysis's rows of the planned checkpoints. A run that was stopped has one more than other seeds."""
    return [row for row in found["checkpoints"] if row["iteration"] in run.checkpoints]


Values = Iterator[tuple[str, float | None]]
"""Pairs (measure, value)."""


def _space(run: TrainingRun, found: dict[str, Any]) -> Values:
    last_layer = _planned(run, found)[-1]["layers"][-1]
    return ((measure, last_layer.get(key)) for measure, key in SPACE.items())


def _direction(run: TrainingRun, found: dict[str, Any]) -> Values:
    return ((measure, found["models"][place][key]) for measure, (place, key) in DIRECTION.items())


def _triangle(run: TrainingRun, found: dict[str, Any]) -> Values:
    return iter([(TRIANGLE, found["models"][0]["share"])])


LAST_VALUES: dict[str, Callable[[TrainingRun, dict[str, Any]], Values]] = {
    "space": _space,
    "direction": _direction,
    "triangle": _triangle,
}
"""Kind of analysis → function that returns its values of a run's last checkpoint."""
