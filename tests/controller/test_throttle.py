"""The throttle on a clock of its own: which loops it holds back, and how it lets go again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.front.throttle import Throttle, thread_times
from controller.front.waiting_line import WAITING_MAX


class Loop:
    """An event loop that can serve so many requests per second, and refuse eight times as many."""

    def __init__(self, capacity_rps: float) -> None:
        self.now_ns = 0
        self.busy_ns = 0
        self.serve_ns = NS_PER_S / capacity_rps
        self.throttle = Throttle(lambda: self.now_ns, lambda: (self.busy_ns, 0))
        self.served = 0
        self._behind_ns = 0.0

    def offer(self, rate_rps: float, seconds: float, *, slow_anyway: bool = False) -> None:
        """Have requests come evenly; what comes to a loop that is 20 ms behind ends slowly."""
        for _ in range(int(rate_rps * seconds)):
            gap_ns = NS_PER_S / rate_rps
            self.now_ns += int(gap_ns)
            self.busy_ns += int(min(gap_ns, self._behind_ns))
            self._behind_ns = max(0.0, self._behind_ns - gap_ns)
            if not self.throttle.admit():
                self._behind_ns += self.serve_ns / 8
                continue
            slow = slow_anyway or self._behind_ns > 20 * NS_PER_MS
            self.throttle.ended(slow=slow)
            # A request that is refused in the end has cost as much as one that is served.
            self._behind_ns += self.serve_ns
            self.served += not slow


class Backlog:
    """An event loop that ends its requests one after the other, a second for so many."""

    def __init__(self, capacity_rps: float) -> None:
        self.now_ns = 0
        self.busy_ns = 0
        self.serve_ns = round(NS_PER_S / capacity_rps)
        self.throttle = Throttle(lambda: self.now_ns, lambda: (self.busy_ns, 0))
        self._arrived_ns: deque[int] = deque()
        self._spent_ns = 0

    def offer(self, rate_rps: float, seconds: float) -> None:
        """Have requests come evenly; one that waited for 20 ms ends slowly."""
        for _ in range(int(rate_rps * seconds)):
            gap_ns = round(NS_PER_S / rate_rps)
            self.now_ns += gap_ns
            if self._arrived_ns:
                self.busy_ns += gap_ns
                self._spent_ns += gap_ns
            while self._arrived_ns and self._spent_ns >= self.serve_ns:
                self._spent_ns -= self.serve_ns
                waited_ns = self.now_ns - self._arrived_ns.popleft()
                self.throttle.ended(slow=waited_ns > 20 * NS_PER_MS)
            if self.throttle.admit():
                self._arrived_ns.append(self.now_ns)


def test_a_loop_that_can_serve_all_lets_all_in() -> None:
    loop = Loop(1000)
    loop.offer(900, 5)
    assert loop.served == 4500
    assert loop.throttle.rate_rps is None


def test_at_three_times_what_a_loop_can_do_it_does_not_collapse() -> None:
    loop = Loop(1000)
    loop.offer(3000, 2)
    before = loop.served
    loop.offer(3000, 5)
    # Refusals alone take a quarter of its time, and the search for the rate takes some. Without a throttle
    # nothing is served at all.
    assert loop.served - before > 0.4 * 5 * 1000


def test_a_full_loop_shows_what_a_request_takes_and_the_first_rate_follows_from_it() -> None:
    loop = Backlog(1000)
    while loop.throttle.rate_rps is None:
        loop.offer(1500, 0.01)
    assert loop.throttle.request_ns == pytest.approx(NS_PER_MS, rel=0.1)
    assert loop.throttle.offered_rps == pytest.approx(1500, rel=0.05)
    # To refuse 1,500 would take 0.375 s of 0.95 s; a request that is let in takes 0.75 ms more.
    assert loop.throttle.rate_rps == pytest.approx((950 - 375) / 0.75, rel=0.15)


def test_the_first_rate_keeps_a_quarter_whatever_was_measured() -> None:
    loop = Backlog(1000)
    while loop.throttle.rate_rps is None:
        loop.offer(6000, 0.01)
    assert loop.throttle.rate_rps == pytest.approx(1500, rel=0.05)


def test_a_loop_that_was_never_full_has_shown_no_cost() -> None:
    loop = Backlog(1000)
    loop.offer(900, 3)
    assert loop.throttle.request_ns == 0


def test_what_was_held_back_is_let_go_when_less_comes() -> None:
    loop = Loop(1000)
    loop.offer(5000, 3)
    assert loop.throttle.rate_rps is not None
    loop.offer(300, 5)
    assert loop.throttle.rate_rps is None
    before = loop.served
    loop.offer(300, 1)
    assert loop.served - before == 300


def test_an_idle_loop_lets_in_what_a_device_refuses_late() -> None:
    loop = Loop(1000)
    loop.offer(500, 3, slow_anyway=True)
    assert loop.throttle.rate_rps is None


def test_a_loop_that_is_busy_and_in_time_is_left_alone() -> None:
    busy: Callable[[], tuple[int, int]] = lambda: (loop.now_ns, 0)  # noqa: E731  it knows the loop below
    loop = Loop(1000)
    loop.throttle = Throttle(lambda: loop.now_ns, busy)
    loop.offer(990, 3)
    assert loop.served == 2970


def test_nobody_looks_how_busy_a_loop_is_that_answers_in_time() -> None:
    looks: list[int] = []

    def look() -> tuple[int, int]:
        looks.append(loop.now_ns)
        return loop.busy_ns, 0

    loop = Loop(1000)
    loop.throttle = Throttle(lambda: loop.now_ns, look)
    loop.offer(900, 5)
    assert looks == [0]
    loop.offer(3000, 2)
    assert len(looks) > 10


def test_a_thread_is_busy_no_longer_than_it_lives() -> None:
    read = thread_times()
    ran_ns, waited_ns = read()
    assert sum(range(1_000_000)) > 0
    later = read()
    assert 0 <= ran_ns <= later[0]
    assert 0 <= waited_ns <= later[1]


def missing(loop: Backlog, seconds: float) -> None:
    """Have a loop be busy with requests that are past their SLO when it looks at them."""
    for _ in range(round(1000 * seconds)):
        loop.now_ns += NS_PER_MS
        loop.busy_ns += NS_PER_MS
        if loop.throttle.admit():
            loop.throttle.missed()


def test_a_loop_that_finds_every_request_too_late_takes_in_less() -> None:
    loop = Backlog(1000)
    missing(loop, 2)
    assert loop.throttle.rate_rps is not None
    assert loop.throttle.rate_rps < 900
    # What is refused unseen is cheap, and says nothing of what a request takes.
    assert loop.throttle.request_ns == 0


def test_a_loop_that_catches_up_after_a_standstill_is_left_alone() -> None:
    loop = Backlog(1000)
    loop.offer(900, 1)
    missing(loop, 0.5)
    loop.offer(900, 1)
    assert loop.throttle.rate_rps is None


def test_who_is_kept_out_hears_what_a_request_takes_of_the_controller() -> None:
    loop = Backlog(1000)
    while loop.throttle.rate_rps is None:
        loop.offer(1500, 0.01)
    throttle = loop.throttle
    refused = throttle.refusal()
    assert refused.refusal is Refusal.OVERLOADED
    assert throttle.rate_rps is not None
    assert refused.figures == {
        "rate_rps": round(throttle.rate_rps),
        "controller_ns": throttle.request_ns,
        "waited_pct": 0,
        "offered_rps": round(throttle.offered_rps),
    }
    rate, cost_us = f"{throttle.rate_rps:.0f} requests/s", f"{throttle.request_ns / 1000:.0f} us"
    for word in ("the controller itself", cost_us, rate, f"{throttle.offered_rps:.0f} arrive"):
        assert word in str(refused)
    assert "others" not in str(refused)
    assert "takes" not in str(Loop(1).throttle.refusal())


def test_a_processor_that_others_have_is_room_that_is_missing_and_no_cost_of_a_request() -> None:
    alone, shared = Backlog(1000), Backlog(1000)
    # The same pace, of which 60 % is waiting for a processor.
    shared.throttle = Throttle(
        lambda: shared.now_ns, lambda: (shared.busy_ns * 4 // 10, shared.busy_ns * 6 // 10)
    )
    for loop in (alone, shared):
        while loop.throttle.rate_rps is None:
            loop.offer(1500, 0.01)
    assert shared.throttle.rate_rps == pytest.approx(alone.throttle.rate_rps, rel=0.01)
    assert shared.throttle.request_ns == pytest.approx(0.4 * alone.throttle.request_ns, rel=0.01)
    assert shared.throttle.refusal().figures["waited_pct"] == 60
    assert "others have its processor 60 % of the time" in str(shared.throttle.refusal())


def let_in(loop: Loop, together: int) -> int:
    """Have so many requests come in one moment; says how many are let in."""
    return sum(loop.throttle.admit() for _ in range(together))


def test_a_second_after_a_flood_a_burst_is_let_in_whole() -> None:
    loop = Loop(668)
    loop.offer(6434, 3)
    assert loop.throttle.rate_rps is not None
    assert let_in(loop, 32) < 32
    loop.now_ns += NS_PER_S
    assert let_in(loop, 32) == 32
    assert loop.throttle.rate_rps is None


def test_a_second_after_a_flood_a_client_is_served_that_asks_for_what_the_loop_can_do() -> None:
    loop = Loop(1000)
    loop.offer(6000, 3)
    loop.offer(900, 1)
    before = loop.served
    loop.offer(900, 1)
    assert loop.served - before == 900


class Patient:
    """A request that may wait."""

    over = False


class Line:
    """Requests with time to spare at a loop that refuses, and what became of them."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.num_begun = 0
        self.num_refused = 0

    def come(self, latest_ns: int, request: Patient | None = None) -> None:
        """Have one come; a loop that begins with it is busy for its time."""
        throttle = self.loop.throttle
        if throttle.admit():
            self._begin()
        elif not throttle.wait(request or Patient(), self._begin, self._refuse, latest_ns):
            self._refuse()

    def _begin(self) -> None:
        self.num_begun += 1
        self.loop.throttle.ended(slow=False)

    def _refuse(self) -> None:
        self.num_refused += 1


