"""Packing moves documents and changes none; rows are nearly full, never too long, and the same on every rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.loader import Share
from megatron_ddrp.data.batches.samples import join_samples, pack_rows
from tests.datasets import FakeSamples, fake_loader

PAD, UNK, CLS, SEP, MASK = SPECIAL = range(5)
SEQ = 64


def wikipedia_lengths(count, row_length, seed=0):
    """Log-normal document lengths, cut into pieces of at most a row: half of them short, a tenth full rows."""
    documents = np.random.default_rng(seed).lognormal(5.3, 1.1, count).astype(int) + 8
    pieces = [piece for n in documents for piece in [row_length] * (n // row_length) + [n % row_length]]
    return np.array([n for n in pieces if n >= 10][:count])


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


@given(st.lists(st.integers(3, 40), min_size=1, max_size=60))
def test_best_fit_leaves_no_two_rows_that_would_fit_into_one(lengths):
    lengths = np.array(lengths)
    tokens = [int(lengths[row].sum()) for row in pack_rows(lengths, 40)]
    assert all(one + two > 40 for one, two in zip(tokens, tokens[1:], strict=False))


def test_known_layouts():
    assert pack_rows(np.array([3, 7, 5, 5, 4, 6]), 10) == [[1, 0], [2, 3], [5, 4]]
    # The 4 goes to the row that it fills, not to the first that has room.
    assert pack_rows(np.array([5, 6, 4]), 10) == [[0], [1, 2]]
    assert pack_rows(np.array([2, 2, 2, 2]), 10, min_rows=2) == [[0, 2], [1, 3]]
    assert pack_rows(np.array([2, 3, 9]), 10, min_rows=3) == [[0], [1], [2]]


def test_where_more_rows_are_needed_the_fullest_are_halved():
    lengths = np.array([6, 3, 3, 4, 4, 4, 20])
    assert pack_rows(lengths, 24) == [[0, 4, 5, 1, 2], [6, 3]]
    assert pack_rows(lengths, 24, min_rows=3) == [[3], [0, 4, 5, 1, 2], [6]]
    assert pack_rows(lengths, 24, min_rows=4) == [[3], [0, 1], [4, 5, 2], [6]]


@pytest.mark.parametrize("seed", range(4))
def test_short_documents_fill_rows(seed):
    lengths = wikipedia_lengths(256, 512, seed)
    rows = pack_rows(lengths, 512)
    assert lengths.sum() / (512 * len(lengths)) < 0.62, "nothing to pack"
    assert len(rows) <= np.ceil(lengths.sum() / 512) * 1.02
    assert lengths.sum() / (512 * len(rows)) >= 0.95


def sample(length, number):
    """The fields of one sample, `[length]` each, all different."""
    ids = 100 * number + np.arange(length)
    return {"input_ids": ids, "labels": ids + 1000, "position_ids": np.arange(length), "sequence_ids": number}


def one_a_row(samples, width, pad_id):
    shape = len(samples), width
    batch = Batch(np.full(shape, pad_id), np.full(shape, IGNORED_LABEL), *(np.zeros(shape, np.int64) for _ in range(4)))
    for row, fields in enumerate(samples):
        n = len(fields["input_ids"])
        batch.document_ids[row, :n] = 1
        for name, values in fields.items():
            getattr(batch, name)[row, :n] = values
    return batch


def test_joining_writes_the_documents_side_by_side():
    samples = [sample(5, 1), sample(3, 2), sample(4, 3), sample(6, 4)]
    joined = join_samples(one_a_row(samples, 8, pad_id=-7), np.array([2, 1, 1]), 10, pad_id=-7)
    assert joined.document_ids.tolist() == [[1] * 5 + [2] * 3 + [0] * 2, [1] * 4 + [0] * 6, [1] * 6 + [0] * 4]
    assert joined.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]
    assert joined.sequence_ids[0].tolist() == [1] * 5 + [2] * 3 + [0] * 2
    assert joined.input_ids[0].tolist() == [100, 101, 102, 103, 104, 200, 201, 202, -7, -7]
    assert joined.labels[1].tolist() == [1300, 1301, 1302, 1303] + [IGNORED_LABEL] * 6
    assert not joined.segment_ids.any()
    assert all(field.dtype == np.int64 and field.shape == (3, 10) for field in joined.arrays())


def make_loader(*, micro=8, world=1, rank=0, packing=True):
    """A loader of 200 samples, many of them short."""
    rng = np.random.default_rng(0)
    samples = FakeSamples(np.minimum(rng.geometric(0.06, 200), SEQ - 2), rng)
    return fake_loader(samples, Share(64, micro, rank, world), SEQ, packing=packing)


def documents_of(batches):
    """Sorted (sequence id, positions, input ids, labels, segments) of the documents in all rows; checks the padding."""
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
                fields = row.position_ids, row.input_ids, row.labels, row.segment_ids
                documents.append((name, *(tuple(field[places].tolist()) for field in fields)))
    return sorted(documents)


@pytest.mark.parametrize("consumed", [0, 64, 192])  # the last global batch spans two epochs
def test_packed_batches_hold_the_documents_of_unpacked_ones(consumed):
    expected = documents_of(make_loader(packing=False).step(consumed))
    assert [document[0] for document in expected] == list(range(consumed, consumed + 64))
    for world in (1, 2, 4):
        for micro in (1, 4, 16):
            ranks = [make_loader(micro=micro, world=world, rank=rank).step(consumed) for rank in range(world)]
            assert all(len(batches) == 64 // (micro * world) for batches in ranks)
            assert documents_of(sum(ranks, [])) == expected


def test_micro_batches_of_all_ranks_are_of_one_size_and_smaller():
    for world, micro in ((1, 8), (2, 8), (2, 32), (4, 4)):
        ranks = [make_loader(micro=micro, world=world, rank=rank).step(0) for rank in range(world)]
        sizes = [[len(batch.input_ids) for batch in batches] for batches in ranks]
        everything = [size for at_once in zip(*sizes, strict=True) for size in at_once]  # shortest rows first
        assert everything == sorted(everything, reverse=True), "the parts of the shortest rows have one more"
        assert min(everything) >= 1 and max(everything) - min(everything) <= 1
        assert sum(everything) < 0.55 * 64 and max(everything) < micro


def test_rows_are_cut_to_their_longest_and_never_exceed_the_sequence_length():
    widths = [batch.input_ids.shape[1] for batch in make_loader(micro=2).step(0)]
    for batch, width in zip(make_loader(micro=2).step(0), widths, strict=True):
        longest = (batch.document_ids > 0).sum(axis=1).max()
        assert width == min(SEQ, -(-longest // 8) * 8)
    assert len(set(widths)) > 1


def test_rows_are_nearly_full():
    batches = make_loader(micro=16).step(0)
    tokens = sum(int((batch.document_ids > 0).sum()) for batch in batches)
    assert tokens >= 0.95 * sum(batch.input_ids.size for batch in batches)


def test_the_same_step_gives_the_same_rows_again():
    first, again = make_loader().step(128), make_loader().step(128)
    for one, other in zip(first, again, strict=True):
        assert all(
            a.tobytes() == b.tobytes() and a.flags.c_contiguous
            for a, b in zip(one.arrays(), other.arrays(), strict=True)
        )
