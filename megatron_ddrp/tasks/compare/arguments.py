"""Command line of `megatron-ddrp compare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ddrp.cli import ArgumentParser

DESCRIPTION = """Compare models, at one budget or several.

The command trains all models of a plan with the same seeds and data order, scores them on minimal pairs, GLUE and your
own tasks, analyses them, and writes one page, which also has the numbers of the DDRP+MTH paper (Zhang et al., "Better
Pre-Training by Reducing Representation Confusion").

The plan is a YAML file (examples/compare/*.yaml; docs/compare.md explains its keys). OUT/jobs.jsonl has one line per
finished job, OUT/logs/ the output of each job, OUT/courses/ the checkpoints, and OUT/rows.jsonl one line per finished
run with all its measures, from which the page is made. Run the same command again to do what is missing: it repeats no
finished job, and a run resumes from its last checkpoint. Several commands may share one OUT. You may change the plan:
jobs that it shares with the old plan are not repeated.

  expected time  megatron-ddrp compare PLAN.yaml --output-dir OUT --dry-run
  run it         megatron-ddrp compare PLAN.yaml --output-dir OUT
  own data       … --input wiki.jsonl novels.jsonl --glue-dir glue --minimal-pairs-dir blimp
  page of rows   megatron-ddrp compare OUT/rows.jsonl --output-dir DIR
"""


def build_parser() -> ArgumentParser:
    """Return the parser of all flags, in groups."""
    parser = ArgumentParser(description=DESCRIPTION)
    parser.add_argument(
        "plan", type=Path, nargs="+", metavar="PLAN.yaml", help="plan of the comparison; or rows of runs, ROWS.jsonl …"
    )
    parser.add_argument("--output-dir", type=Path, required=True, metavar="OUT", help="folder for all output")
    instead = parser.add_argument_group("values that replace the plan's")
    instead.add_argument("--input", nargs="+", metavar="FILE", help="corpus.input: texts to build a dataset from")
    instead.add_argument("--data-path", nargs="+", metavar="P", help="corpus.data_path: indexed datasets")
    instead.add_argument("--vocab-file", metavar="FILE", help="corpus.vocab_file")
    instead.add_argument("--glue-dir", metavar="DIR", help="glue.data_dir: GLUE's folder")
    instead.add_argument("--no-glue", action="store_true", help="leave GLUE out")
    instead.add_argument("--minimal-pairs-dir", metavar="DIR", help="minimal_pairs.data_dir: folder of paradigms")
    instead.add_argument("--no-minimal-pairs", action="store_true", help="leave minimal pairs out")
    instead.add_argument("--no-tasks", action="store_true", help="leave the plan's own tasks out")
    instead.add_argument("--workers", type=int, metavar="N", help="jobs at once, each with its share of the cores")
    page = parser.add_argument_group("rows and page")
    page.add_argument(
        "--rows",
        type=Path,
        metavar="FILE.jsonl",
        help="file with a row per finished run (default: OUT/rows.jsonl); a run with a row is not repeated, even if "
        "OUT is empty",
    )
    page.add_argument(
        "--claims", type=Path, metavar="FILE.yaml", help="claims to judge (default: those of the DDRP+MTH paper)"
    )
    page.add_argument(
        "--tables",
        type=Path,
        metavar="FILE.md",
        help="with ROWS.jsonl: replace each block of this file between `<!-- compare NAME -->` and "
        "`<!-- end of compare NAME -->` by the table NAME of the page",
    )
    mode = parser.add_argument_group("mode")
    mode.add_argument("--page-only", action="store_true", help="run nothing; write the page from the finished jobs")
    mode.add_argument(
        "--no-wait",
        action="store_true",
        help="exit instead of waiting for jobs that other commands on the same OUT are doing, except jobs that make "
        "data; the command that finishes last writes the page (for job arrays)",
    )
    mode.add_argument(
        "--dry-run", action="store_true", help="print the plan, every command and the expected hours; write nothing"
    )
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `given` of the result has the values that replace the plan's, by dotted key."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    parsed.is_rows = any(path.suffix == ".jsonl" for path in parsed.plan)
    if parsed.is_rows and not all(path.suffix == ".jsonl" for path in parsed.plan):
        parser.error("a plan (.yaml) and rows (.jsonl) exclude each other: give one plan, or files of rows")
    if parsed.tables and not parsed.is_rows:
        parser.error("--tables needs rows: megatron-ddrp compare OUT/rows.jsonl --output-dir DIR --tables FILE.md")
    if parsed.input and parsed.data_path:
        parser.error("--input and --data-path exclude each other: give the texts, or the datasets made from them")
    if parsed.glue_dir and parsed.no_glue:
        parser.error("--glue-dir and --no-glue exclude each other")
    if parsed.minimal_pairs_dir and parsed.no_minimal_pairs:
        parser.error("--minimal-pairs-dir and --no-minimal-pairs exclude each other")
    if parsed.data_path and not parsed.vocab_file:
        parser.error("--data-path needs --vocab-file, the vocabulary that made the datasets")
    given: dict[str, Any] = {
        "corpus.input": parsed.input,
        "corpus.data_path": parsed.data_path,
        "corpus.vocab_file": parsed.vocab_file,
        "glue.data_dir": parsed.glue_dir,
        "minimal_pairs.data_dir": parsed.minimal_pairs_dir,
        "workers": parsed.workers,
    }
    parsed.given = {key: value for key, value in given.items() if value is not None}
    switches = [parsed.no_glue, parsed.no_minimal_pairs, parsed.no_tasks, parsed.page_only, parsed.no_wait]
    if parsed.is_rows and (parsed.given or parsed.rows or parsed.dry_run or any(switches)):
        parser.error("ROWS.jsonl takes only --output-dir, --claims and --tables: rows are finished, nothing is run")
    if parsed.input:
        parsed.given["corpus.data_path"] = None
    if parsed.data_path:
        parsed.given |= {"corpus.input": None, "corpus.vocab_size": None, "corpus.shuffle": None}
    for section in ("glue", "minimal_pairs", "tasks"):
        if getattr(parsed, f"no_{section}"):
            parsed.given[section] = None
    return parsed
