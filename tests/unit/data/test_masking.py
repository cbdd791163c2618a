"""Masking in words, tokens and n-grams: equal to the loop twin, the promised rates, purity, and specials left alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ddrp.config.registry import MASKINGS
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.data.randomness import fold_in, hash_uint64, to_unit
from tests.datasets import fake_tokenizer
from tests.reference import objectives as twin

PAD, UNK, CLS, SEP, MASK = SPECIAL = range(5)
VOCAB = 200
WORD_STARTS = np.arange(VOCAB) < 120  # 120.. are continuation pieces
SEED = 99


def make_masker(masking="whole-word", **options):
    return Masker(fake_tokenizer(WORD_STARTS), seed=SEED, masking=MASKINGS.find(masking)(), **options)


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


def uniform(purpose, *counters):
    return to_unit(hash_uint64(SEED, purpose, *counters))


def twin_masks(ids, documents, epoch, sample, mask_prob, masking="whole-word"):
    """The twin on one row, given the numbers that (seed, purpose, epoch, sample, column) name."""
    columns = np.arange(len(ids))
    order = hash_uint64(SEED, "mask-order", epoch, sample, columns) >> np.uint64(32)
    action = uniform("mask-action", epoch, sample, columns)
    ordinary = [token for token in range(VOCAB) if token not in SPECIAL]
    pieces = [ordinary[int(draw * len(ordinary))] for draw in uniform("mask-piece", epoch, sample, columns)]
    selectable = [
        bool(document) and token not in (PAD, CLS, SEP, MASK) for token, document in zip(ids, documents, strict=True)
    ]
    ngrams = uniform("mask-ngram", epoch, sample, columns)
    selected = twin.select(ids, selectable, WORD_STARTS, order.tolist(), mask_prob, masking, ngrams)
    return twin.corrupt(ids, selected, MASK, action, pieces)


def assert_equals_twin(ids, documents, epochs, samples, mask_prob=0.15, masking="whole-word"):
    masked, labels = make_masker(mask_prob=mask_prob, masking=masking)(ids, documents, epochs, samples)
    for row in range(len(ids)):
        expected = twin_masks(
            ids[row].tolist(), documents[row].tolist(), int(epochs[row]), int(samples[row]), mask_prob, masking
        )
        assert (masked[row].tolist(), labels[row].tolist()) == expected


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("continuation", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("mask_prob", [0.15, 0.4, 1.0])
def test_equals_the_loop_twin(continuation, mask_prob, masking):
    rng = np.random.default_rng(0)
    ids, documents = make_rows(40, 96, rng, continuation)
    assert_equals_twin(ids, documents, rng.integers(0, 9, 40), rng.integers(0, 10**9, 40), mask_prob, masking)


rows_of_ids = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=9, max_size=9), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    rows_of_ids,
    st.floats(0.01, 1.0),
    st.integers(0, 5),
    st.integers(0, 2**40),
    st.integers(0, 9),
    st.sampled_from(sorted(MASKINGS)),
)
def test_equals_the_loop_twin_on_any_ids(rows, mask_prob, epoch, sample, padding, masking):
    ids = np.array(rows)
    documents = np.ones_like(ids)
    documents[:, 9 - padding :] = 0
    samples = sample + np.arange(len(ids))
    assert_equals_twin(ids, documents, np.full(len(ids), epoch), samples, mask_prob, masking)


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
    rng = np.random.default_rng(1)
    ids, documents = make_rows(300, 257, rng)
    masker = make_masker()
    masked, labels = masker(ids, documents, np.zeros(300, int), np.arange(300))
    for row in (0, 126, 127, 128, 254, 255, 299):
        expected = twin_masks(ids[row].tolist(), documents[row].tolist(), 0, row, 0.15)
        assert (masked[row].tolist(), labels[row].tolist()) == expected


def test_thousands_of_short_rows_are_masked_as_a_few():
    """More rows than the sort key has numbers for."""
    ids = np.tile([CLS, 10, 150, 11, 12, SEP], (5000, 1))
    rows = np.arange(5000)
    at_once = make_masker()(ids, np.ones_like(ids), 0 * rows, rows)
    parts = [make_masker()(ids[part], np.ones((len(part), 6)), 0 * part, part) for part in np.split(rows, 5)]
    for side in range(2):
        assert np.array_equal(at_once[side], np.concatenate([part[side] for part in parts]))


def test_fold_in_names_the_same_numbers_as_hash():
    assert fold_in(hash_uint64(SEED, "mask-order", 2, 3), 4) == hash_uint64(SEED, "mask-order", 2, 3, 4)


def test_rates_on_zipf_text():
    rng = np.random.default_rng(2)
    ids, documents = make_rows(600, 512, rng)
    masked, labels = make_masker()(ids, documents, np.zeros(600, int), np.arange(600))
    selected = labels != IGNORED_LABEL
    ordinary = (documents > 0) & ~np.isin(ids, [PAD, CLS, SEP, MASK])
    assert ordinary.sum() > 100_000
    assert selected.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.002)
    budget = np.maximum(1, np.rint(0.15 * ordinary.sum(axis=1)))
    long_rows = ordinary.sum(axis=1) >= 40
    assert np.all(selected.sum(axis=1)[long_rows] <= budget[long_rows])
    assert np.all(selected.sum(axis=1) >= 1)

    shown, original = masked[selected], ids[selected]
    assert np.mean(shown == MASK) == pytest.approx(0.8, abs=0.01)
    random_share = np.mean((shown != MASK) & (shown != original))
    # A random piece equals the original now and then, so the visible shares lie a little off 10 %.
    assert random_share == pytest.approx(0.1 * (1 - 1 / (VOCAB - 5)), abs=0.01)
    random_pieces = shown[(shown != MASK) & (shown != original)]
    assert not np.isin(random_pieces, SPECIAL).any()
    assert np.unique(random_pieces).size == VOCAB - 5, "every ordinary piece is drawn"


def test_labels_name_the_originals_and_specials_are_never_touched():
    ids, documents = make_rows(200, 128, np.random.default_rng(3))
    masked, labels = make_masker()(ids, documents, np.zeros(200, int), np.arange(200))
    selected = labels != IGNORED_LABEL
    assert np.array_equal(labels[selected], ids[selected])
    assert np.array_equal(masked[~selected], ids[~selected])
    assert not np.isin(ids[selected], [PAD, CLS, SEP, MASK]).any()
    assert np.any(ids[selected] == UNK), "[UNK] is a word like any other"
    assert not selected[documents == 0].any()


def test_ids_without_a_piece_are_never_drawn():
    tokenizer = fake_tokenizer(WORD_STARTS)
    tokenizer.pieces[20:] = [""] * (VOCAB - 20)
    ids, documents = make_rows(200, 64, np.random.default_rng(0))
    ids[ids >= 20] = 7
    masked, _ = Masker(tokenizer, 0.5, SEED)(ids, documents, np.zeros(200, np.int64), np.arange(200))
    assert masked.max() == 19


def test_words_of_up_to_four_pieces_stay_whole_and_longer_ones_split():
    for pieces, whole in ((2, True), (4, True), (5, False)):
        word = [10, *[150] * (pieces - 1)]
        ids = np.array([[CLS, *word * 20, SEP]] * 50)
        _, labels = make_masker()(ids, np.ones_like(ids), np.zeros(50, int), np.arange(50))
        counts = (labels != IGNORED_LABEL)[:, 1:-1].reshape(50, 20, pieces).sum(axis=2)
        if whole:
            assert set(np.unique(counts)) == {0, pieces}
        else:
            assert set(np.unique(counts)) > {0, 1}
            assert np.all(counts.sum(axis=1) == round(0.15 * 20 * pieces)), "single pieces fill the budget exactly"


def test_a_skipped_unit_leaves_room_for_a_smaller_one():
    """Budget 2 of 13: a three-piece word never fits, a two-piece one only first, single pieces fill the rest."""
    ids = np.array([[CLS, 10, 150, 151, 11, 152, 12, 13, 14, 10, 150, 151, 11, 152, SEP]] * 400)
    _, labels = make_masker()(ids, np.ones_like(ids), np.zeros(400, int), np.arange(400))
    selected = labels != IGNORED_LABEL
    assert not selected[:, [1, 2, 3, 9, 10, 11]].any()
    assert np.all(selected.sum(axis=1) == 2)
    assert np.array_equal(selected[:, 4], selected[:, 5])
    assert selected[:, 4].any() and selected[:, 6].any()


def test_where_no_unit_fits_one_whole_word_is_taken():
    ids = np.array([[CLS, 10, 150, 11, 151, 152, SEP, PAD]] * 100)
    _, labels = make_masker()(ids, (ids != PAD).astype(int), np.zeros(100, int), np.arange(100))
    masks = {tuple(row) for row in (labels != IGNORED_LABEL).astype(int).tolist()}
    assert masks == {(0, 1, 1, 0, 0, 0, 0, 0), (0, 0, 0, 1, 1, 1, 0, 0)}


def test_rows_without_ordinary_tokens_predict_nothing():
    ids = np.array([[CLS, SEP, PAD], [PAD, PAD, PAD], [CLS, 7, SEP]])
    masked, labels = make_masker()(ids, np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]]), np.zeros(3, int), np.arange(3))
    assert np.array_equal(masked[:2], ids[:2])
    assert (labels != IGNORED_LABEL).tolist() == [[False] * 3, [False] * 3, [False, True, False]]


def test_pure_in_seed_epoch_and_sample_and_independent_of_row_and_padding():
    ids, documents = make_rows(30, 100, np.random.default_rng(4))
    before = ids.copy()
    epochs, samples = np.arange(30) % 3, np.arange(30) * 7
    masker = make_masker()
    masked, labels = masker(ids, documents, epochs, samples)
    assert np.array_equal(ids, before), "inputs stay untouched"
    again = masker(ids, documents, epochs, samples)
    assert masked.tobytes() == again[0].tobytes() and labels.tobytes() == again[1].tobytes()

    order = np.random.default_rng(5).permutation(30)
    wider = [np.pad(x[order], ((0, 0), (0, 11))) for x in (ids, documents)]
    moved = masker(*wider, epochs[order], samples[order])
    assert np.array_equal(moved[0][:, :100], masked[order]) and np.array_equal(moved[1][:, :100], labels[order])

    for other in (masker(ids, documents, epochs + 1, samples), masker(ids, documents, epochs, samples + 1)):
        assert not np.array_equal(other[1], labels)


def test_shares_can_be_set_for_electra():
    ids, documents = make_rows(200, 256, np.random.default_rng(6))
    masked, labels = make_masker(mask_share=0.85, random_share=0.0)(ids, documents, np.zeros(200, int), np.arange(200))
    selected = labels != IGNORED_LABEL
    assert np.mean(masked[selected] == MASK) == pytest.approx(0.85, abs=0.01)
    assert np.all((masked == ids) | (masked == MASK))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_prob": 0.0}, "mask_prob"),
        ({"mask_prob": 1.5}, "mask_prob"),
        ({"mask_share": 0.95}, "mask_share"),
    ],
)
def test_refuses_impossible_shares(options, message):
    with pytest.raises(ValueError, match=message):
        make_masker(**options)
