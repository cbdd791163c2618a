"""The commands of `megatron-ddrp`, one module each; `megatron_ddrp/__main__.py` lists them."""
