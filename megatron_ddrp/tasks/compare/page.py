"""The page: page.md and page.html in the output folder, made from the finished jobs, whatever they are by now."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.compare.claims import all_claims, summary
from megatron_ddrp.tasks.compare.document import Block, Bullets, Code, Figure, Heading, Table, Text, markdown, to_html
from megatron_ddrp.tasks.compare.figures import draw_all
from megatron_ddrp.tasks.compare.flags import words
from megatron_ddrp.tasks.compare.jobs import KINDS, Job, log_file
from megatron_ddrp.tasks.compare.plan import NUM_SEEDS, Plan
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.compare.running import last_line
from megatron_ddrp.tasks.compare.tables import (
    claims_table,
    cost_table,
    paper_triangles,
    similarity_table,
    table_1,
    table_2,
    table_3,
)
from megatron_ddrp.tasks.compare.work import Work

CAPTIONS = {
    "loss-steps": "Validation masked-LM loss over steps: mean over the seeds, the band from lowest to highest.",
    "loss-seconds": "The same over seconds of training, validations and checkpoints not counted.",
    "token-similarity": "f(S), the self-similarity of tokens, over the checkpoints (the paper's figures 2 and 3a).",
    "head-similarity": "f(H), the self-similarity of heads, over the checkpoints (the paper's figures 2 and 3a).",
    "glue-curve": "GLUE average over the checkpoints (the paper's figure 3b).",
}


def write_page(work: Work) -> str:
    """Write page.md, page.html, results.json and the figures; returns the line that says so."""
    results = Results(work)
    figures = draw_all(results, work.folder / "figures")
    blocks = build_page(work, results, figures)
    texts = {
        "page.md": markdown(blocks, work.folder),
        "page.html": to_html(blocks),
        "results.json": json.dumps(as_json(results), indent=1) + "\n",
    }
    for name, text in texts.items():
        with AtomicFile(work.folder / name) as stream:
            stream.write(text.encode())
    return f"{work.folder / 'page.html'}, page.md and results.json written"


def build_page(work: Work, results: Results, figures: dict[str, Path]) -> list[Block]:
    """All blocks from top to bottom."""
    claims, left = all_claims(work.plan), missing(work)
    blocks: list[Block] = [
        Heading("Position encodings and objectives at one budget", 1),
        Text(introduction(work.plan, results)),
        *(Text(f"Not all of it is finished: {len(left)} jobs are missing, named at the end.") for _ in left[:1]),
        Heading("What this scale shows"),
        *map(Text, summary(results, claims)),
    ]
    if claims:
        blocks.append(claims_table(results, claims))
    blocks += [Heading("Models (the paper's table 1)"), *table_1(results)]
    blocks += [Heading("Objectives (table 2)"), *table_2(results)]
    if work.plan.half_budget:
        blocks.append(Text(HALF_BUDGET))
    blocks += [Heading("Weights of TCD and HCD (table 3)"), *table_3(results), Heading("Loss")]
    blocks += shown(figures, "loss-steps", "loss-seconds") or [Text("No course is finished yet.")]
    blocks += [Heading("Cost of a step"), *cost(work, results)]
    blocks += [Heading("Inside the models"), *inside(results, figures)]
    blocks += [Heading("GLUE over the checkpoints (figure 3b)")]
    blocks += shown(figures, "glue-curve") or [Text("The plan asks for no scores on the way, or none are there yet.")]
    if "glue-curve" in figures:
        blocks.append(Text(f"Averaged here: {', '.join(results.averaged_on_the_way)}."))
    blocks += how(work)
    if left:
        told = f"Not finished, and not on this page, are {len(left)} jobs:"
        blocks += [Heading("Missing"), Text(told), Bullets(left)]
    return blocks


HALF_BUDGET = (
    "The paper does not say whether its rows at 500k steps are checkpoints on the way or trainings of their own. Here "
    "half of the budget is a training of its own, with a schedule of half the length."
)


def introduction(plan: Plan, results: Results) -> str:
    """What was compared, and at which size."""
    seeds = ", ".join(map(str, plan.seeds))
    few = f" Fewer than {NUM_SEEDS} seeds: their spread says little." if len(plan.seeds) < NUM_SEEDS else ""
    steps = sorted({course.steps for course in results.courses if not course.half})
    counted = (
        f" ({' or '.join(f'{count:,}' for count in steps)} steps)" if steps and plan.budget.kind != "steps" else ""
    )
    glue = "" if plan.glue else " GLUE is not in this plan, so that its columns are left out."
    if plan.glue:
        sizes = [f"{task} ({row['train_examples']:,} rows)" for task, row in results.facts.items()]
        settings = " ".join(words(plan.glue.flags))
        glue = (
            f" GLUE: fine-tuned on {', '.join(sizes)} with `{settings}`." if sizes else " No GLUE score is there yet."
        )
    return (
        f"{len(plan.models)} models, {plan.budget} a course{counted}, seeds {seeds}. Courses of one seed see the same "
        f"data in the same order under the same masks.{few} Common flags: `{' '.join(words(plan.flags))}`.{glue}"
    )


def missing(work: Work) -> list[str]:
    """What the plan asks for and the page does not have, by name."""
    items = []
    for job in work.jobs():
        if job.name not in work.store:
            items.append(f"{job.kind} {job.title}: {_why(work, job)}")
    unknown = [name for name in (m.name for m in work.plan.rows) if name not in work.steps()]
    items += [f"courses of {name}: their steps are not measured yet" for name in unknown]
    return items


def _why(work: Work, job: Job) -> str:
    log = log_file(work.folder, job)
    if not log.is_file():
        return "not begun"
    return f"begun, not finished; its log {log.relative_to(work.folder)} ends: {last_line(log)}"


def shown(figures: dict[str, Path], *names: str) -> list[Block]:
    """Those of the figures that there are."""
    return [Figure(figures[name], CAPTIONS[name]) for name in names if name in figures]


def cost(work: Work, results: Results) -> list[Block]:
    """Seconds of a step, and how far they may be trusted."""
    table = cost_table(results)
    if not table.rows:
        return [Text("No course is finished yet.")]
    beside = max((row["workers"] for row in work.store.rows if row["kind"] == "course"), default=1)
    blocks: list[Block] = [table]
    if beside > 1:
        blocks.append(
            Text(
                f"Up to {beside} courses ran beside each other on one machine, so that this is no benchmark: "
                "`benchmarks/step.py` measures steps alone and interleaved."
            )
        )
    papers = "The paper: DDRP and BERT-R +5 %, DeBERTa +25 to 30 % over BERT; MTH +4 % over masked LM."
    return [*blocks, Text(papers)]


def inside(results: Results, figures: dict[str, Path]) -> list[Block]:
    """Self-similarity, triangle effect, attention maps."""
    wanted = results.plan.analyses
    if not any((wanted.self_similarity, wanted.triangle, wanted.attention_maps)):
        return [Text("The plan asks for no analysis.")]
    table = similarity_table(results)
    if not any(cell for row in table.rows for cell in row[1:]):
        return [Text("No analysis is finished yet.")]
    blocks: list[Block] = [table]
    if wanted.triangle:
        blocks.append(paper_triangles())
    blocks += shown(figures, "token-similarity", "head-similarity")
    for arm, path in results.maps.items():
        caption = (
            f"Mean attention maps of {arm.label}, seed {results.plan.seeds[0]}, last layer (the paper's figure 4)."
        )
        blocks.append(Figure(path, caption))
    return blocks


def how(work: Work) -> list[Block]:
    """Commands, hardware, versions and time of what is on the page."""
    names = {job.name for job in work.jobs()}
    rows = [row for row in work.store.rows if row["job"] in names]
    blocks: list[Block] = [Heading("How it was made")]
    if not rows:
        return [*blocks, Text("Nothing is finished yet.")]
    kinds = Counter(row["kind"] for row in rows)
    seconds = {kind: sum(row["seconds"] for row in rows if row["kind"] == kind) for kind in KINDS if kinds[kind]}
    times = [[kind, str(kinds[kind]), duration(total)] for kind, total in seconds.items()]
    times.append(["all", str(len(rows)), duration(sum(seconds.values()))])
    blocks.append(Table(["jobs", "number", "time"], times, "Wall time of the finished jobs, one after the other."))
    machines = dict.fromkeys(f"{row['hardware']}, {_threads(row)}" for row in rows)
    versions = dict.fromkeys(", ".join(f"{k} {v}" for k, v in row["versions"].items()) for row in rows)
    blocks.append(Bullets([*(f"hardware: {one}" for one in machines), *(f"versions: {one}" for one in versions)]))
    commands = [f"{row['command']}" for row in rows]
    return [*blocks, Code(f"The {len(commands)} commands", commands)]


def _threads(row: dict[str, Any]) -> str:
    threads = f", {row['threads']} thread{'s' * (row['threads'] != '1')} each" if row["threads"] else ""
    return f"{row['workers']} job{'s' * (row['workers'] > 1)} at once{threads}"


def as_json(results: Results) -> dict[str, Any]:
    """Return every number of the page for programs: arm → measure → seed → value; arm → task → undefined runs."""
    arms: dict[str, Any] = {}
    for measure, by_arm in results.values.items():
        for arm, by_seed in by_arm.items():
            arms.setdefault(arm.label, {})[measure] = {str(seed): value for seed, value in by_seed.items()}
    curves: dict[str, Any] = {}
    for measure, by_arm_curves in results.curves.items():
        for arm, by_seed_curves in by_arm_curves.items():
            curves.setdefault(arm.label, {})[measure] = {str(seed): c for seed, c in by_seed_curves.items()}
    undefined: dict[str, dict[str, int]] = {}
    for task, by_count in results.collapsed.items():
        for arm, count in by_count.items():
            undefined.setdefault(arm.label, {})[task] = count
    return {"values": arms, "curves": curves, "averaged": results.averaged, "undefined": undefined}
