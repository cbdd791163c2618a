"""Rows: one JSON line per finished run. Tables, figures and results.json are made from rows and nothing else.

`RunRow` is the schema. Values on bootstrap samples of test items, which show the effect of other test sentences, are
in `items/RUN-DIGEST.npz` beside the rows. All runs are scored on the same samples, so that differences are paired.
The files may be missing; then a difference has no interval over items.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from megatron_ddrp.config import OBJECTIVES, concerns
from megatron_ddrp.config.reading import options_of
from megatron_ddrp.config.training import LengthPhase, MaskRates, parse_phases
from megatron_ddrp.data.atomic import write_bytes
from megatron_ddrp.data.batches.word_counts import MIN_SHIFT
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.foreign import Name, misfit, reading
from megatron_ddrp.run.metrics import is_past, onset
from megatron_ddrp.tasks.jobs import Damaged, Row, Store, digest
from megatron_ddrp.tasks.statistics import (
    LIKE_LOSS,
    LOSS,
    MINIMAL_PAIRS,
    OTHER_LOSS,
    STEP_SECONDS,
    TRAINING_LOSS,
    Times,
)

EVAL_ITERS = 20
"""Global batches of a validation, where the plan does not say."""
UNITS = {"million tokens": 2, "steps": 0, "million predictions": 2, "seconds": 0}
"""Unit of a time on the plateau → digits."""
Count = Annotated[int, "[0, 1e15)"]
Number = Annotated[float, "[-1e15, 1e15)"]
Amount = Annotated[float, "[0, 1e15)"]
Value = Number | None
_Setting = str | bool | Value
Flags = Annotated[
    Mapping[str, _Setting | Sequence[_Setting]], "an object of flags with text, finite numbers, true or false"
]
Shares = Mapping[str, Annotated[float, "[0, 1]"]]
Curve = Sequence[tuple[Amount, Number]]
"""Points (tokens, value)."""
Curves = Annotated[Mapping[str, Curve], "an object of lists of points [tokens, value] of finite numbers"]
Samples = Mapping[str, np.ndarray]
"""Measure → value on each bootstrap sample, `[samples]`."""
_FILE = "file name"
"""Array of a file of samples with the file's own name; files of earlier versions have none."""


class Arm(NamedTuple):
    """A model at the full or half budget."""

    name: str
    encoding: str
    objective: str
    flags: tuple[tuple[str, str], ...]
    """Further flags of the model in the order of their names, with values as text."""
    half: bool = False

    @classmethod
    def of(cls, name: str, encoding: str, objective: str, flags: Mapping[str, Any], half: bool = False) -> Arm:
        """Return the arm of a model with these flags, of whatever type their values are."""
        texts = sorted((flag.replace("-", "_"), _as_text(value)) for flag, value in flags.items())
        return cls(name, encoding, objective, tuple(texts), half)

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.name}, half the budget" if self.half else self.name

    @property
    def key(self) -> str:
        """Encoding, objective and flags, as claims name the arm: `ddrp mth hcd-weight=0 half`."""
        flags = [f"{name.replace('_', '-')}={value}" for name, value in self.flags]
        return " ".join([self.encoding, self.objective, *flags, *["half"] * self.half])


def _as_text(value: Any) -> str:
    return f"{value:g}" if not misfit(value, Number) else str(value)


