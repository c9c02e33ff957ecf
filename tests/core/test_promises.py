"""Requests whose clients ask for certainty: refused or promised in time, and a promise is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, ModelId, RequestId, WorkerId
from clockwright.wire.actions import ActionError, Infer
from controller.core import SchedulerConfig
from controller.core.events import (
    CertaintyAsked,
    Command,
    LearnedLink,
    ModelAdded,
    ModelRemoved,
    PromiseRequest,
    Recalled,
    RefuseRequest,
    RequestCancelled,
    TimerFired,
    WorkerDraining,
    WorkerLost,
)
from controller.core.invariants import check, check_commands
from controller.core.policies import POLICIES
from controller.core.policies.fairness import Fairness
from controller.core.policy import Policy, PolicyKind
from controller.core.state import Batch
from controller.telemetry.tables import OK, Telemetry
from experiments.clockwork_paper.cases import poisson
from experiments.simulator import Network, copies_of, run
from modelzoo.profile import Noise, load_profile
from tests.kit.core_bench import (
    GPU,
    GPU2,
    MS,
    A,
    B,
    CoreBench,
    answers,
    infers,
    loads,
    refusals,
)

PREDICT = ("clockwork", "edf_mh")
EXEC_MS: dict[int, float] = {1: 10, 2: 14, 4: 20}


class PromiseBench(CoreBench):
    """Warm models on some workers, and requests that ask for certainty."""

    def __init__(
        self,
        policy: str,
        *workers: WorkerId,
        models: tuple[ModelId, ...] = (A, B),
        links: Sequence[LearnedLink] = (),
        kind: PolicyKind | None = None,
        margin_ms: int = 0,
    ) -> None:
        config = SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=margin_ms * MS)
        super().__init__(config, kind)
        self.tell(Recalled(links=links))
        for worker in workers or (GPU,):
            self.join(worker)
        for model in models:
            self.tell(ModelAdded(model_id=model))
            for worker in workers or (GPU,):
                self.ready(model, worker, exec_ms=EXEC_MS, resident=True)
        self.log: list[Command] = []

    def ask(
        self,
        model: ModelId = A,
        *,
        slo_ms: float = 100,
        within_ms: float = 5,
        num_bytes: int = 0,
    ) -> int:
        """A request arrives whose client asks for certainty; returns its number."""
        self.log += self.request(model, slo_ms=slo_ms, num_bytes=num_bytes)
        number = self.num_requests
        asked = CertaintyAsked(request_id=RequestId(number), within_ns=int(within_ms * MS))
        self.log += self.tell(asked)
        return number

    def pass_ms(self, ms: float) -> None:
        """Time passes: timers fire, and actions take as long as they should."""
        until_ns = self.now_ns + int(ms * MS)
        while True:
            check(self.scheduler)
            wakeup_ns = self.scheduler.next_wakeup_ns()
            ends = [
                (command.expected_begin_ns + command.action.expected_duration_ns, number)
                for number, command in self.in_flight.items()
                if isinstance(command.action, Infer)
            ]
            end_ns, number = min(ends, default=(until_ns + 1, None))
            if min(end_ns, wakeup_ns if wakeup_ns is not None else end_ns) > until_ns:
                break
            if wakeup_ns is not None and wakeup_ns < end_ns:
                self.now_ns = max(self.now_ns, wakeup_ns)
                self.hear(self.tell(TimerFired()))
            else:
                assert number is not None
                command = self.in_flight[number]
                begin_ns = command.expected_begin_ns
                self.hear(self.done(number, begin_ns / MS, end_ns / MS, command.worker_id))
        self.now_ns = until_ns

    def hear(self, commands: list[Command]) -> None:
        check_commands(self.scheduler, commands, self.now_ns)
        self.log += commands

    def fill(self, count: int, model: ModelId = B, *, slo_ms: float = 1000) -> None:
        """So many requests arrive whose clients do not ask."""
        for _ in range(count):
            self.log += self.request(model, slo_ms=slo_ms)

    def flood(self, ms: float) -> None:
        """For so long, eight times as many requests arrive as the lane can serve."""
        until_ns = self.now_ns + int(ms * MS)
        while self.now_ns < until_ns:
            self.fill(4, B, slo_ms=30)
            self.pass_ms(2.5)

    def overload(self) -> None:
        """So many requests are refused that places are as long as the largest batch from now on; all are over."""
        for number in range(100):
            self.ask(A if number % 2 else B, within_ms=2)
            self.pass_ms(1)
        self.pass_ms(150)
        self.log.clear()

    @property
    def promised(self) -> list[int]:
        return [each.request_id for each in self.log if isinstance(each, PromiseRequest)]

    @property
    def refused(self) -> dict[int, Refusal]:
        return dict(refusals(self.log))

    @property
    def answered(self) -> list[int]:
        return answers(self.log)


def play_many(bench: PromiseBench) -> None:
    """More requests than the lane can serve; some of them ask."""
    generator = random.Random(1)
    for _ in range(60):
        model, slo_ms = generator.choice((A, B)), generator.choice((40, 70, 100))
        bench.ask(model, slo_ms=slo_ms, within_ms=5)
        bench.fill(1, generator.choice((A, B)), slo_ms=30)
        bench.pass_ms(3)
    bench.pass_ms(200)


@pytest.mark.parametrize("policy", PREDICT)
def test_a_request_that_waits_is_promised_by_the_time_that_its_client_gives(policy: str) -> None:
    bench = PromiseBench(policy)
    bench.fill(4)
    number = bench.ask(within_ms=5)
    bench.pass_ms(3)
    assert bench.promised == []
    bench.pass_ms(2)
    assert bench.promised == [number]
    bench.pass_ms(95)
    assert number in bench.answered


@pytest.mark.parametrize("policy", PREDICT)
def test_a_request_without_a_place_is_refused_by_the_time_that_its_client_gives(
    policy: str,
) -> None:
    """A lane has time for 5 batches of 20 ms before 100 ms, so 30 requests are too many for it."""
    bench = PromiseBench(policy)
    numbers = [bench.ask(A if number % 2 else B, within_ms=6) for number in range(30)]
    bench.pass_ms(6)
    sent = {number for each in infers(bench.log) for number in each.request_ids}
    assert set(bench.promised) | set(bench.refused) | sent == set(numbers)
    assert set(bench.refused.values()) == {Refusal.OVERLOADED}
    refused = [each for each in bench.log if isinstance(each, RefuseRequest)]
    assert any("no lane has a place" in each.detail for each in refused)
    bench.pass_ms(100)
    assert set(bench.answered) == set(numbers) - set(bench.refused)


@pytest.mark.parametrize("policy", PREDICT)
def test_later_and_more_urgent_requests_do_not_take_a_promised_requests_time(policy: str) -> None:
    bench = PromiseBench(policy)
    bench.fill(4)
    number = bench.ask(slo_ms=100, within_ms=5)
    bench.pass_ms(5)
    assert bench.promised == [number]
    for _ in range(40):
        bench.fill(2, B, slo_ms=25)
        bench.pass_ms(2.5)
    bench.pass_ms(50)
    assert number in bench.answered
    assert number not in bench.refused


@pytest.mark.parametrize("policy", PREDICT)
def test_promised_requests_keep_their_places_beside_each_other(policy: str) -> None:
    bench = PromiseBench(policy)
    play_many(bench)
    assert len(bench.promised) >= 20
    assert set(bench.promised) <= set(bench.answered)


def test_promised_requests_share_the_batch_of_their_place() -> None:
    bench = PromiseBench("clockwork")
    bench.fill(4)
    numbers = [bench.ask(within_ms=2) for _ in range(4)]
    bench.pass_ms(60)
    batches = [each.request_ids for each in infers(bench.log) if numbers[0] in each.request_ids]
    assert batches == [tuple(numbers)]


@pytest.mark.parametrize("policy", PREDICT)
def test_a_request_of_several_rows_is_promised(policy: str) -> None:
    bench = PromiseBench(policy)
    bench.fill(4)
    bench.log += bench.request(A, rows=3)
    number = bench.num_requests
    bench.log += bench.tell(CertaintyAsked(request_id=RequestId(number), within_ns=5 * MS))
    bench.fill(1, A)
    bench.pass_ms(100)
    assert bench.promised == [number]
    assert number in bench.answered


@pytest.mark.parametrize("policy", PREDICT)
def test_a_request_that_was_sent_in_time_needs_no_promise(policy: str) -> None:
    bench = PromiseBench(policy)
    number = bench.ask()
    bench.pass_ms(50)
    assert bench.promised == []
    assert bench.answered == [number]


# Whichever of two workers the promise is on, one of these is that one.
@pytest.mark.parametrize("lost", [GPU, GPU2])
@pytest.mark.parametrize("policy", PREDICT)
def test_a_promise_moves_to_another_worker_when_its_worker_is_lost(
    policy: str, lost: WorkerId
) -> None:
    bench = PromiseBench(policy, GPU, GPU2)
    bench.fill(8)
    number = bench.ask(within_ms=2)
    bench.pass_ms(2)
    assert bench.promised == [number]
    for action_id, command in list(bench.in_flight.items()):
        if command.worker_id == lost:
            del bench.in_flight[action_id]
    bench.hear(bench.tell(WorkerLost(worker_id=lost)))
    bench.pass_ms(100)
    assert number in bench.answered


@pytest.mark.parametrize("policy", PREDICT)
def test_a_promise_is_lost_with_the_only_worker_and_says_so(policy: str) -> None:
    bench = PromiseBench(policy)
    bench.fill(4)
    number = bench.ask(within_ms=2)
    bench.pass_ms(2)
    bench.in_flight.clear()
    bench.hear(bench.tell(WorkerLost(worker_id=GPU)))
    assert bench.refused[number] is Refusal.WORKER_LOST


@pytest.mark.parametrize("policy", PREDICT)
def test_a_promise_that_no_other_worker_can_keep_ends_with_the_worker(policy: str) -> None:
    """One of two workers is lost, and the other has no time left for what both had promised."""
    bench = PromiseBench(policy, GPU, GPU2)
    numbers = [bench.ask(A if number % 2 else B, within_ms=3) for number in range(40)]
    bench.pass_ms(3)
    assert bench.promised
    for action_id, command in list(bench.in_flight.items()):
        if command.worker_id == GPU2:
            del bench.in_flight[action_id]
    bench.hear(bench.tell(WorkerLost(worker_id=GPU2)))
    bench.pass_ms(120)
    broken = set(numbers) & set(bench.refused) & set(bench.promised)
    assert {bench.refused[number] for number in broken} == {Refusal.WORKER_LOST}
    assert set(numbers) == set(bench.answered) | set(bench.refused)


@pytest.mark.parametrize("drained", [GPU, GPU2])
@pytest.mark.parametrize("policy", PREDICT)
def test_a_promise_moves_away_from_a_worker_that_drains(policy: str, drained: WorkerId) -> None:
    bench = PromiseBench(policy, GPU, GPU2)
    bench.fill(8)
    number = bench.ask(within_ms=2)
    bench.pass_ms(2)
    assert bench.promised == [number]
    bench.hear(bench.tell(WorkerDraining(worker_id=drained)))
    bench.pass_ms(100)
    assert number in bench.answered


@pytest.mark.parametrize("policy", PREDICT)
def test_a_promised_request_that_its_worker_was_too_late_for_gets_its_place_again(
    policy: str,
) -> None:
    bench = PromiseBench(policy)
    bench.fill(4)
    number = bench.ask(within_ms=2)
    while not any(number in each.request_ids for each in bench.in_flight.values()):
        bench.pass_ms(1)
    (action_id,) = [key for key, each in bench.in_flight.items() if number in each.request_ids]
    bench.hear(bench.failed(action_id, ActionError.TOO_LATE, at_ms=bench.now_ms))
    bench.pass_ms(100)
    assert number in bench.answered


@pytest.mark.parametrize("policy", PREDICT)
def test_a_promised_request_ends_with_its_model_or_its_client(policy: str) -> None:
    bench = PromiseBench(policy)
    bench.fill(4)
    first, second = bench.ask(within_ms=2), bench.ask(within_ms=2)
    bench.pass_ms(2)
    assert bench.promised == [first, second]
    bench.hear(bench.tell(RequestCancelled(request_id=RequestId(first))))
    check(bench.scheduler)
    bench.hear(bench.tell(ModelRemoved(model_id=A)))
    check(bench.scheduler)
    assert bench.refused == {second: Refusal.MODEL_REMOVED}


# Inputs of these requests take 100 ms on a link that carries a byte in 8 ns.
THIN = LearnedLink(
    worker_id=GPU, out_length_ns=0, out_ns_per_byte=8, back_length_ns=0, back_ns_per_byte=0
)
LARGE = 12_500_000


@pytest.mark.parametrize("model", [A, B])
@pytest.mark.parametrize("policy", PREDICT)
def test_a_promise_is_kept_beside_a_request_whose_inputs_come_after_its_time(
    policy: str, model: ModelId
) -> None:
    bench = PromiseBench(policy, links=[THIN])
    bench.fill(4)
    number = bench.ask(slo_ms=50, within_ms=2)
    bench.pass_ms(2)
    assert bench.promised == [number]
    large = bench.ask(model, slo_ms=300, within_ms=2, num_bytes=LARGE)
    bench.flood(100)
    bench.pass_ms(250)
    assert bench.promised == [number, large]
    assert {number, large} <= set(bench.answered)


@pytest.mark.parametrize("policy", PREDICT)
def test_a_promised_request_gets_another_place_when_its_places_time_is_over(policy: str) -> None:
    """Two share a place. Once the one is too late, because the lane was, the other still is not."""
    bench = PromiseBench(policy)
    bench.fill(4)
    urgent, patient = bench.ask(slo_ms=40, within_ms=2), bench.ask(slo_ms=150, within_ms=2)
    bench.pass_ms(2)
    assert bench.promised == [urgent, patient]
    (slow,) = bench.in_flight
    bench.now_ns = 40 * MS
    bench.fill(4, B, slo_ms=30)
    bench.hear(bench.done(slow, 0, 40))
    bench.flood(150)
    assert patient in bench.answered


@pytest.mark.parametrize("policy", PREDICT)
def test_a_promise_is_kept_where_a_place_before_it_was_run_in_part(policy: str) -> None:
    """Both places have time for four requests, as long as the first one is run whole."""
    bench = PromiseBench(policy)
    bench.overload()
    bench.fill(1)
    for _ in range(3):
        bench.ask(A, slo_ms=50, within_ms=2)
    number = bench.ask(B, slo_ms=62, within_ms=2)
    bench.pass_ms(9.5)
    assert [len(each.request_ids) for each in infers(bench.log)] == [1, 2]
    for model in (A, B):
        for _ in range(3):
            bench.ask(model, slo_ms=100, within_ms=2)
    bench.pass_ms(100)
    assert number in bench.promised
    assert set(bench.promised) <= set(bench.answered)


@pytest.mark.parametrize("policy", PREDICT)
def test_no_request_joins_a_place_that_would_then_end_too_late(policy: str) -> None:
    """A run takes so long that there is time left for one request, inside the margin, but not for four."""
    slow_model = ModelId("slow")
    bench = PromiseBench(policy, models=(A, B, slow_model), margin_ms=5)
    bench.overload()
    begin_ms = bench.now_ns / MS
    bench.fill(1, slow_model)
    bench.ask(B, slo_ms=55, within_ms=2)
    number = bench.ask(A, slo_ms=60, within_ms=2)
    bench.pass_ms(9.5)
    slow, next_one = bench.in_flight
    bench.hear(bench.done(slow, begin_ms, begin_ms + 36))
    for _ in range(3):
        bench.ask(A, slo_ms=100, within_ms=2)
    bench.now_ns += MS
    bench.hear(bench.tell(TimerFired()))
    bench.hear(bench.done(next_one, begin_ms + 36, begin_ms + 46))
    bench.pass_ms(100)
    assert number in bench.promised
    assert set(bench.promised) <= set(bench.answered)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_hears_of_each_batch_when_it_is_sent_and_of_no_other(policy: str) -> None:
    counted: list[tuple[ModelId, int]] = []
    built_in = POLICIES[policy]

    def make(config: SchedulerConfig) -> Policy:
        made = built_in.make(config)
        runs = made.runs

        def count(batch: Batch, now_ns: int) -> None:
            counted.append((batch.copy.model.model_id, batch.count))
            runs(batch, now_ns)

        made.runs = count  # type: ignore[method-assign]
        return made

    bench = PromiseBench(policy, kind=replace(built_in, make=make))
    play_many(bench)
    assert counted == [
        (each.action.model_id, len(each.request_ids))
        for each in infers(bench.log)
        if isinstance(each.action, Infer)
    ]


def test_edf_mh_counts_each_request_once_where_promises_turn_batches_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[RequestId] = []

    def count(_: Fairness, batch: Batch, now_ns: int) -> None:
        queue = batch.copy.model.queue
        taken = queue[batch.first : batch.first + batch.count]
        counted.extend(request.request_id for request in taken)

    monkeypatch.setattr(Fairness, "count_served", count)
    bench = PromiseBench("edf_mh")
    bench.fill(4)
    bench.ask(slo_ms=50, within_ms=2)
    bench.flood(100)
    assert counted == [number for each in infers(bench.log) for number in each.request_ids]


@pytest.mark.parametrize("policy", PREDICT)
def test_a_cold_model_is_loaded_for_a_request_that_is_promised(policy: str) -> None:
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    bench.join(pages=10)
    for name in ("a", "b", "c", "d", "e"):
        bench.tell(ModelAdded(model_id=ModelId(name)))
        bench.ready(ModelId(name), exec_ms=EXEC_MS)
    log: list[Command] = []
    for name in ("a", "b", "c", "d", "e"):
        log += bench.request(ModelId(name))
        number = RequestId(bench.num_requests)
        log += bench.tell(CertaintyAsked(request_id=number, within_ns=2 * MS))
    bench.now_ns += 2 * MS
    log += bench.tell(TimerFired())
    promised = {each.request_id for each in log if isinstance(each, PromiseRequest)}
    assert len(promised) == 5
    assert len(loads(log)) == 5
    check(bench.scheduler)


@pytest.mark.parametrize("policy", PREDICT)
def test_a_request_for_which_a_model_is_loaded_is_promised(policy: str) -> None:
    """After the load there is time for it alone, but not for those that are likely to come as well."""
    other = ModelId("other")
    bench = PromiseBench(policy, models=(B,))
    bench.join(GPU2)
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A, GPU2, exec_ms=EXEC_MS, resident=True)
    bench.overload()
    bench.tell(WorkerLost(worker_id=GPU2))
    bench.tell(ModelAdded(model_id=other))
    for model in (A, other):
        bench.ready(model, exec_ms=EXEC_MS)
    bench.fill(1, other)
    number = bench.ask(A, slo_ms=29, within_ms=2)
    bench.pass_ms(1)
    assert loads(bench.log) == [(GPU, other), (GPU, A)]
    assert bench.promised == [number]


def test_work_of_batch_clients_takes_no_worker_before_it_is_sent() -> None:
    """There is one GPU for it at a time. It is not taken by what is not sent."""
    config = SchedulerConfig(
        policy="edf_mh", dispatch_delay_ns=0, margin_ns=0, batch_slo_ns=50 * MS
    )
    bench = CoreBench(config)
    for worker, model in ((GPU, A), (GPU2, B)):
        bench.join(worker)
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model, worker, exec_ms=EXEC_MS, resident=worker == GPU2)
    log = bench.request(A)
    log += bench.tell(CertaintyAsked(request_id=RequestId(1), within_ns=2 * MS))
    for _ in range(7):
        bench.now_ns += MS
        log += bench.tell(TimerFired())
    assert [each for each in log if isinstance(each, PromiseRequest)]
    log += bench.request(A)
    log += bench.request(B)
    assert [each.worker_id for each in infers(log)] == [GPU2]


@pytest.mark.parametrize("policy", ["clipper", "infaas"])
def test_a_policy_that_does_not_predict_says_at_once_that_it_cannot_decide(policy: str) -> None:
    bench = CoreBench(SchedulerConfig(policy=policy))
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready(resident=True)
    bench.request()
    number = RequestId(bench.num_requests)
    commands = bench.tell(CertaintyAsked(request_id=number, within_ns=5 * MS))
    (refused,) = [each for each in commands if isinstance(each, RefuseRequest)]
    assert refused.refusal is Refusal.INFEASIBLE
    assert f"policy {policy} cannot decide" in refused.detail
    assert "edf_mh" in refused.detail
    check(bench.scheduler)


def test_a_request_that_is_unknown_or_over_is_not_decided() -> None:
    bench = PromiseBench("edf_mh")
    assert bench.tell(CertaintyAsked(request_id=RequestId(77), within_ns=MS)) == []


@pytest.mark.parametrize("policy", PREDICT)
@pytest.mark.parametrize(
    ("num_models", "network", "begin_ms"),
    [
        (4, Network(), 0),
        (15, Network(), 0),
        # It carries the inputs of 332 requests per second, which has to be measured first.
        (4, Network(bytes_per_s=200_000_000), 300),
    ],
    ids=["4", "15", "thin"],
)
def test_in_overload_every_decision_comes_in_time_and_is_kept(
    policy: str, num_models: int, network: Network, begin_ms: int
) -> None:
    row = load_profile("table1").row_for("resnet50_v1b")
    within_ns = 20 * MS
    case = poisson(
        copies_of(row, num_models),
        1,
        num_gpus=1,
        rate_rps=1400,
        slo_ns=100 * MS,
        duration_ns=NS_PER_S,
        noise=Noise(exec_sigma=0.003, load_sigma=0.003),
    )
    scheduler = SchedulerConfig(policy=policy)
    telemetry = Telemetry()
    run(
        replace(case, scheduler=scheduler, network=network, decide_within_ns=within_ns),
        telemetry=telemetry,
        check=True,
    )
    rows = [each for each in telemetry.requests if each.arrival_ns >= begin_ms * MS]
    kept = [each for each in rows if each.outcome == OK]
    assert len(kept) > (200 if begin_ms else 400)
    broken = [each for each in rows if each.outcome != OK and each.decided_ns < each.departure_ns]
    assert broken == []
    assert max(each.decided_ns - each.arrival_ns for each in rows) <= within_ns
