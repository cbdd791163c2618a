"""The entry point of `megatron_ddrp.tasks.minimal_pairs`."""
