"""Jobs and training runs of a comparison, and the data of the runs."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatron_ddrp.checkpoint import tag
from megatron_ddrp.config import Config, concerns, flag_words
from megatron_ddrp.config.registry import code_sum
from megatron_ddrp.config.run import under_flags
from megatron_ddrp.data.batches.loader import read_blend
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.plan import ComparisonPlan, CorpusPlan, Model, make_config
from megatron_ddrp.lab.compare.rows import EVAL_ITERS, Arm
from megatron_ddrp.tasks.jobs import Store, digest

RUN = "course"
"""Kind of a training run in names of jobs and folders, kept from the first version; `kind_name` shows "run"."""


@dataclass(frozen=True)
class Job:
    """One command and its output."""

    kind: str
    """Kind of the job."""
    name: str
    title: str
    command: tuple[str, ...]
    """Command line as typed."""
    output: Path
    """File or folder that the command makes."""
    needs: tuple[str, ...] = ()
    """Names of the jobs that must finish first."""
    work: float = 1.0
    """Size relative to other jobs of its kind."""

    def __str__(self) -> str:
        return f"{kind_name(self.kind)} {self.title}"


def kind_name(kind: str) -> str:
    """Return the name of a kind on the page and in printed lines."""
    return "run" if kind == RUN else kind


def log_file(folder: Path, job: Job) -> Path:
    """Return the log file of a job."""
    return folder / "logs" / f"{job.name}.log"


def job_name(kind: str, title: str, facts: Any) -> str:
    """Return a file name that differs between jobs with different `facts`.

    The name ends in a digest of the facts, which are everything that determines the job's result.
    """
    short = re.sub(r"[^a-z0-9.]+", "-", title.lower().replace("α", "a")).strip("-")
    return f"{kind}-{short}-{digest(facts)}"


def open_store(folder: Path) -> Store:
    """Open the finished jobs of an output folder."""
    return Store(folder / "jobs.jsonl", lambda row: row["job"], "a job finished by megatron-ddrp compare")


_END = 1 << 20
"""Number of bytes at each end of a file that enter its fingerprint."""


@dataclass(frozen=True)
class CorpusFiles:
    """Data files of a training command."""

    data_path: tuple[str, ...]
    vocab_file: str
    tokenizer_type: str
    key: str
    """Hash that changes with the data."""
    jobs: tuple[Job, ...]
    """Jobs that build the files; none for existing datasets."""
    other_data_path: tuple[str, ...] = ()
    """Datasets of `--other-data-path`; none without text of another kind."""


def open_corpus(plan: ComparisonPlan, folder: Path) -> CorpusFiles:
    """Return the files of a plan's corpus. Raises `UserError` for a missing input.

    A corpus is existing indexed datasets, or the jobs that build one from texts.
    """
    corpus, jobs = plan.corpus, list[Job]()
    vocabulary = fingerprint(plan, "vocab_file", corpus.vocab_file) if corpus.vocab_file else corpus.vocab_size
    facts: list[Any] = [vocabulary, *_dataset_facts(plan, "data_path")]
    if corpus.input:
        inputs = [fingerprint(plan, "input", name) for name in corpus.input]
        facts = [inputs, vocabulary, corpus.tokenizer_type, *(["shuffled"] * bool(corpus.shuffle))]
    if other := [fingerprint(plan, "other", name) for name in corpus.other] + _dataset_facts(plan, "other_data_path"):
        facts += ["other", other]
    key = digest(facts)
    folder = folder / "corpus" / key
    vocab_file = corpus.vocab_file or str(folder / "vocab.txt")
    if corpus.vocab_size:
        case = ("--cased",) if corpus.tokenizer_type == "BertWordPieceCase" else ()
        command = (
            *("megatron-ddrp", "train-tokenizer", "--input", *corpus.input),
            *("--vocab-size", str(corpus.vocab_size), "--output", vocab_file, "--overwrite", *case),
        )
        title = f"vocabulary of {corpus.vocab_size:,} pieces"
        jobs.append(Job("vocabulary", f"vocabulary-{key}", title, command, Path(vocab_file)))
    needs = tuple(job.name for job in jobs)

    def dataset_of(texts: tuple[str, ...], name: str, label: str) -> tuple[str, ...]:
        """Add the job that makes a dataset of texts, and return its prefix."""
        command = (
            *("megatron-ddrp", "preprocess", "--input", *texts, "--output-prefix", str(folder / name)),
            *("--vocab-file", vocab_file, "--tokenizer-type", corpus.tokenizer_type),
            *("--workers", str(corpus.workers), "--overwrite"),
        )
        title, prefix = f"{label} of {len(texts)} text{'s' * (len(texts) > 1)}", f"{folder / name}_text_document"
        jobs.append(Job("dataset", f"{label}-{key}", title, command, Path(f"{prefix}.idx"), needs))
        return (prefix,)

    data_path = dataset_of(corpus.input, "corpus", "dataset") if corpus.input else corpus.data_path
    if corpus.shuffle:
        made, data_path = data_path, (str(folder / "shuffled_text_document"),)
        command = ("megatron-ddrp", "dataset", "shuffle", *made, "--output-prefix", *data_path, "--overwrite")
        output = Path(f"{data_path[0]}.idx")
        jobs.append(Job("dataset", f"shuffled-{key}", "with its documents shuffled", command, output, (jobs[-1].name,)))
    other_path = dataset_of(corpus.other, "other", "other-dataset") if corpus.other else corpus.other_data_path
    return CorpusFiles(data_path, vocab_file, corpus.tokenizer_type, key, tuple(jobs), other_path)


def _dataset_facts(plan: ComparisonPlan, key: str) -> list[Any]:
    """Return what identifies the indexed datasets of a key of the corpus, with their weights."""
    words = getattr(plan.corpus, key)
    prefixes, facts = read_blend(words, f"corpus.{key}").prefixes if words else (), list[Any]()
    for word in words:
        facts += [fingerprint(plan, key, word + end) for end in (".bin", ".idx")] if word in prefixes else [float(word)]
    return facts


def fingerprint(plan: ComparisonPlan, key: str, name: str) -> Any:
    """Return the size and a hash of a file, or of all files in a folder.

    Of a corpus, which may have hundreds of gigabytes, only both ends enter the hash.
    """
    path = Path(name)
    if path.is_dir():
        return [fingerprint(plan, key, str(inner)) for inner in sorted(path.rglob("*")) if inner.is_file()]
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            total = hashlib.sha256(stream.read(_END))
            if key in ("glue", "tasks"):
                while stream.tell() < size - _END:
                    total.update(stream.read(min(_END, size - _END - stream.tell())))
            stream.seek(max(0, size - _END))
            total.update(stream.read(_END))  # a device has no end
    except OSError as error:
        where, flag = _PLACES[key]
        raise UserError(f"{plan.file}: {where}: {name}: {error.strerror}; give {flag}", 2) from None
    return [size, total.hexdigest()[:16]]


_PLACES = {
    "input": ("corpus.input", "--input FILE…"),
    "data_path": ("corpus.data_path", "--data-path PREFIX…"),
    "other": ("corpus.other", "--other FILE…"),
    "other_data_path": ("corpus.other_data_path", "--other-data-path PREFIX…"),
    "vocab_file": ("corpus.vocab_file", "--vocab-file FILE"),
    "glue": ("glue", "--glue-dir DIR, or --no-glue"),
    "tasks": ("tasks", "existing files, or --no-tasks"),
}
"""Purpose of a file → key in the plan, and the flag that replaces it."""


LOGGED = 100
"""Approximate number of log rows that a run writes to metrics.jsonl."""

_NO_MATTER = {
    "checkpoint": ("save", "load", "keep_last"),
    "logging": ("log_interval", "tensorboard_dir", "wandb_project"),
    "training": ("num_threads",),
    "data": ("data_path", "other_data_path", "vocab_file", "tokenizer_model", "index_cache_dir"),
    "parallel": ("decided_by_deepspeed_config", "cuda_graphs"),
}
"""Settings that do not affect the result of a run; `CorpusFiles.key` identifies the corpus."""
_USUAL = {"tokenizer_type": CorpusPlan.tokenizer_type}
"""Values of a plan that count as defaults in the names of runs, where a setting's own default is another."""


