"""Indexed datasets: round trips, Megatron's own files byte for byte, and one clear line for every kind of damage.

Splits, and the sample index: each token of each kept document exactly once."""

import errno
import itertools
import json
import pickle
import re
import shutil
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.atomic import SUM
from megatron_ddrp.data.batches.samples import SampleIndex, document_lengths, split_documents
from megatron_ddrp.data.dataset import dataset_index, indexed_dataset
from megatron_ddrp.data.dataset.dataset_index import HEADER, token_dtype
from megatron_ddrp.data.dataset.indexed_dataset import COMPLETE, UnfinishedDatasets, finish_left, read_manifest
from megatron_ddrp.data.dataset.merging import merge
from megatron_ddrp.data.dataset.verification import check_sums, first_documents, open_dataset, verify
from tests.datasets import shared_asset, write_dataset
from tests.refusals import refused, wrong_arguments


def writing(prefix):
    return UnfinishedDatasets(f"{prefix}.unfinished", [str(prefix)], np.dtype(np.uint16))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65_535), max_size=9), max_size=3), max_size=5),
    dtype=st.sampled_from([np.uint16, np.int32]),
)
def test_round_trip(tmp_path, documents, dtype):
    dataset = write_dataset(tmp_path / "a", documents, dtype)
    sequences = [sequence for document in documents for sequence in document]
    assert [ids.tolist() for ids in dataset] == sequences
    assert len(dataset) == len(sequences) and dataset.num_tokens == sum(map(len, sequences))
    assert dataset.dtype == dtype and dataset.sizes.dtype == np.int32
    assert dataset.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()


def append(output, ids, sizes, lengths):
    output.append(0, np.array(ids, np.uint16).tobytes(), np.array(sizes), np.array(lengths))


def test_the_type_of_ids_follows_the_vocabulary():
    assert token_dtype(65_499) == np.uint16 and token_dtype(65_500) == np.int32


def test_slices_are_read_only_views_and_pickle_keeps_the_prefix(tmp_path):
    dataset = write_dataset(tmp_path / "a", [[[5, 6, 7, 8]], [[9]]], manifest={"tokens": 5})
    assert [ids.tolist() for ids in (dataset.get(0, 1, 2), dataset.get(0, 3), dataset[-1])] == [[6, 7], [8], [9]]
    assert not dataset[0].flags.owndata and not dataset[0].flags.writeable
    for offset, length in ((0, 5), (-1, 1), (5, 0)):
        with pytest.raises(IndexError, match="sequence 0, which has 4"):
            dataset.get(0, offset, length)
    with pytest.raises(IndexError):
        dataset[2]
    again = pickle.loads(pickle.dumps(dataset))
    assert again[0].tolist() == [5, 6, 7, 8] and again.manifest["tokens"] == 5
    assert IndexedDataset(f"{tmp_path}/a.bin").prefix == f"{tmp_path}/a"


@pytest.mark.parametrize("name", ["test_text_document", "fim_text_document", "test_samples_mmap_text_sentence"])
def test_megatron_files_survive_read_and_rewrite_byte_for_byte(tmp_path, name):
    for suffix in (".bin", ".idx"):
        (tmp_path / (name + suffix)).write_bytes(shared_asset(f"indexed/{name}{suffix}"))
    assert list(verify(tmp_path / name)) == []
    dataset = IndexedDataset(tmp_path / name)
    bounds = dataset.document_indices.tolist()
    documents = [[dataset[i] for i in range(*span)] for span in zip(bounds, bounds[1:], strict=False)]
    write_dataset(tmp_path / "again", documents, dataset.dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / ("again" + suffix)).read_bytes() == (tmp_path / (name + suffix)).read_bytes()


def interrupt(path, *arguments, **settings):
    """Open a file, or fail as Ctrl-C does at the third of a dataset."""
    if path.name == "0.documents":
        raise KeyboardInterrupt
    return open(path, *arguments, **settings)


