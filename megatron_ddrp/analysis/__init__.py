"""What checkpoints show: the paper's figures 2, 3a and 4, its Algorithm 1, and notes on rare words (tools/analyze.py).

A module that measures knows nothing of flags and files; a `run_*` module beside it does what its subcommand asks.
"""
