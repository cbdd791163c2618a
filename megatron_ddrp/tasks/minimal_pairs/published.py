"""Accuracies and phenomena that BLiMP's authors published; the accuracies are in their folder `raw_results/summary`."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json

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
    try:
        rows = [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {name: {row["UID"]: float(row[key]) for row in rows} for key, name in NAMES.items()}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: not BLiMP's summary of models; copy it again, or delete it") from None


def _humans(file: Path) -> dict[str, dict[str, float]]:
    if not file.is_file():
        return {}
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return {"human": {row["Condition"]: float(row["total_mean"]) for row in csv.DictReader(stream)}}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: not BLiMP's summary of human judgements; copy it again, or delete it") from None


def phenomenon(uid: str) -> str | None:
    """Return the phenomenon of a paradigm; None for a paradigm that BLiMP lacks."""
    return next((name for name, beginnings in _BEGINNINGS.items() if uid.startswith(beginnings)), None)
