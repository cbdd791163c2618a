"""Command line of `megatron-ddrp ladder`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser

DESCRIPTION = """Show whether the claims of the DDRP+MTH paper hold as the budget grows.

The command reads the rows that `megatron-ddrp compare` writes, one JSON line per run, and nothing else. It writes
DIR/page.md, DIR/page.html (one self-contained file), DIR/results.json and DIR/figures/*.png. Rows of several files make
one ladder; a later row of a run replaces an earlier one.

  one page        megatron-ddrp ladder OUT/rows.jsonl --output-dir DIR
  tables of docs  megatron-ddrp ladder OUT/rows.jsonl --output-dir DIR --tables docs/results.md
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    parser = ArgumentParser(description=DESCRIPTION)
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS.jsonl", help="rows of finished runs")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="folder for the page")
    parser.add_argument(
        "--tables",
        type=Path,
        metavar="FILE.md",
        help="replace each block of this file between `<!-- ladder NAME -->` and `<!-- end of ladder NAME -->` by the "
        "table NAME of the page",
    )
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    return build_parser().parse_args(arguments)
