"""Measures of runs (minimal pairs, tasks of one's own, GLUE, space, throughput): their jobs, gains and tables."""

import json
import shutil

import numpy as np
import pytest

from megatron_ddrp.lab.compare.measures import make_row
from megatron_ddrp.lab.compare.page import Page, by_phenomenon
from megatron_ddrp.lab.compare.rows import as_run
from megatron_ddrp.lab.compare.tables import Claim, ExperimentValues, gains
from megatron_ddrp.tasks.finetune.runs import TuningRun, write_predictions
from megatron_ddrp.tasks.finetune.table_files import Task
from megatron_ddrp.tasks.glue import TASKS
from megatron_ddrp.tasks.statistics import GLUE, LOSS, MINIMAL_PAIRS, SPACE, student_interval
from tests.refusals import refused
from tests.unit.lab.compare import conftest as plans

PAIRS = {"agreement": ("morphology", 50), "islands": ("syntax", 100), "binding": ("syntax", 50)}
"""Paradigm → field and number of pairs."""
ROWS = 200


@pytest.fixture
def with_scores(values, tmp_path):
    """A plan with minimal pairs, a task of its own and GLUE, two seeds, no arm at half of the budget."""
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for name, (field, number) in PAIRS.items():
        same = {"field": field, "UID": name}
        rows = [{"sentence_good": f"a {i}", "sentence_bad": f"{i} a"} | same for i in range(number)]
        plans.write_lines(pairs / f"{name}.jsonl", rows)
    (tmp_path / "glue" / "RTE").mkdir(parents=True)
    (tmp_path / "order.yaml").write_text("{train: train.jsonl, valid: valid.jsonl, kind: classification}")
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a b", "label": "in order"}\n')
    values |= {"tasks": [{"file": str(tmp_path / "order.yaml"), "seeds": 2, "epochs": [2, 3]}]}
    values |= {"seeds": 2, "half_budget": [], "minimal_pairs": {"data_dir": str(pairs), "score": "pll"}}
    return values | {"analyses": {}, "glue": {"data_dir": str(tmp_path / "glue"), "tasks": ["RTE"], "seeds": 2}}


@pytest.fixture
def work(with_scores, open_work):
    """Return a finished plan in which MTH has 8 and 12 points more of the pairs right, and 4 and 6 more of the rows."""
    work = open_work(with_scores)
    random = np.random.default_rng(3)
    plans.finish_runs(work)
    for measure in plans.measures_of(work, "minimal-pairs"):
        is_mth, seed = measure.run.model.objective == "mth", work.plan.seeds.index(measure.run.seed)
        gains = [is_mth * (0.08 + 0.04 * seed + own) for own in (0.02, 0, -0.02)]
        finish_pairs(work, measure, [0.5 + 0.02 * seed + gain for gain in gains], random)
    for score in plans.measures_of(work, "glue", "finetune"):
        is_own = score.job.kind == "finetune"
        task = Task("order", "accuracy", labels=("in order", "shuffled")) if is_own else TASKS["RTE"]
        gain = (0.04 + 0.02 * work.plan.seeds.index(score.run.seed)) * (score.run.model.objective == "mth")
        finish_sweep(work, score.job, task, 0.6 + gain, random)
    return work


def finish_pairs(work, measure, shares, random):
    """The files of tasks.minimal_pairs, in which a share of each paradigm's pairs is right."""
    folder = measure.job.output.parent
    folder.mkdir(parents=True)
    paradigms, lines, fields = {}, [], {}
    for (name, (field, number)), share in zip(PAIRS.items(), shares, strict=True):
        right = random.permutation(number) < round(share * number)
        paradigms[name] = {"accuracy": right.mean(), "pairs": number}
        fields.setdefault(field, []).append(right.mean())
        line = {"encoder": "e", "seed": None, "paradigm": name, "data": "d", "score": "pll", "load": "iter", "rows": 1}
        line |= {"seconds": 1.0, "identical": 0, "pieces_good": [2] * number, "pieces_bad": [2] * number}
        lines.append(line | {"good": [-1.0] * number, "bad": [-1.0 - 1.0 * r for r in right.tolist()]})
    average = np.mean([found["accuracy"] for found in paradigms.values()])
    encoder = {"load": "iter", "macro_average": average, "standard_error": 0.01, "paradigms": paradigms}
    encoder["fields"] = {name: np.mean(values) for name, values in fields.items()}
    plans.write_lines(folder / "scores.jsonl", lines)
    measure.job.output.write_text(json.dumps({"encoders": [encoder], "differences": []}))
    plans.record(work, measure.job)


