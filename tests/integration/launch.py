"""Start `pretrain_bert.py` for tests: its own processes, its own ports, its real engine, and files as the result.

A fork server holds the slow imports, so that a rank starts in milliseconds; each rank runs the script itself as
`__main__`, with the variables that a launcher would set. The real launchers have their own smoke tests. Other commands
can be started in the same way: `python` alone takes 2 to 8 s to import what they need.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron_ddrp.data.atomic import take_lock
from megatron_ddrp.data.points import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_bert.py"
TIMEOUT = 400.0
"""Seconds until a test gives up on its ranks, well before they would give up on each other (10 minutes)."""
GRACE = 20.0
"""Seconds for a process that is given up to write its stacks."""

Before, During = Callable[[], None], Callable[[list[Any]], None]
OF_THE_MACHINE = ("tokens_per_second", "step_time", "mfu", "peak_memory_gib")
"""Keys of metrics.jsonl that differ between two equal runs."""

PRELOADED = [
    *("tests.integration.before_the_imports", "torch._dynamo", "torch.utils.tensorboard", "numpy.ma", "tokenizers"),
    *("deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload.superoffload_stage3"),
    *("megatron_ddrp.train", "megatron_ddrp.arguments", "transformers.models.bert.modeling_bert"),
    *("megatron_ddrp.tasks.finetune.workers", "pytest", "tests.integration.launch", "tests.integration.conftest"),
    *("tests.integration.training_runs", "tests.integration.before_the_fork"),
]
"""What DeepSpeed, torch.optim and a test's own functions import on first use as well: without these, 2 s a rank."""


@dataclass(frozen=True)
class Result:
    """What ended processes leave."""

    exit_codes: list[int | None]
    """One a rank; None for a rank that had to be killed."""
    stdout: list[str]
    stderr: list[str]

    def check(self) -> Result:
        """This result, if every rank ended well."""
        assert set(self.exit_codes) == {0}, f"exit codes {self.exit_codes}\n" + "\n".join(self.stderr)
        return self


def start_ranks(
    arguments: Sequence[object],
    world_size: int | None = 1,
    before: Before | None = None,
    during: During | None = None,
    context: Any = None,
    program: str | Callable[[], object] = "pretrain_bert.py",
    timeout: float = TIMEOUT,
    last_arguments: Sequence[object] = (),
) -> Result:
    """Run `pretrain_bert.py ARGUMENTS` on some ranks; a `world_size` of None is one process that no launcher started.

    `before`, a module's function, runs first in each of them. `during` runs here meanwhile, with the ranks' processes,
    to do them harm. `context` starts the processes: by default the fork server, whose children see no GPU. `program` is
    another script of this repository, a module as `python -m` takes it, or a module's function. What runs after
    `timeout` seconds is killed. The last rank is given the `last_arguments` too, like a host with its own command.
    """
    context = context or fork_server()
    variables = [{}] if world_size is None else set_by_launcher(world_size)
    words = [[str(word) for word in arguments] for _ in variables]
    words[-1] += map(str, last_arguments)
    with tempfile.TemporaryDirectory() as folder:
        streams = [(Path(folder) / f"stdout{rank}", Path(folder) / f"stderr{rank}") for rank in range(len(variables))]
        ranks = [
            context.Process(target=_run, args=(program, *of_rank, before))
            for of_rank in zip(words, variables, streams, strict=True)
        ]
        exit_codes = exit_codes_of(ranks, timeout, during)
        stdout, stderr = (list(map(text_of, paths)) for paths in zip(*streams, strict=True))
    return Result(exit_codes, stdout, stderr)


def armed(points: str, rank: int | None = None, then: Before | None = None) -> Before:
    """Return what arms points of `megatron_ddrp/data/points.py` before a rank starts, on all ranks or one of them, and
    then calls `then`, a module's function."""
    return functools.partial(_arm, points, rank, then)


