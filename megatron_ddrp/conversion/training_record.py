"""Data, progress, losses, settings and command of a run, for its model card: tables and text without paths."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp import checkpoint
from megatron_ddrp.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    flag,
    flag_words,
)
from megatron_ddrp.data.batches.blend import read_blend
from megatron_ddrp.data.dataset.manifest import read_manifest
from megatron_ddrp.errors import UserError
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.metrics import MetricsRow, read_rows

MEASURES = ("loss", "accuracy", "perplexity")
"""Suffixes of the names of the metrics on the card."""
LINE = 100
"""Largest number of characters per line of the command."""
MOST_FILES = 5
"""Largest number of source files that the card names per dataset."""


class Dataset(NamedTuple):
    """A dataset that the run was trained on."""

    name: str
    weight: str
    """Share in the blend, or "whole" without weights."""
    manifest: dict[str, Any] | None
    """Content of the manifest, or None if none is found."""


def datasets_of(data: DataConfig) -> Iterable[Dataset]:
    """Yield the datasets of training. Manifests are read from the paths of the run's data."""
    words = data.data_path or data.train_data_path
    if not words:
        return
    prefixes, weights = read_blend(words, "--data-path")
    total = sum(weights) if weights else 1
    for number, prefix in enumerate(prefixes):
        try:
            manifest = read_manifest(prefix)
        except (UserError, OSError):
            manifest = None
        yield Dataset(_last(prefix), f"{float(weights[number] / total):.1%}" if weights else "whole", manifest)


def data_table(datasets: Iterable[Dataset]) -> Table | None:
    """Return the counts of the datasets that have a manifest, or None if none has one."""
    rows = []
    for name, weight, manifest in datasets:
        if manifest is None:
            continue
        counts = [f"{manifest[key]:,}" if key in manifest else "" for key in ("documents", "tokens")]
        names = [_last(str(file.get("name"))) for file in manifest.get("inputs") or [] if isinstance(file, dict)]
        more = f" and {len(names) - MOST_FILES} more" if len(names) > MOST_FILES else ""
        rows.append([name, *counts, weight, ", ".join(names[:MOST_FILES]) + more])
    return Table(["dataset", "documents", "tokens", "share", "made from"], rows, wordy=(4,)) if rows else None


def progress(config: Config, state: dict[str, Any]) -> str:
    """Return sentences about the training's progress and its start."""
    tokens, samples = state.get("consumed_tokens"), state.get("consumed_samples")
    seen = f", on {samples:,} sequences with {tokens:,} tokens" if tokens and samples else ""
    load, save = config.checkpoint.load, config.checkpoint.save
    origin = state.get(checkpoint.STARTED_FROM) or (_last(load) if load and load != save else None)
    start = f" Training started from the checkpoint `{origin}`, which the command needs as `--load`." if origin else ""
    return f"The run made {state['iteration']:,} of {config.training.train_iters:,} steps{seen}.{start}"


def losses(run: Path, iteration: int) -> Table | None:
    """Return the last values of training and validation up to a step, as logged in metrics.jsonl."""
    rows = [row for row in read_rows(run, tell=lambda _: None) if row["iteration"] <= iteration]
    columns = []
    for label, prefix in (("training", ""), ("validation", "valid_")):
        logged = [(row["iteration"], _measures(row, prefix)) for row in rows]
        columns += [(f"{label}, step {step:,}", found) for step, found in logged if found][-1:]
    if not columns:
        return None
    names = dict.fromkeys(name for _, found in columns for name in found)
    table = [[name, *(_number(found.get(name)) for _, found in columns)] for name in names]
    return Table(["metric", *(label for label, _ in columns)], table)


def _measures(row: MetricsRow, prefix: str) -> dict[str, float | None]:
    """Return the losses and accuracies of a row whose names begin with `prefix`, without the prefix."""
    own = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
    return {key: value for key, value in own.items() if key.endswith(MEASURES) and not key.startswith("valid_")}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def command(config: Config) -> list[str]:
    """Return the run's command line, without paths, outputs and the launcher's own settings."""
    optimizer = config.optimizer
    if optimizer.lr_warmup_iters is not None:  # the share is without effect, and its flag would be refused
        optimizer = replace(optimizer, lr_warmup_fraction=OptimizerConfig().lr_warmup_fraction)
    words = ["deepspeed", "--module", "megatron_ddrp", "pretrain"]
    words += changed_flags(replace(config.data, index_cache_dir=None), DataConfig())
    words += objective_flags(config.objective) + model_flags(config.model)
    for section, default in (
        (config.training, TrainingConfig()),
        (optimizer, OptimizerConfig()),
        (config.parallel, ParallelConfig()),
    ):
        words += changed_flags(section, default)
    words += ["--save", config.checkpoint.save or "run"]
    return _wrap([_last(word) for word in words])


def _wrap(words: Sequence[str]) -> list[str]:
    """Return a command as lines of at most `LINE` characters, broken before flags."""
    lines: list[list[str]] = [[]]
    for place, word in enumerate(words):
        with_values = itertools.takewhile(lambda later: not later.startswith("--"), words[place + 1 :])
        if word.startswith("--") and len(shlex.join([*lines[-1], word, *with_values])) > LINE:
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(map(shlex.join, lines)).split("\n")


def facts_table(facts: Mapping[str, Any], header: Sequence[str] = ("setting", "value")) -> Table:
    """Return a table with one row per fact."""
    return Table([*header], [[key, str(value)] for key, value in facts.items()], wordy=(1,))


def _last(path: str) -> str:
    """Return the last part of a path, other words unchanged."""
    return os.path.basename(path.rstrip("/")) if "/" in path else path


def model_flags(config: ModelConfig) -> list[str]:
    """Return the flags that make pre-training build this model: those that differ from their defaults."""
    default = ModelConfig(position_encoding=config.position_encoding)
    usual = ModelConfig().position_encoding == config.position_encoding
    named = [] if usual else [flag("position_encoding"), config.position_encoding]
    return [*named, *changed_flags(config, default)]


def objective_flags(config: ObjectiveConfig) -> list[str]:
    """Return `--objective`, always, and the objective's flags that differ from its defaults."""
    return [flag("objective"), config.objective, *changed_flags(config, ObjectiveConfig(config.objective))]


def changed_flags(section: Any, default: Any) -> list[str]:
    """Return the flags of a section's settings that differ from those of `default`."""
    named = ((field.name, getattr(section, field.name)) for field in fields(section) if "help" in field.metadata)
    return flag_words((name, value) for name, value in named if value not in (None, getattr(default, name)))
