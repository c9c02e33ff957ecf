"""Workloads and faults that nobody tuned the policies to, each a family with its seeds."""
