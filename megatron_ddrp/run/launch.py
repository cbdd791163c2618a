"""One process of a launcher (`deepspeed`, `torchrun`, `srun`): its rank, what it prints, how it ends.

Nothing here imports torch, so that a wrong argument is refused at once.
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
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)


def launched_rank() -> int:
    """Return this process's rank as the launcher announced it; 0 without a launcher."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def is_launched() -> bool:
    """Return whether a launcher started this process; ask before `process_group.start` fills the variables in."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


@contextlib.contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Let rank 0 alone print inside the block, where all ranks would print the same, such as a wrong argument."""
    if launched_rank() == 0:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def run_rank(main: Callable[[], object], program: str | None = None) -> NoReturn:
    """Run a command's `main` on one of several ranks and end the process as `run_command` does.

    An error that every rank raises alike is printed once, by rank 0.
    """

    def silent_beside_rank_0() -> object:
        try:
            return main()
        except UserError as error:
            if launched_rank() == 0 or not error.agreed:
                raise
            sys.exit(error.exit_code)

    with exit_without_teardown():
        run_command(silent_beside_rank_0, program)


@contextlib.contextmanager
def exit_without_teardown() -> Iterator[NoReturn]:
    """End the process with the exit code or the traceback that the block ends with, without Python's teardown.

    Teardown destroys the process groups while their threads may still release the tensors of the last call. Python ends
    a thread that asks for the interpreter then, in the middle of C++ code, and the process aborts: `terminate called
    without an active exception`. Where another rank is gone or stuck, teardown waits for it as well.
    """
    code: object = 0
    try:
        yield  # type: ignore[misc]
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = FAILURE
    with contextlib.suppress(OSError):  # the reader of our output left
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else FAILURE)
