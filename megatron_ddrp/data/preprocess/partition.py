"""Part I of N of the input: decided from the sizes of all files, by each machine on its own.

The files stand end to end, S bytes in all, and part I owns the bytes from S(I − 1)/N to S·I/N. A document that crosses
the border belongs to the part in which it begins, as in Hadoop's text splits: a part reads behind its last byte until
the document ends, and skips to the first document that begins in its range. A packed or Parquet file cannot be entered
in the middle, so the whole of it belongs to the part that owns its first byte. Both sides of a border compute it by
the same function (`record_start`), so no document is lost or read twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_ddrp.data.preprocess.documents import record_start
from megatron_ddrp.data.preprocess.inputs import InputFile, is_stream
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


class Partition(NamedTuple):
    """One part of a partitioned input."""

    part: int
    """Number of the part, from 1."""
    of: int
    """Number of parts."""

    def __str__(self) -> str:
        return f"{self.part}/{self.of}"

    @property
    def suffix(self) -> str:
        """End of the output prefix, which no other part has: `_part03-of-16`, sorted by a shell as by number."""
        return f"_part{self.part:0{len(str(self.of))}}-of-{self.of}"


def parse_partition(text: str) -> Partition:
    """Return the partition that `I/N` names. Raises `UserError` for anything else, and for I outside 1 to N."""
    found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    partition = Partition(int(found[1]), int(found[2])) if found else Partition(0, 0)
    if not 1 <= partition.part <= partition.of:
        hint = "expected I/N with I from 1 to N, such as 3/16 for the third of 16 parts"
        raise UserError(f"--partition {text}: {hint}", WRONG_ARGUMENTS)
    return partition


def own_files(files: Sequence[InputFile], partition: Partition) -> list[InputFile]:
    """Return the files, and ranges of files, that belong to a part, in order; none where it owns no document.

    Raises `UserError` for standard input and pipes, whose size nobody knows.
    """
    for file in files:
        if is_stream(file.path):
            name = "standard input" if file.path == "-" else "a pipe"
            raise UserError(
                f"--partition {partition}: {file.path} is {name}, which cannot be divided by its size; write it to a "
                "file first",
                WRONG_ARGUMENTS,
            )
    sizes = [os.path.getsize(file.path) for file in files]
    total, is_last = sum(sizes), partition.part == partition.of
    begin, end = (total * number // partition.of for number in (partition.part - 1, partition.part))
    own, offset = [], 0  # bytes of all files before this one
    for file, size in zip(files, sizes, strict=True):
        if size == 0 or file.packing or file.is_table:
            if begin <= offset and (offset < end or is_last):
                own.append(file)
        elif begin < offset + size and offset < end:
            first, behind = record_start(file, begin - offset), record_start(file, end - offset)
            if (first, behind) == (0, size):
                own.append(file)
            elif first < behind:
                own.append(file._replace(begin=first, end=behind))
        offset += size
    return own


def own_bytes(files: Sequence[InputFile]) -> int | None:
    """Return the number of bytes to read, as they lie on the disk; None where a stream is among the files."""
    if any(is_stream(file.path) for file in files):
        return None
    return sum((os.path.getsize(file.path) if file.end is None else file.end) - file.begin for file in files)


def partition_entry(partition: Partition, files: Sequence[InputFile]) -> dict[str, Any]:
    """Return the manifest's `partition`, by which a merge knows the parts that belong together.

    `inputs` is the SHA-256 of the names and sizes of all files, those of other parts included.
    """
    listed = json.dumps([[file.name, os.path.getsize(file.path)] for file in files])
    return {**partition._asdict(), "inputs": hashlib.sha256(listed.encode()).hexdigest()}
