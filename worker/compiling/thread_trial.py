"""Chooses how many threads of the processor run a graph, by a short trial.

Each number of threads runs small and larger batches, in turns. A run begins with sleeping threads, as while
serving, so that the time to wake them counts. The smallest number wins that is nearly as fast as the best: threads
that gain little would spin on cores which other work could use.

Other programs disturb runs of several threads most, because all threads wait for the one that lost its core. So a
run counts only if its threads hardly waited for a core, by the kernel's account. If no run of some number counts,
the length of a run decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from clockwright.units import NS_PER_MS, NS_PER_S

# More threads have to gain more than a tenth.
_GAIN = 1.1
# The trial's length, but for its last round.
_BUDGET_NS = NS_PER_S // 2
_ROUNDS_MAX = 15
# Long enough for threads that spin to fall asleep.
_PAUSE_S = 0.001
# Waiting for cores, all threads together, as a part of a run that counts.
_WAIT_SHARE = 0.1
# On a busy machine: what runs longer on one thread than this gains by several. A ResNet-18 takes 35 ms and gains; a
# network of two small layers takes 20 us, and waking one more thread costs as much.
_LONG_NS = NS_PER_MS

#: Runs one batch, by the number of its rows.
Launches = Mapping[int, Callable[[], object]]
#: The ns of a run by threads and rows.
Durations = Mapping[int, Mapping[int, int]]


def choose_threads(launches: Mapping[int, Launches]) -> int:
    """Try numbers of threads, which ascend, on the same batches and choose one."""
    return judge(*_try_all(launches))


def judge(counted: Durations, shortest: Durations) -> int:
    """Choose a number of threads by the least ns of runs that count, and of all, by threads and rows."""
    if any(counted[count].keys() != each.keys() for count, each in shortest.items()):
        fewest = min(shortest)
        return max(shortest) if min(shortest[fewest].values()) > _LONG_NS else fewest
    cost = {count: sum(ns / size for size, ns in each.items()) for count, each in counted.items()}
    return min(count for count in cost if cost[count] <= _GAIN * min(cost.values()))


def _try_all(launches: Mapping[int, Launches]) -> tuple[Durations, Durations]:
    counted: dict[int, dict[int, int]] = {count: {} for count in launches}
    shortest: dict[int, dict[int, int]] = {count: {} for count in launches}
    # The first round allocates: a small part of runs so long that there is no other round.
    begin_ns = time.monotonic_ns()
    for _ in range(_ROUNDS_MAX):
        for count, each in launches.items():
            for size, launch in each.items():
                time.sleep(_PAUSE_S)
                before_ns, start_ns = _waited_ns(), time.monotonic_ns()
                launch()
                taken_ns = time.monotonic_ns() - start_ns
                _note(shortest[count], size, taken_ns)
                if _waited_ns() - before_ns <= _WAIT_SHARE * taken_ns:
                    _note(counted[count], size, taken_ns)
        if time.monotonic_ns() - begin_ns > _BUDGET_NS:
            break
    return counted, shortest


def _note(durations: dict[int, int], size: int, taken_ns: int) -> None:
    durations[size] = min(durations.get(size, taken_ns), taken_ns)


def _waited_ns() -> int:
    """How long the threads of this process have been ready to run without a core; 0 where the kernel does not count."""
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError):  # it has just ended
                total += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    return total
