"""Page of an experiment: page.md, page.html, results.json, tables and figures, from rows alone.

A model has one colour, marker and line on all figures. Curves are smoothed and drawn as differences to the baseline
from the same seeds, because seeds differ more than models.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.config import flag_words
from megatron_ddrp.lab.compare.rows import UNITS, Arm, RunRow, samples_file, times_on_plateau
from megatron_ddrp.lab.compare.runs import kind_name
from megatron_ddrp.lab.compare.tables import (
    SAME_TEXT,
    ExperimentValues,
    basis_of,
    check_places,
    checks_of,
    checks_table,
    claim_table,
    claims_of,
    compared_arms,
    cost_table,
    format_budget,
    gains,
    group_of,
    load_claims,
    model_claims,
    paper_table,
    runs_table,
    score_table,
    throughput_table,
)
from megatron_ddrp.pages import plotting
from megatron_ddrp.pages.markdown import Table, render_page, to_html, write_blocks, write_page
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.minimal_pairs.pairs import phenomenon
from megatron_ddrp.tasks.statistics import (
    BOOTSTRAP_SAMPLES,
    EXPLORATORY,
    FALSE_DISCOVERIES,
    FEWEST_SEEDS,
    GLUE,
    LOSS,
    LOSSES,
    MINIMAL_PAIRS,
    TRAINING_LOSS,
    Gain,
    draw_heat,
    factor_of,
    format_median,
    log_rank,
    pair_by_seed,
    share_resting,
    table_of,
    unit_of,
    verdicts,
)

ROW = 0.36
"""Height of a row in inches."""


def styles(results: ExperimentValues) -> dict[Arm, dict[str, Any]]:
    """Return arm → colour, marker and line, the same on all figures; arms of many budgets have distinct colours."""
    arms = sorted(results.arms, key=lambda arm: -sum(bool(results.at(budget, arm)) for budget in results.budgets))
    return {arm: plotting.run_style(number) | {"markersize": 6} for number, arm in enumerate(arms)}


def draw_gains(results: ExperimentValues, found: Sequence[Gain]) -> Any:
    """Draw a panel per measure and budget with one row per claim: seeds, mean, intervals over seeds and over items."""
    plt, look = plotting.figure_tools(), styles(results)
    measures = list(dict.fromkeys(gain.measure for gain in found))
    budgets = [budget for budget in results.budgets if any(gain.budget == budget for gain in found)]
    claims = {name: list(dict.fromkeys(map(_claim, (g for g in found if g.measure == name)))) for name in measures}
    heights = [len(of_measure) for of_measure in claims.values()]
    size = (4.5 + 3.2 * len(budgets), 0.5 + 0.9 * len(measures) + ROW * sum(heights))
    grid = {"squeeze": False, "height_ratios": heights, "figsize": size}
    figure, axes = plt.subplots(len(measures), len(budgets), sharey="row", **grid)
    for (name, rows), line in zip(claims.items(), axes, strict=True):
        for budget, axis in zip(budgets, line, strict=True):
            own = [gain for gain in found if gain.measure == name and gain.budget == budget]
            for gain in own:
                _draw_gain(axis, gain, rows.index(_claim(gain)), look[gain.first])
            axis.axvline(0, color="black", linewidth=1)
            axis.grid(axis="x", alpha=0.3)
            axis.locator_params(axis="x", nbins=5)
            if not any(gain.seeds.mean or gain.seeds.deviation for gain in own):
                axis.set_xlim(-1, 1)  # no gain at all
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
            axis.set_xlabel(f"gain, {name}{unit_of(name)}", fontsize="small")
            if not own:
                axis.set_visible(False)
        line[0].set_ylim(len(rows) - 0.4, -0.6)
        line[0].set_yticks(range(len(rows)), [plotting.wrap_title(text, 5.2) for text, *_ in rows], fontsize="small")
    for budget, axis in zip(budgets, axes[0], strict=True):
        axis.set_title(format_budget(budget, results.budgets[budget]), fontsize="medium")
    return figure


def _claim(gain: Gain) -> tuple[str, Arm, Arm]:
    return gain.text, gain.first, gain.second


def _draw_gain(axis: Any, gain: Gain, height: float, look: Mapping[str, Any]) -> None:
    """Draw a gain in a row, in the look of its first arm, and a pale one if it is exploratory."""
    factor = factor_of(gain.measure)
    pale = {"color": look["color"], "alpha": 0.35 if gain.word == EXPLORATORY else 1.0}
    for interval, width, below in ((gain.seeds.interval, 3.5, 0.0), (gain.items, 1.5, 0.25)):
        if interval:
            place = [height + below] * 2
            axis.plot(np.multiply(interval, factor), place, linewidth=width, solid_capstyle="butt", **pale)
    axis.plot(np.multiply(gain.seeds.values, factor), [height] * len(gain.seeds.values), "|", markersize=9, **pale)
    mean = {"marker": look["marker"], "markersize": 8, "markeredgecolor": "white"}
    axis.plot([factor * gain.seeds.mean], [height], **mean, **pale)


def draw_pairs(results: ExperimentValues) -> Any:
    """Draw heat maps of arms × phenomena, one per budget, with colours centred on chance; None without pairs."""
    found = {
        format_budget(budget, tokens): {
            arm.label: by_phenomenon(list(results.at(budget, arm).values())) for arm in results.arms_at(budget)
        }
        for budget, tokens in results.budgets.items()
    }
    columns = list(dict.fromkeys(name for arms in found.values() for groups in arms.values() for name in groups))
    tables = {
        budget if len(found) > 1 else "": {
            label: [100 * groups.get(name, np.nan) for name in columns] for label, groups in arms.items() if groups
        }
        for budget, arms in found.items()
        if any(arms.values())
    }
    return draw_heat(tables, columns, 1, "pairs right [%]; chance is 50") if tables else None


def by_phenomenon(runs: Sequence[RunRow]) -> Mapping[str, float]:
    """Return phenomenon of BLiMP → mean accuracy over its paradigms and the runs, with "all" first.

    Fields take the place of phenomena if a run has a paradigm that BLiMP lacks. Empty without minimal pairs.
    """
    scored = [run for run in runs if MINIMAL_PAIRS in run.values and (run.paradigms or run.fields)]
    if not scored:
        return {}
    found = [_groups(run) for run in scored]
    names = sorted((name for name in found[0] if all(name in one for one in found)), key=str.lower)
    average = statistics.fmean(run.values[MINIMAL_PAIRS] for run in scored)
    return {"all": average} | {name: statistics.fmean(one[name] for one in found) for name in names if name != "all"}


def _groups(run: RunRow) -> Mapping[str, float]:
    groups: dict[str, list[float]] = {}
    for uid, accuracy in run.paradigms.items():
        name = phenomenon(uid)
        if name is None:
            return run.fields
        groups.setdefault(name, []).append(accuracy)
    return {name: statistics.fmean(values) for name, values in groups.items()} or run.fields


LINES = 7
"""Largest number of lines of a panel; as many colours are distinct."""
COLUMNS = 3
SIZE = (5.8, 4.2)
"""Width and height of a panel in inches."""
SMOOTHED = 0.1
"""Share of a curve that is averaged around each of its points."""


def draw_over_tokens(results: ExperimentValues, measure: str) -> Any:
    """Draw the baseline's curve over tokens, one line per budget, and panels of the other arms minus the baseline."""
    look, baseline = styles(results), results.baseline
    budgets = {budget: format_budget(budget, tokens) for budget, tokens in results.budgets.items()}
    own: list[plotting.Line] = []
    panels: list[plotting.Panel] = []
    for budget, name in budgets.items():
        base = _curves(results, measure, baseline, budget)
        if not base:
            continue
        style = plotting.run_style(len(own)) | {"markersize": 6}
        own.append(plotting.Line(_band(list(map(_smoothed, base.values()))), style, name if len(budgets) > 1 else ""))
        others = [arm for arm in look if arm != baseline and not arm.half]
        found = [(arm, _minus(_curves(results, measure, arm, budget), base)) for arm in others]
        lines = [plotting.Line(points, look[arm], arm.label) for arm, points in found if points]
        panels += _panels(results, lines, f"minus {baseline.label}, {name}", f"difference{unit_of(measure)}")
    first = _panels(results, own, f"{baseline.label}: {measure}", f"{measure}{unit_of(measure)}")
    return plotting.draw_curves([*first, *panels], COLUMNS, SIZE) if panels else None


