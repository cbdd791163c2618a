"""Checks of Triton's kernels on a CPU, in a process of their own: how a test starts them, and their fixtures.

The interpreter replaces Triton's functions when they are defined, so TRITON_INTERPRET=1 must stand before the first
import of triton, and nothing compiled can be used beside it. To run a check alone:

    TRITON_INTERPRET=1 python -m pytest tests/unit/model/triton_encodings.py -k deberta
"""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ddrp.model.attention.gpu.triton_attention import plan_of

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(arguments, **environment):
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500, check=False
    )


def assert_checks_pass(name, fewest):
    """Run the checks of a file in this folder under the interpreter: all pass, and there are `fewest` or more."""
    checks = str(Path(__file__).with_name(name))
    result = run(["-m", "pytest", checks, "-p", "no:cacheprovider"], TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) >= fewest, result.stdout


@pytest.fixture(autouse=True, scope="module")
def kernels_alone_take_time():
    """Leave out what takes the interpreter longer than the kernels' sums.

    A launch gives Triton's functions their meaning on a CPU; at every call of a helper the interpreter would look
    through all of them again, and once for each module of helpers is enough. It would also do every sum of whole
    numbers a second time in int64, to find overflows that it reports in its debug mode alone.
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patched = set()
    call = interpreter.InterpretedFunction.__call__

    def call_helper(self, *args, **kwargs):
        if self.fn.__module__ in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(self.fn.__module__)
        return call(self, *args, **kwargs)

    options = interpreter.interpreter_builder.options
    with pytest.MonkeyPatch.context() as patch:
        unchecked = dataclasses.replace(options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_helper)
        yield


@pytest.fixture(autouse=True)
def no_plan_of_other_tiles():
    """Some tests choose tiles of their own."""
    plan_of.cache_clear()
    yield
    plan_of.cache_clear()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """Fill new memory with NaN, so that a value which a kernel does not write is noticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
