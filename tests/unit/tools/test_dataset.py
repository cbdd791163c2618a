"""tools/dataset.py as its users meet it: what it prints, what it exits with; and the tools that make texts into files.

Books become one document each, and so do sentences.
"""

import gzip
import json
import shlex
import shutil
from functools import partial

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands import dataset
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from tools import books_to_jsonl, split_sentences
from tools.books_to_jsonl import body
from tools.split_sentences import is_whole, sentences


@pytest.fixture
def command(run_tool):
    """`command(words…)` → (exit code, stdout, stderr) of tools/dataset.py."""
    return partial(run_tool, dataset)


def copy_to(prefix, corpus):
    """Copy the dataset of a corpus to another prefix."""
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{corpus.prefix}{suffix}", f"{prefix}{suffix}")


def test_inspect_shows_counts_lengths_and_text(tiny_corpus, command, tmp_path):
    indexed = IndexedDataset(tiny_corpus.prefix)
    lengths = sorted(map(len, indexed))
    flags = ("--vocab-file", tiny_corpus.vocab_file, "--documents", 2)
    code, out, err = command("inspect", tiny_corpus.prefix, *flags, "--output", tmp_path / "counts.json")
    assert code == 0 and not err
    assert f"600 documents, 600 sequences, {indexed.num_tokens:,} tokens as uint16" in out
    assert f"shortest {lengths[0]}" in out and f"50% {lengths[300]}" in out and f"longest {lengths[-1]}" in out
    first = json.loads(tiny_corpus.text_file.read_text(encoding="utf-8").splitlines()[0])["text"].lower()
    shown = out.split("document 0, ")[1].split(": ", 1)[1].split("\n")[0]
    assert shown.removesuffix(" …").replace(" ", "")[:60] == first.replace(" ", "")[:60]
    assert "document 1, " in out and "document 2, " not in out
    counts = json.loads((tmp_path / "counts.json").read_text())
    for low, high, count in counts["histogram"]:
        assert count == sum(low <= length <= high for length in lengths)
    assert sum(count for _, _, count in counts["histogram"]) == counts["documents"] == 600
    ids = " ".join(map(str, indexed[0][:3]))
    copy_to(tmp_path / "moved", tiny_corpus)
    out = command("inspect", tmp_path / "moved.idx", "--tokens", 3)[1]
    assert f": {ids} …" in out, "the vocabulary is not where the manifest says"
    assert "--tokenizer-type BertWordPieceLowerCase --vocab-file FILE --num-layers " in out


