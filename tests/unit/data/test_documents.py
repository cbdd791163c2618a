"""Readers: formats, packings, and every fault named by file and line."""

import bz2
import gzip
import json
import lzma
import random

import pytest
import zstandard

from megatron_ddrp.data.documents import check_inputs, iter_chunks, iter_documents
from megatron_ddrp.errors import UserError

PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def texts(*paths, **options):
    return [document[0] for document in iter_documents([str(path) for path in paths], **options)]


@pytest.mark.parametrize("packing", PACK)
def test_packings_in_one_and_in_two_members(tmp_path, packing):
    lines = [json.dumps({"text": f"document {i} é"}).encode() + b"\n" for i in range(50)]
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACK[packing](b"".join(lines[:30])) + PACK[packing](b"".join(lines[30:])))
    assert texts(path) == [f"document {i} é" for i in range(50)]


@pytest.mark.parametrize("packing", [packing for packing in PACK if packing])
def test_a_cut_or_damaged_file_is_an_error_and_not_a_shorter_corpus(tmp_path, packing):
    noise = random.Random(0)
    lines = b"".join(json.dumps({"text": hex(noise.getrandbits(400))}).encode() + b"\n" for _ in range(3000))
    packed = PACK[packing](lines)
    path = tmp_path / f"a.jsonl{packing}"
    for data in (packed[:-20], packed[: len(packed) // 2], b"no such format" + packed):
        path.write_bytes(data)
        with pytest.raises(UserError, match="damaged or cut off after line"):
            texts(path)


def test_plain_text_documents_lie_between_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\n one\r\ntwo\r\n\r\n \t\nthree\n\nfour")
    assert texts(path) == [" one\ntwo", "three", "four"]
    [chunk] = iter_chunks([str(path)])
    assert [line for line, _ in chunk.records] == [2, 6, 8]


def test_json_lines_keys_blank_lines_and_byte_order_mark(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(
        '\ufeff{"text": "a", "title": "A"}\n\n{"title": "B", "text": "b\\ud83d\\ude00"}\r\n', encoding="utf-8"
    )
    assert list(iter_documents([str(path)], ["title", "text"])) == [("A", "a"), ("B", "b\U0001f600")]


BAD = [
    (b'{"text": "a"', "not JSON"),
    (b"[1]", "a JSON list, expected one object a line"),
    (b'{"body": "a"}', "no key 'text', it has body"),
    (b'{"text": 3}', "key 'text' holds int, expected a string"),
    (b'{"text": "\xff"}', r"not UTF-8 \(byte 0xff\)"),
    (b'{"text": "\\ud800"}', "key 'text' holds half a surrogate pair"),
    (b"[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=["json", "list", "key", "type", "utf8", "surrogate", "deep"])
def test_a_bad_line_stops_with_its_number_or_is_skipped_and_told(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl:3: {reason}.*--on-error skip") as caught:
        texts(path)
    assert "\n" not in str(caught.value)
    skipped = []
    assert texts(path, on_error="skip", on_skip=skipped.append) == ["first", "last"]
    assert len(skipped) == 1 and "a.jsonl:3: " in skipped[0]


def test_bad_bytes_in_plain_text_are_named_by_their_own_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ntwo\nthree \xfe\n")
    with pytest.raises(UserError, match=r"a\.txt:4: not UTF-8 \(byte 0xfe\)"):
        texts(path)


def test_inputs_are_checked_before_anything_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    for name, complaint in (("none.jsonl", "No such file"), ("a.csv", "expected a name that ends in"), (".", "folder")):
        with pytest.raises(UserError, match=complaint):
            check_inputs([str(tmp_path / name)])


def test_chunks_keep_order_stay_small_and_add_up_to_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(100)))
    chunks = list(iter_chunks([str(path), str(path)], chunk_bytes=200))
    assert len(chunks) > 10 and all(sum(len(data) for _, data in chunk.records) < 300 for chunk in chunks)
    assert [line for chunk in chunks for line, _ in chunk.records] == [*range(1, 101)] * 2
    assert sum(chunk.read for chunk in chunks) == 2 * path.stat().st_size
