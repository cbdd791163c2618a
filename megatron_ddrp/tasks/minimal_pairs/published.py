"""Published accuracies from BLiMP's repository, folder `raw_results/summary`."""

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
