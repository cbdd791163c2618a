"""Inputs: which files a name, a folder or a pattern stands for, in which order, and what the manifest says of them."""

import errno
import gzip
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ddrp.data.preprocess.documents import iter_documents
from megatron_ddrp.data.preprocess.inputs import InputFile, OpenInput, find_inputs
from megatron_ddrp.errors import UserError

ROOT = Path(__file__).parents[3]


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


def names(files):
    return [file.name for file in files]


def test_a_folder_gives_its_documents_sorted_and_nothing_else(corpus):
    files = find_inputs([str(corpus)], leave_out=[str(corpus / "vocab.txt")])
    assert names(files) == ["a/b/y.parquet", "a/z.json", "a.txt", "b/wiki_00", "b/wiki_01", "c.jsonl.gz"]
    assert all(Path(file.path) == corpus / file.name for file in files)


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
    assert names(find_inputs([str(corpus / pattern)], leave_out=[str(corpus / "link")])) == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("pattern", ["", "*", "*.*", "**", "**/*.json*"])
def test_texts_beside_the_files_of_a_tokenizer_are_read(tmp_path, pattern):
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "merges.txt"):
        (tmp_path / name).write_text("no document")
    (tmp_path / "a.jsonl").write_text('{"text": "One."}')
    assert names(find_inputs([str(tmp_path / pattern)], leave_out=[str(tmp_path)])) == ["a.jsonl"]


def test_pipes_in_a_folder_or_a_pattern_are_left_alone(corpus):
    for name in ("b/pipe", "b/pipe.txt"):
        os.mkfifo(corpus / name)
    assert names(find_inputs([str(corpus / "b"), str(corpus / "b" / "*")])) == ["wiki_00", "wiki_01"]


def test_patterns_are_sorted_and_arguments_keep_their_order(corpus):
    files = find_inputs([str(corpus / "c*.gz"), str(corpus / "b" / "wiki_0?"), str(corpus / "**" / "*.json")])
    assert names(files) == ["c.jsonl.gz", "wiki_00", "wiki_01", "z.json"]
    assert names(find_inputs([str(corpus / "[b]")])) == ["wiki_00", "wiki_01"]
    twice = find_inputs([str(corpus / "b" / "wiki_01"), str(corpus / "b" / "*"), str(corpus / "b" / ".." / "b")])
    assert names(twice) == ["wiki_01", "wiki_00"]


def test_capitals_and_ndjson_are_endings_too(tmp_path):
    line = b'{"text": "red"}\n'
    for name, content in (
        ("A.JSONL", line),
        ("b.Jsonl.GZ", gzip.compress(line)),
        ("c.ndjson", line),
        ("D.TXT", b"red\n"),
    ):
        (tmp_path / name).write_bytes(content)
    assert names(find_inputs([str(tmp_path)])) == ["A.JSONL", "D.TXT", "b.Jsonl.GZ", "c.ndjson"]
    assert list(iter_documents([str(tmp_path)])) == [("red",)] * 4


def test_files_left_out_of_a_folder_are_named_on_one_line(corpus, capsys):
    find_inputs([str(corpus / "b")])
    assert capsys.readouterr().err == ""
    (corpus / "part-00000").write_text("plain text\n")
    (corpus / "old_text_document.bin").touch()
    (corpus / "x.csv").touch()
    find_inputs([str(corpus)], leave_out=[str(corpus / "vocab.txt")])
    line = capsys.readouterr().err
    assert line.startswith(
        f"{corpus}: 4 files left out (LICENSE, README.md, part-00000, …): expected names that end in"
    )
    assert line.count("\n") == 1 and ".hidden" not in line


