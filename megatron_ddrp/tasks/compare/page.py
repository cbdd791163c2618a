"""Page of a comparison: page.md and page.html in the output folder, from the jobs finished so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ddrp.config import flag_words
from megatron_ddrp.pages import rendering
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.compare import comparison
from megatron_ddrp.tasks.compare.figures import draw_all
from megatron_ddrp.tasks.compare.jobs import KINDS, RUN, Job, log_file, shown_kind
from megatron_ddrp.tasks.compare.plan import NUM_SEEDS
from megatron_ddrp.tasks.compare.recording import make_row
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.compare.running import last_line
from megatron_ddrp.tasks.compare.tables import (
    comparison_table,
    cost_table,
    paper_triangles,
    table_1,
    table_2,
    table_3,
    throughput_table,
)
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.ladder.as_json import claims
from megatron_ddrp.tasks.ladder.facts import not_finite
from megatron_ddrp.tasks.ladder.page import LadderPage
from megatron_ddrp.tasks.ladder.rows import as_run
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES


def write_page(work: Work) -> str:
    """Write page.md, page.html, results.json and the figures; return a line that names the files."""
    results = Results(work)
    compared = comparison.compare_all(results)
    rung = ladder_page(work, results)
    figures = draw_all(results, compared, work.folder / "figures")
    figures |= {name: work.folder / "figures" / f"{name}.png" for name in rung.draw()}
    text = page(work, results, comparison_table(results, compared), rung, figures)
    numbers = as_json(results, compared, rung)
    rendering.write_page(work.folder, text, "Position encodings and objectives at one budget", numbers)
    return f"{work.folder / 'page.html'}, page.md and results.json written"


def ladder_page(work: Work, results: Results) -> LadderPage:
    """Return the page of a ladder whose only rung is the plan's budget: claims, their seeds, minimal pairs, the inside.

    Models count as one rung even if their tokens differ, as they do with a budget in minutes.
    """
    runs = [as_run(make_row(work, run, results)) for run in results.runs]
    rung = max((run.rung for run in runs), default=0)
    return LadderPage([replace(run, rung=rung) for run in runs], work.folder)


def page(work: Work, results: Results, measured: Table, rung: LadderPage, figures: dict[str, Path]) -> str:
    """Return the text of page.md."""
    plan = work.plan
    names = {job.name for job in work.jobs()}
    rows = [row for row in work.store if row["job"] in names]
    steps = sorted({run.steps for run in results.runs if not run.half})
    return rendering.render(
        "compare.md.jinja",
        plan=plan,
        folder=work.folder,
        figures=figures,
        few=NUM_SEEDS,
        steps=[f"{count:,}" for count in steps],
        flags=" ".join(flag_words(plan.flags)),
        glue_flags=" ".join(flag_words(plan.glue.flags)) if plan.glue else "",
        sizes=[f"{task} ({row['train_examples']:,} rows)" for task, row in results.facts.items()],
        missing=missing(work),
        not_finite=not_finite(rung.ladder.runs),
        blocks=rung.blocks,
        comparison=measured,
        samples=BOOTSTRAP_SAMPLES,
        tables=(table_1(results), table_2(results), table_3(results)),
        cost=cost_table(results),
        beside=max((row["workers"] for row in rows if row["kind"] == RUN), default=1),
        looks=any(vars(plan.analyses).values()),
        triangles=paper_triangles(),
        throughput=throughput_table(results),
        maps=results.maps,
        averaged_on_the_way=results.averaged_on_the_way,
        jobs=rows,
        times=_times(rows),
        machines=dict.fromkeys(f"{row['hardware']}, {_share(row)}" for row in rows),
        versions=dict.fromkeys(", ".join(map(" ".join, row["versions"].items())) for row in rows),
    )


def missing(work: Work) -> list[str]:
    """Return one sentence per job of the plan that is not finished, and per model whose steps are unknown."""
    items = [f"{job}: {_why(work, job)}" for job in work.store.missing(work.jobs())]
    unknown = [model.name for model in work.plan.rows if model.name not in work.steps]
    return items + [f"runs of {name}: the time of their steps is not measured yet" for name in unknown]


def _why(work: Work, job: Job) -> str:
    log = log_file(work.folder, job)
    if not log.is_file():
        return "not started"
    return f"started, not finished; its log {log.relative_to(work.folder)} ends: {last_line(log)}"


def _times(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the wall time of finished jobs, by kind."""
    kinds = Counter(row["kind"] for row in rows)
    seconds = {kind: sum(row["seconds"] for row in rows if row["kind"] == kind) for kind in KINDS if kinds[kind]}
    times = [[shown_kind(kind), str(kinds[kind]), duration(total)] for kind, total in seconds.items()]
    times.append(["all", str(len(rows)), duration(sum(seconds.values()))])
    return Table(["jobs", "number", "time"], times, "Sum of the wall times of the finished jobs.")


def _share(row: dict[str, Any]) -> str:
    """Return the number of jobs that ran at once, and the threads of each, in words."""
    threads = f", {row['threads']} thread{'s' * (row['threads'] != '1')} each" if row["threads"] else ""
    return f"{row['workers']} job{'s' * (row['workers'] > 1)} at once{threads}"


def as_json(results: Results, compared: dict[str, list[comparison.Compared]], rung: LadderPage) -> dict[str, Any]:
    """Return the content of results.json: all numbers of the page by arm, measure and seed."""
    paradigms: dict[str, dict[int, dict[str, float]]] = {}
    for run in results.runs:
        if found := results.items.accuracies(run.arm, run.seed):
            paradigms.setdefault(run.arm.label, {})[run.seed] = found
    return {
        "values": _by_label(results.values),
        "curves": _by_label(results.curves),
        "averaged": results.averaged,
        "undefined": _by_label(results.undefined),
        "comparison": comparison.as_json(results, compared),
        "claims": claims(rung.judged + rung.models),
        "paradigms": paradigms,
        "fields": {arm.label: by_seed for arm, by_seed in results.fields.items()},
    }


def _by_label(values: dict[str, dict[Any, Any]]) -> dict[str, dict[str, Any]]:
    """Convert measure → arm → value to arm's label → measure → value."""
    turned: dict[str, dict[str, Any]] = {}
    for measure, by_arm in values.items():
        for arm, value in by_arm.items():
            turned.setdefault(arm.label, {})[measure] = value
    return turned
