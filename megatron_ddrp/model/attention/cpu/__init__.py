"""Blocked attention: cache-sized tiles, for CPUs."""
