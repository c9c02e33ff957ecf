"""How many workers the current load needs, from the core's statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from clockwright.units import NS_PER_S, GpuKind

#: Target share of a lane's time in use, so that bursts have room while another worker starts.
TARGET_BUSY: Final = 0.8
#: From when a worker is asked for until it is ready, before that was measured.
START_NS: Final = 60 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class KindStatistics:
    """How one kind of worker did in the last seconds."""

    gpu_kind: GpuKind
    num_workers: int
    #: How long the rates look back.
    over_ns: int
    #: Share of the time that EXECs took, and LOADs.
    exec_busy: float
    load_busy: float
    #: Requests that were run, and weights that were loaded and evicted, per second.
    run_rps: float
    loads_per_s: float
    evictions_per_s: float
    #: Requests dropped per second, for want of each.
    dropped_for_exec_rps: float
    dropped_for_links_rps: float
    dropped_for_loads_rps: float
    dropped_for_pages_rps: float
    #: Requests that one more worker of the kind would answer, per second.
    one_more_rps: float
    #: Workers that the load needs, and what that number comes from: exec, loads, links, pages; empty: no load.
    wanted: int = 0
    limit: str = ""
    #: Of `num_workers`: those that serve no model yet, and are not about to leave.
    num_joining: int = 0
    #: From when a worker is asked for until it is ready, as a rule.
    start_ns: int = 0


def required_workers(kind: KindStatistics) -> tuple[int, str]:
    """Number of workers of a kind so that nothing is refused and no lane is busier than `TARGET_BUSY`.

    Refused requests count as work of the lane that had no time for them, each as long as those that ran. Requests
    refused for lack of links, PCIe or pages need more workers in proportion to what a worker serves now.

    Returns:
        The number, and what it comes from: exec, loads, links, pages; empty: no load.
    """
    if kind.num_workers == 0:
        return 0, ""
    present = kind.num_workers
    exec_work, load_work = present * kind.exec_busy, present * kind.load_busy
    dropped = {
        "links": kind.dropped_for_links_rps,
        "loads": kind.dropped_for_loads_rps,
        "pages": kind.dropped_for_pages_rps,
    }
    dropped_rps = sum(dropped.values())
    more = 0.0
    if kind.run_rps:
        exec_work *= 1 + kind.dropped_for_exec_rps / kind.run_rps
        more = dropped_rps * present / kind.run_rps
    elif dropped_rps or kind.dropped_for_exec_rps:
        more = 1.0
    required = math.ceil(max(exec_work, load_work) / TARGET_BUSY)
    limit = "" if not required else "loads" if load_work > exec_work else "exec"
    if more:
        # A shortage exists although all present workers do what they can.
        required = max(required, present) + math.ceil(more)
        limit = max(dropped, key=lambda name: dropped[name]) if dropped_rps else "exec"
    elif kind.dropped_for_exec_rps and required <= present:
        required, limit = present + 1, "exec"
    return max(required, 1), limit
