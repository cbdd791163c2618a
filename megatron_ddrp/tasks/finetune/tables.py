"""Tables of a sweep: scores, gains over random weights, the runs behind each score, differences, the paper's scores."""

from __future__ import annotations

import statistics

from megatron_ddrp.pages.markdown import Table, percent
from megatron_ddrp.tasks.finetune.cells import Cell, Cells, task_order
from megatron_ddrp.tasks.finetune.differences import Pair, differences, gains, words
from megatron_ddrp.tasks.finetune.items import Interval, Items
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.statistics import EQUAL_SEEDS

DETAILS = [
    *(
        "encoder",
        "task",
        "metric",
        "median",
        "min to max",
        "95 % over items",
        "best epoch, median",
        "seeds",
        "undefined",
    ),
    *("batch", "lr", "epochs", "row length", "train examples", "dev examples"),
]
"""Columns of the table of the runs behind each score."""


def all_tables(encoders: dict[str, Cells], suite: Suite, items: Items) -> dict[str, Table | None]:
    """Return the tables of the page by name."""
    details = [
        line
        for name, cells in encoders.items()
        for cell in cells.values()
        for line in _details(name, cell, suite, items)
    ]
    gained = [
        [gain.encoder, gain.pretrained.task, gain.pretrained.score_name]
        + [_score(cell, items) for cell in (gain.pretrained, gain.random)]
        + ["undefined" if gain.difference is None else f"{100 * gain.difference:+.2f}"]
        for gain in gains(encoders)
    ]
    return {
        "scores": _scores(encoders, suite, items),
        "gains": Table(["encoder", "task", "metric", "pre-trained", "random weights", "difference"], gained),
        "runs": Table(DETAILS, details),
        "differences": _differences(differences(encoders, items)),
        "paper": suite.published_table(encoders),
    }


def _scores(encoders: dict[str, Cells], suite: Suite, items: Items) -> Table:
    """Return the table of medians, one row per encoder, with a last row of constant guesses if any are known."""
    tasks = task_order(encoders, suite.order)
    means = {name: suite.means(cells) for name, cells in encoders.items()}
    shown = [kind for kind in suite.averages if any(mean[kind] is not None for mean in means.values())]
    rows = [
        [name, *(_score(cells[task], items) if task in cells else "" for task in tasks)]
        + [percent(means[name][kind]) for kind in shown]
        for name, cells in encoders.items()
    ]
    guesses = {task: items.guess(cell) for cells in encoders.values() for task, cell in cells.items()}
    if any(guess is not None for guess in guesses.values()):
        rows.append(["(constant guess)", *(percent(guesses[task]) for task in tasks), *[""] * len(shown)])
    return Table(["encoder", *tasks, *shown], rows)


def _differences(pairs: list[Pair]) -> Table:
    header = [
        "encoder",
        "minus",
        "tasks",
        "seeds",
        "difference",
        "95 % over seeds",
        "95 % over items",
        "the encoder is",
    ]
    rows = [
        [pair.first, pair.second, str(len(pair.tasks)), str(len(pair.difference.values))]
        + [percent(pair.difference.mean), _interval(pair.difference.interval) or EQUAL_SEEDS]
        + [_interval(pair.over_items), word]
        for pair, word in zip(pairs, words(pairs), strict=True)
    ]
    return Table(header, rows, wordy=[1, len(header) - 1])


def _score(cell: Cell, items: Items) -> str:
    """Return a cell's median, with its faults in words."""
    guess = items.guess(cell)
    remarks = [f"{cell.undefined} undefined"] * bool(cell.undefined)
    remarks += ["below a constant guess"] * (guess is not None and cell.median < guess)
    return percent(cell.median) + (f" ({', '.join(remarks)})" if remarks else "")


def _interval(interval: Interval | None) -> str:
    return " to ".join(map(percent, interval or ()))


def _details(name: str, cell: Cell, suite: Suite, items: Items) -> list[list[str]]:
    """Return the rows of a cell in the table of runs: by the task's metric, by further metrics, on further files."""
    best_epoch = percent(statistics.median(row["best_epoch_score"] for row in cell.rows))
    first, size = cell.rows[0], suite.official_size(cell.task)
    point = [str(first["batch_size"]), f"{first['lr']:g}", str(first["epochs"])]
    point += [str(first["max_seq_length"]), str(first["train_examples"])]
    official = "" if size in (None, first["dev_examples"]) else f" (official: {size})"

    def row(label: str, scores: list[float], undefined: str, *facts: str, metric: str = cell.score_name) -> list[str]:
        interval, best, examples = facts or ("", "", "")
        spread = f"{percent(min(scores))} to {percent(max(scores))}"
        middle = percent(statistics.median(scores))
        return [name, label, metric, middle, spread, interval, best, str(len(scores)), undefined, *point, examples]

    own = _interval(items.of_cell(cell)), best_epoch, f"{first['dev_examples']}{official}"
    rows = [row(cell.task, cell.scores, str(cell.undefined), *own)]
    rows += [row(cell.task, scores, "", metric=metric) for metric, scores in cell.beside.items()]
    for file, scores in cell.others.items():
        rows.append(row(f"{cell.task} ({file})", scores, str(cell.other_undefined(file))))
    return rows + [row(label, scores, "") for label, scores in suite.combined(cell).items()]
