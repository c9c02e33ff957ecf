"""The most that any policy could answer of a family's case."""

from __future__ import annotations

from clockwright.units import NS_PER_S
from experiments.bounds import density_bound, memory_bound
from experiments.bounds.simulated import problem_of, rate_bound
from experiments.unseen.family import Family

# The memory bound takes seconds for some thousand requests, so longer runs are bounded by windows.
_WINDOW_NS = 2 * NS_PER_S


def bound_of(family: Family, seed: int) -> int:
    """Requests of the measured time that any policy could answer in time; -1 where no bound is known."""
    if not family.bound:
        return -1
    case = family.case(seed)
    if family.bound == "rate":
        return rate_bound(case, family.begin_ns)
    problem = problem_of(case, family.begin_ns)
    if family.bound == "density":
        return density_bound(problem)
    windows = range(family.begin_ns, case.duration_ns, _WINDOW_NS)
    return sum(memory_bound(problem.window(at, at + _WINDOW_NS)) for at in windows)
