"""The process of a run: one of a launcher (`deepspeed`, `torchrun`, `srun`), or a guest in somebody's process.

This module does not import torch, so that a wrong argument is refused at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np

from megatron_ddrp.config.registry import plugins_forgotten_after
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.errors import FAILURE, UserError, run_command


def launched_world_size() -> int:
    """Return the number of ranks that the launcher announced; 1 without a launcher.

    Under Slurm the tasks of srun's step count. Those of the job without srun, and those of mpirun, count only where
    MASTER_ADDR says that they meet: otherwise, as in the shell of `salloc`, a process trains alone
    (`parallel/rendezvous.py`).
    """
    meeting = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return _number("WORLD_SIZE", *(meeting if os.environ.get("MASTER_ADDR") else meeting[1:2]), default=1)


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
    """Return whether this process is rank 0, or has a rank that is no number, which a command refuses later.

    All of mpirun's say yes until they have met: it kills the others, rank 0 too, as soon as one has ended.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return not rank.isdecimal() or int(rank) == 0


def is_launched() -> bool:
    """Return whether a launcher started this process as a rank, before `process_group.start` sets the variables.

    Slurm's variables alone do not say so: a batch script and an interactive shell of one task have them too.
    """
    return "RANK" in os.environ or launched_world_size() > 1


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

    An error that every rank of a host raises alike, before the ranks meet, is printed once per host, whose command may
    be its own.
    """

    def silent_beside_the_first() -> object:
        try:
            return main()
        except UserError as error:
            local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID")  # else rank 0 is the first
            if not error.agreed or (local_rank == "0" if local_rank else _speaks()):
                raise
            sys.exit(error.exit_code)

    with exit_without_teardown():
        run_command(silent_beside_the_first)


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


EXIT_CODE = "exit_code"
OUT_OF_TIME = 1000
"""Code of the time limit, larger than every signal's number."""
BY_CALLBACK = 1001
"""Code of a callback that raises `StopTraining`."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class StopRequests:
    """Requests to stop this rank early, by a signal or the clock.

    After SIGTERM, SIGUSR1 (`scancel`, a batch system's warning, `kill`), SIGHUP (a closed terminal) or SIGINT (Ctrl-C)
    the current step finishes; on GPUs the next one too, which is already launched. Then all ranks save and exit with
    `ASKED_TO_STOP`, whichever of them got the signal. The signals are handled from the command's start, so that one
    before the first step ends the run there, until the process ends: a late one, such as a launcher's SIGTERM after the
    first rank has ended, must not kill a rank that still writes its last files or change its exit code.

    A second SIGINT ends a process at once, unless a launcher started it: launchers forward the terminal's SIGINT, so
    one Ctrl-C can reach a rank twice, and they kill ranks that do not end. A process that was started with SIGINT
    ignored, as shells start background jobs of scripts, keeps ignoring it; SIGTERM stops it. So does one that `nohup`
    started, SIGHUP.
    """

    def __init__(self, minutes: float | None, alone: bool = False) -> None:
        """Set the time limit to `minutes` from now; None = no limit.

        `alone` is True if no launcher started this process; a second SIGINT then ends it.
        """
        self.alone = alone
        self.deadline = time.monotonic() + 60 * minutes if minutes else None
        self.received = 0

    def heed(self) -> StopRequests:
        """Handle the signals from now on, until the process ends; return this object."""
        for number in SIGNALS:
            if number not in (signal.SIGINT, signal.SIGHUP) or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.alone and number == signal.SIGINT:
            if self.received == number:
                raise KeyboardInterrupt
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"SIGINT: stopping after this step; once more ends at once, without saving\n")
        self.received = number

    @property
    def code(self) -> int:
        """Code of the request: 0 without one, a signal's number, `BY_CALLBACK` or `OUT_OF_TIME`.

        All ranks follow the largest.
        """
        out_of_time = self.deadline is not None and time.monotonic() >= self.deadline
        return self.received or OUT_OF_TIME * out_of_time


def name_of(code: int) -> str:
    """Return the name of the signal, flag or callback that stopped this run."""
    named = {OUT_OF_TIME: "--exit-duration-in-mins", BY_CALLBACK: "a callback"}
    return named.get(code) or signal.Signals(code).name


def note_exit_code(folder: Path, code: int) -> None:
    """Write DIR/exit_code, for launchers that turn every exit code but 0 into 1."""
    write_text(folder / EXIT_CODE, f"{code}\n")


def forget_exit_code(folder: Path) -> None:
    """Remove DIR/exit_code when a run begins, so that a failed run leaves none."""
    (folder / EXIT_CODE).unlink(missing_ok=True)


@contextmanager
def guest() -> Iterator[None]:
    """Leave the process as it was: environment, plug-ins, random numbers, signals, process groups, matplotlib, torch.

    The ranks of a launcher stay in their process group until their process ends: they can meet only once.

    A command in a process of its own needs none of this. docs/python.md says what cannot be set back.

    Raises:
        UserError: this is not the main thread, the only one that may handle signals, or another library has a process
            group in this process.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError("this thread cannot handle signals: call the function from the main thread")
    alone = not is_launched()
    with plugins_forgotten_after(), ExitStack() as stack:
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        for number in SIGNALS:
            stack.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # torch replaces it for its process groups
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(warnings.catch_warnings())
        for name in ("DeepSpeed", "deepspeed"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
        _keep_matplotlib(stack)
        _keep_torch(stack, alone)
        yield


def _keep_matplotlib(stack: ExitStack) -> None:
    """Let a stack set matplotlib's settings back, without its import, which many commands do not need."""
    if loaded := sys.modules.get("matplotlib"):
        stack.enter_context(loaded.rc_context())
    else:
        stack.callback(lambda: "matplotlib" in sys.modules and sys.modules["matplotlib"].rc_file_defaults())


def _keep_torch(stack: ExitStack, alone: bool) -> None:
    """Let a stack set torch's state back, and leave the process group of a process that runs `alone`."""
    import torch

    from megatron_ddrp.engine.build import leave_groups
    from megatron_ddrp.parallel import process_group

    if alone and process_group.is_joined():
        raise UserError("this process already has a process group: end the other library's distributed run first")
    stack.enter_context(torch.random.fork_rng())
    stack.callback(setattr, torch.nn.functional, "linear", torch.nn.functional.linear)  # ZeRO 3 replaces it
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        stack.callback(setattr, process_group.DEFAULTS, name, getattr(process_group.DEFAULTS, name))
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    mode, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(torch.use_deterministic_algorithms, mode, warn_only=warns)
    if alone:
        stack.callback(leave_groups)
