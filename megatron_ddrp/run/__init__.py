"""A run as the system sees it: how it starts and stops, its folder, its log and metrics."""
