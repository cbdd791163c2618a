"""Compare models, at one budget or several.

The command trains all models of a plan with the same seeds and data order, scores them on minimal pairs, GLUE and your
own tasks, analyses them, and writes one page, which also has the numbers of the DDRP+MTH paper (Zhang et al., "Better
Pre-Training by Reducing Representation Confusion").

The plan is a YAML file (examples/compare/*.yaml; docs/compare.md explains its keys). OUT/jobs.jsonl has one line per
finished job, OUT/logs/ the output of each job, OUT/courses/ the checkpoints, and OUT/rows.jsonl one line per finished
run with all its measures, from which the page is made. Run the same command again to do the missing jobs: it repeats
no finished job, and a run resumes from its last checkpoint. Several commands may share one OUT. You may change the
plan: jobs that it shares with the old plan are not repeated.

  plan alone     megatron-ddrp compare PLAN.yaml --output-dir OUT --dry-run
  run it         megatron-ddrp compare PLAN.yaml --output-dir OUT
  own data       … --input wiki.jsonl novels.jsonl --glue-dir glue --minimal-pairs-dir blimp
  page of rows   megatron-ddrp compare OUT/rows.jsonl --output-dir DIR
  a run again    megatron-ddrp compare PLAN.yaml --reproduce RUN --rows rows.jsonl --output-dir OUT
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.cli import ArgumentParser, given_options, parse_sections
from megatron_ddrp.config import flag
from megatron_ddrp.config.reading import COUNT, Section, option, refuse


@dataclass(frozen=True)
class Files(Section):
    """plan and output"""

    plan: tuple[Path, ...] = option(
        MISSING,
        "plan of the comparison; or rows of runs, ROWS.jsonl …",
        nargs="+",
        metavar="PLAN.yaml",
        positional=True,
    )
    output_dir: Path = option(MISSING, "folder for all output", metavar="OUT")

    def __post_init__(self) -> None:
        if self.is_rows and not all(path.suffix == ".jsonl" for path in self.plan):
            refuse("a plan (.yaml) and rows (.jsonl) exclude each other: give one plan, or files of rows")

    @property
    def is_rows(self) -> bool:
        """True if the command gets rows of finished runs instead of a plan."""
        return any(path.suffix == ".jsonl" for path in self.plan)


@dataclass(frozen=True)
class Replacements(Section):
    """values that replace the plan's"""

    input: tuple[str, ...] | None = option(
        None, "corpus.input: texts to build a dataset from", nargs="+", metavar="FILE"
    )
    data_path: tuple[str, ...] | None = option(None, "corpus.data_path: indexed datasets", nargs="+", metavar="P")
    vocab_file: str | None = option(None, "corpus.vocab_file", metavar="FILE")
    other: tuple[str, ...] | None = option(None, "corpus.other: texts of another kind", nargs="+", metavar="FILE")
    other_data_path: tuple[str, ...] | None = option(None, "corpus.other_data_path", nargs="+", metavar="P")
    glue: bool = option(True, "with --no-glue: leave GLUE out")
    glue_dir: str | None = option(None, "glue.data_dir: GLUE's folder", metavar="DIR")
    minimal_pairs: bool = option(True, "with --no-minimal-pairs: leave minimal pairs out")
    minimal_pairs_dir: str | None = option(None, "minimal_pairs.data_dir: folder of paradigms", metavar="DIR")
    tasks: bool = option(True, "with --no-tasks: leave the plan's own tasks out")
    workers: int | None = option(None, "jobs at once, each with its share of the cores", within=COUNT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input and self.data_path:
            refuse("--input and --data-path exclude each other: give the texts, or the datasets made from them")
        if self.data_path and not self.vocab_file:
            refuse("--data-path needs --vocab-file, the vocabulary that made the datasets")
        for name in ("glue", "minimal_pairs"):
            if getattr(self, f"{name}_dir") and not getattr(self, name):
                refuse(f"{flag(name)}-dir and {flag(f'no_{name}')} exclude each other")

    def by_key(self) -> dict[str, Any]:
        """Return the values that replace the plan's, by dotted key; None removes one."""
        given = {
            "corpus.input": self.input and list(self.input),
            "corpus.data_path": self.data_path and list(self.data_path),
            "corpus.vocab_file": self.vocab_file,
            "corpus.other": self.other and list(self.other),
            "corpus.other_data_path": self.other_data_path and list(self.other_data_path),
            "glue.data_dir": self.glue_dir,
            "minimal_pairs.data_dir": self.minimal_pairs_dir,
            "workers": self.workers,
        }
        replaced: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        out = {"input": "data_path", "vocab_file": "vocab_size", "other": "other_data_path", "other_data_path": "other"}
        replaced |= {f"corpus.{theirs}": None for mine, theirs in out.items() if getattr(self, mine)}
        if self.data_path:
            replaced |= {"corpus.input": None, "corpus.vocab_size": None, "corpus.shuffle": None}
        return replaced | {name: None for name in ("glue", "minimal_pairs", "tasks") if not getattr(self, name)}


@dataclass(frozen=True)
class RowsAndPage(Section):
    """rows and page"""

    rows: Path | None = option(
        None, "a row per finished run, which is not repeated (default: OUT/rows.jsonl)", metavar="FILE.jsonl"
    )
    reproduce: str | None = option(None, "train this run of --rows again; exit 1 if its losses differ", metavar="RUN")
    claims: Path | None = option(None, "claims to judge (default: those of the DDRP+MTH paper)", metavar="FILE.yaml")
    tables: Path | None = option(
        None, "with ROWS.jsonl: fill the blocks `<!-- compare NAME -->` of this file with tables", metavar="FILE.md"
    )


@dataclass(frozen=True)
class Mode(Section):
    """mode"""

    page_only: bool = option(False, "run nothing; write the page from the finished jobs")
    wait: bool = option(
        True,
        "with --no-wait: exit instead of waiting for jobs that other commands on the same OUT are doing, except jobs "
        "that make data; the command that finishes last writes the page (for job arrays)",
    )
    dry_run: bool = option(False, "print the plan, the jobs of each kind and every command; write nothing")


SECTIONS = (Files, Replacements, RowsAndPage, Mode)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `given` of the result has the values that replace the plan's, by dotted key."""
    parser = ArgumentParser(description=__doc__)
    options = parse_sections(parser, SECTIONS, arguments, plugins=False)
    options.is_rows = given_options(Files, options).is_rows
    options.given = given_options(Replacements, options).by_key()
    if options.tables and not options.is_rows:
        parser.error("--tables needs rows: megatron-ddrp compare OUT/rows.jsonl --output-dir DIR --tables FILE.md")
    in_another_mode = options.page_only or options.dry_run or not options.wait
    if options.is_rows and (options.given or options.rows or in_another_mode):
        parser.error("ROWS.jsonl takes only --output-dir, --claims and --tables: rows are finished, nothing is run")
    if options.reproduce is not None and (not options.rows or options.claims or in_another_mode):
        parser.error("--reproduce needs --rows, and takes neither --claims, --page-only, --dry-run nor --no-wait")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the missing jobs and write the page. Return 1 if a job failed, otherwise 0."""
    options = parse_arguments(arguments)
    from megatron_ddrp.lab.compare.experiment import run_here  # here, because --help needs none of it

    return run_here(options)
