"""Small indexed datasets, written from lists of ids or by preprocessing; samples in memory and a loader of them."""

import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.batches.loader import BatchLoader, Blend, SampleReader, Share
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.data.dataset.indexed_dataset import UnfinishedDatasets
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig

FAKE_VOCAB = 300
"""Size of the vocabulary of `FakeSamples`."""


SHARED = Path(__file__).parents[2] / "shared" / "data"


def shared_asset(end: str) -> bytes:
    """Return the shared file whose name has this end, or skip the test where such files are not at hand."""
    if not (SHARED / "small_assets.tar.xz").exists():
        pytest.skip(f"{end} is not at hand")
    with tarfile.open(SHARED / "small_assets.tar.xz") as archive:
        name = next(name for name in archive.getnames() if name.endswith(end))
        return archive.extractfile(name).read()  # type: ignore[union-attr]


def wordpiece_job(vocab_file: Any, output_prefix: Any, /, *files: Any, **changes: Any) -> PreprocessConfig:
    """Return the settings that preprocess files by a lower-casing WordPiece."""
    settings = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(vocab_file)}
    settings |= {"input": tuple(map(str, files)), "output_prefix": str(output_prefix)} | changes
    return PreprocessConfig(**settings)


def write_dataset(prefix: Any, documents: Sequence, dtype: Any = np.uint16, manifest: Any = None) -> IndexedDataset:
    """Write documents of sequences of ids, and return the dataset."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    ids = b"".join(sequence.tobytes() for sequence in sequences)
    sizes, lengths = np.array([*map(len, sequences)], int), np.array([*map(len, documents)], int)
    with UnfinishedDatasets(f"{prefix}.unfinished", [str(prefix)], np.dtype(dtype)) as output:
        output.append(0, ids, sizes, lengths)
        output.publish([manifest])
    return IndexedDataset(prefix)


def fake_tokenizer(word_starts: np.ndarray) -> Any:
    """Return what a loader needs of a tokenizer whose ids 0 to 4 are [PAD], [UNK], [CLS], [SEP] and [MASK]."""
    roles = {"pad_id": 0, "unk_id": 1, "cls_id": 2, "sep_id": 3, "mask_id": 4}
    pieces = [f"piece {i}" for i in range(len(word_starts))]
    given = {"vocab_size": len(pieces), "pieces": pieces, "word_starts": word_starts, "special_ids": np.arange(5)}
    return SimpleNamespace(**given, **roles, word_ends=np.zeros_like(word_starts))


class FakeSamples:
    """Samples in memory, of given lengths without [CLS] and [SEP]."""

    prefix = "corpus"

    def __init__(self, lengths: np.ndarray, rng: np.random.Generator) -> None:
        self.ids = [rng.integers(5, FAKE_VOCAB, int(length)) for length in lengths]

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, indices: np.ndarray) -> list[np.ndarray]:
        return [self.ids[index] for index in indices]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.array([len(ids) + 2 for ids in self.ids])[indices]


def fake_loader(samples: FakeSamples, share: Share, seq: int, *, seed: int = 7, packing: bool = False) -> BatchLoader:
    """Return a loader of one rank's share of samples in rows of up to `seq` tokens."""
    tokenizer = fake_tokenizer(np.arange(FAKE_VOCAB) % 4 != 0)
    reader = SampleReader(Blend([samples]), tokenizer, Masker(tokenizer, seed=7), seq)
    return BatchLoader(reader, share, seed, packing)
