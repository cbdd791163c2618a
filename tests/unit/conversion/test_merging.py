"""The mean of models is that of float64, rounded once; folders that have no mean are refused in one line."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ddrp import checkpoint
from megatron_ddrp.commands import merge as command
from megatron_ddrp.conversion.families.contract import CARD, check_sums
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.merging import Mean
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from tests.refusals import refused, wrong_arguments
from tests.unit.conversion import conftest
from tests.unit.conversion.conftest import SAFE, put, set_keys, stored, write_checkpoint, write_folder

pytestmark = pytest.mark.usefixtures("few_probes")
WEIGHTS = (1.0, 0.3, 2.5)


def shaken(tensors, seed=0):
    """The tensors with other numbers, of many sizes."""
    torch.manual_seed(seed)
    return {n: t * torch.randn_like(t).exp() if t.is_floating_point() else t for n, t in tensors.items()}


def twin(files, weights=WEIGHTS):
    """The mean in loops over Python's floats, which are float64; numpy rounds each once to fp32."""
    read, means = [load_file(file) for file in files], {}
    for name in read[0]:
        columns = zip(*(tensors[name].flatten().tolist() for tensors in read), strict=True)
        numbers = [sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights) for column in columns]
        means[name] = torch.from_numpy(np.array(numbers).astype(np.float32)).reshape(read[0][name].shape)
    return means


def test_the_mean_of_checkpoints(tmp_path, tokenizer, monkeypatch, capsys):
    def merge(*words):
        command.main([*map(str, words)])

    three = [tmp_path / name for name in "abc"]
    for seed, folder in enumerate(three):
        path = write_checkpoint(folder, tokenizer, position_encoding="absolute") / checkpoint.tag(3)
        save_file(shaken(load_file(path / SAFE), seed), path / SAFE)
        conftest.seal_again(path / SAFE)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    merge("--load", *three[:2], three[2] / "iter_0000003", "--weights", *WEIGHTS, "--output", tmp_path / "mean")
    path, expected = tmp_path / "mean" / "iter_0000000", twin([folder / "iter_0000003" / SAFE for folder in three])
    written = load_file(path / SAFE)
    assert written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)
    assert checkpoint.read_state(path)[checkpoint.MERGED][1] == ["b/iter_0000003", 0.3 / sum(WEIGHTS)]
    assert checkpoint.fault(path, ("weights",)) is None and checkpoint.newest(tmp_path / "mean") == path
    shown = capsys.readouterr().out
    assert " 26.32% of a/iter_0000003\n" in shown and "convert --load" in shown
    export_checkpoint(tmp_path / "mean", tmp_path / "hf")
    assert "mean of 0.2632 x `a/iter_0000003`, 0.07895 x `b/" in (tmp_path / "hf" / CARD).read_text()
    again = ("--load", three[0], three[0], "--output", tmp_path / "mean")
    wrong_arguments("mean exists: choose another name", merge, *again)
    merge(*again, "--overwrite")
    one, mean = (load_file(folder / SAFE) for folder in (three[0] / "iter_0000003", path))
    assert all(torch.equal(one[name], mean[name]) for name in one)


@pytest.mark.parametrize("encoding", ["absolute", "ddrp"])
def test_the_mean_of_exports(tmp_path, tokenizer, offline, encoding):
    """transformers loads the mean, of a plain BERT and of our code, with its tokenizer; a pooling module stays."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    export_checkpoint(write_checkpoint(tmp_path / "run", tokenizer, position_encoding=encoding), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    stored(shaken)(tmp_path / "two")
    (tmp_path / "two" / "export_sums.json").unlink()
    set_keys(dtype="bfloat16", finetuned={"score": 1})(tmp_path / "two")
    Mean([tmp_path / "two", tmp_path / "one"], [3, 1]).write(tmp_path / "mean")
    check_sums(tmp_path / "mean")
    expected = twin([tmp_path / "two" / SAFE, tmp_path / "one" / SAFE], [3, 1])
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "mean", trust_remote_code=encoding == "ddrp")
    written = loaded.state_dict()
    assert expected and all(torch.equal(written[name], expected[name]) for name in expected)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "mean")) == tokenizer.vocab_size
    assert (tmp_path / "mean" / "1_Pooling" / "config.json").is_file()
    settings, card = json.loads((tmp_path / "mean" / "config.json").read_text()), (tmp_path / "mean" / CARD).read_text()
    assert not {"dtype", "finetuned"} & settings.keys() and "| two | 0.75 |" in card and "ForMaskedLM" in card


def test_shards_and_lower_precisions_have_an_fp32_mean(tmp_path, vocab):
    models = []
    for dtype, folder in ((torch.float16, tmp_path / "half"), (torch.bfloat16, tmp_path / "bf16")):
        models.append(write_folder(folder, vocab, "BertForMaskedLM"))
        (folder / SAFE).unlink()
        models[-1].to(dtype).save_pretrained(folder, max_shard_size="20KB")
    assert not (tmp_path / "half" / SAFE).exists()
    mean = Mean([tmp_path / "half", tmp_path / "bf16"], [1, 1])
    mean.write(tmp_path / "mean")
    name = "bert.encoder.layer.1.output.dense.weight"
    pairs = zip(*(model.state_dict()[name].flatten().tolist() for model in models), strict=True)
    expected = torch.tensor([(a + b) / 2 for a, b in pairs]).reshape(mean[name].shape)
    assert torch.equal(load_file(tmp_path / "mean" / SAFE)[name], expected)
    import_folder(tmp_path / "mean", tmp_path / "start")


def use_other_vocabulary(folder):
    conftest.wordpiece(folder / "vocab.txt", [*conftest.BERT_SPECIALS, *reversed(conftest.WORDS)])


def add_dense(folder):
    (folder / "2_Dense").mkdir()
    save_file({"w": torch.ones(2)}, folder / "2_Dense" / SAFE)


PLACES, BIAS = "bert.embeddings.position_ids", "cls.predictions.bias"
REFUSED = [
    (set_keys(layer_norm_eps=0.1), r"another architecture \(layer_norm_eps\) than"),
    (stored(lambda tensors: dict([*tensors.items()][3:])), "of another architecture: bert"),
    (put(BIAS, torch.ones(7)), "another architecture: cls.pred"),
    (put(BIAS, torch.full((20,), torch.inf)), "bias contains a value that is not a finite number"),
    (put(PLACES, torch.arange(5) + 1), "position_ids holds other whole numbers"),
    (use_other_vocabulary, "another vocabulary than"),
    (add_dense, "2_Dense has weights of its own"),
    (lambda folder: (folder / SAFE).rename(folder / "pytorch_model.bin"), "no model.safetensors"),
    (lambda folder: (folder / SAFE).write_bytes(b"x" * 99), "model.safetensors: cannot be read"),
    (None, "kind of folder"),
]


def test_what_has_no_mean_is_refused(tmp_path, tokenizer, vocab):
    write_checkpoint(tmp_path / "run", tokenizer)
    write_folder(tmp_path / "one", vocab, "BertForMaskedLM")
    put(PLACES, torch.arange(5))(tmp_path / "one")
    for number, (change, line) in enumerate(REFUSED):
        two = tmp_path / f"two{number}"
        shutil.copytree(tmp_path / ("one" if change else "run"), two)
        if change:
            change(two)
        refused(line, lambda two=two: Mean([tmp_path / "one", two], [1, 1]).write(tmp_path / "mean"))
        assert not (tmp_path / "mean").exists()
