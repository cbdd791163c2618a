"""The page: what the store or the rows have and nothing else, claims, whole HTML; the rows and pages in docs/."""

import itertools
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_ddrp import __main__
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare import measures
from megatron_ddrp.lab.compare.command import main
from megatron_ddrp.lab.compare.experiment import Runner
from megatron_ddrp.lab.compare.page import NAMES, Page, draw_gains
from megatron_ddrp.lab.compare.plan import read_plans
from megatron_ddrp.lab.compare.rows import read_run_rows
from megatron_ddrp.lab.compare.runs import log_file
from megatron_ddrp.pages.markdown import Table, code, paragraph, to_html
from megatron_ddrp.tasks.glue import PAPER_TASKS
from megatron_ddrp.tasks.statistics import LIKE_LOSS, STEP_SECONDS, TOKEN_SIMILARITY
from tests.refusals import refused, wrong_arguments
from tests.unit.lab.compare import conftest as plans
from tests.unit.lab.compare.made_rows import LOSS, RUNGS, full_rows, gain_rows, make_row

LOSSES = {"BERT (MLM)": 6.5, "BERT (MTH)": 6.25}


@pytest.fixture
def work(values, open_work):
    """All runs finished but one; MTH lowers f(S) and not f(H)."""
    work = open_work(values)
    for run in work.runs:
        number = work.plan.seeds.index(run.seed)
        if (run.model.name, number, run.half) == ("BERT (MTH)", 2, False):
            continue
        loss = 7.0 if run.half else LOSSES[run.model.name]
        plans.finish_run(work, run, loss + number / 100, 0.5 if run.model.objective == "mlm" else 0.52)
        if not run.half:
            mth = run.model.objective == "mth"
            plans.finish_similarity(work, run, (0.1 if mth else 0.8) + number / 100, 0.5 + (-1) ** number * mth / 100)
    return work


def files_of(work):
    """The text of both files of the page, and from results.json beside them: measure → model → seed → value."""
    plans.write_page(work)
    found = {}
    for one in json.loads((work.folder / "results.json").read_text())["values"]:
        found.setdefault(one["measure"], {})[one["model"]] = one["by_seed"]
    return [(work.folder / name).read_text(encoding="utf-8") for name in ("page.md", "page.html")], found


def test_the_page_has_the_values_of_the_store_and_names_what_is_missing_and_its_html_is_whole(work, values, open_work):
    failed = next(c for c in work.runs if c.job.name not in work.store)
    log = log_file(work.folder, failed.job)
    log.parent.mkdir(parents=True)
    log.write_text("$ python pretrain_bert.py\npretrain_bert.py: error: no space left\n")
    texts, found = files_of(work)
    assert found[LOSS] == {
        "BERT (MLM)": pytest.approx({"1234": 6.5, "1235": 6.51, "1236": 6.52}),
        "BERT (MTH)": pytest.approx({"1234": 6.25, "1235": 6.26}),
        "BERT (MTH), half the budget": pytest.approx({"1234": 7.0, "1235": 7.01, "1236": 7.02}),
    }
    row = measures.make_row(work, work.runs[0])
    assert row["values"][STEP_SECONDS] == 0.5  # without the 60 s of the first step
    assert row["curves"][TOKEN_SIMILARITY] == [[2000, pytest.approx(0.85)], [4000, 0.8]]
    for text in texts:
        assert "6.5100 ± 0.0100" in text and "6.2550 ± 0.0071" in text  # three seeds, and the two that there are
        assert "run BERT (MTH), seed 1236: started, not finished" in text and "error: no space left" in text
        assert "self-similarity BERT (MTH), seed 1236: not started" in text
        assert "Up to 2 jobs shared the machine" in text and "2 cores of Some CPU" in text
        assert "GLUE" not in text and "Finished jobs: 8 x run" in text and "jobs.jsonl" in text
    markdown, html = texts
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown)
    assert len(links) == 2 and all((work.folder / link).stat().st_size > 5000 for link in links)
    tags = OpenTags()
    tags.feed(html)
    assert tags.open == []
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert not re.search(r"<(script|link|iframe)|@import|url\(", html) and "prefers-color-scheme: dark" in html
    assert html.count("<table") == html.count('<div class="scroll"')
    assert html.count("<img") == html.count('src="data:image/png;base64,') == len(links)
    text = plans.write_page(open_work(values | {"models": values["models"][:1], "half_budget": []}))
    assert "6.5100 ± 0.0100" in text and "6.2550" not in text and "BERT (MTH)" not in text


