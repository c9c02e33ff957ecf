"""What links carry: every answer has its inputs and outputs carried between its arrival and its deadline.

Those with the fewest bytes first, that is more than any schedule can carry.
"""

from __future__ import annotations

import math

import numpy as np

from clockwright.units import NS_PER_S
from experiments.bounds.case import BoundProblem, Wires


def wires_bound(case: BoundProblem, wires: Wires) -> int:
    """Requests that could be carried at most, one way, from the start to the last deadline."""
    # A simulated wire rounds the time of each message down to whole ns.
    span_s = (case.span_ns + len(case)) / NS_PER_S
    num_bytes = np.sort(np.asarray(wires.request_bytes, dtype=np.float64)[case.model])
    fits = np.cumsum(num_bytes) <= math.ceil(wires.bytes_per_s * span_s)
    return int(np.count_nonzero(fits))
