"""A run's page: the facts of the run, its curves beside those of other runs, and the figures."""
