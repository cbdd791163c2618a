"""report.md: the facts of the runs, their curves in numbers, scores, commands and versions."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ddrp.config import Config, load_config
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.run_report.figures import (
    MetricsRows,
    Panel,
    Series,
    learning_panels,
    loss_panel,
    majority,
    perplexity,
    series,
)
from megatron_ddrp.pages.machine import versions
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.pages.plotting import thousands
from megatron_ddrp.pages.rendering import render
from megatron_ddrp.run.log import duration
from megatron_ddrp.run.plateau import curve_of, is_past, onset, stored_level


def facts(folder: Path, rows: MetricsRows) -> list[tuple[str, str]]:
    """Return (name, value) pairs of a run: model, parameters, batch, tokens seen, speed and time.

    Without config.json, only the facts of metrics.jsonl are returned.
    """
    config, settled = None, []
    if (folder / "config.json").is_file():
        try:
            config = load_config(folder)
            settled = list(_of_config(config))
        except UserError as error:  # damaged, or of a plug-in that was not given
            settled = [("model", f"unknown: {error}")]
    return [*settled, *_of_rows(rows, config), *_of_plateau(rows, stored_level(folder))]


def _of_config(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the facts that follow from the configuration."""
    model, training = config.model, config.training
    yield "model", f"{model.position_encoding} + {config.objective.objective}"
    heads = f"{model.num_attention_heads} heads"
    layers = f"{model.num_layers} layer{'s' * (model.num_layers > 1)}"
    yield "size", f"{layers} x {model.hidden_size}, {heads}, {model.vocab_size:,} pieces"
    from megatron_ddrp.model import count_parameters, on_meta_device  # here, because --help must not import torch

    parameters, of_positions = count_parameters(on_meta_device(model, config.objective))
    yield "parameters", f"{parameters:,} ({of_positions:,} for positions)"
    tokens = training.global_batch_size * model.seq_length
    yield "batch", f"{training.global_batch_size:,} sequences x {model.seq_length:,} tokens = up to {tokens:,} per step"
    yield "precision", training.precision


def _of_rows(rows: MetricsRows, config: Config | None) -> Iterator[tuple[str, str]]:
    """Yield the facts that follow from the rows of metrics.jsonl."""
    last = max(row["iteration"] for row in rows)
    yield "steps", f"{last:,} of {config.training.train_iters:,}" if config else f"{last:,}"
    tokens = [count for _, count in series(rows, "consumed_tokens")]
    if tokens:
        yield "tokens seen, without padding", f"{tokens[-1]:,}"
    seconds = training_seconds(rows)
    if tokens and seconds:
        yield "throughput", f"{tokens[-1] / seconds:,.0f} tokens per second"
    if seconds:
        yield "time per step", f"{statistics.median(time for _, time in series(rows, 'step_time')):.3f} s (median)"
        yield "time of all steps", duration(seconds)
    memory = [gib for _, gib in series(rows, "peak_memory_gib")]
    if memory:
        yield "peak memory of a rank", f"{max(memory):.2f} GiB"


def _of_plateau(rows: MetricsRows, level: float | None) -> Iterator[tuple[str, str]]:
    """Yield when a run left the plateau near the unigram level, if the level is known."""
    if level is not None and (curve := curve_of(rows)):
        left = onset(curve, level)
        resting = "never on it: it began from trained weights" if is_past(curve, level) else "not left yet"
        yield "plateau", f"left after {left:,} tokens" if left else f"{resting} (docs/lab/plateau.md)"


def training_seconds(rows: MetricsRows) -> float:
    """Return the time of all steps: each row's seconds per step times the steps since the row before."""
    total, before = 0.0, 0
    for step, seconds in series(rows, "step_time"):
        total += seconds * (step - before)
        before = step
    return total


Facts = Mapping[str, Sequence[tuple[str, str]]]
"""Run's name → the (name, value) pairs of its head."""


def page(
    runs: Mapping[str, MetricsRows],
    facts: Facts,
    figures: Mapping[str, str],
    unigram: float | None = None,
    scores: str | None = None,
    remark: str | None = None,
    commands: str | None = None,
) -> str:
    """Return the text of report.md.

    `figures` are titles → files, and the first of `runs` is the report's own. `unigram` is the entropy in nats of the
    corpus's pieces, `scores` the text of a table.md, `remark` a paragraph of Markdown above it, and `commands` are the
    command lines that made the run.
    """
    valid = loss_panel(runs).validation_curve(next(iter(runs.values())))
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
        remark=remark,
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


def summary(runs: Mapping[str, MetricsRows]) -> Table:
    """Return the first and last value of each curve, run by run where there are several."""
    lines: list[list[str]] = []
    for name, rows in runs.items():
        of_run = f" of {name}" if len(runs) > 1 else ""
        loss = loss_panel({name: rows})
        losses = loss.validation_curve(rows)
        lines += _of_panel(loss, rows, of_run)
        lines += _ends(f"perplexity, validation{of_run}", [(step, perplexity(value)) for step, value in losses])
        for panel in learning_panels({name: rows}):
            lines += _of_panel(panel, rows, of_run)
        lines += _ends(f"majority: every token an original [%]{of_run}", majority(rows))
    return Table(["curve", "first", "last", "at step"], lines)


def _of_panel(panel: Panel, rows: MetricsRows, of_run: str) -> list[list[str]]:
    trained = _ends(f"{panel.label}, training{of_run}", panel.training_curve(rows))
    return trained + _ends(f"{panel.label}, validation{of_run}", panel.validation_curve(rows))


def _ends(label: str, values: Series) -> list[list[str]]:
    """Return one line of the summary; none without values."""
    if not values:
        return []
    label = label.replace("[", "(").replace("]", ")")  # plain in a table's source
    return [[label, _number(values[0][1]), _number(values[-1][1]), f"{values[-1][0]:,}"]]


def _number(value: float) -> str:
    return thousands(value) if abs(value) >= 100 else f"{value:.3f}"
