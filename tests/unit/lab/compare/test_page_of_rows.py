"""The page: everything that the rows have, nothing else; claims of a file; tables in documents."""

from __future__ import annotations

import json
import re
import sys

import pytest

from megatron_ddrp import __main__, compare
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.command import main
from megatron_ddrp.lab.compare.page import NAMES, Page
from megatron_ddrp.lab.compare.rows import read_run_rows
from megatron_ddrp.tasks.glue import PAPER_TASKS
from tests.unit.lab.compare.made_rows import LOSS, RUNGS, full_rows, gain_rows, make_row

MTH = "MTH is better than MLM with BERT"


@pytest.fixture
def page_of(write_rows, tmp_path):
    """Return a function from rows to their page, without figures."""
    return lambda rows, claims=None: Page(read_run_rows([write_rows(rows)]), tmp_path / "out", claims)


def text_of(page):
    return page.text({}, [], {})


def words_of(page, text=MTH, measure=LOSS):
    """Budget → judgement of a claim."""
    gains = [gain for found in page.gains.values() for gain in found]
    return {g.budget: g.word for g in gains if (g.text, g.measure) == (text, measure)}


def test_the_command_writes_a_page_with_all_figures_and_tables(write_rows, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words = ["megatron-ddrp", "compare", str(write_rows(full_rows())), "--output-dir", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert not ended.value.code
    assert "figures written" in capsys.readouterr().out
    text, html = (out / "page.md").read_text(encoding="utf-8"), (out / "page.html").read_text(encoding="utf-8")
    drawn = sorted(path.stem for path in (out / "figures").glob("*.png"))
    assert {"budgets", "claims", "claims-inside", "curves", "losses", "minimal-pairs", "models"} <= set(drawn)
    assert sorted(re.findall(r"\(figures/(\S+)\.png\)", text)) == drawn
    assert {path.suffix for path in (out / "figures").iterdir()} == {".png", ".pdf", ".svg"}
    assert html.count("data:image/png;base64,") == len(drawn)
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert (out / "tables" / "claims.tex").is_file() and (out / "tables" / "scores-2.csv").is_file()


def test_the_name_of_earlier_versions_is_refused_with_the_new_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megatron-ddrp", "ladder", "rows.jsonl", "--output-dir", "out"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1
    assert "ladder: this name is gone; the command is compare" in said


def test_the_function_returns_the_rows_of_its_files_and_the_last_row_of_each_run(write_rows, tmp_path):
    rows = gain_rows({"rope": (0.05, 0.05)})
    newer = make_row("rope", rows[-1]["seed"], rows[-1]["tokens"], {LOSS: 1.25})
    assert newer["run"] == rows[-1]["run"]
    files = [write_rows(rows, "one.jsonl"), write_rows([newer], "two.jsonl")]
    found = compare(iter(files), output_dir=tmp_path / "out")
    assert [row["run"] for row in found.rows] == [row["run"] for row in rows]
    assert {key: found.rows[-1][key] for key in newer} == newer and "## Scores" in found.page
    (only,) = compare(files[1], output_dir=tmp_path / "out").rows
    assert only == found.rows[-1]


def test_sections_stand_in_the_order_of_a_reader_and_those_without_data_are_left_out(page_of):
    page = page_of(full_rows())
    text = text_of(page)
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert titles == ["Claims", "Models over the baseline", "Scores", "Inside the models", "Checks"]
    assert "| 4,194,304 tokens | 4,194,304 | 2,048 | 7 | 2 | 14 | 1,468,160 |" in text
    assert "`--num-layers 2 --hidden-size 128 --bf16 --lr 0.002`" in text
    assert (
        "| learning rate | 4.19 M tokens | absolute+0.002 | 6.0000 | 2.00 | +0.1000 over absolute+0.001 | 1 |" in text
    )
    assert "no benchmark" in text and page.tables["cost"] == []  # two jobs shared the machine
    page = page_of(gain_rows({"rope": (0.05, 0.05)}))
    assert {name for name in NAMES if page.blocks[name]} == {"runs", "models", "scores"}
    assert re.findall(r"^## (.*)$", text_of(page), re.M) == ["Models over the baseline", "Scores"]


def test_training_texts_that_differ_by_seed_are_told(page_of):
    rows = gain_rows({"ddrp": (0.05,)}, seeds=(2,))
    assert "training texts" not in text_of(page_of([one | {"unigram_loss": 7.0} for one in rows]))
    rows = [one | {"unigram_loss": 7.0 - 0.5 * one["seed"]} for one in rows]
    told = "The training texts of seeds or budgets differ: unigram levels from 6.50 to 7.00."
    assert told in text_of(page_of(rows))


def test_one_seed_has_no_word(page_of):
    page = page_of(full_rows(num_rungs=1, num_seeds=1))
    words = {gain.word for found in page.gains.values() for gain in found}
    assert words == {""} and "judgement |" not in text_of(page) and "| budget |" not in page.blocks["claims"]


@pytest.mark.parametrize(("gain", "word"), [(0.05, "better"), (-0.05, "worse"), (0.0, "not told apart")])
def test_the_word_is_the_side_of_the_gain(page_of, gain, word):
    page = page_of(gain_rows({"absolute+mth": (gain, gain)}))
    assert set(words_of(page).values()) == {word}


def test_more_is_better_for_scores(page_of):
    rows = gain_rows({"ddrp": (0.05,)}, measure="STS-B")
    rows = [row | {"values": row["values"] | {"GLUE average": 0.0}} for row in rows]
    assert words_of(page_of(rows), "DDRP is better than BERT", "GLUE average") == {"4,194,304 tokens": "better"}


def test_models_over_the_baseline_leave_out_what_a_claim_says(page_of):
    found = page_of(gain_rows({"rope": (0.05,), "rope+mth": (0.05,), "absolute+mth": (0.01,)})).gains
    assert [gain.text for gain in found["models"]] == ["rope over absolute", "rope+mth over absolute"]
    assert [gain.text for gain in found["claims"]] == [MTH, "MTH is better than MLM with rope"]


CLAIMS = """
names: {rope: RoPE}
claims:
  - {text: "{encoding} beats T5", first: "{encoding} mlm", second: t5 mlm, measures: [validation masked-LM loss]}
  - {text: MTH helps, first: rope mth, second: rope mlm}
"""


def test_claims_of_a_file(page_of, tmp_path):
    (tmp_path / "mine.yaml").write_text(CLAIMS)
    page = page_of(gain_rows({"rope": (0.05,), "t5": (0.01,)}), tmp_path / "mine.yaml")
    assert words_of(page, "RoPE beats T5") == {"4,194,304 tokens": "better"}
    assert "- MTH helps: no run of rope mth; there is absolute mlm, rope mlm, t5 mlm" in text_of(page)
    assert words_of(page, "t5 beats T5") == {}  # {encoding} is T5 itself there, which is no claim
    claim = "claims: [{text: RoPE helps, first: rope mlm, second: t5 mlm}]"
    (tmp_path / "mine.yaml").write_text(claim)
    assert page_of(gain_rows({"rope": (0.05,), "t5": (0.01,)}), tmp_path / "mine.yaml").unused == []
    page = page_of(gain_rows({"rope": (0.05,)}))
    assert page.unused == []  # the paper's claims about other models are no news


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claims: 3", r"mine.yaml: claims\[1\]: expected settings such as `text: …`, got a int"),
        ("claims: [{text: a, first: b}]", r"mine.yaml: claims\[1\].second: missing"),
        ("claims: [{text: a, first: b, second: c, measure: d}]", r"unknown setting 'measure'; did you mean measures"),
        ("claims: [{text: a, first: b, second: c, paper: [1]}]", r"claims\[1\].paper: got \[1\], expected some text"),
        ("names: {}", "mine.yaml: claims: missing"),
    ],
)
def test_a_mistake_in_claims_is_one_line(page_of, tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        page_of(gain_rows({"rope": (0.05,)}), tmp_path / "mine.yaml")
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.yaml", "b.jsonl"], "a plan (.yaml) and rows (.jsonl) exclude each other"),
        (["a.yaml", "--tables", "b.md"], "--tables needs rows"),
        (["a.jsonl", "--page-only"], "ROWS.jsonl takes only --output-dir, --claims and --tables"),
        (["a.jsonl", "--workers", "2"], "ROWS.jsonl takes only --output-dir, --claims and --tables"),
    ],
)
def test_words_that_exclude_each_other(words, message, tmp_path, capsys):
    with pytest.raises((SystemExit, UserError)) as caught:
        main([*words, "--output-dir", str(tmp_path / "out")])
    assert message in str(caught.value) + capsys.readouterr().err


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
    assert [gain.seeds.mean for gain in page.gains["claims-glue"]] == pytest.approx([0.01, 0.01])
    named = "the mean of STS-B and CoLA; the paper's average has eight tasks"
    assert page.blocks["claims-glue"].startswith(f"GLUE average ({named}). Gains")
    assert page.blocks["scores"].count(f"GLUE average: {named}.") == 2


