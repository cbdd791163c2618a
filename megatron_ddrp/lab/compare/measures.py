"""Jobs that measure checkpoints, and the row that is made of their outputs.

The jobs are GLUE, minimal pairs, other tasks, and analyses by megatron-ddrp analyze. No other module knows what their
outputs look like.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.config import encoding_class, flag_words, load_config
from megatron_ddrp.data.batches.loader import read_blend
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json, read_json
from megatron_ddrp.lab.compare.plan import NUM_SEEDS, ComparisonPlan, Flags, TaskPlan
from megatron_ddrp.lab.compare.rows import Samples
from megatron_ddrp.lab.compare.runs import (
    CorpusFiles,
    Job,
    PlannedRun,
    all_runs,
    count_steps,
    fingerprint,
    job_name,
    open_corpus,
)
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.run.metrics import read_rows, stored_gap, stored_level
from megatron_ddrp.tasks.finetune.command import OWN_TASKS
from megatron_ddrp.tasks.finetune.runs import RUNS, Cell, Items, RunStore, best_cells
from megatron_ddrp.tasks.glue import GLUE as GLUE_SUITE
from megatron_ddrp.tasks.glue import averaged_tasks
from megatron_ddrp.tasks.jobs import Row, Store, digest
from megatron_ddrp.tasks.minimal_pairs.pairs import read_pairs
from megatron_ddrp.tasks.statistics import (
    DIRECTION,
    GLUE,
    HEAD_SIMILARITY,
    LOSS,
    MINIMAL_PAIRS,
    OTHER_LOSS,
    SPACE,
    STEP_SECONDS,
    TOKEN_SIMILARITY,
    TOKENS,
    TRAINING_LOSS,
    TRIANGLE,
)

ANALYSES = ("self-similarity", "triangle", "attention-maps", "space", "direction")
"""Kinds of analyses of single runs; the plan has the number of sentences of each."""


class Measure(NamedTuple):
    """Job that measures a checkpoint of a run."""

    run: PlannedRun
    step: int
    job: Job
    task: str = ""
    """Name of the plan's own task that it scores; empty for other measures."""


def all_measures(plan: ComparisonPlan, runs: list[PlannedRun], corpus: CorpusFiles, folder: Path) -> list[Measure]:
    """Return the measures of all runs: GLUE comes last, and that of earlier checkpoints at the end.

    Raises `UserError` for missing or unreadable data.
    """
    found = [*_minimal_pairs(plan, runs, folder / "minimal-pairs"), *_analyses(plan, runs, corpus, folder / "analyses")]
    found += _throughput(plan, runs, folder / "analyses")
    return [*found, *_own_tasks(plan, runs, folder / "tasks"), *_glue(plan, runs, folder / "glue")]


def _score(run: PlannedRun, step: int, job: Job, start: Sequence[str], flags: Sequence[str], task: str = "") -> Measure:
    """Return the measure by a command that scores a checkpoint of a run. The `job` lacks only its command and needs."""
    where = ("--load", str(run.checkpoint(step)), "--output-dir", str(job.output.parent))
    command = ("megatron-ddrp", job.kind, *start, *where, *flags, *run.plugin_words)
    return Measure(run, step, replace(job, command=command, needs=(run.job.name,)), task)


def _flag_facts(flags: Flags) -> list[object]:
    return [[name.replace("_", "-"), flag_words([(name, value)])[1:]] for name, value in flags]


def _glue(plan: ComparisonPlan, runs: list[PlannedRun], folder: Path) -> list[Measure]:
    """Return the GLUE jobs of every last checkpoint, then of the other checkpoints of `glue.checkpoints_of`."""
    glue = plan.glue
    if glue is None:
        return []
    data = [fingerprint(plan, "glue", f"{glue.data_dir}/{task}") for task in glue.tasks]
    curves = [run for run in runs if run.model.name in glue.checkpoints_of and not run.half]
    earlier = [(run, step) for run in curves for step in run.checkpoints if step != run.steps]
    found = []
    for run, step in [*((run, run.steps) for run in runs), *earlier]:
        # The folder does not depend on the tasks, so a task that is added to the plan later joins the others' runs.
        facts = [run.job.name, step, _flag_facts(glue.flags)]
        title = f"{run.job.title}, step {step:,}"
        output = folder / f"{run.folder.name}-{step}-{digest(facts)}" / "table.json"
        job = Job("glue", job_name("glue", title, [facts, glue.tasks, data]), title, (), output)
        start = ("--tasks", *glue.tasks, "--data-dir", glue.data_dir)
        found.append(_score(run, step, job, start, flag_words(glue.flags)))
    return found


