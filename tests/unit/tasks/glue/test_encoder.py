"""Encoders out of checkpoints and folders of transformers, their fingerprints, and folders that hold none."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_ddrp.checkpoint import choose_checkpoint
from megatron_ddrp.checkpoint.folder import refuse_folders
from megatron_ddrp.conversion.from_huggingface import read_folder
from megatron_ddrp.conversion.model_code import SEQUENCE, SPAN, Labels
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer, usual_rows
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.huggingface import _is_decoder
from megatron_ddrp.encoders.rows import pad_batch
from megatron_ddrp.lab.analysis.session import find_snapshots
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.table_files import Example
from megatron_ddrp.tasks.glue import TASKS
from tests.refusals import refused
from tests.unit.conversion.conftest import change_json, seal_again, write_checkpoint

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 14}
CPU = torch.device("cpu")
FINDERS = (load_encoder, read_folder, lambda folder: find_snapshots([folder], every=False))


def write_model(folder, kind, **settings):
    """Write a tiny model of transformers with random weights, of 14 pieces and in most cases of 16 positions."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | {"max_position_embeddings": 16} | settings)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)


def hidden(encoder, examples):
    """Hidden states of rows and which of them are no padding: `[rows, seq, hidden]`, `[rows, seq]`."""
    encoded = KINDS["classification"].encode(TASKS["RTE"], examples, encoder.tokenizer, encoder.max_length)
    batch = pad_batch(encoded, np.arange(len(examples))).map(torch.from_numpy)
    with torch.no_grad():
        return encoder.module.eval()(batch), batch.document_ids > 0


