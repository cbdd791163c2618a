"""The sections of the GPU report: smoke tests, then tables. A section writes the rows of one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpu_device import HAS_GPU, describe_machine
from gpu_groups import Bench, Key, Row, Starter, measure_together
from gpu_others import MODELS, Foreign
from gpu_parts import measure_parts
from gpu_training import Arm, measure
from measure import DEVICE

from megatron_ddrp.config import OBJECTIVES, ModelConfig, ObjectiveConfig, flag
from megatron_ddrp.run.device import choices as choices_of_device

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"
FLAGSHIP = (ModelConfig().position_encoding, ObjectiveConfig().objective)
PLAIN = ("absolute", "mlm")
NOT_TIMED = ("auto", "eager", "blocked")
"""Attention backends that no GPU trains with: the name for the best one, the reference, and that of CPUs."""


class Section(NamedTuple):
    """One table of the report."""

    name: str
    title: str
    share: float
    """Part of the report's time, relative to the other sections' shares."""
    run: Callable[[Bench], None]


def backends() -> list[str]:
    """Return the attention backends that a GPU can train with, by `--attention-backend`."""
    (field,) = (f for f in dataclasses.fields(ModelConfig) if f.name == "attention_backend")
    return [name for name in field.metadata["choices"] if name not in NOT_TIMED]


def machine(bench: Bench) -> None:
    """Write the device, its driver and the versions of all that takes part."""
    for name, value in describe_machine().items():
        bench.write({"name": name, "value": value})
    for encoding, objective in (FLAGSHIP, PLAIN):
        run = arm(bench.sizes.usual_length, encoding, objective)
        chosen = choices_of_device(run.config(bench, bench.sizes.tokens), DEVICE)
        bench.write({"name": f"{run.name} by default", "value": chosen})


class Recorder:
    """A plug-in of pytest that writes a row with the number of tests, then a row for each test."""

    def __init__(self, write: Callable[[Row], None]) -> None:
        self.write = write

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write how many tests will run, so that a reader sees how many the deadline cut off."""
        self.write({"selected": len(session.items)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test's outcome: after its call, or after what came before or behind it and did not pass."""
        if report.when == "call" or report.outcome != "passed":
            row: Row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            self.write(row | ({} if report.outcome == "passed" else {"note": reason(report)}))


def reason(report: pytest.TestReport) -> str:
    """Return in one line why a test failed or was skipped."""
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:200]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return " ".join(text.split())[:200]


def run_tests(paths: Sequence[Path], bench: Bench) -> None:
    """Run tests, and write a row for each. Those that the deadline cuts off have none."""
    import pytest

    settings = TESTS.parents[1] / "pyproject.toml"
    arguments = ["-p", "no:cacheprovider", "-m", "gpu", "-c", str(settings), *map(str, paths)]
    code = pytest.main(arguments, plugins=[Recorder(bench.write)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {pytest.ExitCode(code).name}")


def arm(length: int, encoding: str, objective: str, rows: str = "full", **model: str) -> Arm:
    """Return an arm named after what it trains and the settings in `model`."""
    settings = [f"{flag(name)} {value}" for name, value in model.items()]
    name = ", ".join((f"{encoding} + {objective}", *settings))
    return Arm(name, length, {"position_encoding": encoding, **model}, objective, rows)


def by_length(bench: Bench) -> None:
    """Time the flagship at every length, in rows without padding, padded and packed, and plain BERT."""
    for length in bench.lengths:
        flagship = [arm(length, *FLAGSHIP, rows) for rows in ("full", "padded", "packed")]
        measure([*flagship, arm(length, *PLAIN)], bench)


def by_encoding(bench: Bench) -> None:
    """Time every encoding with every objective."""
    for encoding in bench.sizes.encodings:
        measure([arm(bench.sizes.usual_length, encoding, objective) for objective in OBJECTIVES], bench)


def by_backend(bench: Bench) -> None:
    """Time every attention backend beside the others, for every encoding and for the flagship."""
    for encoding, objective in (*((encoding, PLAIN[1]) for encoding in bench.sizes.encodings), FLAGSHIP):
        length = bench.sizes.usual_length
        measure([arm(length, encoding, objective, attention_backend=name) for name in backends()], bench)


def compiled_or_not(bench: Bench) -> None:
    """Time the flagship and plain BERT with `--compile on` beside `off`."""
    if not HAS_GPU:
        bench.write({"name": "--compile", "note": "not timed on a CPU, where compiling takes minutes"})
        return
    for encoding, objective in (FLAGSHIP, PLAIN):
        length = bench.sizes.usual_length
        measure([arm(length, encoding, objective, compile=switch) for switch in ("on", "off")], bench)


def parts(bench: Bench) -> None:
    """Time the parts of a step of the flagship and of plain BERT."""
    for encoding, objective in (FLAGSHIP, PLAIN):
        measure_parts(arm(bench.sizes.usual_length, encoding, objective), bench)


def others(bench: Bench, models: Mapping[str, Sequence[str]] = MODELS) -> None:
    """Time our plain BERT and DeBERTa, each beside the models of other libraries that are like it."""
    for length in bench.lengths:
        for encoding, names in models.items():
            starters: dict[Key, Starter]
            starters = {(f"transformers: {name}", "full"): partial(Foreign, name, bench, length) for name in names}
            ours = arm(length, encoding, PLAIN[1])
            starters[ours.name, ours.rows] = partial(ours.start, bench)
            measure_together(starters, bench, length)


def smoke(name: str, file: str, share: float) -> Section:
    """Return the section that runs one file of tests/gpu."""
    return Section(f"smoke-{name}", f"Smoke tests: {name}", share, partial(run_tests, [TESTS / file]))


SECTIONS = (
    Section("machine", "The machine", 3, machine),
    smoke("steps", "test_steps_gpu.py", 9),
    smoke("runs", "test_runs_gpu.py", 4),
    smoke("attention", "test_attention_gpu.py", 3),
    Section("lengths", "Lengths and kinds of rows", 6, by_length),
    Section("encodings", "Every encoding with every objective", 8, by_encoding),
    Section("backends", "Attention backends", 6, by_backend),
    Section("compile", "Compiled layers", 4, compiled_or_not),
    Section("parts", "Parts of a step", 2, parts),
    Section("others", "Beside other libraries", 6, others),
)
"""The sections in the order of the report, each in a process of its own, where a failed kernel spoils the device."""
