"""Test this project on a CUDA device and time it, 10 minutes at a time: `make gpu-report`.

    python benchmarks/gpu_report.py                     # gpu-report.md and gpu-report.json, to send in
    python benchmarks/gpu_report.py                     # again: goes on with the sections that are not done
    python benchmarks/gpu_report.py --minutes 60        # all of it in one go
    python benchmarks/gpu_report.py --tiny              # a trial with tiny models, on a CPU too; its times mean nothing

Sections come by importance: smoke tests of kernels and steps (tests/gpu), whether CUDA graphs should be on, attention
beside other libraries', whole runs, then tables of tokens/s, MFU and peak memory. Each is a process of its own with a
limit of time, and is written when it ends. One that fails or runs out of time says so in the report, with the rows that
it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_device import device_name
from gpu_groups import TINY, Bench, Row, Sizes, one_line
from gpu_page import page, row_line
from gpu_sections import SECTIONS, Section
from gpu_training import write_corpora
from measure import DEVICE, benchmark_parser

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.preprocess.signals import exit_on_sigterm
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError, run_command
from megatron_ddrp.parallel import process_group

ROOT = Path(__file__).resolve().parents[1]
GRACE = 15.0
"""Seconds that a section has beyond its deadline before it is killed."""
LEAST = 20.0
"""Least seconds that a section begins with, unless it is the first."""
PAGE, NUMBERS, LOG = "gpu-report.md", "gpu-report.json", "gpu-report.log"


class Reporter:
    """Runs sections, and keeps the report on disk up to date after each of them."""

    def __init__(self, output: Path, sizes: Sizes, minutes: float, context: Any) -> None:
        """Go on with the report in `output` if there is one. Raises `UserError` if it is of other code or sizes."""
        self.output, self.sizes, self.context = output, sizes, context
        self.began = time.monotonic()
        self.deadline = self.began + minutes * 60
        same = {"format": 2, "commit": commit(), "device": device_name(), "sizes": dataclasses.asdict(sizes)}
        same = json.loads(json.dumps(same))
        self.report: dict[str, Any] = same | {"date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "sections": []}
        if (output / NUMBERS).exists():
            self.report = json.loads((output / NUMBERS).read_text(encoding="utf-8"))
            if other := next((key for key, value in same.items() if self.report.get(key) != value), None):
                raise UserError(
                    f"{output / NUMBERS} is a report of another {other} ({self.report.get(other)} instead "
                    f"of {same[other]}): move it away, or give another --output",
                    WRONG_ARGUMENTS,
                )
        self.minutes_before = self.report.get("minutes", 0.0)

    def run(self, sections: Sequence[Section]) -> None:
        """Run the sections that are not done while there is time: those that never began, then those with faults."""
        before = {section["name"]: section for section in self.report["sections"]}
        new = [section for section in sections if section.name not in before]
        due = [*new, *(s for s in sections if s.name in before and before[s.name]["fault"])]
        if not due:
            print(f"all of these sections are done: see {self.output / PAGE}")
            return
        with tempfile.TemporaryDirectory() as folder:
            write_corpora(Path(folder), self.sizes)
            for number, section in enumerate(due):
                seconds = min(section.seconds, self.deadline - time.monotonic())
                if seconds < LEAST and number:
                    print(
                        f"no time for {', '.join(s.name for s in due[number:])}: run the same command again", flush=True
                    )
                    break
                print(f"[{number + 1}/{len(due)}] {section.title}: up to {seconds / 60:.1f} min", flush=True)
                before[section.name] = self._run_apart(section, Path(folder), seconds)
                self.report["sections"] = [before[s.name] for s in SECTIONS if s.name in before]
                self.report["sections"] += [s for s in before.values() if s not in self.report["sections"]]
                self._write()

    def _run_apart(self, section: Section, folder: Path, seconds: float) -> dict[str, Any]:
        """Run a section in a process of its own for at most so many seconds; return its part of the report."""
        rows_file, began = folder / f"{section.name}.jsonl", time.monotonic()
        rows_file.touch()
        words = (section, self.sizes, folder, seconds, rows_file, self.output / LOG)
        process = self.context.Process(target=work, args=words)
        process.start()
        shown, fault = 0, None
        try:
            while process.is_alive() and time.monotonic() < began + seconds + GRACE:
                process.join(0.2)
                shown = _show_rows(rows_file, shown)
            if process.is_alive():
                fault = "Stopped for time: the rows that are missing were left out."
        finally:
            _kill_all(process)  # also when this command is stopped: a section left alone would keep the device busy
        _show_rows(rows_file, shown)
        rows = read_rows(rows_file)
        if rows and "fault" in rows[-1]:
            fault = rows.pop()["fault"]
        elif process.exitcode and fault is None:
            fault = f"Failed: its process ended with code {process.exitcode}."
        if fault:
            print(f"    {fault}", flush=True)
        took = time.monotonic() - began
        return {"name": section.name, "title": section.title, "seconds": took, "fault": fault, "rows": rows}

    def _write(self) -> None:
        self.report["minutes"] = self.minutes_before + (time.monotonic() - self.began) / 60
        numbers = json.dumps(self.report, indent=1, ensure_ascii=False)
        write_text(self.output / NUMBERS, numbers + "\n")
        write_text(self.output / PAGE, page(self.report))


def work(section: Section, sizes: Sizes, folder: Path, seconds: float, rows_file: Path, log: Path) -> None:
    """Run a section in this process, which leads a group of its own; append its rows and what it fails with."""
    os.setsid()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    with rows_file.open("a", encoding="utf-8", buffering=1) as lines:

        def write(row: Row) -> None:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")

        try:
            section.run(Bench(sizes, folder, time.monotonic() + seconds, write))
            process_group.stop()
        except BaseException as error:
            traceback.print_exc()
            write({"fault": f"Failed: {one_line(error)}"})
            os._exit(FAILURE)  # threads of a failed library may never end


def _kill_all(process: Any) -> None:
    """Kill a section's process with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _show_rows(rows_file: Path, shown: int) -> int:
    """Print the rows that were written since `shown` of them; return how many there are."""
    rows = read_rows(rows_file)
    for row in rows[shown:]:
        if "fault" not in row:
            print(f"    {row_line(row)}", flush=True)
    return len(rows)


