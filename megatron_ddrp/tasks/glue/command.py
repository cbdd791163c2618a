"""`megatron-ddrp glue`: fine-tune encoders on GLUE over a grid and seeds, and report the medians."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.run.launch import first_rank_speaks
from megatron_ddrp.tasks.finetune.running import run
from megatron_ddrp.tasks.glue.arguments import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the inputs, do the missing runs, and report. Return 1 if --report leaves damaged runs out."""
    with first_rank_speaks():
        options = parse_arguments(arguments)
    return run(options)


SECTIONS: tuple[type, ...] = ()
