"""The subcommands of tools/analyze.py: the flags of each, and what it does. A new one is one entry of `COMMANDS`.

Nothing heavy is imported before a command runs, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SENTENCES, MAP_SENTENCES = 5000, 1000
LENGTH = 64


class Command(NamedTuple):
    """One subcommand."""

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    module: str
    """Module of this package whose `run(arguments)` does it."""

    def run(self, arguments: argparse.Namespace) -> object:
        return importlib.import_module(f"megatron_ddrp.analysis.{self.module}").run(arguments)


def _add_common(
    parser: argparse.ArgumentParser, sentences: int, max_length: str, default_length: int | None, several: bool = True
) -> None:
    """The flags that every analysis of checkpoints has."""
    given = parser.add_argument_group("input and output")
    given.add_argument(
        "--load",
        type=Path,
        nargs="+" if several else 1,
        required=True,
        metavar="DIR",
        help="what pretrain_bert.py --save wrote, one DIR/iter_N in it, or a Hugging Face folder (an export of ours, a "
        "BERT or a DeBERTa v1)" + ("; several are compared" if several else ""),
    )
    given.add_argument(
        "--data-path", nargs="+", required=True, metavar="P", help="prefixes that tools/preprocess_data.py wrote"
    )
    given.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="FILE.png with FILE.json beside it, or FILE.json alone",
    )
    looked_at = parser.add_argument_group("sentences")
    looked_at.add_argument("--sentences", type=int, default=sentences, metavar="N", help="validation sequences at most")
    looked_at.add_argument("--max-length", type=int, default=default_length, metavar="N", help=max_length)
    looked_at.add_argument(
        "--split",
        metavar="SHARES",
        help="shares of the documents for training, validation and test, as in training (default: the run's own; "
        "0,1,0 takes every document for validation)",
    )
    looked_at.add_argument("--seed", type=int, default=1234, help="decides which of the validation sequences")
    speed = parser.add_argument_group("speed")
    speed.add_argument("--batch-size", type=int, default=32, metavar="N", help="sentences at once")
    speed.add_argument("--device", metavar="D", help="cpu, cuda or cuda:1 (default: a GPU where there is one)")


def _add_similarity(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, SENTENCES, "cut sentences to so many tokens (default: the models' --seq-length)", None)


def _add_triangle(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, SENTENCES, "cut sentences to so many tokens", LENGTH)
    parser.add_argument_group("measure").add_argument(
        "--threshold", type=float, default=0.7, metavar="T", help="share of the attention that makes a triangle"
    )


def _add_maps(parser: argparse.ArgumentParser) -> None:
    _add_common(
        parser,
        MAP_SENTENCES,
        "cut sentences to so many tokens; of those drawn, the ones as long as the longest count",
        LENGTH,
        several=False,
    )
    chosen = parser.add_argument_group("what is drawn")
    chosen.add_argument("--layer", type=int, metavar="N", help="layer, counted from 1 (default: the last)")
    chosen.add_argument(
        "--head", type=int, nargs="+", default=[], metavar="N", help="single heads, counted from 1, instead of groups"
    )


def _add_notes(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("input")
    source.add_argument(
        "--load", type=Path, required=True, metavar="DIR", help="a --save folder, or one DIR/iter_N in it"
    )
    source.add_argument("--data-path", metavar="P", help="dataset whose sentences are searched for rare words")
    source.add_argument("--documents", type=int, default=5000, metavar="N", help="how many documents of it")
    asked = parser.add_argument_group("nearest notes")
    asked.add_argument(
        "--words", nargs="+", default=[], metavar="WORD", help="rare words (default: five frequent ones)"
    )
    asked.add_argument("--neighbours", type=int, default=5, metavar="N", help="nearest notes of each")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FILE.json", help="also write the numbers as JSON")


COMMANDS = (
    Command(
        "self-similarity",
        "how alike tokens and heads are, over the checkpoints of runs (figures 2 and 3a)",
        "f(S) and f(H), eq. 15 and 16 of the paper, at every saved checkpoint of one run or several: the mean cosine\n"
        "of the last hidden states of a sentence, and of the attention logits of a layer's heads. In closed form,\n"
        "over all tokens and heads.\n\n"
        "    python tools/analyze.py self-similarity --load runs/mlm runs/mth --data-path corpus_text_document "
        "--output similarity.png",
        _add_similarity,
        "run_similarity",
    ),
    Command(
        "attention-maps",
        "mean attention maps of the heads that look right, that look left, and of all (figure 4)",
        "The mean attention of one layer over validation sentences, its heads divided by where they look, or single\n"
        "heads.\n\n"
        "    python tools/analyze.py attention-maps --load run --data-path corpus_text_document --output maps.png\n"
        "    python tools/analyze.py attention-maps … --layer 3 --head 1 2 5 --output heads.png",
        _add_maps,
        "run_maps",
    ),
    Command(
        "triangle",
        "share of sentences with the up-down triangle effect (Algorithm 1)",
        "Algorithm 1 of the paper's appendix C, at the newest checkpoint of each folder: the share of sentences in\n"
        "which the right-looking half of a layer's heads has 70 % of its attention above the diagonal and the\n"
        "left-looking half as much below it. The headline is the last layer; the JSON has all.\n\n"
        "    python tools/analyze.py triangle --load runs/ddrp runs/bert_r --data-path corpus_text_document "
        "--output triangle.png",
        _add_triangle,
        "run_triangle",
    ),
    Command(
        "notes",
        "the note dictionary of a run with --notes",
        "How many rare words a run knows, how many of them it has a note of, the share of sentences that hold one,\n"
        "and the words whose notes lie nearest to a word's, by the cosine of notes taken from their mean.\n\n"
        "    python tools/analyze.py notes --load run --data-path corpus_text_document\n"
        "    python tools/analyze.py notes --load run --words perth syntax --neighbours 5 --output notes.json",
        _add_notes,
        "run_notes",
    ),
)
