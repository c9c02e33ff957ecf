"""The thread that reads a worker process's connections and ends what takes time."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from worker.action_thread import ActionThread

PATIENCE_S = 60.0


@pytest.fixture
def actions() -> Iterator[ActionThread]:
    with closing(ActionThread()) as running:
        yield running


def test_functions_are_called_in_the_order_of_their_times_and_never_early(
    actions: ActionThread,
) -> None:
    called: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    now_ns = time.monotonic_ns()
    times_ns = [now_ns + delay * NS_PER_MS for delay in (30, 10, 20, 10, -5)]
    for time_ns in times_ns:
        actions.call_at(time_ns, lambda due=time_ns: called.put((due, time.monotonic_ns())))  # type: ignore[misc]
    found = [called.get(timeout=PATIENCE_S) for _ in times_ns]
    # What is due at once may be called before the rest is known.
    assert sorted(due for due, _ in found) == sorted(times_ns)
    later = [due for due, _ in found if due > now_ns]
    assert later == sorted(later)
    assert all(due <= at_ns for due, at_ns in found)


def test_an_earlier_time_cuts_a_wait_short(actions: ActionThread) -> None:
    called = threading.Event()
    actions.call_at(time.monotonic_ns() + 3600 * NS_PER_S, lambda: None)
    actions.call_at(time.monotonic_ns() + NS_PER_MS, called.set)
    assert called.wait(PATIENCE_S)


def test_a_socket_is_read_until_it_is_ignored(actions: ActionThread) -> None:
    here, there = socket.socketpair()
    with here, there:
        read: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def reader() -> None:
            data = here.recv(100)
            if data == b"enough":
                actions.ignore(here)
            read.put(data)

        actions.listen(here, reader)
        for data in (b"one", b"enough"):
            there.sendall(data)
            assert read.get(timeout=PATIENCE_S) == data
        there.sendall(b"more")
        called = threading.Event()
        actions.call_at(0, called.set)
        assert called.wait(PATIENCE_S)
        assert read.empty()


def test_a_function_that_fails_is_logged_and_the_others_are_called(
    actions: ActionThread, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Event()
    time_ns = time.monotonic_ns() + NS_PER_MS

    def fail() -> None:
        raise RuntimeError("smoke")

    actions.call_at(time_ns, fail)
    actions.call_at(time_ns + 1, called.set)
    assert called.wait(PATIENCE_S)
    assert "smoke" in caplog.text


def test_a_thread_that_was_closed_ends() -> None:
    before = set(threading.enumerate())
    actions = ActionThread()
    (thread,) = set(threading.enumerate()) - before
    actions.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