def test_each_run_has_a_copy_of_its_own_and_random_weights_that_its_seed_draws(checkpoint_folder):
    encoder = load_encoder(checkpoint_folder)
    copy = encoder.fresh(1, CPU)
    for loaded, copied in zip(encoder.module.parameters(), copy.parameters(), strict=True):
        assert (loaded == copied).all() and loaded.data_ptr() != copied.data_ptr()
    drawn = load_encoder(checkpoint_folder, random_init=True)
    first, again, other = (next(p for p in drawn.fresh(seed, CPU).parameters() if p.ndim > 1) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_the_fingerprint_follows_every_weight_and_not_the_step_that_was_named(checkpoint_folder):
    before = load_encoder(checkpoint_folder).fingerprint
    path = checkpoint_folder / "iter_0000003" / "model.safetensors"
    weights = load_file(path)
    weights[sorted(weights)[-1]].view(-1)[0] += 1e-3
    save_file(weights, path, {"format": "pt"})
    seal_again(path)
    whole, step = load_encoder(checkpoint_folder).fingerprint, load_encoder(path.parent).fingerprint
    assert before != whole == step != load_encoder(checkpoint_folder, random_init=True).fingerprint


def test_the_fingerprint_of_a_folder_follows_tokenizer_and_settings_and_not_its_place(bert_folder, tmp_path):
    def fingerprint(folder=bert_folder, **more):
        return load_encoder(folder, **more).fingerprint

    found = [fingerprint()]
    for name, before, after in (
        ("tokenizer_config.json", '"do_lower_case": true', '"do_lower_case": false'),
        ("vocab.txt", "red\ngreen", "green\nred"),
        ("config.json", '"gelu"', '"relu"'),
    ):
        text = (bert_folder / name).read_text()
        assert before in text
        (bert_folder / name).write_text(text.replace(before, after))
        found.append(fingerprint())
        (bert_folder / name).write_text(text)
    assert len({*found}) == 4
    twin = shutil.copytree(bert_folder, tmp_path / "twin")
    change_json(twin / "config.json", _name_or_path=str(twin), transformers_version="4.0", torch_dtype="float32")
    assert fingerprint(twin) == found[0]
    settings = json.loads((twin / "config.json").read_text())
    assert settings.pop("attention_probs_dropout_prob") == 0.1, "transformers' own value, which may be left out"
    (twin / "config.json").write_text(json.dumps(settings))
    assert fingerprint(twin) == found[0]
    drawn = fingerprint(random_init=True)
    assert fingerprint(random_init=True) == drawn
    change_json(bert_folder / "config.json", hidden_act="relu")
    assert fingerprint(random_init=True) != drawn


def test_the_origin_says_what_was_loaded_and_a_run_has_the_vocabulary_of_its_training(bert_folder, checkpoint_folder):
    origin = load_encoder(bert_folder).origin
    assert "missing: none; not used: " in origin and "cls.predictions" in origin
    encoder = load_encoder(checkpoint_folder)
    assert "not used: 5 (head.dense.weight" in encoder.origin
    assert "random in every run" in load_encoder(checkpoint_folder, random_init=True).origin
    (checkpoint_folder / "fewer.txt").write_text("\n".join(encoder.tokenizer.pieces[:-1]))
    build_tokenizer("BertWordPieceLowerCase", checkpoint_folder / "fewer.txt").save(checkpoint_folder / "tokenizer")
    said = "its tokenizer has 13 pieces but its model embeds 14; put the vocabulary of"
    refused(said, load_encoder, checkpoint_folder)
    (checkpoint_folder / "latest").unlink()
    shutil.rmtree(checkpoint_folder / "iter_0000003")
    refused("holds no checkpoint", load_encoder, checkpoint_folder)


OTHERS = {
    **{"Roberta": {}, "Data2VecText": {}, "IBert": {}, "RobertaPreLayerNorm": {}, "Esm": {"mask_token_id": 4}},
    **{"DistilBert": {"hidden_dim": 32}, "Xmod": {"languages": ["en_XX"], "default_language": "en_XX"}},
    **{"Luke": {"entity_vocab_size": 5, "entity_emb_size": 8}},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_relatives_of_roberta_count_positions_from_the_padding_and_others_from_0(bert_folder, kind):
    write_model(bert_folder, kind, max_position_embeddings=10, pad_token_id=1, **OTHERS[kind])
    encoder = load_encoder(bert_folder)
    assert encoder.max_length == (10 if kind == "DistilBert" else 8)
    states, valid = hidden(encoder, [Example(("red cat runs bird sings", "dog blue green red cat"), 0)])
    assert states.shape == (*valid.shape, 16) == (1, encoder.max_length, 16) and torch.isfinite(states).all()


def test_a_roberta_without_a_padding_and_an_xlnet_are_refused(bert_folder):
    write_model(bert_folder, "Roberta", pad_token_id=0)
    change_json(bert_folder / "config.json", pad_token_id=None)
    refused("pad_token_id is null in its config.json, and positions are counted from it", load_encoder, bert_folder)
    transformers.AutoConfig.for_model("xlnet").save_pretrained(bert_folder)
    refused("^--load .*: xlnet has <cls> at the end of a row", load_encoder, bert_folder)


CAUSAL = {"gpt2": {}, "gemma3_text": {}, "t5": {}, "bert": {"is_decoder": True}, "xlm": {"causal": True}}


@pytest.mark.parametrize(("kind", "settings"), CAUSAL.items())
def test_a_model_whose_pieces_see_only_earlier_ones_is_refused(bert_folder, kind, settings):
    """[CLS] comes first, so its state would be the same for every text. The weights are not even read."""
    transformers.AutoConfig.for_model(kind, **settings).save_pretrained(bert_folder)
    refused(f"{kind} is no encoder; use a BERT", load_encoder, bert_folder)


def test_encoders_with_a_causal_head_in_transformers_are_no_decoders():
    own = {"gemma3_text": {"use_bidirectional_attention": True}}
    kinds = ("bert", "fnet", "xlm", "bert-generation", "gemma3_text")
    assert not [kind for kind in kinds if _is_decoder(transformers.AutoConfig.for_model(kind, **own.get(kind, {})))]


@pytest.mark.parametrize("kind", ["FNet", "Bert"])
def test_families_whose_states_depend_on_padding_are_warned_of(bert_folder, kind):
    torch.manual_seed(0)
    write_model(bert_folder, kind, initializer_range=0.3, pad_token_id=0)
    encoder = load_encoder(bert_folder)
    examples = [Example(("red cat runs sings dog",), 0), Example(("red cat runs sings dog blue green bird",), 0)]
    (alone, valid), (padded, _) = hidden(encoder, examples[:1]), hidden(encoder, examples)
    alone, padded = alone[0], padded[0, : valid.shape[1]]
    depends = bool((alone - padded).abs().max() > 1e-3 * alone.abs().max())
    told = f"warning: {bert_folder}: padding changes the states of a fnet model, so results depend on the rows that"
    assert depends == encoder.warning.startswith(told) == encoder.origin.startswith(told) == (kind == "FNet")


@pytest.mark.parametrize(
    ("first", "segments", "separators"), [("<s>", 1, 2), ("<s>", 2, 1), ("[CLS]", 1, 1), ("[CLS]", 0, 1)]
)
def test_a_pair_of_a_run_like_roberta_has_two_separators_as_its_export_has(tmp_path, first, segments, separators):
    last = {"<s>": "</s>", "[CLS]": "[SEP]"}[first]
    (tmp_path / "vocab.txt").write_text(f"<pad>\n<unk>\n{first}\n{last}\n<mask>\nred\ncat\n")
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tmp_path / "vocab.txt")
    run = write_checkpoint(tmp_path / "run", tokenizer, num_segments=segments, position_encoding="absolute")
    tokenizer = load_encoder(run).tokenizer
    assert tokenizer.rows == usual_rows(2, 3, separators == 2)
    write_tokenizer(tokenizer, tmp_path, 16, segments)
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)("red", "cat")["input_ids"]
    assert ids == [2, 5, *[3] * separators, 6, 3]


