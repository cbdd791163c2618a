#!/usr/bin/env python
"""Start `megatron_ddrp.analysis.commands`; `tools/analyze.py --help` says what it does."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.analysis.commands import build_parser, main
from megatron_ddrp.errors import run_command

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    run_command(main)
