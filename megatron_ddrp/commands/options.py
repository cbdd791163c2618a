"""The size of a run for a text, and the options that several commands share. This module does not import torch.

Shapes of models are ordered by the law of Muennighoff et al. for repeated data (arXiv:2305.16264, with the constants of
their code); D are the tokens that a model of N weights sees, U of them different:

    loss = A / N'^α + B / D'^α + E        G = (A / B)^(1 / α), the weights that fit a token
    D' = U + U · R_D · (1 − exp(−(D / U − 1) / R_D))        N' likewise from N and G · U with R_N

The law was fitted to decoders, and nobody has fitted one to masked LM on English. So only the order of the shapes is
used, a difference below `TIE` counts as none, and no loss is printed.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple

from megatron_ddrp.commands import PROGRAM
from megatron_ddrp.config.reading import Section, flag_words, option
from megatron_ddrp.data.dataset.indexed_dataset import recorded_flags
from megatron_ddrp.data.preprocess.inputs import INPUT_HELP
from megatron_ddrp.data.tokenizers.tokenizer import TOKENIZER_TYPES

A, B, E, ALPHA = 521.0, 1488.2, 1.869, 0.3526596
R_D, R_N = 15.387756, 5.309743
G = (A / B) ** (1 / ALPHA)


class Shape(NamedTuple):
    """Shape of a model; the fields are settings."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int

    def __str__(self) -> str:
        return f"{self.num_layers} x {self.hidden_size}"

    @property
    def weights(self) -> int:
        """Weights of the layers' matrices; laws of scaling do not count embeddings."""
        return 12 * self.num_layers * self.hidden_size**2


SHAPES = (
    *(Shape(2, 128, 2), Shape(4, 256, 4), Shape(6, 384, 6), Shape(8, 512, 8)),
    *(Shape(12, 768, 12), Shape(24, 1024, 16)),
)
"""Shapes in growing order: BERT's base and large, and smaller ones as in Turc et al. (arXiv:1908.08962)."""

EPOCHS = 40
"""Most epochs: those of BERT (arXiv:1810.04805, appendix A.2). By the law the 40th is worth 8 % of the first."""
TIE = 0.1
STEPS = 20_000
"""Steps that a batch is chosen for, if it lies in `BATCH`."""
BATCH = (2048, 524_288)
"""Fewest and most tokens per step: 16 and 4,096 rows of 128; the latter is the batch of cramming and MosaicBERT."""
WARMUP = 0.06
"""Share of the steps in which the rate rises, as in RoBERTa-large: 30,000 of 500,000 (arXiv:1907.11692)."""


def best_shape(seen: Mapping[Shape, float], tokens: float) -> Shape:
    """Return the smallest shape that ties with the best one.

    `seen` are the tokens that each shape sees, in growing order of the shapes; `tokens` are the different ones.
    """
    losses = {shape: _loss(shape.weights, of_shape, tokens) for shape, of_shape in seen.items()}
    return next(shape for shape, loss in losses.items() if loss <= min(losses.values()) + TIE)


def _loss(weights: float, seen: float, tokens: float) -> float:
    return A / _worth(G * min(tokens, seen), weights, R_N) ** ALPHA + B / _worth(tokens, seen, R_D) ** ALPHA + E


def _worth(useful: float, given: float, constant: float) -> float:
    """Return how much `given` is worth if only `useful` of it is worth its whole number."""
    useful = min(useful, given)
    return useful + useful * constant * (1 - math.exp(-(given / useful - 1) / constant))


def rows_per_rank(seen: float, length: int, ranks: int = 1) -> int:
    """Return the rows of `length` tokens per rank and step, a power of two, that make about `STEPS` steps."""
    per_step = min(max(seen / STEPS, BATCH[0]), BATCH[1])
    return power_of_two(per_step / length / ranks)