def test_inspect_finds_its_tokenizer_draws_says_how_to_train_and_refuses_another_one(tiny_corpus, command, tmp_path):
    flags = ("--vocab-file", tiny_corpus.vocab_file)
    without = command("inspect", tiny_corpus.prefix)[1]
    assert without == command("inspect", tiny_corpus.prefix, *flags)[1]
    words = shlex.split(without.splitlines()[-1].removeprefix("train on it: "))
    assert words[:2] == ["megatron-ddrp", "pretrain"]
    parsed = parse_arguments(words[2:]).config.data  # the manifest names the vocabulary
    assert (parsed.data_path, parsed.vocab_file) == ((str(tiny_corpus.prefix),), None)
    pieces = tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines()
    pieces[-1] = pieces[-1][::-1] + "x"
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    for flag, value, exit_code, complaint in (
        ("--vocab-file", tmp_path / "vocab.txt", 1, "the dataset was made by tokenizer"),
        ("--output", tmp_path / "x.pdf", 2, "x.pdf: expected a name that ends in .json or .png"),
    ):
        code, out, err = command("inspect", tiny_corpus.prefix, flag, value)
        assert code == exit_code and complaint in err and err.count("\n") == 1 and not out
    pytest.importorskip("matplotlib")
    assert command("inspect", tiny_corpus.prefix, "--output", tmp_path / "lengths.png")[0] == 0
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_tells_the_share_of_unknown_pieces(tiny_corpus, command, tmp_path):
    copy_to(tmp_path / "d", tiny_corpus)
    manifest = IndexedDataset(tiny_corpus.prefix).manifest
    tokens = manifest["tokens"]
    for unknown, expected in ((tokens // 200, "0.50% unknown pieces"), (tokens // 20, "5.00% unknown pieces")):
        (tmp_path / "d.json").write_text(json.dumps(manifest | {"unknown_tokens": unknown}))
        code, out, _ = command("inspect", tmp_path / "d")
        assert code == 0 and expected in out
        assert ("warning: this dataset: " in out) == (unknown == tokens // 20)
    del manifest["unknown_tokens"]  # as an earlier version wrote it
    (tmp_path / "d.json").write_text(json.dumps(manifest))
    assert "unknown pieces: not recorded" in command("inspect", tmp_path / "d")[1]


def test_verify_passes_what_is_sound_and_fails_what_is_not(tiny_corpus, command):
    words = ("verify", tiny_corpus.prefix, "--vocab-file", tiny_corpus.vocab_file)
    code, out, _ = command(*words)
    assert code == 0 and "sound; 600 documents" in out and "SHA-256 as in the manifest" in out
    code, out, _ = command(*words, "--tokenizer-type", "BertWordPieceCase")
    assert code == 1 and "made by tokenizer BertWordPieceLowerCase" in out and out.endswith("1 finding\n")


def test_merge_and_shuffle_print_what_they_wrote(tiny_corpus, command, tmp_path):
    copy_to(tmp_path / "more", tiny_corpus)
    code, out, _ = command("merge", "--output_prefix", tmp_path / "all", tiny_corpus.prefix, tmp_path / "more")
    assert code == 0 and out.startswith("2 datasets, 1,200 documents, ")
    assert command("verify", tmp_path / "all", "--vocab-file", tiny_corpus.vocab_file)[0] == 0
    words = ("shuffle", f"{tiny_corpus.prefix}.idx", "--output-prefix", tmp_path / "mixed")
    assert command(*words)[1:] == (f"600 documents, shuffled by seed 1234 → {tmp_path}/mixed.{{bin,idx}}\n", "")
    out = command(*words, "--seed", 5, "--overwrite")[1]
    assert "shuffled by seed 5" in out and IndexedDataset(tmp_path / "mixed").manifest["shuffled"] == 5


def test_a_book_is_one_document_whatever_its_blank_lines_and_what_is_none_is_refused_or_counted(run_tool, tmp_path):
    books = tmp_path / "books"
    (books / "more").mkdir(parents=True)
    (books / "b.txt").write_text("\ufeffOne day\nit rained.\n\n  \n\nThen not.\n", encoding="utf-8")
    (books / "more" / "a.txt.gz").write_bytes(gzip.compress(b"Ein Tag."))
    (books / "empty.txt").write_text(" \n\n")
    code, out, err = run_tool(books_to_jsonl, "--input", books, "--output", tmp_path / "out.jsonl")
    assert code == 0, err
    documents = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [d["text"] for d in documents] == ["One day\nit rained.\nThen not.", "Ein Tag."]
    assert "2 books" in out and "1 empty left out" in out
    two = BOOK.format("One") + BOOK.format("Two")
    for name, content, exit_code, complaint in (
        ("two.txt", two, 1, "holds 2 books, by its *** START lines, expected one"),
        ("a.jsonl", '{"text": "x"}\n', 2, "expected .txt, one book a file"),
        ("bad.txt", "caf\xe9 au lait", 1, "byte 4 is not UTF-8"),
    ):
        file = tmp_path / name / name
        file.parent.mkdir()
        file.write_bytes(content.encode("latin-1"))
        (file.parent / "good.txt").write_text("tea")
        words = ("--input", file.parent, "--output", tmp_path / "o.jsonl")
        code, _, err = run_tool(books_to_jsonl, *words)
        assert code == exit_code and name in err and complaint in err
        assert len(err.splitlines()) == 1 and not (tmp_path / "o.jsonl").exists()
    code, out, _ = run_tool(books_to_jsonl, *words, "--on-error", "skip")
    assert code == 0 and "1 books, " in out and "1 not UTF-8 left out" in out


def test_project_gutenbergs_header_and_licence_are_left_out_and_a_start_mark_may_take_three_lines():
    start, end = "*** START OF THIS PROJECT GUTENBERG EBOOK X ***", "*** END OF THE PROJECT GUTENBERG EBOOK X ***"
    assert body(f"Head\n{start}\nStory.\n{end}\nTail").strip() == "Story."
    assert body("A book *** START of nothing.") == "A book *** START of nothing."
    end = "*** END OF THE PROJECT GUTENBERG EBOOK A\nB ***\nTail"
    for mark, story in (
        ("FRANKENSTEIN;\nOR, THE MODERN PROMETHEUS ***\nStory.", "Story."),
        ("A\n B\nC ***  \n\nStory ***\n***\nMore.", "Story ***\n***\nMore."),
        ("A ***\nB ***\nStory.", "B ***\nStory."),
        ("A\nB\nC\nD ***\nStory.", "B\nC\nD ***\nStory."),  # no mark: it ends too late
        ("A\nStory.\n***\nMore.", "Story.\n***\nMore."),
    ):
        text = f"Head\n*** START OF THE PROJECT GUTENBERG EBOOK {mark}\n{end}\n"
        for line_break in ("\n", "\r\n"):
            assert body(text.replace("\n", line_break)).strip() == story.replace("\n", line_break)


BOOK = "*** START OF THE PROJECT GUTENBERG EBOOK {0} ***\n{0}.\n*** END OF THE PROJECT GUTENBERG EBOOK {0} ***\n"
DAYS = "At noon Mr. Hall, our guest {}, came to eat at noon. Nobody had seen Mr. Lane that day! Had they met?"


def test_every_whole_sentence_is_a_document_and_abbreviations_are_those_of_the_text(run_tool, tmp_path):
    text = "\n".join(["CHAPTER ONE", *(DAYS.format(day) for day in range(40)), "and so on."])
    documents = ({"text": text}, {"text": "It rained all day."})
    (tmp_path / "novel.jsonl").write_text("\n".join(map(json.dumps, documents)))
    code, out, err = run_tool(split_sentences, "--input", tmp_path / "novel.jsonl", "--output", tmp_path / "out.jsonl")
    assert code == 0, err
    found = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    noon = "At noon Mr. Hall, our guest {}, came to eat at noon."
    assert found[:3] == [noon.format(0), "Nobody had seen Mr. Lane that day!", "Had they met?"]
    assert found[-1] == "It rained all day." and len(found) == 121
    assert "121 sentences, 0.0 million characters" in out
    # the sentences before Punkt has learned are split like those behind them
    with_it = set(sentences((DAYS.format(day) for day in range(40)), 80))
    assert with_it >= {noon.format(day) for day in (0, 39)}
    assert list(sentences(iter(["He left. Mr. Hall stayed there."]), 80)) == ["Hall stayed there."]


def test_what_a_whole_sentence_is_longer_ones_are_left_out_and_a_text_without_any_is_named(run_tool, tmp_path):
    texts = ["She saw him.", "“Did she see him?”", "12 of them came.", "She saw.", "and she saw him."]
    texts += ["History of the town", "Two of them came.", "Two of them came here.", ""]
    kept = ["She saw him.", "“Did she see him?”", "12 of them came.", "Two of them came."]
    assert [text for text in texts if is_whole(text, max_words=4)] == kept
    text, made = tmp_path / "novel.txt", tmp_path / "out.jsonl"
    words = ("--input", text, "--output", made)
    text.write_text("A town\n\nAnother town\n")
    code, out, err = run_tool(split_sentences, *words)
    assert code == 1 and "novel.txt: no sentence of 3 to 80 words" in err
    assert len(err.splitlines()) == 1 and not made.exists()
    text.write_text("She saw him. He did not see her.\n")
    _, out, _ = run_tool(split_sentences, *words, "--max-words", 4)
    assert "1 sentences" in out and json.loads(made.read_text())["text"] == "She saw him."
