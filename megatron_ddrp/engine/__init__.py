"""The DeepSpeed engine: build, step, checkpoint, checks of the device. The only folder that imports DeepSpeed."""
