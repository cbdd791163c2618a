"""A short report of a run: loss curves, fine-tuning scores, the commands that made them, and versions.

    megatron-ddrp report --load runs/ddrp --scores-dir runs/ddrp/glue --output-dir runs/ddrp/report
    megatron-ddrp report --load runs/tnf --beside runs/bert --output-dir runs/tnf/report

Writes report.md and losses.png. With --data-path the figure marks the unigram level: the loss of a model that knows
how often each piece occurs and nothing else. A masked-LM loss below it has learnt from context. Of an ELECTRA run it
shows the discriminator's accuracy beside the majority, which is that of calling every token an original.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.errors import UserError
from megatron_ddrp.run.metrics import METRICS, Row, ends_in_half_a_line, read_rows
from megatron_ddrp.tasks.machine import versions
from megatron_ddrp.tasks.markdown import Table
from megatron_ddrp.tasks.pages import render, require_packages

FIGURE = "losses.png"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"  # the first two colours of all our figures

Rows = list[Row]
"""Rows of one run's metrics.jsonl."""

Series = list[tuple[int, float]]
"""(iteration, value) pairs."""


class Curve(NamedTuple):
    label: str
    values: Series
    color: str
    style: str


def read_metrics(folder: Path) -> Rows:
    """Return the rows of metrics.jsonl. Raises `UserError` where there is none."""
    path = folder / METRICS
    if not path.is_file():
        raise UserError(f"{path}: no such file; --load takes the --save folder of a pre-training run")
    rows = read_rows(folder)
    if not rows:
        raise UserError(f"{path} is empty: the run has logged nothing yet")
    if ends_in_half_a_line(folder):
        print(f"{path}: left out the half line at its end", file=sys.stderr)
    return rows


def series(rows: Rows, key: str) -> Series:
    """Return the values of one metric, where it was logged and finite."""
    return [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]


