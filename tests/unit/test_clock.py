"""What the progress line and a profile say: rates, the share of the devices' peak, shares of operations, and memory."""

import json
import subprocess
import sys
from statistics import median
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from megatron_ddrp.config import Config
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.run import flops as profile
from megatron_ddrp.run import log
from megatron_ddrp.run.flops import StepProfile, peak_of_device, peak_of_run, shares_of
from megatron_ddrp.run.log import Clock, MetricsLog, duration, progress_line, speed
from megatron_ddrp.run.loop import peak_memory_bytes

ROW = {"iteration": 1, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 1500.0, "peak_memory_gib": 21.26}


@pytest.fixture
def time_passes(monkeypatch):
    """A clock that shows the last number of a list."""
    shown = [0.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: shown[-1])
    return shown


def test_mfu_is_the_flop_since_the_last_reading_by_time_and_peak(time_passes):
    clock = Clock(0, 10, peak=1e12)
    for _ in range(2):
        clock.count(tokens=100, flop=3e12)
    time_passes.append(10.0)
    assert clock.rates() == {"tokens_per_second": 20.0, "step_time": 5.0, "mfu": pytest.approx(0.6)}
    clock.restart()
    clock.count(tokens=100, flop=1e12)
    time_passes.append(12.0)
    assert clock.rates()["mfu"] == pytest.approx(0.5)


def test_the_time_left_is_that_of_the_steps_since_the_start_of_this_process(time_passes):
    """A resumed run has not spent the time of the steps before it."""
    new, resumed = Clock(0, 1200), Clock(1000, 1200)
    time_passes.append(10.0)
    assert (new.eta(10), resumed.eta(1010)) == ("19m50s", "3m10s")


DURATIONS = {59: "59s", 60: "1m00s", 3599: "59m59s", 3600: "1h00m", 86399: "23h59m", 86400: "1d00h"}
RATES = {0.6249: "0.625", 9.0: "9", 99.96: "100", 999: "999", 1000: "1.0k", 412e3: "412.0k", 1.25e6: "1.25M"}


def test_a_duration_changes_its_unit_where_the_larger_one_is_whole_and_a_rate_always_has_digits():
    assert {seconds: duration(seconds) for seconds in DURATIONS} == DURATIONS
    assert {rate: speed(rate) for rate in RATES} == RATES


def test_the_line_shows_mfu_and_memory_and_no_mfu_without_a_peak():
    line = progress_line(ROW | {"mfu": 0.3123}, {}, 10, "1s")
    assert line.endswith("| 1.5k tok/s | mfu 31.2% | mem 21.3 GiB | eta 1s")
    # The memory is that of all ranks, which only a row asks for: a line between two rows has none.
    row = {name: value for name, value in ROW.items() if name != "peak_memory_gib"}
    assert progress_line(row, {}, 10, "1s").endswith("| 1.5k tok/s | eta 1s")
    clock = Clock(0, 10)
    clock.count(tokens=100, flop=3e12)
    assert list(clock.rates()) == ["tokens_per_second", "step_time"]
    assert "mfu" not in progress_line(ROW, {}, 10, "1s")


def test_a_log_is_quiet_after_ten_seconds_without_a_line(capsys):
    now = [100.0]
    with MetricsLog(Config(), 0, active=True, now=lambda: now[0]) as metrics_log:
        for expected in ({9.9: False, 0.2: True, 5.0: True}, {9.9: False, 0.2: True}):
            for passed, quiet in expected.items():
                now[0] += passed
                assert metrics_log.is_quiet() == quiet
            metrics_log.say("a line")
    other_rank = MetricsLog(Config(), 0, active=False, now=lambda: now[0])
    now[0] += 100
    assert not other_rank.is_quiet()


def test_the_peak_is_the_flags_or_the_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for training, peak in (({}, 156e12), ({"tf32": False}, 19.5e12), ({"bf16": True}, 312e12)):  # fp32 in TF32
        assert peak_of_device(Config().replace(training=training), gpu) == peak
    assert peak_of_device(Config(), cpu) is None
    given = Config().replace(logging={"peak_tflops": 2.0})
    assert peak_of_device(given, cpu) == 2e12 and peak_of_run(Setup(given, Ranks(1, 4, cpu))) == 8e12