@dataclass(frozen=True)
class RunRow:
    """One row: a finished training run with its measures. Whatever the row does not tell is 0 or empty."""

    run: Name
    model: Name
    encoding: Name
    objective: Name
    seed: Count
    planned_tokens: Count
    """Tokens of the budget. An arm at half the budget trains for half of them."""
    values: Mapping[str, float]
    """Measure → finite value."""
    flags: Flags = field(default_factory=dict)
    """Further flags of the model."""
    generates: bool | None = None
    """True if its loss is a generator's; None if only the objective's name tells."""
    validated: Count = 0
    """Rows of the held-out text that a validation reads; 0 if only the settings tell."""
    half: bool = False
    budget: str = ""
    """Budget in words, which runs that are compared share."""
    check: str = ""
    """Side experiment that the run belongs to; empty for a run of the main one."""
    baseline: str = ""
    """Name of the model to compare the others with."""
    jobs: Annotated[Sequence[Name], "a list of names"] = ()
    """Names of its jobs."""
    tokens: Count = 0
    """Tokens that the run consumed."""
    steps: Count = 0
    parameters: Count = 0
    seconds: Amount = 0.0
    """Time of training and of all measures."""
    common: Flags = field(default_factory=dict)
    """Flags of all models of the plan."""
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    workers: Count = 1
    """Number of jobs that shared the machine."""
    unigram_loss: Amount = 0.0
    """Unigram level of the training text in nats, from which the onset is measured."""
    validation_gap: Value = None
    """Nats per piece by which the validation text is off the training text (`stored_gap`); None if unknown."""
    curves: Curves = field(default_factory=dict)
    """Measure → its curve over tokens."""
    paradigms: Shares = field(default_factory=dict)
    """Paradigm of minimal pairs → accuracy."""
    pairs: Mapping[str, Count] = field(default_factory=dict)
    """Paradigm of minimal pairs → number of its pairs, if it is known."""
    fields: Shares = field(default_factory=dict)
    """Field of minimal pairs → accuracy."""
    tasks: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)
    """Task → train_examples, dev_examples and the number of undefined fine-tuning runs."""
    maps: str = ""
    """File of its attention maps, beside the rows."""
    throughput: Mapping[str, Sequence[Mapping[str, Value]]] = field(default_factory=dict)
    """Name of each model that was timed with it → results by row length."""
    undefined: tuple[str, ...] = ()
    """Measures whose value is not finite, which JSON has as null."""
    samples: Samples = field(default_factory=dict)
    """Values on bootstrap samples of its test items; empty without their file."""

    @cached_property
    def arm(self) -> Arm:
        """Model at the full or half budget."""
        return Arm.of(self.model, self.encoding, self.objective, self.flags, self.half)

    @cached_property
    def onset(self) -> float | None:
        """Tokens at which the run left the plateau, or of its first point if it has left before; None if it did not."""
        curve: Any = self.curves.get(TRAINING_LOSS, ())
        has_left = curve and is_past(curve, self.unigram_loss) and not self.settings.get("objective_phases")
        return curve[0][0] if has_left else onset(curve, self.unigram_loss)

    def check_equal(self, again: RunRow) -> str:
        """Return a line that the losses of this row and of the same run, trained again, are equal.

        The points of curves are compared in their order: rows of earlier versions have them at other tokens. Rows have
        them with five decimal places.

        Raises:
            UserError: the losses differ; the line says how far, where most, and how the machines differ.
        """
        old, new = (
            [(name, *point) for name in (TRAINING_LOSS, LOSS, OTHER_LOSS) for point in row.curves.get(name, ())]
            for row in (self, again)
        )
        apart = [(abs(loss - first[-1]), name, at) for first, (name, at, loss) in zip(old, new, strict=False)]
        equal, total = sum(not far for far, *_ in apart), max(len(old), len(new))
        was, now = self.validation_loss, again.validation_loss
        if equal == total and was == now:
            return f"equal to the last digit: {equal} of {total} points and the validation loss {was}"
        far, name, at = max([*apart, (abs(was - now), LOSS, again.tokens)])
        machines = [[row.hardware or "untold hardware", *map(" ".join, row.versions.items())] for row in (self, again)]
        told, here = (", ".join(fact for fact in own if fact not in other) for own, other in (machines, machines[::-1]))
        raise UserError(
            f"not equal: {equal} of {total} points are; largest difference {far:.2g}, {name} at {at:,} tokens; "
            f"validation loss {was} in the row, {now} here, difference {abs(was - now):.2g}; only the row has "
            f"{told or 'nothing'}; only this machine has {here or 'nothing'}; another instruction set alone gives 1e-5 "
            "(docs/lab/reproduce.md)"
        )

    @cached_property
    def validates_alike(self) -> bool:
        """True if the validation text is known to be of the training text's kind."""
        return self.validation_gap is not None and self.validation_gap < MIN_SHIFT

    @property
    def validation_loss(self) -> float:
        """Loss on the validation text, whatever its kind; nan without one."""
        name = LIKE_LOSS if self.validates_alike else OTHER_LOSS
        return self.values.get(LOSS, self.values.get(name, np.nan))

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Setting → value, as far as the row tells: the plan's, and the model's own."""
        return {name.replace("-", "_"): value for name, value in {**self.common, **self.flags}.items()}

    def compares(self, other: RunRow, measure: str) -> bool:
        """Return whether values of a measure compare: of the same pairs or rows of a task, where both tell them."""
        if measure in (LIKE_LOSS, OTHER_LOSS, LOSS):
            return self.loss_key(measure) == other.loss_key(measure)
        told: list[Sequence[object]] = [(sorted(run.paradigms) or None, run.pairs or None) for run in (self, other)]
        if measure != MINIMAL_PAIRS:
            rows = [run.tasks.get(measure, {}) for run in (self, other)]
            told = [(row.get("train_examples"), row.get("dev_examples")) for row in rows]
        return all(one == another or None in (one, another) for one, another in zip(*told, strict=True))

    def loss_key(self, measure: str) -> tuple[object, ...]:
        """Return a key that two runs share if their losses on a text compare.

        The head that predicts must be alike, the generator's or the encoder's; so must the text, held-out or trained
        on, and the rows and masks that are made of it: those of the last step, or in training the settings `_ALIKE`.
        """
        generates = self.objective not in OBJECTIVES or OBJECTIVES.find(self.objective).generates
        alone = generates if self.generates is None else self.generates
        trained, given = measure == LIKE_LOSS and not self.validates_alike, measure == OTHER_LOSS in self.curves
        names = _ALIKE if trained else ("masking", "eval_mask_prob", "split")
        settings = (_as_text(self.settings.get(name, _DEFAULTS[name])) for name in names)
        told = (int(self.settings.get(name, _DEFAULTS[name])) for name in ("eval_iters", "global_batch_size"))
        read = self.validated or math.prod(told)
        last = next(phase for phase in self.phases if phase.share == 1)
        return (self.objective * alone, trained or (given, read), last.seq_length, *settings)

    @cached_property
    def phases(self) -> Sequence[LengthPhase]:
        """Phases by the length of the rows."""
        longest = int(self.settings.get("seq_length", _DEFAULTS["seq_length"]))
        return parse_phases(self.settings.get("seq_length_phases") or (), longest)

    @cached_property
    def rested(self) -> float | None:
        """Tokens on the plateau: up to the onset, or all of the run's if it never left.

        None if the row tells no level or curve, for an arm at half the budget, which had less time than the others, and
        for a run whose causal phase ended below the level.
        """
        curve: Any = self.curves.get(TRAINING_LOSS)
        level = self.unigram_loss
        if self.half or not level or not curve or (self.onset is None and is_past(curve, level)):
            return None
        return self.onset or self.tokens or curve[-1][0]  # a row need not tell its tokens

    @cached_property
    def spent(self) -> Mapping[str, float]:
        """Unit → what the run had spent at its onset, or at its end; without the units that its row does not tell.

        Predictions are tokens times the mask rate up to then, which changes in equal steps, of which each has the rows
        of its phase. A causal phase predicts every token.
        """
        tokens = self.rested or 0.0
        ends, lengths = np.array([0.0, *(one.share for one in self.phases)]), [one.seq_length for one in self.phases]
        grown = np.cumsum([0, *np.diff(ends) * lengths])
        share = np.interp(tokens / (self.tokens or np.inf), grown / grown[-1], ends)
        rates = MaskRates.parse(str(self.settings.get("mask_prob", _DEFAULTS["mask_prob"])))
        _, _, causal = str(self.settings.get("objective_phases") or "").partition(":")
        at = share * (np.arange(2000) + 0.5) / 2000  # middles of steps [2000]
        masked = np.where(at < float(causal or 0), 1, rates.start + (rates.end - rates.start) * at)
        rate = np.average(masked, weights=np.take(lengths, np.searchsorted(ends, at) - 1)) if self.settings else 0.0
        seconds = self.steps * share * self.values.get(STEP_SECONDS, 0.0)
        found = zip(UNITS, (tokens / 1e6, self.steps * share, tokens / 1e6 * rate, seconds), strict=True)
        return {unit: amount for unit, amount in found if amount}


_ALIKE = ("mask_prob", "masking", "seq_length", "seq_length_phases", "packing", "hidden_dropout", "attention_dropout")
"""Settings that must be alike where training losses are compared."""
_DEFAULTS = {name: option.default for name, option in options_of(*concerns().values()).items()}
_DEFAULTS["eval_iters"] = EVAL_ITERS


def times_on_plateau(runs: Mapping[int, RunRow], unit: str = "million tokens") -> Times:
    """Return the times of the runs of an arm, by seed, on the plateau; none if a row does not tell its own."""
    times: Any = [(run.spent.get(unit), run.onset is not None) for run in runs.values() if run.rested]
    return times if all(time for time, _ in times) else []


_KEYS: dict[str, Any] = {
    **get_type_hints(RunRow, include_extras=True),
    "values": Annotated[Mapping[str, Value], "an object of finite numbers, with null for a value that is not finite"],
    "pairs": (Count, Mapping[str, Count]),
}
"""Key of a row → type hint of its value. Old rows have one number of pairs for all paradigms."""
del _KEYS["undefined"], _KEYS["samples"]


def as_run(row: Mapping[str, Any], folder: Path | None = None) -> RunRow:
    """Return a row as a run, with its samples if they stand in the folder. Raises `Damaged` for another object."""
    found = {key: value for key, value in row.items() if value is not None and key in _KEYS}
    if wrong := misfit(found, {key: _KEYS[key] for key in found}):
        raise Damaged(wrong)
    required = [key.name for key in fields(RunRow) if key.default is key.default_factory is MISSING]
    if missing := [name for name in required if name not in found]:
        raise Damaged(f"not a row of a run: {missing[0]} is missing")
    values, pairs = found["values"], found.get("pairs", {})
    pairs = pairs if isinstance(pairs, dict) else dict.fromkeys(found.get("paradigms", {}), pairs)
    run = RunRow(
        **found
        | {
            "values": {name: float(value) for name, value in values.items() if value is not None},
            "undefined": tuple(name for name, value in values.items() if value is None),
            "pairs": {name: count for name, count in pairs.items() if count},
            "budget": found.get("budget") or f"{found['planned_tokens']:,} tokens",
            "samples": read_samples(folder, row) if folder else {},
        }
    )
    return replace(run, values=losses_by_text(run))


def losses_by_text(run: RunRow) -> dict[str, float]:
    """Return the values of a run, with its losses named by their text if the row has the validation gap.

    If the validation text is of another kind, the loss on like text is that of the last tenth of training.
    """
    values, name = dict(run.values), LIKE_LOSS if run.validates_alike else OTHER_LOSS
    if run.validation_gap is None:
        return values
    if LOSS in values and name not in values:
        values[name] = values.pop(LOSS)
    tail = None if run.validates_alike else last_tenth(run.curves.get(TRAINING_LOSS, ()))
    return values if tail is None else {LIKE_LOSS: tail} | values


def last_tenth(curve: Curve) -> float | None:
    """Return the mean training loss over the last tenth of a run's tokens; None without tokens.

    Each point counts by the tokens since the point before. In its first epoch a run sees all of this text for the first
    time.
    """
    begin = max(0.0, 2 * curve[0][0] - curve[1][0]) if len(curve) > 1 else 0.0  # a causal phase has no masked loss
    points = np.array([(begin, 0.0), *curve])  # [1 + points, 2]
    spans = np.diff(points[:, 0]) * (points[1:, 0] > 0.9 * points[-1, 0])
    return float(spans @ points[1:, 1] / spans.sum()) if spans.sum() > 0 else None


def samples_file(folder: Path, row: Mapping[str, Any]) -> Path:
    """Return the file of a row's samples; another measurement of the same run has another file."""
    return folder / "items" / f"{row['run']}-{digest(list(row.get('jobs', [])))}.npz"


