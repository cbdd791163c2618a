"""Partitioned preprocessing: every document in exactly one part, and the merge of all parts equal to one run."""

import gzip
import json
import lzma
import os
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.dataset.merging import merge
from megatron_ddrp.data.dataset.verification import verify
from megatron_ddrp.data.preprocess import pipeline
from megatron_ddrp.data.preprocess.documents import (
    Partition,
    iter_chunks,
    lines_before,
    own_bytes,
    own_files,
    parse_partition,
    partition_entry,
)
from megatron_ddrp.data.preprocess.inputs import InputFile, OpenInput, find_inputs
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.data.preprocess.records import parse_chunk
from megatron_ddrp.errors import UserError

WORDS = ["the", "cat", "sat", "##s", ".", "on", "mat", "a"]
KEYS = ("text", "title")


def some_text(chance):
    return " ".join(chance.choices(WORDS, k=chance.randint(0, 12)))


def json_lines(chance, end):
    lines = []
    for _ in range(chance.randint(0, 20)):
        lines += [json.dumps({"text": some_text(chance), "title": some_text(chance)})]
        lines += [chance.choice(["", "  "])] * chance.choice([0, 0, 0, 1, 3])
    return end.join(lines) + chance.choice(["", end, end * 3])


def paragraphs(chance, end):
    lines = []
    for _ in range(chance.randint(0, 20)):
        lines += [some_text(chance) or "a" for _ in range(chance.randint(1, 4))]
        lines += [chance.choice(["", " \t", "\x0b", "\xa0\u3000", "\x85"])] * chance.choice([1, 1, 2, 5])
    return end.join(lines) + chance.choice(["", end, "a mat"])


def articles(chance, end):
    return "".join(
        end.join([f'<doc id="{number}" url="u" title="T">', *(some_text(chance) for _ in range(3)), "</doc>", ""])
        for number in range(chance.randint(1, 8))
    )


def write_files(folder, chance):
    """Files of every format that can be read from the middle."""
    kinds = {"a.jsonl": json_lines, "b.txt": paragraphs, "c": articles, "d.json": json_lines, "e.txt": articles}
    kinds |= {"j.json": lambda *given: f"[{','.join(filter(str.strip, json_lines(*given).splitlines()))}]"}
    kinds |= {"f": json_lines, "g.txt": paragraphs, "h.jsonl": lambda *_: "", "i.txt": lambda *_: "a mat"}
    for name in chance.sample(sorted(kinds), 5):
        text = kinds[name](chance, chance.choice(["\n", "\r\n"]))
        mark = chance.choice(["", "\ufeff"]) if "." in name else ""
        (folder / name).write_bytes((mark + text).encode())
    (folder / "last.jsonl").write_text('{"text": "the cat", "title": "a mat"}')  # or there might be no file to read
    (folder / "z.txt").touch()  # begins where the last part ends
    return find_inputs([str(folder)])


def texts(files, chunk_bytes):
    found = []
    for file in files:
        with OpenInput(file) as opened:
            for chunk in iter_chunks(opened, KEYS, chunk_bytes):
                parsed = parse_chunk(chunk, KEYS)
                assert not parsed.faults
                found += parsed.texts
    return found


@pytest.mark.parametrize("seed", range(12))
def test_each_document_is_in_exactly_one_part(tmp_path, seed):
    chance = random.Random(seed)
    files = write_files(tmp_path, chance)
    whole = texts(files, 1 << 20)
    for of in (1, 2, 3, 5, 8, len(whole) + 10, 200):
        own = [own_files(files, Partition(part, of)) for part in range(1, of + 1)]
        assert [text for part in own for text in texts(part, chance.choice([1, 50, 1 << 20]))] == whole
        assert sum(map(own_bytes, own)) == own_bytes(files)
        assert {file.path for part in own for file in part} == {file.path for file in files}


def test_parts_are_of_equal_size_up_to_a_document(tmp_path):
    line = json.dumps({"text": "a" * 80}) + "\n"
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(line * 500)
    files = find_inputs([str(tmp_path)])
    sizes = [own_bytes(own_files(files, Partition(part, 7))) for part in range(1, 8)]
    assert max(sizes) - min(sizes) <= 2 * len(line)


