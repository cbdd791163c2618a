"""`megatron-ddrp compare`: train the models of a plan at one budget, score and look into them, and write one page."""
