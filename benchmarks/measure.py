"""Interleaved timing: on a noisy machine only ratios within a round mean something.

Every round runs all arms once in a fresh random order, so that drift hits them alike. An arm's figure is the median of
its time ÷ the base's time in the same round, with a bootstrap 95 % interval. An arm that repeats the base (the A/A row)
shows what the method itself can resolve. The process keeps freed memory, as training does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_ddrp.run.host_memory import keep_freed_memory

BOOTSTRAP_DRAWS = 4000


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


def time_rounds(arms: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, np.ndarray]:
    """Seconds `[rounds]` of each arm, interleaved in random order; CUDA work is waited for."""
    keep_freed_memory()
    order = np.random.default_rng(0)
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        for name in order.permutation(names):
            begin = time.perf_counter()
            arms[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: np.array(values) for name, values in seconds.items()}


def median_interval(values: np.ndarray) -> Interval:
    """Median of `[n]` values with its bootstrap interval."""
    draws = np.random.default_rng(1).choice(values, (BOOTSTRAP_DRAWS, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def verdict(interval: Interval, bound: float) -> str:
    """`met` when the whole interval lies below the bound, `missed` when it lies above, else `not resolved`."""
    if interval.high <= bound:
        return f"met (bound {bound})"
    return f"missed (bound {bound})" if interval.low > bound else f"not resolved (bound {bound})"