def draw_losses(results: ExperimentValues) -> Any:
    """Draw the training loss of every arm over the tokens of the largest budget; None if there are no curves."""
    look, (budget, tokens) = styles(results), max(results.budgets.items(), key=lambda item: item[1])
    found = [(arm, _curves(results, TRAINING_LOSS, arm, budget)) for arm in look if not arm.half]
    lines = [
        plotting.Line(_band(list(map(_smoothed, own.values()))), look[arm], arm.label) for arm, own in found if own
    ]
    panels = _panels(results, lines, format_budget(budget, tokens), f"{TRAINING_LOSS}{unit_of(TRAINING_LOSS)}")
    return plotting.draw_curves(panels, COLUMNS, SIZE) if panels else None


def draw_onsets(results: ExperimentValues) -> Any:
    """Draw the share of each arm's runs that are still on the plateau over tokens, a panel per budget and few arms.

    None if no run left the plateau.
    """
    look, panels = styles(results), []
    for budget, tokens in results.budgets.items():
        curves = {arm: share_resting(times) for arm in look if (times := times_on_plateau(results.at(budget, arm)))}
        lines = [
            plotting.Line(np.multiply(curve, (1e6, 100)).tolist(), look[arm] | {"drawstyle": "steps-post"}, arm.label)
            for arm, curve in curves.items()
        ]
        panels += _panels(results, lines, format_budget(budget, tokens), "runs on the plateau [%]")
    return plotting.draw_curves(panels, COLUMNS, SIZE) if any(r.rested and r.onset for r in results.runs) else None


