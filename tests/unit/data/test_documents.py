"""Readers: formats, packings, and every fault named by file and line."""

import bz2
import gzip
import itertools
import json
import os
import re
import sys
import threading

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron_ddrp.data.preprocess import documents as documents_module
from megatron_ddrp.data.preprocess.documents import iter_chunks, iter_documents
from megatron_ddrp.data.preprocess.inputs import InputFile, OpenInput, find_inputs
from megatron_ddrp.errors import UserError
from tests.refusals import refused


def texts(*paths, **options):
    return [document[0] for document in iter_documents([str(path) for path in paths], **options)]


def test_zstandard_with_a_long_window_is_read(tmp_path):
    """`zstd --long=28`: the library refuses such a window unless told otherwise."""
    long = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=long).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(packer.compress(b"red") + packer.flush())
    assert texts(tmp_path / "a.txt.zst") == ["red"]


WIKI = (
    '<doc id="1" url="u" title="A">\nA\n\nFirst.\nLine <doc two.\n</doc>\n<doc id="2" url="u" title="B">\nB\n</doc>\n'
)
ARTICLES = ["A\n\nFirst.\nLine <doc two.", "B"]
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 12345\n"
BRACKETS = ["[1] A note.", "[", "[]", '["the cat", "the dog"]', "[{the cat}]", '[{"One," he said.}]', "[ {} ]"]
SCRIPTS = {
    "A line\nbreaks.\r\nTwice.": "A line breaks. Twice.",
    "吾輩は猫で\nある。\n「名前」は\r\nまだ無い": "吾輩は猫である。「名前」はまだ無い",
    "我们\n喜欢，\n读书": "我们喜欢，读书",
    "ニャー\nニャー　\n　と\nＡ": "ニャーニャー　　とＡ",
    "𠮷野\n家 漢字\nword\n漢字": "𠮷野家 漢字 word 漢字",
    "한국어는\n띄어쓰기가\n있다": "한국어는 띄어쓰기가 있다",
    "é\né 😀\n😀": "é é 😀 😀",
}
"""Plain text → the same without line breaks, which become what the script puts between words."""
READ = [
    *((name, f"{text}\n", [text]) for name in ("a.txt", "a") for text in BRACKETS),
    ("a.txt", '{"One," he said.}\n', ['{"One," he said.}']),
    ("a.txt", "\ufeff\n one\r\ntwo\r\n\r\n \t\nthree\n\nfour", [" one two", "three", "four"]),
    ("a.txt", "a stray\rsign\nis text", ["a stray\rsign is text"]),
    *(("a.txt", f"{written}\n\nnext", [read, "next"]) for written, read in SCRIPTS.items()),
    # A text inside another object, and the word as a value.
    ("a.json", '{"text": "a", "of": {"text": "\\"text\\": text"}, "is": "text"}', ["a"]),
    *((name, WIKI, ARTICLES) for name in ("wiki_00", "wiki.txt")),
    ("wiki_01.bz2", bz2.compress(WIKI.replace("\n", "\r\n").encode()), ARTICLES),
    ("wiki_02", '{"text": "json"}\n', ["json"]),
    # The signs that WikiExtractor escapes.
    ("wiki_03", '<doc id="1">\nAT&amp;T if a &lt; b &amp;lt; &copy;\n</doc>\n', ["AT&T if a < b &lt; &copy;"]),
]


def write(path, content):
    """Write a file, packed if its name says so; or a pipe, if that is its name."""
    data = content if isinstance(content, bytes) else content.encode()
    data = gzip.compress(data) if path.suffix == ".gz" else data
    if path.name == "pipe":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(data,)).start()
    else:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(("name", "content", "documents"), READ, ids=[name for name, *_ in READ])
def test_documents_of_a_file(tmp_path, name, content, documents):
    assert texts(write(tmp_path / name, content)) == documents


