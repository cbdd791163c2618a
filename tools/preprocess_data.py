#!/usr/bin/env python
"""Run `megatron-ddrp preprocess` from a checkout."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_ddrp.__main__ import run

if __name__ == "__main__":
    run("preprocess")
