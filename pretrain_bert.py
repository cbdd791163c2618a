#!/usr/bin/env python3
"""Pre-train a BERT-class encoder: parse → build → train. See `python pretrain_bert.py --help`."""

from __future__ import annotations

import sys

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.errors import UserError, run_command
from megatron_ddrp.launch import first_rank_speaks, launched_rank


def main() -> int:
    with first_rank_speaks():
        arguments = parse_arguments()
    if arguments.dry_run:
        from megatron_ddrp.dry_run import dry_run

        dry_run(arguments.config, arguments.world_size, arguments.device_memory)
        return 0
    from megatron_ddrp.parallel.process_group import lost_rank_in_one_line
    from megatron_ddrp.train import train

    with lost_rank_in_one_line():
        return train(arguments.config)


def main_of_rank() -> int:
    """`main`, with an error that every rank raises alike told once, by rank 0."""
    try:
        return main()
    except UserError as error:
        if launched_rank() == 0 or not error.agreed:
            raise
        sys.exit(error.exit_code)


if __name__ == "__main__":
    run_command(main_of_rank)
