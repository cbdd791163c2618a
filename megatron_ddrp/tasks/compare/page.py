"""Page of an experiment: page.md, page.html, results.json, tables and figures, from rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.errors import UserError
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.pages.rendering import render, write_page
from megatron_ddrp.pages.tables import write_tables
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.blocks import block_names, replace_blocks
from megatron_ddrp.tasks.compare.arms import Arm
from megatron_ddrp.tasks.compare.claims import Claim, Gain, claims_of, gains, load_claims, model_claims
from megatron_ddrp.tasks.compare.facts import facts
from megatron_ddrp.tasks.compare.figures import draw_all
from megatron_ddrp.tasks.compare.jobs import shown_kind
from megatron_ddrp.tasks.compare.results import Results, check_places, checks_of
from megatron_ddrp.tasks.compare.rows import Run
from megatron_ddrp.tasks.compare.tables import (
    cost_table,
    gain_table,
    paper_table,
    runs_table,
    score_table,
    table_of,
    throughput_table,
)
from megatron_ddrp.tasks.measures import GLUE, LOSS
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES, FALSE_DISCOVERIES

BLOCK = "compare "
"""Begin of the names of our blocks in documents."""
GROUPS = ("", "-glue", "-minimal-pairs", "-tasks", "-inside")
NAMES = ("runs", *(f"claims{group}" for group in GROUPS), *(f"models{group}" for group in GROUPS[:4]))
NAMES += ("scores", "inside", "checks", "cost", "throughput")
"""Names of the tables that `--tables` knows."""


class Page:
    """Page of some runs."""

    def __init__(self, runs: Sequence[Run], folder: Path, claims: Path | None = None):
        """Judge the claims of a file, by default the paper's, about the runs, whose page is to stand in the folder."""
        check_places(runs)
        self.folder, self.runs = folder, runs
        self.results = Results(runs)
        self.checks = [Results(runs, check) for check in checks_of(runs)]
        self.gains: dict[str, list[Gain]] = {}
        """Name of a table → its gains, judged together."""
        self.unused: list[str] = []
        """Sentences about the claims of the user's file that no runs are about."""
        if self.results.runs:
            found, unused = claims_of(self.results, load_claims(claims))
            self.unused = unused if claims else []
            self._judge("claims", found)
            self._judge("models", model_claims(self.results, found))
        self.of_checks = {check.check: gains(check, _over_baseline(check)) for check in self.checks}

    def _judge(self, name: str, claims: Sequence[Claim]) -> None:
        for group in GROUPS:
            own = [claim for claim in claims if table_of(claim.measure) == group]
            if found := gains(self.results, own):
                self.gains[name + group] = found

    @cached_property
    def tables(self) -> dict[str, list[Table]]:
        """Name → tables, for every one of `NAMES`; those without rows are left out."""
        results, budgets = self.results, self.results.budgets
        found = {name: [gain_table(results, own, name[:6].rstrip("s"))] for name, own in self.gains.items()}
        found["checks"] = [
            score_table(check, budget, found=self.of_checks[check.check])
            for check in self.checks
            for budget in check.budgets
        ]
        if results.runs:
            found |= {
                "runs": [runs_table(results)],
                "scores": [score_table(results, budget) for budget in budgets],
                "inside": [score_table(results, budget, is_inside=True) for budget in budgets],
                "cost": [cost_table(results)],
                "throughput": [throughput_table(results.runs)],
            }
        return {name: [table for table in found.get(name, []) if table.rows] for name in NAMES}

    @property
    def blocks(self) -> dict[str, str]:
        """Name → tables as Markdown."""
        return {name: "\n\n".join(map(str, tables)) for name, tables in self.tables.items()}

    def write(self, missing: Sequence[str] = (), times: Mapping[str, tuple[int, float]] | None = None) -> str:
        """Write all files into the folder; return a line that names them.

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
        return f"{self.folder / 'page.html'}, page.md, results.json, tables/ and {len(figures)} figures written"

    def text(self, figures: Mapping[str, str], missing: Sequence[str], times: Mapping[str, tuple[int, float]]) -> str:
        """Return the text of page.md. `figures` maps names to captions."""
        jobs = [f"{count} x {shown_kind(kind)}, {duration(seconds)}" for kind, (count, seconds) in times.items()]
        return render(
            "compare.md.jinja",
            blocks=self.blocks,
            figures=figures,
            filled=[name for name, text in self.blocks.items() if text] + list(figures),
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

    def numbers(self) -> dict[str, Any]:
        """Return the content of results.json."""
        found = [("", gain) for own in self.gains.values() for gain in own]
        found += [(check, gain) for check, own in self.of_checks.items() for gain in own]
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
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a Markdown file") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8; give a Markdown file") from None
        names = [name.removeprefix(BLOCK) for name in block_names(text, BLOCK)]
        unknown = [name for name in names if name not in NAMES]
        if unknown or not names:
            got = f"unknown table {unknown[0]!r}" if unknown else f"no line <!-- {BLOCK}NAME -->"
            raise UserError(f"{path}: {got}; expected one of {', '.join(NAMES)}")
        for name in names:
            try:
                text = replace_blocks(text, BLOCK + name, self.blocks[name] or "These rows have no such numbers.")
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
        write_text(path, text)
        return f"{path}: {len(names)} tables replaced: {', '.join(names)}"


def _over_baseline(check: Results) -> list[Claim]:
    """Return the claims that the arms of a check gain over its baseline by the loss."""
    base: Arm = check.baseline
    return [Claim(f"{arm.label} over {base.label}", LOSS, arm, base) for arm in check.arms if arm != base]


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
