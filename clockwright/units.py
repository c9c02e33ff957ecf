"""Identifiers and units. Every time in a core is an `int` of nanoseconds on the controller's clock."""

from typing import NewType

ModelId = NewType("ModelId", str)
"""A model: one instance with weights of its own, as clients name it."""
ArchitectureId = NewType("ArchitectureId", str)
"""A compiled graph, shared by all models that differ in their weights only."""
WorkerId = NewType("WorkerId", str)
"""One worker process, which is one GPU."""
GpuKind = NewType("GpuKind", str)
"""Workers of one kind run the same kernels equally fast; estimates are kept per kind."""
RequestId = NewType("RequestId", int)
NO_REQUEST = RequestId(0)
"""The number of what was not asked, or not yet; they count from 1."""
ActionId = NewType("ActionId", int)

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

# Longest duration of a step that a worker may report, and that anything is expected to take. An action
# that takes longer has been given up long before.
DURATION_NS_MAX = 3600 * NS_PER_S

# 73 years. A clock beyond it is nonsense, and translated times would no longer fit the wire.
TIME_NS_MAX = 1 << 61

# A day. It keeps every time well inside the wire's int64; a client that means "no limit" is told so.
SLO_NS_MAX = 24 * 3600 * NS_PER_S

#: Smallest and largest weight of a request: enough to go behind or before all others, and sums stay exact.
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0

# Names that people give are shorter: ids of requests and queries, tenants, contexts, outputs. The
# scheduler keeps some tenants, and applications keep contexts.
NAME_CHARS_MAX = 256

# Clockwork's page size (cache.cpp); a page is the unit of allocation in the weights cache.
PAGE_BYTES = 16 * 1024 * 1024

# Compiled batch sizes of the paper (section 5.2).
DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16)
#: The most batches that one request may take.
PARTS_MAX = 16


def format_ns(duration_ns: int) -> str:
    """Say a duration as people do: `8.3 ms`, `420 us`, `2.50 s`."""
    if abs(duration_ns) >= NS_PER_S:
        return f"{duration_ns / NS_PER_S:.2f} s"
    if abs(duration_ns) >= NS_PER_MS // 10:
        return f"{duration_ns / NS_PER_MS:.1f} ms"
    return f"{duration_ns / NS_PER_US:.0f} us"
