"""Masking in words, tokens and n-grams equals the loop twin; draws by counters are pure and uniform."""

import itertools

import numpy as np
import pytest
from scipy import stats

from megatron_ddrp.config.registry import MASKINGS
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.masking import Masker, Masking, predict_next
from megatron_ddrp.data.randomness import fold_in, hash_uint64, permute, to_unit
from tests.datasets import fake_tokenizer
from tests.reference import objectives as twin
from tests.refusals import refused

PAD, UNK, CLS, SEP, MASK = SPECIAL = range(5)
VOCAB = 200
WORD_STARTS = np.arange(VOCAB) < 120  # 120.. are continuation pieces
SEED = 99


def make_masker(masking="whole-word", **options):
    return Masker(fake_tokenizer(WORD_STARTS), seed=SEED, masking=MASKINGS.find(masking)(), **options)


def mask_rows(ids, documents=None, **options):
    """Return masked ids, and labels, of rows that are the samples 0, 1, … in epoch 0."""
    documents = np.ones_like(ids) if documents is None else documents
    return make_masker(**options)(ids, documents, np.zeros(len(ids), int), np.arange(len(ids)))


def make_rows(num_rows, seq_length, rng, continuation=0.3, unknown=0.02):
    """`[CLS] tokens [SEP]` rows of differing lengths with Zipf-distributed word pieces."""
    ids = np.full((num_rows, seq_length), PAD)
    documents = np.zeros_like(ids)
    for row in range(num_rows):
        n = int(rng.integers(1, seq_length - 1))
        tokens = 5 + np.minimum(rng.zipf(1.3, n) - 1, 114)
        tokens = np.where(rng.random(n) < continuation, rng.integers(120, VOCAB, n), tokens)
        tokens[rng.random(n) < unknown] = UNK
        ids[row, : n + 2] = [CLS, *tokens, SEP]
        documents[row, : n + 2] = 1
    return ids, documents


def twin_masks(ids, documents, epoch, sample, mask_prob, masking):
    """The twin on one row, given the numbers that (seed, purpose, epoch, sample, column) name."""

    def draws(purpose):
        return hash_uint64(SEED, purpose, epoch, sample, np.arange(len(ids)))

    order = draws("mask-order") >> np.uint64(32)
    action, ngrams = to_unit(draws("mask-action")), to_unit(draws("mask-ngram"))
    ordinary = [token for token in range(VOCAB) if token not in SPECIAL]
    pieces = [ordinary[int(draw * len(ordinary))] for draw in to_unit(draws("mask-piece"))]
    selectable = [bool(own) and token not in (PAD, CLS, SEP, MASK) for token, own in zip(ids, documents, strict=True)]
    selected = twin.select(ids, selectable, WORD_STARTS, order.tolist(), mask_prob, masking, ngrams)
    return twin.corrupt(ids, selected, MASK, action, pieces)


