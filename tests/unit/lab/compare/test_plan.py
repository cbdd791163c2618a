"""Plans: every mistake is one line with file, key and what is allowed; jobs, gains and tables of measures."""

import copy
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_ddrp.arguments import parse_arguments as parse_pretraining
from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.config.registry import PLUGINS
from megatron_ddrp.lab.compare.command import parse_arguments
from megatron_ddrp.lab.compare.measures import make_row
from megatron_ddrp.lab.compare.plan import read_plans
from megatron_ddrp.lab.compare.rows import as_run
from megatron_ddrp.lab.compare.tables import Claim, ExperimentValues, gains
from megatron_ddrp.tasks.finetune.runs import TuningRun, write_predictions
from megatron_ddrp.tasks.finetune.table_files import Task
from megatron_ddrp.tasks.glue import TASKS
from megatron_ddrp.tasks.statistics import GLUE, LOSS, MINIMAL_PAIRS, SPACE, student_interval
from tests.refusals import refused, wrong_arguments
from tests.unit.lab.compare import conftest as plans

ROOT = Path(__file__).resolve().parents[4]


def test_a_mistake_is_one_line_with_file_key_and_what_is_allowed_before_anything_runs(values, write, open_work):
    both = {"data_path": ["a"], "vocab_file": "v", "other": ["b"], "other_data_path": ["c"]}
    for path, value, expected in (
        ("modles", [], "unknown setting 'modles'; did you mean models?"),
        ("models", [], "models: got [], expected at least one value"),
        ("models.0.encoding", "rotary", "models[1].encoding: got 'rotary', expected one of absolute, bert-r"),
        ("models.0.objective", "clm", "models[1].objective: got 'clm', expected one of mlm, mth, electra"),
        ("models.1.name", "BERT (MLM)", "models[2].name: 'BERT (MLM)' names two models"),
        ("models.1.objective", "mlm", "models[2]: 'BERT (MTH)' is the same as a model before it"),
        ("models.0.flags", {"hcd-wieght": 0}, "models[1].flags: unknown setting 'hcd-wieght'; did you mean hcd-weight"),
        ("seeds", 0, "seeds: got 0: it must be at least 1"),
        ("seeds", [1, 1], "seeds: got [1, 1], expected values that differ"),
        ("seeds", [[1] * 999], "seeds: got [1, 1, 1, 1, 1, 1, ...], expected a whole number"),
        ("budget", {}, "budget: expected either steps or tokens"),
        ("budget", {"steps": 5, "tokens": 9}, "budget: expected either steps or tokens"),
        ("corpus.input", ["a.txt"], "corpus: expected either input (texts) or data_path"),
        ("corpus.vocab_file", None, "corpus: vocab_file is missing"),
        ("corpus.shuffle", True, "corpus: shuffle needs input (texts); shuffle datasets by megatron-ddrp dataset shuf"),
        ("corpus", both, "corpus: expected other (texts) or other_data_path (prefixes of indexed datasets), not both"),
        ("corpus.tokenizer_type", "BPE", "corpus.tokenizer_type: got 'BPE', expected one of BertWordPieceLowerCase"),
        ("training", {"seed": 1}, "training.seed: not allowed here: seeds determines it"),
        ("half_budget", ["DDRP"], "half_budget: got 'DDRP', expected one of BERT (MLM), BERT (MTH)"),
        ("glue", {"tasks": ["RTE"]}, "glue.data_dir: missing"),
        ("glue", {"data_dir": "g", "tasks": ["SQuAD"]}, "glue.tasks: got 'SQuAD', expected one of RTE"),
        ("analyses", {"probing": 1}, "analyses: unknown setting 'probing'; allowed are self_similarity, triangle"),
        ("expected", {"step_seconds": 1}, "unknown setting 'expected'; the key is gone, leave it out: the time left"),
        ("check", "rate", "check: only for an entry of rungs"),
        ("minimal_pairs", {"data_dir": "d", "score": "sum"}, "minimal_pairs.score: got 'sum', expected one of"),
        ("tasks", [{"file": "a.yaml", "epoch": 1}], "tasks[1]: unknown setting 'epoch'; did you mean epochs?"),
        ("tasks", [{"file": "no/such.yaml"}], "tasks[1]: no/such.yaml: no such file; expected YAML with keys such as"),
        ("baseline", "GPT", "baseline: got 'GPT', expected one of BERT (MLM), BERT (MTH)"),
    ):
        *outer, last = path.split(".")
        wrong = inner = copy.deepcopy(values)
        for key in outer:
            inner = inner[int(key) if key.isdecimal() else key]
        inner[last] = value
        file = write(wrong)
        wrong_arguments("^" + re.escape(f"{file}: {expected}"), plans.read_plan, file)
    file = write(values | {"workers": 2, "launcher": "deepspeed --num_gpus 2"})
    refused("workers: 2 with a launcher that starts several ranks: expected 1", plans.read_plan, file)
    no_file = "No such file or directory; give --"
    of_texts = {"input": ["no.jsonl"], "data_path": [], "vocab_file": None, "vocab_size": 500}
    no_pairs = r"plan\.yaml: minimal_pairs: .*no such folder; expected a folder of \.jsonl files.*--no-minimal-pairs"
    for section, flags, expected in (
        ("model", {"hidden-size": 15}, r"plan\.yaml: BERT \(MLM\): .*--hidden-size"),
        ("training", {"bf16": True, "fp16": True}, r"plan\.yaml: BERT \(MLM\): .*--bf16 and --fp16"),
        ("corpus", of_texts, rf"corpus\.input: .*no\.jsonl: {no_file}input"),
        ("corpus", {"other": ["no.jsonl"]}, rf"corpus\.other: no\.jsonl: {no_file}other FILE"),
        ("corpus", {"other_data_path": ["no"]}, r"corpus\.other_data_path: no\.bin: No such file.*--other-data-path"),
        ("minimal_pairs", {"data_dir": "nowhere"}, no_pairs),
    ):
        wrong_arguments(expected, open_work, values | {section: values.get(section, {}) | flags})


