"""Options that several commands share, the input text and the tokenizer, and the command that trains on a dataset."""

from __future__ import annotations

import os
import shlex
from dataclasses import MISSING, dataclass
from typing import Any

from megatron_ddrp.commands import PROGRAM
from megatron_ddrp.config.option import Section, flag_words, option
from megatron_ddrp.data.dataset.manifest import recorded_flags
from megatron_ddrp.data.preprocess.inputs import INPUT_HELP
from megatron_ddrp.data.tokenizers.tokenizer import TOKENIZER_TYPES
from megatron_ddrp.run.sizing import recipe_for_text


def on_error(record: str) -> Any:
    """Return the option `on_error` for records that cannot be read."""
    return option("stop", f"{record}: stop and name it, or skip and count it", choices=("stop", "skip"))


@dataclass(frozen=True)
class TextInput(Section):
    """input"""

    input: tuple[str, ...] = option(MISSING, INPUT_HELP, nargs="+", metavar="FILE")
    json_keys: tuple[str, ...] = option(
        ("text",),
        "keys (columns, of .parquet) to take; megatron-ddrp preprocess makes one dataset each: PREFIX_KEY_document",
        nargs="+",
        metavar="KEY",
    )
    on_error: str = on_error("a record that is not UTF-8 or JSON or lacks the key")


@dataclass(frozen=True)
class GivenTokenizer(Section):
    """tokenizer (local files only; default: the one that is recorded)"""

    tokenizer_type: str | None = option(
        None, f"kind of vocabulary (default: as recorded, else {TOKENIZER_TYPES[0]})", choices=TOKENIZER_TYPES
    )
    vocab_file: str | None = option(None, "vocab.txt, for the BertWordPiece types", metavar="FILE")
    tokenizer_model: str | None = option(
        None, ".model file for SentencePiece; for HuggingFace a folder with tokenizer.json", metavar="PATH"
    )


def training_command(prefix: str, tokens: int) -> str:
    """Return the command that trains a model on a dataset, of a size that fits its tokens (`run/sizing.py`).

    It names the tokenizer only where the manifest cannot; `FILE` is for a vocabulary that is not known or has moved.
    """
    flags = recorded_flags(prefix)
    is_there = flags.path is not None and os.path.exists(flags.path)
    words = [] if is_there else flags.with_path("FILE").words()
    words += flag_words(recipe_for_text(tokens).items())
    return shlex.join([PROGRAM, "pretrain", "--data-path", prefix, *words, "--save", "run", "--load", "run"])
