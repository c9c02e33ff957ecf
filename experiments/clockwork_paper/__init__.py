"""The figures and tables of the Clockwork paper, and the workloads that they share."""
