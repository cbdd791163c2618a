"""The entry point of `megatron_ddrp.lab.compare`."""
