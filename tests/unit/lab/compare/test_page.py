"""The page: what is in the store and nothing else, missing work by name, and HTML that needs nothing from outside."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.command import main
from megatron_ddrp.lab.compare.experiment import Runner
from megatron_ddrp.lab.compare.measures import make_row
from megatron_ddrp.lab.compare.page import Page
from megatron_ddrp.lab.compare.runs import log_file
from megatron_ddrp.pages.markdown import Table, code, paragraph, to_html
from megatron_ddrp.tasks.statistics import LOSS, STEP_SECONDS, TOKEN_SIMILARITY
from tests.unit.lab.compare.conftest import (
    experiment_of,
    finish_run,
    finish_similarity,
    measures_of,
    record,
    write_page,
)

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


def page_of(work):
    write_page(work)
    return {name: (work.folder / name).read_text(encoding="utf-8") for name in ("page.md", "page.html")}


def values_of(work):
    """Measure → model → seed → value, from results.json."""
    write_page(work)
    found = {}
    for one in json.loads((work.folder / "results.json").read_text())["values"]:
        found.setdefault(one["measure"], {})[one["model"]] = one["by_seed"]
    return found


def test_values_are_those_of_the_store(work):
    found = values_of(work)[LOSS]
    assert found["BERT (MLM)"] == pytest.approx({"1234": 6.5, "1235": 6.51, "1236": 6.52})
    assert found["BERT (MTH)"] == pytest.approx({"1234": 6.25, "1235": 6.26})
    assert found["BERT (MTH), half the budget"] == pytest.approx({"1234": 7.0, "1235": 7.01, "1236": 7.02})
    row = make_row(work, work.runs[0])
    assert row["values"][STEP_SECONDS] == 0.5  # without the 60 s of the first step
    assert row["curves"][TOKEN_SIMILARITY] == [(2000, pytest.approx(0.85)), (4000, 0.8)]


def test_a_loss_that_is_not_finite_is_left_out_and_told(work):
    """metrics.jsonl has null for it."""
    run = next(run for run in work.runs if run.seed == 1235 and run.model.objective == "mlm")
    metrics = run.folder / "metrics.jsonl"
    *before, last = metrics.read_text(encoding="utf-8").splitlines()
    metrics.write_text("\n".join([*before, json.dumps(json.loads(last) | {"valid_lm_loss": None})]) + "\n")
    assert values_of(work)[LOSS]["BERT (MLM)"] == pytest.approx({"1234": 6.5, "1236": 6.52})
    assert "validation masked-LM loss not finite, eta" in Runner(work.store, 1).finished(run.job, 1.0, [])
    text = page_of(work)["page.md"]
    assert f"Values that are not finite are left out: validation masked-LM loss of {run.job.name}." in text


def test_the_page_tells_what_is_there_and_names_what_is_missing(work):
    failed = next(c for c in work.runs if c.job.name not in work.store)
    log = log_file(work.folder, failed.job)
    log.parent.mkdir(parents=True)
    log.write_text("$ python pretrain_bert.py\npretrain_bert.py: error: no space left\n")
    for text in page_of(work).values():
        assert "6.5100 ± 0.0100" in text and "6.2550 ± 0.0071" in text  # three seeds, and the two that there are
        assert "run BERT (MTH), seed 1236: started, not finished" in text and "error: no space left" in text
        assert "self-similarity BERT (MTH), seed 1236: not started" in text
        assert "Up to 2 jobs shared the machine" in text and "2 cores of Some CPU" in text
        assert "GLUE" not in text and "Finished jobs: 8 x run" in text and "jobs.jsonl" in text


def test_a_store_with_nothing_gives_a_page_with_nothing(values, open_work):
    work = open_work(values)
    for text in page_of(work).values():
        assert "6.5" not in text and "±" not in text
        assert "15 jobs or runs are missing" in text and "No run is finished yet." in text
    assert not list((work.folder / "figures").glob("*.png"))


def test_jobs_of_another_plan_in_the_same_folder_stay_off_the_page(work, values, open_work):
    values["models"] = values["models"][:1]
    values["half_budget"] = []
    text = page_of(open_work(values))["page.md"]
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
    """Claim → its word and its gain, from results.json of rows made anew."""
    (work.folder / "rows.jsonl").unlink(missing_ok=True)
    write_page(work)
    gains = json.loads((work.folder / "results.json").read_text())["gains"]
    return {one["claim"]: (one["judgement"], one["mean"]) for one in gains}


def test_the_judgements_come_from_the_data(work):
    claim = "MTH is better than MLM with BERT"
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


def test_the_html_is_whole_and_needs_nothing_from_outside(work):
    text = page_of(work)["page.html"]
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


def test_the_figures_of_the_markdown_are_files_beside_it(work):
    text = page_of(work)["page.md"]
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(links) == 2 and all((work.folder / link).stat().st_size > 5000 for link in links)


def test_text_is_escaped_and_markdown_tables_keep_their_columns(tmp_path):
    table = Table(["a", "b"], [["x|y", "1"], ["<script>", "`2`"], ["_z_", "*3*"]], "a `x|y` of <b>")
    parts = [
        "# a &lt; b",
        paragraph("*so* it `is` & was"),
        f"- {paragraph('2 < 3')}",
        str(table),
        code(["x > y"]),
    ]
    text = "\n\n".join(parts)
    assert "| x\\|y | 1 |" in text and "| &lt;script&gt; | \\`2\\` |" in text
    assert "\n*so* it `is` &amp; was\n" in text and "a `x|y` of &lt;b&gt;\n" in text
    html = to_html(text, "<title>", tmp_path)
    assert "<script>" not in html and ">`2`</td>" in html and "<td>_z_</td>" in html and ">*3*</td>" in html
    for part in ("<title>&lt;title&gt;</title>", "<h1>a &lt; b</h1>", "2 &lt; 3", "x &gt; y", "<td>x|y</td>"):
        assert part in html
    assert "<em>so</em> it <code>is</code> &amp; was" in html and "<p>a <code>x|y</code> of &lt;b&gt;</p>" in html


@pytest.mark.parametrize("package", ["markdown", "matplotlib"])
def test_a_missing_package_is_named_before_anything_runs(values, write, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"the page needs {package}, not installed here: pip install {package}$"):
        main([str(write(values)), "--output-dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_glue_columns_come_from_the_runs(values, open_work, tmp_path):
    data = tmp_path / "glue"
    for task in ("RTE", "CoLA"):
        (data / task).mkdir(parents=True)
        (data / task / "train.tsv").write_text("x")
    values["glue"] = {"data_dir": str(data), "tasks": ["RTE", "CoLA"], "checkpoints_of": ["BERT (MLM)"]}
    values["seeds"] = 2
    work = open_work(values)
    for run in work.runs:
        finish_run(work, run, 6.5)
    for score in measures_of(work, "glue"):
        number = work.plan.seeds.index(score.run.seed)
        undefined = number == 1 and score.run.model.objective == "mlm"
        write_scores(score, 0.6 + number / 10 + (score.run.model.objective == "mth") / 20, None if undefined else 0.2)
        record(work, score.job)
    text = page_of(work)["page.md"]
    assert "| BERT (MLM) | 6.5000 ± 0.0000 | 65.00 ± 7.07 | 10.00 ± 14.14 (1 undefined) | 37.50 ± 3.54 |" in text
    assert "GLUE average: the mean of RTE and CoLA" in text and "83.29" in text and "84.25" in text
    assert "(figures/glue-curve.png)" not in text  # one model has a curve, and no other stands beside it
    claim = next(line for line in text.splitlines() if line.startswith("| MTH is better than MLM") and "+7.50" in line)
    assert "+7.50" in claim and "+0.96" in claim  # 2.5 and, where BERT (MLM) collapsed, 12.5


def test_the_average_leaves_out_wnli_and_says_so(values, open_work, tmp_path):
    data = tmp_path / "glue"
    tasks = ("RTE", "CoLA", "WNLI")
    for task in tasks:
        (data / task).mkdir(parents=True)
    work = open_work(values | {"seeds": 2, "half_budget": [], "glue": {"data_dir": str(data), "tasks": list(tasks)}})
    for run in work.runs:
        finish_run(work, run, 6.5)
    for score in measures_of(work, "glue"):
        write_scores(score, 0.6, 0.2, WNLI=0.9)
        record(work, score.job)
    text = write_page(work)
    assert "GLUE average: the mean of RTE and CoLA" in text
    assert "| 60.00 ± 0.00 | 20.00 ± 0.00 | 90.00 ± 0.00 | 40.00 ± 0.00 |" in text


def write_scores(score, rte, cola, **more):
    folder = score.job.output.parent
    folder.mkdir(parents=True)
    rows = []
    for task, value in {"RTE": rte, "CoLA": cola, **more}.items():
        run = {"task": task, "batch_size": 32, "lr": 3e-5, "epochs": 4, "seed": 1, "max_seq_length": 32}
        run |= {"encoder": score.job.name, "data": "d", "micro_batch_size": 16, "layerwise_lr_decay": 1.0}
        run |= {"precision": "fp32", "max_train_examples": None, "load": "iter", "score": value, "metric": "m"}
        rows.append(run | {"train_examples": 9, "dev_examples": 9, "seconds": 1.0, "epoch_scores": [value]})
    (folder / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "table.json").write_text("{}")
