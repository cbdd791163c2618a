"""Freed memory stays with the process: taking it again meets no page fault; kernels of old shapes do not."""

import json
import subprocess
import sys
from statistics import median

import pytest

TAKE_AND_FREE = """
import json
import resource
import torch
from megatron_ddrp.run.loop import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if {keep}:
    keep_freed_memory()
rounds = []
for _ in range(16):
    before = faults()
    first, second = torch.ones(2**24), torch.ones(2**23)
    del first, second
    rounds.append(faults() - before)
print(json.dumps(rounds))
"""


def faults_of_a_late_round(keep: bool) -> float:
    """The median over the second half of the rounds: in the first, and now and then later, the heap still grows."""
    command = [sys.executable, "-c", TAKE_AND_FREE.format(keep=keep)]
    rounds = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return median(rounds[len(rounds) // 2 :])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere malloc is not glibc's")
def test_freed_tensors_are_taken_again_without_page_faults():
    if (without := faults_of_a_late_round(keep=False)) < 200:
        pytest.skip(f"this malloc keeps freed memory by itself: {without} page faults")
    assert faults_of_a_late_round(keep=True) < without / 100


SHAPES = """
import torch
from megatron_ddrp.run.loop import bound_kernel_caches, peak_resident_bytes, reset_peak_resident_bytes

if {bound}:
    bound_kernel_caches()
weight = torch.ones(64, 64, dtype=torch.bfloat16)
start = reset_peak_resident_bytes()
for rows in range(100, 500):
    torch.ones(rows, 64, dtype=torch.bfloat16) @ weight
print((peak_resident_bytes() - start) / 2**20)
"""


def growth_over_shapes(bound: bool) -> float:
    """MiB by which a process grows over bf16 products of 400 shapes."""
    command = [sys.executable, "-c", SHAPES.format(bound=bound)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc")
def test_kernels_of_old_shapes_are_dropped():
    if (without := growth_over_shapes(bound=False)) < 100:
        pytest.skip(f"this CPU has no bf16 kernels per shape: {without} MiB")
    assert growth_over_shapes(bound=True) < without / 2


PEAK = """
import json
import torch
from megatron_ddrp.run.loop import peak_resident_bytes, reset_peak_resident_bytes, return_freed_memory

def peak_of(megabytes):
    start = reset_peak_resident_bytes()
    torch.ones(megabytes * 2**18)
    return (peak_resident_bytes() - start) / 2**20

return_freed_memory()
torch.ones(300 * 2**18)
print(json.dumps([peak_of(megabytes) for megabytes in {sizes}]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc")
def test_the_peak_is_that_of_the_tensors_since_it_was_reset():
    sizes = [10, 10, 10, 200, 10]  # glibc would keep the second 10 MiB for the third
    command = [sys.executable, "-c", PEAK.format(sizes=sizes)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found == [pytest.approx(size, abs=2) for size in sizes]
