"""The rows in docs/ladder are those of a plan; pages of docs/ and the golden numbers say what they say."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy
from packaging.version import Version
from scipy import stats

from megatron_ddrp.lab.compare.page import Page
from megatron_ddrp.lab.compare.plan import read_plans
from megatron_ddrp.lab.compare.rows import read_run_rows
from megatron_ddrp.lab.compare.tables import above_chance, format_budget
from megatron_ddrp.tasks.statistics import DIRECTION, LIKE_LOSS, LOSS, OTHER_LOSS, seeds_needed

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


LENGTHS = {"claims": 30, "claims-other": 30, "claims-glue": 30, "claims-minimal-pairs": 30, "claims-inside": 31}
LENGTHS |= {"models": 24, "models-other": 25, "models-glue": 25, "models-minimal-pairs": 25}
"""Table of the ladder's gains → number of its rows."""
LESS_IS_BETTER = (LIKE_LOSS, OTHER_LOSS, "f(S)", "f(H)", "first component")
DIGITS = {"triangle share": 1, "effective rank": 1, "minimal pairs": 2}
DIGITS |= dict.fromkeys(("STS-B", "CoLA", "GLUE average"), 2) | dict.fromkeys(DIRECTION, 3)
"""Measure → digits in tables; others have 4."""
FACTORS = dict.fromkeys(("triangle share", "minimal pairs", "STS-B", "CoLA", "GLUE average"), 100)
ONSET = "median onset [million tokens] (left)"

COUNTS = np.arange(2, 100_001)
HALVES = stats.t.ppf(0.975, COUNTS - 1) / np.sqrt(COUNTS)
"""Half-widths of Student's interval for each number of seeds at a standard deviation of 1."""


def shown(measure, value, sign=""):
    return f"{FACTORS.get(measure, 1) * value:{sign}.{DIGITS.get(measure, 4)}f}"


def rows_of(page, name):
    return [dict(zip(table.header, row, strict=True)) for table in page.tables[name] for row in table.rows]


def value_of(run, measure):
    """Return a run's value of a measure, None without one; the rows have two tasks of GLUE."""
    found = [run.values.get(name) for name in (("STS-B", "CoLA") if measure == "GLUE average" else (measure,))]
    return None if None in found else sum(found) / len(found)


def compares(measure, one, other):
    """Return whether the values of two runs compare: training losses only under equal masks."""
    return measure != LIKE_LOSS or [dict(run.arm.flags).get("mask_prob") for run in (one, other)].count(None) != 1


def differences(results, gain):
    """Return the gain at each common seed."""
    first, second = results.at(gain.budget, gain.first), results.at(gain.budget, gain.second)
    pairs = [(first[seed], second[seed]) for seed in first if seed in second]
    pairs = [pair for pair in pairs if compares(gain.measure, *pair)]
    values = [value_of(one, gain.measure) - value_of(other, gain.measure) for one, other in pairs]
    return (-1 if gain.measure in LESS_IS_BETTER else 1) * np.array(values)


def judged(results, gains):
    """Yield what SciPy says of each gain of a table, as its cells; fewer than three seeds are exploratory."""
    found = [differences(results, gain) for gain in gains]
    tests = [stats.ttest_1samp(values, 0) if len(values) > 1 and any(values) else None for values in found]
    several = [number for number, values in enumerate(found) if len(values) > 2]
    p_values = [tests[number].pvalue if tests[number] else 1.0 for number in several]
    told = dict(zip(several, stats.false_discovery_control(p_values) <= 0.05 if several else (), strict=True))
    for number, (gain, values, test) in enumerate(zip(gains, found, tests, strict=True)):
        low, high = test.confidence_interval() if test else (0.0, 0.0)
        ends = [shown(gain.measure, end, "+") for end in (low, high)]
        enough = COUNTS[HALVES * (values.std(ddof=1) if test else 0) < abs(values.mean())]
        needed = f"{enough[0]:,}" if len(enough) else "over 100,000"
        word = ("better" if values.mean() > 0 else "worse") if told.get(number) else "not told apart"
        yield {"gain": shown(gain.measure, values.mean(), "+"), "n": str(len(values))} | {
            "95 % over seeds": " to ".join(ends) if len(values) > 1 else "",
            "judgement": word if number in told else "exploratory",
            "seeds needed": needed if test and low <= 0 <= high else "",
        }


