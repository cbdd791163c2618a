"""The command line of `megatron-ddrp compare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ddrp.cli import ArgumentParser

DESCRIPTION = """Compare models at one budget: train each of a plan from the same seeds and data order, score them by
minimal pairs, GLUE and tasks of your own, look inside, and write one page beside the paper's numbers.

The plan is a YAML file (examples/compare/*.yaml; docs/compare.md explains its keys). OUT/jobs.jsonl holds one line per
finished job, OUT/logs/ what each job printed, OUT/courses/ the checkpoints. Given again, the same command does what
is missing: nothing finished is repeated, a half-trained run resumes from its checkpoint. Several commands may share
one OUT, and a plan may be changed: what it shares with the old one is taken over.

  what it costs  megatron-ddrp compare PLAN.yaml --output-dir OUT --dry-run
  do it          megatron-ddrp compare PLAN.yaml --output-dir OUT
  own data       … --input wiki.jsonl novels.jsonl --glue-dir glue --minimal-pairs-dir blimp
"""


def build_parser() -> ArgumentParser:
    """Return the parser of all flags, by concern."""
    parser = ArgumentParser(description=DESCRIPTION)
    parser.add_argument("plan", type=Path, metavar="PLAN.yaml", help="what is compared")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="OUT", help="for everything that is made")
    instead = parser.add_argument_group("instead of the plan's own")
    instead.add_argument("--input", nargs="+", metavar="FILE", help="corpus.input: texts that a dataset is built from")
    instead.add_argument("--data-path", nargs="+", metavar="P", help="corpus.data_path: indexed datasets")
    instead.add_argument("--vocab-file", metavar="FILE", help="corpus.vocab_file")
    instead.add_argument("--glue-dir", metavar="DIR", help="glue.data_dir: GLUE's folder")
    instead.add_argument("--no-glue", action="store_true", help="leave GLUE out")
    instead.add_argument("--minimal-pairs-dir", metavar="DIR", help="minimal_pairs.data_dir: folder of paradigms")
    instead.add_argument("--no-minimal-pairs", action="store_true", help="leave minimal pairs out")
    instead.add_argument("--no-tasks", action="store_true", help="leave the plan's own tasks out")
    instead.add_argument("--workers", type=int, metavar="N", help="jobs at once, each with its share of the cores")
    mode = parser.add_argument_group("mode")
    mode.add_argument("--page-only", action="store_true", help="only write the page anew, from what is finished by now")
    mode.add_argument(
        "--dry-run", action="store_true", help="print the plan, every command and the expected hours; write nothing"
    )
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `given` holds what replaces values of the plan, by dotted key."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.input and parsed.data_path:
        parser.error("--input and --data-path exclude each other: give the texts, or the datasets made from them")
    if parsed.glue_dir and parsed.no_glue:
        parser.error("--glue-dir and --no-glue exclude each other")
    if parsed.minimal_pairs_dir and parsed.no_minimal_pairs:
        parser.error("--minimal-pairs-dir and --no-minimal-pairs exclude each other")
    if parsed.data_path and not parsed.vocab_file:
        parser.error("--data-path needs --vocab-file, the vocabulary that the datasets were made with")
    given: dict[str, Any] = {
        "corpus.input": parsed.input,
        "corpus.data_path": parsed.data_path,
        "corpus.vocab_file": parsed.vocab_file,
        "glue.data_dir": parsed.glue_dir,
        "minimal_pairs.data_dir": parsed.minimal_pairs_dir,
        "workers": parsed.workers,
    }
    parsed.given = {key: value for key, value in given.items() if value is not None}
    if parsed.input:
        parsed.given["corpus.data_path"] = None
    if parsed.data_path:
        parsed.given |= {"corpus.input": None, "corpus.vocab_size": None}
    for section in ("glue", "minimal_pairs", "tasks"):
        if getattr(parsed, f"no_{section}"):
            parsed.given[section] = None
    return parsed