BAD = {
    b'{"text": "a"': "not JSON",
    b"[1]": "a JSON list, expected one object per line",
    b'{"body": "a"}': "no key 'text', it has body",
    b'{"text": 3}': "key 'text' holds int, expected a string",
    b'{"text": "\xff"}': r"not UTF-8 \(byte 0xff\)",
    b'{"text": "\\ud800"}': "key 'text' has half a surrogate pair",
    b"[" * 100_000: "not JSON",
    b'{"text": "a", "text": "b"}': "key 'text' is twice in one object",
}
"""Line of JSON → the reason why it is no document."""
HEADS = ['{"text": "one"', '{"text": "one', '{"text": "a"} x', '{"text": {"text": "b"}']
"""Damaged first lines, which are not taken for an object over several lines."""
AS_TEXT = r"a\.txt: a JSON object in .* rename it to end in \.jsonl"
FAULTY = [
    *(
        ("a.jsonl", b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}\n', rf":3: {reason}.*--on-error skip",
         ["first", "last"], [3])
        for line, reason in BAD.items()
    ),
    *(("a.jsonl", f'{head}\n{{"text": "two"}}\n{{"text": "3"}}\n', ":1: ", ["two", "3"], [1]) for head in HEADS),
    ("a.jsonl", '{"text": "0123456789"}\n' * 100_000 + "[]\n", ":100001: a JSON list", None, [100_001]),
    ("a.txt", '\n {"text": "One."}\n{"text": "Two."}\n', AS_TEXT, None, None),
    ("a.json", '[\n{"text": "one"},\n{"body":\n "two"},\n{"text": "three"}\n]\n', ":2: no key 'text', it has body",
     ["one", "three"], [2]),
    ("a.json", '[\n{"text": "one"},\n{"text": "two"}\n', r": not JSON \(a list is not closed", None, None),
    ("a.txt", f"one\n\n{POINTER}\ntwo\n\nversion https://git-lfs.github.com/spec/v1 is text\n",
     ":3: a pointer of Git LFS", ["one", "two", "version https://git-lfs.github.com/spec/v1 is text"], [3]),
    ("a.txt", "one\rtwo\r\rthree\r", r":1: its lines end in \\r alone .* tr '\\r' '\\n'", [], [1]),
    ("a.txt", b"one\n\ntwo\nthree \xfe\n", r":4: not UTF-8 \(byte 0xfe\)", ["one"], [4]),
    ("wiki_00", WIKI.replace("</doc>", "", 1) + "stray\n" + WIKI, ":1: <doc …> without </doc>", ["B", *ARTICLES],
     [1, 10]),
    ("a.arrow", b"FEA1" + bytes(100) + b"FEA1", "Feather V1, which is no Arrow file; read it by pandas", None, None),
]  # fmt: skip
"""Name, content, words of the refusal, and what is left with their places where faults are skipped, if they can be."""


@pytest.mark.parametrize(("name", "content", "words", "left", "places"), FAULTY, ids=[row[2] for row in FAULTY])
def test_a_fault_stops_with_its_place_or_is_skipped_and_told(tmp_path, name, content, words, left, places):
    path = write(tmp_path / name, content)
    assert name in str(refused(words, texts, path))
    if places is None:
        refused(words, texts, path, on_error="skip")
        return
    told = []
    found = texts(path, on_error="skip", on_skip=told.append)
    assert found == left or left is None
    assert [int(re.search(rf"{name}:(\d+): ", line)[1]) for line in told] == places


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "a", "a.json.gz", "pipe"])
@pytest.mark.parametrize("content", ['[{"text": "One."}, {"text": "Two."}]', '\ufeff\n[\n {\n  "text" : "A."\n }\n]\n'])
def test_an_array_of_json_objects_is_read_and_refused_only_as_plain_text(tmp_path, name, content):
    path = write(tmp_path / name, content)
    if name == "a.txt":
        refused(AS_TEXT, texts, path)
    else:
        assert texts(path) == [row["text"] for row in json.loads(content.removeprefix("\ufeff"))]


def test_a_list_has_unreadable_records_and_a_largest_size_and_lines_have_keys_blanks_and_a_mark(tmp_path, monkeypatch):
    content = b'[{"text": "one", "x": NaN}, {"text": "\xff"},\r\n{"text": "\\ud83d"}, {"text": "a", "text": "b"}, 2]'
    path, told = write(tmp_path / "a.json", content), []
    assert texts(path, on_error="skip", on_skip=told.append) == ["one"]
    assert [line.removeprefix(str(path))[:9] for line in told] == [":2: not U", ":3: key '", ":4: key '", ":5: a JSO"]
    monkeypatch.setattr(documents_module, "MAX_VALUES_BYTES", 10)
    refused(r"a\.json: more than 0 MiB of JSON that is not in lines; write one object per", texts, path)
    write(path, '\ufeff{"text": "a", "title": "A"}\n\n{"title": "B", "text": "b\\ud83d\\ude00"}\r\n')
    assert list(iter_documents([str(path)], ["title", "text"])) == [("A", "a"), ("B", "b\U0001f600")]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.parquet", "a.arrow", "wiki_00", "pipe", "a.gz"])
@pytest.mark.parametrize("content", [POINTER, POINTER.replace("\n", "\r\n"), POINTER * 3])
def test_a_pointer_is_never_a_document(tmp_path, name, content):
    given = tmp_path
    if name in ("pipe", "a.gz"):
        given = write(tmp_path / name, content)
    else:
        (tmp_path / name).write_bytes(content.encode())
    refused(rf"{name}: a pointer of Git LFS in place of the file: run git ", texts, given, on_error="skip")


