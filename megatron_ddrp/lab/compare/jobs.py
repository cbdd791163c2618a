"""Jobs of a comparison with their names and kinds, and the forecast of their time.

The name of a job ends in a digest of everything that determines its result.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.lab.compare.plan import Plan
from megatron_ddrp.run.log import duration
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.jobs.forecast import Forecast
from megatron_ddrp.tasks.jobs.store import Store, digest

RUN = "course"
"""Kind of a training run in names of jobs and folders, kept from the first version; `kind_name` shows "run"."""
PROBE = "probe"
"""Kind of a short run that measures the time of a step."""
KINDS: dict[str, float | str] = {
    "vocabulary": 60.0, "dataset": 120.0, PROBE: 30.0, RUN: "step_seconds", "minimal-pairs": "minimal_pairs_minutes",
    "finetune": "task_minutes", "glue": "glue_minutes", "self-similarity": 30.0, "triangle": 15.0,
    "attention-maps": 15.0, "space": 60.0, "direction": 20.0, "throughput": 60.0,
}  # fmt: skip
"""Kind → assumed seconds of a small job until one of its kind is finished, or the key under `expected` in the plan."""


@dataclass(frozen=True)
class Job:
    """One command and its output."""

    kind: str
    """Kind of the job."""
    name: str
    title: str
    command: tuple[str, ...]
    """Command line as typed."""
    output: Path
    """File or folder that the command makes."""
    needs: tuple[str, ...] = ()
    """Names of the jobs that must finish first."""
    work: float = 1.0
    """Size relative to other jobs of its kind."""

    def __str__(self) -> str:
        return f"{kind_name(self.kind)} {self.title}"


def kind_name(kind: str) -> str:
    """Return the name of a kind on the page and in printed lines."""
    return "run" if kind == RUN else kind


def log_file(folder: Path, job: Job) -> Path:
    """Return the log file of a job."""
    return folder / "logs" / f"{job.name}.log"


def job_name(kind: str, title: str, facts: Any) -> str:
    """Return a file name that differs between jobs with different `facts`."""
    short = re.sub(r"[^a-z0-9.]+", "-", title.lower().replace("α", "a")).strip("-")
    return f"{kind}-{short}-{digest(facts)}"


def open_store(folder: Path) -> Store:
    """Open the finished jobs of an output folder."""
    return Store(folder / "jobs.jsonl", lambda row: row["job"], "a job finished by megatron-ddrp compare")


class JobForecast(Forecast[Job]):
    """Forecast of a comparison's jobs."""

    def __init__(self, plan: Plan, store: Store):
        super().__init__(store)
        self.plan = plan
        self.paces: dict[str, float] = {}
        """Name of a running training run → its seconds per step, at the last status."""

    @property
    def workers(self) -> int:
        """Number of jobs at once."""
        return self.plan.workers

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
        usual = KINDS[job.kind]
        if isinstance(usual, float):
            return usual
        if job.kind == RUN and self.plan.budget.kind == "minutes":
            return self.plan.budget.amount * 60
        given: float | None = getattr(self.plan.expected, usual)
        return given and given * (job.work if job.kind == RUN else 60)

    def plan_lines(self, jobs: Sequence[Job]) -> list[str]:
        """Return lines with the number of missing jobs and their expected time, by kind and in total."""
        missing, workers = self.store.missing(jobs), self.plan.workers
        lines = [f"{len(missing)} of {len(jobs)} jobs to do, {workers} at once"]
        counts = Counter(job.kind for job in missing)
        for kind, count in ((kind, counts[kind]) for kind in KINDS if counts[kind]):
            total = self.total(job for job in missing if job.kind == kind)
            told = "time unknown until one is finished" if total is None else f"{total / 3600:.2f} hours of one worker"
            lines.append(f"  {count:4} x {kind_name(kind)}: {told}")
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
        shown = "" if not losses else "not finite" if losses[-1] is None else f"{losses[-1]:.4f}"
        loss = f", validation masked-LM loss {shown}" * bool(shown)
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


def _pace(rows: Sequence[dict[str, float]]) -> float | None:
    """Return the seconds per step of a running training run from its rows; the first of them has the start in it."""
    times = [row["step_time"] for row in rows if "step_time" in row][1:]
    return statistics.median(times) if times else None


def _rows(job: Job) -> list[dict[str, float]]:
    return read_rows(job.output) if job.kind == RUN else []
