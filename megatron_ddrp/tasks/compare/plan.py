"""What is compared: models, seeds, one budget, one corpus. `plan_file` reads it; docs/compare.md shows the keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.tasks.compare.flags import TOKENIZERS, Flags

NUM_SEEDS = 3
"""With fewer seeds their spread says little."""


@dataclass(frozen=True)
class Model:
    """One row of the tables."""

    name: str
    encoding: str
    objective: str
    flags: Flags = ()
    """What else differs from the other models."""
    weights: tuple[float, float] | None = None
    """(alpha_1, alpha_2) where it is a point of the plan's grid."""


@dataclass(frozen=True)
class Budget:
    """What every course may use: exactly one of steps, minutes and tokens."""

    kind: str
    amount: float

    def __str__(self) -> str:
        return f"{self.amount:,.0f} {self.kind}" if self.amount >= 1 else f"{self.amount:g} {self.kind}"


@dataclass(frozen=True)
class CorpusPlan:
    """Indexed datasets, or the texts that one is built from."""

    inputs: tuple[str, ...] = ()
    data_path: tuple[str, ...] = ()
    vocab_file: str | None = None
    vocab_size: int | None = None
    """Pieces of a vocabulary that is built where no file is given."""
    tokenizer_type: str = TOKENIZERS[0]
    workers: int = 1


@dataclass(frozen=True)
class GluePlan:
    """How `python -m tasks.glue` scores a checkpoint."""

    data_dir: str
    tasks: tuple[str, ...]
    flags: Flags
    """Further flags of `tasks.glue`."""
    curve: tuple[str, ...] = ()
    """Models of which every checkpoint is scored (figure 3b)."""


@dataclass(frozen=True)
class Analyses:
    """Validation sentences of each analysis; 0 leaves it out."""

    self_similarity: int = 0
    triangle: int = 0
    attention_maps: int = 0


@dataclass(frozen=True)
class Expected:
    """What the plan says about time on the hardware that it is for; None = nothing."""

    step_seconds: float | None = None
    """Of one course with `workers` courses beside each other."""
    glue_minutes: float | None = None
    """To score one checkpoint."""


@dataclass(frozen=True)
class Plan:
    """All of it."""

    file: Path
    models: tuple[Model, ...]
    seeds: tuple[int, ...]
    budget: Budget
    corpus: CorpusPlan
    flags: Flags
    """Of every course: the plan's `model` and `training`."""
    glue: GluePlan | None
    analyses: Analyses
    half_budget: tuple[str, ...]
    grid: tuple[Model, ...]
    """The models of the alpha grid."""
    grid_seeds: tuple[int, ...]
    checkpoints: int
    launcher: tuple[str, ...]
    workers: int
    expected: Expected

    @property
    def rows(self) -> tuple[Model, ...]:
        """The models and those of the grid that are none of them."""
        return self.models + self.grid

    def model(self, name: str) -> Model:
        """By name."""
        return next(model for model in self.rows if model.name == name)
