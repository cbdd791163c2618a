"""Datasets that are being written: nothing has a name before its time, and nobody else's files are touched."""

import shutil
from pathlib import Path

import pytest

from megatron_ddrp.data.dataset.unfinished import UnfinishedDatasets
from megatron_ddrp.data.preprocess import pipeline
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.errors import UserError


@pytest.fixture
def config(tmp_path, tiny_corpus, monkeypatch):
    """A job in this process, of many chunks."""
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 20_000)

    def make(**changes):
        settings = {
            "input": (str(tiny_corpus.text_file),),
            "output_prefix": str(tmp_path / "out" / "p"),
            "tokenizer_type": "BertWordPieceLowerCase",
            "vocab_file": str(tiny_corpus.vocab_file),
        }
        return PreprocessConfig(**(settings | changes))

    return make


@pytest.mark.parametrize("kind", ["a file", "a folder", "a link", "a link for a folder"])
def test_files_of_others_in_the_folder_are_not_touched(config, tmp_path, kind):
    folder, mine = Path(config().unfinished_folder), tmp_path / "mine"
    folder.parent.mkdir(exist_ok=True)
    mine.mkdir()
    (mine / "notes").write_text("mine")
    if kind == "a link for a folder":
        folder.symlink_to(mine)
    else:
        folder.mkdir()
        make = {"a file": shutil.copy, "a folder": shutil.copytree, "a link": lambda a, b: b.symlink_to(a)}[kind]
        make(mine if kind == "a folder" else mine / "notes", folder / ("lock" if kind == "a link" else "notes"))
    before = [(path.name, path.is_symlink()) for path in folder.iterdir()]
    with pytest.raises(UserError, match="was not written by this command, .*: move it away, or choose another prefix"):
        preprocess(config())
    assert [(path.name, path.is_symlink()) for path in folder.iterdir()] == before
    assert (mine / "notes").read_text() == "mine"


def test_a_dangling_link_in_place_of_a_dataset_counts_as_there(config, tmp_path):
    Path(config().unfinished_folder).parent.mkdir(exist_ok=True)
    link = Path(f"{config().prefixes[0]}.bin")
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="exists already"):
        preprocess(config())
    assert link.is_symlink()


def test_two_processes_do_not_write_the_same_datasets(config, tmp_path):
    settings = config()
    with (
        UnfinishedDatasets(settings.unfinished_folder, settings.prefixes, "<u2"),
        pytest.raises(UserError, match="another process is writing here"),
    ):
        preprocess(settings)
