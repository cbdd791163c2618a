"""Test this project on a CUDA device and time it, 10 minutes at a time: `make gpu-report`.

    python benchmarks/gpu_report.py                     # gpu-report.md and gpu-report.json, to send in
    python benchmarks/gpu_report.py                     # again: does the sections that are not done
    python benchmarks/gpu_report.py --minutes 40        # all of it in one go
    python benchmarks/gpu_report.py --tiny              # a trial with tiny models, on a CPU too; its times mean nothing

Sections come by importance: smoke tests of kernels and steps (tests/gpu), CUDA graphs off and on, attention and the
loss by themselves, three tiles of each kernel, steps beside transformers, a resumed run. Each is a process of its own
with a limit of time, and is written when it ends. The report says which failed or ran out of time, and has their rows
so far.
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_device import device_name
from gpu_sections import SECTIONS, ReportSection
from gpu_training import TINY, Bench, ReportSizes, Row, one_line, write_corpora
from measure import DEVICE, benchmark_parser

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.preprocess.pipeline import exit_on_sigterm
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError, run_command
from megatron_ddrp.parallel import process_group

ROOT = Path(__file__).resolve().parents[1]
LEAST = 20.0
"""Least seconds that a section begins with, unless it is the first."""
PAGE, NUMBERS, LOG = "gpu-report.md", "gpu-report.json", "gpu-report.log"

FORMATS = {
    **{
        "tokens/s": ",.0f",
        "ms": ".2f",
        "earlier ms": ".2f",
        "host ms": ".2f",
        "kernel ms": ".2f",
        "first steps, s": ".1f",
    },
    **{"busy": ".0%", "MFU": ".1%", "TFLOP/s": ".1f", "peak GiB": ".2f"},
}
"""Column → the format of its numbers."""


class Reporter:
    """Runs sections, and keeps the report on disk up to date after each of them."""

    def __init__(self, output: Path, sizes: ReportSizes, minutes: float, context: Any) -> None:
        """Go on with the report in `output` if there is one. Raises `UserError` if it is of other code or sizes."""
        self.output, self.sizes, self.context = output, sizes, context
        self.began = time.monotonic()
        self.deadline = self.began + minutes * 60
        same = {"format": 3, "commit": commit(), "device": device_name(), "sizes": dataclasses.asdict(sizes)}
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

    def run(self, sections: Sequence[ReportSection]) -> None:
        """Run the sections that are not done while there is time: those that never began, then those with faults."""
        before = {section["name"]: section for section in self.report["sections"]}
        due = [section for section in sections if section.name not in before or before[section.name]["fault"]]
        due.sort(key=lambda section: section.name in before)
        if not due:
            print(f"all of these sections are done: see {self.output / PAGE}")
            return
        order = {section.name: number for number, section in enumerate(SECTIONS)}
        with tempfile.TemporaryDirectory() as folder:
            write_corpora(Path(folder), self.sizes)
            for number, section in enumerate(due):
                seconds = min(section.seconds, self.deadline - time.monotonic())
                if seconds < LEAST and number:
                    left = ", ".join(s.name for s in due[number:])
                    print(f"no time for {left}: run the same command again", flush=True)
                    break
                print(f"[{number + 1}/{len(due)}] {section.title}: up to {seconds / 60:.1f} min", flush=True)
                before[section.name] = self._run_apart(section, Path(folder), seconds)
                self.report["sections"] = sorted(before.values(), key=lambda s: order.get(s["name"], len(order)))
                self._write()

    def _run_apart(self, section: ReportSection, folder: Path, seconds: float) -> dict[str, Any]:
        """Run a section in a process of its own for at most so many seconds; return its part of the report."""
        rows_file, began = folder / f"{section.name}.jsonl", time.monotonic()
        rows_file.touch()
        words = (section, self.sizes, folder, rows_file, self.output / LOG)
        process = self.context.Process(target=work, args=words)
        process.start()
        try:
            process.join(max(0.0, seconds))
            fault = "Stopped for time: the rows that are missing were left out." if process.is_alive() else None
        finally:
            _kill_all(process)  # also when this command is stopped: a section left alone would keep the device busy
        text = rows_file.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
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
        write_text(self.output / NUMBERS, json.dumps(self.report, indent=1, ensure_ascii=False) + "\n")
        write_text(self.output / PAGE, page(self.report))


def work(section: ReportSection, sizes: ReportSizes, folder: Path, rows_file: Path, log: Path) -> None:
    """Run a section in this process, which leads a group of its own; append its rows and what it fails with."""
    os.setsid()
    terminal = os.dup(1)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    with rows_file.open("a", encoding="utf-8", buffering=1) as lines, open(terminal, "w", buffering=1) as shown:

        def write(row: Row) -> None:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            shown.write(f"    {'  '.join(f'{column} {text}' for column, text in cells(row).items())}\n")

        try:
            section.run(Bench(sizes, folder, write))
            process_group.stop()
        except BaseException as error:
            traceback.print_exc()
            lines.write(json.dumps({"fault": f"Failed: {one_line(error)}"}) + "\n")
            os._exit(FAILURE)  # threads of a failed library may never end


def _kill_all(process: Any) -> None:
    """Kill a section's process with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def page(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    sizes = report["sizes"]
    lines = [
        "# GPU report",
        "",
        f"Begun at {report['date']} by commit {report['commit']}; {report['minutes']:.1f} minutes so far. A step's "
        f"time is the median of {sizes['steps']} steps after {sizes['warm_up']} others. ms is per micro-batch, with "
        f"{sizes['micro_batches']} per optimizer step. docs/lab/benchmarks.md says what the columns mean.",
    ]
    for section in report["sections"]:
        tests = [row for row in section["rows"] if "outcome" in row]
        outcomes = Counter(
            f"skipped ({row['note']})" if row["outcome"] == "skipped" else row["outcome"] for row in tests
        )
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        lines += ["", f"## {section['title']}", "", *[f"{counts}.", ""] * bool(counts)]
        lines += table([row for row in section["rows"] if row.get("outcome") not in ("passed", "skipped")])
        lines += ["", f"{section['seconds']:.0f} s. {section['fault'] or ''}".strip()]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table of some rows."""
    told = [cells(row) for row in rows]
    columns = list(dict.fromkeys(column for row in told for column in row))
    lines = [columns, ["---"] * len(columns), *([row.get(column, "–") for column in columns] for row in told)]
    return ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines if columns]


def cells(row: Row) -> dict[str, str]:
    """Return the text of each column that a row fills; lists stand in the JSON alone."""
    filled = {key: value for key, value in row.items() if value is not None and not isinstance(value, list)}
    return {key: format(value, FORMATS.get(key, "")) for key, value in filled.items()}


def commit() -> str:
    """Return the repository's commit, with "+ changes" where files differ from it; "unknown" outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty= + changes", "--exclude=*"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


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
    sizes = TINY if arguments.tiny else ReportSizes()
    reporter = Reporter(arguments.output, sizes, arguments.minutes, multiprocessing.get_context("spawn"))
    reporter.run([s for s in SECTIONS if arguments.sections is None or s.name in arguments.sections])
    names = " and ".join(str(arguments.output / name) for name in (PAGE, NUMBERS))
    print(
        f"wrote {names}\nto send them in, open an issue of this project with both files attached; "
        f"{arguments.output / LOG} has the sections' own output, for errors"
    )


if __name__ == "__main__":
    run_command(main, Path(sys.argv[0]).name)
