"""An imported folder computes what transformers computes, and says what it took and what it did not."""

import io
import re

import pytest
import torch
from parity import compare
from safetensors.torch import load_file

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.conversion.families.contract import SUMS
from megatron_ddrp.conversion.from_huggingface import check_rows, import_folder, load_hugging_face
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders.text_encoder import load_encoder
from tests.refusals import refused
from tests.unit.conversion.conftest import READERS, SAFE, change_json, put, set_keys, stored, write_folder
from tests.unit.conversion.tokenizers_of_families import small_byte_level


def write_pickle(folder, change=lambda weights: weights):
    """Replace model.safetensors by pytorch_model.bin, its tensors changed."""
    torch.save(change(load_file(folder / SAFE)), folder / "pytorch_model.bin")
    (folder / SAFE).unlink()


def assert_equal(theirs, folder):
    """Compare all hidden states and the logits, if there are any."""
    assert max(compare(theirs.double(), load_model(folder)[0].double(), 0).all) < 1e-6


def test_bert_and_the_tokenizers(tmp_path, hf, vocab):
    model = write_folder(hf, vocab, "BertForMaskedLM")
    imported = import_folder(hf, tmp_path / "run")
    assert_equal(model, tmp_path / "run")
    assert imported.weights.left_out == imported.weights.initialised == []
    assert (tmp_path / "run" / "tokenizer" / "vocab.txt").read_bytes() == vocab.read_bytes()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["config.json", "iter_0000000", "latest", "tokenizer"]
    (hf / "vocab.txt").unlink()
    small_byte_level(hf)
    imported = import_folder(hf, tmp_path / "bytes")
    assert load_model(tmp_path / "bytes")[1].fingerprint == imported.tokenizer.fingerprint
    flags = f"--tokenizer-type HuggingFace --tokenizer-model {tmp_path / 'bytes' / 'tokenizer'}"
    assert imported.summary().count(flags) == 1
    (hf / "tokenizer.json").unlink()
    without = import_folder(hf, tmp_path / "none")
    assert without.config.vocab_size == 20 and "tokenizer:   none" in without.summary()
    assert [words for words in ("next:", "then:", "its padding") if words in without.summary()] == []
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


def test_rows_without_a_piece_are_cut(tmp_path, hf, vocab):
    model = write_folder(hf, vocab, "BertForMaskedLM", vocab_size=24)
    imported = import_folder(hf, tmp_path / "run")
    assert "4 rows beyond the tokenizer's vocabulary" in imported.summary()
    model.resize_token_embeddings(20)
    assert_equal(model, tmp_path / "run")


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


BIAS, DECODER = "cls.predictions.bias", "cls.predictions.decoder.weight"
REFUSED = {
    "code": (set_keys(model_type="megatron_ddrp"), "config.json: layernorm_position is missing"),
    "NaN": (put(BIAS, torch.full((20,), torch.nan)), f"{BIAS} contains a value that is not a finite number"),
    "another output matrix": (put(DECODER, torch.zeros(20, 32)), "output matrix differs from its word embedding"),
    "no segments": (
        stored(lambda tensors: {name.replace("token_type_", "token_typo_"): t for name, t in tensors.items()}),
        "type_vocab_size 2, and the weights embed 0 segments",
    ),
    "no weights": (lambda hf: (hf / SAFE).unlink(), "neither model.safetensors nor pytorch_model.bin"),
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


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The file that evil code leaves; `y` answers every question."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    return tmp_path / "evil-code-ran"


@pytest.fixture
def export(export_of, offline, marker):
    """An exported BERT with evil.py in its folder."""
    folder = export_of("absolute")
    (folder / SUMS).unlink()  # no sum shall refuse what is to be refused as code
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    return folder


@pytest.mark.parametrize("reader", READERS)
def test_folders_with_code_are_refused(export, marker, reader):
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"}
    for file, changes in (
        ("config.json", {"model_type": "evil", "auto_map": auto_map}),
        ("config.json", {"auto_map": auto_map}),
        ("config.json", {"attn_implementation": "somebody/kernel"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}),
    ):
        before = (export / file).read_bytes()
        change_json(export / file, **changes)
        error = refused("code of a folder is never run here", READERS[reader], export)
        assert str(export / file) in str(error) and not marker.exists()
        (export / file).write_bytes(before)
    change_json(export / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.EvilTokenizer", None]})
    assert build_tokenizer("HuggingFace", tokenizer_model=export).vocab_size == 20, "which reads it as data"
    assert not marker.exists()


def test_a_small_tokenizer_beside_a_large_vocabulary_is_warned_of(tmp_path, export, capsys, recwarn):
    """Spare rows are at most 255, and no more than the pieces."""
    import transformers

    for pieces, rows in ((511, 766), (300, 555), (255, 510), (254, 508), (20, 40)):
        assert check_rows(tmp_path, pieces, rows) == ""
        assert f"has {pieces} pieces but its model embeds {rows + 1}" in check_rows(tmp_path, pieces, rows + 1)
    config = transformers.BertConfig.from_pretrained(export)
    config.vocab_size = 2 * 20
    for warned in (False, True):
        transformers.BertForMaskedLM(config).save_pretrained(export)
        imported = import_folder(export, tmp_path / f"imported{warned}")
        load_hugging_face(export)
        encoder = load_encoder(export)
        told = [imported.warning, capsys.readouterr().err, encoder._encoder.origin, *(str(w.message) for w in recwarn)]
        line = f"{export}: its tokenizer has 20 pieces but its model embeds 41: is it the tokenizer of"
        assert [line in text for text in told[:3]] == [warned] * 3 and any(line in text for text in told[3:]) == warned
        assert len(encoder.fill_mask("red [MASK]", top_k=30)[0]) == 20
        config.vocab_size += 1


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("broken", [False, True], ids=["with code", "damaged"])
def test_a_pickle_is_refused_without_advice_to_load_it_unsafely(export, marker, reader, broken):
    write_pickle(export, lambda weights: weights if broken else weights | {"more": Malicious(marker)})
    path = export / "pytorch_model.bin"
    if broken:
        path.write_bytes(path.read_bytes()[:-5000])
    error = refused("not a plain file of tensors.*save it as model.safetensors", READERS[reader], export)
    assert "weights_only" not in str(error) and "trust" not in str(error)
    assert not marker.exists()


@pytest.mark.parametrize("reader", READERS)
def test_absurd_sizes_are_refused_before_anything_is_allocated(export, little_room, reader):
    before = (export / "config.json").read_text()
    for changes in (
        *({"hidden_size": size} for size in (10**12, 2**20, "abc", 0)),
        *({"num_hidden_layers": 10**9}, {"num_hidden_layers": 200}, {"num_attention_heads": 7}),
        *({"intermediate_size": 2**21}, {"max_position_embeddings": 2**22}),
        *({"vocab_size": 10**12}, {"vocab_size": 2**21, "hidden_size": 2**21}),
    ):
        (export / "config.json").write_text(before)
        change_json(export / "config.json", **changes)
        refused(re.escape(str(export)), READERS[reader], export)
