"""A process that is killed before any change of names: the same command then gives what an undisturbed one does.

The process is a fork that ends, without a word to anyone, before its n-th renaming, removal or new folder.
"""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from megatron_ddrp.data import atomic
from megatron_ddrp.data.atomic import atomic_folder, write_text
from megatron_ddrp.data.dataset.merging import merge, shuffle
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from tests.datasets import write_dataset

KILLED = 9
CHANGES = ("replace", "rename", "unlink", "mkdir", "rmdir")


def is_killed_at(number, action):
    """Run `action` in a fork that ends before its change `number`; return False if it had fewer."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, KILLED)
        return code == KILLED
    passed = 0
    with contextlib.suppress(BaseException):

        def count(change):
            def counted(*arguments, **named):
                nonlocal passed
                passed += 1
                if passed == number:
                    os._exit(KILLED)
                return change(*arguments, **named)

            return counted

        for name in CHANGES:
            setattr(os, name, count(getattr(os, name)))
        exchange = atomic._exchange
        atomic._exchange = count(exchange)
        action()
        os._exit(0)
    os._exit(1)


def content(folder):
    """Every file below a folder that has a name of its own, without what a killed process left under hidden names."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if "/." not in str(path)}


def assert_survives(folder, action, at_least):
    """Kill `action` before each of its changes in a copy of `folder`; the same action then gives what it always does.

    Killed before the last change, the removal of an empty folder, it had done everything.
    """
    whole = folder.with_name("whole")
    shutil.copytree(folder, whole, copy_function=shutil.copy2)
    action(whole)
    expected, number = content(whole), 1
    here = folder.with_name("killed")
    while True:
        shutil.copytree(folder, here, copy_function=shutil.copy2)
        killed = is_killed_at(number, lambda: action(here))
        if not killed:
            break
        if [list(path.iterdir()) for path in here.glob("*.unfinished")] != [[]] or content(here) != expected:
            action(here)
            assert not list(here.glob("*.unfinished")), number
        assert content(here) == expected, f"killed before change {number}"
        shutil.rmtree(here)
        number += 1
    assert number > at_least


@pytest.fixture
def two_datasets(tmp_path):
    """Return a folder with datasets a and b."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, first in (("a", 5), ("b", 60)):
        documents = [[[first + number, 7, 8]] for number in range(9)]
        write_dataset(folder / name, documents, manifest={"documents": 9, "inputs": [{"name": f"{name}.txt"}]})
    return folder


def test_merge(two_datasets):
    def action(folder):
        merge(folder / "both", [str(folder / "a"), str(folder / "b")])

    assert_survives(two_datasets, action, at_least=8)


@pytest.mark.parametrize("in_place", [True, False])
def test_shuffle(two_datasets, in_place):
    def action(folder):
        shuffle(folder / ("a" if in_place else "mixed"), str(folder / "a"), 1, overwrite=in_place)

    assert_survives(two_datasets, action, at_least=8)


@pytest.mark.parametrize("overwrite", [True, False])
def test_preprocess_of_two_keys(tmp_path, tiny_corpus, overwrite):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "text.jsonl").write_text(
        '{"text": "the first words", "title": "words"}\n{"text": "more", "title": "x"}\n'
    )
    settings = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(tiny_corpus.vocab_file)}

    def action(folder, **changes):
        os.chdir(folder)  # manifests and jobs hold the paths as given
        given = {"input": ("text.jsonl",), "output_prefix": "p", "json_keys": ("text", "title"), **settings, **changes}
        preprocess(PreprocessConfig(**given))

    if overwrite:
        action(folder)
        (folder / "text.jsonl").write_text('{"text": "other words", "title": "words"}\n')
    before = Path.cwd()
    try:
        assert_survives(folder, lambda folder: action(folder, overwrite=overwrite), at_least=12)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_folder(tmp_path, monkeypatch, can_exchange, replaces):
    """And at each moment a reader finds the old folder or the new one, where the system can exchange names."""
    folder = tmp_path / "data"
    folder.mkdir()
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)

    def action(folder):
        if (folder / "model").exists() and can_exchange:
            assert (folder / "model" / "config.json").read_text() in ("old", "new")
        with atomic_folder(folder / "model") as new:
            write_text(new / "config.json", "new")

    if replaces:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("old")
        (folder / "model" / "old_weights").write_text("")
    assert_survives(folder, action, at_least=4 if replaces else 3)


def test_files_of_a_folder_are_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files that other libraries wrote are synced too: a journal may keep the new name and lose the bytes."""
    synced, renamed, fsync = set(), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file))[1])

    def check(change):
        def checked(source, target):
            if Path(target).name == "model":
                held = [path.stat().st_ino for path in (source, *Path(source).rglob("*"))]
                renamed.append(set(held) <= synced)
            return change(source, target)

        return checked

    monkeypatch.setattr(os, "rename", check(os.rename))
    monkeypatch.setattr(atomic, "_exchange", check(atomic._exchange))
    for _ in range(2):
        synced.clear()
        with atomic_folder(tmp_path / "deep" / "model") as new:
            (new / "config.json").write_text("{}")
            (new / "inner").mkdir()
            (new / "inner" / "tokenizer.json").write_text("{}")
    assert renamed == [True, True] and (tmp_path / "deep").stat().st_ino in synced
