"""`megatron-ddrp ladder`, the name of an earlier version for `megatron-ddrp compare ROWS.jsonl`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from megatron_ddrp.tasks.compare import command


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the new command, and run it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    new = shlex.join(["megatron-ddrp", "compare", *words])
    if not {"-h", "--help"} & set(words):
        print(f"megatron-ddrp ladder will go in the next release; the same is: {new}", file=sys.stderr, flush=True)
    return command.main(words)
