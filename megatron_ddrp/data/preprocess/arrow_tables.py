"""Rows of tables: Parquet files, and Arrow files, such as `Dataset.save_to_disk` of Hugging Face writes."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import UserError, need_packages, shown_names
from megatron_ddrp.foreign import read_object, reading

ROWS = 512  # of a Parquet file, decoded at once; pages, not rows, are what pyarrow keeps in memory

Row = tuple[bytes | str | None, ...]
"""Cell of each column: its UTF-8, None for null, or why the file cannot give it, as a `str`."""

Batches = Callable[[list[str]], Iterator[tuple[Any, float]]]
"""Function from names of columns to pyarrow's batches of rows, each with the fraction of the file read so far."""

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a finished Arrow stream."""


def table_rows(path: str, columns: Sequence[str], part_bytes: int) -> Iterator[tuple[list[Row], float]]:
    """Yield parts of about `part_bytes` bytes: rows, and the fraction of the file read.

    Columns that are missing or hold no strings are faults of every row. Raises `UserError` without pyarrow, and for a
    damaged file.
    """
    with _open_arrow(path) if path.lower().endswith(".arrow") else _parquet_batches(path) as (schema, batches):
        import pyarrow

        faults = [_column_fault(schema, column) for column in columns]
        sound = [column for column, fault in zip(columns, faults, strict=True) if not fault]
        rows: list[Row] = []
        size = 0
        for batch, done in batches(sound):
            cells = [
                [fault] * batch.num_rows if fault else batch.column(column).cast(pyarrow.large_binary()).to_pylist()
                for column, fault in zip(columns, faults, strict=True)
            ]
            rows += zip(*cells, strict=True)
            size += sum(batch.column(column).nbytes for column in sound) + batch.num_rows * sum(map(len, faults))
            if size >= part_bytes:
                yield rows, done
                rows, size = [], 0
        yield rows, 1.0


@contextlib.contextmanager
def _parquet_batches(path: str) -> Iterator[tuple[Any, Batches]]:
    """Open a Parquet file; yield its schema and its batches."""

    def batches(columns: list[str]) -> Iterator[tuple[Any, float]]:
        done = 0
        for batch in file.iter_batches(ROWS, columns=columns, use_threads=False):
            done += batch.num_rows
            yield batch, done / max(1, file.metadata.num_rows)

    with open_parquet(path) as file:
        yield file.schema_arrow, batches


@contextlib.contextmanager
def _open_arrow(path: str) -> Iterator[tuple[Any, Batches]]:
    """Open an Arrow file, a stream or the random-access format; yield its schema and its batches.

    Raises `UserError` without pyarrow, and for a damaged file, also if the damage shows inside the block. A stream
    that was cut off between two batches lacks its end.
    """
    pyarrow = _pyarrow(path)

    def batches(columns: list[str]) -> Iterator[tuple[Any, float]]:
        found = iter(reader) if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        try:
            for batch in found:
                batch.validate(full=True)  # damaged lengths would let pyarrow read anywhere
                yield batch, source.tell() / size
        except MemoryError as error:  # for a damaged length
            raise ValueError(error) from None

    with reading(path, "damaged, or not an Arrow file ({error}); copy it again"), pyarrow.OSFile(path) as source:
        size = source.size()
        begin = source.read(6)
        if begin.startswith(b"FEA1"):
            raise UserError(f"{path}: Feather V1, which is no Arrow file; read it by pandas and write Parquet")
        is_stream = begin != b"ARROW1"
        source.seek(max(0, size - len(_STREAM_END)))
        if is_stream and source.read() != _STREAM_END:
            raise ValueError("its end is missing")
        source.seek(0)
        reader = pyarrow.ipc.open_stream(source) if is_stream else pyarrow.ipc.open_file(source)
        yield reader.schema, batches


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """Open a file as pyarrow's `ParquetFile`, which reads pages when needed.

    Raises `UserError` without pyarrow, and for a damaged file, also if the damage shows inside the block.
    """
    with (
        reading(path, "damaged, or not a Parquet file ({error}); copy it again"),
        _pyarrow(path).parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file,
    ):
        yield file


def _pyarrow(path: str) -> Any:
    need_packages(path, "pyarrow")
    import pyarrow.parquet

    return pyarrow


def _column_fault(schema: Any, column: str) -> str:
    """Return why a column gives no strings; empty if it does."""
    import pyarrow.types as types

    count = schema.names.count(column)
    if count == 0:
        return f"no column {column!r}, it has {shown_names(schema.names[:8])} (see --json-keys)"
    if count > 1:
        return f"column {column!r} is there {count} times, expected once"
    kind = schema.field(column).type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if str(plain) not in ("string", "large_string", "string_view", "null"):
        return f"column {column!r} holds {kind}, expected strings"
    return ""


def is_beside_rows(path: str) -> bool:
    """Return whether a file lies beside the rows of a saved `Dataset` and holds none of them.

    Hugging Face's `save_to_disk` writes such files and leaves the rows of a dataset that was there before; `map` and
    `filter` leave caches of rows there.
    """
    folder, name = os.path.split(path)
    state = os.path.join(folder, "state.json")
    if name in ("state.json", "dataset_info.json"):
        return os.path.exists(state) and bool(glob.glob(glob.escape(folder) + "/*.arrow"))
    if name == "dataset_dict.json":
        return bool(glob.glob(glob.escape(folder) + "/*/state.json"))
    if not name.endswith(".arrow"):
        return False
    listed = _listed_rows(state, os.stat(state).st_mtime_ns) if os.path.exists(state) else None
    return name.startswith("cache-") or (listed is not None and name not in listed)


@functools.lru_cache(maxsize=1)
def _listed_rows(state: str, changed: int) -> set[str] | None:
    """Return the files of rows that a state.json, last `changed` then, names; None if it names none."""
    rows = read_object(Path(state)).get("_data_files")
    return {str(file.get("filename")) for file in rows if isinstance(file, dict)} if isinstance(rows, list) else None
