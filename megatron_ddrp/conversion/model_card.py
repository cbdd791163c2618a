"""README.md of an exported or fine-tuned folder: a model card with the metadata that the Hugging Face hub reads.

`render_card` builds every card. All facts in the card of an export, such as data, losses, settings and command of the
run, come from the checkpoint, metrics.jsonl and the manifests of the datasets. A card has only the last part of each
path, so it names no folder, host or user.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_ddrp import checkpoint
from megatron_ddrp.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    flag_words,
)
from megatron_ddrp.config.training import phase_at
from megatron_ddrp.conversion.families import Family
from megatron_ddrp.conversion.families.contract import CARD
from megatron_ddrp.conversion.origin import Origin
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.batches.loader import read_blend
from megatron_ddrp.data.dataset.indexed_dataset import read_manifest
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.pages.markdown import Table, render_page, versions
from megatron_ddrp.run.metrics import MetricsRow, read_rows, stored_level

MEASURES = ("loss", "accuracy", "perplexity")
"""Suffixes of the names of the metrics on the card."""
HELD_OUT = ("valid_", "other_")
"""Beginnings of the names of metrics that validations log."""
LINE = 100
"""Largest number of characters per line of the command."""
MOST_FILES = 5
"""Largest number of source files that the card names per dataset."""


class TrainingDataset(NamedTuple):
    """A dataset that the run was trained on."""

    name: str
    weight: str
    """Share in the blend, or "whole" without weights."""
    manifest: dict[str, Any] | None
    """Content of the manifest, or None if none is found."""


def datasets_of(data: DataConfig) -> Iterable[TrainingDataset]:
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
        yield TrainingDataset(_last(prefix), f"{float(weights[number] / total):.1%}" if weights else "whole", manifest)


def data_table(datasets: Iterable[TrainingDataset]) -> Table | None:
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


def untrained(state: Mapping[str, Any]) -> str:
    """Return a sentence about the origin of weights that no run trained as they are; "" for those of a run."""
    if shares := state.get(checkpoint.MERGED):
        return f"These weights are the mean of {', '.join(f'{share:.4g} x `{name}`' for name, share in shares)}."
    imported = state.get(checkpoint.WEIGHTS_ONLY)
    return "These weights were imported from another folder and not trained since." if imported else ""


def longest_row(config: Config, state: Mapping[str, Any]) -> int:
    """Return the length in pieces of the longest rows that a run trained on up to a checkpoint."""
    return phase_at(config.phases, state["iteration"] - 1, config.training.train_iters).seq_length


def losses(run: Path, iteration: int) -> Table | None:
    """Return the last values of training and validation up to a step, as logged in metrics.jsonl."""
    rows = [row for row in read_rows(run, tell=lambda _: None) if row["iteration"] <= iteration]
    columns = []
    for label, prefix in zip(("training", "validation", "other text"), ("", *HELD_OUT), strict=True):
        logged = [(row["iteration"], _measures(row, prefix)) for row in rows]
        columns += [(f"{label}, step {step:,}", found) for step, found in logged if found][-1:]
    if not columns:
        return None
    names = dict.fromkeys(name for _, found in columns for name in found)
    values = {name: [found.get(name) for _, found in columns] for name in names}
    table = [[name, *("" if value is None else f"{value:.4f}" for value in row)] for name, row in values.items()]
    return Table(["metric", *(label for label, _ in columns)], table)


def _measures(row: MetricsRow, prefix: str) -> dict[str, float | None]:
    """Return the losses and accuracies of a row whose names begin with `prefix`, without the prefix."""
    own = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
    return {key: value for key, value in own.items() if key.endswith(MEASURES) and not key.startswith(HELD_OUT)}


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
    return flag_words(model_settings(config).items())


def model_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that make pre-training build this model: those that differ from their defaults."""
    usual, encoding = ModelConfig().position_encoding, config.position_encoding
    named = {} if encoding == usual else {"position_encoding": encoding}
    return named | changed_settings(config, ModelConfig(position_encoding=encoding))


def objective_flags(config: ObjectiveConfig) -> list[str]:
    """Return `--objective`, always, and the objective's flags that differ from its defaults."""
    return flag_words(objective_settings(config).items())


def objective_settings(config: ObjectiveConfig) -> dict[str, Any]:
    """Return `objective`, always, and the objective's settings that differ from its defaults."""
    return {"objective": config.objective} | changed_settings(config, ObjectiveConfig(config.objective))


def changed_flags(section: Any, default: Any) -> list[str]:
    """Return the flags of a section's settings that differ from those of `default`."""
    return flag_words(changed_settings(section, default).items())


def changed_settings(section: Any, default: Any) -> dict[str, Any]:
    """Return a section's settings that have flags and differ from those of `default`."""
    named = ((field.name, getattr(section, field.name)) for field in fields(section) if "help" in field.metadata)
    return {name: value for name, value in named if value not in (None, getattr(default, name))}


EXAMPLE = "Paris is the {} of France."


class Publishing(NamedTuple):
    """Facts of a model card that only the publisher knows."""

    license: str | None = None
    """Licence, as the hub's identifier, such as apache-2.0."""
    languages: tuple[str, ...] = ()
    """Codes of the languages, such as en."""


