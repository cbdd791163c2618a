"""Tables of the page. Each has a name, under which it is a file of its own and `--tables` writes it into a document."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.compare.claims import Gain
from megatron_ddrp.tasks.compare.numbers import (
    shown,
    shown_average,
    shown_budget,
    shown_gain,
    shown_interval,
    shown_needed,
    shown_spread,
)
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.compare.rows import Run
from megatron_ddrp.tasks.glue.paper import PAPER_ROWS, paper_rows
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS
from megatron_ddrp.tasks.measures import GLUE, INSIDE, LOSS, MINIMAL_PAIRS, STEP_SECONDS
from megatron_ddrp.tasks.minimal_pairs.results import standard_error
from megatron_ddrp.tasks.statistics import paired, spread

CHANCE = 0.5
ABOVE_CHANCE = "above chance"
KINDS = {"glue": [GLUE], "minimal-pairs": [MINIMAL_PAIRS], "inside": list(INSIDE)}
"""End of a table's name → its measures. The loss has no ending, and all others have `tasks`."""


def table_of(measure: str) -> str:
    """Return the end of the name of a measure's table of gains; empty for the loss."""
    found = next((name for name, measures in KINDS.items() if measure in measures), "tasks")
    return "" if measure == LOSS else f"-{found}"


def runs_table(results: Results) -> Table:
    """Return the table of the budgets: their models, seeds and cost."""
    cells = []
    for budget in results.budgets:
        runs = [run for run in results.runs if run.budget == budget]
        seeds = [len(results.at(budget, arm)) for arm in results.arms_at(budget)]
        numbers = [
            _range([run.tokens for run in runs if not run.arm.half]),
            ", ".join(f"{n:,}" for n in sorted({run.steps for run in runs if run.steps and not run.arm.half})),
            *(f"{len(seeds)}", _range(seeds), f"{len(runs)}"),
            _range([run.parameters for run in runs if run.parameters]),
            duration(sum(run.seconds for run in runs)),
        ]
        cells.append([budget, *numbers])
    header = ["budget", "tokens consumed", "steps", "models", "seeds per model", "runs", "parameters", "time"]
    return Table(header, cells, "Time of the runs with all measures.")


