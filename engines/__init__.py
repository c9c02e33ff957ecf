"""Orchestrators, which place workers on other machines: each runs the same commands as a person would.

An orchestrator starts, stops and restarts processes. It asks the controller how many are wanted and which may go. No
request and no tensor passes it, and nothing here is imported by the controller or a worker.
"""
