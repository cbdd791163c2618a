"""Profile of some training steps (`--profile`): the time of every operation, as a table and as a trace."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megatron_ddrp.config import Config
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.parallel.agreement import gather_objects
from megatron_ddrp.parallel.process_group import Ranks

FOLDER = "profile"
"""Folder in the `--save` folder."""
WARM_UP, LENGTH = 10, 2
"""Number of a run's steps before the profile, and of steps in it, where no flag says so."""
LINE_OPERATIONS = 5
"""Number of operations in the line for people."""


class StepProfile:
    """Profiler of some steps, on the ranks of the first replica: the others do the same with other text.

    Without `--profile` it does nothing.
    """

    def __init__(self, config: Config, ranks: Ranks, steps_done: int) -> None:
        """Choose the steps for a run that continues after `steps_done` steps."""
        logging = config.logging
        self.start = steps_done + WARM_UP if logging.profile_step_start is None else logging.profile_step_start
        """Number of the step after which the profile begins."""
        self.end = self.start + LENGTH if logging.profile_step_end is None else logging.profile_step_end
        """Number of its last step."""
        self.refusal: list[str] = []
        """A line that says why there will be no profile, if one was asked for."""
        steps = config.training.train_iters
        if logging.profile and not steps_done <= self.start < self.end <= steps:
            self.refusal = [
                f"no profile: steps {self.start + 1:,} to {self.end:,} are not among those of this run, "
                f"{steps_done + 1:,} to {steps:,}; set --profile-step-start and --profile-step-end"
            ]
        self._pending = logging.profile and not self.refusal
        self._folder = Path(config.checkpoint.save or "") / FOLDER
        self._ranks = ranks
        self._profiler: Any = None
        self._began = 0.0

    def is_bound(self, step: int) -> bool:
        """Return whether the profile begins or ends after this step; the next one must not be launched before."""
        return self._pending and step in (self.start, self.end)

    def begin(self, step: int) -> None:
        """Start the profiler if `step`, which is about to be launched, is the first of the profile."""
        if not self._pending or step != self.start + 1 or self._ranks.data_rank != 0:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its own stages otherwise
        gpu = [ProfilerActivity.CUDA] * (self._ranks.device.type == "cuda")
        self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profiler.start()
        self._began = time.perf_counter()

    def finish(self, step: int) -> list[str]:
        """Write the profile if `step` was its last one; return a line of every rank that profiles.

        A collective call after that step. A profile that cannot be written is reported, and the run continues.
        """
        if not self._pending or step != self.end:
            return []
        seconds = (time.perf_counter() - self._began) / (self.end - self.start)
        profiler = self._stop()
        try:
            own = self._write(profiler, seconds) if profiler else None
        except OSError as error:
            own = f"profile of rank {self._ranks.rank} not written: {error}"
        return [line for line in gather_objects(own) if line is not None]

    def stop_early(self, step: int) -> list[str]:
        """End a profile that is not finished, for a run that stops after `step`; return a line about it."""
        if not self._pending:
            return []
        self._stop()
        return [f"no profile: the run stopped after step {step:,}, before step {self.end:,} (--profile-step-end)"]

    def _stop(self) -> Any:
        """Stop the profiler and return it; None on a rank without one."""
        self._pending, profiler, self._profiler = False, self._profiler, None
        if profiler:
            profiler.stop()
        return profiler

    def _write(self, profiler: Any, seconds: float) -> str:
        """Write table and trace; return a line about them. `seconds` is the time of a step under the profiler."""
        on_gpu = self._ranks.device.type == "cuda"
        operations = profiler.key_averages()
        path = self._folder / f"steps-{self.start + 1}-{self.end}-rank-{self._ranks.rank}"
        self._folder.mkdir(exist_ok=True)
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = operations.table(sort_by=order, row_limit=-1, max_name_column_width=80)
        write_text(path.with_suffix(".txt"), table)
        profiler.export_chrome_trace(f"{path}.json.gz")
        shares = ", ".join(f"{name:.60} {share:.0%}" for name, share in shares_of(operations, on_gpu)[:LINE_OPERATIONS])
        steps = f"steps {self.start + 1} to {self.end} on rank {self._ranks.rank}"
        files = f"{path}.txt has all, ui.perfetto.dev shows {path.name}.json.gz"
        return f"profile of {steps}, {seconds:.3f} s per step with the profiler: {shares}; {files}"


def shares_of(operations: Any, on_gpu: bool) -> list[tuple[str, float]]:
    """Return (name, share of the time) of torch's averaged operations, the longest first: kernels on a GPU.

    There an operation of the host has the time of the kernels that it launched too, which would count twice; a named
    range has the time of all inside.
    """
    if on_gpu:
        kernels = [item for item in operations if item.device_type != DeviceType.CPU and not item.is_user_annotation]
        times = [(item.key, float(item.self_device_time_total)) for item in kernels]
    else:
        times = [(item.key, float(item.self_cpu_time_total)) for item in operations]
    total = sum(time for _, time in times) or 1.0
    return sorted(((name, time / total) for name, time in times), key=lambda pair: -pair[1])
