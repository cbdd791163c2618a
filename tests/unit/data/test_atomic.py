"""Files and folders exist whole or not at all, whatever else lies beside them and whenever a process is killed.

Systems that cannot exchange two names are covered here; `tests/crash` tries whole commands, and power cuts too."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import stat
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_ddrp.data import atomic
from megatron_ddrp.data.atomic import BeingWritten, atomic_file, atomic_folder, write_bytes, write_text
from megatron_ddrp.errors import UserError, run_command
from tests.refusals import refused


def write_file(path):
    write_text(path, "new")


def write_folder(path):
    with atomic_folder(path) as folder:
        (folder / "content").write_text("new")


WRITERS = pytest.mark.parametrize("write", [write_file, write_folder])


def content_of(path):
    return ((path / "content") if path.is_dir() else path).read_text()


def tree(folder):
    """Every path below a folder with its content; links are not followed."""

    def held(path):
        if path.is_symlink():
            return os.readlink(path)
        return "folder" if path.is_dir() else path.read_text()

    return {str(path.relative_to(folder)): held(path) for path in sorted(folder.rglob("*"))}


OTHERS = {
    "a file": lambda path, _: path.write_text("mine"),
    "a folder": lambda path, outside: shutil.copytree(outside, path),
    "a link to a folder": lambda path, outside: path.symlink_to(outside),
    "a dangling link": lambda path, outside: path.symlink_to(outside / "nothing"),
}
NAMES = ("h.tmp", "h.replaced", ".h.tmp", ".h.old", "h.lock", ".h.0123456789abcdef.tmp", ".h.0123456789abcdef.old")


@WRITERS
@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_of_others_is_touched(tmp_path, write, kind):
    """Temporary names of this and of earlier versions are taken by a user's files and links."""
    outside, here = tmp_path / "outside", tmp_path / "here"
    outside.mkdir()
    here.mkdir()
    (outside / "file").write_text("mine")
    for name in NAMES:
        OTHERS[kind](here / name, outside)
    before = tree(tmp_path)
    for _ in range(2):
        write(here / "h")
    assert content_of(here / "h") == "new"
    (shutil.rmtree if (here / "h").is_dir() else os.unlink)(here / "h")
    assert tree(tmp_path) == before


@WRITERS
def test_a_failure_leaves_what_was_there_or_brings_it_back(tmp_path, write, monkeypatch):
    write(tmp_path / "h")
    before, rename = tree(tmp_path), os.rename
    refuse = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))

    def refuse_the_successor(source, target):
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)  # as on a file system that cannot
    with pytest.raises((UserError, OSError), match="No space left on device"):
        write(tmp_path / "h")
    assert tree(tmp_path) == before
    if write is write_folder:
        monkeypatch.setattr(os, "rename", refuse_the_successor)
        refused("h: cannot be written: Input/output error", write_folder, tmp_path / "h")
        assert tree(tmp_path) == before


def test_a_full_disk_is_one_line_with_the_files_name(tmp_path, capsys):
    def main():
        with atomic_file(tmp_path / "h"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit) as end:
        run_command(main, "program")
    said = f"program: error: {tmp_path / 'h'}: No space left on device\n"
    assert (end.value.code, capsys.readouterr().err, tree(tmp_path)) == (1, said, {})


def test_a_writer_waits_for_a_short_write_and_without_locks_each_has_a_file_of_its_own(tmp_path, monkeypatch):
    first, sleep = atomic_file(tmp_path / "h"), time.sleep

    def end_the_first(_):
        first.__exit__(None, None, None)
        sleep(0)

    first.__enter__()
    monkeypatch.setattr(time, "sleep", end_the_first)
    write_text(tmp_path / "h", "second")
    assert tree(tmp_path) == {"h": "second"}
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with atomic_file(tmp_path / "h") as alone:
        write_text(tmp_path / "h", "second")
        alone.write(b"first")
    assert tree(tmp_path) == {"h": "first"}


@WRITERS
def test_a_second_writer_is_refused_and_the_next_one_removes_what_a_killed_one_left_and_nothing_else(tmp_path, write):
    told, tell = os.pipe()
    killed = os.fork()
    if not killed:
        try:
            with atomic_file(tmp_path / "h") if write is write_file else atomic_folder(tmp_path / "h") as output:
                half = output if write is write_file else (output / "content").open("wb")
                half.write(b"half")
                half.flush()
                os.write(tell, b"!")
                time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(told, 1) == b"!"
    line = "h: another process is writing it; wait for it or choose another name"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BeingWritten, match=line):
        patch.setattr(atomic, "WAITS", ())
        write(tmp_path / "h")
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert len(list(tmp_path.iterdir())) == 1
    write(tmp_path / "other")
    assert len(list(tmp_path.iterdir())) == 2
    write(tmp_path / "h")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h", "other"]


@WRITERS
@pytest.mark.parametrize("there", [True, False], ids=["link", "dangling link"])
def test_an_output_behind_a_link_is_written_where_it_lies(tmp_path, write, there):
    (tmp_path / "far").mkdir()
    if there:
        write(tmp_path / "far" / "h")
    (tmp_path / "h").symlink_to(tmp_path / "far" / "h")
    write(tmp_path / "h")
    assert (tmp_path / "h").is_symlink() and content_of(tmp_path / "far" / "h") == "new"
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["h"]


