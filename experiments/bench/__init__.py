"""Benchmarks: one part of the product alone, or one property of the whole, measured on this machine."""
