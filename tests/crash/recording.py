"""File operations below one folder, recorded by shim.c and read back as operations on inodes."""

import ctypes
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

Tree = dict[str, tuple[int, bytes | None]]
"""Path below the root → (inode, content); a folder's content is None. The root's own path is empty."""
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
    """Return all files and folders below a root."""
    found: Tree = {"": (root.stat().st_ino, None)}
    for path in sorted(root.rglob("*")):
        found[str(path.relative_to(root))] = (path.lstat().st_ino, None if path.is_dir() else path.read_bytes())
    return found


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
    """Operations on a tree, with inodes numbered anew: the system gives those of deleted files to new ones.

    Attributes:
        contents: inode → content at the start.
        entries: folder → names in it at the start, with their inodes.
        top: inode of the root.
    """

    def __init__(self, root: Path, before: Tree, log: Path, after: Tree) -> None:
        """Read a log. Raises `Missed` if its operations do not lead from the tree `before` to `after`."""
        self.root, self.operations, self.contents = root, list[Operation](), dict[int, bytes]()
        self.folders: set[int] = set()
        self._now: dict[int, dict[str, int]] = {}
        self._numbers: dict[int, int] = {}
        ids: dict[str, int] = {}
        for path, (inode, content) in before.items():
            ids[path] = self._new(inode, content is None, content or b"")
            if path:
                folder, _, name = path.rpartition("/")
                self._now[ids[folder]][name] = ids[path]
        self.top = ids[""]
        self.entries = {folder: dict(names) for folder, names in self._now.items()}
        self._read(log.read_bytes())
        self._compare({path: content for path, (_, content) in after.items() if path})

    def _new(self, inode: int, is_folder: bool, content: bytes = b"") -> int:
        number = self._numbers[inode] = len(self.folders) + len(self.contents)
        if is_folder:
            self.folders.add(number)
            self._now[number] = {}
        else:
            self.contents[number] = content
        return number

    def _place(self, path: str) -> tuple[int, str]:
        *folders, name = os.path.relpath(path, self.root).split("/")
        at = self.top
        for folder in folders:
            at = self._now[at][folder]
        return at, name

    def _read(self, log: bytes) -> None:
        at = 0
        while at < len(log):
            end = log.index(b"\n", at)
            size, kind, *words = log[at:end].decode(errors="surrogateescape").split("\t")
            at = end + 1 + int(size)
            self._add(kind, words, log[end + 1 : at])

    def _add(self, kind: str, words: list[str], data: bytes) -> None:
        text = f"{kind} {' → '.join(os.path.relpath(word, self.root) for word in words if word.startswith('/'))}"
        if kind in ("write", "truncate"):
            change = (kind, int(words[1]), data)
            self.operations.append(Operation("data", text, inode=self._numbers[int(words[0])], change=change))
            return
        if kind in ("sync", "mark"):
            inode = self._numbers[int(words[0])] if kind == "sync" else -1
            self.operations.append(Operation(kind, text if kind == "sync" else words[0], inode=inode))
            return
        if kind in ("create", "mkdir"):
            names = [(*self._place(words[1]), self._new(int(words[0]), kind == "mkdir"))]
        elif kind in ("unlink", "rmdir"):
            names = [(*self._place(words[0]), None)]
        else:
            (one, name), (other, new) = self._place(words[0]), self._place(words[1])
            there = self._now[other].get(new) if words[2] == EXCHANGE else None
            names = [(one, name, there), (other, new, self._now[one][name])]
        apply_names(self._now, names)
        self.operations.append(Operation("names", text, tuple(names)))

    def _compare(self, real: dict[str, bytes | None]) -> None:
        ours = files_of(self, self._now, lambda inode, _: self.content(inode, len(self.operations)))
        if wrong := sorted(n for n in ours.keys() | real.keys() if ours.get(n, 0) != real.get(n, 0)):
            raise Missed(f"the recorder missed operations on {', '.join(wrong[:6])}")

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
    found: dict[str, bytes | None] = {}

    def walk(folder: int, prefix: str, above: frozenset[int]) -> None:
        for name, inode in entries.get(folder, {}).items():
            path = prefix + name
            is_folder = inode in recording.folders
            found[path] = None if is_folder else content(inode, path)
            if is_folder and inode not in above:
                walk(inode, f"{path}/", above | {inode})

    walk(recording.top, "", frozenset({recording.top}))
    return found
