"""`python -m tasks.finetune`: fine-tune encoders on tasks of your own, and label files with them."""

from megatron_ddrp.run.launch import run_rank
from megatron_ddrp.tasks.finetune.command import main

if __name__ == "__main__":
    run_rank(main, "tasks.finetune")
