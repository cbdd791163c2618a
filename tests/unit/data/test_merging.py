"""Merging, partitions and shuffling: the bytes of one writer, and nothing under the final name before its time."""

import gzip
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.dataset import dataset_index, indexed_dataset, merging
from megatron_ddrp.data.dataset.merging import merge, shuffle
from megatron_ddrp.data.dataset.verification import verify
from megatron_ddrp.data.preprocess import documents as reading
from megatron_ddrp.data.preprocess import pipeline
from megatron_ddrp.data.preprocess.documents import Partition, own_bytes, own_files
from megatron_ddrp.data.preprocess.inputs import InputFile, OpenInput, find_inputs
from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.data.preprocess.records import parse_chunk
from tests.datasets import wordpiece_job, write_dataset
from tests.refusals import refused


def write(prefix, documents, dtype=np.uint16, manifest=None):
    return write_dataset(prefix, documents, dtype, manifest).prefix


def manifest(name, documents, fingerprint="f" * 64):
    counts = dict.fromkeys(("documents", "sequences", "tokens"), documents) | {"skipped": 1}
    tokenizer = {"type": "SentencePiece", "fingerprint": fingerprint, "vocab_size": 900}
    made = {"json_key": name, "append_eod": True, "dtype": "uint16", "tokenizer": tokenizer}
    return counts | made | {"inputs": [{"name": f"{name}.jsonl", "bytes": 7}]}


def same_files(one, other, suffixes=("bin", "idx")):
    return all(Path(f"{one}.{suffix}").read_bytes() == Path(f"{other}.{suffix}").read_bytes() for suffix in suffixes)


def damage(prefix, suffix, place, value=None):
    """Change one byte of a file of a dataset."""
    data = bytearray(Path(f"{prefix}{suffix}").read_bytes())
    data[place] = data[place] ^ 1 if value is None else value
    Path(f"{prefix}{suffix}").write_bytes(data)


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_the_bytes_are_those_of_one_writer(tmp_path, monkeypatch, chunk):
    for module, name in ((dataset_index, "CHUNK"), (merging, "CHUNK"), (indexed_dataset, "CHUNK_TOKENS")):
        monkeypatch.setattr(module, name, chunk)
    parts = ([[[1, 2], [3]], [[4]]], [], [[[5], [], [6, 7, 8]]], [[[40_000]]])
    types = (np.uint16, np.uint8, np.int32, np.uint16)
    prefixes = [write(tmp_path / str(k), part, types[k]) for k, part in enumerate(parts)]
    read = []
    merged = merge(tmp_path / "all", prefixes, advance=read.append)
    assert merged.dtype == np.int32 and sum(read) == 8 + 0 + 16 + 2
    write(tmp_path / "once", [document for part in parts for document in part], np.int32)
    assert same_files(tmp_path / "all", tmp_path / "once")
    same = merge(tmp_path / "same", [prefixes[0], prefixes[3]])
    assert same.dtype == np.uint16 and same[3].tolist() == [40_000]
    assert not list(tmp_path.glob("*.unfinished")) and list(verify(tmp_path / "all")) == []


