"""Reading a YAML mapping with checks: whatever is wrong gives one line with the file, the key and what is allowed."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

Value = TypeVar("Value")
Check = Callable[[Any], Value]
"""Returns the value as it is used, or raises ValueError that says what is expected."""
REQUIRED = object()

SHOWN = reprlib.Repr()
"""Shows a value in an error, cut where it is long or deep: a few bytes of YAML may stand for gigabytes."""
SHOWN.maxlevel, SHOWN.maxstring, SHOWN.maxother = 2, 200, 200


class Section:
    """One mapping of a plan; `take` hands out its checked values."""

    def __init__(self, file: Path, where: str, value: Any, allowed: Sequence[str]):
        """`where` is its dotted key, empty for the file itself. Raises `UserError` for a key that is not `allowed`."""
        self.file, self.where = file, where
        if not isinstance(value, Mapping):
            raise self.error("", f"{SHOWN.repr(value)}: expected keys among {', '.join(allowed)}")
        self._values = dict(value)
        for key in self._values:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), allowed, n=1)
                hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(allowed)}"
                raise self.error(str(key), f"no such key; {hint}")

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def take(self, key: str, check: Check[Value], default: Any = REQUIRED) -> Value:
        """The value of a key, checked, or its default. Raises `UserError` where it is wrong or missing."""
        value = self._values.get(key)
        if value is None:
            if default is REQUIRED:
                raise self.error(key, "missing")
            return default
        try:
            return check(value)
        except ValueError as error:
            raise self.error(key, f"{SHOWN.repr(value)}: expected {error}") from None

    def section(self, key: str, allowed: Sequence[str]) -> Section:
        """A mapping inside this one; an empty one where it is not given."""
        value = self._values.get(key)
        return Section(self.file, self._path(key), {} if value is None else value, allowed)

    def error(self, key: str, message: str) -> UserError:
        """An error about one of the keys."""
        path = self._path(key)
        return UserError(f"{self.file}: {path + ': ' if path else ''}{message}", WRONG_ARGUMENTS)

    def _path(self, key: str) -> str:
        return ".".join(filter(None, (self.where, key)))


def read_mapping(file: Path) -> Any:
    """Return the content of a YAML file. Raises `UserError` where it is missing or not YAML."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; give a plan such as examples/compare/cpu-hours.yaml", 2) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file}: not YAML: {error}", WRONG_ARGUMENTS) from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply; expected a plan such as examples/compare/*.yaml", 2) from None


def at_least(least: int) -> Check[int]:
    """A whole number."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number of at least {least}")
        return value

    return check


def above_zero(value: Any) -> float:
    """A number above 0; YAML reads 1e-3 as text, so that counts as well."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError("a number above 0")
    return number


def text(value: Any) -> str:
    """Some text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("some text")
    return value


def yes_or_no(value: Any) -> bool:
    """A truth value."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def one_of(*choices: str) -> Check[str]:
    """One of some names."""

    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return str(value)

    return check


def list_of(check: Check[Value], least: int = 1) -> Check[tuple[Value, ...]]:
    """At least so many values, all different; a single one needs no list."""

    def check_all(value: Any) -> tuple[Value, ...]:
        items = value if isinstance(value, list) else [value]
        if len(items) < least:
            raise ValueError("at least one value")
        values = tuple(check(item) for item in items)
        if len(set(values)) < len(values):
            raise ValueError("values that differ")
        return values

    return check_all
