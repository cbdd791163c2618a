#!/usr/bin/env python3
"""Run `megatron-ddrp pretrain` from a checkout: `deepspeed pretrain_bert.py …`."""

from megatron_ddrp.__main__ import run

if __name__ == "__main__":
    run("pretrain")