def test_a_file_reached_twice_is_read_once(tmp_path, capsys):
    """A cache of the Hugging Face hub: blobs without endings, and links to them with the files' names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1f"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (blobs / f"0{name[:2]}").write_text('{"text": "red"}\n')
        (snapshot / name).symlink_to(f"../../blobs/0{name[:2]}")
    (snapshot / "again.jsonl").symlink_to("../../blobs/0tr")
    expected = ["snapshots/1f/again.jsonl", "snapshots/1f/test.jsonl"]
    assert names(find_inputs([str(tmp_path)])) == expected
    assert names(find_inputs([str(tmp_path / "**")])) == [Path(name).name for name in expected]
    assert capsys.readouterr().err == ""
    (tmp_path / "own.txt").write_text("red\n")
    (tmp_path / "link.txt").symlink_to("own.txt")
    assert names(find_inputs([str(tmp_path)])) == ["own.txt", *expected]


def test_mistakes_are_named(corpus):
    (corpus / "empty").mkdir()
    (corpus / "a.csv").write_text("x")
    for name, complaint in (
        ("none.jsonl", "none.jsonl: No such file"),
        ("a.csv", "expected a name that ends in .jsonl, .ndjson, .json, .txt, .parquet"),
        ("empty", "holds no file that ends in"),
        ("*.nothing", "no file matches it as a pattern"),
    ):
        with pytest.raises(UserError, match=complaint.replace("*", r"\*")):
            find_inputs([str(corpus / name)])
    for ending in (".jsonl.gz", ".txt.xz", ".json.bz2", ".txt.zst"):
        (corpus / f"nothing{ending}").touch()
        with pytest.raises(UserError, match=f"nothing{ending}: empty, expected a .* file; copy it again"):
            find_inputs([str(corpus / f"nothing{ending}")])
    os.mkfifo(corpus / "pipe.parquet")
    with pytest.raises(UserError, match="pipe.parquet: a pipe, but .parquet"):
        find_inputs([str(corpus / "pipe.parquet")])
    os.mkfifo(corpus / "pipe")
    for name in ("-", str(corpus / "pipe")):
        with pytest.raises(UserError, match=f"--input {name} is given twice; standard input and pipes"):
            find_inputs([name, name])


def test_what_cannot_be_read_is_refused_in_a_folder_and_in_a_pattern(corpus, monkeypatch):
    (corpus / "b" / "link.json").symlink_to("../a/z.json")
    assert names(find_inputs([str(corpus / "**" / "*.json")])) == ["z.json"]
    (corpus / "b" / "gone.jsonl").symlink_to("nowhere")
    for name in ("b", "b/*.jsonl", "**/*.jsonl"):
        with pytest.raises(UserError, match=r"b/gone\.jsonl: (No such file|Too many levels).*; give a readable file"):
            find_inputs([str(corpus / name)])
    scandir = os.scandir

    def locked(path):
        if path == str(corpus / "a" / "b"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    for name in ("a", "[a]"):
        with pytest.raises(UserError, match="a/b: Permission denied; make it readable, or give the other folders"):
            find_inputs([str(corpus / name)])


@pytest.mark.parametrize("packed", [False, True])
def test_the_hash_is_that_of_the_file_on_disk(tmp_path, packed):
    content = b"some text\n" * 300_000
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(content) + b"\0" * 100 if packed else content)
    with OpenInput(InputFile(str(path), "name")) as opened:
        unpacked = b"".join(iter(lambda: opened.read(1 << 20), b""))
        described = opened.manifest_entry()
    on_disk = path.read_bytes()
    assert unpacked == content
    assert described == {"name": "name", "bytes": len(on_disk), "sha256": hashlib.sha256(on_disk).hexdigest()}


def test_packed_standard_input_is_known_by_its_first_bytes():
    program = (
        "from megatron_ddrp.data.preprocess.documents import iter_documents\n"
        "print([text for (text,) in iter_documents(['-'])])"
    )
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb") as packed:
        packed.write(b'{"text": "one"}\n{"text": "two"}\n')
    done = subprocess.run(
        [sys.executable, "-c", program], input=stream.getvalue(), capture_output=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.decode().strip() == "['one', 'two']"
