"""Optimizers, one file each, and their contract."""

from megatron_ddrp.engine.optimizers.contract import Optimizer
