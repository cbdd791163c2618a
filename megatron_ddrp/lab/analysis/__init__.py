"""Analyses of trained encoders, the subcommands of `megatron-ddrp analyze`.

`command` defines the flags and `reports` runs the subcommands. `figures` and `probe` measure, and know no flags and no
output files. "The paper" is Zhang et al., "Better Pre-Training by Reducing Representation Confusion"; its figures 2, 3a
and 4 and its Algorithm 1 are here.
"""
