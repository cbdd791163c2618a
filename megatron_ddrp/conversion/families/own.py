"""Our own exports: any model of this project, under the names of training, with the code that transformers runs.

Import never runs that code; it reads settings and weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.families.contract import CLASSIFIER_DROPOUT, HEADS, NOTHING, Family
from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE, OWN_SETTINGS, SIZES, read_settings
from megatron_ddrp.conversion.foreign_config import model_config as checked_config
from megatron_ddrp.conversion.model_code import write_model_code
from megatron_ddrp.conversion.task_heads import HEAD_FORMS
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError

ALWAYS = ("layernorm_position", "position_encoding", "relative_distance", "relative_table", "deberta_emd")
"""Settings of `OWN_SETTINGS` in folders of all versions. A folder that lacks any other setting means its default."""
OBJECTIVES = {"masked-lm": "mlm", "replaced-token": "electra", "contextual-replaced-token": "rtd"}
"""Head of a folder → objective that trains it, if the folder names none."""


class Own(Family):
    """Family of every model of this project; for models that transformers does not have."""

    model_type, class_name, prefix = OWN_MODEL_TYPE, "Ddrp", "encoder."
    head_modules = {head: {} for head in HEADS}
    head_keys = CLASSIFIER_DROPOUT
    task_head = NOTHING
    has_code = True

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        return values

    def model_config(self, path: Path, values: dict[str, Any]) -> ModelConfig:
        keys = SIZES | {name: name for name in OWN_SETTINGS if name in values or name in ALWAYS}
        if missing := [key for key in keys if key not in values]:
            raise UserError(f"{path}: {missing[0]} is missing; export the checkpoint again")
        return checked_config(path, read_settings(path, values, keys))

    def objective(self, path: Path, values: dict[str, Any], names: Iterable[str]) -> ObjectiveConfig:
        if "objective" not in values:
            return ObjectiveConfig(OBJECTIVES[_head(set(names))])
        try:
            stored = Config.from_dict({"objective": values["objective"]}).objective
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        return replace(stored, generator_embeddings="shared")  # a generator is drawn anew

    def our_name(self, name: str) -> str | None:
        if name == "head.bias":
            return "head.decoder.bias"
        if name.startswith("encoder.final_norm."):
            return name.replace("encoder.", "head.", 1)
        return name.removeprefix(self.prefix)

    def refusal(self, config: ModelConfig, head: str) -> str | None:
        return None

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        settings = super().folder_settings(config, head, tokenizer)
        return {
            "model_type": settings["model_type"],
            "architectures": settings["architectures"],
            "auto_map": {
                "AutoConfig": "configuration_ddrp.DdrpConfig",
                "AutoModel": "modeling_ddrp.DdrpModel",
                f"AutoModelFor{HEADS[head].auto}": f"modeling_ddrp.DdrpFor{HEADS[head].name}",
                **{f"AutoModelFor{name}": f"modeling_ddrp.DdrpFor{name}" for name, *_ in HEAD_FORMS},
            },
            **settings,
            **{name: getattr(config, name) for name in OWN_SETTINGS},
            "absolute_embedding": config.adds_absolute_embedding,
        }

    def their_name(self, name: str, head: str) -> str:
        if name == "head.decoder.bias":
            return "head.bias"
        if name.startswith("head.final_norm."):
            return name.replace("head.", "encoder.", 1)
        return name if name.startswith(("head.", "mask_decoder.")) else f"{self.prefix}{name}"

    def write_code(self, folder: Path, config: ModelConfig) -> None:
        write_model_code(folder, config.position_encoding)


def _head(names: set[str]) -> str:
    """Return the key of `HEADS` for the head among a folder's weights."""
    if "head.output.weight" not in names:
        return "masked-lm"
    return "contextual-replaced-token" if "head.norm.weight" in names else "replaced-token"
