"""The kept sample index: the same totals from disk, in memory or made anew, for any number of writers at once."""

import io
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ddrp.data import atomic
from megatron_ddrp.data.batches import index_cache
from megatron_ddrp.data.batches.index_cache import cached_totals, totals_cache
from megatron_ddrp.data.batches.samples import SampleIndex, sample_totals
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.sealed import seal_cache as seal
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset
from tests.unit.data.damage import damaged


def write_lengths(prefix, lengths):
    return write_dataset(prefix, [[np.arange(length)] for length in lengths])


@pytest.fixture
def dataset(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 60, 1000)
    return write_lengths(tmp_path / "data" / "corpus_text_document", lengths.tolist())


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_second_opening_reads_what_the_first_wrote(dataset, tmp_path, monkeypatch):
    before = files(tmp_path / "data")
    totals, note = cached_totals(dataset, 32)
    (name,) = set(files(tmp_path / "data")) - set(before)
    assert note is None and name.startswith("corpus_text_document.") and name.endswith(".samples.npy")
    assert np.array_equal(totals, sample_totals(dataset, 32))
    mode = stat.S_IMODE(os.stat(tmp_path / "data" / name).st_mode)
    assert mode == stat.S_IMODE(os.stat(dataset.prefix + ".idx").st_mode)

    monkeypatch.setattr("megatron_ddrp.data.batches.index_cache.sample_totals", None)
    again, note = cached_totals(dataset, 32)
    assert note is None and np.array_equal(again, totals)


def test_kept_and_fresh_totals_give_the_same_samples(dataset, tmp_path):
    cached_totals(dataset, 32, tmp_path / "cache")
    totals, _ = cached_totals(dataset, 32, tmp_path / "cache")
    for low, high in ((0, 1000), (64, 128), (333, 999)):
        kept, fresh = SampleIndex(dataset, (low, high), 32, totals), SampleIndex(dataset, (low, high), 32)
        everything = np.arange(len(fresh))
        assert len(kept) == len(fresh) and kept.num_tokens == fresh.num_tokens
        for one, other in zip(kept.tokens(everything), fresh.tokens(everything), strict=True):
            assert np.array_equal(one, other)


def test_the_name_follows_content_and_sequence_length(dataset, tmp_path):
    names = {totals_cache(dataset, 32).path.name, totals_cache(dataset, 33).path.name}
    lengths = dataset.sizes.tolist()
    lengths[10], lengths[20] = 5, lengths[10] + lengths[20] - 5  # as many documents and tokens as before
    names.add(totals_cache(write_lengths(dataset.prefix, lengths), 32).path.name)
    assert len(names) == 3
    assert totals_cache(dataset, 32, tmp_path / "elsewhere").path.parent == tmp_path / "elsewhere"


@pytest.fixture
def cached(dataset):
    """The path of a dataset's totals, the totals and the whole file."""
    totals, note = cached_totals(dataset, 32)
    assert note is None
    path = totals_cache(dataset, 32).path
    return path, np.array(totals), path.read_bytes()


def assert_made_again(dataset, cached):
    path, totals, whole = cached
    again, note = cached_totals(dataset, 32)
    assert note is not None and note.startswith(f"{path}: damaged") and "\n" not in note
    assert np.array_equal(again, totals) and path.read_bytes() == whole


def unsealed(array):
    """A .npy file without a sum, as earlier versions wrote it."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize("damage", ["empty", "short", "zeros", "truncated", "unsealed", "type", "neighbour", "folder"])
def test_a_damaged_or_foreign_file_is_made_again(dataset, cached, damage):
    path, totals, whole = cached
    neighbour = write_lengths(f"{dataset.prefix}2", dataset.sizes.tolist()[::-1])  # as many documents and tokens
    cached_totals(neighbour, 32)
    contents = {
        "empty": b"",
        "short": b"\x93NU",
        "zeros": bytes(len(whole)),
        "truncated": whole[:-9],
        "unsealed": unsealed(totals),
        "type": seal(path.name, unsealed(totals.astype(np.int32))),
        "neighbour": totals_cache(neighbour, 32).path.read_bytes(),
    }
    if damage == "folder":
        path.unlink()
        path.mkdir()
        again, note = cached_totals(dataset, 32)
        assert np.array_equal(again, totals) and "stays in memory" in note
        return
    path.write_bytes(contents[damage])
    assert_made_again(dataset, cached)


def test_no_random_damage_passes_for_an_index(dataset, cached):
    path, _, whole = cached
    for seed in range(60):
        path.write_bytes(damaged(whole, seed))
        assert_made_again(dataset, cached)


def test_an_index_damaged_behind_the_cache_is_refused_where_it_is_used(dataset):
    """The cache is found by the time and some pages of the .idx; a disk's own damage changes neither."""
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


def test_many_writers_at_once_leave_one_whole_file(dataset, tmp_path):
    folder = tmp_path / "cache"
    program = (
        "import sys, zlib\n"
        "from megatron_ddrp.data.batches.index_cache import cached_totals\n"
        "from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset\n"
        "dataset = IndexedDataset(sys.argv[1])\n"
        "for _ in range(50):\n"
        "    totals, note = cached_totals(dataset, 32, sys.argv[2])\n"
        "    assert note is None\n"
        "    for path in __import__('pathlib').Path(sys.argv[2]).glob('*.npy'):\n"
        "        path.unlink(missing_ok=True)\n"
        "print(zlib.crc32(cached_totals(dataset, 32, sys.argv[2])[0].tobytes()))\n"
    )
    command = [sys.executable, "-c", program, dataset.prefix, str(folder)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [(*writer.communicate(timeout=60), writer.returncode) for writer in writers]
    assert [code for _, _, code in results] == [0] * 4, results
    assert len({out for out, _, _ in results}) == 1
    cached_totals(dataset, 32, folder)
    assert files(folder) == [totals_cache(dataset, 32).path.name], "no temporary file stays"


def refuse_writing(*_arguments, **_options):
    raise OSError(30, "Read-only file system")


def test_a_file_that_another_node_takes_away_is_left_to_it(dataset, tmp_path, monkeypatch):
    """Let another writer remove the open file, as happens on file systems whose locks hold on one node only."""
    cache, totals = totals_cache(dataset, 16, tmp_path / "cache"), sample_totals(dataset, 16)
    others = iter([cache.write])

    def seal_beside_another(*given):
        for write in others:
            assert write(totals) is None
        return seal(*given)

    monkeypatch.setattr(atomic, "take_lock", lambda *_: True)
    monkeypatch.setattr(index_cache, "seal_cache", seal_beside_another)
    assert cache.write(totals) is None
    assert np.array_equal(cache.load(), totals) and files(tmp_path / "cache") == [cache.path.name]


def test_read_only_data_keep_the_index_in_memory_and_say_so(dataset, tmp_path, monkeypatch):
    before = files(tmp_path / "data")
    monkeypatch.setattr("megatron_ddrp.data.atomic._new_file", refuse_writing)
    totals, note = cached_totals(dataset, 32)
    assert np.array_equal(totals, sample_totals(dataset, 32)) and files(tmp_path / "data") == before
    for part in (str(tmp_path / "data"), "Read-only file system", "stays in memory", "--index-cache-dir DIR"):
        assert part in note
    assert "\n" not in note


def test_a_named_folder_that_cannot_be_written_is_refused(dataset, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--index-cache-dir .*folder: cannot be written: Not a directory") as error:
        cached_totals(dataset, 32, tmp_path / "file" / "folder")
    assert error.value.exit_code == 1
