"""Analyse pre-trained encoders and draw figures: similarity, attention, geometry of hidden states, notes, speed.

    megatron-ddrp analyze self-similarity --load runs/mlm runs/mth --data-path corpus_text_document --output f.png
    megatron-ddrp analyze attention-maps --load run --data-path corpus_text_document --output maps.png
    megatron-ddrp analyze triangle --load runs/ddrp runs/bert_r --data-path corpus_text_document --output share.png
    megatron-ddrp analyze direction --load runs/ddrp runs/bert_r --data-path corpus_text_document --output sides.png
    megatron-ddrp analyze space --load runs/mlm runs/mth some_encoder --text sentences.txt --output space.png
    megatron-ddrp analyze throughput --load runs/mlm some_encoder --lengths 128 512 --output throughput.json
    megatron-ddrp analyze notes --load run --data-path corpus_text_document

Each command also writes the figure's numbers as JSON. `megatron-ddrp analyze COMMAND --help` explains a command.
"The paper" is Zhang et al., "Better Pre-Training by Reducing Representation Confusion".
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser, add_plugin_flag
from megatron_ddrp.errors import allocations_as_user_errors

SENTENCES, MAP_SENTENCES, DIRECTION_SENTENCES = 5000, 1000, 1000
LENGTH = 64
SPACE_SENTENCES, SPACE_LENGTH = 1000, 128


def main() -> None:
    """Parse the command line and run the subcommand. Torch is imported only then, so that --help is fast."""
    arguments = build_parser().parse_args()
    from megatron_ddrp.analysis import reports

    analyse = {
        "self-similarity": reports.report_similarity,
        "attention-maps": reports.report_maps,
        "triangle": reports.report_triangles,
        "direction": reports.report_direction,
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
            "similarity of tokens and of heads at every checkpoint of runs (the paper's figures 2 and 3a)",
            _similarity,
        ),
        (
            "attention-maps",
            "mean attention maps of heads that look right, of heads that look left, and of all (the paper's figure 4)",
            _maps,
        ),
        ("triangle", "share of sentences with the up-down triangle effect (the paper's Algorithm 1)", _triangle),
        ("direction", "how well encodings and attention tell left from right", _direction),
        ("space", "token cosines, isotropy and effective rank, per layer and checkpoint, of any encoder", _space),
        ("throughput", "tokens per second and memory of encoders at inference, per row length", _throughput),
        ("notes", "note dictionary of a run with --notes", _notes),
    ):
        command = commands.add_parser(name, help=summary, description=inspect.getdoc(add_flags))
        add_flags(command)
        add_plugin_flag(command)
    return parser


def _similarity(parser: argparse.ArgumentParser) -> None:
    """Measure how similar tokens and heads are at every saved checkpoint of one or more runs. f(S) is the mean cosine
    between the last hidden states of two tokens of a sentence (eq. 15 of the paper), f(H) the mean cosine between the
    attention logits of two heads of a layer (eq. 16). All tokens and heads count. Lower means less alike.

        megatron-ddrp analyze self-similarity --load runs/mlm runs/mth --data-path corpus_text_document --output f.png
    """
    _add_common(parser, SENTENCES, None, "cut sentences to N tokens (default: the models' --seq-length)")


def _maps(parser: argparse.ArgumentParser) -> None:
    """Draw the mean attention of one layer over validation sentences: of the half of its heads that looks most to the
    right, of the half that looks most to the left, and of all heads; or of single heads.

        megatron-ddrp analyze attention-maps --load run --data-path corpus_text_document --output maps.png
        megatron-ddrp analyze attention-maps … --layer 3 --head 1 2 5 --output heads.png
    """
    longest = "cut sentences to N tokens; only the longest of the drawn sentences count"
    _add_common(parser, MAP_SENTENCES, LENGTH, longest, several=False)
    drawn = parser.add_argument_group("layer and heads")
    drawn.add_argument("--layer", type=int, metavar="N", help="layer, counted from 1 (default: the last)")
    drawn.add_argument(
        "--head", type=int, nargs="+", default=[], metavar="N", help="single heads, counted from 1, instead of groups"
    )


def _triangle(parser: argparse.ArgumentParser) -> None:
    """Run Algorithm 1 of the paper's appendix C at the newest checkpoint of each folder. It counts the sentences in
    which the right-looking half of a layer's heads has at least 70 % of its attention above the diagonal and the
    left-looking half at least 70 % below it. The printed share is the last layer's; the JSON has every layer.

        megatron-ddrp analyze triangle --load runs/ddrp runs/bert_r --data-path corpus_text_document --output t.png
    """
    _add_common(parser, SENTENCES, LENGTH, "cut sentences to N tokens")
    measure = parser.add_argument_group("measure")
    share = "least share of the attention that counts as a triangle"
    measure.add_argument("--threshold", type=float, default=0.7, metavar="T", help=share)


def _direction(parser: argparse.ArgumentParser) -> None:
    """Measure how well the newest checkpoint of each folder tells left from right. Encodings with a table of queries:
    the cosine of its rows for the keys k places to the right and to the left. All encodings: the accuracy of a linear
    readout of the heads' attention logits that names the right-hand one of the two keys k = 1 … 8 places beside a
    token, fitted on half of the sentences and scored on the other half; chance is 50 %. It is measured on the sentences
    as they are, and with the text of each sentence in a random order, where only positions can tell.

        megatron-ddrp analyze direction --load runs/ddrp runs/bert_r --data-path corpus_text_document --output sides.png
    """
    _add_random_init(_add_common(parser, DIRECTION_SENTENCES, LENGTH, "cut sentences to N tokens"))


def _space(parser: argparse.ArgumentParser) -> None:
    """Measure the geometry of each layer's hidden states at every saved checkpoint: the mean cosine between two tokens
    of one sentence (f(S)) and of different sentences, both also with the mean of all tokens removed; IsoScore (1 if
    every direction has equal variance, 0 if there is one direction); and the effective rank. For models of this project
    also f(H), the mean cosine between the attention logits of two heads. --load takes any encoder that transformers
    loads; no code in its folder is run. With --text each model reads the same texts with its own tokenizer.

        megatron-ddrp analyze space --load runs/mlm runs/mth --data-path corpus_text_document --output space.png
        megatron-ddrp analyze space --load runs/mlm albert mpnet --text sentences.txt --random-init --output s.png
    """
    longest = "cut sentences to N tokens, or to the model's number of positions if that is smaller"
    given = _add_common(parser, SPACE_SENTENCES, SPACE_LENGTH, longest, any_encoder=True)
    source = given.add_mutually_exclusive_group(required=True)
    _add_data_path(source, required=False)
    source.add_argument(
        "--text",
        metavar="FILE",
        help="texts instead of a dataset, in any format that megatron-ddrp preprocess reads (.jsonl: the key text; "
        ".txt: a blank line ends a text); required for encoders with different vocabularies",
    )
    _add_random_init(given)


def _throughput(parser: argparse.ArgumentParser) -> None:
    """Measure tokens per second and memory of encoders at inference, per row length. Rows are full and hold random
    pieces; every batch has about the same number of tokens. The encoders take turns, in a random order in each round,
    and the output has the median and the quartiles over the rounds. Memory is the peak during one forward pass, minus
    the memory of the loaded encoder; on a CPU each encoder and length is measured in a fresh process. Checkpoints run
    with this project's code, Hugging Face folders with transformers.

        megatron-ddrp analyze throughput --load runs/mlm runs/ddrp albert --lengths 64 128 512 --output speed.png
    """
    given = parser.add_argument_group("input and output")
    folder = "folder that megatron-ddrp pretrain --save wrote, one DIR/iter_N in it, or a Hugging Face encoder's folder"
    given.add_argument("--load", type=Path, nargs="+", required=True, metavar="DIR", help=folder)
    figure = "FILE.png (also writes FILE.pdf, FILE.svg and FILE.json) or FILE.json"
    given.add_argument("--output", type=Path, required=True, metavar="FILE", help=figure)
    measure = parser.add_argument_group("measure")
    lengths = "tokens per row; a length beyond an encoder's positions is left out"
    measure.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 512], metavar="N", help=lengths)
    tokens = "tokens per batch (default: 16384 on a GPU, 2048 on a CPU); a longer row makes a batch alone"
    measure.add_argument("--tokens", type=int, metavar="N", help=tokens)
    measure.add_argument(
        "--rounds", type=int, default=9, metavar="N", help="timed forward passes per encoder and length after a warm-up"
    )
    measure.add_argument("--bf16", action="store_true", help="use autocast to bf16 instead of fp32")
    measure.add_argument("--seed", type=int, default=1234, help="seed of the pieces and of the order of the encoders")
    _add_device(measure)


def _notes(parser: argparse.ArgumentParser) -> None:
    """Show the number of rare words of a run, the number of those with a note, the share of sentences that contain a
    rare word, and for some words the words with the nearest notes, by cosine after the mean of all notes is removed.

        megatron-ddrp analyze notes --load run --data-path corpus_text_document
        megatron-ddrp analyze notes --load run --words perth syntax --neighbours 5 --output notes.json
    """
    source = parser.add_argument_group("input")
    folder = "a --save folder, or one DIR/iter_N in it"
    source.add_argument("--load", type=Path, required=True, metavar="DIR", help=folder)
    source.add_argument("--data-path", metavar="P", help="dataset whose sentences are searched for rare words")
    source.add_argument("--documents", type=int, default=5000, metavar="N", help="search its first N documents")
    asked = parser.add_argument_group("nearest notes")
    words = "rare words (default: the five most frequent with a note)"
    asked.add_argument("--words", nargs="+", default=[], metavar="WORD", help=words)
    asked.add_argument("--neighbours", type=int, default=5, metavar="N", help="number of nearest notes per word")
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
    """Add the flags that all analyses of checkpoints share; return the group of input and output.

    `max_length` is the help text of --max-length. With `any_encoder` the caller adds the source of the sentences.
    """
    given = parser.add_argument_group("input and output")
    given.add_argument(
        "--load",
        type=Path,
        nargs="+" if several else 1,
        required=True,
        metavar="DIR",
        help="folder that megatron-ddrp pretrain --save wrote, one DIR/iter_N in it, or "
        + ("any Hugging Face encoder's folder" if any_encoder else "a Hugging Face folder of a supported family")
        + ("; give several to compare them" if several else ""),
    )
    if not any_encoder:
        _add_data_path(given, required=True)
    figure = "FILE.png (also writes FILE.pdf, FILE.svg and FILE.json) or FILE.json"
    given.add_argument("--output", type=Path, required=True, metavar="FILE", help=figure)
    looked_at = parser.add_argument_group("sentences")
    looked_at.add_argument("--sentences", type=int, default=sentences, metavar="N", help="largest number of sentences")
    looked_at.add_argument("--max-length", type=int, default=length, metavar="N", help=max_length)
    looked_at.add_argument(
        "--split",
        metavar="SHARES",
        help="shares of the documents for training, validation and test; validation documents are analysed (default: "
        "the run's own split; 0,1,0 uses every document)",
    )
    looked_at.add_argument("--seed", type=int, default=1234, help="seed that draws the sentences")
    speed = parser.add_argument_group("speed")
    speed.add_argument("--batch-size", type=int, default=32, metavar="N", help="sentences per batch")
    _add_device(speed)
    return given


def _add_data_path(parser: argparse._ActionsContainer, required: bool) -> None:
    prefixes = "dataset prefixes that megatron-ddrp preprocess wrote"
    parser.add_argument("--data-path", nargs="+", required=required, metavar="P", help=prefixes)


def _add_random_init(parser: argparse._ActionsContainer) -> None:
    meaning = "also measure each --load with random weights drawn from --seed"
    parser.add_argument("--random-init", action="store_true", help=meaning)


def _add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
