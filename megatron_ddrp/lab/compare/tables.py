"""Tables of the page. Each has a name, under which it is a file of its own and `--tables` writes it into a document."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ddrp.lab.compare.claims import Gain
from megatron_ddrp.lab.compare.results import Results
from megatron_ddrp.lab.compare.rows import Arm, RunRow
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS, paper_rows
from megatron_ddrp.tasks.measures import GLUE, INSIDE, LOSS, MINIMAL_PAIRS, ONSET, STEP_SECONDS, format_value, unit_of
from megatron_ddrp.tasks.minimal_pairs.results import standard_error
from megatron_ddrp.tasks.statistics import BySeed, Difference, pair_by_seed, seeds_needed


def format_spread(measure: str, values: BySeed) -> str:
    """Return mean ± standard deviation over the seeds; only the mean for one seed, nothing for none."""
    if not values:
        return ""
    mean = format_value(measure, statistics.fmean(values.values()))
    return mean if len(values) < 2 else f"{mean} ± {format_value(measure, statistics.stdev(values.values()))}"


def format_interval(measure: str, interval: tuple[float, float] | None) -> str:
    """Return both ends of an interval of a difference; nothing without an interval."""
    return " to ".join(format_value(measure, end, "+") for end in interval or ())


def format_needed(gain: Difference) -> str:
    """Return the number of seeds whose interval would exclude 0; empty without a spread, or if it already does."""
    if not gain.interval or not gain.deviation or not gain.interval[0] <= 0 <= gain.interval[1]:
        return ""
    count = seeds_needed(gain.mean, gain.deviation)
    return "no number" if gain.mean == 0 else "over 100,000" if count is None else f"{count:,}"


def format_average(tasks: Sequence[str]) -> str:
    """Return the meaning of a GLUE average over these tasks: "the paper's measure", or their names."""
    if set(tasks) == set(PAPER_TASKS):
        return "the paper's measure"
    *others, last = tasks
    names = f"the mean of {', '.join(others)} and {last}" if others else f"{last} alone"
    return f"{names}; the paper's average has eight tasks"


def format_tokens(tokens: float) -> str:
    """Return a number of tokens: 4.19 M, 1.07 G, 524,288."""
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:.3g} {unit}"
    return f"{tokens:,.0f}"


def format_budget(budget: str, tokens: int) -> str:
    """Return a budget in words: 4.19 M tokens, 2,048 steps."""
    return f"{format_tokens(tokens)} tokens" if budget == f"{tokens:,} tokens" else budget


CHANCE = 0.5
ABOVE_CHANCE = "above chance"
KINDS = {"onset": [ONSET], "glue": [GLUE], "minimal-pairs": [MINIMAL_PAIRS], "inside": list(INSIDE)}
"""End of a table's name → its measures. The loss has no ending, and all others have `tasks`."""


def table_of(measure: str) -> str:
    """Return the end of the name of a measure's table of gains; empty for the loss."""
    found = next((name for name, measures in KINDS.items() if measure in measures), "tasks")
    return "" if measure == LOSS else f"-{found}"


def _table(rows: Sequence[Mapping[str, str]], caption: str = "", wordy: Sequence[str] = ()) -> Table:
    """Return a table of rows, column → cell, without the columns that have no cell; those of `wordy` hold sentences."""
    header = [name for name in dict.fromkeys(itertools.chain(*rows)) if any(row.get(name) for row in rows)]
    cells = [[row.get(name, "") for name in header] for row in rows]
    return Table(header, cells, caption, wordy=[place for place, name in enumerate(header) if name in wordy])


def runs_table(results: Results) -> Table:
    """Return the table of the budgets: their models, seeds and cost."""
    rows = []
    for budget in results.budgets:
        runs = [run for run in results.runs if run.budget == budget]
        whole = [run for run in runs if not run.arm.half]
        seeds = [len(results.at(budget, arm)) for arm in results.arms_at(budget)]
        row = {
            "budget": budget,
            "tokens consumed": _range([run.tokens for run in whole]),
            "steps": ", ".join(f"{n:,}" for n in sorted({run.steps for run in whole if run.steps})),
            "models": f"{len(seeds)}",
            "seeds per model": _range(seeds),
            "runs": f"{len(runs)}",
            "parameters": _range([run.parameters for run in runs if run.parameters]),
            "time": duration(sum(run.seconds for run in runs)),
        }
        rows.append(row)
    return _table(rows, "Time of the runs with all measures.")


