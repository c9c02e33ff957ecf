"""The ledger around the real scheduler, with a shell that a test moves by hand: no event loop, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from typing_extensions import override

from clockwright.errors import ProtocolError
from clockwright.units import ActionId, ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from clockwright.wire.actions import Action, ActionError, Infer, LoadWeights, Result, StepTime
from clockwright.wire.bulk import Buffer
from controller.core import Scheduler
from controller.core.events import (
    AnswerRequest,
    Command,
    Event,
    ModelAdded,
    ModelReady,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    WithdrawAction,
    WorkerJoined,
    WriteOffAction,
)
from controller.ledger import Finished, Ledger, Sent
from controller.telemetry.tables import Telemetry

MS = 1_000_000
W, M = WorkerId("w"), ModelId("m")


class Shell:
    """One worker with one model; what the ledger asked for, in order."""

    def __init__(
        self, scheduler: Scheduler | None = None, *, at_once: bool = False, tick_ns: int = 1
    ) -> None:
        self.now_ns = 0
        #: Actions are finished while they are being sent.
        self.at_once = at_once
        self.sent: list[Action] = []
        #: By name of the request: its outputs, or None: too late.
        self.answers: dict[str, Sequence[Buffer] | None] = {}
        self.withdrawn: list[tuple[str, ActionId]] = []
        self.lost: list[Sent] = []
        self.armed_ns: list[int] = []
        self.num_settled = 0
        self.telemetry = Telemetry()
        self.ledger: Ledger[str, str] = Ledger(
            scheduler or Scheduler(),
            clock=lambda: self.now_ns,
            telemetry=self.telemetry,
            send=self._send,
            withdraw_action=lambda link, action_id: self.withdrawn.append((link, action_id)),
            write_off=lambda _link, sent: self.lost.append(sent),
            answer=self._answer,
            refuse=self._refuse,
            forget=lambda _link, _model_id: None,
            close=lambda _link, _reason, lost: self.lost.extend(lost),
            settled=self._settled,
            arm=self._arm,
            tick_ns=tick_ns,
        )
        self.ledger.tell(ModelAdded(model_id=M))
        self.ledger.join("link", WorkerJoined(worker_id=W, gpu_kind=GpuKind("k"), num_pages=4))
        self.ledger.tell(
            ModelReady(
                worker_id=W,
                model_id=M,
                architecture_id=ArchitectureId("a"),
                num_pages=1,
                load_ns=MS,
                exec_ns={1: MS, 2: MS},
            )
        )

    def request(self, number: int, *, slo_ns: int = 1000 * MS) -> RequestArrived:
        request = RequestArrived(
            request_id=RequestId(number),
            model_id=M,
            rows=1,
            arrival_ns=self.now_ns,
            slo_ns=slo_ns,
        )
        self.ledger.open(request, f"request {number}")
        return request

    def finish(self, action: Action, *, duration_ns: int = MS) -> None:
        step = StepTime(self.now_ns, self.now_ns + duration_ns, duration_ns)
        result = Result(action_id=action.action_id, received_ns=self.now_ns)
        if isinstance(action, LoadWeights):
            result.load = step
            self.ledger.finish(W, result, [])
        elif isinstance(action, Infer):
            result.exec = step
            outputs = [b"%d/%d" % (action.action_id, row) for row in range(len(action.rows))]
            self.ledger.finish(W, result, outputs)

    def _send(self, _link: str, sent: Sent) -> None:
        self.sent.append(sent.command.action)
        if self.at_once:
            self.finish(sent.command.action)

    def _answer(
        self,
        _request: RequestArrived,
        name: str,
        command: AnswerRequest,
        finished: Finished,
        _now_ns: int,
        in_time: bool,
    ) -> None:
        self.answers[name] = [finished.outputs[command.index]] if in_time else None

    def _refuse(
        self, _request: RequestArrived, name: str, _command: RefuseRequest, _now_ns: int
    ) -> None:
        self.answers[name] = None

    def _settled(self) -> None:
        self.num_settled += 1

    def _arm(self, wakeup_ns: int) -> int:
        self.armed_ns.append(wakeup_ns)
        return wakeup_ns


def test_results_that_come_while_commands_are_carried_out_wait_and_keep_their_outputs() -> None:
    shell = Shell(at_once=True)
    settled = shell.num_settled
    requests = tuple(shell.request(number) for number in (1, 2, 3))
    shell.ledger.tell(RequestsArrived(requests=requests))
    while len(shell.answers) < 3:
        shell.now_ns = shell.armed_ns[-1]
        shell.ledger.fire()
    of_action = {row.request_id: row.action_id for row in shell.telemetry.requests}
    assert {row.outcome for row in shell.telemetry.requests} == {"OK"}
    for number in (1, 2, 3):
        (output,) = shell.answers[f"request {number}"] or ()
        assert bytes(output).startswith(b"%d/" % (of_action[RequestId(number)] or 0))
    assert shell.num_settled > settled
    assert shell.ledger.is_idle


def test_rows_are_in_order_of_what_happened_and_complete() -> None:
    shell = Shell()
    shell.ledger.tell(shell.request(1))
    load, infer = shell.sent
    shell.now_ns += MS
    shell.finish(load)
    shell.now_ns += MS
    shell.finish(infer)
    rows = list(shell.telemetry.actions)
    assert [(row.type, row.error) for row in rows] == [("LoadWeights", "NONE"), ("Infer", "NONE")]
    assert rows[0].load is not None
    assert rows[1].exec is not None
    (row,) = shell.telemetry.requests
    assert (row.outcome, row.cold, row.departure_ns) == ("OK", True, shell.now_ns)


def test_a_request_that_was_withdrawn_is_closed_once() -> None:
    shell = Shell()
    shell.ledger.tell(shell.request(1))
    shell.ledger.withdraw(RequestId(1))
    shell.ledger.withdraw(RequestId(1))
    assert [row.outcome for row in shell.telemetry.requests] == ["CANCELLED"]
    for action in shell.sent:
        assert not shell.ledger.is_idle
        shell.finish(action)
    assert shell.ledger.is_idle
    assert not shell.answers


class WritingOff(Scheduler):
    """A scheduler that writes the first Infer off when its request is cancelled."""

    @override
    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        commands = super().handle(event, now_ns=now_ns)
        if isinstance(event, RequestCancelled):
            commands = [*commands, WriteOffAction(worker_id=W, action_id=ActionId(2))]
        return commands


def test_an_action_that_was_written_off_is_over_and_its_late_result_is_dropped() -> None:
    shell = Shell(WritingOff())
    shell.ledger.tell(shell.request(1))
    load, infer = shell.sent
    shell.finish(load)
    shell.ledger.withdraw(RequestId(1))
    assert shell.ledger.is_idle
    assert [row.error for row in shell.telemetry.actions] == ["NONE", "WORKER_LOST"]
    assert [sent.command.action for sent in shell.lost] == [infer]
    assert shell.ledger.finish(W, Result(action_id=infer.action_id), []) is None
    with pytest.raises(ProtocolError, match="not under way"):
        shell.ledger.finish(W, Result(action_id=ActionId(99)), [])


class Withdrawing(Scheduler):
    """A scheduler that takes every Infer whose request was cancelled back from a worker that is gone too."""

    @override
    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        commands = super().handle(event, now_ns=now_ns)
        if isinstance(event, RequestCancelled):
            gone = WithdrawAction(worker_id=WorkerId("gone"), action_id=ActionId(2))
            commands = [*commands, gone]
        return commands


def test_an_action_that_was_withdrawn_stays_in_the_books_until_its_result() -> None:
    shell = Shell(Withdrawing())
    shell.ledger.tell(shell.request(1))
    load, infer = shell.sent
    shell.ledger.withdraw(RequestId(1))
    assert shell.withdrawn == [("link", infer.action_id)]
    shell.finish(load)
    assert not shell.ledger.is_idle
    result = Result(action_id=infer.action_id, error=ActionError.WITHDRAWN)
    sent = shell.ledger.finish(W, result, [])
    assert sent is not None
    assert sent.command.action == infer
    assert shell.ledger.is_idle
    assert [row.error for row in shell.telemetry.actions] == ["NONE", "WITHDRAWN"]


def test_the_actions_of_a_lost_worker_are_given_back_and_have_rows() -> None:
    shell = Shell()
    shell.ledger.tell(shell.request(1))
    lost = shell.ledger.lose(W)
    assert [sent.command.action for sent in lost] == shell.sent
    assert [row.error for row in shell.telemetry.actions] == ["WORKER_LOST"] * 2
    assert shell.ledger.lose(W) == ()
    assert shell.ledger.finish(W, Result(action_id=shell.sent[0].action_id)) is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Result(action_id=ActionId(99)), "99, which is not under way"),
        (Result(action_id=ActionId(1)), "LoadWeights succeeded without a time"),
        (Result(action_id=ActionId(1), load=StepTime(5, 4, 1)), "ran from 5 to 4"),
        (Result(action_id=ActionId(1), load=StepTime(0, 1, 10**10)), "for 10000000000 ns"),
        (Result(action_id=ActionId(1), load=StepTime(0, 1, 1, 10**10)), "10000000000 ns spared"),
    ],
)
def test_a_result_that_cannot_be_true_changes_nothing_in_any_shell(
    result: Result, message: str
) -> None:
    shell = Shell()
    shell.ledger.tell(shell.request(1))
    with pytest.raises(ProtocolError, match=message):
        shell.ledger.finish(W, result)
    assert not shell.telemetry.actions
    shell.finish(shell.sent[0])
    assert [row.error for row in shell.telemetry.actions] == ["NONE"]


def test_a_timer_that_is_late_by_less_than_a_tick_is_left_alone() -> None:
    for tick_ns, num_armed in ((1, 2), (1000 * MS, 1)):
        shell = Shell(tick_ns=tick_ns)
        shell.ledger.tell(shell.request(1, slo_ns=500 * MS))
        before = len(shell.armed_ns)
        # Its deadline is nearer, so the scheduler wants to be woken sooner.
        shell.ledger.tell(shell.request(2, slo_ns=50 * MS))
        assert shell.ledger.due_ns == shell.armed_ns[-1]
        assert len(shell.armed_ns) - before == num_armed - 1
