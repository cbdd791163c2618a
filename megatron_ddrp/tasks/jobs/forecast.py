"""Forecast of the time that jobs will take, from finished jobs of the same kind."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.jobs.store import AnyJob, Store


class Forecast(ABC, Generic[AnyJob]):
    """Base class of a forecast of jobs. It assumes that jobs of one kind take time in proportion to their work."""

    def __init__(self, store: Store):
        self.store = store
        self._probed: dict[str, float] = {}
        """Kind → seconds per unit of work, from a probe."""

    @abstractmethod
    def kind(self, job: AnyJob) -> str:
        """Return the kind of a job."""

    @abstractmethod
    def work(self, job: AnyJob) -> float:
        """Return the size of a job relative to others of its kind."""

    @abstractmethod
    def rates(self, kind: str) -> list[float]:
        """Return seconds per unit of work, one value per finished job of this kind."""

    def guess(self, job: AnyJob) -> float | None:
        """Return the expected seconds of a job if no job of its kind is finished; None if unknown.

        By default the first job of a kind is probed.
        """
        kind = self.kind(job)
        if kind not in self._probed:
            self._probed[kind] = self.probe(job)
        return self._probed[kind] * self.work(job)

    def probe(self, job: AnyJob) -> float:
        """Return the seconds per unit of work, from timing a part of a job.

        There is no default: a forecast without it has a `guess` of its own.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither probe() nor guess()")

    def expected(self, jobs: Iterable[AnyJob]) -> list[float | None]:
        """Return the expected seconds of each job; None for an unknown one."""
        rates: dict[str, float | None] = {}
        found = []
        for job in jobs:
            kind = self.kind(job)
            if kind not in rates:
                known = self.rates(kind)
                rates[kind] = statistics.median(known) if known else None
            rate = rates[kind]
            found.append(self.guess(job) if rate is None else rate * self.work(job))
        return found

    def total(self, jobs: Iterable[AnyJob]) -> float | None:
        """Return the expected seconds of all jobs in sequence; None if one of them is unknown."""
        return _sum(self.expected(jobs))

    def eta(self, left: Sequence[AnyJob], workers: int, remaining: Mapping[str, float] | None = None) -> str:
        """Return the time until `workers` finish the jobs `left`, as text; a job is never shared between workers.

        `remaining` has the seconds that running jobs still take, by name.
        """
        known = remaining or {}
        seconds = [known.get(job.name, expected) for job, expected in zip(left, self.expected(left), strict=True)]
        total = _sum(seconds)
        if total is None:
            return "not known yet"
        return duration(max(total / workers, *(each or 0.0 for each in seconds), 0.0))


def _sum(seconds: Iterable[float | None]) -> float | None:
    """Return the sum; None if one of the values is unknown."""
    values = list(seconds)
    known = [each for each in values if each is not None]
    return sum(known, 0.0) if len(known) == len(values) else None
