"""The page: everything that the rows have, nothing else, and tables in documents."""

from __future__ import annotations

import json
import re

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.pages.plotting import FORMATS
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS
from megatron_ddrp.tasks.ladder import curves
from megatron_ddrp.tasks.ladder import page as page_module
from megatron_ddrp.tasks.ladder.command import main
from megatron_ddrp.tasks.ladder.page import NAMES, LadderPage
from megatron_ddrp.tasks.ladder.rows import read_runs
from tests.unit.ladder.conftest import LOSS, RUNGS, full_rows, gain_rows, ladder_of, make_row


@pytest.fixture
def page_of(write_rows, tmp_path):
    """Return a function from rows to their page, without figures."""
    return lambda rows: LadderPage(read_runs([write_rows(rows)]), tmp_path / "out")


def test_the_command_writes_a_page_with_all_figures(write_rows, tmp_path, capsys):
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    for ending in FORMATS:
        (out / "figures" / f"gains-others{ending}").write_bytes(b"old")
    rows = [row for row in full_rows() if row["model"] != "ddrp+free"]
    assert main([str(write_rows(rows)), "--output-dir", str(out)]) == 0
    assert "7 figures written" in capsys.readouterr().out
    text, html = (out / "page.md").read_text(encoding="utf-8"), (out / "page.html").read_text(encoding="utf-8")
    drawn = ["claims", "direction", "gains", "loss", "minimal-pairs", "similarity", "training"]
    files = sorted(f"{name}{ending}" for name in drawn for ending in FORMATS)
    assert sorted(path.name for path in (out / "figures").iterdir()) == files  # the old figure is gone
    assert sorted(re.findall(r"\(figures/(\S+)\.png\)", text)) == drawn
    assert html.count("data:image/png;base64,") == len(drawn)
    assert not re.search(r'(src|href)="(?!data:)', html)


def test_sections_stand_in_the_order_of_a_reader(page_of):
    page = page_of(full_rows())
    text = page.text([])
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert titles == [
        "Claims by validation loss",
        "Claims by the GLUE average and by minimal pairs",
        "Claims about the inside of the models",
        "Every model against its reference",
        "Seeds that would be needed",
        "Gains and losses against the budget",
        "Minimal pairs above chance",
        "Inside the models",
        "All scores",
        "Checks",
    ]
    assert "| 4,194,304 tokens | 4,194,304 | 2,048 | 7 | 2 | 14 | 1,468,160 |" in text
    assert "`--num-layers 2 --hidden-size 128 --bf16 --lr 0.002`" in text
    assert "Check of learning rate, 4.19 M tokens" in text
    assert "| absolute+0.002 | 6.0000 | 2.00 | +0.1000, n = 1 | 1 |" in text
    assert all(page.blocks.values())


def test_a_page_of_one_rung_and_one_seed_claims_nothing(page_of):
    text = page_of(full_rows(num_rungs=1, num_seeds=1)).text([])
    assert "per factor of four" not in text
    assert "trend" not in text
    assert "one seed: no spread" not in text
    assert "| BERT-R is better than BERT | +0.60 |" in text and ", n = 1 | no interval |" in text
    assert "intervals of differences" not in text
    assert "±" not in text.lower().replace("mean ± standard deviation", "")


def test_rows_with_a_loss_alone(page_of):
    page = page_of(gain_rows({"rope": (0.05, 0.05)}))
    assert {name for name in NAMES if page.blocks[name]} == {"summary", "runs", "verdicts", "models", "scores"}
    assert "No claim of the paper compares two models of these rows." in page.text([])
    assert "| rope over absolute | +0.0" in page.blocks["models"]


def test_the_head_says_what_holds(page_of):
    text = page_of(gain_rows({"ddrp": (0.05, 0.05), "bert-r": (0.05, 0.05)})).blocks["summary"]
    assert re.search(r"\*Holds on every rung\*: BERT-R is better than BERT \(\+0\.0\d+ at 16\.8 M\); DDRP is", text)
    assert "*Not told apart*: DDRP is better than BERT-R" in text
    assert "There are 6 intervals of differences." in text


@pytest.mark.parametrize(("accuracy", "words"), [(0.4, "below chance"), (0.6, "above chance")])
def test_the_head_says_on_which_side_of_chance_the_best_model_is(page_of, accuracy, words):
    row = make_row("absolute", 1, RUNGS[0], {"minimal pairs": accuracy}, paradigms={"a": accuracy}, pairs=101)
    assert (
        f"absolute has the most minimal pairs right: {100 * accuracy:.2f} %, 2.0 standard errors {words}."
        in (page_of([row]).blocks["summary"])
    )


def glue_rows(scores_of, seeds=2):
    """Return rows of two models; `scores_of` maps rung and model to the scores. The stored averages are wrong."""
    return [
        make_row(model, seed, rung, {"GLUE average": 0.9 * (model == "ddrp"), **scores_of(rung, model)})
        for rung in RUNGS[:2]
        for model in ("absolute", "ddrp")
        for seed in range(seeds)
    ]