def _minimal_pairs(plan: ComparisonPlan, runs: list[PlannedRun], folder: Path) -> list[Measure]:
    """Return the minimal-pair jobs of every last checkpoint. Raises `UserError` for unreadable pairs."""
    pairs = plan.minimal_pairs
    if pairs is None:
        return []
    try:
        paradigms = read_pairs(Path(pairs.data_dir), pairs.max_pairs)
        data, work = [[each.uid, each.digest] for each in paradigms], float(sum(map(len, paradigms)))
    except UserError as error:
        raise UserError(f"{plan.file}: minimal_pairs: {error}; or give --no-minimal-pairs", 2) from None
    # By default the command uses all cores; with several jobs at once it must not.
    flags = [*flag_words(pairs.flags), *(() if plan.workers == 1 else ("--workers", "1"))]
    found = []
    for run in runs:
        name = job_name("minimal-pairs", run.job.title, [run.job.name, run.steps, _flag_facts(pairs.flags), data])
        output = folder / name.removeprefix("minimal-pairs-") / "results.json"
        job = Job("minimal-pairs", name, run.job.title, (), output, work=work)
        found.append(_score(run, run.steps, job, ("--data-dir", pairs.data_dir), flags))
    return found


def _own_tasks(plan: ComparisonPlan, runs: list[PlannedRun], folder: Path) -> list[Measure]:
    """Return the jobs that score every last checkpoint on every task. Raises `UserError` for missing data."""
    facts = [(task, _task_facts(plan, task)) for task in plan.tasks]
    found = []
    for run, (task, data) in itertools.product(runs, facts):
        title = f"{task.name}, {run.job.title}"
        name = job_name("finetune", title, [run.job.name, run.steps, data])
        output = folder / name.removeprefix("finetune-") / "table.json"
        job = Job("finetune", name, title, (), output, work=float(task.epochs))
        start = ("--task-file", task.file, "--no-keep-models")
        found.append(_score(run, run.steps, job, start, flag_words(task.flags), task.name))
    return found


def _task_facts(plan: ComparisonPlan, task: TaskPlan) -> list[object]:
    """Return everything but the checkpoint that determines a score: the data, the task's settings and the flags."""
    data = [fingerprint(plan, "tasks", name) for name in task.data]
    others = ("train", "valid", "test", "test_groups", "pretraining_text")
    asked = {name: value for name, value in vars(task.task).items() if name not in others}
    return [data, asked, _flag_facts(task.flags), *task.task.test_facts()]


def _analyses(plan: ComparisonPlan, runs: list[PlannedRun], corpus: CorpusFiles, folder: Path) -> list[Measure]:
    """Return the analyses of the runs at the full budget; attention maps only for the first seed."""
    prefixes = read_blend(corpus.data_path, "corpus.data_path").prefixes
    first, found = _first_runs(plan, runs), []
    for run, kind in itertools.product([run for run in runs if not run.half], ANALYSES):
        sentences = getattr(plan.analyses, kind.replace("-", "_"))
        of_distances = encoding_class(run.model.encoding).is_relative
        if sentences and (kind != "triangle" or of_distances) and (kind != "attention-maps" or run in first):
            name = job_name(kind, run.job.title, [run.job.name, sentences])
            output = folder / f"{name}{'.png' if kind == 'attention-maps' else '.json'}"
            command = (
                *("megatron-ddrp", "analyze", kind, "--load", str(run.folder), "--data-path", *prefixes),
                *("--sentences", str(sentences), "--output", str(output)),
                *(("--random-init",) if kind == "direction" else ()),
                *run.plugin_words,
            )
            work = float(len(run.checkpoints)) if kind in ("self-similarity", "space") else 1.0
            found.append(
                Measure(run, run.steps, Job(kind, name, run.job.title, command, output, (run.job.name,), work))
            )
    return found


