"""Run `megatron-ddrp glue` from a checkout: `python -m tasks.glue`."""

from megatron_ddrp.__main__ import run

if __name__ == "__main__":
    run("glue", "python -m tasks.glue")
