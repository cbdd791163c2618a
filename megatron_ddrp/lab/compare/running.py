"""Jobs that are command lines, several at once, each as a process with its own log, in the order of the list.

A job waits for the jobs that it needs. If a job fails, the driver reports its log and drops the jobs that need it; the
others continue. A job's process and the driver, which started it, hold its lease together: if the driver is killed, the
lease is free only after the process has ended. If the driver ends for any reason, the store has the finished jobs and
the runs have their checkpoints; the same command resumes. On Linux the kernel then tells the processes to stop; on
other systems they run to their end, and the next driver waits for them.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.jobs import Job, JobLines, log_file
from megatron_ddrp.pages import machine

ROOT = Path(__file__).resolve().parents[3]
WAIT = 0.3
"""Seconds between two checks of the processes."""
STATUS = 60.0
"""Seconds between two status lines."""
GRACE = 120.0
"""Seconds that a stopped process gets to save its last checkpoint."""
_SET_PARENT_DEATH_SIGNAL = 1


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
    """Driver of jobs that are command lines."""

    def __init__(self, lines: JobLines, say: Callable[[str], object], after: Callable[[], object] = lambda: None):
        """Take what prints a line, `say`, and what runs whenever a job is finished, `after`."""
        self.after = after
        self.lines, self.store, self.workers, self.say = lines, lines.store, lines.workers, say
        self.folder = self.store.path.parent
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
            self.say("  " + self.lines.status([(r.job, r.began) for r in self.running], left))
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
                preexec_fn=_stop_with_parent if sys.platform == "linux" else None,
            )
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.running.append(_Running(job, lease, process, slot, time.monotonic(), now))

    def _environment(self, slot: int) -> dict[str, str]:
        """Return the environment of a job: paths, and with several workers its share of cores and GPUs."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        if self.workers > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.workers)))
            if (gpus := len(machine.gpu_names())) > 1:
                visible = environment.get("CUDA_VISIBLE_DEVICES")
                names = visible.split(",") if visible else [str(number) for number in range(gpus)]
                environment["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
        return environment

    def _finish(self, running: _Running, jobs: Sequence[Job]) -> None:
        job, code = running.job, running.process.returncode
        with running.lease:
            if code == 0 and job.output.exists():
                seconds = time.monotonic() - running.began
                self.store.append(self._row(running, seconds))
                self.after()
                done = len(jobs) - len(self.store.missing(jobs))
                self.say(f"[{done}/{len(jobs)}] " + self.lines.finished(job, seconds, self.left(jobs)))
                return
        log = log_file(self.folder, job)
        why = f"exit code {code}" if code else f"it made no {job.output}"
        self.failed[job.name] = f"{why}; see {log}"
        self.say(f"FAILED {job}: {why}, {last_line(log)} (see {log}); the others continue")

    def _row(self, running: _Running, seconds: float) -> dict[str, Any]:
        job = running.job
        return {
            "job": job.name,
            "kind": job.kind,
            "title": job.title,
            "command": shlex.join(job.command),
            "work": job.work,
            "seconds": round(seconds, 3),
            "started": running.started,
            "workers": self.workers,
            "threads": self._environment(running.slot).get("OMP_NUM_THREADS"),
            "hardware": machine.hardware(),
            "versions": machine.versions(),
        }

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


def full_command(command: Sequence[str]) -> list[str]:
    """Return a command with this Python and this package in place of `megatron-ddrp`."""
    own = [sys.executable, "-m", "megatron_ddrp"]
    if command[0] == "megatron-ddrp":
        return [*own, *command[1:]]
    return [sys.executable, *command[1:]] if command[0] == "python" else list(command)


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


def _stop_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