SPACES = [character for character in map(chr, range(0x110000)) if character.isspace() and character != "\n"]
NO_SPACES = ["\u200b", "\ufeff", "\u2060", "\u180e", "\u00ad", "\x00", "\x1b", "."]


@pytest.mark.parametrize("line", [*SPACES, " \u3000\t\xa0", "\u2028" * 50, *NO_SPACES, "\xa0.\xa0"], ids=ascii)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_line_of_whitespace_ends_a_plain_text_as_in_googles_reader(tmp_path, line, end):
    """Google's strips each line and ends a document at an empty one. Chunks and parts of a file are cut alike."""
    content = end.join(["one", "two", line, "three \x85 \u2028", line, line, "four"]) + end
    path = write(tmp_path / "a.txt", content)
    google = "\n".join(part.strip() for part in content.split("\n")).strip("\n").split("\n\n")
    count = len([document for document in google if document])
    found, size = texts(path), path.stat().st_size
    assert len(found) == count == (1 if line.strip() else 3)
    file = InputFile(str(path), path.name)
    for chunk_bytes in (1, 10, size):
        chunks = chunks_of(file, chunk_bytes)
        assert parsed(chunks) == found and sum(chunk.read for chunk in chunks) == size
    begins = sorted({documents_module.record_start(file, position) for position in range(size + 1)})
    ranges = [file._replace(begin=a, end=b) for a, b in itertools.pairwise(begins)]
    assert parsed(chunk for part in ranges for chunk in chunks_of(part, 10)) == found and len(ranges) >= count


ROWS = '{"text": "one"}\n{"text": "two"}\n'
WIDE = [(name, ROWS, encoding) for name in ("a.txt.gz", "wiki_00") for encoding in ("utf-16", "utf-32")]
WIDE += [("a.jsonl", ROWS, "utf-16-le"), ("a.txt", ROWS, "utf-16-be"), ("a.txt", "Привет мир\n\nвторой\n", "utf-16-le")]


@pytest.mark.parametrize(("name", "content", "encoding"), WIDE)
def test_text_in_wide_characters_is_refused_and_not_read_as_text_full_of_zeros(tmp_path, name, content, encoding):
    """Without a byte order mark it shows in its zeros, or in its control characters where letters have none."""
    path = write(tmp_path / name, content.encode(encoding))
    refused(rf"{name}: in {encoding[:6].upper()}[BL]?E?, expected UTF-8; .*iconv -f", texts, path)


def chunks_of(file, chunk_bytes):
    with OpenInput(file) as opened:
        return list(iter_chunks(opened, ["text"], chunk_bytes))


def parsed(chunks):
    return [text for chunk in chunks for (text,) in documents_module.parse_chunk(chunk, ["text"])[0]]