def _range(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest number, once if they are equal."""
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)})) if numbers else ""


def gain_table(results: Results, found: Sequence[Gain], what: str) -> Table:
    """Return the table of gains that were judged together, one line per budget. Columns without a cell are left out."""
    measures = list(dict.fromkeys(gain.claim.measure for gain in found))
    cells = []
    for gain in found:
        measure = gain.claim.measure
        row = [
            gain.claim.text,
            measure,
            gain.claim.paper,
            shown_budget(gain.budget, results.budgets[gain.budget]),
            shown(measure, gain.seeds.mean, "+"),
            shown_interval(measure, gain.seeds.interval),
            shown_interval(measure, gain.items),
            str(len(gain.seeds.values)),
            gain.word,
            shown_needed(gain.seeds),
        ]
        cells.append(row)
    header = [what, "measure", "the paper", "budget", "gain", "95 % over seeds", "95 % over items", "n", "judgement"]
    header.append("seeds needed")
    kept = [n for n in range(len(header)) if any(row[n] for row in cells)]
    kept = [n for n in kept if (n != 1 or len(measures) > 1) and (n != 3 or len(results.budgets) > 1)]
    wordy = [place for place, n in enumerate(kept) if n in (0, 1, 3, 8)]
    return Table(
        [header[n] for n in kept], [[row[n] for n in kept] for row in cells], _caption(results, measures), False, wordy
    )


def _caption(results: Results, measures: Sequence[str]) -> str:
    named = [f"{name} ({shown_average(results.averaged)})" if name == GLUE else name for name in measures]
    unit = "Gains in nats" if measures == [LOSS] else "Gains as in the tables of values"
    return f"{', '.join(named)}. {unit}, paired by seed." if named else ""


def score_table(results: Results, budget: str, is_inside: bool = False, found: Sequence[Gain] = ()) -> Table:
    """Return the table of all arms of a budget with their measures: those of the inside, or all others.

    `found` are the gains over the baseline, which then have a column of their own.
    """
    measures = [name for name in results.measures if (name in INSIDE) == is_inside]
    with_chance = MINIMAL_PAIRS in measures
    own = {gain.claim.first: gain for gain in found if gain.budget == budget}
    cells = []
    for arm in results.arms_at(budget):
        runs = results.at(budget, arm)
        row = [_value(results, measure, list(runs.values()), budget) for measure in measures]
        if not any(row):
            continue
        above = above_chance(list(runs.values()))
        row += ["" if above is None else f"{above:+.1f}"] * with_chance
        if found:
            gain = own.get(arm)
            row.append(f"{shown_gain(LOSS, gain.seeds)}{': ' * bool(gain.word)}{gain.word}" if gain else "")
        cells.append([arm.label, *row, str(len(runs))])
    header = ["model", *measures, *[ABOVE_CHANCE] * with_chance]
    header += [f"gain over {results.baseline.label}"] * bool(found)
    name = f"{results.check}{', ' * bool(results.check)}{shown_budget(budget, results.budgets[budget])}"
    caption = f"{name}: mean ± standard deviation over the seeds."
    if GLUE in measures:
        caption += f" GLUE average: {shown_average(results.averaged)}."
    return Table([*header, "seeds"], cells, caption)


def _value(results: Results, measure: str, runs: Sequence[Run], budget: str) -> str:
    """Return mean ± standard deviation, and the number of undefined fine-tuning runs, which count as 0."""
    if not runs:
        return ""
    cell = shown_spread(measure, spread(results.of(measure, runs[0].arm, budget)))
    undefined = sum(run.tasks.get(measure, {}).get("undefined", 0) for run in runs)
    return f"{cell} ({undefined} undefined)" if cell and undefined else cell


def above_chance(runs: Sequence[Run]) -> float | None:
    """Return (accuracy − 50 %) of minimal pairs in standard errors over pairs; None if these are not known.

    The runs score the same pairs, so the error of their mean is at most the mean of their errors, which counts here.
    """
    scored = [run for run in runs if MINIMAL_PAIRS in run.values]
    errors = [standard_error(list(r.paradigms.values()), [r.pairs.get(p, 0) for p in r.paradigms]) for r in scored]
    known = [error for error in errors if error]
    if not known or len(known) < len(errors):
        return None
    return (statistics.fmean(run.values[MINIMAL_PAIRS] for run in scored) - CHANCE) / statistics.fmean(known)


def cost_table(results: Results) -> Table:
    """Return the table of seconds per step, also relative to the baseline."""
    cells = []
    for budget, tokens in results.budgets.items():
        base = results.of(STEP_SECONDS, results.baseline, budget)
        for arm in results.arms_at(budget):
            own = results.of(STEP_SECONDS, arm, budget)
            seconds, ratio = spread(own), paired(own, base, relative=True)
            if seconds is None or arm.half:
                continue
            interval = ratio.interval if ratio and arm != results.baseline else None
            row = [
                arm.label,
                shown_budget(budget, tokens),
                f"{seconds.mean:.4f}",
                f"{1 + ratio.mean:.3f}" if ratio else "",
            ]
            cells.append([*row, "{:.3f} to {:.3f}".format(*(1 + end for end in interval)) if interval else ""])
    header = ["model", "budget", "seconds per step", f"÷ {results.baseline.label}", "95 % over seeds"]
    return Table(header, cells, "Median over a run's steps without its first tenth, mean over the seeds.", wordy=(1,))


def throughput_table(runs: Sequence[Run]) -> Table:
    """Return the table of tokens per second at inference and memory; a model's last measurement counts."""
    timed: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for run in runs:
        timed |= {(label, one["length"]): one for label, found in run.throughput.items() for one in found}
    cells = []
    for (label, length), one in timed.items():
        median, low, high = (f"{one[key]:,.0f}" for key in ("tokens_per_second", "lower_quartile", "upper_quartile"))
        memory = one["memory_bytes"]
        cells.append(
            [label, f"{length:,.0f}", median, f"{low} to {high}", "" if memory is None else f"{memory / 2**20:,.0f}"]
        )
    caption = (
        "Forward passes at inference: median and quartiles over the rounds, and peak memory minus the loaded model."
    )
    return Table(["model", "row length", "tokens/s", "quartiles", "MiB"], cells, caption)


def paper_table() -> Table:
    """Return the paper's tables 1 to 3."""
    caption = "The paper's own numbers, not ours: base size, best grid point, median of 5 seeds."
    rows = paper_rows([name for name, _, _ in PAPER_ROWS])
    return Table(["the paper's model", *PAPER_TASKS, "average of 8"], rows, caption, is_paper=True)
