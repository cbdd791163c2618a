"""The origin of an imported model: its name and licence, and the modules that sentence-transformers puts behind it.

A sentence encoder is an encoder with a pooling, often a normalization, and a longest row. An import keeps the settings
of these modules, every checkpoint of a run has them, and the export writes them again. Any other export gets modules of
its own, which take the mean of the last hidden states, so that every server pools it in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ddrp.conversion.families.contract import CARD
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import misfit, parse_yaml, read_bytes, read_json, read_object, show

MODULES = "modules.json"
LONGEST_ROW = "sentence_bert_config.json"
SETTINGS = (LONGEST_ROW, "config_sentence_transformers.json")
"""Files of settings beside `MODULES`; the second has prompts and the similarity."""
KINDS = ("Transformer", "Pooling", "Normalize")
"""Modules that are kept, by the last part of their type: the encoder itself, then those without weights."""
POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
_MODULE: Any = {"path": str, "type": str}


@dataclass(frozen=True)
class Origin:
    """Facts about an imported folder for later exports. Every checkpoint of a run that begins there keeps them."""

    name: str | None = None
    """Name on the hub, or of the folder; None for a model that was trained from scratch."""
    license: str | None = None
    """Licence that the folder's model card states."""
    has_head: bool = True
    """False if the folder had no head for the objective, so that a new one was drawn."""
    modules: Mapping[str, Any] = field(default_factory=dict)
    """File → content, of a sentence encoder's modules; empty for other models."""

    @property
    def is_bare(self) -> bool:
        """True if exports are encoders without a head, as the folder was."""
        return bool(self.modules) and not self.has_head


def read_modules(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the files of a folder's sentence-transformers modules with their content, and the modules left out.

    Modules with weights or code of their own, such as Dense, are left out, and all of them if the first one has code.
    Both are empty for other folders. Raise `UserError` for a damaged file, or a module outside the folder.
    """
    path = folder / MODULES
    if not path.is_file():
        return {}, []
    modules = read_json(path)
    if reason := misfit(modules, list) or next(filter(None, (misfit(module, _MODULE) for module in modules)), ""):
        raise UserError(f"{path}: {reason}; copy the file again, or delete it if this is no sentence encoder")
    kept: list[dict[str, str]] = []
    left_out: list[str] = []
    files: dict[str, Any] = {name: read_object(folder / name) for name in SETTINGS if (folder / name).is_file()}
    for module in modules:
        place, kind = module["path"], module["type"].rpartition(".")[2]
        if not re.fullmatch(r"[\w-][\w.-]{,99}|", place):
            raise UserError(f"{path}: a path is {show(place)}, expected the name of a folder in this one")
        if kind not in (KINDS[1:] if kept else KINDS[:1]) or not module["type"].startswith("sentence_transformers."):
            left_out.append(place or kind)
            continue
        kept.append(module)
        if place and (folder / place / "config.json").is_file():
            files[f"{place}/config.json"] = read_object(folder / place / "config.json")
    return ({MODULES: kept, **files} if kept and not kept[0]["path"] else {}), left_out


def own_modules(width: int, longest: int) -> dict[str, Any]:
    """Return the modules of an export whose origin has none: the mean over rows of up to `longest` pieces."""
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate({"Transformer": "", "Pooling": "1_Pooling"}.items())
    ]
    pooling = {f"pooling_mode_{how}": how == "mean_tokens" for how in POOLINGS}
    return {
        MODULES: modules,
        LONGEST_ROW: {"max_seq_length": longest, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": width, **pooling},
    }


def write_modules(modules: Mapping[str, Any], folder: Path) -> str:
    """Write the files of sentence-transformers modules into an export; return a line that describes them."""
    for name, content in modules.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return describe(modules)


def pooling_of(modules: Mapping[str, Any]) -> str:
    """Return the pooling in words: "mean", "cls and max", or "no"."""
    settings: dict[str, Any] = {}
    for module in modules[MODULES]:
        settings |= modules.get(f"{module['path']}/config.json", {})
    named = [key for key, value in settings.items() if value is True and key.startswith("pooling_mode_")]
    words = " and ".join(re.sub("^pooling_mode_|_tokens?$", "", key) for key in named)
    return words or str(settings.get("pooling_mode", "no"))


def describe(modules: Mapping[str, Any]) -> str:
    """Return the pooling, the length of the vectors and the longest row in words."""
    kinds = [module["type"].rpartition(".")[2] for module in modules[MODULES]]
    longest = modules.get(LONGEST_ROW, {}).get("max_seq_length")
    rows = f"rows of up to {longest!s:.20} pieces" if longest else "rows as long as the model's"
    length = "length 1" if "Normalize" in kinds else "any length"
    return f"{pooling_of(modules):.80} pooling, vectors of {length}, {rows}"


def stated_license(folder: Path) -> str | None:
    """Return the licence in the metadata of a folder's model card, or None without a card that states one."""
    try:
        metadata = parse_yaml(read_bytes(folder / CARD).split(b"---")[1])
    except (UserError, IndexError, ValueError):
        return None
    found = metadata.get("license") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) else None
