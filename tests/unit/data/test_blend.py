"""Blending: every prefix keeps to the weights, each corpus in its own epochs, any position in constant time."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ddrp.data.batches.loader import MAX_PERIOD, Blend, interleave, read_blend, whole_weights
from megatron_ddrp.errors import UserError


class FakeSamples:
    """Samples in memory: sample i of corpus c has the one token 1000·c + i."""

    def __init__(self, corpus, num_samples):
        self.corpus, self.num_documents, self.prefix = corpus, num_samples, f"corpus{corpus}"

    def __len__(self):
        return self.num_documents

    def lengths(self, indices):
        assert np.all((indices >= 0) & (indices < len(self)))
        return np.full(np.shape(indices), 3 + self.corpus)

    def tokens(self, indices):
        return [np.array([1000 * self.corpus + index]) for index in indices]


def corpora(*sizes):
    return [FakeSamples(corpus, size) for corpus, size in enumerate(sizes)]


weights = st.lists(st.integers(1, 200), min_size=1, max_size=9)


@settings(deadline=None, max_examples=200)
@given(weights)
def test_every_prefix_of_the_pattern_is_within_one_sample_of_its_weights(counts):
    pattern, period = interleave(counts), sum(counts)
    given_so_far = np.cumsum(pattern[:, None] == np.arange(len(counts)), axis=0)  # [period, corpora]
    due = np.arange(1, period + 1)[:, None] * np.array(counts)  # times the period, so that all is whole
    assert np.all(np.abs(given_so_far * period - due) < period)
    assert given_so_far[-1].tolist() == counts


def test_known_patterns():
    assert interleave([1]).tolist() == [0]
    assert interleave([1, 1, 1]).tolist() == [0, 1, 2]
    assert interleave([3, 1]).tolist() == [0, 0, 1, 0]


def largest_deviation(pattern, counts):
    given_so_far = np.cumsum(pattern[:, None] == np.arange(len(counts)), axis=0)  # [period, corpora]
    due = np.arange(1, len(pattern) + 1)[:, None] * np.array(counts) / sum(counts)
    return np.abs(given_so_far - due).max()


def test_many_small_corpora_beside_a_large_one():
    """Where the corpus with the largest deficit first, Megatron's rule, strays by more than a sample."""
    counts = np.array([1, 7, 1, 1, 5, 7, 1, 3, 400, 23, 1, 5, 1])
    consumed, greedy = np.zeros(len(counts)), []
    for position in range(counts.sum()):
        greedy.append(np.argmax(counts / counts.sum() * max(position, 1) - consumed))
        consumed[greedy[-1]] += 1
    assert largest_deviation(np.array(greedy), counts) > 1.5
    assert largest_deviation(interleave(counts.tolist()), counts) < 1


@pytest.mark.parametrize(
    ("written", "counts"),
    [
        (["0.3", "0.7"], [3, 7]),
        (["5", "5"], [1, 1]),
        (["0.25", "0.25", "0.5"], [1, 1, 2]),
        (["1e-1", "0.9"], [1, 9]),
        (["12"], [1]),
    ],
)
def test_weights_are_taken_as_written(written, counts):
    assert whole_weights([Fraction(weight) for weight in written]) == counts


def test_weights_that_need_a_long_pattern_are_rounded_and_none_vanishes():
    counts = whole_weights([Fraction(10**12), Fraction(10**12 + 7), Fraction(1)])
    assert min(counts) == 1 and abs(sum(counts) - MAX_PERIOD) <= 2
    assert counts[0] / sum(counts) == pytest.approx(0.5, abs=2e-6)


def visits(blend, positions, seed=5):
    epochs, indices = blend.visits(np.asarray(positions), seed)
    return list(zip(epochs.tolist(), indices.tolist(), strict=True))


