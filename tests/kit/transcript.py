"""Events and commands of the scheduler as lines that people read.

Every field of every command is in its line, so that no change of a schedule goes unseen. Times are
milliseconds, exact to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from clockwright.units import RequestId
from clockwright.wire.actions import EvictWeights, Infer, LoadWeights
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AdmissionClosed,
    AnswerRequest,
    CertaintyAsked,
    ClockSeen,
    CloseWorker,
    Command,
    Event,
    ForgetModel,
    ModelAdded,
    ModelPinned,
    ModelReady,
    ModelRemoved,
    ModelWanted,
    PromiseRequest,
    Recalled,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    SendAction,
    TenantsWeighed,
    TimerFired,
    TurnedAway,
    WithdrawAction,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WriteOffAction,
)


def say_ms(time_ns: int | None) -> str:
    """`12.5` for 12.5 ms; all digits that there are, none that says nothing."""
    if time_ns is None:
        return "?"
    sign, (whole, rest) = "-" if time_ns < 0 else "", divmod(abs(time_ns), 1_000_000)
    return f"{sign}{whole}" + (f".{rest:06}".rstrip("0") if rest else "")


def say_event(event: Event, now_ns: int) -> str:
    match event:
        case Recalled():
            return f"{len(event.times)} rows of durations and {len(event.links)} links are recalled"
        case WorkerJoined():
            return f"{event.worker_id} joins: {event.gpu_kind}, {event.num_pages} pages"
        case ClockSeen():
            return f"{event.worker_id} is at {event.clock_mhz} MHz"
        case WorkerDraining():
            return f"{event.worker_id} shall leave"
        case WorkerLost():
            return f"{event.worker_id} is lost"
        case ModelAdded():
            return f"model {event.model_id} is added"
        case ModelReady():
            times = " ".join(f"{size}:{say_ms(ns)}" for size, ns in event.exec_ns.items())
            clock = f", measured at {event.clock_mhz} MHz" if event.clock_mhz else ""
            return (
                f"{event.worker_id} has {event.model_id} ({event.architecture_id}): "
                f"load {say_ms(event.load_ns)}, exec {times}, {event.num_pages} pages{clock}"
            )
        case ModelRemoved():
            return f"model {event.model_id} is removed"
        case RequestArrived():
            return _say_requests([event], now_ns)
        case RequestsArrived():
            groups: list[list[RequestArrived]] = []
            for request in event.requests:
                if groups and _alike(groups[-1][-1], request):
                    groups[-1].append(request)
                else:
                    groups.append([request])
            return "; ".join(_say_requests(group, now_ns) for group in groups)
        case TurnedAway():
            return f"{event.number} like {_say_requests([event.request], now_ns)} are turned away"
        case CertaintyAsked():
            return f"request {event.request_id} is to be decided within {say_ms(event.within_ns)}"
        case RequestCancelled():
            return f"request {event.request_id} is cancelled"
        case ModelWanted():
            return f"model {event.model_id} is wanted"
        case ModelPinned():
            return f"model {event.model_id} is {'pinned' if event.pinned else 'pinned no more'}"
        case ActionSucceeded():
            return (
                f"{event.worker_id} did {event.action_id}: "
                f"{say_ms(event.begin_ns)}..{say_ms(event.end_ns)}, took {say_ms(event.duration_ns)}, "
                f"received {say_ms(event.received_ns)}, staged {say_ms(event.staged_ns)}"
            )
        case ActionFailed():
            words = f" ({event.message})" if event.message else ""
            return (
                f"{event.worker_id} failed {event.action_id}: {event.error.name}{words}, "
                f"received {say_ms(event.received_ns)}"
            )
        case TenantsWeighed():
            return f"tenants weigh {dict(event.weights)}"
        case AdmissionClosed():
            return "admission is closed"
        case TimerFired():
            return "timer"


def _alike(one: RequestArrived, other: RequestArrived) -> bool:
    return (
        other.request_id == one.request_id + 1
        and (other.model_id, other.rows, other.slo_ns, other.tenant, other.arrival_ns)
        == (one.model_id, one.rows, one.slo_ns, one.tenant, one.arrival_ns)
    )  # fmt: skip


def _say_requests(requests: Sequence[RequestArrived], now_ns: int) -> str:
    first, last = requests[0], requests[-1]
    noun = "request" if first is last else "requests"
    words = [
        f"{noun} {_span(first.request_id, last.request_id)}",
        str(first.model_id),
        f"slo {say_ms(first.slo_ns)}",
    ]
    if first.rows != 1:
        words.append(f"{first.rows} rows")
    if first.tenant:
        words.append(f"of {first.tenant}")
    if first.arrival_ns != now_ns:
        words.append(f"arrived {say_ms(first.arrival_ns)}")
    return "  ".join(words)


def say_commands(commands: Sequence[Command], now_ns: int) -> Iterator[str]:
    """A line each, but for responses that differ only by counting on, which share one."""
    position = 0
    while position < len(commands):
        first = last = commands[position]
        position += 1
        while position < len(commands) and commands[position] == _next_alike(last):
            last = commands[position]
            position += 1
        yield _say_command(first, last, now_ns)


def _next_alike(command: Command) -> Command | None:
    """The response that would share its line."""
    match command:
        case AnswerRequest():
            next_id = RequestId(command.request_id + 1)
            return replace(command, request_id=next_id, index=command.index + 1)
        case RefuseRequest():
            return replace(command, request_id=RequestId(command.request_id + 1))
    return None


def _say_command(command: Command, last: Command, now_ns: int) -> str:
    match command, last:
        case SendAction(), _:
            return _say_action(command, now_ns)
        case AnswerRequest(), AnswerRequest():
            return (
                f"answer {_span(command.request_id, last.request_id)}: "
                f"number {_span(command.index, last.index)} of {command.action_id} "
                f"(x{command.batch_size}) on {command.worker_id}, "
                f"{'cold' if command.cold else 'warm'}, "
                f"expected {say_ms(command.expected_departure_ns)}"
            )
        case RefuseRequest(), RefuseRequest():
            detail = f" ({command.detail})" if command.detail else ""
            return (
                f"refuse {_span(command.request_id, last.request_id)} {command.model_id}: "
                f"{command.refusal.value}, load {say_ms(command.load_ns)} + "
                f"exec {say_ms(command.exec_ns)} + queue {say_ms(command.queue_ns)} + "
                f"margin {say_ms(command.margin_ns)}, slo {say_ms(command.slo_ns)}{detail}"
            )
        case PromiseRequest(), _:
            return f"promise {command.request_id}"
        case WithdrawAction(), _:
            return f"{command.worker_id} withdraw {command.action_id}"
        case WriteOffAction(), _:
            return f"{command.worker_id} write off {command.action_id}"
        case ForgetModel(), _:
            return f"{command.worker_id} forget {command.model_id}"
        case CloseWorker(), _:
            reason = f": {command.reason}" if command.reason else ""
            return f"{command.worker_id} close{reason}"
    raise AssertionError(f"{command} cannot share a line with {last}")


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _say_action(command: SendAction, now_ns: int) -> str:
    action = command.action
    if isinstance(action, EvictWeights):
        assert not command.request_ids
        assert command.expected_begin_ns == 0
        return f"{command.worker_id} evict {action.action_id} {action.model_id}"
    if isinstance(action, LoadWeights):
        assert not command.request_ids
        what = f"load {action.action_id} {action.model_id}"
    else:
        what = f"infer {action.action_id} {action.model_id} x{action.batch_size} "
        what += _say_payload(command.request_ids, action)
    assert action.earliest_ns == now_ns, "what is sent may begin at once"
    return (
        f"{command.worker_id} {what}  window ..{say_ms(action.latest_ns)}  "
        f"begin {say_ms(command.expected_begin_ns)}  takes {say_ms(action.expected_duration_ns)}"
    )


def _say_payload(request_ids: Sequence[int], action: Infer) -> str:
    words = [
        str(request_id) if rows == 1 else f"{request_id}({rows} rows)"
        for request_id, rows in zip(request_ids, action.rows, strict=True)
    ]
    return f"[{' '.join(words)}]"
