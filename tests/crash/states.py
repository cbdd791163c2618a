"""Contents of a disk that a crash may leave, from a recording of the operations before it.

kill     the process ends after an operation: everything before it is there
journal  a power cut with ext4 or xfs: names come to the disk in their order, any of them at any time; the bytes of
         a file that was not synced are missing from any place on, each file for itself
worst    a power cut with what POSIX allows: each folder keeps its names up to any place after its own last sync,
         for itself (a renaming between two folders happens in both or in neither); bytes as before, or zeros
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.recording import Change, Operation, Recording, Tree, apply_names, changed, files_of

MODELS = ("kill", "journal", "worst")
MOST = 300
"""Combinations of folders at one moment; of more, so many are drawn by chance."""
LOSSES = {"journal": ("nothing", "half"), "worst": ("nothing", "half", "zeros")}
"""Model → parts of unsynced bytes that a crash may leave."""

Named = tuple[int, Operation]
"""Operation on names, with its number."""


@dataclass(frozen=True)
class State:
    """Files after a crash."""

    at: int
    """Number of operations before the crash."""
    lost: tuple[str, ...]
    reported: tuple[str, ...]
    """Parts of the update that the process had reported as done."""
    files: Tree

    @functools.cached_property
    def key(self) -> frozenset[tuple[str, bytes | None]]:
        """The files, for a comparison with other states."""
        return frozenset(self.files.items())

    def write(self, root: Path) -> None:
        """Write the files into a new folder."""
        root.mkdir(parents=True)
        for name, content in sorted(self.files.items()):
            if content is None:
                (root / name).mkdir()
            else:
                (root / name).write_bytes(content)


def states_of(recording: Recording, model: str) -> list[State]:
    """Return each different state once, with the most that was reported before it."""
    chance, found = random.Random(0), dict[Any, State]()
    for end in _moments(recording, model):
        for state in _Moment(recording, end, model, chance).states():
            if state.key not in found or len(found[state.key].reported) < len(state.reported):
                found[state.key] = state
    return list(found.values())


def _moments(recording: Recording, model: str) -> list[int]:
    """Return where a crash differs from others: before each sync, after each report, and at the end."""
    operations = recording.operations
    if model == "kill":
        return list(range(len(operations) + 1))
    found = {number + (op.kind == "mark") for number, op in enumerate(operations) if op.kind in ("sync", "mark")}
    return sorted(found | {len(operations)})


class _Moment:
    """States of a crash after the first `end` operations."""

    def __init__(self, recording: Recording, end: int, model: str, chance: random.Random) -> None:
        self.recording, self.end, self.model, self.chance = recording, end, model, chance
        operations = recording.operations[:end]
        self.reported = tuple(op.text for op in operations if op.kind == "mark")
        self.names = [(number, op) for number, op in enumerate(operations) if op.kind == "names"]
        self.synced = {op.inode: number for number, op in enumerate(operations) if op.kind == "sync"}
        self.safe: dict[int, list[Change]] = {}
        self.open: dict[int, list[Change]] = {}
        """File → its changes since its last sync."""
        for number, op in enumerate(operations):
            if op.kind == "data":
                changes = self.open if self.synced.get(op.inode, -1) < number else self.safe
                changes.setdefault(op.inode, []).append(op.change)
        self._contents: dict[tuple[int, str], bytes] = {}

    def states(self) -> Iterator[State]:
        if self.model == "kill":
            yield self._state(self.names, {})
            return
        files = sorted(self.open)
        for kept in self._in_order() if self.model == "journal" else self._by_folder():
            for losses in _losses(files, LOSSES[self.model]):
                yield self._state(kept, losses)

    def _in_order(self) -> Iterator[Sequence[Named]]:
        last = max(self.synced.values(), default=-1)
        first = sum(number < last for number, _ in self.names)
        yield from (self.names[:count] for count in range(first, len(self.names) + 1))

    def _by_folder(self) -> Iterator[Sequence[Named]]:
        safe = {n for n, op in self.names if any(self.synced.get(folder, -1) > n for folder, *_ in op.names)}
        waiting = [(number, {folder for folder, *_ in op.names}) for number, op in self.names if number not in safe]
        folders = sorted({folder for _, own in waiting for folder in own})
        lengths = [sum(folder in own for _, own in waiting) for folder in folders]
        cuts = self._cuts(lengths)
        for kept in dict.fromkeys(_kept(waiting, dict(zip(folders, cut, strict=True))) for cut in cuts):
            yield [each for each in self.names if each[0] in safe or each[0] in kept]

    def _cuts(self, lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if math.prod(length + 1 for length in lengths) <= MOST:
            yield from itertools.product(*(range(length + 1) for length in lengths))
            return
        for k in range(MOST):  # ends of folders are the likelier faults
            draw = self.chance.randint if k % 3 else lambda _, most: self.chance.choice((0, most))
            yield tuple(draw(0, length) for length in lengths)

    def _state(self, kept: Sequence[Named], losses: Mapping[int, str]) -> State:
        entries = {folder: dict(names) for folder, names in self.recording.entries.items()}
        for _, op in kept:
            apply_names(entries, op.names)
        present = {number for number, _ in kept}
        lost = [f"no {op.text}" for number, op in self.names if number not in present]

        def content(inode: int, path: str) -> bytes:
            loss = losses.get(inode, "")
            if loss:
                lost.append(f"{path}: {loss}")
            return self._content(inode, loss)

        files = files_of(self.recording, entries, content)
        return State(self.end, tuple(lost), self.reported, files)

    def _content(self, inode: int, loss: str) -> bytes:
        if (inode, loss) not in self._contents:
            base, open_ = changed(self.recording.contents[inode], self.safe.get(inode, ())), self.open.get(inode, [])
            if loss == "nothing":
                open_ = []
            elif loss == "half":
                kind, offset, data = open_[0]
                first = (kind, offset, data[: len(data) // 2]) if kind == "write" else open_[0]
                open_ = open_[: len(open_) // 2] or [first]
            self._contents[inode, loss] = changed(base, open_, zeros=loss == "zeros")
        return self._contents[inode, loss]


def _kept(waiting: Sequence[tuple[int, set[int]]], lengths: dict[int, int]) -> frozenset[int]:
    """Return the operations that are kept if each folder keeps at most its first `lengths` ones."""
    left, kept = dict(lengths), set()
    for number, folders in waiting:
        if all(left[folder] > 0 for folder in folders):
            kept.add(number)
            for folder in folders:
                left[folder] -= 1
        else:
            left.update(dict.fromkeys(folders, 0))
    return frozenset(kept)


def _losses(files: Sequence[int], kinds: Sequence[str]) -> Iterator[dict[int, str]]:
    """Yield what files lose: none anything, all the same, one alone, all but one."""
    yield {}
    for kind in kinds if files else ():
        yield dict.fromkeys(files, kind)
        for file in files if len(files) > 1 else ():
            yield {file: kind}
            yield {other: kind for other in files if other != file}
