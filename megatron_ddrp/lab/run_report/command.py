"""A short report of a run: its facts and curves, fine-tuning scores, the commands that made them, and versions.

    megatron-ddrp report --load runs/ddrp --scores-dir runs/ddrp/glue --output-dir runs/ddrp/report
    megatron-ddrp report --load runs/tnf --beside runs/bert --output-dir runs/tnf/report

Writes report.md, losses.png (losses, perplexity, accuracies, TCD and HCD) and speed.png (learning rate, gradient norm,
tokens per second, memory), each also as .pdf and .svg. The figure marks the unigram level: the loss of a model that
knows how often each piece occurs and nothing else. A model with a lower masked-LM loss has learnt from context. The
report of an ELECTRA run shows the discriminator's accuracy beside the majority: the accuracy of calling every token an
original.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.config.option import Section, option
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.batches.unigram import entropy
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.errors import UserError, need_packages
from megatron_ddrp.foreign import read_text
from megatron_ddrp.lab.run_report.figures import (
    LOSS,
    MetricsRows,
    draw_losses,
    draw_speed,
    learning_panels,
    logged_panels,
)
from megatron_ddrp.run.metrics import METRICS, ends_in_half_a_line, read_rows

LOSSES, SPEED = "losses.png", "speed.png"


def read_metrics(folder: Path, flag: str = "--load") -> MetricsRows:
    """Return the rows of metrics.jsonl. Raises `UserError` if the folder has no such file, or it is empty."""
    path = folder / METRICS
    if not path.is_file():
        raise UserError(f"{path}: no such file; {flag} takes the --save folder of a pre-training run")
    rows = read_rows(folder)
    if not rows:
        raise UserError(f"{path} is empty: the run has logged nothing yet")
    if ends_in_half_a_line(folder):
        say(f"{path}: left out the half line at its end")
    return rows


def read_runs(load: Path, beside: Iterable[Path]) -> dict[Path, MetricsRows]:
    """Return folder → rows of the run and those beside it. Say which folders are left out, or have no curves."""
    runs = {load: read_metrics(load)}
    for folder in beside:
        if any(folder.resolve() == other.resolve() for other in runs):
            say(f"--beside {folder}: left out, it is in the report already")
            continue
        runs[folder] = read_metrics(folder, "--beside")
    for folder, rows in runs.items():
        if not logged_panels([LOSS], {"": rows}) and not learning_panels({"": rows}):
            say(f"{folder / METRICS}: no losses in it; the figure has no curve of this run")
    return runs


def say(line: str) -> None:
    """Print a notice on standard error."""
    print(line, file=sys.stderr)


def unigram_level(prefix: str) -> float:
    """Return the entropy in nats of the pieces of a dataset, taken one by one."""
    return entropy(IndexedDataset(prefix).piece_counts())


def read_words(path: Path) -> str:
    """Return the text of a file. Raises `UserError` if it is empty or not UTF-8."""
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} is empty: make it again")
    return text


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """input and output"""

    load: Path = option(MISSING, "--save folder of a pre-training run", metavar="DIR")
    beside: tuple[Path, ...] = option((), "other runs to draw beside it (default: none)", nargs="+", metavar="DIR")
    data_path: str | None = option(
        None,
        "its dataset's prefix, to count the unigram level of all of it (default: the run's own)",
        metavar="P",
    )
    scores_dir: Path | None = option(
        None,
        "--output-dir of megatron-ddrp finetune or megatron-ddrp glue",
        metavar="DIR",
    )
    note: str | None = option(None, "a sentence above the scores, in Markdown", metavar="TEXT")
    commands: Path | None = option(None, "the command lines that made the run", metavar="FILE")
    output_dir: Path = option(MISSING, "for report.md and the figures", metavar="DIR")


SECTIONS = (Options,)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_sections(ArgumentParser(description=__doc__), SECTIONS, words)
    need_packages("the report", "matplotlib")
    found = read_runs(arguments.load, arguments.beside)
    scores = read_words(arguments.scores_dir / "table.md") if arguments.scores_dir else None
    commands = read_words(arguments.commands) if arguments.commands else None

    from megatron_ddrp.lab.run_report.page import facts, page
    from megatron_ddrp.run.plateau import stored_level  # these load torch

    unigram = unigram_level(arguments.data_path) if arguments.data_path else stored_level(arguments.load)
    runs = {str(folder): rows for folder, rows in found.items()}
    output: Path = arguments.output_dir
    output.mkdir(parents=True, exist_ok=True)
    draw_losses(runs, unigram, output / LOSSES)
    figures = {"Losses and accuracies": LOSSES}
    if draw_speed(runs, output / SPEED):
        figures["Learning rate, gradient norm, speed and memory"] = SPEED
    head = {str(folder): facts(folder, rows) for folder, rows in found.items()}
    write_text(output / "report.md", page(runs, head, figures, unigram, scores, arguments.note, commands))
    print(f"{output / 'report.md'} written")
