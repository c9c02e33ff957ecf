"""The runtime around the real scheduler, with a link that a test answers by hand, on virtual time."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import Callable, Sequence

import pytest
from typing_extensions import override

from clockwright.errors import ProtocolError, Refusal
from clockwright.units import ActionId, ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from clockwright.wire.actions import Action, ActionError, Infer, LoadWeights, Result, StepTime
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from controller.core import Scheduler
from controller.core.events import ModelAdded, ModelReady, ModelRemoved, RefuseRequest, WorkerJoined
from controller.front.oip.refusals import NoAnswerError, error_of, refusal_text
from controller.models.entry import Entry
from controller.port import Answered, Ask, Refused, Sink, Told
from controller.runtime import Runtime, refused_figures
from controller.selection.live_application import LiveApplication
from controller.selection.parts import PartStage
from controller.telemetry.tables import Telemetry
from tests.kit import asking
from tests.kit.asking import FutureSink, Reply
from tests.kit.virtual_time import now_ns

pytestmark = pytest.mark.virtual_time

MS = 1_000_000
S = 1000 * MS
W, M = WorkerId("w"), ModelId("m")


class HandLink:
    """Remembers what it was asked to do."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[tuple[Action, list[Buffer]]] = asyncio.Queue()
        self.withdrawn: list[ActionId] = []
        self.written_off: list[ActionId] = []
        self.forgotten: list[ModelId] = []
        self.closed: list[str] = []
        self.flushed: list[bool] = []
        #: Does what a worker does that answers at once.
        self.looked: Callable[[], object] = lambda: None

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        self.sent.put_nowait((action, list(payload)))

    def look(self) -> None:
        self.looked()

    def flush(self, *, now: bool) -> None:
        self.flushed.append(now)

    def withdraw_action(self, action_id: ActionId) -> None:
        self.withdrawn.append(action_id)

    def write_off(self, action_id: ActionId) -> None:
        self.written_off.append(action_id)

    def forget_model(self, model_id: ModelId) -> None:
        self.forgotten.append(model_id)

    def close(self, reason: str) -> None:
        self.closed.append(reason)


class RuntimeBench:
    """A runtime with one worker that has one model ready."""

    def __init__(self, *, exec_ns: int = MS) -> None:
        self.telemetry = Telemetry()
        self.runtime = Runtime(Scheduler(), self.telemetry, clock=now_ns)
        self.link = HandLink()
        self.runtime.tell(ModelAdded(model_id=M))
        self.runtime.worker_joined(
            self.link, WorkerJoined(worker_id=W, gpu_kind=GpuKind("g"), num_pages=4)
        )
        self.runtime.tell(
            ModelReady(
                worker_id=W,
                model_id=M,
                architecture_id=ArchitectureId("a"),
                num_pages=1,
                load_ns=MS,
                exec_ns={1: exec_ns, 2: exec_ns, 4: exec_ns},
            )
        )

    def submit(self, *inputs: bytes, slo_ns: int = 30 * S, rows: int = 1) -> asyncio.Future[Reply]:
        ask = Ask(0, rows, now_ns(), slo_ns, explain=True)
        return asking.submit(self.runtime, M, inputs, ask)

    def succeed(self, action: Action, outputs: Sequence[Buffer] = ()) -> None:
        at_ns = now_ns()
        step = StepTime(at_ns, at_ns + 1000, 900)
        result = Result(action_id=action.action_id, received_ns=at_ns)
        if isinstance(action, LoadWeights):
            result.load = step
        else:
            result.input = result.exec = result.output = step
        self.runtime.action_finished(W, result, outputs)

    async def load(self) -> None:
        action, _ = await self.link.sent.get()
        assert isinstance(action, LoadWeights)
        self.succeed(action)

    async def infer(self) -> tuple[Infer, list[Buffer]]:
        """The next Infer; loads on the way succeed."""
        while True:
            action, payload = await self.link.sent.get()
            if isinstance(action, Infer):
                return action, payload
            self.succeed(action)