def read_samples(folder: Path, row: Mapping[str, Any]) -> Samples:
    """Return the samples of a row; none if their file is missing. Raises `UserError` for a damaged file."""
    file = samples_file(folder, row)
    if not file.exists():
        return {}
    with reading(file, "damaged, or not the samples of its run; copy it again, or delete it"):
        with np.load(file, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
        if str(found.pop(_FILE, file.name)) != file.name:
            raise ValueError("those of another run")
        return found


def write_samples(folder: Path, row: Mapping[str, Any], samples: Samples) -> None:
    """Store the samples of a row."""
    stream = io.BytesIO()
    path = samples_file(folder, row)
    np.savez_compressed(stream, **dict(samples) | {_FILE: np.array(path.name)})  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, stream.getvalue())


def open_rows(path: Path) -> Store:
    """Open a file of rows. Raises `UserError` with the line that is damaged or has a value of a wrong type or range."""

    def check(row: Row) -> Row:
        as_run(row)
        return row

    def refuse(sentence: str) -> None:
        raise UserError(f"{sentence}; delete this line, and let megatron-ddrp compare write it again")

    return Store(path, lambda row: f"{row['run']} {digest(row.get('jobs', []))}", "a row of a run", check, refuse)


def read_run_rows(paths: Iterable[Path]) -> list[RunRow]:
    """Return the runs of some files; a later row of a run replaces an earlier one.

    Raises:
        UserError: a file is missing, empty or damaged, also one of samples, or two runs claim the same place.
    """
    found: dict[str, RunRow] = {}
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give the rows.jsonl that megatron-ddrp compare writes")
        store = open_rows(path)
        if store.ends_in_half_a_line:
            raise UserError(f"{path}: its last line is cut off; delete it, or let megatron-ddrp compare write it again")
        found |= {row["run"]: as_run(row, path.parent) for row in store}
    if not found:
        raise UserError(f"no row in {', '.join(map(str, paths))}; train a run of the plan first")
    return list(found.values())


def row_of(file: Path, name: str) -> RunRow:
    """Return the row of the run with this name, or with the only one that starts so. Raises `UserError`."""
    rows = [row for row in read_run_rows([file]) if np.isfinite(row.validation_loss)]
    found = [row for row in rows if row.run == name] or [row for row in rows if row.run.startswith(name)]
    if len(found) != 1:
        names = ", ".join(row.run for row in (found or rows)[:3])
        raise UserError(f"--reproduce {name!r}: {len(found)} runs of {file} fit; give one of {names}", WRONG_ARGUMENTS)
    return found[0]