def test_a_shuffled_corpus_is_another_one_made_from_the_same_texts(values, open_work, tiny_corpus):
    values["corpus"] = {"input": [str(tiny_corpus.text_file)], "vocab_size": 500}
    plain = open_work(values | {"corpus": values["corpus"] | {"shuffle": False}}).corpus
    work = open_work(values)
    assert work.corpus == open_work(values | {"corpus": values["corpus"] | {"shuffle": True}}).corpus
    vocabulary, dataset, shuffled = work.corpus.jobs
    assert work.corpus.key != plain.key and len(plain.jobs) == 2
    made = str(dataset.output).removesuffix(".idx")
    assert work.corpus.data_path == (str(shuffled.output).removesuffix(".idx"),) != (made,)
    assert shuffled.needs == (dataset.name,) and dataset.needs == (vocabulary.name,)
    command = ("megatron-ddrp", "dataset", "shuffle", made, "--output-prefix", *work.corpus.data_path)
    assert shuffled.command[:6] == command
    assert set(work.runs[0].job.needs) == {vocabulary.name, dataset.name, shuffled.name}


def test_every_run_is_evaluated_on_the_other_text_whose_content_is_in_its_name(values, open_work, tmp_path):
    def runs(**corpus):
        work = open_work(values | {"corpus": values["corpus"] | corpus})
        return work, [run.job.name for run in work.runs]

    work, alone = runs()
    assert not any("--other-data-path" in run.job.command for run in work.runs) and not work.corpus.jobs
    for name, text in (("one.txt", "a b"), ("moved.txt", "a b"), ("another.txt", "b a")):
        (tmp_path / name).write_text(text)
    work, named = runs(other=[str(tmp_path / "one.txt")])
    (dataset,) = work.corpus.jobs
    assert dataset.command[3] == str(tmp_path / "one.txt") and work.corpus.vocab_file in dataset.command
    made = str(dataset.output).removesuffix(".idx")
    for run in work.runs:
        assert run.config.data.other_data_path == (made,) and run.job.needs == (dataset.name,)
        assert run.job.command[run.job.command.index("--other-data-path") + 1] == made
    assert named == runs(other=[str(tmp_path / "moved.txt")])[1] != alone
    assert named != runs(other=[str(tmp_path / "another.txt")])[1]
    datasets = values["corpus"]["data_path"]
    work, names = runs(other_data_path=datasets)
    assert [run.config.data.other_data_path for run in work.runs] == [tuple(datasets)] * len(names) and names != alone


