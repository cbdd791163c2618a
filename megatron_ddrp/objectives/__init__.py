"""Pre-training objectives: pure functions of hidden states, logits and draws; each gives sums, never means.

A loss is a sum over the global batch ÷ the global count (`megatron_ddrp.engine.step`), so no micro-batch, rank or stage
may divide by its own count.
"""
