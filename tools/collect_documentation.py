#!/usr/bin/env python
"""Write a corpus of text that every machine has: the documentation inside the installed Python.

The standard library's docstrings and the interpreter's help topics come first, then the docstrings of installed
packages until there is enough. One document is one module or topic; code examples, tables and grammar are left out,
and so is a paragraph that stood in an earlier document. The documents are shuffled by a fixed seed, so that any slice
of the file is a fair sample.

    python tools/collect_documentation.py --output corpus.jsonl
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.data.atomic import atomic_file
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, run_command

PACKAGES = ("numpy", "torch", "scipy", "sklearn", "matplotlib", "transformers")
"""Packages that this project needs and that have much prose in their docstrings."""

LEFT_OUT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__", "_vendor"}
"""Folders without documentation of their own."""

MIN_PARAGRAPH_WORDS = 8
MIN_WORD_SHARE = 0.75
SEED = 0

_CODE_LINE = re.compile(
    r"\s*(>>>|\.\.\.( |$)|\.\. |:\w+[^:]*:|[-=~^+|*#]{3,}|.*::=|.*\|.*\|"
    r"|(Args|Arguments|Attributes|Examples?|Notes?|Parameters|Raises|References|Returns|See Also|Yields):?\s*$)"
)
_TABLE = re.compile(r"^\s*[=-]{2,}( +[=-]{2,})+\s*$", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([^`<]+)(?:<[^`]*>)?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_+")
_MARKUP = re.compile(r"`{1,2}|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)")
_WORD = re.compile(r"[(\"']?[A-Za-z]+(?:['-][A-Za-z]+)*[.,;:!?)\"']*$")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose in a docstring or help topic, each on one line without markup."""
    for block in re.split(r"\n[ \t]*\n", text):
        if _TABLE.search(block):
            continue
        lines = [line for line in block.split("\n") if not _CODE_LINE.match(line)]
        prose = " ".join(" ".join(lines).split())
        for pattern in (_ROLE, _LINK):
            prose = pattern.sub(r"\1", prose)
        prose = _MARKUP.sub("", prose)
        words = prose.split(" ")
        if len(words) >= MIN_PARAGRAPH_WORDS and sum(map(bool, map(_WORD.match, words))) >= MIN_WORD_SHARE * len(words):
            yield prose


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file: the module's, its classes' and functions', in their order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def modules(root: Path) -> Iterator[Path]:
    """Yield the Python files below `root` that are no tests, in alphabetical order."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in LEFT_OUT)
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".py"))


def folder_of(package: str) -> Path | None:
    """Return the folder of an installed package; None for any other name."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # the package above it is missing, or no name at all
        return None
    return Path(spec.origin).parent if spec and spec.origin and spec.submodule_search_locations else None


def sources(packages: Iterable[str]) -> Iterator[tuple[str, Iterable[tuple[str, Iterable[str]]]]]:
    """Yield (name, its documents as (title, texts)) of each source, the standard library first."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    yield "the standard library", ((str(path.relative_to(stdlib)), docstrings(path)) for path in modules(stdlib))
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions ship it apart
        pass
    else:
        yield "the help topics", ((f"help: {name}", [text]) for name, text in sorted(topics.topics.items()))
    for package in packages:
        root = folder_of(package)
        if root is None:
            continue
        files = ((str(path.relative_to(root.parent)), docstrings(path)) for path in modules(root))
        yield package, files


def collect(packages: Iterable[str], megabytes: float) -> tuple[list[dict[str, str]], list[str]]:
    """Return (documents, names of the sources used): whole sources until there are `megabytes` of text."""
    documents: list[dict[str, str]] = []
    used: list[str] = []
    seen: set[str] = set()
    size = 0
    for name, titled_texts in sources(packages):
        if size >= megabytes * 1e6 and used:
            break
        used.append(name)
        for title, texts in titled_texts:
            prose = dict.fromkeys(paragraph for text in texts for paragraph in paragraphs(text))
            kept = [paragraph for paragraph in prose if paragraph not in seen]
            seen.update(kept)
            if kept:
                documents.append({"title": title, "text": "\n".join(kept)})
                size += len(documents[-1]["text"])
    random.Random(SEED).shuffle(documents)
    return documents, used


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", required=True, metavar="FILE.jsonl", help="corpus to write, replaced if it is there"
    )
    parser.add_argument(
        "--megabytes", type=float, default=4.0, metavar="X", help="add packages until there is this much text"
    )
    parser.add_argument(
        "--packages", nargs="*", metavar="NAME", help=f"packages to add, in this order (default: {' '.join(PACKAGES)})"
    )
    arguments = parser.parse_args()
    if missing := [name for name in arguments.packages or () if folder_of(name) is None]:
        raise UserError(
            f"--packages {' '.join(missing)}: no package that is installed in this Python; expected names as in an "
            "import statement; install it, or leave it out",
            WRONG_ARGUMENTS,
        )
    packages = PACKAGES if arguments.packages is None else arguments.packages
    documents, used = collect(packages, arguments.megabytes)
    if not documents:
        raise UserError("no documentation found in this Python; use a corpus of your own")
    with atomic_file(arguments.output) as stream:
        for document in documents:
            stream.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
    size = sum(len(document["text"].encode()) for document in documents)
    print(f"{arguments.output}: {len(documents)} documents, {size / 1e6:.1f} MB, from {', '.join(used)}")


if __name__ == "__main__":
    run_command(main)
