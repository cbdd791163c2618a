"""Protocols of a run's folder and of stores of finished jobs."""

import contextlib
import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint import choose_checkpoint, read_state, refuse_folders
from megatron_ddrp.errors import refusals_as_user_errors
from megatron_ddrp.run import launch
from megatron_ddrp.run.metrics import MetricsFile, read_rows
from megatron_ddrp.run.run_folder import RunFolder
from megatron_ddrp.tasks.jobs import Store
from tests.crash.protocol import Protocol, quietly
from tests.crash.sample import write_rows
from tests.endurance.lines import ROOT
from tests.integration.conftest import TINY, command_line

KINDS = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.BESIDE)


class Save(Protocol):
    """Checkpoints 4 and 6 over 2, each after its rows of metrics.jsonl; two are kept."""

    name = "save"
    had: tuple[int, ...] = (2,)
    begin = 2
    """Checkpoint that the run resumes from."""

    @property
    def run(self) -> Path:
        """The `--save` folder."""
        return self.root / "run"

    def prepare(self) -> None:
        self.sample.make_run(self.run, self.had)

    def update(self) -> None:
        since = self.begin
        MetricsFile(self.run / "metrics.jsonl", since, lambda _: None).close()
        for step in (4, 6):
            with refusals_as_user_errors(self.run):
                write_rows(self.run, since, step)
            self.sample.save(self.run, step, since, keep_last=2)
            self.report(str(step))
            since = step

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        least = max([self.begin, *map(int, reported)])
        if refusal := quietly(lambda: refuse_folders(self.run, self.run)).refusal:
            yield f"the run is refused: {refusal}"
        path, refusal, told = quietly(lambda: choose_checkpoint(self.run, KINDS))
        if path is None:
            yield f"no checkpoint: {refusal}"
            return
        step = read_state(path)["iteration"]
        if step < least:
            yield f"checkpoint {step} is chosen, {least} was reported ({told.strip()[:200]})"
        if not self.sample.is_equal(path, step):
            yield f"checkpoint {step} has other weights, and nothing says so"
        yield from missing_rows(self.run, range(1, step + 1), step)
        if not deep:
            return
        self.sample.save(self.run, step + 2, step, keep_last=2)
        if choose_checkpoint(self.run, KINDS, lambda _: None).name != checkpoint.tag(step + 2):
            yield "the next checkpoint is not chosen"
        if left := sorted(path.name for path in self.run.iterdir() if path.name.endswith(".tmp")):
            yield f"the next save leaves {left}"


class SaveAbandoned(Save):
    """`latest` was set back to 2: the run comes by 4 and 6 again."""

    name, had = "save, abandoned", (2, 4, 6)

    def prepare(self) -> None:
        super().prepare()
        checkpoint.mark_latest(self.run, checkpoint.tag(2))


class SaveDamaged(Save):
    """4 is damaged: the run resumes from 2 and saves 4 again."""

    name, had = "save, damaged", (2, 4)

    def prepare(self) -> None:
        super().prepare()
        path = next((self.run / checkpoint.tag(4)).glob("weights*"))
        content = path.read_bytes()
        path.write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])


def missing_rows(run: Path, expected: Iterable[int], step: int) -> Iterator[str]:
    """Yield a fault if metrics.jsonl does not have each row up to a checkpoint once."""
    told: list[str] = []
    MetricsFile(run / "metrics.jsonl", step, told.append).close()
    if (found := [row["iteration"] for row in read_rows(run, told.append)]) != list(expected):
        yield f"metrics.jsonl has the rows {found} before checkpoint {step}{'' if told else ', and nothing says so'}"


