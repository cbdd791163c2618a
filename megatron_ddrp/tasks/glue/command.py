"""`megatron-ddrp glue`: fine-tune encoders on GLUE over a grid and seeds, and print the medians."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.run.launch import first_rank_speaks
from megatron_ddrp.tasks.finetune.running import run
from megatron_ddrp.tasks.glue.arguments import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Read and check everything, then run what is missing, then report. Return 1 where a report leaves runs out."""
    with first_rank_speaks():
        options = parse_arguments(arguments)
    return run(options)
