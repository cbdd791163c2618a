"""Scores of minimal pairs: the jobs of one command, its workers, and its report with tables and figures.

The report of an output folder is results.json, table.md, tables/ and heatmap.png.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megatron_ddrp.data.progress import progress
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import warn_of_unmarked_words
from megatron_ddrp.encoders.masked_lm import PieceLogits, load_masked_lm, piece_logits
from megatron_ddrp.errors import UserError, allocations_as_user_errors
from megatron_ddrp.pages.markdown import Table, percent, render_page, write_page
from megatron_ddrp.pages.plotting import short_names
from megatron_ddrp.tasks.jobs import SPAWN, device_of, drain, left_to_others, one_at_a_time, share_out, share_threads
from megatron_ddrp.tasks.minimal_pairs.pairs import (
    SCORES,
    SCORES_FILE,
    SENTENCES,
    PairJob,
    PairStore,
    Paradigm,
    ParadigmScore,
    Result,
    cell,
    difference,
    masked_rows,
    published_levels,
    read_pairs,
)
from megatron_ddrp.tasks.statistics import CURVES, Gain, Score, draw_heat, draw_learning_curves, gain_table

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 131072}
"""Default of --tokens-per-batch. On CPUs it keeps the states of the feed-forward block in a core's cache."""
DECIMALS = 6

Pieces = list[list[int]]


@dataclass(frozen=True)
class Subject:
    """An encoder to score, without its weights."""

    name: str
    """Name of the encoder in tables."""
    folder: Path
    seed: int | None
    """Seed of random weights; None for the folder's own weights."""
    fingerprint: str
    tokenizer: Tokenizer
    max_length: int
    origin: str


def subjects_of(folder: Path, seeds: Sequence[int | None]) -> list[Subject]:
    """Load a folder; return one subject with its weights if `seeds` is [None], else one per seed of random weights.

    Raises `UserError` as in `load_masked_lm`.
    """
    encoder = load_masked_lm(folder, random_init=None not in seeds)
    origin = "; ".join(filter(None, (warn_of_unmarked_words(encoder.tokenizer), encoder.origin)))
    rest = (encoder.fingerprint, encoder.tokenizer, encoder.max_length, origin)
    of_seed = {seed: f", seed {seed}" if len(seeds) > 1 else "" for seed in seeds}
    return [Subject(encoder.name + of_seed[seed], encoder.folder, seed, *rest) for seed in seeds]


def encode_pairs(paradigm: Paradigm, tokenizer: Tokenizer, max_length: int) -> tuple[Pieces, Pieces]:
    """Return the pieces of the good and of the bad sentences, without [CLS] and [SEP].

    Raises `UserError` with file and line for a sentence without a piece or with too many for the encoder's positions.
    """
    encoded = tokenizer.encode_batch(paradigm.good), tokenizer.encode_batch(paradigm.bad)
    room = max_length - tokenizer.rows.num_specials(1)
    for key, sentences in zip(SENTENCES, encoded, strict=True):
        for place, pieces in zip(paradigm.places, sentences, strict=True):
            if not 0 < len(pieces) <= room:
                raise UserError(
                    f"{place}: {key} has {len(pieces)} pieces; expected 1 to {room}, the number of positions "
                    "of the encoder"
                )
    return encoded


@torch.inference_mode()
def score_sentences(
    model: PieceLogits,
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[int]],
    score: str,
    budget: int,
    advance: Callable[[int], object] = lambda rows: None,
) -> np.ndarray:
    """Return the sum of log p over the pieces of each sentence, in nats, float64 `[sentences]`.

    `score` is a name in `SCORES`. Equal sentences are scored once. `advance` gets the number of rows after each batch.
    """
    numbers: dict[tuple[int, ...], int] = {}
    which = np.array([numbers.setdefault(tuple(pieces), len(numbers)) for pieces in sentences])
    device = next(model.parameters()).device
    sums = np.zeros(len(numbers))
    for rows in masked_rows(list(numbers), tokenizer, score, budget):
        ids, places, targets = (torch.from_numpy(array).to(device) for array in rows[1:])
        logits = model(ids, places)  # [rows, vocab]
        found = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)
        np.add.at(sums, rows.sentences, found.double().cpu().numpy())
        advance(len(ids))
    return sums[which]


