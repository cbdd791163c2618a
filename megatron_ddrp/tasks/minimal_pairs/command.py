"""`megatron-ddrp minimal-pairs`: score encoders on minimal pairs without fine-tuning, and report the accuracies."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.tasks.minimal_pairs.arguments import SECTIONS, parse_arguments

__all__ = ["SECTIONS", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the inputs, do the missing jobs, and report."""
    options = parse_arguments(arguments)
    from megatron_ddrp.tasks.minimal_pairs.work import run_here  # here, because it imports torch

    run_here(options)
