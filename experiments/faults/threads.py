"""In place of `threading`, for the modules of a worker that have threads."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from clockwright.units import NS_PER_S
from experiments.faults import world as worlds


class Lock:
    """No thread is held up by it: a thread of the world lets others run only where it waits, and then it has let go."""

    def __init__(self) -> None:
        self._is_held = False

    def acquire(self) -> bool:
        assert not self._is_held, "held while its owner waits"
        self._is_held = True
        return True

    def release(self) -> None:
        assert self._is_held
        self._is_held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """Threads wait here."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiting: deque[tuple[worlds.WorldThread, list[bool]]] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified, or so long."""
        thread = worlds.running_thread()
        notified: list[bool] = []
        entry = thread, notified
        self._waiting.append(entry)
        self._lock.release()
        try:
            thread.block(None if timeout is None else round(timeout * NS_PER_S))
        finally:
            if not notified:
                self._waiting.remove(entry)
            self._lock.acquire()
        return bool(notified)

    def notify(self, n: int = 1) -> None:
        """Let who waits go on."""
        for _ in range(min(n, len(self._waiting))):
            thread, notified = self._waiting.popleft()
            notified.append(True)
            thread.wake()


class Thread:
    """A thread."""

    def __init__(
        self,
        world: worlds.World,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._thread = worlds.WorldThread(world.running, target, args)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Wait until it has ended."""
        waiting = worlds.running_thread()
        while not self._thread.is_over:
            self._thread.when_over(waiting.waker())
            waiting.block()


class Threading:
    """What stands where a module says `threading`: the threads of here for a world's processes, for others Python's."""

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._inside = {
            "Lock": Lock,
            "Condition": Condition,
            "Thread": functools.partial(Thread, world),
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name) if self._world.current is None else self._inside[name]
