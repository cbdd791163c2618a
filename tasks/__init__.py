"""Entry points: `python -m tasks.NAME` runs `megatron_ddrp.tasks.NAME`."""
