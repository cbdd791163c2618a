"""The sections of the GPU report by importance. A section writes the rows of one table."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_device import DTYPES, describe_machine, device_name, kernel_seconds, precision
from gpu_training import Bench, ReportSizes, Row, StepArm, noted, time_steps, training, transformers_training
from measure import DEVICE, time_rounds
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.model.attention.backends import backend_function, resolve_backend
from megatron_ddrp.model.attention.gpu import triton_attention
from megatron_ddrp.model.attention.gpu.triton_attention import Tile
from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.heads import masked_lm_sum
from megatron_ddrp.model.stages import Layout
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.train import train

TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"
PLAIN = ("absolute", "mlm")
ROUNDS = 6
"""Times that a call of attention is timed."""
PRODUCTS = 7
"""Products of plain attention, 2 forward and 5 backward."""
COMPARED = 2
"""Heads in HCD, as in the recipe."""
TRITON_PRODUCTS = {
    "forward_kernel": 2.0,  # Q·Kᵀ, P·V
    "key_gradient_kernel": 4.0,  # Q·Kᵀ again, dO·Vᵀ, dAᵀ·Q, Pᵀ·dO
    "query_gradient_kernel": 1.0,  # dA·K
    **dict.fromkeys(("rows_kernel", "loss_kernel", "loss_gradient_kernel"), 0.0),
}
"""Triton kernel → its products of `[seq, head_dim]` and `[head_dim, seq]` per head."""

EARLIER = {
    **{"torch": 0.67, "ours, ddrp": 2.94, "ours, ddrp with HCD": 3.05, "ours, deberta": 3.29},
    **{"ours, ddrp, forward_kernel": 0.37, "ours, ddrp, query_gradient_kernel": 0.63},
    **{"ours, ddrp, key_gradient_kernel": 0.54, "ddrp + mth, graphs on": 54.4},
}
"""Row → its ms on an H100 with the kernels of November 2026 (docs/lab/benchmarks.md)."""

SQUARE = Tile(64, 64, 4, 2)
OTHER_TILES = {
    "forward": {9: (Tile(128, 64, 8, 2), SQUARE), 8: (Tile(128, 32, 8, 2), SQUARE)},
    "key_gradient": {9: (Tile(64, 128, 8, 2), Tile(32, 128, 8, 2, 128)), 8: (Tile(32, 128, 8, 2), SQUARE)},
    "query_gradient": {9: (Tile(128, 64, 8, 2), SQUARE), 8: (Tile(128, 32, 8, 2, 128), SQUARE)},
}
"""Kind of kernel → major compute capability → tiles for heads of 64 that are timed beside the shipped one."""

ITERATIONS, STOP = 6, 3
"""Steps of a whole run, and the step at which it stops to be resumed."""

Call = Callable[[], list[Tensor]]
"""Type of a forward pass; it returns what has a gradient."""


class ReportSection(NamedTuple):
    """One table of the report."""

    name: str
    title: str
    seconds: float
    """Most time that it may take."""
    run: Callable[[Bench], None]


def machine(bench: Bench) -> None:
    """Write the device, its driver and the versions of all that takes part."""
    for name, value in describe_machine().items():
        bench.write({"name": name, "value": value})


class OutcomeRecorder:
    """A plug-in of pytest that writes a row for each test."""

    def __init__(self, write: Callable[[Row], None]) -> None:
        self.write = write

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write a test's outcome: after its call, or after what came before or behind it and did not pass."""
        if report.when == "call" or report.outcome != "passed":
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr)
            if isinstance(reason, tuple):  # of a skipped test: file, line, reason
                reason = reason[2].removeprefix("Skipped: ")
            note = None if report.outcome == "passed" else " ".join(str(reason).split())[:200]
            self.write({"name": report.nodeid, "outcome": report.outcome, "note": note})


