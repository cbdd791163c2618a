"""One piece of work of a comparison: a command line, run as a process of its own, done once and for ever.

A job is known by its name, which ends in a digest of all that decides its result. The process holds the lease of its
job together with whoever started it: after a kill of the driver the job stays taken until its process has ended too.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.tasks.jobs.store import Store

RUN = "course"
"""Kind of a training run. Its jobs and folders have this name since the first version, and people read "run"."""
KINDS = (
    "vocabulary", "dataset", "probe", RUN, "minimal-pairs", "finetune", "glue", "self-similarity", "triangle",
    "attention-maps", "space", "throughput",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One command and what it makes."""

    kind: str
    """One of `KINDS`."""
    name: str
    title: str
    command: tuple[str, ...]
    """What to start, as one would type it."""
    output: Path
    """The file or folder that it makes."""
    needs: tuple[str, ...] = ()
    """Names of the jobs before it."""
    work: float = 1.0
    """Size beside other jobs of its kind."""

    def __str__(self) -> str:
        return f"{shown_kind(self.kind)} {self.title}"


def shown_kind(kind: str) -> str:
    """Return a kind as people read it."""
    return "run" if kind == RUN else kind


def job_name(kind: str, title: str, facts: Any) -> str:
    """Return a file name that tells jobs of different `facts` apart."""
    short = re.sub(r"[^a-z0-9.]+", "-", title.lower().replace("α", "a")).strip("-")
    return f"{kind}-{short}-{digest(facts)}"


def digest(facts: Any) -> str:
    """Return twelve hexadecimal digits that change with any of the facts (JSON values)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def open_store(folder: Path) -> Store:
    """Open the finished jobs of an output folder."""
    return Store(folder / "jobs.jsonl", lambda row: row["job"], "a job finished by megatron-ddrp compare")


def log_file(folder: Path, job: Job) -> Path:
    """Return the file that a job's output goes into."""
    return folder / "logs" / f"{job.name}.log"