def finish_sweep(work, job, task, share, random):
    """Two fine-tuning seeds on a task, and their predictions."""
    labels = np.arange(ROWS) % 2
    facts = {"task": task.name, "facts": task.facts, "metric": "accuracy", "dev_examples": ROWS, "score": share}
    plans.write_tuning(job, [facts | {"seed": seed} for seed in (1, 2)])
    for line in (job.output.parent / "runs.jsonl").read_text().splitlines():
        predictions = np.where(random.permutation(ROWS) < round(share * ROWS), labels, 1 - labels)
        scored = {"dev": (labels.astype(float), predictions.astype(float))}
        name = TuningRun.of_row(json.loads(line)).name
        write_predictions(job.output.parent / "predictions" / f"{name}.tsv", task, scored)
    plans.record(work, job)


def gain_of(work, measure):
    results = ExperimentValues(plans.experiment_of(work).finished_runs())
    mlm, mth = (model.arm() for model in work.plan.models)
    (gain,) = gains(results, [Claim("", measure, mth, mlm)])
    return gain


def test_every_measure_has_its_gain_both_intervals_tables_and_figures_and_another_model_may_be_the_baseline(
    work, with_scores, open_work
):
    for measure, difference in ((LOSS, 0.0), (MINIMAL_PAIRS, 0.1), ("order", 0.05), (GLUE, 0.05)):
        gain = gain_of(work, measure)
        assert gain.seeds.mean == pytest.approx(difference)
        assert gain.seeds.interval == pytest.approx(student_interval(gain.seeds.values))
        assert (gain.items is None) == (measure == LOSS)
    low, high = gain.items
    assert low < 0.05 < high  # two models that are right on different rows: √(2 · 0.24 / 200) ≈ 0.05, four runs
    assert 1.5 * 0.024 < (high - low) / 2 < 2.5 * 0.035
    row = make_row(work, work.runs[0])
    assert row["pairs"] == as_run(row).pairs == {name: number for name, (_, number) in PAIRS.items()}
    text = plans.write_page(work)
    (row,) = [line for line in text.splitlines() if line.startswith("| MTH is better than MLM") and "+10.00" in line]
    assert row.count(" to ") == 2 and "| 2 | exploratory |" in row
    assert "](figures/claims-minimal-pairs.png)" in text and "](figures/minimal-pairs.png)" in text
    assert "| BERT (MLM) | 6.5000 ± 0.0000 | 51.00 ± 1.41 |" in text and "order 9 and 200" in text
    found = json.loads((work.folder / "results.json").read_text())
    assert found.keys() == {"gains", "values", "onsets"}
    (gain,) = [one for one in found["gains"] if one["measure"] == MINIMAL_PAIRS]
    assert gain["mean"] == pytest.approx(0.1) and gain["over_items"][0] <= gain["mean"] <= gain["over_items"][1]
    tex = (work.folder / "tables" / "claims-minimal-pairs.tex").read_text()
    assert "MTH is better than MLM with BERT" in tex and r"\begin{tabular}" in tex
    assert (work.folder / "tables" / "scores.csv").is_file()
    (work.folder / "rows.jsonl").unlink()  # rows keep their baseline
    other = open_work(with_scores | {"baseline": "BERT (MTH)"})
    runs = plans.experiment_of(other).finished_runs()
    (gain,) = Page(runs, other.folder).gains["models-minimal-pairs"]
    assert gain.text == "BERT (MLM) over BERT (MTH)" and gain.seeds.mean == pytest.approx(-0.1)
    found = by_phenomenon([run for run in runs if run.arm.objective == "mlm"])  # means over the seeds
    assert found == pytest.approx({"all": 0.51, "morphology": 0.51, "syntax": 0.51}, abs=0.01)


def test_samples_stay_when_the_outputs_are_gone_and_damaged_ones_are_refused(work):
    before = gain_of(work, GLUE).items
    for score in plans.measures_of(work, "glue"):
        shutil.rmtree(score.job.output.parent)
    assert before and gain_of(work, GLUE).items == before
    for path in (work.folder / "items").iterdir():
        path.write_bytes(b"PK")
    refused(r"items/.*\.npz: damaged", gain_of, work, GLUE)
    shutil.rmtree(work.folder / "items")
    assert gain_of(work, GLUE).items is None


