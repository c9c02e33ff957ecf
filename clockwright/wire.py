"""Actions and results to and from `worker.proto`, in both directions, and nothing else.

`shift_ns` is added to every time on the way out or in: the controller's end of the link passes the
worker's clock offset, the worker passes nothing.
"""

from __future__ import annotations

from collections import deque

from clockwright.actions import (
    Action,
    ActionError,
    EvictWeights,
    Infer,
    LoadWeights,
    Result,
    StepTime,
)
from clockwright.bulk import join_bulk
from clockwright.errors import ProtocolError
from clockwright.units import DURATION_NS_MAX, ActionId, ModelId
from clockwright.v1 import worker_pb2 as pb

# A worker of another version is refused and told both versions; there is no negotiation.
PROTOCOL_VERSION = 1

# Field numbers of `payload` and `next` in both envelopes.
PAYLOAD_FIELD = 15
NEXT_FIELD = 14

# 73 years. A clock beyond it is nonsense, and translated times would no longer fit the wire.
TIME_NS_MAX = 1 << 61

# Messages are put together up to this size: enough for dozens of actions with small tensors, little
# enough that copying it once more does not count.
TOGETHER_BYTES = 64 * 1024

ATTACH_METHOD = "/clockwright.v1.WorkerService/Attach"


def take_together(outgoing: deque[bytes]) -> bytes:
    """Take the next message from a queue, with those after it that can travel in one with it."""
    first = outgoing.popleft()
    if not outgoing:
        return first
    size = len(first)
    following: list[bytes] = []
    while outgoing and (size := size + len(outgoing[0])) <= TOGETHER_BYTES:
        following.append(outgoing.popleft())
    return join_bulk(first, NEXT_FIELD, following)


def encode_action(action: Action, *, shift_ns: int = 0) -> pb.ToWorker:
    """Make the envelope of an action; the caller appends the payload of an Infer."""
    if isinstance(action, Infer):
        return pb.ToWorker(
            infer=pb.Infer(
                action_id=action.action_id,
                model_id=action.model_id,
                batch_size=action.batch_size,
                rows=action.rows,
                earliest_ns=action.earliest_ns + shift_ns,
                latest_ns=action.latest_ns + shift_ns,
                expected_duration_ns=action.expected_duration_ns,
            )
        )
    if isinstance(action, LoadWeights):
        return pb.ToWorker(
            load_weights=pb.LoadWeights(
                action_id=action.action_id,
                model_id=action.model_id,
                earliest_ns=action.earliest_ns + shift_ns,
                latest_ns=action.latest_ns + shift_ns,
                expected_duration_ns=action.expected_duration_ns,
            )
        )
    return pb.ToWorker(
        evict_weights=pb.EvictWeights(action_id=action.action_id, model_id=action.model_id)
    )


def decode_action(message: pb.ToWorker) -> Action:
    """Read the action in an envelope.

    Raises:
        ProtocolError: the envelope holds no action.
    """
    kind = message.WhichOneof("kind")
    if kind == "infer":
        infer = message.infer
        return Infer(
            action_id=ActionId(infer.action_id),
            model_id=ModelId(infer.model_id),
            batch_size=infer.batch_size,
            rows=tuple(infer.rows),
            earliest_ns=infer.earliest_ns,
            latest_ns=infer.latest_ns,
            expected_duration_ns=infer.expected_duration_ns,
        )
    if kind == "load_weights":
        load = message.load_weights
        return LoadWeights(
            action_id=ActionId(load.action_id),
            model_id=ModelId(load.model_id),
            earliest_ns=load.earliest_ns,
            latest_ns=load.latest_ns,
            expected_duration_ns=load.expected_duration_ns,
        )
    if kind == "evict_weights":
        evict = message.evict_weights
        return EvictWeights(action_id=ActionId(evict.action_id), model_id=ModelId(evict.model_id))
    raise ProtocolError(f"expected an action, found {kind!r}")


def encode_result(result: Result) -> pb.FromWorker:
    """Make the envelope of a result; the caller appends the payload of a successful Infer."""
    return pb.FromWorker(
        result=pb.Result(
            action_id=result.action_id,
            error=int(result.error),  # type: ignore[arg-type]
            message=result.message,
            received_ns=result.received_ns,
            load=_encode_step(result.load),
            input=_encode_step(result.input),
            exec=_encode_step(result.exec),
            output=_encode_step(result.output),
        )
    )


def decode_result(message: pb.Result, *, shift_ns: int = 0) -> Result:
    """Read a result; `shift_ns` is added to every time.

    Raises:
        ProtocolError: it names an unknown error, or times that no clock shows.
    """
    try:
        error = ActionError(message.error)
    except ValueError:
        raise ProtocolError(f"action {message.action_id}: unknown error {message.error}") from None

    def step(name: str) -> StepTime | None:
        if not message.HasField(name):
            return None
        time: pb.StepTime = getattr(message, name)
        begin_ns, end_ns, duration_ns = time.begin_ns, time.end_ns, time.duration_ns
        if not (
            -TIME_NS_MAX < begin_ns < TIME_NS_MAX
            and -TIME_NS_MAX < end_ns < TIME_NS_MAX
            and 0 <= duration_ns <= DURATION_NS_MAX
        ):
            raise ProtocolError(
                f"action {message.action_id}: found {name} from {begin_ns} to {end_ns} ns that took"
                f" {duration_ns} ns, expected an hour at most, on a clock within 73 years of 0"
            )
        return StepTime(begin_ns + shift_ns, end_ns + shift_ns, duration_ns)

    if not -TIME_NS_MAX < message.received_ns < TIME_NS_MAX:
        raise ProtocolError(f"action {message.action_id}: received at {message.received_ns} ns")
    return Result(
        action_id=ActionId(message.action_id),
        error=error,
        message=message.message,
        received_ns=message.received_ns + shift_ns,
        load=step("load"),
        input=step("input"),
        exec=step("exec"),
        output=step("output"),
    )


def _encode_step(step: StepTime | None) -> pb.StepTime | None:
    if step is None:
        return None
    return pb.StepTime(begin_ns=step.begin_ns, end_ns=step.end_ns, duration_ns=step.duration_ns)
