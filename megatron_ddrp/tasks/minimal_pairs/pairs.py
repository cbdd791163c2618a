"""Minimal pairs, their masked rows, and the store of their scores."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, word_begins
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import Name, misfit, parse_json, reading
from megatron_ddrp.tasks.finetune.table_files import read_rows
from megatron_ddrp.tasks.jobs import Store, digest
from megatron_ddrp.tasks.statistics import (
    MINIMAL_PAIRS,
    Difference,
    Gain,
)

SENTENCES = ("sentence_good", "sentence_bad")
LARGEST_DIGEST = 16
_PAIRS = "*.jsonl"
_SUBSET_SEED = 0
"""Seed of the pairs that --max-pairs keeps, the same for all encoders."""


@dataclasses.dataclass
class Paradigm:
    """Minimal pairs of one kind."""

    uid: str
    file: Path
    field: str = ""
    """BLiMP's field, for example `morphology`; empty if the file has none."""
    term: str = ""
    """BLiMP's `linguistics_term`; empty if the file has none."""
    places: list[str] = dataclasses.field(default_factory=list)
    """File and line of each pair."""
    good: list[str] = dataclasses.field(default_factory=list)
    bad: list[str] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.good)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the sentences."""
        content = json.dumps([self.good, self.bad])
        return hashlib.sha256(content.encode()).hexdigest()[:LARGEST_DIGEST]

    def sample(self, size: int | None) -> Paradigm:
        """Return at most `size` of the pairs in their order, always the same ones."""
        if size is None or size >= len(self):
            return self
        kept = sorted(np.random.default_rng(_SUBSET_SEED).permutation(len(self))[:size].tolist())
        places, good, bad = ([values[i] for i in kept] for values in (self.places, self.good, self.bad))
        return Paradigm(self.uid, self.file, self.field, self.term, places, good, bad)


def pair_files(folder: Path) -> list[Path]:
    """Return the .jsonl files of a folder, or of its folder `data` as in BLiMP's repository.

    Raises `UserError` for a missing folder and for one without such files.
    """
    for place in (folder, folder / "data"):
        if files := sorted(place.glob(_PAIRS)):
            return files
    if not folder.is_dir():
        raise UserError(f"--data-dir {folder}: no such folder; expected a folder of .jsonl files with minimal pairs")
    nearby = [
        found for place in sorted(folder.glob("*/")) for found in (place, place / "data") if any(found.glob(_PAIRS))
    ]
    raise UserError(
        f"--data-dir {folder}: holds no .jsonl file; expected files with one object per line, "
        f"keys {', '.join(SENTENCES)}" + (f"; maybe --data-dir {nearby[0]}" if nearby else "")
    )


def read_pairs(folder: Path, max_pairs: int | None = None) -> list[Paradigm]:
    """Read the paradigms of a folder. The key `UID` of a pair, or else its file's name, names its paradigm.

    Raises `UserError` with file and line for a line without a pair, and for a UID in two files.

    The files have JSON lines: BLiMP's, or others with `sentence_good` and `sentence_bad`.
    """
    found: dict[str, Paradigm] = {}
    for file in pair_files(folder):
        for uid, paradigm in _read_file(file).items():
            if uid in found:
                raise UserError(f"{file}: UID {uid!r} is in {found[uid].file} too; put each paradigm into one file")
            found[uid] = paradigm.sample(max_pairs)
    return list(found.values())


def _read_file(file: Path) -> dict[str, Paradigm]:
    found: dict[str, Paradigm] = defaultdict(lambda: Paradigm("", file))
    for place, row in read_rows(str(file)):
        good, bad = (_text(row, key, place) for key in SENTENCES)
        uid = row.get("UID", file.stem)
        if misfit(uid, Name):
            raise UserError(f"{place}: UID is {uid!r}; expected a name, or no such key")
        paradigm = found[uid]
        if not paradigm.good:
            paradigm.uid = uid
            paradigm.field = str(row.get("field") or "").replace("/", "_")  # one file of BLiMP has syntax/semantics
            paradigm.term = str(row.get("linguistics_term") or "")
        paradigm.places.append(place)
        paradigm.good.append(good)
        paradigm.bad.append(bad)
    return dict(found)


def _text(row: dict[str, Any], key: str, place: str) -> str:
    value: Any = row.get(key)
    if misfit(value, Name):
        got = "is missing" if key not in row else f"is {value!r:.40}"
        raise UserError(f"{place}: {key} {got}; expected a sentence under each of {', '.join(SENTENCES)}")
    return value


FOLDER = Path("raw_results", "summary")
MODELS, HUMANS = "models_summary.jsonl", "human_validation_summary.csv"
NAMES = {"ngram": "5-gram", "lstm": "LSTM", "txl": "Transformer-XL", "gpt2": "GPT-2"}
"""Key in the file `MODELS` → name of the model in BLiMP's paper."""

