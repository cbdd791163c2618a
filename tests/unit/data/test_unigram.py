"""The unigram level, and validation text of another kind than the training text: as slow loops measure them."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches import word_counts as unigram
from megatron_ddrp.data.batches.loader import Blend
from megatron_ddrp.data.batches.samples import SampleIndex, sample_totals
from megatron_ddrp.data.batches.word_counts import shift_of, split_remark, unigram_loss, unigram_shift, usual_shift
from tests.datasets import write_dataset

WORDS = 50


MANY, FEW = [2, 3, 4, 7, 8, 0, 5, 5], [5, 6, 1, 1, 9, 9, 9, 9]
SPECIAL = np.array([0, 1, 7])


@pytest.mark.parametrize(("weights", "copies"), [((1, 3), (1, 3)), (None, (9, 3))])
def test_the_unigram_level_is_the_entropy_of_what_training_reads_without_special_pieces(weights, copies, tmp_path):
    many = write_dataset(tmp_path / "many", [[MANY]] * 9)
    few = write_dataset(tmp_path / "few", [[FEW]] * 3)
    parts = [SampleIndex(one, (0, one.num_documents), 10, sample_totals(one, 10)) for one in (many, few)]
    samples = Blend(parts, weights and [Fraction(weight) for weight in weights])
    counts = Counter(piece for piece in MANY * copies[0] + FEW * copies[1] if piece not in SPECIAL)
    total = sum(counts.values())
    expected = -sum(count / total * math.log(count / total) for count in counts.values())
    assert unigram_loss(samples, SPECIAL, 10) == pytest.approx(expected, abs=1e-9)


def test_the_level_is_that_of_all_text_and_of_as_many_tokens_whatever_their_rows(tmp_path, monkeypatch):
    dataset = text(tmp_path, "words", (90, None), length=15)
    counts = Counter(piece for number in range(len(dataset)) for piece in dataset[number].tolist())
    total = sum(counts.values())
    expected = -sum(count / total * math.log(count / total) for count in counts.values())
    for most in (total, total - 1, 400):
        monkeypatch.setattr(unigram, "MOST_TOKENS", most)
        levels = {unigram_loss(Blend([SampleIndex(dataset, (0, 90), row)]), [], row) for row in (17, 64, 128, 2048)}
        assert len(levels) == 1 and (levels.pop() == pytest.approx(expected, abs=0.01)) == (most > 400)


def slow_shift(predicted, own, other):
    """Subtract two cross-entropies of `predicted`, each under the add-one frequencies of one text."""
    pieces = set(predicted) | set(own) | set(other)

    def cross_entropy(known):
        counts = Counter(known)
        return -sum(math.log((counts[p] + 1) / (len(known) + len(pieces))) for p in predicted) / len(predicted)

    return cross_entropy(other) - cross_entropy(own)


def zipf(seed, count, order=None):
    """`count` ids with frequencies 1 / rank; `order` gives the ranks to other ids."""
    shares = 1 / np.arange(1, WORDS + 1)
    ids = np.random.default_rng(seed).choice(WORDS, count, p=shares / shares.sum())
    return ids if order is None else order[ids]


OTHER = np.random.default_rng(0).permutation(WORDS)
"""Another kind of text: the same ids with other frequencies."""


def text(folder, name, *kinds, length=40):
    """A dataset of documents; each kind is (number of documents, order of the ids)."""
    documents = [
        [zipf([number, k], length, order)] for k, (count, order) in enumerate(kinds) for number in range(count)
    ]
    return write_dataset(folder / name, documents)


def halves(dataset, first):
    """The samples of the first documents, and those of the others."""
    bounds = (0, first), (first, dataset.num_documents)
    return [SampleIndex(dataset, part, seq_length=22) for part in bounds]


def test_the_shift_is_that_of_a_slow_loop():
    own, other, predicted = zipf(1, 300), zipf(2, 300, OTHER), zipf(3, 200)
    expected = slow_shift(predicted.tolist(), own.tolist(), other.tolist())
    assert unigram_shift(predicted, own, other) == pytest.approx(expected, rel=1e-12)
    assert unigram_shift(predicted, other, own) == pytest.approx(-expected, rel=1e-12)
    longer = np.repeat(other, 3)  # thinned to one of each three
    assert unigram_shift(predicted, own, longer) == pytest.approx(expected, rel=1e-12)
    assert unigram_shift(predicted, np.repeat(own, 3), other) == pytest.approx(expected, rel=1e-12)


def test_ids_of_a_damaged_file_cost_no_memory_and_no_traceback():
    own, other, predicted = (ids.astype(np.int32) for ids in (zipf(1, 300), zipf(2, 300), zipf(3, 200)))
    sound = unigram_shift(predicted, own, other)
    predicted[7], own[5] = -3, 2**31 - 1
    assert unigram_shift(predicted, own, other) == pytest.approx(sound, abs=0.05)


def test_the_shift_of_much_text_is_the_divergence_of_its_distribution():
    shares = 1 / np.arange(1, WORDS + 1)
    shares /= shares.sum()
    divergence = (shares * np.log(shares / shares[np.argsort(OTHER)])).sum()
    assert unigram_shift(zipf(1, 200_000), zipf(2, 200_000), zipf(3, 200_000, OTHER)) == pytest.approx(
        divergence, abs=0.02
    )
    assert unigram_shift(zipf(1, 200_000), zipf(2, 200_000), zipf(3, 200_000)) == pytest.approx(0, abs=0.01)


def test_another_kind_of_text_is_told_with_both_shifts(tmp_path):
    training, validation = halves(text(tmp_path, "two", (400, None), (40, OTHER)), 400)
    line = split_remark(training, validation) or ""
    shift, usual = shift_of(validation, 0, len(validation), training), usual_shift(training, len(validation))
    assert shift > 0.5 > 0.05 > usual
    assert line.startswith(f"{tmp_path}/two: the validation text is of another kind than the training text")
    assert f"off by {shift:.2f} nats per piece; {max(usual, 0):.2f} is usual" in line and "\n" not in line


def test_text_of_one_kind_is_not_told(tmp_path):
    assert split_remark(*halves(text(tmp_path, "one", (440, None)), 400)) is None


def test_training_text_that_changes_as_much_is_not_told(tmp_path):
    generator = np.random.default_rng(1)
    kinds = [(40, generator.permutation(WORDS)) for _ in range(11)]  # as novels: each its own
    training, validation = halves(text(tmp_path, "many", *kinds), 400)
    assert shift_of(validation, 0, len(validation), training) > 0.2
    assert split_remark(training, validation) is None


@pytest.mark.parametrize(("documents", "told"), [(19, False), (20, True)])
def test_a_few_documents_are_not_judged(tmp_path, documents, told):
    dataset = text(tmp_path, "few", (400, None), (documents, OTHER))
    assert bool(split_remark(*halves(dataset, 400))) == told
    with_short = text(tmp_path, "short", (400, None), (documents - 1, OTHER), (30, None), length=40)
    cut = write_dataset(
        tmp_path / "cut", [[with_short.get(i)[: 40 if i < 399 + documents else 4]] for i in range(len(with_short))]
    )
    assert split_remark(*halves(cut, 400)) is None  # documents under 8 tokens do not count


def test_little_training_text_is_not_judged(tmp_path):
    assert split_remark(*halves(text(tmp_path, "tiny", (9, None), (40, OTHER)), 9)) is None


def test_a_corpus_tells_it_for_each_dataset_that_split_divides(prose_then_code, tiny_corpus):
    def remarks(logging=None, **data):
        config = Config().replace(data=data, model={"seq_length": 48}, logging=logging or {})
        return Corpus.open(config).split_remarks()

    line, shared = remarks(data_path=("1", str(tiny_corpus.prefix), "3", prose_then_code))
    assert line.startswith(f"{prose_then_code}: the validation text")
    assert "1 input files (corpus.jsonl) is also in" in shared and "--split divides each on its own" in shared
    assert remarks(data_path=(prose_then_code,), logging={"eval_interval": 0}) == []
    assert remarks(data_path=(prose_then_code,), logging={"eval_iters": 0}) == []
    (line,) = remarks(train_data_path=(str(tiny_corpus.prefix),), valid_data_path=(prose_then_code,), split=None)
    assert line.startswith(f"{prose_then_code}: 1 of its 2 input files (corpus.jsonl) is also in {tiny_corpus.prefix}")
