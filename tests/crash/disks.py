"""Power cuts of real file systems: each lies in an image, which is copied the moment a command has reported success.

The copy holds what the file system has given to its device by then; mounting it replays the journal, as after a power
cut. It needs root, loop devices and the tools of the file systems. Nothing is recorded meanwhile: all syncs are real.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.crash.checking import PROTOCOLS, Bench, faults_of, in_a_fork, prepare, update
from tests.crash.protocol import Protocol

BYTES = 320 << 20
"""Size of an image: mkfs.xfs takes none below 300 MiB."""
KINDS = {"ext4": ("-q", "-F"), "xfs": ("-q",), "btrfs": ("-q",)}
"""File system → options of its mkfs."""


def lacking(kind: str) -> str:
    """Return what this machine lacks for a file system, or an empty text."""
    lacks = {"root": not os.geteuid(), "loop devices": os.path.exists("/dev/loop-control")}
    lacks[f"mkfs.{kind}"] = shutil.which(f"mkfs.{kind}") is not None
    return ", ".join(name for name, is_there in lacks.items() if not is_there)


class Disk:
    """File system of a kind in an image."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Make the file system."""
        self.kind, self.image, self.place = kind, folder / f"{kind}.img", folder / kind
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(BYTES)
        _system(f"mkfs.{kind}", *KINDS[kind], self.image)

    @contextlib.contextmanager
    def mounted(self, image: Path) -> Iterator[None]:
        """Mount the image or a copy of it."""
        options = "loop,nouuid" if self.kind == "xfs" else "loop"  # the copy has the id of the original
        _system("mount", "-o", options, image, self.place)
        try:
            yield
        finally:
            _system("umount", self.place)

    def copy(self, number: int) -> None:
        """Copy the image as it is now: the disk after a power cut."""
        copy = self.image.with_suffix(f".{number}")
        copy.unlink(missing_ok=True)  # a loop device may still hold an earlier copy, and would be used again
        _system("cp", "--sparse=always", self.image, copy)


def check(bench: Bench, kind: str, names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Cut the power after each report of some protocols; yield each with the faults found."""
    disk = Disk(bench.folder, kind)
    for name in names:
        protocol = PROTOCOLS[name](disk.place / "root", bench.sample)
        with disk.mounted(disk.image):
            prepare(protocol)
            os.sync()
            protocol.after, reported = in_a_fork(partial(_updated, protocol, disk))
        for number, what in enumerate(reported, 1):
            with disk.mounted(disk.image.with_suffix(f".{number}")):
                faults = in_a_fork(partial(faults_of, protocol, reported[:number], deep=True))
            yield f"{kind}: power cut after {name}, {what}", faults


def _updated(protocol: Protocol, disk: Disk) -> tuple[dict[str, bytes], list[str]]:
    """Do an update, and copy the disk at each report; return the files and the reports."""
    reported: list[str] = []

    def report(what: str) -> None:
        reported.append(what)
        disk.copy(len(reported))

    protocol.report = report  # type: ignore[method-assign]
    update(protocol)
    return protocol.files(), reported


def _system(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)
