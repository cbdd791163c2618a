"""Datasets that are being written: nothing has a name before its time, and nobody else's files are touched."""

import errno
import shutil
from pathlib import Path

import pytest

from megatron_ddrp.data.dataset import indexed_dataset as unfinished
from megatron_ddrp.data.dataset.indexed_dataset import COMPLETE, UnfinishedDatasets
from megatron_ddrp.data.dataset.merging import merge, shuffle
from megatron_ddrp.data.preprocess import pipeline
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset


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


class Killed(BaseException):
    """Stand-in for the end of a process: nothing of this package catches it."""


def killed_at(monkeypatch, name, action):
    """Run an action that ends where it calls a function of the module `unfinished`."""

    def end(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(unfinished, name, end)
        action()


@pytest.fixture
def commands(config, tmp_path):
    """Return name → (command, prefix of the dataset that it writes)."""
    for name in "ab":
        write_dataset(tmp_path / name, [[[5, 6, 7]], [[8, 9]]], manifest={"documents": 2, "inputs": []})
    out, inputs = tmp_path / "out", [str(tmp_path / name) for name in "ab"]
    return {
        "preprocess": (lambda: preprocess(config()), config().prefixes[0]),
        "merge": (lambda: merge(out / "both", inputs), str(out / "both")),
        "shuffle": (lambda: shuffle(out / "mixed", inputs[0], 1), str(out / "mixed")),
    }


def dataset_files(prefix):
    return {ending: Path(prefix + ending).read_bytes() for ending in (".bin", ".idx", ".json")}


@pytest.mark.parametrize("name", ["preprocess", "merge", "shuffle"])
def test_a_dataset_that_was_deleted_after_a_kill_is_written_again(commands, monkeypatch, name):
    """The kill came after the last renaming, so what is left says that all is done."""
    command, prefix = commands[name]
    killed_at(monkeypatch, "_remove", command)
    expected = dataset_files(prefix)
    for ending in expected:
        Path(prefix + ending).unlink()
    command()
    assert dataset_files(prefix) == expected


@pytest.mark.parametrize("damage", ["a failing read", "other bytes"])
@pytest.mark.parametrize("name", ["preprocess", "merge", "shuffle"])
def test_complete_files_stay_if_their_mark_cannot_be_read(commands, monkeypatch, name, damage):
    """One failing read must not cost hours of work."""
    command, prefix = commands[name]
    killed_at(monkeypatch, "_give_names", command)
    (mark,) = Path(prefix).parent.glob(f"*.unfinished/{COMPLETE}")
    files, content, opened = sorted(mark.parent.iterdir()), mark.read_bytes(), Path.open

    def refuse(path, *arguments, **named):
        if path == mark:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *arguments, **named)

    with monkeypatch.context() as patch:
        if damage == "other bytes":
            mark.write_bytes(content[:-3])
        else:
            patch.setattr(Path, "open", refuse)
        with pytest.raises(UserError, match=f"{COMPLETE} cannot be read: .*; try again, or remove"):
            command()
    assert sorted(mark.parent.iterdir()) == files and not Path(f"{prefix}.bin").exists()
    mark.write_bytes(content)
    command()
    assert not mark.parent.exists() and len(dataset_files(prefix)) == 3
