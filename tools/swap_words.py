#!/usr/bin/env python
"""Make a word order task out of any corpus: real sentences against the same with two words swapped.

Writes train.csv and valid.csv with the columns text and label for python -m tasks.finetune; the labels are real and
swapped. Every sentence comes in both forms, and the two files come from different documents. First and last words,
punctuation and capitals stay where they are, so that only word order tells the classes apart. Half of the rows have
each label, so a constant guess has an accuracy of 50 %.

    python tools/swap_words.py --input corpus.jsonl --output-dir task/word-order
"""

from __future__ import annotations

import csv
import io
import os
import random
import re
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.preprocess.documents import iter_documents
from megatron_ddrp.data.preprocess.inputs import INPUT_HELP
from megatron_ddrp.errors import UserError, run_command

MIN_WORDS, MAX_WORDS = 6, 30
REAL, SWAPPED = "real", "swapped"

Rows = list[tuple[str, str]]
"""(text, label) pairs."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SENTENCE = re.compile(r"[A-Z][^\t\n]*[.!?]")
_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")
_MOVABLE = re.compile(r"[a-z]+(?:['-][a-z]+)*")


def sentences(text: str) -> list[str]:
    """Return the sentences of `text` that are 6 to 30 words of prose, split at blank space."""
    found = []
    for line in text.splitlines():
        for candidate in _SENTENCE_END.split(line.strip()):
            words = candidate.split()
            plain = sum(1 for word in words if _WORD.fullmatch(word.strip(".,;:!?()\"'")))
            if MIN_WORDS <= len(words) <= MAX_WORDS and _SENTENCE.fullmatch(candidate) and plain >= len(words) - 1:
                found.append(" ".join(words))
    return found


def swap(sentence: str, rng: random.Random) -> str | None:
    """Return `sentence` with two of its different inner lower-case words exchanged; None where there are no two."""
    words = sentence.split(" ")
    movable = [index for index in range(1, len(words) - 1) if _MOVABLE.fullmatch(words[index])]
    pairs = [(i, j) for i in movable for j in movable if i < j and words[i] != words[j]]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    words[i], words[j] = words[j], words[i]
    return " ".join(words)


def label_rows(documents: Iterable[list[str]], rng: random.Random, limit: int) -> Rows:
    """Return at most `limit` rows in random order: each sentence as it is and with two words swapped.

    Both forms have the same words, so that nothing but their order tells the label.
    """
    sentences_in_order = (sentence for found in documents for sentence in found)
    candidates = [(sentence, changed) for sentence in sentences_in_order if (changed := swap(sentence, rng))]
    rng.shuffle(candidates)
    half = min(limit // 2, len(candidates))
    rows = [row for real, changed in candidates[:half] for row in ((real, REAL), (changed, SWAPPED))]
    rng.shuffle(rows)
    return rows


def make_task(texts: Iterable[str], train: int, dev: int, seed: int) -> tuple[Rows, Rows]:
    """Return (training rows, development rows), at most so many, from different documents.

    Documents go to development until it has twice as many sentences as rows, for some cannot be changed, or a tenth of
    all. A sentence that occurs twice counts once.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    documents = []
    for text in texts:
        found = [s for s in dict.fromkeys(sentences(text)) if s not in seen]
        seen.update(found)
        if found:
            documents.append(found)
    # By content rather than by position: an added document does not reshuffle the others.
    documents.sort(key=lambda found: (zlib.crc32(f"{seed} {found[0]}".encode()), found[0]))
    total = sum(map(len, documents))
    wanted = min(2 * dev, max(1, total // 10))
    dev_documents = []
    held = 0
    while documents and held < wanted:
        dev_documents.append(documents.pop())
        held += len(dev_documents[-1])
    return label_rows(documents, rng, train), label_rows(dev_documents, rng, dev)


def write_rows(path: Path, rows: Rows) -> None:
    """Write rows below the header text,label."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("text", "label"), *rows])
    write_text(path, text.getvalue())


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=INPUT_HELP)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="for train.csv and valid.csv")
    parser.add_argument("--train-rows", type=int, default=6000, metavar="N", help="at most so many training rows")
    parser.add_argument("--dev-rows", type=int, default=1000, metavar="N", help="at most so many development rows")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="decides the split, the words and the order")
    arguments = parser.parse_args()
    if arguments.train_rows < 2 or arguments.dev_rows < 2:
        parser.error("--train-rows and --dev-rows: expected at least 2, one row of each label")
    texts = (text for (text,) in iter_documents(arguments.input))
    train, dev = make_task(texts, arguments.train_rows, arguments.dev_rows, arguments.seed)
    if not train or not dev:
        raise UserError(
            f"{', '.join(arguments.input)}: too few sentences of {MIN_WORDS} to {MAX_WORDS} words in at least two "
            "documents to make a task; give a larger corpus"
        )
    write_rows(arguments.output_dir / "train.csv", train)
    write_rows(arguments.output_dir / "valid.csv", dev)
    print(f"{arguments.output_dir}: {len(train)} training and {len(dev)} development rows")


if __name__ == "__main__":
    run_command(main)