def test_a_half_precision_folder_is_tuned_and_drawn_anew_in_fp32_and_a_head_for_answers_has_two_outputs(bert_folder):
    transformers.BertModel.from_pretrained(bert_folder).half().save_pretrained(bert_folder)
    loaded, drawn = load_encoder(bert_folder), load_encoder(bert_folder, random_init=True)
    headed = loaded.family_model(loaded.fresh(1, CPU), SEQUENCE, Labels(("a", "b"), None))
    for module in (loaded.module, headed, drawn.fresh(1, CPU)):
        assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    change_json(bert_folder / "config.json", id2label={str(i): f"l{i}" for i in range(5)})
    encoder = load_encoder(bert_folder)
    assert encoder.family_model(encoder.fresh(1, CPU), SPAN, Labels((), None)).model.qa_outputs.out_features == 2


def test_a_configuration_without_its_model_type_is_named(bert_folder):
    path = bert_folder / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if key != "model_type"}
    for written in ({}, {"model_type": None}, {"model_type": 5}, {"model_type": ""}):
        path.write_text(json.dumps(values | written))
        for read in FINDERS:
            refused(r"config\.json: model_type (is missing|is (None|5|'')), expected the name", read, bert_folder)


MODEL = '{"model_type": "bert"}'
AROUND = {
    "0_Transformer": {"modules.json": "[]", "1_Pooling/config.json": '{"word_embedding_dimension": 16}'},
    "checkpoint-1000": {"checkpoint-200/config.json": MODEL},
    "models/a": {},
    "snapshots/1f": {"snapshots/9a/config.json": MODEL, "refs/main": "1f"},
}
"""Place of a model in a folder of sentence-transformers, a Trainer, a task or the hub's cache → other files there."""


@pytest.mark.parametrize("name", AROUND)
def test_a_folder_around_a_model_names_the_one_inside(tmp_path, name):
    outer, said = tmp_path / "models--org--bert", "give a folder inside it that holds a model, such as"
    for file, content in {f"{name}/config.json": MODEL, **AROUND[name]}.items():
        (outer / file).parent.mkdir(parents=True, exist_ok=True)
        (outer / file).write_text(content)
    for read in (*FINDERS, choose_checkpoint, lambda folder: refuse_folders(tmp_path / "save", folder)):
        refused(re.escape(f"{said} {outer / name}"), read, outer)
    if name == "snapshots/1f":
        refused(re.escape(f"{said} {outer / name}"), load_encoder, tmp_path)


ADAPTER, TENSORFLOW = "an adapter (LoRA, PEFT) without its model", "weights of TensorFlow"
FORMS = {
    **{"adapter_config.json": ADAPTER, "checkpoint-9/adapter_config.json": ADAPTER, "m.Q4.gguf": "weights in GGUF"},
    **{"tf_model.h5": TENSORFLOW, "bert_model.ckpt.index": TENSORFLOW, "flax_model.msgpack": "weights of Flax"},
    **{"onnx/model_quantized.onnx": "a model in ONNX"},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_folder_with_a_model_in_another_form_says_which(bert_folder, name):
    (bert_folder / name).parent.mkdir(exist_ok=True)
    (bert_folder / name).write_text("{}")
    for lost in ("model.safetensors", "config.json"):
        (bert_folder / lost).unlink()
        for read in (load_encoder, read_folder):
            refused(re.escape(f"it holds {FORMS[name]}"), read, bert_folder)