def assert_equals_twin(ids, documents, epochs, samples, mask_prob=0.15, masking="whole-word", rows=None):
    before = ids.copy()
    masked, labels = make_masker(mask_prob=mask_prob, masking=masking)(ids, documents, epochs, samples)
    assert np.array_equal(ids, before), "inputs stay untouched"
    for row in rows or range(len(ids)):
        given = ids[row].tolist(), documents[row].tolist(), int(epochs[row]), int(samples[row])
        assert (masked[row].tolist(), labels[row].tolist()) == twin_masks(*given, mask_prob, masking)


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("continuation", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("mask_prob", [0.01, 0.15, 0.4, 1.0])
def test_equals_the_loop_twin(continuation, mask_prob, masking):
    rng = np.random.default_rng(0)
    ids, documents = make_rows(40, 96, rng, continuation)
    ids[::4] = rng.integers(0, VOCAB, ids[::4].shape)  # special pieces inside a text, and ordinary ones as padding
    assert_equals_twin(ids, documents, rng.integers(0, 9, 40), rng.integers(0, 10**9, 40), mask_prob, masking)


def test_a_lower_rate_masks_a_part_of_what_a_higher_one_masks():
    rng = np.random.default_rng(3)
    ids, documents = make_rows(20, 96, rng, 0.0)  # words of one piece: none is skipped
    epochs, samples = np.zeros(20, int), np.arange(20)
    masker = make_masker(mask_prob=0.3)
    (few_ids, few), (many_ids, many) = (m(ids, documents, epochs, samples) for m in (masker.at_rate(0.15), masker))
    predicted = few != IGNORED_LABEL
    assert np.array_equal(few_ids[predicted], many_ids[predicted]) and np.array_equal(few[predicted], many[predicted])
    assert 0 < predicted.sum() < 0.6 * (many != IGNORED_LABEL).sum()
    assert masker.mask_prob == 0.3


def test_many_chunks_equal_the_loop_twin():
    ids, documents = make_rows(300, 257, np.random.default_rng(1))
    assert_equals_twin(ids, documents, np.zeros(300, int), np.arange(300), rows=(0, 126, 127, 128, 254, 255, 299))


def test_thousands_of_short_rows_are_masked_as_a_few():
    """More rows than the sort key has numbers for."""
    ids, rows = np.tile([CLS, 10, 150, 11, 12, SEP], (5000, 1)), np.arange(5000)
    parts = [make_masker()(ids[part], np.ones((len(part), 6)), 0 * part, part) for part in np.split(rows, 5)]
    for at_once, of_parts in zip(mask_rows(ids), zip(*parts, strict=True), strict=True):
        assert np.array_equal(at_once, np.concatenate(of_parts))


def test_ids_without_a_piece_are_never_drawn():
    tokenizer = fake_tokenizer(WORD_STARTS)
    tokenizer.pieces[20:] = [""] * (VOCAB - 20)
    ids, documents = make_rows(200, 64, np.random.default_rng(0))
    ids[ids >= 20] = 7
    masked, _ = Masker(tokenizer, 0.5, SEED)(ids, documents, np.zeros(200, np.int64), np.arange(200))
    assert masked.max() == 19


def test_shares_can_be_set_for_electra_and_impossible_ones_are_refused():
    ids, documents = make_rows(200, 256, np.random.default_rng(6))
    masked, labels = mask_rows(ids, documents, mask_share=0.85, random_share=0.0)
    assert np.mean(masked[labels != IGNORED_LABEL] == MASK) == pytest.approx(0.85, abs=0.01)
    assert np.all((masked == ids) | (masked == MASK))
    for name, value in (("mask_prob", 0.0), ("mask_prob", 1.5), ("mask_share", 0.95)):
        with pytest.raises(ValueError, match=name):
            make_masker(**{name: value})


def test_a_masking_whose_units_join_words_says_how_long_they_are():
    pairs = type("Pairs", (Masking,), {"longest": 2})()
    ids, documents = make_rows(2, 12, np.random.default_rng(0))
    masker = Masker(fake_tokenizer(WORD_STARTS), seed=SEED, masking=pairs)
    refused(r"Pairs has no lengths\(\)", masker, ids, documents, np.zeros(2, int), np.arange(2))


def test_draws_are_elementwise_functions_of_their_seed_purpose_and_counters_and_frozen():
    grid = hash_uint64(1, "p", np.arange(4)[:, None], np.arange(5))
    assert grid.shape == (4, 5) and grid.dtype == np.uint64 and grid[2, 3] == hash_uint64(1, "p", 2, 3)
    assert hash_uint64(1, "p", 2, 3).shape == () and hash_uint64(1, "p", np.arange(0)).shape == (0,)
    assert np.array_equal(grid, fold_in(hash_uint64(1, "p", np.arange(4))[:, None], np.arange(5)))
    # A change of these numbers changes every run's data: it must be a decision, not a side effect.
    draws = hash_uint64(1234, "mask-order", 3, np.array([0, 1]))
    assert draws.tolist() == [1074841977364916073, 11525570127649832071]
    assert permute(np.arange(7), 7, 1234, "shuffle", 0).tolist() == [0, 6, 5, 2, 4, 3, 1]
    assert fold_in(hash_uint64(SEED, "mask-order", 2, 3), 4) == hash_uint64(SEED, "mask-order", 2, 3, 4)
    with np.errstate(all="raise"):
        hash_uint64(2**63, "p", 2**62, np.array([2**62]))
    given = list(itertools.product((0, 1, -1, 2**70), ("p", "q", ""), range(3), range(3)))
    assert len({int(hash_uint64(*numbers)) for numbers in given}) == len(given)


def test_uniform_is_uniform_and_uncorrelated():
    draws = to_unit(hash_uint64(7, "test", np.arange(200)[:, None], np.arange(500)))
    assert draws.min() >= 0 and draws.max() < 1 and stats.kstest(draws.ravel(), "uniform").pvalue > 1e-4
    for first, second in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02
    bits = np.unpackbits(hash_uint64(7, "bits", np.arange(20_000)).view(np.uint8)).reshape(20_000, 64).mean(axis=0)
    assert np.all(np.abs(bits - 0.5) < 0.02)


@pytest.mark.parametrize("size", [*range(1, 34), 97, 127, 128, 129, 255, 256, 257, 1009, 4096, 65_537])
def test_permute_is_a_bijection(size):
    place = permute(np.arange(size), size, 5, "shuffle", 2)
    assert place.dtype == np.int64 and np.array_equal(np.sort(place), np.arange(size))
    some = np.arange(size)[:: max(1, size // 7)]
    assert np.array_equal(permute(some, size, 5, "shuffle", 2), place[some]), "a place does not depend on the others"
    for index in (-1, size):
        with pytest.raises(ValueError, match=rf"expected within \[0, {size}\)"):
            permute([index], size, 0, "shuffle", 0)


def test_permute_epochs_seeds_and_purposes_differ():
    base = permute(np.arange(1000), 1000, 5, "shuffle", 0)
    for seed, purpose, epoch in ((5, "shuffle", 1), (6, "shuffle", 0), (5, "valid", 0)):
        assert np.mean(permute(np.arange(1000), 1000, seed, purpose, epoch) == base) < 0.02
    both = permute(np.arange(1000) % 500, 500, 5, "shuffle", np.arange(1000) // 500)
    assert np.array_equal(both[500:], permute(np.arange(500), 500, 5, "shuffle", 1)), "epochs may be an array"


@pytest.mark.parametrize("size", [2, 3, 7, 16, 61])
def test_permute_places_are_uniform_over_epochs(size):
    epochs = 3000
    place = permute(np.arange(size), size, 11, "shuffle", np.arange(epochs)[:, None])  # [epochs, size]
    for index in {0, size // 2, size - 1}:
        counts = np.bincount(place[:, index], minlength=size)
        assert stats.chisquare(counts).pvalue > 1e-5


def test_permute_scatters_neighbours_of_huge_ranges():
    size = 10**12 + 39
    place = permute(np.arange(1000), size, 5, "shuffle", 0)
    assert np.unique(place).size == 1000 and place.min() >= 0 and place.max() < size
    assert stats.kstest(place / size, "uniform").pvalue > 1e-4


def test_the_causal_phase_predicts_each_next_token_of_a_document_and_no_cls():
    ids, documents = make_rows(6, 12, np.random.default_rng(2))
    joined = [np.concatenate([row[own > 0] for row, own in zip(ids, documents, strict=True)]), [PAD, PAD]]
    packed = np.concatenate(joined)[None]
    of_packed = np.append(np.repeat(np.arange(1, 7), documents.sum(1)), [0, 0])[None]
    for rows, numbers in ((ids, documents), (packed, of_packed)):
        read, labels = predict_next(rows, numbers, 0, 0)
        assert read is rows and labels.shape == rows.shape
        for row, places in enumerate(numbers.tolist()):
            for place, document in enumerate(places):
                goes_on = document != 0 and place + 1 < len(places) and places[place + 1] == document
                assert labels[row, place] == (rows[row, place + 1] if goes_on else IGNORED_LABEL)
        assert (labels == SEP).sum() == 6 and not (labels == CLS).any() and not (labels == PAD).any()
