"""Analyse pre-trained encoders and draw figures: similarity, attention, geometry of hidden states, notes, speed.

    megatron-ddrp analyze self-similarity --load runs/mlm runs/mth --data-path corpus_text_document --output f.png
    megatron-ddrp analyze attention-maps --load run --data-path corpus_text_document --output maps.png
    megatron-ddrp analyze triangle --load runs/ddrp runs/bert_r --data-path corpus_text_document --output share.png
    megatron-ddrp analyze direction --load runs/ddrp runs/bert_r --data-path corpus_text_document --output sides.png
    megatron-ddrp analyze space --load runs/mlm runs/mth some_encoder --text sentences.txt --output space.png
    megatron-ddrp analyze masked-places --load run --data-path corpus_text_document --output places.json
    megatron-ddrp analyze throughput --load runs/mlm some_encoder --lengths 128 512 --output throughput.json
    megatron-ddrp analyze notes --load run --data-path corpus_text_document

Each command also writes the figure's numbers as JSON. `megatron-ddrp analyze COMMAND --help` explains a command.
"The paper" is Zhang et al., "Better Pre-Training by Reducing Representation Confusion".
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from megatron_ddrp.cli import Subcommand, parse_subcommand
from megatron_ddrp.config.reading import COUNT, SEED, Section, option, refuse
from megatron_ddrp.errors import allocations_as_user_errors

RUNS = "folder that megatron-ddrp pretrain --save wrote, one DIR/iter_N in it, or "
FAMILY, ANY = "a Hugging Face folder of a supported family", "any Hugging Face encoder's folder"
SEVERAL = "; give several to compare them"
FIGURE = "FILE.png (also writes FILE.pdf, FILE.svg and FILE.json) or FILE.json"
PREFIXES = "dataset prefixes that megatron-ddrp preprocess wrote"
LENGTHS = "[3, 2147483648)"
"""Range of lengths in tokens."""
DEFAULT_LENGTH = " (default: the models' --seq-length)"


def models(folders: str, nargs: str | int = "+") -> type[Section]:
    """Return the options of models, their dataset and the output; the help of --load names the `folders`."""

    @dataclass(frozen=True)
    class ModelOptions(Section):
        """input and output"""

        load: tuple[Path, ...] = option(MISSING, RUNS + folders, nargs=nargs, metavar="DIR")
        data_path: tuple[str, ...] = option(MISSING, PREFIXES, nargs="+", metavar="P")
        output: Path = option(MISSING, FIGURE, metavar="FILE")

    return ModelOptions


@dataclass(frozen=True, kw_only=True)
class AnyModels(Section):
    """input and output"""

    load: tuple[Path, ...] = option(MISSING, RUNS + ANY + SEVERAL, nargs="+", metavar="DIR")
    data_path: tuple[str, ...] | None = option(None, f"{PREFIXES}; or give --text", nargs="+", metavar="P")
    output: Path = option(MISSING, FIGURE, metavar="FILE")
    text: str | None = option(
        None,
        "texts instead of a dataset, in any format that megatron-ddrp preprocess reads (.jsonl: the key text; "
        ".txt: a blank line ends a text); required for encoders with different vocabularies",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.data_path is None) == (self.text is None):
            refuse("one of the arguments --data-path --text is required, and not both")


def sentences(count: int, length: int | None = 64, more: str = "", of_length: str = "") -> type[Section]:
    """Return the options of sentences; `more` and `of_length` end the help of the first two, of these defaults."""

    @dataclass(frozen=True)
    class SentenceOptions(Section):
        """sentences"""

        sentences: int = option(count, f"largest number of sentences{more}", within=COUNT)
        max_length: int | None = option(length, f"cut sentences to N tokens{of_length}", within=LENGTHS)
        split: str | None = option(
            None,
            "shares of the documents for training, validation and test; validation documents are analysed (default: "
            "the run's own split; 0,1,0 uses every document)",
            metavar="SHARES",
        )
        seed: int = option(1234, "seed that draws the sentences", within=SEED)

    return SentenceOptions


@dataclass(frozen=True)
class Guesses(Section):
    """measure"""

    top_k: int = option(10, "number of guesses per masked place", within="[1, 1000]")


@dataclass(frozen=True)
class Heads(Section):
    """layer and heads"""

    layer: int | None = option(None, "layer, counted from 1 (default: the last)", within=COUNT)
    head: tuple[int, ...] = option(
        (), "single heads, counted from 1, instead of groups", nargs="+", metavar="N", within=COUNT
    )


@dataclass(frozen=True)
class Triangle(Section):
    """measure"""

    threshold: float = option(0.7, "least share of the attention that counts as a triangle", within="(0, 1]")


@dataclass(frozen=True)
class Baseline(Section):
    """baseline"""

    random_init: bool = option(False, "also measure each --load with random weights drawn from --seed")


@dataclass(frozen=True)
class Batches(Section):
    """speed"""

    batch_size: int = option(32, "sentences per batch", within=COUNT)
    device: str | None = option(None, "cpu, cuda or cuda:1 (default: a GPU if there is one)", metavar="D")


@dataclass(frozen=True)
class TimedEncoders(Section):
    """input and output"""

    load: tuple[Path, ...] = option(MISSING, RUNS + "a Hugging Face encoder's folder", nargs="+", metavar="DIR")
    output: Path = option(MISSING, FIGURE, metavar="FILE")


@dataclass(frozen=True)
class Timing(Section):
    """measure"""

    lengths: tuple[int, ...] = option(
        (64, 128, 512),
        "tokens per row; a length beyond an encoder's positions is left out",
        nargs="+",
        metavar="N",
        within=LENGTHS,
    )
    tokens: int | None = option(
        None,
        "tokens per batch (default: 16384 on a GPU, 2048 on a CPU); a longer row makes a batch alone",
        within=COUNT,
    )
    rounds: int = option(9, "timed forward passes per encoder and length after a warm-up", within=COUNT)
    bf16: bool = option(False, "use autocast to bf16 instead of fp32")
    seed: int = option(1234, "seed of the pieces and of the order of the encoders", within=SEED)
    device: str | None = option(None, "cpu, cuda or cuda:1 (default: a GPU if there is one)", metavar="D")


@dataclass(frozen=True)
class NotesOfRun(Section):
    """input and output"""

    load: Path = option(MISSING, "a --save folder, or one DIR/iter_N in it", metavar="DIR")
    data_path: str | None = option(None, "dataset whose sentences are searched for rare words", metavar="P")
    documents: int = option(5000, "search its first N documents", within=COUNT)
    words: tuple[str, ...] = option((), "rare words (default: the five most frequent)", nargs="+", metavar="WORD")
    neighbours: int = option(5, "number of nearest notes per word", within=COUNT)
    output: Path | None = option(None, "also write the numbers as JSON", metavar="FILE.json")


SIMILARITY = """\
Measure how similar tokens and heads are at every saved checkpoint of one or more runs. f(S) is the mean cosine
between the last hidden states of two tokens of a sentence (eq. 15 of the paper), f(H) the mean cosine between the
attention logits of two heads of a layer (eq. 16). All tokens and heads count. Lower means less alike.

    megatron-ddrp analyze self-similarity --load runs/mlm runs/mth --data-path corpus_text_document --output f.png"""
MAPS = """\
Draw the mean attention of one layer over validation sentences: of the half of its heads that looks most to the
right, of the half that looks most to the left, and of all heads; or of single heads.

    megatron-ddrp analyze attention-maps --load run --data-path corpus_text_document --output maps.png
    megatron-ddrp analyze attention-maps … --layer 3 --head 1 2 5 --output heads.png"""
TRIANGLE = """\
Run Algorithm 1 of the paper's appendix C at the newest checkpoint of each folder. It counts the sentences in
which the right-looking half of a layer's heads has at least 70 % of its attention above the diagonal and the
left-looking half at least 70 % below it. The printed share is the last layer's; the JSON has every layer.

    megatron-ddrp analyze triangle --load runs/ddrp runs/bert_r --data-path corpus_text_document --output t.png"""
DIRECTION = """\
Measure how well the newest checkpoint of each folder tells left from right. Encodings with a table of queries:
the cosine of its rows for the keys k places to the right and to the left. All encodings: the accuracy of a linear
readout of the heads' attention logits that names the right-hand one of the two keys k = 1 … 8 places beside a
token, fitted on half of the sentences and scored on the other half; chance is 50 %. It is measured on the sentences
as they are, and with the text of each sentence in a random order, where only positions can tell.

    megatron-ddrp analyze direction --load runs/ddrp runs/bert_r --data-path corpus_text_document --output sides.png"""
SPACE = """\
Measure the geometry of each layer's hidden states at every saved checkpoint: the mean cosine between two tokens
of one sentence (f(S)) and of different sentences, both also with the mean of all tokens removed; IsoScore (1 if
every direction has equal variance, 0 if there is one direction); and the effective rank. For models of this project
also f(H), the mean cosine between the attention logits of two heads. --load takes any encoder that transformers
loads; no code in its folder is run. With --text each model reads the same texts with its own tokenizer.

    megatron-ddrp analyze space --load runs/mlm runs/mth --data-path corpus_text_document --output space.png
    megatron-ddrp analyze space --load runs/mlm albert mpnet --text sentences.txt --random-init --output s.png"""
MASKED_PLACES = """\
Mask one piece in each of 200 sentences of the validation split, and count the sentences in which that piece is among
the first ten guesses of a model; beside it, those in which it is one of the ten most frequent pieces of the dataset,
which is what a model on the unigram level knows.

    megatron-ddrp analyze masked-places --load run --data-path corpus_text_document --output places.json"""
THROUGHPUT = """\
Measure tokens per second and memory of encoders at inference, per row length. Rows are full and hold random
pieces; every batch has about the same number of tokens. The encoders take turns, in a random order in each round,
and the output has the median and the quartiles over the rounds. Memory is the peak during one forward pass, minus
the memory of the loaded encoder; on a CPU each encoder and length is measured in a fresh process. Checkpoints run
with this project's code, Hugging Face folders with transformers.

    megatron-ddrp analyze throughput --load runs/mlm runs/ddrp albert --lengths 64 128 512 --output speed.png"""
NOTES = """\
Show the number of rare words of a run, the number of those with a note, the share of sentences that contain a
rare word, and for some words the words with the nearest notes, by cosine after the mean of all notes is removed.

    megatron-ddrp analyze notes --load run --data-path corpus_text_document
    megatron-ddrp analyze notes --load run --words perth syntax --neighbours 5 --output notes.json"""

MODELS = models(FAMILY + SEVERAL)
SUBCOMMANDS = {
    "self-similarity": Subcommand(
        "similarity of tokens and of heads at every checkpoint of runs (the paper's figures 2 and 3a)",
        SIMILARITY,
        (MODELS, sentences(5000, None, of_length=DEFAULT_LENGTH), Batches),
    ),
    "attention-maps": Subcommand(
        "mean attention maps of heads that look right, of heads that look left, and of all (the paper's figure 4)",
        MAPS,
        (
            models(FAMILY, 1),
            sentences(1000, of_length="; only the longest of the drawn sentences count"),
            Heads,
            Batches,
        ),
    ),
    "triangle": Subcommand(
        "share of sentences with the up-down triangle effect (the paper's Algorithm 1)",
        TRIANGLE,
        (MODELS, sentences(5000), Triangle, Batches),
    ),
    "direction": Subcommand(
        "how well encodings and attention tell left from right", DIRECTION, (MODELS, sentences(1000), Baseline, Batches)
    ),
    "space": Subcommand(
        "token cosines, isotropy and effective rank, per layer and checkpoint, of any encoder",
        SPACE,
        (
            AnyModels,
            sentences(1000, 128, of_length=", or to the model's number of positions if that is smaller"),
            Baseline,
            Batches,
        ),
    ),
    "masked-places": Subcommand(
        "how often the masked piece is among the first guesses, beside the most frequent pieces",
        MASKED_PLACES,
        (MODELS, sentences(200, None, "; one piece of each is masked", DEFAULT_LENGTH), Guesses, Baseline, Batches),
    ),
    "throughput": Subcommand(
        "tokens per second and memory of encoders at inference, per row length", THROUGHPUT, (TimedEncoders, Timing)
    ),
    "notes": Subcommand("note dictionary of a run with --notes", NOTES, (NotesOfRun,)),
}


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line and run the subcommand. Torch is imported only then, so that --help is fast."""
    arguments = parse_subcommand(str(__doc__), SUBCOMMANDS, words)
    from megatron_ddrp.lab.analysis import reports

    analyse = {
        "self-similarity": reports.report_similarity,
        "attention-maps": reports.report_maps,
        "triangle": reports.report_triangles,
        "direction": reports.report_direction,
        "space": reports.report_space,
        "masked-places": reports.report_masked_places,
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
