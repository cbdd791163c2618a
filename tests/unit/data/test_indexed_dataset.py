"""Indexed datasets: round trips, Megatron's own files byte for byte, and one clear line for every kind of damage."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.dataset.dataset_index import HEADER, token_dtype
from megatron_ddrp.data.dataset.indexed_dataset import UnfinishedDatasets
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset

SHARED_ASSETS = Path(__file__).parents[4] / "shared" / "data" / "small_assets.tar.xz"


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


def test_all_documents_at_once_equal_some_at_a_time(tmp_path):
    write_dataset(tmp_path / "a", [[[1], [2, 3]], [[]], [[4]]])
    with writing(tmp_path / "b") as output:
        output.append(0, np.array([1, 2, 3], np.uint16).tobytes(), np.array([1, 2, 0]), np.array([2, 1]))
        output.append(0, np.array([4], np.uint16).tobytes(), np.array([1]), np.array([1]))
        output.publish([None])
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


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
    if not SHARED_ASSETS.exists():
        pytest.skip("Megatron's own dataset files are not at hand")
    import tarfile

    with tarfile.open(SHARED_ASSETS) as archive:
        for suffix in (".bin", ".idx"):
            member = next(m for m in archive.getnames() if m.endswith(f"indexed/{name}{suffix}"))
            (tmp_path / (name + suffix)).write_bytes(archive.extractfile(member).read())
    dataset = IndexedDataset(tmp_path / name)
    bounds = dataset.document_indices.tolist()
    documents = [[dataset[i] for i in range(*span)] for span in zip(bounds, bounds[1:], strict=False)]
    write_dataset(tmp_path / "again", documents, dataset.dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / ("again" + suffix)).read_bytes() == (tmp_path / (name + suffix)).read_bytes()


def test_type_follows_the_vocabulary(tmp_path):
    assert token_dtype(65_499) == np.uint16 and token_dtype(65_500) == np.int32


def header(magic=b"MMIDIDX\0\0", version=1, code=8, sequences=2, documents=2):
    return HEADER.pack(magic, version, code, sequences, documents)


BODY = struct.pack("<2i2q2q", 3, 1, 0, 6, 0, 2)


@pytest.mark.parametrize(
    ("index", "tokens", "complaint"),
    [
        (b"MMID", 8, "4 bytes, expected at least the 34"),
        (header(magic=b"TNTIDX\0\0\0") + BODY, 8, "not a Megatron index"),
        (header(version=2) + BODY, 8, "version 2, expected 1"),
        (header(code=6) + BODY, 8, "type code 6, expected one of 1 \\(uint8\\)"),
        (header() + BODY[:-1], 8, "73 bytes, expected 74 for 2 sequences and 2 document indices"),
        (header(sequences=2**40) + BODY, 8, "expected 13194139533362"),
        (header() + BODY[:-8] + struct.pack("<q", 1), 8, r"over \(0, 1\), expected \(0, 2\)"),
        (header() + BODY, 7, r"a.bin: 7 bytes, expected 8 as its .idx says"),
        (header() + BODY, 10, r"a.bin: 10 bytes, expected 8"),
    ],
)
def test_damage_is_one_clear_line(tmp_path, index, tokens, complaint):
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(bytes(tokens))
    with pytest.raises(UserError, match=complaint) as caught:
        IndexedDataset(tmp_path / "a")
    assert "\n" not in str(caught.value) and "again" in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none.idx: No such file"):
        IndexedDataset(tmp_path / "none")
    write_dataset(tmp_path / "a", [[[1]]])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match=r"a.bin: No such file"):
        IndexedDataset(tmp_path / "a")


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
        with pytest.raises(UserError, match="another process is writing"):
            writing(tmp_path / "a")
        output.append(0, b"\7\0", np.array([1]), np.array([1]))
        output.publish([None])
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