@pytest.mark.parametrize("name", LENGTHS)
def test_every_gain_of_the_ladder_is_judged_as_by_scipy(name, page):
    rows, gains = rows_of(page, name), page.gains[name]
    assert len(gains) == LENGTHS[name]
    for row, gain, expected in zip(rows, gains, judged(page.results, gains), strict=True):
        expected |= {name[:5]: gain.text}
        assert {key: row[key] for key in expected} == expected, gain.text
        assert row["budget"] == format_budget(gain.budget, page.results.budgets[gain.budget])
        assert (row.get("measure", gain.measure), row.get("the paper", "")) == (gain.measure, gain.paper)


def spread(measure, runs, beside):
    """Return the cell of a measure; empty without values that compare with the run `beside`."""
    values = [value for run in runs if (value := value_of(run, measure)) is not None and compares(measure, run, beside)]
    if not values:
        return ""
    return shown(measure, np.mean(values)) + (f" ± {shown(measure, np.std(values, ddof=1))}" if len(values) > 1 else "")


def median_onset(runs):
    """Return the cell of the onset, by the product of shares of the runs that stay at each time."""
    times = sorted(((run.onset or run.tokens) / 1e6, run.onset is None) for run in runs)
    share, median = 1.0, f"> {times[-1][0]:.2f}"
    for place, (time, rests) in enumerate(times):
        share *= 1 if rests else 1 - 1 / (len(times) - place)
        if share < 0.5 + 1e-9:
            median = f"{time:.2f}"
            break
    return f"{median} ({sum(not rests for _, rests in times)}/{len(times)})"


def chance_of(runs):
    errors = [sum(p * (1 - p) / (run.pairs[name] - 1) for name, p in run.paradigms.items()) for run in runs]
    errors = [error**0.5 / len(run.paradigms) for run, error in zip(runs, errors, strict=True)]
    return f"{(np.mean([run.values['minimal pairs'] for run in runs]) - 0.5) / np.mean(errors):+.1f}"


@pytest.mark.parametrize("name", ["scores", "inside", "checks"])
def test_every_spread_of_the_ladder_is_that_of_the_rows(name, page):
    experiments = page.checks if name == "checks" else [page.results]
    places = [(results.at(budget, results.baseline) or results.at(budget, results.arms_at(budget)[0]), arm,
               list(results.at(budget, arm).values()))
              for results in experiments for budget in results.budgets for arm in results.arms_at(budget)]  # fmt: skip
    places = [place for place in places if name != "inside" or "f(S)" in place[2][0].values]
    other = {"model", "seeds", "check", "budget", "gain", "95 % over seeds", "judgement", "above chance"}
    for row, (beside, arm, runs) in zip(rows_of(page, name), places, strict=True):
        assert (row["model"], row["seeds"]) == (arm.label, str(len(runs)))
        for column in row.keys() - other - {ONSET}:
            assert row[column] == spread(column, runs, next(iter(beside.values()))), (arm.label, column)
        assert row.get(ONSET, "") == (median_onset(runs) if name != "inside" and not arm.half else "")
        assert "above chance" not in row or row["above chance"] == chance_of(runs)


def test_every_check_of_the_ladder_is_judged_as_by_scipy(page):
    found = {(row["check"], row["model"]): row for row in rows_of(page, "checks")}
    for check, own in page.checks.items():
        expected_of = {}
        for measure in (OTHER_LOSS, LIKE_LOSS):  # the latter, where two runs compare by it
            gains = [gain for gain in own if gain.measure == measure]
            cells = judged(check, gains)
            expected_of |= {gain.first.label: (gain, own) for gain, own in zip(gains, cells, strict=True)}
        for label, (gain, expected) in expected_of.items():
            row, text = found.pop((check.check, label)), gain.measure.removeprefix("masked-LM loss on ")
            assert row["gain"] == f"{expected['gain']} over {check.baseline.label} ({text})"
            assert [row["95 % over seeds"], row["judgement"]] == [expected["95 % over seeds"], expected["judgement"]]
    assert len(found) == 9 and not any(row["gain"] + row["judgement"] for row in found.values()), "baselines"


