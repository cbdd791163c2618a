"""The `--save` folder of a running training: locked, with all files that readers of its checkpoints need."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_ddrp.checkpoint import TOKENIZER
from megatron_ddrp.config import Config, save_config
from megatron_ddrp.config.registry import plugin_files
from megatron_ddrp.data.atomic import make_folder, write_bytes
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError, refusals_as_user_errors, shared_error
from megatron_ddrp.parallel.process_group import Ranks, agree_on_long_work, gather_objects
from megatron_ddrp.parallel.rendezvous import wait_until
from megatron_ddrp.run.launch import forget_exit_code
from megatron_ddrp.run.metrics import store_level

LOCK = "lock"

PATIENCE = datetime.timedelta(minutes=1)
"""Time for which a host may not see a new file: NFS remembers that long that a name was not there."""

PLUGIN_FOLDER = "plugins"
"""Folder with copies of the files that `--plugin` loaded. They are a record; no command runs them."""


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[int]:
    """Hold DIR/lock, so that no second run writes there; yield its descriptor. The system frees a killed run's lock.

    Raises `UserError` with the holder's name if another run has it. File systems without locks are not protected.
    """
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            raise UserError(
                f"--save {folder} is being written by another run ({holder}): stop it, or give another --save"
            ) from None
        except OSError:
            pass
        if os.pread(descriptor, 5, 0).strip(b"\0") not in (b"", b"host "):  # a power cut may leave zeros
            raise UserError(f"{path} is not the lock of a run: move it away, or give another --save")
        os.truncate(descriptor, 0)
        os.write(descriptor, _holder())
        os.fsync(descriptor)  # NFS shows it to other hosts only then
        yield descriptor
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):  # nobody has replaced it
            path.unlink()
    finally:
        os.close(descriptor)


def _holder() -> bytes:
    return f"host {socket.gethostname()}, process {os.getpid()}\n".encode()


def find_unshared(folder: Path | None, resumes: bool, ranks: Ranks) -> list[str]:
    """Return a line that names the hosts that do not see rank 0's lock in the `--save` folder; a collective call.

    Raises `UserError` if the run also `resumes` from its folders: started with rank 0 on another host, the same command
    would find no checkpoint there and start afresh.
    """
    if folder is None or ranks.world_size == 1:
        return []
    path = folder / LOCK
    holder = gather_objects(_holder())[0]
    looks = ranks.first_on_host and ranks.rank > 0  # rank 0 would release its lock when it closed the file

    def sees() -> bool:
        with contextlib.suppress(OSError):
            return not looks or wait_until(lambda: path.read_bytes() == holder, PATIENCE, lambda: f"{path} of rank 0")
        return False

    found = gather_objects((socket.gethostname(), agree_on_long_work(sees)))
    hosts = ", ".join(sorted({host for host, there in found if not there}))
    line = (
        f"--save {folder} is not shared: host {hosts} does not see what rank 0 writes there, so --load would start "
        "afresh with rank 0 on another host: give a folder that all hosts share"
    )
    if hosts and resumes:
        raise shared_error(line)
    return [line] if hosts else []


class RunFolder:
    """The `--save` folder, locked by this process; a context manager. Only rank 0 has one."""

    def __init__(
        self, path: Path, config: Config, tokenizer: Tokenizer, unigram_loss: float, gap: float | None = None
    ) -> None:
        self.path, self._config, self._tokenizer, self._of_text = path, config, tokenizer, (unigram_loss, gap)
        self._plugins = [(path.name, path.read_bytes()) for path in sorted(plugin_files())]
        self.remarks: list[str] = []
        """Lines for the user about the folder."""
        self._held = contextlib.ExitStack()

    def __enter__(self) -> RunFolder:
        with refusals_as_user_errors(self.path, "give --save a folder that you can write to, on a disk with space"):
            make_folder(self.path)
            self._held.enter_context(sole_writer(self.path))
            forget_exit_code(self.path)
            save_config(self._config, self.path)
            store_level(self.path, *self._of_text)
            self._tokenizer.save(self.path / TOKENIZER)
            self._keep_plugins()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _keep_plugins(self) -> None:
        """Copy new or changed files that `--plugin` loaded, as a record."""
        folder, codes = self.path / PLUGIN_FOLDER, [code for _, code in self._plugins]
        for name, code in self._plugins:
            folder.mkdir(exist_ok=True)
            kept = {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}
            if code not in kept.values():
                names = [name, *(f"{Path(name).stem}-{number}.py" for number in range(2, len(kept) + 2))]
                copy = next(free for free in names if free not in kept)
                write_bytes(folder / copy, code)
                if any(kept.get(each, code) not in codes for each in names):  # no other plug-in of this name has it
                    said = f"--plugin {name}: changed since the run began; its new code is kept as"
                    self.remarks.append(f"{said} {PLUGIN_FOLDER}/{copy}")
