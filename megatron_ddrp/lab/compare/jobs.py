"""Jobs of a comparison with their names and kinds, and the lines that are printed about them.

The name of a job ends in a digest of everything that determines its result.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_ddrp.run.log import duration
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.jobs.forecast import Part, eta
from megatron_ddrp.tasks.jobs.store import Store, digest

RUN = "course"
"""Kind of a training run in names of jobs and folders, kept from the first version; `kind_name` shows "run"."""


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


class JobLines:
    """Printed lines about the jobs of a comparison: the plan, finished jobs and running ones."""

    def __init__(self, store: Store, workers: int):
        """Take the finished jobs and the number of jobs at once."""
        self.store, self.workers = store, workers

    def plan(self, jobs: Sequence[Job]) -> list[str]:
        """Return lines with the number of missing jobs by kind, and the time that they will take."""
        missing = self.store.missing(jobs)
        lines = [f"{len(missing)} of {len(jobs)} jobs to do, {self.workers} at once"]
        lines += [f"  {count:4} x {kind}" for kind, count in Counter(kind_name(job.kind) for job in missing).items()]
        return [*lines, f"  time left: {self._eta([_part(job) for job in missing])}"] if missing else lines

    def finished(self, job: Job, seconds: float, left: Sequence[Job]) -> str:
        """Return the line of a finished job."""
        losses = [row["valid_lm_loss"] for row in _rows(job) if "valid_lm_loss" in row]
        shown = "" if not losses else "not finite" if losses[-1] is None else f"{losses[-1]:.4f}"
        loss = f", validation masked-LM loss {shown}" * bool(shown)
        return f"{job}: {duration(seconds)}{loss}, eta {self._eta([_part(each) for each in left])}"

    def status(self, running: Sequence[tuple[Job, float]], left: Sequence[Job]) -> str:
        """Return the line of the running jobs with their step and the time since their start in `time.monotonic`."""
        now, words, steps, trained = time.monotonic(), [], {}, []
        for job, began in running:
            rows = _rows(job)
            steps[job.name] = step = rows[-1]["iteration"] if rows else 0
            words.append(f"{job}{f' step {step:,} of {job.work:,.0f}' * bool(step)} since {duration(now - began)}")
            if times := [row["step_time"] for row in rows if "step_time" in row][1:]:  # the first has the start in it
                trained.append(Part(kind_name(job.kind), step, step * fmean(times)))
        parts = [_part(job)._replace(work=job.work - steps.get(job.name, 0)) for job in left]
        return f"{'; '.join(words)}; eta {self._eta(parts, trained)}"

    def _eta(self, left: Sequence[Part], trained: Sequence[Part] = ()) -> str:
        finished = [Part(kind_name(row["kind"]), row["work"], row["seconds"]) for row in self.store]
        return eta(left, [*finished, *trained], self.workers)


def _part(job: Job) -> Part:
    return Part(kind_name(job.kind), job.work)


def _rows(job: Job) -> list[dict[str, float]]:
    return read_rows(job.output) if job.kind == RUN else []