def test_failure_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    write_dataset(tmp_path / "a", [[[1, 2]]], manifest={"tokens": 2})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), writing(tmp_path / "a") as output:
        append(output, [3], [1], [1])
        raise RuntimeError
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(indexed_dataset, "open", interrupt, raising=False)
        with writing(tmp_path / "a"):
            pytest.fail("not every file was opened")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_dataset(tmp_path / "a", [[[3]]])  # without a manifest: the old one must not stay
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    (tmp_path / "a.unfinished").mkdir()
    (tmp_path / "a.unfinished" / "0.ids").write_bytes(b"left by a killed run")
    with writing(tmp_path / "a") as output:
        refused("another process is writing", writing(tmp_path / "a").__enter__)
        append(output, [7], [1], [1])
        output.publish([None])
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("kind", ["a file", "a link", "a link in place of the folder"])
def test_files_of_others_in_the_folder_are_not_touched(tmp_path, kind):
    folder, mine = tmp_path / "a.unfinished", tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").write_text("mine")
    if kind == "a link in place of the folder":
        folder.symlink_to(mine)
    elif kind == "a link":
        folder.mkdir()
        (folder / "lock").symlink_to(mine / "notes")
    else:
        shutil.copytree(mine, folder)
    before = sorted(tmp_path.rglob("*"))
    line = "was not written by this command, .*: move it away, or choose another prefix"
    refused(line, writing(tmp_path / "a").__enter__)
    assert sorted(tmp_path.rglob("*")) == before and (mine / "notes").read_text() == "mine"


def left_by_a_kill(folder, monkeypatch, function):
    """Merge a dataset `b` into `a`, end where the command calls a function, and return the folder that is left."""
    write_dataset(folder / "b", [[[7]]])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(indexed_dataset, function, Mock(side_effect=KeyboardInterrupt))
        merge(folder / "a", [str(folder / "b")])
    return folder / "a.unfinished"


def test_complete_files_that_a_kill_left_get_their_own_names_whatever_command_comes_next(tmp_path, monkeypatch):
    write_dataset(tmp_path / "c", [[[3]]])
    left_by_a_kill(tmp_path, monkeypatch, "_give_names").rename(tmp_path / "moved.unfinished")
    assert not finish_left(str(tmp_path / "moved.unfinished"), [str(tmp_path / "c")], {})
    assert [IndexedDataset(tmp_path / name)[0].tolist() for name in "ac"] == [[7], [3]]
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_dataset_that_was_deleted_after_a_kill_is_written_again(tmp_path, monkeypatch):
    """The kill came after the last renaming, so what is left says that all is done."""
    left_by_a_kill(tmp_path, monkeypatch, "_remove")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a{suffix}").unlink()
    assert merge(tmp_path / "a", [str(tmp_path / "b")])[0].tolist() == [7]


def test_complete_files_stay_if_their_mark_cannot_be_read(tmp_path, monkeypatch):
    """One failing read must not cost hours of work."""
    mark = left_by_a_kill(tmp_path, monkeypatch, "_give_names") / COMPLETE
    again, line = (tmp_path / "a", [f"{tmp_path}/b"]), f"{COMPLETE} cannot be read: .*; try again, or remove"
    files, content = sorted(mark.parent.iterdir()), mark.read_bytes()
    mark.write_bytes(content[:-3])
    refused(line, merge, *again)
    mark.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        refused(line, merge, *again)
    assert sorted(mark.parent.iterdir()) == files and not (tmp_path / "a.bin").exists()
    assert merge(*again)[0].tolist() == [7] and not mark.parent.exists()


def test_a_manifest_is_read_as_it_was_written_and_refused_if_edited(tmp_path):
    manifest = {"tokens": 2, "inputs": [("a.txt", 7)], "tokenizer": {"vocab_size": 9}}
    write_dataset(tmp_path / "p", [[[1, 2]]], manifest=manifest)
    found, path = read_manifest(tmp_path / "p"), tmp_path / "p.json"
    assert (found["tokens"], found["inputs"]) == (2, [["a.txt", 7]]) and SUM not in found
    written = json.loads(path.read_text(encoding="utf-8"))
    for change in ({"tokens": 3}, {"inputs": []}, {"tokenizer": {}}, {"more": 1}, {SUM: 5}):
        path.write_text(json.dumps(written | change), encoding="utf-8")
        refused("damaged or edited", read_manifest, tmp_path / "p")
    del written[SUM]
    path.write_text(json.dumps(written | {"tokens": 3}), encoding="utf-8")
    assert read_manifest(tmp_path / "p")["tokens"] == 3


