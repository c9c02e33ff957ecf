"""How many workers the current load needs, from the core's statistics. No I/O."""

from __future__ import annotations

import math
from typing import Final

from controller.core import KindStatistics

#: Target share of a lane's time in use, so that bursts have room while another worker starts.
TARGET_BUSY: Final = 0.8


def required_workers(kind: KindStatistics) -> int:
    """Number of workers of a kind so that nothing is refused and no lane is busier than `TARGET_BUSY`.

    Refused requests count as work of the lane that had no time for them, each as long as those that ran. Requests
    refused for lack of links, PCIe or pages need more workers in proportion to what a worker serves now.
    """
    if kind.num_workers == 0:
        return 0
    present = kind.num_workers
    exec_work, load_work = present * kind.exec_busy, present * kind.load_busy
    dropped_rps = (
        kind.dropped_for_links_rps + kind.dropped_for_loads_rps + kind.dropped_for_pages_rps
    )
    more = 0.0
    if kind.run_rps:
        exec_work *= 1 + kind.dropped_for_exec_rps / kind.run_rps
        more = dropped_rps * present / kind.run_rps
    elif dropped_rps or kind.dropped_for_exec_rps:
        more = 1.0
    required = math.ceil(max(exec_work, load_work) / TARGET_BUSY)
    if more:
        # A shortage exists although all present workers do what they can.
        required = max(required, present) + math.ceil(more)
    elif kind.dropped_for_exec_rps:
        required = max(required, present + 1)
    return max(required, 1)
