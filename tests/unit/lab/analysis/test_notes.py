"""`tools/analyze.py notes` on a dictionary whose answers are known."""

import json

import numpy as np
import pytest
import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint.weights import Form, note_tensors, write_tensors
from megatron_ddrp.config import Config, ObjectiveConfig
from megatron_ddrp.data.batches.word_counts import WordFinder, count_rare_words
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis.reports import analyze_notes, nearest_notes, share_of_sentences
from megatron_ddrp.objectives.electra import NoteDictionary
from tests.datasets import write_dataset
from tests.integration.launch import run_program

SENTENCES = ["the cat sings .", "the red dog !", "the the .", "the cat and the bird", "red ."]


@pytest.fixture
def tokenizer(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "bird", "red", "and", "sing", "##s"]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*pieces, ".", "!"]) + "\n")
    return build_tokenizer("BertWordPieceLowerCase", vocab)


@pytest.fixture
def dataset(tokenizer, tmp_path):
    texts = (" ".join(SENTENCES[:4]), SENTENCES[4])
    return write_dataset(tmp_path / "d", [[tokenizer.encode(text)] for text in texts])


@pytest.fixture
def rare(dataset, tokenizer):
    finder = WordFinder(tokenizer)
    return count_rare_words([(dataset, (0, 2))], finder, (1, 2))


def names(rare, tokenizer):
    return {tokenizer.decode(rare.word(number)): number for number in range(1, len(rare) + 1)}


def test_sentences_with_a_rare_word(dataset, rare, tokenizer):
    assert set(names(rare, tokenizer)) == {"cat", "sings", "red", "dog", "!", "and", "bird"}
    facts = share_of_sentences(dataset, rare, tokenizer, documents=100)
    assert (facts["sentences"], facts["sentences_with_a_rare_word"]) == (5, 4)
    assert share_of_sentences(dataset, rare, tokenizer, documents=1)["sentences"] == 4


def notes_of(rare, tokenizer):
    """cat and bird alike, dog opposed; a large part common to all."""
    number = names(rare, tokenizer)
    notes = NoteDictionary(rare, 3, ObjectiveConfig(notes=True))
    for word, vector in (("cat", [1, 0, 9]), ("bird", [1, 0.1, 9]), ("dog", [-1, 0, 9]), ("sings", [-1, 1, 9])):
        notes.notes[number[word] - 1] = torch.tensor(vector, dtype=torch.float32)
        notes.met[number[word] - 1] = True
    return notes


def test_nearest_notes_look_past_what_all_share(rare, tokenizer):
    notes = notes_of(rare, tokenizer)
    met = (notes.met.nonzero().squeeze(-1) + 1).tolist()
    near = nearest_notes("cat", rare, met, notes.notes[notes.met], tokenizer, 2)
    assert [other["word"] for other in near] == ["bird", "dog"]
    assert near[0]["cosine"] > 0.9 > 0.0 > near[1]["cosine"]
    with pytest.raises(UserError, match="--words red: no note"):
        nearest_notes("red", rare, met, notes.notes[notes.met], tokenizer, 2)


def write_notes(folder, rare, tokenizer, step=3):
    """Write a checkpoint that holds notes alone; return its file of notes."""
    path = folder / checkpoint.tag(step)
    path.mkdir(parents=True)
    tensors = note_tensors(notes_of(rare, tokenizer))
    name = f"{checkpoint.BESIDE}-00-of-01.safetensors"
    facts = write_tensors(path / name, {key: Form.of(t) for key, t in tensors.items()}, tensors.items())
    counts = {"iteration": step, "consumed_samples": 0, "consumed_tokens": 0}
    state = {**counts, checkpoint.WEIGHTS_ONLY: True, "files": {name: facts}, "config": Config().to_dict()}
    checkpoint.write_state(path, state)
    tokenizer.save(folder / checkpoint.TOKENIZER)
    checkpoint.mark_latest(folder, path.name)
    return path / name


def test_damaged_notes_are_passed_over_or_refused(rare, tokenizer, tmp_path, capsys):
    files = [write_notes(tmp_path, rare, tokenizer, step) for step in (3, 4)]
    for file in reversed(files):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        if file == files[1]:
            found = analyze_notes(tmp_path, None, ["sings"], 2, 10)
            assert found["checkpoint"] == str(files[0].parent)
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"skipped {file.parent}: {file.name} has the CRC-32 ")
    for load in (tmp_path, files[0].parent):
        with pytest.raises(UserError, match="has the CRC-32"):
            analyze_notes(load, None, ["sings"], 2, 10)


def test_the_command(rare, tokenizer, dataset, tmp_path):
    write_notes(tmp_path / "run", rare, tokenizer)
    command = ["tools/analyze.py", "notes", "--load", tmp_path / "run"]
    more = ["--data-path", dataset.prefix, "--words", "sings", "--output", tmp_path / "notes.json"]
    done = run_program(*command, *more)
    assert done.returncode == 0, done.stderr
    assert "7 rare words (1 to 2 times in the training text), 4 with a note" in done.stdout
    assert "80.0% of 5 sentences" in done.stdout
    found = json.loads((tmp_path / "notes.json").read_text(encoding="utf-8"))
    assert found["nearest"]["sings"][0]["word"] == "dog" and np.isclose(found["share_of_sentences"], 0.8)
    wrong = run_program(*command, "--words", "horse")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
