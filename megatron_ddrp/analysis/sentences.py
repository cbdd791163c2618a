"""The sentences that an analysis looks at: validation sequences as in training, but unmasked.

A sentence here is a sequence `[CLS] tokens [SEP]` of the validation split, cut to `max_length` tokens. Which of them is
a function of the seed, so that every checkpoint and every run is shown the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_ddrp.corpus import check_ids, open_dataset
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.blend import Blend
from megatron_ddrp.data.batches.samples import NUM_SPECIAL_TOKENS, SampleIndex, sample_totals, split_documents
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer


class Sentences:
    """Up to `count` sequences of the validation part of some datasets, drawn without replacement.

    `seq_length` is that of the sample index, so that sequences begin where they do in training; `max_length` cuts them.
    Raises `UserError` where a dataset is of another tokenizer, or its validation part is empty.
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
            dataset = open_dataset(prefix, tokenizer)
            check_ids(dataset, tokenizer.vocab_size)
            documents = split_documents(dataset.num_documents, split)["valid"]
            parts.append(SampleIndex(dataset, documents, seq_length, sample_totals(dataset, seq_length)))
        self.tokenizer, self.max_length = tokenizer, max_length
        self.samples = Blend(parts)
        _, indices = self.samples.visits(np.arange(min(count, len(self.samples))), seed)
        lengths = np.minimum(self.samples.lengths(indices), max_length)
        order = np.argsort(-lengths, kind="stable")  # the longest first: what takes most memory and time comes early
        self.indices, self.lengths = indices[order], lengths[order]

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.indices)

    def keep_longest(self) -> None:
        """Drop all sentences that are shorter than the longest."""
        count = int(np.count_nonzero(self.lengths == self.lengths[0]))
        self.indices, self.lengths = self.indices[:count], self.lengths[:count]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield numpy batches `[sentences, seq]`, cut to their longest row; nothing is masked or predicted."""
        for begin in range(0, len(self), batch_size):
            yield self._batch(slice(begin, begin + batch_size))

    def _batch(self, rows: slice) -> Batch:
        lengths = self.lengths[rows]
        places = np.arange(lengths.max())
        document_ids = (places < lengths[:, None]).astype(np.int64)  # [sentences, seq]
        input_ids = np.full(document_ids.shape, self.tokenizer.pad_id, np.int64)
        input_ids[:, 0] = self.tokenizer.cls_id
        input_ids[np.arange(len(lengths)), lengths - 1] = self.tokenizer.sep_id
        for row, tokens, length in zip(input_ids, self.samples.tokens(self.indices[rows]), lengths, strict=True):
            row[1 : length - 1] = tokens[: length - NUM_SPECIAL_TOKENS]
        nothing = np.zeros_like(input_ids)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        return Batch(input_ids, labels, document_ids, places * document_ids, nothing, nothing)
