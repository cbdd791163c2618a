"""Run `megatron-ddrp compare` from a checkout: `python -m tasks.compare`."""

from megatron_ddrp.__main__ import run

if __name__ == "__main__":
    run("compare", "python -m tasks.compare")