def _range(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest number, once if they are equal."""
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)})) if numbers else ""


def gain_table(results: Results, found: Sequence[Gain], what: str) -> Table:
    """Return the table of gains that were judged together, one line per budget."""
    measures = list(dict.fromkeys(gain.claim.measure for gain in found))
    rows = []
    for gain in found:
        measure = gain.claim.measure
        row = {
            what: gain.claim.text,
            "measure": measure if len(measures) > 1 else "",
            "the paper": gain.claim.paper,
            "budget": format_budget(gain.budget, results.budgets[gain.budget]) if len(results.budgets) > 1 else "",
            "gain": format_value(measure, gain.seeds.mean, "+"),
            "95 % over seeds": format_interval(measure, gain.seeds.interval),
            "95 % over items": format_interval(measure, gain.items),
            "n": str(len(gain.seeds.values)),
            "judgement": gain.word,
            "seeds needed": format_needed(gain.seeds),
        }
        rows.append(row)
    named = [f"{name} ({format_average(results.averaged)})" if name == GLUE else name for name in measures]
    resting = "a run that never left counts with all of its own, two of a seed as equal"
    own = {LOSS: "Gains in nats", ONSET: f"Gains in million tokens; {resting}"}
    unit = own[measures[0]] if len(measures) == 1 and measures[0] in own else "Gains as in the tables of values"
    return _table(
        rows, f"{', '.join(named)}. {unit}, paired by seed." if named else "", ("measure", "budget", "judgement")
    )


def score_table(results: Results, budget: str, is_inside: bool = False) -> Table:
    """Return the table of all arms of a budget with their measures: those of the inside, or all others."""
    measures = [name for name in results.measures if (name in INSIDE) == is_inside]
    found = [(arm, _values(results, measures, arm, budget)) for arm in results.arms_at(budget)]
    rows = [
        {"model": arm.label, **values, "seeds": str(len(results.at(budget, arm)))} for arm, values in found if values
    ]
    caption = f"{format_budget(budget, results.budgets[budget])}: mean ± standard deviation over the seeds."
    average = f" GLUE average: {format_average(results.averaged)}." if GLUE in measures else ""
    return _table(rows, caption + average)


def checks_table(checks: Mapping[Results, Sequence[Gain]]) -> Table:
    """Return the table of all side experiments: their scores, and the gains by the loss over the baseline of each."""
    rows = []
    for check, gains in checks.items():
        measures = [name for name in check.measures if name not in INSIDE]
        for budget, tokens in check.budgets.items():
            own = {gain.claim.first: gain for gain in gains if gain.budget == budget}
            for arm in check.arms_at(budget):
                row = {"check": check.check, "budget": format_budget(budget, tokens), "model": arm.label}
                row |= _values(check, measures, arm, budget) | {"gain": "", "95 % over seeds": "", "judgement": ""}
                if gain := own.get(arm):
                    row["gain"] = f"{format_value(LOSS, gain.seeds.mean, '+')} over {check.baseline.label}"
                    row |= {"95 % over seeds": format_interval(LOSS, gain.seeds.interval), "judgement": gain.word}
                rows.append(row | {"seeds": str(len(check.at(budget, arm)))})
    caption = "Mean ± standard deviation over the seeds; gains by the loss, judged per check."
    return _table(rows, caption, ("budget", "model", "gain", "judgement"))


def _values(results: Results, measures: Sequence[str], arm: Arm, budget: str) -> dict[str, str]:
    """Return measure → mean ± standard deviation of an arm, and the distance of minimal pairs from chance.

    Undefined fine-tuning runs, which count as 0, are numbered, and so are the seeds if some have no value. Empty if
    nothing is measured.
    """
    runs = list(results.at(budget, arm).values())
    cells = {}
    for measure in measures:
        values = results.of(measure, arm, budget)
        undefined = sum(run.tasks.get(measure, {}).get("undefined", 0) for run in runs)
        cells[measure] = format_spread(measure, values)
        cells[measure] += f" ({undefined} undefined)" * bool(values and undefined)
        cells[measure] += f" ({len(values)} of {len(runs)} seeds)" * bool(values and len(values) < len(runs))
    if cells.get(ONSET) and (resting := sum(run.onset is None for run in runs if ONSET in run.values)):
        cells[ONSET] = f"≥ {cells[ONSET]} ({resting} never)"
    if not any(cells.values()):
        return {}
    above = above_chance(runs) if MINIMAL_PAIRS in measures else None
    cells = {f"{name}{unit_of(name)}" if name == ONSET else name: cell for name, cell in cells.items()}
    return cells | {ABOVE_CHANCE: "" if above is None else f"{above:+.1f}"}


def above_chance(runs: Sequence[RunRow]) -> float | None:
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
    """Return the table of seconds per step, also relative to the baseline, with two columns per budget."""
    rows: dict[str, dict[str, str]] = {}
    for (budget, tokens), arm in itertools.product(results.budgets.items(), results.arms):
        own, base = (results.of(STEP_SECONDS, one, budget) for one in (arm, results.baseline))
        if not own or arm.half:
            continue
        ratio = pair_by_seed(own, base, relative=True)
        cell = f"{1 + ratio.mean:.3f}" if ratio and arm != results.baseline else ""
        if cell and ratio and ratio.interval:
            cell += " ({:.3f} to {:.3f})".format(*(1 + end for end in ratio.interval))
        where = f", {format_budget(budget, tokens)}" * (len(results.budgets) > 1)
        row = rows.setdefault(arm.label, {"model": arm.label})
        row |= {
            f"seconds per step{where}": f"{statistics.fmean(own.values()):.4f}",
            f"÷ {results.baseline.label}{where}": cell,
        }
    caption = "Median over a run's steps without its first tenth, mean over the seeds; ratios with 95 % over seeds."
    return _table(list(rows.values()), caption)


def throughput_table(runs: Sequence[RunRow]) -> Table:
    """Return the table of tokens per second at inference and memory; a model's last measurement counts."""
    timed: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for run in runs:
        timed |= {(label, one["length"]): one for label, found in run.throughput.items() for one in found}
    rows = [
        {
            "model": label,
            "row length": f"{length:,.0f}",
            "tokens/s": f"{one['tokens_per_second']:,.0f}",
            "quartiles": f"{one['lower_quartile']:,.0f} to {one['upper_quartile']:,.0f}",
            "MiB": "" if one["memory_bytes"] is None else f"{one['memory_bytes'] / 2**20:,.0f}",
        }
        for (label, length), one in timed.items()
    ]
    return _table(rows, "Forward passes at inference: median and quartiles, and peak memory minus the loaded model.")


def paper_table() -> Table:
    """Return the paper's tables 1 to 3."""
    caption = "The paper's own numbers, not ours: base size, best grid point, median of 5 seeds."
    return Table(["the paper's model", *PAPER_TASKS, "average of 8"], paper_rows(), caption, is_paper=True)
