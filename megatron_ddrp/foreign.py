"""The door for foreign files: JSON, YAML, and every file that a library reads and somebody else may have written.

Libraries raise errors of all kinds for damaged or hostile files, up to panics of Rust code. Inside `reading(...)` each
of them becomes one line that names the file. tests/unit/test_foreign.py finds code that reads such a file elsewhere.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, NoReturn

import yaml

from megatron_ddrp.errors import UserError, is_of_others, lacks_memory

LARGEST = 1 << 28
"""Largest file in bytes that is read as a whole."""
LARGEST_YAML = 1 << 22
"""Largest YAML file in bytes: its reader needs a second for a few hundred kilobytes."""
MOST_DIGITS = 308
"""Largest number of digits of a whole number: a longer one is no floating-point number either."""
MOST_LENIENT_DIGITS = 4300
"""Largest number of digits in lenient JSON: Python itself reads no longer numbers."""
_QUIET = RLock()
"""Lock of the thread in `quiet_transformers`."""
_POINTER = re.compile(r"(?:version https://\S+/spec/v\d+\s+(?:ext-\S+ \S+\s+)*oid \S+\s+size \d+\s*)+")
"""Pointer of Git LFS, or several."""


@contextlib.contextmanager
def reading(path: object, line: str | Callable[[], str] = "cannot be read: {error}") -> Iterator[None]:
    """Raise whatever a library raises in the block as a `UserError` about `path`; `line` may contain `{error}`.

    Refusals of the operating system keep their own words, and a stand-in for the file is named as such. A lack of
    memory passes, and so do a `UserError` and errors of others (`code_of_others`).
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust code is no `Exception`
        if lacks_memory(error) or is_of_others(error):
            raise
        refuse_stand_in(b"", path)
        words = line if isinstance(line, str) else line()
        if isinstance(error, OSError) and error.strerror:
            words = f"{error.strerror}; give a readable file"
        reason = next(iter(str(error).strip().splitlines()), "")[:200] or type(error).__name__
        raise UserError(f"{path}: {words.replace('{error}', reason)}") from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers log only errors and show no progress bar in the block: we account for weights ourselves.

    Threads take turns, as these are settings of the process.
    """
    from huggingface_hub import utils
    from transformers import logging

    with _QUIET:
        level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        hub_has_bars = not utils.are_progress_bars_disabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if has_bars:
                logging.enable_progress_bar()
            (utils.enable_progress_bars if hub_has_bars else utils.disable_progress_bars)()


def read_bytes(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Return a file's content. Raises `UserError` if it cannot be read or has more than `most` bytes."""
    with reading(path), open(path, "rb") as stream:
        content = stream.read(most + 1)  # a device may have no end
    if len(content) > most:
        raise UserError(f"{path}: more than {most >> 20} MiB, expected a smaller file; give another one")
    refuse_stand_in(content, path)
    return content


def stand_in(text: str) -> str:
    """Return the line about a text that is a pointer of Git LFS and only stands for a file; otherwise nothing."""
    get = "run git lfs install && git lfs pull in its repository, or download the file itself"
    return f"a pointer of Git LFS in place of the file: {get}" if _POINTER.fullmatch(text) else ""


