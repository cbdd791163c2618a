"""README.md of an exported folder: a model card with the metadata that the Hugging Face hub reads.

Everything comes from the checkpoint, the run's metrics.jsonl and the manifests of its datasets. Of a path only the last
part is written: a card names no folder, host or user.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_ddrp.config.data import DataConfig
from megatron_ddrp.conversion.export_sums import CARD
from megatron_ddrp.conversion.families import Family
from megatron_ddrp.conversion.run_flags import changed_flags, model_flags, objective_flags
from megatron_ddrp.data.batches.blend import read_blend
from megatron_ddrp.data.dataset.manifest import read_manifest
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.run.metrics import Row, read_rows
from megatron_ddrp.tasks.machine import versions
from megatron_ddrp.tasks.markdown import Table
from megatron_ddrp.tasks.pages import render

MEASURES = ("loss", "accuracy", "perplexity")
"""Ends of the names of the metrics that the card shows."""
LINE = 100
"""Characters per line of the command."""
MOST_FILES = 5
"""Source files that the card names per dataset."""
EXAMPLE = "Paris is the {} of France."


class Publishing(NamedTuple):
    """What only the publisher knows."""

    license: str | None = None
    """Identifier of the hub, such as apache-2.0."""
    languages: tuple[str, ...] = ()
    """Codes such as en."""


@dataclass(frozen=True)
class Described:
    """The export that a card is about."""

    name: str
    source: Path
    """The checkpoint, DIR/iter_N."""
    config: Config
    tokenizer: Tokenizer
    family: Family
    head: str
    """Key of `HEADS`."""
    parameters: int

    @property
    def fills_masks(self) -> bool:
        return self.head == "masked-lm"


def write_card(folder: Path, described: Described, publishing: Publishing) -> None:
    """Write README.md into a folder."""
    (folder / CARD).write_text(_card(described, publishing), encoding="utf-8")


def _card(described: Described, publishing: Publishing) -> str:
    config, tokenizer = described.config, described.tokenizer
    state = checkpoint.read_state(described.source)
    datasets = list(_datasets(config.data))
    return render(
        "model_card.md.jinja",
        metadata=_metadata(described, publishing),
        name=described.name,
        kind=_kind(described),
        license=publishing.license,
        usage=_usage(described),
        trust=described.family.has_code,
        model=_facts(_model_facts(described)),
        data=_data_table(datasets),
        unknown_data=[dataset.name for dataset in datasets if dataset.manifest is None],
        tokenizer=f"Tokenizer: {tokenizer.tokenizer_type} of {tokenizer.vocab_size:,} pieces, fingerprint "
        f"`{tokenizer.fingerprint[:12]}`.",
        trained=not state.get(checkpoint.WEIGHTS_ONLY),
        progress=_progress(config, state),
        losses=_losses(described.source.resolve().parent, state["iteration"]),
        settings=_facts(_settings(config, state)),
        command=_command(config),
        limits=_limits(described),
        versions=Table(["package", "version"], list(versions().items()), wordy=(1,)),
    )


def _metadata(described: Described, publishing: Publishing) -> str:
    """Return the YAML between the card's dashes."""
    config = described.config
    values: dict[str, Any] = {
        "license": publishing.license,
        "language": list(publishing.languages),
        "library_name": "transformers",
        "pipeline_tag": "fill-mask" if described.fills_masks else "feature-extraction",
        "tags": ["megatron-ddrp", config.model.position_encoding, config.objective.objective],
    }
    if described.fills_masks:
        mask = described.tokenizer.pieces[described.tokenizer.mask_id]
        values["mask_token"] = mask
        if not publishing.languages or "en" in publishing.languages:
            values["widget"] = [{"text": EXAMPLE.format(mask)}]
    known = {key: value for key, value in values.items() if value}
    text = yaml.safe_dump(known, sort_keys=False, allow_unicode=True)
    return text.strip() if publishing.license else f"# license: unknown; set it before publishing\n{text.strip()}"


def _kind(described: Described) -> str:
    model = described.config.model
    head = "with its masked-LM head" if described.fills_masks else "trained as a discriminator of replaced tokens"
    return (
        f"A BERT-class encoder, {head}: {model.position_encoding} positions, {model.num_layers} layers of "
        f"{model.hidden_size}, {described.parameters:,} parameters, pre-trained under the objective "
        f"{described.config.objective.objective} with megatron_ddrp."
    )


def _usage(described: Described) -> list[str]:
    """Return lines of Python that load the folder from the hub and use it."""
    name = json.dumps(f"USER/{described.name}", ensure_ascii=False)
    trust = ", trust_remote_code=True" if described.family.has_code else ""
    if described.fills_masks:
        text = json.dumps(EXAMPLE.format(described.tokenizer.pieces[described.tokenizer.mask_id]), ensure_ascii=False)
        return [
            "from transformers import pipeline",
            "",
            f'fill = pipeline("fill-mask", model={name}{trust})',
            f"print(fill({text}))",
        ]
    return [
        "from transformers import AutoModel, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({name}{trust})",
        f"model = AutoModel.from_pretrained({name}{trust})",
        'states = model(**tokenizer("A sentence.", return_tensors="pt")).last_hidden_state  # [1, tokens, hidden]',
    ]


def _model_facts(described: Described) -> dict[str, Any]:
    model = described.config.model
    return {
        "class": described.family.classes(described.head)[0],
        "position encoding": model.position_encoding,
        "layers, hidden size, heads": f"{model.num_layers}, {model.hidden_size}, {model.num_attention_heads}",
        "feed-forward size": f"{model.ffn_size:,}, {model.ffn}",
        "LayerNorm": {"post": "after each block", "pre": "before each block"}[model.layernorm_position],
        "longest text": f"{model.seq_length:,} pieces",
        "vocabulary": f"{model.vocab_size:,} pieces",
        "parameters in this folder": f"{described.parameters:,}, fp32",
    }


