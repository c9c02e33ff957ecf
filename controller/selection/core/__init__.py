"""What selection knows and decides. No I/O, no clock, no randomness of its own."""
