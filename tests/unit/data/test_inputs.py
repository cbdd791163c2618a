"""Inputs: which files a name, a folder or a pattern stands for; packed files as `gzip -t` and its like judge; bars."""

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import re
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path

import pytest
import zstandard

from megatron_ddrp.data.preprocess.documents import iter_documents
from megatron_ddrp.data.preprocess.inputs import InputFile, OpenInput, find_inputs
from megatron_ddrp.data.progress import progress, reading_progress, show_phase, track
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.table_files import read_rows
from tests.refusals import refused


@pytest.fixture
def corpus(tmp_path):
    for name in ("b/wiki_01", "b/wiki_00", "a.txt", "c.jsonl.gz", "a/z.json", "a/b/y.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("<doc id=1>\n</doc>\n")
    for name in (".hidden.txt", "README.md", "LICENSE", "vocab.txt", "old_text_document.json", "old_text_document.idx"):
        (tmp_path / name).write_text("no document")
    (tmp_path / "old.unfinished").mkdir()
    (tmp_path / "old.unfinished" / "0.txt").write_text("no document")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    return tmp_path


def names(*given, leave_out=()):
    """Return the names of the files that these inputs stand for."""
    return [file.name for file in find_inputs(list(map(str, given)), leave_out=list(map(str, leave_out)))]


def test_a_folder_gives_its_documents_sorted_and_patterns_are_sorted_between_arguments_in_order(corpus):
    expected = ["a/b/y.parquet", "a/z.json", "a.txt", "b/wiki_00", "b/wiki_01", "c.jsonl.gz"]
    assert names(corpus, leave_out=[corpus / "vocab.txt"]) == expected
    assert all(Path(file.path) == corpus / file.name for file in find_inputs([str(corpus)]))
    for name in ("b/pipe", "b/pipe.txt"):
        os.mkfifo(corpus / name)  # which are left alone
    for given, expected in (
        (["c*.gz", "b/wiki_0?", "**/*.json"], ["c.jsonl.gz", "wiki_00", "wiki_01", "z.json"]),
        (["[b]"], ["wiki_00", "wiki_01"]),
        (["b/wiki_01", "b/*", "b/../b"], ["wiki_01", "wiki_00"]),
        (["b", "b/*"], ["wiki_00", "wiki_01"]),
    ):
        assert names(*(f"{corpus}/{name}" for name in given)) == expected


@pytest.mark.parametrize("pattern", ["", "*", "**", "**/*"])
def test_the_folder_of_a_tokenizer_inside_the_input_is_no_text(tmp_path, capsys, pattern):
    corpus, folder = tmp_path / "corpus", tmp_path / "corpus" / "deep" / "tok"
    (folder / "more").mkdir(parents=True)
    (corpus / "link").symlink_to(folder)
    for name in ("tokenizer.json", "vocab.txt", "notes.txt", "spiece.model", "more/a.txt"):
        (folder / name).write_text("no document")
    for name in ("a.txt", "deep/b.txt"):
        (corpus / name).write_text("A document.")
    expected = ["a.txt", "b.txt" if pattern else "deep/b.txt"]
    assert names(corpus / pattern, leave_out=[corpus / "link"]) == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("pattern", ["", "*", "*.*", "**", "**/*.json*"])
def test_texts_beside_the_files_of_a_tokenizer_are_read(tmp_path, pattern):
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "merges.txt"):
        (tmp_path / name).write_text("no document")
    (tmp_path / "a.jsonl").write_text('{"text": "One."}')
    assert names(tmp_path / pattern, leave_out=[tmp_path]) == ["a.jsonl"]