class Scorer:
    """Scorer of one paradigm after the other, with the weights of one encoder in memory at a time."""

    def __init__(self, plan: PairPlan, device: torch.device, advance: Callable[[int], object]):
        """Take the plan of the jobs; `advance` gets the number of rows of each batch."""
        self.plan, self.device, self.advance = plan, device, advance
        self.budget = plan.options.tokens_per_batch or TOKENS_PER_BATCH[device.type]
        self._loaded: tuple[tuple[str, int | None], PieceLogits] | None = None

    def model(self, job: PairJob) -> PieceLogits:
        """Return the masked LM of a job. Raises `UserError` if its folder has changed."""
        key = (job.encoder, job.seed)
        if self._loaded is None or self._loaded[0] != key:
            folder = self.plan.subjects[key].folder
            encoder = load_masked_lm(folder, random_init=job.seed is not None)
            if job.encoder != encoder.fingerprint:
                raise UserError(f"--load {folder}: it was changed after the start of this command; run it again")
            self._loaded = key, piece_logits(encoder, job.seed or 0, self.device)
        return self._loaded[1]

    def perform(self, job: PairJob) -> dict[str, Any]:
        """Do a job and return its row."""
        subject, paradigm = self.plan.subjects[job.encoder, job.seed], self.plan.paradigms[job.paradigm]
        model = self.model(job)
        begin = time.perf_counter()
        good, bad = encode_pairs(paradigm, subject.tokenizer, subject.max_length)
        with allocations_as_user_errors(
            f"use --tokens-per-batch {self.budget // 2} instead of {self.budget}, or fewer --workers"
        ):
            scores = score_sentences(model, subject.tokenizer, good + bad, job.score, self.budget, self.advance)
        values = [round(value, DECIMALS) if math.isfinite(value) else None for value in scores.tolist()]
        return asdict(job) | {
            "load": subject.name,
            "checkpoint": str(subject.folder),
            "good": values[: len(good)],
            "bad": values[len(good) :],
            "pieces_good": list(map(len, good)),
            "pieces_bad": list(map(len, bad)),
            "identical": sum(first == second for first, second in zip(good, bad, strict=True)),
            "rows": sum(map(len, good + bad)),
            "seconds": round(time.perf_counter() - begin, 3),
        }


PIECE_COUNTS = "piece counts alone"
Levels = dict[str, dict[str, float]]
"""Name → UID → accuracy."""


@dataclass(frozen=True)
class Report:
    """Content of the page."""

    paradigms: Mapping[str, Paradigm]
    results: list[Result]
    published: Levels
    score: str

    @property
    def differences(self) -> list[Gain]:
        """Gains of every two encoders."""
        return [difference(first, second) for first, second in combinations(self.results, 2)]

    def groups(self, key: str) -> dict[str, list[str]]:
        """Group the UIDs by `key`, which is `field` or `term`; return name → UIDs, sorted by name.

        Paradigms without a name are left out.
        """
        names = sorted({getattr(paradigm, key) for paradigm in self.paradigms.values()} - {""})
        return {name: [uid for uid, p in self.paradigms.items() if getattr(p, key) == name] for name in names}

    def in_order(self) -> list[str]:
        """Return the UIDs sorted by field, term and UID."""
        return sorted(self.paradigms, key=lambda uid: (self.paradigms[uid].field, self.paradigms[uid].term, uid))

    def piece_counts(self) -> Levels:
        """Return accuracies from piece counts alone: once if they are equal for all encoders, else per encoder."""
        levels = {r.name: {uid: cell.piece_counts for uid, cell in r.cells.items()} for r in self.results}
        first, *others = levels.values()
        if all(level == first for level in others):
            return {PIECE_COUNTS: first}
        return {f"{PIECE_COUNTS}, {name}": level for name, level in levels.items()}


