#!/usr/bin/env python
"""Training checkpoint → Hugging Face folder, with equal logits.

BERT with absolute positions and LayerNorm after each block becomes a plain transformers BERT. Every other model brings
its own small model file, which transformers runs only when asked to by trust_remote_code=True.

    python tools/convert_checkpoint.py --load checkpoints/base --output hf/base
    python tools/convert_checkpoint.py --load checkpoints/base/iter_0100000 --output hf/base-100k
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.errors import run_command

TERMINATED = 143


def build_parser() -> ArgumentParser:
    """The command's flags, grouped by concern."""
    parser = ArgumentParser(description=__doc__)
    source = parser.add_argument_group("input")
    source.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="DIR",
        help="a folder that pretrain_bert.py --save wrote (its newest checkpoint), or one DIR/iter_N in it",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, required=True, metavar="HF_DIR", help="folder to write: weights, config and tokenizer"
    )
    output.add_argument("--overwrite", action="store_true", help="replace HF_DIR if it is a Hugging Face folder")
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that an unfinished folder is removed
    from megatron_ddrp.conversion.to_huggingface import export_checkpoint

    print(export_checkpoint(arguments.load, arguments.output, arguments.overwrite).summary())


if __name__ == "__main__":
    run_command(main)
