"""The throttle on a clock of its own: which loops it holds back, and how it lets go again."""

from __future__ import annotations

from collections.abc import Callable

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.front.throttle import Throttle, thread_busy_ns


class Loop:
    """An event loop that can serve so many requests per second, and refuse eight times as many."""

    def __init__(self, capacity_rps: float) -> None:
        self.now_ns = 0
        self.busy_ns = 0
        self.serve_ns = NS_PER_S / capacity_rps
        self.throttle = Throttle(lambda: self.now_ns, lambda: self.busy_ns)
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
    busy: Callable[[], int] = lambda: loop.now_ns  # noqa: E731  it knows the loop that is made below
    loop = Loop(1000)
    loop.throttle = Throttle(lambda: loop.now_ns, busy)
    loop.offer(990, 3)
    assert loop.served == 2970


def test_nobody_looks_how_busy_a_loop_is_that_answers_in_time() -> None:
    looks: list[int] = []

    def look() -> int:
        looks.append(loop.now_ns)
        return loop.busy_ns

    loop = Loop(1000)
    loop.throttle = Throttle(lambda: loop.now_ns, look)
    loop.offer(900, 5)
    assert looks == [0]
    loop.offer(3000, 2)
    assert len(looks) > 10


def test_a_thread_is_busy_no_longer_than_it_lives() -> None:
    read = thread_busy_ns()
    first = read()
    assert sum(range(1_000_000)) > 0
    assert 0 <= first <= read()