def write_report(report: Report, folder: Path) -> str:
    """Write results.json, table.md, tables/ and, with matplotlib, heatmap.png into `folder`; return a text to show."""
    differences = report.differences
    tables = all_tables(report, differences)
    text = page(report, tables)
    texts = {"table.md": text, "results.json": json.dumps(summary(report, differences), indent=2) + "\n"}
    fields = {uid: report.paradigms[uid].field for uid in report.in_order()}
    figures = {
        "heatmap.png": functools.partial(draw_heat_map, _levels(report), len(report.results), fields),
        CURVES: functools.partial(draw_learning_curves, _panels(report), "standard error over pairs"),
    }
    written = write_page(folder, texts, tables, figures)
    shown = text.split("\n## By paradigm")[0].strip()
    return f"\n{shown}\n\n{written}"


def _panels(report: Report) -> list[tuple[str, dict[str, Score]]]:
    """Return the panels of the learning curves: the macro average and, if there are several fields, each field."""
    fields = report.groups("field")
    parts = {"macro average": list(report.paradigms), **(fields if len(fields) > 1 else {})}
    return [(title, {each.name: _score(each.only(uids)) for each in report.results}) for title, uids in parts.items()]


def _score(result: Result) -> Score:
    error = result.standard_error or 0.0
    return Score(result.macro_average, result.macro_average - error, result.macro_average + error)


def summary(report: Report, differences: list[Gain]) -> dict[str, Any]:
    """Return the content of results.json: the numbers of the tables as fractions."""
    names = ("over_pairs", "over_paradigms") if len(report.paradigms) == 1 else ("over_paradigms", "over_pairs")
    return {
        "score": report.score,
        "encoders": [_encoder(report, result) for result in report.results],
        "differences": [
            {"first": gain.first, "second": gain.second, "difference": gain.seeds.mean}
            | dict(zip(names, (gain.items, None), strict=True))
            for gain in differences
        ],
        "published": report.published,
    }


def _encoder(report: Report, result: Result) -> dict[str, Any]:
    return {
        "load": result.name,
        "macro_average": result.macro_average,
        "standard_error": result.standard_error,
        "standard_error_over_paradigms": result.paradigm_error,
        "piece_counts": result.piece_counts,
        "fields": {name: result.only(uids).macro_average for name, uids in report.groups("field").items()},
        "linguistics_terms": {name: result.only(uids).macro_average for name, uids in report.groups("term").items()},
        "paradigms": {
            uid: {
                "accuracy": cell.accuracy,
                "pairs": len(cell.right),
                "standard_error": cell.standard_error,
                "ties": cell.ties,
                "undefined": cell.undefined,
                "piece_counts": cell.piece_counts,
            }
            for uid, cell in result.cells.items()
        },
    }


def all_tables(report: Report, differences: list[Gain]) -> dict[str, Table]:
    """Return the tables of the page by name."""
    return {
        "scores": _scores(report),
        "differences": gain_table(differences),
        "terms": _by_group(report, "term"),
        "paradigms": _by_paradigm(report),
    }


def page(report: Report, tables: dict[str, Table]) -> str:
    """Return the text of table.md."""
    return render_page(
        "minimal_pairs.md.jinja",
        score=report.score,
        meaning=SCORES[report.score],
        pairs=sum(map(len, report.paradigms.values())),
        num_paradigms=len(report.paradigms),
        **tables,
    )


