"""Fine-tuning on tasks of any kind, and the files, metrics and scores that these need."""
