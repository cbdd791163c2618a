"""The GPU report made on the CPU with tiny models: every section, every function, all but the device itself."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
import time
import types
import warnings
import weakref
from collections import defaultdict
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu_device
import gpu_graphs
import gpu_groups
import gpu_kernels
import gpu_others
import gpu_page
import gpu_report
import gpu_runs
import gpu_sections
import numpy as np
import pytest
import torch
from gpu_groups import TINY, Bench, Row, Sizes, Work
from gpu_sections import SECTIONS, Section
from gpu_training import Arm, write_corpora

from megatron_ddrp.config import ENCODINGS, OBJECTIVES
from megatron_ddrp.errors import FAILURE, UserError
from tests.integration.launch import fork_server

SIZES = dataclasses.replace(TINY, lengths=(16,), usual_length=16, encodings=("ddrp",), steps=1)

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


WITHOUT_OTHERS: dict[str, tuple[str, ...]] = {"absolute": (), "deberta": ()}


def tables(bench: Bench) -> None:
    """Make every table in one process, which starts DeepSpeed once; each row names its section."""
    for section in SECTIONS:
        if not section.name.startswith("smoke"):
            run = functools.partial(section.run, models=WITHOUT_OTHERS) if section.name == "others" else section.run
            run(dataclasses.replace(bench, write=functools.partial(write_under, section.name, bench)))
    running = Arm("closed", 16).start(bench, 64)
    running.step()
    weight = weakref.ref(next(running.engine.module.parameters()))  # type: ignore[attr-defined]
    running.close()
    gpu_device.release_memory()
    bench.write({"section": "closed", "is_gone": weight() is None})


def write_under(name: str, bench: Bench, row: Row) -> None:
    bench.write({"section": name, **row})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report with every table but the smoke tests, and with sections that go wrong; "rows" are by table."""
    folder = tmp_path_factory.mktemp("report")
    sections = [Section("tables", "Tables", 300, tables)]
    sections += [Section("broken", "Broken", 300, broken), Section("killed", "Killed", 300, killed)]
    gpu_report.Reporter(folder, SIZES, 5.0, fork_server()).run(sections)
    report = json.loads((folder / gpu_report.NUMBERS).read_text(encoding="utf-8"))
    by_name = {section["name"]: section for section in report["sections"]}
    assert by_name["tables"]["fault"] is None
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in by_name["tables"]["rows"]:
        rows[row["section"]].append(row)
    return by_name | {"rows": rows, "page": (folder / gpu_report.PAGE).read_text(encoding="utf-8")}


def timed(all_rows: list[Row]) -> dict[str, Row]:
    """Return the rows that have a speed, by name; every other row has a note."""
    rows = {row["name"]: row for row in all_rows if "note" not in row}
    assert all(row["tokens_per_second"] > 0 and row["ms"] > 0 for row in rows.values())
    return rows


def test_the_machine_is_described(report: dict[str, Any]) -> None:
    described = {row["name"]: row["value"] for row in report["rows"]["machine"]}
    assert described["torch"] == version("torch")
    assert {"device", "driver", "triton", "deepspeed"} <= described.keys()


def test_every_kind_of_rows_is_timed(report: dict[str, Any]) -> None:
    timed(report["rows"]["lengths"])
    kinds = [(row["name"], row["rows"], row["length"]) for row in report["rows"]["lengths"]]
    flagship = [("ddrp + mth", kind, 16) for kind in ("full", "padded", "packed")]
    assert kinds == [*flagship, ("absolute + mlm", "full", 16)]


def test_every_encoding_and_objective_is_timed(report: dict[str, Any]) -> None:
    assert Sizes().encodings == tuple(ENCODINGS)
    assert timed(report["rows"]["encodings"]).keys() == {f"ddrp + {objective}" for objective in OBJECTIVES}


def test_backends_are_timed_or_refused_in_a_line(report: dict[str, Any]) -> None:
    names = [row["name"] for row in report["rows"]["backends"]]
    assert len(names) == 2 * len(gpu_sections.backends())
    assert {"sdpa", "triton"} <= set(gpu_sections.backends())
    assert "ddrp + mth, --attention-backend sdpa" in timed(report["rows"]["backends"])
    (refused,) = (row for row in report["rows"]["backends"] if row["name"] == "ddrp + mth, --attention-backend triton")
    assert refused["note"].startswith("UserError: --attention-backend triton: ")