def test_manifests_add_up(tmp_path):
    a = write(tmp_path / "a", [[[1]], [[2]]], manifest=manifest("a", 2))
    b = write(tmp_path / "b", [[[3]]], manifest=manifest("b", 1))
    found = merge(tmp_path / "all", [a, b]).manifest
    assert (found["documents"], found["sequences"], found["tokens"], found["skipped"]) == (3, 3, 3, 2)
    assert found["inputs"] == [{"name": "a.jsonl", "bytes": 7}, {"name": "b.jsonl", "bytes": 7}]
    assert found["merged"] == ["a", "b"] and found["tokenizer"]["fingerprint"] == "f" * 64
    assert found["append_eod"] and "json_key" not in found  # they disagree on it
    assert "unknown_tokens" not in found, "an earlier version did not count them"
    counted = [write(tmp_path / f"c{n}", [[[1]]], manifest=manifest("c", 1) | {"unknown_tokens": n}) for n in (3, 4)]
    assert merge(tmp_path / "all-c", counted).manifest["unknown_tokens"] == 7
    assert "unknown_tokens" not in merge(tmp_path / "mixed", [counted[0], a]).manifest
    bare = write(tmp_path / "bare", [[[1]]], manifest={"append_eod": True})
    assert merge(tmp_path / "counted", [a, bare]).manifest["documents"] == 3
    assert [*verify(tmp_path / "all"), *verify(tmp_path / "counted")] == []
    plain, kept = write(tmp_path / "plain", [[[9]]]), write(tmp_path / "kept", [[[8]]], manifest={"json_key": "text"})
    assert merge(tmp_path / "more", [kept, plain]).manifest is None
    for mixed in ([a, kept], [plain, a]):
        refused("/a was made with --append-eod, but .*/(kept|plain) without it", merge, tmp_path / "mixed ends", mixed)
    made = [write(tmp_path / name, [[[1, 2]]], manifest=manifest(name, 1) | {"shuffled": 5}) for name in "ab"]
    assert "shuffled" not in merge(tmp_path / "both", made).manifest
    assert merge(tmp_path / "one", made[:1]).manifest["shuffled"] == 5