def held_back() -> Loop:
    """A loop of 1,000 requests per second that holds back what is more."""
    loop = Loop(1000)
    loop.offer(6000, 1)
    assert loop.throttle.rate_rps is not None
    return loop


def in_a_loop(work: Callable[[], None]) -> None:
    async def main() -> None:
        work()

    asyncio.run(main())


def test_who_has_time_waits_for_a_loop_that_was_busy_for_a_moment_and_is_not_refused() -> None:
    def work() -> None:
        loop = held_back()
        line = Line(loop)
        for _ in range(200):
            line.come(loop.now_ns + 10 * NS_PER_S)
        assert line.num_begun < 50
        for _ in range(400):
            loop.now_ns += 5 * NS_PER_MS
            loop.throttle.advance()
        assert (line.num_begun, line.num_refused) == (200, 0)
        assert loop.throttle.num_waiting == 0

    in_a_loop(work)


def test_those_in_haste_and_those_who_wait_share_what_a_loop_can_do() -> None:
    def work() -> None:
        loop = held_back()
        line = Line(loop)
        rate_rps = loop.throttle.rate_rps
        assert rate_rps is not None
        hasty = 0
        for _ in range(20):  # Within one window, in which the rate is the same.
            loop.now_ns += NS_PER_MS
            for _ in range(20):
                line.come(loop.now_ns + 10 * NS_PER_S)
                hasty += loop.throttle.admit()
            loop.throttle.advance()
        assert hasty + line.num_begun == pytest.approx(rate_rps * 0.02, abs=0.01 * rate_rps + 3)
        assert line.num_begun >= rate_rps * 0.02 / 2 - 3
        assert hasty >= rate_rps * 0.02 / 2 - 3

    in_a_loop(work)


