"""Everything that this package does, as one command: `megatron-ddrp COMMAND …`.

`python -m megatron_ddrp COMMAND …` does the same, `deepspeed --module megatron_ddrp COMMAND …` on several ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from megatron_ddrp import __version__
from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.errors import run_command
from megatron_ddrp.run.launch import first_rank_speaks, run_rank

PROGRAM = "megatron-ddrp"
LOCAL_RANK = ("--local_rank=", "--local-rank=")
"""Words that the launchers of DeepSpeed and of older torch put in front of all others."""


class Command(NamedTuple):
    """A command, its module, whose `main` runs it, and a line for the list of commands."""

    module: str
    summary: str
    on_ranks: bool = False
    """A launcher may start several ranks of this command."""


COMMANDS = {
    "pretrain": Command("megatron_ddrp.commands.pretrain", "pre-train an encoder, on one process or many ranks", True),
    "preprocess": Command("megatron_ddrp.commands.preprocess", "turn text into an indexed dataset"),
    "train-tokenizer": Command("megatron_ddrp.commands.train_tokenizer", "learn a vocabulary from text"),
    "dataset": Command("megatron_ddrp.commands.dataset", "inspect, verify, merge or shuffle indexed datasets"),
    "convert": Command("megatron_ddrp.commands.convert", "convert a checkpoint to a Hugging Face folder, or back"),
    "analyze": Command("megatron_ddrp.commands.analyze", "look inside encoders: attention, hidden states, speed"),
    "report": Command("megatron_ddrp.commands.report", "write a short report of a run, with its curves"),
    "glue": Command("megatron_ddrp.tasks.glue.command", "fine-tune encoders on GLUE over a grid and seeds", True),
    "finetune": Command("megatron_ddrp.tasks.finetune.command", "fine-tune encoders on your own tasks", True),
    "minimal-pairs": Command(
        "megatron_ddrp.tasks.minimal_pairs.command", "score masked language models without fine-tuning"
    ),
    "compare": Command("megatron_ddrp.tasks.compare.command", "train and score a plan's models, write one page"),
    "ladder": Command("megatron_ddrp.tasks.compare.ladder", "earlier name of compare ROWS.jsonl"),
}


def run(name: str, program: str | None = None) -> NoReturn:
    """Run one command on this process's arguments and end the process.

    `program` stands in front of messages; by default the running script's name does.
    """
    command = COMMANDS[name]
    sys.argv[0] = program or os.path.basename(sys.argv[0])
    (run_rank if command.on_ranks else run_command)(lambda: _main_of(command)())


def _main_of(command: Command) -> Callable[[], object]:
    return importlib.import_module(command.module).main


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
