"""Settings of a run as the words of a command line."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, flag, flag_words


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
