"""Fine-tuning of any encoder on any task: kinds of tasks, sweeps over a grid and seeds, scores and predictions."""
