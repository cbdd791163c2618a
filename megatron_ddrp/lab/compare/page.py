"""Page of an experiment: page.md, page.html, results.json, tables and figures, from rows alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ddrp.config import flag_words
from megatron_ddrp.lab.compare.figures import FIGURES, draw_all
from megatron_ddrp.lab.compare.rows import RunRow, samples_file
from megatron_ddrp.lab.compare.runs import kind_name
from megatron_ddrp.lab.compare.tables import (
    SAME_TEXT,
    Gain,
    Results,
    check_places,
    checks_of,
    checks_table,
    claims_of,
    cost_table,
    gain_table,
    gains,
    load_claims,
    model_claims,
    paper_table,
    runs_table,
    score_table,
    table_of,
    throughput_table,
)
from megatron_ddrp.pages.markdown import Table, render_page, write_blocks, write_page, write_tables
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES, FALSE_DISCOVERIES, GLUE, LOSS

BLOCK = "compare "
"""Begin of the names of our blocks in documents."""
GROUPS = ("", "-onset", "-glue", "-minimal-pairs", "-tasks", "-inside")
"""Ends of the names of tables of gains, see `table_of`."""
SECTIONS = {
    "Claims": [f"claims{group}" for group in GROUPS],
    "Models over the baseline": [f"models{group}" for group in GROUPS[:-1]],
    "Curves": ["losses", "curves", "onsets", "budgets", "glue-curve"],
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
        self.results = Results(runs)
        self.gains: dict[str, list[Gain]] = {}
        """Name of a table → its gains, judged together."""
        self.unused: list[str] = []
        """Sentences about the claims of the user's file that no runs are about."""
        if self.results.runs:
            found, unused = claims_of(self.results, load_claims(claims))
            self.unused = unused if claims else []
            by_name = {"claims": found, "models": model_claims(self.results, found)}
            for (name, claimed), group in itertools.product(by_name.items(), GROUPS):
                own = [claim for claim in claimed if table_of(claim.measure) == group]
                self.gains |= {name + group: judged} if (judged := gains(self.results, own)) else {}
        self.checks = {
            check: gains(check, [claim for claim in model_claims(check) if claim.measure == LOSS])
            for check in checks_of(runs)
        }
        """Side experiment → its gains by the loss, judged together."""

    @cached_property
    def tables(self) -> dict[str, list[Table]]:
        """Name → tables, for every one of `NAMES`; those without rows are left out."""
        results, budgets = self.results, self.results.budgets
        found = {name: [gain_table(results, own, name[:6].rstrip("s"))] for name, own in self.gains.items()}
        found["checks"] = [checks_table(self.checks)]
        if results.runs:
            found |= {
                "runs": [runs_table(results)],
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
        figures = draw_all(self.results, self.gains, self.folder / "figures")
        files = {
            f"{name}-{number}" if len(self.tables[name]) > 1 else name: table
            for name in NAMES
            for number, table in enumerate(self.tables[name], 1)
        }
        write_tables(self.folder / "tables", dict.fromkeys(NAMES) | files)
        text = self.text(figures, missing, times or {})
        write_page(self.folder, text, "Comparison of models", self.numbers())
        written = f"{self.folder / 'page.html'}, page.md, results.json, tables/ and {len(figures)} figures written"
        return "\n".join([*missing_samples(self.runs), written])

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
        found = [("", gain) for own in self.gains.values() for gain in own]
        found += [(check.check, gain) for check, own in self.checks.items() for gain in own]
        return {
            "gains": [_as_json(check, gain) for check, gain in found],
            "values": [
                {"check": results.check, "budget": budget, "model": arm.label, "measure": measure, "by_seed": by_seed}
                for results in (self.results, *self.checks)
                for budget in results.budgets
                for arm in results.arms_at(budget)
                for measure in results.measures
                if (by_seed := results.of(measure, arm, budget))
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


def _as_json(check: str, gain: Gain) -> dict[str, Any]:
    claim, seeds = gain.claim, gain.seeds
    return {
        "check": check,
        "claim": claim.text,
        "measure": claim.measure,
        "first": claim.first.label,
        "second": claim.second.label,
        "paper": claim.paper,
        "budget": gain.budget,
        "by_seed": seeds.by_seed,
        "n": len(seeds.values),
        "mean": seeds.mean,
        "deviation": seeds.deviation,
        "over_seeds": seeds.interval,
        "over_items": gain.items,
        "p": seeds.p_value,
        "judgement": gain.word or None,
    }


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
        lines.append(f"Up to {workers} jobs shared the machine, so times of steps are no benchmark and have no table.")
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
