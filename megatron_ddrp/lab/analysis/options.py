"""Options of the subcommands of `megatron-ddrp analyze`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from megatron_ddrp.config.option import COUNT, SEED, Section, option, refuse

RUNS = "folder that megatron-ddrp pretrain --save wrote, one DIR/iter_N in it, or "
FAMILY, ANY = "a Hugging Face folder of a supported family", "any Hugging Face encoder's folder"
SEVERAL = "; give several to compare them"
FIGURE = "FILE.png (also writes FILE.pdf, FILE.svg and FILE.json) or FILE.json"
PREFIXES = "dataset prefixes that megatron-ddrp preprocess wrote"
LENGTHS = "[3, 2147483648)"
"""Range of lengths in tokens."""


@dataclass(frozen=True, kw_only=True)
class Models(Section):
    """input and output"""

    load: tuple[Path, ...] = option(MISSING, RUNS + FAMILY + SEVERAL, nargs="+", metavar="DIR")
    data_path: tuple[str, ...] | None = option(MISSING, PREFIXES, nargs="+", metavar="P")
    output: Path = option(MISSING, FIGURE, metavar="FILE")


@dataclass(frozen=True)
class OneModel(Models):
    """input and output"""

    load: tuple[Path, ...] = option(MISSING, RUNS + FAMILY, nargs=1, metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class AnyModels(Models):
    """input and output"""

    load: tuple[Path, ...] = option(MISSING, RUNS + ANY + SEVERAL, nargs="+", metavar="DIR")
    data_path: tuple[str, ...] | None = option(None, f"{PREFIXES}; or give --text", nargs="+", metavar="P")
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


@dataclass(frozen=True)
class Sentences(Section):
    """sentences"""

    sentences: int = option(5000, "largest number of sentences", within=COUNT)
    max_length: int | None = option(
        None, "cut sentences to N tokens (default: the models' --seq-length)", within=LENGTHS
    )
    split: str | None = option(
        None,
        "shares of the documents for training, validation and test; validation documents are analysed (default: the "
        "run's own split; 0,1,0 uses every document)",
        metavar="SHARES",
    )
    seed: int = option(1234, "seed that draws the sentences", within=SEED)


@dataclass(frozen=True)
class ShortSentences(Sentences):
    """sentences"""

    max_length: int | None = option(64, "cut sentences to N tokens", within=LENGTHS)


@dataclass(frozen=True)
class FewSentences(ShortSentences):
    """sentences"""

    sentences: int = option(1000, "largest number of sentences", within=COUNT)


@dataclass(frozen=True)
class MaskedSentences(Sentences):
    """sentences"""

    sentences: int = option(200, "largest number of sentences; one piece of each is masked", within=COUNT)


@dataclass(frozen=True)
class Guesses(Section):
    """measure"""

    top_k: int = option(10, "number of guesses per masked place", within="[1, 1000]")


@dataclass(frozen=True)
class LongestSentences(FewSentences):
    """sentences"""

    max_length: int | None = option(
        64, "cut sentences to N tokens; only the longest of the drawn sentences count", within=LENGTHS
    )


@dataclass(frozen=True)
class SpaceSentences(FewSentences):
    """sentences"""

    max_length: int | None = option(
        128, "cut sentences to N tokens, or to the model's number of positions if that is smaller", within=LENGTHS
    )


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
class Encoders(Section):
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