def test_the_ladders_models_stand_by_encoding_its_runs_are_counted_and_gains_of_two_seeds_are_exploratory(page):
    models = [row["model"] for row in rows_of(page, "scores")]
    assert models[:9] == ["absolute", "bert-r", "tupe-r", "deberta", "ddrp", "rope", "t5", "alibi", "nope"]
    measures = [measure for measure, _ in itertools.groupby(page.gains["claims-inside"], lambda gain: gain.measure)]
    assert measures[:3] == ["f(S)", "f(H)", "triangle share"] and len(measures) == len(set(measures)) == 7
    large = "16,777,216 tokens | 15,731,655 to 15,747,747 | 8,192, 16,384 | 10 | 2 to 3 | 26 | "
    assert list(map(" | ".join, page.tables["runs"][0].rows)) == [
        "4,194,304 tokens | 3,925,863 to 3,940,139 | 2,048 | 24 | 4 to 10 | 120 | 1,470,592 to 1,569,152 | 20h05m",
        f"{large}1,470,592 to 1,487,232 | 19h10m",
        "67,108,864 tokens | 62,957,779 to 62,979,434 | 32,768 | 4 | 2 | 8 | 1,472,736 to 1,486,976 | 12h31m",
    ]
    average = "the mean of STS-B and CoLA; the paper's average has eight tasks"
    assert page.tables["claims-glue"][0].caption.startswith(f"GLUE average ({average}). Gains as in the tables of")
    caption = page.tables["scores"][2].caption
    assert f"{LIKE_LOSS.capitalize()[0]}{LIKE_LOSS[1:]}: training text, last tenth of tokens" in caption
    assert f"{OTHER_LOSS}: held-out".lower() in caption.lower() and caption.endswith(f"GLUE average: {average}.")
    # student's paired test told BERT-R and BERT apart on the largest budget, p = 0.012, from two seeds
    judged = [gain for own in (*page.gains.values(), *page.checks.values()) for gain in own]
    few = [gain for gain in judged if len(gain.seeds.values) < 3]
    assert {gain.word for gain in few} == {"exploratory"}
    assert all(gain.word != "exploratory" for gain in judged if gain not in few)
    (gain,) = [g for g in few if (g.text, g.measure, g.budget[:2]) == ("BERT-R is better than BERT", OTHER_LOSS, "67")]
    assert gain.seeds.p_value == pytest.approx(0.012, abs=5e-4) and gain.seeds.interval[0] > 0


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

FROZEN = 182
"""Number of rows that the version had."""


@pytest.fixture(scope="module")
def first_page(tmp_path_factory):
    return Page(read_run_rows([LADDER / "rows.jsonl"])[:FROZEN], tmp_path_factory.mktemp("page"))


def as_today(key):
    """A key of the golden numbers; the rows tell now that their validation text is of another kind."""
    return key.replace(f"| {LOSS} |", f"| {OTHER_LOSS} |")


@pytest.mark.parametrize(
    ("rows", "first", "second", "tokens", "mean", "interval"),
    [
        ("rows", "bert-r", "absolute", 16_777_216, 1.516, None),
        ("fast", "ddrp", "bert-r", 16_777_216, 0.021, (0.010, 0.033)),
        ("fast", "absolute, MTH of squared cosines", "absolute", 16_777_216, 0.044, (0.024, 0.064)),
        ("fast", "ddrp, MTH of squared cosines", "ddrp", 4_194_304, 0.030, (0.017, 0.044)),
    ],
)
def test_gains_on_like_text_are_those_that_a_referee_computed(rows, first, second, tokens, mean, interval, tmp_path):
    page = Page(read_run_rows([LADDER / f"{rows}.jsonl"]), tmp_path)
    place = (first, second, f"{tokens:,} tokens")
    gains = [*page.gains["claims"], *page.gains["models"]]
    (gain,) = [gain for gain in gains if (gain.first.name, gain.second.name, gain.budget) == place]
    assert gain.measure == LIKE_LOSS and round(gain.seeds.mean, 3) == mean
    assert interval is None or tuple(round(end, 3) for end in gain.seeds.interval) == interval
    assert "(training text, last tenth of tokens). Gains in nats" in page.blocks["claims"]
    assert "(held-out documents of another kind). Gains in nats" in page.blocks["claims-other"]
    measured_on = {one["measure"]: one["measured_on"] for one in page.numbers()["gains"]}
    assert measured_on[LIKE_LOSS] == "training text, last tenth of tokens" and measured_on["f(S)"] == ""


def test_every_value_every_distance_from_chance_and_every_gain_is_the_same(first_page):
    found = {
        f"{one['check']} | {one['budget']} | {one['measure']} | {one['model']}": one["by_seed"]
        for one in json.loads(json.dumps(first_page.numbers()["values"]))
        if one["measure"] != LIKE_LOSS
    }
    golden = {as_today(key): value for key, value in GOLDEN["values"].items()}
    distances = {key: golden.pop(key) for key in list(golden) if "| above chance |" in key}
    assert found == golden and sum(map(len, golden.values())) == 2405 and len(distances) == 35
    results = first_page.results
    for budget in results.budgets:
        for arm in results.arms_at(budget):
            key = f" | {budget} | above chance | {arm.label}"
            assert above_chance(list(results.at(budget, arm).values())) == distances.pop(key, None)
    assert not distances
    gains = {}
    for one in json.loads(json.dumps(first_page.numbers()["gains"])):
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
