"""What is learned of a worker's link: its length, what varies above it, and what it carries."""

from __future__ import annotations

import random

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, NS_PER_US, ModelId, RequestId
from clockwright.wire.actions import ActionError
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import ModelAdded, RequestArrived, SendAction
from controller.core.link import LinkPlan, OneWay
from experiments.simulator import HostedModel
from tests.kit.core_bench import (
    GPU,
    GPU2,
    MS,
    A,
    B,
    CoreBench,
    infers,
    loads,
    refusals,
    sends,
)
from tests.kit.simulated_cluster import SimulatedCluster, row

GIGABIT = 125_000_000


class Wire:
    """A wire that a way is measured on: in order, one message at a time."""

    def __init__(
        self, length_ns: int, bytes_per_s: float = 1e15, jitter_ns: int = 0, seed: int = 1
    ) -> None:
        self.way = OneWay(least_ns=MS // 2, short_ns=MS // 2, tolerance_ns=5 * MS // 2)
        self.length_ns, self.bytes_per_s, self.jitter_ns = length_ns, bytes_per_s, jitter_ns
        self._random = random.Random(seed)
        self._free_ns = self._arrived_ns = 0

    def send(self, at_ns: int, num_bytes: int) -> int:
        """Send a message, measure it as it arrives, and say when that was."""
        self._free_ns = max(self._free_ns, at_ns) + int(num_bytes * NS_PER_S / self.bytes_per_s)
        jitter_ns = int(self._random.expovariate(1 / self.jitter_ns)) if self.jitter_ns else 0
        arrived_ns = max(self._arrived_ns, self._free_ns + self.length_ns + jitter_ns)
        self._arrived_ns = arrived_ns
        sent_bytes = self.way.send(at_ns, num_bytes)
        self.way.measured(at_ns, arrived_ns, num_bytes=num_bytes, sent_bytes=sent_bytes)
        return arrived_ns


@pytest.mark.parametrize("seed", range(20))
def test_a_way_is_planned_by_the_last_delays_whatever_their_order(seed: int) -> None:
    chance, tolerance_ns = random.Random(seed), 5 * MS // 2
    way = OneWay(least_ns=MS // 2, short_ns=MS // 2, tolerance_ns=tolerance_ns)
    now_ns = 0
    delays: list[tuple[int, int]] = []
    for _ in range(500):
        now_ns += chance.choice((300, 700, 3000, 40_000)) * NS_PER_US
        delay_ns = chance.randrange(1, 20) * MS // 2
        way.measured(now_ns - delay_ns, now_ns, num_bytes=0, sent_bytes=0)
        if delays and now_ns - delays[-1][0] < MS:
            delays[-1] = delays[-1][0], max(delays[-1][1], delay_ns)
        else:
            delays = [(at, ns) for at, ns in delays if at >= now_ns - NS_PER_S][-63:]
            delays.append((now_ns, delay_ns))
        found = sorted(ns for _, ns in delays)
        length_ns = found[0] if found[0] > MS // 2 else 0
        usual = max(0, min(int(len(found) * 0.95), len(found) - 3))
        planned_ns = max(MS // 2, length_ns, found[usual] - tolerance_ns)
        assert (way.length_ns, way.ns) == (length_ns, planned_ns)


@pytest.mark.parametrize("number", [2, 5, 19, 30])
def test_a_message_that_is_late_alone_says_nothing_of_the_next_however_few_there_are(
    number: int,
) -> None:
    wire = Wire(MS // 4)
    for at in range(number):
        wire.send(at * 10 * MS, 0)
    wire.length_ns = 200 * MS
    wire.send(number * 10 * MS, 0)
    assert (wire.way.ns, wire.way.variation_ns) == (MS // 2, 0)


def test_a_way_on_which_many_messages_are_late_is_planned_by_the_late_ones() -> None:
    wire = Wire(MS // 4)
    for number in range(9):
        wire.length_ns = MS // 4 if number % 3 else 40 * MS
        wire.send(number * 100 * MS, 0)
    assert wire.way.ns > 30 * MS


def test_the_length_of_a_way_is_the_least_delay() -> None:
    wire = Wire(12 * MS)
    for number in range(20):
        wire.send(number * 3 * MS, 600_000)
    assert (wire.way.length_ns, wire.way.ns, wire.way.variation_ns) == (12 * MS, 12 * MS, 0)
    assert wire.way.ns_per_byte == 0


@pytest.mark.parametrize("length_ns", [100 * NS_PER_US, 8 * MS])
def test_queued_messages_tell_what_a_thin_way_carries_and_the_length_is_told_apart(
    length_ns: int,
) -> None:
    wire = Wire(length_ns, GIGABIT)
    for number in range(40):  # bursts of two, with time between
        wire.send(number // 2 * 20 * MS, 600_000)
    assert wire.way.ns_per_byte == pytest.approx(8, rel=0.01)
    length_known_ns = wire.way.length_ns or length_ns  # a short one counts as none
    assert length_known_ns == pytest.approx(length_ns, abs=50 * NS_PER_US)


def test_a_queue_on_a_thin_way_is_not_taken_for_length() -> None:
    wire = Wire(100 * NS_PER_US, GIGABIT)
    for number in range(60):  # more than it carries: the last waits for 50 ms
        wire.send(number * 4 * MS, 600_000)
    assert wire.way.length_ns == 0
    assert wire.way.free_ns == pytest.approx(60 * 4.8 * MS, abs=MS)


@pytest.mark.parametrize("seed", range(5))
def test_jitter_is_no_want_of_bytes_per_second(seed: int) -> None:
    wire = Wire(MS, jitter_ns=3 * MS, seed=seed)
    thin = 0
    for number in range(300):
        wire.send(number * 2 * MS, 100_000)
        thin += wire.way.wire_ns(100_000) > MS // 2
    assert thin < 30
    assert 4 * MS < wire.way.ns < 25 * MS


def test_a_way_that_was_busy_because_of_somebody_else_recovers_with_the_next_message() -> None:
    wire = Wire(100 * NS_PER_US, GIGABIT)
    for number in range(40):
        wire.send(number // 2 * 20 * MS, 600_000)
    assert wire.way.wire_ns(600_000) > 4 * MS
    wire.bytes_per_s = 100 * GIGABIT
    wire.send(900 * MS, 600_000)
    assert wire.way.wire_ns(600_000) < MS // 4


def test_a_pause_of_the_process_is_one_delay_however_many_messages_it_held_up() -> None:
    wire = Wire(2 * MS)
    for number in range(30):
        wire.send(number * 5 * MS, 0)
    wire.length_ns = 80 * MS
    wire.send(150 * MS, 0)
    wire.length_ns = 2 * MS
    for number in range(20):  # they wait behind the one, and arrive with it
        wire.send((151 + number) * MS, 0)
    assert wire.way.ns == 2 * MS


def test_small_messages_tell_little_of_what_tensors_take() -> None:
    wire = Wire(100 * NS_PER_US, GIGABIT)
    for number in range(20):
        wire.send(number * 30 * MS, 600_000)
        wire.send(number * 30 * MS, 600_000)
        for _ in range(3):  # behind them, in no time
            wire.send(number * 30 * MS, 0)
    assert wire.way.ns_per_byte == pytest.approx(8, rel=0.01)


def test_a_usual_link_learns_nothing_and_one_that_is_usual_again_forgets() -> None:
    link = LinkPlan(least_ns=MS // 2, tolerance_ns=5 * MS // 2)
    assert not link.is_news(3 * MS, MS, 0)
    assert link.is_news(3 * MS + 1, 0, 2 * NS_PER_S)
    assert link.is_news(0, MS + 1, 2 * NS_PER_S)
    link.out.measured(0, 12 * MS, num_bytes=0, sent_bytes=link.out.send(0, 0))
    link.learned(12 * MS)
    assert link.expected_ns(12 * MS) == 12 * MS
    for number in range(200):
        at_ns = (20 + 10 * number) * MS
        for way in (link.out, link.back):
            way.measured(at_ns, at_ns + MS // 4, num_bytes=0, sent_bytes=way.send(at_ns, 0))
        link.learned(at_ns + MS // 4)
        if link.is_usual:
            break
    assert link.is_usual
    assert link.expected_ns(3_000 * MS) == MS // 2


def test_a_link_that_was_short_a_moment_ago_has_a_queue_and_no_length() -> None:
    link = LinkPlan(least_ns=MS // 2, tolerance_ns=5 * MS // 2)
    assert not link.is_news(MS // 4, MS // 4, 10 * MS)
    for sent_ms in (20, 40, 60):
        assert link.is_news(88 * MS, MS // 4, (sent_ms + 88) * MS)
        at_ns = sent_ms * MS
        sent_bytes = link.out.send(at_ns, 0)
        link.out.measured(at_ns, at_ns + 88 * MS, num_bytes=0, sent_bytes=sent_bytes)
        link.learned(at_ns + 88 * MS)
    assert (link.length_ns, link.out.ns) == (0, 88 * MS - 5 * MS // 2)
    # After a second of that it is its length.
    at_ns = 1100 * MS
    link.out.measured(at_ns, at_ns + 88 * MS, num_bytes=0, sent_bytes=link.out.send(at_ns, 0))
    assert link.length_ns == 88 * MS


# --- through the scheduler ------------------------------------------------------------------------


def test_the_length_of_the_way_back_is_kept_free_whatever_the_slo() -> None:
    """10 ms each way and 5 ms of EXEC: 26 ms would do, did the answer arrive when it ends."""
    cluster = SimulatedCluster(
        Scheduler(),
        [HostedModel(A, row("a", load_ns=MS, exec_ns={1: 5 * MS}))],
        delay_ns=10 * MS,
    )
    cluster.add_worker("gpu", 4)
    for number in range(60):
        cluster.at(number * 40 * MS, lambda: cluster.request(A, 200 * MS))
    for number in range(20):
        cluster.at((2_400 + number * 40) * MS, lambda: cluster.request(A, 24 * MS))
    for number in range(20):
        cluster.at((3_200 + number * 40) * MS, lambda: cluster.request(A, 29 * MS))
    cluster.run(5_000 * MS)
    outcomes = [answer.outcome for answer in cluster.answers.values()]
    assert outcomes == ["OK"] * 80
    assert len(cluster.refusals) == 20  # those of 24 ms, at once


def test_a_long_link_has_as_much_under_way_as_its_length_asks_for() -> None:
    bench = CoreBench(
        SchedulerConfig(policy="clockwork", dispatch_delay_ns=0, margin_ns=0, lookahead_ns=50 * MS)
    )
    bench.join()
    bench.warm(A, exec_ms={1: 10})
    (first,) = sends(bench.request(A, at_ms=2000, slo_ms=1000))
    bench.done(first.action.action_id, 2040, 2041, received_ms=2040)
    sent = [first]
    for _ in range(60):
        sent += infers(bench.request(A, slo_ms=1000))
    begins_ms = [command.expected_begin_ns / MS for command in sent]
    assert begins_ms[1] == 2081
    # The look-ahead beyond the length, and the last one begins within it.
    assert 2081 + 40 <= begins_ms[-1] <= 2081 + 50


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_a_lane_whose_result_was_here_sooner_than_planned_is_idle_at_once(policy: str) -> None:
    """Results take 40 ms to come back, and that of a load takes 10."""
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    bench.join()
    bench.warm(A)
    cold = ModelId("cold")
    for model in (B, cold):
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model, exec_ms={1: 5})
    for begin_ms in range(2_000, 3_000, 100):
        (sent,) = sends(bench.request(A, at_ms=begin_ms, slo_ms=1_000))
        bench.now_ns += 50 * MS
        bench.done(sent.action.action_id, begin_ms, begin_ms + 10, received_ms=begin_ms)
    (load,) = sends(bench.request(B, at_ms=3_000, slo_ms=1_000))
    bench.wait(3_018 * MS)
    bench.done(load.action.action_id, 3_000, 3_008, received_ms=3_000)
    commands = bench.request(cold, slo_ms=10)
    assert refusals(commands) == [(bench.num_requests, Refusal.COLD)]
    assert loads(commands) == [(GPU, cold)]


def ask(bench: CoreBench, model: ModelId, num_bytes: int = 600_000) -> list[SendAction]:
    """A request with large inputs comes; returns what is sent for it."""
    bench.num_requests += 1
    request = RequestArrived(
        request_id=RequestId(bench.num_requests),
        model_id=model,
        rows=1,
        arrival_ns=bench.now_ns,
        slo_ns=200 * MS,
        num_bytes=num_bytes,
    )
    return sends(bench.tell(request))


def thin_bench() -> CoreBench:
    """A and B on a worker to which their inputs take 4.8 ms, as is known; A could be on another one, too."""
    bench = CoreBench(
        SchedulerConfig(policy="clockwork", dispatch_delay_ns=0, margin_ns=0, lookahead_ns=50 * MS)
    )
    for worker in (GPU, GPU2):
        bench.join(worker)
    for model in (A, B):
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model, exec_ms={1: 1})
    bench.ready(A, GPU2, exec_ms={1: 1})
    for model in (A, B):
        for sent in ask(bench, model):
            bench.finish(sent)
    for number in range(12):
        bench.wait((2_000 + 50 * number) * MS)
        sent_ms = bench.now_ms
        for place, sent in enumerate([*ask(bench, B), *ask(bench, B)], start=1):
            there_ms = sent_ms + 4.8 * place
            bench.done(sent.action.action_id, there_ms, there_ms + 1, received_ms=there_ms)
    bench.wait(2_700 * MS)
    return bench


def test_the_bytes_of_a_probe_are_on_the_wire_before_those_of_the_next_action() -> None:
    bench = thin_bench()
    (failing,) = ask(bench, A)
    bench.failed(failing.action.action_id, ActionError.DEVICE, at_ms=2_710)
    for sent in list(bench.in_flight.values()):  # it is loaded and runs elsewhere
        bench.finish(sent)
    bench.wait(2_800 * MS)
    _, probe = ask(bench, A)
    assert (failing.worker_id, probe.worker_id) == (GPU, GPU)
    (behind,) = ask(bench, B)
    assert behind.expected_begin_ns >= bench.now_ns + 9.6 * MS


def test_a_forecast_counts_the_time_that_inputs_take() -> None:
    bench = thin_bench()

    def wait_ms(num_bytes: int) -> float:
        (found,) = bench.scheduler.forecast(
            [B],
            rows=1,
            arrival_ns=bench.now_ns,
            slo_ns=200 * MS,
            now_ns=bench.now_ns,
            together=False,
            num_bytes=num_bytes,
        )
        return found.wait_ns / MS

    assert wait_ms(600_000) - wait_ms(0) == pytest.approx(4.8, abs=0.1)
