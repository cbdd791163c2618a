"""The head of a report: the model, the amount of data, the throughput and the total time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from megatron_ddrp.config import Config, load_config
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.report.curves import Rows, series
from megatron_ddrp.run.log import duration


def facts(folder: Path, rows: Rows) -> list[tuple[str, str]]:
    """Return (name, value) pairs of a run: model, parameters, batch, tokens seen, speed and time.

    Without config.json there are only those that the rows tell.
    """
    config, settled = None, []
    if (folder / "config.json").is_file():
        try:
            config = load_config(folder)
            settled = list(_of_config(config))
        except UserError as error:  # damaged, or of a plug-in that was not given
            settled = [("model", f"unknown: {error}")]
    return [*settled, *_of_rows(rows, config)]


def _of_config(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the facts that were settled before the first step."""
    model, training = config.model, config.training
    yield "model", f"{model.position_encoding} + {config.objective.objective}"
    heads = f"{model.num_attention_heads} heads"
    layers = f"{model.num_layers} layer{'s' * (model.num_layers > 1)}"
    yield "size", f"{layers} x {model.hidden_size}, {heads}, {model.vocab_size:,} pieces"
    parameters, of_positions = count_parameters(on_meta_device(model, config.objective))
    yield "parameters", f"{parameters:,} ({of_positions:,} for positions)"
    tokens = training.global_batch_size * model.seq_length
    yield "batch", f"{training.global_batch_size:,} sequences x {model.seq_length:,} tokens = up to {tokens:,} per step"
    yield "precision", training.precision


def _of_rows(rows: Rows, config: Config | None) -> Iterator[tuple[str, str]]:
    """Yield the facts that the steps tell."""
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


def training_seconds(rows: Rows) -> float:
    """Return the time of all steps: each row's seconds per step times the steps since the row before."""
    total, before = 0.0, 0
    for step, seconds in series(rows, "step_time"):
        total += seconds * (step - before)
        before = step
    return total
