"""The thread of a worker process that reads its connections to controllers, and does what is due at a time.

One thread serves all devices of the process: while it works for one, what comes for others collects, and one look at the
sockets finds all of it. A thread for each would wake, and take the interpreter from the others, for each action.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from clockwright.units import NS_PER_S
from worker.timing import tune_thread

logger = logging.getLogger(__name__)

# More are found by the next look; each look takes memory for so many.
_EVENTS_MAX = 64


class SocketWaiter:
    """Waits for sockets to have something to read. Only `wait` belongs to one thread."""

    def __init__(self) -> None:
        self._poller = select.epoll()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._waker, select.EPOLLIN)
        self._readers: dict[int, Callable[[], object]] = {self._waker: self._forget_wake}

    def _forget_wake(self) -> None:
        os.eventfd_read(self._waker)

    def add(self, sock: socket.socket, reader: Callable[[], object]) -> None:
        """Have `wait` return a function while a socket has something to read."""
        self._readers[sock.fileno()] = reader
        self._poller.register(sock, select.EPOLLIN)

    def remove(self, sock: socket.socket) -> None:
        """Forget a socket that is still open, if it was added."""
        if self._readers.pop(sock.fileno(), None) is not None:
            self._poller.unregister(sock)

    def wait(self, until_ns: int | None) -> Sequence[Callable[[], object]]:
        """Wait until a socket has something to read, or for `wake`, or until a time of the monotonic clock.

        Returns what to call now.
        """
        if until_ns is None:
            ready = self._poller.poll(-1, _EVENTS_MAX)
        else:
            # The poller's own limit is in whole milliseconds.
            pause_ns = until_ns - time.monotonic_ns()
            if pause_ns > 0 and not select.select((self._poller,), (), (), pause_ns / NS_PER_S)[0]:
                return ()
            ready = self._poller.poll(0, _EVENTS_MAX)
        return [self._readers[number] for number, _ in ready]

    def wake(self) -> None:
        """End the wait of another thread."""
        os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """Close what it holds; the sockets stay open."""
        self._poller.close()
        os.close(self._waker)


class ActionThread:
    """Runs until `close`. What it calls may take a while only where one device is served."""

    def __init__(self, *, waits: bool = False) -> None:
        """Start the thread; `waits` as of `tune_thread`: nothing that it calls computes."""
        self._waits = waits
        self._waiter = SocketWaiter()
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._is_closed = False
        #: The thread waits, or has begun to decide for how long.
        self._is_waiting = False
        threading.Thread(target=self._run, name="actions", daemon=True).start()

    def listen(self, sock: socket.socket, reader: Callable[[], object]) -> None:
        """Call a function whenever a socket has something to read; from any thread."""
        self._waiter.add(sock, reader)

    def ignore(self, sock: socket.socket) -> None:
        """Stop that; called by this thread, before the socket is closed."""
        self._waiter.remove(sock)

    def call_at(self, time_ns: int, callback: Callable[[], object]) -> None:
        """Call a function at a time of the monotonic clock, never earlier; from any thread."""
        # The number keeps functions from being compared, and those of one time in order.
        heapq.heappush(self._due, (time_ns, next(self._numbers), callback))
        if self._is_waiting:
            self._waiter.wake()

    def close(self) -> None:
        """Have the thread end when what it is calling has returned."""
        self._is_closed = True
        self._waiter.wake()

    def _run(self) -> None:
        tune_thread(waits=self._waits)
        due, waiter = self._due, self._waiter
        while not self._is_closed:
            try:
                self._is_waiting = True
                ready = waiter.wait(due[0][0] if due else None)
                self._is_waiting = False
                if due:
                    now_ns = time.monotonic_ns()
                    while due and due[0][0] <= now_ns:
                        heapq.heappop(due)[2]()
                for reader in ready:
                    reader()
            except Exception:
                # Our own bug. The other functions and connections are served in the next turn.
                logger.exception("the thread that takes actions failed")
        waiter.close()