def onset_table(results: ExperimentValues) -> Table:
    """Return the table of the onsets of all arms, tested against those of `compared_arms` and judged together."""
    places = list(itertools.product(results.budgets, results.arms))
    times = {place: found for place in places if (found := times_on_plateau(results.at(*place)))}
    rows: dict[tuple[str, Arm], dict[str, str]] = {}
    for (budget, arm), found in times.items():
        row = {"budget": format_budget(budget, results.budgets[budget]), "model": arm.label}
        rows[budget, arm] = row | {"runs": str(len(found)), "left": str(sum(left for _, left in found))}
        for unit, digits in UNITS.items():
            own = times_on_plateau(results.at(budget, arm), unit)
            rows[budget, arm][f"median [{unit}]"] = format_median(own, digits)
    pairs = list(itertools.product(results.budgets, compared_arms(results)))
    asked = [(budget, *pair) for budget, pair in pairs if all((budget, arm) in times for arm in pair)]
    tests = [log_rank(times[budget, arm], times[budget, other]) for budget, arm, other in asked]
    for (budget, arm, other), test, word in zip(asked, tests, verdicts(tests, ("sooner", "later")), strict=True):
        told = word if test.p_value is None else f"{word}, p = {test.p_value:.2g}"
        rows[budget, arm][f"against {other.label}"] = told
    caption = "Kaplan and Meier's medians, and log-rank tests, which do not use that runs are paired by seed."
    return table_of(list(rows.values()), caption, ("budget", "model"))


def draw_budgets(results: ExperimentValues) -> Any:
    """Draw the loss of every arm minus the baseline's over the budgets; None if no arm ran at two budgets."""
    look, base, lines = styles(results), results.baseline, list[plotting.Line]()
    loss = next((name for name in LOSSES if name in results.measures), LOSS)
    for arm in look:
        points = []
        for budget, tokens in results.budgets.items():
            found = pair_by_seed(results.of(loss, arm, budget, base), results.of(loss, base, budget))
            if found and arm != base:
                points.append((tokens, found.mean, min(found.values), max(found.values)))
        if len(points) > 1:
            lines.append(plotting.Line(points, look[arm], arm.label))
    if not lines:
        return None
    figure = plotting.draw_curves(_panels(results, lines, "", f"{loss}\nminus {base.label} [nats]"), COLUMNS, SIZE)
    ticks, (size, _) = list(results.budgets.values()), unit_of_tokens(results)
    for axis in figure.axes:
        axis.set_xscale("log")
        axis.set_xticks(ticks, [plotting.thousands(tick / size) for tick in ticks])
        axis.minorticks_off()
    return figure


