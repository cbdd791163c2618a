"""One process of a launcher (`deepspeed`, `torchrun`, `srun`): its rank, its output and its end.

This module does not import torch, so that a wrong argument is refused at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from megatron_ddrp.errors import FAILURE, UserError, run_command


def launched_world_size() -> int:
    """Return the number of ranks that the launcher announced; 1 without a launcher."""
    return _number("WORLD_SIZE", "SLURM_NTASKS", default=1)


def launched_rank() -> int:
    """Return this process's rank as the launcher announced it; 0 without a launcher."""
    return _number("RANK", "SLURM_PROCID", default=0)


def _number(*names: str, default: int) -> int:
    """Return the value of the first variable that is set and not empty."""
    for name in names:
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise UserError(f"{name} is {value!r}, not a number: let deepspeed or torchrun set it")
            return int(value)
    return default


def _speaks() -> bool:
    """Return whether this process is rank 0, or has a rank that is no number, which a command refuses later."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return not rank.isdecimal() or int(rank) == 0


def is_launched() -> bool:
    """Return whether a launcher started this process; call it before `process_group.start` sets the variables."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


@contextlib.contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Let only rank 0 print inside the block, for lines that all ranks would print, such as a wrong argument."""
    if _speaks():
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8", errors="backslashreplace") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def run_rank(main: Callable[[], object]) -> NoReturn:
    """Run a command's `main` on one of several ranks and end the process as `run_command` does.

    An error that every rank raises alike is printed once, by rank 0.
    """

    def silent_beside_rank_0() -> object:
        try:
            return main()
        except UserError as error:
            if _speaks() or not error.agreed:
                raise
            sys.exit(error.exit_code)

    with exit_without_teardown():
        run_command(silent_beside_rank_0)


@contextlib.contextmanager
def exit_without_teardown() -> Iterator[NoReturn]:
    """End the process with the block's exit code or traceback, but without Python's teardown.

    Teardown destroys the process groups while their threads may still release the tensors of the last call. Python then
    ends a thread that needs the interpreter in the middle of C++ code, and the process aborts: `terminate called
    without an active exception`. If another rank is gone or stuck, teardown also waits for it.
    """
    code: object = 0
    try:
        yield  # type: ignore[misc]
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = FAILURE
    with contextlib.suppress(OSError):  # the reader of our output is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else FAILURE)
