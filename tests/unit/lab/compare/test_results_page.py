"""The rows in docs/ladder are those of a plan; pages of docs/ and the golden numbers say what they say."""

import itertools
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
from megatron_ddrp.tasks.statistics import LIKE_LOSS, LOSS, OTHER_LOSS, seeds_needed

ROOT = Path(__file__).resolve().parents[4]
LADDER = ROOT / "docs" / "ladder"
PAGES = {"plateau.md": ["fast", "novels"], "plateau-arms.md": ["plateau"]}
"""Document → rows of its tables."""
PLANS = {"rows": "ladder", "fast": "fast", "novels": "novels", "plateau": "plateau"}
"""Rows → their plan."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Page(read_run_rows([LADDER / "rows.jsonl"]), tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("tables", PAGES)
def test_the_tables_are_those_of_the_rows(tables, tmp_path):
    document, written = ROOT / "docs" / "lab" / tables, tmp_path / tables
    shutil.copy(document, written)
    Page(read_run_rows([LADDER / f"{rows}.jsonl" for rows in PAGES[tables]]), tmp_path / "page").replace_tables(written)
    assert written.read_text() == document.read_text(), "stale tables: run make ladder"


def test_the_ladders_models_stand_by_encoding_its_runs_are_counted_and_captions_name_the_text_of_a_loss(page):
    models = [row[0] for row in page.tables["scores"][0].rows]
    assert models[:9] == ["absolute", "bert-r", "tupe-r", "deberta", "ddrp", "rope", "t5", "alibi", "nope"]
    measures = [measure for measure, _ in itertools.groupby(page.gains["claims-inside"], lambda gain: gain.measure)]
    assert measures[:3] == ["f(S)", "f(H)", "triangle share"] and len(measures) == len(set(measures)) == 7
    large = "16,777,216 tokens | 15,731,655 to 15,747,747 | 8,192, 16,384 | 10 | 2 to 3 | 26 | "
    assert list(map(" | ".join, page.tables["runs"][0].rows)) == [
        "4,194,304 tokens | 3,925,863 to 3,940,139 | 2,048 | 24 | 4 to 10 | 120 | 1,470,592 to 1,569,152 | 20h05m",
        f"{large}1,470,592 to 1,487,232 | 19h10m",
        "67,108,864 tokens | 62,957,779 to 62,979,434 | 32,768 | 4 | 2 | 8 | 1,472,736 to 1,486,976 | 12h31m",
    ]
    caption = page.tables["scores"][2].caption
    assert f"{LIKE_LOSS.capitalize()[0]}{LIKE_LOSS[1:]}: training text, last tenth of tokens" in caption
    assert f"{OTHER_LOSS}: held-out".lower() in caption.lower()
    average = "the mean of STS-B and CoLA; the paper's average has eight tasks"
    assert page.tables["claims-glue"][0].caption.startswith(f"GLUE average ({average}). Gains as in the tables of")
    assert "(training text, last tenth of tokens). Gains in nats" in page.blocks["claims"]
    assert "(held-out documents of another kind). Gains in nats" in page.blocks["claims-other"]
    measured_on = {one["measure"]: one["measured_on"] for one in page.numbers()["gains"]}
    assert measured_on[LIKE_LOSS] == "training text, last tenth of tokens" and measured_on["f(S)"] == ""


@pytest.mark.parametrize(("rows", "plan"), PLANS.items())
def test_the_rows_are_of_the_plans_models_and_budgets(rows, plan):
    planned = set()
    for rung in read_plans(ROOT / "examples" / "compare" / f"{plan}.yaml"):
        names = [model.name for model in rung.models]
        planned |= set(itertools.product([rung.check], names, rung.seeds, [rung.budget.tokens]))
    done = [json.loads(line) for line in (LADDER / f"{rows}.jsonl").read_text().splitlines()]
    assert {(row["check"], row["model"], row["seed"], row["planned_tokens"]) for row in done} <= planned
    assert len({row["run"] for row in done}) == len(done)


GOLDEN = json.loads((ROOT / "tests" / "golden" / "ladder_numbers.json").read_text(encoding="utf-8"))


def as_today(key):
    """A key of the golden numbers; the rows tell now that their validation text is of another kind."""
    return key.replace(f"| {LOSS} |", f"| {OTHER_LOSS} |")


def test_every_value_every_distance_from_chance_and_every_gain_is_the_same(tmp_path):
    """The golden numbers are of the first 182 rows, which an earlier version had."""
    page = Page(read_run_rows([LADDER / "rows.jsonl"])[:182], tmp_path)
    found = {
        f"{one['check']} | {one['budget']} | {one['measure']} | {one['model']}": one["by_seed"]
        for one in json.loads(json.dumps(page.numbers()["values"]))
        if one["measure"] != LIKE_LOSS
    }
    golden = {as_today(key): value for key, value in GOLDEN["values"].items()}
    distances = {key: golden.pop(key) for key in list(golden) if "| above chance |" in key}
    assert found == golden and sum(map(len, golden.values())) == 2405 and len(distances) == 35
    results = page.results
    for budget in results.budgets:
        for arm in results.arms_at(budget):
            key = f" | {budget} | above chance | {arm.label}"
            assert above_chance(list(results.at(budget, arm).values())) == distances.pop(key, None)
    assert not distances
    gains = {}
    for one in json.loads(json.dumps(page.numbers()["gains"])):
        key = f"{one['check']} | {one['budget']} | {one['measure']} | {one['first']} | {one['second']}"
        assert key not in gains, "two gains of the same models"
        needed = seeds_needed(one["mean"], one["deviation"]) if one["deviation"] and one["over_seeds"] else None
        gains[key] = one | {"values": list(one["by_seed"].values()), "seeds_needed": needed}
    assert len(GOLDEN["gains"]) == 165
    for key, golden in ((as_today(key), golden) for key, golden in GOLDEN["gains"].items()):
        found = {name: gains[key][name] for name in golden}
        for name in ("over_seeds", "over_items"):
            if Version(scipy.__version__) < Version("1.16") and golden.get(name):  # other last digits of quantiles
                assert found[name] == pytest.approx(golden[name], 1e-9, 0), key
                found |= {name: golden[name]}
        assert found == golden, key
