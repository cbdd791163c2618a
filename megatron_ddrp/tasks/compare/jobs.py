"""One piece of work of a comparison: a command line, run as a process of its own, done once and for ever.

A job is known by its name, which ends in a digest of all that decides its result. The process holds the lock of its
job together with whoever started it: after a kill of the driver the job stays taken until its process has ended too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.store import Store

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("vocabulary", "dataset", "probe", "course", "glue", "self-similarity", "triangle", "attention-maps")


@dataclass(frozen=True)
class Job:
    """What is to be done."""

    kind: str
    """One of `KINDS`."""
    name: str
    title: str
    """For people."""
    command: tuple[str, ...]
    """What to start, as one would type it in the repository's folder."""
    output: Path
    """The file or folder that it makes."""
    needs: tuple[str, ...] = ()
    """Names of the jobs before it."""
    work: float = 1.0
    """Size beside other jobs of its kind."""


def job_name(kind: str, title: str, facts: Any) -> str:
    """A file name that tells jobs of different `facts` apart."""
    short = re.sub(r"[^a-z0-9.]+", "-", title.lower().replace("α", "a")).strip("-")
    return f"{kind}-{short}-{digest(facts)}"


def digest(facts: Any) -> str:
    """Twelve hexadecimal digits that change with any of the facts (JSON values)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def open_store(folder: Path) -> Store[str]:
    """The finished jobs of an output folder."""
    return Store(folder / "jobs.jsonl", lambda row: row["job"], "a job finished by tasks.compare")


def log_file(folder: Path, job: Job) -> Path:
    """Where a job's output goes."""
    return folder / "logs" / f"{job.name}.log"


class Claim:
    """The right to do a job, while this object or a process that was given `descriptor` has it open."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    @classmethod
    def take(cls, folder: Path, job: Job) -> Claim | None:
        """None where somebody else has it.

        Raises:
            UserError: the file system has no locks.
        """
        path = folder / "claims" / f"{job.name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise UserError(
                f"{path}: this file system has no locks ({error.strerror}); put --output-dir on another one"
            ) from None
        return cls(descriptor)

    def release(self) -> None:
        """Let go; the job stays taken while its process lives."""
        os.close(self.descriptor)
