"""The plateau of masked LM, and its end, the onset: the tokens after which a run predicts from context in earnest.

A model first learns how often each piece occurs; its loss falls to the unigram level, the entropy of the pieces of the
training text. From there it falls slowly: without the order of words, the rest of a text tells no more than its topic.
It falls fast again when attention has begun to use positions (docs/lab/plateau.md).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ddrp.config import Config
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.foreign import read_json
from megatron_ddrp.run.callbacks import Callback
from megatron_ddrp.run.metrics import read_rows

if TYPE_CHECKING:
    from torch import nn

UNIGRAM = "unigram.json"
"""File of the level in a run's folder."""
BELOW = 1.0
"""Nats below the unigram level at which a run has left the plateau. Models without positions gain up to 0.7."""
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
    """Yield the tokens of each point with the mean loss of the points in the last `WINDOW` tokens."""
    recent: list[Point] = []
    for point in curve:
        recent = [*(one for one in recent if one[0] > point[0] - WINDOW), point]
        yield point[0], sum(loss for _, loss in recent) / len(recent)


def curve_of(rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return the curve in rows of metrics.jsonl. Rows without a finite loss are left out."""
    found: Iterator[tuple[Any, Any]] = ((row.get("consumed_tokens"), row.get("lm_loss")) for row in rows)
    return [(tokens, loss) for tokens, loss in found if None not in (tokens, loss) and math.isfinite(loss)]


def store_level(folder: Path, level: float) -> None:
    """Write the unigram level into a run's folder."""
    write_text(folder / UNIGRAM, f'{{"unigram_loss": {level:.5f}}}\n')


def stored_level(folder: Path) -> float | None:
    """Return the unigram level in a run's folder; None if an earlier version wrote the folder."""
    path = folder / UNIGRAM
    return float(read_json(path)["unigram_loss"]) if path.is_file() else None


_ABOVE, _ON, _LEFT = range(3)


class PlateauWatch(Callback):
    """Prints a line when a run reaches the plateau, leaves it or falls back onto it."""

    def __init__(self, level: float) -> None:
        self.level = level
        self._recent: list[Point] = []
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
        curve = [*self._recent, *curve_of([row])]
        if not curve:
            return ""
        *_, (tokens, loss) = smoothed(curve)
        self._recent = [one for one in curve if one[0] > tokens - WINDOW]
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
