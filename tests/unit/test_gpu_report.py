"""The GPU report made on the CPU with tiny models: every section, every function, all but the device itself."""

import dataclasses
import functools
import gc
import json
import os
import signal
import sys
import time
import types
import weakref
from collections import defaultdict
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gpu_device
import gpu_report
import gpu_sections
import gpu_training
import pytest
import torch
from gpu_sections import SECTIONS, ReportSection
from gpu_training import TINY, Bench, ReportSizes, Row, StepArm, write_corpora

from megatron_ddrp.errors import FAILURE
from megatron_ddrp.model.attention.gpu import triton_attention
from tests.integration.launch import fork_server
from tests.refusals import refused, wrong_arguments

SIZES = dataclasses.replace(TINY, lengths=(16,), steps=1)

TESTS = """
import pytest

pytestmark = pytest.mark.gpu

def test_good(): pass

def test_bad(): assert 1 + 1 == 3, "arithmetic"

@pytest.mark.skip(reason="no such device")
def test_left_out(): pass

@pytest.fixture
def broken(): raise OSError("no disk")

def test_without_its_fixture(broken): pass
"""


def broken(bench: Bench) -> None:
    bench.write({"name": "before", "ms": 1.0})
    raise RuntimeError("the kernel\nfailed")


def killed(bench: Bench) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def endless(bench: Bench) -> None:
    time.sleep(600)


