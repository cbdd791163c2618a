#!/usr/bin/env python
"""Look inside pre-trained models: what the paper's figures 2, 3a and 4 and its Algorithm 1 show, for your runs.

    python tools/analyze.py self-similarity --load runs/mlm runs/mth --data-path corpus_text_document --output f.png
    python tools/analyze.py attention-maps --load run --data-path corpus_text_document --output maps.png
    python tools/analyze.py triangle --load runs/ddrp runs/bert_r --data-path corpus_text_document --output share.png
    python tools/analyze.py notes --load run --data-path corpus_text_document

Figures have the numbers beside them as JSON; `analyze.py COMMAND --help` tells more.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.analysis.commands import COMMANDS
from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.errors import run_command


def build_parser() -> ArgumentParser:
    """The subcommands with their flags."""
    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(command.name, help=command.summary, description=command.description)
        command.add_arguments(added)
    return parser


def main() -> object:
    arguments = build_parser().parse_args()
    return next(command for command in COMMANDS if command.name == arguments.command).run(arguments)


if __name__ == "__main__":
    run_command(main)