def test_a_loss_that_is_not_finite_is_left_out_and_told(work):
    """metrics.jsonl has null for it."""
    run = next(run for run in work.runs if run.seed == 1235 and run.model.objective == "mlm")
    metrics = run.folder / "metrics.jsonl"
    *before, last = metrics.read_text(encoding="utf-8").splitlines()
    metrics.write_text("\n".join([*before, json.dumps(json.loads(last) | {"valid_lm_loss": None})]) + "\n")
    assert "validation masked-LM loss not finite, eta" in Runner(work.store, 1).finished(run.job, 1.0, [])
    (text, _), values = files_of(work)
    assert values[LOSS]["BERT (MLM)"] == pytest.approx({"1234": 6.5, "1236": 6.52})
    assert f"Values that are not finite are left out: validation masked-LM loss of {run.job.name}." in text


def test_an_empty_store_gives_an_empty_page_and_models_of_different_tokens_compare_at_one_budget(values, open_work):
    work = open_work(values)
    for text in files_of(work)[0]:
        assert "6.5" not in text and "±" not in text
        assert "15 jobs or runs are missing" in text and "No run is finished yet." in text
    assert not list((work.folder / "figures").glob("*.png"))
    values["models"][1]["flags"] = {"global-batch-size": 8}
    work = open_work(values)
    for run in work.runs:
        plans.finish_run(work, run, LOSSES[run.model.name] + run.seed / 1e4)
    page = plans.page_of_work(work)
    (gain,) = [gain for gain in page.gains["models"] if not gain.first.half]
    assert gain.seeds.values == pytest.approx([0.25] * 3) and list(page.results.budgets) == ["40 steps"]


