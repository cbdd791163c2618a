"""`tools/analyze.py notes`."""

from __future__ import annotations

import argparse
import json

from megatron_ddrp.analysis.notes import analyze_notes, describe


def run(arguments: argparse.Namespace) -> None:
    """What the note dictionary of a run holds: lines, and JSON where it is wanted."""
    result = analyze_notes(
        arguments.load, arguments.data_path, arguments.words, arguments.neighbours, arguments.documents
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(describe(result))
