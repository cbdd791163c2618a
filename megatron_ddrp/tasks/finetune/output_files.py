"""Writers of files of predictions: the rows of a file, each with its prediction."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import IO, Any

from megatron_ddrp.tasks.finetune.layouts import conll_text
from megatron_ddrp.tasks.finetune.task import Columns

PREDICTION = "prediction"
"""Name of the column of predictions."""
_BREAKS = re.compile(r"[\t\r\n]")

CellText = Callable[[Any, str], str]
"""Function from a label or prediction and the file's ending to the text of its cell, `Kind.cell_text`."""


class RowFile(ABC):
    """Base class of the writers of rows with their predictions to a stream of bytes."""

    def __init__(self, stream: IO[bytes], ending: str, columns: Columns, cell_text: CellText):
        self.stream, self.ending, self.columns, self.cell_text = stream, ending, columns, cell_text
        self.count = 0
        self.changed = 0
        """Number of cells whose tabs and line breaks became blanks."""

    def write(self, cells: dict[str, Any], prediction: Any) -> None:
        """Write a row. Raises ValueError with the reason if the format cannot hold it."""
        self.stream.write(self.text(cells, prediction).encode())
        self.count += 1

    @abstractmethod
    def text(self, cells: dict[str, Any], prediction: Any) -> str:
        """Return one row as text. Raises ValueError with the reason if the format cannot hold it."""

    def finish(self) -> None:
        """Write the end of the file after the last row."""
        return None


class JsonLinesFile(RowFile):
    """Writer of one JSON object per row."""

    def text(self, cells: dict[str, Any], prediction: Any) -> str:
        told = {name: None if _is_missing(value) else value for name, value in cells.items()} | {PREDICTION: prediction}
        try:
            return json.dumps(told, ensure_ascii=False, default=str, allow_nan=False) + "\n"
        except ValueError:
            raise ValueError("a number of a cell is nan or infinite, which JSON cannot hold; write .csv") from None


class TableFile(RowFile):
    """Writer of comma- or tab-separated rows below a header; the first row determines the columns."""

    header: list[str] | None = None

    def text(self, cells: dict[str, Any], prediction: Any) -> str:
        told = cells | {PREDICTION: prediction}
        first = ""
        if self.header is None:
            self.header = list(told)
            first = self._line(self.header)
        if more := [column for column in told if column not in self.header]:
            raise ValueError(f"column {more[0]!r} is not in the first row; write .jsonl")
        return first + self._line([self._cell(column, told.get(column, "")) for column in self.header])

    def _cell(self, column: str, value: Any) -> str:
        """Return a cell as text, empty without a value; the kind of the task writes labels and predictions."""
        if column == PREDICTION or (column == self.columns.label and not _is_missing(value)):
            return self.cell_text(value, self.ending)
        return "" if _is_missing(value) else as_text(value)

    def _line(self, cells: list[str]) -> str:
        if self.ending == ".tsv":
            kept = [_BREAKS.sub(" ", cell) for cell in cells]
            self.changed += sum(cell != before for cell, before in zip(kept, cells, strict=True))
            return "\t".join(kept) + "\n"
        text = io.StringIO()
        csv.writer(text, lineterminator="\r\n").writerow(cells)  # the csv module quotes the characters of this
        return text.getvalue().removesuffix("\r\n") + "\n"


class ConllFile(RowFile):
    """Writer of one token and its tag per line, `_` for no prediction."""

    def text(self, cells: dict[str, Any], prediction: list[str | None]) -> str:
        return conll_text(cells[self.columns.text], [tag or "_" for tag in prediction])


class SquadFile(RowFile):
    """Writer of one JSON object from the id of each question to its answer; without ids, from its number."""

    def __init__(self, stream: IO[bytes], ending: str, columns: Columns, cell_text: CellText):
        super().__init__(stream, ending, columns, cell_text)
        self._seen: set[str] = set()

    def text(self, cells: dict[str, Any], prediction: str | None) -> str:
        name = str(cells.get("id", self.count))
        if name in self._seen:
            raise ValueError(
                f"an earlier question has the id {name!r} too, which .json cannot hold; write .jsonl or .csv"
            )
        self._seen.add(name)
        before = ",\n" if self.count else "{"
        return before + json.dumps({name: prediction or ""}, ensure_ascii=False)[1:-1]

    def finish(self) -> None:
        self.stream.write(b"}\n")


OUTPUT_FILES: dict[str, type[RowFile]] = {".jsonl": JsonLinesFile, ".csv": TableFile, ".tsv": TableFile}
"""Ending → writer, for every kind of task."""


def _is_missing(value: Any) -> bool:
    """Return whether a cell has no value: null, or the nan of a Parquet file."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_text(value: Any) -> str:
    """Return a cell as text: numbers, lists and objects as JSON; decimals, times and bytes of Parquet by `str`."""
    is_json = value is None or isinstance(value, (bool, int, float, list, dict))
    return json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)
