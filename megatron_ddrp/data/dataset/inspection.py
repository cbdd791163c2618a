"""Summary of an indexed dataset: counts, lengths of its documents, and its first documents.

The histogram of lengths has powers of two as borders, and quantiles are exact below `LONGEST_COUNTED` tokens. Memory
does not grow with the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ddrp.data.batches.samples import MIN_DOCUMENT_TOKENS, document_lengths
from megatron_ddrp.data.dataset.dataset_index import MEND
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.manifest import tokenizer_name
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.data.tokenizers.vocabulary_fit import unknown_share, warn_of_unknown
from megatron_ddrp.errors import UserError

LONGEST_COUNTED = 1 << 20
"""Length in tokens from which on all documents count as equally long in quantiles."""

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
BAR = 40
"""Length of the histogram's longest bar in characters."""


@dataclass(frozen=True)
class DatasetSummary:
    """Counts of a dataset."""

    documents: int
    sequences: int
    tokens: int
    dtype: str
    shortest: int
    """Length of the shortest document in tokens."""
    longest: int
    """Length of the longest document in tokens."""
    quantiles: dict[str, int]
    """"0.5" → the median of tokens per document."""
    short_documents: int
    """Number of documents too short for a training sample."""
    histogram: list[tuple[int, int, int]]
    """Histogram rows: (lowest, highest, number of documents with a length in this range, both included)."""
    tokenizer: dict[str, Any] | None
    """Tokenizer entry of the manifest, if there is one."""
    unknown_tokens: int | None
    """Number of unknown pieces according to the manifest; None without this entry."""
    dropped_characters: int = 0
    """Number of characters that the tokenizer left out, according to the manifest; 0 without this entry."""

    def lines(self) -> Iterator[str]:
        """Yield the summary as text."""
        mean = self.tokens / max(1, self.documents)
        yield (
            f"{self.documents:,} documents, {self.sequences:,} sequences, {self.tokens:,} tokens as {self.dtype}, "
            f"{mean:,.1f} tokens per document"
        )
        made_by = "not recorded (no manifest)" if self.tokenizer is None else tokenizer_name(self.tokenizer)
        yield f"tokenizer: {made_by}"
        unknown, dropped = self.unknown_tokens, self.dropped_characters
        yield "unknown pieces: not recorded" if unknown is None else unknown_share(unknown, self.tokens, dropped)
        if unknown is not None and (warning := warn_of_unknown("this dataset", unknown, self.tokens, dropped)):
            yield warning
        if not self.documents:
            return
        shares = ", ".join(f"{float(name):.0%} {value:,}" for name, value in self.quantiles.items())
        yield f"tokens per document: shortest {self.shortest:,}, {shares}, longest {self.longest:,}"
        if self.short_documents:
            yield f"{self.short_documents:,} have fewer than {MIN_DOCUMENT_TOKENS} tokens and give no training sample"
        yield ""
        most = max(count for _, _, count in self.histogram)
        for low, high, count in self.histogram:
            span = f"{low:,}" if low == high else f"{low:,} – {high:,}"
            yield f"{span:>25}  {count:>13,}  {'█' * -(-BAR * count // most)}"


def summarize(dataset: IndexedDataset) -> DatasetSummary:
    """Count the documents of a dataset by their lengths."""
    counts = np.zeros(LONGEST_COUNTED + 1, np.int64)  # documents of each length, the last entry and beyond
    bins = np.zeros(64, np.int64)  # documents of 0, 1, 2–3, 4–7, … tokens
    shortest, longest = np.iinfo(np.int64).max, 0
    for lengths in document_lengths(dataset):
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        counts += np.bincount(np.minimum(lengths, LONGEST_COUNTED), minlength=len(counts))
        bins += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=len(bins))
    filled = np.flatnonzero(bins)
    exponents = range(filled[0], filled[-1] + 1) if len(filled) else range(0)
    histogram = [((1 << e) >> 1, max(0, (1 << e) - 1), int(bins[e])) for e in exponents]
    below = np.cumsum(counts)
    documents, manifest = dataset.num_documents, dataset.manifest or {}
    unknown, dropped = manifest.get("unknown_tokens"), manifest.get("dropped_characters")
    ranks = [(q, min(documents - 1, int(q * documents))) for q in QUANTILES] if documents else []
    return DatasetSummary(
        documents=documents,
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        dtype=dataset.dtype.name,
        shortest=shortest if documents else 0,
        longest=longest,
        quantiles={str(q): int(np.searchsorted(below, rank, side="right")) for q, rank in ranks},
        short_documents=int(below[MIN_DOCUMENT_TOKENS - 1]),
        histogram=histogram,
        tokenizer=manifest.get("tokenizer"),
        unknown_tokens=unknown if isinstance(unknown, int) else None,
        dropped_characters=dropped if isinstance(dropped, int) else 0,
    )


def first_documents(
    dataset: IndexedDataset, count: int, num_tokens: int, tokenizer: Tokenizer | None
) -> Iterator[tuple[int, int, str]]:
    """Yield (document, its tokens, its beginning) for the first documents.

    The beginning is text of at most `num_tokens` tokens, or their ids without a tokenizer.
    """
    for document in range(min(count, dataset.num_documents)):
        first, last = (int(i) for i in dataset.document_indices[document : document + 2])
        if not 0 <= first <= last <= len(dataset):
            raise UserError(f"{dataset.prefix}.idx: document {document} is [{first}, {last}): damaged; {MEND}")
        shown: list[int] = []
        size = 0
        for sequence in range(first, last):
            ids = dataset[sequence]
            size += len(ids)
            shown += ids[: max(0, num_tokens - len(shown))].tolist()
        more = " …" if size > len(shown) else ""
        if tokenizer is None:
            text = " ".join(map(str, shown)) + more
        elif foreign := [i for i in shown if not 0 <= i < tokenizer.vocab_size]:
            text = f"not of this tokenizer: id {foreign[0]}, expected 0 to {tokenizer.vocab_size - 1}"
        else:
            text = " ".join(tokenizer.decode(shown).split()) + more
        yield document, size, text
