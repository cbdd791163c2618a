"""Freed memory stays with the process: taking it again meets no page fault."""

import subprocess
import sys

import pytest

TAKE_AND_FREE = """
import resource
import torch
from megatron_ddrp.host_memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
for number in range(12):
    if number == 6:  # the heap finds its size in the first rounds
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first, second = torch.ones(2**24), torch.ones(2**23)
    del first, second
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
    command = [sys.executable, "-c", TAKE_AND_FREE.format(keep=keep)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere malloc is not glibc's")
def test_freed_tensors_are_taken_again_without_page_faults():
    if (without := faults(keep=False)) < 1000:
        pytest.skip(f"this malloc keeps freed memory by itself: {without} page faults")
    assert faults(keep=True) < without / 100
