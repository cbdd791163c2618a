"""Rows of a made-up ladder whose truth is known, as `megatron-ddrp compare` would write them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.json_files import object_sum

RUNGS = (4_194_304, 16_777_216, 67_108_864)
LOSS = "validation masked-LM loss"
UIDS = (
    "anaphor_gender_agreement", "causative", "passive_1", "principle_A_c_command", "tough_vs_raising_1",
    "determiner_noun_agreement_1", "ellipsis_n_bar_1", "wh_questions_object_gap", "irregular_past_participle_verbs",
    "wh_island", "npi_present_1", "superlative_quantifiers_1", "irregular_plural_subject_verb_agreement_1",
)  # fmt: skip
"""One paradigm per phenomenon of BLiMP, and a second of argument structure."""

Row = dict[str, Any]


def make_row(
    model: str, seed: int, rung: int, values: Mapping[str, float], *, objective: str = "mlm", **other: Any
) -> Row:
    """Return a row of a run; the encoding is the model's name up to the first `+`."""
    half = other.get("half", False)
    tokens = rung // 2 if half else rung
    row = {
        "run": f"{model}-{seed}-{rung}-{half}-{other.get('check', '')}",
        "jobs": [],
        "model": model,
        "half": half,
        "encoding": model.split("+")[0],
        "objective": objective,
        "flags": {},
        "baseline": "absolute",
        "check": "",
        "seed": seed,
        "budget": f"{rung:,} tokens",
        "tokens": tokens,
        "planned_tokens": rung,
        "steps": tokens // 2048,
        "parameters": 1_468_160,
        "common": {"num_layers": 2, "hidden_size": 128, "bf16": True, "lr": 0.002},
        "values": dict(values),
        "hardware": "2 cores",
        "versions": {"torch": "2.13.0"},
        "workers": 2,
        "seconds": 300.0,
    }
    return row | other


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """Write rows with their sums, one per line."""
    lines = [json.dumps(row | {"crc32": object_sum(row)}) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def gain_rows(
    gains: Mapping[str, Sequence[float]], seeds: Sequence[int] = (1, 2, 3, 4), noise: float = 0.002
) -> list[Row]:
    """Return rows of `absolute` and of models whose losses lie lower by the gains, one gain per rung."""
    random.seed(5)
    rows = []
    for number, rung in enumerate(RUNGS[: len(next(iter(gains.values())))]):
        for seed in seeds:
            base = 6.0 - 0.5 * number + 0.05 * seed
            rows.append(make_row("absolute", seed, rung, {LOSS: base}))
            for model, by_rung in gains.items():
                loss = base - by_rung[number] - random.gauss(0, noise)
                rows.append(make_row(model, seed, rung, {LOSS: loss}, objective="mth" if "+mth" in model else "mlm"))
    return rows


ARMS: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("absolute", "mlm", {}, 0.0), ("bert-r", "mlm", {}, 0.05), ("tupe-r", "mlm", {}, 0.045), ("deberta", "mlm", {}, 0.06),
    ("ddrp", "mlm", {}, 0.056), ("rope", "mlm", {}, 0.07), ("t5", "mlm", {}, 0.04), ("alibi", "mlm", {}, 0.03),
    ("nope", "mlm", {}, -0.2), ("ddrp+free", "mlm", {"direction_init": "free"}, 0.057),
    ("absolute+mth", "mth", {}, 0.03), ("ddrp+mth", "mth", {}, 0.09),
    ("absolute+tcd", "mth", {"hcd_weight": 0}, 0.02), ("absolute+hcd", "mth", {"tcd-weight": 0.0}, 0.005),
    ("ddrp+token-contrast", "token-contrast", {}, 0.06), ("ddrp+head-disagreement", "head-disagreement", {}, 0.04),
)  # fmt: skip
"""Model, objective, flags, gain by loss on the first rung."""


def full_rows() -> list[Row]:
    """Return a ladder with every measure: 16 models and two halves on the first rung, six and four above it."""
    random.seed(7)
    rows = []
    for number, (rung, seeds) in enumerate(zip(RUNGS, (4, 3, 2), strict=True)):
        names = [name for name, *_ in ARMS]
        if number:
            names = ["absolute", "bert-r", "ddrp", "rope", "absolute+mth", "ddrp+mth"][: 6 if number == 1 else 5]
        for name, objective, flags, gain in ARMS:
            for seed in range(1234, 1234 + seeds) if name in names else ():
                for half in (False, True) if name in ("absolute+mth", "ddrp+mth") else (False,):
                    rows.append(_full_row((name, objective, flags, gain), seed, number, half))
    for seed in (1234, 1235):
        for rate, loss in ((0.001, 6.1), (0.002, 6.0), (0.004, 6.05)):
            values = {LOSS: loss + random.gauss(0, 0.01)}
            rows.append(make_row(f"absolute+{rate}", seed, RUNGS[0], values, flags={"lr": rate}, check="learning rate"))
    return rows


def _full_row(arm: tuple[str, str, dict[str, Any], float], seed: int, number: int, half: bool) -> Row:
    name, objective, flags, gain = arm
    rung, mth = RUNGS[number], objective == "mth"
    loss = 6.1 - 0.62 * number + 0.02 * (seed - 1234) - gain * 0.8**number + 0.25 * half + random.gauss(0, 0.006)
    paradigms = {
        uid: min(0.95, 0.5 + 0.03 * place * (1 + number) / 3 + random.gauss(0, 0.02)) for place, uid in enumerate(UIDS)
    }
    tokens = rung // 2 if half else rung
    values = {
        LOSS: loss, "f(S)": 0.01 if mth else 0.4 + random.gauss(0, 0.02), "f(H)": -0.3 if mth else 0.45,
        "triangle share": 0.02 * number, "minimal pairs": sum(paradigms.values()) / len(paradigms),
        "STS-B": 0.12 + random.gauss(0, 0.03), "CoLA": 0.02, "GLUE average": 0.07 + random.gauss(0, 0.02),
        "IsoScore": 0.2 + 0.1 * mth + random.gauss(0, 0.01), "effective rank": 40 + 20 * mth + random.gauss(0, 2),
        "cosine between sentences": 0.3, "cosine within, mean removed": 0.05, "seconds of a step": 0.12,
    }  # fmt: skip
    if arm[0] != "nope":
        values |= {
            "direction probe": 0.7 + random.gauss(0, 0.05),
            "direction probe, shuffled": 0.5,
            "direction cosine": 0.9,
        }
    points = [tokens * (place + 1) / 100 for place in range(100)]
    return make_row(
        name, seed, rung, values, objective=objective, flags=flags, half=half, paradigms=paradigms, pairs=200,
        fields={"morphology": 0.55}, curve=[(at, loss + 3 * math.exp(-7 * at / tokens) + random.gauss(0, 0.05)) for at in points],
        validation=[(at, loss + 3 * math.exp(-7 * at / tokens)) for at in points[9::10]],
        similarity=[(at, values["f(S)"] * (1 - math.exp(-5 * at / tokens)), values["f(H)"] * (1 - math.exp(-4 * at / tokens))) for at in points[9::10]],
    )  # fmt: skip


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[[Iterable[Row]], Path]:
    """Return a function that writes rows into a file."""
    return lambda rows: write_rows(tmp_path / "rows.jsonl", rows)
