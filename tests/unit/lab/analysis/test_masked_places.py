"""Masked places: one drawn piece of each sentence, guesses of a model and of frequencies, and the command."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.lab.analysis.reports import count_found, count_pieces, frequent_pieces
from tests.unit.lab.analysis.test_analyze import is_png

TOKENIZER = SimpleNamespace(special_ids=np.array([0, 1, 2, 3, 4]), mask_id=4, vocab_size=20)
CLS, SEP, UNK = 2, 3, 1
SENTENCES = [[CLS, 7, 7, 7, SEP], [CLS, UNK, 9, UNK, SEP], [CLS, UNK, UNK, SEP, 0], [CLS, 9, 9, SEP, 0]]


def batch():
    ids = torch.tensor(SENTENCES)
    return Batch.of_texts(ids, (ids > 0).long())


def test_one_piece_of_each_sentence_is_masked_and_never_a_special_one():
    """The model names piece 7 first, 9 second: with one guess it finds the sentence of 7, with two all three."""
    seen = []

    def model(ids, places):
        seen.extend(zip(ids.tolist(), places.tolist(), strict=True))
        logits = torch.zeros(len(ids), 24)  # padded beyond the vocabulary, where the largest logits are
        logits[:, 7], logits[:, 9], logits[:, 20:] = 3, 2, 9
        return logits

    assert count_found(model, [batch()], TOKENIZER, np.array([9]), seed=1) == (3, 1, 2)
    assert count_found(model, [batch()], TOKENIZER, np.array([9, 8]), seed=1) == (3, 3, 2)
    whole = [[i for i in sentence if i] for sentence in SENTENCES]
    for ids, place in seen:
        assert ids[place] == TOKENIZER.mask_id and ids.count(TOKENIZER.mask_id) == 1
        assert any(ids[:place] + [piece] + ids[place + 1 :] in whole for piece in (7, 9))
    assert [len(ids) for ids, _ in seen[:3]] == [5, 5, 4], "rows without padding"
    assert len({count_places(seed) for seed in range(8)}) > 1, "the seed draws the places"


def count_places(seed):
    places = []

    def model(ids, where):
        places.extend(where.tolist())
        return torch.zeros(len(ids), 20)

    count_found(model, [batch()], TOKENIZER, np.array([9]), seed)
    return tuple(places)


def test_frequent_pieces_are_counted_over_all_datasets_without_special_ones(tiny_corpus):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    counts = np.bincount(np.concatenate(list(IndexedDataset(str(tiny_corpus.prefix)).chunks())))
    counts[tokenizer.special_ids[tokenizer.special_ids < len(counts)]] = 0
    prefix, size = str(tiny_corpus.prefix), tokenizer.vocab_size
    once = frequent_pieces(count_pieces([prefix], size), tokenizer, 5)
    assert [counts[i] for i in once] == sorted(counts, reverse=True)[:5]
    assert once.tolist() == frequent_pieces(count_pieces([prefix] * 2, size), tokenizer, 5).tolist()


def test_the_command_counts_runs_exports_and_random_weights(run_folder, analyze_main, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    from megatron_ddrp.conversion.to_huggingface import export_checkpoint

    export_checkpoint(run_folder, tmp_path / "export")
    folders = [run_folder, tmp_path / "export"]
    words = ("--sentences", 30, "--top-k", 40, "--random-init")
    result = analyze_main("masked-places", folders, tmp_path / "places.png", *words)
    run, random, exported, _ = result["models"]
    assert (run["places"], run["iteration"], result["top_k"]) == (30, 20, 40)
    assert run["found"] == exported["found"] and random["run"] == "ddrp, random weights"
    assert len({row["found_by_frequency"] for row in result["models"]}) == 1
    assert is_png(tmp_path / "places.png")
    line = f"ddrp step 20: the masked piece is among the first 40 in {run['found']} of 30 held-out places"
    assert line in capsys.readouterr().out