def test_every_finished_run_is_scored_once_and_older_jobs_keep_their_names(values, with_scores, open_work):
    work = open_work(with_scores | {"half_budget": ["BERT (MTH)"]})
    pairs, tuned = plans.measures_of(work, "minimal-pairs"), plans.measures_of(work, "finetune")
    assert [m.run for m in pairs] == [m.run for m in tuned] == work.runs and len(work.runs) == 6
    command = " ".join(pairs[0].job.command)
    assert f"--load {work.runs[0].folder / 'iter_0000040'} " in command and command.endswith(" --score pll")
    command = " ".join(tuned[0].job.command)
    assert "order.yaml --no-keep-models --load " in command and command.endswith(" --grid quick --epochs 2 3 --seeds 2")
    assert (tuned[0].job.work, pairs[0].job.work) == (10, 200)
    names = {job.name for job in plans.experiment_of(work).jobs()}
    del with_scores["minimal_pairs"], with_scores["tasks"]
    assert {job.name for job in plans.experiment_of(open_work(with_scores)).jobs()} < names


def test_a_task_whose_data_change_is_done_again(with_scores, open_work, tmp_path):
    before = {measure.job.name for measure in plans.measures_of(open_work(with_scores), "finetune")}
    (tmp_path / "valid.jsonl").write_text('{"text": "b a", "label": "shuffled"}\n')
    assert not before & {measure.job.name for measure in plans.measures_of(open_work(with_scores), "finetune")}
    (tmp_path / "valid.jsonl").unlink()
    refused(r"plan\.yaml: tasks: .*valid\.jsonl: No such file.*; give .* or --no-tasks", open_work, with_scores)


def test_space_looks_into_every_run_of_the_full_budget_and_one_job_times_all_models_of_the_first_seed(
    values, open_work
):
    """The page has a table of each once their jobs are done."""
    work = open_work(values | {"analyses": {"space": 10, "throughput": [16, 32]}, "seeds": 2})
    plans.finish_runs(work)
    text = plans.write_page(work)
    assert "row length" not in text and "Inside the models" not in text
    full = [run for run in work.runs if not run.half]
    spaces = plans.measures_of(work, "space")
    assert [measure.run for measure in spaces] == full
    command = spaces[0].job.command
    assert command[:5] == ("megatron-ddrp", "analyze", "space", "--load", str(full[0].folder))
    assert command[command.index("--sentences") + 1] == "10"
    [timer] = plans.measures_of(work, "throughput")
    timed = [run for run in full if run.seed == work.plan.seeds[0]]
    command = timer.job.command
    assert timer.job.needs == tuple(run.job.name for run in timed) and len(timed) == 2
    assert command[4 : command.index("--lengths")] == tuple(str(run.folder) for run in timed)
    assert command[command.index("--lengths") + 1 : command.index("--output")] == ("16", "32")
    order = [job.name for job in plans.experiment_of(work).jobs()]
    assert all(order.index(timer.job.name) > order.index(name) for name in timer.job.needs)
    for measure in spaces:
        layer = dict.fromkeys(SPACE.values(), work.plan.seeds.index(measure.run.seed) / 10) | {"isoscore": None}
        rows = [{"iteration": step, "layers": [{}, layer]} for step in measure.run.checkpoints]
        plans.finish_measure(work, measure, {"checkpoints": [*rows, {"iteration": 999, "layers": [{}]}]})
    encoders = []
    for number, run in enumerate(timed, 1):
        row = {"rows": 4, "tokens_per_second": 1000.0 * number, "lower_quartile": 900.0, "upper_quartile": 4100.0}
        lengths = [row | {"length": 16, "memory_bytes": 1000 * number * 2**20}]
        lengths += [row | {"length": 32, "memory_bytes": None}] * (number == 1)
        encoders.append({"checkpoint": str(run.folder / "iter_0000040"), "lengths": lengths})
    plans.finish_measure(work, timer, {"encoders": encoders})
    text = plans.write_page(work)
    assert "| BERT (MLM) | 0.0500 ± 0.0707 | 0.0500 ± 0.0707 | 0.1 ± 0.1 |" in text
    assert "| model | row length | tokens/s | quartiles | MiB |" in text
    assert "| BERT (MLM) | 16 | 1,000 | 900 to 4,100 | 1,000 |\n| BERT (MLM) | 32 | 1,000 | 900 to 4,100 |  |" in text
    assert "| BERT (MTH) | 16 | 2,000 | 900 to 4,100 | 2,000 |" in text
