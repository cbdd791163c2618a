"""One readable progress line, and the same numbers in metrics.jsonl and for callbacks. Rank 0 only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ddrp.config import Config
from megatron_ddrp.run.callbacks import Callbacks
from megatron_ddrp.run.metrics import METRICS, MetricsFile

QUIET_SECONDS = 10
"""Seconds without a line after which the next step prints one, whether or not a row is due."""


class MetricsLog:
    """Log of a run: rows of numbers, whose `iteration` counts from 1, and lines for people.

    Raises `UserError` if metrics.jsonl cannot be written.
    """

    def __init__(
        self,
        config: Config,
        start_iteration: int,
        active: bool,
        logged_every: int | None = None,
        callbacks: Callbacks | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open the log; `logged_every` is `--log-interval` up to `start_iteration` (default: that of `config`).

        `now` is the clock in seconds.
        """
        self.active = active
        self.callbacks = callbacks or Callbacks()
        self._now, self._printed = now, now()
        self._file: MetricsFile | None = None
        if not active:
            return
        if config.checkpoint.save:
            path, load = Path(config.checkpoint.save) / METRICS, config.checkpoint.load
            self._file = MetricsFile(path, start_iteration, self.say)
            logged = start_iteration - start_iteration % (logged_every or config.logging.log_interval) or 1
            resumes_here = start_iteration and load and path.parent.resolve() == Path(load).resolve()
            if resumes_here and self._file.last_row < logged:
                self.say(f"{path}: the rows after step {self._file.last_row} up to step {logged} are missing")

    def write(self, row: dict[str, Any], event: str) -> None:
        """Append a row to metrics.jsonl at once, so that it survives a kill; then tell the callbacks of the event."""
        if self._file:
            self._file.write(row)
        self.callbacks.tell(event, row)

    def sync(self) -> None:
        """Sync metrics.jsonl to the disk."""
        if self._file:
            self._file.sync()

    def say(self, line: str) -> None:
        """Print a line for people. A run that saves goes on without its reader, such as an ssh that has ended."""
        if self.active:
            try:
                print(line, flush=True)
            except OSError:
                if self._file is None:
                    raise
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._printed = self._now()

    def is_quiet(self) -> bool:
        """Return whether people have waited for a line long enough."""
        return self.active and self._now() - self._printed >= QUIET_SECONDS

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
        self.callbacks.end()


class Clock:
    """Clock of a run: rates since the last reading, and the time to the last step."""

    def __init__(self, start_iteration: int, train_iters: int, peak: float | None = None) -> None:
        """Start the clock; `peak` is the peak of all devices of the run together, in FLOP/s."""
        self.start_iteration, self.train_iters, self.peak = start_iteration, train_iters, peak
        self.restart()
        self.begin = self.last

    def count(self, tokens: int, flop: float = 0.0) -> None:
        """Count one more step, with its non-padding tokens and FLOP over all ranks."""
        self.steps += 1
        self.tokens += tokens
        self.flop += flop

    def rates(self) -> dict[str, float]:
        """Return `tokens_per_second`, `step_time` (s) and, if the peak is known, `mfu` since the last restart."""
        elapsed = max(time.perf_counter() - self.last, 1e-9)
        rates = {"tokens_per_second": self.tokens / elapsed, "step_time": elapsed / max(1, self.steps)}
        if self.peak is not None:
            rates["mfu"] = self.flop / elapsed / self.peak
        return rates

    def restart(self) -> None:
        """Begin to count steps for new rates."""
        self.last, self.steps, self.tokens, self.flop = time.perf_counter(), 0, 0, 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside (a validation, a checkpoint) from the rates."""
        began = time.perf_counter()
        yield
        self.last += time.perf_counter() - began

    def eta(self, iteration: int) -> str:
        """Return the time to the last step, such as 9h12m."""
        done = iteration - self.start_iteration
        seconds = (time.perf_counter() - self.begin) / max(1, done) * (self.train_iters - iteration)
        return duration(seconds)


def duration(seconds: float) -> str:
    """Return a duration as 45s, 12m05s, 9h12m or 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def terms(row: Mapping[str, Any], labels: Mapping[str, str], digits: int = 3, prefix: str = "") -> str:
    """Return the labelled numbers of a row under keys with a prefix, such as `mlm 6.010 tcd 0.402`."""
    return " ".join(f"{label} {row[prefix + key]:.{digits}f}" for key, label in labels.items() if prefix + key in row)


def similarities(row: dict[str, Any]) -> str:
    """Return ` | f(S) 0.812 f(H) 0.344` if a row has these numbers, otherwise an empty text."""
    if "token_similarity" not in row:
        return ""
    return f" | f(S) {row['token_similarity']:.4f} f(H) {row['head_similarity']:.4f}"


def progress_line(row: Mapping[str, Any], labels: Mapping[str, str], train_iters: int, eta: str) -> str:
    """Return the progress line of a row.

    `step 1200/125000 | loss 6.412 (mlm 6.010 tcd 0.402) | lr 9.60e-05 | gnorm 1.21 | 412.0k tok/s | mfu 31.2% | mem
    21.3 GiB | eta 9h12m`, all in one line; `mfu` and `mem` only if the row has them.
    """
    mfu = f"mfu {100 * row['mfu']:.1f}% | " if "mfu" in row else ""
    memory = f"mem {row['peak_memory_gib']:.1f} GiB | " if "peak_memory_gib" in row else ""
    return (
        f"step {row['iteration']}/{train_iters} | loss {row['loss']:.3f} ({terms(row, labels)}) | lr {row['lr']:.2e} | "
        f"gnorm {row['grad_norm']:.2f} | {speed(row['tokens_per_second'])} tok/s | {mfu}{memory}eta {eta}"
    )


def speed(rate: float) -> str:
    """Return a rate as 1.25M, 41.2k, 412 or 0.62."""
    if rate >= 1e3:
        return f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.1f}k"
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
