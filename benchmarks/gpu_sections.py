"""The sections of the GPU report by importance. A section writes the rows of one table."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gpu_device import describe_machine
from gpu_graphs import decide
from gpu_groups import Bench, Key, Starter, measure_together
from gpu_kernels import kernels
from gpu_others import MODELS, Foreign
from gpu_runs import finetuning_twice, whole_runs
from gpu_training import FLAGSHIP, PLAIN, arm, measure
from measure import DEVICE

from megatron_ddrp.config import OBJECTIVES, ModelConfig
from megatron_ddrp.engine.device import choices as choices_of_device

TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"
NOT_TIMED = ("auto", "eager", "blocked")
"""Attention backends that no GPU trains with: the name for the best one, the reference, and that of CPUs."""


class Section(NamedTuple):
    """One table of the report."""

    name: str
    title: str
    seconds: float
    """Most time that it may take."""
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


def processes_of_tests() -> int:
    """Return the number of processes that share the tests of a section, which mostly wait for a compiler."""
    cores = len(os.sched_getaffinity(0))
    return min(12, cores - 2) if cores > 3 and importlib.util.find_spec("xdist") else 0


def run_tests(paths: Sequence[Path], bench: Bench, processes: int = 0) -> None:
    """Run tests in this process or several, and write a row for each. Those that the deadline cuts off have none."""
    import pytest
    from gpu_tests import Recorder

    settings = TESTS.parents[1] / "pyproject.toml"
    arguments = ["-p", "no:cacheprovider", "-m", "gpu", "-c", str(settings), *map(str, paths)]
    if processes:
        arguments += ["-n", str(processes), "--dist", "load"]
    code = pytest.main(arguments, plugins=[Recorder(bench.write)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {pytest.ExitCode(code).name}")


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


def others(bench: Bench, models: Mapping[str, Sequence[str]] = MODELS) -> None:
    """Time our plain BERT and DeBERTa, each beside the models of other libraries that are like it."""
    for length in bench.lengths:
        for encoding, names in models.items():
            starters: dict[Key, Starter]
            starters = {(f"transformers: {name}", "full"): partial(Foreign, name, bench, length) for name in names}
            ours = arm(length, encoding, PLAIN[1])
            starters[ours.name, ours.rows] = partial(ours.start, bench)
            measure_together(starters, bench, length)


def smoke(name: str, file: str, seconds: float, is_shared: bool = True) -> Section:
    """Return the section that runs one file of tests/gpu, whose tests several processes may share."""
    processes = processes_of_tests() if is_shared else 0
    run = partial(run_tests, [TESTS / file], processes=processes)
    return Section(f"smoke-{name}", f"Smoke tests: {name}", seconds, run)


SECTIONS = (
    Section("machine", "The machine", 60, machine),
    smoke("attention", "test_attention_gpu.py", 120),
    smoke("steps", "test_steps_gpu.py", 300),
    Section("graphs", "CUDA graphs off and on, in the steps of the recipe", 300, decide),
    Section("kernels", "Attention by itself", 90, kernels),
    Section("runs", "Whole runs: save and resume, ZeRO 1 to 3", 120, whole_runs),
    Section("finetuning", "Fine-tuning twice", 60, finetuning_twice),
    smoke("runs", "test_runs_gpu.py", 240, is_shared=False),  # its runs share one process
    Section("lengths", "Lengths and kinds of rows", 240, by_length),
    Section("others", "Beside other libraries", 240, others),
    Section("backends", "Attention backends", 240, by_backend),
    Section("encodings", "Every encoding with every objective", 300, by_encoding),
)
"""The sections by importance, each in a process of its own, where a failed kernel spoils the device."""
