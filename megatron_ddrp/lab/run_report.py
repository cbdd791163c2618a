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

import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.config import Config, load_config
from megatron_ddrp.config.reading import Section, option
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.batches.word_counts import entropy
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.errors import UserError, need_packages
from megatron_ddrp.foreign import read_text
from megatron_ddrp.pages import plotting
from megatron_ddrp.pages.markdown import Table, render_page, versions
from megatron_ddrp.run.log import duration
from megatron_ddrp.run.metrics import (
    METRICS,
    MetricsRow,
    curve_of,
    ends_in_half_a_line,
    is_past,
    onset,
    read_rows,
    stored_level,
)

MetricsRows = list[MetricsRow]
"""Rows of one run's metrics.jsonl."""

Series = list[tuple[int, float]]
"""(iteration, value) pairs."""


@dataclass(frozen=True)
class Curve:
    """One axis of a figure and the numbers on it."""

    label: str
    training: str | None
    """Key of the numbers that training logs."""
    validation: str | None = None
    """Key of the numbers that validations log."""
    factor: float = 1.0
    is_noisy: bool = False
    """True if single steps vary so much that the training curve gets a running mean."""

    def training_curve(self, rows: MetricsRows) -> Series:
        """Return the training curve; empty where nothing was logged."""
        return [(step, self.factor * value) for step, value in series(rows, self.training)]

    def validation_curve(self, rows: MetricsRows) -> Series:
        """Return the validation curve; empty where nothing was logged."""
        return [(step, self.factor * value) for step, value in series(rows, self.validation)]


LOSS = Curve("masked-LM loss [nats]", "lm_loss", "valid_lm_loss")
GENERATOR_LOSS = replace(LOSS, label="generator's loss [nats]")
MIXED_LOSS = replace(LOSS, label="masked-LM loss (ELECTRA: the generator's) [nats]")
RTD_ACCURACY = Curve("RTD accuracy [%]", "rtd_accuracy", "valid_rtd_accuracy", 100)
LEARNING = (
    Curve("masked-LM accuracy [%]", "lm_accuracy", "valid_lm_accuracy", 100),
    Curve("TCD's loss, f(S) in validation", "tcd_loss", "token_similarity"),
    Curve("HCD: mean cosine of heads", "hcd_loss", "head_similarity", is_noisy=True),
    Curve("RTD loss [nats]", "rtd_loss", "valid_rtd_loss"),
    RTD_ACCURACY,
    Curve("replaced tokens found [%]", "rtd_recall", "valid_rtd_recall", 100),
    Curve("generator's accuracy [%]", "generator_accuracy", "valid_generator_accuracy", 100),
)
"""Panels below the loss, where a run logged their numbers."""
SPEED = (
    Curve("learning rate", "lr"),
    Curve("gradient norm", "grad_norm"),
    Curve("tokens per second", "tokens_per_second"),
    Curve("peak memory [GiB]", "peak_memory_gib"),
)


_WITHOUT_PANEL = {
    *("iteration", "consumed_samples", "consumed_tokens", "loss", "step_time", "mfu"),
    *("replaced_share", "valid_replaced_share"),
}
"""Columns that no panel shows: counts, and what other panels show in another form."""


def series(rows: MetricsRows, key: str | None) -> Series:
    """Return the values of one metric, where it was logged and finite."""
    return [(row["iteration"], row[key]) for row in rows if key and row.get(key) is not None]


def running_mean(values: Series, window: int) -> Series:
    """Return the means of `window` neighbouring values, each at the middle one's step; `window` is odd."""
    middle = window // 2
    return [
        (values[number][0], sum(value for _, value in values[number - middle : number + middle + 1]) / window)
        for number in range(middle, len(values) - middle)
    ]


def logged_panels(panels: Iterable[Curve], runs: Mapping[str, MetricsRows]) -> list[Curve]:
    """Return the panels that any run logged numbers of."""
    return [
        panel for panel in panels if any(panel.training_curve(r) or panel.validation_curve(r) for r in runs.values())
    ]


def learning_panels(runs: Mapping[str, MetricsRows]) -> list[Curve]:
    """Return the panels below the loss: the logged ones of `LEARNING`, and one for each column of another name.

    Such columns come from callbacks, other text and the terms of other objectives; their names are their labels.
    """
    known = [LOSS, *LEARNING, *SPEED]
    taken = {key for panel in known for key in (panel.training, panel.validation)} | _WITHOUT_PANEL
    logged = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    others = dict.fromkeys(key.removeprefix("valid_") for key in logged if key not in taken)
    own = [Curve(key, None, key) if key.startswith("other_") else Curve(key, key, f"valid_{key}") for key in others]
    return logged_panels([*LEARNING, *own], runs)


def loss_panel(runs: Mapping[str, MetricsRows]) -> Curve:
    """Return the panel of the masked-LM losses; those of a run with a detector are its generator's."""
    detecting = [bool(logged_panels([RTD_ACCURACY], {name: rows})) for name, rows in runs.items()]
    return GENERATOR_LOSS if all(detecting) else MIXED_LOSS if any(detecting) else LOSS