def _scores(report: Report) -> Table:
    """Return the table of macro averages: the encoders, then the published levels."""
    fields = report.groups("field")
    header = ["encoder", "macro average", "± pairs", "± paradigms", *fields, PIECE_COUNTS, "ties", "undefined"]
    rows = [
        [result.name, percent(result.macro_average), percent(result.standard_error), percent(result.paradigm_error)]
        + [percent(result.only(uids).macro_average) for uids in fields.values()]
        + [percent(result.piece_counts)]
        + [f"{sum(getattr(cell, key) for cell in result.cells.values()):,}" for key in ("ties", "undefined")]
        for result in report.results
    ]
    for name, level in report.published.items():
        averages = [percent(statistics.fmean(level[uid] for uid in uids)) for uids in fields.values()]
        rows.append([f"{name} (published)", percent(statistics.fmean(level.values())), "", "", *averages, "", "", ""])
    return Table(header, rows)


def _by_group(report: Report, key: str) -> Table:
    levels = _levels(report)
    rows = [
        [name, str(len(uids)), *(percent(statistics.fmean(level[uid] for uid in uids)) for level in levels.values())]
        for name, uids in report.groups(key).items()
    ]
    return Table(["linguistics term", "paradigms", *levels], rows)


def _by_paradigm(report: Report) -> Table:
    levels = _levels(report)
    fields = [uid for uids in report.groups("field").values() for uid in uids]  # empty if no file names a field
    rows = [
        [uid, *[report.paradigms[uid].field] * bool(fields), str(len(report.paradigms[uid]))]
        + [percent(level[uid]) for level in levels.values()]
        for uid in report.in_order()
    ]
    return Table(["paradigm", *["field"] * bool(fields), "pairs", *levels], rows, wordy=[1] * bool(fields))


def _levels(report: Report) -> Levels:
    """Return the accuracies per paradigm of encoders, piece counts and published models."""
    own = {result.name: {uid: cell.accuracy for uid, cell in result.cells.items()} for result in report.results}
    return {**own, **report.piece_counts(), **{f"{name} (published)": v for name, v in report.published.items()}}


def draw_heat_map(levels: Levels, num_own: int, fields: Mapping[str, str]) -> Any:
    """Draw accuracies: blue is 100 %, white 50 % (chance), red 0 %.

    `levels` has a column each: name → paradigm → accuracy; the first `num_own` are encoders, and a line follows them.
    `fields` has the paradigms' fields, in the order of the rows; each has a panel.
    """
    tables: dict[str, dict[str, list[float]]] = {}
    for uid, field in fields.items():
        tables.setdefault(field, {})[uid] = [100 * level[uid] for level in levels.values()]
    return draw_heat(tables, short_names(list(levels)), num_own, "accuracy [%] (white: chance)", 50)


MOST_WORKERS = 8
"""Largest default number of worker processes on CPUs; each process holds an encoder."""


class PairPlan:
    """Encoders and paradigms of a command, and the number of rows of each job."""

    def __init__(self, options: argparse.Namespace):
        """Read all files. Raises `UserError` for the first invalid one."""
        self.options = options
        paradigms = read_pairs(options.data_dir, options.max_pairs)
        seeds = list(range(1, options.seeds + 1)) if options.random_init else [None]
        folders = dict.fromkeys(options.load)
        subjects = [subject for folder in folders for subject in subjects_of(folder, seeds)]
        self.paradigms = {paradigm.uid: paradigm for paradigm in paradigms}
        self.subjects: dict[tuple[str, int | None], Subject] = {}
        self.left_out: list[str] = []
        for subject in subjects:
            twin = self.subjects.setdefault((subject.fingerprint, subject.seed), subject)
            if twin is not subject:
                self.left_out.append(f"{subject.name}: left out, it has the same weights as {twin.name}")
        self.rows: dict[PairJob, int] = {}
        counted: dict[tuple[str, int], list[int]] = {}
        for subject in self.subjects.values():
            tokenizer = (subject.tokenizer.fingerprint, subject.max_length)
            if tokenizer not in counted:
                encoded = (encode_pairs(paradigm, subject.tokenizer, subject.max_length) for paradigm in paradigms)
                counted[tokenizer] = [sum(map(len, good + bad)) for good, bad in encoded]
            for paradigm, rows in zip(paradigms, counted[tokenizer], strict=True):
                job = (subject.fingerprint, subject.seed, paradigm.uid, paradigm.digest, options.score)
                self.rows[PairJob(*job)] = rows

    @property
    def jobs(self) -> list[PairJob]:
        """All jobs, grouped by encoder."""
        return list(self.rows)

    def num_pairs(self) -> int:
        """Return the number of pairs over all paradigms."""
        return sum(map(len, self.paradigms.values()))


