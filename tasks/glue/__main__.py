"""`python -m tasks.glue`: fine-tune encoders on GLUE over a grid and seeds, and print the medians."""

from megatron_ddrp.run.launch import run_rank
from megatron_ddrp.tasks.glue.command import main

if __name__ == "__main__":
    run_rank(main, "tasks.glue")
