"""Where the calls of a study run: in processes of this machine, or as tasks of a Ray cluster (`--ray`).

A study that has many calls, each with a seed, takes `pool(setting.processes)`. The same calls come out, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

_clusters: list[str] = []


@contextmanager
def on_cluster(address: str) -> Iterator[None]:
    """Have pools run calls on a Ray cluster, until the block ends; without an address, here."""
    _clusters.append(address)
    try:
        yield
    finally:
        _clusters.pop()


def pool(processes: int) -> Executor:
    """Make a pool: of so many processes, or of as many as the cluster has cores.

    Raises:
        ConfigError: there is no such cluster, or no Ray here.
    """
    if not (_clusters and _clusters[-1]):
        return ProcessPoolExecutor(processes)
    from engines.ray.executor import RayExecutor

    return RayExecutor(_clusters[-1])