@dataclass(frozen=True)
class PlannedRun:
    """Training run of a model with one seed, at the full or half budget.

    Runs with the same seed see the same data, in the same order, with the same masks, whatever model they train. A
    model at half the budget has a run of its own with a schedule of half the length, so that its learning rate also
    decays fully.
    """

    model: Model
    half: bool
    seed: int
    config: Config
    job: Job
    plugin_words: tuple[str, ...]
    """`--plugin FILE.py …` for every command about the run."""

    @property
    def arm(self) -> Arm:
        """Arm of the run: one row of a table."""
        return self.model.arm(self.half)

    @property
    def folder(self) -> Path:
        """Folder of `--save`."""
        return self.job.output

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.config.training.train_iters

    @property
    def checkpoints(self) -> list[int]:
        """Steps at which the run saves a checkpoint."""
        interval = self.config.checkpoint.save_interval
        return sorted({*range(interval, self.steps, interval), self.steps})

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / tag(step)


def count_steps(plan: ComparisonPlan, model: Model) -> int:
    """Return the steps of a model's run at the full budget."""
    steps = plan.budget.steps
    if plan.budget.tokens:
        config = make_config(model.system | dict(plan.flags + model.flags), f"{plan.file}: {model.name}")
        steps = max(2, round(plan.budget.tokens / (config.training.global_batch_size * config.mean_seq_length)))
    assert steps
    return steps