def test_a_glue_average_of_the_papers_tasks_is_its_measure_and_one_of_no_task_is_none(page_of):
    page = page_of(glue_rows(lambda rung, model: dict.fromkeys(PAPER_TASKS, 0.5)))
    assert page.blocks["claims-glue"].startswith("GLUE average (the paper's measure). Gains")
    page = page_of(glue_rows(lambda rung, model: {"RTE" if model == "ddrp" else "MRPC": 0.5}))
    assert not page.blocks["claims-glue"] and "GLUE average" not in page.blocks["scores"]


def test_facts_about_the_runs(page_of):
    first = make_row("absolute", 1, RUNGS[0], {LOSS: None})
    second = make_row("absolute", 1, RUNGS[1], {LOSS: 5.0}, common={"num_layers": 2, "lr": 0.001}, hardware="1 core")
    text = text_of(page_of([first, second]))
    assert "- Flags of every run: `--num-layers 2`." in text
    assert "- Flag that differs: `--lr` is 0.002 at 4,194,304 tokens; 0.001 at 16,777,216 tokens." in text
    assert f"Values that are not finite are left out: {LOSS} of absolute-1-4194304-False-." in text
    assert "- Hardware: 2 cores.\n- Hardware: 1 core." in text


def test_a_flag_that_differs_within_a_rung_names_the_models(page_of):
    in_fp32 = {"common": {"num_layers": 2, "bf16": False}}
    rows = [make_row("absolute", 1, RUNGS[0], {LOSS: 5.0}, common={"num_layers": 2, "bf16": True})]
    rows += [make_row(name, 1, RUNGS[0], {LOSS: 5.0}, **in_fp32) for name in ("rope", "ddrp")]
    text = text_of(page_of([*rows, make_row("rope", 1, RUNGS[1], {LOSS: 4.0}, **in_fp32)]))
    values = "True at 4,194,304 tokens (absolute); False at 4,194,304 tokens (rope, ddrp), 16,777,216 tokens"
    assert f"- Flag that differs: `--bf16` is {values}." in text


