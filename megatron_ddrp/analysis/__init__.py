"""What a run's checkpoints show: one module an analysis, each giving numbers as JSON-ready dictionaries."""
