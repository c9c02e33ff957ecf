"""How good any schedule could be: upper bounds on the requests answered in time.

"Percent of the best possible" needs a denominator. Each bound states what it holds for; the tests hold
the production scheduler, and an exhaustive search over small cases, to every one of them.

========================  ============================================================  ==============
bound                     holds for                                                     cost
========================  ============================================================  ==============
`density_rate`            any arrivals, open or closed loop; any policy                 nothing
`density_bound` (B1)      the given arrivals; any policy, clairvoyant and preemptive    linear, streams
`memory_bound` (B3)       the same, and residency: pages, one LOAD at a time per GPU;   an LP
                          sees bursts
`residency_bound` (B6)    the same, for whole runs: pages x time, and LOADs              a sort
`memoryless_bound` (B4)   policies that cannot foresee, independent popularity          a sort
========================  ============================================================  ==============

`density_bound` and those that are never above it also know what the links carry: every answer has its inputs and
outputs carried between its arrival and its deadline. The length of a link comes off the SLOs (`simulated`).

All of them take an EXEC or LOAD to last at least what its model's `Cost` says, one EXEC and one LOAD at a
time per GPU, and requests of one row. A run whose devices are faster than the profile, or whose durations
are random, is outside of that: give the shortest durations that occur.
"""

from experiments.bounds.case import BoundProblem, Cost, Wires
from experiments.bounds.density import density_bound, density_rate, least_shares
from experiments.bounds.linear import memory_bound
from experiments.bounds.memoryless import memoryless_bound
from experiments.bounds.residency import residency_bound

__all__ = [
    "BoundProblem",
    "Cost",
    "Wires",
    "density_bound",
    "density_rate",
    "least_shares",
    "memory_bound",
    "memoryless_bound",
    "residency_bound",
]
