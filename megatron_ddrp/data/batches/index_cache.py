"""The totals of the sample index kept on disk, so that a node reads every document's length once and not once a start.

The file's name carries a fingerprint of the dataset's index and of the sequence length, and its content follows from
these alone. So there is nothing to wait for: ranks, runs and nodes that find no file each compute the same bytes, write
them under a name of their own and rename; whoever is last replaces a file by its equal. Each file ends in a sum
(sealed.py); a damaged one is made again. Files of datasets that are gone may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ddrp.data.batches.samples import BLOCK, MIN_DOCUMENT_TOKENS, num_blocks, sample_totals
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, dataset_path
from megatron_ddrp.data.sealed import BrokenSealError, check_seal, seal
from megatron_ddrp.errors import UserError

SUFFIX = ".samples.npy"
_VERSION = 1
_PROBES, _PROBE_BYTES = 64, 4096


def cached_totals(
    dataset: IndexedDataset, seq_length: int, folder: str | os.PathLike[str] | None = None
) -> tuple[NDArray[np.int64], str | None]:
    """Return (`sample_totals(dataset, seq_length)`, a line for the user or None).

    The totals are mapped from a file in `folder` (default: beside the data). Where the file is missing or damaged, it
    is made. Where the data's own folder cannot be written to, the totals stay in memory. The line tells of a damaged
    file or of a folder that cannot be written to. Raises `UserError` where a `folder` that was named cannot.
    """
    path = cache_path(dataset, seq_length, folder)
    note = None
    try:
        return _read(path, num_blocks(dataset.num_documents)), None
    except OSError:  # no file yet, or a folder that cannot be made, which writing will tell
        pass
    except BrokenSealError:
        note = f"{path}: damaged, or of an earlier version; the sample index is made again"
    totals = sample_totals(dataset, seq_length)
    try:
        _write(path, totals, mode=dataset_path(dataset.prefix, ".idx").stat().st_mode & 0o666)
    except OSError as error:
        if folder is not None:
            raise UserError(
                f"--index-cache-dir {folder}: cannot be written: {error.strerror}; give a folder that can be"
            ) from None
        return totals, (
            f"{path.parent} cannot be written ({error.strerror}): the sample index of {dataset.prefix} stays in "
            "memory; --index-cache-dir DIR keeps it elsewhere"
        )
    return totals, note


def cache_path(dataset: IndexedDataset, seq_length: int, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return `FOLDER/NAME.FINGERPRINT.samples.npy`; the fingerprint covers all that the totals depend on.

    Of the index it takes the sizes of both files, the time of the last change and 64 pages spread over it, since
    reading all of it would take as long as making the totals.
    """
    index, tokens = dataset_path(dataset.prefix, ".idx"), dataset_path(dataset.prefix, ".bin")
    digest = hashlib.blake2b(digest_size=12)
    size, changed = index.stat().st_size, index.stat().st_mtime_ns
    facts = (_VERSION, BLOCK, MIN_DOCUMENT_TOKENS, seq_length, size, tokens.stat().st_size, changed)
    digest.update(repr(facts).encode())
    with open(index, "rb") as stream:
        for begin in np.linspace(0, max(0, size - _PROBE_BYTES), _PROBES).astype(np.int64).tolist():
            stream.seek(begin)
            digest.update(stream.read(_PROBE_BYTES))
    return Path(folder or index.parent) / f"{index.stem}.{digest.hexdigest()}{SUFFIX}"


def _read(path: Path, blocks: int) -> NDArray[np.int64]:
    """Map the totals in a file. Raises `OSError` where there is none, `BrokenSealError` for damage."""
    check_seal(path)
    totals = np.load(path, mmap_mode="r", allow_pickle=False)
    if totals.dtype != np.int64 or totals.shape != (blocks + 1, 3):
        raise BrokenSealError(path)
    return np.asarray(totals)


def _write(path: Path, totals: NDArray[np.int64], mode: int) -> None:
    """Write the totals to a sealed file, whole or not at all, beside any number of other writers."""
    content = io.BytesIO()
    np.save(content, totals, allow_pickle=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(seal(path.name, content.getvalue()))
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)  # for the same users as the data; mkstemp gives it to one
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
