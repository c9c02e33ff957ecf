"""The pure part of pipelines: declaration, graph, times, progress. No I/O, no clock, no bytes but those of a condition."""
