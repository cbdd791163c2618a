"""Notes of a dictionary whose answers are known, and masked places: guesses of a model and of frequencies."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint.weights import Form, note_tensors, write_tensors
from megatron_ddrp.config import Config, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.word_counts import WordFinder, count_rare_words
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.lab.analysis import command as analyze
from megatron_ddrp.lab.analysis import reports
from megatron_ddrp.objectives.electra import NoteDictionary
from tests.datasets import write_dataset
from tests.refusals import refused
from tests.unit.lab.analysis.conftest import is_png


@pytest.fixture
def tokenizer(tmp_path):
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat dog bird red and sing ##s . !"
    (tmp_path / "vocab.txt").write_text(pieces.replace(" ", "\n") + "\n")
    return build_tokenizer("BertWordPieceLowerCase", tmp_path / "vocab.txt")


@pytest.fixture
def dataset(tokenizer, tmp_path):
    texts = ("the cat sings . the red dog ! the the . the cat and the bird", "red .")
    return write_dataset(tmp_path / "d", [[tokenizer.encode(text)] for text in texts])


@pytest.fixture
def rare(dataset, tokenizer):
    return count_rare_words([(dataset, (0, 2))], WordFinder(tokenizer), (1, 2))


def test_sentences_with_a_rare_word_and_nearest_notes_look_past_what_all_share(dataset, rare, tokenizer):
    found = {tokenizer.decode(rare.word(number + 1)) for number in range(len(rare))}
    assert found == {"cat", "sings", "red", "dog", "!", "and", "bird"}
    facts = reports.share_of_sentences(dataset, rare, tokenizer, documents=100)
    assert (facts["sentences"], facts["sentences_with_a_rare_word"]) == (5, 4)
    assert reports.share_of_sentences(dataset, rare, tokenizer, documents=1)["sentences"] == 4
    notes = notes_of(rare, tokenizer)
    met = (notes.met.nonzero().squeeze(-1) + 1).tolist()
    near = reports.nearest_notes("cat", rare, met, notes.notes[notes.met], tokenizer, 2)
    assert [other["word"] for other in near] == ["bird", "dog"]
    assert near[0]["cosine"] > 0.9 > 0.0 > near[1]["cosine"]
    refused("--words red: no note", reports.nearest_notes, "red", rare, met, notes.notes[notes.met], tokenizer, 2)


def notes_of(rare, tokenizer):
    """cat and bird alike, dog opposed; a large part common to all."""
    vectors = {"cat": [1, 0, 9], "bird": [1, 0.1, 9], "dog": [-1, 0, 9], "sings": [-1, 1, 9]}
    notes = NoteDictionary(rare, 3, ObjectiveConfig(notes=True))
    for number in range(len(rare)):
        if vector := vectors.get(tokenizer.decode(rare.word(number + 1))):
            notes.notes[number], notes.met[number] = torch.tensor(vector, dtype=torch.float32), True
    return notes


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


def test_the_command_finds_notes_and_damaged_ones_are_passed_over_or_refused(
    rare, tokenizer, dataset, tmp_path, capfd, run_tool
):
    older, newer = (write_notes(tmp_path, rare, tokenizer, step) for step in (3, 4))
    newer.write_bytes(newer.read_bytes()[:-1] + b"?")
    found = reports.analyze_notes(tmp_path, None, ["sings"], 2, 10)
    assert found["checkpoint"] == str(older.parent)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"skipped {newer.parent}: {newer.name} has the CRC-32 ")
    older.write_bytes(older.read_bytes()[:-1] + b"?")
    for load in (tmp_path, older.parent):
        refused("has the CRC-32", reports.analyze_notes, load, None, ["sings"], 2, 10)
    write_notes(tmp_path / "run", rare, tokenizer)
    command = [analyze, "notes", "--load", tmp_path / "run"]
    more = ["--data-path", dataset.prefix, "--words", "sings", "--output", tmp_path / "notes.json"]
    done = run_tool(*command, *more)
    assert done.returncode == 0, done.stderr
    assert "7 rare words (1 to 2 times in the training text), 4 with a note" in done.stdout
    assert "80.0% of 5 sentences" in done.stdout
    found = json.loads((tmp_path / "notes.json").read_text(encoding="utf-8"))
    assert found["nearest"]["sings"][0]["word"] == "dog" and np.isclose(found["share_of_sentences"], 0.8)
    wrong = run_tool(*command, "--words", "horse")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


def test_one_piece_of_each_sentence_is_masked_and_frequent_pieces_are_counted_without_special_ones(
    tiny_corpus, corpus_tokenizer
):
    """The model names piece 7 first, 9 second: with one guess it finds the sentence of 7, with two all three."""
    tokenizer = SimpleNamespace(special_ids=np.array([0, 1, 2, 3, 4]), mask_id=4, vocab_size=20)
    cls, sep, unk = 2, 3, 1
    rows = [[cls, 7, 7, 7, sep], [cls, unk, 9, unk, sep], [cls, unk, unk, sep, 0], [cls, 9, 9, sep, 0]]
    ids, seen = torch.tensor(rows), []

    def model(ids, places):
        seen.extend(zip(ids.tolist(), places.tolist(), strict=True))
        logits = torch.zeros(len(ids), 24)  # padded beyond the vocabulary, where the largest logits are
        logits[:, 7], logits[:, 9], logits[:, 20:] = 3, 2, 9
        return logits

    def count_found(frequent, seed=1):
        batch = Batch.of_texts(ids, (ids > 0).long())
        return reports.count_found(model, [batch], tokenizer, np.array(frequent), seed)

    assert (count_found([9]), count_found([9, 8])) == ((3, 1, 2), (3, 3, 2))
    whole = [[i for i in sentence if i] for sentence in rows]
    for row, place in seen:
        assert row[place] == tokenizer.mask_id and row.count(tokenizer.mask_id) == 1
        assert any(row[:place] + [piece] + row[place + 1 :] in whole for piece in (7, 9))
    assert [len(row) for row, _ in seen[:3]] == [5, 5, 4], "rows without padding"
    drawn = set()
    for seed in range(8):
        seen.clear()
        count_found([9], seed)
        drawn.add(tuple(place for _, place in seen))
    assert len(drawn) > 1, "the seed draws the places"
    prefix, special, size = str(tiny_corpus.prefix), corpus_tokenizer.special_ids, corpus_tokenizer.vocab_size
    counts = np.bincount(np.concatenate(list(IndexedDataset(prefix).chunks())), minlength=size)
    counts[special] = 0
    once, twice = (
        reports.frequent_pieces(reports.count_pieces(prefixes, size), corpus_tokenizer, 5).tolist()
        for prefixes in ([prefix], [prefix, prefix])
    )
    assert [counts[i] for i in once] == sorted(counts, reverse=True)[:5] and once == twice


def test_the_command_counts_runs_exports_and_random_weights(run_folder, exported, analyze_main, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    words = ("--sentences", 30, "--top-k", 40, "--random-init")
    result = analyze_main("masked-places", [run_folder, exported], tmp_path / "places.png", *words)
    run, random, other, _ = result["models"]
    assert (run["places"], run["iteration"], result["top_k"]) == (30, 20, 40)
    assert run["found"] == other["found"] and random["run"] == "ddrp, random weights"
    assert len({row["found_by_frequency"] for row in result["models"]}) == 1
    assert is_png(tmp_path / "places.png")
    line = f"ddrp step 20: the masked piece is among the first 40 in {run['found']} of 30 held-out places"
    assert line in capsys.readouterr().out
