"""Splits, the sample index (each token of each kept document exactly once), the check of the tokenizer, and packing.

Packing moves documents and changes none; rows are nearly full, never too long, and the same on every rank."""

import random
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.loader import Share
from megatron_ddrp.data.batches.samples import SampleIndex, join_samples, pack_rows, sample_totals, split_documents
from megatron_ddrp.data.dataset.dataset_index import HEADER
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.verification import check_tokenizer
from megatron_ddrp.errors import UserError
from tests.datasets import FakeSamples, fake_loader, write_dataset
from tests.refusals import refused, wrong_arguments


class FakeDataset:
    """Documents in memory, each a list of sequences, each a list of ids."""

    prefix = "corpus"
    closing_tokens = 0

    def __init__(self, documents):
        self.sequences = [np.array(sequence, np.uint16) for document in documents for sequence in document]
        self.sizes = np.array([len(sequence) for sequence in self.sequences], np.int32)
        self.document_indices = np.cumsum([0, *(len(document) for document in documents)])
        self.num_documents = len(documents)
        self.sample_totals = {}

    def check(self):
        """Sound."""

    def get(self, index, offset, length, count):
        ids = np.concatenate(self.sequences[index : index + count])
        assert offset >= 0 and offset + length <= len(ids)
        return ids[offset : offset + length]


def documents_of(*lengths):
    """One-sequence documents of these lengths, of ids that count up."""
    begins = np.cumsum([0, *lengths])
    return [[list(range(begin, begin + length))] for begin, length in zip(begins, lengths, strict=False)]


