"""`megatron-ddrp compare`: train the models of a plan at one budget, score and analyse them, and write one page."""