def test_graphs_are_compared_step_by_step(report: dict[str, Any]) -> None:
    """On a CPU the arms without graphs are, and those with graphs say why they are not."""
    rows = [row for row in report["rows"]["graphs"] if "verdict" not in row]
    assert [row["name"] for row in rows[:3]] == [f"ddrp + mth, graphs {way}" for way in ("off", "off, again", "on")]
    assert [(row["rows"], row["name"].partition(",")[0]) for row in rows[::3]] == [
        ("full", "ddrp + mth"),
        ("full", "absolute + mlm"),
        ("packed", "ddrp + mth"),
    ]
    for off, again, on in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert off["norms"] == again["norms"] and len(set(off["norms"])) == gpu_graphs.FIRST + SIZES.steps + 2
        assert off["host_ms"] > 0 and off["tokens_per_second"] > 0 and off["waits"] is None
        assert "CUDA graphs need an NVIDIA GPU" in on["note"]
    last = report["rows"]["graphs"][-1]
    assert last["name"] == "to change" and last["verdict"].startswith("nothing; ddrp + mth, full rows: not decided, ")


def ways(on: dict[str, Any], again: dict[str, Any] | None = None) -> dict[str, Row]:
    """Return the rows of an arm off, off again and on."""
    off: Row = {"name": "a", "ms": 40.0, "norms": ["0x1p+0", "0x1p+1"]}
    return {gpu_graphs.OFF: off, gpu_graphs.AGAIN: off | (again or {}), gpu_graphs.ON: off | on}


def test_the_verdict_follows_norms_and_times() -> None:
    faster = gpu_graphs.verdict(ways({"ms": 30.0}))
    assert faster == ("faster", faster.line) and "all 2 steps equal bit for bit" in faster.line
    assert "30.00 ms per micro-batch instead of 40.00" in faster.line
    slower = gpu_graphs.verdict(ways({"ms": 41.0}))
    different = gpu_graphs.verdict(ways({"ms": 30.0, "norms": ["0x1p+0", "0x1p+2"]}))
    assert different == ("different", "graphs change the gradient norm from step 2 on")
    noisy = gpu_graphs.verdict(ways({}, again={"norms": ["0x1p-1", "0x1p+1"]}))
    assert noisy.kind == "unknown" and "other gradient norms from step 1 on" in noisy.line
    failed = gpu_graphs.verdict(ways({"note": "RuntimeError: capture"}))
    assert failed == ("unknown", "not decided, a: RuntimeError: capture")
    assert gpu_graphs.conclusion([faster, slower]) == "nothing: --cuda-graphs auto has the same norms in less time"
    for found in ([slower, faster], [different, faster], [faster, different]):
        fault = next(each for each in found if each is not faster)
        assert gpu_graphs.conclusion(found) == f"the default of --cuda-graphs to off: {fault.line}"
    for unclear in (noisy, failed):
        assert gpu_graphs.conclusion([different, unclear]) == f"nothing; {unclear.line}"


def test_graphs_that_change_norms_are_tried_without_compiled_layers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def compare(base: Arm, ways: tuple[str, ...], bench: Bench) -> gpu_graphs.Verdict:
        asked.append((base.name, len(ways)))
        return gpu_graphs.Verdict("different" if base.model["position_encoding"] == "absolute" else "faster", "")

    monkeypatch.setattr(gpu_graphs, "compare", compare)
    gpu_graphs.decide(bench)
    arms = [("ddrp + mth", 3), ("absolute + mlm", 3), ("absolute + mlm, --compile off", 2), ("ddrp + mth", 3)]
    assert asked == arms


def test_attention_stands_beside_other_libraries(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["rows"]["kernels"]}
    assert rows.keys() == gpu_kernels.CALLS.keys()
    for name in ("torch", "ours, ddrp", "ours, ddrp with HCD", "ours, deberta"):
        flop = 7 * 2 * 4 * 16 * 16 * 32  # 7 products, 4 rows of 16 tokens, hidden size 32
        assert rows[name]["tflops"] == pytest.approx(flop / rows[name]["ms"] / 1e9)


def test_kernels_have_their_own_rate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Row] = []
    monkeypatch.setattr(gpu_kernels, "kernel_seconds", lambda run: {"forward_kernel": 1e-6, "gemm": 1.0})
    monkeypatch.setattr(gpu_kernels, "CALLS", {"torch": gpu_kernels.torchs})
    gpu_kernels.kernels(dataclasses.replace(bench, write=written.append))
    assert written[1:] == [{"name": "torch", "part": "forward_kernel", "ms": 1e-3, "tflops": pytest.approx(0.131072)}]