async def test_an_answer_carries_the_outputs_and_where_the_time_went() -> None:
    bench = RuntimeBench()
    future = bench.submit(b"in-a", b"in-b")
    action, payload = await bench.infer()
    assert payload == [b"in-a", b"in-b"]
    bench.succeed(action, [b"out-a", b"out-b", b"out-c"])
    answer = await future
    assert list(answer.outputs) == [b"out-a", b"out-b", b"out-c"]
    course = answer.told.course
    assert course is not None
    assert (course.worker, course.batch_size, course.cold) == (W, 1, True)
    assert course.load_end_ns - course.load_begin_ns == 1000
    assert course.exec_end_ns - course.exec_begin_ns == 1000
    assert course.latency_ns <= 30 * S
    (row,) = bench.telemetry.requests
    assert (row.outcome, row.action_id, row.cold) == ("OK", action.action_id, True)
    assert [a.type for a in bench.telemetry.actions] == ["LoadWeights", "Infer"]


async def test_a_batch_is_cut_into_its_requests() -> None:
    bench = RuntimeBench(exec_ns=5 * S)
    first = bench.submit(b"0")
    action, _ = await bench.infer()
    rest = [bench.submit(str(number).encode()) for number in (1, 2, 3, 4)]
    bench.succeed(action, [b"zero"])
    assert list((await first).outputs) == [b"zero"]
    action, payload = await bench.infer()
    assert action.batch_size == len(payload) == 4
    bench.succeed(action, [bytes(tensor) * 2 for tensor in payload])
    assert [list((await future).outputs) for future in rest] == [
        [b"11"],
        [b"22"],
        [b"33"],
        [b"44"],
    ]


async def test_what_arrivals_lead_to_leaves_at_once_and_what_results_lead_to_in_one_piece() -> None:
    bench = RuntimeBench(exec_ns=5 * S)
    first = bench.submit(b"0")
    await bench.load()
    action, _ = await bench.infer()
    # The load and the Infer behind it, which the arrival led to, left together.
    assert bench.link.flushed == [True]
    rest = [bench.submit(str(number).encode()) for number in (1, 2)]
    await asyncio.sleep(0)
    bench.succeed(action, [b"out"])
    await first
    action, _ = await bench.infer()
    assert (len(action.rows), bench.link.flushed) == (2, [True, False])
    assert not any(future.done() for future in rest)


@pytest.mark.parametrize("pressed", [False, True])
async def test_a_loop_without_time_to_spare_answers_what_is_ready_before_it_reads_more_requests(
    pressed: bool,
) -> None:
    bench = RuntimeBench()
    bench.submit(b"x")
    action, _ = await bench.infer()
    bench.succeed(action, [b"out"])
    order: list[str] = []

    def answer() -> None:
        assert bench.link.flushed == [True]
        action, _ = bench.link.sent.get_nowait()
        bench.succeed(action, [b"out"])
        order.append("result")

    bench.link.flushed.clear()
    bench.link.looked = answer
    bench.runtime.is_pressed = lambda: pressed
    bench.runtime.answers_leave = lambda: order.append("answers leave")
    future = bench.submit(b"y")
    asyncio.get_running_loop().call_soon(order.append, "next turn")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [*(["result", "answers leave"] if pressed else []), "next turn"]
    if pressed:
        assert list((await future).outputs) == [b"out"]


async def test_a_refusal_is_an_exception_with_the_predicted_times() -> None:
    bench = RuntimeBench(exec_ns=80 * MS)
    with pytest.raises(NoAnswerError) as caught:
        await bench.submit(b"x", slo_ns=20 * MS)
    assert caught.value.figures["exec_ns"] == 80 * MS
    text = refusal_text(caught.value)
    assert re.search(r"model m.*run 80\.0 ms.*> SLO 20\.0 ms", text)
    assert caught.value.refusal is Refusal.INFEASIBLE
    (row,) = bench.telemetry.requests
    assert row.outcome == "INFEASIBLE"
    assert row.departure_ns >= row.arrival_ns


class Heard:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told_: list[tuple[Told, list[Buffer]]] = []

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        self.told_.append((told, list(outputs)))


