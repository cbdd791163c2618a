"""Sentences for the analyses: unmasked validation sequences of a dataset, or texts of a file.

A sentence is a sequence `[CLS] tokens [SEP]`, cut to `max_length` tokens. The seed alone decides which sentences are
drawn, so that every checkpoint and every run sees the same ones.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.blend import Blend
from megatron_ddrp.data.batches.samples import NUM_SPECIAL_TOKENS, NoSample, SampleIndex, sample_totals, split_documents
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.verification import check_ids, check_tokenizer
from megatron_ddrp.data.preprocess.documents import iter_documents
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError


class SentenceBatches(ABC):
    """Base class of the sources of sentences: numbered rows of tokens, the longest first."""

    tokenizer: Tokenizer
    max_length: int
    lengths: NDArray[np.int64]
    """Tokens per sentence including [CLS] and [SEP], `[sentences]`."""

    def _sort(self, tokenizer: Tokenizer, max_length: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Set the attributes; return the order of the rows: long ones first, so that a lack of memory shows early."""
        order = np.argsort(-lengths, kind="stable")
        self.tokenizer, self.max_length, self.lengths = tokenizer, max_length, lengths[order]
        return order

    @abstractmethod
    def tokens(self, rows: slice) -> Sequence[Sequence[int] | NDArray]:
        """Return the ids of the sentences `rows`, without special tokens and not yet cut to `max_length`."""

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.lengths)

    def keep_longest(self) -> None:
        """Drop the sentences that are shorter than the longest."""
        self.lengths = self.lengths[self.lengths == self.lengths[0]]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield numpy batches `[sentences, seq]`, cut to their longest row, without masks and labels."""
        for begin in range(0, len(self), batch_size):
            yield self._batch(slice(begin, min(begin + batch_size, len(self))))

    def _batch(self, rows: slice) -> Batch:
        lengths = self.lengths[rows]
        document_ids = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)  # [sentences, seq]
        input_ids = np.full(document_ids.shape, self.tokenizer.pad_id, np.int64)
        input_ids[:, 0] = self.tokenizer.cls_id
        input_ids[np.arange(len(lengths)), lengths - 1] = self.tokenizer.sep_id
        for row, tokens, length in zip(input_ids, self.tokens(rows), lengths, strict=True):
            row[1 : length - 1] = tokens[: length - NUM_SPECIAL_TOKENS]
        return Batch.of_texts(input_ids, document_ids)


class Sentences(SentenceBatches):
    """Up to `count` sequences of the validation split of some datasets, drawn without replacement.

    `seq_length` is the one of training, so that sequences begin at the same tokens; `max_length` then cuts them. Raises
    `UserError` if a dataset was made with another tokenizer, or its validation split is empty, or a sequence has an id
    outside the vocabulary.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        split: str,
        tokenizer: Tokenizer,
        seq_length: int,
        max_length: int,
        count: int,
        seed: int,
    ) -> None:
        parts = []
        for prefix in prefixes:
            check_tokenizer(prefix, tokenizer)
            dataset = IndexedDataset(prefix)
            documents = split_documents(dataset.num_documents, split)["valid"]
            try:
                parts.append(SampleIndex(dataset, documents, seq_length, sample_totals(dataset, seq_length)))
            except NoSample as error:
                remedy = f"give it a larger share by --split (now {split})"
                raise UserError(f"the validation split is empty: {error}; {remedy}") from None
        self.samples = Blend(parts)
        _, indices = self.samples.visits(np.arange(min(count, len(self.samples))), seed)
        lengths = np.minimum(self.samples.lengths(indices), max_length)
        order = self._sort(tokenizer, max_length, lengths)
        self.indices = indices[order]
        for index, ids in zip(self.indices.tolist(), self.tokens(slice(None)), strict=True):
            check_ids(self.samples.source(index), ids, tokenizer.vocab_size)

    def tokens(self, rows: slice) -> Sequence[NDArray]:
        return self.samples.tokens(self.indices[rows])


class TextSentences(SentenceBatches):
    """Texts split by a model's own tokenizer, so that models with different vocabularies see the same texts.

    Texts without a token are skipped.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, max_length: int) -> None:
        rows = [row[: max_length - NUM_SPECIAL_TOKENS] for row in tokenizer.encode_batch(texts) if row]
        lengths = np.array([len(row) for row in rows], np.int64) + NUM_SPECIAL_TOKENS
        self._rows = [rows[number] for number in self._sort(tokenizer, max_length, lengths)]

    def tokens(self, rows: slice) -> Sequence[Sequence[int]]:
        return self._rows[rows]


def draw_texts(name: str, count: int, seed: int) -> list[str]:
    """Draw up to `count` texts of a file, folder or pattern that megatron-ddrp preprocess reads, each equally likely.

    Keep at most `count` texts in memory (algorithm R: Vitter, ACM TOMS 11, 1985). Raises `UserError` for a source with
    fewer than two texts.
    """
    drawn: list[str] = []
    draw = random.Random(seed)
    for number, (text,) in enumerate(iter_documents([name])):
        place = number if number < count else draw.randrange(number + 1)
        if place < count:
            drawn[place : place + 1] = [text]
    if len(drawn) < min(2, count):
        held = "one text" if drawn else "no text"
        raise UserError(f"--text {name} holds {held}: give two or more (a blank line ends a text of a .txt)")
    return drawn
