"""DeBERTa v2 and v3: the heads that folders have, models under replaced-token detection, parts that are refused."""

import json
import shutil

import pytest
import torch
from parity import Case, compare, imported
from safetensors.torch import load_file, save_file

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.errors import UserError
from tests.unit.conversion.conftest import padded_pair_batch, write_checkpoint
from tests.unit.conversion.test_damaged_folders import refused_in_one_line

FAMILY = FAMILIES["deberta-v2"]
CASE = Case(FAMILY, "masked-lm")
V3 = {
    "model_type": "deberta-v2",
    **{"relative_attention": True, "position_buckets": 256, "max_relative_positions": -1, "norm_rel_ebd": "layer_norm"},
    **{"share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0},
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    **{"layer_norm_eps": 1e-7, "vocab_size": 128100, "max_position_embeddings": 512, "attention_head_size": 64},
}
"""DeBERTaV3-base."""
DETECTOR = {
    "mask_predictions.LayerNorm.weight": (32,),
    "mask_predictions.LayerNorm.bias": (32,),
    "mask_predictions.dense.weight": (32, 32),
    "mask_predictions.dense.bias": (32,),
    "mask_predictions.classifier.weight": (1, 32),
    "mask_predictions.classifier.bias": (1,),
}


def settings(**changes):
    """The model of a config.json."""
    return FAMILY.model_config("config.json", FAMILY.complete("config.json", V3 | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a random masked LM of transformers, `hf`, imported as `imported`; and the former model."""
    folder = tmp_path_factory.mktemp("deberta-v2")
    return folder, imported(CASE, folder)[0]


def rewrite(source, target, change, **values):
    """Copy a folder with other weights and settings; return the folder."""
    shutil.copytree(source / "hf", target)
    save_file(change(load_file(target / "model.safetensors")), target / "model.safetensors")
    config = target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    return target


def with_detector(weights):
    torch.manual_seed(5)
    return weights | {name: torch.randn(shape) for name, shape in DETECTOR.items()}


def without_masked_lm(weights):
    return {name: tensor for name, tensor in with_detector(weights).items() if not name.startswith("lm_predictions.")}


def test_settings_of_a_released_folder():
    config = settings()
    assert (config.position_encoding, config.relative_distance, config.seq_length) == ("deberta-v2", 256, 512)
    assert (config.num_segments, config.deberta_emd, config.absolute_embedding) == (0, False, None)
    assert config.layernorm_epsilon == 1e-7 and config.ffn_hidden_size is None
    for same in ({"max_relative_positions": 512}, {"pos_att_type": ["c2p", "p2c"]}, {"conv_kernel_size": 0}):
        assert settings(**same) == config
    assert settings(position_biased_input=True, type_vocab_size=2).absolute_embedding is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size is 3, which is not supported: expected 0"),
        ({"share_att_key": False}, "share_att_key is False, which is not supported: expected True"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd is 'none', which is not supported: expected 'layer_norm'"),
        ({"relative_attention": False}, "relative_attention is False"),
        ({"position_buckets": -1}, "position_buckets is -1, expected a whole number from 2"),
        ({"position_buckets": 31}, "31: choose an even number"),
        ({"max_relative_positions": 256}, "max_relative_positions is 256 and max_position_embeddings 512.*equal"),
        ({"pos_att_type": "c2p"}, "pos_att_type is 'c2p', expected c2p and p2c"),
        ({"attention_head_size": 32}, "attention_head_size is 32.*need hidden_size / num_attention_heads"),
        ({"embedding_size": 128}, "embedding_size is 128"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ],
)
def test_a_part_that_is_not_built_here_is_named(changes, words):
    with pytest.raises(UserError, match=words) as error:
        settings(**changes)
    assert str(error.value).startswith("config.json: ") and "\n" not in str(error.value)


def test_strange_values_are_taken_or_refused_in_one_line():
    refused = refused_in_one_line(settings, FAMILY.complete("config.json", V3))
    assert refused > 10 * len(FAMILY.sizes)


def test_both_names_of_the_masked_lm_head(folder, tmp_path):
    """As released, with the other head beside it; then BERT's names too, and `legacy` says which head is read."""
    source, theirs = folder
    released = import_folder(rewrite(source, tmp_path / "released", with_detector), tmp_path / "1")
    assert released.weights.left_out == [f"unread.{name}" for name in sorted(DETECTOR)]
    names = {
        "lm_predictions.lm_head.dense": "cls.predictions.transform.dense",
        "lm_predictions.lm_head.LayerNorm": "cls.predictions.transform.LayerNorm",
        "lm_predictions.lm_head.bias": "cls.predictions.bias",
    }

    def under_both(weights):
        for theirs, berts in names.items():
            weights |= {name.replace(theirs, berts): weights[name] + 1 for name in weights if name.startswith(theirs)}
        return weights

    both = import_folder(rewrite(source, tmp_path / "both", under_both), tmp_path / "2")
    assert all(name.startswith("unread.cls.") for name in both.weights.left_out) and len(both.weights.left_out) == 5
    for read in (released, both):
        assert read.objective.objective == "mlm" and not read.weights.initialised
        assert max(compare(theirs, read.model.eval(), 0).all) < 1e-4
    other = import_folder(rewrite(source, tmp_path / "legacy", under_both, legacy=True), tmp_path / "3").model
    expected = load_file(source / "hf" / "model.safetensors")["lm_predictions.lm_head.dense.weight"] + 1
    assert torch.equal(other.head.dense.weight, expected)


@torch.no_grad()
def test_a_discriminator_alone_resumes_under_replaced_token_detection(folder, tmp_path):
    source, theirs = folder
    read = import_folder(rewrite(source, tmp_path / "d", without_masked_lm), tmp_path / "start")
    assert read.objective.objective == "rtd" and "--objective rtd" in read.summary()
    assert read.weights.initialised == [
        "generator (drawn anew; the folder has none)",
        "difference of the embeddings (0; the folder has none)",
    ]
    model = load_model(tmp_path / "start")[0]
    words = theirs.deberta.embeddings.word_embeddings.weight
    assert torch.equal(model.embeddings.token.weight[:18], words) and not model.embeddings.difference.weight.any()
    assert torch.equal(model.head.output.weight, with_detector({})["mask_predictions.classifier.weight"])
    ids, segments, mask = padded_pair_batch(18)
    place = torch.arange(ids.shape[1]).expand_as(ids) * mask
    expected = theirs.deberta(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(model.encode(ids, segments, mask, place)[mask.bool()], expected[mask.bool()])
    with pytest.raises(UserError, match="its num_layers is 2, but this discriminator needs 1"):
        import_folder(tmp_path / "d", tmp_path / "refused", generator=tmp_path / "d")


def test_a_pair_of_generator_and_discriminator(folder, tmp_path):
    """The difference of the two word embeddings is E_Δ; the generator has half of the layers."""
    source, theirs = folder
    words = "deberta.embeddings.word_embeddings.weight"

    def half(weights):
        first_layer = {name: weight for name, weight in weights.items() if ".layer.1." not in name}
        return first_layer | {words: weights[words] + 1}

    place = rewrite(source, tmp_path / "d", without_masked_lm)
    generator = rewrite(source, tmp_path / "g", half, num_hidden_layers=1)
    model = import_folder(place, tmp_path / "start", generator=generator).model
    expected = theirs.deberta.embeddings.word_embeddings.weight
    torch.testing.assert_close(model.embeddings.token.weight[:18], expected + 1)
    torch.testing.assert_close(model.embeddings.difference.weight[:18], -torch.ones_like(expected))
    first = theirs.deberta.encoder.layer[0].attention.self.query_proj.weight
    assert torch.equal(model.generator.layers[0].attention.query.weight, first)
    assert torch.equal(model.generator.head.dense.weight, theirs.lm_predictions.lm_head.dense.weight)


@torch.no_grad()
def test_a_model_of_replaced_token_detection_leaves_as_a_plain_encoder(tmp_path, tokenizer, offline):
    from transformers import AutoModel, AutoModelForSequenceClassification

    settings = {"position_encoding": "deberta-v2", "num_segments": 0, "num_layers": 1}
    run = write_checkpoint(tmp_path / "run", tokenizer, objective="rtd", **settings)
    export = export_checkpoint(run, tmp_path / "hf")
    assert "a plain DebertaV2: AutoModel.from_pretrained" in export.summary()
    weights, (model, _, _) = load_file(tmp_path / "hf" / "model.safetensors"), load_model(run)
    assert {name for name in weights if not name.startswith("deberta.")} == DETECTOR.keys()
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    place = torch.arange(ids.shape[1]).expand_as(ids) * mask
    expected = model.encode(ids, segments, mask, place)[mask.bool()]
    for kind in (AutoModel, AutoModelForSequenceClassification):
        theirs = kind.from_pretrained(tmp_path / "hf").eval()
        found = theirs(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(found[mask.bool()], expected, atol=1e-5, rtol=1e-5)
    again = import_folder(tmp_path / "hf", tmp_path / "back")
    assert again.objective.objective == "rtd" and not again.weights.left_out
    for name in ("dense", "output", "norm"):
        assert torch.equal(again.model.head.get_submodule(name).weight, model.head.get_submodule(name).weight)


def test_models_that_transformers_cannot_follow_leave_with_their_code(tmp_path, tokenizer, offline):
    for number, change in enumerate(({"deberta_emd": True}, {"relative_table": "per-layer"})):
        place = tmp_path / str(number)
        settings = {"position_encoding": "deberta-v2", "num_layers": 1, **change}
        export = export_checkpoint(write_checkpoint(place / "run", tokenizer, **settings), place / "hf")
        assert export.family.model_type == "megatron_ddrp"
