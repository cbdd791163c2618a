"""What checkpoints show: the paper's figures 2, 3a and 4, its Algorithm 1, and notes on rare words (tools/analyze.py).

`commands` has the flags, `reports` what each subcommand does; a module that measures knows nothing of flags and files.
"""
