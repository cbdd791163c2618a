"""Names of encoders in tables."""

from __future__ import annotations


def with_random_weights(name: str) -> str:
    """Return what tables call the encoder `name` when it starts from random weights."""
    return f"{name}, random weights"
