"""Books become one document each."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.books_to_jsonl import body

TOOL = Path(__file__).resolve().parents[3] / "tools" / "books_to_jsonl.py"


def run(*words):
    return subprocess.run([sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, timeout=60)


def test_a_book_is_one_document_whatever_its_blank_lines(tmp_path):
    books = tmp_path / "books"
    (books / "more").mkdir(parents=True)
    (books / "b.txt").write_text("\ufeffOne day\nit rained.\n\n  \n\nThen not.\n", encoding="utf-8")
    (books / "more" / "a.txt.gz").write_bytes(gzip.compress(b"Ein Tag."))
    (books / "empty.txt").write_text(" \n\n")
    done = run("--input", books, "--output", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [d["text"] for d in documents] == ["One day\nit rained.\nThen not.", "Ein Tag."]
    assert "2 books" in done.stdout and "1 empty left out" in done.stdout


def test_project_gutenbergs_header_and_licence_are_left_out():
    start, end = "*** START OF THIS PROJECT GUTENBERG EBOOK X ***", "*** END OF THE PROJECT GUTENBERG EBOOK X ***"
    text = f"Head\n{start}\nStory.\n{end}\nTail"
    assert body(text).strip() == "Story."
    assert body("A book *** START of nothing.") == "A book *** START of nothing."


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("mark", "story"),
    [
        ("FRANKENSTEIN;\nOR, THE MODERN PROMETHEUS ***\nStory.", "Story."),
        ("A\n B\nC ***  \n\nStory ***\n***\nMore.", "Story ***\n***\nMore."),
        ("A ***\nB ***\nStory.", "B ***\nStory."),
        ("A\nB\nC\nD ***\nStory.", "B\nC\nD ***\nStory."),  # no mark: it ends too late
        ("A\n\nStory. ***", "Story. ***"),
        ("A\nStory.\n***\nMore.", "Story.\n***\nMore."),
        ("A", ""),
    ],
)
def test_a_start_mark_may_take_three_lines(mark, story, line_break):
    end = "*** END OF THE PROJECT GUTENBERG EBOOK A\nB ***\nTail"
    text = f"Head\n*** START OF THE PROJECT GUTENBERG EBOOK {mark}\n{end}\n".replace("\n", line_break)
    assert body(text).strip() == story.replace("\n", line_break)


def test_a_file_of_several_books_is_refused(tmp_path):
    book = "*** START OF THE PROJECT GUTENBERG EBOOK {0} ***\n{0}.\n*** END OF THE PROJECT GUTENBERG EBOOK {0} ***\n"
    (tmp_path / "two.txt").write_text(book.format("One") + book.format("Two"))
    done = run("--input", tmp_path, "--output", tmp_path / "o.jsonl")
    assert done.returncode == 1 and "two.txt: holds 2 books, by its *** START lines, expected one" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "o.jsonl").exists()


def test_a_book_that_is_not_utf8_stops_or_is_counted(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "good.txt").write_text("tea")
    words = ("--input", tmp_path, "--output", tmp_path / "o.jsonl")
    done = run(*words)
    assert done.returncode == 1 and "bad.txt: byte 4 is not UTF-8" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "o.jsonl").exists()
    done = run(*words, "--on-error", "skip")
    assert done.returncode == 0 and "1 books, " in done.stdout and "1 not UTF-8 left out" in done.stdout


def test_other_kinds_of_files_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    done = run("--input", tmp_path, "--output", tmp_path / "o.jsonl")
    assert done.returncode == 2 and "expected .txt, one book a file" in done.stderr
