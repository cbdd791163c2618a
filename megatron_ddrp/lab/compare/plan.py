"""Plan of a comparison: models, seeds, one budget, one corpus, checked before anything runs.

The keys `model` and `training` and a model's `flags` take flags of `megatron-ddrp pretrain` without the leading dashes.
Flags that the plan itself determines (seed, steps, folders, data) are refused there. docs/compare.md explains the keys.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ddrp.config import ENCODINGS, OBJECTIVES
from megatron_ddrp.config.option import COUNT, SEED, option, refuse
from megatron_ddrp.config.reading import Option, Place, read_value
from megatron_ddrp.lab.compare.rows import Arm
from megatron_ddrp.lab.compare.scoring import (
    Flags,
    GluePlan,
    MinimalPairsPlan,
    TaskPlan,
    read_flags,
    read_glue,
    read_tasks,
)

FIRST_SEED = 1234
NUM_SEEDS = 3
"""Default number of seeds; with fewer, the spread over seeds is unreliable."""


@dataclass(frozen=True)
class Model:
    """Model to compare."""

    name: str = option(MISSING, "name in tables")
    encoding: str = option(MISSING, "--position-encoding", choices=ENCODINGS)
    objective: str = option(MISSING, "--objective", choices=OBJECTIVES)
    flags: Flags = option((), "further flags of this model", read=read_flags)

    @property
    def system(self) -> dict[str, str]:
        """The encoding and the objective, as settings of a run."""
        return {"position_encoding": self.encoding, "objective": self.objective}

    def arm(self, half: bool = False) -> Arm:
        """Return the model at the full or half budget."""
        return Arm.of(self.name, self.encoding, self.objective, dict(self.flags), half)


@dataclass(frozen=True)
class Budget:
    """Budget of every run: either steps or tokens."""

    steps: int | None = option(None, "training steps", within="[2, 2147483648)")
    tokens: int | None = option(None, "batch x sequence length", within="[2, 9223372036854775808)")

    def __post_init__(self) -> None:
        if bool(self.steps) == bool(self.tokens):
            refuse("expected either steps or tokens")

    def __str__(self) -> str:
        return f"{self.steps:,} steps" if self.steps else f"{self.tokens:,} tokens"


@dataclass(frozen=True)
class CorpusPlan:
    """Corpus: indexed datasets, or texts to build a dataset from."""

    input: tuple[str, ...] = option((), "texts", distinct=True)
    data_path: tuple[str, ...] = option((), "prefixes of indexed datasets")
    vocab_file: str | None = option(None, "vocabulary")
    vocab_size: int | None = option(None, "number of pieces of a vocabulary to build", within="[100, 2147483648)")
    tokenizer_type: str = option(
        "BertWordPieceLowerCase", "tokenizer", choices=("BertWordPieceLowerCase", "BertWordPieceCase")
    )
    workers: int = option(1, "processes of megatron-ddrp preprocess", within=COUNT)
    shuffle: bool = option(False, "documents of the texts in a random order, so that validation has each kind of text")

    def __post_init__(self) -> None:
        if self.shuffle and not self.input:
            refuse("shuffle needs input (texts); shuffle datasets by megatron-ddrp dataset shuffle")
        if bool(self.input) == bool(self.data_path):
            refuse("expected either input (texts) or data_path (prefixes of indexed datasets)")
        if self.data_path and not self.vocab_file:
            refuse("vocab_file is missing: data_path needs the vocabulary that made the datasets")
        if bool(self.vocab_size) == bool(self.vocab_file):
            refuse("expected either vocab_file or vocab_size (of a vocabulary to build)")


@dataclass(frozen=True)
class Analyses:
    """Number of validation sentences per analysis, and row lengths of throughput. 0 or none leaves an analysis out."""

    self_similarity: int = option(0, "f(S) and f(H)", within="[0, 2147483648)")
    triangle: int = option(0, "up-down triangles", within="[0, 2147483648)")
    attention_maps: int = option(0, "mean attention maps", within="[0, 2147483648)")
    space: int = option(0, "cosines, IsoScore and effective rank", within="[0, 2147483648)")
    direction: int = option(0, "left and right", within="[0, 2147483648)")
    throughput: tuple[int, ...] = option((), "lengths of rows at inference", within="[3, 2147483648)", distinct=True)


def _read_seeds(values: Any, place: Place) -> tuple[int, ...]:
    """Read a list of seeds, or a number N of seeds, which means `FIRST_SEED` and the N − 1 numbers after it."""
    if isinstance(values, list):
        rules = {"within": SEED, "distinct": True}
        return read_value(values, Option(tuple[int, ...], rules, MISSING), place)
    count = read_value(values, Option(int, {"within": COUNT}, MISSING), place)
    return tuple(range(FIRST_SEED, FIRST_SEED + count))


@dataclass(frozen=True)
class Plan:
    """Plan of a comparison."""

    models: tuple[Model, ...] = option(MISSING, "models to compare")
    budget: Budget = option(MISSING, "budget of every run")
    corpus: CorpusPlan = option(MISSING, "data of every run")
    seeds: tuple[int, ...] = option(
        tuple(range(FIRST_SEED, FIRST_SEED + NUM_SEEDS)), "number of seeds, or a list of seeds", read=_read_seeds
    )
    model: Flags = option((), "flags of every run", read=read_flags)
    training: Flags = option((), "further flags of every run", read=read_flags)
    plugins: tuple[str, ...] = option((), "plug-ins, as for --plugin; every run and score loads them")
    glue: GluePlan | None = option(None, "fine-tuning", read=read_glue)
    minimal_pairs: MinimalPairsPlan | None = option(None, "pairs of sentences, without fine-tuning")
    tasks: tuple[TaskPlan, ...] = option((), "fine-tuning on your own tasks", read=read_tasks)
    baseline: str | None = option(None, "model to compare the others with (default: the first)")
    analyses: Analyses = option(Analyses(), "analyses of the models")
    half_budget: tuple[str, ...] = option((), "models to train at half the budget too", distinct=True)
    checkpoints: int = option(4, "checkpoints per run", within=COUNT)
    launcher: str = option("python", "python, or a launcher of megatron-ddrp pretrain")
    workers: int = option(1, "jobs at once", within=COUNT)
    check: str = option("", "side experiment that these runs are")
    file: Path = Path()

    def __post_init__(self) -> None:
        for number, model in enumerate(self.models):
            for other in self.models[:number]:
                if model.name == other.name:
                    refuse(f"models[{number + 1}].name: {model.name!r} names two models: choose another name")
                if replace(model, name="") == replace(other, name=""):
                    refuse(f"models[{number + 1}]: {model.name!r} is the same as a model before it")
        names = [model.name for model in self.models]
        curves = self.glue.checkpoints_of if self.glue else ()
        for key, chosen in (
            ("half_budget", self.half_budget),
            ("glue.checkpoints_of", curves),
            ("baseline", (self.baseline,) if self.baseline else ()),
        ):
            for name in chosen:
                if name not in names:
                    refuse(f"{key}: got {name!r}, expected one of {', '.join(names)}")
        if self.workers > 1 and self.launcher != "python":
            refuse(f"workers: {self.workers} with a launcher that starts several ranks: expected 1")

    @property
    def plugin_words(self) -> tuple[str, ...]:
        """Words `--plugin FILE.py …` of every command about a model; empty without plug-ins."""
        return ("--plugin", *(str(Path(file).resolve()) for file in self.plugins)) if self.plugins else ()

    @property
    def flags(self) -> Flags:
        """Flags of every run."""
        return self.model + self.training

    def model_of(self, name: str) -> Model:
        """Return the model with this name."""
        return next(model for model in self.models if model.name == name)
