"""Blocked attention for CPUs, in tiles that fit in the cache."""
