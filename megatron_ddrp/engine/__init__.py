"""The DeepSpeed engine: build, step, schedule, checkpoint. The only folder that imports DeepSpeed."""
