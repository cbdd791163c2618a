"""Settings stored by older versions, translated to their present meaning. An absent key shows an older version."""

from __future__ import annotations

from typing import Any

from megatron_ddrp.config.schedules import idle_phases


def model_as_meant(values: dict[str, Any]) -> dict[str, Any]:
    """Return a stored model's settings with their present meaning.

    Before the setting `absolute_embedding` existed, tupe-r's distance was always 128. Before `direction_init` existed,
    DDRP's D started closely around 1. Before `key_bias` existed, all keys had a bias. The attention backend `flex` no
    longer exists; it becomes `auto`, since no weight depends on the backend.
    """
    if not values:
        return values
    meant = {"direction_init": "ones", "key_bias": True, **values}
    if "absolute_embedding" not in values and values.get("position_encoding") == "tupe-r":
        meant["relative_distance"] = 128
    if values.get("attention_backend") == "flex":
        meant["attention_backend"] = "auto"
    return meant


def objective_as_meant(values: dict[str, Any]) -> dict[str, Any]:
    """Return a stored objective's settings with their present meaning.

    Before the setting `generator_embeddings` existed, ELECTRA's generator had its own. Before `eval_mask_prob` existed,
    validation masked at the rate of training.
    """
    meant = dict(values)
    if "mask_prob" in values:
        meant.setdefault("eval_mask_prob", values["mask_prob"])
    if values.get("objective") == "electra":
        meant.setdefault("generator_embeddings", "own")
    return meant


def training_as_meant(values: dict[str, Any]) -> dict[str, Any]:
    """Return stored settings of training with their present meaning.

    Before length phases without a step were refused, they had no effect.
    """
    words, steps = values.get("seq_length_phases"), values.get("train_iters")
    if not (isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words) and type(steps) is int):
        return values
    idle = {phase.word for phase in idle_phases(words, steps)}
    return {**values, "seq_length_phases": [word for word in words if word not in idle]}


OLDER = {"model": model_as_meant, "objective": objective_as_meant, "training": training_as_meant}
"""Concern → function that gives its stored settings their present meaning."""