def test_capitals_and_ndjson_are_endings_too(tmp_path):
    line = b'{"text": "red"}\n'
    contents = {"A.JSONL": line, "b.Jsonl.GZ": gzip.compress(line), "c.ndjson": line, "D.TXT": b"red\n"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert names(tmp_path) == ["A.JSONL", "D.TXT", "b.Jsonl.GZ", "c.ndjson"]
    assert list(iter_documents([str(tmp_path)])) == [("red",)] * 4


def test_files_left_out_of_a_folder_are_named_on_one_line(corpus, capsys):
    find_inputs([str(corpus / "b")])
    assert capsys.readouterr().err == ""
    for name in ("part-00000", "old_text_document.bin", "x.csv"):
        (corpus / name).write_text("plain text\n")
    find_inputs([str(corpus)], leave_out=[str(corpus / "vocab.txt")])
    line = capsys.readouterr().err
    words = "4 files left out (LICENSE, README.md, part-00000, …): expected names that end in"
    assert line.startswith(f"{corpus}: {words}") and line.count("\n") == 1 and ".hidden" not in line


def test_a_file_reached_twice_is_read_once(tmp_path, capsys):
    """A cache of the Hugging Face hub: blobs without endings, and links to them with the files' names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1f"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("train.jsonl", "test.jsonl", "again.jsonl"):
        blob = "0te" if name == "test.jsonl" else "0tr"
        (blobs / blob).write_text('{"text": "red"}\n')
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    expected = ["snapshots/1f/again.jsonl", "snapshots/1f/test.jsonl"]
    assert names(tmp_path) == expected and names(tmp_path / "**") == [Path(name).name for name in expected]
    assert capsys.readouterr().err == ""
    (tmp_path / "own.txt").write_text("red\n")
    (tmp_path / "link.txt").symlink_to("own.txt")
    assert names(tmp_path) == ["own.txt", *expected]


def test_mistakes_are_named_and_what_cannot_be_read_in_a_folder_or_a_pattern_is_refused(corpus, monkeypatch):
    (corpus / "empty").mkdir()
    (corpus / "a.csv").write_text("x")
    os.mkfifo(corpus / "pipe.parquet")
    packed = [f"0{ending}" for ending in (".jsonl.gz", ".txt.xz", ".json.bz2", ".txt.zst")]
    for name in packed:
        (corpus / name).touch()
    for name, complaint in {
        "none.jsonl": "none.jsonl: No such file",
        "a.csv": "expected a name that ends in .jsonl, .ndjson, .json, .txt, .parquet",
        "empty": "holds no file that ends in",
        "*.nothing": r"\*.nothing: no such file, and no file matches it as a pattern",
        **dict.fromkeys(packed, "empty, expected a .* file; copy it"),
        "pipe.parquet": "pipe.parquet: a pipe, but .parquet",
    }.items():
        refused(complaint, names, corpus / name)
    (corpus / "b" / "link.json").symlink_to("../a/z.json")
    assert names(corpus / "**" / "*.json") == ["z.json"]
    (corpus / "b" / "gone.jsonl").symlink_to("nowhere")
    for name in ("b", "b/*.jsonl", "**/*.jsonl"):
        refused(r"b/gone\.jsonl: (No such file|Too many levels).*; give a readable file", names, corpus / name)
    scandir = os.scandir

    def locked(path):
        if path == str(corpus / "a" / "b"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    for name in ("a", "[a]"):
        refused("a/b: Permission denied; make it readable, or give the other folders", names, corpus / name)
    os.mkfifo(corpus / "pipe")
    for name in ("-", corpus / "pipe"):
        refused(f"--input {name} is given twice; standard input and pipes", names, name, name)


@pytest.mark.parametrize("packed", [False, True])
def test_the_hash_is_that_of_the_file_on_disk(tmp_path, packed):
    content, path = b"some text\n" * 300_000, tmp_path / ("a.txt.gz" if packed else "a.txt")
    on_disk = gzip.compress(content) + b"\0" * 100 if packed else content
    path.write_bytes(on_disk)
    with OpenInput(InputFile(str(path), "name")) as opened:
        assert b"".join(iter(lambda: opened.read(1 << 20), b"")) == content
        entry = {"name": "name", "bytes": len(on_disk), "sha256": hashlib.sha256(on_disk).hexdigest()}
        assert opened.manifest_entry() == entry


PACK = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
RED, BLUE = (f'{{"text": "{word}", "n": 1}}\n'.encode() for word in ("red", "blue"))
BOTH = RED + BLUE


def skippable(size):
    return b"\x50\x2a\x4d\x18" + size.to_bytes(4, "little") + b"x" * size


def cases(packing):
    """Return name of a case → (content of the file, text; None where the file is refused)."""
    pack = PACK[packing]
    red, blue, empty = pack(RED), pack(BLUE), pack(b"")
    found = {
        "one": (red, RED),
        "two": (red + blue, BOTH),
        "many": (empty + b"".join(pack(BOTH[i : i + 1]) for i in range(len(BOTH))), BOTH),
        "empty between": (red + empty + empty + blue, BOTH),
        "empty alone": (empty, b""),
        "nothing": (b"", None),
        "zeros first": (b"\0" * 4 + red, None),
        "letters first": (b"text" + red, None),
        "letters behind": (red + blue + b"trailing garbage", None),
        "another format behind": (red + PACK[".gz" if packing != ".gz" else ".xz"](BLUE), None),
        "zeros and letters behind": (red + b"\0" * 8 + b"text", None),
    }
    for zeros in (1, 3, 4, 5, 8, 512, 20_000):
        text = BOTH if packing == ".gz" or (packing == ".xz" and zeros % 4 == 0) else None
        found[f"{zeros} zeros behind"] = (red + blue + b"\0" * zeros, text)
        found[f"{zeros} zeros between"] = (red + b"\0" * zeros + blue, text)
    if packing == ".xz":
        alone = lzma.compress(BOTH, lzma.FORMAT_ALONE)
        found |= {
            "of the older format": (alone, BOTH),
            "zeros behind the older format": (alone + b"\0" * 4, None),
            "two of the older format": (alone + alone, None),
            "the older format behind": (red + alone, None),
            "zeros between three": (red + b"\0" * 4 + empty + b"\0" * 8 + blue + b"\0" * 4, BOTH),
            "without a check": (lzma.compress(BOTH, check=lzma.CHECK_NONE), BOTH),
            "a check of unknown kind": (with_unknown_check(BOTH), None),
        }
    if packing == ".zst":
        found |= {
            "skippable frames around": (skippable(4) + red + skippable(0) + skippable(10_000) + blue, BOTH),
            "a skippable frame last": (red + blue + skippable(9), BOTH),
            "a cut skippable frame": (red + blue + skippable(9)[:-1], None),
            "skippable frames alone": (skippable(9) * 2, b""),
        }
    return found


def with_unknown_check(data):
    """Return a sound .xz file whose check has the number 2, which no program knows; it is as long as CRC32's."""
    packed = bytearray(lzma.compress(data, check=lzma.CHECK_CRC32))
    packed[7] = packed[-3] = 2
    packed[8:12] = zlib.crc32(packed[6:8]).to_bytes(4, "little")
    packed[-12:-8] = zlib.crc32(packed[-8:-2]).to_bytes(4, "little")
    return bytes(packed)


def unpacked(path):
    with OpenInput(InputFile(str(path), path.name)) as opened:
        data = b"".join(iter(lambda: opened.read(1 << 20), b""))
        assert opened.manifest_entry()["bytes"] == opened.bytes_read
    return data


@pytest.mark.parametrize(("packing", "name"), [(packing, name) for packing in PACK for name in cases(packing)])
def test_a_packed_file_is_read_whole_or_refused(tmp_path, packing, name):
    content, text = cases(packing)[name]
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(content)
    if text is None:
        for read in (unpacked, lambda path: list(read_rows(str(path)))):
            refused(r"a\.jsonl\.\w+: damaged or cut off after \d+ bytes \(.*\); copy it", read, path)
    else:
        assert unpacked(path) == text
        rows = [row.cells["text"] for row in read_rows(str(path))] if text else []
        assert rows == ["red", "blue"][: text.count(b"\n")]


@pytest.mark.parametrize("packing", PACK)
def test_no_flipped_bit_and_no_cut_shortens_a_file_in_silence(tmp_path, packing):
    """Every bit of the later stream, its head included, and every length."""
    red, blue = PACK[packing](RED), PACK[packing](BLUE)
    path = tmp_path / f"a{packing}"

    def read(content):
        path.write_bytes(content)
        try:
            return unpacked(path)
        except UserError:
            return None

    for bit in range(8 * len(blue)):
        harmed = bytearray(blue)
        harmed[bit // 8] ^= 1 << bit % 8
        assert read(red + harmed) in (None, BOTH), f"bit {bit}"
    for size in range(1, len(blue)):
        assert read(red + blue[:size]) is None, f"{size} bytes"


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_pipe_is_read_alike_however_it_is_written(tmp_path, packing, step):
    """Its first write may be shorter than the bytes by which the packing is known."""
    path, content = tmp_path / "pipe", PACK[packing](RED) + PACK[packing](BLUE)
    os.mkfifo(path)

    def write():
        with open(path, "wb", buffering=0) as pipe:
            for start in range(0, len(content), step):
                pipe.write(content[start : start + step])

    writer = threading.Thread(target=write)
    writer.start()
    assert [text for (text,) in iter_documents([str(path)])] == ["red", "blue"]
    writer.join()


@pytest.mark.parametrize("packing", PACK)
def test_memory_stays_bounded_where_little_unpacks_to_much(tmp_path, packing):
    path = tmp_path / f"a{packing}"
    streams, limit = (6, 300 << 20) if packing == ".zst" else (2, 16 << 20)
    path.write_bytes(PACK[packing](bytes(64 << 20)) * streams)
    tracemalloc.start()
    try:
        with OpenInput(InputFile(str(path), path.name)) as opened:
            size = sum(map(len, iter(lambda: opened.read(1 << 20), b"")))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == streams * 64 << 20 and most < limit


def test_a_damaged_packed_file_of_a_folder_is_not_left_out(tmp_path):
    """A file without a further ending is recognised by its text, which a damaged file hides."""
    packed = bz2.compress(b'<doc id="1" url="u" title="A">\nA\n</doc>\n')
    (tmp_path / "wiki_00.bz2").write_bytes(packed)
    assert names(tmp_path) == ["wiki_00.bz2"]
    (tmp_path / "wiki_01.bz2").write_bytes(packed[3:])
    refused(r"wiki_01\.bz2: damaged or cut off after", find_inputs, [str(tmp_path)])


def test_bars_say_nothing_of_short_work_and_name_what_goes_on_behind_a_full_one(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"12345")
    with reading_progress([tmp_path / "file"]) as reading:
        assert reading.total == 5
        reading.update(5)
    assert list(track("abc", "letter")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
    with progress("row", 2) as bar, progress("row", 2, show=False) as hidden:
        bar.update(2)
        show_phase(hidden, "sorting")
        show_phase(bar, "sorting")
        assert capsys.readouterr().err == ""
        bar.start_t -= 11
        show_phase(bar, "learning the pieces")
        assert "learning the pieces: 100%" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # a terminal shows even short work
    assert list(track("abc", "letter", "spelling")) == ["a", "b", "c"]
    assert re.search(r"spelling: +0%.* 0/3 ", capsys.readouterr().err)
