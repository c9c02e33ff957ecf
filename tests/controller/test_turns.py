"""The marks of an event loop's turns: how often a loop that has nothing to do is woken for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVarTuple

import pytest
from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.front.http.arrival_clock import BUSY_PERIOD_NS, IDLE_PERIOD_NS, ArrivalClock
from controller.front.http.http2_server import Http2Server
from controller.process import app
from controller.process.app import running
from controller.process.config import ControllerConfig

Ts = TypeVarTuple("Ts")


class TimersByHand(asyncio.SelectorEventLoop):
    """An event loop whose timers ring when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: list[tuple[float, Callable[..., Any]]] = []

    @override
    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.armed.append((delay, callback))
        return super().call_later(3600, callback, *args)


def periods_ns(happens: Callable[[ArrivalClock], None], seconds: float) -> list[int]:
    """The times between looks, when something happens at each of them."""
    periods: list[int] = []

    async def main() -> None:
        now_ns = 0
        turns = ArrivalClock(lambda: now_ns)
        while now_ns < seconds * NS_PER_S:
            delay, beat = loop.armed.pop()
            periods.append(round(delay * NS_PER_S))
            now_ns += periods[-1]
            happens(turns)
            beat()
            await asyncio.sleep(0)
        turns.stop()

    loop = TimersByHand()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    return periods


def test_lifesigns_of_workers_do_not_keep_an_idle_loop_awake() -> None:
    later = periods_ns(lambda turns: turns.used(), 3)[-100:]
    assert set(later) == {IDLE_PERIOD_NS}


def test_a_loop_that_clients_ask_looks_often() -> None:
    def ask(turns: ArrivalClock) -> None:
        turns.used()
        turns.asked()

    assert set(periods_ns(ask, 0.5)[1:]) == {BUSY_PERIOD_NS}
    assert BUSY_PERIOD_NS < IDLE_PERIOD_NS <= 10 * NS_PER_MS


@pytest.mark.parametrize("asked", [False, True])
def test_a_loop_sleeps_to_gather_requests_only_while_clients_ask(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def happens(turns: ArrivalClock) -> None:
        turns.period_ns = NS_PER_MS
        if asked:
            turns.asked()

    periods_ns(happens, seconds=3)
    # No client has asked since the loop began, so it sleeps at most in its first second.
    assert (len(slept) > 1 * NS_PER_S // BUSY_PERIOD_NS) == asked


def test_answers_that_are_due_leave_before_a_loop_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda _: order.append("slept"))

    async def main() -> None:
        turns = ArrivalClock(lambda: 0)
        turns.asked()
        loop.armed.pop()[1]()
        await asyncio.sleep(0)
        turns.period_ns = NS_PER_MS
        turns.used()
        for _ in range(2):
            turns.soon(lambda: order.append("answered"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turns.stop()

    loop = TimersByHand()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert order == ["answered", "answered", "slept"]


def test_what_is_due_at_the_end_of_a_turn_can_be_done_before_and_a_failure_costs_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("a bug")

    async def main() -> None:
        turns = ArrivalClock(lambda: 0)
        for work in (lambda: done.append("first"), fail, lambda: done.append("second")):
            turns.soon(work)
        turns.work_now()
        assert done == ["first", "second"]
        await asyncio.sleep(0)
        turns.soon(lambda: done.append("third"))
        await asyncio.sleep(0)
        turns.stop()

    asyncio.run(main())
    assert done == ["first", "second", "third"]
    assert "a bug" in caplog.text


def test_what_is_read_now_may_have_waited_as_long_as_the_loop_is_late_or_was_at_its_last_look() -> (
    None
):
    told: list[int] = []

    async def main() -> None:
        now_ns = 0
        turns = ArrivalClock(lambda: now_ns)

        def look(late_ns: int) -> None:
            nonlocal now_ns
            delay, beat = loop.armed.pop()
            now_ns += round(delay * NS_PER_S) + late_ns
            told.append(turns.unread_ns())
            beat()
            told.append(turns.unread_ns())

        look(0)
        look(200 * NS_PER_MS)
        look(0)
        turns.stop()

    loop = TimersByHand()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    # uvloop's timers are up to a millisecond late by nature.
    late_ns = 199 * NS_PER_MS
    assert told == [0, 0, 200 * NS_PER_MS, late_ns, late_ns, 0]


def test_a_controller_without_time_to_spare_can_have_answers_leave_before_the_end_of_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[Http2Server] = []

    def make(**settings: Any) -> Http2Server:  # noqa: ANN401
        servers.append(Http2Server(**settings))
        return servers[0]

    async def main() -> list[bool]:
        async with running(ControllerConfig(port=0)) as controller:
            runtime = controller.runtime
            found = [runtime.is_pressed()]
            servers[0].entrance.is_pressed = True
            servers[0].turns.soon(lambda: found.append(runtime.is_pressed()))
            runtime.answers_leave()
            return found

    monkeypatch.setattr(app, "Http2Server", make)
    assert asyncio.run(main()) == [False, True]


def test_a_controller_knows_how_long_it_did_not_look() -> None:
    async def main() -> int:
        async with running(ControllerConfig(port=0)) as controller:
            await asyncio.sleep(0)
            time.sleep(0.2)  # noqa: ASYNC251  nothing of the loop goes on meanwhile
            return controller.runtime.unread_ns()

    assert asyncio.run(main()) >= 0.2 * NS_PER_S - IDLE_PERIOD_NS
