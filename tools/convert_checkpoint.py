#!/usr/bin/env python
"""Training checkpoint ↔ Hugging Face folder, with equal hidden states and logits.

To Hugging Face (--load): BERT with absolute positions and LayerNorm after each block becomes a plain transformers BERT.
Every other model brings its own small model files, which transformers runs only when asked to by
trust_remote_code=True. DeBERTa's enhanced mask decoder goes into the masked-LM model alone.

    python tools/convert_checkpoint.py --load checkpoints/base --output hf/base
    python tools/convert_checkpoint.py --load checkpoints/base/iter_0100000 --output hf/base-100k

From Hugging Face (--from-hf): the folder of a BERT or of a DeBERTa in its v1 layout, with model.safetensors or
pytorch_model.bin, becomes a folder that pretrain_bert.py --load goes on from, with the flags that this command prints.

    python tools/convert_checkpoint.py --from-hf bert-base-uncased --output start
    deepspeed pretrain_bert.py --load start --save run --data-path corpus_text_document …

Both say what was loaded, left out and initialised.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.cli import ArgumentParser, add_plugin_flag
from megatron_ddrp.errors import run_command

TERMINATED = 143


def build_parser() -> ArgumentParser:
    """Return the parser of the command's flags, grouped by concern."""
    parser = ArgumentParser(description=__doc__)
    source = parser.add_argument_group("input, one of").add_mutually_exclusive_group(required=True)
    saved = "a folder that pretrain_bert.py --save wrote (its newest checkpoint), or one DIR/iter_N in it"
    source.add_argument("--load", type=Path, metavar="DIR", help=saved)
    foreign = "a local Hugging Face folder of a BERT or DeBERTa (v1): config.json, weights and tokenizer"
    source.add_argument("--from-hf", type=Path, metavar="HF_DIR", help=foreign)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to write: weights, configuration and tokenizer, as a Hugging Face folder for --load and as a "
        "checkpoint for --from-hf",
    )
    replaced = "replace the output if it is a Hugging Face folder (--load), or an untrained import (--from-hf)"
    output.add_argument("--overwrite", action="store_true", help=replaced)
    add_plugin_flag(parser.add_argument_group("plug-ins"))
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that an unfinished folder is removed
    if arguments.from_hf:
        from megatron_ddrp.conversion.from_huggingface import import_folder

        imported = import_folder(arguments.from_hf, arguments.output, arguments.overwrite)
        print(imported.summary(), flush=True)
        if imported.warning:
            print(f"convert_checkpoint.py: warning: {imported.warning}", file=sys.stderr)
    else:
        from megatron_ddrp.conversion.to_huggingface import export_checkpoint

        print(export_checkpoint(arguments.load, arguments.output, arguments.overwrite).summary())


if __name__ == "__main__":
    run_command(main)
