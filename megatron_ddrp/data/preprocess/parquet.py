"""Text columns of Parquet files, read by pyarrow (an optional dependency) a few rows at a time to save memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ddrp.errors import UserError

ROWS = 512  # decoded at once; pages, not rows, are what pyarrow keeps in memory


Row = tuple[bytes | None, ...]


def parquet_rows(path: str, columns: Sequence[str], part_bytes: int) -> Iterator[tuple[list[Row], float]]:
    """Yield parts of about `part_bytes` bytes: rows as the UTF-8 of each column (None for null), and the fraction read.

    The fraction is of the file's rows. Raises `UserError` without pyarrow, for a damaged file, and for columns that are
    missing or hold no strings.
    """
    with open_parquet(path) as file:
        import pyarrow

        _check_columns(path, file.schema_arrow, columns)
        total = max(1, file.metadata.num_rows)
        rows: list[Row] = []
        size = done = 0
        for batch in file.iter_batches(ROWS, columns=list(columns), use_threads=False):
            cells = [batch.column(column).cast(pyarrow.large_binary()).to_pylist() for column in columns]
            rows += zip(*cells, strict=True)
            size += batch.nbytes
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
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path}: needs pyarrow, which is not installed; pip install 'megatron-ddrp[parquet]'"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: damaged, or not a Parquet file ({reason}); copy it again") from None


def _check_columns(path: str, schema: Any, columns: Sequence[str]) -> None:
    import pyarrow.types as types

    for column in columns:
        if column not in schema.names:
            known = ", ".join(schema.names[:8]) or "none"
            raise UserError(f"{path}: no column {column!r}, it has {known} (see --json-keys)")
        kind = schema.field(column).type
        plain = kind.value_type if types.is_dictionary(kind) else kind
        if str(plain) not in ("string", "large_string", "string_view"):
            raise UserError(f"{path}: column {column!r} holds {kind}, expected strings")
