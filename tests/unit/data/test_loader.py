"""Loading, packing and blending: the same rows with the same masks in every layout and after every resume."""

import itertools
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ddrp.data.batches import loader
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.loader import Blend, SampleReader, Share, interleave, iterate, whole_weights
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.data.batches.samples import join_samples, pack_rows
from megatron_ddrp.errors import UserError
from tests.datasets import FAKE_VOCAB, FakeSamples, fake_loader, fake_tokenizer
from tests.refusals import refused, wrong_arguments

PAD, UNK, CLS, SEP, MASK = SPECIAL = range(5)
SEQ, PACKED_SEQ = 60, 64


def fake_samples(num_samples=50):
    """Samples of lengths that repeat, so that sorting meets ties."""
    rng = np.random.default_rng(0)
    return FakeSamples(rng.integers(1, SEQ - 1, num_samples), rng)


def make_loader(samples=None, *, micro=2, world=1, rank=0, global_batch=16, seed=7, packing=False):
    share = Share(global_batch, micro, rank, world)
    return fake_loader(samples or fake_samples(), share, SEQ, seed=seed, packing=packing)


def pack_loader(*, micro=8, world=1, rank=0, packing=True):
    """A loader of 200 samples, many of them short."""
    rng = np.random.default_rng(0)
    samples = FakeSamples(np.minimum(rng.geometric(0.06, 200), PACKED_SEQ - 2), rng)
    return fake_loader(samples, Share(64, micro, rank, world), PACKED_SEQ, packing=packing)


def documents_in_rows(batches):
    """Sorted (sequence id, input ids, labels, positions, segments) of the documents in all rows; checks the padding."""
    documents = []
    for batch in batches:
        for row in (Batch(*fields) for fields in zip(*batch.arrays(), strict=True)):
            count = row.document_ids.max()
            assert set(row.document_ids) | {0} == set(range(count + 1)), "the documents of a row are 1, 2, …"
            padding = row.document_ids == 0
            assert np.all(row.input_ids[padding] == PAD) and np.all(row.labels[padding] == IGNORED_LABEL)
            assert not any(field[padding].any() for field in (row.position_ids, row.sequence_ids, row.segment_ids))
            for number in range(1, count + 1):
                places = np.flatnonzero(row.document_ids == number)
                assert np.all(np.diff(places) == 1), "a document lies in one piece"
                (name,) = set(row.sequence_ids[places].tolist())
                fields = row.input_ids, row.labels, row.position_ids, row.segment_ids
                documents.append((name, *(tuple(field[places].tolist()) for field in fields)))
    return sorted(documents)


def original(ids, labels):
    """The ids of a row before masking."""
    return tuple(np.where(np.array(labels) == IGNORED_LABEL, ids, labels).tolist())


