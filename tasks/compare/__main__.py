"""`python -m tasks.compare`: do what a plan asks for, as far as it is not done, and write the page."""

from megatron_ddrp.errors import run_command
from megatron_ddrp.tasks.compare.command import main

if __name__ == "__main__":
    run_command(main, "tasks.compare")
