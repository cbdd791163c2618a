"""Forecast of a comparison's jobs, from finished jobs or from the plan's expectation, and its printed lines."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence

from megatron_ddrp.run.log import duration
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.compare.jobs import KINDS, RUN, Job, shown_kind
from megatron_ddrp.tasks.compare.plan import Plan
from megatron_ddrp.tasks.jobs.forecast import Forecast
from megatron_ddrp.tasks.jobs.store import Store

_USUAL = {
    "vocabulary": 60.0, "dataset": 120.0, "probe": 30.0, "self-similarity": 30.0, "triangle": 15.0,
    "attention-maps": 15.0, "space": 60.0, "direction": 20.0, "throughput": 60.0,
}  # fmt: skip
"""Kind → assumed seconds of a small job until a job of its kind is finished."""


class JobForecast(Forecast[Job]):
    """Forecast of a comparison's jobs."""

    def __init__(self, plan: Plan, store: Store):
        super().__init__(store)
        self.plan = plan
        self.paces: dict[str, float] = {}
        """Name of a running training run → its seconds per step, at the last status."""

    def kind(self, job: Job) -> str:
        """Return the job's kind."""
        return job.kind

    def work(self, job: Job) -> float:
        """Return the job's work."""
        return job.work

    def rates(self, kind: str) -> list[float]:
        """Return seconds per unit of work of the finished jobs of a kind; until there is one, of running training."""
        finished = [row["seconds"] / row["work"] for row in self.store if row["kind"] == kind]
        return finished or (list(self.paces.values()) if kind == RUN else [])

    def guess(self, job: Job) -> float | None:
        """Return the plan's expected seconds, or the usual seconds of a small job; None if the plan has none."""
        expected = self.plan.expected
        if job.kind == RUN and self.plan.budget.kind == "minutes":
            return self.plan.budget.amount * 60
        if job.kind == RUN:
            return expected.step_seconds * job.work if expected.step_seconds else None
        if job.kind in _USUAL:
            return _USUAL[job.kind]
        minutes = {
            "glue": expected.glue_minutes,
            "minimal-pairs": expected.minimal_pairs_minutes,
            "finetune": expected.task_minutes,
        }[job.kind]
        return minutes * 60 if minutes else None

    def plan_lines(self, jobs: Sequence[Job]) -> list[str]:
        """Return lines with the number of missing jobs and their expected time, by kind and in total."""
        missing, workers = self.store.missing(jobs), self.plan.workers
        lines = [f"{len(missing)} of {len(jobs)} jobs to do, {workers} at once"]
        for kind, count in sorted(Counter(job.kind for job in missing).items(), key=lambda item: KINDS.index(item[0])):
            total = self.total(job for job in missing if job.kind == kind)
            told = "time unknown until one is finished" if total is None else f"{total / 3600:.2f} hours of one worker"
            lines.append(f"  {count:4} x {shown_kind(kind)}: {told}")
        total = self.total(missing)
        if total is None:
            lines.append("  expected: unknown until the first jobs are finished, or set `expected` in the plan")
        else:
            source = "measured" if self.rates(RUN) else "from the plan"
            lines.append(f"  expected: {total / 3600:.2f} hours of one worker, {duration(total / workers)} ({source})")
        return lines

    def line(self, job: Job, seconds: float, left: Sequence[Job]) -> str:
        """Return the printed line of a finished job."""
        losses = [row["valid_lm_loss"] for row in _rows(job) if "valid_lm_loss" in row]
        loss = f", validation masked-LM loss {_shown(losses[-1])}" if losses else ""
        return f"{job}: {duration(seconds)}{loss}, eta {self.eta(left, self.plan.workers)}"

    def status(self, running: Sequence[tuple[Job, float]], left: Sequence[Job]) -> str:
        """Return the status line: running jobs with their step and time since their start, and the expected end.

        `running` has jobs with their start in `time.monotonic`.
        """
        now = time.monotonic()
        rows = {job.name: _rows(job) for job, _ in running}
        self.paces = {name: pace for name, found in rows.items() if (pace := _pace(found))}
        parts, remaining = [], {}
        for (job, began), expected in zip(running, self.expected(job for job, _ in running), strict=True):
            step = rows[job.name][-1]["iteration"] if rows[job.name] else 0
            at_step = f" step {step:,} of {job.work:,.0f}" if step else ""
            parts.append(f"{job}{at_step} since {duration(now - began)}")
            if pace := self.paces.get(job.name):
                remaining[job.name] = pace * (job.work - step)
            elif expected is not None:
                remaining[job.name] = max(0.0, expected - (now - began))
        return f"{'; '.join(parts)}; eta {self.eta(left, self.plan.workers, remaining)}"


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _pace(rows: Sequence[dict[str, float]]) -> float | None:
    """Return the seconds per step of a running training run from its rows; the first of them has the start in it."""
    times = [row["step_time"] for row in rows if "step_time" in row][1:]
    return statistics.median(times) if times else None


def _rows(job: Job) -> list[dict[str, float]]:
    return read_rows(job.output) if job.kind == RUN else []
