"""Cache files beside the data: the totals of the sample index here, the rare words in word_counts.py.

With the totals a node need not read every document's length at every start. A file ends with a sum (sealed.py), so a
damaged one is made again instead of being used; all of them may be deleted at any time. A file's content follows from
its name, so processes need not wait for each other: each one that finds no file computes the same bytes. While one of
them writes the file, the others leave it to that one.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ddrp.data.atomic import AnyPath, BeingWritten, atomic_file
from megatron_ddrp.data.batches.samples import BLOCK, MIN_DOCUMENT_TOKENS, num_blocks, sample_totals
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, dataset_path
from megatron_ddrp.data.sealed import BrokenSeal, check_cache, seal_cache
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import reading

_VERSION = 1
_PROBES, _PROBE_BYTES = 64, 4096


class CacheFile:
    """`FOLDER/NAME.FINGERPRINT.ENDING`, in `folder` (`--index-cache-dir`) or beside the dataset.

    Attributes:
        path: the file.
        damaged: True if `load` found a file that is damaged or from an earlier version.
    """

    def __init__(self, dataset: IndexedDataset, fingerprint: str, ending: str, folder: AnyPath | None = None):
        self._index = dataset_path(dataset.prefix, ".idx")
        self._folder = folder
        self.path = Path(folder or self._index.parent) / f"{self._index.stem}.{fingerprint}.{ending}"
        self.damaged = False

    def load(self) -> Any:
        """Return what `write` was given, an array as a memory map; None if there is no intact file."""
        try:
            check_cache(self.path)
            with reading(self.path):
                content = np.load(self.path, mmap_mode="r", allow_pickle=False)
                return np.asarray(content) if isinstance(content, np.ndarray) else dict(content)
        except OSError:  # no file yet, or a folder that cannot be made; writing will report that
            return None
        except (BrokenSeal, UserError) as error:
            self.damaged = not isinstance(error.__context__, FileNotFoundError)  # another process removed it meanwhile
            return None

    def write(self, content: NDArray[Any] | Mapping[str, NDArray[Any]]) -> str | None:
        """Write the file, whole or not at all. Return None, or the reason why the data's folder cannot be written to.

        Raises `UserError` if the user named a folder that cannot be written to.
        """
        stream = io.BytesIO()
        if isinstance(content, np.ndarray):
            np.save(stream, content, allow_pickle=False)
        else:
            np.savez(stream, **content)  # type: ignore[arg-type]
        try:
            with atomic_file(self.path, mode=self._index.stat().st_mode & 0o666) as file:  # the data's rights
                file.write(seal_cache(self.path.name, stream.getvalue()))
        except BeingWritten:
            return None
        except FileNotFoundError:  # locks that hold on one node only: another node removed our file and writes its own
            return None
        except (OSError, UserError) as error:
            cause = error.__cause__ or error
            reason = cause.strerror if isinstance(cause, OSError) else str(cause)
            if self._folder is None:
                return f"{self.path.parent} cannot be written ({reason})"
            raise UserError(
                f"--index-cache-dir {self._folder}: cannot be written: {reason}; give a folder that can be"
            ) from None
        return None


def cached_totals(
    dataset: IndexedDataset, seq_length: int, folder: AnyPath | None = None
) -> tuple[NDArray[np.int64], str | None]:
    """Return (`sample_totals(dataset, seq_length)`, a remark for the user or None).

    The totals are mapped from a file in `folder` (default: beside the data), which is made if it is missing or
    damaged. If the data's own folder cannot be written to, the totals stay in memory. The remark reports both cases.
    Raises `UserError` for a named `folder` that cannot be written to.
    """
    cache = totals_cache(dataset, seq_length, folder)
    totals = cache.load()
    if totals is not None and (totals.dtype, totals.shape) == (np.int64, (num_blocks(dataset.num_documents) + 1, 3)):
        return totals, None
    is_damaged = cache.damaged or totals is not None
    totals = sample_totals(dataset, seq_length)
    if refused := cache.write(totals):
        kept = f"the sample index of {dataset.prefix} stays in memory; --index-cache-dir DIR keeps it elsewhere"
        return totals, f"{refused}: {kept}"
    remark = f"{cache.path}: damaged, or from an earlier version; the sample index is made again"
    return totals, remark if is_damaged else None


def totals_cache(dataset: IndexedDataset, seq_length: int, folder: AnyPath | None = None) -> CacheFile:
    """Return the file of a dataset's totals; its fingerprint covers everything that the totals depend on.

    It uses the sizes of both files, the time of the index's last change and 64 pages spread over the index; reading all
    of it would take as long as making the totals.
    """
    index, tokens = dataset_path(dataset.prefix, ".idx"), dataset_path(dataset.prefix, ".bin")
    digest = hashlib.blake2b(digest_size=12)
    size, changed = index.stat().st_size, index.stat().st_mtime_ns
    closing = ("closed",) if dataset.closing_tokens else ()
    facts = (_VERSION, BLOCK, MIN_DOCUMENT_TOKENS, seq_length, size, tokens.stat().st_size, changed, *closing)
    digest.update(repr(facts).encode())
    with open(index, "rb") as stream:
        for begin in np.linspace(0, max(0, size - _PROBE_BYTES), _PROBES).astype(np.int64).tolist():
            stream.seek(begin)
            digest.update(stream.read(_PROBE_BYTES))
    return CacheFile(dataset, digest.hexdigest(), "samples.npy", folder)
