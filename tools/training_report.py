#!/usr/bin/env python
"""A short report of a run: loss curves, fine-tuning scores, the commands that made them, and versions.

    python tools/training_report.py --load runs/ddrp --glue-dir runs/ddrp/glue --output-dir runs/ddrp/report
    python tools/training_report.py --load runs/tnf --beside runs/bert --output-dir runs/tnf/report

Writes report.md and losses.png. With --data-path the figure marks the unigram level: the loss of a model that knows
how often each piece occurs and nothing else. A masked-LM loss below it has learnt from context. Of an ELECTRA run it
shows the discriminator's accuracy beside the majority, which is that of calling every token an original.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.errors import UserError, run_command
from megatron_ddrp.run.metrics import METRICS, Row, ends_in_half_a_line, read_rows
from megatron_ddrp.tasks import markdown

PACKAGES = ("megatron-ddrp", "torch", "deepspeed", "numpy", "tokenizers", "transformers", "scikit-learn")
FIGURE = "losses.png"

# Okabe and Ito's colours, told apart by readers of every colour vision; the line styles differ as well.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
BESIDE = [("#009E73", "s"), ("#CC79A7", "^"), ("#56B4E9", "D"), ("#E69F00", "v"), ("#000000", "P")]
"""Colour and marker of each run that is drawn beside."""

Rows = list[Row]
"""Of one run's metrics.jsonl."""

Series = list[tuple[int, float]]
"""(iteration, value) pairs."""


class Curve(NamedTuple):
    label: str
    values: Series
    color: str
    style: str


def read_metrics(folder: Path) -> Rows:
    """The rows of metrics.jsonl. Raises `UserError` where there is none."""
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
        found = np.bincount(tokens)
        if len(found) > len(counts):
            found[: len(counts)] += counts
            counts = found
        else:
            counts[: len(found)] += found
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
    """What goes below the masked-LM losses, by the label of the axis: only what was logged."""
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
    """The masked-LM losses, those of the runs `beside` by name, and below them what `panels` gives."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lower = panels(rows)
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
    for (name, others), (color, marker) in zip(beside.items(), cycle(BESIDE), strict=False):
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
        axis.legend()
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def summary(rows: Rows, beside: dict[str, Rows], unigram: float | None) -> list[str]:
    """Return the first and last value of each curve as a table in Markdown."""
    lines = markdown.header(["curve", "first", "last", "at step"])
    curves = {
        "masked LM, training": series(rows, "lm_loss"),
        "masked LM, validation": series(rows, "valid_lm_loss"),
        **{f"masked LM, validation of {name}": series(others, "valid_lm_loss") for name, others in beside.items()},
        "RTD loss, validation": series(rows, "valid_rtd_loss"),
        **{curve.label: curve.values for below in panels(rows).values() for curve in below},
    }
    for label, values in curves.items():
        if values:
            ends = [f"{values[0][1]:.3f}", f"{values[-1][1]:.3f}", str(values[-1][0])]
            lines.append(markdown.row([markdown.escape(label), *ends]))
    valid = series(rows, "valid_lm_loss")
    if unigram is not None and valid:
        gap = unigram - valid[-1][1]
        side = "below" if gap > 0 else "above"
        lines += [
            "",
            f"The unigram level of this corpus is {unigram:.3f} nats; the last validation loss lies "
            f"{abs(gap):.3f} nats {side} it.",
        ]
    return lines


def report(
    rows: Rows,
    beside: dict[str, Rows],
    unigram: float | None,
    scores: str | None,
    note: str | None,
    commands: str | None,
) -> str:
    """Return the text of report.md; `scores` is a table.md, and `note` a paragraph of Markdown above it."""
    seconds = [row["step_time"] for row in rows if "step_time" in row]
    lines = ["# Report", "", "## Pre-training", "", f"![Loss curves]({FIGURE})", "", *summary(rows, beside, unigram)]
    if seconds:
        lines += ["", f"Median time of a step: {float(np.median(seconds)):.3f} s."]
    if scores is not None:
        # The table's headings go down, into this section.
        lines += ["", "## Fine-tuning", "", *([note, ""] if note else [])]
        lines += ["##" + line if line.startswith("#") else line for line in scores.strip().split("\n")]
    if commands is not None:
        lines += ["", "## Commands", "", *markdown.code(commands.strip().split("\n"))]
    lines += ["", "## Versions", "", "| | |", "| --- | --- |", f"| Python | {platform.python_version()} |"]
    for package in PACKAGES:
        try:
            lines.append(f"| {package} | {metadata.version(package)} |")
        except metadata.PackageNotFoundError:
            continue
    lines.append(f"| machine | {platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="--save folder of a pre-training run")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="DIR", help="other runs to draw beside it"
    )
    parser.add_argument("--data-path", metavar="P", help="its dataset's prefix, for the unigram level")
    parser.add_argument("--glue-dir", type=Path, metavar="DIR", help="--output-dir of python -m tasks.glue")
    parser.add_argument("--note", metavar="TEXT", help="a sentence above the scores, in Markdown")
    parser.add_argument("--commands", type=Path, metavar="FILE", help="the command lines that made the run")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="for report.md and the figure")
    arguments = parser.parse_args()
    rows = read_metrics(arguments.load)
    beside = {str(folder): read_metrics(folder) for folder in arguments.beside}
    unigram = unigram_level(arguments.data_path) if arguments.data_path else None
    scores = read_text(arguments.glue_dir / "table.md") if arguments.glue_dir else None
    commands = read_text(arguments.commands) if arguments.commands else None
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        draw_losses(rows, beside, unigram, arguments.output_dir / FIGURE)
    except ImportError:
        raise UserError("the figure needs matplotlib: pip install 'megatron-ddrp[plots]'") from None
    with AtomicFile(arguments.output_dir / "report.md") as stream:
        stream.write(report(rows, beside, unigram, scores, arguments.note, commands).encode())
    print(f"{arguments.output_dir / 'report.md'} written")


if __name__ == "__main__":
    run_command(main)
