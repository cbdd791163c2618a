"""Splits, the sample index (each token of each kept document exactly once) and the check of the tokenizer."""

import random
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ddrp.data.batches.samples import SampleIndex, sample_totals, split_documents
from megatron_ddrp.data.dataset.dataset_index import HEADER
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.verification import check_tokenizer
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset


class FakeDataset:
    """Documents in memory, each a list of sequences, each a list of ids."""

    prefix = "corpus"
    closing_tokens = 0

    def __init__(self, documents):
        self.sequences = [np.array(sequence, np.uint16) for document in documents for sequence in document]
        self.sizes = np.array([len(sequence) for sequence in self.sequences], np.int32)
        self.document_indices = np.cumsum([0, *(len(document) for document in documents)])
        self.num_documents = len(documents)

    def check(self):
        """Sound."""

    def get(self, index, offset, length):
        assert offset >= 0 and offset + length <= self.sizes[index]
        return self.sequences[index][offset : offset + length]


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
    with pytest.raises(UserError, match="expected up to three weights") as error:
        split_documents(10, split)
    assert error.value.exit_code == 2 and repr(split) in str(error.value)


def test_documents_give_consecutive_pieces_and_short_ones_are_dropped():
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


def test_a_sep_that_ends_a_document_is_in_no_sample():
    """It gave a sample of itself alone, with nothing to predict, behind each document that filled its rows."""
    dataset = FakeDataset(documents_of(11, 21, 8, 9, 0))
    dataset.closing_tokens = 1
    samples = SampleIndex(dataset, (0, 5), seq_length=12)
    found = [ids.tolist() for ids in samples.tokens(np.arange(len(samples)))]
    assert found == [list(range(10)), list(range(11, 21)), list(range(21, 31)), list(range(40, 48))]
    assert (samples.num_dropped_documents, samples.num_tokens) == (2, 38)


def test_a_range_of_documents():
    samples = SampleIndex(FakeDataset(documents_of(25, 7, 8, 20)), (2, 4), seq_length=100)
    assert [ids.tolist() for ids in samples.tokens(np.arange(len(samples)))] == [
        list(range(32, 40)),
        list(range(40, 60)),
    ]


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


def test_seq_length_must_hold_a_token():
    with pytest.raises(UserError, match="--seq-length is 2") as error:
        SampleIndex(FakeDataset(documents_of(20)), (0, 1), seq_length=2)
    assert error.value.exit_code == 2


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
    with pytest.raises(UserError, match=r"\.idx: .*: damaged; copy both files again"):
        SampleIndex(IndexedDataset(prefix), (0, 3), seq_length=22)


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
    unseen = refused = 0
    for _ in range(60):
        content = bytearray(whole)
        content[draw.randrange(34, len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            index = SampleIndex(IndexedDataset(dataset.prefix), (0, 1000), 32, totals)
            found = [tokens.tobytes() for tokens in index.tokens(np.arange(len(index)))]
        except UserError as error:
            refused += 1
            assert str(error).startswith(dataset.prefix) and "\n" not in str(error)
        else:
            unseen += found != expected  # a border between two documents of one block that moved by a little
    assert refused > 50 and unseen < 3
