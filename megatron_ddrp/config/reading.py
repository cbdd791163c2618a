"""Fields of dataclasses that are flags: their ranges, errors that name the flag, and their values from YAML.

Errors about YAML are one line with file and key.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

from megatron_ddrp.config.registry import PLUGINS, load_plugin
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, nearest
from megatron_ddrp.foreign import LARGEST_YAML, GivenTwice, hints_of, misfit, parse_yaml, read_bytes

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
    function that `read_value` calls in place of its own rules, and that checks the value's range. `word` reads one word
    of the command line in place of the field's type. `positional` is for a word without its flag.
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
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if "within" in f.metadata and "read" not in f.metadata and value is not None:
                for number in value if isinstance(value, (list, tuple)) else (value,):
                    check_range(f.name, number, f.metadata["within"])


def check_range(name: str, value: Any, within: str) -> None:
    """Refuse a value that is not a finite number in the range `within`, written as in `option`."""
    if reason := refused_range(value, within):
        refuse(f"{flag(name)} is {value}: {reason}")


def refused_range(value: Any, within: str) -> str | None:
    """Return the sentence that names the allowed range, or None if a value lies in it."""
    return f"it must {_describe(within)}" if misfit(value, Annotated[float, within]) else None


def _describe(within: str) -> str:
    """Return a range in words: `lie in [0, 1)`, `be at least 1 and at most 1e+12`, `be above 0 and finite`."""
    low, high = map(float, within[1:-1].split(","))
    if within[-1] == ")" and 2**31 <= high < math.inf:
        return f"be at least {low:g} and below 2^{math.log2(high):g}"
    if high < 2**31:
        return f"lie in {within}"
    return f"be {'at least' if within[0] == '[' else 'above'} {low:g} and " + (
        f"at most {high:g}" if math.isfinite(high) else "finite"
    )


AnySection = TypeVar("AnySection")

SHOWN = reprlib.Repr()
"""Printer of values in errors. It cuts long and deep values: a few bytes of YAML can expand to gigabytes."""
SHOWN.maxlevel, SHOWN.maxstring, SHOWN.maxother = 2, 200, 200

_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "some text", Path: "a path"}


class Place(NamedTuple):
    """Place of a value: a file and the dotted key in it (empty for the whole file)."""

    file: str
    key: str = ""

    def at(self, key: str) -> Place:
        """Return the place of a key inside this one."""
        return Place(self.file, f"{self.key}.{key}" if self.key else key)

    def error(self, message: str) -> UserError:
        """Return an error that names this place."""
        return UserError(": ".join(filter(None, (*self, message))), WRONG_ARGUMENTS)


class Option(NamedTuple):
    """A setting: its type, the rules of its `option(...)` and its default."""

    hint: Any
    rules: Mapping[str, Any]
    default: Any


def options_of(*sections: Any) -> dict[str, Option]:
    """Return name → option for every field of these dataclasses that `option(...)` made."""
    return {
        f.name: Option(hints_of(section)[f.name], f.metadata, f.default)
        for section in sections
        for f in dataclasses.fields(section)
        if "help" in f.metadata
    }


def load_plugins(files: Any, place: Place, source: Path, is_of_a_run: bool = False) -> None:
    """Load the plug-ins that a YAML file names, before its other keys are checked: these may have names from them.

    A line on standard error names each file before its code runs. Raises `UserError` for any other `source` than a YAML
    file that a person wrote: the configuration of a run, which may be somebody else's, never names code.
    """
    if is_of_a_run or source.suffix.lower() not in (".yaml", ".yml"):
        raise place.error(
            "only a YAML file of your own may name code that is run: leave the key out, and give the file by --plugin"
        )
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise place.error(f"got {SHOWN.repr(files)}, expected a list of files, such as [my_encoding.py]")
    for file in files:
        if Path(file).resolve() not in PLUGINS.values():
            print(f"{place.file}: runs the code of {Path(file).resolve()}", file=sys.stderr, flush=True)
        try:
            load_plugin(Path(file))
        except UserError as error:
            raise place.error(str(error)) from None


def load_values(path: Path, place: Place, parse: Callable[[bytes], Any] = parse_yaml) -> Any:
    """Return the content of a YAML file, or of what `parse` reads.

    Raises `UserError` if the file cannot be read or has a setting twice.
    """
    try:
        return parse(read_bytes(path, LARGEST_YAML))
    except GivenTwice as error:
        raise place.error(str(error)) from None
    except (ValueError, UserError) as error:
        raise place.error(f"cannot be read: {str(error).removeprefix(f'{path}: ')}") from None


def read_settings(
    options: Mapping[str, Option], values: Any, place: Place, hints: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return name → checked value of the settings in a mapping; its keys have dashes or underscores.

    Raises `UserError` for an unknown key, a key in both spellings, and a value of a wrong type or out of its range.
    `hints` have the remedy for keys that other programs know, with dashes.
    """
    if not isinstance(values, Mapping):
        raise place.error(f"expected settings such as `{next(iter(options))}: …`, got a {type(values).__name__}")
    settings = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in options:
            hint = hints.get(name.replace("_", "-"))
            raise place.error(f"unknown setting {str(key)!r}; {hint}" if hint else _unknown(str(key), options))
        if name in settings:  # one of them may come by `<<`
            raise place.at(str(key)).error("given twice, with dashes and with underscores; keep one of them")
        settings[name] = read_value(value, options[name], place.at(str(key)))
    return settings


