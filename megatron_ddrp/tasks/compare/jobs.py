"""Job of a comparison: a command line that runs once, as a process of its own.

The name of a job ends in a digest of everything that determines its result. The job's process and the driver, which
started it, hold the lease together: if the driver is killed, the lease is free only after the process has ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.tasks.jobs.store import Store, digest

RUN = "course"
"""Kind of a training run in names of jobs and folders, kept from the first version; `shown_kind` shows "run"."""
PROBE = "probe"
"""Kind of a short run that measures the time of a step."""
KINDS = (
    "vocabulary", "dataset", PROBE, RUN, "minimal-pairs", "finetune", "glue", "self-similarity", "triangle",
    "attention-maps", "space", "direction", "throughput",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One command and its output."""

    kind: str
    """Kind of the job, one of `KINDS`."""
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
        return f"{shown_kind(self.kind)} {self.title}"


def shown_kind(kind: str) -> str:
    """Return the name of a kind on the page and in printed lines."""
    return "run" if kind == RUN else kind


def job_name(kind: str, title: str, facts: Any) -> str:
    """Return a file name that differs between jobs with different `facts`."""
    short = re.sub(r"[^a-z0-9.]+", "-", title.lower().replace("α", "a")).strip("-")
    return f"{kind}-{short}-{digest(facts)}"


def open_store(folder: Path) -> Store:
    """Open the finished jobs of an output folder."""
    return Store(folder / "jobs.jsonl", lambda row: row["job"], "a job finished by megatron-ddrp compare")


def log_file(folder: Path, job: Job) -> Path:
    """Return the log file of a job."""
    return folder / "logs" / f"{job.name}.log"
