"""ModernBERT: both forms of its config.json, packed rows, refused parts, biases, heads of classifiers."""

import json

import pytest
import torch
from parity import Case, example, imported
from safetensors.torch import load_file, save_file

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.families.modernbert import FULL, LOCAL
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.errors import UserError
from tests.unit.conversion.conftest import write_checkpoint
from tests.unit.conversion.test_damaged_folders import refused_in_one_line

FAMILY = FAMILIES["modernbert"]
CASE = Case(FAMILY, "masked-lm")
V4 = {
    "model_type": "modernbert",
    **{"num_hidden_layers": 7, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    **{"layer_norm_eps": 1e-3, "position_embedding_type": "absolute", "reference_compile": True},
    **{"global_attn_every_n_layers": 3, "local_attention": 128, "local_rope_theta": 10000.0},
}
"""As transformers 4 writes it, with keys that nothing reads."""


def settings(**changes):
    """The model of a config.json."""
    return FAMILY.model_config("config.json", FAMILY.complete("config.json", V4 | changes))


def rope(full=160_000.0, local=10_000.0, **more):
    return {FULL: {"rope_type": "default", "rope_theta": full, **more}, LOCAL: {"rope_theta": local}}


def kinds(pattern):
    return [FULL if kind == "f" else LOCAL for kind in pattern]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a random model of transformers, `hf`, imported as `imported`."""
    folder = tmp_path_factory.mktemp("modernbert")
    theirs, ours = imported(CASE, folder)
    return folder, theirs.double(), ours.double()


def test_settings_of_a_released_folder_are_read_as_transformers_reads_them():
    config = settings()
    assert (config.layernorm_epsilon, config.seq_length, config.vocab_size) == (1e-5, 8192, 50368)
    assert (config.hidden_dropout, config.attention_dropout, config.num_segments) == (0, 0, 0)
    assert (config.local_attention, config.global_every) == (128, 3)
    assert (config.rope_theta, config.local_rope_theta) == (160_000, 10_000)
    assert settings(hidden_size=48, intermediate_size=192).ffn_size == 192  # four times, which is no default of GEGLU


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": kinds("fllfllf")}, (128, 3, 160_000, 10_000)),
        ({"layer_types": kinds("fllllll")}, (128, 7, 160_000, 10_000)),
        ({"layer_types": kinds("flflflf"), "local_attention": 12}, (12, 2, 160_000, 10_000)),
        ({"layer_types": kinds("fffffff")}, (None, 1, 160_000, None)),
        ({"global_attn_every_n_layers": 1}, (None, 1, 160_000, None)),
        ({"local_rope_theta": None, "global_rope_theta": 50.5}, (128, 3, 50.5, None)),
        ({"rope_parameters": rope(500.0, 500.0)}, (128, 3, 500, None)),
        ({"rope_parameters": rope(7.0, 9.5), "global_rope_theta": 3.0}, (128, 3, 7, 9.5)),
        ({"rope_parameters": {FULL: None, LOCAL: {}}, "global_rope_theta": 3.0}, (128, 3, 3, 10_000)),
        ({"mlp_dropout": 0.1, "embedding_dropout": 0.1}, (128, 3, 160_000, 10_000)),
    ],
)
def test_both_forms_of_layers_and_thetas(changes, expected):
    config = settings(**changes)
    found = (config.local_attention, config.global_every, config.rope_theta, config.local_rope_theta)
    assert found == expected and config.hidden_dropout == changes.get("mlp_dropout", 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"layer_types": kinds("lffllff")},
            "layer_types has an unsupported order: need 'full_attention' in",
        ),
        ({"layer_types": kinds("ffllffl")}, "layer_types has an unsupported order"),
        ({"layer_types": ["full_attention"]}, "expected a list with one kind for each layer"),
        ({"layer_types": [*kinds("fllfll"), "linear_attention"]}, "layer_types has an unsupported order"),
        ({"rope_parameters": rope(factor=2.0, rope_type="yarn")}, "'full_attention'.*'yarn'.*rope_type 'default'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "expected one table for each of full_att"),
        ({"rope_parameters": {"chunked": {}}}, "of 'chunked'.*need full_attention or sliding_attention"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling is .*expected null"),
        ({"local_attention": None}, "local_attention is None, but some layers are local"),
        ({"local_attention": 1}, r"--local-attention"),
        ({"global_rope_theta": 0.5}, r"--rope-theta"),
        ({"norm_bias": True}, "norm_bias is True and attention_bias is False: here all maps and norms have one"),
        ({"decoder_bias": False}, "decoder_bias is False, which is not supported: expected True"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"classifier_activation": "tanh"}, "classifier_activation is 'tanh'"),
        ({"mlp_dropout": 0.1}, "mlp_dropout is 0.1 and embedding_dropout is 0.0: --hidden-dropout is one number"),
    ],
)
def test_a_part_that_is_not_built_here_is_named(changes, words):
    with pytest.raises(UserError, match=words) as error:
        settings(**changes)
    assert str(error.value).startswith("config.json: ") and "\n" not in str(error.value)


def test_strange_values_are_taken_or_refused_in_one_line():
    refused = refused_in_one_line(settings, FAMILY.complete("config.json", V4))
    assert refused > 10 * len(FAMILY.sizes)


@torch.no_grad()
def test_packed_rows_are_equal_under_masks_of_documents(folder):
    """Documents of 15 and 9 tokens in one row; half a window is 5."""
    _, theirs, ours = folder
    ids = torch.randint(5, 18, (1, 24), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[1] * 15 + [2] * 9])
    place = torch.cat([torch.arange(15), torch.arange(9)])[None]
    together = (documents[:, :, None] == documents[:, None])[:, None]
    near = (place[:, :, None] - place[:, None]).abs()[:, None] <= 5
    for attend in ({FULL: together, LOCAL: together & near}, {FULL: together, LOCAL: together}):
        expected = theirs.model(ids, attention_mask=attend, position_ids=place).last_hidden_state
        gap = (ours.encode(ids, torch.zeros_like(ids), documents, place) - expected).abs().max()
        is_right = attend[LOCAL].sum() < together.sum()
        assert (gap < 1e-6 * expected.abs().max()) == is_right, "the comparison does not see the window"


def test_an_export_has_both_forms_and_the_special_ids(folder, tmp_path, offline):
    folder, theirs, _ = folder
    export_checkpoint(folder / "imported", tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {
        **{"layer_types": kinds("fllf"), "global_attn_every_n_layers": 3, "local_attention": 10},
        **{"global_rope_theta": 50.0, "local_rope_theta": 5.0, "max_position_embeddings": 24},
        **{"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3},
    }
    assert expected.items() <= values.items() and "auto_map" not in values
    before, after = (load_file(place / "hf" / "model.safetensors") for place in (folder, tmp_path))
    assert before.keys() == after.keys() and "decoder.weight" not in after and "model.layers.0.attn_norm" not in after
    assert all(torch.equal(before[name], after[name]) for name in before)
    from transformers import AutoModelForMaskedLM, AutoTokenizer, ModernBertConfig

    model, tokenizer = (kind.from_pretrained(tmp_path / "hf") for kind in (AutoModelForMaskedLM, AutoTokenizer))
    assert model(**tokenizer("red cat", "the dog", return_tensors="pt")).logits.shape == (1, 7, 18)
    old = {key: value for key, value in values.items() if key not in ("layer_types", "rope_parameters")}
    assert ModernBertConfig(**old).to_dict() == ModernBertConfig(**values).to_dict()


def test_a_classifier_gets_a_new_masked_lm_head(folder, tmp_path):
    folder, _, _ = folder
    place = tmp_path / "hf"
    place.mkdir()
    for name in ("config.json", "vocab.txt"):
        (place / name).write_bytes((folder / "hf" / name).read_bytes())
    weights = load_file(folder / "hf" / "model.safetensors")
    weights["classifier.bias"] = weights.pop("decoder.bias")[:2].clone()
    save_file(weights, place / "model.safetensors")
    read = import_folder(place, tmp_path / "start")
    assert read.weights.initialised == ["masked-LM head (drawn anew; the folder has none)"]
    assert read.weights.left_out == [f"classifier.{name}" for name in ("bias", "head.dense.weight", "head.norm.weight")]
    assert torch.equal(read.model.head.final_norm.weight, weights["model.final_norm.weight"])
    weights["model.layers.1.attn.Wqkv.weight"] = weights["model.layers.1.attn.Wqkv.weight"][:-1]
    save_file(weights, place / "model.safetensors")
    with pytest.raises(UserError, match=r"layers.1.attention.value.weight is \[31, 32\].*requires \[32, 32\]"):
        import_folder(place, tmp_path / "refused")


@pytest.mark.parametrize("key_bias", [True, False])
def test_a_model_with_biases_leaves_as_a_plain_one(tmp_path, offline, key_bias):
    config, tokenizer = example(CASE, tmp_path)
    changes = {"bias": True, "key_bias": key_bias, "local_attention": None, "local_rope_theta": None}
    names = {"ffn", "layernorm_position", "first_norm", "num_segments", "position_encoding", "rope_theta", "num_layers"}
    run = write_checkpoint(tmp_path / "run", tokenizer, **{n: getattr(config, n) for n in names} | changes)
    export = export_checkpoint(run, tmp_path / "hf")
    assert export.family is FAMILY and "trust_remote_code" not in export.summary()
    again = load_model(import_folder(tmp_path / "hf", tmp_path / "back").output)[2].model
    assert (again.bias, again.key_bias, again.local_attention, again.ffn_hidden_size) == (True, True, None, None)