@dataclass(frozen=True)
class Described:
    """The export that a card describes."""

    name: str
    source: Path
    """The checkpoint, DIR/iter_N."""
    config: Config
    tokenizer: Tokenizer
    family: Family
    head: str
    """Key of `HEADS`, or `BARE`."""
    parameters: int
    origin: Origin
    sentences: str
    """Pooling of the folder's sentence-transformers modules, in words."""

    @property
    def fills_masks(self) -> bool:
        """True if the folder has a masked-LM head that was trained.

        A head that was drawn at the import counts as trained once the run's loss lies below the unigram level.
        """
        run, step = self.source.resolve().parent, checkpoint.read_state(self.source)["iteration"]
        rows = [row for row in read_rows(run, tell=lambda _: None) if row["iteration"] <= step]
        found = (row[key] for row in reversed(rows) for key in ("valid_lm_loss", "lm_loss") if key in row)
        is_trained = self.origin.has_head or next(found, math.inf) < (stored_level(run) or math.inf)
        return is_trained and self.head == "masked-lm"


def write_card(folder: Path, described: Described, publishing: Publishing) -> None:
    """Write README.md into a folder."""
    config, family = described.config, described.family
    state = checkpoint.read_state(described.source)
    datasets = list(datasets_of(config.data))
    text = render_card(
        "model_card.md.jinja",
        described.name,
        _metadata(described, publishing),
        _usage(described, publishing),
        family.has_code,
        fills_masks=described.fills_masks,
        head=described.head,
        origin=described.origin,
        sentences=described.sentences,
        longest_row=longest_row(config, state),
        license=publishing.license,
        config=config,
        class_name=family.classes(described.head)[0],
        parameters=described.parameters,
        data=data_table(datasets),
        unknown_data=[dataset.name for dataset in datasets if dataset.manifest is None],
        tokenizer=described.tokenizer,
        untrained=untrained(state),
        progress=progress(config, state),
        losses=losses(described.source.resolve().parent, state["iteration"]),
        objective=objective_flags(config.objective),
        ranks=state.get("layout", {}).get("ranks", "unknown"),
        command=command(config),
    )
    write_text(folder / CARD, text)


def render_card(
    template: str, name: str, metadata: dict[str, Any], usage: Sequence[str], has_code: bool, **parts: Any
) -> str:
    """Return a model card: what all cards have in common, and the parts of a template that extends it.

    `metadata` is for the YAML header, which has no empty values; `usage` are lines of Python; `has_code` is True for a
    folder with code of its own.
    """
    known = {key: value for key, value in metadata.items() if value}
    header = yaml.safe_dump(known, sort_keys=False, allow_unicode=True).strip()
    if "license" not in known:
        header = f"# license: unknown; set it before publishing\n{header}"
    installed = facts_table(versions(), ["package", "version"])
    return render_page(template, name=name, metadata=header, usage=usage, trust=has_code, versions=installed, **parts)


def loading_lines(name: str, auto_class: str, has_code: bool) -> list[str]:
    """Return lines of Python that load a folder and its tokenizer from the hub with a class of transformers."""
    place = hub_name(name) + (", trust_remote_code=True" if has_code else "")
    return [
        f"from transformers import {auto_class}, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({place})",
        f"model = {auto_class}.from_pretrained({place})",
    ]


def hub_name(name: str) -> str:
    """Return the name of a folder on the hub as a string of Python."""
    return json.dumps(f"USER/{name}", ensure_ascii=False)


def _metadata(described: Described, publishing: Publishing) -> dict[str, Any]:
    """Return the content of the card's YAML header."""
    config, origin = described.config, described.origin
    use = "fill-mask" if described.fills_masks else "feature-extraction"
    values: dict[str, Any] = {
        "license": publishing.license,
        "language": list(publishing.languages),
        "base_model": origin.name if origin.name and "/" in origin.name else None,
        "library_name": "sentence-transformers" if origin.modules else "transformers",
        "pipeline_tag": "sentence-similarity" if origin.modules else use,
        "tags": ["megatron-ddrp", config.model.position_encoding, config.objective.objective],
    }
    if described.fills_masks:
        mask = described.tokenizer.pieces[described.tokenizer.mask_id]
        values["mask_token"] = mask
        if example := _example(described, publishing):
            values["widget"] = [{"text": example}]
    return values


def _example(described: Described, publishing: Publishing) -> str | None:
    """Return an English sentence with a mask, or None if the model does not know its language or pieces."""
    tokenizer = described.tokenizer
    example = EXAMPLE.format(tokenizer.pieces[tokenizer.mask_id])
    if publishing.languages:
        return example if "en" in publishing.languages else None
    return None if tokenizer.unk_id in tokenizer.encode_with_masks(example) else example


def _usage(described: Described, publishing: Publishing) -> list[str]:
    """Return lines of Python that load the folder from the hub and use it."""
    if described.origin.modules:
        return [
            "from sentence_transformers import SentenceTransformer",
            "",
            f"model = SentenceTransformer({hub_name(described.name)}{described.family.trust})",
            'vectors = model.encode(["A sentence.", "Another one."])  # [texts, hidden]',
        ]
    if described.fills_masks:
        mask = described.tokenizer.pieces[described.tokenizer.mask_id]
        text = json.dumps(_example(described, publishing) or f"YOUR TEXT WITH ONE {mask}", ensure_ascii=False)
        return [
            "from transformers import pipeline",
            "",
            f'fill = pipeline("fill-mask", model={hub_name(described.name)}{described.family.trust})',
            f"print(fill({text}))",
        ]
    return [
        *loading_lines(described.name, "AutoModel", described.family.has_code),
        'states = model(**tokenizer("A sentence.", return_tensors="pt")).last_hidden_state  # [1, tokens, hidden]',
    ]
