"""The entry point of `megatron_ddrp.tasks.finetune`."""
