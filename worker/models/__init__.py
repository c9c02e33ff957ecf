"""What one model is: its files, its limits, what is served of it."""