@pytest.mark.parametrize(
    ("num_documents", "split", "expected"),
    [
        (1000, "949,50,1", [(0, 949), (949, 999), (999, 1000)]),
        (1000, "98,2", [(0, 980), (980, 1000), (1000, 1000)]),
        (10, "100", [(0, 10), (10, 10), (10, 10)]),
        (10, "949,50,1", [(0, 8), (8, 9), (9, 10)]),
        (3, "949,50,1", [(0, 1), (1, 2), (2, 3)]),
        (2, "949,50,1", [(0, 1), (1, 2), (2, 2)]),
        (1, "949,50,1", [(0, 1), (1, 1), (1, 1)]),
        (0, "949,50,1", [(0, 0), (0, 0), (0, 0)]),
        (5, "0,1,0", [(0, 0), (0, 5), (5, 5)]),
        (3, "0.5, 0.5, 0.5", [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_split_documents(num_documents, split, expected):
    assert list(split_documents(num_documents, split).items()) == list(
        zip(("train", "valid", "test"), expected, strict=True)
    )


@given(st.integers(0, 10**7), st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any))
def test_split_covers_all_documents_in_order(num_documents, weights):
    ranges = split_documents(num_documents, ",".join(map(str, weights))).values()
    bounds = [bound for low, high in ranges for bound in (low, high)]
    assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] == num_documents
    for (low, high), weight in zip(ranges, [*weights, 0, 0], strict=False):
        assert abs((high - low) - weight / sum(weights) * num_documents) <= 2
        assert weight > 0 or high == low
        assert weight == 0 or high > low or num_documents < 3


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf,1", "1;2", "949,,1"])
def test_split_refuses_what_is_not_weights(split):
    error = wrong_arguments("expected up to three weights", split_documents, 10, split)
    assert repr(split) in str(error)


def test_documents_of_a_range_give_consecutive_pieces_and_short_ones_are_dropped():
    samples = SampleIndex(FakeDataset(documents_of(25, 7, 8, 0, 20, 10)), (0, 6), seq_length=12)
    assert (samples.num_documents, samples.num_dropped_documents, samples.num_tokens) == (6, 2, 63)
    assert [ids.tolist() for ids in samples.tokens(np.arange(len(samples)))] == [
        list(range(0, 10)),
        list(range(10, 20)),
        list(range(20, 25)),
        list(range(32, 40)),
        list(range(40, 50)),
        list(range(50, 60)),
        list(range(60, 70)),
    ]
    assert samples.lengths([[0, 2], [3, 6]]).tolist() == [[12, 7], [10, 12]]
    assert samples.prefix == "corpus"
    for index in (-1, 7):
        with pytest.raises(IndexError):
            samples.tokens([index])
    samples = SampleIndex(FakeDataset(documents_of(25, 7, 8, 20)), (2, 4), seq_length=100)
    assert [ids.tolist() for ids in samples.tokens(np.arange(len(samples)))] == [
        list(range(32, 40)),
        list(range(40, 60)),
    ]
    assert refused("--seq-length is 2", SampleIndex, FakeDataset(documents_of(20)), (0, 1), seq_length=2).exit_code == 2


def test_a_sep_that_ends_a_document_is_in_no_sample():
    """It gave a sample of itself alone, with nothing to predict, behind each document that filled its rows."""
    dataset = FakeDataset(documents_of(11, 21, 8, 9, 0))
    dataset.closing_tokens = 1
    samples = SampleIndex(dataset, (0, 5), seq_length=12)
    found = [ids.tolist() for ids in samples.tokens(np.arange(len(samples)))]
    assert found == [list(range(10)), list(range(11, 21)), list(range(21, 31)), list(range(40, 48))]
    assert (samples.num_dropped_documents, samples.num_tokens) == (2, 38)


corpora = st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=1, max_size=8)


@settings(deadline=None)
@given(corpora, st.integers(3, 20), st.data())
def test_every_token_of_the_kept_documents_comes_once_and_in_order(shape, seq_length, data):
    counter = iter(range(10**6))
    documents = [[[next(counter) for _ in range(length)] for length in document] for document in shape]
    low = data.draw(st.integers(0, len(documents)))
    high = data.draw(st.integers(low, len(documents)))
    texts = [sum(document, []) for document in documents[low:high]]
    kept = [text for text in texts if len(text) >= 8]
    dataset = FakeDataset(documents)
    if not kept:
        with pytest.raises(UserError, match=r"no sample in .*(have fewer than 8 tokens|range is empty)") as error:
            SampleIndex(dataset, (low, high), seq_length)
        assert error.value.exit_code == 1
        return
    samples = SampleIndex(dataset, (low, high), seq_length)
    pieces = [ids.tolist() for ids in samples.tokens(np.arange(len(samples)))]
    cut = seq_length - 2
    assert pieces == [text[begin : begin + cut] for text in kept for begin in range(0, len(text), cut)]
    assert samples.lengths(np.arange(len(samples))).tolist() == [len(piece) + 2 for piece in pieces]
    assert samples.num_dropped_documents == len(texts) - len(kept)


def test_memory_is_small_for_many_documents():
    dataset = SimpleNamespace(
        prefix="corpus",
        closing_tokens=0,
        sample_totals={},
        sizes=np.full(200_000, 700, np.int32),
        document_indices=np.arange(200_001),
        num_documents=200_000,
        check=lambda: None,
    )
    tracemalloc.start()
    samples = SampleIndex(dataset, (0, 200_000), 128)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == 200_000 * 6
    assert kept < 200_000, "3/8 byte a document, nothing a sample"


@pytest.fixture
def prefix(tmp_path):
    manifest = {"tokenizer": {"type": "SentencePiece", "fingerprint": "abc", "vocab_size": 100}}
    write_dataset(tmp_path / "corpus_text_document", documents_of(30, 9, 3), manifest=manifest)
    return tmp_path / "corpus_text_document"


def test_samples_of_a_dataset_on_disk(prefix):
    samples = SampleIndex(IndexedDataset(prefix), (0, 3), seq_length=22)
    assert [ids.tolist() for ids in samples.tokens([0, 1, 2])] == [[*range(20)], [*range(20, 30)], [*range(30, 39)]]


@pytest.mark.parametrize(("place", "number"), [(0, -30), (12 + 8, 13), (12 + 24 + 8, 3), (12 + 24 + 8, 10**9)])
def test_a_damaged_index_gives_no_samples(prefix, place, number):
    """A size, a byte offset, and a document border that crosses the next one or points far outside."""
    path = prefix.with_suffix(".idx")
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, HEADER.size + place, number)
    path.write_bytes(data)
    refused(r"\.idx: .*: damaged; copy both files again", SampleIndex, IndexedDataset(prefix), (0, 3), seq_length=22)


