"""Merging: the bytes of one writer, manifests added up, and nothing under the final name before its time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ddrp.data.dataset import dataset_index, indexed_dataset, merging
from megatron_ddrp.data.dataset.merging import merge
from megatron_ddrp.data.dataset.verification import verify
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset

ROOT = Path(__file__).parents[3]


def write(prefix, documents, dtype=np.uint16, manifest=None):
    return write_dataset(prefix, documents, dtype, manifest).prefix


def manifest(name, documents, fingerprint="f" * 64):
    return {
        "documents": documents,
        "sequences": documents,
        "tokens": documents,
        "skipped": 1,
        "json_key": name,
        "append_eod": True,
        "dtype": "uint16",
        "tokenizer": {"type": "SentencePiece", "fingerprint": fingerprint, "vocab_size": 900},
        "inputs": [{"name": f"{name}.jsonl", "bytes": 7}],
    }


PARTS = ([[[1, 2], [3]], [[4]]], [], [[[5], [], [6, 7, 8]]], [[[40_000]]])


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_the_bytes_are_those_of_one_writer(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(dataset_index, "CHUNK", chunk)
    monkeypatch.setattr(merging, "CHUNK", chunk)
    monkeypatch.setattr(indexed_dataset, "CHUNK_TOKENS", chunk)
    types = (np.uint16, np.uint8, np.int32, np.uint16)
    prefixes = [write(tmp_path / str(k), part, types[k]) for k, part in enumerate(PARTS)]
    read = []
    merged = merge(tmp_path / "all", prefixes, advance=read.append)
    assert merged.dtype == np.int32 and sum(read) == 8 + 0 + 16 + 2
    write(tmp_path / "once", [document for part in PARTS for document in part], np.int32)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"all.{suffix}").read_bytes() == (tmp_path / f"once.{suffix}").read_bytes()
    same = merge(tmp_path / "same", [prefixes[0], prefixes[3]])
    assert same.dtype == np.uint16 and same[3].tolist() == [40_000]
    assert not list(tmp_path.glob("*.unfinished")) and list(verify(tmp_path / "all")) == []


def test_manifests_add_up(tmp_path):
    a = write(tmp_path / "a", [[[1]], [[2]]], manifest=manifest("a", 2))
    b = write(tmp_path / "b", [[[3]]], manifest=manifest("b", 1))
    merged = merge(tmp_path / "all", [a, b])
    found = merged.manifest
    assert (found["documents"], found["sequences"], found["tokens"], found["skipped"]) == (3, 3, 3, 2)
    assert found["inputs"] == [{"name": "a.jsonl", "bytes": 7}, {"name": "b.jsonl", "bytes": 7}]
    assert found["merged"] == ["a", "b"] and found["tokenizer"]["fingerprint"] == "f" * 64
    assert found["append_eod"] and "json_key" not in found  # they disagree on it
    assert "unknown_tokens" not in found, "an earlier version did not count them"
    assert list(verify(tmp_path / "all")) == []
    counted = [write(tmp_path / f"c{n}", [[[1]]], manifest=manifest("c", 1) | {"unknown_tokens": n}) for n in (3, 4)]
    assert merge(tmp_path / "all-c", counted).manifest["unknown_tokens"] == 7
    assert "unknown_tokens" not in merge(tmp_path / "mixed", [counted[0], a]).manifest
    bare = write(tmp_path / "bare", [[[1]]], manifest={"append_eod": True})
    assert merge(tmp_path / "counted", [a, bare]).manifest["documents"] == 3 and not list(verify(tmp_path / "counted"))
    plain, kept = write(tmp_path / "plain", [[[9]]]), write(tmp_path / "kept", [[[8]]], manifest={"json_key": "text"})
    assert merge(tmp_path / "more", [kept, plain]).manifest is None
    for mixed in ([a, kept], [plain, a]):
        with pytest.raises(UserError, match="/a was made with --append-eod, but .*/(kept|plain) without it"):
            merge(tmp_path / "mixed ends", mixed)


def test_shuffled_datasets_one_after_another_are_not_shuffled(tmp_path):
    made = [write(tmp_path / name, [[[1, 2]]], manifest=manifest(name, 1) | {"shuffled": 5}) for name in "ab"]
    assert "shuffled" not in merge(tmp_path / "both", made).manifest
    assert merge(tmp_path / "one", made[:1]).manifest["shuffled"] == 5


def test_refusals_leave_everything_as_it_was(tmp_path):
    a = write(tmp_path / "a", [[[1]]], manifest=manifest("a", 1))
    b = write(tmp_path / "b", [[[2]]], manifest=manifest("b", 1, "e" * 64))
    damaged = write(tmp_path / "c", [[[1]], [[2]], [[3]]], manifest=manifest("c", 3))
    data = bytearray(Path(f"{damaged}.idx").read_bytes())
    data[34 + 12 + 8] = 3  # the byte offset of the second sequence
    Path(f"{damaged}.idx").write_bytes(data)
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"link{suffix}").symlink_to(f"a{suffix}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for output, prefixes, complaint in (
        (
            "all",
            [a, b],
            "a was made by tokenizer SentencePiece f{12} of 900 pieces, but .*/b by .* e{12}",
        ),
        ("all", [a, damaged], r"c\.idx: sequence 1 begins at byte 3, but sequence 0 ends at byte 2"),
        ("all", [a, str(tmp_path / "none")], r"none\.idx: No such file"),
        ("a", [a, a], r"a\.bin: exists already; give --overwrite"),
        ("all", [a, f"{a}.idx"], r"/a is given 2 times; name each dataset once \(its \.idx, not its \.bin too\)"),
        ("all", [a, str(tmp_path / "link")], "/a is given 2 times"),
    ):
        with pytest.raises(UserError, match=complaint):
            merge(tmp_path / output, prefixes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    other = write(tmp_path / "d", [[[4]]], manifest=manifest("d", 1))
    assert [ids.tolist() for ids in merge(tmp_path / "a", [a, other], overwrite=True)] == [[1], [4]]


@pytest.mark.parametrize(("suffix", "place", "value"), [(".bin", 0, 7), (".idx", -16, 1)])
def test_another_id_and_a_moved_border_are_refused(tmp_path, suffix, place, value):
    sound = write(tmp_path / "a", [[[1]]], manifest=manifest("a", 1))
    changed = write(tmp_path / "b", [[[1], [2]], [[3]]], manifest=manifest("b", 2))
    data = bytearray(Path(f"{changed}{suffix}").read_bytes())
    data[place] = value
    Path(f"{changed}{suffix}").write_bytes(data)
    with pytest.raises(UserError, match=rf"b\{suffix}: SHA-256 .* changed since then"):
        merge(tmp_path / "all", [sound, changed])
    assert not list(tmp_path.glob("all*"))


def test_killed_halfway_nothing_has_the_final_name(tmp_path):
    prefixes = [write(tmp_path / name, [[[1, 2]], [[3]]]) for name in "ab"]
    program = (
        "import os, sys\nfrom megatron_ddrp.data.dataset.merging import merge\n"
        "merge(sys.argv[1], sys.argv[2:], advance=lambda size: os.kill(os.getpid(), 9))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "all"), *prefixes]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("all*")] == ["all.unfinished"]
    assert len(merge(tmp_path / "all", prefixes)) == 4
    assert {path.name for path in tmp_path.glob("all*")} == {"all.bin", "all.idx"}