NO_FILE = "it is a device or a pipe"
STRANGE = {
    "a folder": (Path.mkdir, "h", "it is a folder; give the name of a file"),
    "a pipe": (os.mkfifo, "h", NO_FILE),
    "a link to a device": (lambda path: path.symlink_to(os.devnull), "h", NO_FILE),
    "standard output": (None, "/dev/stdout", NO_FILE),
    "a descriptor": (None, "/proc/self/fd/1", NO_FILE),
    "a loop of links": (lambda path: path.symlink_to(path), "h", "Too many levels of symbolic links"),
    "below a file": (Path.touch, "h/h", "Not a directory"),
}
"""Kind → what makes `h`, the output, and why it is refused."""


@pytest.mark.parametrize("kind", STRANGE)
def test_an_output_that_no_file_can_replace_is_refused(tmp_path, kind):
    make, output, message = STRANGE[kind]
    if make:
        make(tmp_path / "h")
    before = [item.name for item in tmp_path.iterdir()]
    refused(f"cannot be written: {message}", write_text, tmp_path / output, "new")
    assert [item.name for item in tmp_path.iterdir()] == before


@pytest.mark.parametrize("umask, expected", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_those_of_the_umask_or_of_the_file_before(tmp_path, umask, expected):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "h", "new")
        write_folder(tmp_path / "folder")
        write_bytes(tmp_path / "own", b"")
        (tmp_path / "own").chmod(0o640)
        write_bytes(tmp_path / "own", b"new")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("h", "folder/content", "folder", "own")]
    assert modes == [expected, expected, 0o777 & ~umask, 0o640]


def test_names_that_are_no_utf_8_hard_links_and_write_protection_are_kept(tmp_path, monkeypatch):
    for folder in ("encoded", "linked", "protected"):
        (tmp_path / folder).mkdir()
    write_text(tmp_path / "encoded" / os.fsdecode(b"h\xe9"), os.fsdecode(b"of h\xe9"))
    [written] = (tmp_path / "encoded").iterdir()
    assert (written.name, written.read_bytes()) == ("h\udce9", b"of h\xe9")
    (tmp_path / "linked" / "backup").write_text("old")
    os.link(tmp_path / "linked" / "backup", tmp_path / "linked" / "h")
    write_text(tmp_path / "linked" / "h", "new")
    assert tree(tmp_path / "linked") == {"backup": "old", "h": "new"}
    opened, mine = os.open, tmp_path / "protected" / "h"

    def opens(path, flags, *more, **options):
        if Path(path).name == "h" and flags & os.O_WRONLY:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *more, **options)

    mine.write_text("mine")
    monkeypatch.setattr(os, "open", opens)  # as for any user but root
    refused("h: cannot be written: it is write-protected", write_text, mine, "new")
    assert tree(mine.parent) == {"h": "mine"}


def test_a_folder_that_came_meanwhile_is_not_replaced(tmp_path):
    def check():
        if (tmp_path / "h").exists():
            raise UserError("it is there")

    with pytest.raises(UserError, match="it is there"), atomic_folder(tmp_path / "h", check):
        (tmp_path / "h").mkdir()
        (tmp_path / "h" / "content").write_text("theirs")
    assert tree(tmp_path) == {"h": "folder", "h/content": "theirs"}


def is_killed_at(number, action):
    """Run `action` in a fork that ends before its change `number`; return False if it had fewer."""
    child, killed = os.fork(), 9
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, killed)
        return code == killed
    passed = 0

    def counted(change, *arguments, **named):
        nonlocal passed
        passed += 1
        if passed == number:
            os._exit(killed)
        return change(*arguments, **named)

    with contextlib.suppress(BaseException):
        of_os = ((os, name) for name in ("replace", "rename", "unlink", "mkdir", "rmdir"))
        for module, name in (*of_os, (atomic, "_exchange")):
            setattr(module, name, partial(counted, getattr(module, name)))
        action()
        os._exit(0)
    os._exit(1)


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_folder_is_whole_whenever_its_writer_is_killed(tmp_path, monkeypatch, can_exchange, replaces):
    """And at each moment a reader finds the old folder or the new one, where the system can exchange names."""
    folder = tmp_path / "data" / "model"
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)

    def action():
        if folder.exists() and can_exchange:
            assert (folder / "config.json").read_text() in ("old", "new")
        with atomic_folder(folder) as new:
            write_text(new / "config.json", "new")

    for number in itertools.count(1):
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir()
        if replaces:
            folder.mkdir()
            (folder / "config.json").write_text("old")
            (folder / "old_weights").touch()
        if not is_killed_at(number, action):
            break
        action()
        visible = {path: content for path, content in tree(folder.parent).items() if not path.startswith(".")}
        assert visible == {"model": "folder", "model/config.json": "new"}, f"killed before change {number}"
    assert number > (4 if replaces else 3)


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
