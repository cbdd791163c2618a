"""The jobs of a comparison, how they run, and the rows of its finished runs."""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import BinaryIO

import torch

from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.preprocess.inputs import find_inputs
from megatron_ddrp.data.progress import track
from megatron_ddrp.engine.build import precision_remarks
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError, need_packages
from megatron_ddrp.lab.compare.measures import PlanJobs, draw_samples, make_row
from megatron_ddrp.lab.compare.page import Page
from megatron_ddrp.lab.compare.plan import ComparisonPlan, read_plans
from megatron_ddrp.lab.compare.rows import RunRow, as_run, open_rows, read_run_rows, row_of, samples_file, write_samples
from megatron_ddrp.lab.compare.runs import RUN, Job, PlannedRun, kind_name, log_file, open_store
from megatron_ddrp.lab.compare.tables import load_claims
from megatron_ddrp.pages.markdown import hardware, versions
from megatron_ddrp.run.log import duration
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.jobs import Row, Store, Workload, device_of, eta, left_to_others, one_at_a_time

ROOT = Path(__file__).resolve().parents[3]
WAIT = 0.3
"""Seconds between two checks of the processes."""
STATUS = 60.0
"""Seconds between two status lines."""
GRACE = 120.0
"""Seconds that a stopped process gets to save its last checkpoint."""
_END_WITH_PARENT = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None


@dataclass
class _Running:
    """Running process of a job."""

    job: Job
    lease: BinaryIO
    process: subprocess.Popen[bytes]
    slot: int
    began: float
    started: str


