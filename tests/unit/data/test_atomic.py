"""Files and folders that exist whole or not at all, whatever else lies beside them and whenever a process is killed.

A process that is killed before any change of a folder's name: the next one gives what an undisturbed one does. It is a
fork that ends, without a word to anyone, before its n-th renaming, removal or new folder. Systems that cannot exchange
two names are covered here; `tests/crash` tries whole commands, and power cuts too. Datasets that are being written:
nothing has a name before its time, and nobody else's files are touched."""

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_ddrp.data import atomic
from megatron_ddrp.data.atomic import BeingWritten, atomic_file, atomic_folder, write_bytes, write_text
from megatron_ddrp.data.dataset import indexed_dataset as unfinished
from megatron_ddrp.data.dataset.indexed_dataset import COMPLETE, UnfinishedDatasets
from megatron_ddrp.data.dataset.merging import merge, shuffle
from megatron_ddrp.data.preprocess import pipeline
from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.errors import UserError, run_command
from tests.datasets import wordpiece_job, write_dataset
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
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else "folder"
        if path.is_dir()
        else path.read_text()
        for path in sorted(folder.rglob("*"))
    }


OTHERS = {
    "a file": lambda path, _: path.write_text("mine"),
    "a folder": lambda path, _: (path.mkdir(), (path / "mine").write_text("mine")),
    "an empty folder": lambda path, _: path.mkdir(),
    "a link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "a link to a folder": lambda path, outside: path.symlink_to(outside),
    "a dangling link": lambda path, outside: path.symlink_to(outside / "nothing"),
}
NAMES = ("h.tmp", "h.replaced", ".h.tmp", ".h.old", "h.lock", ".h.0123456789abcdef.tmp", ".h.0123456789abcdef.old")


@WRITERS
@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_of_others_is_touched(tmp_path, write, kind):
    """Temporary names of this and of earlier versions are taken by a user's files and links."""
    outside, here = tmp_path / "outside", tmp_path / "here"
    for folder in (outside, here):
        folder.mkdir()
    (outside / "file").write_text("mine")
    for name in NAMES:
        OTHERS[kind](here / name, outside)
    before = tree(tmp_path)
    write(here / "h")
    write(here / "h")
    assert content_of(here / "h") == "new"
    (shutil.rmtree if (here / "h").is_dir() else os.unlink)(here / "h")
    assert tree(tmp_path) == before


@WRITERS
def test_a_failure_leaves_what_was_there(tmp_path, write, monkeypatch):
    write(tmp_path / "h")
    before = tree(tmp_path)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)  # as on a file system that cannot
    with pytest.raises((UserError, OSError), match="No space left on device"):
        write(tmp_path / "h")
    assert tree(tmp_path) == before


def test_a_folder_comes_back_if_its_successor_cannot_take_its_name(tmp_path, monkeypatch):
    write_folder(tmp_path / "h")
    before, rename = tree(tmp_path), os.rename

    def refuse_the_second(source, target):
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_the_second)
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)  # as on a file system that cannot
    refused("h: cannot be written: Input/output error", write_folder, tmp_path / "h")
    assert tree(tmp_path) == before


def test_a_full_disk_is_one_line_with_the_files_name(tmp_path, capsys):
    def main():
        with atomic_file(tmp_path / "h"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit) as end:
        run_command(main, "program")
    assert end.value.code == 1
    assert capsys.readouterr().err == f"program: error: {tmp_path / 'h'}: No space left on device\n"
    assert tree(tmp_path) == {}


@WRITERS
def test_the_second_writer_gets_a_line_and_the_first_one_its_name(tmp_path, write, monkeypatch):
    monkeypatch.setattr(atomic, "WAITS", (0.0,))
    with atomic_file(tmp_path / "h") if write is write_file else atomic_folder(tmp_path / "h"):
        held = tree(tmp_path)
        with pytest.raises(BeingWritten, match="h: another process is writing it; wait for it or choose another name"):
            write(tmp_path / "h")
        write(tmp_path / "other")
        assert held.items() <= tree(tmp_path).items()
    assert (tmp_path / "h").exists()


def test_a_writer_waits_for_a_short_write(tmp_path):
    first = atomic_file(tmp_path / "h")
    first.__enter__()
    sleep = time.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: (first.__exit__(None, None, None), sleep(0)))
        write_text(tmp_path / "h", "second")
    assert tree(tmp_path) == {"h": "second"}


