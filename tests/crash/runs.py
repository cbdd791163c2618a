"""Protocols of a run's folder and of stores of finished jobs."""

import contextlib
import os
import runpy
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint import choose_checkpoint, read_state, refuse_folders
from megatron_ddrp.errors import refusals_as_user_errors
from megatron_ddrp.run import launch
from megatron_ddrp.run.metrics import MetricsFile, read_rows
from megatron_ddrp.run.run_folder import RunFolder
from megatron_ddrp.tasks.jobs import Store
from tests.crash.protocol import Protocol, quietly
from tests.crash.sample import Sample, write_rows
from tests.integration.conftest import TINY, command_line
from tests.integration.launch import SCRIPT

KINDS = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.BESIDE)


def resumed_step(run: Path, least: int, sample: Sample | None = None) -> Generator[str, None, int]:
    """Yield the faults of a folder from which a run resumes; return the step of its checkpoint, 0 without one.

    The step is at least `least`, and the weights can be loaded; with `sample`, they are those of the step.
    """
    if refusal := quietly(lambda: refuse_folders(run, run)).refusal:
        yield f"the run is refused: {refusal}"
    path, refusal, told = quietly(lambda: choose_checkpoint(run, KINDS))
    if path is None:
        yield f"no checkpoint: {refusal}"
        return 0
    step = read_state(path)["iteration"]
    if step < least:
        yield f"checkpoint {step} is chosen, {least} was reported ({told.strip()[:200]})"
    if refusal := quietly(lambda: checkpoint.load_model(run)).refusal:
        yield f"checkpoint {step} cannot be loaded: {refusal}"
    if sample and not sample.is_equal(path, step):
        yield f"checkpoint {step} has other weights, and nothing says so"
    return step


def missing_rows(run: Path, expected: Iterable[int], step: int) -> Iterator[str]:
    """Yield a fault if metrics.jsonl does not have each row up to a checkpoint once."""
    told: list[str] = []
    MetricsFile(run / "metrics.jsonl", step, told.append).close()
    if (found := [row["iteration"] for row in read_rows(run, told.append)]) != list(expected):
        yield f"metrics.jsonl has the rows {found} before checkpoint {step}{'' if told else ', and nothing says so'}"


class Save(Protocol):
    """Checkpoints 4 and 6 over 2, each after its rows of metrics.jsonl; two are kept."""

    name, place = "save", "run"
    had: tuple[int, ...] = (2,)
    begin = 2
    """Checkpoint that the run resumes from."""

    def prepare(self) -> None:
        self.sample.make_run(self.output, self.had)

    def update(self) -> None:
        since = self.begin
        MetricsFile(self.output / "metrics.jsonl", since, lambda _: None).close()
        for step in (4, 6):
            with refusals_as_user_errors(self.output):
                write_rows(self.output, since, step)
            self.sample.save(self.output, step, since, keep_last=2)
            self.report(str(step))
            since = step

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        run = self.output
        step = yield from resumed_step(run, max([self.begin, *map(int, reported)]), self.sample)
        if not step:
            return
        yield from missing_rows(run, range(1, step + 1), step)
        if not deep:
            return
        self.sample.save(run, step + 2, step, keep_last=2)
        if choose_checkpoint(run, KINDS, lambda _: None).name != checkpoint.tag(step + 2):
            yield "the next checkpoint is not chosen"
        if left := sorted(path.name for path in run.iterdir() if path.name.endswith(".tmp")):
            yield f"the next save leaves {left}"


class SaveAbandoned(Save):
    """`latest` was set back to 2: the run comes by 4 and 6 again."""

    name, had = "save, abandoned", (2, 4, 6)

    def prepare(self) -> None:
        super().prepare()
        checkpoint.mark_latest(self.output, checkpoint.tag(2))


class SaveDamaged(Save):
    """4 is damaged: the run resumes from 2 and saves 4 again."""

    name, had = "save, damaged", (2, 4)

    def prepare(self) -> None:
        super().prepare()
        path = next((self.output / checkpoint.tag(4)).glob("weights*"))
        content = path.read_bytes()
        path.write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])