async def test_a_sink_is_told_once_with_what_became_of_its_request() -> None:
    bench = RuntimeBench()
    answered, refused = Heard(), Heard()
    bench.runtime.ask(M, Ask(0, 1, now_ns(), 30 * S), [b"x"], answered)
    bench.runtime.ask(M, Ask(0, 1, now_ns(), 1), [b"y"], refused)
    action, payload = await bench.infer()
    assert payload == [b"x"]
    bench.succeed(action, [b"out"])
    ((told, outputs),) = answered.told_
    assert isinstance(told, Answered)
    # Nobody wants to know where its time went, and that takes some.
    assert told.course is None
    assert outputs == [b"out"]
    ((told, _),) = refused.told_
    assert isinstance(told, Refused)
    assert told.refusal is Refusal.INFEASIBLE


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_request_that_is_withdrawn_is_never_sent_and_its_sink_hears_nothing(
    turns: int,
) -> None:
    bench = RuntimeBench(exec_ns=5 * S)
    first = bench.submit(b"first")
    action, _ = await bench.infer()
    heard = Heard()
    request_id = bench.runtime.ask(M, Ask(0, 1, now_ns(), 30 * S), [b"withdrawn"], heard)
    kept = bench.submit(b"kept")
    for _ in range(turns):
        await asyncio.sleep(0)
    bench.runtime.withdraw(request_id)
    bench.runtime.withdraw(request_id)  # A second time is nothing.
    bench.succeed(action, [b"out"])
    await first
    action, payload = await bench.infer()
    assert payload == [b"kept"]
    bench.succeed(action, [b"out"])
    await kept
    assert bench.runtime.num_waiting == 0
    assert not heard.told_
    assert [row.outcome for row in bench.telemetry.requests] == ["CANCELLED", "OK", "OK"]


