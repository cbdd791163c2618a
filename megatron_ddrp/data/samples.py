"""Training samples as an index over documents: which tokens of which document make sample i (section 4.3 of the paper).

A sample comes from one document; a longer document gives consecutive pieces of at most `seq_length - 2` tokens, which
leaves room for [CLS] and [SEP]. There is no filling from the next document and no random shortening. The last piece of
a document may be short, and is kept: dropping it would lose text, and the loader's sorting by length makes it cheap.
The index holds two numbers a document and nothing a sample.
"""

from __future__ import annotations

import math
import os
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ddrp.data.indexed_dataset import IndexedDataset, dataset_path
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError

SPLIT_NAMES = ("train", "valid", "test")
MIN_DOCUMENT_TOKENS = 8
"""Shorter documents give no sample; they stay in the files."""
NUM_SPECIAL_TOKENS = 2


class Samples(Protocol):
    """What the loader needs: a `SampleIndex`, or several of them blended."""

    def __len__(self) -> int:
        """Number of samples in an epoch."""

    def tokens(self, index: int) -> NDArray[Any]:
        """Ids of one sample without specials, `[length - 2]`."""

    def lengths(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Tokens of each sample, specials included; the shape of `indices`."""

    def source(self, index: int) -> str:
        """Name of the dataset that a sample comes from, for messages."""


class TokenizerIdentity(Protocol):
    """What names a tokenizer: two with the same fingerprint give the same ids."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""


class SampleIndex:
    """Samples of the documents `[low, high)` of a dataset.

    Raises `UserError` where not one document is long enough.

    Attributes:
        num_documents: documents in the range.
        num_dropped_documents: those under `MIN_DOCUMENT_TOKENS` tokens, which give no sample.
        num_tokens: tokens in all samples, without specials.
    """

    def __init__(self, dataset: IndexedDataset, document_range: tuple[int, int], seq_length: int) -> None:
        if seq_length <= NUM_SPECIAL_TOKENS:
            raise UserError(f"--seq-length is {seq_length}: it must hold [CLS], one token and [SEP]", WRONG_ARGUMENTS)
        low, high = document_range
        if not 0 <= low <= high <= dataset.num_documents:
            raise ValueError(f"documents [{low}, {high}) of {dataset.prefix}, which has {dataset.num_documents}")
        self.dataset = dataset
        self.seq_length = seq_length
        self._piece_length = seq_length - NUM_SPECIAL_TOKENS
        self._first_sequence = dataset.document_indices[low : high + 1]  # [documents + 1], a view of the file
        begin, end = self._first_sequence[0], self._first_sequence[-1]
        token_ends = np.cumsum(dataset.sizes[begin:end], dtype=np.int64)
        token_ends = np.concatenate([[0], token_ends])
        self._document_tokens = np.diff(token_ends[self._first_sequence - begin])  # [documents]
        kept = self._document_tokens >= MIN_DOCUMENT_TOKENS
        pieces = np.where(kept, -(-self._document_tokens // self._piece_length), 0)
        self._first_sample = np.concatenate([[0], np.cumsum(pieces)])  # [documents + 1]
        self.num_documents = high - low
        self.num_dropped_documents = int(self.num_documents - np.count_nonzero(kept))
        self.num_tokens = int(self._document_tokens[kept].sum())
        if not len(self):
            raise UserError(
                f"{dataset.prefix}: no sample in documents [{low}, {high}) of {dataset.num_documents}: "
                f"{self.num_dropped_documents} of these {self.num_documents} have fewer than {MIN_DOCUMENT_TOKENS} "
                "tokens; preprocess more text, or give this part a larger share by --split",
                FAILURE,
            )

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._first_sample[-1])

    def tokens(self, index: int) -> NDArray[Any]:
        """Ids of sample `index` without specials, `[1 … seq_length - 2]`, in the dataset's own integer type."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        document = int(np.searchsorted(self._first_sample, index, side="right")) - 1
        begin = int(index - self._first_sample[document]) * self._piece_length
        length = min(self._piece_length, int(self._document_tokens[document]) - begin)
        first, last = int(self._first_sequence[document]), int(self._first_sequence[document + 1])
        if last - first == 1:
            return self.dataset.get(first, begin, length)
        # A document of several sequences, such as one a sentence: gather those that the piece overlaps.
        ends = np.cumsum(self.dataset.sizes[first:last], dtype=np.int64)
        parts = []
        sequence = int(np.searchsorted(ends, begin, side="right"))
        position = begin
        while position < begin + length:
            sequence_begin = int(ends[sequence - 1]) if sequence else 0
            taken = min(int(ends[sequence]), begin + length) - position
            parts.append(self.dataset.get(first + sequence, position - sequence_begin, taken))
            position += taken
            sequence += 1
        return np.concatenate(parts)

    def lengths(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Tokens of each sample, [CLS] and [SEP] included; the shape of `indices`."""
        indices = np.asarray(indices)
        documents = np.searchsorted(self._first_sample, indices, side="right") - 1
        begins = (indices - self._first_sample[documents]) * self._piece_length
        return np.minimum(self._piece_length, self._document_tokens[documents] - begins) + NUM_SPECIAL_TOKENS

    def source(self, index: int) -> str:
        """Prefix of the dataset."""
        return self.dataset.prefix


def split_documents(num_documents: int, split: str) -> dict[str, tuple[int, int]]:
    """Contiguous document ranges `{"train": (low, high), "valid": …, "test": …}` in the proportions of `split`.

    `split` is up to three weights, "949,50,1"; missing ones are 0. Each share is rounded and the largest takes the
    difference, which gives Megatron's ranges wherever training is the largest. A part with a weight that would get
    nothing takes one document from the largest part while that has more than one. Raises `UserError`, exit code 2.
    """
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = []
    valid = all(math.isfinite(weight) and weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf
    if not valid or len(weights) > len(SPLIT_NAMES):
        raise UserError(
            f"--split is {split!r}: expected up to three weights for training, validation and test, none negative and "
            "not all 0, such as 949,50,1",
            WRONG_ARGUMENTS,
        )
    weights += [0.0] * (len(SPLIT_NAMES) - len(weights))
    counts = [round(weight / sum(weights) * num_documents) for weight in weights]
    counts[weights.index(max(weights))] += num_documents - sum(counts)
    for part, weight in enumerate(weights):
        largest = counts.index(max(counts))
        if weight > 0 and counts[part] == 0 and counts[largest] > 1:
            counts[largest] -= 1
            counts[part] = 1
    bounds = [sum(counts[:part]) for part in range(len(SPLIT_NAMES) + 1)]
    return {name: (bounds[part], bounds[part + 1]) for part, name in enumerate(SPLIT_NAMES)}


def check_tokenizer(prefix: str | os.PathLike[str], tokenizer: TokenizerIdentity) -> None:
    """Refuse a dataset that another tokenizer made, by the fingerprint in its manifest PREFIX.json.

    A dataset without a manifest passes here; the loader still refuses ids outside the vocabulary.
    """
    made_by = (IndexedDataset(prefix).manifest or {}).get("tokenizer") or {}
    fingerprint = made_by.get("fingerprint")
    if fingerprint is None or fingerprint == tokenizer.fingerprint:
        return
    raise UserError(
        f"{dataset_path(prefix, '.json')}: the dataset was made by tokenizer {str(fingerprint)[:12]} "
        f"({made_by.get('type', 'unknown type')}, {made_by.get('vocab_size', 'unknown number of')} pieces), but the "
        f"tokenizer given is {tokenizer.fingerprint[:12]} ({tokenizer.vocab_size} pieces); give the vocabulary and "
        "--tokenizer-type that it was preprocessed with, or preprocess again",
        FAILURE,
    )
