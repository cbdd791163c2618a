"""Experiments: comparisons of models, analyses of what they learned, and reports of runs."""
