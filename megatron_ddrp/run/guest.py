"""A command as a guest in somebody's process: what it sets for the whole process is set back at its end.

A command of its own process needs none of this. What cannot be set back is docs/python.md's to say.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from megatron_ddrp.config.registry import plugins_forgotten_after
from megatron_ddrp.errors import UserError
from megatron_ddrp.run.launch import SIGNALS, is_launched


@contextmanager
def guest() -> Iterator[None]:
    """Leave the process as it was: environment, plug-ins, random numbers, signals, process groups, matplotlib, torch.

    The ranks of a launcher stay in their process group until their process ends: they can meet only once.

    Raises:
        UserError: this is not the main thread, the only one that may handle signals, or another library has a process
            group in this process.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError("this thread cannot handle signals: call the function from the main thread")
    alone = not is_launched()
    with plugins_forgotten_after(), ExitStack() as stack:
        stack.callback(_restore_environment, dict(os.environ))
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


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


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
