"""Reader of minimal pairs from JSON lines: BLiMP's files, or others with `sentence_good` and `sentence_bad`.

Accuracies and phenomena that BLiMP's authors published; the accuracies are in their folder `raw_results/summary`.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json, reading
from megatron_ddrp.tasks.finetune.table_files import read_rows

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
        if not isinstance(uid, str) or not uid:
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


def _text(row: dict[str, object], key: str, place: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
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
    """
    wanted = set(uids)
    for place in (folder, folder.parent):
        if (place / FOLDER / MODELS).is_file():
            found = {**_models(place / FOLDER / MODELS), **_humans(place / FOLDER / HUMANS)}
            return {
                name: {uid: levels[uid] for uid in wanted} for name, levels in found.items() if wanted <= levels.keys()
            }
    return {}


def _models(file: Path) -> dict[str, dict[str, float]]:
    with reading(file, "not BLiMP's summary of models; copy it again, or delete it"):
        rows = [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {name: {row["UID"]: float(row[key]) for row in rows} for key, name in NAMES.items()}


def _humans(file: Path) -> dict[str, dict[str, float]]:
    if not file.is_file():
        return {}
    with (
        reading(file, "not BLiMP's summary of human judgements; copy it again, or delete it"),
        file.open(encoding="utf-8", newline="") as stream,
    ):
        return {"human": {row["Condition"]: float(row["total_mean"]) for row in csv.DictReader(stream)}}


def phenomenon(uid: str) -> str | None:
    """Return the phenomenon of a paradigm; None for a paradigm that BLiMP lacks."""
    return next((name for name, beginnings in _BEGINNINGS.items() if uid.startswith(beginnings)), None)
