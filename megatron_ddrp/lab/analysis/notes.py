"""Contents of a run's note dictionary (Wu et al., arXiv:2008.01466): rare words, their frequency, similar words.

Wu et al. find a rare word in about 20 % of sentences.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ddrp.checkpoint import BESIDE, TOKENIZER, choose_checkpoint
from megatron_ddrp.checkpoint.note_files import read_notes
from megatron_ddrp.data.batches.rare_words import RareWords, WordFinder
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.progress import track
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

SENTENCE_ENDS = (".", "!", "?")


def analyze_notes(load: Path, data_path: str | None, words: Sequence[str], neighbours: int, documents: int) -> dict:
    """Return facts about a checkpoint's dictionary, and about the sentences of the dataset `data_path` if given.

    Raises `UserError` for one of `words` without a note.
    """
    path = choose_checkpoint(load, (BESIDE,))
    rare, met, vectors = read_notes(path)
    tokenizer = load_tokenizer(path.resolve().parent / TOKENIZER)
    result: dict[str, Any] = {
        "checkpoint": str(path),
        "rare_words": len(rare),
        "words_with_a_note": len(met),
        "count_range": [int(rare.counts.min()), int(rare.counts.max())],
    }
    if data_path:
        result |= share_of_sentences(IndexedDataset(data_path), rare, tokenizer, documents)
    asked = list(words) or most_frequent(rare, met.tolist(), tokenizer)
    result["nearest"] = {
        word: nearest_notes(word, rare, met.tolist(), vectors, tokenizer, neighbours) for word in asked
    }
    return result


def share_of_sentences(
    dataset: IndexedDataset, rare: RareWords, tokenizer: Tokenizer, documents: int
) -> dict[str, Any]:
    """Count sentences, and those with a rare word, in the first `documents` documents. A ., ! or ? ends a sentence."""
    finder = WordFinder(tokenizer)
    ends = np.array([piece.strip("▁") in SENTENCE_ENDS for piece in tokenizer.pieces])
    sentences = with_one = 0
    low, high = 0, int(dataset.document_indices[min(documents, dataset.num_documents)])
    for sequence in track(range(low, high), "sequence"):
        ids = np.asarray(dataset[sequence], np.int64)
        if not len(ids):
            continue
        marks = finder.number(rare, ids[None], np.array([True]))[0] > 0
        number = np.concatenate([[0], np.cumsum(ends[ids[:-1]])])  # of each token's sentence
        sentences += int(number[-1]) + 1
        with_one += len(np.unique(number[marks]))
    share = with_one / max(1, sentences)
    return {"sentences": sentences, "sentences_with_a_rare_word": with_one, "share_of_sentences": share}


def most_frequent(rare: RareWords, met: list[int], tokenizer: Tokenizer, count: int = 5) -> list[str]:
    """Return the `count` most frequent alphabetic words with a note, by their counts in the training text."""
    by_count = sorted(met, key=lambda number: (-int(rare.counts[number - 1]), number))
    texts = (tokenizer.decode(rare.word(number)) for number in by_count)
    return list(itertools.islice((text for text in texts if re.fullmatch(r"[^\W\d_]{4,}", text)), count))


def nearest_notes(
    word: str, rare: RareWords, met: list[int], vectors: torch.Tensor, tokenizer: Tokenizer, count: int
) -> list[dict[str, Any]]:
    """Return the words whose notes have the largest cosine with the note of `word`.

    The mean of all notes is removed first: every note is an average of contexts, so with the part that all contexts
    share every cosine would be near 1. Raises `UserError` if `word` has no note.
    """
    numbers = {tuple(rare.word(number)): row for row, number in enumerate(met)}
    row = numbers.get(tuple(tokenizer.encode(word)))
    if row is None:
        some = ", ".join(most_frequent(rare, met, tokenizer))
        raise UserError(f"--words {word}: no note of this word; rare words with a note are {some}", WRONG_ARGUMENTS)
    vectors = vectors.float()
    directions = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=-1)
    cosines = directions @ directions[row]
    cosines[row] = -2.0
    best = cosines.topk(min(count, len(met) - 1))
    return [
        {"word": tokenizer.decode(rare.word(met[other])), "cosine": cosine}
        for cosine, other in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def summary(result: dict[str, Any]) -> str:
    """Return the result of `analyze_notes` as lines of text."""
    low, high = result["count_range"]
    lines = [
        f"{result['rare_words']:,} rare words ({low:,} to {high:,} times in the training text), "
        f"{result['words_with_a_note']:,} with a note in {result['checkpoint']}"
    ]
    if "sentences" in result:
        lines.append(
            f"{result['share_of_sentences']:.1%} of {result['sentences']:,} sentences contain one "
            "(Wu et al., arXiv:2008.01466: about 20 %)"
        )
    for word, near in result["nearest"].items():
        lines.append(f"{word}: " + ", ".join(f"{other['word']} {other['cosine']:.2f}" for other in near))
    return "\n".join(lines)
