"""Fine-tuning of encoders: kinds of tasks, sweeps over a grid and seeds, scores, predictions and kept models."""
