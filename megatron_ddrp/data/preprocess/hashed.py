"""A file, or a range of it, whose bytes are counted and hashed while they are read."""

from __future__ import annotations

import hashlib
import io
from typing import Any

from megatron_ddrp.data.preprocess.packed import FIRST_BYTES


class HashedFile(io.FileIO):
    """File, or descriptor, that counts and hashes the bytes from `begin` to `end` while they are read.

    Attributes:
        count: number of bytes read.
        digest: their SHA-256.
    """

    def __init__(self, file: str | int, begin: int, end: int | None):
        super().__init__(file, "rb", closefd=isinstance(file, str))
        if begin:
            self.seek(begin)
        self._length = None if end is None else end - begin
        self.count = 0
        self.digest = hashlib.sha256()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        if self._length is not None:
            view = view[: self._length - self.count]
        count = super().readinto(view) or 0
        while not self.count and 0 < count < FIRST_BYTES and (more := super().readinto(view[count:])):
            count += more  # a pipe may give its first bytes one by one
        self.digest.update(view[:count])
        self.count += count
        return count
