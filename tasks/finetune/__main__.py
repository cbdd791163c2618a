"""Run `megatron-ddrp finetune` from a checkout: `python -m tasks.finetune`."""

from megatron_ddrp.__main__ import run

if __name__ == "__main__":
    run("finetune", "python -m tasks.finetune")