def read_rows(rows_file: Path) -> list[Row]:
    """Return the whole rows of a section's file."""
    text = rows_file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def commit() -> str:
    """Return the repository's commit, with "+ changes" where files differ from it; "unknown" outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty= + changes", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="time for this call")
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="folder for the report's files")
    parser.add_argument("--tiny", action="store_true", help="tiny models, with or without a GPU: tries the report out")
    parser.add_argument("--sections", nargs="+", choices=[s.name for s in SECTIONS], help="these alone; None: all")
    arguments = parser.parse_args()
    if DEVICE.type != "cuda" and not arguments.tiny:
        raise UserError(
            f"torch {torch.__version__} finds no CUDA device: run this on a machine with an NVIDIA GPU and a CUDA "
            "build of torch, or try it out with python benchmarks/gpu_report.py --tiny",
            FAILURE,
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    exit_on_sigterm()
    sizes = TINY if arguments.tiny else Sizes()
    reporter = Reporter(arguments.output, sizes, arguments.minutes, multiprocessing.get_context("spawn"))
    reporter.run([s for s in SECTIONS if arguments.sections is None or s.name in arguments.sections])
    names = " and ".join(str(arguments.output / name) for name in (PAGE, NUMBERS))
    print(
        f"wrote {names}\nto send them in, open an issue of this project with both files attached; "
        f"{arguments.output / LOG} has the sections' own output, for errors"
    )


if __name__ == "__main__":
    run_command(main, Path(sys.argv[0]).name)
