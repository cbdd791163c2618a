"""Rates, budget and the over-four-pieces rule on real text, words being told apart by the pieces' own spelling."""

import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest

from megatron_ddrp.config.registry import MASKINGS
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.data.tokenizers.vocabulary import train_sentencepiece
from megatron_ddrp.data.tokenizers.wordpiece import SentencePieceTokenizer, WordPieceTokenizer

SHARED = Path(__file__).parents[4] / "shared" / "data"
ASSETS, TEXT = SHARED / "small_assets.tar.xz", SHARED / "sample.jsonl.xz"
pytestmark = pytest.mark.skipif(not (ASSETS.exists() and TEXT.exists()), reason=f"no {ASSETS.name}, {TEXT.name}")

LENGTH = 128
EPOCHS = 4


@pytest.fixture(scope="module")
def texts():
    with lzma.open(TEXT, "rt", encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in stream]


@pytest.fixture(scope="module", params=["wordpiece", "sentencepiece"])
def corpus(request, texts, tmp_path_factory):
    """(tokenizer, whether each piece starts a word by its spelling, rows of ids `[rows, LENGTH]`)."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "wordpiece":
        with tarfile.open(ASSETS) as archive:
            member = archive.extractfile("vocab/bert-base-uncased-vocab.txt")
            (folder / "vocab.txt").write_bytes(member.read())
        tokenizer = WordPieceTokenizer(folder / "vocab.txt", "BertWordPieceLowerCase")
        begins = np.array([not piece.startswith("##") for piece in tokenizer.pieces])
    else:
        model, *_ = train_sentencepiece(texts[:60], 1500)
        (folder / "spm.model").write_bytes(model)
        tokenizer = SentencePieceTokenizer(folder / "spm.model")
        begins = np.array([piece.startswith("▁") for piece in tokenizer.pieces])
    begins[tokenizer.special_ids] = True
    ids = np.concatenate([np.array(ids, np.int64) for ids in tokenizer.encode_batch(texts[:150])])
    rows = ids[: len(ids) // (LENGTH - 2) * (LENGTH - 2)].reshape(-1, LENGTH - 2)
    ends = [np.full((len(rows), 1), end) for end in (tokenizer.cls_id, tokenizer.sep_id)]
    return tokenizer, begins, np.concatenate([ends[0], rows, ends[1]], axis=1)


def mask(corpus, masking, mask_prob=0.15):
    """Rows `[EPOCHS * rows, LENGTH]`: ids, masked ids, whether selected."""
    tokenizer, _, rows = corpus
    masker = Masker(tokenizer, mask_prob, masking=MASKINGS.find(masking)())
    ids = np.tile(rows, (EPOCHS, 1))
    epochs, samples = np.divmod(np.arange(len(ids)), len(rows))
    masked, labels = masker(ids, np.ones_like(ids), epochs, samples)
    return ids, masked, labels != IGNORED_LABEL


def words(corpus, ids):
    """First token and number of pieces of each word, the rows' ordinary tokens laid end to end; both `[words]`."""
    starts = corpus[1][ids[:, 1:-1]].copy()
    starts[:, 0] = True
    first = np.flatnonzero(starts)
    return first, np.diff(first, append=starts.size)


@pytest.mark.parametrize("mask_prob", [0.15, 0.4])
@pytest.mark.parametrize("masking", MASKINGS)
def test_budget_and_shares(corpus, masking, mask_prob):
    tokenizer, _, _ = corpus
    ids, masked, selected = mask(corpus, masking, mask_prob)
    assert selected.size > 100_000
    budget = round(mask_prob * (LENGTH - 2))
    counts = selected.sum(axis=1)
    assert counts.max() <= budget and counts.min() >= 1
    assert counts.mean() == pytest.approx(budget, rel=0.005), "nearly always filled to the last token"
    assert not selected[:, [0, -1]].any()
    shown, original = masked[selected], ids[selected]
    assert np.mean(shown == tokenizer.mask_id) == pytest.approx(0.8, abs=0.015)
    replaced = (shown != tokenizer.mask_id) & (shown != original)
    assert np.mean(replaced) == pytest.approx(0.1, abs=0.01)
    assert not np.isin(shown[replaced], tokenizer.special_ids).any()
    # No place is preferred: each tenth of the row gets its share.
    places = np.array_split(selected[:, 1:-1].mean(axis=0), 10)
    assert [part.mean() for part in places] == pytest.approx([mask_prob] * 10, rel=0.12)


@pytest.mark.parametrize("masking", ["whole-word", "ngram"])
def test_words_up_to_four_pieces_are_whole_and_longer_ones_fall_apart(corpus, masking):
    ids, _, selected = mask(corpus, masking)
    first, sizes = words(corpus, ids)
    taken = np.add.reduceat(selected[:, 1:-1].ravel(), first, dtype=np.int64)  # [words]: pieces of each
    short = sizes <= 4
    assert set(np.unique(sizes[short])) == {1, 2, 3, 4}
    assert np.all((taken[short] == 0) | (taken[short] == sizes[short]))
    long_sizes, long_taken = sizes[~short], taken[~short]
    assert len(long_sizes) > 50
    assert np.any((long_taken > 0) & (long_taken < long_sizes)), "a long word's pieces are drawn one by one"
    # Pieces of long words are as likely as any other to be predicted, give or take chance and the end of the budget.
    assert long_taken.sum() / long_sizes.sum() == pytest.approx(0.15, abs=0.035)


def test_single_tokens_split_words(corpus):
    ids, _, selected = mask(corpus, "token")
    first, sizes = words(corpus, ids)
    taken = np.add.reduceat(selected[:, 1:-1].ravel(), first, dtype=np.int64)
    pairs = taken[sizes == 2]
    assert np.mean(pairs == 1) == pytest.approx(2 * 0.15 * 0.85, abs=0.03)


def test_ngrams_are_of_one_to_three_words_with_falling_shares(corpus):
    """In low doses n-grams seldom touch, so the runs of selected words show the law p(n) = 6/11, 3/11, 2/11."""
    ids, _, selected = mask(corpus, "ngram", mask_prob=0.1)
    first, sizes = words(corpus, ids)
    taken = np.add.reduceat(selected[:, 1:-1].ravel(), first, dtype=np.int64) > 0
    taken &= sizes <= 4
    padded = np.concatenate([[False], taken, [False]]).astype(np.int8)
    lengths = np.flatnonzero(np.diff(padded) == -1) - np.flatnonzero(np.diff(padded) == 1)
    shares = np.bincount(lengths, minlength=6)[1:] / len(lengths)
    assert shares[0] > shares[1] > shares[2] > shares[3]
    assert shares[:3] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.08)
    assert shares[3:].sum() < 0.12