def test_whole_runs_repeat(report: dict[str, Any]) -> None:
    resumed, two, three = report["rows"]["runs"]
    assert resumed["value"] == "losses and gradient norms of all 6 steps equal bit for bit"
    assert two["name"] == "--zero-stage 2 beside 1" and three["name"] == "--zero-stage 3 beside 1"
    assert all("bit for bit" in row["value"] or "of themselves" in row["value"] for row in (two, three))
    assert report["rows"]["finetuning"][0]["value"] == "equal bit for bit"


def test_differences_of_runs_are_told() -> None:
    one = np.array([[2.0, 1.0], [1.0, 4.0]])
    assert gpu_runs.difference(one, one[:1]) == "1 steps instead of 2"
    told = gpu_runs.difference(one, one * [1.0, 1.01])
    assert told == "losses differ by up to 0.0e+00 of themselves, gradient norms by up to 1.0e-02"


def test_our_own_models_stand_beside_other_libraries(report: dict[str, Any]) -> None:
    assert timed(report["rows"]["others"]).keys() == {"absolute + mlm", "deberta + mlm"}


def test_a_closed_engine_leaves_no_weights(report: dict[str, Any]) -> None:
    assert report["rows"]["closed"] == [{"section": "closed", "is_gone": True}]


def test_a_table_begins_with_the_usual_length() -> None:
    assert Bench(Sizes(), Path(), 0.0, print).lengths == [512, 128, 1024, 2048, 4096]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder, SIZES)
    return Bench(SIZES, folder, float("inf"), print)


@pytest.mark.parametrize("name", [name for names in gpu_others.MODELS.values() for name in names])
def test_another_librarys_model_makes_a_step_or_lacks_its_package(name: str, bench: Bench) -> None:
    try:
        model = gpu_others.Foreign(name, bench, 16, 64)
    except ImportError as missing:
        assert str(missing) == f"{gpu_others.NEEDED[name]} is not installed"
        return
    before = [weight.detach().clone() for weight in model.model.parameters()]
    model.step()
    assert any(not torch.equal(x, y) for x, y in zip(before, model.model.parameters(), strict=True))
    assert model.done == [Work(128, [(4, 16), (4, 16)])]
    model.close()


def test_tests_have_their_outcome_and_reason(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS, encoding="utf-8")
    written: list[Row] = []
    gpu_sections.run_tests([tmp_path / "test_sample.py"], Bench(SIZES, tmp_path, 0.0, written.append))
    rows = {row["test"].rpartition("::")[2]: row for row in written if "test" in row}
    assert written[0] == {"selected": 4}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_left_out": "skipped",
        "test_without_its_fixture": "failed",
    }
    assert "arithmetic" in rows["test_bad"]["note"]
    assert rows["test_left_out"]["note"] == "no such device"
    assert "no disk" in rows["test_without_its_fixture"]["note"]
    lines = gpu_page.tests_table(written)
    assert lines[0] == "2 failed, 1 passed, 1 skipped."
    assert lines[-1] == "- skipped 1: no such device"
    assert gpu_page.tests_table(written[:2])[0] == "3 left out for time, 1 passed."
    assert [gpu_page.row_line(row).partition(" ")[0] for row in written] == [
        "4",
        "passed",
        "failed",
        "skipped",
        "failed",
    ]


def test_processes_share_the_tests(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS, encoding="utf-8")
    written: list[Row] = []
    gpu_sections.run_tests([tmp_path / "test_sample.py"], Bench(SIZES, tmp_path, 0.0, written.append), processes=2)
    assert written[0] == {"selected": 4}
    assert sorted(row["outcome"] for row in written[1:]) == ["failed", "failed", "passed", "skipped"]