def test_the_border_of_a_document_is_where_it_begins(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 4)  # 14 bytes a line
    files = find_inputs([str(path)])
    assert [file[2:] for part in (1, 2) for file in own_files(files, Partition(part, 2))] == [(0, 28), (28, 56)]
    assert [file[2:] for part in (1, 2, 3) for file in own_files(files, Partition(part, 3))] == [
        (0, 28),  # the line that begins at 14 crosses the border at 18
        (28, 42),
        (42, 56),
    ]


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "1/0", "-1/4", "1/4/2", "a/b", ""])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(UserError, match=r"--partition .*: expected I/N with I from 1 to N, such as 3/16"):
        parse_partition(text)
    assert parse_partition("3/16") == (3, 16)


def test_parts_know_the_names_and_the_sizes_of_all_files(tmp_path):
    def entry(**sizes):
        folder = tmp_path / str(sizes)
        folder.mkdir()
        for name, size in sizes.items():
            (folder / f"{name}.jsonl").write_bytes(b" " * size)
        return partition_entry(Partition(2, 3), find_inputs([str(folder)]))["inputs"]

    assert len({entry(a=5, b=7), entry(a=7, b=5), entry(a=5, b=8), entry(a=5, c=7)}) == 4


def test_a_stream_cannot_be_divided(folder):
    with pytest.raises(UserError, match=r"--partition 2/4: - is standard input, .* write it to a file first"):
        preprocess(config(folder, (2, 4), input=("-",)))


@pytest.fixture
def folder(tmp_path):
    """A vocabulary, and a corpus of plain, packed and Parquet files."""
    chance = random.Random(3)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_files(corpus, chance)
    rows = [{"text": some_text(chance), "title": some_text(chance)} for _ in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), corpus / "b.parquet", row_group_size=4)
    (corpus / "c.txt.gz").write_bytes(gzip.compress(paragraphs(chance, "\n").encode()))
    (corpus / "d.jsonl.gz").write_bytes(gzip.compress(json_lines(chance, "\n").encode()))
    return tmp_path


def config(folder, part=None, **changes):
    settings = {
        "input": (str(folder / "corpus"),),
        "output_prefix": str(folder / "out" / "p"),
        "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_file": str(folder / "vocab.txt"),
        "json_keys": KEYS,
        "partition": part and Partition(*part),
    }
    return PreprocessConfig(**(settings | changes))


def run_parts(folder, of, **changes):
    """Return the prefixes of all parts, by key."""
    prefixes = [preprocess(config(folder, (part, of), **changes)).prefixes for part in range(1, of + 1)]
    return {key: [by_key[k] for by_key in prefixes] for k, key in enumerate(KEYS)}


@pytest.mark.parametrize("of", [1, 3])
def test_the_merge_of_all_parts_is_one_run_byte_for_byte(folder, of, monkeypatch):
    once = preprocess(config(folder)).prefixes
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 64)
    chance = random.Random(0)
    for (key, parts), alone in zip(run_parts(folder, of).items(), once, strict=True):
        chance.shuffle(parts)
        merged = merge(folder / key, parts)
        for suffix in ("bin", "idx"):
            assert Path(f"{alone}.{suffix}").read_bytes() == (folder / f"{key}.{suffix}").read_bytes()
        assert list(verify(merged.prefix)) == []
        found, expected = merged.manifest, IndexedDataset(alone).manifest
        assert (found.pop("tokenizer_path"), expected.pop("tokenizer_path")) == ("vocab.txt", "../vocab.txt")
        files, whole = found.pop("inputs"), expected.pop("inputs")
        assert found == expected
        assert [(file["name"], file["bytes"]) for file in files] == [(file["name"], file["bytes"]) for file in whole]
        assert all(file == other or "ranges" in file for file, other in zip(files, whole, strict=True))
        assert any("ranges" in file for file in files) == (of > 1)


def test_names_keep_parts_apart_and_in_order(folder):
    names = [config(folder, (part, of)).prefixes[0] for of in (9, 12) for part in range(1, of + 1)]
    assert len(set(names)) == 21 and sorted(names[9:]) == names[9:]
    assert names[9] == str(folder / "out" / "p_part01-of-12_text_document")
    preprocess(config(folder, (1, 12)))
    with pytest.raises(UserError, match=r"p_part01-of-12_text_document\.bin: exists already"):
        preprocess(config(folder, (1, 12)))


