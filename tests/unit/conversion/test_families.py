"""Every family of the registry: equal to transformers in both directions, and what is special about each."""

import copy
import itertools
import json
import shlex
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from parity import CASES, SIZES, Case, compare, example, exported, imported
from safetensors.torch import load_file, save_file

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.commands.dry_run import dry_run
from megatron_ddrp.config import STARTS, ModelConfig, flag
from megatron_ddrp.conversion.families import FAMILIES, leaving_family
from megatron_ddrp.conversion.families.modernbert import FULL, LOCAL
from megatron_ddrp.conversion.from_huggingface import import_folder, local_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders.text_encoder import load_encoder
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import count_parameters
from megatron_ddrp.model.stages import Draws, Inputs, layout_of
from tests.refusals import refused, wrong_arguments
from tests.unit.conversion import conftest
from tests.unit.conversion.conftest import change_json, encoded, padded_pair_batch, stored, write_checkpoint
from tests.unit.conversion.tokenizers_of_families import FAIRSEQ, byte_level

pytestmark = pytest.mark.usefixtures("few_probes")
DISCRIMINATOR, GENERATOR = "replaced-token", "masked-lm"
MASKED_LMS = ("bert", "roberta", "modernbert", "deberta-v2")
BERT, ROBERTA, MODERNBERT, DEBERTA_V2 = (Case(FAMILIES[name], "masked-lm") for name in MASKED_LMS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Case → folders and models of a model of transformers that was imported; one of each for all tests."""

    @cache
    def made(case):
        top = tmp_path_factory.mktemp("family")
        return SimpleNamespace(hf=top / "hf", imported=top / "imported", models=imported(case, top))

    return made


@pytest.mark.parametrize("direction", ["imported", "exported"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_and_logits_are_equal_in_both_directions(tmp_path, offline, folders, case, direction):
    theirs, model = copy.deepcopy(folders(case).models) if direction == "imported" else exported(case, tmp_path)
    pad_id = theirs.config.pad_token_id
    assert max(compare(theirs, model, pad_id).all) < 1e-4
    assert max(compare(theirs.double(), model.double(), pad_id).all) < 1e-6
    model.layers[0].attention.value.weight.data *= 1.1
    assert min(compare(theirs, model, pad_id).all) > 1e-4, "the comparison does not see a change"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_leaves_as_its_family_and_the_printed_flags_are_its_own(tmp_path, offline, folders, capsys, case):
    config, tokenizer = example(case, tmp_path)
    for named in (None, case.family.model_type):
        assert leaving_family(config, case.head, tokenizer, named) is case.family
    start = import_folder(folders(case).hf, tmp_path / "start")
    lines = dict(line.split(":", 1) for line in start.summary().splitlines())
    line, (_, tokenizer) = lines["flags"], lines["next"].split(" --output-prefix corpus ")
    config = parse_arguments(shlex.split(f"--load {tmp_path / 'start'} {tokenizer} {line}")).config
    expected = {"masked-lm": "mlm", "replaced-token": "electra", "contextual-replaced-token": "rtd"}
    # transformers writes a folder without a head where the family has a bare one
    objective = expected["masked-lm" if case.head in case.family.bare_heads else case.head]
    assert start.objective.objective == objective and f"--objective {objective} " in line + " "
    for name, value in case.family.training.items():
        assert getattr(start.objective, name) == value and f"{flag(name)} {value}" in line
    assert config.objective == start.objective == load_model(tmp_path / "start")[2].objective
    dry_run(config)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["parameters"] == count_parameters(start.model)[0]
    assert config.replace(model={"vocab_size": start.config.vocab_size}).model == start.config


def test_a_bert_in_a_causal_phase_is_transformers_decoder_with_its_loss_and_gradients(tmp_path, offline):
    import transformers

    encoder, model = exported(BERT, tmp_path)
    encoder.config.is_decoder = True
    decoder = transformers.BertLMHeadModel(encoder.config).eval().double()
    decoder.load_state_dict(encoder.state_dict())
    ids = torch.arange(48).reshape(2, 24) * 7 % 17 + 1  # not 0, whose row transformers keeps as padding
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), IGNORED_LABEL)], dim=1)
    batch = Batch.of_texts(ids, torch.ones_like(ids))._replace(labels=labels)
    inputs = Inputs(batch, Draws.none(2, model.config.num_layers), None, layout_of(batch, causal=True))
    loss = model.eval().double()(*inputs).sums[0]
    logits = decoder(input_ids=ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    ours = torch.autograd.grad(loss, [model.embeddings.token.weight, model.layers[0].attention.key.weight])
    bert = decoder.bert
    theirs = bert.embeddings.word_embeddings.weight, bert.encoder.layer[0].attention.self.key.weight
    for gradient, wanted in zip(ours, torch.autograd.grad(expected, theirs), strict=True):
        torch.testing.assert_close(gradient[: len(wanted)], wanted, rtol=1e-7, atol=1e-9)


def test_a_nomic_bert_as_it_was_released(tmp_path, offline):
    """GPT-2's names of sizes, one matrix for query, key and value, no biases in the head; it names code."""
    theirs, tokenizer = conftest.write_theirs("nomic_bert", tmp_path / "hf", rope_parameters=..., layer_norm_eps=0.01)
    file, config = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    biases = ("cls.predictions.bias", "cls.predictions.transform.dense.bias")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items() if name not in biases}
    for name in ("encoder.layers.0.attn.Wqkv.weight", "encoder.layers.1.mlp.fc11.weight", "emb_ln.bias"):
        assert any(stored.endswith(name) for stored in tensors), name
    save_file({name.replace("nomic_bert.", "bert."): tensor for name, tensor in tensors.items()}, file)
    old_keys = {
        **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        **{"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"},
        **{"layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"},
    }
    theirs.cls.predictions.transform.dense.bias.data.zero_(), theirs.cls.predictions.decoder.bias.data.zero_()
    values = {old_keys.get(key, key): value for key, value in json.loads(config.read_text()).items()}
    code = {"auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}}
    config.write_text(json.dumps(values | code | {"activation_function": "swiglu", "qkv_proj_bias": False}))
    imported = import_folder(tmp_path / "hf", tmp_path / "start")
    assert imported.weights.left_out == [] and imported.config.layernorm_epsilon == 0.01
    assert max(compare(theirs, load_model(tmp_path / "start")[0], tokenizer.pad_id).all) < 1e-4
    save_file(tensors, file)  # as the embedding models have them
    whole, start = (load_encoder(tmp_path / name) for name in ("hf", "start"))
    assert whole.max_length == start.max_length
    assert abs(whole.pool(["a text", "another one"]) - start.pool(["a text", "another one"])).max() < 1e-4


def test_a_eurobert_gets_a_new_head_and_keeps_it_beside_its_export(tmp_path, offline):
    transformers = pytest.importorskip("transformers")
    theirs, tokenizer = conftest.write_theirs("eurobert", tmp_path / "hf")
    masked = transformers.EuroBertForMaskedLM(theirs.config)
    masked.model = theirs
    masked.save_pretrained(tmp_path / "hf")
    imported = import_folder(tmp_path / "hf", tmp_path / "start")
    assert imported.weights.left_out == ["lm_head.weight"]
    assert imported.weights.initialised == ["masked-LM head (drawn anew; the folder has none)"]
    export_checkpoint(tmp_path / "start", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["EuroBertModel"]
    back = import_folder(tmp_path / "again", tmp_path / "back")
    assert back.weights.initialised == back.weights.left_out == []
    kept, size = imported.model.state_dict(), tokenizer.vocab_size
    assert all(torch.equal(kept[name][:size], value[:size]) for name, value in back.model.state_dict().items())


def test_padding_that_ends_texts_too_is_no_robertas(tmp_path):
    """RoBERTa counts positions by the id of padding, and would give an end the position of padding."""
    config = ModelConfig(position_encoding="absolute", num_segments=1)
    byte_level(tmp_path, FAIRSEQ, template=True)
    for padding, family in (("<pad>", "roberta"), ("</s>", "bert")):
        change_json(tmp_path / "tokenizer_config.json", pad_token=padding)
        tokenizer = build_tokenizer("HuggingFace", tokenizer_model=tmp_path)
        assert leaving_family(config, "masked-lm", tokenizer).model_type == family
    message = r"--family roberta: it needs a piece of its own for \[PAD\]; leave --family out"
    wrong_arguments(message, leaving_family, config, "masked-lm", tokenizer, "roberta")


def test_roberta_has_rows_that_no_token_reads(tmp_path, offline, folders):
    folder = folders(ROBERTA).hf
    export_checkpoint(folders(ROBERTA).imported, tmp_path / "hf")
    table = load_file(tmp_path / "hf" / "model.safetensors")["roberta.embeddings.position_embeddings.weight"]
    assert len(table) == 26 and not table[:2].any()
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {"max_position_embeddings": 26, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0}
    assert values | expected == values
    values = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2}
    complete = FAMILIES["roberta"].complete(folder, values)
    refused("2 rows belong to padding: none is left", FAMILIES["roberta"].settings, folder, complete)


def write_electra(folder, head, embeddings_of=None, **settings):
    """A folder of one half of an ELECTRA, with the embeddings of the other half's model."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128}
    model, _ = conftest.write_theirs("electra", folder, head, **sizes | settings)
    if embeddings_of is not None:
        model.electra.embeddings.load_state_dict(embeddings_of.electra.embeddings.state_dict())
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("width", [16, 8], ids=["projected", "as wide as its embeddings"])
@torch.no_grad()
def test_a_generator_joins_its_discriminator(tmp_path, offline, width):
    discriminator = write_electra(tmp_path / "d", DISCRIMINATOR, embedding_size=8)
    sizes = {"hidden_size": width, "num_attention_heads": width // 8, "intermediate_size": 4 * width}
    generator = write_electra(tmp_path / "g", GENERATOR, discriminator, embedding_size=8, **sizes)
    together = import_folder(tmp_path / "d", tmp_path / "start", generator=tmp_path / "g")
    assert together.weights.initialised == [] and f" --generator {tmp_path / 'g'}" in together.summary()
    assert together.objective.generator_config(together.config).num_attention_heads == width // 8
    model = load_model(tmp_path / "start")[0]
    ids, segments, mask = batch = padded_pair_batch(18)
    theirs = generator(ids, mask, segments).logits
    lone = load_model(import_folder(tmp_path / "g", tmp_path / "lone").output)[0]
    torch.testing.assert_close(lone.logits(encoded(lone, *batch))[mask.bool()], theirs[mask.bool()])
    lone.embeddings, lone.layers = model.generator.embeddings, model.generator.layers
    joined = model.generator.head.logits(encoded(lone, *batch))[..., :18]
    torch.testing.assert_close(joined[mask.bool()], theirs[mask.bool()], atol=1e-5, rtol=1e-5)
    theirs = discriminator(ids, mask, segments).logits
    torch.testing.assert_close(model.head.logits(encoded(model, *batch))[mask.bool()], theirs[mask.bool()])


def test_a_generator_that_does_not_belong_is_refused(tmp_path, offline, folders):
    discriminator = write_electra(tmp_path / "d", DISCRIMINATOR)
    other = write_electra(tmp_path / "other", GENERATOR, intermediate_size=64, hidden_size=16, num_attention_heads=2)
    other.electra.embeddings.word_embeddings.weight.data[5] += 0.1
    other.save_pretrained(tmp_path / "other")
    write_electra(tmp_path / "wide", GENERATOR, discriminator, intermediate_size=48)
    for first, second, words in (
        ("d", "other", "embeddings.token.weight differs from the discriminator's.*leave --generator out"),
        ("d", "wide", "its ffn_size is 48.*128.*leave --generator out"),
        ("wide", "wide", "holds a masked LM: give the discriminator's folder"),
    ):
        refused(words, import_folder, tmp_path / first, tmp_path / "start", generator=tmp_path / second)
    alone = import_folder(tmp_path / "d", tmp_path / "start")
    assert alone.weights.initialised == ["generator (drawn anew; the folder has none)"]


def test_a_family_is_named_or_refused(tmp_path, offline, folders):
    folder = folders(ROBERTA).imported
    assert export_checkpoint(folder, tmp_path / "bert", family_name="bert").family.class_name == "Bert"
    for name, words in {
        "deberta": "--family deberta: --position-encoding is absolute, and Deberta has deberta",
        "gpt": "--family gpt is not known: expected one of camembert",
    }.items():
        refused(words, export_checkpoint, folder, tmp_path / name, family_name=name)


def test_the_start_of_a_run_decides_no_family_and_other_backbones_are_no_bert(tmp_path):
    _, tokenizer = example(BERT, tmp_path)
    start = {"attention_init": "offsets", "direction_init": "free", "init_method_std": 0.5}
    config = ModelConfig(position_encoding="absolute", **SIZES | start)
    assert [name for name in STARTS if name not in start] == []
    assert leaving_family(config, "masked-lm", tokenizer).model_type == "bert"
    assert FAMILIES["bert"].refusal(config, "masked-lm") is None
    for change in ({"ffn": "geglu"}, {"norm": "rmsnorm"}, {"bias": False}, {"embedding_size": 16}):
        config = ModelConfig(position_encoding="absolute", **SIZES, **change)
        assert "Bert has" in FAMILIES["bert"].refusal(config, "masked-lm")
        expected = "electra" if "embedding_size" in change else "megatron_ddrp"
        assert leaving_family(config, "masked-lm", tokenizer).model_type == expected, change
    for change in ({"deberta_emd": True}, {"relative_table": "per-layer"}):
        config = ModelConfig(position_encoding="deberta-v2", **SIZES, **change)
        assert leaving_family(config, "masked-lm", tokenizer).model_type == "megatron_ddrp", change
    by_token = {name for name, family in FAMILIES.items() if family.training.get("masking") == "token"}
    assert {"roberta", "xlm-roberta", "electra"} <= by_token and not {"bert", "camembert"} & by_token


def test_other_models_are_told_what_is_supported(tmp_path):
    for kind in ("distilbert", "albert", "gpt2"):
        change_json(tmp_path / "config.json", model_type=kind)
        words = f"model_type is '{kind}'.*supported are camembert, .*roberta, bert, electra"
        refused(words, import_folder, tmp_path, tmp_path / "start")
    (tmp_path / "config.json").write_text('{"checkpoint": {}}')
    refused("a run; export it first: convert --load", import_folder, tmp_path, tmp_path / "start")


def test_a_hub_name_is_downloaded_or_told_how(tmp_path, offline, folders, monkeypatch):
    import huggingface_hub

    source, asked = folders(BERT).hf, []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        shutil.copytree(source, tmp_path / "snapshot", dirs_exist_ok=True)
        (tmp_path / "snapshot" / "model.safetensors").unlink(missing_ok=len(asked) == 1)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_folder(Path("google/bert")) == tmp_path / "snapshot"
    assert [("model.safetensors" in patterns) for _, patterns in asked] == [True, False]
    assert all(name == "google/bert" and not any("py" in p.split(".")[-1:] for p in ps) for name, ps in asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=OSError("no network\nand more")))
    told = r"\(no network\).*`hf download google/bert --local-dir DIR`"
    refused(told, import_folder, Path("google/bert"), tmp_path / "start")
    refused("config.json: No such file", import_folder, tmp_path / "missing", tmp_path / "start")


RELEASED = {
    "deberta": {},
    "deberta-v2": {
        **{"relative_attention": True, "position_buckets": 256, "max_relative_positions": -1},
        **{"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p"},
    },
    "modernbert": {
        **{"num_hidden_layers": 7, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
        **{"layer_norm_eps": 1e-3, "position_embedding_type": "absolute", "reference_compile": True},
        **{"global_attn_every_n_layers": 3, "local_attention": 128, "local_rope_theta": 10000.0},
    },
}
"""config.json of a DeBERTaV3 and of a ModernBERT, as transformers 4 writes it, with keys that nothing reads."""


def settings(name, **changes):
    """Return the model of a config.json."""
    family, values = FAMILIES[name], {"model_type": name} | RELEASED[name]
    return family.model_config("config.json", family.complete("config.json", values | changes))


def rope(full=160_000.0, local=10_000.0, **more):
    return {FULL: {"rope_type": "default", "rope_theta": full, **more}, LOCAL: {"rope_theta": local}}


def kinds(pattern):
    return [FULL if kind == "f" else LOCAL for kind in pattern]


def test_settings_of_released_models_are_read_as_transformers_reads_them():
    assert settings("modernbert").layernorm_epsilon == 1e-5, "layer_norm_eps is a key of other families"
    assert settings("modernbert", hidden_size=48, intermediate_size=192).ffn_size == 192, "no default of GEGLU"
    for same in ({"max_relative_positions": 512}, {"pos_att_type": ["c2p", "p2c"]}, {"conv_kernel_size": 0}):
        assert settings("deberta-v2", **same) == settings("deberta-v2")
    for changes, *expected in (  # both forms of layers and thetas
        ({"layer_types": kinds("flflflf"), "local_attention": 12}, 12, 2, 160_000, 10_000),
        ({"layer_types": kinds("fffffff")}, None, 1, 160_000, None),
        ({"global_attn_every_n_layers": 1}, None, 1, 160_000, None),
        ({"local_rope_theta": None, "global_rope_theta": 50.5}, 128, 3, 50.5, None),
        ({"rope_parameters": rope(500.0, 500.0)}, 128, 3, 500, None),
        ({"rope_parameters": rope(7.0, 9.5), "global_rope_theta": 3.0}, 128, 3, 7, 9.5),
        ({"rope_parameters": {FULL: None, LOCAL: {}}, "global_rope_theta": 3.0}, 128, 3, 3, 10_000),
        ({"mlp_dropout": 0.1, "embedding_dropout": 0.1}, 128, 3, 160_000, 10_000),
    ):
        config = settings("modernbert", **changes)
        found = [config.local_attention, config.global_every, config.rope_theta, config.local_rope_theta]
        assert found == expected and config.hidden_dropout == changes.get("mlp_dropout", 0), changes


def test_an_export_has_both_forms_and_the_special_ids(folders, tmp_path, offline):
    export_checkpoint(folders(MODERNBERT).imported, tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {
        **{"layer_types": kinds("fllf"), "global_attn_every_n_layers": 3, "local_attention": 10},
        **{"global_rope_theta": 50.0, "local_rope_theta": 5.0, "max_position_embeddings": 24},
        **{"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3},
    }
    assert expected.items() <= values.items() and "auto_map" not in values
    from transformers import ModernBertConfig

    old = {key: value for key, value in values.items() if key not in ("layer_types", "rope_parameters")}
    assert ModernBertConfig(**old).to_dict() == ModernBertConfig(**values).to_dict()


def test_a_classifier_gets_a_new_masked_lm_head(folders, tmp_path):
    def change(weights):
        weights["classifier.bias"] = weights.pop("decoder.bias")[:2].clone()
        return weights

    place = rewrite(folders(MODERNBERT).hf, tmp_path / "hf", change)
    read, weights = import_folder(place, tmp_path / "start"), load_file(place / "model.safetensors")
    assert read.weights.initialised == ["masked-LM head (drawn anew; the folder has none)"]
    assert read.weights.left_out == [f"classifier.{name}" for name in ("bias", "head.dense.weight", "head.norm.weight")]
    assert torch.equal(read.model.head.final_norm.weight, weights["model.final_norm.weight"])
    weights["model.layers.1.attn.Wqkv.weight"] = weights["model.layers.1.attn.Wqkv.weight"][:-1]
    save_file(weights, place / "model.safetensors")
    words = r"layers.1.attention.value.weight is \[31, 32\].*requires \[32, 32\]"
    refused(words, import_folder, place, tmp_path / "refused")


@pytest.mark.parametrize("key_bias", [True, False])
def test_a_model_with_biases_leaves_as_a_plain_one(tmp_path, offline, key_bias):
    config, tokenizer = example(MODERNBERT, tmp_path)
    changes = {"bias": True, "key_bias": key_bias, "local_attention": None, "local_rope_theta": None}
    names = {"ffn", "layernorm_position", "first_norm", "num_segments", "position_encoding", "rope_theta", "num_layers"}
    run = write_checkpoint(tmp_path / "run", tokenizer, **{n: getattr(config, n) for n in names} | changes)
    export = export_checkpoint(run, tmp_path / "hf")
    assert export.family is MODERNBERT.family and "trust_remote_code" not in export.summary()
    again = load_model(import_folder(tmp_path / "hf", tmp_path / "back").output)[2].model
    assert (again.bias, again.key_bias, again.local_attention, again.ffn_hidden_size) == (True, True, None, None)


DETECTOR = {}
for part, shape in {"LayerNorm": (32,), "dense": (32, 32), "classifier": (1, 32)}.items():
    DETECTOR |= {f"mask_predictions.{part}.weight": shape, f"mask_predictions.{part}.bias": shape[:1]}


def rewrite(source, target, change, **values):
    """Copy a folder with other weights and settings; return the folder."""
    shutil.copytree(source, target)
    save_file(change(load_file(target / "model.safetensors")), target / "model.safetensors")
    change_json(target / "config.json", **values)
    return target


def with_detector(weights):
    torch.manual_seed(5)
    return weights | {name: torch.randn(shape) for name, shape in DETECTOR.items()}


def test_a_part_that_is_not_built_here_is_named():
    """tests/unit/conversion/test_config_keys.py refuses the keys of all families; here are the words for a user."""
    for name, changes, words in (
        ("deberta", {"position_buckets": 256}, "position_buckets is 256, .*v2/v3.*'deberta-v2'"),
        ("deberta-v2", {"position_buckets": 31}, "31: choose an even number"),
        ("deberta-v2", {"max_relative_positions": 256}, "is 256 and max_position_embeddings 512.*equal"),
        ("modernbert", {"layer_types": kinds("lffllff")}, "has an unsupported order: need 'full_attention' in"),
        ("modernbert", {"layer_types": ["full_attention"]}, "expected a list with one kind for each layer"),
        ("modernbert", {"rope_parameters": rope(factor=2.0, rope_type="yarn")}, "'full_attention'.*'yarn'.*rope_type"),
        ("modernbert", {"rope_parameters": {"rope_theta": 5.0}}, "expected one table for each of full_attention"),
        ("modernbert", {"rope_parameters": {"chunked": {}}}, "of 'chunked'.*need full_attention or sliding_attention"),
        ("modernbert", {"local_attention": None}, "local_attention is None, but some layers are local"),
        ("modernbert", {"mlp_dropout": 0.1}, "mlp_dropout is 0.1 and embedding_dropout is 0.0: --hidden-dropout is"),
    ):
        assert str(refused(words, settings, name, **changes)).startswith("config.json: ")


STRANGE = (
    10**12, -1, 0, 2**31, 10**5, 10**400, 1.5, 1e308, float("nan"), float("inf"), True, None, "abc", "", "x" * 100_000,
    [], {}, [[]], {"a": {}}, ["c2p"], "../../x", 3,
)  # fmt: skip
"""Values that no key of a config.json has."""


@pytest.mark.parametrize("name", FAMILIES)
def test_strange_values_are_taken_or_refused_in_one_line(tmp_path, name):
    family, refusals = FAMILIES[name], 0
    config, tokenizer = example(Case(family, "masked-lm"), tmp_path)
    values = family.complete("config.json", family.folder_settings(config, "masked-lm", tokenizer))
    for key, value in itertools.product(values, STRANGE):
        try:
            family.model_config("config.json", family.complete("config.json", values | {key: value}))
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, (key, error)
            refusals += 1
    assert refusals > 10 * len(family.sizes)


def test_both_names_of_the_masked_lm_head(folders, tmp_path):
    """As released, with the other head beside it; then BERT's names too, and `legacy` says which head is read."""
    source, theirs = folders(DEBERTA_V2).hf, folders(DEBERTA_V2).models[0]
    released = import_folder(rewrite(source, tmp_path / "released", with_detector), tmp_path / "1")
    assert released.weights.left_out == [f"unread.{name}" for name in sorted(DETECTOR)]
    names = {"dense": "transform.dense", "LayerNorm": "transform.LayerNorm", "bias": "bias"}

    def under_both(weights):
        for theirs, berts in names.items():
            old, new = f"lm_predictions.lm_head.{theirs}", f"cls.predictions.{berts}"
            weights |= {name.replace(old, new): weights[name] + 1 for name in weights if name.startswith(old)}
        return weights

    both = import_folder(rewrite(source, tmp_path / "both", under_both), tmp_path / "2")
    assert all(name.startswith("unread.cls.") for name in both.weights.left_out) and len(both.weights.left_out) == 5
    for read in (released, both):
        assert read.objective.objective == "mlm" and not read.weights.initialised
        assert max(compare(theirs, read.model.eval(), 0).all) < 1e-4
    other = import_folder(rewrite(source, tmp_path / "legacy", under_both, legacy=True), tmp_path / "3").model
    expected = load_file(source / "model.safetensors")["lm_predictions.lm_head.dense.weight"] + 1
    assert torch.equal(other.head.dense.weight, expected)


@torch.no_grad()
def test_a_discriminator_resumes_under_replaced_token_detection_alone_or_beside_its_generator(folders, tmp_path):
    """The difference of the two word embeddings is E_Δ; the generator has half of the layers."""
    source, theirs = folders(DEBERTA_V2).hf, folders(DEBERTA_V2).models[0]
    rewrite(source, tmp_path / "d", with_detector)
    stored(lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("lm_predictions.")})(tmp_path / "d")
    read = import_folder(tmp_path / "d", tmp_path / "start")
    assert read.objective.objective == "rtd" and "--objective rtd" in read.summary()
    drawn = ["generator (drawn anew; the folder has none)", "difference of the embeddings (0; the folder has none)"]
    model, words = load_model(tmp_path / "start")[0], theirs.deberta.embeddings.word_embeddings.weight
    assert read.weights.initialised == drawn
    assert torch.equal(model.embeddings.token.weight[:18], words) and not model.embeddings.difference.weight.any()
    assert torch.equal(model.head.output.weight, with_detector({})["mask_predictions.classifier.weight"])
    ids, _, mask = batch = padded_pair_batch(18)
    expected = theirs.deberta(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(encoded(model, *batch)[mask.bool()], expected[mask.bool()])
    told = "its num_layers is 2, but this discriminator needs 1"
    refused(told, import_folder, tmp_path / "d", tmp_path / "refused", generator=tmp_path / "d")

    def half(weights, name="deberta.embeddings.word_embeddings.weight"):
        return {n: t for n, t in weights.items() if ".layer.1." not in n} | {name: weights[name] + 1}

    generator = rewrite(source, tmp_path / "g", half, num_hidden_layers=1)
    model = import_folder(tmp_path / "d", tmp_path / "pair", generator=generator).model
    torch.testing.assert_close(model.embeddings.token.weight[:18], words + 1)
    torch.testing.assert_close(model.embeddings.difference.weight[:18], -torch.ones_like(words))
    first = theirs.deberta.encoder.layer[0].attention.self.query_proj.weight
    assert torch.equal(model.generator.layers[0].attention.query.weight, first)
    assert torch.equal(model.generator.head.dense.weight, theirs.lm_predictions.lm_head.dense.weight)


def test_a_model_of_replaced_token_detection_leaves_as_a_plain_encoder(tmp_path, tokenizer, offline):
    settings = {"position_encoding": "deberta-v2", "num_segments": 0, "num_layers": 1}
    run = write_checkpoint(tmp_path / "run", tokenizer, objective="rtd", **settings)
    export = export_checkpoint(run, tmp_path / "hf")
    assert "a plain DebertaV2: AutoModel.from_pretrained" in export.summary()
    weights, (model, _, _) = load_file(tmp_path / "hf" / "model.safetensors"), load_model(run)
    assert {name for name in weights if not name.startswith("deberta.")} == DETECTOR.keys()
    again = import_folder(tmp_path / "hf", tmp_path / "back")
    assert again.objective.objective == "rtd" and not again.weights.left_out
    for name in ("dense", "output", "norm"):
        assert torch.equal(again.model.head.get_submodule(name).weight, model.head.get_submodule(name).weight)
