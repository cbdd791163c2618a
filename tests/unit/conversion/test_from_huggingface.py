"""An imported folder computes what transformers computes, and says what it took and what it did not."""

import io
import json
import math
import os
import random
import re
import shutil
from functools import partial

import pytest
import torch
from parity import compare
from safetensors.torch import load_file

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.conversion.families.contract import SUMS
from megatron_ddrp.conversion.from_huggingface import check_rows, import_folder, load_hugging_face
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders.text_encoder import load_encoder
from tests.endurance.damage import kinds
from tests.refusals import refused
from tests.unit.conversion import conftest
from tests.unit.conversion.conftest import READERS, SAFE, change_json, set_keys, stored, write_folder
from tests.unit.conversion.tokenizers_of_families import small_byte_level


def write_pickle(folder, change=lambda weights: weights):
    """Replace model.safetensors by pytorch_model.bin, its tensors changed."""
    torch.save(change(load_file(folder / SAFE)), folder / "pytorch_model.bin")
    (folder / SAFE).unlink()


def assert_equal(theirs, folder):
    """Compare all hidden states and the logits, if there are any; return the configuration of the run."""
    model, _, config = load_model(folder)
    assert max(compare(theirs.double(), model.double(), 0).all) < 1e-6
    return config


def test_bert_and_the_tokenizers(tmp_path, hf, vocab):
    model = write_folder(hf, vocab, "BertForMaskedLM", layer_norm_eps=1e-6)
    imported = import_folder(hf, tmp_path / "run")
    config = assert_equal(model, tmp_path / "run")
    assert (config.model.position_encoding, config.model.layernorm_epsilon) == ("absolute", 1e-6)
    assert imported.weights.left_out == imported.weights.initialised == []
    assert imported.tokenizer.tokenizer_type == "BertWordPieceLowerCase"
    assert (tmp_path / "run" / "tokenizer" / "vocab.txt").read_bytes() == vocab.read_bytes()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["config.json", "iter_0000000", "latest", "tokenizer"]
    (hf / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert import_folder(hf, tmp_path / "cased").tokenizer.tokenizer_type == "BertWordPieceCase"
    (hf / "vocab.txt").unlink()
    small_byte_level(hf)
    imported = import_folder(hf, tmp_path / "bytes")
    again = load_model(tmp_path / "bytes")[1]
    assert again.fingerprint == imported.tokenizer.fingerprint and again.encode("ab abc") == [10, 9, 10, 7]
    assert again.word_starts[[9, 11]].all() and not again.word_starts[10]
    flags = f"--tokenizer-type HuggingFace --tokenizer-model {tmp_path / 'bytes' / 'tokenizer'}"
    assert imported.summary().count(flags) == 1
    (hf / "tokenizer.json").unlink()
    without = import_folder(hf, tmp_path / "none")
    assert without.config.vocab_size == 20 and "tokenizer:   none" in without.summary()
    assert "next:" not in without.summary() and "then:" not in without.summary()
    assert not (tmp_path / "none" / "tokenizer").exists()


def test_pretraining_folder_in_the_oldest_spelling(tmp_path, hf, vocab):
    """LayerNorms as gamma and beta, tied weights twice, a pooler, a next-sentence head, a buffer; as a pickle."""
    model, beside = write_folder(hf, vocab, "BertForMaskedLM"), {"bert.embeddings.position_ids": torch.arange(24)[None]}
    for part, shape in (("bert.pooler.dense", (32, 32)), ("cls.seq_relationship", (2, 32))):
        beside |= {f"{part}.weight": torch.ones(shape), f"{part}.bias": torch.ones(shape[:1])}

    def old_spelling(weights):
        new = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in weights.items()}
        new = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in new.items()}
        new["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
        new["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"]
        return new | beside

    write_pickle(hf, old_spelling)
    summary = import_folder(hf, tmp_path / "run").summary()
    assert_equal(model, tmp_path / "run")
    (left_out,) = (line for line in summary.splitlines() if line.startswith("left out"))
    groups = ["bert.embeddings (1)", "bert.pooler.dense (2)", "cls.seq_relationship (2)"]
    assert sorted(left_out.removeprefix("left out:").strip().split(", ")) == groups


def test_a_bare_encoder_gets_a_new_head(tmp_path, hf, vocab):
    model = write_folder(hf, vocab, "BertModel")
    imported = import_folder(hf, tmp_path / "run")
    assert_equal(model, tmp_path / "run")
    assert imported.weights.initialised == ["masked-LM head (drawn anew; the folder has none)"]
    head = load_model(tmp_path / "run")[0].head
    assert 0.01 < head.dense.weight.std() < 0.03 and torch.all(head.norm.weight == 1)


def test_export_then_import_gives_the_same_weights(tmp_path, hf, tokenizer):
    settings = {"position_encoding": "absolute", "relative_distance": 64}
    load = conftest.write_checkpoint(tmp_path / "run", tokenizer, **settings)
    export_checkpoint(load, hf)
    import_folder(hf, tmp_path / "back")
    (model, _, config), (back, again, restored) = load_model(load), load_model(tmp_path / "back")
    assert restored.model == config.model and again.fingerprint == tokenizer.fingerprint
    for name, weight in model.named_parameters():
        rows = slice(tokenizer.vocab_size) if name in ("embeddings.token.weight", "head.decoder.bias") else slice(None)
        assert torch.equal(back.get_parameter(name)[rows], weight[rows]), name


def test_rows_without_a_piece_are_cut(tmp_path, hf, vocab):
    model = write_folder(hf, vocab, "BertForMaskedLM", vocab_size=24)
    imported = import_folder(hf, tmp_path / "run")
    assert "4 rows beyond the tokenizer's vocabulary" in imported.summary()
    model.resize_token_embeddings(20)
    assert_equal(model, tmp_path / "run")
    write_folder(tmp_path / "short", vocab, "BertForMaskedLM", vocab_size=19)
    refused("20 pieces.*embeds 19", import_folder, tmp_path / "short", tmp_path / "refused")


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def with_value(value):
    """Put a value into one of the weights."""

    def change(tensors):
        tensors["bert.encoder.layer.1.output.dense.weight"][3, 5] = value
        return tensors

    return stored(change)


NOT_FINITE = "bert.encoder.layer.1.output.dense.weight contains a value that is not a finite number"
REFUSED = {
    "code": (set_keys(model_type="megatron_ddrp"), "config.json: layernorm_position is missing"),
    "act": (set_keys(hidden_act="gelu_new"), "hidden_act is 'gelu_new'.*'gelu'"),
    "text": (set_keys(hidden_size="32"), "hidden_size is '32', expected a whole number"),
    "NaN in JSON": (set_keys(layer_norm_eps=math.nan), "NaN is no number of JSON"),
    "longer": (set_keys(max_position_embeddings=48), r"embeddings.absolute.weight is \[24, 32\].*\[48, 32\]"),
    "deeper": (set_keys(num_hidden_layers=3), "the weight for layers.2.* is missing, and .*the folder is incomplete"),
    "NaN": (with_value(math.nan), NOT_FINITE),
    "infinity": (with_value(math.inf), NOT_FINITE),
    "another output matrix": (
        stored(lambda tensors: tensors | {"cls.predictions.decoder.weight": torch.zeros(20, 32)}),
        "output matrix differs from its word embedding",
    ),
    "no segments": (
        stored(lambda tensors: {name.replace("token_type_", "token_typo_"): t for name, t in tensors.items()}),
        "type_vocab_size 2, and the weights embed 0 segments",
    ),
    "no weights": (lambda hf: (hf / SAFE).unlink(), "neither model.safetensors nor pytorch_model.bin"),
    "no folder": (shutil.rmtree, "config.json: No such file"),
}
"""Content of a folder of a BERT → a function that makes it, and the words of the line."""


@pytest.mark.parametrize("kind", REFUSED)
def test_other_folders_are_refused(tmp_path, hf, vocab, kind):
    write_folder(hf, vocab, "BertForMaskedLM")
    change, words = REFUSED[kind]
    change(hf)
    refused(words, import_folder, hf, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_command_imports_and_replaces_untrained_imports_alone(tmp_path, hf, vocab, convert):
    write_folder(hf, vocab, "BertForMaskedLM")
    run = tmp_path / "run"
    first = convert("--from-hf", hf, "--output", run)
    assert first.returncode == 0, first.stderr
    preprocessing = "megatron-ddrp preprocess --input FILE --output-prefix corpus --tokenizer-type Bert"
    plan = f"megatron-ddrp plan --load {hf} --data-path corpus_text_document"
    told = (f"next:        {preprocessing}", f"then:        {plan}", "--position-encoding absolute")
    assert [line for line in (*told, "initialised: nothing") if line not in first.stdout] == []
    again = convert("--from-hf", hf, "--output", run)
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1 and "--overwrite" in again.stderr
    import_folder(hf, run, overwrite=True)
    path = run / "iter_0000000"
    layout = {"ranks": 1, "tensor": 1, "pipeline": 1, "zero_stage": 1, "precision": "fp32"}
    of_training = {"weights_only": False, "optimizer_step": 0, "loss_scaler": None, "layout": layout}
    checkpoint.write_state(path, checkpoint.read_state(path) | of_training)
    assert checkpoint.newest(run) == path
    refused("not an untrained import", import_folder, hf, run, overwrite=True)
    path.rename(run / "iter_0000002")  # a trained one behind the import, to which `latest` has gone back
    import_folder(hf, tmp_path / "import")
    (tmp_path / "import" / "iter_0000000").rename(path)
    assert checkpoint.newest(run) == path
    refused("not an untrained import", import_folder, hf, run, overwrite=True)


DAMAGED = 40
"""Folders of each kind; some hundreds find nothing more."""
FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt",
    "model.safetensors", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json",
)  # fmt: skip


def change_value(path, chance):
    """Put something strange at a random place of a JSON file."""
    top = json.loads(path.read_text())
    inside, places = top, []
    while isinstance(inside, (dict, list)) and inside:
        key = chance.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        places.append((inside, key))
        inside = inside[key]
    where, key = chance.choice(places)
    where[key] = chance.choice(conftest.STRANGE)
    path.write_text(json.dumps(top))


def replace(path, chance):
    deep = "[" * 100_000
    path.write_text(chance.choice(("", "[]", "{}", "1", "null", '"x"', deep, '{"a":' * 5000, "\0" * 50)))


def damage(folder, seed):
    """Damage one file of a folder; the same seed does the same."""
    chance = random.Random(seed)
    path = folder / chance.choice([name for name in FILES if (folder / name).exists()])
    harms = [*kinds.BYTES.values(), replace, *[change_value] * 7 * (path.suffix == ".json")]
    harm = chance.choice(harms)
    return f"{harm.__name__} of {path.name}: {harm(path, chance)}"


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="measures memory in /proc")
@pytest.mark.parametrize("encoding", ["absolute", "ddrp"])
def test_a_damaged_folder_is_taken_or_refused_in_one_line(tmp_path, export_of, offline, little_room, encoding):
    whole, folder = export_of(encoding), tmp_path / "damaged"
    (whole / SUMS).unlink()  # else nothing but sums would be tested
    refusals = 0
    for seed in range(DAMAGED):
        shutil.copytree(whole, folder)
        what = damage(folder, seed)
        for name, read in READERS.items():
            try:
                refusals += conftest.refused_in_one_line(partial(read, folder))
            except BaseException as error:
                raise AssertionError(f"{name}, seed {seed}, {what}") from error
        shutil.rmtree(folder)
    assert refusals > DAMAGED


EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import BertConfig, BertModel, BertTokenizer
class EvilConfig(BertConfig):
    model_type = "evil"
class EvilModel(BertModel):
    config_class = EvilConfig
class EvilTokenizer(BertTokenizer):
    pass
"""
AUTO_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"}


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The file that evil code leaves; `y` answers every question."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    return tmp_path / "evil-code-ran"


@pytest.fixture
def export(export_of, offline, marker):
    """Encoding → an exported folder with evil.py in it."""

    def make(encoding):
        folder = export_of(encoding)
        (folder / SUMS).unlink()  # no sum shall refuse what is to be refused as code
        (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
        return folder

    return make


@pytest.mark.parametrize("reader", READERS)
def test_folders_with_code_are_refused(export, marker, reader):
    folder = export("absolute")
    for file, changes in (
        ("config.json", {"model_type": "evil", "auto_map": AUTO_MAP}),
        ("config.json", {"auto_map": AUTO_MAP}),
        ("config.json", {"attn_implementation": "somebody/kernel"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}),
    ):
        before = (folder / file).read_bytes()
        change_json(folder / file, **changes)
        error = refused("code of a folder is never run here", READERS[reader], folder)
        assert str(folder / file) in str(error) and not marker.exists()
        (folder / file).write_bytes(before)
    change_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.EvilTokenizer", None]})
    assert build_tokenizer("HuggingFace", tokenizer_model=folder).vocab_size == 20, "which reads it as data"
    assert not marker.exists()


def test_a_small_tokenizer_beside_a_large_vocabulary_is_warned_of(tmp_path, export, capsys, recwarn):
    """Spare rows are at most 255, and no more than the pieces."""
    import transformers

    for pieces, rows in ((511, 766), (300, 555), (255, 510), (254, 508), (20, 40)):
        assert check_rows(tmp_path, pieces, rows) == ""
        assert f"has {pieces} pieces but its model embeds {rows + 1}" in check_rows(tmp_path, pieces, rows + 1)
    folder = export("absolute")
    config = transformers.BertConfig.from_pretrained(folder)
    config.vocab_size = 2 * 20
    for warned in (False, True):
        transformers.BertForMaskedLM(config).save_pretrained(folder)
        imported = import_folder(folder, tmp_path / f"imported{warned}")
        load_hugging_face(folder)
        encoder = load_encoder(folder)
        told = [imported.warning, capsys.readouterr().err, encoder._encoder.origin, *(str(w.message) for w in recwarn)]
        line = f"{folder}: its tokenizer has 20 pieces but its model embeds 41: is it the tokenizer of"
        assert [line in text for text in told[:3]] == [warned] * 3 and any(line in text for text in told[3:]) == warned
        assert len(encoder.fill_mask("red [MASK]", top_k=30)[0]) == 20
        config.vocab_size += 1


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("broken", [False, True], ids=["with code", "damaged"])
def test_a_pickle_is_refused_without_advice_to_load_it_unsafely(export, marker, reader, broken):
    folder = export("absolute")
    write_pickle(folder, lambda weights: weights if broken else weights | {"more": Malicious(marker)})
    path = folder / "pytorch_model.bin"
    if broken:
        path.write_bytes(path.read_bytes()[:-5000])
    error = refused("not a plain file of tensors.*save it as model.safetensors", READERS[reader], folder)
    assert "weights_only" not in str(error) and "trust" not in str(error)
    assert not marker.exists()


ABSURD = [
    {"hidden_size": 10**12}, {"hidden_size": 2**20}, {"hidden_size": -32}, {"hidden_size": "abc"}, {"hidden_size": 0},
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": 200}, {"num_attention_heads": 0}, {"num_attention_heads": 7},
    {"intermediate_size": 2**21}, {"vocab_size": 10**12}, {"vocab_size": 2**21, "hidden_size": 2**21},
    {"max_position_embeddings": 2**22}, {"max_position_embeddings": 10**10},
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_absurd_sizes_are_refused_before_anything_is_allocated(export, little_room, reader):
    folder = export("absolute")
    before = (folder / "config.json").read_text()
    for changes in ABSURD:
        (folder / "config.json").write_text(before)
        change_json(folder / "config.json", **changes)
        refused(re.escape(str(folder)), READERS[reader], folder)