def test_a_flag_that_differs_between_seeds_names_the_seeds(page_of):
    """All models of a seed have one value, so no difference that is paired by seed comes from the flag."""
    rows = []
    for seed in (1, 2, 3):
        common = {"num_layers": 2, "bf16": seed < 3}
        rows += [make_row(name, seed, RUNGS[0], {LOSS: 5.0}, common=common) for name in ("absolute", "ddrp")]
    values = "True at 4,194,304 tokens (seeds 1, 2); False at 4,194,304 tokens (seed 3)"
    assert f"- Flag that differs: `--bf16` is {values}." in text_of(page_of(rows))


def test_tables_of_a_document_are_replaced_and_a_second_time_nothing_changes(page_of, tmp_path):
    document = tmp_path / "results.md"
    document.write_text(
        "# ExperimentValues\n\n<!-- compare claims -->\nstale\n<!-- end of compare claims -->\n\ntext\n\n"
        "<!-- compare runs -->\n<!-- end of compare runs -->\n<!-- other -->\nkept\n<!-- end of other -->\n"
    )
    page = page_of(full_rows())
    assert page.replace_tables(document) == f"{document}: 2 tables replaced: claims, runs"
    text = document.read_text(encoding="utf-8")
    assert f"<!-- compare claims -->\n{page.blocks['claims']}\n<!-- end of compare claims -->\n\ntext\n" in text
    assert page.blocks["runs"] in text and "stale" not in text and "\nkept\n" in text
    page.replace_tables(document)
    assert document.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<!-- compare claim -->\n<!-- end of compare claim -->\n",
            "unknown table 'claim'; expected one of runs, claims,",
        ),
        ("nothing", "no line <!-- compare NAME -->; expected one of runs"),
        ("<!-- compare claims -->\n", "expected a line <!-- compare claims --> before every line <!-- end of"),
    ],
)
def test_a_wrong_document_is_one_line_and_stays_as_it_is(page_of, tmp_path, text, message):
    document = tmp_path / "results.md"
    document.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        page_of(full_rows(num_rungs=1, num_seeds=1)).replace_tables(document)
    assert document.read_text() == text


