"""Texts of a Python program as an input file: JSON lines, made while they are read. No text is stored."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, code_of_others

TEXTS: dict[str, TextStream] = {}
"""Path of an input file that is none → the texts that a program has given."""


class TextStream(io.RawIOBase):
    """Bytes of JSON lines, one per text. The first text is taken when the first byte is read.

    Attributes:
        count: number of bytes read.
        digest: SHA-256 of these.
    """

    def __init__(self, texts: Iterable[Any], keys: Sequence[str]) -> None:
        self.count, self.digest = 0, hashlib.sha256()
        self._lines, self._rest = _json_lines(texts, keys), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or memoryview(next(self._lines))
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        self.digest.update(part)
        self.count += len(part)
        return len(part)


@contextmanager
def texts_as_file(texts: Iterable[Any], keys: Sequence[str]) -> Iterator[str]:
    """Yield the path of a file, to be read once in this process, with the texts as JSON lines.

    A text is a string, for the only key, or a row: a mapping with a string for every key, as `datasets.Dataset` gives.
    An error of the texts ends the reading and reaches the caller as it is.

    Raises:
        UserError: `texts` is no list or a table, or a text is neither a string nor a row with the keys.
    """
    refuse_no_list(texts, "a list of texts or rows; a file is given by input", but=(str, bytes))
    path = f"<texts {len(TEXTS) + 1}>/texts.jsonl"
    TEXTS[path] = TextStream(texts, keys)
    try:
        yield path
    finally:
        del TEXTS[path]


def refuse_no_list(texts: Any, expected: str, but: tuple[type, ...] = ()) -> None:
    """Raise `UserError` for what cannot be iterated or is one of the types `but`, and for a table.

    A table gives the names of its columns when it is iterated.
    """
    try:
        if isinstance(texts, but):
            raise TypeError
        iter(texts)  # an array may have no axis
    except TypeError:
        raise UserError(f"texts={texts!r:.60}: expected {expected}", WRONG_ARGUMENTS) from None
    if any(hasattr(texts, name) for name in ("keys", "columns")) and not hasattr(texts, "tolist"):
        raise UserError(
            f"texts is a table ({type(texts).__name__}), expected a list of texts; give one of its columns, such as "
            'table["text"]'
        )


def _json_lines(texts: Iterable[Any], keys: Sequence[str]) -> Iterator[bytes]:
    """Yield the row of JSON of each text, and at the end nothing for ever."""
    with code_of_others():
        source = iter(texts)
    for number in itertools.count(1):
        with code_of_others():
            text = next(source, source)
            text = text.as_py() if hasattr(text, "as_py") else text  # of a column of pyarrow
        if text is source:
            yield from itertools.repeat(b"")
        row = {keys[0]: text} if isinstance(text, str) and len(keys) == 1 else text
        if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in keys):
            wanted = "a string, or " * (len(keys) == 1) + f"a row with a string for {' and '.join(map(repr, keys))}"
            raise UserError(f"text {number:,} is {text!r:.80}: expected {wanted}")
        yield json.dumps({key: row[key] for key in keys}).encode() + b"\n"