class OpenTags(HTMLParser):
    """Open tags must close in order."""

    def reset(self):
        super().reset()
        self.open = []

    def handle_starttag(self, tag, attributes):
        self.open += [tag] * (tag not in ("meta", "img", "br"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_text_is_escaped_and_markdown_tables_keep_their_columns(tmp_path):
    table = Table(["a", "b"], [["x|y", "1"], ["<script>", "`2`"], ["_z_", "*3*"]], "a `x|y` of <b>")
    parts = ["# a &lt; b", paragraph("*so* it `is` & was"), f"- {paragraph('2 < 3')}", str(table), code(["x > y"])]
    text = "\n\n".join(parts)
    assert "| x\\|y | 1 |" in text and "| &lt;script&gt; | \\`2\\` |" in text
    assert "\n*so* it `is` &amp; was\n" in text and "a `x|y` of &lt;b&gt;\n" in text
    html = to_html(text, "<title>", tmp_path)
    assert "<script>" not in html and ">`2`</td>" in html and "<td>_z_</td>" in html and ">*3*</td>" in html
    for part in ("<title>&lt;title&gt;</title>", "<h1>a &lt; b</h1>", "2 &lt; 3", "x &gt; y", "<td>x|y</td>"):
        assert part in html
    assert "<em>so</em> it <code>is</code> &amp; was" in html and "<p>a <code>x|y</code> of &lt;b&gt;</p>" in html


def test_a_missing_package_is_named_before_anything_runs(values, write, tmp_path, monkeypatch):
    for package in ("markdown", "matplotlib", "scipy"):
        words = [str(write(values)), "--output-dir", str(tmp_path / "out")]
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            refused(rf"the page needs {package}, not installed here: pip install {package}$", main, words)
        assert not (tmp_path / "out").exists()


def test_glue_columns_come_from_the_runs(values, open_work, tmp_path):
    for task in ("RTE", "CoLA"):
        (tmp_path / "glue" / task).mkdir(parents=True)
        (tmp_path / "glue" / task / "train.tsv").write_text("x")
    glue = {"data_dir": str(tmp_path / "glue"), "tasks": ["RTE", "CoLA"], "checkpoints_of": ["BERT (MLM)"]}
    work = open_work(values | {"seeds": 2, "glue": glue})
    plans.finish_runs(work)
    for score in plans.measures_of(work, "glue"):
        number, mth = work.plan.seeds.index(score.run.seed), score.run.model.objective == "mth"
        scores = {"RTE": 0.6 + number / 10 + mth / 20, "CoLA": None if number == 1 and not mth else 0.2}
        plans.write_tuning(score.job, [{"task": task, "score": found} for task, found in scores.items()])
        plans.record(work, score.job)
    text = plans.write_page(work)
    assert "| BERT (MLM) | 6.5000 ± 0.0000 | 65.00 ± 7.07 | 10.00 ± 14.14 (1 undefined) | 37.50 ± 3.54 |" in text
    assert "GLUE average: the mean of RTE and CoLA" in text and "83.29" in text and "84.25" in text
    assert "(figures/glue-curve.png)" not in text  # one model has a curve, and no other stands beside it
    claim = next(line for line in text.splitlines() if line.startswith("| MTH is better than MLM") and "+7.50" in line)
    assert "+7.50" in claim and "+0.96" in claim  # 2.5 and, where BERT (MLM) collapsed, 12.5


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


def test_the_command_writes_a_page_with_all_figures_and_tables(write_rows, tmp_path, run_tool):
    out = tmp_path / "out"
    done = run_tool(__main__, "compare", write_rows(full_rows()), "--output-dir", out)
    assert done.returncode == 0 and "figures written" in done.stdout
    text, html = (out / "page.md").read_text(encoding="utf-8"), (out / "page.html").read_text(encoding="utf-8")
    drawn = sorted(path.stem for path in (out / "figures").glob("*.png"))
    assert {"budgets", "claims", "claims-inside", "curves", "losses", "minimal-pairs", "models"} <= set(drawn)
    assert sorted(re.findall(r"\(figures/(\S+)\.png\)", text)) == drawn
    assert {path.suffix for path in (out / "figures").iterdir()} == {".png", ".pdf", ".svg"}
    assert html.count("data:image/png;base64,") == len(drawn)
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert (out / "tables" / "claims.tex").is_file() and (out / "tables" / "scores-2.csv").is_file()


def test_sections_stand_in_the_order_of_a_reader_and_those_without_data_are_left_out(page_of, tmp_path):
    page = page_of(full_rows())
    text = text_of(page)
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert titles == ["Claims", "Models over the baseline", "Scores", "Inside the models", "Checks"]
    assert "| 4,194,304 tokens | 4,194,304 | 2,048 | 7 | 2 | 14 | 1,468,160 |" in text
    assert "`--num-layers 2 --hidden-size 128 --bf16 --lr 0.002`" in text
    assert "| absolute+0.002 | 6.0000 | 2.00 | +0.1000 over absolute+0.001 | exploratory | 1 |" in text
    assert "no benchmark" in text and page.tables["cost"] == []  # two jobs shared the machine
    page = page_of(gain_rows({"rope": (0.05, 0.05)}))
    assert {name for name in NAMES if page.blocks[name]} == {"runs", "models", "scores"}
    assert re.findall(r"^## (.*)$", text_of(page), re.M) == ["Models over the baseline", "Scores"]
    # a plan may begin with its checks, and every row may be the last for now
    assert "0 figures written" in page_of([row for row in full_rows() if row["check"]]).write()
    text = (tmp_path / "out" / "page.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == ["Checks"]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["gains"][0]["check"] == "learning rate"


def test_texts_baselines_and_sets_of_minimal_pairs_that_differ_are_told(page_of):
    rows = gain_rows({"rope": (0.05,), "ddrp": (0.01,)}, seeds=(2,))
    text = text_of(page_of([one | {"unigram_loss": 7.0} for one in rows]))
    assert "training texts" not in text and "name the baselines" not in text
    text = text_of(page_of([one | {"unigram_loss": 7.0 - 0.5 * one["seed"]} for one in rows]))
    assert "The training texts of seeds or budgets differ: unigram levels from 6.50 to 7.00." in text
    text = text_of(page_of([row | {"baseline": "rope"} if row["model"] == "ddrp" else row for row in rows]))
    assert "- Rows name the baselines absolute, rope: the one whose run comes first counts." in text
    rows = full_rows(num_rungs=1)
    assert "Minimal pairs: " not in text_of(page_of(rows))
    row = next(row for row in rows if row.get("paradigms"))
    row["paradigms"] = dict(list(row["paradigms"].items())[:3])
    found = re.findall(r"Minimal pairs: (?:[\d,]+) of (\d+) paradigms", text_of(page_of(rows)))
    assert found == ["3", "13"]


def test_one_and_two_seeds_are_exploratory_in_tables_results_and_figures(page_of):
    for seeds in (1, 2):
        page = page_of(full_rows(num_rungs=1, num_seeds=seeds))
        assert {gain["judgement"] for gain in page.numbers()["gains"]} == {"exploratory"}
        assert "exploratory" in page.blocks["claims"] and "| budget |" not in page.blocks["claims"]
        judged = [gain._replace(word="") for gain in page.gains["claims"]]
        (pale,), (full,) = (draw_gains(page.results, found).axes for found in (page.gains["claims"], judged))
        both = zip(pale.lines, full.lines, strict=True)
        assert all(one.get_alpha() < 1 == other.get_alpha() for one, other in both if one.get_color() != "black")


def test_the_word_is_the_side_of_the_gain_more_is_better_for_scores_and_models_leave_out_what_a_claim_says(page_of):
    for gain, word in ((0.05, "better"), (-0.05, "worse"), (0.0, "not told apart")):
        assert set(words_of(page_of(gain_rows({"absolute+mth": (gain, gain)}))).values()) == {word}
    rows = gain_rows({"ddrp": (0.05,)}, measure="STS-B")
    page = page_of([row | {"values": row["values"] | {"GLUE average": 0.0}} for row in rows])
    assert words_of(page, "DDRP is better than BERT", "GLUE average") == {"4,194,304 tokens": "better"}
    found = page_of(gain_rows({"rope": (0.05,), "rope+mth": (0.05,), "absolute+mth": (0.01,)})).gains
    assert [gain.text for gain in found["models"]] == ["rope over absolute", "rope+mth over absolute"]
    assert [gain.text for gain in found["claims"]] == [MTH, "MTH is better than MLM with rope"]


CLAIMS = """
names: {rope: RoPE}
claims:
  - {text: "{encoding} beats T5", first: "{encoding} mlm", second: t5 mlm, measures: [validation masked-LM loss]}
  - {text: MTH helps, first: rope mth, second: rope mlm}
"""


def test_claims_of_a_file_and_their_mistakes(page_of, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(CLAIMS)
    page = page_of(gain_rows({"rope": (0.05,), "t5": (0.01,)}), file)
    assert words_of(page, "RoPE beats T5") == {"4,194,304 tokens": "better"}
    assert "- MTH helps: no run of rope mth; there is absolute mlm, rope mlm, t5 mlm" in text_of(page)
    assert words_of(page, "t5 beats T5") == {}  # {encoding} is T5 itself there, which is no claim
    file.write_text("claims: [{text: RoPE helps, first: rope mlm, second: t5 mlm}]")
    assert page_of(gain_rows({"rope": (0.05,), "t5": (0.01,)}), file).unused == []
    rows = gain_rows({"rope": (0.05,)})
    assert page_of(rows).unused == []  # the paper's claims about other models are no news
    for text, message in (
        ("claims: [{text: a, first: b}]", r"mine.yaml: claims\[1\].second: missing"),
        ("claims: [{text: a, first: b, second: c, paper: [1]}]", r"claims\[1\].paper: got \[1\], expected some text"),
    ):
        file.write_text(text)
        wrong_arguments(message, page_of, rows, file)


def test_words_that_exclude_each_other_and_the_name_of_earlier_versions_are_refused(tmp_path, capfd, run_tool):
    of_rows = "ROWS.jsonl takes only --output-dir, --claims and --tables"
    for words, message in (
        ("a.yaml b.jsonl", "a plan (.yaml) and rows (.jsonl) exclude each other"),
        ("a.yaml --tables b.md", "--tables needs rows"),
        ("a.jsonl --page-only", of_rows),
        ("a.yaml --reproduce b", "--reproduce needs --rows, and takes neither"),
        ("a.yaml --reproduce b --rows c --dry-run", "--reproduce needs --rows, and takes neither"),
        ("a.jsonl --workers 2", of_rows),
    ):
        with pytest.raises((SystemExit, UserError)) as caught:
            main([*words.split(), "--output-dir", str(tmp_path / "out")])
        assert message in str(caught.value) + capfd.readouterr().err, words


def glue_rows(scores_of, seeds=2):
    """Return rows of two models; `scores_of` maps rung and model to the scores. The stored averages are wrong."""
    order = [(rung, model, seed) for rung in RUNGS[:2] for model in ("absolute", "ddrp") for seed in range(seeds)]
    stored = {"absolute": {"GLUE average": 0.0}, "ddrp": {"GLUE average": 0.9}}
    return [make_row(model, seed, rung, stored[model] | scores_of(rung, model)) for rung, model, seed in order]


def test_a_glue_average_is_over_the_tasks_that_all_runs_share_but_wnli_the_papers_tasks_or_none(page_of):
    """DDRP on the second rung comes from a plan with more tasks, which are easier."""

    def scores_of(rung, model):
        more = {"SST-2": 0.8, "WNLI": 0.5} if (rung, model) == (RUNGS[1], "ddrp") else {}
        return {"STS-B": 0.1, "CoLA": 0.1 + 0.02 * (model == "ddrp"), "WNLI": 0.9, **more}

    page = page_of(glue_rows(scores_of))
    assert [gain.seeds.mean for gain in page.gains["claims-glue"]] == pytest.approx([0.01, 0.01])
    named = "the mean of STS-B and CoLA; the paper's average has eight tasks"
    assert page.blocks["claims-glue"].startswith(f"GLUE average ({named}). Gains")
    assert page.blocks["scores"].count(f"GLUE average: {named}.") == 2
    page = page_of(glue_rows(lambda rung, model: {"RTE": 0.6, "CoLA": 0.2, "WNLI": 0.9}))
    assert " | 60.00 ± 0.00 | 20.00 ± 0.00 | 90.00 ± 0.00 | 40.00 ± 0.00 | " in page.blocks["scores"]
    page = page_of(glue_rows(lambda rung, model: dict.fromkeys(PAPER_TASKS, 0.5)))
    assert page.blocks["claims-glue"].startswith("GLUE average (the paper's measure). Gains")
    page = page_of(glue_rows(lambda rung, model: {"RTE" if model == "ddrp" else "MRPC": 0.5}))
    assert not page.blocks["claims-glue"] and "GLUE average" not in page.blocks["scores"]


def test_facts_about_the_runs_and_a_flag_that_differs_names_the_models_of_a_rung_or_the_seeds(page_of):
    """Where all models of a seed have one value, no difference that is paired by seed comes from the flag."""
    first = make_row("absolute", 1, RUNGS[0], {LOSS: None})
    second = make_row("absolute", 1, RUNGS[1], {LOSS: 5.0}, common={"num_layers": 2, "lr": 0.001}, hardware="1 core")
    text = text_of(page_of([first, second]))
    assert "- Flags of every run: `--num-layers 2`." in text
    assert "- Flag that differs: `--lr` is 0.002 at 4,194,304 tokens; 0.001 at 16,777,216 tokens." in text
    assert f"Values that are not finite are left out: {LOSS} of absolute-1-4194304-False-." in text
    assert "- Hardware: 2 cores.\n- Hardware: 1 core." in text

    def made(name, seed, rung, bf16):
        return make_row(name, seed, rung, {LOSS: 5.0}, common={"num_layers": 2, "bf16": bf16})

    models = [made(name, 1, RUNGS[0], name == "absolute") for name in ("absolute", "rope", "ddrp")]
    seeds = [made(name, seed, RUNGS[0], seed < 3) for seed in (1, 2, 3) for name in ("absolute", "ddrp")]
    for rows, values in (
        ([*models, made("rope", 1, RUNGS[1], False)], ("(absolute)", "(rope, ddrp), 16,777,216 tokens")),
        (seeds, ("(seeds 1, 2)", "(seed 3)")),
    ):
        told = "- Flag that differs: `--bf16` is True at 4,194,304 tokens {}; False at 4,194,304 tokens {}."
        assert told.format(*values) in text_of(page_of(rows))
    rows = gain_rows({"rope": (0.05,)}, noise=0.0)
    rows[1] |= {"values": {LOSS: None}}
    line = next(line for line in page_of(rows).blocks["scores"].splitlines() if line.startswith("| rope"))
    assert line == "| rope | 6.0500 ± 0.0500 (3 of 4 seeds) | 4 |"


def test_tables_of_a_document_are_replaced_a_second_time_nothing_changes_and_a_wrong_one_stays(page_of, tmp_path):
    document = tmp_path / "results.md"
    document.write_text(
        "# ExperimentValues\n\n<!-- compare claims -->\nstale\n<!-- end of compare claims -->\n\ntext\n\n"
        "<!-- compare runs -->\n<!-- end of compare runs -->\n<!-- other -->\nkept\n<!-- end of other -->\n"
    )
    page = page_of(full_rows(num_rungs=1, num_seeds=1))
    assert page.replace_tables(document) == f"{document}: 2 tables replaced: claims, runs"
    text = document.read_text(encoding="utf-8")
    assert f"<!-- compare claims -->\n{page.blocks['claims']}\n<!-- end of compare claims -->\n\ntext\n" in text
    assert page.blocks["runs"] in text and "stale" not in text and "\nkept\n" in text
    page.replace_tables(document)
    assert document.read_text(encoding="utf-8") == text
    unknown = b"<!-- compare claim -->\n<!-- end of compare claim -->\n"
    for content, message in (
        (unknown, "unknown table 'claim'; expected one of runs, claim"),
        (b"nothing", "no line <!-- compare NAME -->; expected one of runs"),
        (b"<!-- compare claims -->\n", "expected a line <!-- compare claims --> before every line <!-- end of"),
        (b"\xff\xfe", "not UTF-8"),
    ):
        document.write_bytes(content)
        refused(re.escape(message), page.replace_tables, document)
        assert document.read_bytes() == content
    refused("No such file or directory; give a readable file", page.replace_tables, tmp_path / "none.md")


def test_entries_of_a_check_with_different_baselines_are_each_judged_by_their_own(page_of):
    """The second entry also has the first one's baseline, and a row from before rows named theirs."""
    rows = []
    for seed in (1, 2, 3):
        for rung, baseline, losses in (
            (RUNGS[0], "ddrp", {"rope": 5.0 + seed / 1000, "ddrp": 6.0}),
            (RUNGS[1], "bert-r", {"rope": 4.0, "ddrp": 3.0 + seed / 1000, "bert-r": 5.0}),
        ):
            own = {"check": "recipe", "baseline": baseline}
            rows += [make_row(name, seed, rung, {LOSS: loss + seed / 100}, **own) for name, loss in losses.items()]
    page = page_of(rows)
    gains = [gain for own in page.checks.values() for gain in own]
    found = {(gain.budget[:2], gain.text): round(gain.seeds.mean, 2) for gain in gains}
    assert found == {("4,", "rope over ddrp"): 1.0, ("16", "rope over bert-r"): 1.0, ("16", "ddrp over bert-r"): 2.0}
    assert "+0.9980 over ddrp" in page.blocks["checks"] and "+1.9980 over bert-r" in page.blocks["checks"]
    rows[0].pop("baseline")
    assert [check.baseline.name for check in page_of(rows).checks] == ["ddrp", "bert-r"]


def test_a_claim_about_a_model_with_two_names_is_judged_under_each(page_of):
    """The rows of two plans, whose common flags differ."""
    rows = gain_rows({"absolute+mth": (0.05,)})
    rows += [row | {"model": f"{row['model']}, small", "run": f"{row['run']}, small"} for row in rows]
    texts = [gain.text for gain in page_of(rows).gains["claims"]]
    names = ("absolute+mth", "absolute+mth, small")
    assert texts == [f"{MTH} ({one} over {other})" for one in names for other in ("absolute", "absolute, small")]


ROOT = Path(__file__).resolve().parents[4]
LADDER = ROOT / "docs" / "ladder"
PAGES = {"plateau.md": ["fast", "novels"], "plateau-arms.md": ["plateau"]}
"""Document → rows of its tables."""
PLANS = {"rows": "ladder", "fast": "fast", "novels": "novels", "plateau": "plateau"}
"""Rows → their plan."""


@pytest.mark.parametrize("tables", PAGES)
def test_the_tables_are_those_of_the_rows(tables, tmp_path):
    document, written = ROOT / "docs" / "lab" / tables, tmp_path / tables
    shutil.copy(document, written)
    Page(read_run_rows([LADDER / f"{rows}.jsonl" for rows in PAGES[tables]]), tmp_path / "page").replace_tables(written)
    assert written.read_text() == document.read_text(), "stale tables: run make ladder"


def test_the_ladders_models_stand_by_encoding_and_its_runs_are_counted(tmp_path):
    page = Page(read_run_rows([LADDER / "rows.jsonl"]), tmp_path)
    models = [row[0] for row in page.tables["scores"][0].rows]
    assert models[:9] == ["absolute", "bert-r", "tupe-r", "deberta", "ddrp", "rope", "t5", "alibi", "nope"]
    large = "16,777,216 tokens | 15,731,655 to 15,747,747 | 8,192, 16,384 | 10 | 2 to 3 | 26 | "
    assert list(map(" | ".join, page.tables["runs"][0].rows)) == [
        "4,194,304 tokens | 3,925,863 to 3,940,139 | 2,048 | 24 | 4 to 10 | 120 | 1,470,592 to 1,569,152 | 20h05m",
        f"{large}1,470,592 to 1,487,232 | 19h10m",
        "67,108,864 tokens | 62,957,779 to 62,979,434 | 32,768 | 4 | 2 | 8 | 1,472,736 to 1,486,976 | 12h31m",
    ]
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