def unit_of_tokens(results: ExperimentValues) -> tuple[float, str]:
    """Return the unit of an axis of tokens, in tokens and in words, in which the largest budget has a short number."""
    largest = max(results.budgets.values())
    units = ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"))
    return next((unit for unit in units if largest >= unit[0]), (1.0, "tokens"))


def _panels(results: ExperimentValues, lines: Sequence[plotting.Line], title: str, label: str) -> list[plotting.Panel]:
    """Return panels over tokens, with so many lines on each that they can be told apart; none without lines."""
    size, unit = unit_of_tokens(results)
    levels = [0.0] if "minus" in title + label else []
    count = -(-len(lines) // LINES)
    shares = [lines[number * len(lines) // count : (number + 1) * len(lines) // count] for number in range(count)]
    return [plotting.Panel(share, title, unit, label, size, levels) for share in shares]


def _curves(results: ExperimentValues, measure: str, arm: Arm, budget: str) -> dict[int, Any]:
    """Return seed → curve of an arm, `[points, 2]`, for curves of two or more points, in the measure's unit."""
    found = {seed: run.curves.get(measure, ()) for seed, run in results.at(budget, arm).items()}
    return {seed: np.array(curve) * (1, factor_of(measure)) for seed, curve in found.items() if len(curve) > 1}


def _minus(own: Mapping[int, Any], base: Mapping[int, Any]) -> list[tuple[float, float, float, float]]:
    """Return the band of the smoothed differences of two arms at their common seeds, without the first tenth."""
    found = []
    for seed in own.keys() & base.keys():
        x = own[seed][:, 0]
        x = x[(x >= base[seed][0, 0]) & (x <= base[seed][-1, 0])]
        values = np.interp(x, *own[seed].T) - np.interp(x, *base[seed].T)
        curve = _smoothed(np.stack([x, values], axis=1))
        found.append(curve[len(curve) // 10 :])
    return _band(found)


def _smoothed(curve: Any) -> Any:
    """Return a curve `[points, 2]` whose values are means over a window around each point."""
    half = int(SMOOTHED * len(curve) / 2)
    sums = np.concatenate([[0.0], np.cumsum(curve[:, 1])])
    low = np.maximum(np.arange(len(curve)) - half, 0)
    high = np.minimum(np.arange(len(curve)) + half + 1, len(curve))
    return np.stack([curve[:, 0], (sums[high] - sums[low]) / (high - low)], axis=1)


def _band(curves: Sequence[Any]) -> list[tuple[float, float, float, float]]:
    """Return mean, lowest and highest of some curves, up to the end of the shortest."""
    count = min(map(len, curves), default=0)
    if not count:
        return []
    stacked = np.stack([curve[:count] for curve in curves])
    x, values = stacked[:, :, 0].mean(0), stacked[:, :, 1]
    return list(zip(x, values.mean(0), values.min(0), values.max(0), strict=True))


FIGURES: dict[str, tuple[Callable[[ExperimentValues], Any], str]] = {
    "curves": (
        partial(draw_over_tokens, measure=TRAINING_LOSS),
        "Training masked-LM loss: of the baseline, and of the other models minus the baseline's from the same seeds. "
        "Below 0 is better. Lines are smoothed means over the seeds, bands reach from the lowest to the highest seed. "
        "Models of other masking rates, dropout or rows do not compare.",
    ),
    "losses": (
        draw_losses,
        "Training masked-LM loss of every model on the largest budget. Lines are smoothed means over the seeds, bands "
        "reach from the lowest to the highest seed. Models of other masking rates, dropout or rows do not compare.",
    ),
    "onsets": (
        draw_onsets,
        "Runs that are still on the plateau: share of each model's runs whose training loss has not yet come down "
        "for good to 1 nat below the unigram level (Kaplan and Meier). Where a line ends above 0, runs never left.",
    ),
    "budgets": (
        draw_budgets,
        "Masked-LM loss over the budgets, on the text that the axis names: minus the baseline's from the same seeds. "
        "Below 0 is better. Lines are means over the seeds, bands reach from the lowest to the highest seed.",
    ),
    "glue-curve": (
        partial(draw_over_tokens, measure=GLUE),
        "GLUE average over the checkpoints (the paper's figure 3b): of the baseline, and of other models minus it.",
    ),
    "minimal-pairs": (
        draw_pairs,
        "Minimal pairs by phenomenon: share of the pairs that are right, means over paradigms and seeds. Guessing "
        "gives 50 %, which is white.",
    ),
}
"""Name → function that draws the figure, and its caption."""


BLOCK = "compare "
"""Begin of the names of our blocks in documents."""
GROUPS = ("", "-other", "-glue", "-minimal-pairs", "-tasks", "-inside")
"""Ends of the names of tables of gains, see `group_of`."""
SECTIONS = {
    "Claims": [f"claims{group}" for group in GROUPS],
    "Models over the baseline": [f"models{group}" for group in GROUPS[:-1]],
    "Plateau": ["onsets", "plateau"],
    "Curves": ["losses", "curves", "budgets", "glue-curve"],
    "Scores": ["scores", "minimal-pairs"],
    "Inside the models": ["inside"],
    "Checks": ["checks"],
    "Cost": ["cost", "throughput"],
}
"""Title of a section → names of its figures and tables; a figure stands above the table of its name."""
NAMES = ("runs", *(name for names in SECTIONS.values() for name in names if name not in FIGURES))
"""Names of the tables that `--tables` knows."""


class Page:
    """Page of some runs."""

    def __init__(self, runs: Sequence[RunRow], folder: Path, claims: Path | None = None):
        """Judge the claims of a file, by default the paper's, about the runs, whose page is to stand in the folder."""
        check_places(runs)
        self.folder, self.runs = folder, runs
        self.results = ExperimentValues(runs)
        self.gains: dict[str, list[Gain]] = {}
        """Name of a table → its gains, judged together."""
        self.unused: list[str] = []
        """Sentences about the claims of the user's file that no runs are about."""
        if self.results.runs:
            found, unused = claims_of(self.results, load_claims(claims))
            self.unused = unused if claims else []
            by_name = {"claims": found, "models": model_claims(self.results, found)}
            for (name, claimed), group in itertools.product(by_name.items(), GROUPS):
                own = [claim for claim in claimed if group_of(claim.measure) == group]
                self.gains |= {name + group: judged} if (judged := gains(self.results, own)) else {}
        self.checks: dict[ExperimentValues, list[Gain]] = {}
        """Side experiment → its gains by each loss, those of one loss judged together."""
        for check in checks_of(runs):
            by_loss = ([one for one in model_claims(check) if one.measure == loss] for loss in LOSSES)
            self.checks[check] = [gain for claimed in by_loss for gain in gains(check, claimed)]

    @cached_property
    def tables(self) -> dict[str, list[Table]]:
        """Name → tables, for every one of `NAMES`; those without rows are left out."""
        results, budgets = self.results, self.results.budgets
        found = {name: [claim_table(results, own, name[:6].rstrip("s"))] for name, own in self.gains.items()}
        found["checks"] = [checks_table(self.checks)]
        if results.runs:
            found |= {
                "runs": [runs_table(results)],
                "plateau": [onset_table(results)],
                "scores": [score_table(results, budget) for budget in budgets],
                "inside": [score_table(results, budget, is_inside=True) for budget in budgets],
                "cost": [cost_table(results)] if max(run.workers for run in results.runs) < 2 else [],
                "throughput": [throughput_table(results.runs)],
            }
        return {name: [table for table in found.get(name, []) if table.rows] for name in NAMES}

    @property
    def blocks(self) -> dict[str, str]:
        """Name → tables as Markdown."""
        return {name: "\n\n".join(map(str, tables)) for name, tables in self.tables.items()}

    def write(self, missing: Sequence[str] = (), times: Mapping[str, tuple[int, float]] | None = None) -> str:
        """Write all files into the folder; return a line that names them, after one about missing samples.

        `missing` are sentences about what the page lacks, `times` the number and seconds of finished jobs by kind.
        """
        figures = self.draw()
        tables = {
            f"{name}-{number}" if len(self.tables[name]) > 1 else name: table
            for name in NAMES
            for number, table in enumerate(self.tables[name], 1)
        }
        text = self.text(figures, missing, times or {})
        texts = {
            "page.md": text,
            "page.html": to_html(text, "Comparison of models", self.folder),
            "results.json": json.dumps(self.numbers(), indent=1) + "\n",
        }
        written = write_page(self.folder, texts, dict.fromkeys(NAMES) | tables, {})
        return "\n".join([*missing_samples(self.runs), f"{written}; {len(figures)} figures written"])

    def draw(self) -> dict[str, str]:
        """Draw the figures that have data; return name → caption."""
        figures = {name: (partial(draw, self.results), caption) for name, (draw, caption) in FIGURES.items()}
        figures |= {name: (partial(draw_gains, self.results, found), "") for name, found in self.gains.items()}
        draws = {f"{name}.png": draw if self.results.runs else lambda: None for name, (draw, _) in figures.items()}
        drawn = plotting.save_figures(self.folder / "figures", draws)
        return {name: caption for name, (_, caption) in figures.items() if f"{name}.png" in drawn}

    def text(self, figures: Mapping[str, str], missing: Sequence[str], times: Mapping[str, tuple[int, float]]) -> str:
        """Return the text of page.md. `figures` maps names to captions."""
        jobs = [f"{count} x {kind_name(kind)}, {duration(seconds)}" for kind, (count, seconds) in times.items()]
        return render_page(
            "compare.md.jinja",
            blocks=self.blocks,
            figures=figures,
            sections=self._sections(figures),
            results=self.results,
            facts=facts(self.results.runs),
            seeds=sorted({run.seed for run in self.results.runs}),
            missing=missing,
            unused=self.unused,
            times="; ".join(jobs),
            intervals=sum(gain.seeds.interval is not None for found in self.gains.values() for gain in found),
            samples=BOOTSTRAP_SAMPLES,
            rate=FALSE_DISCOVERIES,
            fewest=FEWEST_SEEDS,
            paper=paper_table() if GLUE in self.results.measures else "",
            maps={run.arm.label: run.maps for run in self.runs if run.maps and (self.folder / run.maps).is_file()},
        )

    def _sections(self, figures: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Return title → name → text of each part of a section that has one: a figure, a table, or both.

        Tables of all models by other measures than the loss are files only: their figure shows the same numbers.
        """
        texts: dict[str, str] = {}
        for name in itertools.chain(*SECTIONS.values()):
            table, caption = self.blocks.get(name, ""), figures.get(name, "")
            if name in figures:
                table = f"Numbers: `tables/{name}.csv`." if name.startswith("models-") else table
                picture = f"![{caption.partition(':')[0] or name}](figures/{name}.png)"
                table = "\n\n".join(filter(None, (picture, caption, table)))
            texts[name] = table
        return {
            title: found
            for title, names in SECTIONS.items()
            if (found := {name: texts[name] for name in names if texts[name]})
        }

    def numbers(self) -> dict[str, Any]:
        """Return the content of results.json."""
        found = [(self.results, gain) for own in self.gains.values() for gain in own]
        found += [(check, gain) for check, own in self.checks.items() for gain in own]
        return {
            "gains": [
                {
                    "check": results.check,
                    "claim": gain.text,
                    "measure": gain.measure,
                    "measured_on": basis_of(results, gain.measure),
                    "paper": gain.paper,
                    "budget": gain.budget,
                }
                | gain.as_json()
                | {"first": gain.first.label, "second": gain.second.label}
                for results, gain in found
            ],
            "values": [
                {"check": results.check, "budget": budget, "model": arm.label, "measure": measure, "by_seed": by_seed}
                for results in (self.results, *self.checks)
                for budget in results.budgets
                for arm in results.arms_at(budget)
                for measure in results.measures
                if (by_seed := results.of(measure, arm, budget))
            ],
            "onsets": [
                dict(zip(table.header, row, strict=True)) for table in self.tables["plateau"] for row in table.rows
            ],
        }

    def replace_tables(self, path: Path) -> str:
        """Replace the blocks `compare NAME` of a Markdown file; return a line about it.

        Raises:
            UserError: the file is missing or not UTF-8, has no block, an unknown one, or one without an end.
        """
        texts = {name: text or "These rows have no such numbers." for name, text in self.blocks.items()}
        names = write_blocks(path, BLOCK, texts)
        return f"{path}: {len(names)} tables replaced: {', '.join(names)}"


def missing_samples(runs: Sequence[RunRow]) -> list[str]:
    """Return a line about the runs without samples that have a measure of which other runs have them."""
    measures = {measure for run in runs for measure in run.samples}
    without = [run for run in runs if not run.samples and measures & run.values.keys()]
    more = f" and {len(without) - 1:,} more files" if len(without) > 1 else ""
    files = [samples_file(Path(), vars(run)) for run in without[:1]]
    return [f"{file}{more}: missing; differences of these runs have no interval over items" for file in files]


def facts(runs: Sequence[RunRow]) -> list[str]:
    """Return one sentence per fact about some runs."""
    names = list(dict.fromkeys(name for run in runs for name in run.common))
    values = {name: dict.fromkeys(str(run.common.get(name, "not given")) for run in runs) for name in names}
    shared = [(name, runs[0].common[name]) for name in names if len(values[name]) == 1]
    lines = [f"Flags of every run: `{' '.join(flag_words(shared))}`."] * bool(shared)
    lines += [_difference(name, list(values[name]), runs) for name in names if len(values[name]) > 1]
    examples = {f"{name} {one['train_examples']:,} and {one['dev_examples']:,}" for run in runs
                for name, one in run.tasks.items() if {"train_examples", "dev_examples"} <= one.keys()}  # fmt: skip
    lines += [f"Examples for training and for scores: {', '.join(sorted(examples))}."] * bool(examples)
    lines += [f"Hardware: {line}." for line in dict.fromkeys(run.hardware for run in runs) if line]
    if len(baselines := dict.fromkeys(run.baseline for run in runs if run.baseline)) > 1:
        lines.append(f"Rows name the baselines {', '.join(baselines)}: the one whose run comes first counts.")
    levels = sorted(run.unigram_loss for run in runs if run.unigram_loss)
    if levels and levels[-1] - levels[0] >= SAME_TEXT:
        lines.append(
            f"The training texts of seeds or budgets differ: unigram levels from {levels[0]:.2f} to {levels[-1]:.2f}."
        )
    pairs = dict.fromkeys((sum(run.pairs.values()), len(run.paradigms)) for run in runs if run.paradigms)
    lines += [f"Minimal pairs: {number:,} of {kinds} paradigms." for number, kinds in pairs if len(pairs) > 1]
    versions = dict.fromkeys(", ".join(map(" ".join, run.versions.items())) for run in runs)
    lines += [f"Versions: {line}." for line in versions if line]
    if (workers := max((run.workers for run in runs), default=1)) > 1:
        lines.append(f"Up to {workers} jobs shared the machine, so times of steps are no benchmark.")
    undefined = [f"{', '.join(run.undefined)} of {run.run}" for run in runs if run.undefined]
    return lines + [f"Values that are not finite are left out: {'; '.join(undefined)}."] * bool(undefined)


def _difference(name: str, values: Sequence[str], runs: Sequence[RunRow]) -> str:
    """Return a sentence about a flag that differs: the budgets of each value, with the seeds or models it belongs to.

    Where all models of a seed have one value, it names the seeds: then no paired difference comes from the flag.
    """
    parts = []
    for value in values:
        places = []
        for budget in dict.fromkeys(run.budget for run in runs):
            here = [run for run in runs if run.budget == budget]
            own = [run for run in here if str(run.common.get(name, "not given")) == value]
            seeds = sorted({run.seed for run in own})
            which = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
            if {run.seed for run in here if run not in own} & set(seeds):
                which = ", ".join(dict.fromkeys(run.arm.label for run in own))
            places += [budget if own == here else f"{budget} ({which})"] * bool(own)
        parts.append(f"{value} at {', '.join(places)}")
    return f"Flag that differs: `--{name.replace('_', '-')}` is {'; '.join(parts)}."
