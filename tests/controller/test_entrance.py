"""The entrance on a clock of its own: what a busy event loop begins with, what waits, and what is refused."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from controller.front.admission.entrance import (
    INSIDE_LEAST,
    INSIDE_NS_MOST,
    PART,
    PART_AT_FIRST,
    PERIOD_NS_MOST,
    TURN_NS_LEAST,
    TURN_NS_MOST,
    TURN_PART,
    WINDOW_NS,
    YOUNG_NS,
    Entrance,
    thread_used_ns,
)
from controller.front.admission.limits import AdmissionLimits
from controller.process.app import running
from controller.process.config import ControllerConfig

SLO_NS: Final = 50 * NS_PER_MS


class Request:
    """Notes what became of it."""

    def __init__(self, name: str, began: list[str], cost: Callable[[], None]) -> None:
        self.over = False
        self.refused = False
        self._name, self._began, self._cost = name, began, cost

    def begin_waiting(self) -> None:
        """It costs the loop some time."""
        self._cost()
        self._began.append(self._name)

    def refuse(self) -> None:
        """Its turn came too late."""
        self.refused = True


class Loop:
    """An event loop whose time a test spends."""

    def __init__(self, cost_ns: int = 100 * NS_PER_US) -> None:
        self.now_ns = NS_PER_S
        self.used_ns = 0
        self.began_ns = self.now_ns
        self.period_ns = 0
        self.cost_ns = cost_ns
        self.began: list[str] = []
        self.door = AdmissionLimits(max_requests=100_000, max_bytes=1 << 30)
        self._soon: deque[Callable[[], None]] = deque()
        self.entrance = Entrance(
            lambda: self.now_ns,
            self,
            self.door,
            soon=self._soon.append,
            used_ns=lambda: self.used_ns,
        )

    def used(self) -> None:
        """Something came in."""

    def soon(self, work: Callable[[], object]) -> None:
        """Nothing of an entrance is due before a pause."""

    def work(self, duration_ns: int) -> None:
        """Be busy."""
        self.now_ns += duration_ns
        self.used_ns += duration_ns

    def turn(self) -> None:
        """Do what was left for the next turn."""
        self.began_ns = self.now_ns
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def spend_turn(self) -> None:
        """Have the present turn begin nothing more."""
        self.work(TURN_NS_MOST)

    def ask(self, source: str, slo_ns: int = SLO_NS, *, name: str = "") -> Request | None:
        """Have a request enter that came just now. Returns None if it is refused."""
        request = Request(name or source, self.began, lambda: self.work(self.cost_ns))
        entered = self.entrance.enter(source, request, self.now_ns, slo_ns)
        return request if entered else None

    def fall_behind(self, *, answers: int) -> None:
        """Be busy for a while, and give so many answers in each window."""
        for _ in range(120):
            self.end_window(answers=answers)

    def end_window(self, *, answers: int, idle_ns: int = 0) -> None:
        """Be busy until the present window ends, but for so long."""
        self.work(WINDOW_NS - idle_ns)
        self.now_ns += idle_ns
        for _ in range(answers):
            self.door.enter(0)
            self.door.leave(0)
        self.entrance.has_time(self.now_ns, self.now_ns)


def test_a_loop_that_has_time_begins_everything_at_once() -> None:
    loop = Loop(cost_ns=0)
    loop.door.num_requests = 5000
    assert loop.entrance.has_time(loop.now_ns, loop.now_ns)
    assert all(loop.ask("a") for _ in range(100))
    assert len(loop.began) == 100
    assert loop.entrance.num_waiting == 0


def test_a_loop_that_is_behind_lets_in_what_it_answers_within_a_part_of_the_slo() -> None:
    loop = Loop()
    loop.fall_behind(answers=100)
    # 250 us from answer to answer: 100 of them take half of 50 ms.
    assert loop.entrance.pace_ns == pytest.approx(250 * NS_PER_US, rel=0.01)
    assert not loop.entrance.has_time(loop.now_ns, loop.now_ns)
    most = round(PART * SLO_NS / (250 * NS_PER_US))
    loop.door.num_requests = most - 2
    assert loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)
    loop.door.num_requests = most + 2
    assert not loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)
    # One that has more time still enters where a quarter of it is longer, and one that has less does not.
    assert not loop.entrance.may_enter("a", loop.now_ns, 2 * SLO_NS, loop.now_ns)
    assert loop.entrance.may_enter("a", loop.now_ns, 4 * SLO_NS, loop.now_ns)
    loop.door.num_requests = most // 2
    assert not loop.entrance.may_enter("a", loop.now_ns, SLO_NS // 5, loop.now_ns)


def test_what_devices_are_still_to_answer_takes_no_room() -> None:
    loop = Loop()
    loop.entrance.share_elsewhere = lambda: 0.9
    loop.door.num_requests = 500
    loop.fall_behind(answers=100)
    most = 450 + round(PART * SLO_NS / (250 * NS_PER_US))
    loop.door.num_requests = most - 2
    assert loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)
    loop.door.num_requests = most + 2
    assert not loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)


async def test_a_controller_tells_its_entrance_what_devices_have(tmp_path: Path) -> None:
    config = ControllerConfig(port=0, http_port=0, models_dir=tmp_path)
    async with running(config) as controller:
        entrance = controller.fronts.shared.entrance
        assert entrance.share_elsewhere == controller.runtime.share_with_devices


def test_what_waited_before_it_was_read_counts() -> None:
    loop = Loop()
    loop.fall_behind(answers=100)
    loop.door.num_requests = INSIDE_LEAST
    now_ns = loop.now_ns
    assert loop.entrance.may_enter("a", now_ns - SLO_NS // 4, SLO_NS, now_ns)
    assert not loop.entrance.may_enter("a", now_ns - SLO_NS // 2, SLO_NS, now_ns)


def test_what_no_model_could_do_is_left_to_the_scheduler_with_its_figures() -> None:
    loop = Loop()
    loop.spend_turn()
    request = Request("", loop.began, lambda: None)
    assert loop.entrance.enter("a", request, loop.now_ns - YOUNG_NS, NS_PER_US)
    loop.turn()
    assert loop.began == [""]


def test_a_large_batch_is_let_in_however_bad_the_pace_was() -> None:
    loop = Loop()
    loop.fall_behind(answers=0)
    assert INSIDE_LEAST * loop.entrance.pace_ns > SLO_NS
    loop.door.num_requests = INSIDE_LEAST - 1
    assert loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)
    loop.door.num_requests = INSIDE_LEAST
    assert not loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)


def test_after_a_standstill_what_can_still_be_in_time_is_begun() -> None:
    loop = Loop()
    loop.work(SLO_NS)
    loop.entrance.has_time(loop.now_ns, loop.now_ns)
    assert loop.entrance.behind
    arrival_ns = loop.now_ns - int((PART_AT_FIRST - 0.01) * SLO_NS)
    assert loop.entrance.may_enter("a", arrival_ns, SLO_NS, loop.now_ns)
    loop.fall_behind(answers=1000)
    arrival_ns = loop.now_ns - int((PART_AT_FIRST - 0.01) * SLO_NS)
    assert not loop.entrance.may_enter("a", arrival_ns, SLO_NS, loop.now_ns)


def test_a_turn_begins_some_and_leaves_the_others_to_the_next() -> None:
    loop = Loop(cost_ns=TURN_NS_LEAST // 4)
    loop.turn()
    assert all(loop.ask("a", name=str(number)) for number in range(10))
    assert loop.began == ["0", "1", "2", "3"]
    loop.turn()
    assert loop.began == [str(number) for number in range(8)]
    loop.turn()
    loop.turn()
    assert loop.began == [str(number) for number in range(10)]
    assert loop.entrance.num_waiting == 0


def test_a_source_that_floods_the_loop_delays_no_other() -> None:
    loop = Loop()
    loop.spend_turn()
    flood = [loop.ask("flood") for _ in range(1000)]
    # It fills its own queue, and is refused beyond that.
    assert 100 < sum(request is not None for request in flood) < 500
    assert all(loop.ask(source) for source in ("b", "c", "d"))
    loop.turn()
    assert sorted(loop.began[:4]) == ["b", "c", "d", "flood"]
    # The others have as much room as if the flood were not there.
    assert all(loop.ask("b") for _ in range(20))


@pytest.mark.parametrize("alike", [0, 200])
def test_sources_that_ask_for_much_more_than_the_others_share_what_they_leave(alike: int) -> None:
    loop = Loop()
    loop.fall_behind(answers=400)
    modest = [str(number) for number in range(60)]

    def let_in(source: str, asked: int) -> int:
        ask = loop.entrance.may_enter
        return sum(ask(source, loop.now_ns, SLO_NS, loop.now_ns) for _ in range(asked))

    for _ in range(2):
        floods = []
        for source in ("a", "b"):
            # Those that are refused together count, too.
            loop.entrance.asked(source, alike)
            floods.append(let_in(source, 400 - alike))
        # What these ask for is more than such a source gets in vain, and fair.
        assert [let_in(source, 4) for source in modest] == [4] * 60
        loop.end_window(answers=400)
    # 85 % of what can be answered, but for what the others asked for; and no less than is fair.
    left = (340 - 4 * len(modest)) / 2
    fair = INSIDE_LEAST + 2 * (800 + 4 * len(modest)) / 62
    assert floods == [pytest.approx(max(left, 0 if alike else fair), abs=1)] * 2
    # Nobody has to be left unread in turn.
    assert {loop.entrance.pause_ns(source, NS_PER_S) for source in modest} == {SLO_NS // 4}


def test_a_source_that_asks_for_much_gets_all_that_is_left_where_the_loop_has_time_to_spare() -> (
    None
):
    loop = Loop()
    loop.fall_behind(answers=200)
    for _ in range(2):
        for source in map(str, range(15)):
            loop.entrance.may_enter(source, loop.now_ns, SLO_NS, loop.now_ns)
        ask = loop.entrance.may_enter
        entered = [ask("a", loop.now_ns, SLO_NS, loop.now_ns) for _ in range(400)]
        loop.entrance.asked("a", 100)
        loop.end_window(answers=180, idle_ns=WINDOW_NS // 10)
        assert loop.entrance.behind
        assert not loop.entrance.is_pressed
    assert sum(entered) == pytest.approx(200 - 15, abs=1)


@pytest.mark.parametrize("num_sources", [1, 2, 5])
def test_none_floods_where_all_ask_for_more_than_before(num_sources: int) -> None:
    """As they do in turn whose requests were slow, and are quick now: of the pace, only what was slow is known."""
    loop = Loop()
    loop.fall_behind(answers=100)
    ask = loop.entrance.may_enter
    for each in (10, 300):
        entered = [
            ask(source, loop.now_ns, SLO_NS, loop.now_ns)
            for _ in range(each)
            for source in range(num_sources)
        ]
        loop.end_window(answers=100)
    assert all(entered)


def test_what_a_source_asked_for_before_is_not_left_to_the_others() -> None:
    loop = Loop()
    loop.fall_behind(answers=400)
    ask = loop.entrance.may_enter
    for number in (20, 1000):
        for other in 20 * ("b", "c", "d"):
            assert ask(other, loop.now_ns, SLO_NS, loop.now_ns)
        entered = [ask("a", loop.now_ns, SLO_NS, loop.now_ns) for _ in range(number)]
        loop.end_window(answers=400)
    # 85 % of what can be answered, but for what the others asked for.
    assert sum(entered) == pytest.approx(340 - 3 * 20, abs=1)


def test_in_a_queue_the_request_that_must_begin_first_is_first() -> None:
    loop = Loop()
    loop.spend_turn()
    for name, slo_ns in (("long", 100 * SLO_NS), ("short", SLO_NS), ("middle", 2 * SLO_NS)):
        assert loop.ask("a", slo_ns, name=name)
    loop.turn()
    assert loop.began == ["short", "middle", "long"]


def test_a_request_whose_client_left_costs_nothing() -> None:
    loop = Loop()
    loop.spend_turn()
    requests = [loop.ask("a") for _ in range(50)]
    for request in requests[:-1]:
        assert request is not None
        request.over = True
    loop.turn()
    assert len(loop.began) == 1
    assert loop.entrance.num_waiting == 0


def test_a_request_whose_turn_comes_too_late_is_refused() -> None:
    loop = Loop()
    loop.spend_turn()
    short, long = loop.ask("a"), loop.ask("a", 10 * SLO_NS)
    loop.work(SLO_NS)
    loop.turn()
    assert short is not None
    assert short.refused
    assert long is not None
    assert not long.refused
    assert loop.began == ["a"]


def test_turns_are_put_farther_apart_while_many_requests_find_the_loop_busy() -> None:
    loop = Loop()
    loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)
    loop.fall_behind(answers=100)
    assert loop.period_ns == 0  # One client that asks one by one would only wait.
    loop.entrance.may_enter("a", loop.now_ns, SLO_NS // 5, loop.now_ns)
    loop.end_window(answers=100)
    assert loop.entrance.turn_ns == int(TURN_PART * SLO_NS / 5)
    loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)
    loop.door.num_requests = 8
    loop.fall_behind(answers=100)
    assert loop.entrance.turn_ns == TURN_NS_MOST
    assert loop.period_ns == PERIOD_NS_MOST
    for _ in range(40):
        loop.now_ns += WINDOW_NS
        loop.entrance.has_time(loop.now_ns, loop.now_ns)
    assert loop.period_ns == 0
    assert not loop.entrance.behind


def test_turns_come_closer_again_where_the_loop_waits_for_them_with_more_under_way_than_it_answers() -> (
    None
):
    loop = Loop()
    loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)
    loop.door.num_requests = 101
    loop.fall_behind(answers=100)
    longest_ns = loop.period_ns
    assert longest_ns == PERIOD_NS_MOST
    # A fifth of the time to spare, and as much is under way as one window answers: it may go on so.
    loop.door.num_requests = 100
    loop.end_window(answers=100, idle_ns=WINDOW_NS // 5)
    assert loop.period_ns == longest_ns
    loop.door.num_requests = 101
    periods = []
    for _ in range(4):
        loop.end_window(answers=100, idle_ns=WINDOW_NS // 5)
        periods.append(loop.period_ns)
    assert periods == [longest_ns // 2, longest_ns // 4, *[loop.entrance.turn_ns // 8] * 2]


def test_twice_as_much_is_let_in_while_the_loop_has_just_fallen_behind() -> None:
    slo_ns = 2 * SLO_NS
    loop = Loop()
    loop.end_window(answers=100)
    assert loop.entrance.behind
    loop.door.num_requests = int(2 * INSIDE_NS_MOST / loop.entrance.pace_ns)
    assert loop.entrance.may_enter("a", loop.now_ns, slo_ns, loop.now_ns)
    loop.door.num_requests += 2
    assert not loop.entrance.may_enter("a", loop.now_ns, slo_ns, loop.now_ns)


def test_a_loop_that_has_time_because_it_refuses_stays_behind_and_lets_more_in() -> None:
    loop = Loop()
    loop.fall_behind(answers=100)
    assert loop.entrance.is_pressed
    for _ in range(40):
        loop.door.num_requests = 10_000
        assert not loop.entrance.may_enter("a", loop.now_ns, SLO_NS, loop.now_ns)
        # As many more are refused without a question each as would take the time that is left.
        loop.entrance.asked("a", 100)
        loop.door.num_requests = 0
        # Half of the window is left.
        loop.now_ns += WINDOW_NS // 2
        loop.work(WINDOW_NS // 2)
        for _ in range(100):
            loop.door.enter(0)
            loop.door.leave(0)
        loop.entrance.has_time(loop.now_ns, loop.now_ns)
        assert loop.entrance.behind
        assert not loop.entrance.is_pressed
    assert loop.entrance.pace_ns == pytest.approx(WINDOW_NS / 200, rel=0.01)
    # Once nothing is refused any more, everything is let in.
    loop.now_ns += WINDOW_NS
    loop.entrance.has_time(loop.now_ns, loop.now_ns)
    assert not loop.entrance.behind


def test_a_loop_with_time_for_what_it_refuses_is_not_behind_whatever_waits_for_devices() -> None:
    """Devices give 80 answers in a second, and 150 requests that have much time wait for them."""
    loop = Loop()
    loop.door.num_requests = 150
    # Others took the processor for three seconds.
    loop.fall_behind(answers=2)
    refused = []
    for _ in range(40):
        ask = loop.entrance.may_enter
        refused.append(loop.entrance.behind and not ask("a", loop.now_ns, SLO_NS, loop.now_ns))
        # A fifth of the window is used.
        loop.now_ns += 4 * WINDOW_NS // 5
        loop.work(WINDOW_NS // 5)
        for _ in range(2):
            loop.door.enter(0)
            loop.door.leave(0)
        loop.entrance.has_time(loop.now_ns, loop.now_ns)
    assert refused[0]
    assert sum(refused) <= 4


def shifts(loop: Loop, asked: int) -> list[list[str]]:
    """Which of four sources are read often, window after window, where each asks so much in a window."""
    found = []
    for _ in range(8):
        for source in "abcd":
            loop.entrance.asked(source, asked)
        loop.end_window(answers=100)
        pauses_ns = [loop.entrance.pause_ns(source, NS_PER_S) for source in "abcd"]
        shortest_ns = min(pauses_ns)
        found.append([s for s, it in zip("abcd", pauses_ns, strict=True) if it == shortest_ns])
        assert shortest_ns > 0
    return found


def test_sources_take_shifts_where_twice_as_much_is_asked_as_can_be_answered() -> None:
    loop = Loop()
    loop.fall_behind(answers=100)
    assert shifts(loop, 25) == [["a", "b", "c", "d"]] * 8
    found = shifts(loop, 50)[1:]
    assert {tuple(on_shift) for on_shift in found} == {("a", "c"), ("b", "d")}


def test_a_source_is_left_unread_for_a_quarter_of_the_shortest_slo_or_for_all_of_it_off_shift() -> (
    None
):
    loop = Loop()
    loop.fall_behind(answers=100)
    for slo_ns in (NS_PER_US, SLO_NS // 5, 4 * SLO_NS):
        loop.entrance.may_enter("a", loop.now_ns, slo_ns, loop.now_ns)
        loop.end_window(answers=100)
        shifts(loop, 50)
        pauses_ns = {loop.entrance.pause_ns(source, NS_PER_S) for source in "abcd"}
        counted_ns = min(max(slo_ns, 8 * NS_PER_MS), 64 * NS_PER_MS)
        assert pauses_ns == {counted_ns // 4, counted_ns}


def test_a_source_that_asks_seldom_is_read_at_once() -> None:
    loop = Loop()
    loop.fall_behind(answers=100)
    for source, asked in (("floods", 500), ("seldom", 2)):
        loop.entrance.asked(source, asked)
    loop.end_window(answers=100)
    assert loop.entrance.pause_ns("floods", NS_PER_S) > 0
    assert loop.entrance.pause_ns("floods", 7) == 7
    assert loop.entrance.pause_ns("seldom", NS_PER_S) == 0


def test_a_refusal_says_how_many_are_inside_and_the_pace() -> None:
    loop = Loop()
    loop.fall_behind(answers=100)
    loop.door.num_requests = 123
    refusal = loop.entrance.refusal(loop.now_ns)
    assert refusal.figures == {"inside": 123, "controller_ns": round(loop.entrance.pace_ns)}
    assert "the controller itself is busy all the time: found 123 requests inside" in str(refusal)
    # It is not made anew for each.
    loop.door.num_requests = 7
    assert loop.entrance.refusal(loop.now_ns) is refusal
    assert loop.entrance.refusal(loop.now_ns + 2 * NS_PER_S) is not refusal


@pytest.mark.parametrize("slo_ns", [10 * NS_PER_MS, SLO_NS, 2 * SLO_NS])
@pytest.mark.parametrize(("times", "least"), [(0.8, 0.79), (1.5, 0.9), (3.0, 0.8)])
def test_a_loop_keeps_its_goodput_at_three_times_what_it_can_do(
    slo_ns: int, times: float, least: float
) -> None:
    # Half of a request is the answer's, some turns later; a refusal costs a twentieth.
    loop, half_ns, refusal_ns = Loop(cost_ns=50 * NS_PER_US), 50 * NS_PER_US, 5 * NS_PER_US
    gap_ns = round(2 * half_ns / times)
    arrivals = iter(range(loop.now_ns, loop.now_ns + NS_PER_S, gap_ns))
    next_ns = next(arrivals)
    under_way: deque[list[int]] = deque([[], []])
    in_time = 0
    while next_ns:
        loop.turn()
        for arrival_ns in under_way.popleft():
            loop.work(half_ns)
            loop.door.leave(0)
            in_time += loop.now_ns <= arrival_ns + slo_ns
        begun: list[int] = []
        under_way.append(begun)

        def begin(arrival_ns: int, begun: list[int] = begun) -> None:
            loop.work(half_ns)
            loop.door.enter(0)
            begun.append(arrival_ns)

        while next_ns and next_ns <= loop.now_ns:
            arrival_ns = next_ns
            next_ns = next(arrivals, 0)
            if loop.entrance.has_time(loop.now_ns, loop.now_ns):
                begin(arrival_ns)
                continue
            request = Request("", loop.began, lambda at=arrival_ns: begin(at))  # type: ignore[misc]
            if not loop.entrance.enter("a", request, arrival_ns, slo_ns):
                loop.work(refusal_ns)
        loop.now_ns = max(loop.now_ns + 10 * NS_PER_US, loop.began_ns + loop.period_ns)
    assert in_time * 2 * half_ns / NS_PER_S > least


def test_a_request_that_fails_as_it_begins_leaves_the_others_in_line() -> None:
    loop = Loop()
    loop.work(NS_PER_S)

    def fail() -> None:
        raise ValueError("on purpose")

    for name, cost in (("a", fail), ("b", lambda: None)):
        request = Request(name, loop.began, cost)
        assert loop.entrance.enter("source", request, loop.now_ns, NS_PER_S)
    with pytest.raises(ValueError, match="on purpose"):
        loop.turn()
    loop.turn()
    assert loop.began == ["b"]
    assert loop.entrance.num_waiting == 0


def test_the_time_that_a_thread_used_is_no_older_than_the_question() -> None:
    read = thread_used_ns()
    before_ns, since_ns = read(), time.thread_time_ns()
    while time.thread_time_ns() - since_ns < NS_PER_MS:
        pass
    assert read() - before_ns >= NS_PER_MS
