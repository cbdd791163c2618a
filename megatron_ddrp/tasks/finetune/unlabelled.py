"""Rows without labels, which a fine-tuned model predicts."""

from __future__ import annotations

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.kinds.contract import Kind
from megatron_ddrp.tasks.finetune.known_files import KnownFile
from megatron_ddrp.tasks.finetune.table_files import Row, blamed_on
from megatron_ddrp.tasks.finetune.task import Columns

PREDICTION = "prediction"
"""Name of the column of predictions in the output."""


def text_columns(columns: Columns) -> list[str]:
    """Return the columns that a row without a label must have."""
    return [name for name in (columns.text, columns.pair) if name]


def texts_to_predict(row: Row, kind: Kind, columns: Columns) -> tuple[str, ...]:
    """Return the texts of a row.

    Raises:
        UserError: a cell holds no text, or the row has a column of predictions already.
    """
    with blamed_on(row):
        texts = kind.texts(row.cells, columns)
    if PREDICTION in row.cells:
        raise UserError(f"{row.where}: there is a column {PREDICTION!r} already; rename it")
    return texts


def count_unlabelled(file: KnownFile, kind: Kind, columns: Columns) -> int:
    """Read a file that is to be predicted and return its number of rows.

    Raises:
        UserError: a row cannot be predicted; the message names file and line.
    """
    count = 0
    for row in file.rows(text_columns(columns)):
        texts_to_predict(row, kind, columns)
        count += 1
    return count
