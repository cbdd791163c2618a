"""--log-similarity on the real engine: f(S) and f(H) of the validation batches beside their loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.embeddings import document_mask, token_cosine
from megatron_ddrp.model.stages import Draws
from tests.integration.launch import read_rows, start_ranks
from tests.unit.model.tiny import encode, named_sums

VALIDATION = {"train_iters": 2, "eval_interval": 2, "eval_iters": 1, "objective": "mlm"}


@torch.no_grad()
def test_similarity_is_logged_and_changes_no_step(flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path / "with", log_similarity=True, **VALIDATION)
    lines = start_ranks(command).check().stdout[0]
    start_ranks(flags(save=tmp_path / "without", **VALIDATION)).check()
    rows, plain = read_rows(tmp_path / "with"), read_rows(tmp_path / "without")
    assert [row["loss"] for row in rows if "loss" in row] == [row["loss"] for row in plain if "loss" in row]
    row, bare = rows[-1], plain[-1]
    assert list(bare) == ["iteration", "valid_lm_loss", "valid_lm_accuracy"]
    assert list(row) == [*bare][:2] + ["token_similarity", "head_similarity", "valid_lm_accuracy"]
    assert row["valid_lm_loss"] == pytest.approx(bare["valid_lm_loss"], rel=1e-6)
    assert f"f(S) {row['token_similarity']:.4f} f(H) {row['head_similarity']:.4f}" in lines

    model, _, config = load_model(tmp_path / "with")
    heads = torch.arange(4).expand(config.model.num_layers, -1)
    tokens, heads_alike, count = 0.0, 0.0, 0
    for arrays in Corpus.open(parse_arguments(command).config).loader("valid", 0, 1).step(0):
        batch = arrays.map(torch.from_numpy)
        sums = named_sums(model, batch, Draws(document_mask(batch.document_ids, 1).long(), heads))
        tokens += sums["tcd_loss"].item()
        heads_alike += sums["hcd_loss"].item()
        count += len(batch.input_ids)
    assert row["token_similarity"] == pytest.approx(tokens / count, rel=1e-5)
    assert row["head_similarity"] == pytest.approx(heads_alike / count, rel=1e-4, abs=1e-6)


@torch.no_grad()
def test_squared_cosines_are_trained_on_but_not_logged(flags, tmp_path: Path) -> None:
    words = flags(save=tmp_path, log_similarity=True, tcd_squared=True, tcd_weight=1.0, tcd_tokens=0, **VALIDATION)
    start_ranks(words).check()
    first, *_, last = read_rows(tmp_path)
    assert 0 <= first["tcd_loss"] <= 1 and first["loss"] == pytest.approx(first["lm_loss"] + first["tcd_loss"])

    model, _, config = load_model(tmp_path)
    similarity, squared, count = 0.0, 0.0, 0
    for arrays in Corpus.open(config).loader("valid", 0, 1).step(0):
        batch = arrays.map(torch.from_numpy)
        documents = document_mask(batch.document_ids, 1).long()
        hidden = encode(model.eval(), batch)
        similarity += token_cosine(hidden, documents).sum().item()
        squared += token_cosine(hidden, documents, squared=True).sum().item()
        count += len(batch.input_ids)
        draws = Draws(documents, torch.empty(config.model.num_layers, 0, dtype=torch.long))
        sums = named_sums(model.train(), batch, draws)
        torch.testing.assert_close(sums["tcd_loss"], token_cosine(hidden, documents, squared=True).sum())
    assert last["token_similarity"] == pytest.approx(similarity / count, rel=1e-5)
    assert abs(similarity - squared) > 0.01 * count


def test_one_head_has_no_similarity(flags) -> None:
    words = flags(log_similarity=True, num_attention_heads=1, objective="mlm")
    with pytest.raises(UserError, match="f.H. compares heads"):
        parse_arguments(words)
