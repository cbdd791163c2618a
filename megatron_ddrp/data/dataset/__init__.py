"""Megatron's indexed files: reading, inspecting, verifying, merging."""