def test_refusals_leave_everything_as_it_was(tmp_path):
    a = write(tmp_path / "a", [[[1]]], manifest=manifest("a", 1))
    b = write(tmp_path / "b", [[[2]]], manifest=manifest("b", 1, "e" * 64))
    damaged = write(tmp_path / "c", [[[1]], [[2]], [[3]]], manifest=manifest("c", 3))
    damage(damaged, ".idx", 34 + 12 + 8, 3)  # the byte offset of the second sequence
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"link{suffix}").symlink_to(f"a{suffix}")
    # Another id, and a moved border.
    moved = [write(tmp_path / name, [[[1], [2]], [[3]]], manifest=manifest(name, 2)) for name in ("id", "border")]
    damage(moved[0], ".bin", 0, 7)
    damage(moved[1], ".idx", -16, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for output, prefixes, complaint in (
        ("all", [a, b], "a was made by tokenizer SentencePiece f{12} of 900 pieces, but .*/b by .* e{12}"),
        ("all", [a, damaged], r"c\.idx: sequence 1 begins at byte 3, but sequence 0 ends at byte 2"),
        ("all", [a, str(tmp_path / "none")], r"none\.idx: No such file"),
        ("a", [a, a], r"a\.bin: exists already; give --overwrite"),
        ("all", [a, f"{a}.idx"], r"/a is given 2 times; name each dataset once \(its \.idx, not its \.bin too\)"),
        ("all", [a, str(tmp_path / "link")], "/a is given 2 times"),
        ("all", [a, moved[0]], r"id\.bin: SHA-256 .* changed since then"),
        ("all", [a, moved[1]], r"border\.idx: SHA-256 .* changed since then"),
    ):
        refused(complaint, merge, tmp_path / output, prefixes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    other = write(tmp_path / "d", [[[4]]], manifest=manifest("d", 1))
    assert [ids.tolist() for ids in merge(tmp_path / "a", [a, other], overwrite=True)] == [[1], [4]]


WORDS = ["the", "cat", "sat", "##s", ".", "on", "mat", "a"]
KEYS = ("text", "title")
LINES = '{"text": "the cats", "title": "a mat"}\n\n  \n{"text": "", "title": "cat"}\n{"text": "sat.", "title": ""}\n'
PARAGRAPHS = "the cat\nsat\n\n \t\na mat\n\xa0\u3000\n\n\x0b\nthe cat\n\x85\non the mat\n\n"
ARTICLE = '<doc id="1" url="u" title="T">\nthe cat\n\nsat\n</doc>\n'
FILES = {
    **{"a.jsonl": LINES * 20, "b.txt": "\ufeff" + PARAGRAPHS * 5 + "a mat", "c": ARTICLE * 8, "d.jsonl": ""},
    **{"e.json": '[{"text": "the", "title": "a"}, {"text": "cat", "title": "mat"}]', "f": LINES, "g.txt": ARTICLE * 2},
    **{"h.txt": "a mat", "last.jsonl": '{"text": "the cat", "title": "a mat"}'},
    "z.txt": "",  # begins where the last part ends
}
"""Name → content, in every format that can be read from the middle."""


def write_files(folder, end="\n"):
    for name, content in FILES.items():
        (folder / name).write_bytes(content.replace("\n", end).encode())
    return find_inputs([str(folder)])


def texts(files, chunk_bytes):
    found = []
    for file in files:
        with OpenInput(file) as opened:
            for chunk in reading.iter_chunks(opened, KEYS, chunk_bytes):
                documents, faults = parse_chunk(chunk, KEYS)
                assert not faults
                found += documents
    return found


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("chunk_bytes", [1, 50, 1 << 20])
def test_each_document_is_in_exactly_one_part(tmp_path, end, chunk_bytes):
    files = write_files(tmp_path, end)
    whole = texts(files, 1 << 20)
    for of in (1, 2, 3, 5, 8, len(whole) + 10, 200):
        own = [own_files(files, Partition(part, of)) for part in range(1, of + 1)]
        assert [text for part in own for text in texts(part, chunk_bytes)] == whole
        assert sum(map(own_bytes, own)) == own_bytes(files)
        assert {file.path for part in own for file in part} == {file.path for file in files}


def test_borders_are_where_documents_begin_and_parts_of_equal_size(tmp_path):
    line, path = json.dumps({"text": "a" * 80}) + "\n", tmp_path / "a.jsonl"
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(line * 500)
    files = find_inputs([str(tmp_path)])
    sizes = [own_bytes(own_files(files, Partition(part, 7))) for part in range(1, 8)]
    assert max(sizes) - min(sizes) <= 2 * len(line)
    path.write_text('{"text": "a"}\n' * 4)  # 14 bytes a line
    files = find_inputs([str(path)])
    for of, ranges in ((2, [(0, 28), (28, 56)]), (3, [(0, 28), (28, 42), (42, 56)])):
        # Of three parts: the line that begins at 14 crosses the border at 18.
        assert [file[2:] for part in range(1, of + 1) for file in own_files(files, Partition(part, of))] == ranges


def test_what_is_no_part_is_refused_and_parts_know_the_names_and_the_sizes_of_all_files(tmp_path):
    for text in ("0/4", "5/4", "4", "1/0", "-1/4", "1/4/2", "a/b", ""):
        line = r"--partition .*: expected I/N with I from 1 to N, such as 3/16"
        refused(line, reading.parse_partition, text)
    assert reading.parse_partition("3/16") == (3, 16)
    entries = set()
    for sizes in ({"a": 5, "b": 7}, {"a": 7, "b": 5}, {"a": 5, "b": 8}, {"a": 5, "c": 7}):
        folder = tmp_path / str(sizes)
        folder.mkdir()
        for name, size in sizes.items():
            (folder / f"{name}.jsonl").write_bytes(b" " * size)
        entries.add(reading.partition_entry(Partition(2, 3), find_inputs([str(folder)]))["inputs"])
    assert len(entries) == 4


@pytest.fixture
def folder(tmp_path):
    """A vocabulary, and a corpus of plain, packed and Parquet files."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_files(corpus)
    rows = [{"text": "the cat " * number, "title": "a mat"} for number in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), corpus / "b.parquet", row_group_size=4)
    for name, content in (("c.txt.gz", PARAGRAPHS), ("d.jsonl.gz", LINES)):
        (corpus / name).write_bytes(gzip.compress(content.encode()))
    return tmp_path


def config(folder, part=None, **changes):
    settings = {"json_keys": KEYS, "partition": part and Partition(*part)} | changes
    return wordpiece_job(folder / "vocab.txt", folder / "out" / "p", folder / "corpus", **settings)


def run_parts(folder, of, **changes):
    """Return the prefixes of all parts, by key."""
    prefixes = [preprocess(config(folder, (part, of), **changes)).prefixes for part in range(1, of + 1)]
    return {key: [by_key[k] for by_key in prefixes] for k, key in enumerate(KEYS)}


@pytest.mark.parametrize("of", [1, 3])
def test_the_merge_of_all_parts_is_one_run_byte_for_byte(folder, of, monkeypatch):
    once = preprocess(config(folder)).prefixes
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 64)
    for (key, parts), alone in zip(run_parts(folder, of).items(), once, strict=True):
        merged = merge(folder / key, parts[::-1])
        assert same_files(alone, merged.prefix) and list(verify(merged.prefix)) == []
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
    refused(r"p_part01-of-12_text_document\.bin: exists already", preprocess, config(folder, (1, 12)))


def test_what_is_not_one_whole_run_is_refused(folder):
    parts = run_parts(folder, 4)["text"]
    third = preprocess(config(folder, (3, 3))).prefixes[0]
    with_end = preprocess(config(folder, (3, 4), output_prefix=str(folder / "eod"), append_eod=True)).prefixes[0]
    (folder / "corpus" / "new.jsonl").write_text('{"text": "a", "title": "b"}')
    other_files = preprocess(config(folder, (3, 4), output_prefix=str(folder / "other"))).prefixes[0]
    alone = preprocess(config(folder)).prefixes[0]
    rest = [*parts[:2], parts[3]]
    for given, complaint in (
        (rest, r"parts \[3\] of 4 are not given; .* megatron-ddrp preprocess … --partition 3/4"),
        (parts[:1], r"parts \[2, 3, 4\] of 4 are not given"),
        ([*parts, parts[1]], r"part 2 of 4 is given 2 times, as .* and .*; give it once"),
        ([*rest, third], r"part1-of-4_text_document is part 1 of 4, but .*p_part3-of-3_text_document part 3 of 3"),
        ([*rest, with_end], r"made with append_eod False, but .*/eod_part3-of-4_text_document with True"),
        ([*rest, other_files], r"other_part3-of-4_text_document were made from different input files"),
        ([*parts, alone], r"but .*/p_text_document is not a part of such a run; merge the parts first"),
        ([*rest, parts[2].replace("text_doc", "title_doc")], r"made with json_key text, but .* with title"),
    ):
        refused(complaint, merge, folder / "all", given)
    assert not list(folder.glob("all*"))
    stream = config(folder, (2, 4), input=("-",))
    refused(r"--partition 2/4: - is standard input, .* write it to a file first", preprocess, stream)


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
    (empty_corpus / "a.jsonl").write_text('{"text": "", "title": ""}\n')
    nothing = "no text in any of the 2 parts; preprocess files that hold some"
    refused(nothing, merge, folder / "all", run_parts(folder, 2)["text"])


def test_a_change_between_two_parts_is_seen_and_faults_have_their_line_in_the_whole_file(folder, empty_corpus):
    """A file that is read whole is not opened again for the number of a line."""
    file = empty_corpus / "z.jsonl"
    lines = [json.dumps({"text": "the cat " * n, "title": "a"}) + "\n" for n in range(8)]
    file.write_text("".join(lines))
    parts = [preprocess(config(folder, (1, 2))).prefixes[0]]
    file.write_text("".join(reversed(lines)))  # of the same size
    parts += [preprocess(config(folder, (2, 2))).prefixes[0]]
    refused(r"z\.jsonl changed between the parts: their ranges do not meet", merge, folder / "all", parts)
    line = json.dumps({"text": "a cat", "title": "a"}) + "\n"
    file.write_text(line * 10 + "{}\n" + line * 3)
    refused(r"z\.jsonl:11: no key 'text'", preprocess, config(folder, (3, 3)))
    skipped = preprocess(config(folder, (3, 3), on_error="skip"))
    assert skipped.skipped == 1 and "z.jsonl:11: " in skipped.first_skipped
    packed = empty_corpus / "a.jsonl.xz"
    packed.write_bytes(lzma.compress(b'{}\n{"text": "a cat", "title": "a"}\n'))
    skipped = preprocess(config(folder, input=(str(packed),), on_error="skip"))
    assert skipped.skipped == 1 and skipped.by_key[0].documents == 1
    reading.lines_before.cache_clear()
    with packed.open("rb") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", stream)
        assert reading.lines_before(InputFile("-", "-")) == 0 == os.lseek(stream.fileno(), 0, os.SEEK_CUR)


MANIFEST = {"documents": 50, "json_key": "text", "partition": {"part": 1, "of": 2}, "inputs": [{"name": "a.jsonl"}]}


def source(folder, dtype=np.uint16, manifest=MANIFEST):
    """50 documents of 0 to 3 sequences of 0 to 6 ids."""
    draw = np.random.default_rng(0).integers
    documents = [[draw(0, 200, draw(0, 7)).tolist() for _ in range(draw(0, 4))] for _ in range(50)]
    return write_dataset(folder / "source", documents, dtype, manifest)


def documents_of(dataset):
    bounds = dataset.document_indices.tolist()
    return [tuple(tuple(dataset[i].tolist()) for i in range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_every_document_once_and_whole_in_the_seeds_order_whatever_the_block(tmp_path, dtype, monkeypatch):
    dataset, read = source(tmp_path, dtype), []
    shuffled = shuffle(tmp_path / "mixed.bin", f"{dataset.prefix}.idx", 1, advance=read.append)
    before, after = documents_of(dataset), documents_of(shuffled)
    assert sorted(before) == sorted(after) and before != after
    assert shuffled.dtype == dtype and shuffled.prefix == str(tmp_path / "mixed")
    assert list(verify(shuffled.prefix)) == [] and not list(tmp_path.glob("*.unfinished"))
    assert sum(read) == 2 * dataset.bin_bytes  # once for the SHA-256
    assert documents_of(shuffle(tmp_path / "other", dataset.prefix, 2)) != after
    monkeypatch.setattr(merging, "BLOCK", 7)
    shuffle(tmp_path / "again", dataset.prefix, 1)
    assert same_files(tmp_path / "again", shuffled.prefix, ("bin", "idx", "json"))


def test_the_manifest_names_the_seed_and_no_part_and_is_not_made_up(tmp_path):
    found = shuffle(tmp_path / "mixed", source(tmp_path).prefix, 5).manifest
    assert found["shuffled"] == 5 and found["inputs"] == [{"name": "a.jsonl"}] and found["documents"] == 50
    assert "partition" not in found
    dataset, read = source(tmp_path, manifest=None), []
    assert shuffle(tmp_path / "other", dataset.prefix, 1, advance=read.append).manifest is None
    assert sum(read) == dataset.bin_bytes  # one pass


def test_an_output_is_replaced_only_when_asked_may_be_the_input_and_damage_gets_no_new_checksum(tmp_path):
    dataset = source(tmp_path)
    before = documents_of(dataset)
    refused("source.bin: exists already; give --overwrite", shuffle, dataset.prefix, dataset.prefix, 1)
    after = documents_of(shuffle(dataset.prefix, dataset.prefix, 1, overwrite=True))
    assert sorted(after) == sorted(before) and after != before and list(verify(dataset.prefix)) == []
    for suffix, place in ((".bin", -1), (".idx", -8), (".idx", 40)):
        prefix = source(tmp_path).prefix
        damage(prefix, suffix, place)
        refused(rf"source\{suffix}", shuffle, tmp_path / "mixed", prefix, 1)
    assert list(tmp_path.glob("mixed*")) == []