def test_any_position_alone_gives_what_the_stream_gives():
    blend = Blend(corpora(7, 30, 11), [Fraction(1), Fraction(4), Fraction(2)])
    stream = visits(blend, np.arange(300))
    for begin, end in ((0, 1), (5, 19), (123, 124), (250, 300)):
        assert visits(blend, np.arange(begin, end)) == stream[begin:end]
    scattered = np.random.default_rng(0).permutation(300)
    assert visits(blend, scattered) == [stream[position] for position in scattered]
    far = 10**15
    assert visits(blend, [far]) == visits(blend, np.arange(far - 50, far + 50))[50:51]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=5))
def test_each_corpus_is_walked_once_an_epoch_in_its_own_order(parts):
    counts = whole_weights([Fraction(weight) for weight, _ in parts])
    blend = Blend(corpora(*(size for _, size in parts)), [Fraction(weight) for weight, _ in parts])
    positions = 5 * max(sum(counts) * -(-size // count) for count, (_, size) in zip(counts, parts, strict=True))
    stream = visits(blend, np.arange(positions))
    offset = 0
    for (_, size), consumed in zip(parts, blend.count_visits(positions), strict=True):
        own = [(epoch, index - offset) for epoch, index in stream if offset <= index < offset + size]
        assert len(own) == consumed >= 5 * size
        for epoch in range(4):
            walked = own[epoch * size : (epoch + 1) * size]
            assert {e for e, _ in walked} == {epoch}
            assert sorted(index for _, index in walked) == list(range(size))
        offset += size


def test_epochs_and_corpora_have_orders_of_their_own():
    blend = Blend(corpora(100, 100), [Fraction(1), Fraction(1)])
    indices = [index for _, index in visits(blend, np.arange(400))]
    first, second = indices[0:200:2], [index - 100 for index in indices[1:200:2]]
    assert sorted(first) == sorted(second) == list(range(100)) and first != second
    assert indices[200:400:2] != first


def test_without_weights_the_corpora_are_one():
    blend, merged = Blend(corpora(20, 30)), Blend(corpora(50))
    assert visits(blend, np.arange(130)) == visits(merged, np.arange(130))
    assert blend.counts is None and len(blend) == 50


def test_samples_are_read_from_their_corpora_in_the_order_asked_for():
    blend = Blend(corpora(4, 2, 5))
    indices = np.array([10, 0, 4, 3, 5, 6])
    assert [ids.tolist() for ids in blend.tokens(indices)] == [[2004], [0], [1000], [3], [1001], [2000]]
    assert blend.lengths(indices.reshape(2, 3)).tolist() == [[5, 3, 4], [3, 4, 5]]
    assert [blend.source(index) for index in (3, 4, 10)] == ["corpus0", "corpus1", "corpus2"]


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["A"], ("A",), None),
        (["7"], ("7",), None),
        (["A", "B", "C"], ("A", "B", "C"), None),
        (["0.1", "A", "2", "B"], ("A", "B"), (Fraction(1, 10), Fraction(2))),
        (["1", "A", "1", "./2024"], ("A", "./2024"), (Fraction(1), Fraction(1))),
        (["1e3", "A"], ("A",), (Fraction(1000),)),
        (["2024_01", "news"], ("2024_01", "news"), None),
    ],
)
def test_reading_the_words_of_a_blend(words, prefixes, weights):
    assert read_blend(words, "--data-path") == (prefixes, weights)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data-path is empty"),
        (["0.3", "A", "B"], "got 3 words of which 1 are numbers"),
        (["0.3", "A", "0.7"], "got 3 words of which 2 are numbers"),
        (["A", "0.3", "B", "0.7"], "expected a weight before every prefix or before none"),
        (["A", "0.3"], "expected a weight before every prefix or before none"),
        (["0.3", "0.7"], "got 2 words of which 2 are numbers"),
        (["0", "A", "1", "B"], "weight 0 must be a number above 0"),
        (["1", "A", "-2", "B"], "weight -2 must be a number above 0"),
        (["nan", "A", "1", "B"], "weight nan"),
        (["inf", "A", "1", "B"], "weight inf"),
    ],
)
def test_what_is_not_a_blend_is_refused(words, message):
    with pytest.raises(UserError, match=message) as error:
        read_blend(words, "--data-path")
    assert error.value.exit_code == 2 and "--data-path" in str(error.value)
