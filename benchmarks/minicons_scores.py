"""Scores of sentences by `megatron-ddrp minimal-pairs` beside those of minicons, an independent scorer, on one model.

The model is a Hugging Face masked LM that transformers loads without code of its own, such as an export of an encoder
with absolute positions. minicons (PyPI) is no dependency of this project.

    pip install minicons
    python benchmarks/minicons_scores.py --load HF_DIR --data-dir blimp                 # 4 pairs of each paradigm
    python benchmarks/minicons_scores.py --load HF_DIR --data-dir blimp --max-pairs 50
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_ddrp.encoders.masked_lm import load_masked_lm, piece_logits
from megatron_ddrp.tasks.minimal_pairs.pairs import TIE, read_pairs
from megatron_ddrp.tasks.minimal_pairs.scoring import score_sentences

METRICS = {"pll": "original", "l2r": "within_word_l2r"}
"""Our name of a score → minicons's."""
ROWS = 64
TOKENS = 4096


def ours(folder: Path, sentences: Sequence[str], score: str) -> np.ndarray:
    """Return the scores of this project, `[sentences]`."""
    encoder = load_masked_lm(folder)
    model = piece_logits(encoder, 0, torch.device("cpu"))
    return score_sentences(model, encoder.tokenizer, encoder.tokenizer.encode_batch(sentences), score, TOKENS)


def theirs(folder: Path, sentences: Sequence[str], score: str) -> np.ndarray:
    """Return the scores of minicons, `[sentences]`."""
    from minicons.scorer import MaskedLMScorer

    scorer = MaskedLMScorer(str(folder), "cpu")
    found: list[float] = []
    for start in range(0, len(sentences), ROWS):
        batch = list(sentences[start : start + ROWS])
        found += scorer.sequence_score(batch, reduction=lambda x: x.sum(0).item(), PLL_metric=METRICS[score])
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, metavar="HF_DIR")
    parser.add_argument("--data-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--max-pairs", type=int, default=4, metavar="N", help="pairs of each paradigm (default: 4)")
    given = parser.parse_args()
    paradigms = read_pairs(given.data_dir, given.max_pairs)
    good, bad = ([text for p in paradigms for text in getattr(p, side)] for side in ("good", "bad"))
    for score in METRICS:
        mine, other = (scores(given.load, good + bad, score) for scores in (ours, theirs))
        gains = [scores[: len(good)] - scores[len(good) :] for scores in (mine, other)]
        equal = int(((gains[0] > TIE) == (gains[1] > TIE)).sum())
        print(
            f"{score}: {len(good)} pairs, scores from {mine.min():.1f} to {mine.max():.1f} nats, largest difference "
            f"{np.abs(mine - other).max():.1e}; {equal} of {len(good)} pairs judged alike"
        )


if __name__ == "__main__":
    main()
