"""Requirements of Triton, which compiles layers and attention for GPUs."""

from __future__ import annotations

import importlib.util
import os
import shutil


def missing_for_triton() -> str | None:
    """Return what Triton lacks on this machine, as the object of "needs", or None if it can compile.

    Triton builds its launcher with a C compiler at the first use.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which torch installs for CUDA"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (is_interpreted or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler, and neither gcc nor clang is found (install one or set CC)"
    return None
