"""Datasets in Megatron's indexed format: reading, inspecting, verifying, merging."""
