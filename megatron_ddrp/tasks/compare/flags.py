"""Flags of `megatron-ddrp pretrain` in the YAML of a plan."""

from __future__ import annotations

from typing import Any

from megatron_ddrp.arguments import Settings, decide_by_deepspeed
from megatron_ddrp.config import Config, concerns
from megatron_ddrp.config.config_file import config_of
from megatron_ddrp.config.reading import Place, options_of, read_settings
from megatron_ddrp.config.translation import HINTS
from megatron_ddrp.errors import UserError

Flags = tuple[tuple[str, Any], ...]
"""Pairs (name of a setting, value)."""

DECIDED = {
    "position_encoding": "models",
    "objective": "models",
    "train_iters": "budget",
    "seed": "seeds",
    "save": "--output-dir",
    "load": "--output-dir",
    "save_interval": "checkpoints",
    "keep_last": "checkpoints",
    "exit_interval": "budget",
    "exit_duration_in_mins": "budget",
    "data_path": "corpus",
    "train_data_path": "corpus",
    "valid_data_path": "corpus",
    "vocab_file": "corpus",
    "tokenizer_type": "corpus",
}
"""Flag of `megatron-ddrp pretrain` that a plan must not have → the key that determines it."""


def read_flags(values: Any, place: Place) -> Flags:
    """Return the flags of `megatron-ddrp pretrain` in a mapping. Raises `UserError` for a flag in `DECIDED`."""
    options = options_of(*concerns().values())
    settings = read_settings(options, values or {}, place, HINTS)
    for name in DECIDED:
        if name in settings:
            raise place.at(name.replace("_", "-")).error(f"not allowed here: {DECIDED[name]} determines it")
    return tuple((name, settings[name]) for name in options if settings.get(name) is not None)


def make_config(settings: dict[str, Any], blame: str) -> Config:
    """Return the configuration with these settings. Raises `UserError` that begins with `blame` for invalid ones."""
    resolved = Settings(settings)
    try:
        decide_by_deepspeed(resolved, None)
        return config_of(resolved)
    except UserError as error:
        raise UserError(f"{blame}: {error}", error.exit_code) from None
