"""report.md: the facts of the runs, their curves in numbers, scores, commands and versions."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ddrp.pages.machine import versions
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.pages.plotting import thousands
from megatron_ddrp.pages.rendering import render
from megatron_ddrp.report.curves import LEARNING, Panel, Rows, Series, logged, loss_panel, majority, perplexity

Facts = Mapping[str, Sequence[tuple[str, str]]]
"""Run's name → the (name, value) pairs of its head."""


@dataclass(frozen=True)
class Extras:
    """Parts of the page that the user asks for."""

    unigram: float | None = None
    """Entropy in nats of the corpus's pieces."""
    scores: str | None = None
    """Text of a table.md."""
    remark: str | None = None
    """Paragraph of Markdown above the scores."""
    commands: str | None = None
    """Command lines that made the run."""


def page(runs: Mapping[str, Rows], facts: Facts, figures: Mapping[str, str], extras: Extras) -> str:
    """Return the text of report.md; `figures` are titles → files, and the first of `runs` is the report's own."""
    valid = loss_panel(runs).validated(next(iter(runs.values())))
    unigram, scores, commands = extras.unigram, extras.scores, extras.commands
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores"
    return render(
        "report.md.jinja",
        facts=_side_by_side(facts),
        figures=figures,
        summary=summary(runs),
        unigram=unigram,
        gap=unigram - valid[-1][1] if unigram is not None and valid else None,
        # The table's headings go down, into this page's section.
        scores=re.sub("^#", "###", scores.strip(), flags=re.MULTILINE) if scores is not None else None,
        remark=extras.remark,
        commands=commands.strip().split("\n") if commands is not None else None,
        versions=Table(["", ""], [*versions().items(), ("machine", machine)], wordy=(1,)),
    )


def _side_by_side(facts: Facts) -> Table:
    """Return the facts of the runs, one column per run."""
    names = list(dict.fromkeys(name for pairs in facts.values() for name, _ in pairs))
    columns = [dict(pairs) for pairs in facts.values()]
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    header = ["", *facts] if len(facts) > 1 else ["", ""]
    return Table(header, rows, wordy=range(1, len(header)))


def summary(runs: Mapping[str, Rows]) -> Table:
    """Return the first and last value of each curve, run by run where there are several."""
    lines: list[list[str]] = []
    for name, rows in runs.items():
        of_run = f" of {name}" if len(runs) > 1 else ""
        loss = loss_panel({name: rows})
        losses = loss.validated(rows)
        lines += _of_panel(loss, rows, of_run)
        lines += _ends(f"perplexity, validation{of_run}", [(step, perplexity(value)) for step, value in losses])
        for panel in logged(LEARNING, {name: rows}):
            lines += _of_panel(panel, rows, of_run)
        lines += _ends(f"majority: every token an original [%]{of_run}", majority(rows))
    return Table(["curve", "first", "last", "at step"], lines)


def _of_panel(panel: Panel, rows: Rows, of_run: str) -> list[list[str]]:
    trained = _ends(f"{panel.label}, training{of_run}", panel.trained(rows))
    return trained + _ends(f"{panel.label}, validation{of_run}", panel.validated(rows))


def _ends(label: str, values: Series) -> list[list[str]]:
    """Return one line of the summary; none without values."""
    if not values:
        return []
    label = label.replace("[", "(").replace("]", ")")  # plain in a table's source
    return [[label, _number(values[0][1]), _number(values[-1][1]), f"{values[-1][0]:,}"]]


def _number(value: float) -> str:
    return thousands(value) if abs(value) >= 100 else f"{value:.3f}"