class Fill(NamedTuple):
    """Sequences and tokens that fill a row."""

    sequences: int
    """Sequences of a row, a power of two: `--packing` puts several into one, and batches are counted in sequences."""
    tokens: float
    """Tokens of the text in a row."""


def fill_rows(tokens: float, documents: float, length: int) -> Fill:
    """Return the `Fill` of a row of `length` tokens, of so many documents (0: unknown) with so many tokens in all.

    A document is cut into sequences of `length - 2` tokens, of which the last is half full on average.
    """
    if not documents or not tokens:
        return Fill(1, length)
    mean = tokens / max(documents, tokens / (length - 2) + documents / 2)
    sequences = power_of_two(length / (mean + 2))
    return Fill(sequences, sequences * mean)


def power_of_two(number: float) -> int:
    """Return the largest power of two that is at most `number`, and at least 1."""
    return 1 << max(0, math.floor(math.log2(number)))


PLAIN: dict[str, Any] = {
    "position_encoding": "rope",
    "objective": "mlm",
    "layernorm_position": "pre",
    "first_norm": False,
    "ffn": "geglu",
    "bias": False,
    "num_segments": 0,
}
"""A model that is exported as a plain `modernbert`. Of the encodings and objectives compared in docs/lab/results.md,
rotary positions and masked LM have the lowest loss; the block is that of the family."""


def recipe(shape: Shape, seen: float, length: int, rows: int, micro_batch: int, fill: Fill) -> dict[str, Any]:
    """Return the settings of a run in which a model sees so many tokens, in steps of `rows` rows.

    The peak rate is for pre-norm layers and AdamW; the best one differs by recipe, so try three. 1e-3 is cramming's
    (arXiv:2212.14034) and that of docs/lab/results.md, 5e-4 MosaicBERT's (arXiv:2312.17482), 8e-4 ModernBERT's
    (arXiv:2412.13663), the last three at a width of 768.
    """
    return {
        **shape._asdict(),
        "seq_length": length,
        "packing": True,
        **PLAIN,
        "micro_batch_size": micro_batch * fill.sequences,
        "global_batch_size": rows * fill.sequences,
        "train_iters": max(1, int(seen / (rows * fill.tokens))),
        "lr": 1e-3 if shape.hidden_size <= 512 else 5e-4,
        "lr_warmup_fraction": WARMUP,
    }


class Plan(NamedTuple):
    """Result of `megatron-ddrp plan`."""

    settings: dict[str, Any]
    """Settings of the suggested run, the keywords of `pretrain`."""
    rows: list[dict[str, Any]]
    """One row per shape: its settings, epochs, seconds and memory."""


LENGTH, MICRO_BATCH = 128, 16
"""Tokens per row and rows per micro-batch where no device is known."""


def recipe_for_text(tokens: int, documents: int = 0) -> dict[str, Any]:
    """Return the settings of a run for a text of so many tokens, up to BERT's base shape, without a limit of time."""
    seen = EPOCHS * max(1, tokens)
    shape = best_shape(dict.fromkeys(SHAPES[:-1], seen), max(1, tokens))
    fill = fill_rows(tokens, documents, LENGTH)
    return recipe(shape, seen, LENGTH, rows_per_rank(seen, LENGTH), MICRO_BATCH, fill)


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


def training_command(prefix: str, tokens: int, documents: int) -> str:
    """Return the command that trains a model on a dataset, of a size that fits its text (`recipe_for_text`).

    It names the tokenizer only where the manifest cannot; `FILE` is for a vocabulary that is not known or has moved.
    """
    flags = recorded_flags(prefix)
    words = [] if flags.path and os.path.exists(flags.path) else flags.with_path("FILE").words()
    words += flag_words(recipe_for_text(tokens, documents).items())
    words += ["--eval-interval", "0"] * (documents == 1)  # of which no part is left to validate on
    return shlex.join([PROGRAM, "pretrain", "--data-path", prefix, *words, "--save", "run", "--load", "run"])
