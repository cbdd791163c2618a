"""Groups of arms that are timed in turns, at one micro-batch size.

An arm is anything that makes training steps (`Running`). A failed arm has a note in its row; the others are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from gpu_device import peak_gib, release_memory, start_peak
from measure import time_rounds

from megatron_ddrp.config import ENCODINGS, ParallelConfig
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models, rows and rounds of a report; the defaults are those of the paper's base model."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 30522
    lengths: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    usual_length: int = 512
    """Length of the rows where a table is about something else."""
    tokens: int = 16_384
    """Tokens of a micro-batch, 32 rows of the usual length as in the recipe for one GPU."""
    micro_batches: int = 8
    """Micro-batches per optimizer step, as in the recipe."""
    steps: int = 8
    """Steps of an arm that is timed by itself."""
    encodings: tuple[str, ...] = tuple(ENCODINGS)
    """Encodings of the tables that hold all of them."""
    rounds: int = 6
    warm_up: int = 3
    """Rounds before these, beside each arm's first step: rows of new lengths compile again."""
    corpus_tokens: int = 2_000_000


TINY = Sizes(
    layers=2,
    hidden=32,
    heads=4,
    vocabulary=200,
    lengths=(16, 32),
    usual_length=32,
    tokens=64,
    micro_batches=2,
    steps=3,
    rounds=1,
    warm_up=1,
    corpus_tokens=20_000,
)
"""Sizes with which a report is tried out on a CPU."""


@dataclass
class Bench:
    """Gives a section of the report its device, its time and its file of rows."""

    sizes: Sizes
    folder: Path
    """Folder of `write_corpora`."""
    deadline: float
    """When the section should have ended, as of `time.monotonic`."""
    write: Callable[[Row], None]
    """Takes a finished row of the section's table."""
    longest_group: float = field(default=0.0, init=False)
    """Seconds of the longest group of arms so far."""

    @cached_property
    def ranks(self) -> Ranks:
        """This process as the only rank of a run."""
        return process_group.start(ParallelConfig())

    @property
    def lengths(self) -> list[int]:
        """Lengths of rows, the usual one first: it has its times where there is not enough time for all."""
        usual = self.sizes.usual_length
        return [usual, *(length for length in self.sizes.lengths if length != usual)]

    @property
    def has_time(self) -> bool:
        """Return whether a group as long as the longest so far would end in time."""
        return time.monotonic() + self.longest_group < self.deadline


class Work(NamedTuple):
    """Work of one timed step."""

    tokens: int
    """Tokens without padding."""
    shapes: list[tuple[int, int]]
    """(rows, length) of each micro-batch."""


class Running(Protocol):
    """A model in training on the device."""

    done: list[Work]
    """Work of each step so far."""

    def step(self) -> None:
        """Make one training step."""

    def mfu(self, work: Work, seconds: float) -> float | None:
        """Return the share of the device's peak that the model's FLOP reach, None where it is not known."""

    def close(self) -> None:
        """Let go of the device's memory."""


Starter = Callable[[int], Running]
"""Type of a function that starts an arm with micro-batches of at most so many tokens."""

Key = tuple[str, str]
"""Name and kind of rows of an arm."""


def measure_together(starters: Mapping[Key, Starter], bench: Bench, length: int) -> None:
    """Time arms with rows of `length` tokens in turns, and write a row of each.

    An arm that fails has a note in its row. Where no time is left for the group all of its rows say so.
    """
    rows: dict[Key, Row] = {(name, kind): {"name": name, "rows": kind, "length": length} for name, kind in starters}
    if not bench.has_time:
        for row in rows.values():
            bench.write(row | {"note": "left out for time"})
        return
    began, running = time.monotonic(), dict[Key, Running]()
    try:
        _start(starters, max(bench.sizes.tokens, length), running, rows)
        _time(bench.sizes, running, rows)
    finally:
        for arm in running.values():
            arm.close()
        running.clear()
        release_memory()
    for row in rows.values():
        bench.write(row)
    bench.longest_group = max(bench.longest_group, time.monotonic() - began)


def _start(starters: Mapping[Key, Starter], tokens: int, running: dict[Key, Running], rows: Mapping[Key, Row]) -> None:
    """Start every arm and make its first step, which compiles kernels and reaches the peak of memory."""
    for key, start in starters.items():
        before = start_peak()
        with noted([rows[key]]):
            running[key] = start(tokens)
            running[key].step()
        if "note" in rows[key] and key in running:
            running.pop(key).close()
        rows[key]["peak_gib"] = peak_gib(before)


def _time(sizes: Sizes, running: Mapping[Key, Running], rows: Mapping[Key, Row]) -> None:
    """Time the arms in turns."""
    names = {" | ".join(key): key for key in running}
    with noted([rows[key] for key in running]):
        seconds = time_rounds({name: running[key].step for name, key in names.items()}, sizes.rounds, sizes.warm_up)
        for name, key in names.items():
            rows[key] |= timing(running[key], seconds[name])


@contextmanager
def noted(rows: list[Row]) -> Iterator[None]:
    """Note an error in some rows."""
    try:
        yield
    except Exception as error:
        for row in rows:
            row["note"] = one_line(error)


def timing(arm: Running, seconds: np.ndarray) -> Row:
    """Return speed, time per micro-batch and MFU of an arm from the seconds `[rounds]` of its last steps."""
    work = arm.done[-len(seconds) :]
    rates = [done.tokens / second for done, second in zip(work, seconds, strict=True)]
    shares = [arm.mfu(done, second) for done, second in zip(work, seconds, strict=True)]
    largest = max(work[0].shapes, key=lambda shape: shape[0] * shape[1])
    return {
        "micro_batch": " x ".join(map(str, largest)),
        "tokens_per_second": float(np.median(rates)),
        "ms": float(np.median(seconds)) * 1e3 / len(work[0].shapes),
        "mfu": None if None in shares else float(np.median(np.array(shares, float))),
    }


def one_line(error: BaseException) -> str:
    """Return an error in one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]
