"""Indexed datasets: round trips, Megatron's own files byte for byte, and one clear line for every kind of damage.

Whatever byte is wrong, the reader ends in one line and `verify` names the place. A manifest that is not as it was
written is refused; one of an earlier version has no sum and passes."""

import json
import os
import pickle
import random
import re
import struct
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.atomic import SUM
from megatron_ddrp.data.batches.samples import document_lengths
from megatron_ddrp.data.dataset import dataset_index, indexed_dataset
from megatron_ddrp.data.dataset.dataset_index import HEADER, token_dtype
from megatron_ddrp.data.dataset.indexed_dataset import UnfinishedDatasets, read_manifest
from megatron_ddrp.data.dataset.verification import check_sums, first_documents, open_dataset, verify
from megatron_ddrp.errors import UserError
from tests.datasets import shared_asset, write_dataset
from tests.refusals import refused


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
    ends = np.cumsum([0] + [len(document) for document in documents])
    assert dataset.document_indices.tolist() == ends.tolist()


def test_all_documents_at_once_equal_some_at_a_time_and_the_type_follows_the_vocabulary(tmp_path):
    write_dataset(tmp_path / "a", [[[1], [2, 3]], [[]], [[4]]])
    with writing(tmp_path / "b") as output:
        output.append(0, np.array([1, 2, 3], np.uint16).tobytes(), np.array([1, 2, 0]), np.array([2, 1]))
        output.append(0, np.array([4], np.uint16).tobytes(), np.array([1]), np.array([1]))
        output.publish([None])
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert token_dtype(65_499) == np.uint16 and token_dtype(65_500) == np.int32


def test_slices_are_read_only_views_and_pickle_keeps_the_prefix(tmp_path):
    dataset = write_dataset(tmp_path / "a", [[[5, 6, 7, 8]], [[9]]], manifest={"tokens": 5})
    assert dataset.get(0, 1, 2).tolist() == [6, 7] and dataset.get(0, 3).tolist() == [8]
    assert dataset[-1].tolist() == [9]
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
    dataset = IndexedDataset(tmp_path / name)
    bounds = dataset.document_indices.tolist()
    documents = [[dataset[i] for i in range(*span)] for span in zip(bounds, bounds[1:], strict=False)]
    write_dataset(tmp_path / "again", documents, dataset.dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / ("again" + suffix)).read_bytes() == (tmp_path / (name + suffix)).read_bytes()


def test_failure_leaves_nothing_and_keeps_what_was_there(tmp_path):
    write_dataset(tmp_path / "a", [[[1, 2]]], manifest={"tokens": 2})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), writing(tmp_path / "a") as output:
        output.append(0, b"\3\0", np.array([1]), np.array([1]))
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_dataset(tmp_path / "a", [[[3]]])  # without a manifest: the old one must not stay
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_two_writers_of_one_name_are_kept_apart_and_a_stale_file_is_taken_over(tmp_path):
    (tmp_path / "a.unfinished").mkdir()
    (tmp_path / "a.unfinished" / "0.ids").write_bytes(b"left by a killed run")
    with writing(tmp_path / "a") as output:
        refused("another process is writing", writing, tmp_path / "a")
        output.append(0, b"\7\0", np.array([1]), np.array([1]))
        output.publish([None])
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.fixture
def prefix(tmp_path):
    manifest = {"tokens": 2, "inputs": [("a.txt", 7)], "tokenizer": {"vocab_size": 9}}
    write_dataset(tmp_path / "p", [[[1, 2]]], manifest=manifest)
    return tmp_path / "p"


def test_what_was_written_is_read(prefix):
    manifest = read_manifest(prefix)
    assert {name: manifest[name] for name in ("tokens", "inputs")} == {"tokens": 2, "inputs": [["a.txt", 7]]}
    assert SUM not in manifest


@pytest.mark.parametrize("change", [{"tokens": 3}, {"inputs": []}, {"tokenizer": {}}, {"more": 1}, {SUM: 5}])
def test_an_edited_manifest_is_refused(prefix, change):
    path = prefix.with_suffix(".json")
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(written | change), encoding="utf-8")
    refused("damaged or edited", read_manifest, prefix)
    del written[SUM]
    path.write_text(json.dumps(written | {"tokens": 3}), encoding="utf-8")
    assert read_manifest(prefix)["tokens"] == 3


