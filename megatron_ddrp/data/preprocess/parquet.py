"""Text columns of Parquet files, read by pyarrow (an optional dependency) a few rows at a time to save memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import reading

ROWS = 512  # decoded at once; pages, not rows, are what pyarrow keeps in memory


Row = tuple[bytes | str | None, ...]
"""Cell of each column: its UTF-8, None for null, or why the file cannot give it, as a `str`."""


def parquet_rows(path: str, columns: Sequence[str], part_bytes: int) -> Iterator[tuple[list[Row], float]]:
    """Yield parts of about `part_bytes` bytes: rows, and the fraction of the file's rows read.

    Columns that are missing or hold no strings are faults of every row. Raises `UserError` without pyarrow, and for a
    damaged file.
    """
    with open_parquet(path) as file:
        import pyarrow

        faults = [_column_fault(file.schema_arrow, column) for column in columns]
        sound = [column for column, fault in zip(columns, faults, strict=True) if not fault]
        total = max(1, file.metadata.num_rows)
        rows: list[Row] = []
        size = done = 0
        for batch in file.iter_batches(ROWS, columns=sound, use_threads=False):
            cells = [
                [fault] * batch.num_rows if fault else batch.column(column).cast(pyarrow.large_binary()).to_pylist()
                for column, fault in zip(columns, faults, strict=True)
            ]
            rows += zip(*cells, strict=True)
            size += batch.nbytes + batch.num_rows * sum(map(len, faults))
            done += batch.num_rows
            if size >= part_bytes:
                yield rows, done / total
                rows, size = [], 0
        yield rows, 1.0


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """Open a file as pyarrow's `ParquetFile`, which reads pages when needed.

    Raises `UserError` without pyarrow, and for a damaged file, also if the damage shows inside the block.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path}: needs pyarrow, which is not installed; pip install 'megatron-ddrp[parquet]'"
        ) from None
    with (
        reading(path, "damaged, or not a Parquet file ({error}); copy it again"),
        pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file,
    ):
        yield file


def _column_fault(schema: Any, column: str) -> str:
    """Return why a column gives no strings; empty if it does."""
    import pyarrow.types as types

    count = schema.names.count(column)
    if count == 0:
        return f"no column {column!r}, it has {', '.join(schema.names[:8]) or 'none'} (see --json-keys)"
    if count > 1:
        return f"column {column!r} is there {count} times, expected once"
    kind = schema.field(column).type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if str(plain) not in ("string", "large_string", "string_view", "null"):
        return f"column {column!r} holds {kind}, expected strings"
    return ""