def tables(bench: Bench) -> None:
    """Make every table in one process, which starts DeepSpeed once; each row names its section."""
    for section in SECTIONS:
        if not section.name.startswith("smoke"):
            write = functools.partial(lambda name, row: bench.write({"section": name} | row), section.name)
            section.run(dataclasses.replace(bench, write=write))
    weights, build = [], gpu_training.build_engine

    def noting(*words: Any) -> Any:
        engine = build(*words)
        weights.append(weakref.ref(next(engine.module.parameters())))
        return engine

    gpu_training.build_engine = noting
    gpu_training.time_steps({}, functools.partial(gpu_training.training, StepArm(16), bench), bench.sizes)
    gc.collect()
    bench.write({"section": "closed", "is_gone": [weight() is None for weight in weights]})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report with every table but the smoke tests, and with sections that go wrong; "rows" are by table."""
    folder = tmp_path_factory.mktemp("report")
    sections = [ReportSection(run.__name__, run.__name__.title(), 300, run) for run in (tables, broken, killed)]
    gpu_report.Reporter(folder, SIZES, 5.0, fork_server()).run(sections)
    report = json.loads((folder / gpu_report.NUMBERS).read_text(encoding="utf-8"))
    by_name = {section["name"]: section for section in report["sections"]}
    assert by_name["tables"]["fault"] is None
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in by_name["tables"]["rows"]:
        rows[row["section"]].append(row)
    return by_name | {"rows": rows, "page": (folder / gpu_report.PAGE).read_text(encoding="utf-8")}


def test_the_machine_is_described_and_a_resumed_run_and_a_closed_engine(report: dict[str, Any]) -> None:
    described = {row["name"]: row["value"] for row in report["rows"]["machine"]}
    assert described["torch"] == version("torch") and {"device", "driver", "triton", "deepspeed"} <= described.keys()
    resumed = {"losses and gradient norms of a run resumed at step 3": "all 6 equal bit for bit"}
    assert {row["name"]: row["value"] for row in report["rows"]["runs"]} == resumed
    assert report["rows"]["closed"] == [{"section": "closed", "is_gone": [True]}]


def test_steps_of_every_kind_are_timed_beside_transformers(report: dict[str, Any]) -> None:
    rows = report["rows"]["steps"]
    kinds = [("ddrp + mth", kind, 16) for kind in ("full", "padded", "packed")]
    others = ("absolute + mlm", "deberta + mlm", "transformers: bert", "transformers: deberta-v2")
    kinds += [(name, "full", 16) for name in others]
    assert [(row["name"], row["rows"], row["length"]) for row in rows] == kinds
    assert all("note" not in row and row["tokens/s"] > 0 and row["ms"] >= row["host ms"] > 0 for row in rows)
    count = SIZES.warm_up + SIZES.steps
    assert [len(set(row["numbers"])) for row in rows] == [count] * 5 + [1, 1]  # those of transformers' have none


def test_graphs_are_compared_step_by_step_and_the_first_difference_is_told(report: dict[str, Any]) -> None:
    """On a CPU the arms without graphs are, and those with graphs say why they are not."""
    rows = report["rows"]["graphs"]
    names = [("ddrp + mth", "full"), ("absolute + mlm", "full"), ("ddrp + mth", "packed")]
    assert [(row["name"].partition(",")[0], row["rows"]) for row in rows] == [name for name in names for _ in range(3)]
    told = "gradient norms beside the first"
    for off, again, on in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert off["name"].endswith("graphs off") and told not in off
        assert again[told] == f"all {SIZES.warm_up + SIZES.steps} equal bit for bit"
        assert "CUDA graphs need an NVIDIA GPU" in on["note"] and on[told] == "not compared"
    assert gpu_sections.sameness([1.0, 2.0], [1.0, 2.0]) == "all 2 equal bit for bit"
    assert gpu_sections.sameness([1.0, 2.0, 3.0], [1.0, 2.0 + 2**-51, 3.0]) == "other from step 2 on"
    assert gpu_sections.sameness([1.0], None) == gpu_sections.sameness([], [1.0]) == "not compared"


def test_attention_stands_beside_torchs(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["rows"]["kernels"]}
    attention, losses = ["torch", "ours, ddrp", "ours, ddrp with HCD", "ours, deberta"], ["torch, loss", "ours, loss"]
    assert list(rows) == attention + losses
    flop = 7 * 2 * 4 * 16 * 16 * 32  # 7 products, 4 rows of 16 tokens, hidden size 32
    assert all(rows[name]["TFLOP/s"] == pytest.approx(flop / rows[name]["ms"] / 1e9) for name in attention)
    assert all(rows[name]["ms"] > 0 and rows[name]["TFLOP/s"] is None for name in losses)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder, SIZES)
    return Bench(SIZES, folder, print)


def test_kernels_have_their_own_rate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Row] = []
    took = {"forward_kernel": 1e-6, "rows_kernel": 2e-6, "gemm": 1.0}
    monkeypatch.setattr(gpu_sections, "kernel_seconds", lambda run: took)
    monkeypatch.setattr(gpu_sections, "CALLS", {"torch": gpu_sections.torchs})
    gpu_sections.kernels(dataclasses.replace(bench, write=written.append))
    parts = [{"name": "torch", "part": "forward_kernel", "ms": 1e-3, "TFLOP/s": pytest.approx(0.131072)}]
    parts.append({"name": "torch", "part": "rows_kernel", "ms": 2e-3, "TFLOP/s": None})
    assert written[0]["kernel ms"] == pytest.approx(1000.003) and written[1:] == parts


def test_rows_stand_beside_those_of_earlier_kernels_on_the_same_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    call, packed = {"name": "ours, ddrp", "rows": 32}, {"name": "ddrp + mth, graphs on", "rows": "packed"}
    full, part = packed | {"rows": "full"}, {"name": "ours, ddrp", "part": "forward_kernel"}
    for device, expected in (("NVIDIA H100 80GB HBM3", [2.94, 0.37, 54.4, None]), ("NVIDIA A100", [None] * 4)):
        monkeypatch.setattr(gpu_sections, "device_name", lambda device=device: device)
        told = [gpu_sections.beside_earlier(row, ReportSizes()) for row in (call, part, full, packed)]
        assert [row.get("earlier ms") for row in told] == expected
        assert "earlier ms" not in gpu_sections.beside_earlier(call, SIZES)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_three_tiles_of_each_kernel_come_by_their_time(capability, bench, monkeypatch):
    """The tile in force decides: here those of eight warps are faster, the others are not timed."""
    written: list[Row] = []
    monkeypatch.setattr(triton_attention, "capability_of", lambda _: capability)
    shipped = triton_attention.tiles(64, torch.bfloat16, capability, False)

    def seconds(run: Any) -> dict[str, float]:
        tried = triton_attention.tiles(64, torch.bfloat16, capability, False)._asdict()
        return {f"{kind}_kernel": (tile.registers or 255) / 1e3 for kind, tile in tried.items() if tile.warps == 8}

    monkeypatch.setattr(gpu_sections, "kernel_seconds", seconds)
    gpu_sections.tiles(dataclasses.replace(bench, write=written.append))
    assert [row["name"] for row in written[::3]] == ["forward_kernel", "key_gradient_kernel", "query_gradient_kernel"]
    for rows in (written[:3], written[3:6], written[6:]):
        assert sum(row["shipped"] for row in rows) == 1 and len({row["tile"] for row in rows}) == 3
        limits = [row["tile"].split()[4] for row in rows if " 8 " in row["tile"]]
        assert [row["ms"] for row in rows[: len(limits)]] == sorted(255.0 if x == "None" else float(x) for x in limits)
        assert [row["ms"] for row in rows[len(limits) :]] == [None] * (3 - len(limits))
    assert triton_attention.tiles(64, torch.bfloat16, capability, False) == shipped


def test_a_steps_kernels_and_peak_have_their_shares_and_an_arm_without_memory_a_note(monkeypatch):
    """With kernels of a second per step, and a device of 10^12 FLOP per second."""
    device = types.SimpleNamespace(tflops=lambda precision, tf32: 1.0)
    monkeypatch.setattr(gpu_training, "device_named", lambda name: device)
    monkeypatch.setattr(gpu_training, "kernel_seconds", lambda run: {"one": 0.75, "other": 0.25})
    work = gpu_training.StepWork(128, 5e11, lambda: 1.0)
    row = gpu_training.time_steps({"name": "a"}, lambda: nullcontext(lambda: work), SIZES)
    assert row["kernel ms"] == 500.0 and row["numbers"] == [1.0, 1.0]
    seconds = row["ms"] * SIZES.micro_batches / 1e3
    assert row["MFU"] == pytest.approx(0.5 / seconds) and row["busy"] == pytest.approx(1 / seconds)
    large = Mock(side_effect=torch.OutOfMemoryError("CUDA out of\nmemory"))
    assert gpu_training.time_steps({"name": "b"}, large, SIZES)["note"] == "OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize("processes", [0, 2])
def test_tests_have_their_outcome_and_reason_and_fail_the_section_if_they_do_not_start(tmp_path, processes):
    (tmp_path / "test_sample.py").write_text(TESTS, encoding="utf-8")
    written: list[Row] = []
    gpu_sections.run_tests([tmp_path / "test_sample.py"], Bench(SIZES, tmp_path, written.append), processes)
    rows = {row["name"].rpartition("::test_")[2]: (row["outcome"], row["note"]) for row in written}
    assert rows.keys() == {"good", "bad", "left_out", "without_its_fixture"}
    assert rows["good"] == ("passed", None) and rows["left_out"] == ("skipped", "no such device")
    assert rows["bad"][0] == rows["without_its_fixture"][0] == "failed"
    assert "arithmetic" in rows["bad"][1] and "no disk" in rows["without_its_fixture"][1]
    section = {"title": "Smoke tests", "seconds": 1.0, "fault": None, "rows": written}
    page = {"date": "", "commit": "", "minutes": 1.0, "sizes": dataclasses.asdict(SIZES), "sections": [section]}
    made = gpu_report.page(page)
    assert "2 failed, 1 passed, 1 skipped (no such device)." in made
    assert "arithmetic" in made and "test_good" not in made and "test_left_out" not in made
    with pytest.raises(RuntimeError, match="pytest ended with USAGE_ERROR"):
        gpu_sections.run_tests([tmp_path / "missing.py"], Bench(SIZES, tmp_path, print))


def test_a_section_that_fails_is_a_line_and_keeps_its_rows(report: dict[str, Any]) -> None:
    assert report["broken"]["fault"] == "Failed: RuntimeError: the kernel failed"
    assert report["broken"]["rows"] == [{"name": "before", "ms": 1.0}]
    assert report["killed"]["fault"] == "Failed: its process ended with code -9."
    assert "Failed: RuntimeError: the kernel failed" in report["page"]
    assert "| name | ms |\n| --- | --- |\n| before | 1.00 |" in report["page"]


def test_a_second_call_does_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections that never began come first, then those with faults; one that is done is not repeated."""
    calls: list[str] = []
    first, second, third, fourth = (section.name for section in SECTIONS[:4])

    def run_apart(self: gpu_report.Reporter, section: ReportSection, folder: Path, seconds: float) -> dict[str, Any]:
        calls.append(section.name)
        fault = "Stopped for time" if section.name == second and calls.count(second) == 1 else None
        return {"name": section.name, "title": section.title, "seconds": 1.0, "fault": fault, "rows": []}

    monkeypatch.setattr(gpu_report.Reporter, "_run_apart", run_apart)
    monkeypatch.setattr(gpu_report, "commit", lambda: "abc")
    for minutes in (0.0, 0.0, 5.0, 5.0):
        gpu_report.Reporter(tmp_path, SIZES, minutes, None).run(SECTIONS[:4])
        kept = json.loads((tmp_path / gpu_report.NUMBERS).read_text(encoding="utf-8"))["sections"]
    assert calls == [first, second, third, fourth, second]
    assert [section["name"] for section in kept] == [first, second, third, fourth]
    monkeypatch.setattr(gpu_report, "commit", lambda: "def")
    line = "is a report of another commit .abc instead of def.: move it away"
    wrong_arguments(line, gpu_report.Reporter, tmp_path, SIZES, 5.0, None)


