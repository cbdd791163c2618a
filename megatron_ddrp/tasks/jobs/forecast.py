"""Forecast of the time that jobs will take, from finished jobs of the same kind."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic

from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.jobs.store import AnyJob, Store


class Forecast(ABC, Generic[AnyJob]):
    """Base class of a forecast of jobs. It assumes that jobs of one kind take time in proportion to their work."""

    def __init__(self, store: Store):
        self.store = store

    @abstractmethod
    def kind(self, job: AnyJob) -> str:
        """Return the kind of a job."""

    @abstractmethod
    def work(self, job: AnyJob) -> float:
        """Return the size of a job relative to others of its kind."""

    @abstractmethod
    def rates(self, kind: str) -> list[float]:
        """Return seconds per unit of work, one value per finished job of this kind."""

    @abstractmethod
    def guess(self, job: AnyJob) -> float | None:
        """Return the expected seconds of a job if no job of its kind is finished; None if unknown."""

    def total(self, jobs: Iterable[AnyJob]) -> float | None:
        """Return the expected seconds of all jobs in sequence; None if one of them is unknown."""
        rates: dict[str, float | None] = {}
        seconds = 0.0
        for job in jobs:
            kind = self.kind(job)
            if kind not in rates:
                found = self.rates(kind)
                rates[kind] = statistics.median(found) if found else None
            rate = rates[kind]
            expected = self.guess(job) if rate is None else rate * self.work(job)
            if expected is None:
                return None
            seconds += expected
        return seconds

    def eta(self, left: Sequence[AnyJob], workers: int, spent: float = 0.0) -> str:
        """Return the time until `workers` finish the jobs `left`, as text. `spent` seconds have passed already."""
        total = self.total(left)
        return "not known yet" if total is None else duration(max(0.0, total - spent) / workers)
