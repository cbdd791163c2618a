"""The page: what the store or the rows have and nothing else, claims of a file, HTML that is whole."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from megatron_ddrp import __main__, compare
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare import measures
from megatron_ddrp.lab.compare.command import main
from megatron_ddrp.lab.compare.experiment import Runner
from megatron_ddrp.lab.compare.page import NAMES, Page, draw_gains
from megatron_ddrp.lab.compare.rows import read_run_rows
from megatron_ddrp.lab.compare.runs import log_file
from megatron_ddrp.pages.markdown import Table, code, paragraph, to_html
from megatron_ddrp.tasks.glue import PAPER_TASKS
from megatron_ddrp.tasks.statistics import STEP_SECONDS, TOKEN_SIMILARITY
from tests.refusals import refused
from tests.unit.lab.compare.conftest import (
    experiment_of,
    finish_run,
    finish_runs,
    finish_similarity,
    measures_of,
    record,
    write_page,
    write_tuning,
)
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
        finish_run(work, run, loss + number / 100, 0.5 if run.model.objective == "mlm" else 0.52)
        if not run.half:
            mth = run.model.objective == "mth"
            finish_similarity(work, run, (0.1 if mth else 0.8) + number / 100, 0.5 + (-1) ** number * mth / 100)
    return work


def files_of(work):
    write_page(work)
    return {name: (work.folder / name).read_text(encoding="utf-8") for name in ("page.md", "page.html")}


def values_of(work):
    """Measure → model → seed → value, from results.json beside the page."""
    found = {}
    for one in json.loads((work.folder / "results.json").read_text())["values"]:
        found.setdefault(one["measure"], {})[one["model"]] = one["by_seed"]
    return found


def test_values_are_those_of_the_store(work):
    write_page(work)
    found = values_of(work)[LOSS]
    assert found["BERT (MLM)"] == pytest.approx({"1234": 6.5, "1235": 6.51, "1236": 6.52})
    assert found["BERT (MTH)"] == pytest.approx({"1234": 6.25, "1235": 6.26})
    assert found["BERT (MTH), half the budget"] == pytest.approx({"1234": 7.0, "1235": 7.01, "1236": 7.02})
    row = measures.make_row(work, work.runs[0])
    assert row["values"][STEP_SECONDS] == 0.5  # without the 60 s of the first step
    assert row["curves"][TOKEN_SIMILARITY] == [(2000, pytest.approx(0.85)), (4000, 0.8)]


def test_a_loss_that_is_not_finite_is_left_out_and_told(work):
    """metrics.jsonl has null for it."""
    run = next(run for run in work.runs if run.seed == 1235 and run.model.objective == "mlm")
    metrics = run.folder / "metrics.jsonl"
    *before, last = metrics.read_text(encoding="utf-8").splitlines()
    metrics.write_text("\n".join([*before, json.dumps(json.loads(last) | {"valid_lm_loss": None})]) + "\n")
    assert "validation masked-LM loss not finite, eta" in Runner(work.store, 1).finished(run.job, 1.0, [])
    text = write_page(work)
    assert values_of(work)[LOSS]["BERT (MLM)"] == pytest.approx({"1234": 6.5, "1236": 6.52})
    assert f"Values that are not finite are left out: validation masked-LM loss of {run.job.name}." in text


def test_the_page_tells_what_is_there_and_names_what_is_missing(work):
    failed = next(c for c in work.runs if c.job.name not in work.store)
    log = log_file(work.folder, failed.job)
    log.parent.mkdir(parents=True)
    log.write_text("$ python pretrain_bert.py\npretrain_bert.py: error: no space left\n")
    for text in files_of(work).values():
        assert "6.5100 ± 0.0100" in text and "6.2550 ± 0.0071" in text  # three seeds, and the two that there are
        assert "run BERT (MTH), seed 1236: started, not finished" in text and "error: no space left" in text
        assert "self-similarity BERT (MTH), seed 1236: not started" in text
        assert "Up to 2 jobs shared the machine" in text and "2 cores of Some CPU" in text
        assert "GLUE" not in text and "Finished jobs: 8 x run" in text and "jobs.jsonl" in text


def test_a_store_with_nothing_gives_a_page_with_nothing(values, open_work):
    work = open_work(values)
    for text in files_of(work).values():
        assert "6.5" not in text and "±" not in text
        assert "15 jobs or runs are missing" in text and "No run is finished yet." in text
    assert not list((work.folder / "figures").glob("*.png"))


def test_jobs_of_another_plan_in_the_same_folder_stay_off_the_page(work, values, open_work):
    values["models"] = values["models"][:1]
    values["half_budget"] = []
    text = write_page(open_work(values))
    assert "6.5100 ± 0.0100" in text and "6.2550" not in text and "BERT (MTH)" not in text


def vary(work):
    """Move two seeds of masked LM apart and leave the mean: equal differences are no evidence."""
    for run in work.runs:
        change = {1234: 0.001, 1235: -0.001}.get(run.seed, 0.0) * (run.model.objective == "mlm")
        if change:
            number = work.plan.seeds.index(run.seed)
            finish_run(work, run, LOSSES[run.model.name] + number / 100 + change)
            finish_similarity(work, run, 0.8 + number / 100 + change, 0.5)


def judgements_of(work):
    """Claim → its word and its gain, of rows made anew."""
    (work.folder / "rows.jsonl").unlink(missing_ok=True)
    gains = Page(experiment_of(work).finished_runs(), work.folder).numbers()["gains"]
    return {one["claim"]: (one["judgement"], one["mean"]) for one in gains}


def test_the_judgements_come_from_the_data(work):
    claim = "MTH is better than MLM with BERT"
    word, gain = judgements_of(work)[claim]
    assert word == "exploratory" and gain == pytest.approx(0.25)  # of two seeds
    last = next(run for run in work.runs if run.job.name not in work.store)
    finish_run(work, last, LOSSES["BERT (MTH)"] + 0.02)
    finish_similarity(work, last, 0.12, 0.51)
    word, gain = judgements_of(work)[claim]
    assert word is None and gain == pytest.approx(0.25)  # equal gains have no spread
    vary(work)
    found = judgements_of(work)
    assert found[claim] == ("better", pytest.approx(0.25))
    half = "MTH at half the budget is at least as good as MLM at the whole with BERT"
    assert found[half] == ("worse", pytest.approx(-0.5))
    assert found["MTH lowers f(S) with BERT"] == ("better", pytest.approx(0.7))
    for run in work.runs:  # the same page, turned round
        path = next((a.job.output for a in work.measures if a.run == run), None)
        if path and path.is_file():
            found = json.loads(path.read_text())
            for row in found["checkpoints"]:
                row["token_similarity"] = 1 - row["token_similarity"]
            path.write_text(json.dumps(found))
    assert judgements_of(work)["MTH lowers f(S) with BERT"] == ("worse", pytest.approx(-0.7))


def test_models_of_different_tokens_are_compared_at_one_budget(values, open_work):
    values["models"][1]["flags"] = {"global-batch-size": 8}
    work = open_work(values)
    for run in work.runs:
        finish_run(work, run, LOSSES[run.model.name] + run.seed / 1e4)
    page = Page(experiment_of(work).finished_runs(), work.folder)
    (gain,) = [gain for gain in page.gains["models"] if not gain.first.half]
    assert gain.seeds.values == pytest.approx([0.25] * 3) and list(page.results.budgets) == ["40 steps"]


class Structure(HTMLParser):
    """Open tags must close in order; keeps what could reach outside."""

    VOID = {"meta", "img", "br", "!doctype"}

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.references, self.metas = [], [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.references += [values[name] for name in ("src", "href") if name in values]
        self.metas += [values] * (tag == "meta")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_is_whole_and_needs_nothing_from_outside_and_the_figures_of_the_markdown_are_beside_it(work):
    markdown, text = files_of(work).values()
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown)
    assert len(links) == 2 and all((work.folder / link).stat().st_size > 5000 for link in links)
    structure = Structure()
    structure.feed(text)
    structure.close()
    assert structure.open == []
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in structure.metas
    assert structure.references and all(r.startswith("data:image/png;base64,") for r in structure.references)
    assert not {"script", "link", "iframe"} & set(structure.tags)
    assert "@import" not in text and "url(" not in text and "prefers-color-scheme: dark" in text
    assert structure.tags.count("table") == text.count('<div class="scroll"')
    assert structure.tags.count("img") == len(list((work.folder / "figures").glob("*.png"))) > 0


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


@pytest.mark.parametrize("package", ["markdown", "matplotlib", "scipy"])
def test_a_missing_package_is_named_before_anything_runs(values, write, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    words = [str(write(values)), "--output-dir", str(tmp_path / "out")]
    refused(rf"the page needs {package}, not installed here: pip install {package}$", main, words)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def glue_work(values, open_work, tmp_path):
    """Return a function from tasks, and more for GLUE, to a plan of two seeds whose runs are finished."""

    def make(*tasks, **more):
        for task in tasks:
            (tmp_path / "glue" / task).mkdir(parents=True)
            (tmp_path / "glue" / task / "train.tsv").write_text("x")
        glue = {"data_dir": str(tmp_path / "glue"), "tasks": list(tasks)}
        work = open_work(values | {"seeds": 2, "glue": glue | more})
        finish_runs(work)
        return work

    return make


def test_glue_columns_come_from_the_runs(glue_work):
    work = glue_work("RTE", "CoLA", checkpoints_of=["BERT (MLM)"])
    for score in measures_of(work, "glue"):
        number = work.plan.seeds.index(score.run.seed)
        undefined = number == 1 and score.run.model.objective == "mlm"
        write_scores(score, 0.6 + number / 10 + (score.run.model.objective == "mth") / 20, None if undefined else 0.2)
        record(work, score.job)
    text = write_page(work)
    assert "| BERT (MLM) | 6.5000 ± 0.0000 | 65.00 ± 7.07 | 10.00 ± 14.14 (1 undefined) | 37.50 ± 3.54 |" in text
    assert "GLUE average: the mean of RTE and CoLA" in text and "83.29" in text and "84.25" in text
    assert "(figures/glue-curve.png)" not in text  # one model has a curve, and no other stands beside it
    claim = next(line for line in text.splitlines() if line.startswith("| MTH is better than MLM") and "+7.50" in line)
    assert "+7.50" in claim and "+0.96" in claim  # 2.5 and, where BERT (MLM) collapsed, 12.5


def test_the_average_leaves_out_wnli_and_says_so(glue_work):
    work = glue_work("RTE", "CoLA", "WNLI")
    for score in measures_of(work, "glue"):
        write_scores(score, 0.6, 0.2, WNLI=0.9)
        record(work, score.job)
    text = write_page(work)
    assert "GLUE average: the mean of RTE and CoLA" in text
    assert "| 60.00 ± 0.00 | 20.00 ± 0.00 | 90.00 ± 0.00 | 40.00 ± 0.00 |" in text


def write_scores(score, rte, cola, **more):
    write_tuning(score.job, [{"task": task, "score": s} for task, s in {"RTE": rte, "CoLA": cola, **more}.items()])


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


def test_the_name_of_earlier_versions_is_refused_with_the_new_one(run_tool):
    ended = run_tool(__main__, "ladder", "rows.jsonl", "--output-dir", "out")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "ladder: this name is gone; the command is compare" in ended.stderr


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
    assert "| absolute+0.002 | 6.0000 | 2.00 | +0.1000 over absolute+0.001 | exploratory | 1 |" in text
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


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_and_two_seeds_are_exploratory_in_tables_results_and_figures(page_of, seeds):
    page = page_of(full_rows(num_rungs=1, num_seeds=seeds))
    assert {gain["judgement"] for gain in page.numbers()["gains"]} == {"exploratory"}
    assert "exploratory" in page.blocks["claims"] and "| budget |" not in page.blocks["claims"]
    pytest.importorskip("matplotlib")
    judged = [gain._replace(word="") for gain in page.gains["claims"]]
    (pale,), (full,) = (draw_gains(page.results, found).axes for found in (page.gains["claims"], judged))
    both = zip(pale.lines, full.lines, strict=True)
    assert all(one.get_alpha() < 1 == other.get_alpha() for one, other in both if one.get_color() != "black")


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
    assert refused(message, page_of, gain_rows({"rope": (0.05,)}), tmp_path / "mine.yaml").exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.yaml", "b.jsonl"], "a plan (.yaml) and rows (.jsonl) exclude each other"),
        (["a.yaml", "--tables", "b.md"], "--tables needs rows"),
        (["a.jsonl", "--page-only"], "ROWS.jsonl takes only --output-dir, --claims and --tables"),
        (["a.yaml", "--reproduce", "b"], "--reproduce needs --rows, and takes neither"),
        (["a.yaml", "--reproduce", "b", "--rows", "c", "--dry-run"], "--reproduce needs --rows, and takes neither"),
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


def test_a_flag_that_differs_names_the_models_of_a_rung_or_the_seeds(page_of):
    """Where all models of a seed have one value, no difference that is paired by seed comes from the flag."""
    in_fp32 = {"common": {"num_layers": 2, "bf16": False}}
    rows = [make_row("absolute", 1, RUNGS[0], {LOSS: 5.0}, common={"num_layers": 2, "bf16": True})]
    rows += [make_row(name, 1, RUNGS[0], {LOSS: 5.0}, **in_fp32) for name in ("rope", "ddrp")]
    text = text_of(page_of([*rows, make_row("rope", 1, RUNGS[1], {LOSS: 4.0}, **in_fp32)]))
    values = "True at 4,194,304 tokens (absolute); False at 4,194,304 tokens (rope, ddrp), 16,777,216 tokens"
    assert f"- Flag that differs: `--bf16` is {values}." in text
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
            b"<!-- compare claim -->\n<!-- end of compare claim -->\n",
            "unknown table 'claim'; expected one of runs, claim",
        ),
        (b"nothing", "no line <!-- compare NAME -->; expected one of runs"),
        (b"<!-- compare claims -->\n", "expected a line <!-- compare claims --> before every line <!-- end of"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_wrong_document_is_one_line_and_stays_as_it_is(page_of, tmp_path, text, message):
    document = tmp_path / "results.md"
    document.write_bytes(text)
    replace_tables = page_of(full_rows(num_rungs=1, num_seeds=1)).replace_tables
    refused(re.escape(message), replace_tables, document)
    assert document.read_bytes() == text
    refused("No such file or directory; give a readable file", replace_tables, tmp_path / "none.md")


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