def test_what_is_not_one_whole_run_is_refused(folder):
    parts = run_parts(folder, 4)["text"]
    third = preprocess(config(folder, (3, 3))).prefixes[0]
    with_end = preprocess(config(folder, (3, 4), output_prefix=str(folder / "eod"), append_eod=True)).prefixes[0]
    (folder / "corpus" / "new.jsonl").write_text('{"text": "a", "title": "b"}')
    other_files = preprocess(config(folder, (3, 4), output_prefix=str(folder / "other"))).prefixes[0]
    alone = preprocess(config(folder)).prefixes[0]
    rest = [*parts[:2], parts[3]]
    for given, complaint in (
        (rest, r"part 3 of 4 is missing among the 3 given; .* megatron-ddrp preprocess … --partition 3/4"),
        (parts[:1], r"parts 2, 3, 4 of 4 are missing"),
        ([*parts, parts[1]], r"part 2 of 4 is given 2 times, as .* and .*; give it once"),
        ([*rest, third], r"part1-of-4_text_document is part 1 of 4, but .*p_part3-of-3_text_document part 3 of 3"),
        ([*rest, with_end], r"made with append_eod False, but .*/eod_part3-of-4_text_document with True"),
        ([*rest, other_files], r"other_part3-of-4_text_document were made from different input files"),
        ([*parts, alone], r"but .*/p_text_document is not a part of such a run; merge the parts first"),
        ([*rest, parts[2].replace("text_doc", "title_doc")], r"made with json_key text, but .* with title"),
    ):
        with pytest.raises(UserError, match=complaint):
            merge(folder / "all", given)
    assert not list(folder.glob("all*"))


@pytest.fixture
def empty_corpus(folder):
    for path in (folder / "corpus").iterdir():
        path.unlink()
    return folder / "corpus"


def test_more_parts_than_documents_leave_some_empty(folder, empty_corpus):
    (empty_corpus / "a.jsonl").write_text('{"text": "a", "title": "the mat"}\n{"text": "", "title": "a cat"}\n')
    parts = run_parts(folder, 5)
    assert [len(IndexedDataset(part)) for part in parts["title"]] == [1, 0, 1, 0, 0]
    assert all(list(verify(part)) == [] for part in parts["title"])
    assert [len(merge(folder / key, parts[key])) for key in KEYS] == [1, 2]


def test_parts_without_any_text_end_as_one_run_does(folder, empty_corpus):
    (empty_corpus / "a.jsonl").write_text('{"text": "", "title": ""}\n')
    with pytest.raises(UserError, match="no text in any of the 2 parts; preprocess files that hold some"):
        merge(folder / "all", run_parts(folder, 2)["text"])


def test_a_file_that_changed_between_two_parts_is_seen(folder, empty_corpus):
    file = empty_corpus / "z.jsonl"
    lines = [json.dumps({"text": "the cat " * n, "title": "a"}) + "\n" for n in range(8)]
    file.write_text("".join(lines))
    first = preprocess(config(folder, (1, 2))).prefixes[0]
    file.write_text("".join(reversed(lines)))  # of the same size
    second = preprocess(config(folder, (2, 2))).prefixes[0]
    with pytest.raises(UserError, match=r"z\.jsonl changed between the parts: their ranges do not meet"):
        merge(folder / "all", [first, second])


def test_faults_have_their_line_in_the_whole_file(folder, empty_corpus):
    line = json.dumps({"text": "a cat", "title": "a"}) + "\n"
    (empty_corpus / "a.jsonl").write_text(line * 10 + "{}\n" + line * 3)
    with pytest.raises(UserError, match=r"a\.jsonl:11: no key 'text'"):
        preprocess(config(folder, (3, 3)))
    skipped = preprocess(config(folder, (3, 3), on_error="skip"))
    assert skipped.skipped == 1 and "a.jsonl:11: " in skipped.first_skipped


def test_a_fault_in_a_whole_file_does_not_open_it_again(folder, empty_corpus):
    packed = empty_corpus / "a.jsonl.xz"
    packed.write_bytes(lzma.compress(b'{}\n{"text": "a cat", "title": "a"}\n'))
    skipped = preprocess(config(folder, input=(str(packed),), on_error="skip"))
    assert skipped.skipped == 1 and skipped.by_key[0].documents == 1
    lines_before.cache_clear()
    with packed.open("rb") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", stream)
        assert lines_before(InputFile("-", "-")) == 0
        assert os.lseek(stream.fileno(), 0, os.SEEK_CUR) == 0