def _throughput(plan: ComparisonPlan, runs: list[PlannedRun], folder: Path) -> list[Measure]:
    """Return one job that times all models of the first seed together; its `run` is the last of their runs."""
    lengths, timed = plan.analyses.throughput, _first_runs(plan, runs)
    if not lengths or not timed:
        return []
    needs = tuple(run.job.name for run in timed)
    title = f"{len(timed)} models, seed {plan.seeds[0]}"
    name = job_name("throughput", title, [needs, lengths])
    output = folder / f"{name}.json"
    command = (
        *("megatron-ddrp", "analyze", "throughput", "--load", *(str(run.folder) for run in timed)),
        *("--lengths", *map(str, lengths), "--output", str(output)),
        *dict.fromkeys(word for run in timed for word in run.plugin_words),
    )
    job = Job("throughput", name, title, command, output, needs, float(len(timed)))
    return [Measure(timed[-1], timed[-1].steps, job)]


def _first_runs(plan: ComparisonPlan, runs: list[PlannedRun]) -> list[PlannedRun]:
    """Return the runs of the plan's models with the first seed at the full budget."""
    return [run for run in runs if run.seed == plan.seeds[0] and run.model in plan.models and not run.half]


class PlanJobs:
    """Jobs of a plan in an output folder."""

    def __init__(self, plan: ComparisonPlan, folder: Path, store: Store):
        """Plan all jobs. Raises `UserError` for missing inputs and for flags that pre-training would refuse."""
        self.plan, self.folder, self.store = plan, folder, store
        self.corpus = open_corpus(plan, folder)
        self.steps = {model.name: count_steps(plan, model) for model in plan.models}
        """Model's name → steps of the full budget."""
        self.runs = all_runs(plan, self.corpus, folder, self.steps)
        self.measures = all_measures(plan, self.runs, self.corpus, folder)

    def jobs_of(self, run: PlannedRun) -> list[Job]:
        """Return a run's job and those that measure its checkpoints, the last one first."""
        return [run.job, *(measure.job for measure in self.measures if measure.run == run)]

    def summary(self) -> str:
        """Return the numbers of models and seeds, and the budget, in words."""
        models, seeds = len(self.plan.models), self.plan.seeds
        few = f" (fewer than {NUM_SEEDS}: too few for a reliable spread)" if len(seeds) < NUM_SEEDS else ""
        counts = f"{models} model{'s' * (models > 1)} x {len(seeds)} seed{'s' * (len(seeds) > 1)}"
        return f"{counts} ({', '.join(map(str, seeds))}){few}, {self.plan.budget} each"


DIGITS = 5
"""Decimal places of curves."""
WARM_UP = 0.1
"""Share of a run's first steps whose times are left out, because memory, caches and compilers warm up."""


VALIDATED = {LOSS: "valid_lm_loss", OTHER_LOSS: "other_lm_loss"}
"""Loss → its key in metrics.jsonl."""