def test_parquet_rows(tmp_path, monkeypatch):
    rows = [f"row {i} é" for i in range(1500)]
    rows[7] = None
    plain, coded = pyarrow.array(rows), pyarrow.array(rows).dictionary_encode()
    path, skipped = tmp_path / "a.parquet", []
    parquet.write_table(pyarrow.table({"n": range(1500), "text": plain, "title": coded}), path, row_group_size=400)
    found = list(iter_documents([str(path)], ["title", "text"], "skip", skipped.append))
    assert found == [(row, row) for row in rows if row is not None]
    assert skipped == [f"{path}:8: column 'title' holds null, expected a string"]
    chunks = chunks_of(InputFile(str(path), path.name), 1000)
    assert len(chunks) > 2 and sum(chunk.read for chunk in chunks) == path.stat().st_size
    if hasattr(pyarrow, "string_view"):  # not before pyarrow 16
        views = pyarrow.table({"text": pyarrow.array(["one", "é"], pyarrow.string_view())})
        parquet.write_table(views, tmp_path / "b.parquet")
        assert texts(tmp_path / "b.parquet") == ["one", "é"]
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-9])
    refused("cut.parquet: damaged, or not a Parquet file", texts, tmp_path / "cut.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(r"needs pyarrow.*: pip install pyarrow$", texts, path)


def write_arrow(path, table, new=pyarrow.ipc.new_stream):
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as out:
        out.write_table(table, max_chunksize=3)


def saved_dataset(folder, texts):
    """A folder as `Dataset.save_to_disk` of Hugging Face writes it over another one, with a cache of `map`."""
    folder.mkdir()
    for name in ("data-00000-of-00001", "cache-1f", "data-00000-of-00002"):
        write_arrow(folder / f"{name}.arrow", pyarrow.table({"id": range(len(texts)), "text": texts}))
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (folder / "dataset_info.json").write_text('{"features": {}, "text": "no document"}')
    return folder / "data-00000-of-00001.arrow"


def test_rows_of_a_saved_dataset(tmp_path, capsys):
    wanted = ["one", "zwei", "", "three é", "four\nlines", "five", "six"]
    file = saved_dataset(tmp_path / "train", wanted)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for given in (tmp_path, tmp_path / "train", tmp_path / "train" / "*.arrow", file):
        assert texts(given) == wanted, given
    assert capsys.readouterr().err == ""
    line = r"arrow:1: no column 'body', it has id, text \(see --json-keys\)"
    refused(line, list, iter_documents([str(file)], ["body"]))
    write_arrow(tmp_path / "other.arrow", pyarrow.table({"text": wanted}), pyarrow.ipc.new_file)
    assert texts(tmp_path / "other.arrow") == wanted


def test_a_saved_dataset_is_listed_anew_when_it_changes(tmp_path):
    rows = saved_dataset(tmp_path / "train", ["one"])
    state, other = rows.with_name("state.json"), rows.with_name("other.arrow")
    other.write_bytes(rows.read_bytes())
    assert [file.path for file in find_inputs([str(tmp_path)])] == [str(rows)]
    state.write_text('{"_data_files": [{"filename": "other.arrow"}]}')
    os.utime(state, ns=(1, 1))
    assert [file.path for file in find_inputs([str(tmp_path)])] == [str(other)]


def test_a_damaged_arrow_file_is_refused_and_never_read_in_part(tmp_path):
    file = saved_dataset(tmp_path / "train", ["some text", "another text", "a third"] * 20)
    whole = file.read_bytes()
    cuts = range(0, len(whole), 41)
    damaged = [whole[:cut] for cut in cuts]
    damaged += [whole[:cut] + bytes([whole[cut] ^ 255]) + whole[cut + 1 :] for cut in cuts]
    num_refused = 0
    for content in damaged:
        file.write_bytes(content)
        try:
            assert len(texts(file, on_error="skip")) == 60  # a letter was changed
        except UserError as error:
            num_refused += 1
            assert "\n" not in str(error)
    assert num_refused > len(list(cuts))


NUMBERS, LETTERS, NULLS = pyarrow.array([1, 2, 3]), pyarrow.array(["a", "b", "c"]), pyarrow.nulls(3)
CODED = pyarrow.DictionaryArray.from_arrays(pyarrow.array([None, None, None], pyarrow.int32()), LETTERS)
IS_NULL = "column 'text' holds null, expected a string"
SHARDS = {
    "null type": (pyarrow.table({"text": NULLS, "id": NUMBERS}), IS_NULL),
    "null codes": (pyarrow.table({"text": CODED}), IS_NULL),
    "no column": (pyarrow.table({"body": LETTERS, "id": NUMBERS}), "no column 'text', it has body, id (see --json"),
    "numbers": (pyarrow.table({"text": NUMBERS}), "column 'text' holds int64, expected strings"),
    "twice": (pyarrow.Table.from_arrays([LETTERS, LETTERS], ["text", "text"]),
              "column 'text' is there 2 times, expected once"),
}  # fmt: skip
"""Tables of 3 rows without a text, and the reason."""


@pytest.mark.parametrize("kind", SHARDS)
def test_a_parquet_shard_without_texts_stops_or_is_skipped_row_by_row_as_json_is(tmp_path, kind):
    table, reason = SHARDS[kind]
    parquet.write_table(table, tmp_path / "b.parquet")
    for name in ("a", "c"):
        parquet.write_table(pyarrow.table({"id": NUMBERS, "text": [name] * 3}), tmp_path / f"{name}.parquet")
    refused(rf"b\.parquet:1: {re.escape(reason)}.*; fix the file, or skip such .* skip", texts, tmp_path)
    skipped = []
    assert texts(tmp_path, on_error="skip", on_skip=skipped.append) == ["a"] * 3 + ["c"] * 3
    assert [line.split(": ")[0].rpartition(":")[2] for line in skipped] == ["1", "2", "3"]
    assert all(f": {reason}" in line for line in skipped)
    found = list(iter_documents([str(tmp_path / "a.parquet")], ["text", "body"], "skip", skipped.append))
    assert found == [] and len(skipped) == 6, "rows that lack one of two columns"


def test_a_record_without_end_is_named_and_not_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_RECORD_BYTES", 1 << 21)
    path = write(tmp_path / "a.jsonl", '{"text": "short"}\n' + "x" * (1 << 24))
    refused(r"a\.jsonl: a record of more than 2 MiB before byte", texts, path)
