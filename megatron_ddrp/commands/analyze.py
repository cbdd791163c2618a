"""Look inside pre-trained models: what the paper's figures 2, 3a and 4 and its Algorithm 1 show, for your runs.

    megatron-ddrp analyze self-similarity --load runs/mlm runs/mth --data-path corpus_text_document --output f.png
    megatron-ddrp analyze attention-maps --load run --data-path corpus_text_document --output maps.png
    megatron-ddrp analyze triangle --load runs/ddrp runs/bert_r --data-path corpus_text_document --output share.png
    megatron-ddrp analyze space --load runs/mlm runs/mth some_encoder --text sentences.txt --output space.png
    megatron-ddrp analyze throughput --load runs/mlm some_encoder --lengths 128 512 --output throughput.json
    megatron-ddrp analyze notes --load run --data-path corpus_text_document

Figures have the numbers beside them as JSON; `analyze.py COMMAND --help` tells more.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser, add_plugin_flag
from megatron_ddrp.errors import allocations_as_user_errors

SENTENCES, MAP_SENTENCES = 5000, 1000
LENGTH = 64
SPACE_SENTENCES, SPACE_LENGTH = 1000, 128


def main() -> None:
    """Parse the command line and do what it asks. Nothing heavy is imported before, so that --help answers at once."""
    arguments = build_parser().parse_args()
    from megatron_ddrp.analysis import reports

    analyse = {
        "self-similarity": reports.report_similarity,
        "attention-maps": reports.report_maps,
        "triangle": reports.report_triangles,
        "space": reports.report_space,
        "throughput": reports.report_throughput,
        "notes": reports.report_notes,
    }[arguments.command]
    with allocations_as_user_errors(f"use {need_less_memory(arguments)}"):
        analyse(arguments)


def need_less_memory(arguments: argparse.Namespace) -> str:
    """Return what a command line can change to need less memory."""
    size = getattr(arguments, "batch_size", 1)
    if size > 1:
        return f"--batch-size {size // 2} instead of {size}"
    return "a smaller --tokens" if arguments.command == "throughput" else "a machine with more memory"


def build_parser() -> ArgumentParser:
    """Return the parser of the subcommands and their flags."""
    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary, add_flags in (
        (
            "self-similarity",
            "how alike tokens and heads are, over the checkpoints of runs (figures 2 and 3a)",
            _similarity,
        ),
        (
            "attention-maps",
            "mean attention maps of the heads that look right, that look left, and of all (figure 4)",
            _maps,
        ),
        ("triangle", "share of sentences with the up-down triangle effect (Algorithm 1)", _triangle),
        ("space", "cosines of tokens, isotropy and effective rank, by layer and over checkpoints, any encoder", _space),
        ("throughput", "tokens per second and memory of encoders at inference, by length", _throughput),
        ("notes", "the note dictionary of a run with --notes", _notes),
    ):
        command = commands.add_parser(name, help=summary, description=inspect.getdoc(add_flags))
        add_flags(command)
        add_plugin_flag(command)
    return parser


def _similarity(parser: argparse.ArgumentParser) -> None:
    """Measure f(S) and f(H), eq. 15 and 16 of the paper, at every saved checkpoint of one run or several: the mean
    cosine of the last hidden states of a sentence, and of the attention logits of a layer's heads. In closed form, over
    all tokens and heads.

        megatron-ddrp analyze self-similarity --load runs/mlm runs/mth --data-path corpus_text_document --output f.png
    """
    _add_common(parser, SENTENCES, None, "cut sentences to so many tokens (default: the models' --seq-length)")


def _maps(parser: argparse.ArgumentParser) -> None:
    """Draw the mean attention of one layer over validation sentences, its heads divided by where they look, or single
    heads.

        megatron-ddrp analyze attention-maps --load run --data-path corpus_text_document --output maps.png
        megatron-ddrp analyze attention-maps … --layer 3 --head 1 2 5 --output heads.png
    """
    longest = "cut sentences to so many tokens; of those drawn, the ones as long as the longest count"
    _add_common(parser, MAP_SENTENCES, LENGTH, longest, several=False)
    drawn = parser.add_argument_group("what is drawn")
    drawn.add_argument("--layer", type=int, metavar="N", help="layer, counted from 1 (default: the last)")
    drawn.add_argument(
        "--head", type=int, nargs="+", default=[], metavar="N", help="single heads, counted from 1, instead of groups"
    )


def _triangle(parser: argparse.ArgumentParser) -> None:
    """Run Algorithm 1 of the paper's appendix C at the newest checkpoint of each folder: the share of sentences in
    which the right-looking half of a layer's heads has 70 % of its attention above the diagonal and the left-looking
    half as much below it. The headline is the last layer; the JSON has all.

        megatron-ddrp analyze triangle --load runs/ddrp runs/bert_r --data-path corpus_text_document --output t.png
    """
    _add_common(parser, SENTENCES, LENGTH, "cut sentences to so many tokens")
    measure = parser.add_argument_group("measure")
    share = "share of the attention that makes a triangle"
    measure.add_argument("--threshold", type=float, default=0.7, metavar="T", help=share)


def _space(parser: argparse.ArgumentParser) -> None:
    """Show what the hidden states of each layer look like, at every saved checkpoint: the mean cosine of tokens of one
    sentence (f(S)) and of different sentences, before and after the mean of all tokens is taken off, IsoScore, and the
    effective rank; of models of ours f(H) as well. Any encoder that transformers loads is welcome; no code of its
    folder is run. With --text each model cuts up the same texts with its own tokenizer.

        megatron-ddrp analyze space --load runs/mlm runs/mth --data-path corpus_text_document --output space.png
        megatron-ddrp analyze space --load runs/mlm albert mpnet --text sentences.txt --random-init --output s.png
    """
    longest = "cut sentences to so many tokens, and to as many as a model has positions for"
    given = _add_common(parser, SPACE_SENTENCES, SPACE_LENGTH, longest, any_encoder=True)
    source = given.add_mutually_exclusive_group(required=True)
    _add_data_path(source, required=False)
    source.add_argument(
        "--text",
        metavar="FILE",
        help="texts instead of a dataset, in any form that megatron-ddrp preprocess reads (.jsonl: the key text; .txt: "
        "a blank line ends a text); needed for encoders of different vocabularies",
    )
    given.add_argument(
        "--random-init", action="store_true", help="also show each --load with new random weights, drawn from --seed"
    )


def _throughput(parser: argparse.ArgumentParser) -> None:
    """Measure how many tokens per second encoders take at inference and how much memory, by the length of their rows.
    Rows are full and hold random pieces; every batch has about the same number of tokens. The encoders take turns,
    in a random order in each round: the median over the rounds and the quartiles. Memory is the peak of one forward
    pass above the loaded encoder; on a CPU it is measured in a fresh process for each encoder and length.
    Checkpoints run in this project's code, Hugging Face folders in that of transformers.

        megatron-ddrp analyze throughput --load runs/mlm runs/ddrp albert --lengths 64 128 512 --output speed.png
    """
    given = parser.add_argument_group("input and output")
    folder = "what pretrain_bert.py --save wrote, one DIR/iter_N in it, or any Hugging Face folder with an encoder"
    given.add_argument("--load", type=Path, nargs="+", required=True, metavar="DIR", help=folder)
    figure = "FILE.png with FILE.json beside it, or FILE.json alone"
    given.add_argument("--output", type=Path, required=True, metavar="FILE", help=figure)
    measure = parser.add_argument_group("measure")
    lengths = "tokens per row; lengths that an encoder has no positions for are left out"
    measure.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 512], metavar="N", help=lengths)
    tokens = "tokens per batch (default: 16384 on a GPU, 2048 on a CPU); a longer row is a batch of its own"
    measure.add_argument("--tokens", type=int, metavar="N", help=tokens)
    measure.add_argument(
        "--rounds", type=int, default=9, metavar="N", help="forward passes of each that count, after one that does not"
    )
    measure.add_argument("--bf16", action="store_true", help="under autocast to bf16 instead of in fp32")
    measure.add_argument("--seed", type=int, default=1234, help="decides the pieces and the order of the encoders")
    _add_device(measure)


def _notes(parser: argparse.ArgumentParser) -> None:
    """Show how many rare words a run knows, how many of them it has a note of, the share of sentences that hold one,
    and the words whose notes lie nearest to a word's, by the cosine of notes taken from their mean.

        megatron-ddrp analyze notes --load run --data-path corpus_text_document
        megatron-ddrp analyze notes --load run --words perth syntax --neighbours 5 --output notes.json
    """
    source = parser.add_argument_group("input")
    folder = "a --save folder, or one DIR/iter_N in it"
    source.add_argument("--load", type=Path, required=True, metavar="DIR", help=folder)
    source.add_argument("--data-path", metavar="P", help="dataset whose sentences are searched for rare words")
    source.add_argument("--documents", type=int, default=5000, metavar="N", help="how many documents of it")
    asked = parser.add_argument_group("nearest notes")
    words = "rare words (default: five frequent ones)"
    asked.add_argument("--words", nargs="+", default=[], metavar="WORD", help=words)
    asked.add_argument("--neighbours", type=int, default=5, metavar="N", help="nearest notes of each")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FILE.json", help="also write the numbers as JSON")


def _add_common(
    parser: argparse.ArgumentParser,
    sentences: int,
    length: int | None,
    max_length: str,
    several: bool = True,
    any_encoder: bool = False,
) -> argparse._ArgumentGroup:
    """Add the flags that every analysis of checkpoints has, and return the group of input and output.

    `max_length` is the help of --max-length. With `any_encoder` the caller adds where the sentences come from.
    """
    given = parser.add_argument_group("input and output")
    given.add_argument(
        "--load",
        type=Path,
        nargs="+" if several else 1,
        required=True,
        metavar="DIR",
        help="what pretrain_bert.py --save wrote, one DIR/iter_N in it, or "
        + ("any Hugging Face folder with an encoder" if any_encoder else "a Hugging Face folder of a family of ours")
        + ("; several are compared" if several else ""),
    )
    if not any_encoder:
        _add_data_path(given, required=True)
    figure = "FILE.png with FILE.json beside it, or FILE.json alone"
    given.add_argument("--output", type=Path, required=True, metavar="FILE", help=figure)
    looked_at = parser.add_argument_group("sentences")
    looked_at.add_argument("--sentences", type=int, default=sentences, metavar="N", help="validation sequences at most")
    looked_at.add_argument("--max-length", type=int, default=length, metavar="N", help=max_length)
    looked_at.add_argument(
        "--split",
        metavar="SHARES",
        help="shares of the documents for training, validation and test, as in training (default: the run's own; "
        "0,1,0 takes every document for validation)",
    )
    looked_at.add_argument("--seed", type=int, default=1234, help="decides which of the validation sequences")
    speed = parser.add_argument_group("speed")
    speed.add_argument("--batch-size", type=int, default=32, metavar="N", help="sentences at once")
    _add_device(speed)
    return given


def _add_data_path(parser: argparse._ActionsContainer, required: bool) -> None:
    prefixes = "prefixes that megatron-ddrp preprocess wrote"
    parser.add_argument("--data-path", nargs="+", required=required, metavar="P", help=prefixes)


def _add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:1 (default: a GPU where there is one)")
