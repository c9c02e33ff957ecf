"""Models that are code in a process of their own."""