VOCAB_SIZE = 1000
TOKENIZER = SimpleNamespace(tokenizer_type="BertWordPieceLowerCase", fingerprint="f" * 64, vocab_size=VOCAB_SIZE)
MANIFEST = {"tokenizer": {"type": "BertWordPieceLowerCase", "fingerprint": "f" * 64, "vocab_size": VOCAB_SIZE}}


def write(prefix, documents, dtype=np.uint16, manifest=None):
    return write_dataset(prefix, documents, dtype, manifest).prefix


def patch(path: Path, position: int, form: str, value: int) -> None:
    """Overwrite one number of a file."""
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, position, value)
    path.write_bytes(data)


@pytest.fixture
def small(tmp_path):
    """Three documents of four sequences with 3, 1, 0 and 2 tokens."""
    return write(tmp_path / "a", [[[1, 2, 3], [4]], [[]], [[5, 6]]])


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
        ("bin", 4, "<H", 1000, [r"a\.bin: token 2 \(of sequence 0\) is id 1000, expected 0 to 999"]),
        ("bin", 6, "<H", 4444, [r"a\.bin: token 3 \(of sequence 1\) is id 4444, expected 0 to 999"]),
    ],
)  # fmt: skip
def test_each_kind_of_damage_is_named_with_its_place(small, suffix, position, form, value, findings):
    assert list(verify(small, TOKENIZER)) == []
    patch(Path(f"{small}.{suffix}"), position, form, value)
    found = list(verify(small, TOKENIZER))
    assert len(found) == len(findings), found
    for line, expected in zip(found, findings, strict=True):
        assert re.search(expected, line) and "\n" not in line
        if expected.startswith("a") and "token" not in expected:
            assert "again" in str(refused(expected, IndexedDataset, small))


def test_what_the_manifest_knows(tmp_path):
    manifest = {**MANIFEST, "documents": 1, "sequences": 1, "tokens": 3, "dtype": "uint16"}
    prefix = write(tmp_path / "a", [[[1, 2, 3]]], manifest=manifest)
    assert list(verify(prefix, TOKENIZER)) == list(verify(prefix)) == []
    other = SimpleNamespace(tokenizer_type="HuggingFace", fingerprint="e" * 64, vocab_size=3)
    fingerprint, foreign = verify(prefix, other)
    assert (
        "made by tokenizer BertWordPieceLowerCase ffffffffffff of 1000 pieces, but the tokenizer given is"
        in fingerprint
    )
    assert "token 2 (of sequence 0) is id 3, expected 0 to 2" in foreign
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
        with pytest.raises(
            UserError, match=rf"^{path}: SHA-256 .* {prefix}.json says .* megatron-ddrp dataset verify tells more$"
        ) as caught:
            check_sums(prefix)
        assert caught.value.exit_code == 1
        path.unlink()
        refused(f"^{path}: No such file", check_sums, prefix)
        path.write_bytes(whole)


@pytest.mark.parametrize("manifest", [None, "{}", '{"files": {"bin": {"sha256": "0"}}}', '{"files": [1]}'])
def test_without_sums_nothing_can_be_compared(tmp_path, manifest):
    prefix = write(tmp_path / "a", [[[1, 2, 3]]])
    if manifest is not None:
        (tmp_path / "a.json").write_text(manifest)
    assert refused(f"--verify-data needs the sums in {prefix}.json, but ", check_sums, prefix).exit_code == 2


def test_many_faults_are_counted_not_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_index, "CHUNK", 7)
    monkeypatch.setattr(indexed_dataset, "CHUNK_TOKENS", 5)
    prefix = write(tmp_path / "a", [[[1, VOCAB_SIZE]] for _ in range(40)])
    read = []
    found = list(verify(prefix, TOKENIZER, read.append))
    assert len(found) == 11 and "token 19 (of sequence 9) is id 1000" in found[9]
    assert found[10].endswith("30 more ids outside the vocabulary, 40 in all")
    assert sum(read) == 160
    patch(tmp_path / "a.idx", HEADER.size + 4 * 13, "<i", 5)  # size of the last sequence of the second chunk
    assert "sequence 14 begins at byte 56, but sequence 13 ends at byte 62" in next(verify(prefix))


def test_ids_without_a_manifest_are_looked_at_in_the_beginning_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "CHUNK_TOKENS", 4)
    late = write(tmp_path / "late", [[[1, 2, 3]], [[4, VOCAB_SIZE]]])
    assert open_dataset(late, TOKENIZER).num_tokens == 5
    assert open_dataset(write(tmp_path / "empty", []), TOKENIZER).num_tokens == 0
    early = write(tmp_path / "early", [[[1, VOCAB_SIZE]]])
    refused("early: token ids from 1 to 1000, but the vocabulary has 1000 pieces; give", open_dataset, early, TOKENIZER)


