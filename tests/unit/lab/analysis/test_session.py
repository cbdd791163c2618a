"""Sentences of validation text and texts, the same for models of different lengths; checkpoints and folders."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.data.dataset import indexed_dataset
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.encoders.huggingface import layer_states
from megatron_ddrp.lab.analysis import session
from megatron_ddrp.lab.analysis.reports import count_pieces
from megatron_ddrp.model import Encoder
from tests.datasets import write_dataset
from tests.refusals import refused
from tests.unit.model.tiny import tiny_batch

SHORTENED = "short takes at most 16 tokens: the sentences of all models are cut to 16\n"


@pytest.fixture(scope="module")
def berts(tiny_corpus, tmp_path_factory):
    """Folders of two BERTs of transformers that differ in their number of positions, 16 and 40."""
    transformers = pytest.importorskip("transformers")
    words = len(tiny_corpus.vocab_file.read_text().splitlines())
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20, "num_hidden_layers": 2}
    folders = [tmp_path_factory.mktemp("berts") / name for name in ("short", "long")]
    for folder, positions in zip(folders, (16, 40), strict=True):
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=words, max_position_embeddings=positions, **sizes)
        transformers.BertForMaskedLM(config).save_pretrained(folder)
        (folder / "vocab.txt").write_bytes(tiny_corpus.vocab_file.read_bytes())
    return folders


@pytest.fixture
def seen(monkeypatch):
    """Ids of the sentences of each model, filled by the analysis."""
    found = []

    class Recorded(session.Sentences):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            found.append([row.tolist() for batch in self.batches(8) for row in batch.input_ids])

    monkeypatch.setattr(session, "Sentences", Recorded)
    return found


def test_folders_of_different_lengths_see_the_same_sentences(berts, run_folder, analyze_main, seen, tmp_path, capsys):
    words = (tmp_path / "f.json", "--sentences", 20)
    for order in (berts, berts[::-1]):
        rows = analyze_main("self-similarity", order, *words)["checkpoints"]
        assert [row["max_length"] for row in rows] == [16, 16]
        assert seen[-2] == seen[-1] and len(seen[-1]) == 20
        assert capsys.readouterr().out.startswith(SHORTENED)
    assert seen[0] == seen[2]
    analyze_main("self-similarity", berts, *words, "--max-length", 12)
    assert seen[-2] == seen[-1] and "takes at most" not in capsys.readouterr().out
    analyze_main("self-similarity", berts[1], *words)
    assert "takes at most" not in capsys.readouterr().out
    seen.clear()  # a folder that is shorter than a run shortens its sentences
    analyze_main("space", [run_folder, berts[0]], *words, "--split", "80,20,0")
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]


def test_the_length_of_a_folder_is_known_before_its_weights_are_read(berts, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert [session.Snapshot("b", folder).seq_length() for folder in berts] == [16, 40]
    for config in (
        transformers.RobertaConfig(max_position_embeddings=20, pad_token_id=1),
        transformers.MPNetConfig(max_position_embeddings=20, pad_token_id=1),
        transformers.AlbertConfig(max_position_embeddings=18),
    ):
        config.save_pretrained(tmp_path / config.model_type)
        assert session.Snapshot("b", tmp_path / config.model_type).seq_length() == 18, config.model_type
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    assert session.Snapshot("unknown", tmp_path).seq_length() is None


def test_sentences_are_validation_text_with_specials_and_depend_on_the_seed(tiny_corpus, corpus_tokenizer):
    prefix, tokenizer = str(tiny_corpus.prefix), corpus_tokenizer

    def some(seed=1, count=20):
        rows = session.validation_rows([prefix], "80,20,0", tokenizer, 24, count, seed)
        return session.Sentences(rows, tokenizer, max_length=12)

    dataset = IndexedDataset(prefix)
    held_out = {tuple(dataset[number][:10]) for number in range(round(0.8 * dataset.num_documents), len(dataset))}
    sentences = some(count=10**6)
    rows = []
    for batch in sentences.batches(8):
        lengths = batch.document_ids.sum(1)
        rows += [row[:n].tolist() for row, n in zip(batch.input_ids, lengths, strict=True)]
    assert len(rows) == len(sentences) == len(some(2, 10**7)) > len(some())
    assert {row[0] for row in rows} == {tokenizer.cls_id} and {row[-1] for row in rows} == {tokenizer.sep_id}
    assert max(map(len, rows)) == 12
    beginnings = {tuple(row[1:11]) for row in rows if len(row) == 12}
    assert held_out & beginnings and len(held_out - beginnings) < len(held_out) / 10
    drawn = [[row.tolist() for row in some(seed).rows] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    texts, everything = (Counter(tuple(row.tolist()) for row in some(count=count).rows) for count in (20, 10**6))
    assert texts.total() == 20 and texts <= everything
    assert (sentences.lengths[:-1] >= sentences.lengths[1:]).all()


def test_ids_outside_the_vocabulary_and_numbers_that_are_not_finite_are_refused(
    corpus_tokenizer, tmp_path, monkeypatch
):
    size = corpus_tokenizer.vocab_size
    prefix = write_dataset(tmp_path / "a", [[[9] * 10]] * 8 + [[[9] * 9 + [size]]]).prefix
    assert len(session.validation_rows([prefix], "50,25,25", corpus_tokenizer, 24, 9, 1)) == 2
    monkeypatch.setattr(indexed_dataset, "CHUNK_TOKENS", 20)
    message = f"a: token ids from 9 to {size}, but the vocabulary has {size} pieces"
    refused(message, session.validation_rows, [prefix], "0,100,0", corpus_tokenizer, 24, 9, 1)
    refused(message, count_pieces, [prefix], size)
    # jSON has no such numbers: `compare` could not read the file, and one run that diverged would stop it
    words = r"x\.json: not written, some numbers are not finite: use a checkpoint that"
    for value in (float("nan"), float("inf")):
        write = session.AnalysisFiles(tmp_path / "x.json").write
        refused(words, write, {"models": [{"share": value}]}, lambda: None)
        assert not (tmp_path / "x.json").exists()


def test_damaged_checkpoints_are_passed_over_and_named(run_folder, tmp_path, capsys):
    found = session.find_snapshots([run_folder], every=True)
    assert [snapshot.iteration for snapshot in found] == [10, 20] and not capsys.readouterr().err
    broken = shutil.copytree(run_folder, tmp_path / "ddrp")
    (broken / "iter_0000020" / checkpoint.WEIGHTS).unlink()
    for every in (True, False):
        found = session.find_snapshots([broken], every)
        assert [snapshot.iteration for snapshot in found] == [10]
        assert "iter_0000020: model.safetensors is missing" in capsys.readouterr().err
    both = session.find_snapshots([run_folder, broken], every=False)
    assert [snapshot.run for snapshot in both] == [str(run_folder), str(broken)]


def test_progress_moves_on_with_every_batch():
    counts = []
    sentences = SimpleNamespace(batches=lambda size: [tiny_batch().map(lambda tensor: tensor.numpy())] * 2)
    view = session.View(None, None, None, sentences, torch.device("cpu"), 3, counts.append)
    assert [list(counts) for _ in view.batches()] == [[], [3]] and counts == [3, 3]


def test_transformers_and_we_see_the_same_space_of_a_bert_and_an_encoder_we_refuse_is_left_to_them(
    berts, albert, tmp_path, capsys
):
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertForMaskedLM.from_pretrained(berts[1]).eval()
    loaded = session.Snapshot("bert", berts[1]).load_any()
    assert isinstance(loaded.model, Encoder)
    for ours, theirs in zip(*(layer_states(each, tiny_batch()) for each in (loaded.model, bert.bert)), strict=True):
        valid = tiny_batch().document_ids > 0
        torch.testing.assert_close(ours.hidden[valid], theirs.hidden[valid], rtol=0, atol=1e-5)
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=4, vocab_size=59, hidden_act="relu")
    transformers.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_bytes((albert / "vocab.txt").read_bytes())
    loaded = session.Snapshot("bert", tmp_path).load_any()
    assert not isinstance(loaded.model, Encoder) and loaded.position_encoding is None
    assert "read by transformers, without f(H)" in capsys.readouterr().err
    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "block_sizes": [1, 1], "vocab_size": 11}
    model = transformers.FunnelModel(transformers.FunnelConfig(**sizes)).eval()
    refused("layers of a funnel shorten their rows", list, layer_states(model, tiny_batch()))


def test_texts_are_drawn_evenly_and_the_same_for_every_model_and_empty_ones_are_left_out(tmp_path, corpus_tokenizer):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(20)))
    assert session.draw_texts(str(path), 30, seed=1) == [str(number) for number in range(20)]
    first, again, other = (session.draw_texts(str(path), 5, seed) for seed in (1, 1, 2))
    assert first == again != other
    counts = Counter(text for seed in range(2000) for text in session.draw_texts(str(path), 5, seed))
    assert len(counts) == 20
    assert all(430 <= count <= 570 for count in counts.values())  # 500 of 2,000 each, 3.6 standard deviations
    path.write_text('{"text": "alone"}\n')
    refused("holds one text: give two or more", session.draw_texts, str(path), 5, seed=1)
    rows = corpus_tokenizer.encode_batch(["the", " ", "the and the and the"])
    [batch] = session.Sentences(rows, corpus_tokenizer, max_length=5).batches(8)
    cls, sep, pad = corpus_tokenizer.cls_id, corpus_tokenizer.sep_id, corpus_tokenizer.pad_id
    the, both = corpus_tokenizer.encode("the"), corpus_tokenizer.encode("the and the")
    assert batch.input_ids.tolist() == [[cls, *both, sep], [cls, *the, sep, pad, pad]]
    assert batch.document_ids.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
