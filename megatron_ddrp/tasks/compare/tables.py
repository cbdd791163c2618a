"""Tables of the page. The paper's numbers have their own tables, marked as the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.compare.comparison import Compared, count_items, measures
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.glue.paper import PAPER_TRIANGLES, paper_rows
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS
from megatron_ddrp.tasks.ladder.claims import row_of
from megatron_ddrp.tasks.ladder.measures import (
    GLUE,
    HEAD_SIMILARITY,
    LOSS,
    STEP_SECONDS,
    TOKEN_SIMILARITY,
    TOKENS,
)
from megatron_ddrp.tasks.ladder.numbers import shown, shown_interval, shown_seeds, shown_spread
from megatron_ddrp.tasks.ladder.rows import Arm
from megatron_ddrp.tasks.statistics import paired, spread

Blocks = list[Table | str]
"""Tables and paragraphs."""


def cell(results: Results, measure: str, arm: Arm) -> str:
    """Return mean ± standard deviation over the seeds, and the number of undefined runs, which count as 0."""
    found = shown_spread(measure, spread(results.of(measure, arm)))
    undefined = results.undefined.get(measure, {}).get(arm, 0)
    return f"{found} ({undefined} undefined)" if found and undefined else found


def score_table(results: Results, arms: Iterable[Arm]) -> Table:
    """Return the table of GLUE tasks, their average, and the masked-LM loss."""
    tasks = list(results.plan.glue.tasks) if results.plan.glue else []
    average = [GLUE] if results.averaged else []
    header = ["model", *tasks, *(f"average of {len(results.averaged)}" for _ in average), LOSS, "seeds"]
    rows = []
    for arm in arms:
        cells = [cell(results, measure, arm) for measure in (*tasks, *average, LOSS)]
        rows.append([arm.label, *cells, str(len(results.of(LOSS, arm)))])
    return Table(header, rows, f"Ours: mean ± standard deviation over the seeds{_left_out(tasks, results.averaged)}.")


def _left_out(tasks: Sequence[str], averaged: Sequence[str]) -> str:
    """Return a clause about the tasks that are not in the average; empty without an average or such tasks."""
    if not averaged:
        return ""
    unscored = ", ".join(task for task in tasks if task in PAPER_TASKS and task not in averaged)
    never = ", ".join(task for task in tasks if task not in PAPER_TASKS)
    reasons = [f"{unscored}, because a run has no score"] * bool(unscored)
    reasons += [f"{never}, as GLUE's averages do"] * bool(never)
    return f"; the average leaves out {', and '.join(reasons)}" if reasons else ""


def paper_table(names: Sequence[str], where: str) -> Table:
    """Return rows of the paper's tables 1 to 3."""
    caption = f"The paper's own numbers, not ours: {where}. Base size, 1M steps, best grid point, median of 5 seeds."
    return Table(["the paper's model", *PAPER_TASKS, "average of 8"], paper_rows(names), caption, is_paper=True)


def score_blocks(results: Results, arms: Sequence[Arm], where: str) -> Blocks:
    """Return the table of these arms and, if the paper has such models, its table."""
    theirs = [name for arm in arms if (name := row_of(arm))]
    return [score_table(results, arms), *([paper_table(theirs, where)] if theirs else [])]


def table_1(results: Results) -> Blocks:
    """Return the scores of all models at the full budget."""
    arms = [arm for arm in _plan_arms(results) if not arm.half]
    return score_blocks(results, arms, "tables 1 and 2") if arms else ["No run of the full budget is finished yet."]


def table_2(results: Results) -> Blocks:
    """Return the scores of masked LM and MTH, with the models at half the budget first."""
    encodings = [arm.encoding for arm in results.arms if arm.objective == "mth" or arm.half]
    wanted = [arm for arm in _plan_arms(results) if arm.encoding in encodings]
    arms = sorted(wanted, key=lambda arm: not arm.half)
    if not arms:
        return ["No model with MTH and none at half the budget is finished yet, or the plan has none."]
    ours, *theirs = score_blocks(results, arms, "table 2")
    return [ours, *([] if results.plan.half_budget else ["The plan trains no model at half the budget."]), *theirs]


def table_3(results: Results) -> Blocks:
    """Return the scores under different weights of TCD and HCD: models with such flags, and the alpha grid."""
    chosen = [model for model in results.plan.rows if _has_weight(model.arm())]
    if not chosen:
        return ["The plan changes no weight of TCD or HCD, so there is no ablation."]
    encodings = {model.encoding for model in chosen}
    wanted = [arm for arm in results.arms if not arm.half and arm.encoding in encodings]
    arms = [arm for arm in wanted if not arm.flags or _has_weight(arm)]
    ours = score_table(results, arms)
    alike = Table(
        ["model", "f(S)", "f(H)"],
        [[arm.label, cell(results, TOKEN_SIMILARITY, arm), cell(results, HEAD_SIMILARITY, arm)] for arm in arms],
        "Ours, at the last checkpoint: mean cosine of a sentence's tokens, f(S), and of a layer's heads, f(H).",
    )
    names = ["BERT (MTH) 1M steps", "BERT (MTH without HCD) 1M steps", "BERT (MLM) 1M steps"]
    return [ours, alike, paper_table(names, "table 3")]


