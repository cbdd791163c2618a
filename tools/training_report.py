#!/usr/bin/env python
"""A short report of a run: loss curves, fine-tuning scores, the commands that made them, and versions.

    python tools/training_report.py --load runs/ddrp --glue-dir runs/ddrp/glue --output-dir runs/ddrp/report

Writes report.md and losses.png. The figure marks the unigram level: the loss of a model that knows how often each
piece occurs and nothing else. A masked-LM loss below it has learnt from context.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.data.indexed_dataset import IndexedDataset
from megatron_ddrp.errors import UserError, run_command
from megatron_ddrp.log import METRICS, read_rows

PACKAGES = ("megatron-ddrp", "torch", "deepspeed", "numpy", "tokenizers", "transformers", "scikit-learn")
FIGURE = "losses.png"

# Okabe and Ito's colours, told apart by readers of every colour vision; the line styles differ as well.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"

Series = list[tuple[int, float]]
"""(iteration, value) pairs."""


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. Raises `UserError` where there is none."""
    path = folder / METRICS
    if not path.is_file():
        raise UserError(f"{path}: no such file; --load takes the --save folder of a pre-training run")
    rows = read_rows(folder)
    if not rows:
        raise UserError(f"{path} is empty: the run has logged nothing yet")
    return rows


def series(rows: list[dict[str, Any]], key: str) -> Series:
    """The values of one metric, where it was logged."""
    return [(row["iteration"], row[key]) for row in rows if key in row]


def unigram_level(prefix: str) -> float:
    """Entropy in nats of the pieces of a dataset, taken one by one."""
    dataset = IndexedDataset(prefix)
    counts = np.zeros(0, dtype=np.int64)
    for index in range(len(dataset)):
        found = np.bincount(dataset[index])
        if len(found) > len(counts):
            found[: len(counts)] += counts
            counts = found
        else:
            counts[: len(found)] += found
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def draw_losses(rows: list[dict[str, Any]], unigram: float | None, path: Path) -> None:
    """The masked-LM losses and, below them, TCD and HCD where they were logged."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    terms = [
        (label, color, style, series(rows, key))
        for label, key, color, style in (
            ("TCD: mean cosine of tokens", "tcd_loss", BLUE, "-"),
            ("HCD: mean cosine of heads", "hcd_loss", ORANGE, "--"),
        )
        if series(rows, key)
    ]
    heights = [3, 2] if terms else [3]
    figure, axes = plt.subplots(
        len(heights), 1, sharex=True, squeeze=False, figsize=(8, 1.5 * sum(heights)),
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    top = axes[0, 0]
    train, valid = series(rows, "lm_loss"), series(rows, "valid_lm_loss")
    top.plot(*zip(*train, strict=True), color=BLUE, linewidth=1.2, label="training")
    if valid:
        top.plot(*zip(*valid, strict=True), color=ORANGE, marker="o", markersize=5, linewidth=2, label="validation")
    if unigram is not None:
        top.axhline(unigram, color=GREY, linestyle=":", linewidth=2, label=f"unigram level ({unigram:.2f})")
    top.set_ylabel("masked-LM loss [nats]")
    top.set_title("Pre-training")
    for label, color, style, values in terms:
        axes[1, 0].plot(*zip(*values, strict=True), color=color, linestyle=style, linewidth=1.6, label=label)
        axes[1, 0].set_ylabel("mean cosine")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
        axis.legend()
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def summary(rows: list[dict[str, Any]], unigram: float | None) -> list[str]:
    """What the curves say, as a table in Markdown: first and last value of each loss."""
    lines = ["| loss | first | last | at step |", "| --- | ---: | ---: | ---: |"]
    for label, key in (
        ("masked LM, training", "lm_loss"),
        ("masked LM, validation", "valid_lm_loss"),
        ("TCD", "tcd_loss"),
        ("HCD", "hcd_loss"),
    ):
        values = series(rows, key)
        if values:
            lines.append(f"| {label} | {values[0][1]:.3f} | {values[-1][1]:.3f} | {values[-1][0]} |")
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
    rows: list[dict[str, Any]], unigram: float | None, scores: str | None, note: str | None, commands: str | None
) -> str:
    """The text of report.md; `scores` is a table.md, of which `note` says what a reader must know."""
    seconds = [row["step_time"] for row in rows if "step_time" in row]
    lines = ["# Report", "", "## Pre-training", "", f"![Loss curves]({FIGURE})", "", *summary(rows, unigram)]
    if seconds:
        lines += ["", f"Median time of a step: {float(np.median(seconds)):.3f} s."]
    if scores is not None:
        # The table's headings go down, into this section.
        lines += ["", "## Fine-tuning", "", *([note, ""] if note else [])]
        lines += ["##" + line if line.startswith("#") else line for line in scores.strip().split("\n")]
    if commands is not None:
        lines += ["", "## Commands", "", "```", *commands.strip().split("\n"), "```"]
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
    parser.add_argument("--data-path", metavar="P", help="its dataset's prefix, for the unigram level")
    parser.add_argument("--glue-dir", type=Path, metavar="DIR", help="--output-dir of python -m tasks.glue")
    parser.add_argument("--note", metavar="TEXT", help="a sentence above the scores")
    parser.add_argument("--commands", type=Path, metavar="FILE", help="the command lines that made the run")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="for report.md and the figure")
    arguments = parser.parse_args()
    rows = read_metrics(arguments.load)
    unigram = unigram_level(arguments.data_path) if arguments.data_path else None
    scores = (arguments.glue_dir / "table.md").read_text(encoding="utf-8") if arguments.glue_dir else None
    commands = arguments.commands.read_text(encoding="utf-8") if arguments.commands else None
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        draw_losses(rows, unigram, arguments.output_dir / FIGURE)
    except ImportError:
        raise UserError("the figure needs matplotlib: pip install 'megatron-ddrp[plots]'") from None
    with AtomicFile(arguments.output_dir / "report.md") as stream:
        stream.write(report(rows, unigram, scores, arguments.note, commands).encode())
    print(f"{arguments.output_dir / 'report.md'} written")


if __name__ == "__main__":
    run_command(main)
