"""How much memory this process takes and may take, and what follows for its admission limits."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from clockwright.process import give_back_memory
from controller.front.admission.limits import AdmissionLimits
from controller.front.admission.pressure import MemoryPressure, MemoryState

log = logging.getLogger(__name__)

#: How often memory is looked at. A 10 GbE link brings 250 MB in that time.
LOOK_S = 0.2
# While it is short, what is free is given back to the kernel so often.
_GIVE_BACK_S = 2.0

_STATM = Path("/proc/self/statm")
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP, cgroups: Path = _CGROUPS) -> int:
    """How much memory there is for this process: the least limit of its control groups, or the machine's memory.

    `cgroup` is the kernel's list of this process's groups; they are mounted at `cgroups`, of version 2 or 1.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        for line in cgroup.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, name = cgroups, "memory.max"
            elif "memory" in controllers.split(","):
                root, name = cgroups / "memory", "memory.limit_in_bytes"
            else:
                continue
            # Inside a container the path may be the host's: then the group that is seen there is the root.
            folder = root / path.lstrip("/")
            while True:
                with suppress(OSError, ValueError):
                    limits.append(int((folder / name).read_text()))
                if folder == root:
                    break
                folder = folder.parent
    return min(limit for limit in limits if limit > 0)


def resident_bytes() -> int:
    """Memory that this process takes up, with what it touched of shared memory. Returns 0 if unknown."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class MemoryWatch:
    """Has the admission limits refuse requests for which memory is short."""

    def __init__(
        self,
        door: AdmissionLimits,
        limit_bytes: int | None = None,
        *,
        used_bytes: Callable[[], int] = resident_bytes,
    ) -> None:
        """Begin with a look. More than `limit_bytes`, or all that is available, is never to be in use."""
        self.pressure = MemoryPressure(available_bytes() if limit_bytes is None else limit_bytes)
        self._door = door
        self._used_bytes = used_bytes
        self.look()

    def look(self) -> None:
        """Find out how much is in use now."""
        pressure = self.pressure
        if not pressure.see(self._used_bytes()):
            return
        self._door.memory_is(pressure)
        say = log.info if pressure.state is MemoryState.AMPLE else log.warning
        say(
            "memory: %d of %d MiB are in use: %s",
            pressure.used_bytes >> 20,
            pressure.limit_bytes >> 20,
            {
                MemoryState.AMPLE: "all requests are taken again",
                MemoryState.LARGE_REFUSED: "large requests are refused",
                MemoryState.ALL_REFUSED: "all requests are refused",
            }[pressure.state],
        )

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look again and again until the end."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()
            looks = looks + 1 if self.pressure.state is not MemoryState.AMPLE else 0
            # What was freed may still be the process's: nothing would ever be taken again.
            if looks % round(_GIVE_BACK_S / LOOK_S) == 1:
                await asyncio.to_thread(give_back_memory)
