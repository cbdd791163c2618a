"""Pre-train a BERT-class encoder: parse → build → train. `megatron-ddrp pretrain --help` lists the flags."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_ddrp.arguments import Arguments, Invocation, parse_arguments
from megatron_ddrp.commands import PROGRAM
from megatron_ddrp.config import concerns
from megatron_ddrp.errors import allocations_as_user_errors
from megatron_ddrp.run.launch import StopRequests, first_rank_speaks, is_launched

SECTIONS = (Invocation, *concerns().values())


def read_arguments(words: Sequence[str] | None = None) -> Arguments:
    """Parse a command line, and let rank 0 print what there is to say about it."""
    with first_rank_speaks():
        arguments = parse_arguments(words)
        for line in arguments.remarks:
            with contextlib.suppress(OSError):  # without a reader, the log's first line decides what becomes of the run
                print(line, flush=True)
    return arguments


def rehearse(arguments: Arguments) -> None:
    """Do a dry run."""
    from megatron_ddrp.commands.dry_run import dry_run

    with allocations_as_user_errors():
        dry_run(arguments.config, arguments.world_size, arguments.device_memory)


def main(words: Sequence[str] | None = None) -> int:
    arguments = read_arguments(words)
    if arguments.dry_run:
        rehearse(arguments)
        return 0
    requests = StopRequests(arguments.config.checkpoint.exit_duration_in_mins, alone=not is_launched()).heed()
    from megatron_ddrp.checkpoint import newest
    from megatron_ddrp.parallel import process_group
    from megatron_ddrp.parallel.process_group import lost_rank_in_one_line, print_shared_errors_once
    from megatron_ddrp.train import train

    with print_shared_errors_once(), lost_rank_in_one_line(), allocations_as_user_errors():
        code = train(arguments.config, requests=requests).code
        process_group.stop()
    save = arguments.config.checkpoint.save
    if code == 0 and save and words is None and newest(Path(save)):
        run = shlex.quote(save)
        with first_rank_speaks():
            print(f"next: {PROGRAM} report --load {run} --output-dir {run}/report", flush=True)
            print(f"or use it: {PROGRAM} convert --load {run} --output {run}_hf; finetune and glue take --load too")
    return code
