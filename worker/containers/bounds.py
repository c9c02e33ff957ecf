"""Bounds of a container's memory and processor time: a control group of Linux (cgroup v2), where this process may make one.

A group also finds the processes that a program started in sessions of their own, and ends them with the program. So a
program without bounds has one too, where that is possible.

A group is made in the parent of the worker's own, because a group that has processes has no groups with bounds.
With systemd 254 or newer, `Delegate=yes` and `DelegateSubgroup=clockwright` give the service such a parent.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

from clockwright.containers import ContainerSpec

logger = logging.getLogger(__name__)

_PERIOD_US = 100_000
# Killed processes are gone in a moment, unless a disk holds them.
_END_LIMIT_S = 2.0
_groups = itertools.count()


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The group of one process."""

    folder: Path
    memory_mib: int | None

    def verdict(self) -> str:
        """Say that the kernel has ended a process of the group for its memory; empty: it has not."""
        if self.memory_mib is None:
            return ""
        with contextlib.suppress(OSError):
            events = (self.folder / "memory.events").read_text(encoding="ascii").split()
            if events[events.index("oom_kill") + 1] != "0":
                return f", because it took more than memory_mib = {self.memory_mib},"
        return ""

    def close(self) -> None:
        """End what is left in the group, and remove it."""
        end_s = time.monotonic() + _END_LIMIT_S
        with contextlib.suppress(OSError):
            # Linux 5.14; elsewhere what is left stays.
            with (self.folder / "cgroup.kill").open("r+") as kill:
                kill.write("1")
            with (self.folder / "cgroup.events").open("rb", buffering=0) as events:
                ended = select.poll()
                ended.register(events, select.POLLPRI)
                while b"populated 1" in events.read() and time.monotonic() < end_s:
                    ended.poll(_END_LIMIT_S * 1e3)
                    events.seek(0)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


class Bounds:
    """Makes the groups of a container's processes."""

    def __init__(self, name: str, root: Path = Path("/")) -> None:
        """Set up; makes nothing. `name` is for the log; a test has another root of the file system."""
        self._name = name
        self._root = root
        self._has_told = False

    def open(self, spec: ContainerSpec) -> ControlGroup | None:
        """Make a group with the bounds that a declaration states.

        Returns the group; None: none is possible. Where there are bounds, the log says so once.
        """
        wanted: dict[str, str] = {}
        if spec.memory_mib is not None:
            wanted["memory.max"] = str(spec.memory_mib << 20)
        if spec.cpus is not None:
            wanted["cpu.max"] = f"{round(spec.cpus * _PERIOD_US)} {_PERIOD_US}"
        group: ControlGroup | None = None
        try:
            parent = self._parent()
            if wanted:
                _enable(parent, {name.partition(".")[0] for name in wanted})
            folder = parent / f"clockwright-{os.getpid()}-{next(_groups)}"
            folder.mkdir()
            group = ControlGroup(folder, spec.memory_mib)
            for name, value in wanted.items():
                (folder / name).write_text(value, encoding="ascii")
            if spec.memory_mib is not None:
                # Otherwise it would swap, and a part of it would be ended.
                for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                    with contextlib.suppress(OSError):
                        (folder / name).write_text(value, encoding="ascii")
        except OSError as error:
            if group is not None:
                group.close()
            if wanted and not self._has_told:
                self._has_told = True
                logger.warning(
                    "container %s: memory_mib and cpus do not hold: %s; expected a cgroup v2 that this "
                    "process may write to",
                    self._name,
                    error,
                )
            return None
        return group

    def _parent(self) -> Path:
        """Find the group in which groups are made. Raises OSError if there is no cgroup v2."""
        mounts = (self._root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        mounted = [line.split()[4] for line in mounts if " - cgroup2 " in line]
        own = (self._root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        paths = [line.removeprefix("0::/") for line in own if line.startswith("0::/")]
        if not mounted or not paths:
            raise OSError("found no cgroup v2")
        top = self._root / mounted[0].lstrip("/")
        return (top / paths[0]).parent if paths[0] else top


def _enable(parent: Path, controllers: set[str]) -> None:
    """Have the groups in one be bounded in these ways. Raises OSError if they cannot be."""
    control = parent / "cgroup.subtree_control"
    if missing := controllers - set(control.read_text(encoding="ascii").split()):
        there = (parent / "cgroup.controllers").read_text(encoding="ascii").split()
        if lacking := sorted(missing - set(there)):
            raise OSError(f"{parent}: found controllers {there}, but no {' and no '.join(lacking)}")
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)), encoding="ascii")