def test_a_glue_average_is_over_the_tasks_that_all_runs_share(page_of):
    """DDRP on the second rung comes from a plan with more tasks, which are easier."""

    def scores_of(rung, model):
        more = {"SST-2": 0.8, "WNLI": 0.5} if (rung, model) == (RUNGS[1], "ddrp") else {}
        return {"STS-B": 0.1, "CoLA": 0.1 + 0.02 * (model == "ddrp"), "WNLI": 0.9, **more}

    page = page_of(glue_rows(scores_of))
    (item,) = [item for item in page.judged if item.claim.measure == "GLUE average"]
    assert {rung: gain.mean for rung, gain in item.gains.items()} == pytest.approx(dict.fromkeys(RUNGS[:2], 0.01))
    named = "the mean of STS-B and CoLA; the paper's average has eight tasks"
    assert page.blocks["claims-glue"].startswith(f"GLUE average: {named}. Mean gain")
    assert f"By the GLUE average ({named}; points). " in page.blocks["summary"]
    assert page.blocks["scores"].count(f"GLUE average: {named}.") == 2


def test_a_glue_average_of_the_papers_tasks_is_its_measure_and_one_of_no_task_is_none(page_of):
    page = page_of(glue_rows(lambda rung, model: dict.fromkeys(PAPER_TASKS, 0.5)))
    assert page.blocks["claims-glue"].startswith("GLUE average: the paper's measure. Mean gain")
    page = page_of(glue_rows(lambda rung, model: {"RTE" if model == "ddrp" else "MRPC": 0.5}))
    assert not page.blocks["claims-glue"] and "GLUE average" not in page.blocks["scores"]


def test_facts_about_the_runs(page_of):
    first = make_row("absolute", 1, RUNGS[0], {LOSS: float("inf")})
    second = make_row("absolute", 1, RUNGS[1], {LOSS: 5.0}, common={"num_layers": 2, "lr": 0.001}, hardware="1 core")
    text = page_of([first, second]).text([])
    assert "- Flags of every run: `--num-layers 2`." in text
    assert "- Flag that differs: `--lr` is 0.002 at 4,194,304 tokens; 0.001 at 16,777,216 tokens." in text
    assert f"Values that are not finite are left out: {LOSS} of absolute-1-4194304-False-." in text
    assert "- Hardware: 2 cores.\n- Hardware: 1 core." in text


def test_a_flag_that_differs_within_a_rung_names_the_models(page_of):
    in_fp32 = {"common": {"num_layers": 2, "bf16": False}}
    rows = [make_row("absolute", 1, RUNGS[0], {LOSS: 5.0}, common={"num_layers": 2, "bf16": True})]
    rows += [make_row(name, 1, RUNGS[0], {LOSS: 5.0}, **in_fp32) for name in ("rope", "ddrp")]
    text = page_of([*rows, make_row("rope", 1, RUNGS[1], {LOSS: 4.0}, **in_fp32)]).text([])
    values = "True at 4,194,304 (absolute) tokens; False at 4,194,304 (rope, ddrp), 16,777,216 tokens"
    assert f"- Flag that differs: `--bf16` is {values}." in text


def test_a_flag_that_differs_between_seeds_names_the_seeds(page_of):
    """All models of a seed have one value, so no difference that is paired by seed comes from the flag."""
    rows = []
    for seed in (1, 2, 3):
        common = {"num_layers": 2, "bf16": seed < 3}
        rows += [make_row(name, seed, RUNGS[0], {LOSS: 5.0}, common=common) for name in ("absolute", "ddrp")]
    values = "True at 4,194,304 (seeds 1, 2) tokens; False at 4,194,304 (seed 3) tokens"
    assert f"- Flag that differs: `--bf16` is {values}." in page_of(rows).text([])


def test_runs_that_differ_in_one_flag_stand_side_by_side(page_of):
    flags = {"num_layers": 2, "bf16": True, "lr": 0.001}
    rows = [make_row("absolute", seed, RUNGS[0], {LOSS: 6.0 + seed}, common=flags) for seed in (2, 1)]
    for change, loss in (({"bf16": False}, 7.25), ({"bf16": False, "lr": 0.1}, 9.0), ({"num_layers": 4}, 6.5)):
        rows.append(make_row("absolute", 1, RUNGS[0], {LOSS: loss}, check=f"{change}", common=flags | change))
    rows.append(make_row("rope", 2, RUNGS[0], {LOSS: 6.5}, common=flags | {"bf16": False}))
    _, *tables = page_of(rows).blocks["checks"].split("Runs of one model and seed that differ only in ")
    assert [(table.split(":")[0], re.findall(r"^\| (?!model|---)(.*) \|$", table, re.M)) for table in tables] == [
        ("`--bf16` and `--no-bf16`", ["absolute | 4.19 M | 1 | 7.0000 | 7.2500 | +0.2500"]),
        ("`--num-layers 2` and `--num-layers 4`", ["absolute | 4.19 M | 1 | 7.0000 | 6.5000 | -0.5000"]),
        ("`--lr 0.001` and `--lr 0.1`", ["absolute | 4.19 M | 1 | 7.2500 | 9.0000 | +1.7500"]),
    ]


