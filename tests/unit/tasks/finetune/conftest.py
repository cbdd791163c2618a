"""Tasks of one's own in small files; the encoders are those of GLUE's tests."""

import json

import pytest

from tests.unit.tasks.glue.conftest import bert_folder, checkpoint_folder, glue_dir, sentences, training_run

__all__ = ["bert_folder", "checkpoint_folder", "glue_dir", "training_run"]

KINDS_OF_FIRST_WORD = {"red": "colour", "green": "colour", "blue": "colour", "cat": "animal", "dog": "animal"}


def first_word_kind(text):
    """One of three labels, by the first word."""
    return KINDS_OF_FIRST_WORD.get(text.split()[0], "other")


@pytest.fixture
def topics(tmp_path):
    """A folder with a three-class task in JSON lines, and a test file without labels."""
    folder = tmp_path / "topics"
    folder.mkdir()
    for name, count, seed in (("train", 64, 0), ("valid", 21, 1), ("new", 9, 2)):
        rows = [{"text": text, "label": first_word_kind(text)} for text, _ in sentences(count, seed)]
        if name == "new":
            rows = [{"id": number, "text": row["text"]} for number, row in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
