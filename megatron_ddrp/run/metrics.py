"""metrics.jsonl, one row of numbers per log or evaluation, and the plateau that its rows show.

All code that reads or writes the file is here. A line that is not a row (damage, or the half line of a killed run) is
moved to metrics.jsonl.damaged when the run resumes; readers skip it and report it once. The rows after it are kept.

The plateau is one of masked LM, and it ends at the onset: the tokens after which a run predicts from context in
earnest. A model first learns how often each piece occurs; its loss falls to the unigram level, the entropy of the
pieces of the training text. From there it falls slowly: without the order of words, the rest of a text tells no more
than its topic. It falls fast again when attention has begun to use positions (docs/lab/plateau.md).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ddrp.config import Config
from megatron_ddrp.data.atomic import write_bytes, write_text
from megatron_ddrp.errors import refusals_as_user_errors
from megatron_ddrp.foreign import misfit, parse_json, read_json
from megatron_ddrp.run.callbacks import Callback

if TYPE_CHECKING:
    from torch import nn


METRICS, DAMAGED = "metrics.jsonl", "metrics.jsonl.damaged"
MetricsRow = dict[str, Any]
"""Row of metrics.jsonl: `iteration`, from 1, and numbers by name; None for a number that was not finite."""
Tell = Callable[[str], object]


@functools.cache
def print_once(line: str) -> None:
    """Print a notice on standard error, once per process."""
    print(line, file=sys.stderr, flush=True)


def read_rows(folder: str | os.PathLike[str], tell: Tell = print_once) -> list[MetricsRow]:
    """Return the rows of a run's metrics.jsonl, also while a run writes it; no rows if there is no file yet.

    Calls `tell` with the number of skipped damaged lines. Raises `UserError` if the file cannot be read.
    """
    path = Path(folder) / METRICS
    if not path.exists():
        return []
    with refusals_as_user_errors(path):
        *lines, unfinished = path.read_bytes().split(b"\n")
    rows, damaged = _sort_out(lines)
    if damaged:
        tell(f"{path}: left out {_count(damaged)}")
    last = _parse(unfinished)  # complete if only its line end is missing; otherwise the line being written
    return [row for _, row in rows] + ([last] if last else [])


def ends_in_half_a_line(folder: Path) -> bool:
    """Return whether the file ends with the beginning of a row: it is being written, or was cut off."""
    with refusals_as_user_errors(folder / METRICS):
        last = (folder / METRICS).read_bytes().rpartition(b"\n")[2]
    return bool(last) and _parse(last) is None


def _sort_out(lines: list[bytes]) -> tuple[list[tuple[bytes, MetricsRow]], list[bytes]]:
    """Return (lines that are rows, with the rows; other lines), without blank lines."""
    parsed = [(line, _parse(line)) for line in lines if line.strip()]
    return [(line, row) for line, row in parsed if row is not None], [line for line, row in parsed if row is None]


def _parse(line: bytes) -> MetricsRow | None:
    """Return the row in a line, or None."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return None if misfit(row, {"iteration": int}) or misfit(row, Mapping[str, float | None]) else row


def _count(lines: list[bytes]) -> str:
    return f"{len(lines)} damaged line{'s' * (len(lines) > 1)}"