def test_every_layout_gives_the_same_rows_and_packed_ones_the_documents_of_unpacked_ones():
    """The last global batches of each loader span two epochs."""
    for make, size, micros, steps in (
        (make_loader, 16, (1, 2, 4), (0, 48)),
        (pack_loader, 64, (1, 4, 16), (0, 64, 192)),
    ):
        for consumed in steps:
            expected = documents_in_rows(make(micro=size, packing=False).step(consumed))
            assert [document[0] for document in expected] == list(range(consumed, consumed + size))
            for world, micro in itertools.product((1, 2, 4), micros):
                ranks = [make(micro=micro, world=world, rank=rank).step(consumed) for rank in range(world)]
                assert all(len(batches) == size // (micro * world) for batches in ranks)
                assert documents_in_rows(sum(ranks, [])) == expected


def test_ranks_hold_rows_of_similar_length_at_the_same_time():
    ranks = [make_loader(world=2, rank=rank).step(0) for rank in range(2)]
    lengths = [[batch.document_ids.sum(axis=1) for batch in batches] for batches in ranks]
    for step in range(3):
        assert max(row[step].max() for row in lengths) <= min(row[step + 1].min() for row in lengths)


def test_the_fields_of_a_batch():
    samples = fake_samples()
    texts, batches = {tuple(ids) for ids in samples.ids}, make_loader(samples, micro=4).step(32)
    for batch in batches:
        for field in batch.arrays():
            assert field.dtype == np.int64 and field.shape == batch.input_ids.shape and field.flags.c_contiguous
    for _, ids, labels, positions, segments in documents_in_rows(batches):
        cls, *text, sep = original(ids, labels)
        assert (cls, sep) == (CLS, SEP) and tuple(text) in texts
        assert positions == (*range(len(ids)),) and not any(segments) and set(labels) != {IGNORED_LABEL}


def test_the_text_of_a_full_row_may_continue_behind_it():
    """A full row may end inside its text where rare words are marked; a shorter row holds the end of its text."""
    seen = []

    def mark(ids, ends_here):
        seen.append((ids, ends_here.tolist()))
        return np.zeros_like(ids)

    lengths = np.array([SEQ, SEQ - 1, 9])
    samples = FakeSamples(lengths - 2, np.random.default_rng(0))
    tokenizer = fake_tokenizer(np.ones(FAKE_VOCAB, bool))
    reader = SampleReader(Blend([samples]), tokenizer, Masker(tokenizer), SEQ, mark)
    batch = reader.read(np.arange(3), np.zeros(3, int), np.arange(3), lengths)
    ((ids, ends_here),) = seen
    assert ends_here == [False, True, True] and batch.note_ids.shape == (3, SEQ)
    assert (ids != MASK).all() and (batch.input_ids == MASK).any()  # read before they are masked


def test_masks_change_with_the_epoch_and_stay_in_every_evaluation():
    samples = fake_samples(16)
    first, second = (documents_in_rows(make_loader(samples).step(consumed)) for consumed in (0, 16))
    of_first, of_second = ({original(ids, labels): labels for _, ids, labels, *_ in rows} for rows in (first, second))
    assert of_first.keys() == of_second.keys() and len(of_first) == 16
    assert sum(of_first[ids] != labels for ids, labels in of_second.items()) > 8
    assert documents_in_rows(make_loader(samples).step(0)) == first


def test_the_seed_decides_the_order_and_a_resumed_run_goes_on_as_before():
    first, second = (documents_in_rows(make_loader(seed=seed).step(0)) for seed in (1, 2))
    assert [len(row[1]) for row in first] != [len(row[1]) for row in second]
    uninterrupted = list(iterate(make_loader(), 0, 8))
    resumed = list(iterate(make_loader(), 5 * 16, 3))
    for expected, batches in zip(uninterrupted[5:], resumed, strict=True):
        for one, other in zip(expected, batches, strict=True):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(one.arrays(), other.arrays(), strict=True))


def test_a_global_batch_that_does_not_divide_is_refused():
    for global_batch, nearest in {20: "16 or 24", 3: "nearest: 8", 0: "nearest: 8", -4: "nearest: 8"}.items():
        line = rf"--global-batch-size is {global_batch}:.*{nearest}"
        wrong_arguments(line, make_loader, world=4, global_batch=global_batch)


@pytest.mark.parametrize("wrong", [FAKE_VOCAB, -1])
def test_refuses_ids_outside_the_vocabulary_by_the_corpus_of_the_id(wrong):
    """The row of a batch and the number of its sample point to different corpora."""
    corpora = [fake_samples(16) for _ in range(3)]
    for number, corpus in enumerate(corpora):
        corpus.prefix = f"corpus{number}"
    corpora[1].ids[3][0] = wrong
    blend, tokenizer = Blend(corpora), fake_tokenizer(np.ones(FAKE_VOCAB, bool))
    indices, reader = np.array([40, 19, 0]), SampleReader(blend, tokenizer, Masker(tokenizer), SEQ)
    line = f"^corpus1: token ids .*{wrong}.*, but the vocabulary has 300 pieces"
    error = refused(line, reader.read, np.arange(3), np.zeros(3, int), indices, blend.lengths(indices))
    assert error.exit_code == 1


def test_the_words_of_a_blend_are_read_or_refused():
    for words, prefixes, weights in (
        (["7"], ("7",), None),
        (["A", "B", "C"], ("A", "B", "C"), None),
        (["0.1", "A", "1e3", "./2024"], ("A", "./2024"), (Fraction(1, 10), Fraction(1000))),
        (["2024_01", "news"], ("2024_01", "news"), None),
    ):
        assert loader.read_blend(words, "--data-path") == (prefixes, weights)
    for words, message in (
        ([], "--data-path is empty"),
        (["0.3", "A", "B"], "got 3 words of which 1 are numbers"),
        (["A", "0.3", "B", "0.7"], "expected a weight before every prefix or before none"),
        (["0", "A", "1", "B"], "weight 0 must be a number above 0"),
        (["1", "A", "-2", "B"], "weight -2 must be a number above 0"),
        (["nan", "A", "1", "B"], "weight nan"),
        (["inf", "A", "1", "B"], "weight inf"),
        (["A.bin", "A.idx"], "A.bin A.idx names A twice: give it once; a weight reads it more often"),
        (["1", "A", "2", "B", "1", "A"], "names A twice"),
    ):
        assert "--data-path" in str(wrong_arguments(message, loader.read_blend, words, "--data-path"))