VOCAB_SIZE = 1000
TOKENIZER = SimpleNamespace(tokenizer_type="BertWordPieceLowerCase", fingerprint="f" * 64, vocab_size=VOCAB_SIZE)
MANIFEST = {"tokenizer": {"type": "BertWordPieceLowerCase", "fingerprint": "f" * 64, "vocab_size": VOCAB_SIZE}}


def write(prefix, documents, dtype=np.uint16, manifest=None):
    return write_dataset(prefix, documents, dtype, manifest).prefix


def patch(path, position, form, value):
    """Overwrite one number of a file."""
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, position, value)
    path.write_bytes(data)


@pytest.fixture
def small(tmp_path):
    """Three documents of four sequences with 3, 1, 0 and 2 tokens."""
    return write(tmp_path / "a", [[[1, 2, 3], [4]], [[]], [[5, 6]]])


def read_everything(prefix):
    """Read every token, document length and beginning of a dataset."""
    dataset = IndexedDataset(prefix)
    assert [len(ids) for ids in dataset] == dataset.sizes.tolist()
    assert all(lengths.min() >= 0 for lengths in document_lengths(dataset))
    assert len(list(first_documents(dataset, 99, 5, None))) == dataset.num_documents


SIZES, POINTERS, DOCUMENTS = HEADER.size, HEADER.size + 4 * 4, HEADER.size + 4 * 12


@pytest.mark.parametrize(
    ("suffix", "position", "form", "value", "findings"),
    [
        ("idx", 0, "<B", 65, [r"a\.idx: starts with b'AMIDIDX.*expected b'MMIDIDX"]),
        ("idx", 9, "<Q", 2, [r"a\.idx: format version 2, expected 1"]),
        ("idx", 17, "<B", 6, [r"a\.idx: type code 6, expected one of 1 \(uint8\)"]),
        ("idx", 17, "<B", 4, [r"sequence 1 begins at byte 6, but sequence 0 ends at byte 12", "sequence 2 begins",
                              r"a\.bin: 12 bytes, expected 16 as its .idx says", "token 0 .* is id 131073, expected",
                              "token 1 .* is id 262147", "token 2 .* is id 393221"]),
        ("idx", 18, "<Q", 5, [r"a\.idx: 114 bytes, expected 126 for 5 sequences and 4 document indices"]),
        ("idx", 18, "<Q", 2**40, [r"a\.idx: 114 bytes, expected 13194139533378"]),
        ("idx", SIZES, "<i", 4, [r"sequence 1 begins at byte 6, but sequence 0 ends at byte 8"]),
        ("idx", SIZES + 8, "<i", -1, [r"sequence 2 has -1 tokens", "sequence 3 begins at byte 8, .* 2 ends at byte 6"]),
        ("idx", SIZES + 12, "<i", 3, [r"a\.bin: 12 bytes, expected 14 as its .idx says"]),
        ("idx", POINTERS, "<q", 2, [r"sequence 0 begins at byte 2, expected 0", "sequence 0 ends at byte 8"]),
        ("idx", POINTERS + 8, "<q", 7, [r"sequence 1 begins at byte 7.* ends at byte 6", "sequence 1 ends at byte 9"]),
        ("idx", DOCUMENTS, "<q", 1, [r"document indices run over \(1, 4\), expected \(0, 4\)"]),
        ("idx", DOCUMENTS + 8, "<q", 9, [r"document 1 begins with sequence 9, but ends before sequence 3"]),
        ("bin", 6, "<H", 1000, [r"a\.bin: token 3 \(of sequence 1\) is id 1000, expected 0 to 999"]),
    ],
)  # fmt: skip
def test_damage_is_named_with_its_place_and_no_damaged_index_is_read(small, suffix, position, form, value, findings):
    assert list(verify(small, TOKENIZER)) == []
    patch(Path(f"{small}.{suffix}"), position, form, value)
    found = list(verify(small, TOKENIZER))
    assert len(found) == len(findings), found
    for line, expected in zip(found, findings, strict=True):
        assert re.search(expected, line) and "\n" not in line
        if expected.startswith("a") and "token" not in expected:
            assert "again" in str(refused(expected, IndexedDataset, small))
    if suffix == "idx":
        refused(rf"^{small}\.\w+: .* again", read_everything, small)


