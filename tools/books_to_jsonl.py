#!/usr/bin/env python
"""A folder of books, one .txt file per book → one .jsonl with one document per book.

In plain text a blank line ends a document, and a book would fall into its paragraphs. Here a book is one document,
whose tokens fill whole sequences. Project Gutenberg's header and licence, where its *** lines mark them, are left out.

    python tools/books_to_jsonl.py --input books/ --output books.jsonl
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import MISSING, dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.commands.options import on_error
from megatron_ddrp.config.reading import Section, option
from megatron_ddrp.data.atomic import atomic_file
from megatron_ddrp.data.preprocess.inputs import InputFile, OpenInput, find_inputs
from megatron_ddrp.data.progress import reading_progress
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, run_command

_BLOCK = 1 << 20
_MARK = re.compile(
    r"^\*\*\* ?(START|END) OF (?:THIS|THE) PROJECT GUTENBERG"
    r"(?:(?:.*\n(?=[ \t]*[^\s*])){0,2}?.*\*\*\*[ \t\r]*$|.*$)",  # a long title takes up to two further lines
    re.MULTILINE,
)


def read_book(file: InputFile, skip: bool) -> str | None:
    """Return the text of a book, without blank lines; None for a skipped one that is not UTF-8."""
    with OpenInput(file) as stream:
        try:
            stream.first()  # refuses text in wide characters
        except UserError:
            if skip:
                return None
            raise
        raw = b"".join(iter(lambda: stream.read(_BLOCK), b""))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if skip:
            return None
        raise UserError(
            f"{file.path}: byte {error.start + 1} is not UTF-8; convert it, or leave such books out by --on-error skip"
        ) from None
    if (books := sum(mark[1] == "START" for mark in _MARK.finditer(text))) > 1:
        raise UserError(
            f"{file.path}: holds {books} books, by its *** START lines, expected one per file; split it before each of "
            "them, or leave it out"
        )
    return "\n".join(line.strip() for line in body(text).splitlines() if line.strip())


def body(text: str) -> str:
    """Return the text between Project Gutenberg's marks, all of it where there are none."""
    marks = {mark[1]: mark for mark in _MARK.finditer(text)}
    begin = marks["START"].end() if "START" in marks else 0
    end = marks["END"].start() if "END" in marks else len(text)
    return text[begin:end] if begin < end else text


@dataclass(frozen=True)
class BookOptions(Section):
    """input and output"""

    input: tuple[str, ...] = option(MISSING, "folders (or files) of .txt, also packed", nargs="+", metavar="DIR")
    output: str = option(MISSING, "replaced if it is there", metavar="FILE.jsonl")
    on_error: str = on_error("a book that is not UTF-8")


def main() -> None:
    arguments = parse_sections(ArgumentParser(description=__doc__), (BookOptions,), None, plugins=False)
    files = find_inputs(arguments.input)
    for file in files:
        if file.ending not in ("", ".txt"):
            raise UserError(
                f"{file.path}: expected .txt, one book a file; give {file.ending} to tools/preprocess_data.py as it is",
                WRONG_ARGUMENTS,
            )
    written = skipped = empty = characters = 0
    with atomic_file(arguments.output) as stream, reading_progress([file.path for file in files]) as bar:
        for file in files:
            text = read_book(file, arguments.on_error == "skip")
            bar.update(os.path.getsize(file.path) if os.path.isfile(file.path) else 0)
            if not text:
                skipped, empty = skipped + (text is None), empty + (text == "")
                continue
            stream.write(json.dumps({"title": file.name, "text": text}, ensure_ascii=False).encode() + b"\n")
            written, characters = written + 1, characters + len(text)
        if not written:
            raise UserError(f"{' '.join(arguments.input)}: no book with any text in it; nothing written")
    left_out = f", {skipped} not UTF-8 left out" * bool(skipped) + f", {empty} empty left out" * bool(empty)
    print(f"{arguments.output}: {written} books, {characters / 1e6:.1f} million characters{left_out}")


if __name__ == "__main__":
    run_command(main)
