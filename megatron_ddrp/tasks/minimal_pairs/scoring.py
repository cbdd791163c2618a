"""Scores of sentences, and the execution of one job: the scores of a paradigm under one encoder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.data.tokenizers.vocabulary_fit import warn_of_unmarked_words
from megatron_ddrp.encoders.masked_lm import PieceLogits, load_masked_lm, piece_logits
from megatron_ddrp.errors import UserError, allocations_as_user_errors
from megatron_ddrp.tasks.minimal_pairs.pairs import SENTENCES, Paradigm
from megatron_ddrp.tasks.minimal_pairs.results import PairJob
from megatron_ddrp.tasks.minimal_pairs.rows import masked_rows

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 131072}
"""Default of --tokens-per-batch. On CPUs it keeps the states of the feed-forward block in a core's cache."""
DECIMALS = 6

Pieces = list[list[int]]


@dataclass(frozen=True)
class Subject:
    """An encoder to score, without its weights."""

    name: str
    """Name of the encoder in tables."""
    folder: Path
    seed: int | None
    """Seed of random weights; None for the folder's own weights."""
    fingerprint: str
    tokenizer: Tokenizer
    max_length: int
    origin: str


def subjects_of(folder: Path, seeds: Sequence[int | None]) -> list[Subject]:
    """Load a folder; return one subject with its weights if `seeds` is [None], else one per seed of random weights.

    Raises `UserError` as in `load_masked_lm`.
    """
    encoder = load_masked_lm(folder, random_init=None not in seeds)
    origin = "; ".join(filter(None, (warn_of_unmarked_words(encoder.tokenizer), encoder.origin)))
    rest = (encoder.fingerprint, encoder.tokenizer, encoder.max_length, origin)
    return [Subject(encoder.name + _of_seed(seed, seeds), encoder.folder, seed, *rest) for seed in seeds]


def _of_seed(seed: int | None, seeds: Sequence[int | None]) -> str:
    return f", seed {seed}" if len(seeds) > 1 else ""


def encode_pairs(paradigm: Paradigm, tokenizer: Tokenizer, max_length: int) -> tuple[Pieces, Pieces]:
    """Return the pieces of the good and of the bad sentences, without [CLS] and [SEP].

    Raises `UserError` with file and line for a sentence without a piece or with too many for the encoder's positions.
    """
    encoded = tokenizer.encode_batch(paradigm.good), tokenizer.encode_batch(paradigm.bad)
    room = max_length - tokenizer.rows.num_specials(1)
    for key, sentences in zip(SENTENCES, encoded, strict=True):
        for place, pieces in zip(paradigm.places, sentences, strict=True):
            if not 0 < len(pieces) <= room:
                raise UserError(
                    f"{place}: {key} has {len(pieces)} pieces; expected 1 to {room}, the number of positions "
                    "of the encoder"
                )
    return encoded


@torch.inference_mode()
def score_sentences(
    model: PieceLogits,
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[int]],
    score: str,
    budget: int,
    advance: Callable[[int], object] = lambda rows: None,
) -> np.ndarray:
    """Return the sum of log p over the pieces of each sentence, in nats, float64 `[sentences]`.

    `score` is a name in `SCORES`. Equal sentences are scored once. `advance` gets the number of rows after each batch.
    """
    numbers: dict[tuple[int, ...], int] = {}
    which = np.array([numbers.setdefault(tuple(pieces), len(numbers)) for pieces in sentences])
    device = next(model.parameters()).device
    sums = np.zeros(len(numbers))
    for rows in masked_rows(list(numbers), tokenizer, score, budget):
        ids, places, targets = (torch.from_numpy(array).to(device) for array in rows[1:])
        logits = model(ids, places)  # [rows, vocab]
        found = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)
        np.add.at(sums, rows.sentences, found.double().cpu().numpy())
        advance(len(ids))
    return sums[which]


class Scorer:
    """Scorer of one paradigm after the other, with the weights of one encoder in memory at a time."""

    def __init__(
        self,
        subjects: Mapping[tuple[str, int | None], Subject],
        paradigms: Mapping[str, Paradigm],
        device: torch.device,
        budget: int | None,
        advance: Callable[[int], object],
    ):
        """Keep `subjects` by (fingerprint, seed) and `paradigms` by UID.

        `budget` is the number of tokens per batch, None for the device's default.
        """
        self.subjects, self.paradigms, self.device, self.advance = subjects, paradigms, device, advance
        self.budget = budget or TOKENS_PER_BATCH[device.type]
        self._loaded: tuple[tuple[str, int | None], PieceLogits] | None = None

    def model(self, job: PairJob) -> PieceLogits:
        """Return the masked LM of a job. Raises `UserError` if its folder has changed."""
        key = (job.encoder, job.seed)
        if self._loaded is None or self._loaded[0] != key:
            folder = self.subjects[key].folder
            encoder = load_masked_lm(folder, random_init=job.seed is not None)
            if job.encoder != encoder.fingerprint:
                raise UserError(f"--load {folder}: it was changed after the start of this command; run it again")
            self._loaded = key, piece_logits(encoder, job.seed or 0, self.device)
        return self._loaded[1]

    def perform(self, job: PairJob) -> dict[str, Any]:
        """Do a job and return its row."""
        subject, paradigm = self.subjects[job.encoder, job.seed], self.paradigms[job.paradigm]
        model = self.model(job)
        begin = time.perf_counter()
        good, bad = encode_pairs(paradigm, subject.tokenizer, subject.max_length)
        with allocations_as_user_errors(
            f"use --tokens-per-batch {self.budget // 2} instead of {self.budget}, or fewer --workers"
        ):
            scores = score_sentences(model, subject.tokenizer, good + bad, job.score, self.budget, self.advance)
        values = [round(value, DECIMALS) if math.isfinite(value) else None for value in scores.tolist()]
        return asdict(job) | {
            "load": subject.name,
            "checkpoint": str(subject.folder),
            "good": values[: len(good)],
            "bad": values[len(good) :],
            "pieces_good": list(map(len, good)),
            "pieces_bad": list(map(len, bad)),
            "identical": sum(first == second for first, second in zip(good, bad, strict=True)),
            "rows": sum(map(len, good + bad)),
            "seconds": round(time.perf_counter() - begin, 3),
        }
