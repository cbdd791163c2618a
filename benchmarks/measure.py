"""Interleaved timing: on a noisy machine only ratios within a round mean something.

Every round runs all arms once in a fresh random order, so that drift hits them alike. An arm's figure is the median of
its time ÷ the base's time in the same round, with a bootstrap 95 % interval. An arm that repeats the base (the A/A row)
shows what the method itself can resolve. The process keeps freed memory, as training does.

Importing this module puts the repository on the import path, so that a benchmark measures the code beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ddrp.run.loop import keep_freed_memory

BOOTSTRAP_DRAWS = 4000
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring, line by line, and the default of each flag."""

    class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
        pass

    return argparse.ArgumentParser(description=description, formatter_class=Formatter)


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


def time_rounds(
    arms: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Return the seconds `[rounds]` of each arm, interleaved in random order; CUDA work is waited for."""
    keep_freed_memory()
    order = np.random.default_rng(0)
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        for name in order.permutation(names):
            begin = clock()
            arms[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 0:
                seconds[name].append(clock() - begin)
    return {name: np.array(values) for name, values in seconds.items()}


def median_interval(values: np.ndarray) -> Interval:
    """Return the median of `[n]` values with its bootstrap interval."""
    draws = np.random.default_rng(1).choice(values, (BOOTSTRAP_DRAWS, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def verdict(interval: Interval, bound: float) -> str:
    """Return "met" if the whole interval lies below the bound, "missed" if it lies above, else "not resolved"."""
    if interval.high <= bound:
        return f"met (bound {bound})"
    return f"missed (bound {bound})" if interval.low > bound else f"not resolved (bound {bound})"


def print_ratio(name: str, ratios: np.ndarray, bound: float | None = None) -> None:
    """Print the median of `[rounds]` ratios with its interval, and how it stands to a bound."""
    interval = median_interval(ratios)
    print(f"  {name:<30} {interval}   {'' if bound is None else verdict(interval, bound)}".rstrip(), flush=True)
