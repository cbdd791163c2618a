"""The parts of every concern's dataclass: fields that are flags, ranges of numbers, and errors that name the flag."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from pathlib import PurePath
from typing import Any, NamedTuple

from megatron_ddrp.errors import UserError

COUNT = "[1, 2147483648)"
"""Range of sizes and numbers of steps. A product of two of them is exact in 64 bits."""
SEED = "[0, 9223372036854775808)"
"""Range of seeds."""
NOT_NEGATIVE, POSITIVE, WAVELENGTH_BASE = "[0, 1e12]", "(0, 1e12]", "[1, 1e12]"
"""Ranges of real numbers; float32 holds the product of three of them."""


class Number(NamedTuple):
    """A number that an objective or an optimizer declares, for `--objective-options` and `--optimizer-options`."""

    default: float
    within: str
    """Range, written as for `option`."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Return a dataclass field that is also a command-line flag.

    `choices`, `nargs` and `metavar` go to argparse. `within` is the range of a number, such as "[0, 1)" or "(0, inf)";
    every number has one, and no range includes inf or nan. `distinct` refuses a list with equal values. `read` is a
    function that replaces the usual reading of a value from YAML (`reading.py`) and checks its range. `word` reads one
    word of the command line in place of the field's type. `positional` is for a word without its flag.
    """
    return field(default=default, metadata={"help": help, **metadata})


def flag(field_name: str) -> str:
    """Return the flag of a field: `num_layers` → `--num-layers`."""
    return "--" + field_name.replace("_", "-")


def flag_words(settings: Iterable[tuple[str, Any]]) -> list[str]:
    """Return settings as words of a command line: `("bf16", True)` as `--bf16`, `("bf16", False)` as `--no-bf16`.

    Raises `UserError` for a value of a type that no flag has.
    """
    typed = []
    for name, value in settings:
        values = value if isinstance(value, (tuple, list)) else () if isinstance(value, bool) else (value,)
        if not all(isinstance(each, (str, PurePath, numbers.Number)) for each in values):
            refuse(f"{name}={value!r:.60}: expected a text, a path, a number, True, False, or a list of these")
        typed += [flag(f"no_{name}" if value is False else name), *map(str, values)]
    return typed


def refuse(message: str) -> None:
    """Raise `UserError` for an impossible setting (exit code 2)."""
    raise UserError(message, exit_code=2)


def check_ranges(section: Any) -> None:
    """Refuse the first number of a concern's dataclass that lies outside its option's range."""
    for f in fields(section):
        value = getattr(section, f.name)
        if "within" in f.metadata and "read" not in f.metadata and value is not None:
            for number in value if isinstance(value, (list, tuple)) else (value,):
                check_range(f.name, number, f.metadata["within"])


def own_numbers(owner: str, name: str, words: Iterable[str], declared: Mapping[str, Number]) -> dict[str, float]:
    """Return the numbers that an objective or an optimizer declares, with those given as NAME=NUMBER in their place.

    `owner` is its flag with its name, and `name` the field of the `words`. Raises `UserError` for an undeclared name,
    for text that is not a number, and for a number out of its range.
    """
    numbers = {key: float(number.default) for key, number in declared.items()}
    given = [word.partition("=") for word in words]
    for key, _, text in given:
        word = f"{flag(name)} {key}={text}" if text else f"{flag(name)} {key}"
        if key not in declared:
            takes = f"takes {', '.join(declared)}, as name=number" if declared else "has no options"
            refuse(f"{word}: {owner} {takes}")
        if sum(other == key for other, *_ in given) > 1:
            refuse(f"{word}: {key} is given twice; give it once")
        try:
            numbers[key] = float(text)
        except ValueError:
            refuse(f"{word}: {text!r} is not a number; give {key}={declared[key].default}")
        check_range(f"{name} {key}", numbers[key], declared[key].within)
    return numbers


def as_tuple(words: str | Iterable[str]) -> tuple[str, ...]:
    """Return the words of an option with several: a string is one word, and JSON and YAML give lists."""
    return (words,) if isinstance(words, str) else tuple(words)


def as_words(numbers: Mapping[str, float]) -> tuple[str, ...]:
    """Return numbers as the words that `own_numbers` takes."""
    return tuple(f"{name}={number!r}" for name, number in numbers.items())


def as_number(value: Any) -> float | None:
    """Return a number of Python, numpy or torch as a float; None for anything else."""
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


class Section:
    """Base of the dataclasses of flags: refuses numbers outside their options' ranges."""

    def __post_init__(self) -> None:
        check_ranges(self)


def check_range(name: str, value: Any, within: str) -> None:
    """Refuse a value that is not a finite number in the range `within`, written as in `option`."""
    if reason := refused_range(value, within):
        refuse(f"{flag(name)} is {value}: {reason}")


def refused_range(value: Any, within: str) -> str | None:
    """Return the sentence that names the allowed range, or None if a value lies in it."""
    low, high = (float(bound) for bound in within[1:-1].split(","))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    above = is_number and (value >= low if within[0] == "[" else value > low)
    below = is_number and (value <= high if within[-1] == "]" else value < high)
    return None if above and below else f"it must {_describe(within, low, high)}"


def _describe(within: str, low: float, high: float) -> str:
    """Return a range in words: `lie in [0, 1)`, `be at least 1 and at most 1e+12`, `be above 0 and finite`."""
    if within[-1] == ")" and 2**31 <= high < math.inf:
        return f"be at least {low:g} and below 2^{math.log2(high):g}"
    if high < 2**31:
        return f"lie in {within}"
    return f"be {'at least' if within[0] == '[' else 'above'} {low:g} and " + (
        f"at most {high:g}" if math.isfinite(high) else "finite"
    )