class Recording:
    """Results of the finished jobs of a run."""

    def __init__(self, work: PlanJobs, run: PlannedRun):
        """Read the metrics of the run itself; `READERS` add what its other jobs have measured."""
        self.work, self.run = work, run
        self.values: dict[str, float | None] = {}
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.more: Row = {}
        rows = read_rows(run.folder)
        self._consumed = {0: 0} | {row["iteration"]: row["consumed_tokens"] for row in rows if "consumed_tokens" in row}
        self.tokens = max(self._consumed.values())
        times = [row["step_time"] for row in rows if row["iteration"] > WARM_UP * run.steps and "step_time" in row]
        for row in rows:
            self.values |= {name: row[key] for name, key in VALIDATED.items() if key in row}
        self.values |= {STEP_SECONDS: statistics.median(times)} if times else {}
        self.values[TOKENS] = float(self.tokens)
        for name, key in ((TRAINING_LOSS, "lm_loss"), *VALIDATED.items()):
            self.add_curve(name, [(row["iteration"], row[key]) for row in rows if row.get(key)])

    def add_curve(self, measure: str, by_step: Sequence[tuple[float, float]]) -> None:
        """Add a curve, converted from steps to tokens."""
        self.curves[measure] = [(self.tokens_at(step), round(value, DIGITS)) for step, value in by_step]

    def tokens_at(self, step: float) -> int:
        """Return the tokens consumed up to a step; between two logged ones, each step counts the same."""
        steps = sorted(self._consumed)
        return round(np.interp(step, steps, [self._consumed[one] for one in steps]))


def make_row(work: PlanJobs, run: PlannedRun) -> Row:
    """Return the row of a finished run with the results of those of its jobs that are finished."""
    plan = work.plan
    config = load_config(run.folder)  # unlike the plan's, it has the size of the vocabulary
    parameters, _ = count_parameters(on_meta_device(config.model, config.objective))
    finished = {row["job"]: row for row in work.store}
    course = finished[run.job.name]
    threads = config.training.num_threads or (plan.launcher == "python" and course.get("threads"))
    measures = [one for one in work.measures if one.run == run and one.job.name in finished]
    found = Recording(work, run)
    for measure in measures:
        READERS[measure.job.kind](found, measure)
    jobs = [run.job.name, *(measure.job.name for measure in measures)]
    row = found.more | {
        "run": run.job.name,
        "jobs": jobs,
        "model": run.model.name,
        "half": run.half,
        "encoding": run.model.encoding,
        "objective": run.model.objective,
        "generates": run.config.objective.generates,
        "validated": run.config.logging.eval_iters * run.config.training.global_batch_size,
        "flags": dict(run.model.flags),
        "baseline": plan.baseline or plan.models[0].name,
        "check": plan.check,
        "seed": run.seed,
        "budget": str(plan.budget),
        "planned_tokens": planned_tokens(work, run),
        "steps": run.steps,
        "parameters": parameters,
        "common": dict(plan.flags),
        "hardware": course["hardware"] + (f", {threads} thread{'s' * (str(threads) != '1')}" if threads else ""),
        "versions": course["versions"],
        "workers": course["workers"],
        "seconds": sum(finished[name]["seconds"] for name in jobs),
        "tokens": found.tokens,
        "unigram_loss": stored_level(run.folder) or 0.0,
        **({} if (gap := stored_gap(run.folder)) is None else {"validation_gap": gap}),
        "values": {
            name: None if value is None or not np.isfinite(value) else value for name, value in found.values.items()
        },
        "curves": {name: points for name, points in found.curves.items() if points},
    }
    return parse_json(json.dumps(row))  # type: ignore[no-any-return]  # as rows are that were stored


def draw_samples(work: PlanJobs, run: PlannedRun) -> Samples:
    """Return the values on bootstrap samples of a run's test items, as far as outputs of jobs are there."""
    found: dict[str, np.ndarray | None] = {}
    for measure in (one for one in work.measures if one.run == run and one.job.kind in ("glue", "finetune")):
        if measure.job.name in work.store and measure.job.output.parent.is_dir():
            items = Items(GLUE_SUITE if measure.job.kind == "glue" else OWN_TASKS)
            found |= {name: items.samples(cell) for name, cell in _cells(work, measure)}
    return {name: samples for name, samples in found.items() if samples is not None}


def planned_tokens(work: PlanJobs, run: PlannedRun) -> int:
    """Return the tokens of the budget; of steps it is steps x batch x sequence length."""
    of_steps = work.steps[run.model.name] * run.config.training.global_batch_size * run.config.mean_seq_length
    return work.plan.budget.tokens or round(of_steps)


def _json(measure: Measure) -> Any:
    return read_json(measure.job.output)


