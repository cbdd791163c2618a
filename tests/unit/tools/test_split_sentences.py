"""Sentences become one document each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.split_sentences import is_whole, sentences

TOOL = Path(__file__).resolve().parents[3] / "tools" / "split_sentences.py"
DAYS = "At noon Mr. Hall, our guest {}, came to eat at noon. Nobody had seen Mr. Lane that day! Had they met?"


def run(*words):
    return subprocess.run([sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, timeout=60)


def test_every_whole_sentence_is_a_document(tmp_path):
    text = "\n".join(["CHAPTER ONE", *(DAYS.format(day) for day in range(40)), "and so on."])
    (tmp_path / "novel.jsonl").write_text(
        json.dumps({"text": text}) + "\n" + json.dumps({"text": "It rained all day."})
    )
    done = run("--input", tmp_path / "novel.jsonl", "--output", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found[:3] == [
        "At noon Mr. Hall, our guest 0, came to eat at noon.",
        "Nobody had seen Mr. Lane that day!",
        "Had they met?",
    ]
    assert found[-1] == "It rained all day." and len(found) == 121
    assert "121 sentences, 0.0 million characters" in done.stdout


def test_abbreviations_are_those_of_the_text():
    """The sentences before Punkt has learned are split like those behind them."""
    with_it = list(sentences((DAYS.format(day) for day in range(40)), 80))
    assert (
        "At noon Mr. Hall, our guest 0, came to eat at noon." in with_it
        and "At noon Mr. Hall, our guest 39, came to eat at noon." in with_it
    )
    assert list(sentences(iter(["He left. Mr. Hall stayed there."]), 80)) == ["Hall stayed there."]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("She saw him.", True),
        ("“Did she see him?”", True),
        ("12 of them came.", True),
        ("She saw.", False),
        ("and she saw him.", False),
        ("History of the town", False),
        ("Two of them came.", True),
        ("Two of them came here.", False),
        ("", False),
    ],
)
def test_what_a_whole_sentence_is(text, kept):
    assert is_whole(text, max_words=4) is kept


def test_longer_sentences_are_left_out(tmp_path):
    (tmp_path / "novel.txt").write_text("She saw him. He did not see her.\n")
    done = run("--input", tmp_path / "novel.txt", "--output", tmp_path / "out.jsonl", "--max-words", 4)
    assert "1 sentences" in done.stdout and json.loads((tmp_path / "out.jsonl").read_text())["text"] == "She saw him."


def test_a_text_without_sentences_is_named(tmp_path):
    (tmp_path / "titles.txt").write_text("A town\n\nAnother town\n")
    done = run("--input", tmp_path / "titles.txt", "--output", tmp_path / "out.jsonl")
    assert done.returncode == 1 and "titles.txt: no sentence of 3 to 80 words" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out.jsonl").exists()