def test_what_the_manifest_knows(tmp_path):
    manifest = {**MANIFEST, "documents": 1, "sequences": 1, "tokens": 3, "dtype": "uint16"}
    prefix = write(tmp_path / "a", [[[1, 2, 3]]], manifest=manifest)
    assert list(verify(prefix, TOKENIZER)) == list(verify(prefix)) == []
    other = SimpleNamespace(tokenizer_type="HuggingFace", fingerprint="e" * 64, vocab_size=3)
    fingerprint, foreign = verify(prefix, other)
    made = "made by tokenizer BertWordPieceLowerCase ffffffffffff of 1000 pieces, but the tokenizer given is"
    assert made in fingerprint and "token 2 (of sequence 0) is id 3, expected 0 to 2" in foreign
    patch(tmp_path / "a.bin", 2, "<H", 7)  # another id of the vocabulary: only the hash tells
    [finding] = verify(prefix, TOKENIZER)
    assert f"{prefix}.bin: SHA-256" in finding and "changed since" in finding
    write(tmp_path / "b", [[[1, 2], [9]], [[4]]])
    for suffix in ("bin", "idx"):
        (tmp_path / f"b.{suffix}").replace(tmp_path / f"a.{suffix}")
    found = "\n".join(verify(prefix))
    for expected in ("documents 1, but the index says 2", "sequences 1, but the index says 3", "tokens 3, but"):
        assert f"{prefix}.json: {expected}" in found
    for text in ("[]", "{", '{"tokenizer": 3}'):
        (tmp_path / "a.json").write_text(text)
        assert "not a dataset manifest" in next(verify(prefix))


def test_sums_are_compared_with_the_manifest(tmp_path):
    prefix = write(tmp_path / "a", [[[1, 2, 3]], [[4]]], manifest=MANIFEST)
    read = []
    check_sums(prefix, read.append)
    assert sum(read) == sum((tmp_path / f"a.{suffix}").stat().st_size for suffix in ("bin", "idx"))
    for suffix, position in (("bin", 2), ("idx", DOCUMENTS - 1)):
        path = tmp_path / f"a.{suffix}"
        whole = path.read_bytes()
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        line = rf"^{path}: SHA-256 .* {prefix}.json says .* megatron-ddrp dataset verify tells more$"
        assert refused(line, check_sums, prefix).exit_code == 1
        path.unlink()
        refused(f"^{path}: No such file", check_sums, prefix)
        path.write_bytes(whole)
    for manifest in (None, "{}", '{"files": {"bin": {"sha256": "0"}}}', '{"files": [1]}'):
        (tmp_path / "a.json").unlink(missing_ok=True)
        if manifest is not None:
            (tmp_path / "a.json").write_text(manifest)
        wrong_arguments(f"--verify-data needs the sums in {prefix}.json, but ", check_sums, prefix)


def test_many_faults_are_counted_not_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_index, "CHUNK", 7)
    monkeypatch.setattr(indexed_dataset, "CHUNK_TOKENS", 5)
    prefix, read = write(tmp_path / "a", [[[1, VOCAB_SIZE]] for _ in range(40)]), []
    found = list(verify(prefix, TOKENIZER, read.append))
    assert len(found) == 11 and "token 19 (of sequence 9) is id 1000" in found[9]
    assert found[10].endswith("30 more ids outside the vocabulary, 40 in all") and sum(read) == 160
    patch(tmp_path / "a.idx", HEADER.size + 4 * 13, "<i", 5)  # size of the last sequence of the second chunk
    assert "sequence 14 begins at byte 56, but sequence 13 ends at byte 62" in next(verify(prefix))


