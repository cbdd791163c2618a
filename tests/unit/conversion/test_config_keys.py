"""Every key of config.json that transformers reads, family by family: what becomes of it, and whether that is so.

RoBERTa, XLM-R and CamemBERT count positions from the id of padding: it is the padding of the tokenizer alone.
"""

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
from parity import Case, compare, example, write_run
from transformers import CONFIG_MAPPING

from megatron_ddrp import checkpoint
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.configuration_ddrp import DEFAULTS
from megatron_ddrp.conversion.families import FAMILIES, contract
from megatron_ddrp.conversion.families.contract import SHARED_DEFAULTS, SHARED_FOLLOWED, SUMS, exported_class
from megatron_ddrp.conversion.families.modernbert import ALWAYS, FULL, LOCAL
from megatron_ddrp.conversion.from_huggingface import import_folder, read_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.engine.checkpoint import Progress
from tests.refusals import refused
from tests.unit.conversion.conftest import change_json, wordpiece, write_theirs

pytestmark = pytest.mark.usefixtures("few_probes")

PAGE = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (.+?) \| (`.+) \|$", PAGE, re.MULTILINE))
"""First cell of the page's rows → the second, which names keys."""
THEIRS = {name: family for name, family in FAMILIES.items() if not family.has_code}
ROBERTAS = ("roberta", "xlm-roberta", "camembert")

BY_METHODS = {
    **{"deberta": ("embedding_size",), "deberta-v2": ("embedding_size", "attention_head_size")},
    **{"modernbert": ("head_dim",), "nomic_bert": ("head_dim",), "eurobert": ("head_dim", "num_key_value_heads")},
}
"""Keys that a family's methods read without a default of their own."""
WITH_HEADS = ("id2label", "label2id", "num_labels", "problem_type")
WITHOUT_EFFECT = (
    *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
    *("transformers_version", "bos_token_id", "eos_token_id", "conv_act", "conv_groups", "embedding_size"),
    "pretraining_tp",
)
"""Keys that change no number: of decoders, of the form of outputs, of the convolution that is refused, and the width of
embeddings where transformers only checks whether the key exists."""
FATES = (
    "a setting of our model; exports have it again",
    "taken at some values, otherwise refused by name",
    "kept for the heads that fine-tuning adds, through training; exports of the family have it again",
    "written anew, from the tokenizer and the form of the export",
    "left out with the head that the import leaves out",
    "changes no number of an encoder",
)


@pytest.mark.parametrize("name", THEIRS)
def test_every_key_of_transformers_has_a_fate_and_stands_in_its_row_of_the_page(tmp_path, name):
    """The keys are the fields of transformers' class and the names in its code; the family's tables tell their fate."""
    family, config_class = THEIRS[name], CONFIG_MAPPING[name]
    modules = [config_class.__module__, config_class.__module__.replace("configuration_", "modeling_")]
    code = "\n".join(inspect.getsource(importlib.import_module(module)) for module in modules)
    patterns = (r"\bconfig\.([a-z]\w*)\b(?!\()", r'attr\((?:self\.)?config, "(\w+)"', r'kwargs\.(?:get|pop)\("(\w+)"')
    found = {key for pattern in patterns for key in re.findall(pattern, code)}
    found |= {field.name for field in dataclasses.fields(config_class)}
    config, tokenizer = example(Case(family, next(iter(family.head_modules))), tmp_path)
    written = family.folder_settings(config, "masked-lm", tokenizer).keys() | {"dtype"}
    limited = {*SHARED_FOLLOWED, *family.followed, *family.defaults, *BY_METHODS.get(name, ())}
    places = (family.sizes, limited, family.head_keys, written, WITH_HEADS, WITHOUT_EFFECT)
    known = found | SHARED_FOLLOWED.keys() | family.followed.keys()
    fates = {key: next((f for f, keys in zip(FATES, places, strict=True) if key in keys), None) for key in known}
    assert [key for key, fate in fates.items() if f"`{key}`" not in ROWS.get(fate, "")] == []


REQUIRED = {"deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}}
OF_V2 = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
REQUIRED["deberta-v2"] = REQUIRED["deberta"] | OF_V2
"""Keys whose defaults in transformers our encoder does not support."""


@pytest.mark.parametrize("name", THEIRS)
def test_absent_keys_mean_what_they_mean_in_transformers(name):
    family, config_class, needed = THEIRS[name], CONFIG_MAPPING[name], REQUIRED.get(name, {})
    theirs = {field.name: field.default for field in dataclasses.fields(config_class)}
    followed = {key: allowed[0] for key, allowed in (SHARED_FOLLOWED | dict(family.followed)).items()}
    ours = {**followed, **SHARED_DEFAULTS, **family.defaults}
    assert {k: v for k, v in ours.items() if k in theirs} == {k: theirs[k] for k in ours if k in theirs} | {
        key: value for key, value in needed.items() if key in followed and key not in family.defaults
    }
    for key in needed:
        refused(f"{key} is ", family.complete, "config.json", {k: v for k, v in needed.items() if k != key})
    written = config_class(**needed).to_dict()
    models = [family.model_config("config.json", family.complete("config.json", v)) for v in (dict(needed), written)]
    assert models[0] == models[1]


def test_absent_keys_of_our_exports_mean_the_same_in_their_code_and_here():
    keys = contract.SIZES | {name: name for name in contract.OWN_SETTINGS if name not in ALWAYS}
    ours = dataclasses.asdict(ModelConfig()) | {"ffn_hidden_size": 4 * 768}
    assert {key: DEFAULTS[key] for key in keys if key in DEFAULTS} == {k: ours[keys[k]] for k in keys if k in DEFAULTS}
    assert keys.keys() - DEFAULTS.keys() == {"absolute_embedding"}, "its default depends on the encoding"


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_of_heads_come_back(tmp_path, offline, monkeypatch, name):
    not_defaults = {
        **{"classifier_dropout": 0.25, "classifier_pooling": "mean", "initializer_cutoff_factor": 1.5},
        **{"sparse_prediction": True, "sparse_pred_ignore_index": -7, "deterministic_flash_attn": True},
        **{"summary_type": "mean", "summary_use_proj": False, "summary_proj_to_labels": True},
        **{"summary_activation": "tanh", "summary_first_dropout": 0.5, "summary_last_dropout": 0},
        **{"pooler_hidden_act": "tanh", "pooler_hidden_size": 32, "pooler_dropout": 0.5, "cls_dropout": 0.25},
    }
    family = FAMILIES[name]
    kept = {key: not_defaults[key] for key in family.head_keys}
    if family.has_code:
        export_checkpoint(write_run(Case(family, "masked-lm"), tmp_path / "run"), tmp_path / "hf")
        (tmp_path / "hf" / SUMS).unlink()
        change_json(tmp_path / "hf" / "config.json", **kept)
    else:
        write_theirs(name, tmp_path / "hf", **kept)
    import_folder(tmp_path / "hf", tmp_path / "start")
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "start"))
    assert Progress.from_state(state).head_settings == kept, "later checkpoints of the run have them too"
    export_checkpoint(tmp_path / "start", tmp_path / "again", family_name=name)
    assert kept.items() <= json.loads((tmp_path / "again" / "config.json").read_text()).items()
    export_checkpoint(tmp_path / "start", tmp_path / "own", family_name="megatron_ddrp")
    own = json.loads((tmp_path / "own" / "config.json").read_text())
    assert [key for key in kept if key in own] == [key for key in kept if key == "classifier_dropout"]


def test_unknown_settings_of_heads_are_refused():
    for name, key, value, expected in (
        ("modernbert", "classifier_pooling", "max", "expected 'cls' or 'mean'"),
        ("bert", "classifier_dropout", "0.1", "expected a number or null"),
        ("modernbert", "classifier_dropout", None, "expected a number"),
        ("electra", "summary_use_proj", 1, "expected true or false"),
        ("deberta", "pooler_hidden_act", None, "expected some text"),
    ):
        refused(f"^config.json: {key} is .*{expected}", FAMILIES[name].head_settings, "config.json", {key: value})


BERTS = (*ROBERTAS, "bert", "electra")
DEBERTAS = ("deberta", "deberta-v2")
ROTARY = ("nomic_bert", "eurobert")
EVERYWHERE = [
    *({"tie_word_embeddings": False}, {"is_encoder_decoder": True}, {"is_decoder": True}),
    *({"add_cross_attention": True}, {"per_layer_config": {"1": {"layer_norm_eps": 0.01}}}),
    *({"pruned_heads": {"0": [1]}}, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}),
]
TIED_OR_NOT = ("eurobert", "tie_word_embeddings")
"""The output matrix of EuroBERT is left out, so it may be its own."""
REFUSED = [
    *((name, changes) for name in THEIRS for changes in EVERYWHERE if (name, *changes) != TIED_OR_NOT),
    *((name, {"hidden_act": act}) for name in (*BERTS, *DEBERTAS) for act in ("gelu_new", "gelu_pytorch_tanh", "relu")),
    *((name, {"type_vocab_size": 0}) for name in BERTS),
    *((name, {"type_vocab_size": 3}) for name in (*BERTS, *DEBERTAS)),
    *((name, {"position_embedding_type": "relative_key_query"}) for name in BERTS),
    *((name, {"pos_att_type": both}) for name in DEBERTAS for both in (["C2P", "P2C"], ["c2p", "p2c", "p2c"])),
    *((name, changes) for name in DEBERTAS for changes in ({"pos_att_type": "c2p|p2c|p2c"}, {"embedding_size": 16})),
    *(("deberta", {key: n}) for key, n in (("talking_head", True), ("share_att_key", True), ("conv_kernel_size", 3))),
    ("deberta", {"norm_rel_ebd": "layer_norm"}),
    *(("deberta-v2", {key: n}) for key, n in (("conv_kernel_size", 3), ("attention_head_size", 16))),
    ("deberta-v2", {"max_relative_positions": 12}),
    ("modernbert", {"rope_parameters": {LOCAL: {"type": "linear", "factor": 2.0, "rope_theta": 5.0}}}),
    *(("modernbert", {f"{part}_activation": act}) for part, act in (("hidden", "silu"), ("classifier", "tanh"))),
    *(("modernbert", {key: value}) for key, value in (("sliding_window", 2), ("head_dim", 4), ("decoder_bias", False))),
    ("modernbert", {"norm_bias": True}),
    *((name, {"rope_scaling": {"factor": 2.0}}) for name in ("modernbert", *ROTARY)),
    *((name, changes) for name in ROTARY for changes in ({"hidden_act": "gelu"}, {"head_dim": 4})),
    *((name, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}) for name in ROTARY),
    *((name, {"rope_parameters": 5}) for name in ROTARY),
    *(("nomic_bert", changes) for changes in ({"qkv_proj_bias": True}, {"rotary_emb_fraction": 0.5})),
    *(("eurobert", changes) for changes in ({"num_key_value_heads": 2}, {"attention_bias": True}, {"mlp_bias": True})),
]


@pytest.mark.parametrize(("name", "changes"), REFUSED, ids=str)
def test_a_key_that_would_act_is_refused_by_name(tmp_path, name, changes):
    family = FAMILIES[name]
    config, tokenizer = example(Case(family, "masked-lm"), tmp_path)
    values = family.folder_settings(config, "masked-lm", tokenizer) | changes
    words = f"^config.json: .*{next(iter(changes))} (is|of) "
    refused(words, lambda: family.model_config("config.json", family.complete("config.json", values)))


EQUAL = [
    *((name, {"hidden_act": "gelu_python", "layer_norm_eps": 0.01}) for name in (*BERTS, *DEBERTAS)),
    *((name, {"type_vocab_size": size}) for name in BERTS for size in (1, 2)),
    *((name, {"type_vocab_size": size}) for name in DEBERTAS for size in (0, 1, 2)),
    *((name, {"position_biased_input": biased}) for name in DEBERTAS for biased in (True, False)),
    *((name, {"pos_att_type": " C2P | p2c "}) for name in DEBERTAS),
    *((name, {"legacy": legacy}) for name in ("deberta",) for legacy in (True, False)),
    *(("deberta", {"max_relative_positions": reach}) for reach in (-5, 0, 3, 40)),
    *(("deberta-v2", {"position_buckets": buckets}) for buckets in (2, 4, 24, 40)),
    *((name, {"pad_token_id": 7}) for name in THEIRS if name not in ROBERTAS),
    *((name, {"pad_token_id": None}) for name in THEIRS if name not in (*ROBERTAS, "nomic_bert")),  # theirs refuses it
    *((name, {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": ...}) for name in ROTARY),
    *((name, {"rope_parameters": ..., "rope_theta": theta}) for name in ROTARY for theta in (9.0, ...)),
    ("nomic_bert", {"type_vocab_size": 1, "layer_norm_eps": 0.01}),
    ("eurobert", {"num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 0.01, "tie_word_embeddings": True}),
    ("electra", {"embedding_size": 32}),
    ("modernbert", {"hidden_activation": "gelu_python", "classifier_activation": "gelu_python", "norm_eps": 0.01}),
    ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}),
    ("modernbert", {"local_attention": 3}),
    ("modernbert", {"layer_types": [FULL, LOCAL, LOCAL, LOCAL]}),
    ("modernbert", {"rope_parameters": {LOCAL: {"rope_theta": 9.0}}}),
    ("modernbert", {"rope_parameters": ..., "global_rope_theta": 9.0, "local_rope_theta": ...}),
    ("modernbert", {"layer_types": ..., "global_attn_every_n_layers": ..., "rope_parameters": ...}),
]
"""Family and keys, … for a key that is absent."""


@pytest.mark.parametrize(("name", "changes"), EQUAL, ids=str)
def test_a_key_that_acts_and_is_taken_acts_as_in_transformers(tmp_path, offline, name, changes):
    theirs, tokenizer = write_theirs(name, tmp_path, **changes)
    assert max(compare(theirs, read_folder(tmp_path).model.eval(), tokenizer.pad_id).all) < 1e-4


@pytest.mark.parametrize("padding", [0, 2, 4, 17, 18, 10**6, None, -1, True, "1"], ids=str)
def test_a_roberta_whose_padding_is_not_its_tokenizers_is_refused(tmp_path, offline, padding):
    write_theirs("roberta", tmp_path)
    change_json(tmp_path / "config.json", pad_token_id=padding)
    refused(f"^{tmp_path / 'config.json'}: pad_token_id is ", read_folder, tmp_path)


def test_a_roberta_whose_padding_is_another_piece_of_a_text_is_refused(tmp_path):
    """transformers gives that piece the position of padding."""
    family = FAMILIES["roberta"]
    _, tokenizer = example(Case(family, "masked-lm"), tmp_path)
    given = "config.json", {"pad_token_id": tokenizer.pad_id}, tokenizer
    family.check_tokenizer(*given)
    tokenizer.sep_id = tokenizer.pad_id
    refused("pad_token_id is 1, .*must be the padding and no other piece", family.check_tokenizer, *given)


@pytest.mark.parametrize("padding", [0, 3, 10])
def test_an_export_is_padded_as_its_tokenizer_pads(tmp_path, offline, padding):
    pieces = ["<unk>", "<s>", "</s>", "<mask>", "red", "green", "blue", "cat", "dog", "the"]
    pieces.insert(padding, "<pad>")
    tokenizer = wordpiece(tmp_path / "vocab.txt", pieces, "BertWordPieceLowerCase")
    write_theirs("roberta", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "start", tokenizer=tokenizer)
    export_checkpoint(tmp_path / "start", tmp_path / "again", family_name="roberta")
    settings = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (settings["pad_token_id"], settings["max_position_embeddings"]) == (padding, 24 + padding + 1)
    theirs = exported_class(tmp_path / "again", settings["architectures"][0]).from_pretrained(tmp_path / "again").eval()
    assert max(compare(theirs, read_folder(tmp_path / "again").model.eval(), padding).all) < 1e-4


def test_a_folder_without_a_tokenizer_names_its_padding(tmp_path, offline):
    write_theirs("roberta", tmp_path / "hf")
    (tmp_path / "hf" / "vocab.txt").unlink()
    summary = import_folder(tmp_path / "hf", tmp_path / "start").summary()
    assert "; its padding must have the id 1\n" in summary and "give the model's own" in summary
