"""`megatron-ddrp compare`: do the missing jobs of a plan and write the page; or write the page of rows alone."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ddrp.cli import ArgumentParser, given_options, parse_sections
from megatron_ddrp.config import flag
from megatron_ddrp.config.option import COUNT, Section, option, refuse
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError, need_packages
from megatron_ddrp.tasks.compare.experiment import Experiment
from megatron_ddrp.tasks.compare.jobs import JobForecast, open_store
from megatron_ddrp.tasks.compare.plan_file import read_plans
from megatron_ddrp.tasks.compare.results import load_claims
from megatron_ddrp.tasks.compare.rows import read_rows
from megatron_ddrp.tasks.compare.running import Runner, stop_on_sigterm
from megatron_ddrp.tasks.jobs.store import left_to_others, one_at_a_time

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
            "glue.data_dir": self.glue_dir,
            "minimal_pairs.data_dir": self.minimal_pairs_dir,
            "workers": self.workers,
        }
        replaced: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if self.input:
            replaced["corpus.data_path"] = None
        if self.data_path:
            replaced |= {"corpus.input": None, "corpus.vocab_size": None, "corpus.shuffle": None}
        return replaced | {name: None for name in ("glue", "minimal_pairs", "tasks") if not getattr(self, name)}


@dataclass(frozen=True)
class RowsAndPage(Section):
    """rows and page"""

    rows: Path | None = option(
        None,
        "file with a row per finished run (default: OUT/rows.jsonl); a run with a row is not repeated, even if OUT is "
        "empty",
        metavar="FILE.jsonl",
    )
    claims: Path | None = option(None, "claims to judge (default: those of the DDRP+MTH paper)", metavar="FILE.yaml")
    tables: Path | None = option(
        None,
        "with ROWS.jsonl: replace each block of this file between `<!-- compare NAME -->` and "
        "`<!-- end of compare NAME -->` by the table NAME of the page",
        metavar="FILE.md",
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
    dry_run: bool = option(False, "print the plan, every command and the expected hours; write nothing")


SECTIONS = (Files, Replacements, RowsAndPage, Mode)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `given` of the result has the values that replace the plan's, by dotted key."""
    parser = ArgumentParser(description=DESCRIPTION)
    options = parse_sections(parser, SECTIONS, arguments, plugins=False)
    options.is_rows = given_options(Files, options).is_rows
    options.given = given_options(Replacements, options).by_key()
    if options.tables and not options.is_rows:
        parser.error("--tables needs rows: megatron-ddrp compare OUT/rows.jsonl --output-dir DIR --tables FILE.md")
    if options.is_rows and (options.given or options.rows or options.page_only or options.dry_run or not options.wait):
        parser.error("ROWS.jsonl takes only --output-dir, --claims and --tables: rows are finished, nothing is run")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the missing jobs and write the page. Return 1 if a job failed, otherwise 0."""
    options = parse_arguments(arguments)
    if not options.dry_run:
        need_packages("the page", "markdown", "matplotlib")  # before hours of jobs, not after them
    if options.is_rows:
        return _page_of_rows(options)
    experiment = plan_experiment(options)
    if options.claims:
        load_claims(options.claims)  # before hours of jobs, not after them
    if options.page_only:
        return _write_page(experiment, options)
    forecast = JobForecast(experiment.plan, experiment.store)
    jobs = experiment.jobs()
    print("\n".join([experiment.plan_text(), *forecast.plan_lines(jobs), *_remarks(experiment)]), flush=True)
    if options.dry_run:
        for job in jobs:
            print(f"{'done' if job.name in experiment.store else 'to do'}: {job}\n  $ {shlex.join(job.command)}")
        return 0
    stop_on_sigterm()
    runner = Runner(forecast, partial(print, flush=True), experiment.record)
    runner.run(first := experiment.first_jobs())
    experiment.update()  # the probes have given the steps of a budget in minutes
    if not experiment.store.missing(first):
        for line in _data_remarks(experiment):
            print(f"  {line}", flush=True)
    jobs = experiment.jobs()
    runner.run(jobs, wait=options.wait)
    if left := len(runner.left(jobs)):
        experiment.record()
        print(left_to_others(left, options.output_dir))
    else:
        _write_page(experiment, options)
    return FAILURE if runner.failed else 0


def plan_experiment(options: argparse.Namespace) -> Experiment:
    """Return the experiment of a plan. Raises `UserError` for a mistake in the file."""
    if len(options.plan) > 1:
        raise UserError("one plan at a time; only files of rows (.jsonl) may be several", WRONG_ARGUMENTS)
    plans = read_plans(options.plan[0], options.given)
    return Experiment(plans, options.output_dir, open_store(options.output_dir), options.rows)


def _remarks(experiment: Experiment) -> list[str]:
    """Return what the missing runs will say about their precision on this machine, each line once."""
    import torch  # here, because --help must not import torch

    from megatron_ddrp.engine.device import precision_remarks

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [f"  {line}" for run in experiment.missing_runs for line in precision_remarks(run.config, device)]
    return list(dict.fromkeys(lines))


def _data_remarks(experiment: Experiment) -> list[str]:
    """Return what the missing runs will say about the division of their data, each line once."""
    from megatron_ddrp.corpus import Corpus  # here, because --help must not import torch

    by_data = {run.config.data: run.config for run in experiment.missing_runs}
    lines = [line for config in by_data.values() for line in Corpus.open(config).split_remarks()]
    remedy = "; in a plan: shuffle: true under corpus" * bool(experiment.plan.corpus.input)
    return [line + remedy for line in lines]


def _write_page(experiment: Experiment, options: argparse.Namespace) -> int:
    from megatron_ddrp.tasks.compare.page import Page  # here, because figures import torch

    with one_at_a_time(experiment.folder, "page"):
        experiment.store.refresh()
        page = Page(experiment.finished_runs(), experiment.folder, options.claims)
        if left := len(experiment.store.missing(experiment.jobs())):
            print(f"{experiment.store.path}: {left:,} of the plan's jobs not finished; the page names them")
        print(page.write(experiment.missing, experiment.times()))
    return 0


def _page_of_rows(options: argparse.Namespace) -> int:
    """Write the page of files of rows, and replace the tables of a Markdown file if one is given."""
    from megatron_ddrp.tasks.compare.page import Page

    page = Page(read_rows(options.plan), options.output_dir, options.claims)
    if options.tables:
        print(page.replace_tables(options.tables))  # first, because it may refuse the file
    print(page.write())
    return 0