def test_a_missing_document(page_of, tmp_path):
    with pytest.raises(UserError, match="No such file or directory; give a readable file"):
        page_of(full_rows(num_rungs=1, num_seeds=1)).replace_tables(tmp_path / "none.md")
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        page_of(full_rows(num_rungs=1, num_seeds=1)).replace_tables(tmp_path / "binary.md")


def test_rows_of_checks_alone_give_a_page_of_checks(page_of, tmp_path):
    """A plan may begin with its checks, and every row may be the last for now."""
    assert "0 figures written" in page_of([row for row in full_rows() if row["check"]]).write()
    text = (tmp_path / "out" / "page.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == ["Checks"]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["gains"][0]["check"] == "learning rate"


def test_entries_of_a_check_with_different_baselines_are_each_judged_by_their_own(page_of):
    """The second entry also has the first one's baseline, and a row from before rows named theirs."""
    rows = []
    for seed in (1, 2, 3):
        small = {"check": "recipe", "baseline": "ddrp"}
        large = {"check": "recipe", "baseline": "bert-r"}
        rows += [make_row(name, seed, RUNGS[0], {LOSS: loss + seed / 100}, **small)
                 for name, loss in (("rope", 5.0 + seed / 1000), ("ddrp", 6.0))]  # fmt: skip
        rows += [make_row(name, seed, RUNGS[1], {LOSS: loss + seed / 100}, **large)
                 for name, loss in (("rope", 4.0), ("ddrp", 3.0 + seed / 1000), ("bert-r", 5.0))]  # fmt: skip
    page = page_of(rows)
    gains = [gain for own in page.checks.values() for gain in own]
    found = {(gain.budget[:2], gain.text): round(gain.seeds.mean, 2) for gain in gains}
    assert found == {("4,", "rope over ddrp"): 1.0, ("16", "rope over bert-r"): 1.0, ("16", "ddrp over bert-r"): 2.0}
    assert "+0.9980 over ddrp" in page.blocks["checks"] and "+1.9980 over bert-r" in page.blocks["checks"]
    rows[0].pop("baseline")
    assert [check.baseline.name for check in page_of(rows).checks] == ["ddrp", "bert-r"]


def test_a_main_experiment_with_two_baselines_says_so(page_of):
    rows = gain_rows({"rope": (0.05,), "ddrp": (0.01,)})
    assert "name the baselines" not in text_of(page_of(rows))
    rows = [row | {"baseline": "rope"} if row["model"] == "ddrp" else row for row in rows]
    assert "- Rows name the baselines absolute, rope: the one whose run comes first counts." in text_of(page_of(rows))


def test_sets_of_minimal_pairs_that_differ_are_named(page_of):
    rows = full_rows(num_rungs=1)
    assert "Minimal pairs: " not in text_of(page_of(rows))
    row = next(row for row in rows if row.get("paradigms"))
    row["paradigms"] = dict(list(row["paradigms"].items())[:3])
    text = text_of(page_of(rows))
    assert re.findall(r"Minimal pairs: (?:[\d,]+) of (\d+) paradigms", text) == ["3", "13"]


def test_a_claim_about_a_model_with_two_names_is_judged_under_each(page_of):
    """The rows of two plans, whose common flags differ."""
    rows = gain_rows({"absolute+mth": (0.05,)})
    rows += [row | {"model": f"{row['model']}, small", "run": f"{row['run']}, small"} for row in rows]
    texts = [gain.text for gain in page_of(rows).gains["claims"]]
    names = ("absolute+mth", "absolute+mth, small")
    assert texts == [f"{MTH} ({one} over {other})" for one in names for other in ("absolute", "absolute, small")]


def test_a_measure_that_some_seeds_lack_says_how_many_have_it(page_of):
    rows = gain_rows({"rope": (0.05,)}, noise=0.0)
    rows[1] |= {"values": {LOSS: None}}
    line = next(line for line in page_of(rows).blocks["scores"].splitlines() if line.startswith("| rope"))
    assert line == "| rope | 6.0500 ± 0.0500 (3 of 4 seeds) | 4 |"