def run_tests(paths: Sequence[Path], bench: Bench, processes: int = 0) -> None:
    """Run tests in this process or several, and write a row for each."""
    import pytest

    settings = TESTS.parents[1] / "pyproject.toml"
    arguments = ["-p", "no:cacheprovider", "-m", "gpu", "-c", str(settings), *map(str, paths)]
    if processes:
        arguments += ["-n", str(processes), "--dist", "load"]
    code = pytest.main(arguments, plugins=[OutcomeRecorder(bench.write)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {pytest.ExitCode(code).name}")


def smoke(name: str, file: str, seconds: float, is_shared: bool = True) -> ReportSection:
    """Return the section that runs one file of tests/gpu, whose tests several processes may share."""
    cores = len(os.sched_getaffinity(0))
    processes = min(12, cores - 2) if is_shared and cores > 3 and importlib.util.find_spec("xdist") else 0
    run = partial(run_tests, [TESTS / file], processes=processes)  # a test mostly waits for a compiler
    return ReportSection(f"smoke-{name}", f"Smoke tests: {name}", seconds, run)


def graphs(bench: Bench) -> None:
    """Train the flagship, plain BERT and the flagship on packed rows without graphs, again, and with graphs."""
    length = bench.sizes.lengths[0]
    for base in (StepArm(length), StepArm(length, *PLAIN), StepArm(length, rows="packed")):
        rows: list[Row] = []
        for way in ("off", "off, again", "on"):
            start = partial(training, base._replace(graphs=way.partition(",")[0]), bench)
            row = time_steps(base.row | {"name": f"{base.row['name']}, graphs {way}"}, start, bench.sizes)
            if rows:
                row["gradient norms beside the first"] = sameness(rows[0].get("numbers"), row.get("numbers"))
            rows.append(row)
            bench.write(beside_earlier(row, bench.sizes))


def sameness(expected: list[Any] | None, got: list[Any] | None) -> str:
    """Return in words whether the steps of two runs have the same numbers."""
    if not expected or not got:
        return "not compared"
    other = next((step for step, pair in enumerate(zip(expected, got, strict=True), 1) if pair[0] != pair[1]), None)
    return f"other from step {other} on" if other else f"all {len(got)} equal bit for bit"


def leaf(*shape: int) -> Tensor:
    """Return a random tensor on the device that has a gradient."""
    return torch.randn(*shape, device=DEVICE, dtype=DTYPES[precision()], requires_grad=True)


def vectors(sizes: ReportSizes) -> list[Tensor]:
    """Return query, key and value `[batch, heads, seq, head_dim]`."""
    seq, heads = sizes.lengths[0], sizes.heads
    return [leaf(sizes.tokens // seq, seq, heads, sizes.hidden // heads).transpose(1, 2) for _ in range(3)]


def torchs(sizes: ReportSizes) -> Call:
    """Return torch's attention, which is its flash kernel in half precision on GPUs that have it."""
    query, key, value = vectors(sizes)
    return lambda: [F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)]


def ours(encoding: str, compared: int, sizes: ReportSizes) -> Call:
    """Return our attention with an encoding's terms, by the backend that a run would choose."""
    shape: dict[str, Any] = {"hidden_size": sizes.hidden, "num_attention_heads": sizes.heads}
    config = ModelConfig(position_encoding=encoding, num_layers=1, seq_length=sizes.lengths[0], **shape)
    module = encoding_class(encoding)(config)
    maps = [nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2)]
    tensors = module.layer_part(config).of_layer(module(torch.arange(config.seq_length)[None]), *maps)
    terms = module.terms(config, tensors).by_offset.map(lambda x, _: leaf(*x.shape))
    query, key, value = vectors(sizes)
    documents = torch.ones(query.shape[0], query.shape[2], dtype=torch.long, device=DEVICE)
    counted, heads = documents[:, :1].float(), torch.arange(compared, device=DEVICE)
    attending = Attending(
        query, key, value, terms, documents, heads, 0.1, counted, cast(Layout, SimpleNamespace(full=True))
    )
    attend = backend_function(resolve_backend("auto", attending.demand, in_logits=True)[0])
    return lambda: [output for output in attend(attending) if output is not None]


def loss(convert: Callable[[Tensor, Tensor], Tensor], sizes: ReportSizes) -> Call:
    """Return a sum of losses at 15 % of a micro-batch's tokens, from logits in half precision."""
    logits = leaf(sizes.tokens * 15 // 100, ModelConfig(vocab_size=sizes.vocabulary).padded_vocab_size)
    labels = torch.arange(len(logits), device=DEVICE) % sizes.vocabulary
    return lambda: [convert(logits, labels)]


CALLS: dict[str, Callable[[ReportSizes], Call]] = {
    "torch": torchs,
    "ours, ddrp": partial(ours, "ddrp", 0),
    "ours, ddrp with HCD": partial(ours, "ddrp", COMPARED),
    "ours, deberta": partial(ours, "deberta", 0),
    "torch, loss": partial(loss, lambda logits, labels: F.cross_entropy(logits.float(), labels, reduction="sum")),
    "ours, loss": partial(loss, masked_lm_sum),
}


def kernels(bench: Bench) -> None:
    """Time every call of attention, forward and backward, and on a GPU the kernels of ours."""
    sizes = bench.sizes
    products = 2 * sizes.tokens * sizes.lengths[0] * sizes.hidden  # FLOP of one product, of all heads
    # HCD's kernels multiply Q·Kᵀ for the compared heads alone.
    counts = TRITON_PRODUCTS | dict.fromkeys(("compare_kernel", "pull_kernel"), COMPARED / sizes.heads)
    for name, start in CALLS.items():
        row: Row = {"name": name, "rows": sizes.tokens // sizes.lengths[0], "length": sizes.lengths[0]}
        parts: dict[str, float] = {}
        with noted(row):
            call = start(sizes)
            gradients = [torch.ones_like(output) for output in call()]

            def run(call: Call = call, gradients: list[Tensor] = gradients) -> None:
                torch.autograd.backward(call(), gradients)

            seconds = float(min(time_rounds({name: run}, ROUNDS)[name]))
            row |= {"ms": seconds * 1e3, "TFLOP/s": None if "loss" in name else PRODUCTS * products / seconds / 1e12}
            found = kernel_seconds(run)
            row["kernel ms"] = sum(found.values()) * 1e3 or None
            parts = {kernel: took for kernel, took in found.items() if kernel in counts}
        bench.write(beside_earlier(row, sizes))
        for kernel, took in parts.items():
            tflops = counts[kernel] * products / took / 1e12 or None
            part = {"name": name, "part": kernel, "ms": took * 1e3, "TFLOP/s": tflops}
            bench.write(beside_earlier(part, sizes))


def beside_earlier(row: Row, sizes: ReportSizes) -> Row:
    """Return a row of a report on an H100 with the time of the earlier kernels, if that was taken."""
    name = ", ".join(row[key] for key in ("name", "part") if key in row)
    is_same = "H100" in device_name() and sizes == ReportSizes() and row.get("rows") in (None, "full", 32)
    return row | ({"earlier ms": EARLIER[name]} if is_same and name in EARLIER else {})


def train_once(call: Call) -> None:
    """Run a call forward and backward."""
    call()[0].sum().backward()


def tiles(bench: Bench) -> None:
    """Time each kernel of ddrp's attention with three tiles, the fastest first: it is the one to ship."""
    capability = triton_attention.capability_of(DEVICE)
    chosen = triton_attention.tiles(64, DTYPES[precision()], capability, has_key_table=False)
    for kind, others in OTHER_TILES.items():
        rows: list[Row] = []
        for tile in (getattr(chosen, kind), *others[9 if capability[0] == 9 else 8]):
            rows.append({"name": f"{kind}_kernel", "tile": " ".join(map(str, tile)), "shipped": not rows})
            tried = chosen._replace(**{kind: tile})
            with noted(rows[-1]), mock.patch.object(triton_attention, "tiles", lambda *_, tried=tried: tried):
                triton_attention.plan_of.cache_clear()
                call = ours("ddrp", 0, bench.sizes)
                took = [kernel_seconds(partial(train_once, call)) for _ in range(ROUNDS)]
                rows[-1]["ms"] = min(each.get(f"{kind}_kernel", 0.0) for each in took[1:]) * 1e3 or None
        triton_attention.plan_of.cache_clear()
        for row in sorted(rows, key=lambda row: row.get("ms") or math.inf):
            bench.write(row)


def steps(bench: Bench) -> None:
    """Time steps of the flagship, plain BERT and DeBERTa, the last two beside transformers' models."""
    for length in bench.sizes.lengths:
        kinds = ("full", "padded", "packed") if length == bench.sizes.lengths[0] else ("full",)
        arms = [
            *(StepArm(length, rows=rows) for rows in kinds),
            StepArm(length, *PLAIN),
            StepArm(length, "deberta", "mlm"),
        ]
        for arm in arms:
            bench.write(time_steps(arm.row, partial(training, arm, bench), bench.sizes))
        for kind in ("bert", "deberta-v2"):
            row = StepArm(length).row | {"name": f"transformers: {kind}"}
            bench.write(
                time_steps(row, partial(transformers_training, kind, StepArm(length, *PLAIN), bench), bench.sizes)
            )


def resumed_run(bench: Bench) -> None:
    """Train by the command's loop: a run that stops and resumes, beside one that never stopped."""
    whole = numbers_of(bench, "whole")
    numbers_of(bench, "resumed", STOP)
    told = sameness(whole, numbers_of(bench, "resumed"))
    bench.write({"name": f"losses and gradient norms of a run resumed at step {STOP}", "value": told})


def numbers_of(bench: Bench, name: str, stop: int | None = None) -> list[Any]:
    """Return loss and gradient norm of each step of a run of the flagship in its folder, which it resumes from."""
    folder = bench.folder / name
    config = StepArm(bench.sizes.lengths[0], rows="packed").config(bench)
    files: dict[str, Any] = {"save": str(folder), "load": str(folder) if folder.exists() else None}
    train(
        config.replace(
            training={"train_iters": ITERATIONS, "global_batch_size": config.training.micro_batch_size},
            logging={"log_interval": 1, "eval_interval": 0},
            checkpoint={**files, "exit_interval": stop},
        )
    )
    return [(row["loss"], row["grad_norm"]) for row in read_rows(folder)]


SECTIONS = (
    ReportSection("machine", "The machine", 60, machine),
    smoke("attention", "test_attention_gpu.py", 120),
    smoke("steps", "test_steps_gpu.py", 300),
    ReportSection("graphs", "CUDA graphs off and on, in the steps of the recipe", 300, graphs),
    ReportSection("kernels", "Attention by itself", 90, kernels),
    ReportSection("tiles", "Three tiles of each kernel", 120, tiles),
    ReportSection("steps", "Steps, beside transformers", 300, steps),
    ReportSection("runs", "A run that saves and resumes", 60, resumed_run),
    smoke("runs", "test_runs_gpu.py", 240, is_shared=False),  # its runs share one process
)
"""The sections by importance, each in a process of its own, where a failed kernel spoils the device."""
