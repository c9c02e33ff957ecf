"""Requests with several answers, as a stage of the port: the server asks step after step.

Each step is a request of its own to those who schedule, in its own window and with its own deadline: it is asked as the
answer before it comes, with the state that this left, and is due within the time that the client allows from answer to
answer. So the scheduler and the workers know nothing of streams. Steps of several streams join in batches like other
requests, and nothing is planned for a stream that has ended.

A step that is refused, or late, ends its stream with that reason, behind the answers that were given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clockwright.errors import ProtocolError, Refusal, RefusedError
from clockwright.units import NO_REQUEST, RequestId, format_ns
from clockwright.wire.bulk import Buffer, total_bytes
from clockwright.wire.tensors import TensorSpec
from controller.models.entry import Entry
from controller.models.stepped import first_state
from controller.models.streamed import GeneratePlan, StreamPlan
from controller.port import (
    ANSWERS,
    INTERNAL,
    Answered,
    Ask,
    Failed,
    PortStage,
    Refused,
    Sink,
    Streaming,
    Told,
)
from controller.runtime import Runtime
from controller.stages.sequences.beats import StreamBeat, longest_gap_ns
from controller.stages.sequences.stage import SequenceStage
from controller.stages.sequences.tokens import Tokens

#: Streams that are open at a time, and bytes of what their next steps are asked with. A step of each is in the
#: scheduler's queues always: with more of them it was not tried.
STREAMS_MAX: Final = 20_000
INPUT_BYTES_MAX: Final = 1 << 30

_REMEDY: Final = "fewer streams at a time, or more workers"

S = TypeVar("S")


@dataclass(slots=True, eq=False)
class _Stream:
    """A request that has not had its last answer."""

    model: Entry
    plan: StreamPlan
    #: The step that is open, and what it is asked with, in the model's order.
    ask: Ask
    inputs: list[Buffer]
    sink: Sink
    #: The number that its client withdraws: the first step's.
    request_id: RequestId
    step_id: RequestId
    #: Steps that may still be asked.
    num_left: int
    next_ns: int
    #: What a model that generates has besides: the tokens, and how often they come.
    tokens: Tokens | None
    beat: StreamBeat | None
    #: When the request came, and the time for its first answer; how many steps that takes.
    arrival_ns: int
    first_ns: int
    num_before: int
    num_given: int = 0
    #: Rows that have said that a step was their last; None: no step was answered.
    done: NDArray[np.bool_] | None = None


class DrivenStage(Generic[S]):
    """Asks for each answer of requests that have several."""

    def __init__(
        self,
        inner: PortStage[S],
        runtime: Runtime,
        sequences: SequenceStage[Any],
        *,
        streams_max: int = STREAMS_MAX,
        input_bytes_max: int = INPUT_BYTES_MAX,
    ) -> None:
        """Begin with no requests. So many streams may be open, whose inputs and states have so many bytes at most.

        `sequences` knows whether there is time for a beat, and the beats that there are.
        """
        self._inner: PortStage[Any] = inner
        self._runtime = runtime
        self._sequences = sequences
        self._streams_max = streams_max
        self._input_bytes_max = input_bytes_max
        #: By the number of the open step, and by that which a client withdraws.
        self._steps: dict[RequestId, _Stream] = {}
        self._streams: dict[RequestId, _Stream] = {}
        #: Those that are refused in the next turn of the event loop.
        self._refused: dict[RequestId, asyncio.Handle] = {}
        self._num_bytes = 0

    def ask(self, subject: S, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        """Do what `PortStage` says."""
        plan = subject.stream if isinstance(subject, Entry) else None
        streaming = ask.streaming
        if not isinstance(subject, Entry) or plan is None or streaming is None:
            raise ProtocolError("found a stream of answers by what answers once")
        whole, tokens, beat = _first_inputs(subject, plan, ask.rows, inputs), None, None
        num_before, slo_ns = 1, ask.slo_ns
        if plan.generate is not None:
            tokens = _tokens(subject, plan, plan.generate, inputs[0], streaming)
            whole[plan.generate.tokens] = tokens.first
            num_before = 1 + tokens.num_prompt_left
            beat = StreamBeat(subject.model_id, streaming.next_ns, streaming.next_ns)
            ask = msgspec.structs.replace(ask, slo_ns=max(slo_ns // num_before, 1))
        refused = self._crowd(subject, plan, total_bytes(whole))
        if refused is None and beat is not None:
            refused = self._sequences.too_busy(beat, subject.name) or self._too_many(subject, beat)
        if refused is not None:
            return self._refuse(subject, ask, sink, refused)
        stream = _Stream(
            subject,
            plan,
            ask,
            whole,
            sink,
            NO_REQUEST,
            NO_REQUEST,
            num_left=min(streaming.max_steps, plan.max_steps) - 1,
            next_ns=streaming.next_ns,
            tokens=tokens,
            beat=beat,
            arrival_ns=ask.arrival_ns,
            first_ns=slo_ns,
            num_before=num_before,
        )
        stream.request_id = stream.step_id = self._inner.ask(subject, ask, [*whole], self)
        self._steps[stream.step_id] = self._streams[stream.request_id] = stream
        subject.num_streams += 1
        if beat is not None:
            self._sequences.others[beat] += 1
        self._num_bytes += total_bytes(whole)
        return stream.request_id

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Take what came of a step: tell its client, and ask the next."""
        stream = self._steps.pop(request_id, None)
        if stream is None:
            return
        if not isinstance(told, Answered):
            self._forget(stream)
            if isinstance(told, Refused) and stream.num_given:
                # Its figures are the last step's.
                plural = "" if stream.num_given == 1 else "s"
                words = f"after {stream.num_given} answer{plural} of its stream"
                told.detail = f"{told.detail}; {words}" if told.detail else words
                told.figures[ANSWERS] = stream.num_given
            stream.sink.told(stream.request_id, told, ())
            return
        # What is in workers' memory is free for others then.
        found = [bytes(tensor) for tensor in outputs]
        plan, tokens, specs = stream.plan, stream.tokens, stream.model.outputs
        # What failed in a batch of others that did not carries its reason, which its client is told.
        is_last = any(map(TensorSpec.failure, specs, found))
        if not is_last and (words := _misfit(stream, found)):
            self._forget(stream)
            stream.sink.told(stream.request_id, Failed(INTERNAL, words), ())
            return
        more = sum([len(found[out]) - len(stream.inputs[into]) for into, out in plan.feeds])
        if more > 0 and (crowd := self._too_much(more)) is not None:
            # Only text can grow.
            self._forget(stream)
            refused = Refused(crowd.refusal, crowd.figures, message=crowd.message)
            refused.figures[ANSWERS] = stream.num_given
            stream.sink.told(stream.request_id, refused, ())
            return
        shown: Sequence[Buffer] = [found[index] for index in plan.shown]
        if tokens is not None and plan.generate is not None:
            if tokens.left:
                self._ask_next(stream, found, tokens.left.pop())
                return
            token = tokens.choose(found[plan.generate.logits])
            shown, is_last = tokens.answer(token), token == plan.generate.end
        if not is_last:
            done = plan.done(specs, found)
            if stream.done is not None and done.shape != stream.done.shape:
                self._forget(stream)
                words = f"model {stream.model.name}: found {done.size} values of stream.final, expected {stream.done.size}"
                failed = Failed(INTERNAL, f"{words} as in the step before")
                stream.sink.told(stream.request_id, failed, ())
                return
            stream.done = done if stream.done is None else done | stream.done
            is_last = bool(stream.done.all())
        stream.num_given += 1
        told.more = not (is_last or stream.num_left == 0)
        if told.more:
            stream.num_left -= 1
            self._ask_next(stream, found, None if tokens is None else tokens.encode(token))
        else:
            self._forget(stream)
        stream.sink.told(stream.request_id, told, shown)

    def holds(self, request_id: RequestId) -> bool:
        """Whether a request is open here."""
        return request_id in self._streams or request_id in self._refused

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request: of a stream, nothing more is asked."""
        if (handle := self._refused.pop(request_id, None)) is not None:
            handle.cancel()
        stream = self._streams.get(request_id)
        if stream is not None:
            self._forget(stream)
            if self._steps.pop(stream.step_id, None) is not None:
                self._inner.withdraw(stream.step_id)

    def _ask_next(self, stream: _Stream, found: Sequence[bytes], token: bytes | None) -> None:
        for into, out in stream.plan.feeds:
            self._num_bytes += len(found[out]) - len(stream.inputs[into])
            stream.inputs[into] = found[out]
        if token is not None:
            assert stream.plan.generate is not None
            stream.inputs[stream.plan.generate.tokens] = token
        now_ns, slo_ns = self._runtime.clock(), stream.next_ns
        if not stream.num_given:
            # Steps of the prompt share the time of the first answer evenly.
            assert stream.tokens is not None
            num_done = stream.num_before - stream.tokens.num_prompt_left
            due_ns = stream.arrival_ns + stream.first_ns * num_done // stream.num_before
            slo_ns = max(due_ns - now_ns, 1)
        ask = stream.ask = msgspec.structs.replace(
            stream.ask,
            arrival_ns=now_ns,
            slo_ns=slo_ns,
            decide_within_ns=0,
            work_ahead_ns=0,
        )
        stream.step_id = self._inner.ask(stream.model, ask, [*stream.inputs], self)
        self._steps[stream.step_id] = stream

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.request_id]
        if (beat := stream.beat) is not None:
            others = self._sequences.others
            others[beat] -= 1
            if not others[beat]:
                del others[beat]
        stream.model.num_streams -= 1
        self._num_bytes -= total_bytes(stream.inputs)

    def _crowd(self, model: Entry, plan: StreamPlan, num_bytes: int) -> RefusedError | None:
        """Say of what there is too much for one more stream. Returns None if there is room."""
        most = self._streams_max if plan.max_open is None else plan.max_open
        for what, found, bound in (
            (f"streams of model {model.name}", model.num_streams + 1, most),
            ("streams", len(self._streams) + 1, self._streams_max),
        ):
            if found > bound:
                return _crowded(what, found, bound)
        return self._too_much(num_bytes)

    def _too_much(self, num_bytes: int) -> RefusedError | None:
        """Say that there is no room for so many more bytes of inputs. Returns None if there is."""
        found, bound = self._num_bytes + num_bytes, self._input_bytes_max
        return _crowded("bytes of streams' inputs", found, bound) if found > bound else None

    def _too_many(self, model: Entry, beat: StreamBeat) -> RefusedError | None:
        """Say that streams of a model would wait longer than a beat for each other. Returns None if they would not."""
        found = self._runtime.model_statistics(model.model_id)
        if found is None or not found.ready_on:
            return None  # The scheduler says so.
        number = model.num_streams + 1
        needed_ns = longest_gap_ns(found.exec_ns, -(-number // len(found.ready_on)))
        needed_ns += self._runtime.margin_ns(beat.slo_ns)
        if needed_ns <= beat.slo_ns:
            return None
        words = (
            f"model {model.name}: {number} streams wait {format_ns(needed_ns)} for each other, expected"
            f" {format_ns(beat.slo_ns)} at most (tpot_ms); come again when one has ended, or add workers"
        )
        figures = {"streams": number, "needed_ns": needed_ns, "slo_ns": beat.slo_ns}
        return RefusedError(Refusal.OVERLOADED, words, figures=figures)

    def _refuse(self, model: Entry, ask: Ask, sink: Sink, error: RefusedError) -> RequestId:
        """Refuse a stream before its first answer, in a later turn of the event loop."""
        refused = Refused(error.refusal, error.figures, message=error.message)
        self._runtime.refused_at_door(ask, model.name, refused, _REMEDY)
        request_id = self._runtime.new_number()
        loop = asyncio.get_running_loop()
        self._refused[request_id] = loop.call_soon(self._tell_refused, request_id, sink, refused)
        return request_id

    def _tell_refused(self, request_id: RequestId, sink: Sink, refused: Refused) -> None:
        del self._refused[request_id]
        sink.told(request_id, refused, ())


def _crowded(what: str, found: int, bound: int) -> RefusedError:
    words = f"found {found} {what}, expected {bound} at most; come again when one has ended"
    return RefusedError(Refusal.OVERLOADED, words, figures={"found": found, "bound": bound})


def _first_inputs(
    model: Entry, plan: StreamPlan, rows: int, inputs: Sequence[Buffer]
) -> list[Buffer]:
    """Put together what the first step is asked with."""
    whole: list[Buffer] = [b""] * len(model.inputs)
    if plan.generate is not None:
        inputs, given, seen = inputs[1:], plan.given[1:], plan.inputs[1:]
    else:
        given, seen = plan.given, plan.inputs
    for index, spec, tensor in zip(given, seen, inputs, strict=True):
        # Longer than the request is open, perhaps.
        whole[index] = bytes(tensor)
        if spec.vary is not None and spec.axis is not None:
            rows = spec.unpack(tensor)[0].row_shape[spec.axis]
    for pair in plan.state:
        spec = model.inputs[pair.input_index]
        whole[pair.input_index] = first_state(spec, pair.initial, rows)
    return whole


def _misfit(stream: _Stream, found: Sequence[bytes]) -> str:
    """Say that a step left a tensor of another size than the next one takes; empty: all fit."""
    for into, out in stream.plan.feeds:
        spec = stream.model.outputs[out]
        if spec.vary is None or spec.datatype == "BYTES":
            continue
        before, after = bytes(stream.inputs[into][: spec.header_bytes]), found[out]
        if not after.startswith(before):
            sized, _ = spec.unpack(after)
            return (
                f"model {stream.model.name}: output {spec.name!r} is an input of the next step: found shape"
                f" {list(sized.row_shape)}, which is not the one before"
            )
    return ""


def _tokens(
    model: Entry, plan: StreamPlan, generate: GeneratePlan, prompt: Buffer, said: Streaming
) -> Tokens:
    return Tokens(
        prompt,
        plan.inputs[0],
        plan.outputs[0],
        model.outputs[generate.logits],
        temperature=said.temperature,
        seed=said.seed,
    )
