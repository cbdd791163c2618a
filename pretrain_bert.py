#!/usr/bin/env python3
"""Pre-train a BERT-class encoder: parse → build → train. See `python pretrain_bert.py --help`."""

from __future__ import annotations


from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.errors import run_command


def main() -> None:
    arguments = parse_arguments()
    if arguments.dry_run:
        from megatron_ddrp.dry_run import dry_run

        dry_run(arguments.config)
        return
    from megatron_ddrp.train import train

    train(arguments.config)


if __name__ == "__main__":
    run_command(main)
