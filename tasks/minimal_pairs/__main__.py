"""Run `megatron-ddrp minimal-pairs` from a checkout: `python -m tasks.minimal_pairs`."""

from megatron_ddrp.__main__ import run

if __name__ == "__main__":
    run("minimal-pairs", "python -m tasks.minimal_pairs")
