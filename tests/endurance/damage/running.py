"""Commands run in processes that are forked with the slow imports done: a case costs its own work alone."""

from __future__ import annotations

import multiprocessing.connection
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.launch import PRELOADED, ROOT, fork_server, redirect_streams

LIMIT = 120.0
"""Seconds after which a command counts as hanging: a hundred times what the slowest of them takes."""

MORE_PRELOADED = [
    "transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "matplotlib.pyplot",
    "scipy.stats",
    "megatron_ddrp.lab.analysis.reports",
    "megatron_ddrp.conversion.from_huggingface",
    "megatron_ddrp.conversion.to_huggingface",
    "megatron_ddrp.data.preprocess.pipeline",
    "megatron_ddrp.tasks.finetune.figure",
    "megatron_ddrp.tasks.finetune.workers",
    "megatron_ddrp.tasks.finetune.workers",
    "tests.endurance.damage.running",
]
CHUNK_BYTES = 1 << 13
"""Size of preprocessing's chunks here, so that a small text has several."""


class Command(NamedTuple):
    """Words as in `Reader.words`, the folder to run in, and files for the two streams."""

    words: tuple[str, ...]
    folder: Path
    stdout: Path
    stderr: Path


class Ended(NamedTuple):
    """What an ended command leaves beside its files; the exit code is None where it had to be killed."""

    exit_code: int | None
    stdout: str
    stderr: str


def run_all(commands: Iterable[tuple[Any, Command]], workers: int) -> Iterator[tuple[Any, Ended]]:
    """Run some commands at a time; yield (label, how it ended) in the order in which they end."""
    context = fork_server([*PRELOADED, *MORE_PRELOADED])
    waiting, running = iter(commands), {}
    while True:
        while len(running) < workers and (item := next(waiting, None)) is not None:
            label, command = item
            process = context.Process(target=_perform, args=(command,))
            process.start()
            running[process] = label, command, time.monotonic() + LIMIT
        if not running:
            return
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=1.0)
        for process, (label, command, deadline) in list(running.items()):
            late = process.is_alive() and time.monotonic() > deadline
            if late:
                os.killpg(process.pid, signal.SIGKILL)
            if late or not process.is_alive():
                process.join()
                del running[process]
                yield label, Ended(None if late else process.exitcode, _text(command.stdout), _text(command.stderr))


def run_one(command: Command) -> Ended:
    """Run one command to its end."""
    return next(run_all([(None, command)], 1))[1]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _perform(command: Command) -> None:
    """Be the command, from here to the end of this process."""
    os.setsid()
    redirect_streams(command.stdout, command.stderr)
    os.chdir(command.folder)
    import torch
    import tqdm

    from megatron_ddrp.data.preprocess import pipeline as preprocess

    torch.set_num_threads(1)
    tqdm.tqdm.set_lock(threading.RLock())  # its own holds a semaphore that nobody frees when this process exits
    preprocess.CHUNK_BYTES = CHUNK_BYTES
    script, *words = command.words
    if script == "-m":
        module, *words = words
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(ROOT / script), *words]
        runpy.run_path(sys.argv[0], run_name="__main__")
