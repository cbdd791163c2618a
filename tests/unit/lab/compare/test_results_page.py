"""Pages of docs/ say what the rows in docs/ladder say, and the rows are those of a plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_ddrp.lab.compare.page import Page
from megatron_ddrp.lab.compare.plan import read_plans
from megatron_ddrp.lab.compare.rows import read_run_rows
from megatron_ddrp.tasks.statistics import LOSS

ROOT = Path(__file__).resolve().parents[4]
LADDER = ROOT / "docs" / "ladder"
PAGES = {
    "results-tables.md": ["rows.jsonl"],
    "plateau.md": ["fast.jsonl", "novels.jsonl"],
    "plateau-arms.md": ["plateau.jsonl"],
}
"""Document → rows of its tables."""
PLANS = {
    "rows.jsonl": "ladder.yaml",
    "fast.jsonl": "fast.yaml",
    "novels.jsonl": "novels.yaml",
    "plateau.jsonl": "plateau.yaml",
}
"""Rows → their plan."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Page(read_run_rows([LADDER / "rows.jsonl"]), tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("tables", PAGES)
def test_the_tables_are_those_of_the_rows(tables, tmp_path):
    document, written = ROOT / "docs" / "lab" / tables, tmp_path / tables
    shutil.copy(document, written)
    Page(read_run_rows([LADDER / rows for rows in PAGES[tables]]), tmp_path / "page").replace_tables(written)
    assert written.read_text() == document.read_text(), "stale tables: run make ladder"


def test_the_six_claims_have_the_numbers_of_the_rows(page):
    cells = {}
    for gain in page.numbers()["gains"]:
        if gain["measure"] == LOSS and not gain["check"] and gain["over_seeds"]:
            low, high = gain["over_seeds"]
            cells[gain["claim"], gain["budget"]] = f"{gain['mean']:+.3f} [{low:+.3f}, {high:+.3f}], {gain['n']} seeds"
    text = (ROOT / "docs" / "lab" / "results.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    found = {row[0]: row[2:5] for row in rows if row[0] not in ("claim", "---")}
    expected = {claim: [cells.get((claim, budget), "–") for budget in page.results.budgets] for claim in found}
    assert found == expected and len(found) == 6


@pytest.mark.parametrize(("rows", "plan"), PLANS.items())
def test_the_rows_are_of_the_plans_models_and_budgets(rows, plan):
    plans = read_plans(ROOT / "examples" / "compare" / plan)
    planned = {
        (plan.check, model.name, seed, plan.budget.tokens)
        for plan in plans
        for model in plan.models
        for seed in plan.seeds
    }
    done = [json.loads(line) for line in (LADDER / rows).read_text().splitlines()]
    assert {(row["check"], row["model"], row["seed"], row["planned_tokens"]) for row in done} <= planned
    assert len({row["run"] for row in done}) == len(done)