def unigram_level(prefix: str) -> float:
    """Return the entropy in nats of the pieces of a dataset, taken one by one."""
    counts = np.zeros(0, dtype=np.int64)
    for tokens in IndexedDataset(prefix).chunks():
        found = np.bincount(tokens, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def read_text(path: Path) -> str:
    """Return the text of a file. Raises `UserError` where it is empty or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8: damaged; make it again") from None
    if not text.strip():
        raise UserError(f"{path} is empty: make it again")
    return text


def panels(rows: Rows) -> dict[str, list[Curve]]:
    """Return the curves below the masked-LM losses, by the label of their axis; only those that were logged."""
    majority = [(step, 1 - share) for step, share in series(rows, "valid_replaced_share")]
    every = {
        "mean cosine": [
            Curve("TCD: mean cosine of tokens", series(rows, "tcd_loss"), BLUE, "-"),
            Curve("HCD: mean cosine of heads", series(rows, "hcd_loss"), ORANGE, "--"),
        ],
        "RTD accuracy": [
            Curve("RTD accuracy, validation", series(rows, "valid_rtd_accuracy"), BLUE, "-"),
            Curve("majority: every token an original", majority, GREY, ":"),
        ],
        "recall": [Curve("replaced tokens found, validation", series(rows, "valid_rtd_recall"), ORANGE, "--")],
    }
    logged = {name: [curve for curve in curves if curve.values] for name, curves in every.items()}
    return {name: curves for name, curves in logged.items() if curves}


def draw_losses(rows: Rows, beside: dict[str, Rows], unigram: float | None, path: Path) -> None:
    """Draw the masked-LM losses, those of the runs `beside` by name, and below them the curves of `panels`."""
    from megatron_ddrp.analysis.figures import COLORS, MARKERS, pyplot, save_figure

    plt, lower = pyplot(), panels(rows)
    heights = [3] + [2] * len(lower)
    figure, axes = plt.subplots(
        len(heights), 1, sharex=True, squeeze=False, figsize=(8, 1.5 * sum(heights)),
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    top = axes[0, 0]
    train, valid = series(rows, "lm_loss"), series(rows, "valid_lm_loss")
    top.plot(*zip(*train, strict=True), color=BLUE, linewidth=1.2, label="training")
    if valid:
        top.plot(*zip(*valid, strict=True), color=ORANGE, marker="o", markersize=5, linewidth=2, label="validation")
    styles = cycle(zip(COLORS[2:], MARKERS[1:], strict=False))
    for (name, others), (color, marker) in zip(beside.items(), styles, strict=False):
        if values := series(others, "valid_lm_loss"):
            label = f"validation of {name}"
            top.plot(*zip(*values, strict=True), color=color, marker=marker, markersize=5, linewidth=1.6, label=label)
    if unigram is not None:
        top.axhline(unigram, color=GREY, linestyle=":", linewidth=2, label=f"unigram level ({unigram:.2f})")
    top.set_ylabel("generator's loss [nats]" if "RTD accuracy" in lower else "masked-LM loss [nats]")
    top.set_title("Pre-training")
    for axis, (name, curves) in zip(axes[1:, 0], lower.items(), strict=True):
        for label, values, color, style in curves:
            axis.plot(*zip(*values, strict=True), color=color, linestyle=style, linewidth=1.6, label=label)
        axis.set_ylabel(name)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    axes[-1, 0].set_xlabel("step")
    save_figure(plt, figure, path)


def summary(rows: Rows, beside: dict[str, Rows]) -> Table:
    """Return the first and last value of each curve."""
    curves = {
        "masked LM, training": series(rows, "lm_loss"),
        "masked LM, validation": series(rows, "valid_lm_loss"),
        **{f"masked LM, validation of {name}": series(others, "valid_lm_loss") for name, others in beside.items()},
        "RTD loss, validation": series(rows, "valid_rtd_loss"),
        **{curve.label: curve.values for below in panels(rows).values() for curve in below},
    }
    ends = [
        [label, f"{values[0][1]:.3f}", f"{values[-1][1]:.3f}", str(values[-1][0])]
        for label, values in curves.items()
        if values
    ]
    return Table(["curve", "first", "last", "at step"], ends)


def report(
    rows: Rows,
    beside: dict[str, Rows],
    unigram: float | None,
    scores: str | None,
    remark: str | None,
    commands: str | None,
) -> str:
    """Return the text of report.md; `scores` is a table.md, and `remark` a paragraph of Markdown above it."""
    seconds = [row["step_time"] for row in rows if "step_time" in row]
    valid = series(rows, "valid_lm_loss")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores"
    return render(
        "report.md.jinja",
        figure=FIGURE,
        summary=summary(rows, beside),
        unigram=unigram,
        gap=unigram - valid[-1][1] if unigram is not None and valid else None,
        step_time=float(np.median(seconds)) if seconds else None,
        # The table's headings go down, into this page's section.
        scores=re.sub("^#", "###", scores.strip(), flags=re.MULTILINE) if scores is not None else None,
        remark=remark,
        commands=commands.strip().split("\n") if commands is not None else None,
        versions=Table(["", ""], [*versions().items(), ("machine", machine)], wordy=(1,)),
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="--save folder of a pre-training run")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="DIR", help="other runs to draw beside it"
    )
    parser.add_argument("--data-path", metavar="P", help="its dataset's prefix, for the unigram level")
    parser.add_argument(
        *("--scores-dir", "--glue-dir"),
        type=Path,
        metavar="DIR",
        help="--output-dir of megatron-ddrp finetune or megatron-ddrp glue (--glue-dir is the older name)",
    )
    parser.add_argument("--note", dest="remark", metavar="TEXT", help="a sentence above the scores, in Markdown")
    parser.add_argument("--commands", type=Path, metavar="FILE", help="the command lines that made the run")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="for report.md and the figure")
    arguments = parser.parse_args()
    require_packages("plots", "matplotlib")
    rows = read_metrics(arguments.load)
    beside = {str(folder): read_metrics(folder) for folder in arguments.beside}
    unigram = unigram_level(arguments.data_path) if arguments.data_path else None
    scores = read_text(arguments.scores_dir / "table.md") if arguments.scores_dir else None
    commands = read_text(arguments.commands) if arguments.commands else None
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    draw_losses(rows, beside, unigram, arguments.output_dir / FIGURE)
    with AtomicFile(arguments.output_dir / "report.md") as stream:
        stream.write(report(rows, beside, unigram, scores, arguments.remark, commands).encode())
    print(f"{arguments.output_dir / 'report.md'} written")
