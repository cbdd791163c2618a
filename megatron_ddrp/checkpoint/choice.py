"""Choice of a checkpoint: the newest whole one. Every reader chooses here, so none of them reads a damaged one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from megatron_ddrp.checkpoint.folder import WEIGHTS, candidates, is_checkpoint
from megatron_ddrp.checkpoint.other_folders import look_inside
from megatron_ddrp.checkpoint.state import read_state
from megatron_ddrp.config.registry import NotRegistered
from megatron_ddrp.data.sealed import file_fault
from megatron_ddrp.errors import UserError

MODEL, OPTIMIZER, BESIDE = "weights", "optimizer", "beside"
"""Prefixes of file names: the model, the optimizer's moments, and other training state."""


def to_standard_error(line: str) -> None:
    """Print a notice for the user of a command to standard error."""
    print(line, file=sys.stderr, flush=True)


def choose_checkpoint(
    load: Path, kinds: Collection[str] = (MODEL,), tell: Callable[[str], object] = to_standard_error
) -> Path:
    """Return the checkpoint that `--load` means: the newest whole one of a folder, or the one that it names.

    The files of `kinds`, which the caller will read, are checked against their sums. Raise `UserError` if no checkpoint
    is whole, or if the named one is not.
    """
    if is_checkpoint(load):
        if reason := fault(load, kinds):
            raise UserError(f"--load {load}: {reason}; give another checkpoint")
        return load
    for path in whole_checkpoints(load, kinds, tell):
        return path
    wrote = "expected a folder that megatron-ddrp pretrain --save wrote"
    raise UserError(f"--load {load} holds no checkpoint: {look_inside(load) or wrote}")


def whole_checkpoints(
    folder: Path, kinds: Collection[str] = (MODEL,), tell: Callable[[str], object] = to_standard_error
) -> Iterator[Path]:
    """Yield the whole checkpoints of a `--save` folder, newest first; call `tell` with a line on each damaged one.

    Before a checkpoint is yielded, its files of `kinds` are checked against their sums. Raise `UserError` if there are
    checkpoints and none of them is whole.
    """
    found, remarks = candidates(folder)
    untold, reasons = list(remarks), []
    for path in found:
        reason = fault(path, kinds)
        if reason is not None:
            reasons.append(f"{path.name}: {reason}")
            untold.append(f"skipped {folder / reasons[-1]}")
            continue
        while untold:
            tell(untold.pop(0))
        yield path
    if found and len(reasons) == len(found):
        raise none_complete(folder, reasons)
    for line in untold:
        tell(line)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a `--save` folder whose files have the right sizes, or None without one."""
    return next(whole_checkpoints(folder, (), tell=lambda _: None), None)


def none_complete(folder: Path, reasons: list[str]) -> UserError:
    """Return the error for a folder whose checkpoints are all damaged."""
    return UserError(
        f"{folder} holds no complete checkpoint ({'; '.join(reasons)}): copy it again, or start in another --save"
    )


def fault(path: Path, kinds: Collection[str] = (), part: int = 0, parts: int = 1) -> str | None:
    """Return the reason why a checkpoint cannot be used, or None. All its files must exist in the right sizes.

    The files of `kinds` are checked against their sums: every `parts`-th of them, from number `part` on, so that ranks
    can share the reading. Raise `NotRegistered` if a plug-in is missing.
    """
    if not path.is_dir():
        return "missing or incomplete"
    try:
        written = read_state(path)["files"]
        to_read = [name for name in sorted(written) if kind_of(name) in kinds][part::parts]
        checks = [(name, False) for name in sorted(written)] + [(name, True) for name in to_read]
        return next(filter(None, (file_fault(path / name, written[name], read) for name, read in checks)), None)
    except NotRegistered:  # the checkpoint is not at fault
        raise
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"


def kind_of(file: str) -> str:
    """Return the kind of a checkpoint's file by its name: `MODEL`, `OPTIMIZER` or `BESIDE`."""
    return MODEL if file == WEIGHTS else file.partition("-")[0]