class Start(Protocol):
    """A run in folders that do not exist yet: lock, configuration, tokenizer, first checkpoint, exit code."""

    name = "first start of a run"

    @property
    def run(self) -> Path:
        """The `--save` folder."""
        return self.root / "new" / "run"

    def update(self) -> None:
        refuse_folders(self.run, self.run)
        with RunFolder(self.run, self.sample.config, self.sample.tokenizer, 3.0):
            with refusals_as_user_errors(self.run):
                write_rows(self.run, 0, 2)
            self.sample.save(self.run, 2, 0)
            self.report("2")
        with refusals_as_user_errors(self.run):
            launch.note_exit_code(self.run, 0)

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        if reported:
            yield from lost_checkpoint(self, self.run, 2)
        for action in (lambda: refuse_folders(self.run, self.run), self._enter):
            if refusal := quietly(action).refusal:
                yield f"the same command is refused: {refusal}"
                return
        if deep and not checkpoint.holds_run(self.run):
            self.update()
            yield from lost_checkpoint(self, self.run, 2)

    def _enter(self) -> None:
        with RunFolder(self.run, self.sample.config, self.sample.tokenizer, 3.0):
            MetricsFile(self.run / "metrics.jsonl", 0, lambda _: None).close()


def lost_checkpoint(protocol: Protocol, run: Path, step: int) -> Iterator[str]:
    """Yield a fault unless a run's checkpoint is there and can be loaded."""
    path, refusal, _ = quietly(lambda: choose_checkpoint(run, KINDS))
    if path is None:
        yield f"a reported checkpoint is lost: {refusal}"
        return
    if not protocol.sample.is_equal(path, step):
        yield "a reported checkpoint has other weights"
    if refusal := quietly(lambda: checkpoint.load_model(run)).refusal:
        yield f"a reported checkpoint cannot be loaded: {refusal}"


class NewStore(Protocol):
    """Three jobs of a store that does not exist yet."""

    name = "store, new"
    had: tuple[str, ...] = ()

    def _store(self) -> Store:
        self.damage: list[str] = []
        return Store(self.root / "out" / "runs.jsonl", lambda row: row["job"], "a job", on_damage=self.damage.append)

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

    name, is_quick = "pretrain", False

    def update(self) -> None:
        from megatron_ddrp import checkpoint as files

        def pruned(folder: Path, keep: int, name: str, *more: Any) -> None:
            prune(folder, keep, name, *more)
            self.report(str(int(name.removeprefix("iter_"))))

        prune, files.prune = files.prune, pruned
        changes = {name: value for name, value in self.sample.config.to_dict()["model"].items() if name in TINY}
        changes |= {"train_iters": 4, "save_interval": 2, "keep_last": 2, "relative_distance": 8}
        changes |= {"data_path": self.sample.folder / "data" / "a_text_document"}
        changes |= {"vocab_file": self.sample.vocabulary, "save": self.root / "run", "load": self.root / "run"}
        words = [str(ROOT / "pretrain_bert.py"), *map(str, command_line(TINY | changes))]
        ends, os._exit, before, sys.argv = os._exit, sys.exit, sys.argv, words  # type: ignore[assignment]
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"pretrain_bert.py ended with {end.code}") from None
        finally:
            os._exit, files.prune, sys.argv = ends, prune, before

    def files(self) -> dict[str, bytes]:
        run = self.root / "run"
        return {str(row["iteration"]): b"" for row in read_rows(run)} if run.exists() else {}

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        run, step = self.root / "run", 0
        if refusal := quietly(lambda: refuse_folders(run, run)).refusal:
            yield f"the run is refused: {refusal}"
        lock = run / "lock"
        if lock.exists() and lock.read_bytes()[:5].strip(b"\0") not in (b"", b"host "):
            yield "the run's own lock is refused"
        if reported or checkpoint.all_checkpoints(run):
            path, refusal, _ = quietly(lambda: choose_checkpoint(run, KINDS))
            if path is None:
                yield f"no checkpoint: {refusal}"
                return
            step = read_state(path)["iteration"]
            if refusal := quietly(lambda: checkpoint.load_model(run)).refusal:
                yield f"checkpoint {step} cannot be loaded: {refusal}"
        if step < (least := max([0, *map(int, reported)])):
            yield f"checkpoint {step} is chosen, {least} was reported"
        if step or (run / "metrics.jsonl").exists():
            yield from missing_rows(run, [row for row in map(int, self.after) if row <= step], step)


RUNS: tuple[type[Protocol], ...] = (Save, SaveAbandoned, SaveDamaged, Start, NewStore, LongerStore, Pretrain)