def test_tests_that_do_not_start_fail_the_section(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pytest ended with USAGE_ERROR"):
        gpu_sections.run_tests([tmp_path / "missing.py"], Bench(SIZES, tmp_path, 0.0, print))


def test_a_section_that_fails_is_a_line_and_keeps_its_rows(report: dict[str, Any]) -> None:
    assert report["broken"]["fault"] == "Failed: RuntimeError: the kernel failed"
    assert report["broken"]["rows"] == [{"name": "before", "ms": 1.0}]
    assert report["killed"]["fault"] == "Failed: its process ended with code -9."
    assert "Failed: RuntimeError: the kernel failed" in report["page"]


def test_a_second_call_does_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections that never began come first, then those with faults; one that is done is not repeated."""
    calls: list[str] = []
    first, second, third, fourth = (section.name for section in SECTIONS[:4])

    def run_apart(self: gpu_report.Reporter, section: Section, folder: Path, seconds: float) -> dict[str, Any]:
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
    with pytest.raises(UserError, match="is a report of another commit .abc instead of def.: move it away") as refused:
        gpu_report.Reporter(tmp_path, SIZES, 5.0, None)
    assert refused.value.exit_code == 2


def test_a_section_without_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "GRACE", 0.0)
    reporter = gpu_report.Reporter(tmp_path, SIZES, 0.0, fork_server())
    reporter.run([Section("endless", "Endless", 1, endless)])
    (section,) = reporter.report["sections"]
    assert section["fault"].startswith("Stopped for time")


class Pretended:
    """An arm that fits into memory up to so many tokens."""

    def __init__(self, largest: int, tokens: int) -> None:
        self.largest, self.tokens, self.done = largest, tokens, list[Work]()

    def step(self) -> None:
        if self.tokens > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.done.append(Work(self.tokens, [(self.tokens // 8, 8)]))

    def mfu(self, work: Work, seconds: float) -> float:
        return 0.5

    def close(self) -> None:
        self.tokens = 0


def rows_of(largest: dict[str, int], deadline: float = float("inf")) -> dict[str, Row]:
    """Return the rows of pretended arms with rows of 8 tokens, by name."""
    rows: list[Row] = []
    bench = Bench(dataclasses.replace(SIZES, tokens=64), Path(), deadline, rows.append)
    starters = {(name, "full"): functools.partial(Pretended, tokens) for name, tokens in largest.items()}
    gpu_groups.measure_together(starters, bench, 8)
    return {row["name"]: row for row in rows}


def test_an_arm_without_memory_leaves_the_others_alone() -> None:
    rows = rows_of({"none": 4, "large": 100})
    assert "out of memory" in rows["none"]["note"]
    assert rows["large"]["micro_batch"] == "8 x 8" and rows["large"]["mfu"] == 0.5


def test_a_group_without_time_is_named() -> None:
    assert rows_of({"a": 8, "b": 8}, deadline=0.0)["b"]["note"] == "left out for time"


def test_flashdeberta_is_used_where_it_is_installed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Given:
        def __init__(self, config: Any) -> None:
            self.config = config

    package = types.ModuleType("flashdeberta")
    package.FlashDebertaV2ForMaskedLM = Given  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashdeberta", package)
    package.__spec__ = ModuleSpec("flashdeberta", None)
    model: Any = gpu_others.build("flashdeberta", bench, 16)
    assert isinstance(model, Given)
    assert model.config.pos_att_type == ["c2p", "p2c"]


def test_memory_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    given = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 2**30, "empty_cache": None}
    properties = types.SimpleNamespace(major=9, minor=0, total_memory=80 * 2**30)
    given |= {"max_memory_allocated": 3 * 2**30, "device_count": 2, "get_device_properties": properties}
    given |= {"get_device_name": "NVIDIA H100 80GB HBM3"}
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name, value=value: calls.append(name) or value)
    monkeypatch.setattr(gpu_device, "HAS_GPU", True)
    assert gpu_device.peak_gib(gpu_device.start_peak()) == 2.0
    gpu_device.release_memory()
    described = gpu_device.describe_machine()
    assert described["device"] == "NVIDIA H100 80GB HBM3"
    assert described["compute capability"] == "9.0"
    assert described["memory"] == "80.0 GiB"
    assert set(calls) == given.keys()


def test_waits_of_the_host_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of waits are read as CUDA writes them; the warning about the mode itself is no wait."""

    def set_mode(mode: str) -> None:
        warnings.warn("the mode does not yet detect all synchronizing operations", UserWarning, stacklevel=1)

    def run() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(gpu_device, "HAS_GPU", True)
    line = run.__code__.co_firstlineno + 2
    assert gpu_device.waits_during(run) == [f"{Path(__file__).name}:{line}"] * 2


def test_the_driver_is_asked_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 575.57.08\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_device.driver_version() == "575.57.08"
    program.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert gpu_device.driver_version() == "none"


def test_without_a_device_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["gpu_report.py"])
    with pytest.raises(UserError, match="no CUDA device.*--tiny") as refused:
        gpu_report.main()
    assert refused.value.exit_code == FAILURE
    assert "\n" not in str(refused.value)


def test_the_end_says_where_the_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = fork_server()
    monkeypatch.setattr(gpu_report.multiprocessing, "get_context", lambda kind: context)
    words = ["--tiny", "--output", str(tmp_path / "new"), "--sections", "machine"]
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", *words])
    gpu_report.main()
    printed = capsys.readouterr().out
    assert "[1/1] The machine: up to 1.0 min" in printed
    assert f"wrote {tmp_path / 'new' / 'gpu-report.md'} and {tmp_path / 'new' / 'gpu-report.json'}" in printed
    assert "open an issue" in printed