class MetricsFile:
    """metrics.jsonl, opened for writing. A row that cannot be written waits in memory for the next one."""

    def __init__(self, path: Path, last_iteration: int, tell: Tell) -> None:
        """Cut the file back to `last_iteration`, that of the checkpoint that the run resumes from, and open it.

        Calls `tell` for damaged lines now, and for rows that cannot be written later. Raises `UserError` if the system
        refuses.
        """
        self.path, self._tell = path, tell
        self.last_row = 0
        """Iteration of the last row when the file was opened; 0 without a row."""
        self._waiting: list[bytes] = []
        with refusals_as_user_errors(path):
            if path.exists():
                self._cut_back(last_iteration)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def _cut_back(self, last_iteration: int) -> None:
        """Drop the rows after an iteration, so that no step occurs twice, and move damaged lines to another file."""
        before = self.path.read_bytes()
        rows, damaged = _sort_out(before.split(b"\n"))
        if damaged:
            aside = self.path.with_name(DAMAGED)
            with aside.open("ab") as stream:
                stream.write(b"".join(line + b"\n" for line in damaged))
            self._tell(f"{self.path}: moved {_count(damaged)} to {aside.name}")
        rows = [(line, row) for line, row in rows if row["iteration"] <= last_iteration]
        self.last_row = max((row["iteration"] for _, row in rows), default=0)
        kept = b"".join(line + b"\n" for line, _ in rows)
        if kept != before:
            write_bytes(self.path, kept)

    def write(self, row: MetricsRow) -> None:
        """Append a row and flush it, so that it survives a kill."""
        waited = len(self._waiting)
        # null for inf and nan, such as the norm of fp16 gradients that overflowed
        line = json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}) + "\n"
        self._waiting.append(line.encode())
        try:
            self._flush()
        except OSError as error:
            if not waited:
                self._tell(f"{self.path}: {error.strerror}; its rows wait in memory and training goes on")
            return
        if waited:
            self._tell(f"{self.path}: written again, with the {waited} rows that had to wait")

    def _flush(self) -> None:
        """Write the waiting rows, all of them or none: half a line would damage the next one."""
        end = os.fstat(self._descriptor).st_size
        data = b"".join(self._waiting)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise
        self._waiting.clear()

    def sync(self) -> None:
        """Sync the rows to the disk: a run that resumes from a checkpoint never writes those before it again."""
        with refusals_as_user_errors(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Write the waiting rows, or report that they are lost, and close the file."""
        try:
            self._flush()
        except OSError as error:
            self._tell(f"{self.path}: {error.strerror}; rows lost: {len(self._waiting)}")
        os.close(self._descriptor)


UNIGRAM = "unigram.json"
"""File of the unigram level and the validation gap in a run's folder."""
BELOW = 1.0
"""Nats below the unigram level at which a run has left the plateau: a convention. Runs on it were seen up to 0.8 below
(docs/lab/plateau.md)."""
WINDOW = 200_000
"""Tokens over which the training loss is averaged."""

Point = tuple[float, float]
"""Tokens, and the mean training masked-LM loss since the point before, in nats."""


def onset(curve: Iterable[Point], level: float) -> float | None:
    """Return the first tokens at which the smoothed loss lies `BELOW` the unigram level and stays there, or None.

    A run that begins there, from trained weights, has no onset unless it comes back to the plateau.
    """
    found, was_above = None, False
    for tokens, loss in smoothed(curve):
        if loss > level - BELOW:
            found, was_above = None, True
        elif found is None and was_above:
            found = tokens
    return found


def is_past(curve: Iterable[Point], level: float) -> bool:
    """Return whether a run was never on the plateau or above it, as a branch or an imported encoder may be."""
    return all(loss <= level - BELOW for _, loss in smoothed(curve))


def smoothed(curve: Iterable[Point]) -> Iterator[Point]:
    """Yield the tokens of each point with the mean loss of the points in the last `WINDOW` tokens.

    Each point weighs as much as the tokens since the point before, the first one at most `WINDOW`: a branch counts its
    tokens from the run before.
    """
    recent: list[tuple[float, float, float]] = []
    before = 0.0
    for tokens, loss in curve:
        weight = max(1.0, min(tokens - before, WINDOW))
        recent = [*(one for one in recent if one[0] > tokens - WINDOW), (tokens, loss, weight)]
        before = tokens
        yield tokens, sum(loss * weight for _, loss, weight in recent) / sum(weight for *_, weight in recent)


def curve_of(rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return the curve in rows of metrics.jsonl. Rows without a finite loss are left out."""
    found: Iterator[tuple[Any, Any]] = ((row.get("consumed_tokens"), row.get("lm_loss")) for row in rows)
    return [(tokens, loss) for tokens, loss in found if None not in (tokens, loss) and math.isfinite(loss)]


def store_level(folder: Path, level: float, gap: float | None = None) -> None:
    """Write the unigram level and the validation gap (`stored_gap`) into a run's folder."""
    of_gap = "" if gap is None else f', "validation_gap": {gap:.5f}'
    write_text(folder / UNIGRAM, f'{{"unigram_loss": {level:.5f}{of_gap}}}\n')


def stored_level(folder: Path) -> float | None:
    """Return the unigram level in a run's folder; None if an earlier version wrote the folder."""
    path = folder / UNIGRAM
    return float(read_json(path)["unigram_loss"]) if path.is_file() else None


def stored_gap(folder: Path) -> float | None:
    """Return by how many nats per piece a run's validation text is off its training text; None if it was not measured.

    `split_shift` in `data/batches/word_counts.py` says how it is measured.
    """
    path = folder / UNIGRAM
    return read_json(path).get("validation_gap") if path.is_file() else None


_ABOVE, _ON, _LEFT = range(3)


class PlateauWatch(Callback):
    """Prints a line when a run reaches the plateau, leaves it or falls back onto it."""

    def __init__(self, level: float) -> None:
        self.level = level
        self._new: list[Point] = []
        self._smoothed = smoothed(iter(self._new.pop, None))
        """The smoothed curve, which takes its points from `_new`."""
        self._place: int | None = None

    def on_start(self, config: Config, iteration: int, model: nn.Module) -> None:
        if iteration and config.checkpoint.save:
            for row in read_rows(config.checkpoint.save):
                self.line(row)

    def on_step(self, row: Mapping[str, Any]) -> None:
        if line := self.line(row):
            with contextlib.suppress(OSError):  # without a reader, the log's next line decides what becomes of the run
                print(line, flush=True)

    def line(self, row: Mapping[str, Any]) -> str:
        """Return the line for a logged row; none for the first, at which a trained model may be anywhere."""
        self._new += curve_of([row])
        if not self._new:
            return ""
        tokens, loss = next(self._smoothed)
        before, self._place = self._place, self._place_of(loss)
        words = {
            _ON: f"the loss is down to the unigram level, {self.level:.2f}: the plateau, on which a run rests until "
            "attention uses positions (docs/lab/plateau.md)",
            _LEFT: f"the run has left the plateau after {tokens:,} tokens: the loss is {BELOW:g} below the level",
        }
        if before == _LEFT:
            words[_ON] = "the run is back on the plateau"
        return "" if before in (None, self._place) else words[self._place]

    def _place_of(self, loss: float) -> int:
        """Return where a smoothed loss is. What was reached is kept until the loss has clearly risen."""
        if loss <= self.level - BELOW / (2 if self._place == _LEFT else 1):
            return _LEFT
        return _ON if loss <= self.level or self._place in (_ON, _LEFT) else _ABOVE
