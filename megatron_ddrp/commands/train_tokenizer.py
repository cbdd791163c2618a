"""Text → a WordPiece vocabulary (vocab.txt), a SentencePiece model (.model) or a byte-level BPE (tokenizer.json).

The same text and flags always give the same file. [PAD] [UNK] [CLS] [SEP] [MASK] have the ids 0 to 4.

    megatron-ddrp train-tokenizer --input wiki.jsonl --vocab-size 30522 --output vocab.txt
    megatron-ddrp train-tokenizer --input wiki.jsonl --vocab-size 32000 --type sentencepiece --output tokenizer.model
    megatron-ddrp train-tokenizer --input wiki.jsonl --vocab-size 32000 --type byte-bpe --cased --output tokenizer.json

Byte-level BPE, as in RoBERTa and ModernBERT, has a piece for every byte, so no text is unknown.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from functools import partial

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.commands.options import TextInput
from megatron_ddrp.config.reading import Section, option, refuse
from megatron_ddrp.data.atomic import atomic_file
from megatron_ddrp.data.preprocess.documents import iter_documents
from megatron_ddrp.data.preprocess.inputs import find_inputs
from megatron_ddrp.data.progress import reading_progress, show_phase
from megatron_ddrp.data.tokenizers.vocabulary import (
    NO_TEXT,
    SPECIALS,
    train_byte_bpe,
    train_sentencepiece,
    train_wordpiece,
    warn_of_stripped,
)
from megatron_ddrp.errors import UserError

WHOLE_FILES = {"sentencepiece": (train_sentencepiece, "SentencePiece"), "byte-bpe": (train_byte_bpe, "HuggingFace")}
"""Kind of pieces whose file is a whole tokenizer → how it is trained, and its `--tokenizer-type`."""


@dataclass(frozen=True)
class Vocabulary(Section):
    """vocabulary"""

    vocab_size: int = option(MISSING, "number of pieces", within="[1, 10000000]")
    type: str = option("wordpiece", "kind of pieces", choices=("wordpiece", *WHOLE_FILES))
    lower: bool = option(False, "fold case and, for wordpiece, strip accents; the default")
    cased: bool = option(False, "keep case and accents; for BertWordPieceCase")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size <= len(SPECIALS):
            refuse(f"--vocab-size is {self.vocab_size}: it must be more than the {len(SPECIALS)} special pieces")
        if self.lower and self.cased:
            refuse("--lower and --cased exclude each other: choose one")


@dataclass(frozen=True)
class VocabularyFile(Section):
    """output"""

    output: str = option(MISSING, "vocab.txt, the .model file, or tokenizer.json", metavar="FILE")
    overwrite: bool = option(False, "replace a file that exists")


SECTIONS = (TextInput, Vocabulary, VocabularyFile)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_sections(ArgumentParser(description=__doc__), SECTIONS, words, plugins=False)
    if os.path.exists(arguments.output) and not arguments.overwrite:
        raise UserError(f"{arguments.output}: exists already; give --overwrite to replace it, or another --output")
    files = find_inputs(arguments.input, leave_out=[arguments.output])
    paths = [file.path for file in files]
    skipped: list[str] = []
    cut, warning = "", None
    with atomic_file(arguments.output) as stream, reading_progress(paths) as progress:
        documents = iter_documents(paths, arguments.json_keys, arguments.on_error, skipped.append, progress.update)
        texts = _texts(documents, skipped, partial(show_phase, progress, "learning the pieces"))
        if arguments.type == "wordpiece":
            pieces, alphabet = train_wordpiece(texts, arguments.vocab_size, not arguments.cased)
            stream.write("".join(f"{piece}\n" for piece in pieces).encode())
            size, cut, warning = len(pieces), alphabet.summary(), warn_of_stripped(alphabet.stripped)
            note = alphabet.left_out()
        else:
            train, _ = WHOLE_FILES[arguments.type]
            model, size, note = train(texts, arguments.vocab_size, not arguments.cased)
            stream.write(model)
    reason = "" if cut else "the text gives no more; "
    fewer = f" ({reason}{arguments.vocab_size:,} were asked for)" if size < arguments.vocab_size else ""
    left_out = f", {len(skipped):,} unreadable records skipped (first: {skipped[0]})" if skipped else ""
    print(f"{size:,} pieces{fewer}{left_out} → {arguments.output}")
    for line in filter(None, (cut, note)):
        print(line)
    if warning:
        print(warning, file=sys.stderr)
    if words is None:
        print(f"next: {next_command(arguments)}")


def _texts(documents: Iterable[Sequence[str]], skipped: list[str], at_end: Callable[[], object]) -> Iterator[str]:
    """Yield the texts of some documents, and call `at_end` after the last one.

    Raises `UserError` with the reason of the first of the `skipped` records if there is no document.
    """
    document: Sequence[str] = ()
    for document in documents:
        yield from document
    if skipped and not document:
        raise UserError(f"{NO_TEXT}; {len(skipped):,} records skipped, the first because of {skipped[0]}")
    at_end()


def next_command(arguments: argparse.Namespace) -> str:
    """Return the command that preprocesses the same input with the new vocabulary."""
    words = ["megatron-ddrp", "preprocess", "--input", *arguments.input]
    if arguments.json_keys != ("text",):
        words += ["--json-keys", *arguments.json_keys]
    if arguments.on_error != "stop":
        words += ["--on-error", arguments.on_error]
    words += ["--workers", str(len(os.sched_getaffinity(0)))]
    words += ["--output-prefix", os.path.join(os.path.dirname(arguments.output), "corpus")]
    if arguments.type in WHOLE_FILES:
        words += ["--tokenizer-type", WHOLE_FILES[arguments.type][1], "--tokenizer-model", arguments.output]
    else:
        kind = "BertWordPieceCase" if arguments.cased else "BertWordPieceLowerCase"
        words += ["--tokenizer-type", kind, "--vocab-file", arguments.output]
    return shlex.join(words)
