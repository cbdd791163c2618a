#!/usr/bin/env python
"""Look into a trained run: each analysis reads a checkpoint and, where it needs text, a preprocessed dataset.

python tools/analyze.py notes --load run --data-path corpus_text_document
python tools/analyze.py notes --load run --words perth syntax --neighbours 5 --output notes.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.errors import run_command


def build_parser() -> ArgumentParser:
    """One subcommand an analysis."""
    parser = ArgumentParser(description=__doc__)
    analyses = parser.add_subparsers(title="analyses", metavar="ANALYSIS", required=True)
    notes = analyses.add_parser("notes", help="the note dictionary of a run with --notes", description=NOTES)
    notes.set_defaults(run=run_notes)
    source = notes.add_argument_group("input")
    source.add_argument(
        "--load", type=Path, required=True, metavar="DIR", help="a --save folder, or one DIR/iter_N in it"
    )
    source.add_argument("--data-path", metavar="P", help="dataset whose sentences are searched for rare words")
    source.add_argument("--documents", type=int, default=5000, metavar="N", help="how many documents of it")
    asked = notes.add_argument_group("nearest notes")
    asked.add_argument(
        "--words", nargs="+", default=[], metavar="WORD", help="rare words (default: five frequent ones)"
    )
    asked.add_argument("--neighbours", type=int, default=5, metavar="N", help="nearest notes of each")
    output = notes.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FILE.json", help="also write the numbers as JSON")
    return parser


NOTES = """\
How many rare words a run knows, how many of them it has a note of, the share of sentences that hold one, and the words
whose notes lie nearest to a word's, by the cosine of notes taken from their mean."""


def run_notes(arguments) -> None:
    from megatron_ddrp.analysis.notes import analyze_notes, describe

    result = analyze_notes(
        arguments.load, arguments.data_path, arguments.words, arguments.neighbours, arguments.documents
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(describe(result))


def main() -> None:
    arguments = build_parser().parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    run_command(main)
