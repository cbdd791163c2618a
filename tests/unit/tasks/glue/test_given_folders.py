"""Folders given in place of a model's: each reader names the one inside, or what is missing."""

import json
import shutil

import pytest

from megatron_ddrp.checkpoint import choose_checkpoint
from megatron_ddrp.checkpoint.folder import refuse_folders
from megatron_ddrp.conversion.from_huggingface import read_folder
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis.session import find_snapshots
from megatron_ddrp.lab.compare.rows import open_rows
from megatron_ddrp.tasks.glue import TASKS, read_examples


@pytest.mark.parametrize("written", [{}, {"model_type": None}, {"model_type": 5}, {"model_type": ""}])
def test_a_configuration_without_its_model_type_is_named(bert_folder, written):
    path = bert_folder / "config.json"
    values = json.loads(path.read_text())
    del values["model_type"]
    path.write_text(json.dumps(values | written))
    for read in (load_encoder, read_folder, lambda folder: find_snapshots([folder], every=False)):
        with pytest.raises(UserError, match=r"config\.json: model_type (is missing|is (None|5|'')), expected the name"):
            read(bert_folder)


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
    readers = (
        *(load_encoder, read_folder, choose_checkpoint, lambda folder: find_snapshots([folder], every=False)),
        *(lambda folder: refuse_folders(tmp_path / "save", folder), lambda folder: load_encoder(folder.parent)),
    )
    for read in readers[: 6 if name == "cache" else 5]:
        if name == "cache" and read is readers[5]:
            outer = outer.rename(outer.with_name("models--org--bert"))
            place = outer / "snapshots" / "1f"
        with pytest.raises(UserError) as refused:
            read(outer)
        assert f"give a folder inside it that holds a model, such as {place}" in str(refused.value)


FORMS = {
    "adapter_config.json": "an adapter (LoRA, PEFT) without its model",
    "checkpoint-9/adapter_config.json": "an adapter (LoRA, PEFT) without its model",
    "tf_model.h5": "weights of TensorFlow",
    "bert_model.ckpt.index": "weights of TensorFlow",
    "flax_model.msgpack": "weights of Flax",
    "onnx/model_quantized.onnx": "a model in ONNX",
    "m.Q4.gguf": "weights in GGUF",
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
        with pytest.raises(UserError) as refused:
            read(bert_folder)
        assert f"it holds {FORMS[name]}" in str(refused.value), read


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 12345\n"


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "tokenizer_config.json", "model.safetensors", "pickle"])
def test_a_pointer_of_git_lfs_in_a_folder_is_named(bert_folder, name):
    name = "pytorch_model.bin" if name == "pickle" else name
    if name == "pytorch_model.bin":
        (bert_folder / "model.safetensors").unlink()
    (bert_folder / name).write_text(POINTER)
    for read in (load_encoder, read_folder):
        with pytest.raises(UserError, match=f"{name}: a pointer of Git LFS in place of the file: run git lfs install"):
            read(bert_folder)


def test_a_pointer_of_git_lfs_in_a_run_is_named(checkpoint_folder):
    for name in ("tokenizer/vocab.txt", "iter_0000003/model.safetensors", "iter_0000003/state.json"):
        (checkpoint_folder / name).write_text(POINTER)
        with pytest.raises(UserError, match="a pointer of Git LFS in place of the file: run git lfs install"):
            load_encoder(checkpoint_folder)


def test_a_pointer_of_git_lfs_in_place_of_rows_is_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(POINTER)
    for read in (open_rows, lambda path: read_examples(TASKS["CoLA"], path, path.read_bytes())):
        with pytest.raises(UserError, match="rows.jsonl: a pointer of Git LFS in place of the file"):
            read(rows)
