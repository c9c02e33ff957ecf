"""What a worker runs on: processor, GPU, or durations from a profile."""