def majority(rows: MetricsRows) -> Series:
    """Return the accuracy in percent of calling every token an original, in each validation."""
    return [(step, 100 * (1 - share)) for step, share in series(rows, "valid_replaced_share")]


def perplexity(loss: float) -> float:
    """Return exp(loss): pieces that the model is as unsure between as between equally likely ones."""
    return math.exp(loss) if loss < 700 else math.inf


WIDTH, HEIGHT = 11.0, 3.6
"""Width of a figure and height of a panel in inches."""
WINDOW = 9
"""Rows of metrics.jsonl in a running mean."""

Styles = Mapping[str, tuple[dict[str, Any], dict[str, Any]]]
"""Run's short name → styles of its training and of its validation, in the order of the runs."""


def styles_of(runs: Mapping[str, MetricsRows]) -> Styles:
    """Return the styles of runs: training is thin, validation has markers and, of a run alone, its own colour."""
    found = {}
    for name, style in plotting.run_styles(plotting.short_names(list(runs))).items():
        thin = {"color": style["color"], "linewidth": 1.4, "alpha": 1.0 if len(runs) == 1 else 0.6}
        color = plotting.COLORS[1] if len(runs) == 1 else style["color"]
        found[name] = thin, {"color": color, "linewidth": 2, "marker": style["marker"], "markersize": 5}
    return found


def draw_losses(runs: Mapping[str, MetricsRows], unigram: float | None) -> Any:
    """Draw the losses of runs by name, with the perplexity at the right, and beside them what else they learnt."""
    measured, styles = [loss_panel(runs), *learning_panels(runs)], styles_of(runs)
    panels = [panel_of(one, runs, styles) for one in measured]
    legend = {name: own for name, (_, own) in styles.items()} if len(runs) > 1 else {}
    (thin, thick), grey = next(iter(styles.values())), {"color": plotting.GREY} if len(runs) > 1 else {}
    legend |= {"training": thin | grey, "validation": thick | grey}
    if unigram is not None:
        panels[0] = panels[0]._replace(levels=[unigram])
        legend[f"unigram level ({unigram:.2f})"] = plotting.LEVEL
    if any(one.is_noisy and len(one.training_curve(rows)) > WINDOW for one in measured for rows in runs.values()):
        legend[f"HCD, mean of {WINDOW} rows"] = {"color": plotting.GREY, "linewidth": 2.5}
    if RTD_ACCURACY in measured and any(map(majority, runs.values())):
        legend["majority: every token an original"] = plotting.LEVEL
    columns = _columns(len(panels))
    figure = plotting.draw_curves(panels, columns, (WIDTH / columns, HEIGHT), legend)
    if figure.axes[0].get_ylim()[1] < 700:  # exp of more is beyond the largest float
        _add_perplexity(figure.axes[0])
    return figure


def draw_speed(runs: Mapping[str, MetricsRows]) -> Any:
    """Draw learning rate, gradient norm, speed and memory; None if none of them was logged."""
    styles = styles_of(runs)
    panels = [panel_of(panel, runs, styles) for panel in logged_panels(SPEED, runs)]
    legend = {name: own for name, (own, _) in styles.items()} if len(runs) > 1 else None
    columns = _columns(len(panels))
    return plotting.draw_curves(panels, columns, (WIDTH / columns, HEIGHT), legend) if panels else None


def _columns(panels: int) -> int:
    """Return the columns that leave the fewest holes: 2 for 2 or 4 panels, else 3 at most."""
    return 2 if panels in (2, 4) else min(3, max(1, panels))


def panel_of(measured: Curve, runs: Mapping[str, MetricsRows], styles: Styles) -> plotting.Panel:
    """Return the panel with the curves of runs: training, its running mean if it is noisy, and validation."""
    lines = []
    for rows, (thin, thick) in zip(runs.values(), styles.values(), strict=True):
        trained = measured.training_curve(rows)
        smooth = running_mean(trained, WINDOW) if measured.is_noisy else []
        lines += [
            plotting.Line(trained, thin | ({"alpha": 0.35} if smooth else {})),
            plotting.Line(smooth, thin | {"linewidth": 2.5, "alpha": 1.0}),
        ]
        lines += [plotting.Line(measured.validation_curve(rows), thick)]
        lines += [plotting.Line(majority(rows), plotting.LEVEL)] * (measured == RTD_ACCURACY)
    return plotting.Panel([line for line in lines if line.points], "", "step", measured.label)


def _add_perplexity(axis: Any) -> None:
    """Give the axis of a loss in nats a second scale at the right: exp(loss)."""
    right = axis.secondary_yaxis("right", functions=(np.exp, lambda x: np.log(np.clip(x, 1e-300, None))))
    ticks = perplexity_ticks(*np.exp(axis.get_ylim()))
    right.set_yticks(ticks, [plotting.thousands(tick) for tick in ticks])
    right.minorticks_off()
    right.set_ylabel("perplexity")


