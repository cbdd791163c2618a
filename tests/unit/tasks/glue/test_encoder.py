"""The same encoder out of a checkpoint, one of its steps and its export, and folders that hold none."""

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
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer, usual_rows
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.huggingface import PADDING_SENSITIVE, _is_decoder
from megatron_ddrp.encoders.rows import pad_batch
from megatron_ddrp.lab.analysis.session import find_snapshots
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.table_files import Example
from megatron_ddrp.tasks.glue import TASKS
from tests.refusals import refused
from tests.unit.conversion.conftest import seal_again, write_checkpoint
from tests.unit.tasks.conftest import POINTER

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
EXAMPLES = [Example(("red cat runs", "bird sings"), 0), Example(("dog", "blue green dog sleeps red"), 1)]
CPU = torch.device("cpu")
FINDERS = (load_encoder, read_folder, lambda folder: find_snapshots([folder], every=False))


def write_model(folder, kind, **settings):
    """Write a tiny model of transformers with random weights, of 14 pieces and in most cases of 16 positions."""
    settings = {"vocab_size": 14, "max_position_embeddings": 16} | settings
    getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**settings)).save_pretrained(folder)


def change_config(folder, **changes):
    """Change values of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def hidden(encoder, examples=EXAMPLES):
    """Hidden states of rows and which of them are no padding: `[rows, seq, hidden]`, `[rows, seq]`."""
    encoded = KINDS["classification"].encode(TASKS["RTE"], examples, encoder.tokenizer, encoder.max_length)
    batch = pad_batch(encoded, np.arange(len(examples))).map(torch.from_numpy)
    with torch.no_grad():
        return encoder.module.eval()(batch), batch.document_ids > 0


def test_checkpoint_step_and_export_give_equal_states_and_each_run_a_copy_of_its_own(checkpoint_folder, tmp_path):
    export_checkpoint(checkpoint_folder, tmp_path / "exported")
    first = load_encoder(checkpoint_folder)
    copy = first.fresh(1, CPU)
    for loaded, copied in zip(first.module.parameters(), copy.parameters(), strict=True):
        assert (loaded == copied).all() and loaded.data_ptr() != copied.data_ptr()
    states, valid = hidden(first)
    assert states.shape == (2, int(valid.sum(1).max()), first.hidden_size)
    assert not torch.allclose(states[0, 0], states[1, 0])
    for folder in (checkpoint_folder / "iter_0000003", tmp_path / "exported"):
        others, other_valid = hidden(load_encoder(folder))
        assert (valid == other_valid).all()
        torch.testing.assert_close(others[valid], states[valid], rtol=0, atol=1e-5)
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
    change_config(twin, _name_or_path=str(twin), transformers_version="4.0", torch_dtype="float32")
    assert fingerprint(twin) == found[0]
    settings = json.loads((twin / "config.json").read_text())
    assert settings.pop("attention_probs_dropout_prob") == 0.1, "transformers' own value, which may be left out"
    (twin / "config.json").write_text(json.dumps(settings))
    assert fingerprint(twin) == found[0]
    drawn = fingerprint(random_init=True)
    assert fingerprint(random_init=True) == drawn
    change_config(bert_folder, hidden_act="relu")
    assert fingerprint(random_init=True) != drawn


def test_the_origin_says_what_was_loaded_and_folders_that_hold_no_whole_model_are_refused(
    bert_folder, checkpoint_folder, tmp_path
):
    assert "missing: none; not used: " in load_encoder(bert_folder).origin
    assert "cls.predictions" in load_encoder(bert_folder).origin
    assert "not used: 5 (head.dense.weight" in load_encoder(checkpoint_folder).origin
    assert "random in every run" in load_encoder(checkpoint_folder, random_init=True).origin
    (tmp_path / "empty").mkdir()
    refused("neither a training checkpoint nor a Hugging Face folder", load_encoder, tmp_path / "empty")
    vocabulary = (bert_folder / "vocab.txt").read_text()
    (bert_folder / "vocab.txt").write_text(vocabulary + "more\n")
    refused("15 pieces but its model embeds 14", load_encoder, bert_folder)
    (bert_folder / "vocab.txt").write_text(vocabulary)
    save_file({"other.weight": torch.zeros(2)}, bert_folder / "model.safetensors", {"format": "pt"})
    refused("weights do not belong to its config", load_encoder, bert_folder)
    settings = (checkpoint_folder / "config.json").read_text()
    (checkpoint_folder / "config.json").write_text("{")
    refused(r"config\.json: not JSON", load_encoder, checkpoint_folder)
    (checkpoint_folder / "config.json").write_text(settings)
    for file in ("latest", "iter_0000003/state.json", "iter_0000003/model.safetensors"):
        (checkpoint_folder / file).unlink()
    (checkpoint_folder / "iter_0000003").rmdir()
    refused("holds no checkpoint", load_encoder, checkpoint_folder)


def test_a_vocabulary_smaller_than_its_model_is_said_and_refused_in_a_run(bert_folder, checkpoint_folder):
    write_model(bert_folder, "Bert", vocab_size=900, **SIZES)
    assert load_encoder(bert_folder).origin.startswith(f"warning: {bert_folder}: its tokenizer has 14 pieces but its")
    tokenizer = load_encoder(checkpoint_folder).tokenizer
    (checkpoint_folder / "fewer.txt").write_text("\n".join(tokenizer.pieces[:-1]))
    build_tokenizer("BertWordPieceLowerCase", checkpoint_folder / "fewer.txt").save(checkpoint_folder / "tokenizer")
    said = "its tokenizer has 13 pieces but its model embeds 14; put the vocabulary of"
    refused(said, load_encoder, checkpoint_folder)


OTHERS = {
    "Electra": SIZES,
    "DistilBert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
    "Roberta": SIZES,
    "DebertaV2": SIZES | {"relative_attention": True, "pos_att_type": ["c2p"]},
}
RELATIVES = {
    **{"Data2VecText": {}, "IBert": {}, "RobertaPreLayerNorm": {}, "Esm": {"mask_token_id": 4}},
    **{"Xmod": {"languages": ["en_XX"], "default_language": "en_XX"}},
    **{"Luke": {"entity_vocab_size": 5, "entity_emb_size": 8}},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_encoders_of_transformers(bert_folder, kind):
    write_model(bert_folder, kind, pad_token_id=0, **OTHERS[kind])
    encoder = load_encoder(bert_folder)
    states, valid = hidden(encoder)
    assert states.shape == (*valid.shape, 16) and torch.isfinite(states).all()
    assert encoder.tokenizer.rows == usual_rows(encoder.tokenizer.cls_id, encoder.tokenizer.sep_id)
    assert encoder.max_length == (15 if kind == "Roberta" else 16)


@pytest.mark.parametrize("kind", RELATIVES)
def test_relatives_of_roberta_count_positions_from_the_padding(bert_folder, kind):
    write_model(bert_folder, kind, max_position_embeddings=10, pad_token_id=1, **SIZES, **RELATIVES[kind])
    encoder = load_encoder(bert_folder)
    assert encoder.max_length == 8
    assert hidden(encoder, [Example(("red cat runs bird sings", "dog blue green"), 0)])[0].shape == (1, 8, 16)


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert"])
def test_a_roberta_without_a_padding_and_an_xlnet_are_refused(bert_folder, kind):
    write_model(bert_folder, kind, pad_token_id=0, **SIZES)
    change_config(bert_folder, pad_token_id=None)
    refused("pad_token_id is null in its config.json, and positions are counted from it", load_encoder, bert_folder)
    transformers.AutoConfig.for_model("xlnet").save_pretrained(bert_folder)
    refused("^--load .*: xlnet has <cls> at the end of a row", load_encoder, bert_folder)


CAUSAL = {
    **{"gpt2": {}, "llama": {}, "gpt_neox": {}, "opt": {}, "gemma3_text": {}, "modernbert-decoder": {}, "t5": {}},
    **{"bert": {"is_decoder": True}, "bert-generation": {"is_decoder": True}, "xlm": {"causal": True}},
}
BIDIRECTIONAL = {
    **{"bert": {}, "roberta": {}, "electra": {}, "modernbert": {}, "eurobert": {}, "convbert": {}, "fnet": {}},
    **{"rembert": {}, "xlm": {}, "bert-generation": {}, "gemma3_text": {"use_bidirectional_attention": True}},
}


@pytest.mark.parametrize(("kind", "settings"), CAUSAL.items())
def test_a_model_whose_pieces_see_only_earlier_ones_is_refused(bert_folder, kind, settings):
    """[CLS] comes first, so its state would be the same for every text. The weights are not even read."""
    transformers.AutoConfig.for_model(kind, **settings).save_pretrained(bert_folder)
    refused(f"{kind} is no encoder; use a BERT", load_encoder, bert_folder)


def test_encoders_with_a_causal_head_in_transformers_are_no_decoders():
    kinds = BIDIRECTIONAL.items()
    assert not [kind for kind, settings in kinds if _is_decoder(transformers.AutoConfig.for_model(kind, **settings))]


FNET = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 16}
YOSO = FNET | {"num_attention_heads": 2}
FUNNEL = {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "initializer_std": 0.3}
SIZES_OF_FAMILIES = {"fnet": FNET, "yoso": YOSO, "convbert": YOSO | {"embedding_size": 16}, "funnel": FUNNEL}
SIZES_OF_FAMILIES["nystromformer"] = YOSO
SIZES_OF_FAMILIES["mobilebert"] = YOSO | {"embedding_size": 8, "intra_bottleneck_size": 16, "true_hidden_size": 16}


@pytest.mark.parametrize("kind", [*PADDING_SENSITIVE, "bert"])
def test_families_whose_states_depend_on_padding_are_warned_of(bert_folder, kind):
    torch.manual_seed(0)
    if kind != "bert":
        config = transformers.AutoConfig.for_model(kind, vocab_size=14, pad_token_id=0, **SIZES_OF_FAMILIES[kind])
        config.initializer_range, config.architectures = 0.3, ["FunnelModel"]  # Funnel has two encoders
        model = transformers.AutoModel.from_config(config)
        with torch.no_grad():
            model.get_input_embeddings().weight[0].normal_()  # trained rows of padding are not 0
        model.save_pretrained(bert_folder)
    encoder = load_encoder(bert_folder)
    examples = [Example(("red cat runs sings dog",), 0), Example(("red cat runs sings dog blue green bird",), 0)]
    (alone, valid), (padded, _) = hidden(encoder, examples[:1]), hidden(encoder, examples)
    alone, padded = alone[0], padded[0, : valid.shape[1]]
    depends = bool((alone - padded).abs().max() > 1e-3 * alone.abs().max())
    told = f"warning: {bert_folder}: padding changes the states of a {kind} model, so results depend on the rows that"
    assert depends == encoder.warning.startswith(told) == encoder.origin.startswith(told) == (kind != "bert")


def test_a_pair_of_a_run_like_roberta_has_two_separators(tmp_path):
    """As its export has."""
    for number, (segments, first, expected) in enumerate(
        ((1, "<s>", 2), (2, "<s>", 1), (1, "[CLS]", 1), (0, "[CLS]", 1))
    ):
        last = {"<s>": "</s>", "[CLS]": "[SEP]"}[first]
        (tmp_path / "vocab.txt").write_text(f"<pad>\n<unk>\n{first}\n{last}\n<mask>\nred\ncat\n")
        tokenizer = build_tokenizer("BertWordPieceLowerCase", tmp_path / "vocab.txt")
        if number == 0:
            run = write_checkpoint(tmp_path / "run", tokenizer, num_segments=1, position_encoding="absolute")
            assert load_encoder(run).tokenizer.rows == usual_rows(2, 3, True)
        tokenizer.settle_rows(segments)
        assert tokenizer.rows == usual_rows(2, 3, expected == 2)
        out = tmp_path / f"out{number}"
        out.mkdir()
        write_tokenizer(tokenizer, out, 16, segments)
        ids = transformers.AutoTokenizer.from_pretrained(out)("red", "cat")["input_ids"]
        assert ids == [2, 5, *[3] * expected, 6, 3]


def test_a_half_precision_folder_is_tuned_and_drawn_anew_in_fp32_and_a_head_for_answers_has_two_outputs(bert_folder):
    transformers.BertModel.from_pretrained(bert_folder).half().save_pretrained(bert_folder)
    loaded, drawn = load_encoder(bert_folder), load_encoder(bert_folder, random_init=True)
    headed = loaded.family_model(loaded.fresh(1, CPU), SEQUENCE, Labels(("a", "b"), None))
    for module in (loaded.module, headed, drawn.fresh(1, CPU)):
        assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    change_config(bert_folder, id2label={str(i): f"l{i}" for i in range(5)})
    encoder = load_encoder(bert_folder)
    assert encoder.family_model(encoder.fresh(1, CPU), SPAN, Labels((), None)).model.qa_outputs.out_features == 2


def test_a_configuration_without_its_model_type_is_named(bert_folder):
    path = bert_folder / "config.json"
    values = json.loads(path.read_text())
    del values["model_type"]
    for written in ({}, {"model_type": None}, {"model_type": 5}, {"model_type": ""}):
        path.write_text(json.dumps(values | written))
        for read in FINDERS:
            refused(r"config\.json: model_type (is missing|is (None|5|'')), expected the name", read, bert_folder)


def wrapped(folder, bert, name):
    """Write a folder of others around the folder of a model; return the path of the model inside."""
    place = folder / {"pooling": "0_Transformer", "trainer": "checkpoint-1000", "task": "models/a"}.get(name, "")
    if name == "cache":
        place = folder / "snapshots" / "1f"
        shutil.copytree(bert, folder / "snapshots" / "9a")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("1f")
    shutil.copytree(bert, place, dirs_exist_ok=True)
    if name == "pooling":
        (folder / "modules.json").write_text("[]")
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 16}')
    if name == "trainer":
        shutil.copytree(bert, folder / "checkpoint-200")
    return place


@pytest.mark.parametrize("name", ["pooling", "trainer", "task", "cache"])
def test_a_folder_around_a_model_names_the_one_inside(bert_folder, tmp_path, name):
    outer = tmp_path / name
    place = wrapped(outer, bert_folder, name)
    for read in (*FINDERS, choose_checkpoint, lambda folder: refuse_folders(tmp_path / "save", folder)):
        refused(re.escape(f"give a folder inside it that holds a model, such as {place}"), read, outer)
    if name == "cache":
        outer = outer.rename(outer.with_name("models--org--bert"))
        place = outer / "snapshots" / "1f"
        refused(re.escape(f"give a folder inside it that holds a model, such as {place}"), load_encoder, outer.parent)


ADAPTER, TENSORFLOW = "an adapter (LoRA, PEFT) without its model", "weights of TensorFlow"
FORMS = {
    **{"adapter_config.json": ADAPTER, "checkpoint-9/adapter_config.json": ADAPTER, "m.Q4.gguf": "weights in GGUF"},
    **{"tf_model.h5": TENSORFLOW, "bert_model.ckpt.index": TENSORFLOW, "flax_model.msgpack": "weights of Flax"},
    **{"onnx/model_quantized.onnx": "a model in ONNX"},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_with_a_model_in_another_form_says_which(bert_folder, name, has_config):
    (bert_folder / "model.safetensors").unlink()
    if not has_config:
        (bert_folder / "config.json").unlink()
    (bert_folder / name).parent.mkdir(exist_ok=True)
    (bert_folder / name).write_text("{}")
    for read in (load_encoder, read_folder):
        refused(re.escape(f"it holds {FORMS[name]}"), read, bert_folder)


@pytest.mark.parametrize(
    "name", ["config.json", "vocab.txt", "tokenizer_config.json", "model.safetensors", "pytorch_model.bin"]
)
def test_a_pointer_of_git_lfs_in_a_folder_is_named(bert_folder, name):
    if name == "pytorch_model.bin":
        (bert_folder / "model.safetensors").unlink()
    (bert_folder / name).write_text(POINTER)
    for read in (load_encoder, read_folder):
        refused(f"{name}: a pointer of Git LFS in place of the file: run git lfs install", read, bert_folder)