_BEGINNINGS = {
    "anaphor agreement": ("anaphor_",),
    "argument structure": (
        "animate_subject_", "causative", "drop_argument", "inchoative", "intransitive", "passive_", "transitive",
    ),
    "binding": ("principle_A_",),
    "control and raising": (
        "existential_there_object_", "existential_there_subject_", "expletive_it_", "tough_vs_raising_",
    ),
    "determiner-noun agreement": ("determiner_noun_agreement_",),
    "ellipsis": ("ellipsis_",),
    "filler-gap": ("wh_questions_", "wh_vs_that_"),
    "irregular forms": ("irregular_past_participle_",),
    "island effects": (
        "adjunct_island", "complex_NP_island", "coordinate_structure_", "left_branch_island_",
        "sentential_subject_island", "wh_island",
    ),
    "NPI licensing": ("matrix_question_npi_", "npi_present_", "only_npi_", "sentential_negation_npi_"),
    "quantifiers": ("existential_there_quantifiers_", "superlative_quantifiers_"),
    "subject-verb agreement": ("distractor_agreement_", "irregular_plural_", "regular_plural_"),
}  # fmt: skip
"""The 12 phenomena of the 67 paradigms (Warstadt et al., 2020), with the beginnings of their names."""


def published_levels(folder: Path, uids: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return name → UID → accuracy of the published models, and of humans the share of judgements that agree.

    The files are looked for in the folder of the pairs and in its parent. The result leaves out a model without all of
    `uids`, and is empty without the files. Raises `UserError` for a file with another content.

    BLiMP's authors published the accuracies, in their folder `raw_results/summary`.
    """
    wanted = set(uids)
    for place in (folder, folder.parent):
        models, humans = place / FOLDER / MODELS, place / FOLDER / HUMANS
        if models.is_file():
            with reading(models, "not BLiMP's summary of models; copy it again, or delete it"):
                rows = [parse_json(line) for line in models.read_text(encoding="utf-8").splitlines() if line.strip()]
                found = {name: {row["UID"]: float(row[key]) for row in rows} for key, name in NAMES.items()}
            if humans.is_file():
                with (
                    reading(humans, "not BLiMP's summary of human judgements; copy it again, or delete it"),
                    humans.open(encoding="utf-8", newline="") as stream,
                ):
                    found["human"] = {row["Condition"]: float(row["total_mean"]) for row in csv.DictReader(stream)}
            return {
                name: {uid: levels[uid] for uid in wanted} for name, levels in found.items() if wanted <= levels.keys()
            }
    return {}


def phenomenon(uid: str) -> str | None:
    """Return the phenomenon of a paradigm; None for a paradigm that BLiMP lacks."""
    return next((name for name, beginnings in _BEGINNINGS.items() if uid.startswith(beginnings)), None)


SCORES = {
    "l2r": "to score a piece, mask it and the later pieces of its word",
    "pll": "to score a piece, mask only this piece",
    "whole-word": "to score a piece, mask its whole word",
}
"""Name of a score → its explanation."""
MOST_LOGITS = 2**28
"""Largest number of logits of a batch, 1 GiB in fp32. With a large vocabulary it limits the rows of a batch."""


class MaskedRows(NamedTuple):
    """Masked rows of one length, without padding."""

    sentences: np.ndarray
    """Number of the sentence, int64 `[rows]`."""
    ids: np.ndarray
    """[CLS], the sentence with masks, and [SEP], int64 `[rows, length]`."""
    places: np.ndarray
    """Place of the scored piece, which is masked, int64 `[rows]`."""
    targets: np.ndarray
    """Id of the scored piece, int64 `[rows]`."""


def masked_rows(
    sentences: Sequence[Sequence[int]], tokenizer: Tokenizer, score: str, budget: int
) -> Iterator[MaskedRows]:
    """Yield batches of at most `budget` tokens with one row per piece of each sentence, the longest rows first.

    All rows of a batch have one length, so that there is no padding. A batch has at least one row.

    [CLS] and [SEP] are never scored. The kinds of `score` are

        pll         log p(w_t | sentence without w_t)             Salazar et al., arXiv:1910.14659, equations 1 and 2
        l2r         log p(w_t | … without w_t and the later pieces of its word)     Kauf and Ivanova, arXiv:2305.10588
        whole-word  log p(w_t | … without any piece of its word)                    Kauf and Ivanova, arXiv:2305.10588

    The score of a sentence is the sum over its pieces. `word_begins` finds the words: they begin at WordPiece's pieces
    without ##, at SentencePiece's ▁ and at byte-level BPE's Ġ, or after a piece that ends a word. Departure: Kauf and
    Ivanova split words by the library's pre-tokenizer, which separates punctuation. WordPiece does so too, but with ▁
    and Ġ a full stop belongs to the word before it.
    """
    most_rows = MOST_LOGITS // len(tokenizer.pieces)
    lengths: dict[int, list[int]] = defaultdict(list)
    for number, pieces in enumerate(sentences):
        lengths[len(pieces)].append(number)
    for count in sorted(lengths, reverse=True):
        members = np.array(lengths[count])
        rows = [tokenizer.rows.row([sentences[i]]) for i in members]
        table, first = np.array([ids for ids, _, _ in rows]), rows[0][2][0]  # [members, length]
        begins = word_begins(tokenizer.word_starts, tokenizer.word_ends, table)
        begins[:, first] = True  # the first piece of a sentence begins a word
        words = begins.cumsum(axis=1)  # number of each place's word, [members, length]
        size = max(1, min(budget // table.shape[1], most_rows))
        for start in range(0, len(members) * count, size):
            flat = np.arange(start, min(start + size, len(members) * count))
            which, places = flat // count, flat % count + first
            ids = table[which]  # [rows, length], a copy
            targets = ids[np.arange(len(ids)), places]
            is_masked = (columns := np.arange(table.shape[1])) == places[:, None]  # [rows, length]
            if score != "pll":
                same_word = words[which] == words[which, places][:, None]
                is_masked = same_word if score == "whole-word" else same_word & (columns >= places[:, None])
            ids[is_masked] = tokenizer.mask_id
            yield MaskedRows(members[which], ids, places, targets)


TIE = 2e-5
"""Largest difference of a tie, in nats. Rounding makes equal scores differ for two orders of the same pieces: a model
without positions (2 layers x 128, scores of about -100) gave 2,427 permuted pairs differences of up to 1e-5."""


SCORES_FILE = "scores.jsonl"


@dataclass(frozen=True)
class PairJob:
    """Everything that determines the scores of a paradigm's sentences."""

    encoder: str
    """Fingerprint of the encoder."""
    seed: int | None
    """Seed of random weights; None for the loaded weights."""
    paradigm: str
    data: str
    """Fingerprint of the sentences."""
    score: str

    @cached_property
    def name(self) -> str:
        """File name that no other job has."""
        return f"{re.sub(r'[^A-Za-z0-9_-]', '_', self.paradigm)[:60]}-{digest(asdict(self))}"

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> PairJob:
        """Return the job of a line of scores.jsonl."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


class PairStore(Store):
    """Store of finished jobs in scores.jsonl.

    It has one line per encoder and paradigm; weights, sentences and kind of score identify a line. Ties are counted
    later.
    """

    def __init__(self, path: Path):
        """Read the finished lines. Raises `UserError` for a damaged line."""
        super().__init__(path, lambda row: PairJob.of_row(row).name, "written by megatron-ddrp minimal-pairs", _checked)


_KEYS: dict[str, Any] = {
    **dict.fromkeys(("good", "bad"), Sequence[float | None]),
    **dict.fromkeys(("pieces_good", "pieces_bad"), Sequence[int]),
    **dict.fromkeys(("rows", "seconds", "identical"), float),
}
"""Key of a line of scores.jsonl → type hint of its value."""


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row unchanged. Raises ValueError if it is not a finished job."""
    if misfit(row, _KEYS) or len({len(row[name]) for name in ("good", "bad", "pieces_good", "pieces_bad")}) != 1:
        raise ValueError("expected two scores and two lengths per pair")
    return row


@dataclass(frozen=True)
class ParadigmScore:
    """Result of an encoder on a paradigm.

    A pair is right if the good sentence scores higher by more than `TIE`. A tie is wrong, as BLiMP defines it: a
    program that takes the first of two equal scores, with the good sentence first, gives a model without any preference
    100 %. A pair with a score that is no number is wrong.
    """

    right: np.ndarray
    """True for each pair that is right, bool `[pairs]`."""
    ties: int
    undefined: int
    """Number of pairs with a score that is not finite."""
    piece_counts: float
    """Accuracy from piece counts alone: fewer pieces win, equal counts are half right, identical pieces are a tie."""

    @property
    def accuracy(self) -> float:
        """Share of the pairs that are right."""
        return float(self.right.mean())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the accuracy over pairs, √(p(1 − p)/(n − 1)); None for one pair."""
        return standard_error([self.accuracy], [len(self.right)])


def standard_error(accuracies: Sequence[float], pairs: Sequence[int]) -> float | None:
    """Return the standard error over pairs of the mean of k accuracies p, each of n pairs: √(Σ p(1 − p)/(n − 1))/k.

    None without an accuracy, or if one has fewer than two pairs.
    """
    if min(pairs, default=0) < 2:
        return None
    variances = (p * (1 - p) / (n - 1) for p, n in zip(accuracies, pairs, strict=True))
    return math.sqrt(math.fsum(variances)) / len(accuracies)


def cell(row: Mapping[str, Any]) -> ParadigmScore:
    """Return the result in a line of scores.jsonl."""
    good, bad = (np.array([np.nan if v is None else v for v in row[key]]) for key in ("good", "bad"))
    difference = good - bad
    tied = np.abs(difference) <= TIE  # False if a score is nan
    counts = np.array(row["pieces_good"]) - np.array(row["pieces_bad"])
    even = (int((counts == 0).sum()) - row["identical"]) / 2
    piece_counts = (int((counts < 0).sum()) + even) / len(counts)
    return ParadigmScore(difference > TIE, int(tied.sum()), int(np.isnan(difference).sum()), piece_counts)


@dataclass(frozen=True)
class Result:
    """Results of an encoder on all paradigms.

    There are two standard errors: for other pairs of the same paradigms, and for other paradigms.
    """

    name: str
    cells: dict[str, ParadigmScore]
    """Results by the paradigm's UID."""

    @property
    def macro_average(self) -> float:
        """Mean of the paradigms' accuracies."""
        return statistics.fmean(cell.accuracy for cell in self.cells.values())

    @property
    def undefined(self) -> int:
        """Number of pairs with a score that is not finite."""
        return sum(cell.undefined for cell in self.cells.values())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the macro average over pairs; None if a paradigm has only one pair."""
        cells = self.cells.values()
        return standard_error([cell.accuracy for cell in cells], [len(cell.right) for cell in cells])

    @property
    def paradigm_error(self) -> float | None:
        """Standard error of the macro average over paradigms; None for one paradigm."""
        values = [cell.accuracy for cell in self.cells.values()]
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    @property
    def piece_counts(self) -> float:
        """Macro average from piece counts alone."""
        return statistics.fmean(cell.piece_counts for cell in self.cells.values())

    def only(self, uids: Iterable[str]) -> Result:
        """Return the result on the paradigms `uids`."""
        return Result(self.name, {uid: self.cells[uid] for uid in uids})


def difference(first: Result, second: Result) -> Gain:
    """Return the gain of the macro average on the same pairs, with Student's 95 % interval over the paradigms.

    The means of the paradigms already contain the spread of their pairs. For a single paradigm the interval is over its
    pairs. None for a single pair, and for equal differences that are not 0.
    """
    gains = [first.cells[uid].right.astype(int) - second.cells[uid].right for uid in first.cells]  # −1, 0 or 1 per pair
    means = [float(gain.mean()) for gain in gains]
    over_items = Difference(tuple(gains[0].tolist() if len(gains) == 1 else means)).interval
    return Gain(first.name, second.name, MINIMAL_PAIRS, Difference((statistics.fmean(means),)), over_items)