def perplexity_ticks(lowest: float, highest: float) -> list[float]:
    """Return round numbers between two perplexities: the fewest of 1-2-5 series, whole digits and parts of them that
    are three or more.
    """
    decades = 10.0 ** np.arange(np.floor(np.log10(lowest)), np.ceil(np.log10(highest)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 2, 5), range(1, 10), *(np.arange(parts, 10 * parts) / parts for parts in (2, 5, 10))):
        found = [decade * step for decade in decades for step in steps if lowest <= decade * step <= highest]
        if len(found) >= 3:
            break
    return found


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
    length = config.last_phase.seq_length
    tokens = training.global_batch_size * length
    yield "batch", f"{training.global_batch_size:,} sequences x {length:,} tokens = up to {tokens:,} per step"
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
        yield "throughput", f"{(tokens[-1] - _before(*tokens[:2])) / seconds:,.0f} tokens per second"
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
        resting = "below it from its first row on" if is_past(curve, level) else "not left yet"
        yield "plateau", f"left after {left:,} tokens" if left else f"{resting} (docs/lab/plateau.md)"


def training_seconds(rows: MetricsRows) -> float:
    """Return the time of all steps: each row's seconds per step times the steps since the row before."""
    times = np.array([*series(rows, "step_time")]).reshape(-1, 2)  # step and seconds [rows, 2]
    counts = np.diff(times[:, 0], prepend=_before(*times[:2, 0]))
    return float(counts @ times[:, 1])


def _before(first: float = 0, *second: float) -> float:
    """Return a count before the first of equally spaced rows: 0, or the one at which a branch left its parent."""
    return max(0, 2 * first - second[0]) if second else 0


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
    return render_page(
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
    lines = []
    for name, rows in runs.items():
        loss = loss_panel({name: rows})
        perplexities = [(step, perplexity(value)) for step, value in loss.validation_curve(rows)]
        ends = [*_of_panel(loss, rows), ("perplexity, validation", perplexities)]
        for panel in learning_panels({name: rows}):
            ends += _of_panel(panel, rows)
        ends.append(("majority: every token an original [%]", majority(rows)))
        for label, values in ends:
            plain = label.replace("[", "(").replace("]", ")")  # brackets are not plain in a table's source
            of_run = f" of {name}" if len(runs) > 1 else ""
            if values:
                lines.append([plain + of_run, _number(values[0][1]), _number(values[-1][1]), f"{values[-1][0]:,}"])
    return Table(["curve", "first", "last", "at step"], lines)


def _of_panel(panel: Curve, rows: MetricsRows) -> list[tuple[str, Series]]:
    return [
        (f"{panel.label}, training", panel.training_curve(rows)),
        (f"{panel.label}, validation", panel.validation_curve(rows)),
    ]


def _number(value: float) -> str:
    return plotting.thousands(value) if abs(value) >= 100 else f"{value:.3f}"


TITLES = {"losses.png": "Losses and accuracies", "speed.png": "Learning rate, gradient norm, speed and memory"}
"""Figure → its title."""


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
class ReportOptions(Section):
    """input and output"""

    load: Path = option(MISSING, "--save folder of a pre-training run", metavar="DIR")
    beside: tuple[Path, ...] = option((), "other runs to draw beside it (default: none)", nargs="+", metavar="DIR")
    data_path: str | None = option(
        None, "its dataset's prefix, to count the unigram level of all of it (default: the run's own)", metavar="P"
    )
    scores_dir: Path | None = option(
        None, "--output-dir of megatron-ddrp finetune or megatron-ddrp glue", metavar="DIR"
    )
    note: str | None = option(None, "a sentence above the scores, in Markdown", metavar="TEXT")
    commands: Path | None = option(None, "the command lines that made the run", metavar="FILE")
    output_dir: Path = option(MISSING, "for report.md and the figures", metavar="DIR")


SECTIONS = (ReportOptions,)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_sections(ArgumentParser(description=__doc__), SECTIONS, words)
    need_packages("the report", "matplotlib")
    found = read_runs(arguments.load, arguments.beside)
    scores = read_words(arguments.scores_dir / "table.md") if arguments.scores_dir else None
    commands = read_words(arguments.commands) if arguments.commands else None
    unigram = unigram_level(arguments.data_path) if arguments.data_path else stored_level(arguments.load)
    runs = {str(folder): rows for folder, rows in found.items()}
    output: Path = arguments.output_dir
    draws = {"losses.png": partial(draw_losses, runs, unigram), "speed.png": partial(draw_speed, runs)}
    figures = {TITLES[name]: name for name in plotting.save_figures(output, draws)}
    head = {str(folder): facts(folder, rows) for folder, rows in found.items()}
    write_text(output / "report.md", page(runs, head, figures, unigram, scores, arguments.note, commands))
    print(f"{output / 'report.md'} written")
