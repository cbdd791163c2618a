"""File operations below one folder, recorded by shim.c and read back as operations on inodes."""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAULTS = {"ENOSPC": 1, "EIO": 2, "EINTR": 3, "short write": 4}
"""Faults that `arm` injects, by their number in shim.c."""
EXCHANGE = "2"
"""Flag of renameat2 that exchanges two names."""

TOP = 0
"""Inode of the root."""

Tree = dict[str, bytes | None]
"""Path below the root → content; a folder's content is None."""
Change = tuple[str, int, bytes]
"""("write", offset, bytes) or ("truncate", size, b"")"""


class Missed(Exception):
    """Error for a recording that does not explain the files that are there."""


def environment(folder: Path) -> dict[str, str]:
    """Compile the recorder into `folder`; return the environment of a process that it stands in front of libc of."""
    library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-lpthread"], check=True)
    plain = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    return plain | {"LD_PRELOAD": str(library)}


def is_loaded() -> bool:
    """Return whether the recorder stands in front of libc in this process."""
    return hasattr(_shim(), "crash_start")


def missing() -> str | None:
    """Return why this machine cannot run the checker, or None."""
    if sys.platform != "linux":
        return "needs Linux: the recorder counts on its libc"
    return None if shutil.which("gcc") else "needs gcc: install it, for example with `apt install gcc`"


def start(root: Path, log: Path | None = None) -> None:
    """Watch a folder; with `log`, record its operations."""
    _shim().crash_start(os.fsencode(root), os.fsencode(log or ""))


def stop() -> None:
    """Stop watching."""
    _shim().crash_stop()


def mark(text: str) -> None:
    """Record that the update has reported something as done; without the recorder, do nothing."""
    if is_loaded():
        _shim().crash_mark(text.encode())


def arm(number: int, fault: str, sticky: bool) -> None:
    """Let the operation `number` from now on fail; a sticky fault stays for all later ones."""
    _shim().crash_arm(ctypes.c_long(number), FAULTS[fault], int(sticky))


def hit() -> str:
    """Return the operation that failed, or an empty text."""
    function = _shim().crash_hit
    function.restype = ctypes.c_char_p
    return function().decode()


def _shim() -> Any:
    return ctypes.CDLL(None)


@dataclass
class Operation:
    """One recorded operation."""

    kind: str
    """"names", "data", "sync" or "mark"."""
    text: str
    names: tuple[tuple[int, str, int | None], ...] = ()
    """Changed entries of folders, all at once: (folder, name, new inode or None)."""
    inode: int = -1
    """File or folder of "data" and "sync"."""
    change: Change = ("", 0, b"")


def tree_of(root: Path) -> Tree:
    """Return all files and folders below a root, each folder before its content."""
    paths = sorted(root.rglob("*"))
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}


def changed(content: bytes, changes: Iterable[Change], zeros: bool = False) -> bytes:
    """Return a file's content after some changes; with `zeros` the written bytes are 0."""
    out = bytearray(content)
    for kind, offset, data in changes:
        out.extend(bytes(max(0, offset - len(out))))
        if kind == "truncate":
            del out[offset:]
        else:
            out[offset : offset + len(data)] = bytes(len(data)) if zeros else data
    return bytes(out)


class Recording:
    """Operations on a tree whose files and folders have numbers, which stay when they are renamed.

    Attributes:
        contents: file → content at the start; folders are not there.
        entries: folder → names in it at the start, with their inodes.
    """

    def __init__(self, root: Path, before: Tree, log: Path, after: Tree) -> None:
        """Read a log. Raises `Missed` if its operations do not lead from the tree `before` to `after`."""
        self.root, self.operations, self.contents = root, list[Operation](), dict[int, bytes]()
        self._now: dict[int, dict[str, int]] = {TOP: {}}
        self._numbers = itertools.count(TOP + 1)
        for path, content in before.items():
            folder, name = self._place(path)
            self._now[folder][name] = self._new(content)
        self.entries = {folder: dict(names) for folder, names in self._now.items()}
        self._read(log.read_bytes())
        ours = files_of(self, self._now, lambda inode, _: self.content(inode, len(self.operations)))
        if wrong := sorted(name for name in ours.keys() | after.keys() if ours.get(name, 0) != after.get(name, 0)):
            raise Missed(f"the recorder missed operations on {', '.join(wrong[:6])}")

    def _new(self, content: bytes | None) -> int:
        number = next(self._numbers)
        if content is None:
            self._now[number] = {}
        else:
            self.contents[number] = content
        return number

    def _inode(self, path: str) -> int:
        at = TOP
        for name in filter(None, path.split("/")):
            at = self._now[at][name]
        return at

    def _place(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return self._inode(folder), name

    def _read(self, log: bytes) -> None:
        at = 0
        while at < len(log):
            end = log.index(b"\n", at)
            size, kind, *words = log[at:end].decode(errors="surrogateescape").split("\t")
            at = end + 1 + int(size)
            self.operations.append(self._operation(kind, words, log[end + 1 : at]))

    def _operation(self, kind: str, words: list[str], data: bytes) -> Operation:
        if kind == "mark":
            return Operation(kind, words[0])
        paths = [word.removeprefix(str(self.root)).strip("/") for word in words if word.startswith("/")]
        text = f"{kind} {' → '.join(path or '.' for path in paths)}"
        if kind == "sync":
            return Operation(kind, text, inode=self._inode(paths[0]))
        if kind in ("write", "truncate"):
            return Operation("data", text, inode=self._inode(paths[0]), change=(kind, int(words[1]), data))
        folder, name = self._place(paths[0])
        if kind in ("create", "mkdir"):
            names = [(folder, name, self._new(b"" if kind == "create" else None))]
        elif kind in ("unlink", "rmdir"):
            names = [(folder, name, None)]
        else:
            other, new = self._place(paths[1])
            there = self._now[other].get(new) if words[2] == EXCHANGE else None
            names = [(folder, name, there), (other, new, self._now[folder][name])]
        apply_names(self._now, names)
        return Operation("names", text, tuple(names))

    def content(self, inode: int, end: int) -> bytes:
        """Return a file's content after the first `end` operations."""
        own = (op.change for op in self.operations[:end] if op.kind == "data" and op.inode == inode)
        return changed(self.contents[inode], own)


def apply_names(entries: dict[int, dict[str, int]], names: Iterable[tuple[int, str, int | None]]) -> None:
    """Change entries of folders."""
    for folder, name, inode in names:
        if inode is None:
            entries.setdefault(folder, {}).pop(name, None)
        else:
            entries.setdefault(folder, {})[name] = inode


def files_of(
    recording: Recording, entries: dict[int, dict[str, int]], content: Callable[[int, str], bytes]
) -> dict[str, bytes | None]:
    """Return path → content, None for a folder, of the tree that `entries` make."""
    found: Tree = {}

    def walk(folder: int, prefix: str, above: frozenset[int]) -> None:
        for name, inode in entries.get(folder, {}).items():
            path = prefix + name
            is_folder = inode not in recording.contents
            found[path] = None if is_folder else content(inode, path)
            if is_folder and inode not in above:
                walk(inode, f"{path}/", above | {inode})

    walk(TOP, "", frozenset({TOP}))
    return found
