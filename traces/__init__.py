"""What clients do: arrival processes, recorded traces, a calibrated generator, and their replay."""