def test_grown_plans_keep_names_of_runs_and_a_number_is_a_prefix(values, open_work, tiny_corpus, tmp_path, monkeypatch):
    key = open_work(values).corpus.key
    for end in (".bin", ".idx"):
        (tmp_path / f"2024{end}").write_bytes(Path(f"{tiny_corpus.prefix}{end}").read_bytes())
    monkeypatch.chdir(tmp_path)
    work = open_work(values | {"corpus": values["corpus"] | {"data_path": ["2024"]}})
    assert work.corpus.key == key  # of the same bytes
    assert all(" --data-path 2024 --sentences" in " ".join(measure.job.command) for measure in work.measures)
    before = {run.job.name for run in open_work(values).runs}
    values["models"].append({"name": "DDRP (MTH)", "encoding": "ddrp", "objective": "mth"})
    values |= {"seeds": 4, "analyses": {"triangle": 5}, "workers": 2}
    after = {run.job.name for run in open_work(values).runs}
    assert before < after
    values["training"]["lr"] = 2e-3
    assert not before & {run.job.name for run in open_work(values).runs}


def test_the_command_line_replaces_values(values, write, tmp_path):
    def read(changes, *words):
        options = parse_arguments(["plan.yaml", "--output-dir", str(tmp_path), *words])
        return plans.read_plan(write(values | changes), options.given)

    plan = read({}, "--input", "a.jsonl", "--workers", "3", "--other", "b")
    assert plan.corpus.other == ("b",) and plan.corpus.shuffle
    assert plan.corpus.input == ("a.jsonl",) and plan.corpus.data_path == () and plan.workers == 3
    of_texts = {"corpus": {"input": ["a.jsonl"], "vocab_size": 500, "shuffle": True}}
    words = ("--data-path", "made", "--vocab-file", "vocab.txt", "--other-data-path", "b")
    corpus = read(of_texts, *words).corpus
    assert (corpus.other_data_path, corpus.data_path) == (("b",), ("made",))
    assert not (corpus.input or corpus.vocab_size or corpus.shuffle)
    corpus = read(of_texts, "--vocab-file", "vocab.txt").corpus
    assert (corpus.input, corpus.vocab_file, corpus.vocab_size) == (("a.jsonl",), "vocab.txt", None)
    with_dashes = {"corpus": {"data-path": ["made"], "vocab-file": "v", "other-data-path": ["b"]}}
    corpus = read(with_dashes, "--input", "x", "--other", "o").corpus
    assert (corpus.input, corpus.data_path, corpus.vocab_file) == (("x",), (), "v")
    assert (corpus.other, corpus.other_data_path) == (("o",), ())
    for changes in ({}, {"glue": {"data_dir": "nowhere", "tasks": ["RTE"]}}):
        assert read(changes, "--no-glue").glue is None
    assert read({}, "--minimal-pairs-dir", "blimp").minimal_pairs.data_dir == "blimp"
    measured = {"minimal-pairs": {"data_dir": "d"}, "tasks": [{"file": "no/such.yaml"}]}
    plan = read(measured, "--no-minimal-pairs", "--no-tasks")
    assert plan.minimal_pairs is None and plan.tasks == ()
    assert read(measured, "--minimal-pairs-dir", "e", "--no-tasks").minimal_pairs.data_dir == "e"


def test_flags_are_typed_null_is_the_default_and_a_models_warm_up_in_steps_replaces_the_plans_share(values, open_work):
    values["training"] |= {"lr": "1e-3", "bf16": False, "clip-grad": None, "weight_decay": 0.1}
    values["training"]["lr-warmup-fraction"] = 0.1
    values["model"]["ffn-hidden-size"] = None
    values["models"][1]["flags"] = {"lr-warmup-iters": 3}
    first, second = open_work(values).runs[:2]
    words = " ".join(first.job.command)
    assert " --lr 0.001 " in words and " --no-bf16 " in words and " --weight-decay 0.1 " in words
    assert "--ffn-hidden-size" not in words and "--clip-grad" not in words and first.config.model.ffn_size == 64
    assert "--lr-warmup-fraction" in words and "--lr-warmup-fraction" not in second.job.command
    assert parse_pretraining(second.job.command[2:]).config.optimizer.lr_warmup_iters == 3


