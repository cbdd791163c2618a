"""Settings that an older version stored, with today's meaning. A key that is absent tells that the version is older."""

from __future__ import annotations

from typing import Any


def model_as_meant(values: dict[str, Any]) -> dict[str, Any]:
    """Return a stored model's settings.

    Before `absolute_embedding` was one, tupe-r's distance was 128, as if fixed. Before `direction_init` was one, DDRP's
    D started around 1. The attention backend `flex` is gone; `auto` chooses one for the machine at hand, and no weight
    depends on it.
    """
    if not values:
        return values
    meant = {"direction_init": "ones", **values}
    if "absolute_embedding" not in values and values.get("position_encoding") == "tupe-r":
        meant["relative_distance"] = 128
    if values.get("attention_backend") == "flex":
        meant["attention_backend"] = "auto"
    return meant


def objective_as_meant(values: dict[str, Any]) -> dict[str, Any]:
    """Return a stored objective's settings.

    Before `generator_embeddings` was one, ELECTRA's generator had its own. Before `eval_mask_prob` was one, validation
    masked as much as training.
    """
    meant = dict(values)
    if "mask_prob" in values:
        meant.setdefault("eval_mask_prob", values["mask_prob"])
    if values.get("objective") == "electra":
        meant.setdefault("generator_embeddings", "own")
    return meant


OLDER = {"model": model_as_meant, "objective": objective_as_meant}
"""Concern → what gives its stored settings today's meaning."""
