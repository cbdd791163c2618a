"""Analyses of trained encoders (`megatron-ddrp analyze`): similarity of tokens and heads, attention maps, the triangle
effect, left and right, the geometry of hidden states, notes on rare words, and throughput.

`commands` defines the flags and `reports` runs the subcommands. The modules that measure know no flags and no files.
"The paper" is Zhang et al., "Better Pre-Training by Reducing Representation Confusion"; its figures 2, 3a and 4 and its
Algorithm 1 are here.
"""