def test_json_has_the_numbers_of_the_tables(page_of, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "draw_all", lambda *_: [])
    page = page_of(full_rows())
    page.write()
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["rungs"] == list(RUNGS[:2])
    assert found["checks"]["learning rate"]["claims"][0]["gains"]["4194304"]["mean"] == pytest.approx(0.1)
    claim = next(c for c in found["claims"] if c["claim"].startswith("MTH is better than MLM") and c["measure"] == LOSS)
    gain = claim["gains"]["4194304"]
    assert f"{gain['mean']:+.4f}" in page.blocks["claims"]
    assert gain["values"] == pytest.approx(
        [found["values"]["4194304"]["absolute"][LOSS][s] - found["values"]["4194304"]["absolute+mth"][LOSS][s]
         for s in ("1234", "1235")]
    )  # fmt: skip
    assert found["minimal_pairs"][0]["accuracy"] == pytest.approx(found["phenomena"]["4194304"]["absolute"]["all"])


def test_tables_of_a_document_are_replaced_and_a_second_time_nothing_changes(page_of, tmp_path):
    document = tmp_path / "results.md"
    document.write_text(
        "# Results\n\n<!-- ladder claims -->\nstale\n<!-- end of ladder claims -->\n\ntext\n\n"
        "<!-- ladder summary -->\n<!-- end of ladder summary -->\n<!-- other -->\nkept\n<!-- end of other -->\n"
    )
    page = page_of(full_rows())
    assert page.replace_tables(document) == f"{document}: 2 tables replaced: claims, summary"
    text = document.read_text(encoding="utf-8")
    assert f"<!-- ladder claims -->\n{page.blocks['claims']}\n<!-- end of ladder claims -->\n\ntext\n" in text
    assert page.blocks["summary"] in text and "stale" not in text and "\nkept\n" in text
    page.replace_tables(document)
    assert document.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<!-- ladder claim -->\n<!-- end of ladder claim -->\n",
            "unknown table 'claim'; expected one of summary, runs,",
        ),
        ("nothing", "no line <!-- ladder NAME -->; expected one of summary"),
        ("<!-- ladder claims -->\n", "expected a line <!-- ladder claims --> before every line <!-- end of"),
    ],
)
def test_a_wrong_document_is_one_line_and_stays_as_it_is(page_of, tmp_path, text, message):
    document = tmp_path / "results.md"
    document.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        page_of(full_rows(num_rungs=1, num_seeds=1)).replace_tables(document)
    assert document.read_text() == text


def test_a_missing_document(page_of, tmp_path):
    with pytest.raises(UserError, match="No such file or directory; give a Markdown file"):
        page_of(full_rows(num_rungs=1, num_seeds=1)).replace_tables(tmp_path / "none.md")
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        page_of(full_rows(num_rungs=1, num_seeds=1)).replace_tables(tmp_path / "binary.md")


def test_rows_of_checks_alone_give_a_page_of_checks(page_of, tmp_path):
    """A plan may begin with its checks, and every row may be the last for now."""
    assert "0 figures written" in page_of([row for row in full_rows() if row["check"]]).write()
    text = (tmp_path / "out" / "page.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == ["Checks"]
    assert "All rows belong to checks." in text


def test_training_curves_are_means_over_the_seeds_that_all_models_of_a_panel_have(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save_figure", lambda plt, figure, path: drawn.append(figure))
    more = {"curve": [[1, 6.0], [2, 5.0]]}
    rows = [make_row("absolute", seed, RUNGS[0], {LOSS: 5.0}, curve=[[1, 6.0], [2, float(seed)]]) for seed in (1, 2, 3)]
    rows += [make_row("ddrp", seed, RUNGS[0], {LOSS: 5.0}, **more) for seed in (2, 3)]
    assert curves.draw_training(ladder_of(rows), tmp_path / "training.png")
    panel = drawn[0].axes[0]
    ends = {line.get_label(): line.get_ydata()[-1] for line in panel.get_lines()}
    assert ends == {"absolute": 2.5, "ddrp": 5.0}


def test_a_group_of_models_without_a_run_on_a_rung_has_no_panel_there(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save_figure", lambda plt, figure, path: drawn.append(figure))
    curve = {"curve": [[1, 6.0], [2, 5.0]]}
    rows = [make_row(name, 1, RUNGS[0], {LOSS: 5.0}, **curve) for name in ("absolute", "absolute+mth", "ddrp")]
    rows.append(make_row("ddrp", 1, RUNGS[1], {LOSS: 4.0}, **curve))
    assert curves.draw_training(ladder_of(rows), tmp_path / "training.png")
    shown = [panel.get_title() for panel in drawn[0].axes if panel.axison]
    assert shown == [
        "Encodings under MLM, 4.19 M tokens",
        "Encodings under MLM, 16.8 M tokens",
        "Objectives with BERT, 4.19 M tokens",
    ]