def all_runs(plan: ComparisonPlan, corpus: CorpusFiles, folder: Path, steps: Mapping[str, int]) -> list[PlannedRun]:
    """Return every run, seed by seed, without duplicates. `steps` has the steps of each model at the full budget.

    The plan's own flags override the schedule. All models are validated on as many rows, whatever their batch.
    """
    runs: dict[str, PlannedRun] = {}
    usual, common = Config().training.global_batch_size, dict(plan.flags)
    rows = EVAL_ITERS * int(common.get("global_batch_size", usual))
    code = [code_sum(Path(file)) for file in plan.plugins]
    models = [(model, False) for model in plan.models] + [(plan.model_of(name), True) for name in plan.half_budget]
    for seed, (model, half) in product(plan.seeds, models):
        count = max(1, steps[model.name] // (1 + half))
        label, interval = model.arm(half).label, -(-count // plan.checkpoints)
        batch = int((common | dict(model.flags)).get("global_batch_size", usual))
        settings: dict[str, Any] = {
            "data_path": corpus.data_path,
            **({"other_data_path": corpus.other_data_path} if corpus.other_data_path else {}),
            "vocab_file": corpus.vocab_file,
            "tokenizer_type": corpus.tokenizer_type,
            **model.system,
            "log_interval": max(1, count // LOGGED),
            "eval_interval": interval,
            "eval_iters": EVAL_ITERS if rows % batch else rows // batch,
            "save_interval": interval,
            "train_iters": count,
            "seed": seed,
            **under_flags(common, dict(model.flags)),
        }
        config = make_config(settings, f"{plan.file}: {model.name}")
        name = job_name(RUN, f"{label} {seed}", [facts_of(config), corpus.key, *code])
        output = folder / f"{RUN}s" / name.removeprefix(f"{RUN}-")
        places = {"save": output, "load": output}
        command = (*start_of(plan.launcher), *flag_words((settings | places).items()), *plan.plugin_words)
        needs = tuple(job.name for job in corpus.jobs)
        job = Job(RUN, name, f"{label}, seed {seed}", command, output, needs, count)
        runs.setdefault(name, PlannedRun(model, half, seed, config, job, plan.plugin_words))
    return list(runs.values())


def start_of(launcher: str) -> tuple[str, ...]:
    """Return the words that start pre-training under a launcher."""
    if launcher == "python":
        return "megatron-ddrp", "pretrain"
    program, *flags = launcher.split()
    return program, *flags, "--module" if program == "deepspeed" else "-m", "megatron_ddrp", "pretrain"


def facts_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings that affect the result of a run and differ from their defaults.

    Because defaults are left out, finished runs keep their names if a later version adds a flag.
    """
    facts = {}
    for concern, section in concerns().items():
        ours, default = getattr(config, concern), section()
        facts[concern] = {
            f.name: getattr(ours, f.name)
            for f in dataclasses.fields(section)
            if getattr(ours, f.name) != _USUAL.get(f.name, getattr(default, f.name))
            and f.name not in _NO_MATTER.get(concern, ())
        }
    return facts
