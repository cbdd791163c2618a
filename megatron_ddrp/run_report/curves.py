"""The curves of runs: which numbers of metrics.jsonl stand in which panel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_ddrp.run.metrics import MetricsRow

MetricsRows = list[MetricsRow]
"""MetricsRows of one run's metrics.jsonl."""

Series = list[tuple[int, float]]
"""(iteration, value) pairs."""


@dataclass(frozen=True)
class Panel:
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
        return self._curve(rows, self.training)

    def validation_curve(self, rows: MetricsRows) -> Series:
        """Return the validation curve; empty where nothing was logged."""
        return self._curve(rows, self.validation)

    def _curve(self, rows: MetricsRows, key: str | None) -> Series:
        return [(step, self.factor * value) for step, value in series(rows, key)] if key else []


LOSS = Panel("masked-LM loss [nats]", "lm_loss", "valid_lm_loss")
GENERATOR_LOSS = replace(LOSS, label="generator's loss [nats]")
MIXED_LOSS = replace(LOSS, label="masked-LM loss (ELECTRA: the generator's) [nats]")
RTD_ACCURACY = Panel("RTD accuracy [%]", "rtd_accuracy", "valid_rtd_accuracy", 100)
LEARNING = (
    Panel("masked-LM accuracy [%]", "lm_accuracy", "valid_lm_accuracy", 100),
    Panel("TCD: mean cosine of tokens", "tcd_loss", "token_similarity"),
    Panel("HCD: mean cosine of heads", "hcd_loss", "head_similarity", is_noisy=True),
    Panel("RTD loss [nats]", "rtd_loss", "valid_rtd_loss"),
    RTD_ACCURACY,
    Panel("replaced tokens found [%]", "rtd_recall", "valid_rtd_recall", 100),
    Panel("generator's accuracy [%]", "generator_accuracy", "valid_generator_accuracy", 100),
)
"""Panels below the loss, where a run logged their numbers."""
SPEED = (
    Panel("learning rate", "lr"),
    Panel("gradient norm", "grad_norm"),
    Panel("tokens per second", "tokens_per_second"),
    Panel("peak memory [GiB]", "peak_memory_gib"),
)


_WITHOUT_PANEL = {
    *("iteration", "consumed_samples", "consumed_tokens", "loss", "step_time", "mfu"),
    *("replaced_share", "valid_replaced_share"),
}
"""Columns that no panel shows: counts, and what other panels show in another form."""


def series(rows: MetricsRows, key: str) -> Series:
    """Return the values of one metric, where it was logged and finite."""
    return [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]


def running_mean(values: Series, window: int) -> Series:
    """Return the means of `window` neighbouring values, each at the middle one's step; `window` is odd."""
    middle = window // 2
    return [
        (values[number][0], sum(value for _, value in values[number - middle : number + middle + 1]) / window)
        for number in range(middle, len(values) - middle)
    ]


def logged_panels(panels: Iterable[Panel], runs: Mapping[str, MetricsRows]) -> list[Panel]:
    """Return the panels that any run logged numbers of."""
    return [
        panel for panel in panels if any(panel.training_curve(r) or panel.validation_curve(r) for r in runs.values())
    ]


def learning_panels(runs: Mapping[str, MetricsRows]) -> list[Panel]:
    """Return the panels below the loss: the logged ones of `LEARNING`, and one for each column of another name.

    Such columns come from callbacks and from the terms of other objectives; their names are their labels.
    """
    known = [LOSS, *LEARNING, *SPEED]
    taken = {key for panel in known for key in (panel.training, panel.validation)} | _WITHOUT_PANEL
    logged = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    others = dict.fromkeys(key.removeprefix("valid_") for key in logged if key not in taken)
    return logged_panels([*LEARNING, *(Panel(name, name, f"valid_{name}") for name in others)], runs)


def loss_panel(runs: Mapping[str, MetricsRows]) -> Panel:
    """Return the panel of the masked-LM losses; those of a run with a detector are its generator's."""
    detecting = [bool(logged_panels([RTD_ACCURACY], {name: rows})) for name, rows in runs.items()]
    return GENERATOR_LOSS if all(detecting) else MIXED_LOSS if any(detecting) else LOSS


def majority(rows: MetricsRows) -> Series:
    """Return the accuracy in percent of calling every token an original, in each validation."""
    return [(step, 100 * (1 - share)) for step, share in series(rows, "valid_replaced_share")]


def perplexity(loss: float) -> float:
    """Return exp(loss): pieces that the model is as unsure between as between equally likely ones."""
    return math.exp(loss) if loss < 700 else math.inf
