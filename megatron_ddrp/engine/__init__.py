"""The only place that talks to DeepSpeed: build, step, schedule, checkpoint."""
