"""Texts of a Python program as an input file: a pipe that a thread writes while the file is read. No text is stored."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

NAME = "texts.jsonl"
GZIP = 31
"""`wbits` of zlib for gzip's format."""


@contextmanager
def texts_as_file(texts: Iterable[Any], keys: Sequence[str]) -> Iterator[str]:
    """Yield the path of a file, to be read once, with the texts as JSON lines.

    A text is a string, for the only key, or a row: a mapping with a string for every key, as `datasets.Dataset` gives.
    An error of the texts ends the reading as a damaged file does, so that no half dataset is published, and is raised
    behind the block.

    Raises:
        UserError: `texts` is one string or one mapping, or a text is neither a string nor a row with the keys.
    """
    if isinstance(texts, (str, bytes, Mapping)):
        raise UserError(
            f"texts is one {type(texts).__name__}: give a list of texts or rows; a file is given by input",
            WRONG_ARGUMENTS,
        )
    reading, writing = os.pipe()
    failed: list[BaseException] = []

    def send() -> None:
        packed = zlib.compressobj(0, wbits=GZIP)  # packed, though not compressed: its end says that nothing is missing
        with suppress(BrokenPipeError), open(writing, "wb") as stream:  # a reader that refuses the texts says so itself
            try:
                for number, text in enumerate(texts, 1):
                    stream.write(packed.compress(json.dumps(row_of(text, keys, number)).encode() + b"\n"))
                stream.write(packed.flush())
            except BrokenPipeError:
                raise
            except BaseException as error:  # for the thread that reads
                failed.append(error)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        path.symlink_to(f"/dev/fd/{reading}")
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            yield str(path)
        finally:
            os.close(reading)
            thread.join()
            if failed:
                raise failed[0]


def row_of(text: Any, keys: Sequence[str], number: int) -> dict[str, str]:
    """Return the row of JSON of one text."""
    row = {keys[0]: text} if isinstance(text, str) and len(keys) == 1 else text
    if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in keys):
        wanted = "a string, or " * (len(keys) == 1) + f"a row with a string for {' and '.join(map(repr, keys))}"
        raise UserError(f"text {number:,} is {text!r:.80}: expected {wanted}")
    return {key: row[key] for key in keys}