def refuse_stand_in(content: bytes, path: object) -> None:
    """Raise `UserError` if a file's `content` stands for another file; without it the beginning of the file decides."""
    if not content and isinstance(path, (str, os.PathLike)) and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            content = stream.read(1 << 16)
    if line := stand_in(content.decode(errors="replace") if content.startswith(b"version ") else ""):
        raise UserError(f"{path}: {line}")


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text, its lines ended by line feeds. Raises `UserError` if it cannot be read as UTF-8."""
    content = read_bytes(path)
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; give a file of text") from None


def refuse_wide(begin: bytes, path: str | os.PathLike[str]) -> None:
    """Raise `UserError` for a file of text that begins like one in UTF-16 or UTF-32.

    Without a byte order mark UTF-16 shows in its zeros: read as UTF-8 it would be text full of them.
    """
    wide = [begin[place : place + 2] for place in range(0, 8, 2)]  # such as 5B 00 50 00 of "[PAD]"
    other = ""
    if begin.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        other = "UTF-32"
    elif begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        other = "UTF-16"
    for half, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        if all(len(pair) == 2 and pair[half] == 0 != pair[1 - half] for pair in wide):
            other = name
    controls = bytes({*range(9), *range(14, 32)} - {27})  # of which no text in UTF-8 has many
    if not other and len(begin) - len(begin.translate(None, controls)) > 4 + len(begin) // 16:
        other = "UTF-16"
    if other:
        file = os.fspath(path)
        raise UserError(f"{file}: in {other}, expected UTF-8; write it anew: iconv -f {other} -t UTF-8 {file}")


class RepeatedKey(ValueError):
    """Error for a JSON object with the same key twice."""


def parse_json(text: str | bytes, lenient: bool = False, distinct: bool = False) -> Any:
    """Return the value of a JSON text; bytes are UTF-8 and may begin with a byte order mark.

    Raises `ValueError` with the reason: also for NaN and infinities, a key that an object has twice and half a
    surrogate pair, unless `lenient`; always for too long a number and for deep nesting. With `distinct` a lenient text
    may not have a key twice either.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = ((_DISTINCT if distinct else _LENIENT) if lenient else _STRICT).decode(text)
        if not lenient and ("\\ud" in text or "\\uD" in text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        if line := stand_in(error.doc):
            raise ValueError(line) from None
        raise
    return value


def json_values(text: str) -> Iterator[str]:
    """Yield the text of each value of JSON lists, or of values that follow each other.

    Raises `ValueError` for damaged JSON, and `RecursionError` for deep nesting.
    """
    end = depth = 0
    while (begin := _BETWEEN.match(text, end).end()) < len(text):  # type: ignore[union-attr]
        depth += text.count("[", end, begin) - text.count("]", end, begin)
        _, end = _LENIENT.raw_decode(text, begin)
        yield text[begin:end]
    if depth + text.count("[", end) != text.count("]", end):
        raise ValueError("a list is not closed, or closed twice")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the JSON value in a file. Raises `UserError` if it cannot be read or `parse_json` refuses it."""
    content = read_bytes(path)
    with reading(path, "not JSON ({error}); copy the file again"):
        return parse_json(content)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `UserError` as `read_json` does, and for any other value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; copy the file again")
    return value


Name = Annotated[str, "[1, inf)"]
"""Type hint of text that is not empty."""
_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("some text", "text"),
    list: ("a list", "lists"),
    dict: ("an object", "objects"),
    type(None): ("null", "null"),
}
"""Type of a JSON value → its name in messages, for one value and for several."""


def misfit(value: Any, hint: Any) -> str:
    """Return "" if a JSON value fits a type hint, else a message such as "expected a whole number of at least 0".

    Hints are `bool`, `int`, `float` (also a whole number; finite), `str`, `list`, `dict`, `object`, `Mapping[str, …]`,
    `Sequence[…]`, `tuple[…]`, a union, a tuple of types and values of which one must fit, and `{key: hint}` for an
    object with at least these keys; its message begins with the key. `Annotated[hint, "[0, 1)"]` bounds a number, or
    the length of other values. Any other annotation replaces the words of the message.
    """
    if not isinstance(hint, dict):
        return "" if _fits(value, hint) else f"expected {_words(hint)}"
    if not isinstance(value, dict):
        return f"expected an object with {', '.join(hint)}"
    if missing := [key for key in hint if key not in value]:
        return f"{missing[0]} is missing"
    for key, own in hint.items():
        if reason := misfit(value[key], own):
            return f"{key}: got {show(value[key])}, {reason}"
    return ""


hints_of = functools.cache(typing.get_type_hints)
"""Return field → type of a dataclass. To evaluate its annotations takes longer than to parse a command line."""


def show(value: Any) -> str:
    """Return a value as text for an error, at most 80 characters long."""
    text = "too long a number" if isinstance(value, int) and abs(value) >= 10**80 else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fits(value: Any, hint: Any) -> bool:
    if type(hint) is type:  # first, as rows of metrics have many numbers
        if hint not in (int, float):
            return isinstance(value, hint)
        is_number = isinstance(value, (int, hint)) and not isinstance(value, bool)
        return is_number and (hint is int or abs(value) <= sys.float_info.max)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _fits(value, parts[0]) and (parts[1][0] not in "[(" or _lies_in(value, parts[1]))
    if isinstance(hint, tuple) or origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in parts or hint)
    if origin is Mapping:
        return isinstance(value, dict) and all(_fits(one, parts[1]) for one in value.values())
    if origin in (Sequence, tuple):
        if not isinstance(value, (list, tuple)):
            return False
        kinds = parts if origin is tuple and ... not in parts else [parts[0]] * len(value)
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if isinstance(hint, dict) and hint:
        return not misfit(value, hint)
    return type(value) is type(hint) and value == hint


def _lies_in(value: Any, within: str) -> bool:
    low, high = (float(bound) for bound in within[1:-1].split(","))
    size = value.strip() if isinstance(value, str) else value
    size = size if isinstance(size, (int, float)) else len(size)
    return (low < size < high) or (size == low and within[0] == "[") or (size == high and within[-1] == "]")


def _words(hint: Any, many: bool = False) -> str:
    if hint is None or type(hint) is type:
        return _WORDS[hint or type(None)][many]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return parts[1] if parts[1][0] not in "[(" else _words(parts[0], many) + _range(*parts)
    if isinstance(hint, tuple) or origin in (typing.Union, types.UnionType):
        return " or ".join(_words(one, many) for one in parts or hint)
    if origin is Mapping:
        return f"{_WORDS[dict][many]} of {_words(parts[1], True)}"
    if origin in (Sequence, tuple):
        return f"{_WORDS[list][many]} of {_words(parts[0], True)}"
    return f"an object with {', '.join(hint)}" if isinstance(hint, dict) and hint else repr(hint)


def _range(kind: Any, within: str) -> str:
    """Return a range in words, without a bound that no reasonable value reaches."""
    low, high = within[1:-1].split(", ")
    if kind not in (int, float):
        return " that is not empty"
    if float(high) >= 1e12:
        return f" of at least {low}" if within[0] == "[" else f" above {low}"
    return f" from {low} to {high}" if within[0] == "[" and within[-1] == "]" else f" in {within}"


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(f"key {next(key for key in keys if keys.count(key) > 1)!r} is twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _whole_number(digits: str, most: int = MOST_DIGITS) -> int:
    if len(digits) > most:
        raise ValueError(f"a number of {len(digits):,} digits, expected at most {most:,}")
    return int(digits)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


_BETWEEN = re.compile(r"[\s,\[\]]*")
"""Signs between the values of a list, or of several."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_lenient_number = functools.partial(_whole_number, most=MOST_LENIENT_DIGITS)
_LENIENT = json.JSONDecoder(parse_int=_lenient_number)
_DISTINCT = json.JSONDecoder(parse_int=_lenient_number, object_pairs_hook=_distinct_keys)
_STRICT = json.JSONDecoder(
    parse_int=_whole_number, parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_distinct_keys
)


def parse_yaml(content: bytes) -> Any:
    """Return the value of a YAML text: mappings, lists, texts, numbers, true, false and null; a date is a text.

    Raises `ValueError` with the reason for anything else, also for a key that a mapping has twice.
    """
    try:
        return yaml.load(content.decode("utf-8-sig"), _Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"not YAML: not UTF-8 at byte {error.start}") from None
    except (yaml.YAMLError, OverflowError) as error:
        raise ValueError(f"not YAML: {error}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


class GivenTwice(ValueError):
    """Error for a setting that a mapping has twice, also with dashes in place of underscores."""


class _Loader(yaml.SafeLoader):
    """Loader of plain values."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":timestamp")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping before `<<` adds the settings of another one, which its own settings replace."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                name, line = (key.tag, key.value.replace("-", "_")), key.start_mark.line + 1
                if name in lines:
                    given = f"{key.value} is given already in line {lines[name]}"
                    raise GivenTwice(f"line {line}: {given}; keep one of them")
                lines[name] = line
        return node


def _yaml_text(loader: Any, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    if not text.isascii() and _HALF_PAIR.search(text):
        raise ValueError(f"line {node.start_mark.line + 1}: half a surrogate pair, which is no character")
    return text


def _yaml_whole_number(loader: Any, node: yaml.ScalarNode) -> int:
    value = loader.construct_yaml_int(node) if len(node.value) <= MOST_DIGITS else _whole_number(node.value)
    return value if abs(value) < 10**MOST_DIGITS else _whole_number(str(value))


_PLAIN = ("bool", "float", "map", "null", "seq")
_Loader.yaml_constructors = {
    tag: make for tag, make in _Loader.yaml_constructors.items() if tag is None or tag.rpartition(":")[2] in _PLAIN
}
_Loader.add_constructor("tag:yaml.org,2002:str", _yaml_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _yaml_whole_number)
