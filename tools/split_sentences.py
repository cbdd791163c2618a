#!/usr/bin/env python
"""Text → one document per sentence, so that each row of a training batch is a sentence by itself.

For the recipe of docs/laptop.md. Sentences do not cross lines. They are those of NLTK's Punkt (pip install nltk), which
learns the abbreviations from the first 5 million characters of the text itself. Kept are whole ones of 3 words or more:
they end with a mark and begin with no small letter, so headings and captions are left out.

    python tools/split_sentences.py --input novels.jsonl --output novels_sentences.jsonl --max-words 20
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from itertools import chain

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.config.reading import Section, option
from megatron_ddrp.data.atomic import atomic_file
from megatron_ddrp.data.preprocess.documents import iter_documents
from megatron_ddrp.data.preprocess.inputs import INPUT_HELP
from megatron_ddrp.data.progress import reading_progress
from megatron_ddrp.errors import UserError, need_packages, run_command

LEARN_FROM = 5_000_000
"""Characters of text from which Punkt learns abbreviations."""
MIN_WORDS = 3
_ENDS = tuple(".!?…。！？\"'”’»)")


def sentences(texts: Iterator[str], max_words: int) -> Iterator[str]:
    """Yield the whole sentences of some texts in order, without longer ones."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    first: list[str] = []
    characters = 0
    for text in texts:
        first.append(text)
        characters += len(text)
        if characters >= LEARN_FROM:
            break
    split = PunktSentenceTokenizer("\n".join(first)).tokenize
    lines = (line for text in chain(first, texts) for line in text.splitlines())
    return (sentence for line in lines for sentence in split(line.strip()) if is_whole(sentence, max_words))


def is_whole(sentence: str, max_words: int) -> bool:
    """Return whether a text of one line looks like a sentence of 3 to `max_words` words."""
    words = len(sentence.split())
    return MIN_WORDS <= words <= max_words and sentence.endswith(_ENDS) and not sentence[0].islower()


@dataclass(frozen=True)
class SplitOptions(Section):
    """text"""

    input: tuple[str, ...] = option(MISSING, INPUT_HELP, nargs="+", metavar="FILE")
    output: str = option(MISSING, "replaced if it is there", metavar="FILE.jsonl")
    max_words: int = option(80, "longer sentences are left out", within="[3, inf)")


def main() -> None:
    arguments = parse_sections(ArgumentParser(description=__doc__), (SplitOptions,), None, plugins=False)
    need_packages("splitting into sentences", "nltk")
    written = characters = 0
    with atomic_file(arguments.output) as stream, reading_progress(arguments.input) as bar:
        texts = (text for (text,) in iter_documents(arguments.input, on_read=bar.update))
        for sentence in sentences(texts, arguments.max_words):
            stream.write(json.dumps({"text": sentence}, ensure_ascii=False).encode() + b"\n")
            written, characters = written + 1, characters + len(sentence)
        if not written:
            raise UserError(
                f"{' '.join(arguments.input)}: no sentence of {MIN_WORDS} to {arguments.max_words} words that ends "
                "with a mark and begins with no small letter; nothing written"
            )
    print(f"{arguments.output}: {written:,} sentences, {characters / 1e6:.1f} million characters")


if __name__ == "__main__":
    run_command(main)
