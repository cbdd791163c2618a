"""Outputs that exist whole or not at all, and sums that show whether a file has changed.

A file or folder is written under a name of its own, synced, then renamed. The name is `.NAME.TOKEN.tmp`, in the
output's folder. Half of the token is random, the other half is the sum of NAME and the random half, so a name with the
right sum is ours. Its writer holds a lock on it, which the system frees when the process ends: a second writer of the
same output gets one line, and the next writer removes what a killed one left. Nothing else is ever deleted. An output
behind symbolic links is replaced where it lies; the links stay.

Sums are CRC-32, which detects flipped, missing and zeroed bytes and costs about a second per gigabyte, and SHA-256:

    object   {…, "crc32": sum}: the sum covers the other keys, as JSON with sorted keys and without spaces
    file     {"bytes": …, "crc32": …}, kept in another file
    dataset  SHA-256 in hexadecimal, kept in the manifest
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from megatron_ddrp.errors import UserError, is_of_others
from megatron_ddrp.foreign import parse_json, refuse_stand_in

AnyPath = str | os.PathLike[str]

WAITS = (0.1, 0.3, 0.6)
"""Seconds between attempts while another process writes the same output: small files are written at once."""

_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
"""Beginnings of names of open files, which no file can replace."""


class BeingWritten(UserError):
    """Error for an output that another process is writing."""


@contextlib.contextmanager
def atomic_file(path: AnyPath, mode: int | None = None) -> Iterator[BinaryIO]:
    """Provide a file of bytes that gets its name when the block ends, and is removed if the block raises.

    A file that it replaces keeps its permission bits; a new one has those of the umask, or `mode`. Other names of a
    hard-linked file keep the old content. Raises `UserError` if the folder cannot be made, if the output is there and
    is no file, or if another process is writing it.
    """
    path = Path(path)
    with _name_refusals(path):
        target, status = _place(path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
            raise UserError(f"{path}: cannot be written: it is {kind}; give the name of a file")
        if status is not None and _is_protected(target):
            raise UserError(f"{path}: cannot be written: it is write-protected; choose another name")
        temporary, descriptor = _claim(path, target, _new_file)
        if mode is None and status is not None:
            mode = status.st_mode & 0o777
        if mode is not None:
            os.fchmod(descriptor, mode)
    stream = os.fdopen(descriptor, "wb", buffering=1 << 20)
    try:
        yield stream
        sync(stream)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None and not is_of_others(error):
            error.filename = str(path)  # a full disk says no name
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk refuses the last flush too
            stream.close()


def write_text(path: AnyPath, text: str) -> None:
    """Write a file of text in UTF-8, whole or not at all. Raises `UserError` as `atomic_file` does.

    Names of files in the text are written as the bytes that they have on the disk, also if these are not UTF-8.
    """
    write_bytes(path, text.encode(errors="surrogateescape"))


def write_bytes(path: AnyPath, content: bytes) -> None:
    """Write a file, whole or not at all. Raises `UserError` as `atomic_file` does."""
    with atomic_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_folder(path: Path, check: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Provide a new folder to write into; it is renamed to `path` when the block ends, and removed if that raises.

    A folder that is there at the end is replaced if `check` does not raise. Raises `UserError` as `atomic_file` does.
    """
    with _name_refusals(path):
        target, _ = _place(path)
        temporary, descriptor = _claim(path, target, _new_folder)
        _restore(target)
    try:
        yield temporary
        check()
        with _name_refusals(path):
            for written in (*temporary.rglob("*"), temporary):  # also what other libraries wrote
                if not written.is_symlink():
                    sync_folder(written)
            is_new = not (target.is_dir() and any(target.iterdir()))
            if is_new or not _exchange(temporary, target):
                if not is_new:
                    os.rename(target, _own_name(target, "old"))
                os.rename(temporary, target)
            sync_folder(target.parent)
        shutil.rmtree(temporary, ignore_errors=True)  # after an exchange, the folder that was replaced
    except BaseException:
        _restore(target)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)
    for old in _own_names(target, "old"):
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once, where the system can (Linux; not on NFS); return whether it did."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    at_working_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
    return call is not None and not call(at_working_folder, bytes(one), at_working_folder, bytes(other), exchange)


def _restore(target: Path) -> None:
    """Give a replaced folder its name back if its writer was stopped before the new one got it."""
    if not target.exists():
        for old in _own_names(target, "old")[:1]:
            os.rename(old, target)


@contextlib.contextmanager
def _name_refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def _place(path: Path) -> tuple[Path, os.stat_result | None]:
    """Return where an output lies, behind symbolic links, and its status; None if it is not there yet."""
    if os.path.abspath(path).startswith(_STREAMS):
        raise UserError(f"{path}: cannot be written: it is a device or a pipe; give the name of a file")
    try:
        status = path.stat()
    except FileNotFoundError:
        status = None
    return Path(os.path.realpath(path)), status


