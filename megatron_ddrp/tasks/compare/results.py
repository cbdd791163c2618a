"""Everything measured so far, by arm and seed, read from the finished jobs and from nothing else."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.compare.courses import Course
from megatron_ddrp.tasks.compare.plan import Model, Plan
from megatron_ddrp.tasks.compare.statistics import BySeed
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.glue.report import best_cells
from megatron_ddrp.tasks.glue.runs import RunStore

WARM_UP = 0.1
"""Share of a course's steps whose times are left out: memory, caches and compilers settle."""

LOSS, STEP_SECONDS, TOKENS = "validation masked-LM loss", "seconds of a step", "tokens"
TOKEN_SIMILARITY, HEAD_SIMILARITY, TRIANGLE, GLUE = "f(S)", "f(H)", "triangle share", "GLUE average"


@dataclass(frozen=True)
class Arm:
    """A model at a budget: one row of a table."""

    model: Model
    half: bool = False

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.model.name}, half the budget" if self.half else self.model.name


Curve = list[tuple[float, float]]
"""(step, value) pairs."""
Scores = dict[str, float]
"""Task → score; an undefined one counts as 0."""


class Results:
    """What the finished jobs of a plan found."""

    def __init__(self, work: Work):
        self.plan: Plan = work.plan
        done = [course for course in work.courses() if course.job.name in work.store]
        self.courses = done
        self.rows = {course: read_rows(course.folder) for course in done}
        self.values: dict[str, dict[Arm, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self.curves: dict[str, dict[Arm, dict[int, Curve]]] = defaultdict(lambda: defaultdict(dict))
        self.maps: dict[Arm, Path] = {}
        for course in done:
            self._read_course(course)
        for analysis in work.analyses():
            if analysis.job.name in work.store:
                self._read_analysis(analysis.course, analysis.job.kind, analysis.job.output)
        self.scores: dict[Arm, dict[int, dict[int, Scores]]] = defaultdict(lambda: defaultdict(dict))
        self.collapsed: dict[str, dict[Arm, int]] = defaultdict(lambda: defaultdict(int))
        """Task → arm → fine-tuning runs of the last checkpoints whose score is undefined."""
        self.facts: dict[str, dict[str, Any]] = {}
        """Task → one of its lines in runs.jsonl, for the sizes of the data."""
        for score in work.scores():
            if score.job.name in work.store:
                self._read_scores(score.course, score.step, score.job.output.parent)
        self._average_scores()

    @property
    def arms(self) -> list[Arm]:
        """Those of the plan with at least one finished course, in its order."""
        return list(dict.fromkeys(arm_of(course) for course in sorted(self.courses, key=self._order)))

    def of(self, measure: str, arm: Arm) -> BySeed:
        """Return seed → value; empty where nothing is measured."""
        return dict(self.values.get(measure, {}).get(arm, {}))

    def undefined(self, measure: str, arm: Arm) -> int:
        """Return how many fine-tuning runs behind an arm's score of a task are undefined; 0 for other measures."""
        return self.collapsed.get(measure, {}).get(arm, 0)

    def _order(self, course: Course) -> tuple[int, bool]:
        return self.plan.rows.index(course.model), course.half

    def _read_course(self, course: Course) -> None:
        arm, rows = arm_of(course), self.rows[course]
        losses = [(row["iteration"], row["valid_lm_loss"]) for row in rows if "valid_lm_loss" in row]
        if losses:
            self.values[LOSS][arm][course.seed] = losses[-1][1]
            self.curves[LOSS][arm][course.seed] = [(float(step), loss) for step, loss in losses]
        times = [row["step_time"] for row in rows if row["iteration"] > WARM_UP * course.steps and "step_time" in row]
        if times:
            self.values[STEP_SECONDS][arm][course.seed] = statistics.median(times)
        tokens = [row["consumed_tokens"] for row in rows if "consumed_tokens" in row]
        if tokens:
            self.values[TOKENS][arm][course.seed] = float(tokens[-1])

    def _read_analysis(self, course: Course, kind: str, output: Path) -> None:
        arm, seed = arm_of(course), course.seed
        if kind == "attention-maps":
            self.maps[arm] = output
            return
        found = json.loads(output.read_text(encoding="utf-8"))
        if kind == "triangle":
            self.values[TRIANGLE][arm][seed] = found["models"][0]["share"]
            return
        for measure, key in ((TOKEN_SIMILARITY, "token_similarity"), (HEAD_SIMILARITY, "head_similarity")):
            # A course that was stopped on the way has one more checkpoint, which the other seeds have not.
            rows = [row for row in found["checkpoints"] if row["iteration"] in course.checkpoints]
            curve = [(float(row["iteration"]), float(row[key])) for row in rows]
            self.curves[measure][arm][seed] = curve
            self.values[measure][arm][seed] = curve[-1][1]

    def _read_scores(self, course: Course, step: int, folder: Path) -> None:
        assert self.plan.glue is not None
        rows = [row for row in RunStore(folder / "runs.jsonl") if row["task"] in self.plan.glue.tasks]
        for cells in best_cells(rows).values():  # one encoder a folder
            self.scores[arm_of(course)][course.seed][step] = {task: cell.median for task, cell in cells.items()}
            if step == course.steps:
                for task, cell in cells.items():
                    self.collapsed[task][arm_of(course)] += cell.undefined
            self.facts |= {task: cell.rows[0] for task, cell in cells.items()}

    def _average_scores(self) -> None:
        """Average over the tasks that every averaged checkpoint has a score of, so that all are of the same tasks."""
        last = {(arm, seed): at[max(at)] for arm, by_seed in self.scores.items() for seed, at in by_seed.items()}
        last = {key: scores for key, scores in last.items() if self._is_last(*key)}
        self.averaged = self._common(list(last.values()))
        for (arm, seed), scores in last.items():
            for task, score in scores.items():
                self.values[task][arm][seed] = score
            if self.averaged:
                self.values[GLUE][arm][seed] = _mean(scores, self.averaged)
        curves = {
            (arm, seed): at for arm, by_seed in self.scores.items() for seed, at in by_seed.items() if len(at) > 1
        }
        self.averaged_on_the_way = self._common([scores for at in curves.values() for scores in at.values()])
        for (arm, seed), at in curves.items():
            if self.averaged_on_the_way:
                points = [(float(step), _mean(at[step], self.averaged_on_the_way)) for step in sorted(at)]
                self.curves[GLUE][arm][seed] = points

    def _is_last(self, arm: Arm, seed: int) -> bool:
        course = next(c for c in self.courses if arm_of(c) == arm and c.seed == seed)
        return course.steps in self.scores[arm][seed]

    def _common(self, scores: list[Scores]) -> list[str]:
        tasks = self.plan.glue.tasks if self.plan.glue else ()
        return [task for task in tasks if scores and all(task in found for found in scores)]


def arm_of(course: Course) -> Arm:
    """The row that a course belongs to."""
    return Arm(course.model, course.half)


def _mean(scores: Scores, tasks: list[str]) -> float:
    return statistics.fmean(scores[task] for task in tasks)
