"""Common steps of all fine-tuning commands after parsing: do the missing runs, write the report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ddrp.errors import FAILURE, UserError
from megatron_ddrp.pages.rendering import require_packages
from megatron_ddrp.run.launch import launched_world_size
from megatron_ddrp.tasks.finetune.options import SweepOptions
from megatron_ddrp.tasks.finetune.runs import RUNS
from megatron_ddrp.tasks.jobs.store import Row

if TYPE_CHECKING:
    from megatron_ddrp.tasks.finetune.sweep import AfterSweep


def run(options: SweepOptions, load_after: Callable[[], AfterSweep]) -> int:
    """Carry out a parsed command line. Return 1 if --report leaves damaged runs out.

    `load_after` imports torch and returns the steps after the runs.
    """
    require_packages("glue", "scipy")  # the report needs it; here, before hours of runs
    if options.report is not None:
        return report_only(options)
    from megatron_ddrp.tasks.finetune.workers import run_here, run_on_ranks  # here, because it imports torch

    (run_on_ranks if launched_world_size() > 1 else run_here)(options, load_after())
    return 0


def report_only(options: SweepOptions) -> int:
    """Write one table over several output folders; return 1 if it leaves damaged runs out."""
    from megatron_ddrp.tasks.finetune.predictions import trusted_runs
    from megatron_ddrp.tasks.finetune.report import write_report

    runs: dict[Path, list[Row]] = {}
    left_out, unchecked = [], []
    for folder in options.report or ():
        if not (folder / RUNS).is_file():
            raise UserError(f"--report {folder}: no runs.jsonl in it; expected the --output-dir of an earlier command")
        found = trusted_runs(folder, options.suite)
        if not (found.rows or found.left_out):
            raise UserError(f"--report {folder}: no finished run in its runs.jsonl; finish a run, or copy it again")
        runs[folder] = found.rows
        left_out += found.left_out
        unchecked += found.unchecked
    print(write_report(runs, options.output_dir, options.suite, [*left_out, *unchecked]))
    sys.stdout.flush()
    for sentence in [*left_out, *unchecked]:
        print(f"{options.suite.program}: warning: {sentence}", file=sys.stderr)
    return FAILURE if left_out else 0
