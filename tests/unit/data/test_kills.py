"""A process that is killed before any change of a folder's name: the next one gives what an undisturbed one does.

The process is a fork that ends, without a word to anyone, before its n-th renaming, removal or new folder. Systems that
cannot exchange two names are covered here; `tests/crash` tries whole commands, and power cuts too.
"""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from megatron_ddrp.data import atomic
from megatron_ddrp.data.atomic import atomic_folder, write_text

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
    """Kill `action` before each of its changes in a copy of `folder`; the same action then does what it always does."""
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
        action(here)
        assert content(here) == expected, f"killed before change {number}"
        shutil.rmtree(here)
        number += 1
    assert number > at_least


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
