"""Every number about the rows in docs/ladder, against those of the version that wrote docs/results.md first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ddrp.tasks.ladder.as_json import results
from megatron_ddrp.tasks.ladder.claims import check_claims, judge
from megatron_ddrp.tasks.ladder.page import LadderPage
from megatron_ddrp.tasks.ladder.rows import read_runs

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "ladder_numbers.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Return gains and values of all rows, by the keys of the golden file."""
    page = LadderPage(read_runs([ROOT / "docs" / "ladder" / "rows.jsonl"]), tmp_path_factory.mktemp("page"))
    parts = {"": results(page.ladder, page.judged + page.models)}
    parts |= {name: results(check, judge(check, check_claims(check))) for name, check in page.checks.items()}
    gains, values = {}, {}
    for part, found in json.loads(json.dumps(parts)).items():
        for claim in found["claims"]:
            for rung, gain in claim["gains"].items():
                key = (part, f"{int(rung):,} tokens", claim["measure"], claim["first"], claim["second"])
                gains.setdefault(" | ".join(key), gain | {"over_seeds": gain["interval"]} | claim)
        for rung, arms in found["values"].items():
            for arm, measures in arms.items():
                values |= {f"{part} | {int(rung):,} tokens | {m} | {arm}": by_seed for m, by_seed in measures.items()}
    return {"gains": gains, "values": values}


def test_every_value_is_the_same(numbers):
    golden = {key: found for key, found in GOLDEN["values"].items() if "| above chance |" not in key}
    assert numbers["values"] == golden and sum(map(len, golden.values())) == 2405


def test_every_gain_is_the_same(numbers):
    assert len(GOLDEN["gains"]) == 165
    for key, golden in GOLDEN["gains"].items():
        wanted = {name: value for name, value in golden.items() if name != "over_items"}
        if key in numbers["gains"]:
            found = numbers["gains"][key]
            assert {name: found[name] for name in wanted} == wanted, key
