"""Models that take different numbers of tokens see the same sentences."""

import pytest
import torch

from megatron_ddrp.lab.analysis import session
from megatron_ddrp.lab.analysis.session import Snapshot

SHORTENED = "short takes at most 16 tokens: the sentences of all models are cut to 16\n"


@pytest.fixture(scope="module")
def berts(tiny_corpus, tmp_path_factory):
    """Folders of two BERTs of transformers that differ in their number of positions, 16 and 40."""
    transformers = pytest.importorskip("transformers")
    words = len(tiny_corpus.vocab_file.read_text().splitlines())
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20, "num_hidden_layers": 1}
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


def test_folders_of_different_lengths_see_the_same_sentences(berts, analyze_main, seen, tmp_path, capsys):
    for order in (berts, berts[::-1]):
        rows = analyze_main("self-similarity", order, tmp_path / "f.json", "--sentences", 20)["checkpoints"]
        assert [row["max_length"] for row in rows] == [16, 16]
        assert seen[-2] == seen[-1] and len(seen[-1]) == 20
        assert capsys.readouterr().out.startswith(SHORTENED)
    assert seen[0] == seen[2]


def test_a_folder_that_is_shorter_than_a_run_shortens_its_sentences(berts, run_folder, analyze_main, seen, tmp_path):
    analyze_main("space", [run_folder, berts[0]], tmp_path / "s.json", "--sentences", 20, "--split", "80,20,0")
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]


def test_no_line_where_no_sentence_is_shortened(berts, analyze_main, seen, tmp_path, capsys):
    analyze_main("self-similarity", berts, tmp_path / "f.json", "--sentences", 20, "--max-length", 12)
    assert seen[0] == seen[1] and "takes at most" not in capsys.readouterr().out
    analyze_main("self-similarity", berts[1], tmp_path / "f.json", "--sentences", 20)
    assert "takes at most" not in capsys.readouterr().out


def test_the_length_of_a_folder_is_known_before_its_weights_are_read(berts, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert [Snapshot("b", folder).seq_length() for folder in berts] == [16, 40]
    for name, config in {
        "roberta": transformers.RobertaConfig(max_position_embeddings=20, pad_token_id=1),
        "mpnet": transformers.MPNetConfig(max_position_embeddings=20, pad_token_id=1),
        "albert": transformers.AlbertConfig(max_position_embeddings=18),
    }.items():
        config.save_pretrained(tmp_path / name)
        assert Snapshot(name, tmp_path / name).seq_length() == 18
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    assert Snapshot("unknown", tmp_path).seq_length() is None
