"""`python -m tasks.minimal_pairs`: score encoders on minimal pairs, without fine-tuning, and print the accuracies."""

from megatron_ddrp.errors import run_command
from megatron_ddrp.tasks.minimal_pairs.command import main

if __name__ == "__main__":
    run_command(main, "tasks.minimal_pairs")
