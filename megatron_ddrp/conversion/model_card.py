"""README.md of an exported or fine-tuned folder: a model card with the metadata that the Hugging Face hub reads.

`render_card` builds every card. All facts in the card of an export come from the checkpoint, metrics.jsonl and the
manifests of the datasets. A card has only the last part of each path, so it names no folder, host or user.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config
from megatron_ddrp.conversion.exported_folder import CARD
from megatron_ddrp.conversion.families import Family
from megatron_ddrp.conversion.training_record import (
    command,
    data_table,
    datasets_of,
    facts_table,
    losses,
    objective_flags,
    progress,
)
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.pages.machine import versions
from megatron_ddrp.pages.rendering import render

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
    """Key of `HEADS`."""
    parameters: int

    @property
    def fills_masks(self) -> bool:
        return self.head == "masked-lm"


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
        license=publishing.license,
        config=config,
        class_name=family.classes(described.head)[0],
        parameters=described.parameters,
        data=data_table(datasets),
        unknown_data=[dataset.name for dataset in datasets if dataset.manifest is None],
        tokenizer=described.tokenizer,
        trained=not state.get(checkpoint.WEIGHTS_ONLY),
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
    return render(template, name=name, metadata=header, usage=usage, trust=has_code, versions=installed, **parts)


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
    has_code = described.family.has_code
    if described.fills_masks:
        mask = described.tokenizer.pieces[described.tokenizer.mask_id]
        text = json.dumps(_example(described, publishing) or f"YOUR TEXT WITH ONE {mask}", ensure_ascii=False)
        return [
            "from transformers import pipeline",
            "",
            f'fill = pipeline("fill-mask", model={hub_name(described.name)}{", trust_remote_code=True" * has_code})',
            f"print(fill({text}))",
        ]
    return [
        *loading_lines(described.name, "AutoModel", has_code),
        'states = model(**tokenizer("A sentence.", return_tensors="pt")).last_hidden_state  # [1, tokens, hidden]',
    ]
