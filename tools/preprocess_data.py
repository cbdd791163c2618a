"""Text → Megatron indexed dataset (PREFIX_text_document.bin, .idx and .json).

Each document becomes one sequence of token ids, without [CLS] and [SEP]: the sample builder adds them. The .json says
how many documents and tokens there are, which tokenizer made them, and from which files. The dataset appears when it is
complete. A run that was killed goes on where it was: give the same command again.

    python tools/preprocess_data.py --input wiki.jsonl --output-prefix data/wiki --vocab-file vocab.txt --workers 8
    python tools/preprocess_data.py --input shards/ 'more/*.txt.gz' --output-prefix data/all --vocab-file vocab.txt
    zcat dump.jsonl.gz | python tools/preprocess_data.py --input - --output-prefix data/dump --vocab-file vocab.txt
"""

from __future__ import annotations

import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.data.preprocess.inputs import INPUT_HELP
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.data.preprocess.signals import exit_on_sigterm
from megatron_ddrp.data.tokenizers.tokenizer import TOKENIZER_TYPES
from megatron_ddrp.errors import run_command


def build_parser() -> ArgumentParser:
    """The command's flags, grouped by concern."""
    parser = ArgumentParser(description=__doc__)
    data = parser.add_argument_group("input")
    data.add_argument("--input", nargs="+", required=True, metavar="FILE", help=INPUT_HELP)
    data.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys (columns, of .parquet) to take, one dataset each: PREFIX_KEY_document (default: text)",
    )
    data.add_argument(
        "--split-sentences",
        action="store_true",
        help="one sequence a sentence, by NLTK's Punkt; writes PREFIX_text_sentence",
    )
    data.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="a record that is not UTF-8 or JSON or lacks the key: stop and name its line, or skip and count it",
    )
    tokenizer = parser.add_argument_group("tokenizer (local files only)")
    tokenizer.add_argument(
        "--tokenizer-type", choices=TOKENIZER_TYPES, default="BertWordPieceLowerCase", help="kind of vocabulary"
    )
    tokenizer.add_argument("--vocab-file", metavar="FILE", help="vocab.txt, for the BertWordPiece types")
    tokenizer.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help=".model file for SentencePiece; for HuggingFace a folder with tokenizer.json",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path and beginning of the files' names"
    )
    output.add_argument("--append-eod", action="store_true", help="end each document with [SEP]")
    output.add_argument("--overwrite", action="store_true", help="replace a dataset that exists")
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--workers", type=int, default=1, metavar="N", help="tokenizing processes; the output does not depend on it"
    )
    return parser


def main() -> None:
    flags = vars(build_parser().parse_args())
    arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in flags.items()}
    config = PreprocessConfig(**arguments)
    exit_on_sigterm()  # so that what is done is kept
    print(preprocess(config).summary())


if __name__ == "__main__":
    run_command(main)