PROGRAM = """
import sys, time
from pathlib import Path
from megatron_ddrp.data.atomic import atomic_file, atomic_folder
with (atomic_file if sys.argv[1] == "file" else atomic_folder)(Path(sys.argv[2])) as output:
    if sys.argv[1] == "file":
        output.write(b"half")
        output.flush()
    else:
        (output / "content").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


@WRITERS
def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path, write):
    command = [sys.executable, "-c", PROGRAM, "file" if write is write_file else "folder", str(tmp_path / "h")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as killed:
        killed.stdout.readline()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(BeingWritten):
            patch.setattr(atomic, "WAITS", ())
            write(tmp_path / "h")
        killed.send_signal(signal.SIGKILL)
    assert len([name for name in tree(tmp_path) if "/" not in name]) == 1
    write(tmp_path / "other")
    assert len([name for name in tree(tmp_path) if "/" not in name]) == 2
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


def make_loop(path):
    path.symlink_to(path)
    return path


STRANGE = {
    "a folder": (lambda path: (path.mkdir(), path)[1], "it is a folder; give the name of a file"),
    "a pipe": (lambda path: (os.mkfifo(path), path)[1], "it is a device or a pipe"),
    "a link to a device": (lambda path: (path.symlink_to(os.devnull), path)[1], "it is a device or a pipe"),
    "a device": (lambda _: Path(os.devnull), "it is a device or a pipe"),
    "standard output": (lambda _: Path("/dev/stdout"), "it is a device or a pipe"),
    "a descriptor": (lambda _: Path("/proc/self/fd/1"), "it is a device or a pipe"),
    "a loop of links": (make_loop, "Too many levels of symbolic links"),
    "below a file": (lambda path: (path.write_text("mine"), path / "h")[1], "Not a directory"),
    "too long a name": (lambda path: path.with_name("h" * 255), "File name too long"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_an_output_that_no_file_can_replace_is_refused(tmp_path, kind):
    make, message = STRANGE[kind]
    path = make(tmp_path / "h")
    before = [item.name for item in tmp_path.iterdir()]
    refused(f"cannot be written: {message}", write_text, path, "new")
    assert [item.name for item in tmp_path.iterdir()] == before


def test_names_that_are_not_utf_8_are_written_as_they_are(tmp_path):
    write_text(tmp_path / os.fsdecode(b"h\xe9"), os.fsdecode(b"of h\xe9"))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("h\udce9", b"of h\xe9")]


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


def refused_of(name, opened):
    """`os.open` that may not write the file `name`."""

    def opens(path, flags, *more, **options):
        if Path(path).name == name and flags & os.O_WRONLY:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *more, **options)

    return opens


def test_a_write_protected_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "h").write_text("mine")
    monkeypatch.setattr(os, "open", refused_of("h", os.open))  # as for any user but root
    refused("h: cannot be written: it is write-protected", write_text, tmp_path / "h", "new")
    assert tree(tmp_path) == {"h": "mine"}


def test_other_names_of_a_hard_linked_file_keep_their_content(tmp_path):
    (tmp_path / "backup").write_text("old")
    os.link(tmp_path / "backup", tmp_path / "h")
    write_text(tmp_path / "h", "new")
    assert tree(tmp_path) == {"backup": "old", "h": "new"}


def test_without_locks_every_writer_has_a_file_of_its_own(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with atomic_file(tmp_path / "h") as first:
        write_text(tmp_path / "h", "second")
        first.write(b"first")
    assert tree(tmp_path) == {"h": "first"}


def test_a_folder_that_came_meanwhile_is_not_replaced(tmp_path):
    def check():
        if (tmp_path / "h").exists():
            raise UserError("it is there")

    with pytest.raises(UserError, match="it is there"), atomic_folder(tmp_path / "h", check):
        (tmp_path / "h").mkdir()
        (tmp_path / "h" / "content").write_text("theirs")
    assert tree(tmp_path) == {"h": "folder", "h/content": "theirs"}


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


@pytest.fixture
def config(tmp_path, tiny_corpus, monkeypatch):
    """A job in this process, of many chunks."""
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 20_000)

    return partial(wordpiece_job, tiny_corpus.vocab_file, tmp_path / "out" / "p", tiny_corpus.text_file)


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
    refused("was not written by this command, .*: move it away, or choose another prefix", preprocess, config())
    assert [(path.name, path.is_symlink()) for path in folder.iterdir()] == before
    assert (mine / "notes").read_text() == "mine"


def test_a_dangling_link_in_place_of_a_dataset_counts_as_there(config, tmp_path):
    Path(config().unfinished_folder).parent.mkdir(exist_ok=True)
    link = Path(f"{config().prefixes[0]}.bin")
    link.symlink_to(tmp_path / "nothing")
    refused("exists already", preprocess, config())
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
        refused(f"{COMPLETE} cannot be read: .*; try again, or remove", command)
    assert sorted(mark.parent.iterdir()) == files and not Path(f"{prefix}.bin").exists()
    mark.write_bytes(content)
    command()
    assert not mark.parent.exists() and len(dataset_files(prefix)) == 3