class _Dataset(NamedTuple):
    name: str
    weight: str
    """Share in the blend, "whole" without weights."""
    manifest: dict[str, Any] | None
    """None where no manifest is found."""


def _datasets(data: DataConfig) -> Iterable[_Dataset]:
    """Yield the datasets of training. Manifests are looked for where the run found its data."""
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
        yield _Dataset(_last(prefix), f"{float(weights[number] / total):.1%}" if weights else "whole", manifest)


def _data_table(datasets: Iterable[_Dataset]) -> Table | None:
    """Return the counts of the datasets that have a manifest, None where none has."""
    rows = []
    for name, weight, manifest in datasets:
        if manifest is None:
            continue
        counts = [f"{manifest[key]:,}" if key in manifest else "" for key in ("documents", "tokens")]
        names = [_last(str(file.get("name"))) for file in manifest.get("inputs") or [] if isinstance(file, dict)]
        more = f" and {len(names) - MOST_FILES} more" if len(names) > MOST_FILES else ""
        rows.append([name, *counts, weight, ", ".join(names[:MOST_FILES]) + more])
    return Table(["dataset", "documents", "tokens", "share", "made from"], rows, wordy=(4,)) if rows else None


def _progress(config: Config, state: dict[str, Any]) -> str:
    """Return sentences about how far training went and what it started from."""
    tokens, samples = state.get("consumed_tokens"), state.get("consumed_samples")
    seen = f" {samples:,} sequences with {tokens:,} tokens were seen." if tokens and samples else ""
    load, save = config.checkpoint.load, config.checkpoint.save
    start = f" Training started from {_last(load)}." if load and load != save else ""
    return f"{state['iteration']:,} of {config.training.train_iters:,} steps.{seen}{start}"


def _losses(run: Path, iteration: int) -> Table | None:
    """Return the last logged values of training and validation up to a step, as metrics.jsonl has them."""
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


def _measures(row: Row, prefix: str) -> dict[str, float | None]:
    """Return the losses and accuracies of a row of metrics.jsonl whose names begin with `prefix`, without it."""
    own = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
    return {key: value for key, value in own.items() if key.endswith(MEASURES) and not key.startswith("valid_")}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _settings(config: Config, state: dict[str, Any]) -> dict[str, Any]:
    """Return what decided the training, in words."""
    training, optimizer, objective = config.training, config.optimizer, config.objective
    laid_out = state.get("layout", {})
    warmup = optimizer.lr_warmup_iters
    warmup_words = f"{warmup:,} steps" if warmup is not None else f"{optimizer.lr_warmup_fraction:g} of the steps"
    return {
        "objective": " ".join(objective_flags(objective)),
        "masked": f"{objective.mask_prob} of the tokens, {objective.masking}",
        "sequences per step": f"{training.global_batch_size:,}, of up to {config.model.seq_length:,} tokens",
        "optimizer": f"{optimizer.optimizer}, beta {optimizer.adam_beta1:g} and {optimizer.adam_beta2:g}, eps "
        f"{optimizer.adam_eps:g}, weight decay {optimizer.weight_decay:g}",
        "gradients": f"clipped at a norm of {optimizer.clip_grad:g}" if optimizer.clip_grad else "not clipped",
        "learning rate": f"{optimizer.lr:g}, warm-up {warmup_words}, {optimizer.lr_decay_style} decay to "
        f"{optimizer.min_lr:g}",
        "dropout": f"{config.model.hidden_dropout:g}, of attention {config.model.attention_dropout:g}",
        "precision": training.precision,
        "seed": training.seed,
        "ranks": laid_out.get("ranks", "unknown"),
        "data split": config.data.split or "training and validation data apart",
    }


def _command(config: Config) -> list[str]:
    """Return the run's command line, without paths, outputs and the launcher's own settings."""
    words = ["deepspeed", "--module", "megatron_ddrp", "pretrain"]
    words += changed_flags(replace(config.data, index_cache_dir=None), DataConfig())
    words += objective_flags(config.objective) + model_flags(config.model)
    for section, default in (
        (config.training, TrainingConfig()),
        (config.optimizer, OptimizerConfig()),
        (config.parallel, ParallelConfig()),
    ):
        words += changed_flags(section, default)
    words += ["--save", config.checkpoint.save or "run"]
    return _wrapped([_last(word) for word in words])


def _wrapped(words: Sequence[str]) -> list[str]:
    """Return a command as lines of at most `LINE` characters, broken before flags."""
    lines: list[list[str]] = [[]]
    for place, word in enumerate(words):
        with_values = itertools.takewhile(lambda later: not later.startswith("--"), words[place + 1 :])
        if word.startswith("--") and len(shlex.join([*lines[-1], word, *with_values])) > LINE:
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(map(shlex.join, lines)).split("\n")


def _limits(described: Described) -> str:
    model = described.config.model
    return (
        "The model was pre-trained and nothing more: it is the start of fine-tuning, not an answer to questions. Its "
        "losses are those of its own corpus and vocabulary, and compare only with runs on the same. No benchmark was "
        "run for this card. Whatever the corpus holds of errors, prejudice and private facts may show in its "
        f"predictions. It has not seen texts of more than {model.seq_length:,} pieces."
    )


def _facts(facts: dict[str, Any]) -> Table:
    return Table(["setting", "value"], [[key, str(value)] for key, value in facts.items()], wordy=(1,))


def _last(path: str) -> str:
    """Return the last part of a path, other words unchanged."""
    return os.path.basename(path.rstrip("/")) if "/" in path else path
