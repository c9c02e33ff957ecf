"""The scheduler's policies against each other and against bounds, on workloads of many kinds."""