def test_budgets_become_steps_half_of_one_half_the_steps_and_one_seed_one_data_order_over_the_models(values, open_work):
    runs = open_work(values).runs
    assert [r.steps for r in runs if r.half] == [20] * 3 and {r.steps for r in runs if not r.half} == {40}
    assert {r.model.name for r in runs if r.half} == {"BERT (MTH)"}
    for run in runs:
        assert run.config.training.seed == run.seed
        assert run.config.data == runs[0].config.data
    for budget, training, flags, steps in (
        ({"steps": 40}, {}, {}, 40),
        ({"tokens": 12_800}, {}, {}, 100),  # a step holds 4 x 32 tokens
        ({"tokens": 12_800}, {"seq-length-phases": ["16:0.5"]}, {}, 133),  # 4 x 24 tokens on average
        ({"tokens": 12_800}, {}, {"attention-init": "offsets"}, 100),  # refused with the default encoding
    ):
        first, second = values["models"]
        assert first["encoding"] == "absolute"
        own = {"models": [first | {"flags": flags}, second], "training": values["training"] | training}
        assert set(open_work(values | own | {"budget": budget}).steps.values()) == {steps}


def test_the_ready_plans_say_what_they_need_and_the_papers_has_its_grid_of_weights():
    for file in (ROOT / "examples" / "compare").glob("*.yaml"):
        head = file.read_text(encoding="utf-8").split("models:")[0]
        assert all(f"#   {word}" in head for word in ("hardware", "time", "result")), file
    _, grid = read_plans(ROOT / "examples" / "compare" / "paper.yaml")
    weights = {(1.0, 0.01)} | {tuple(float(value) for _, value in model.flags) for model in grid.models}
    assert weights == {(tcd, hcd) for tcd in (0.01, 0.1, 1) for hcd in (0.01, 0.1, 1)} and len(grid.seeds) == 1


PLUGIN = """
from megatron_ddrp.model.positions import PositionEncoding

class Near(PositionEncoding):
    is_relative = True

ENCODINGS = {"near-of-a-plan": Near}
"""


def test_models_of_a_plug_in_take_it_to_every_command_and_change_with_it(values, write, tmp_path, open_work):
    file = tmp_path / "near.py"
    values["models"][1] |= {"encoding": "near-of-a-plan"}
    for plugins, words in (
        ({}, r"models\[2\]\.encoding: got 'near-of-a-plan', expected one of absolute"),
        ({"plugins": [str(file)]}, r"plan\.yaml: plugins: --plugin .*near\.py: cannot be read"),
    ):
        refused(words, plans.read_plan, write(values | plugins))
    values["plugins"] = str(file)  # one file needs no brackets
    file.write_text(PLUGIN)
    try:
        work = open_work(values)
        for run in work.runs:
            for job in work.jobs_of(run):
                assert job.command[-2:] == ("--plugin", str(file)), job
        names = [run.job.name for run in work.runs]
        file.write_text(PLUGIN + "# other code\n")
        assert not {run.job.name for run in open_work(values).runs} & set(names)  # it may bring more than an encoding
    finally:
        PLUGINS.pop(ENCODINGS.pop("near-of-a-plan"))


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
        finish_pairs(work, measure, [0.5 + 0.02 * seed + gain for gain in gains])
    for score in plans.measures_of(work, "glue", "finetune"):
        is_own = score.job.kind == "finetune"
        task = Task("order", "accuracy", labels=("in order", "shuffled")) if is_own else TASKS["RTE"]
        gain = (0.04 + 0.02 * work.plan.seeds.index(score.run.seed)) * (score.run.model.objective == "mth")
        finish_sweep(work, score.job, task, 0.6 + gain, random)
    return work


