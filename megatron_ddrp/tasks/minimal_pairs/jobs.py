"""Store scores.jsonl: one line per encoder and paradigm, with the scores of all sentences.

Everything that affects the scores (weights, sentences, kind of score) identifies a line. So a restarted command scores
nothing twice, and new weights under an old name are never mistaken for the old ones. Ties are counted later.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ddrp.tasks.jobs.store import Store, digest

SCORES_FILE = "scores.jsonl"


@dataclass(frozen=True)
class PairJob:
    """Everything that determines the scores of a paradigm's sentences."""

    encoder: str
    """Fingerprint of the encoder."""
    seed: int | None
    """Seed of random weights; None for the loaded weights."""
    paradigm: str
    data: str
    """Fingerprint of the sentences."""
    score: str

    @cached_property
    def name(self) -> str:
        """File name that no other job has."""
        return f"{re.sub(r'[^A-Za-z0-9_-]', '_', self.paradigm)[:60]}-{digest(asdict(self))}"

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> PairJob:
        """Return the job of a line of scores.jsonl."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


class PairStore(Store):
    """Store of finished jobs in scores.jsonl."""

    def __init__(self, path: Path):
        """Read the finished lines. Raises `UserError` for a damaged line."""
        super().__init__(path, lambda row: PairJob.of_row(row).name, "written by megatron-ddrp minimal-pairs", _checked)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row unchanged. Raises KeyError, TypeError or ValueError if it is not a finished job."""
    lengths = {len(row[name]) for name in ("good", "bad", "pieces_good", "pieces_bad")}
    numbers = (row["rows"], row["seconds"], row["identical"])
    if len(lengths) != 1 or not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError("expected two scores and two lengths per pair")
    return row
