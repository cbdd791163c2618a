"""File of examples that a command reads several times, and that must not change in between."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.errors import UserError, refusals_as_user_errors
from megatron_ddrp.tasks.finetune.table_files import Row, read_rows

_BLOCK = 1 << 20


@dataclass(frozen=True)
class KnownFile:
    """File with the hash of its bytes."""

    path: Path
    digest: bytes

    @classmethod
    def of(cls, path: Path) -> KnownFile:
        """Hash a file. Raises `UserError` if it cannot be read."""
        digest = hashlib.sha256()
        with refusals_as_user_errors(path, "give a readable file"), path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
        return cls(path, digest.digest())

    def check(self) -> None:
        """Raise `UserError` if the file has changed."""
        if KnownFile.of(self.path) != self:
            raise UserError(
                f"{self.path}: changed after this command had read it; finished runs are kept; run the same command "
                "again to go on with the new rows, or put the old file back first"
            )

    def rows(self, columns: Sequence[str] = ()) -> Iterator[Row]:
        """Yield the rows as `read_rows` does; check before the first and after the last row."""
        self.check()
        yield from read_rows(str(self.path), columns)
        self.check()
