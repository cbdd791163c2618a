"""Share of masked pieces that are among the first guesses of a model, beside a guess that knows frequencies alone.

One piece of each sentence is masked, at a place that a seed draws; special pieces such as [UNK] are never masked. The
unigram guess names the most frequent pieces of the dataset at every place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.verification import check_ids
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.masked_lm import PieceLogits


def count_pieces(prefixes: Iterable[str], vocab_size: int) -> NDArray[np.int64]:
    """Read some datasets in full and return the count of each piece, `[vocab_size]`.

    Raises `UserError` for an id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for prefix in prefixes:
        for ids in IndexedDataset(prefix).chunks():
            check_ids(prefix, ids, vocab_size)
            counts += np.bincount(ids, minlength=vocab_size)
    return counts


def frequent_pieces(counts: NDArray[np.int64], tokenizer: Tokenizer, count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` most frequent pieces, without special ones; `counts` are `[vocab_size]`."""
    counts = counts.copy()
    counts[tokenizer.special_ids] = -1
    return np.argsort(-counts, kind="stable")[:count]


def count_found(
    model: PieceLogits, batches: Iterable[Batch], tokenizer: Tokenizer, frequent: NDArray[np.int64], seed: int
) -> tuple[int, int, int]:
    """Mask one piece of each sentence, and try as many guesses as there are `frequent` pieces.

    Return the numbers of masked places, of those whose piece the model names, and of those whose piece is frequent.
    """
    generator = np.random.default_rng(seed)
    places = by_model = by_frequency = 0
    for batch in batches:
        ids, lengths = batch.input_ids, batch.document_ids.sum(1)  # [sentences, seq], [sentences]
        for length in lengths.unique_consecutive().tolist():
            rows = ids[lengths == length, :length]
            maskable = ~np.isin(rows.cpu().numpy(), tokenizer.special_ids)  # [sentences, length]
            rows, maskable = rows[torch.from_numpy(maskable.any(1)).to(rows.device)], maskable[maskable.any(1)]
            where = [generator.choice(np.flatnonzero(row)) for row in maskable]
            if not where:
                continue
            place = torch.tensor(where, device=rows.device)
            masked = rows.gather(1, place[:, None])  # [sentences, 1]
            with torch.inference_mode():
                logits = model(rows.scatter(1, place[:, None], tokenizer.mask_id), place)[:, : tokenizer.vocab_size]
            guesses = logits.topk(len(frequent)).indices  # [sentences, guesses]
            places += len(where)
            by_model += int((guesses == masked).sum())
            by_frequency += int(np.isin(masked.cpu().numpy(), frequent).sum())
    return places, by_model, by_frequency