def read_section(section: type[AnySection], values: Any, place: Place) -> AnySection:
    """Return a dataclass of options from a mapping."""
    return make_section(section, read_settings(options_of(section), values, place), place)


def make_section(section: type[AnySection], settings: Mapping[str, Any], place: Place) -> AnySection:
    """Return a dataclass from checked settings. Raises `UserError` for a missing or refused setting."""
    for name, option in options_of(section).items():
        if option.default is dataclasses.MISSING and settings.get(name) is None:
            raise place.at(name).error("missing")
    try:
        return section(**settings)
    except UserError as error:
        raise place.error(str(error)) from None


def read_value(value: Any, option: Option, place: Place) -> Any:
    """Return a value of YAML as its option's type; `1e-4`, which YAML reads as text, counts as a number."""
    hint, rules = option.hint, option.rules
    if "read" in rules:
        return rules["read"](value, place)
    if isinstance(hint, types.UnionType):
        members = typing.get_args(hint)
        if value is None and type(None) in members:
            return None
        fitting = [one for one in members if (typing.get_origin(one) is tuple) == isinstance(value, list)]
        hint = next(one for one in (*fitting, *members) if one is not type(None))
    if typing.get_origin(hint) is tuple:
        return _several(value, option._replace(hint=typing.get_args(hint)[0]), place)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return read_section(hint, value, place)
    return _one(value, hint, rules, place)


def _several(value: Any, option: Option, place: Place) -> tuple[Any, ...]:
    """Return the values of a list, or of a single value."""
    items = value if isinstance(value, list) else [value]
    if not items and option.default != ():
        raise place.error("got [], expected at least one value")
    nested = dataclasses.is_dataclass(option.hint)
    places = [place._replace(key=f"{place.key}[{number}]") if nested else place for number in range(1, len(items) + 1)]
    values = tuple(read_value(item, option, at) for item, at in zip(items, places, strict=True))
    if option.rules.get("distinct") and len(set(values)) < len(values):
        raise place.error(f"got {SHOWN.repr(value)}, expected values that differ")
    return values


def _one(value: Any, kind: Any, rules: Mapping[str, Any], place: Place) -> Any:
    choices = rules.get("choices")
    try:
        if isinstance(value, (list, dict, type(None))) or isinstance(value, bool) != (kind is bool):
            raise ValueError
        converted = kind(value)
        if kind is int and converted != float(value):
            raise ValueError
        if kind in (str, Path) and (not str(value).strip() or "\0" in str(value)):  # which no file's name may have
            raise ValueError
        if choices and converted not in choices:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        expected = f"one of {', '.join(map(str, choices))}" if choices else _EXPECTED[kind]
        raise place.error(f"got {SHOWN.repr(value)}, expected {expected}") from None
    if "within" in rules and (reason := refused_range(converted, rules["within"])):
        raise place.error(f"got {converted}: {reason}")
    return converted


def _unknown(key: str, known: Mapping[str, Option]) -> str:
    """Return the line for a key that does not exist; it suggests a similar one in the same spelling."""
    separator = "-" if "-" in key else "_"
    names = [name.replace("_", separator) for name in known]
    close = nearest(key, names)
    return f"unknown setting {key!r}; " + (f"did you mean {close}?" if close else f"allowed are {', '.join(names)}")