def test_check_tokenizer(prefix):
    other = SimpleNamespace(tokenizer_type="HuggingFace", fingerprint="xyz", vocab_size=50)
    check_tokenizer(prefix, SimpleNamespace(tokenizer_type="SentencePiece", fingerprint="abc", vocab_size=100))
    with pytest.raises(UserError) as error:
        check_tokenizer(prefix, other)
    assert error.value.exit_code == 1
    for part in ("corpus_text_document.json", "SentencePiece abc of 100 pieces", "HuggingFace xyz of 50 pieces"):
        assert part in str(error.value)
    prefix.with_suffix(".json").unlink()
    check_tokenizer(prefix, other)


def test_an_index_damaged_behind_the_totals_is_refused_where_it_is_used(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 60, 1000)
    dataset = write_dataset(tmp_path / "corpus", [[np.arange(length)] for length in lengths.tolist()])
    totals = sample_totals(dataset, 32)
    expected = [tokens.tobytes() for tokens in SampleIndex(dataset, (0, 1000), 32).tokens(np.arange(totals[-1, 0]))]
    path = Path(f"{dataset.prefix}.idx")
    whole, draw = path.read_bytes(), random.Random(0)
    unseen = num_refused = 0
    for _ in range(60):
        content = bytearray(whole)
        content[draw.randrange(34, len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            harmed = IndexedDataset(dataset.prefix)
            harmed.sample_totals[32] = totals
            index = SampleIndex(harmed, (0, 1000), 32)
            found = [tokens.tobytes() for tokens in index.tokens(np.arange(len(index)))]
        except UserError as error:
            num_refused += 1
            assert str(error).startswith(dataset.prefix) and "\n" not in str(error)
        else:
            unseen += found != expected  # a border between two documents of one block that moved by a little
    assert num_refused > 50 and unseen < 3


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


def documents_in_rows(batches):
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
    expected = documents_in_rows(make_loader(packing=False).step(consumed))
    assert [document[0] for document in expected] == list(range(consumed, consumed + 64))
    for world in (1, 2, 4):
        for micro in (1, 4, 16):
            ranks = [make_loader(micro=micro, world=world, rank=rank).step(consumed) for rank in range(world)]
            assert all(len(batches) == 64 // (micro * world) for batches in ranks)
            assert documents_in_rows(sum(ranks, [])) == expected


def test_micro_batches_of_all_ranks_are_of_one_size_and_smaller():
    for world, micro in ((1, 8), (2, 8), (2, 32), (4, 4)):
        ranks = [make_loader(micro=micro, world=world, rank=rank).step(0) for rank in range(world)]
        sizes = [[len(batch.input_ids) for batch in batches] for batches in ranks]
        everything = [size for at_once in zip(*sizes, strict=True) for size in at_once]  # shortest rows first
        assert everything == sorted(everything, reverse=True), "the parts of the shortest rows have one more"
        assert min(everything) >= 1 and max(everything) - min(everything) <= 1
        assert sum(everything) < 0.55 * 64 and max(everything) < micro


def test_rows_are_cut_to_their_longest_nearly_full_and_the_same_again():
    widths = [batch.input_ids.shape[1] for batch in make_loader(micro=2).step(0)]
    for batch, width in zip(make_loader(micro=2).step(0), widths, strict=True):
        longest = (batch.document_ids > 0).sum(axis=1).max()
        assert width == min(SEQ, -(-longest // 8) * 8)
    assert len(set(widths)) > 1
    batches = make_loader(micro=16).step(0)
    tokens = sum(int((batch.document_ids > 0).sum()) for batch in batches)
    assert tokens >= 0.95 * sum(batch.input_ids.size for batch in batches)
    first, again = make_loader().step(128), make_loader().step(128)
    for one, other in zip(first, again, strict=True):
        assert all(
            a.tobytes() == b.tobytes() and a.flags.c_contiguous
            for a, b in zip(one.arrays(), other.arrays(), strict=True)
        )
