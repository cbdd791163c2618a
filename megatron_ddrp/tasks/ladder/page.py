"""Page of a ladder: page.md, page.html, results.json and figures, from rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.errors import UserError
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.pages.rendering import render, write_page
from megatron_ddrp.tasks.blocks import block_names, replace_blocks
from megatron_ddrp.tasks.ladder.as_json import results
from megatron_ddrp.tasks.ladder.claims import Judged, check_claims, judge, model_claims, paper_claims
from megatron_ddrp.tasks.ladder.facts import facts
from megatron_ddrp.tasks.ladder.figures import draw_all
from megatron_ddrp.tasks.ladder.ladder import Ladder, check_ladder
from megatron_ddrp.tasks.ladder.minimal_pairs import pairs_table
from megatron_ddrp.tasks.ladder.rows import Run
from megatron_ddrp.tasks.ladder.summary import summary
from megatron_ddrp.tasks.ladder.tables import (
    check_tables,
    claims_table,
    flag_tables,
    of_measure,
    runs_table,
    score_tables,
    seeds_table,
)
from megatron_ddrp.tasks.ladder.verdicts import definitions

BLOCK = "ladder "
"""Begin of the names of our blocks in documents."""
CLAIMS = ("claims", "claims-glue", "claims-minimal-pairs", "claims-inside")
NAMES = ("summary", "runs", "verdicts", *CLAIMS, "models", "seeds", "minimal-pairs", "scores", "inside", "checks")
"""Names of the tables that `--tables` knows."""


class LadderPage:
    """Page of some runs, and its parts for other pages."""

    def __init__(self, runs: Sequence[Run], folder: Path):
        """Judge the claims about the runs, whose page is to stand in the folder."""
        self.folder = folder
        self.ladder = Ladder(runs)
        self.checks = {name: check_ladder(runs, name) for name in dict.fromkeys(run.check for run in runs) if name}
        self.flags = flag_tables(runs)
        self.judged = judge(self.ladder, paper_claims(self.ladder))
        self.models = judge(self.ladder, model_claims(self.ladder))

    @cached_property
    def blocks(self) -> dict[str, str]:
        """Name → table as Markdown, for every one of `NAMES`; empty if there is nothing to show."""
        ladder, checks = self.ladder, [*check_tables(self.checks), *self.flags]
        if not ladder.runs:
            found = {"summary": "All rows belong to checks." * bool(checks), "checks": "\n\n".join(map(str, checks))}
            return dict.fromkeys(NAMES, "") | found
        tables: dict[str, list[Table]] = {
            "runs": [runs_table(ladder)],
            **{name: [claims_table(name, of_measure(self.judged, name), ladder)] for name in CLAIMS},
            "models": [claims_table("models", self.models, ladder)],
            "seeds": [seeds_table(self.judged, ladder)],
            "minimal-pairs": [pairs_table(ladder)],
            "scores": score_tables(ladder, is_inside=False),
            "inside": score_tables(ladder, is_inside=True),
            "checks": checks,
        }
        shown = {name: "\n\n".join(str(table) for table in found if table.rows) for name, found in tables.items()}
        return {"summary": summary(ladder, self.judged), "verdicts": definitions(len(ladder.rungs))} | shown

    @property
    def gains(self) -> dict[str, list[Judged]]:
        """Figure of gains → its claims: the paper's by validation loss, then models that no claim of it is about."""
        claims = [item for item in of_measure(self.judged, "claims") if not item.claim.first.half]
        pairs = {(item.claim.first, item.claim.second) for item in claims}
        others = [item for item in self.models if (item.claim.first, item.claim.second) not in pairs]
        return {"gains": claims, "gains-others": others}

    def draw(self) -> list[str]:
        """Draw the figures that have data into the folder; return their names."""
        return draw_all(self.ladder, self.gains, self.folder / "figures")

    def write(self) -> str:
        """Write all files into the folder; return a line that names them."""
        figures = self.draw()
        text = self.text(figures)
        checks = {name: results(check, judge(check, check_claims(check))) for name, check in self.checks.items()}
        numbers = results(self.ladder, self.judged + self.models) | {"checks": checks}
        write_page(self.folder, text, "The paper's claims as the budget grows", numbers)
        return f"{self.folder / 'page.html'}, page.md, results.json and {len(figures)} figures written"

    def text(self, figures: Sequence[str]) -> str:
        """Return the text of page.md with these figures."""
        return render(
            "ladder.md.jinja",
            blocks=self.blocks,
            figures=figures,
            seeds=sorted({run.seed for run in self.ladder.runs}),
            facts=facts(self.ladder),
        )

    def replace_tables(self, path: Path) -> str:
        """Replace the blocks `ladder NAME` of a Markdown file; return a line about it.

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
            got = f"unknown table {unknown[0]!r}" if unknown else "no line <!-- ladder NAME -->"
            raise UserError(f"{path}: {got}; expected one of {', '.join(NAMES)}")
        for name in names:
            try:
                text = replace_blocks(text, BLOCK + name, self.blocks[name] or "These rows have no such numbers.")
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
        write_text(path, text)
        return f"{path}: {len(names)} tables replaced: {', '.join(names)}"