@pytest.fixture
def worker_threads():
    """A function: the loader's threads that were started since the test began."""
    before = set(threading.enumerate())
    return lambda: [t for t in set(threading.enumerate()) - before if t.name.startswith("batch-loader")]


class CountingLoader:
    """Stands for a loader: notes which steps were asked for, and fails at one of them."""

    global_batch_size = 16

    def __init__(self, fails_at=None):
        self.asked = []
        self.fails_at = fails_at

    def step(self, consumed_samples, steps_done):
        self.asked.append(consumed_samples)
        if consumed_samples == self.fails_at:
            raise UserError("corpus: unreadable")
        return [consumed_samples]


def test_iterate_yields_every_step_in_order_and_stays_two_ahead(worker_threads):
    for steps, expected in ((5, [[32], [48], [64], [80], [96]]), (1, [[32]]), (0, [])):
        assert list(iterate(CountingLoader(), 32, steps)) == expected
    assert not worker_threads()
    counting = CountingLoader()
    stream = iterate(counting, 0, 1000)
    assert next(stream) == [0]
    stream.close()
    assert set(counting.asked) <= {0, 16, 32} and counting.asked[0] == 0
    assert not worker_threads()


def test_iterate_raises_the_thread_s_error_at_its_step(worker_threads):
    seen = []
    with pytest.raises(UserError, match="corpus: unreadable"):
        for batches in iterate(CountingLoader(fails_at=32), 0, 9):
            seen.append(batches)
    assert seen == [[0], [16]] and not worker_threads()


def corpora(*sizes):
    """Samples in memory: sample i of corpus c has c + 1 tokens, all of them 1000·c + i."""
    made = []
    for corpus, size in enumerate(sizes):
        made.append(FakeSamples(np.zeros(size), np.random.default_rng()))
        made[-1].prefix = f"corpus{corpus}"
        made[-1].ids = [np.full(corpus + 1, 1000 * corpus + index) for index in range(size)]
    return made


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=9))
@example([1, 7, 1, 1, 5, 7, 1, 3, 400, 23, 1, 5, 1])  # where Megatron's rule, the largest deficit first, strays by more
def test_every_prefix_of_the_pattern_is_within_one_sample_of_its_weights(counts):
    pattern = interleave(counts)
    given_so_far = np.cumsum(pattern[:, None] == np.arange(len(counts)), axis=0)  # [period, corpora]
    due = np.arange(1, len(pattern) + 1)[:, None] * np.array(counts)  # times the period, so that all is whole
    assert np.abs(given_so_far * sum(counts) - due).max() < sum(counts)
    assert np.bincount(pattern, minlength=len(counts)).tolist() == counts


def test_known_patterns():
    for counts, pattern in (([1], [0]), ([1, 1, 1], [0, 1, 2]), ([3, 1], [0, 0, 1, 0])):
        assert interleave(counts).tolist() == pattern


def test_weights_are_taken_as_written_and_those_that_need_a_long_pattern_are_rounded_so_that_none_vanishes():
    for written, counts in ((["0.25", "0.25", "0.5"], [1, 1, 2]), (["1e-1", "0.9"], [1, 9]), (["12"], [1])):
        assert whole_weights([Fraction(weight) for weight in written]) == counts
    counts = whole_weights([Fraction(10**12), Fraction(10**12 + 7), Fraction(1)])
    assert min(counts) == 1 and abs(sum(counts) - loader.MAX_PERIOD) <= 2
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


def test_corpora_have_orders_of_their_own_and_are_one_without_weights():
    blend = Blend(corpora(100, 100), [Fraction(1), Fraction(1)])
    indices = [index for _, index in visits(blend, np.arange(400))]
    first, second = indices[0:200:2], [index - 100 for index in indices[1:200:2]]
    assert sorted(first) == sorted(second) == list(range(100)) and first != second
    assert indices[200:400:2] != first
    blend, merged = Blend(corpora(20, 30)), Blend(corpora(50))
    assert visits(blend, np.arange(130)) == visits(merged, np.arange(130))
    assert blend.counts is None and len(blend) == 50


