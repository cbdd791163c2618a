"""Settings that an older version stored, with today's meaning. A key that is absent tells that the version is older."""

from __future__ import annotations

from typing import Any

from megatron_ddrp.config.model import RELATIVE_DISTANCES


def model_as_meant(values: dict[str, Any]) -> dict[str, Any]:
    """Return a stored model's settings: before `absolute_embedding` was one, tupe-r's distance was 128, as if fixed."""
    if "absolute_embedding" in values or values.get("position_encoding") != "tupe-r":
        return values
    return {**values, "relative_distance": RELATIVE_DISTANCES["tupe-r"]}


def objective_as_meant(values: dict[str, Any]) -> dict[str, Any]:
    """Return a stored objective's settings: before `generator_embeddings` was one, the generator had its own."""
    return {"generator_embeddings": "own", **values} if values.get("objective") == "electra" else values


OLDER = {"model": model_as_meant, "objective": objective_as_meant}
"""Concern → what gives its stored settings today's meaning."""