def _is_protected(target: Path) -> bool:
    """Return whether a file may not be written; another process may remove it at any moment."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(target, os.O_WRONLY))
    except PermissionError:
        return True
    return False


def _claim(path: Path, target: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Make a file or folder of our own beside `target`; return its path and its locked descriptor.

    Raises `BeingWritten` about `path` while another process holds one for the same output.
    """
    make_folder(target.parent)
    for wait in (*WAITS, None):
        while True:
            temporary = _own_name(target, "tmp")
            descriptor = make(temporary)
            if lock(descriptor, temporary):
                break
            os.close(descriptor)  # another process took it for a leftover before it was locked
        if not _others_write(target, temporary):
            return temporary, descriptor
        _remove(temporary)
        os.close(descriptor)
        if wait is not None:
            time.sleep(wait * random.uniform(0.5, 1))  # two that began together must not meet again
    raise BeingWritten(f"{path}: another process is writing it; wait for it or choose another name")


def _new_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def _new_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _own_name(target: Path, suffix: str, half: str = "") -> Path:
    """Return a name of our own beside an output, with a new random half of its token or the given one."""
    half = half or os.urandom(4).hex()
    return target.with_name(f".{target.name}.{half}{zlib.crc32(os.fsencode(target.name + half)):08x}.{suffix}")


def _own_names(target: Path, suffix: str) -> list[Path]:
    """Return the files and folders beside an output whose names are our own."""
    begin, end = f".{target.name}.", f".{suffix}"
    found = [entry.name for entry in os.scandir(target.parent) if entry.name.startswith(begin)]
    halves = [name[len(begin) :][:8] for name in found if name.endswith(end)]
    return [name for name in (_own_name(target, suffix, half) for half in halves if half) if name.name in found]


def _others_write(target: Path, own: Path) -> bool:
    """Return whether another process is writing an output; remove what killed writers left of it."""
    for path in _own_names(target, "tmp"):
        if path == own:
            continue
        try:
            kind = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR
            descriptor = os.open(path, kind | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or of another user
            continue
        try:
            if not take_lock(descriptor):
                return True
            _remove(path)
        except OSError:  # without locks nobody knows
            pass
        finally:
            os.close(descriptor)
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lock(descriptor: int, path: Path) -> bool:
    """Lock the open file `path` for this process. Return False while another process holds it or has just renamed it.

    A file system without locks counts as locked.
    """
    try:
        return take_lock(descriptor) and path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return True


def take_lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file until it is closed or the process ends; return False if another process holds the lock.

    With `wait`, wait for that process. Raises `OSError` where the file system or the platform has no locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOLCK, "this platform has no file locks") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def sync(stream: IO[bytes]) -> None:
    """Sync everything written to an open file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def make_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it, if it is not there, with their names on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with contextlib.suppress(PermissionError):  # a folder that may be entered and not read
            sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder, or the bytes of a file, to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(folder)  # a full disk says no name
        raise
    finally:
        os.close(descriptor)


SUM = "crc32"
"""Key of an object's own sum, and of a file's."""
BLOCK = 1 << 20
"""Number of bytes read at a time."""

Advance = Callable[[int], object]
"""Function called with the number of bytes (or tokens) read since the last call, such as a progress bar's `update`."""


def silent(count: int) -> None:
    """Show no progress."""


class BrokenSeal(ValueError):
    """Error for content that differs from its sum."""


def content_sum(content: bytes) -> str:
    """Return the CRC-32 of some bytes as it is written, as eight hexadecimal digits."""
    return f"{zlib.crc32(content):08x}"


def object_sum(value: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a JSON object."""
    return content_sum(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def seal_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own sum, and with the types that a reader gets."""
    read = parse_json(json.dumps(value), lenient=True)
    return {**read, SUM: object_sum(read)}


def check_object(sealed: Mapping[str, Any], needs_sum: bool = False) -> dict[str, Any]:
    """Return an object without its own sum. Raises `BrokenSeal` if the sum differs, or is missing and `needs_sum`.

    Objects of older versions have none.
    """
    value = {key: sealed[key] for key in sealed if key != SUM}
    found, written = object_sum(value), sealed.get(SUM)
    if written != found and (needs_sum or SUM in sealed):
        raise BrokenSeal(f"CRC-32 {found} instead of {written!s:.20}")
    return value


def file_facts(path: Path) -> dict[str, Any]:
    """Return a file's size and CRC-32."""
    crc = 0
    with open(path, "rb") as stream:
        while data := stream.read(BLOCK):
            crc = zlib.crc32(data, crc)
    return {"bytes": path.stat().st_size, SUM: f"{crc:08x}"}


def file_fault(path: Path, written: Mapping[str, Any], read: bool = True) -> str | None:
    """Return the fault of a file whose facts were `written`, or None.

    Without `read` only the size is compared; otherwise the whole file is read for its sum.
    """
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != written["bytes"]:
        refuse_stand_in(b"", path)
        return f"{path.name} has {size:,} bytes instead of {written['bytes']:,}"
    found = file_facts(path)[SUM] if read else written[SUM]
    return None if found == written[SUM] else f"{path.name} has the CRC-32 {found} instead of {written[SUM]}"


def file_sha256(path: Path, advance: Advance = silent) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Calls `advance` with the bytes read since the last call."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while data := stream.read(BLOCK):
            digest.update(data)
            advance(len(data))
    return digest.hexdigest()
