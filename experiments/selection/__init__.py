"""Clipper's experiments (NSDI'17) on the selection layer that runs in the controller."""
