"""Figures of the process and its host, reported by leader and standby."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Final

from clockwright.units import NS_PER_S
from controller.front.admission.memory import resident_bytes
from controller.metrics.text import Text

# Changes are relative to a sample of at least this age, so that two scrapers do not shorten each other's
# intervals.
_LEAST_NS: Final = NS_PER_S

_STAT, _MEMORY = Path("/proc/stat"), Path("/proc/meminfo")
_OWN_STAT, _HANDLES = Path("/proc/self/stat"), Path("/proc/self/fd")


class Changes:
    """Changes since an earlier sample, by name; the first element of a sample is a time."""

    def __init__(self) -> None:
        self._samples: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def since_earlier(
        self, what: str, sample: tuple[int, ...], *, least: int = _LEAST_NS
    ) -> tuple[int, ...]:
        """Differences to a sample that is at least `least` older, or the oldest; at first to the present one."""
        earlier, last = self._samples.get(what, (sample, sample))
        if sample[0] - last[0] >= least:
            earlier, last = last, sample
        self._samples[what] = earlier, last
        return tuple([now - then for now, then in zip(sample, earlier, strict=True)])

    def keep_only(self, present: Set[str]) -> None:
        """Forget samples of all others."""
        self._samples = {what: found for what, found in self._samples.items() if what in present}


class ProcessFigures:
    """Figures of this process, under the usual exporters' names, and of its host, under Triton's."""

    def __init__(self) -> None:
        self._started_s = _started_s()
        self._changes = Changes()

    def write(self, text: Text) -> None:
        """Write them on a page."""
        busy, total = 0, 0
        with suppress(OSError):
            times = list(map(int, _STAT.read_text().partition("\n")[0].split()[1:9]))
            # The fourth and fifth are idle time, and idle time with waiting for a disk.
            busy, total = sum(times) - times[3] - times[4], sum(times)
        elapsed, used = self._changes.since_earlier("host", (total, busy), least=1)
        text.one("nv_cpu_utilization", used / elapsed if elapsed else 0.0)
        total_bytes = free_bytes = 0
        with suppress(OSError):
            lines = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
            total_bytes, free_bytes = (
                int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable")
            )
        text.one("nv_cpu_memory_total_bytes", total_bytes)
        text.one("nv_cpu_memory_used_bytes", total_bytes - free_bytes)
        text.one("process_cpu_seconds_total", time.process_time())
        text.one("process_resident_memory_bytes", resident_bytes())
        text.one("process_start_time_seconds", self._started_s)
        text.one("process_open_fds", len(os.listdir(_HANDLES)) if _HANDLES.exists() else 0)
        text.one("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _started_s() -> float:
    """Start of this process in Unix time; now, if the system does not tell it."""
    now_s = time.time()
    try:
        # The name, in parentheses, may have spaces; behind it are the third field and all others.
        ticks = int(_OWN_STAT.read_text().rpartition(")")[2].split()[19])
    except OSError:
        return now_s
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now_s - age_s
