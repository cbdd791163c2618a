"""The rows in docs/ladder are those of a plan; pages of docs/ and the golden numbers say what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import scipy
from packaging.version import Version

from megatron_ddrp.lab.compare.page import Page
from megatron_ddrp.lab.compare.plan import read_plans
from megatron_ddrp.lab.compare.rows import read_run_rows
from megatron_ddrp.lab.compare.tables import above_chance
from megatron_ddrp.tasks.statistics import ONSET, seeds_needed

ROOT = Path(__file__).resolve().parents[4]
LADDER = ROOT / "docs" / "ladder"
PAGES = {"results-tables.md": ["rows"], "plateau.md": ["fast", "novels"], "plateau-arms.md": ["plateau"]}
"""Document → rows of its tables."""
PLANS = {"rows": "ladder", "fast": "fast", "novels": "novels", "plateau": "plateau"}
"""Rows → their plan."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Page(read_run_rows([LADDER / "rows.jsonl"]), tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("tables", PAGES)
def test_the_tables_are_those_of_the_rows(tables, page, tmp_path):
    document, written = ROOT / "docs" / "lab" / tables, tmp_path / tables
    shutil.copy(document, written)
    if PAGES[tables] != ["rows"]:
        page = Page(read_run_rows([LADDER / f"{rows}.jsonl" for rows in PAGES[tables]]), tmp_path / "page")
    page.replace_tables(written)
    assert written.read_text() == document.read_text(), "stale tables: run make ladder"


@pytest.mark.parametrize(("rows", "plan"), PLANS.items())
def test_the_rows_are_of_the_plans_models_and_budgets(rows, plan):
    plans = read_plans(ROOT / "examples" / "compare" / f"{plan}.yaml")
    planned = {
        (plan.check, model.name, seed, plan.budget.tokens)
        for plan in plans
        for model in plan.models
        for seed in plan.seeds
    }
    done = [json.loads(line) for line in (LADDER / f"{rows}.jsonl").read_text().splitlines()]
    assert {(row["check"], row["model"], row["seed"], row["planned_tokens"]) for row in done} <= planned
    assert len({row["run"] for row in done}) == len(done)


GOLDEN = json.loads((ROOT / "tests" / "golden" / "ladder_numbers.json").read_text(encoding="utf-8"))

FROZEN = 182
"""Number of rows that the version had."""


@pytest.fixture(scope="module")
def first_page(tmp_path_factory):
    rows = read_run_rows([LADDER / "rows.jsonl"])
    return Page(rows[:FROZEN], tmp_path_factory.mktemp("page"))


def test_every_value_is_the_same(first_page):
    found = {
        f"{one['check']} | {one['budget']} | {one['measure']} | {one['model']}": one["by_seed"]
        for one in json.loads(json.dumps(first_page.numbers()["values"]))
        if one["measure"] != ONSET
    }
    golden = {key: value for key, value in GOLDEN["values"].items() if "| above chance |" not in key}
    assert found == golden and sum(map(len, golden.values())) == 2405


def test_every_gain_is_the_same(first_page):
    gains = {}
    for one in json.loads(json.dumps(first_page.numbers()["gains"])):
        key = f"{one['check']} | {one['budget']} | {one['measure']} | {one['first']} | {one['second']}"
        assert key not in gains, "two gains of the same models"
        needed = seeds_needed(one["mean"], one["deviation"]) if one["deviation"] and one["over_seeds"] else None
        gains[key] = one | {"values": list(one["by_seed"].values()), "seeds_needed": needed}
    assert len(GOLDEN["gains"]) == 165
    for key, golden in GOLDEN["gains"].items():
        found = {name: gains[key][name] for name in golden}
        if Version(scipy.__version__) < Version("1.16") and golden["over_seeds"]:  # other last digits of quantiles
            assert found["over_seeds"] == pytest.approx(golden["over_seeds"], 1e-9, 0), key
            found |= {"over_seeds": golden["over_seeds"]}
        assert found == golden, key


def test_every_distance_from_chance_is_the_same(first_page):
    results = first_page.results
    golden = {key: value for key, value in GOLDEN["values"].items() if "| above chance |" in key}
    assert len(golden) == 35
    for budget in results.budgets:
        for arm in results.arms_at(budget):
            key = f" | {budget} | above chance | {arm.label}"
            assert above_chance(list(results.at(budget, arm).values())) == golden.pop(key, None)
    assert not golden
