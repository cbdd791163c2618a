"""What checkpoints show: the paper's figures 2, 3a and 4, its Algorithm 1, notes on rare words, the space of hidden
states, and throughput (megatron-ddrp analyze).

`commands` has the flags, `reports` what each subcommand does; a module that measures knows nothing of flags and files.
"""
