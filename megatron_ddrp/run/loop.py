"""The loop over training steps (launch, log, validate, save, stop), and the memory of its process."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ddrp.checkpoint import last_name
from megatron_ddrp.checkpoint.weights import note_tensors
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import BatchLoader, iterate, validation_steps
from megatron_ddrp.data.points import point
from megatron_ddrp.engine.checkpoint import Progress, save_checkpoint
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.engine.nonfinite import FiniteSteps, Launched, reads_late
from megatron_ddrp.engine.step import HostCopy, MicroBatch, StepResult, evaluate, training_inputs
from megatron_ddrp.errors import ASKED_TO_STOP, UserError, shared_error
from megatron_ddrp.objectives.contract import losses_of
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.parallel.process_group import agree, largest_on_device, largest_over_ranks
from megatron_ddrp.run.flops import StepProfile, flop_of_step, peak_of_run
from megatron_ddrp.run.launch import StopRequests, name_of, note_exit_code
from megatron_ddrp.run.log import Clock, MetricsLog, progress_line, similarities, terms

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""glibc's numbers for `mallopt(3)`."""

VALIDATED = {"valid": "validation", "other": "other text"}
"""Split that validations read → its name on the terminal; the split's losses begin with its key."""

NEVER, GROWTH = 2**31 - 1, 64 * 2**20
SMALL, LARGE = 64 * 2**10, 32 * 2**20
"""Bytes from which on a tensor has a mapping of its own: under `return_freed_memory`, and with several heaps."""

KEPT_KERNELS = 64
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables of oneDNN, and of ideep, by which torch calls it."""


def prepare_cpu() -> None:
    """Prepare this process for training on a CPU, before its first step; the environment may say otherwise."""
    keep_freed_memory(several_heaps=os.environ.get("MALLOC_ARENA_MAX") != "1")
    bound_kernel_caches()


def keep_freed_memory(several_heaps: bool = False) -> None:
    """Stop returning freed memory to the system; without effect if malloc is not glibc's.

    A training step on a CPU frees and allocates the same large tensors repeatedly. glibc maps each of them anew, and
    every page of a new mapping costs a page fault and 4 KiB of zeros (measured in `docs/lab/benchmarks.md`). The
    process's peak changes little; between peaks it keeps its memory. With `several_heaps`, one for each thread, this
    is so for tensors below 32 MiB only: a heap cannot use what another one keeps, and a run would grow without end.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(*(M_MMAP_THRESHOLD, LARGE) if several_heaps else (M_MMAP_MAX, 0))
        mallopt(M_TRIM_THRESHOLD, NEVER)
        mallopt(M_TOP_PAD, GROWTH)


def bound_kernel_caches() -> None:
    """Let oneDNN keep 64 kernels instead of 1,024, unless the environment names numbers; before its first kernel.

    In bf16 oneDNN writes a kernel for each shape of a product on a CPU, with about 2 MB, and the number of predicted
    tokens is a new shape in nearly every micro-batch. Writing one takes a quarter of a millisecond.
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(KEPT_KERNELS))


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system at once; without effect if malloc is not glibc's.

    The resident size is then that of the tensors in use, equal in every process to a tenth of a MiB. Otherwise it
    includes memory kept by the heap, which differs by tens of MiB between processes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALL)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on a GPU so far; on a CPU the largest resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident_bytes() -> int | None:
    """Reset the peak resident size of this process and return the present size; None without Linux's /proc.

    The peak of `getrusage` cannot be reset and includes that of the process before `exec`.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the peak resident size of this process since `reset_peak_resident_bytes`."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@dataclass(frozen=True)