def _arm(points: str, rank: int | None, then: Before | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background, or by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if rank is None or os.environ["RANK"] == str(rank):
        os.environ[VARIABLE] = points
    if then:
        then()


class Hold:
    """Named pipe that holds the processes which come to a point of `hold:PIPE`, until it is released."""

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self.action = f"hold:{pipe}"
        self._stream = pipe.open("r+b", buffering=0)
        take_lock(self._stream.fileno())

    def next_process(self, *sentinels: int) -> int:
        """Wait for the next process to be held and return its number; fail if a process of the `sentinels` ends."""
        assert self._stream in wait([self._stream, *sentinels], TIMEOUT), "no process came to the point"
        return int(self._stream.readline())

    def release(self) -> None:
        """Let the processes continue; a fork of this process may have inherited the lock, so closing is not enough."""
        fcntl.flock(self._stream, fcntl.LOCK_UN)
        self._stream.close()


def exit_codes_of(processes: Sequence[Any], timeout: float, during: During | None = None) -> list[int | None]:
    """Start processes and wait for them together; None for one that had to be killed after `timeout` seconds.

    Such a one writes the stacks of its threads to standard error first.
    """
    for process in processes:
        process.start()  # the first waits for the fork server's imports
    began = time.monotonic()
    if during:
        during(list(processes))
    for process in processes:
        process.join(max(0.1, began + timeout - time.monotonic()))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGABRT)
            process.join(GRACE)
            process.kill()
            process.join()
    return exit_codes


def set_by_launcher(world_size: int) -> list[dict[str, str]]:
    """The environment variables of each rank, all on this host."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE"), str(world_size))
    return [{**dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), **sizes, **address} for rank in range(world_size)]


def text_of(path: Path) -> str:
    """Return what a process wrote into a file; nothing if it was killed before it began."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def fork_server(preloaded: Sequence[str] = PRELOADED) -> Any:
    """Where ranks are forked from, with the slow imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    with mock.patch.dict(os.environ, environment(), clear=True):  # its children see what it was started with
        multiprocessing.forkserver.ensure_running()
    return context


def _run(program: Any, words: list[str], variables: dict[str, str], streams: Any, before: Before | None) -> None:
    redirect_streams(*streams)
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    if before:
        before()
    if callable(program):
        program()
    else:
        be_program(program, words)


def be_program(program: str, words: Sequence[str]) -> None:
    """Run a script of this repository, or a module, as this process's program."""
    sys.argv = [str(ROOT / program), *words]
    if program.endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def redirect_streams(stdout: Path, stderr: Path, begin: int = os.O_TRUNC) -> None:
    """Send what this process writes, C++ libraries included, into files; a `begin` of 0 keeps their content."""
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | begin), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable()


def fork_jobs() -> None:
    """Let this process fork the jobs of a comparison and the workers of a sweep from the fork server.

    They are processes of their own, as a user's are, but need not import torch again. Tests that start them for real
    remain.
    """
    from megatron_ddrp.lab.compare import experiment
    from megatron_ddrp.tasks import jobs

    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # it is our parent
    experiment.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedJob})  # type: ignore[attr-defined]
    jobs.SPAWN = SimpleNamespace(Process=_forked_worker)  # type: ignore[assignment]


class ForkedJob:
    """Stands for a `subprocess.Popen` of `python -m MODULE WORDS`, as far as `Runner` needs one."""

    def __init__(self, command: Sequence[str], stdout: Any, env: dict[str, str], **_: Any) -> None:
        _python, _dash_m, module, *words = command
        streams = [Path(stdout.name)] * 2
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_work, args=(env, streams, be_program, (module, words))
        )
        self._process.start()
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a job", timeout or 0.0)


def _forked_worker(target: Callable[..., None], args: tuple[Any, ...], **named: Any) -> Any:
    streams = [Path(f"/proc/self/fd/{number}").readlink() for number in (1, 2)]
    return multiprocessing.get_context("forkserver").Process(
        target=_work, args=(dict(os.environ), streams, target, args), **named
    )


def _work(variables: dict[str, str], streams: list[Path], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    redirect_streams(*streams, begin=0)
    os.environ.update(variables)
    target(*args)


def run_command(command: Sequence[object], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a user would, from another folder than the project's."""
    words = [str(word) for word in command]
    surroundings = environment() | variables
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, env=surroundings, cwd=folder)


def environment() -> dict[str, str]:
    """Ours, without what a launcher above us may have set; on the CPU, one thread a rank."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE"}
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | own | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def lines(text: str) -> list[str]:
    """Standard error, without what gloo's own threads print."""
    return [line for line in text.splitlines() if not line.startswith("[")]


def free_port() -> int:
    """A port that nobody listens on now, and that Linux gives to nobody who asks for any port (those from 32768)."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def json_file(path: Path, content: Any) -> Path:
    """Write a file of JSON, one line per row of a list, and return its path."""
    rows = content if isinstance(content, list) else [content]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of DIR/metrics.jsonl."""
    return json_lines(folder / "metrics.jsonl")


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of training steps of DIR/metrics.jsonl."""
    return steps_of(read_rows(folder))


def steps_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of training steps, without what depends on the clock."""
    return without_times(row for row in rows if "loss" in row)


def without_times(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in OF_THE_MACHINE} for row in rows]