def test_the_processs_peak_counts_what_it_took():
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(before // 4 + 2**24)  # fp32: more than the process ever had
    assert peak_memory_bytes(torch.device("cpu")) > max(before, block.nbytes)


def event(number: int, name: str, begin: int, end: int, device: DeviceType, **more: Any) -> FunctionEvent:
    thread = 0 if device == DeviceType.CPU else 7
    return FunctionEvent(number, name, thread, begin, end, device_type=device, use_device="cuda", stack=[], **more)


def launch(number: int, name: str, kernel: str, begin: int, microseconds: int) -> list[FunctionEvent]:
    """An operation of the host that takes 5 µs, and the kernel that it launches."""
    host = event(number, name, begin, begin + 5, DeviceType.CPU)
    host.append_kernel(kernel, 0, microseconds)
    return [host, event(100 + number, kernel, begin, begin + microseconds, DeviceType.CUDA)]


def test_a_kernel_counts_once_and_a_named_range_not_at_all():
    named_range = event(3, "Optimizer.step#AdamW.step", 0, 500, DeviceType.CUDA, is_user_annotation=True)
    events = [*launch(1, "aten::mm", "gemm", 0, 300), *launch(2, "aten::add", "add", 400, 100), named_range]
    listed = EventList(events, use_device="cuda")
    listed._build_tree()
    assert shares_of(listed.key_averages(), on_gpu=True) == [("gemm", 0.75), ("add", 0.25)]
    on_host = shares_of(listed.key_averages(), on_gpu=False)
    assert dict(on_host) == pytest.approx({"aten::mm": 0.5, "aten::add": 0.5, "gemm": 0, "add": 0, on_host[-1][0]: 0})


def test_the_seconds_of_a_profile_are_those_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    logging = {"profile": True, "profile_step_start": 2, "profile_step_end": 6}
    config = Config().replace(checkpoint={"save": "run"}, logging=logging)
    made = StepProfile(Setup(config, Ranks(0, 1, torch.device("cpu"))), steps_done=0)
    made._began = 10.0
    monkeypatch.setattr(profile.time, "perf_counter", lambda: 18.0)
    monkeypatch.setattr(profile, "gather_objects", lambda item: [item])
    monkeypatch.setattr(StepProfile, "_stop", lambda self: "profiler")
    monkeypatch.setattr(StepProfile, "_write", lambda self, profiler, seconds: f"{seconds} s per step")
    assert made.finish(5) == [] and made.finish(6) == ["2.0 s per step"]


MEMORY = """
from megatron_ddrp.__main__ import share_one_heap
share_one_heap()
import json, os, resource, sys, threading, torch
from megatron_ddrp.run.loop import bound_kernel_caches, keep_freed_memory, peak_resident_bytes, prepare_cpu
from megatron_ddrp.run.loop import reset_peak_resident_bytes, return_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def faults_of_rounds():
    rounds = []
    for _ in range(16):
        before = faults()
        first, second = torch.ones(2**24), torch.ones(2**23)
        del first, second
        rounds.append(faults() - before)
    return rounds

def growth(work, measure=peak_resident_bytes):
    start = reset_peak_resident_bytes()
    work()
    return (measure() - start) / 2**20

def multiply_shapes():
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    for rows in range(100, 500):
        torch.ones(rows, 64, dtype=torch.bfloat16) @ weight

def free_in_two_threads():
    torch.ones(100 * 2**18)
    thread = threading.Thread(target=lambda: torch.ones(90 * 2**18) is None)  # small blocks may lie in the 100
    thread.start()
    thread.join()

def peak_of(mebibytes):
    return growth(lambda: torch.ones(mebibytes * 2**18) is None)

def kept_of_freed():
    return growth(lambda: torch.ones(100 * 2**18) is None, reset_peak_resident_bytes)

for *before, number in json.loads(sys.argv[1]):
    if not os.fork():
        try:
            exec("; ".join(before))
            print(json.dumps(eval(number)), flush=True)
        finally:
            os._exit(0)
    os.wait()
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc, and malloc is not glibc's")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Numbers of processes that are forked from one without any tensor, by their names."""
    sizes = [10, 10, 10, 200, 10]  # glibc would keep the second 10 MiB for the third
    lines = {
        "faults": ["faults_of_rounds()"],
        "faults, kept": ["keep_freed_memory()", "faults_of_rounds()"],
        "two threads": ["keep_freed_memory()", "growth(free_in_two_threads)"],
        "one heap": ["prepare_cpu()", "kept_of_freed()"],
        "several heaps": ["del os.environ['MALLOC_ARENA_MAX']", "prepare_cpu()", "kept_of_freed()"],
        "growth": ["growth(multiply_shapes)"],
        "growth, bound": ["bound_kernel_caches()", "growth(multiply_shapes)"],
        "peaks": ["return_freed_memory()", "torch.ones(300 * 2**18)", f"list(map(peak_of, {sizes}))"],
    }
    command = [sys.executable, "-c", MEMORY, json.dumps(list(lines.values()))]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return {"sizes": sizes} | dict(zip(lines, map(json.loads, said), strict=True))


@on_linux
def test_freed_tensors_are_taken_again_without_page_faults(measured):
    # The median over the second half of the rounds: in the first, and now and then later, the heap still grows.
    without, kept = (median(measured[name][8:]) for name in ("faults", "faults, kept"))
    if without < 200:
        pytest.skip(f"this malloc keeps freed memory by itself: {without} page faults")
    assert kept < without / 100


@on_linux
def test_what_one_thread_freed_serves_another_and_large_freed_tensors_are_kept_by_one_heap_only(measured):
    assert measured["two threads"] < 150
    assert measured["one heap"] > 90 > 10 > measured["several heaps"]


@on_linux
def test_kernels_of_old_shapes_are_dropped(measured):
    if (without := measured["growth"]) < 100:
        pytest.skip(f"this CPU has no bf16 kernels per shape: {without} MiB")
    assert measured["growth, bound"] < without / 2


@on_linux
def test_the_peak_is_that_of_the_tensors_since_it_was_reset(measured):
    assert measured["peaks"] == [pytest.approx(size, abs=2) for size in measured["sizes"]]
