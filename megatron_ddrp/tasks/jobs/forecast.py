"""Time left of a sweep: the mean time of its finished jobs times the work that is left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_ddrp.run.log import duration


class Part(NamedTuple):
    """Job, or part of one, in a forecast."""

    kind: str
    """Kind of the job in words; jobs of one kind take time in proportion to their work."""
    work: float
    seconds: float = 0.0
    """Time that it took, if it is finished."""


def eta(left: Sequence[Part], finished: Iterable[Part], workers: int) -> str:
    """Return the time until `workers` finish the jobs `left`, as text. Workers never share a job."""
    seconds: dict[str, float] = defaultdict(float)
    work: dict[str, float] = defaultdict(float)
    for part in finished:
        seconds[part.kind] += part.seconds
        work[part.kind] += part.work
    total = sum(seconds[part.kind] / work[part.kind] * part.work for part in left if work[part.kind])
    known = duration(total / max(1, min(workers, len(left))))
    unknown = [part.kind for part in left if not work[part.kind]]
    if not unknown:
        return known
    none = f"not known until the first {unknown[0]} is finished"
    return f"more than {known} (no {unknown[0]} is finished yet)" if total else none