def test_a_section_without_end_is_killed(tmp_path: Path) -> None:
    reporter = gpu_report.Reporter(tmp_path, SIZES, 0.0, fork_server())
    reporter.run([ReportSection("endless", "Endless", 1, endless)])
    assert [section["fault"][:16] for section in reporter.report["sections"]] == ["Stopped for time"]


def test_memory_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    given: dict[str, Any] = dict.fromkeys(("synchronize", "reset_peak_memory_stats", "empty_cache"))
    properties = types.SimpleNamespace(major=9, minor=0, total_memory=80 * 2**30)
    given |= {"memory_allocated": 2**30, "max_memory_allocated": 3 * 2**30, "get_device_properties": properties}
    given["get_device_name"] = "NVIDIA H100 80GB HBM3"
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name, value=value: calls.append(name) or value)
    monkeypatch.setattr(gpu_device, "HAS_GPU", True)
    row: Row = {}
    with gpu_device.peak_memory(row):
        pass
    assert row == {"peak GiB": 2.0}
    machine = {"device": "NVIDIA H100 80GB HBM3", "compute capability": "9.0", "memory": "80.0 GiB"}
    assert machine.items() <= gpu_device.describe_machine().items() and set(calls) == given.keys()


def test_the_end_says_where_the_files_are_and_without_a_device_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["gpu_report.py"])
    assert refused("no CUDA device.*--tiny", gpu_report.main).exit_code == FAILURE
    context, folder = fork_server(), tmp_path / "new"
    monkeypatch.setattr(gpu_report.multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--tiny", "--output", str(folder), "--sections", "machine"])
    gpu_report.main()
    printed = capsys.readouterr().out
    files = f"wrote {folder / 'gpu-report.md'} and {folder / 'gpu-report.json'}"
    assert [text for text in ("[1/1] The machine: up to 1.0 min", files, "open an issue") if text not in printed] == []
