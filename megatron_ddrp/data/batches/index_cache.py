"""The totals of the sample index, kept on disk, so that a node does not read every document's length at every start.

The file's name has a fingerprint of the dataset's index and of the sequence length. These files may be deleted at any
time.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.batches.cache_file import BrokenSealError, CacheFile
from megatron_ddrp.data.batches.samples import BLOCK, MIN_DOCUMENT_TOKENS, num_blocks, sample_totals
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, dataset_path

_VERSION = 1
_PROBES, _PROBE_BYTES = 64, 4096


def cached_totals(
    dataset: IndexedDataset, seq_length: int, folder: AnyPath | None = None
) -> tuple[NDArray[np.int64], str | None]:
    """Return (`sample_totals(dataset, seq_length)`, a remark for the user or None).

    The totals are mapped from a file in `folder` (default: beside the data), which is made if it is missing or
    damaged. If the data's own folder cannot be written to, the totals stay in memory. The remark reports both cases.
    Raises `UserError` for a named `folder` that cannot be written to.
    """
    cache = totals_cache(dataset, seq_length, folder)

    def read(path: Path) -> NDArray[np.int64]:
        totals = np.load(path, mmap_mode="r", allow_pickle=False)
        if totals.dtype != np.int64 or totals.shape != (num_blocks(dataset.num_documents) + 1, 3):
            raise BrokenSealError(path)
        return np.asarray(totals)

    if (totals := cache.load(read)) is not None:
        return totals, None
    totals = sample_totals(dataset, seq_length)
    content = io.BytesIO()
    np.save(content, totals, allow_pickle=False)
    if refused := cache.write(content.getvalue()):
        kept = f"the sample index of {dataset.prefix} stays in memory; --index-cache-dir DIR keeps it elsewhere"
        return totals, f"{refused}: {kept}"
    remark = f"{cache.path}: damaged, or from an earlier version; the sample index is made again"
    return totals, remark if cache.damaged else None


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