def test_whose_turn_would_come_too_late_is_refused_at_once() -> None:
    def work() -> None:
        loop = held_back()
        line = Line(loop)
        while loop.throttle.admit():
            pass
        rate_rps = loop.throttle.rate_rps
        assert rate_rps is not None
        for _ in range(1000):
            line.come(loop.now_ns + NS_PER_S // 2)
        assert line.num_refused == pytest.approx(1000 - rate_rps / 2, abs=2)

    in_a_loop(work)


def test_so_many_wait_and_no_more_however_much_time_they_have() -> None:
    def work() -> None:
        loop = held_back()
        line = Line(loop)
        for _ in range(WAITING_MAX + 100):
            line.come(loop.now_ns + 3600 * NS_PER_S)
        assert loop.throttle.num_waiting == WAITING_MAX
        assert line.num_refused == 100 - line.num_begun

    in_a_loop(work)


def test_who_has_left_has_no_turn_and_who_waited_too_long_is_refused() -> None:
    def work() -> None:
        loop = held_back()
        while loop.throttle.admit():
            pass
        line = Line(loop)
        gone = Patient()
        line.come(loop.now_ns + NS_PER_S, gone)
        line.come(loop.now_ns + 100 * NS_PER_MS)
        line.come(loop.now_ns + 10 * NS_PER_S)
        gone.over = True
        loop.now_ns += 200 * NS_PER_MS
        loop.throttle.advance()
        assert (line.num_begun, line.num_refused) == (1, 2)

    in_a_loop(work)