def run_here(options: argparse.Namespace) -> None:
    """Do the missing jobs, in this process or in worker processes, and write the report."""
    plan, store = PairPlan(options), PairStore(options.output_dir / SCORES_FILE)
    published = published_levels(options.data_dir, plan.paradigms)
    missing = store.missing(plan.jobs)
    # By default one per GPU, else per core: several cores do not speed up a small encoder's products.
    own = torch.cuda.device_count() or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    workers = min(options.workers or own, max(1, len(missing)))
    share_threads(workers)
    print(plan_text(plan, missing), flush=True)
    if options.dry_run:
        return
    done = SPAWN.Value("q", 0)
    total = sum(plan.rows[job] for job in missing)
    with progress("row", total, scale=True) as bar:

        def tell() -> None:
            bar.update(done.value - bar.n)

        if workers > 1:
            share_out(work, (plan, done), workers, plan.jobs, store, tell, "megatron-ddrp minimal-pairs")
        else:
            work(0, plan, done, bar)
    store.refresh()
    if left := len(store.missing(plan.jobs)):
        print(left_to_others(left, options.output_dir, options.wait))
        return
    rows = {PairJob.of_row(row).name: row for row in store}
    cells: dict[tuple[str, int | None], dict[str, ParadigmScore]] = {key: {} for key in plan.subjects}
    for job in plan.jobs:
        cells[job.encoder, job.seed][job.paradigm] = cell(rows[job.name])
    results = [Result(subject.name, cells[key]) for key, subject in plan.subjects.items()]
    report = Report(plan.paradigms, results, published, options.score)
    with one_at_a_time(options.output_dir, "report"):
        print(write_report(report, options.output_dir), flush=True)
    if undefined := [f"{result.name} ({result.undefined:,})" for result in report.results if result.undefined]:
        raise UserError(
            f"scores that are not finite, in pairs out of {plan.num_pairs():,}: {', '.join(undefined)}; they count as "
            "wrong, so these accuracies are no results; weights with nan or inf give them: use an earlier checkpoint"
        )


def work(number: int, plan: PairPlan, done: Any, bar: tqdm | None = None) -> None:
    """Do jobs until the store has all. Finished rows move `bar`; without a bar, they are added to the shared `done`."""

    def advance(rows: int) -> None:
        if bar is not None:
            bar.update(rows)
        else:
            with done.get_lock():
                done.value += rows

    scorer, options = Scorer(plan, device_of(number), advance), plan.options
    drain(plan.jobs, PairStore(options.output_dir / SCORES_FILE), scorer.perform, wait=options.wait)


def plan_text(plan: PairPlan, missing: Sequence[PairJob]) -> str:
    """Return the text of the plan: the missing jobs and the origin of each encoder."""
    lines = [
        f"plan: {len(plan.subjects)} encoder{'s' * (len(plan.subjects) > 1)} x {len(plan.paradigms)} paradigms, "
        f"{plan.num_pairs():,} pairs, score {plan.options.score}, on {device_of(0).type}; "
        f"{len(missing)} of {len(plan.jobs)} jobs to do, {sum(plan.rows[job] for job in missing):,} rows"
    ]
    lines += [f"  {subject.name}: {subject.origin}" for subject in plan.subjects.values()]
    return "\n".join([*lines, *(f"  {sentence}" for sentence in plan.left_out)])
