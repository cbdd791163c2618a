"""docs/results.md has the tables of the rows in docs/ladder, and these are rows of examples/compare/ladder.yaml."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron_ddrp.tasks.compare.page import Page
from megatron_ddrp.tasks.compare.plan_file import read_plans
from megatron_ddrp.tasks.compare.rows import read_rows

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / "docs" / "ladder" / "rows.jsonl"


def test_the_tables_in_results_are_those_of_the_rows(tmp_path):
    written = tmp_path / "results.md"
    shutil.copy(ROOT / "docs" / "results.md", written)
    Page(read_rows([ROWS]), tmp_path).replace_tables(written)
    assert written.read_text() == (ROOT / "docs" / "results.md").read_text(), "stale tables: run make ladder"


def test_the_rows_are_of_the_plans_models_and_budgets():
    plans = read_plans(ROOT / "examples" / "compare" / "ladder.yaml")
    planned = {
        (plan.check, model.name, seed, plan.budget.tokens)
        for plan in plans
        for model in plan.models
        for seed in plan.seeds
    }
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert {(row["check"], row["model"], row["seed"], row["planned_tokens"]) for row in rows} <= planned
    assert len({row["run"] for row in rows}) == len(rows)
