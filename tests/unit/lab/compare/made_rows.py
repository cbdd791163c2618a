"""Rows of made-up ladders whose truth is known, as `megatron-ddrp compare` would write them."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ddrp.lab.compare.rows import as_run
from megatron_ddrp.lab.compare.tables import ExperimentValues
from megatron_ddrp.tasks.statistics import HEAD_SIMILARITY, LOSS, TOKEN_SIMILARITY, TRAINING_LOSS

RUNGS = (4_194_304, 16_777_216, 67_108_864)
UIDS = (
    "anaphor_gender_agreement", "causative", "passive_1", "principle_A_c_command", "tough_vs_raising_1",
    "determiner_noun_agreement_1", "ellipsis_n_bar_1", "wh_questions_object_gap", "irregular_past_participle_verbs",
    "wh_island", "npi_present_1", "superlative_quantifiers_1", "irregular_plural_subject_verb_agreement_1",
)  # fmt: skip
"""One paradigm of each phenomenon of BLiMP, and a second one of argument structure."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "mth": {"objective": "mth"},
    "tcd": {"objective": "mth", "flags": {"hcd-weight": 0}},
    "hcd": {"objective": "mth", "flags": {"tcd_weight": 0.0}},
    "free": {"flags": {"direction_init": "free"}},
    "contrast": {"objective": "token-contrast"},
}
"""End of a model's name → settings of its rows."""

Row = dict[str, Any]


def make_row(model: str, seed: int, rung: int, values: Mapping[str, float], **other: Any) -> Row:
    """Return a row of a run. A model is called `encoding` or `encoding+objective`."""
    encoding, _, objective = model.partition("+")
    half = other.get("half", False)
    tokens = rung // 2 if half else rung
    name = "-".join(map(str, (model, seed, rung, half, other.get("check", ""))))
    row = {"run": name, "model": model, "half": half, "encoding": encoding, "objective": "mlm", "flags": {}}
    row |= {"baseline": "absolute", "check": "", "seed": seed, "budget": f"{rung:,} tokens", "tokens": tokens}
    row |= {"planned_tokens": rung, "steps": tokens // 2048, "parameters": 1_468_160, "values": dict(values)}
    row |= {"common": {"num_layers": 2, "hidden_size": 128, "bf16": True, "lr": 0.002}, "hardware": "2 cores"}
    row |= {"versions": {"torch": "2.13.0"}, "workers": 2, "seconds": 300.0}
    return row | OBJECTIVES.get(objective, {}) | other


def gain_rows(
    gains: Mapping[str, Sequence[float]], seeds: Sequence[int] = (4, 3, 3), noise: float = 0.002, measure: str = LOSS
) -> list[Row]:
    """Return rows of `absolute` and of models with these gains over it, one per rung, on `seeds` seeds of each rung."""
    generator = random.Random(5)
    sign = -1 if measure == LOSS else 1
    rows = []
    for number in range(len(next(iter(gains.values())))):
        for seed in range(seeds[number]):
            base = 6.0 - 0.5 * number + 0.05 * seed
            found = {"absolute": base}
            found |= {name: base + sign * (own[number] + generator.gauss(0, noise)) for name, own in gains.items()}
            rows += [make_row(name, seed, RUNGS[number], {measure: value}) for name, value in found.items()]
    return rows


def full_row(model: str, seed: int, number: int, **other: Any) -> Row:
    """Return a row with every measure and curve, on rung `number`."""
    generator = random.Random(f"{model} {seed} {number} {other}")
    mth = "mth" in model
    loss = 6.1 - 0.6 * number + 0.02 * seed - 0.03 * mth + generator.gauss(0, 0.006)
    paradigms = {uid: 0.5 + 0.02 * place * (1 + number) / 3 for place, uid in enumerate(UIDS)}
    values = {
        LOSS: loss, "f(S)": 0.01 if mth else 0.4, "f(H)": -0.3 if mth else 0.45, "triangle share": 0.02 * number,
        "minimal pairs": sum(paradigms.values()) / len(paradigms), "STS-B": 0.12 + generator.gauss(0, 0.03),
        "CoLA": 0.02, "GLUE average": 0.07 + generator.gauss(0, 0.02), "IsoScore": 0.2 + 0.1 * mth,
        "effective rank": 40 + 20 * mth + generator.gauss(0, 2), "seconds of a step": 0.12,
        "direction probe": 0.7, "direction probe, shuffled": 0.65, "direction cosine": 0.9,
        "direction probe, shuffled, random weights": 0.6, "tokens": RUNGS[number],
    }  # fmt: skip
    tokens = RUNGS[number] * (0.5 if other.get("half") else 1.0)
    curve = [(tokens * part / 20, loss + 3 * math.exp(-part / 3)) for part in range(1, 21)]
    later = curve[3::4]
    similarities = {TOKEN_SIMILARITY: [(at, 0.4) for at, _ in later], HEAD_SIMILARITY: [(at, 0.3) for at, _ in later]}
    return make_row(
        model, seed, RUNGS[number], values, paradigms=paradigms, pairs=200, fields={"morphology": 0.55},
        curves={TRAINING_LOSS: curve, LOSS: later, **similarities}, **other,
    )  # fmt: skip


def full_rows(num_rungs: int = 2, num_seeds: int = 2) -> list[Row]:
    """Return a small ladder with every measure, a model at half the budget, and a check."""
    rows = []
    for number in range(num_rungs):
        for seed in range(1234, 1234 + num_seeds):
            models = ("absolute", "bert-r", "ddrp", "absolute+mth", "absolute+tcd", "ddrp+free")
            rows += [full_row(model, seed, number) for model in models[: 6 if number == 0 else 4]]
            rows.append(full_row("absolute+mth", seed, number, half=True))
    for rate, loss in ((0.001, 6.1), (0.002, 6.0)):
        own = {"flags": {"lr": rate}, "check": "learning rate", "baseline": "absolute+0.001"}
        rows.append(make_row(f"absolute+{rate}", 1234, RUNGS[0], {LOSS: loss, "CoLA": 0.02}, **own))
    return rows


def results_of(rows: Iterable[Row], check: str = "") -> ExperimentValues:
    return ExperimentValues([as_run(row) for row in rows], check)
