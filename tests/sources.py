"""Syntax trees of source files, parsed on first use: each process that runs tests imports all of their files."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

Name = TypeVar("Name")


class Trees(Mapping[Name, ast.Module]):
    """Name → syntax tree of a file."""

    def __init__(self, files: Mapping[Name, Path]) -> None:
        self.files = files

    def __getitem__(self, name: Name) -> ast.Module:
        return _parsed(self.files[name])

    def __iter__(self) -> Iterator[Name]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
