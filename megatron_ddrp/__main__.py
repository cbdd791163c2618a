"""Everything that this package does, as one command: `megatron-ddrp COMMAND …`.

`python -m megatron_ddrp COMMAND …` does the same, `deepspeed --module megatron_ddrp COMMAND …` on several ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from typing import NoReturn

from megatron_ddrp import __version__
from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.commands import COMMANDS, PROGRAM
from megatron_ddrp.errors import run_command
from megatron_ddrp.run.launch import first_rank_speaks, run_rank

LOCAL_RANK = ("--local_rank=", "--local-rank=")
"""Words that the launchers of DeepSpeed and of older torch put in front of all others."""

BUSY = 1.5
"""Running processes per core, over the last minute, above which a machine is busy."""


def sleep_while_waiting() -> None:
    """Let threads that wait for others sleep if the machine is busy, unless the environment says how they wait.

    OpenMP reads its settings when torch is imported. By default a waiting thread spins, which is fastest while each has
    a core of its own; beside other work it keeps the thread that it waits for off its core.
    """
    if os.getloadavg()[0] > BUSY * (os.cpu_count() or 1) and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


M_ARENA_MAX = -8
"""glibc's number for `mallopt(3)`."""


def share_one_heap() -> None:
    """Let all threads allocate from one heap, before the first thread; without effect if malloc is not glibc's.

    Memory that the backward pass's thread freed in a heap of its own would serve no other thread, and a run on a CPU
    would grow while its tensors change their sizes (measured in docs/lab/measurements.md). The variable tells this
    process's `prepare_cpu`, and the processes that it starts.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
        os.environ["MALLOC_ARENA_MAX"] = "1"


def run(name: str, program: str | None = None) -> NoReturn:
    """Run one command on this process's arguments and end the process.

    `program` stands in front of messages; by default the running script's name does.
    """
    sleep_while_waiting()
    share_one_heap()
    command = COMMANDS[name]
    sys.argv[0] = program or os.path.basename(sys.argv[0])
    (run_rank if command.on_ranks else run_command)(lambda: importlib.import_module(command.module).main())


def main() -> NoReturn:
    """Run the command that the first argument names."""
    run_command(_run_named, PROGRAM)


def _run_named() -> NoReturn:
    words = sys.argv[1:]
    launchers = [word for word in words[:1] if word.startswith(LOCAL_RANK)]
    words = words[len(launchers) :]
    with first_rank_speaks():
        name = build_parser().parse_args(words[:1]).command
    sys.argv[1:] = launchers * COMMANDS[name].on_ranks + words[1:]
    run(name, f"{PROGRAM} {name}")


def build_parser() -> ArgumentParser:
    """Return the parser of the command's name."""
    width = max(map(len, COMMANDS))
    summaries = "\n".join(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [flags]",
        description="Pre-train, score and share BERT-class encoders.",
        epilog=f"commands:\n{summaries}\n\n`{PROGRAM} COMMAND --help` shows the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="one of the commands below")
    return parser


if __name__ == "__main__":
    main()