class Direct:
    """Asks the runtime for the bench's model: the stage behind `PartStage`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def ask(
        self, subject: Entry | LiveApplication, ask: Ask, inputs: Sequence[Buffer], sink: Sink
    ) -> RequestId:
        return self._runtime.ask(M, ask, inputs, sink)

    def withdraw(self, request_id: RequestId) -> None:
        self._runtime.withdraw(request_id)


async def test_a_part_refused_by_the_event_that_sends_others_stops_no_command() -> None:
    bench = RuntimeBench(exec_ns=100 * MS)
    first = bench.submit(b"0")
    action, _ = await bench.infer()
    bench.succeed(action, [b"out"])
    await first
    row = TensorSpec("x", "UINT8", (1,), 0)
    model = Entry(M, M, None, inputs=(row,), outputs=(row,))
    model.ready_on[W] = (1, 4)
    heard = Heard()
    # All 16 parts arrive in one event, and the last ones cannot be in time.
    PartStage(Direct(bench.runtime)).ask(model, Ask(0, 64, now_ns(), 350 * MS), [bytes(64)], heard)
    await asyncio.sleep(0.001)
    ((told, _),) = heard.told_
    assert isinstance(told, Refused)
    assert bench.runtime.num_waiting == 0
    # What the scheduler sent before reached the worker; what is sent next does so too.
    while bench.link.sent.qsize():
        action, payload = await bench.infer()
        assert len(payload) == 1
        bench.succeed(action, [bytes(4)])
    await bench.runtime.wait_idle()
    second = bench.submit(b"1")
    action, _ = await bench.infer()
    bench.succeed(action, [b"out"])
    await second


@pytest.mark.parametrize("fails", [False, True])
async def test_a_sink_that_withdraws_or_fails_stops_no_command_of_its_event(
    fails: bool, runtime_errors: list[str]
) -> None:
    bench = RuntimeBench(exec_ns=100 * MS)
    first = bench.submit(b"0")
    action, _ = await bench.infer()
    bench.succeed(action, [b"out"])
    await first

    class Lost(Heard):
        @override
        def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
            super().told(request_id, told, outputs)
            if fails:
                raise ValueError("a bug")
            bench.runtime.withdraw(other)

    lost, heard = Lost(), Heard()
    # One event refuses the first and sends the second.
    bench.runtime.ask(M, Ask(0, 1, now_ns(), 20 * MS), [b"1"], lost)
    other = bench.runtime.ask(M, Ask(0, 1, now_ns(), 30 * S), [b"2"], heard)
    action, payload = await bench.infer()
    assert payload == [b"2"]
    bench.succeed(action, [b"out"])
    assert len(lost.told_) == 1
    assert len(heard.told_) == fails
    await bench.runtime.wait_idle()
    assert len(runtime_errors) == fails
    if fails:
        assert "ValueError: a bug" in runtime_errors.pop()


async def test_an_answer_after_the_deadline_is_a_late_refusal() -> None:
    bench = RuntimeBench()
    future = bench.submit(b"x", slo_ns=300 * MS)
    action, _ = await bench.infer()
    # The result is not there at the deadline; the timer says so.
    with pytest.raises(NoAnswerError) as caught:
        await future
    assert caught.value.refusal is Refusal.LATE
    assert now_ns() >= bench.telemetry.requests[0].arrival_ns + 300 * MS
    bench.succeed(action, [b"out"])
    assert bench.runtime.num_waiting == 0


async def test_what_was_short_before_a_silence_is_not_said_to_be_short_now() -> None:
    bench = RuntimeBench(exec_ns=100 * MS)
    first = bench.submit(b"x")
    action, _ = await bench.infer()
    bench.succeed(action, [b"out"])
    await first
    refused = await asyncio.gather(
        *(bench.submit(b"x", slo_ns=150 * MS, rows=4) for _ in range(9)), return_exceptions=True
    )
    assert sum(isinstance(each, NoAnswerError) for each in refused) >= 8
    (kind,) = bench.runtime.statistics().kinds
    assert kind.dropped_for_exec_rps > 0
    for _ in range(2):  # The scheduler hears of nothing meanwhile.
        await asyncio.sleep(20)
        statistics = bench.runtime.statistics()
    assert statistics.kinds[0].dropped_for_exec_rps == 0
    assert bench.runtime.cluster_load().kinds == statistics.kinds


async def test_a_lost_worker_ends_its_actions_and_its_requests() -> None:
    bench = RuntimeBench()
    future = bench.submit(b"x")
    await bench.infer()
    bench.runtime.worker_lost(W)
    with pytest.raises(NoAnswerError) as caught:
        await future
    assert caught.value.refusal is Refusal.WORKER_LOST
    assert [a.error for a in bench.telemetry.actions] == ["NONE", "WORKER_LOST"]
    bench.runtime.worker_lost(W)  # A second time is nothing.
    with pytest.raises(NoAnswerError) as caught:
        await bench.submit(b"x")
    assert caught.value.refusal is Refusal.NO_WORKER


async def test_nobody_waits_for_late_outputs_of_a_worker_that_is_gone() -> None:
    class Wanting:
        def take(self, outputs: Sequence[Buffer]) -> None: ...

    bench = RuntimeBench()
    wanting = Wanting()
    gone = weakref.ref(wanting)
    sink = FutureSink("m")
    bench.runtime.ask(M, Ask(0, 1, now_ns(), 30 * S), [b"x"], sink, late=wanting.take)
    load, _ = await bench.link.sent.get()
    bench.succeed(load)
    await bench.link.sent.get()
    bench.runtime.worker_lost(W)
    with pytest.raises(NoAnswerError):
        await sink.future
    del wanting, sink
    gc.collect()
    assert gone() is None


async def test_nobody_waits_for_late_outputs_of_an_action_that_was_written_off() -> None:
    class Wanting:
        def take(self, outputs: Sequence[Buffer]) -> None: ...

    bench = RuntimeBench(exec_ns=20 * MS)
    warm = bench.submit(b"0")
    bench.succeed((await bench.infer())[0], [b"z"])
    await warm
    wanting = Wanting()
    gone = weakref.ref(wanting)
    sink = FutureSink("m")
    bench.runtime.ask(M, Ask(0, 1, now_ns(), 30 * S), [b"x"], sink, late=wanting.take)
    lost, _ = await bench.infer()
    await asyncio.sleep(0.018)
    last = bench.submit(b"1")
    later, _ = await bench.infer()
    await asyncio.sleep(0.3)
    bench.succeed(later, [b"z"])
    await last
    assert bench.link.written_off == [lost.action_id]
    again, _ = await bench.infer()
    bench.succeed(again, [b"z"])
    await sink.future
    del wanting, sink
    gc.collect()
    assert gone() is None


async def test_an_action_refused_for_lateness_is_sent_again_with_the_same_inputs() -> None:
    bench = RuntimeBench()
    future = bench.submit(b"x")
    action, _ = await bench.infer()
    late = Result(action_id=action.action_id, error=ActionError.TOO_LATE)
    bench.runtime.action_finished(W, late, ())
    again, payload = await bench.infer()
    assert again.action_id != action.action_id
    assert payload == [b"x"]
    bench.succeed(again, [b"out"])
    await future


@pytest.mark.parametrize(
    ("result", "outputs", "message"),
    [
        (Result(action_id=ActionId(99)), [b"y"], "99, which is not under way"),
        (Result(action_id=ActionId(0)), [b"y"], "succeeded without a time"),
        (Result(action_id=ActionId(0), exec=StepTime(5, 4, 1)), [b"y"], "ran from 5 to 4"),
        (Result(action_id=ActionId(0), exec=StepTime(1, 2, 10**18)), [b"y"], "for 1000000"),
        (Result(action_id=ActionId(0), exec=StepTime(1, 2, 1)), [], "0 output tensors"),
    ],
)
async def test_a_result_that_cannot_be_is_a_protocol_error_and_changes_nothing(
    result: Result, outputs: list[bytes], message: str
) -> None:
    bench = RuntimeBench()
    future = bench.submit(b"x")
    action, _ = await bench.infer()
    if result.action_id == 0:
        result.action_id = action.action_id
    with pytest.raises(ProtocolError, match=message):
        bench.runtime.action_finished(W, result, outputs)
    bench.succeed(action, [b"out"])
    await future


async def test_idle_is_when_nothing_waits_and_nothing_runs() -> None:
    bench = RuntimeBench()
    future = bench.submit(b"x")
    action, _ = await bench.infer()
    bench.runtime.close_admission()
    idle = asyncio.create_task(bench.runtime.wait_idle())
    with pytest.raises(NoAnswerError) as caught:
        await bench.submit(b"y")
    assert caught.value.refusal is Refusal.DRAINING
    assert not idle.done()
    bench.succeed(action, [b"out"])
    await idle
    assert (await future).outputs == [b"out"]


async def test_a_drained_worker_is_closed_once_it_has_answered() -> None:
    bench = RuntimeBench()
    future = bench.submit(b"x")
    action, _ = await bench.infer()
    bench.runtime.drain_worker(W)
    assert bench.link.closed == []
    bench.succeed(action, [b"out"])
    assert bench.link.closed == [""]
    await future


async def test_a_removed_model_is_forgotten_and_its_waiting_requests_refused() -> None:
    bench = RuntimeBench(exec_ns=5 * S)
    first = bench.submit(b"first")
    action, _ = await bench.infer()
    second = bench.submit(b"second")
    bench.runtime.tell(ModelRemoved(model_id=M))
    with pytest.raises(NoAnswerError) as caught:
        await second
    assert caught.value.refusal is Refusal.MODEL_REMOVED
    assert bench.link.forgotten == []
    bench.succeed(action, [b"out"])
    await first
    assert bench.link.forgotten == [M]


def test_every_refusal_has_a_sentence() -> None:
    def error(refused: RefuseRequest) -> NoAnswerError:
        told = Refused(refused.refusal, refused_figures(refused))
        told_error = error_of(told, refused.model_id)
        assert isinstance(told_error, NoAnswerError)
        return told_error

    for refusal in Refusal:
        refused = RefuseRequest(
            request_id=1,  # type: ignore[arg-type]
            model_id=ModelId("resnet50"),
            refusal=refusal,
            slo_ns=20 * MS,
            load_ns=8_300_000,
            exec_ns=2_600_000,
            queue_ns=14 * MS,
        )
        text = refusal_text(error(refused))
        assert len(text) > 20
        assert refusal is Refusal.DRAINING or "resnet50" in text
        # A second worker may have vanished with it.
        assert (
            refusal is not Refusal.WORKER_LOST or "no other answered it within SLO 20.0 ms" in text
        )
    cold = RefuseRequest(
        request_id=1,  # type: ignore[arg-type]
        model_id=ModelId("resnet50"),
        refusal=Refusal.COLD,
        slo_ns=20 * MS,
        load_ns=8_300_000,
        exec_ns=2_600_000,
        queue_ns=14 * MS,
    )
    assert refusal_text(error(cold)) == (
        "model resnet50 is cold: load 8.3 ms + run 2.6 ms + queue 14.0 ms = 24.9 ms > SLO 20.0 ms"
    )