class Runner:
    """Driver of jobs that are command lines, several at once, in the order of the list.

    Each job is a process with its own log. A job waits for the jobs that it needs. If a job fails, the driver reports
    its log and drops the jobs that need it; the others continue. A job's process and the driver, which started it, hold
    its lease together: if the driver is killed, the lease is free only after the process has ended. If the driver ends
    for any reason, the store has the finished jobs and the runs have their checkpoints; the same command resumes. On
    Linux the kernel then tells the processes to stop; on other systems they run to their end, and the next driver waits
    for them. The driver also prints lines about the jobs.
    """

    def __init__(
        self,
        store: Store,
        workers: int,
        say: Callable[[str], object] = print,
        after: Callable[[], object] | None = None,
    ):
        """Take the finished jobs and the number of jobs at once; `say` prints a line, `after` follows each job."""
        self.store, self.workers, self.say, self.after = store, workers, say, after
        self.folder = store.path.parent
        self.running: list[_Running] = []
        self.failed: dict[str, str] = {}
        """Name of a failed job → the reason."""
        self._taken: set[str] = set()
        """Names of the jobs that other commands held at the last check."""
        self._waited: set[str] = set()
        self._told = time.monotonic()

    def run(self, jobs: Sequence[Job], wait: bool = True) -> None:
        """Run the jobs; return when each is in the store, has failed, or needs a failed job.

        Without `wait`, return as soon as other commands are doing all remaining jobs, or those that they need.
        """
        try:
            while self._step(jobs) and (wait or not self._wait_for_others(self.left(jobs))):
                time.sleep(WAIT)
        finally:
            self._stop()

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that are neither in the store nor failed."""
        return [job for job in self.store.missing(jobs) if job.name not in self.failed]

    def _wait_for_others(self, left: Sequence[Job]) -> bool:
        """Return whether others hold each job, or one that it needs; jobs stand behind those that they need."""
        held = set(self._taken)
        for job in left:
            if held.intersection(job.needs):
                held.add(job.name)
        return all(job.name in held for job in left)

    def _step(self, jobs: Sequence[Job]) -> bool:
        """Collect ended processes and start jobs; return whether jobs are left."""
        self._taken.clear()
        self.store.refresh()
        for running in [r for r in self.running if r.process.poll() is not None]:
            self.running.remove(running)
            self._finish(running, jobs)
        own = {running.job.name for running in self.running}
        left = self.left(jobs)
        for job in left:
            if lost := next((name for name in job.needs if name in self.failed), None):
                self.failed[job.name] = f"needs {lost}"
            elif len(self.running) < self.workers and job.name not in own and all(n in self.store for n in job.needs):
                self._start(job)
        if self.running and time.monotonic() - self._told > STATUS:
            self._told = time.monotonic()
            self.say("  " + self.status([(r.job, r.began) for r in self.running], left))
        return bool(self.left(left))

    def _start(self, job: Job) -> None:
        lease = self.store.lease(job.name)
        if lease is None:
            if job.name not in self.store:
                self._taken.add(job.name)
            if job.name in self._taken and job.name not in self._waited:
                self._waited.add(job.name)
                self.say(f"{job}: another process is doing it; waiting for that process")
            return
        log = log_file(self.folder, job)
        log.parent.mkdir(parents=True, exist_ok=True)
        slot = min(set(range(self.workers)) - {r.slot for r in self.running})
        self.say(f"$ {shlex.join(job.command)}")
        with log.open("a", encoding="utf-8") as stream:
            stream.write(f"$ {shlex.join(job.command)}\n")
            stream.flush()
            process = subprocess.Popen(
                full_command(job.command),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment(slot),
                pass_fds=(lease.fileno(),),
                start_new_session=True,  # Ctrl-C reaches only the driver, which lets the processes save
                preexec_fn=_END_WITH_PARENT,
            )
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.running.append(_Running(job, lease, process, slot, time.monotonic(), now))

    def _environment(self, slot: int) -> dict[str, str]:
        """Return the environment of a job: paths, and with several workers its share of cores and GPUs."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        if self.workers > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.workers)))
            if (gpus := torch.cuda.device_count()) > 1:
                visible = environment.get("CUDA_VISIBLE_DEVICES")
                names = visible.split(",") if visible else [str(number) for number in range(gpus)]
                environment["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
        return environment

    def _finish(self, running: _Running, jobs: Sequence[Job]) -> None:
        job, code = running.job, running.process.returncode
        with running.lease:
            if code == 0 and job.output.exists():
                seconds = time.monotonic() - running.began
                self.store.append(
                    {
                        "job": job.name,
                        "kind": job.kind,
                        "title": job.title,
                        "command": shlex.join(job.command),
                        "work": job.work,
                        "seconds": round(seconds, 3),
                        "started": running.started,
                        "workers": self.workers,
                        "threads": self._environment(running.slot).get("OMP_NUM_THREADS", str(torch.get_num_threads())),
                        "hardware": hardware(),
                        "versions": versions(),
                    }
                )
                if self.after:
                    self.after()
                done = len(jobs) - len(self.store.missing(jobs))
                self.say(f"[{done}/{len(jobs)}] {self.finished(job, seconds, self.left(jobs))}")
                return
        log = log_file(self.folder, job)
        why = f"exit code {code}" if code else f"it made no {job.output}"
        self.failed[job.name] = f"{why}; see {log}"
        self.say(f"FAILED {job}: {why}, {last_line(log)} (see {log}); the others continue")

    def _stop(self) -> None:
        """Stop the running processes; give each time to save."""
        for running in self.running:
            running.process.terminate()
        for running in self.running:
            try:
                running.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
            running.lease.close()
        self.running.clear()

    def plan(self, jobs: Sequence[Job]) -> list[str]:
        """Return lines with the number of missing jobs by kind, and the time that they will take."""
        missing = self.store.missing(jobs)
        lines = [f"{len(missing)} of {len(jobs)} jobs to do, {self.workers} at once"]
        lines += [f"  {count:4} x {kind}" for kind, count in Counter(kind_name(job.kind) for job in missing).items()]
        return [*lines, f"  time left: {self._eta(missing)}"] if missing else lines

    def finished(self, job: Job, seconds: float, left: Sequence[Job]) -> str:
        """Return the line of a finished job."""
        losses = [row["valid_lm_loss"] for row in _metrics(job) if "valid_lm_loss" in row]
        shown = "" if not losses else "not finite" if losses[-1] is None else f"{losses[-1]:.4f}"
        loss = f", validation masked-LM loss {shown}" * bool(shown)
        return f"{job}: {duration(seconds)}{loss}, eta {self._eta(left)}"

    def status(self, running: Sequence[tuple[Job, float]], left: Sequence[Job]) -> str:
        """Return the line of the running jobs with their step and the time since their start in `time.monotonic`."""
        now, words, steps, trained = time.monotonic(), [], {}, []
        for job, began in running:
            rows = _metrics(job)
            steps[job.name] = step = rows[-1]["iteration"] if rows else 0
            words.append(f"{job}{f' step {step:,} of {job.work:,.0f}' * bool(step)} since {duration(now - began)}")
            if times := [row["step_time"] for row in rows if "step_time" in row][1:]:  # the first has the start in it
                trained.append(Workload(kind_name(job.kind), step, step * fmean(times)))
        left = [replace(job, work=job.work - steps.get(job.name, 0)) for job in left]
        return f"{'; '.join(words)}; eta {self._eta(left, trained)}"

    def _eta(self, left: Sequence[Job], trained: Sequence[Workload] = ()) -> str:
        finished = [Workload(kind_name(row["kind"]), row["work"], row["seconds"]) for row in self.store]
        return eta([Workload(kind_name(job.kind), job.work) for job in left], [*finished, *trained], self.workers)


def _metrics(job: Job) -> list[dict[str, float]]:
    return read_rows(job.output) if job.kind == RUN else []


def full_command(command: Sequence[str]) -> list[str]:
    """Return a command with this Python and this package in place of `megatron-ddrp`."""
    here = {"megatron-ddrp": [sys.executable, "-m", "megatron_ddrp"], "python": [sys.executable]}
    return [*here.get(command[0], command[:1]), *command[1:]]


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, at most 300 characters."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "no log"
    return next((line for line in reversed(lines) if line), "an empty log")[:300]


def stop_on_sigterm() -> None:
    """Make SIGTERM and SIGHUP end the driver as Ctrl-C does."""

    def stop(number: int, frame: object) -> None:
        raise UserError(f"stopped by {signal.Signals(number).name}; run the same command to resume")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


ROWS = "rows.jsonl"


class Experiment:
    """All plans of a file, one per budget or side experiment, with their jobs and rows.

    The page is made from rows alone, so a run's folder may go once its row is stored. A run is not repeated if its row
    has every job of the plan, wherever it ran.
    """

    def __init__(self, plans: Sequence[ComparisonPlan], folder: Path, store: Store, rows: Path | None = None):
        """Plan all jobs. `rows` is the file of rows, by default `ROWS` in the folder."""
        self.plan, self.folder, self.store = plans[0], folder, store
        self.rows = open_rows(rows or folder / ROWS)
        self.works = [PlanJobs(plan, folder, store) for plan in plans]
        self._owners: dict[str, tuple[PlanJobs, PlannedRun]] = {}
        """Name of each run → its plan, which measures more than a side experiment that shares the run."""
        for work in sorted(self.works, key=lambda work: bool(work.plan.check)):
            for run in work.runs:
                self._owners.setdefault(run.job.name, (work, run))
        self._wanted = {name: {job.name for job in work.jobs_of(run)} for name, (work, run) in self._owners.items()}
        """Name of each run → names of its jobs."""

    def data_jobs(self) -> list[Job]:
        """Return the jobs that make the data of the runs without a row."""
        return list({job.name: job for work, _ in self._without_row() for job in work.corpus.jobs}.values())

    def jobs(self) -> list[Job]:
        """Return all jobs, each once and behind those that it needs, without those of runs that have a row.

        GLUE on earlier checkpoints comes last.
        """
        known = {job.name: job for work in self.works for run in work.runs for job in work.jobs_of(run)}
        later = {one.job.name for work in self.works for one in work.measures if one.step != one.run.steps}
        wanted = [(job, work) for work, run in self._without_row() for job in work.jobs_of(run)]
        found = {job.name: job for job in self.data_jobs()}
        for job, work in sorted(wanted, key=lambda item: item[0].name in later):
            needed = [known[name] for name in job.needs if name in known and name not in self.store]
            found |= {one.name: one for one in (*work.corpus.jobs, *needed, job)}
        return list(found.values())

    @property
    def missing_runs(self) -> list[PlannedRun]:
        """Runs that are still to be trained."""
        return [run for _, run in self._without_row() if run.job.name not in self.store]

    def record(self) -> None:
        """Append a row for every run whose jobs are all finished."""
        for work, run in self._without_row():
            if not self.store.missing(work.jobs_of(run)):
                self.rows.append(make_row(work, run))

    def finished_runs(self) -> list[RunRow]:
        """Return the runs that are trained, from their rows, or from the jobs finished so far.

        What is missing beside the rows, scores on resampled test items, is drawn and stored, if the jobs' outputs are
        still there.
        """
        self.rows.refresh()
        self.record()
        found: dict[str, Row] = {}
        unfinished = [make_row(work, run) for work, run in self._without_row() if run.job.name in self.store]
        for row in filter(self.rank, (*self.rows, *unfinished)):
            best = found.get(row["run"], row)  # of two rows of the same worth the later one
            found[row["run"]] = max(row, best, key=lambda one: (self.rank(one), len(one["jobs"])))
        folder = self.rows.path.parent
        for row in track(list(found.values()), "run", "resampling items"):
            if not samples_file(folder, row).is_file() and (samples := draw_samples(*self._owners[row["run"]])):
                write_samples(folder, row, samples)
        return [as_run(row, folder) for row in found.values()]

    def rank(self, row: Row) -> int:
        """Return what a row is worth to the plans: 2 with all jobs of its run, 1 with some of them and no others.

        0 is for a run of another plan, and for one that was measured in another way.
        """
        wanted, has = self._wanted.get(row["run"]), set(row.get("jobs", ()))
        if wanted is None:
            return 0
        return 2 if has >= wanted else int(has <= wanted)

    @property
    def missing(self) -> list[str]:
        """One sentence per job that is not finished, and per run left out."""
        items = [f"{job}: {self._why(job)}" for job in self.store.missing(self.jobs())]
        return items + [f"left out until it is measured as the plan says: {name}" for name in self.left_out]

    def _why(self, job: Job) -> str:
        log = log_file(self.folder, job)
        if not log.is_file():
            return "not started"
        return f"started, not finished; its log {log.relative_to(self.folder)} ends: {last_line(log)}"

    @property
    def left_out(self) -> list[str]:
        """Runs of the plans all of whose rows were measured in another way, and which the store does not have."""
        others = {row["run"] for row in self.rows} - {row["run"] for row in self.rows if self.rank(row)}
        return [name for name in self._wanted if name in others and name not in self.store]

    def _without_row(self) -> list[tuple[PlanJobs, PlannedRun]]:
        """Return the runs without a row that has all their jobs, in the order of the plans."""
        recorded = {row["run"] for row in self.rows if self.rank(row) == 2}
        in_order = dict.fromkeys(run.job.name for work in self.works for run in work.runs)
        return [self._owners[name] for name in in_order if name not in recorded]

    def plan_text(self) -> str:
        """Return the text of the plans: budgets, seeds, models and steps."""
        lines = [f"plan {self.plan.file}: {len(self.works)} budget{'s' * (len(self.works) > 1)}, into {self.folder}"]
        for work in self.works:
            plan = work.plan
            lines.append(f"{f'check, {plan.check}: ' if plan.check else ''}{work.summary()}")
            for model in plan.models:
                steps = f"{work.steps[model.name]:,} steps{', and half of it' * (model.name in plan.half_budget)}"
                lines.append(f"  {model.name}: {model.encoding}, {model.objective}, {steps}")
            lines += ["  no GLUE in this plan"] * (plan.glue is None)
        return "\n".join(lines)

    def times(self) -> dict[str, tuple[int, float]]:
        """Return kind of job → number and wall time in seconds of its finished jobs, those of these plans alone."""
        names = {job.name for work in self.works for job in work.corpus.jobs}
        names = names.union(*self._wanted.values())
        found: dict[str, tuple[int, float]] = {}
        for row in self.store:
            if row["job"] in names:
                count, seconds = found.get(row["kind"], (0, 0.0))
                found[row["kind"]] = count + 1, seconds + row["seconds"]
        return found


def run_here(options: argparse.Namespace) -> int:
    """Do the missing jobs and write the page. Return 1 if a job failed, otherwise 0."""
    if options.reproduce is not None:
        return _reproduce(options)
    if not options.dry_run:
        need_packages("the page", "markdown", "matplotlib", "scipy")  # before hours of jobs, not after them
    if options.is_rows:
        return _page_of_rows(options)
    experiment = plan_experiment(options)
    if options.claims:
        load_claims(options.claims)  # before hours of jobs, not after them
    if options.page_only and not options.dry_run:
        return _write_page(experiment, options)
    runner = Runner(experiment.store, experiment.plan.workers, partial(print, flush=True), experiment.record)
    jobs = experiment.jobs()
    print("\n".join([experiment.plan_text(), *runner.plan(jobs), *_remarks(experiment)]), flush=True)
    if options.dry_run:
        for job in jobs:
            print(f"{'done' if job.name in experiment.store else 'to do'}: {job}\n  $ {shlex.join(job.command)}")
        return 0
    stop_on_sigterm()
    runner.run(making := experiment.data_jobs())  # first, because remarks about the data follow
    if not experiment.store.missing(making):
        for line in _data_remarks(experiment):
            print(f"  {line}", flush=True)
    runner.run(jobs, wait=options.wait)
    if left := len(runner.left(jobs)):
        experiment.record()
        print(left_to_others(left, options.output_dir, options.wait))
    else:
        _write_page(experiment, options)
    return FAILURE if runner.failed else 0


def _reproduce(options: argparse.Namespace) -> int:
    """Train the run of a row again, with the row's share of the cores, and print that the two are equal.

    OUT may have the run that the row was made from, so the new one is in a folder of its own. Return 1 if the training
    failed, otherwise 0. Raises `UserError` if the two differ, and for a row of another plan.
    """
    row = row_of(options.rows, options.reproduce)
    options.output_dir /= "reproduced"
    options.given |= dict.fromkeys(("glue", "minimal_pairs", "tasks"))  # their data need not be here
    planned = {run.job.name: (work, run) for work in plan_experiment(options).works for run in work.runs}
    if row.run not in planned:
        why = "it had another text, budget, flag or plug-in: give its plan, and its texts by --input"
        raise UserError(f"{options.rows}: {row.run} is no run of {options.plan[0]}; {why}", WRONG_ARGUMENTS)
    work, run = planned[row.run]
    runner = Runner(work.store, options.workers or row.workers or 1, partial(print, flush=True))
    stop_on_sigterm()
    runner.run([*work.corpus.jobs, run.job])
    if not runner.failed:
        print(row.check_equal(as_run(make_row(work, run))))
    return FAILURE if runner.failed else 0


def plan_experiment(options: argparse.Namespace) -> Experiment:
    """Return the experiment of a plan. Raises `UserError` for a mistake in the file."""
    if len(options.plan) > 1:
        raise UserError("one plan at a time; only files of rows (.jsonl) may be several", WRONG_ARGUMENTS)
    plans = read_plans(options.plan[0], options.given)
    for plan in plans:
        check_texts(plan)
    return Experiment(plans, options.output_dir, open_store(options.output_dir), options.rows)


def check_texts(plan: ComparisonPlan) -> None:
    """Raise `UserError` for texts of a plan that exist, but that its jobs would refuse, each in its log."""
    for key, given in (("input", plan.corpus.input), ("other", plan.corpus.other)):
        files = find_inputs(name for name in given if os.path.exists(name))
        where, advice = f"{plan.file}: corpus.{key}", f"give --{key} FILE…"
        for file in files:
            if file.is_stream:
                fault = "a pipe or a device, but jobs read texts twice"
                raise UserError(f"{where}: {file.path}: {fault}; {advice}", WRONG_ARGUMENTS)
        if files and not any(os.path.getsize(file.path) for file in files):
            raise UserError(f"{where}: {files[0].path}: empty; {advice}", WRONG_ARGUMENTS)


def _remarks(experiment: Experiment) -> list[str]:
    """Return what the missing runs will say about their precision on this machine, each line once."""
    device = device_of(0)
    lines = [f"  {line}" for run in experiment.missing_runs for line in precision_remarks(run.config, device)]
    return list(dict.fromkeys(lines))


def _data_remarks(experiment: Experiment) -> list[str]:
    """Return what the missing runs will say about the division of their data, each line once."""
    by_data = {run.config.data: run.config for run in experiment.missing_runs}
    lines = [line for config in by_data.values() for line in Corpus.open(config).split_remarks()]
    remedy = "; in a plan: shuffle: true under corpus" * (experiment.plan.corpus.shuffle is False)
    return [line + remedy for line in lines]


def _write_page(experiment: Experiment, options: argparse.Namespace) -> int:
    with one_at_a_time(experiment.folder, "page"):
        experiment.store.refresh()
        page = Page(experiment.finished_runs(), experiment.folder, options.claims)
        if left := len(experiment.store.missing(experiment.jobs())):
            print(f"{experiment.store.path}: {left:,} of the plan's jobs not finished; the page names them")
        print(page.write(experiment.missing, experiment.times()))
    return 0


def _page_of_rows(options: argparse.Namespace) -> int:
    """Write the page of files of rows, and replace the tables of a Markdown file if one is given."""
    page = Page(read_run_rows(options.plan), options.output_dir, options.claims)
    if options.tables:
        print(page.replace_tables(options.tables))  # first, because it may refuse the file
    print(page.write())
    return 0