def test_ids_without_a_manifest_are_looked_at_in_the_beginning_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "CHUNK_TOKENS", 4)
    late = write(tmp_path / "late", [[[1, 2, 3]], [[4, VOCAB_SIZE]]])
    assert open_dataset(late, TOKENIZER).num_tokens == 5
    assert open_dataset(write(tmp_path / "empty", []), TOKENIZER).num_tokens == 0
    early = write(tmp_path / "early", [[[1, VOCAB_SIZE]]])
    refused("early: token ids from 1 to 1000, but the vocabulary has 1000 pieces; give", open_dataset, early, TOKENIZER)


def test_opening_reads_a_handful_of_bytes_however_many_documents(tmp_path):
    """A sparse index of ten million empty sequences, so that the test itself writes nothing."""
    count = 10**7
    with open(tmp_path / "a.idx", "wb") as stream:
        stream.write(HEADER.pack(b"MMIDIDX\0\0", 1, 8, count, count + 1))
        stream.seek(12 * count + 8 * count, 1)
        stream.write(struct.pack("<q", count))
    (tmp_path / "a.bin").touch()
    tracemalloc.start()
    before = int(Path("/proc/self/statm").read_text().split()[1])
    dataset = IndexedDataset(tmp_path / "a")
    assert len(dataset[count - 1]) == 0 and dataset.num_documents == count and dataset.num_tokens == 0
    grown, (_, peak) = int(Path("/proc/self/statm").read_text().split()[1]) - before, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20 and grown * 4096 < 16 << 20  # the index has 200 MB


def test_a_truncated_or_missing_file_is_one_finding_each(small):
    index, tokens = Path(f"{small}.idx"), Path(f"{small}.bin")
    Path(f"{small}.json").write_text(json.dumps({"files": {"bin": {"sha256": "0"}}}))
    data = index.read_bytes()
    index.write_bytes(b"")
    of_header, of_tokens = verify(small)
    assert "a.idx: 0 bytes, expected at least the 34" in of_header and "a.bin: SHA-256" in of_tokens
    index.write_bytes(data)
    tokens.unlink()
    [missing] = verify(small)
    assert "a.bin: No such file" in missing
    refused(r"a.bin: No such file", IndexedDataset, small)
    index.unlink()
    refused(r"a\.idx: No such file", list, verify(small))
    refused(r"a\.idx: No such file", IndexedDataset, small)


def documents_of(*lengths):
    """One-sequence documents of these lengths, of ids that count up."""
    begins = np.cumsum([0, *lengths])
    return [[list(range(begin, begin + length))] for begin, length in zip(begins, lengths, strict=False)]


def test_split_documents_and_what_is_no_weights():
    for num_documents, split, *expected in (
        (1000, "949,50,1", (0, 949), (949, 999), (999, 1000)),
        (1000, "98,2", (0, 980), (980, 1000), (1000, 1000)),
        (10, "949,50,1", (0, 8), (8, 9), (9, 10)),
        (2, "949,50,1", (0, 1), (1, 2), (2, 2)),
        (3, "0.5, 0.5, 0.5", (0, 1), (1, 2), (2, 3)),
    ):
        ranges = list(zip(("train", "valid", "test"), expected, strict=True))
        assert list(split_documents(num_documents, split).items()) == ranges, (num_documents, split)
    for split in ("", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf,1", "1;2", "949,,1"):
        assert repr(split) in str(wrong_arguments("expected up to three weights", split_documents, 10, split))


@given(st.integers(0, 10**7), st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any))
def test_split_covers_all_documents_in_order(num_documents, weights):
    ranges = split_documents(num_documents, ",".join(map(str, weights))).values()
    bounds = [bound for low, high in ranges for bound in (low, high)]
    assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] == num_documents
    for (low, high), weight in zip(ranges, [*weights, 0, 0], strict=False):
        assert abs((high - low) - weight / sum(weights) * num_documents) <= 2
        assert weight > 0 or high == low
        assert weight == 0 or high > low or num_documents < 3


def all_of(samples):
    return [ids.tolist() for ids in samples.tokens(np.arange(len(samples)))]


def counting(*borders):
    return [list(range(begin, end)) for begin, end in itertools.pairwise(borders)]


