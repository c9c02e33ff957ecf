"""For how long a client stood still: what comes meanwhile is late by its clock, and not the server's lateness."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

#: The time between two looks.
TICK_S = 0.005


class Standstill:
    """Adds up for how long a client's loop stood still, by looks that it means to take every `TICK_S`."""

    def __init__(self) -> None:
        #: In all, until the last look.
        self.total_s = 0.0
        self._before_s, self._waited_s = time.monotonic(), _waited_s()

    def look(self) -> None:
        """Count what has passed beyond a tick since the last look."""
        now_s, now_waited_s = time.monotonic(), _waited_s()
        self.total_s += now_s - self._before_s - TICK_S + now_waited_s - self._waited_s
        self._before_s, self._waited_s = now_s, now_waited_s


def _waited_s() -> float:
    """For how long the threads next to this one, which read gRPC's sockets, waited for a processor, in all."""
    waited_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) != threading.get_native_id():
            with suppress(OSError):  # It has ended.
                waited_ns += int((thread / "schedstat").read_bytes().split()[1])
    return waited_ns / 1e9
