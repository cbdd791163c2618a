"""Which checkpoint is taken: the newest whole one. Every reader chooses here, so that none of them reads damage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from megatron_ddrp.checkpoint.folder import WEIGHTS, candidates, is_checkpoint
from megatron_ddrp.checkpoint.state import read_state
from megatron_ddrp.checkpoint.tensor_files import damage
from megatron_ddrp.config.registry import NotRegistered
from megatron_ddrp.errors import UserError

MODEL, OPTIMIZER, BESIDE = "weights", "optimizer", "beside"
"""Beginnings of file names: the model, Adam's moments, and what a run keeps beside the model."""


def to_standard_error(line: str) -> None:
    """Print a notice for the user of a command."""
    print(line, file=sys.stderr, flush=True)


def choose_checkpoint(
    load: Path, kinds: Collection[str] = (MODEL,), tell: Callable[[str], object] = to_standard_error
) -> Path:
    """Return the checkpoint that a reader's `--load` stands for: the newest whole one of a folder, or the one it names.

    The files of `kinds`, which the reader is about to read, are checked by their sums. Raises `UserError` where none
    is whole, or where the one that was named is not.
    """
    if is_checkpoint(load):
        if reason := fault(load, kinds):
            raise UserError(f"--load {load}: {reason}; give another checkpoint")
        return load
    for path in whole_checkpoints(load, kinds, tell):
        return path
    raise UserError(f"--load {load} holds no checkpoint: expected a folder that pretrain_bert.py --save wrote")


def whole_checkpoints(
    folder: Path, kinds: Collection[str] = (MODEL,), tell: Callable[[str], object] = to_standard_error
) -> Iterator[Path]:
    """Yield the checkpoints of a `--save` folder that are whole, the newest first; `tell` of those that are not.

    The files of `kinds` are read for their sums as each checkpoint's turn comes. Raises `UserError` where there are
    checkpoints and none of them is whole.
    """
    found, remarks = candidates(folder)
    untold, reasons = list(remarks), []
    for path in found:
        reason = fault(path, kinds)
        if reason is not None:
            reasons.append(f"{path.name}: {reason}")
            untold.append(f"passed over {folder / reasons[-1]}")
            continue
        while untold:
            tell(untold.pop(0))
        yield path
    if found and len(reasons) == len(found):
        raise none_complete(folder, reasons)
    for line in untold:
        tell(line)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a `--save` folder whose files have their sizes; None where there is none."""
    return next(whole_checkpoints(folder, (), tell=lambda _: None), None)


def none_complete(folder: Path, reasons: list[str]) -> UserError:
    """Return the error of a folder all of whose checkpoints are damaged."""
    return UserError(
        f"{folder} holds no complete checkpoint ({'; '.join(reasons)}): copy it again, or start in another --save"
    )


def fault(path: Path, kinds: Collection[str] = (), part: int = 0, parts: int = 1) -> str | None:
    """Return why a checkpoint cannot be used, or None. All its files must be there in their sizes.

    Raises `UnknownName` where a plug-in is missing.

    The files of `kinds` are read for their sums; of these files, every `parts`-th from number `part` on, so that ranks
    can share the reading.
    """
    if not path.is_dir():
        return "missing or incomplete"
    try:
        written = read_state(path).get("files")
        if written is None:  # an older version wrote it
            return None if (path / WEIGHTS).is_file() else f"{WEIGHTS} is missing"
        to_read = [name for name in sorted(written) if kind_of(name) in kinds][part::parts]
        checks = [(name, False) for name in sorted(written)] + [(name, True) for name in to_read]
        return next(filter(None, (damage(path / name, written[name], read) for name, read in checks)), None)
    except NotRegistered:  # no fault of the checkpoint's
        raise
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"


def kind_of(file: str) -> str:
    """Return `MODEL`, `OPTIMIZER` or `BESIDE`: what a file of a checkpoint holds, by its name."""
    return MODEL if file == WEIGHTS else file.partition("-")[0]
