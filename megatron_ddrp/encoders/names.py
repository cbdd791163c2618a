"""Names of encoders in tables."""

from __future__ import annotations


def with_random_weights(name: str) -> str:
    """Return the name in tables of the encoder `name` with random weights."""
    return f"{name}, random weights"
