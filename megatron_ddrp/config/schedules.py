"""Settings that change with the optimizer step, as pure functions of the step: resuming needs no stored state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_ddrp.config.option import WAVELENGTH_BASE, check_range, refuse
from megatron_ddrp.errors import UserError

LENGTHS = "[3, 2147483648)"
"""Range of a phase's row length: at least [CLS], one token and [SEP]."""


class MaskRates(NamedTuple):
    """Masking rate of a run, which changes from `start` to `end` in equal steps."""

    start: float
    end: float

    @classmethod
    def parse(cls, value: Any) -> MaskRates:
        """Return the rates of a number, or of the text START:END. Raises `UserError`."""
        words = value.split(":") if isinstance(value, str) else [value]
        rates = [_number(word) for word in words]
        if len(words) > 2 or any(isinstance(rate, str) for rate in rates):
            refuse(f"--mask-prob is {value}: it must be one share in (0, 1), such as 0.15, or two, such as 0.3:0.15")
        for rate in rates:
            check_range("mask_prob", rate, "(0, 1)")
        return cls(rates[0], rates[-1])

    @property
    def written(self) -> float | str:
        """Rates as written for `--mask-prob`: one number if they are equal."""
        return self.start if self.start == self.end else f"{self.start}:{self.end}"

    @property
    def mean(self) -> float:
        """Mean masking rate over the run."""
        return (self.start + self.end) / 2

    def at(self, steps_done: int, total_steps: int) -> float:
        """Return the rate of the step that follows `steps_done` steps of a run of `total_steps`."""
        return self.start + (self.end - self.start) * min(1.0, steps_done / total_steps)


def read_rates(value: Any, place: Any) -> Any:
    """Return the value of `--mask-prob` at a place in YAML (`reading.Place`). Raises `UserError` with the place."""
    try:
        return MaskRates.parse(value).written
    except UserError as error:
        raise place.error(str(error)) from None


def _number(word: Any) -> Any:
    """Return text as a number; return anything else unchanged."""
    try:
        return float(word) if isinstance(word, str) else word
    except ValueError:
        return word


class LengthPhase(NamedTuple):
    """Part of a run whose rows have one length."""

    seq_length: int
    share: float
    """The share of all steps after which the phase ends; after 1 no other phase has a step."""
    rope_theta: float | None = None
    """Base of the rotary wavelengths; None for `--rope-theta`."""

    @classmethod
    def parse(cls, text: str) -> LengthPhase:
        """Return the phase of LENGTH:END or LENGTH:END:THETA. Raises `UserError`."""
        words = text.split(":")
        try:
            phase = cls(int(words[0]), *map(float, words[1:]))
        except (TypeError, ValueError):
            refuse(
                f"--seq-length-phases {text}: expected LENGTH:END, such as 128:0.9 for rows of 128 tokens over the "
                "first 90 % of the steps, or LENGTH:END:THETA (quote it in YAML, which reads 128:0.9 as a time)"
            )
        check_range("seq_length_phases", phase.seq_length, LENGTHS)
        check_range("seq_length_phases", phase.share, "(0, 1]")
        if phase.rope_theta is not None:
            check_range("seq_length_phases", phase.rope_theta, WAVELENGTH_BASE)
        return phase

    def last_step(self, total_steps: int) -> int:
        """Return the number of the phase's last step, 1 … `total_steps`."""
        return round(self.share * total_steps)


def parse_phases(words: Sequence[str], seq_length: int) -> tuple[LengthPhase, ...]:
    """Return the phases of a run, the last of which has rows of `seq_length` tokens. Raises `UserError`.

    The last has no step if the one before it ends with the run.
    """
    phases = (*map(LengthPhase.parse, words), LengthPhase(seq_length, 1.0))
    for word, before, after in zip(words, phases, phases[1:], strict=False):
        ends_in_order = before.share < after.share or after is phases[-1]
        if before.seq_length >= after.seq_length or not ends_in_order:
            refuse(
                f"--seq-length-phases {word}: the next phase has {after.seq_length} tokens and ends at "
                f"{after.share:g}: give phases in order, of growing lengths below --seq-length {seq_length} and "
                "growing ends, at most 1"
            )
    return phases


def phase_at(phases: Sequence[LengthPhase], steps_done: int, total_steps: int) -> LengthPhase:
    """Return the phase of the step that follows `steps_done` steps of a run of `total_steps`."""
    return next((phase for phase in phases[:-1] if steps_done < phase.last_step(total_steps)), phases[-1])
