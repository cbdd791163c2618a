"""Requirements of Triton, which compiles layers and attention for GPUs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def missing_for_triton() -> str | None:
    """Return what Triton lacks on this machine, as the object of "needs", or None if it can compile.

    Triton builds its launcher with a C compiler and Python's headers at the first use.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which torch installs for CUDA"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (is_interpreted or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler, and neither gcc nor clang is found (install one or set CC)"
    if not (is_interpreted or (_headers() / "Python.h").is_file()):
        return f"Python.h, which is not in {_headers()} (install python3-dev, or use a Python that has it)"
    return None


def _headers() -> Path:
    """Return the folder where Triton looks for Python's headers, also in Debian's Python."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