class TrainingRun:
    """State of one rank's running training, shared by steps, validations and checkpoints."""

    setup: Setup
    engine: Any
    log: MetricsLog
    folder: Path | None
    """Value of `--save`."""
    notes: NoteDictionary | None

    def steps(
        self, loader: BatchLoader, validation: Mapping[str, BatchLoader], progress: Progress, requests: StopRequests
    ) -> tuple[Progress, int]:
        """Train from `progress` to the last step, `--exit-interval` or a request to stop.

        `validation` has the loaders of the splits that validations read. Return the progress and the request's code, 0
        without one. If numbers are read late (on GPUs), a step is finished after the next one was launched, and a
        request takes effect one step later.
        """
        setup, config, ranks, begin = self.setup, self.setup.config, self.setup.ranks, progress
        clock = Clock(begin.iteration, config.training.train_iters, peak_of_run(setup))
        finite = FiniteSteps(self.engine, setup, self.log.say, self.notes)
        late, profile = reads_late(setup), StepProfile(setup, begin.iteration)
        self.say(profile.refusal)

        def prepare(micro_batches: list[Batch], number: int) -> list[MicroBatch]:
            return training_inputs(micro_batches, setup, begin.iteration + 1 + number)

        def finish(launched: Launched) -> Progress:
            result = finite.finish(launched)
            after = advance(progress, result, config.training.global_batch_size)
            arrays = [micro_batch.arrays for micro_batch in launched.micro_batches]
            flop = 0.0 if clock.peak is None else flop_of_step(setup.at(after.iteration), arrays)
            clock.count(result.counts["tokens"], flop)
            if logged := self.logs(after.iteration):
                self.log_step(result, after, clock)
            elif self.log.is_quiet():
                self.show_step(self.numbers_of(result, after, clock), clock)
            return replace(after, since_logged={}) if logged else after

        if request := largest_over_ranks(requests.received, ranks.device):  # before a step: a clock waits for the first
            return progress, request
        saved_at = begin.iteration
        waiting: tuple[Launched, HostCopy] | None = None  # the step before, and the requests to stop at its launch
        to_do = config.training.train_iters - begin.iteration
        with closing(iterate(loader, begin.consumed_samples, to_do, prepare, begin.iteration)) as stream:
            for number, micro_batches in enumerate(stream):
                profile.begin(begin.iteration + 1 + number)
                launched = finite.launch(micro_batches, begin.iteration + 1 + number)
                if waiting is not None:
                    earlier, requested = waiting
                    progress, request = finish(earlier), int(requested.read())
                pauses = self.pauses_after(launched.step, bool(validation)) or profile.is_bound(launched.step)
                if late and not request and not pauses and not launched.fault:
                    waiting = launched, HostCopy(largest_on_device(requests.code, ranks.device))
                    continue
                progress, waiting = finish(launched), None
                with clock.pause():
                    self.say(profile.finish(progress.iteration))
                    if validation and self.is_due(progress.iteration, config.logging.eval_interval):
                        self.validate(validation, progress)
                request = request or largest_over_ranks(requests.code, ranks.device)
                stops = self.ends(progress.iteration) or request
                if self.folder and (stops or progress.iteration % config.checkpoint.save_interval == 0):
                    with clock.pause():
                        saved_at = self.save(self.folder, progress, saved_at, must=bool(stops))
                    if saved_at == progress.iteration:  # a callback may have asked in on_checkpoint
                        request = request or largest_over_ranks(requests.code, ranks.device)
                if stops or (request and saved_at == progress.iteration):
                    self.say(profile.stop_early(progress.iteration))
                    break
        return progress, request

    def end(self, progress: Progress, request: int) -> int:
        """Report the end of the run, also in DIR/exit_code, and return its code, which `Trained.code` describes."""
        code = ASKED_TO_STOP if request and progress.iteration < self.setup.config.training.train_iters else 0
        if code:
            saved = "" if self.folder else "; nothing is saved without --save"
            self.log.say(f"stopped at step {progress.iteration:,} by {name_of(request)}{saved}")
        if self.folder and self.setup.ranks.rank == 0:
            note_exit_code(self.folder, code)
        return code

    def say(self, lines: Sequence[str]) -> None:
        """Print lines for people."""
        for line in lines:
            self.log.say(line)

    def logs(self, iteration: int) -> bool:
        """Return whether a step is logged: the first, every `--log-interval`-th and the last, also of a phase."""
        objective, total = self.setup.config.objective, self.setup.config.training.train_iters
        return iteration in (1, objective.causal_steps(total)) or self.is_due(
            iteration, self.setup.config.logging.log_interval
        )

    def is_due(self, iteration: int, interval: int) -> bool:
        """Return whether an action of every `interval` steps and of the last step is due."""
        return iteration % interval == 0 or iteration == self.setup.config.training.train_iters

    def ends(self, iteration: int) -> bool:
        """Return whether the run ends here, at its last step or by `--exit-interval`."""
        interval, last = self.setup.config.checkpoint.exit_interval, self.setup.config.training.train_iters
        return iteration == last or (interval is not None and iteration % interval == 0)

    def pauses_after(self, iteration: int, validates: bool) -> bool:
        """Return whether a validation, a checkpoint or the end follows a step; the next step must wait for it.

        It waits for the last step in which the encoder rests too: tried again later, that step would train the encoder.
        """
        config = self.setup.config
        saves = self.folder is not None and iteration % config.checkpoint.save_interval == 0
        validates = validates and self.is_due(iteration, config.logging.eval_interval)
        return saves or validates or self.ends(iteration) or iteration == config.training.new_head_iters

    def numbers_of(self, result: StepResult, progress: Progress, clock: Clock) -> dict[str, Any]:
        """Return the mean losses and rates since the last row, and a step's own learning rate and norm.

        All of them were read when the step was finished.
        """
        objective = self.setup.at(progress.iteration).objective
        return {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            **(losses_of(progress.since_logged, objective) if progress.since_logged else result.losses),
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            **clock.rates(),
        }

    def log_step(self, result: StepResult, progress: Progress, clock: Clock) -> None:
        """Log a step: its numbers, the memory of all ranks, and the columns of callbacks."""
        row, device = self.numbers_of(result, progress, clock), self.setup.ranks.device
        clock.restart()
        row["peak_memory_gib"] = largest_over_ranks(peak_memory_bytes(device), device) / 2**30
        row |= self.log.callbacks.columns(row)
        self.log.write(row, "on_step")
        self.show_step(row, clock)
        point("step.logged", progress.iteration)

    def show_step(self, row: Mapping[str, Any], clock: Clock) -> None:
        """Print the progress line of a step's numbers."""
        iteration = row["iteration"]
        labels = self.setup.at(iteration).objective.labels
        self.log.say(progress_line(row, labels, self.setup.config.training.train_iters, clock.eta(iteration)))

    def validate(self, loaders: Mapping[str, BatchLoader], progress: Progress) -> None:
        """Log the losses on each split; samples, masks and draws are the same each time and for every `--seed`."""
        config, labels = self.setup.config, self.setup.objective.labels
        row: dict[str, float] = {"iteration": progress.iteration}
        for split, loader in loaders.items():
            steps = validation_steps(config.logging.eval_iters, len(loader.samples), loader.global_batch_size)
            with closing(iterate(loader, 0, steps)) as stream:  # its thread ends here even if this fails
                row |= evaluate(self.engine, stream, self.setup, self.notes, split)
        self.log.write(row, "on_validation")
        texts = [f"{VALIDATED[split]} {terms(row, labels, 4, f'{split}_')}" for split in loaders]
        line = f"{' | '.join(texts)}{similarities(row)}"
        self.log.say(f"step {progress.iteration}/{config.training.train_iters} | {line}")

    def save(self, folder: Path, progress: Progress, since: int, must: bool) -> int:
        """Save a checkpoint. If that fails and `must` is false, report it and continue: the earlier ones are whole.

        Return the step of this process's last checkpoint, which was `since`.
        """
        notes = {} if self.notes is None else note_tensors(self.notes)
        try:
            agree(self.log.sync)
            saved = save_checkpoint(self.engine, folder, progress, self.setup, since, notes)
        except UserError as error:
            line = f"step {progress.iteration} not saved: {error}; the last checkpoint is {last_name(folder)}"
            if must:
                raise shared_error(f"{line}; then start the same command again") from error
            self.log.say(f"{line}; training continues")
            return since
        self.log.say(f"saved {saved}")
        self.log.callbacks.tell("on_checkpoint", saved)  # whose errors are no errors of the save
        return progress.iteration


def advance(progress: Progress, result: StepResult, samples: int) -> Progress:
    """Return the progress after a step with so many samples."""
    return replace(
        progress,
        iteration=progress.iteration + 1,
        consumed_samples=progress.consumed_samples + samples,
        consumed_tokens=progress.consumed_tokens + result.counts["tokens"],
        since_logged=add_totals(progress.since_logged, result),
    )


def add_totals(totals: Mapping[str, float], result: StepResult) -> Mapping[str, float]:
    """Return the sums and counts of earlier steps and this one.

    A skipped step adds nothing: its loss or gradients were not finite. Totals with other names, from the checkpoint of
    an earlier version, are dropped.
    """
    if not math.isfinite(result.grad_norm):
        return totals
    own = result.totals
    return {name: totals[name] + own[name] for name in own} if totals.keys() == own.keys() else own