def read_everything(prefix):
    """Sequence lengths and document borders; every token, document length and beginning is read."""
    dataset = IndexedDataset(prefix)
    sequences = [dataset[i] for i in range(len(dataset))]
    for i, ids in enumerate(sequences):
        assert len(ids) == dataset.sizes[i] and ids.sum(dtype=np.int64) is not None
        assert dataset.get(i).tolist() == ids.tolist()
    assert all(lengths.min() >= 0 for lengths in document_lengths(dataset))
    list(first_documents(dataset, 99, 5, None))
    assert all(ids.min() is not None for ids in dataset.chunks())
    return [len(ids) for ids in sequences], dataset.document_indices.tolist()


@pytest.fixture
def memory_path(tmp_path):
    """A folder in memory where there is one: ten thousand openings take seconds on some disks."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_thousand_random_flips_and_truncations(memory_path):
    rng = random.Random(4)
    numbers = np.random.default_rng(4)
    kinds = []
    for name, dtype, manifest in (("recorded", np.uint16, MANIFEST), ("foreign", np.int32, None)):
        documents = [
            [numbers.integers(0, VOCAB_SIZE, rng.randrange(7)).tolist() for _ in range(rng.randrange(1, 4))]
            for _ in range(8)
        ]
        prefix = write(memory_path / name, documents, dtype, manifest)
        files = {suffix: Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("idx", "bin")}
        kinds.append((prefix, files, read_everything(prefix), manifest))
    num_refused = unseen = 0
    for _ in range(1000):
        prefix, files, structure, manifest = rng.choice(kinds)
        suffix = rng.choice(("idx", "idx", "bin"))
        data = bytearray(files[suffix])
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])
        path = Path(f"{prefix}.{suffix}")
        path.write_bytes(data)
        try:
            found = read_everything(prefix)
        except UserError as error:
            found = None
            num_refused += 1
            assert "\n" not in str(error) and prefix in str(error)
        findings = list(verify(prefix, TOKENIZER))
        assert all("\n" not in line and line.startswith(prefix) for line in findings)
        if manifest is not None:
            assert findings, "with a recorded hash no change goes unseen"
        elif not findings:
            # Only an id that is still one of the vocabulary, or a border between two documents.
            unseen += 1
            assert found is not None and found[0] == structure[0]
            assert found[1] == sorted(found[1]) and (found[1] == structure[1] or suffix == "idx")
        path.write_bytes(files[suffix])
    assert num_refused > 400 and 10 < unseen < 150


def test_opening_reads_a_handful_of_bytes_however_many_documents(tmp_path):
    """A sparse index of ten million empty sequences, so that the test itself writes nothing."""
    count = 10**7
    with open(tmp_path / "a.idx", "wb") as stream:
        stream.write(HEADER.pack(b"MMIDIDX\0\0", 1, 8, count, count + 1))
        stream.seek(12 * count + 8 * count, 1)
        stream.write(struct.pack("<q", count))
    (tmp_path / "a.bin").touch()
    tracemalloc.start()
    before = resident_bytes()
    dataset = IndexedDataset(tmp_path / "a")
    assert len(dataset[count - 1]) == 0 and dataset.num_documents == count and dataset.num_tokens == 0
    grown, (_, peak) = resident_bytes() - before, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20 and grown < 16 << 20  # the index has 200 MB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_truncated_or_missing_file_is_one_finding_each(small):
    manifest = Path(f"{small}.json")
    manifest.write_text(json.dumps({"files": {"bin": {"sha256": "0"}}}))
    index = Path(f"{small}.idx")
    data = index.read_bytes()
    index.write_bytes(b"")
    header, tokens = verify(small)
    assert "a.idx: 0 bytes, expected at least the 34" in header and "a.bin: SHA-256" in tokens
    index.write_bytes(data)
    Path(f"{small}.bin").unlink()
    [missing] = verify(small)
    assert "a.bin: No such file" in missing
    refused(r"a.bin: No such file", IndexedDataset, small)
    index.unlink()
    refused(r"a\.idx: No such file", list, verify(small))
    refused(r"a\.idx: No such file", IndexedDataset, small)