def finish_pairs(work, measure, shares):
    """The file of tasks.minimal_pairs, in which a share of each paradigm's pairs is right."""
    paradigms, fields = {}, {}
    for (name, (field, number)), share in zip(PAIRS.items(), shares, strict=True):
        accuracy = round(share * number) / number
        paradigms[name] = {"accuracy": accuracy, "pairs": number}
        fields.setdefault(field, []).append(accuracy)
    average = np.mean([found["accuracy"] for found in paradigms.values()])
    encoder = {"macro_average": average, "paradigms": paradigms}
    encoder["fields"] = {name: np.mean(values) for name, values in fields.items()}
    plans.finish_measure(work, measure, {"encoders": [encoder]})


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


def test_every_measure_has_its_gain_and_intervals_and_another_model_may_be_the_baseline(work, with_scores, open_work):
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
    accuracies = {"mlm": [], "mth": []}
    for measure in plans.measures_of(work, "minimal-pairs"):
        found = json.loads(measure.job.output.read_text())["encoders"][0]["paradigms"]
        accuracies[measure.run.model.objective].append([found[name]["accuracy"] for name in sorted(PAIRS)])
    means = np.mean(np.subtract(accuracies["mth"], accuracies["mlm"]), axis=0)
    assert gain_of(work, MINIMAL_PAIRS).items == pytest.approx(student_interval(means.tolist()))
    page = plans.page_of_work(work)
    text, (gain,) = page.text({}, [], {}), [one for one in page.numbers()["gains"] if one["measure"] == MINIMAL_PAIRS]
    (row,) = [line for line in text.splitlines() if line.startswith("| MTH is better than MLM") and "+10.00" in line]
    assert row.count(" to ") == 2 and "| 2 | exploratory |" in row
    assert "| BERT (MLM) | 6.5000 ± 0.0000 | 51.00 ± 1.41 |" in text and "order 9 and 200" in text
    assert gain["mean"] == pytest.approx(0.1) and gain["over_items"][0] <= gain["mean"] <= gain["over_items"][1]
    (work.folder / "rows.jsonl").unlink()  # rows keep their baseline
    other = open_work(with_scores | {"baseline": "BERT (MTH)"})
    (gain,) = plans.page_of_work(other).gains["models-minimal-pairs"]
    assert gain.text == "BERT (MLM) over BERT (MTH)" and gain.seeds.mean == pytest.approx(-0.1)


def test_missing_predictions_leave_the_interval_over_items_out(work):
    next((plans.measures_of(work, "glue")[-1].job.output.parent / "predictions").iterdir()).unlink()
    gain = gain_of(work, GLUE)
    assert gain.items is None and gain.seeds.mean == pytest.approx(0.05)


def test_samples_stay_when_the_outputs_are_gone(work):
    before = gain_of(work, GLUE).items
    for score in plans.measures_of(work, "glue"):
        shutil.rmtree(score.job.output.parent)
    assert before and gain_of(work, GLUE).items == before
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


def test_missing_data_of_a_task_are_refused(with_scores, open_work, tmp_path):
    (tmp_path / "valid.jsonl").unlink()
    refused(r"plan\.yaml: tasks: .*valid\.jsonl: No such file.*; give .* or --no-tasks", open_work, with_scores)


def test_space_looks_into_every_run_of_the_full_budget_and_one_job_times_all_models_of_one_seed(values, open_work):
    """The page has a table of each once their jobs are done."""
    work = open_work(values | {"analyses": {"space": 10, "throughput": [16, 32]}, "seeds": 2})
    plans.finish_runs(work)
    text = plans.page_of_work(work).text({}, [], {})
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
    text = plans.page_of_work(work).text({}, [], {})
    assert "| BERT (MLM) | 0.0500 ± 0.0707 | 0.0500 ± 0.0707 | 0.1 ± 0.1 |" in text
    assert "| model | row length | tokens/s | quartiles | MiB |" in text
    assert "| BERT (MLM) | 16 | 1,000 | 900 to 4,100 | 1,000 |\n| BERT (MLM) | 32 | 1,000 | 900 to 4,100 |  |" in text
    assert "| BERT (MTH) | 16 | 2,000 | 900 to 4,100 | 2,000 |" in text
