"""The recipe of docs/finetune.md: sentence-transformers trains an export of ours, and mteb scores it."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest
import torch
from scipy.stats import spearmanr

from megatron_ddrp import checkpoint
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from tests.unit.conversion.conftest import WORDS, write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "embeddings"
MISSING = [name for name in ("sentence_transformers", "mteb", "accelerate") if find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"the recipe needs pip install {' '.join(MISSING)}")
@torch.no_grad()
def test_an_export_becomes_a_sentence_encoder_that_mteb_scores(tmp_path, monkeypatch):
    from sentence_transformers import SentenceTransformer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8")
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocabulary)
    run = write_checkpoint(tmp_path / "run", tokenizer)
    export_checkpoint(run, tmp_path / "hf")
    animals = ("cat", "dog", "bird", "blue")
    rows = [
        {"sentence1": f"the {a} run", "sentence2": f"red {b}", "score": 5.0 * (a == b) + (a < b)}
        for a in animals
        for b in animals
    ]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))

    model, _, _ = checkpoint.load_model(run)
    texts = ["the cat", "red dog , blue bird ."]  # the shorter one is padded
    embedded = SentenceTransformer(str(tmp_path / "hf"), trust_remote_code=True).encode(texts)
    for text, found in zip(texts, embedded, strict=True):
        ids = torch.tensor([[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]])
        hidden = model.encode(ids, ids * 0, ids * 0 + 1, torch.arange(ids.shape[1])[None])
        torch.testing.assert_close(torch.from_numpy(found), hidden[0].mean(0), atol=1e-5, rtol=1e-5)

    def run_example(name, **flags):
        """Run one of the scripts in this process."""
        words = [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
        monkeypatch.setattr(sys, "argv", [name, "--pairs", str(pairs), *words])
        with torch.enable_grad():
            run_path(str(EXAMPLES / name), run_name="__main__")

    run_example("train_sentence_encoder.py", load=tmp_path / "hf", output=tmp_path / "sentences", max_seq_length=7)
    trained = SentenceTransformer(str(tmp_path / "sentences"), trust_remote_code=True)
    assert trained.max_seq_length == 7
    first, second = (trained.encode([row[side] for row in rows]) for side in ("sentence1", "sentence2"))
    assert not torch.allclose(torch.from_numpy(trained.encode(texts)), torch.from_numpy(embedded)), "it trained"
    run_example("evaluate_mteb.py", load=tmp_path / "sentences", output=tmp_path / "scores.json")
    cosines = torch.cosine_similarity(torch.from_numpy(first), torch.from_numpy(second))
    expected = spearmanr(cosines, [row["score"] for row in rows]).statistic
    found = json.loads((tmp_path / "scores.json").read_text())["cosine_spearman"]
    assert found == pytest.approx(expected, abs=1e-6)