def test_documents_of_a_range_give_consecutive_pieces_and_short_ones_are_dropped(tmp_path):
    dataset = write_dataset(tmp_path / "corpus", documents_of(25, 7, 8, 0, 20, 10))
    samples = SampleIndex(dataset, (0, 6), seq_length=12)
    assert (samples.num_documents, samples.num_dropped_documents, samples.num_tokens) == (6, 2, 63)
    assert all_of(samples) == counting(0, 10, 20, 25) + counting(32, 40, 50, 60, 70)
    assert samples.lengths([[0, 2], [3, 6]]).tolist() == [[12, 7], [10, 12]]
    assert samples.prefix == dataset.prefix
    for index in (-1, 7):
        with pytest.raises(IndexError):
            samples.tokens([index])
    wrong_arguments("--seq-length is 2", SampleIndex, dataset, (0, 6), seq_length=2)


def test_a_sep_that_ends_a_document_is_in_no_sample(tmp_path):
    """It gave a sample of itself alone, with nothing to predict, behind each document that filled its rows."""
    dataset = write_dataset(tmp_path / "corpus", documents_of(11, 21, 8, 9, 0), manifest={"append_eod": True})
    samples = SampleIndex(dataset, (0, 5), seq_length=12)
    assert all_of(samples) == counting(0, 10) + counting(11, 21, 31) + counting(40, 48)
    assert (samples.num_dropped_documents, samples.num_tokens) == (2, 38)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=1, max_size=8),
    seq_length=st.integers(3, 20),
    data=st.data(),
)
def test_every_token_of_the_kept_documents_comes_once_and_in_order(tmp_path, shape, seq_length, data):
    counter = iter(range(10**6))
    documents = [[[next(counter) for _ in range(length)] for length in document] for document in shape]
    low = data.draw(st.integers(0, len(documents)))
    high = data.draw(st.integers(low, len(documents)))
    texts = [sum(document, []) for document in documents[low:high]]
    kept, cut = [text for text in texts if len(text) >= 8], seq_length - 2
    dataset = write_dataset(tmp_path / "corpus", documents)
    if not kept:
        line = r"no sample in .*(have fewer than 8 tokens|range is empty)"
        assert refused(line, SampleIndex, dataset, (low, high), seq_length).exit_code == 1
        return
    samples = SampleIndex(dataset, (low, high), seq_length)
    pieces = all_of(samples)
    assert pieces == [text[begin : begin + cut] for text in kept for begin in range(0, len(text), cut)]
    assert samples.lengths(np.arange(len(samples))).tolist() == [len(piece) + 2 for piece in pieces]
    assert samples.num_dropped_documents == len(texts) - len(kept)


def test_memory_is_small_for_many_documents(tmp_path):
    with writing(tmp_path / "corpus") as output:
        append(output, np.zeros(1_600_000), np.full(200_000, 8), np.ones(200_000))
        output.publish([None])
    dataset = IndexedDataset(tmp_path / "corpus")
    tracemalloc.start()
    samples = SampleIndex(dataset, (0, 200_000), 4)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == 200_000 * 4
    assert kept < 200_000, "3/8 byte a document, nothing a sample"


@pytest.mark.parametrize("is_counted", [False, True], ids=["before it is counted", "behind its totals"])
def test_a_damaged_index_gives_no_samples(tmp_path, is_counted):
    """A size, a byte offset, and a document border that crosses the next one or points far outside."""
    prefix = write(tmp_path / "corpus", documents_of(30, 9, 3))
    path, whole = Path(f"{prefix}.idx"), Path(f"{prefix}.idx").read_bytes()
    dataset = IndexedDataset(prefix)
    assert all_of(SampleIndex(dataset, (0, 3), seq_length=22)) == counting(0, 20, 30, 39)

    def samples():
        harmed = IndexedDataset(prefix)
        harmed.sample_totals |= dataset.sample_totals if is_counted else {}
        return all_of(SampleIndex(harmed, (0, 3), seq_length=22))

    for place, number in ((0, -30), (12 + 8, 13), (12 + 24 + 8, 3), (12 + 24 + 8, 10**9)):
        path.write_bytes(whole)
        patch(path, HEADER.size + place, "<i", number)
        refused(r"\.idx: .*damaged.*; copy both files again", samples)
