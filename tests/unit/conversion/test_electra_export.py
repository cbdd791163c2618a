"""An exported discriminator computes what it computed in training; its generator stays behind."""

import pytest
import torch

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.encoders.encoder import load_encoder
from tests.unit.conversion.conftest import padded_pair_batch, write_checkpoint


@pytest.mark.parametrize(
    "objective, encoding, order",
    [
        ("electra", "absolute", "post"),
        ("electra", "ddrp", "post"),
        ("electra", "deberta", "pre"),
        ("rtd", "absolute", "post"),
    ],
)
@torch.no_grad()
def test_the_discriminators_states_and_logits_are_equal(tmp_path, tokenizer, offline, objective, encoding, order):
    from transformers import AutoModelForPreTraining, AutoModelForSequenceClassification, ElectraForPreTraining

    load = write_checkpoint(
        tmp_path / "run", tokenizer, objective, position_encoding=encoding, layernorm_position=order
    )
    export = export_checkpoint(load, tmp_path / "hf")
    assert not [name for name in export.weights if "generator" in name]
    assert not [name for name in export.weights if "difference" in name]
    plain = (objective, encoding) == ("electra", "absolute")
    options = {} if plain else {"trust_remote_code": True}
    loaded, report = AutoModelForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True, **options)
    assert isinstance(loaded, ElectraForPreTraining) == plain
    assert not report["missing_keys"] and not report["unexpected_keys"]
    summary = export.summary()
    assert "AutoModelForPreTraining" in summary and "the generator" in summary and "replaced-token head" in summary

    model, _, _ = load_model(load)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    valid = mask.bool()
    hidden = model.encode(ids, segments, mask, torch.arange(ids.shape[1]).expand_as(ids) * mask)
    inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
    output = loaded.eval()(**inputs, output_hidden_states=True)
    torch.testing.assert_close(output.logits[valid], model.head.logits(hidden)[valid], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.hidden_states[-1][valid], hidden[valid], atol=1e-5, rtol=1e-5)

    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", **options)
    assert classifier(**inputs).logits.shape == (3, 2)
    encoders = [load_encoder(folder) for folder in (export.source, tmp_path / "hf")]
    assert [encoder.hidden_size for encoder in encoders] == [32, 32]


@pytest.mark.parametrize("objective", ["electra", "rtd"])
@torch.no_grad()
def test_fine_tuning_starts_from_the_discriminator(tmp_path, tokenizer, objective):
    from megatron_ddrp.data.batches.batch import Batch

    load = write_checkpoint(tmp_path / "run", tokenizer, objective)
    model, _, _ = load_model(load)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    positions = torch.arange(ids.shape[1]).expand_as(ids) * mask
    encoder = load_encoder(load / "iter_0000003").fresh(0, torch.device("cpu")).eval()
    batch = Batch(ids, ids, mask, positions, segments, mask)
    torch.testing.assert_close(encoder(batch), model.encode(ids, segments, mask, positions))


@torch.no_grad()
def test_a_run_goes_on_from_an_exported_rtd_model(tmp_path, tokenizer, offline):
    """Its one table becomes the generator's, beside a difference of 0; head and layers are those of before."""
    load = write_checkpoint(tmp_path / "run", tokenizer, "rtd")
    export_checkpoint(load, tmp_path / "hf")
    imported = import_folder(tmp_path / "hf", tmp_path / "again")
    assert "generator (drawn anew" in imported.summary() and "difference of the embeddings (0" in imported.summary()
    (before, _, _), (after, _, config) = load_model(load), load_model(tmp_path / "again")
    assert config.objective.objective == "rtd" and not after.embeddings.difference.weight.any()
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    inputs = (ids, segments, mask, torch.arange(ids.shape[1]).expand_as(ids) * mask)
    logits = [model.head.logits(model.encode(*inputs))[mask.bool()] for model in (before, after)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("objective", ["electra", "rtd"])
def test_a_generators_mask_decoder_and_models_without_segments_come_back(tmp_path, tokenizer, offline, objective):
    changes = {"position_encoding": "ddrp", "deberta_emd": True, "num_segments": 0}
    load = write_checkpoint(tmp_path / "run", tokenizer, objective, **changes)
    export_checkpoint(load, tmp_path / "hf")
    imported = import_folder(tmp_path / "hf", tmp_path / "again")
    assert "--deberta-emd" in imported.summary() and "--num-segments 0" in imported.summary()
    model = load_model(tmp_path / "again")[0]
    assert model.generator.mask_decoder is not None and model.embeddings.segment is None