class Start(Protocol):
    """A run in folders that do not exist yet: lock, configuration, tokenizer, first checkpoint, exit code."""

    name, place = "first start of a run", "new/run"

    def _run_folder(self) -> RunFolder:
        return RunFolder(self.output, self.sample.config, self.sample.tokenizer, 3.0)

    def update(self) -> None:
        refuse_folders(self.output, self.output)
        with self._run_folder():
            with refusals_as_user_errors(self.output):
                write_rows(self.output, 0, 2)
            self.sample.save(self.output, 2, 0)
            self.report("2")
        with refusals_as_user_errors(self.output):
            launch.note_exit_code(self.output, 0)

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        if reported:
            yield from resumed_step(self.output, 2, self.sample)
        for action in (lambda: refuse_folders(self.output, self.output), self._enter):
            if refusal := quietly(action).refusal:
                yield f"the same command is refused: {refusal}"
                return
        if deep and not checkpoint.holds_run(self.output):
            self.update()
            yield from resumed_step(self.output, 2, self.sample)

    def _enter(self) -> None:
        with self._run_folder():
            MetricsFile(self.output / "metrics.jsonl", 0, lambda _: None).close()


class NewStore(Protocol):
    """Three jobs of a store that does not exist yet."""

    name, place = "store, new", "out/runs.jsonl"
    had: tuple[str, ...] = ()

    def _store(self) -> Store:
        self.damage: list[str] = []
        return Store(self.output, lambda row: row["job"], "a job", on_damage=self.damage.append)

    def _append(self, jobs: Iterable[str]) -> Iterator[str]:
        store = self._store()
        for job in jobs:
            with store.lease(job) or contextlib.nullcontext() as lease:
                if lease:
                    store.append({"job": job, "score": 0.5, "text": "x" * 40})
            yield job

    def prepare(self) -> None:
        list(self._append(self.had))

    def update(self) -> None:
        for job in self._append("abc"):
            self.report(job)

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        store = self._store()
        lost = [job for job in (*self.had, *reported) if job not in store]
        if lost:
            yield f"reported jobs {lost} are lost; damaged lines: {self.damage}"
        list(self._append((*self.had, *"abc")))
        if (names := sorted(row["job"] for row in self._store())) != sorted((*self.had, *"abc")):
            yield f"after the same command, the jobs are {names}"
        if self.damage and not lost:
            yield f"a damaged line stays: {self.damage}"


class LongerStore(NewStore):
    """Three more jobs of a store."""

    name, had = "store, appended", ("x", "y")


class Pretrain(Protocol):
    """`pretrain_bert.py` in this process: 4 steps, a checkpoint every second one."""

    name, place, is_quick = "pretrain", "run", False

    def update(self) -> None:
        prune = checkpoint.prune

        def pruned(folder: Path, keep: int, name: str, *more: Any) -> None:
            prune(folder, keep, name, *more)
            self.report(str(int(name.removeprefix("iter_"))))

        model = self.sample.config.to_dict()["model"]
        changes = {name: value for name, value in model.items() if name in TINY}
        changes |= {"train_iters": 4, "save_interval": 2, "keep_last": 2, "relative_distance": 8}
        changes |= {"data_path": self.sample.folder / "data" / "a_text_document"}
        changes |= {"vocab_file": self.sample.vocabulary, "save": self.output, "load": self.output}
        words = [str(SCRIPT), *command_line(TINY | changes)]
        with (
            mock.patch.object(checkpoint, "prune", pruned),
            mock.patch.object(os, "_exit", sys.exit),
            mock.patch.object(sys, "argv", words),
        ):
            try:
                runpy.run_path(words[0], run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(f"pretrain_bert.py ended with {end.code}") from None

    def files(self) -> dict[str, bytes]:
        return {str(row["iteration"]): b"" for row in read_rows(self.output)} if self.output.exists() else {}

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        run, step = self.output, 0
        lock = run / "lock"
        if lock.exists() and lock.read_bytes()[:5].strip(b"\0") not in (b"", b"host "):
            yield "the run's own lock is refused"
        if reported or checkpoint.all_checkpoints(run):
            step = yield from resumed_step(run, max([0, *map(int, reported)]))
        elif refusal := quietly(lambda: refuse_folders(run, run)).refusal:
            yield f"the run is refused: {refusal}"
        if step or (run / "metrics.jsonl").exists():
            yield from missing_rows(run, [row for row in map(int, self.after) if row <= step], step)


RUNS: tuple[type[Protocol], ...] = (Save, SaveAbandoned, SaveDamaged, Start, NewStore, LongerStore, Pretrain)
