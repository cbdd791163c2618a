"""Flags that several commands share: the input text and the tokenizer."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from megatron_ddrp.data.preprocess.inputs import INPUT_HELP
from megatron_ddrp.data.tokenizers.tokenizer import TOKENIZER_TYPES


def add_input(parser: ArgumentParser, purpose: str) -> None:
    """Add `--input`, `--json-keys` (keys for a `purpose`) and `--on-error`."""
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE", help=INPUT_HELP)
    keys = f"keys (columns, of .parquet) {purpose} (default: text)"
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys)
    records = "a record that is not UTF-8 or JSON or lacks the key"
    add_on_error(group, f"{records}: stop and name its line, or skip and count it")


def add_on_error(parser: Any, help: str) -> None:
    """Add `--on-error` to a parser or to a group of its arguments."""
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help=help)


def add_tokenizer(parser: ArgumentParser, title: str, default: str | None, kind: str) -> None:
    """Add the three flags of a tokenizer; `kind` is the help of `--tokenizer-type`."""
    group = parser.add_argument_group(title)
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default=default, help=kind)
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.txt, for the BertWordPiece types")
    model = ".model file for SentencePiece; for HuggingFace a folder with tokenizer.json"
    group.add_argument("--tokenizer-model", metavar="PATH", help=model)