def _planned(found: Recording, measure: Measure) -> list[dict[str, Any]]:
    """Return an analysis's rows of the planned checkpoints. A run that was stopped has one more than other seeds."""
    return [row for row in _json(measure)["checkpoints"] if row["iteration"] in found.run.checkpoints]


def _similarity(found: Recording, measure: Measure) -> None:
    rows = _planned(found, measure)
    for name, key in ((TOKEN_SIMILARITY, "token_similarity"), (HEAD_SIMILARITY, "head_similarity")):
        found.add_curve(name, [(row["iteration"], row[key]) for row in rows])
        found.values[name] = float(rows[-1][key])


def _space(found: Recording, measure: Measure) -> None:
    last_layer = _planned(found, measure)[-1]["layers"][-1]  # earlier versions had fewer keys
    found.values |= {measure: last_layer[key] for measure, key in SPACE.items() if last_layer.get(key) is not None}


def _direction(found: Recording, measure: Measure) -> None:
    models = _json(measure)["models"]
    values = {measure: models[place][key] for measure, (place, key) in DIRECTION.items()}
    found.values |= {measure: value for measure, value in values.items() if value is not None}


def _triangle(found: Recording, measure: Measure) -> None:
    found.values[TRIANGLE] = _json(measure)["models"][0]["share"]


def _maps(found: Recording, measure: Measure) -> None:
    found.more["maps"] = str(measure.job.output.relative_to(found.work.folder))


def _timed_rows(found: Recording, measure: Measure) -> None:
    """Keep the results of all models that were timed together."""
    labels = {run.folder.name: run.arm.label for run in found.work.runs}
    found.more["throughput"] = {
        labels[Path(encoder["checkpoint"]).parent.name]: encoder["lengths"] for encoder in _json(measure)["encoders"]
    }


def _pairs(found: Recording, measure: Measure) -> None:
    (encoder,) = _json(measure)["encoders"]
    found.values[MINIMAL_PAIRS] = encoder["macro_average"]
    paradigms = {name: one["accuracy"] for name, one in encoder["paradigms"].items()}
    counts = {name: one["pairs"] for name, one in encoder["paradigms"].items()}
    same = max(counts.values(), default=0) if len(set(counts.values())) < 2 else counts
    found.more |= {"paradigms": paradigms, "pairs": same}
    found.more["fields"] = (encoder["fields"] or paradigms) | {"all": encoder["macro_average"]}


def _scores(found: Recording, measure: Measure) -> None:
    cells = dict(_cells(found.work, measure))
    is_last = measure.step == found.run.steps
    if measure.job.kind == "glue" and (averaged := averaged_tasks([{task: one.median for task, one in cells.items()}])):
        average = statistics.fmean(cells[task].median for task in averaged)
        point = (found.tokens_at(measure.step), round(average, DIGITS))
        found.curves[GLUE] = sorted([*found.curves.get(GLUE, []), point])
        found.values |= {GLUE: average} if is_last else {}
    for task, cell in cells.items() if is_last else ():
        found.values[task] = cell.median
        sizes = {key: cell.rows[0][key] for key in ("train_examples", "dev_examples")}
        found.more.setdefault("tasks", {})[task] = sizes | {"undefined": cell.undefined}


def _cells(work: PlanJobs, measure: Measure) -> Iterator[tuple[str, Cell]]:
    """Yield the task and the best grid point of a fine-tuning job."""
    folder = measure.job.output.parent
    rows = [row | {"folder": str(folder)} for row in RunStore(folder / RUNS)]
    if work.plan.glue and not measure.task:
        rows = [row for row in rows if row["task"] in work.plan.glue.tasks]
    for cells in best_cells(rows).values():  # one encoder per folder
        for task, cell in cells.items():
            yield measure.task or task, cell


READERS: dict[str, Callable[[Recording, Measure], None]] = {
    "self-similarity": _similarity,
    "space": _space,
    "direction": _direction,
    "triangle": _triangle,
    "attention-maps": _maps,
    "throughput": _timed_rows,
    "minimal-pairs": _pairs,
    "glue": _scores,
    "finetune": _scores,
}
"""Kind of job → function that adds what its output says."""