def test_samples_are_read_from_their_corpora_in_the_order_asked_for():
    blend = Blend(corpora(4, 2, 5))
    indices = np.array([10, 0, 4, 3, 5, 6])
    expected = [[2004] * 3, [0], [1000] * 2, [3], [1001] * 2, [2000] * 3]
    assert [ids.tolist() for ids in blend.tokens(indices)] == expected
    assert blend.lengths(indices.reshape(2, 3)).tolist() == [[5, 3, 4], [3, 4, 5]]
    assert [blend.source(index) for index in (3, 4, 10)] == ["corpus0", "corpus1", "corpus2"]


@given(st.data(), st.lists(st.integers(3, 40), min_size=1, max_size=60))
def test_rows_hold_every_sample_once_and_none_too_many(data, lengths):
    lengths = np.array(lengths)
    min_rows = data.draw(st.integers(1, len(lengths)))
    rows = pack_rows(lengths, 40, min_rows)
    assert sorted(sum(rows, [])) == list(range(len(lengths)))
    tokens = [int(lengths[row].sum()) for row in rows]
    assert len(rows) >= min_rows and all(rows) and max(tokens) <= 40
    assert tokens == sorted(tokens), "the dealing relies on short rows coming first"
    assert rows == pack_rows(lengths, 40, min_rows)


def test_known_layouts():
    assert pack_rows(np.array([3, 7, 5, 5, 4, 6]), 10) == [[1, 0], [2, 3], [5, 4]]
    # The 4 goes to the row that it fills, not to the first that has room.
    assert pack_rows(np.array([5, 6, 4]), 10) == [[0], [1, 2]]
    assert pack_rows(np.array([2, 2, 2, 2]), 10, min_rows=2) == [[0, 2], [1, 3]]
    assert pack_rows(np.array([2, 3, 9]), 10, min_rows=3) == [[0], [1], [2]]
    lengths = np.array([6, 3, 3, 4, 4, 4, 20])
    assert pack_rows(lengths, 24) == [[0, 4, 5, 1, 2], [6, 3]]
    assert pack_rows(lengths, 24, min_rows=3) == [[3], [0, 4, 5, 1, 2], [6]]
    assert pack_rows(lengths, 24, min_rows=4) == [[3], [0, 1], [4, 5, 2], [6]]


def test_joining_writes_the_documents_side_by_side():
    shape = 4, 8
    batch = Batch(np.full(shape, -7), np.full(shape, IGNORED_LABEL), *(np.zeros(shape, np.int64) for _ in range(4)))
    for row, n in enumerate((5, 3, 4, 6)):
        batch.input_ids[row, :n] = 100 * (row + 1) + np.arange(n)
        batch.labels[row, :n] = 1000 + batch.input_ids[row, :n]
        batch.document_ids[row, :n] = 1
    joined = join_samples(batch, np.array([2, 1, 1]), 10, pad_id=-7)
    assert joined.input_ids[0].tolist() == [100, 101, 102, 103, 104, 200, 201, 202, -7, -7]
    assert joined.labels[1].tolist() == [1300, 1301, 1302, 1303] + [IGNORED_LABEL] * 6
    assert all(field.dtype == np.int64 and field.shape == (3, 10) for field in joined.arrays())


def test_micro_batches_of_all_ranks_are_of_one_size_and_smaller():
    for world, micro in ((1, 8), (2, 8), (2, 32), (4, 4)):
        ranks = [pack_loader(micro=micro, world=world, rank=rank).step(0) for rank in range(world)]
        sizes = [[len(batch.input_ids) for batch in batches] for batches in ranks]
        everything = [size for at_once in zip(*sizes, strict=True) for size in at_once]  # shortest rows first
        assert everything == sorted(everything, reverse=True), "the parts of the shortest rows have one more"
        assert min(everything) >= 1 and max(everything) - min(everything) <= 1
        assert sum(everything) < 0.55 * 64 and max(everything) < micro


def test_rows_are_cut_to_their_longest_and_nearly_full():
    for made, seq_length in ((make_loader(), SEQ), (pack_loader(micro=2), PACKED_SEQ)):
        widths = [batch.input_ids.shape[1] for batch in made.step(0)]
        longest = [(batch.document_ids > 0).sum(axis=1).max() for batch in made.step(0)]
        assert widths == [min(seq_length, -(-length // 8) * 8) for length in longest] and len(set(widths)) > 1
    batches = pack_loader(micro=16).step(0)
    tokens = sum(int((batch.document_ids > 0).sum()) for batch in batches)
    assert tokens >= 0.95 * sum(batch.input_ids.size for batch in batches)
