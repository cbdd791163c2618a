"""Arms of an experiment: models at the full or half budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


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
        texts = sorted((flag.replace("-", "_"), _text(value)) for flag, value in flags.items())
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


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