def _plan_arms(results: Results) -> list[Arm]:
    """Return the arms of the plan's models, without those of the alpha grid."""
    names = {model.name for model in results.plan.models}
    return [arm for arm in results.arms if arm.name in names]


def _has_weight(arm: Arm) -> bool:
    """Return whether a flag of the arm sets the weight of TCD or of HCD."""
    return not {"tcd_weight", "hcd_weight"}.isdisjoint(dict(arm.flags))


def throughput_table(results: Results) -> Table:
    """Return the table of tokens per second, with quartiles, and memory at inference, per row length."""
    lengths = sorted({length for by_length in results.speeds.values() for length in by_length})
    rows = []
    for arm in filter(results.speeds.__contains__, results.arms):
        cells = [_speed(results.speeds[arm].get(length)) for length in lengths]
        rows.append([arm.label, *(speed for speed, _ in cells), *(memory for _, memory in cells)])
    header = [f"{what} at {length}" for what in ("tokens/s", "MiB") for length in lengths]
    caption = (
        "Ours, forward passes at inference, per row length: median (and quartiles) over the rounds, and peak memory "
        "minus the memory of the loaded model."
    )
    return Table(["model", *header], rows, caption)


def _speed(found: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return cells of tokens per second and memory; empty cells for a length that was not measured."""
    if found is None:
        return "", ""
    median, low, high = (f"{found[key]:,.0f}" for key in ("tokens_per_second", "lower_quartile", "upper_quartile"))
    memory = found["memory_bytes"]
    return f"{median} ({low} to {high})", "" if memory is None else f"{memory / 2**20:,.0f}"


def paper_triangles() -> Table:
    """Return the table of the paper's triangle shares (section 5.3)."""
    rows = [["DDRP", f"{PAPER_TRIANGLES['ddrp']:.2f}"], ["BERT-R", f"{PAPER_TRIANGLES['bert-r']:.2f}"]]
    caption = "The paper's own numbers, not ours: sentences with the up-down triangle effect, section 5.3."
    return Table(["the paper's model", "triangle share [%]"], rows, caption, is_paper=True)


def cost_table(results: Results) -> Table:
    """Return the table of seconds per step, also relative to BERT with masked LM."""
    models = results.plan.models
    plain = next((m.arm() for m in models if (m.encoding, m.objective) == ("absolute", "mlm") and not m.flags), None)
    rows = []
    for arm in results.arms:
        by_seed = results.of(STEP_SECONDS, arm)
        seconds, tokens = spread(by_seed), spread(results.of(TOKENS, arm))
        if arm.half or seconds is None:
            continue
        ratio, interval = "1" if arm == plain else "", ""
        if plain and arm != plain and (relative := paired(by_seed, results.of(STEP_SECONDS, plain), relative=True)):
            ratio = f"{1 + relative.mean:.3f}"
            interval = "{:.3f} to {:.3f}".format(*(1 + end for end in relative.interval)) if relative.interval else ""
        consumed = f"{tokens.mean / 1e6:,.2f} M" if tokens else ""
        rows.append([arm.label, f"{seconds.mean:.4f}", ratio, interval, consumed])
    header = ["model", "seconds per step", f"÷ {plain.label if plain else 'BERT'}", "95 % interval", TOKENS]
    return Table(header, rows, "Ours: median over a run's steps without its first tenth, mean over the seeds.")


def comparison_table(results: Results, compared: Mapping[str, Sequence[Compared]]) -> Table:
    """Return the table of every measure of every model, its difference to the baseline, and both its intervals."""
    rows = []
    for measure in measures(results):
        for row in compared[measure]:
            found = ["", "", ""]
            if row.arm == results.baseline:
                found[0] = "baseline"
            elif row.difference:
                ends = [shown_interval(measure, interval) for interval in (row.difference.interval, row.over_items)]
                found = [shown(measure, row.difference.mean, "+"), *ends]
            found += [shown_seeds(row.values, row.difference), count_items(results, measure)]
            rows.append([measure, row.arm.label, cell(results, measure, row.arm), *found])
    header = ["measure", "model", "mean", "difference", "95 % over seeds", "95 % over items", "seeds", "items"]
    caption = (
        f"Ours: mean ± standard deviation over the seeds, and the mean difference to {results.baseline.label}, paired "
        "by seed and by item. Losses are in nats, other measures x 100. A lower loss is better; for other measures "
        "higher is better."
    )
    return Table(header, rows, caption, wordy=(0, 1))
