"""Clients that ask, and write down the outcome."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import grpc

from clockwright.units import NS_PER_MS
from clockwright.v1 import control_pb2
from clockwright.v1 import inference_pb2 as pb
from experiments.faults.device import ModelSpec
from experiments.faults.keys import HOLDERS, UNWELCOME
from experiments.faults.plant import Plant
from experiments.faults.rpc import EOF, Channel, WorldCall
from experiments.faults.world import Host, WorldProcess

INFER = "/inference.GRPCInferenceService/ModelInfer"
FEEDBACK = "/clockwright.v1.ControlService/Feedback"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_FLOAT_BYTES = 4
# A client sends again, or a second time, within so long, and does it so often.
_AGAIN_NS = 20 * NS_PER_MS
_SENDINGS_MAX = 3
# Stands for a model that was never there.
_UNKNOWN = ModelSpec("", 2, 1, 1, 1, 1)


@dataclass(eq=False)
class AskedRequest:
    """A request, and what its client knows of it."""

    number: int
    model: str
    slo_ns: int
    rows: int
    front: str
    #: Rows of input, and what each version of the model answers.
    content: bytes
    #: What the request says that it is, and all that it says. Who sends it again says the same.
    id: str = ""
    message: bytes = b""
    sending: int = 1
    begun_ns: int = 0
    outcome: str = ""
    #: How often it ended. More than once is one answer too many.
    num_ends: int = 0
    cancelled: bool = False
    #: Whose key is shown; whether that allows it, None: keys are not checked.
    caller: str = ""
    is_welcome: bool | None = None
    #: Who says afterwards what happened to the answer of an application.
    judges: Sequence[str] = ()
    #: In a stream: where the request begins there; 0: it had to wait for room, or has a call of its own.
    position: int = 0


@dataclass(eq=False)
class _Stream:
    """A stream of requests, and those that are open."""

    call: WorldCall
    open: dict[str, AskedRequest] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)


@dataclass
class WorldClients:
    """A process of clients, which nothing is done to but by the network."""

    plant: Plant
    host: Host
    process: WorldProcess = field(init=False)
    #: What each model is, or was, or may become.
    versions: dict[str, list[ModelSpec]] = field(default_factory=dict)
    asked: list[AskedRequest] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    #: Since the last look.
    just_ended: list[AskedRequest] = field(default_factory=list)
    #: How often something was learned of each answer of an application, and how often that is unknown.
    learned: Counter[str] = field(default_factory=Counter)
    in_doubt: int = 0
    #: Until then all is sent twice, and what a broken connection cost is sent again.
    insist_until_ns: int = 0
    _query_ids: set[str] = field(default_factory=set)
    _channels: dict[str, Channel] = field(default_factory=dict)
    _streams: dict[tuple[str, str], _Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = {name: [spec] for name, spec in self.plant.specs.items()}
        self.process = WorldProcess(self.plant.world, self.host, "clients")

        async def main() -> None:
            await asyncio.Event().wait()

        self.process.start(main)

    def ask(
        self,
        model: str,
        *,
        front: str,
        slo_ns: int,
        rows: int = 1,
        tenant: str = "",
        cancel_after_ns: int | None = None,
        deadline_s: float | None = None,
        caller: str = "",
        by_stream: bool = False,
        context: str = "",
        judges: Sequence[str] = (),
    ) -> None:
        """Have a client ask, soon.

        Args:
            model: or application.
            front: by which front.
            slo_ns: the SLO.
            rows: of input.
            tenant: whose the request says that it is.
            cancel_after_ns: the client loses interest.
            deadline_s: of the call.
            caller: whose key is shown, where there are keys.
            by_stream: together with others.
            context: for whom an application answers.
            judges: who says afterwards what happened to that.
        """
        world = self.plant.world
        spec = self.versions[model][-1] if model in self.versions else _UNKNOWN
        number = len(self.asked) + 1
        content = world.random.randbytes(8) * (spec.num_inputs * _FLOAT_BYTES * rows // 8)
        asked = AskedRequest(number, model, slo_ns, rows, front, content)
        asked.caller, asked.judges, asked.id = caller, judges, str(number)
        self.asked.append(asked)
        self.num_open += 1
        request = pb.ModelInferRequest(model_name=model, id=asked.id)
        if self.plant.keys is not None:
            asked.is_welcome = caller in HOLDERS and caller not in UNWELCOME
            whose = HOLDERS[caller][1] if asked.is_welcome else ""
            asked.is_welcome = asked.is_welcome and tenant in ("", whose)
            if caller in self.plant.keys.revoked:
                asked.is_welcome = None
        request.parameters["slo_ms"].int64_param = slo_ns // NS_PER_MS
        if context:
            request.parameters["context"].string_param = context
        if tenant:
            request.parameters["tenant"].string_param = tenant
        tensor = request.inputs.add(name="x", datatype="FP32")
        tensor.shape.extend((rows, spec.num_inputs))
        request.raw_input_contents.append(content)
        asked.message = request.SerializeToString()

        def begin() -> None:
            work = self._ask_in_stream(asked) if by_stream else self._ask(asked, deadline_s)
            task = self.process.loop.create_task(work)
            if cancel_after_ns is not None:
                asked.cancelled = True
                self.process.loop.call_later(cancel_after_ns / 1e9, task.cancel)

        self.process.loop.call_soon(begin)
        self._insist(asked)

    def _insist(self, asked: AskedRequest) -> None:
        """Send a request again, with the id that it has, by whichever front, if clients do so now."""
        world = self.plant.world
        if world.now_ns >= self.insist_until_ns or asked.sending == _SENDINGS_MAX:
            return
        front = world.random.choice(sorted(self.plant.fronts))
        again = replace(asked, number=len(self.asked) + 1, front=front, sending=asked.sending + 1)
        again.outcome, again.num_ends, again.cancelled, again.position = "", 0, False, 0
        self.asked.append(again)
        self.num_open += 1
        world.say(f"request {again.number} is request {asked.number} that is sent again")
        loop = self.process.loop
        loop.call_later(
            world.below(_AGAIN_NS) / 1e9, lambda: loop.create_task(self._ask(again, None))
        )

    async def _ask(self, asked: AskedRequest, deadline_s: float | None) -> None:
        world = self.plant.world
        asked.begun_ns = world.now_ns
        call: WorldCall | None = None
        try:
            channel = self._channel(asked.front)
            metadata = self.plant.shown_by(asked.caller).metadata
            call = channel.stream_stream(INFER)(None, timeout=deadline_s, metadata=metadata)
            answers: list[bytes] = []
            try:
                await call.write(asked.message)
                await call.done_writing()
            except asyncio.InvalidStateError:
                pass
            while (answer := await call.read()) is not EOF:
                answers.append(answer)
            self._end(asked, "answered")
            if len(answers) == 1:
                response = pb.ModelInferResponse.FromString(answers[0])
                self._judge(asked, call, response, call.came_ns, call.ended_ns)
            else:
                world.fail(f"request {asked.number} got {len(answers)} answers")
        except grpc.aio.AioRpcError as error:
            reason = error.code().name
            details = error.details() or ""
            self._end(asked, f"{reason} {details.split(' ', 1)[0].rstrip(':')}", details)
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._insist(asked)
        except asyncio.CancelledError:
            if call is not None:
                call.cancel()
            self._end(asked, "cancelled")

    async def _tell(self, asked: AskedRequest, query_id: str, judge: str) -> None:
        """Say what happened to an answer."""
        world = self.plant.world
        item = control_pb2.FeedbackItem(query_id=query_id, reward=asked.number % 2)
        try:
            call = self._channel(asked.front).unary_unary(
                FEEDBACK,
                control_pb2.FeedbackRequest.SerializeToString,
                control_pb2.FeedbackResponse.FromString,
            )
            request = control_pb2.FeedbackRequest(items=[item])
            said = await call(request, metadata=self.plant.shown_by(judge).metadata)
            status = said.outcomes[0].status
            self.learned[query_id] += status == "APPLIED"
            if self.learned[query_id] > 1:
                world.fail(f"twice something was learned of request {asked.number}")
            if self.plant.keys is not None and judge != asked.caller and status != "UNKNOWN":
                world.fail(f"{judge} judges the answer to {asked.caller}: {status}")
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            self.in_doubt += 1
            if world.now_ns < self.insist_until_ns:
                status += ", and is told again"
                self.num_open += 1
                loop = self.process.loop
                loop.call_later(
                    world.below(_AGAIN_NS) / 1e9,
                    lambda: loop.create_task(self._tell(asked, query_id, judge)),
                )
        finally:
            self.num_open -= 1
        world.say(f"{judge or 'somebody'} judges the answer to request {asked.number}: {status}")

    # --- streams --------------------------------------------------------------------------------

    async def _ask_in_stream(self, asked: AskedRequest) -> None:
        caller = asked.caller
        asked.begun_ns = self.plant.world.now_ns
        stream = self._streams.get((asked.front, caller))
        if stream is None:
            metadata = self.plant.shown_by(caller).metadata
            call = self._channel(asked.front).stream_stream(STREAM_INFER)(None, metadata=metadata)
            stream = self._streams[asked.front, caller] = _Stream(call)
            self.process.loop.create_task(self._read_stream(stream, asked.front, caller))
        stream.open[str(asked.number)] = asked
        asked.position = stream.call.next_position
        with suppress(asyncio.InvalidStateError):  # Its reader says why.
            await stream.call.write(asked.message)

    async def _read_stream(self, stream: _Stream, front: str, caller: str) -> None:
        world, call = self.plant.world, stream.call
        reason = "UNAVAILABLE the stream ended"
        try:
            while (data := await call.read()) is not EOF:
                answer = pb.ModelStreamInferResponse.FromString(data)
                name = answer.infer_response.id
                asked = stream.open.pop(name, None)
                if asked is None:
                    again = " again" if name in stream.answered else ""
                    world.fail(f"a stream got the answer of {name!r}{again}")
                    continue
                stream.answered.add(name)
                if answer.error_message:
                    words = answer.error_message
                    self._end(asked, f"in a stream {words.split(' ', 1)[0].rstrip(':')}", words)
                else:
                    self._end(asked, "answered")
                    came_ns = call.arrived_ns(asked.position) if asked.position else 0
                    response = answer.infer_response
                    self._judge(asked, call, response, came_ns, call.answer_sent_ns)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name} {error.details()}"
        del self._streams[front, caller]
        for asked in stream.open.values():
            self._end(asked, f"{reason.split(' ', 1)[0]} in a stream", reason)
            if reason.startswith("UNAVAILABLE"):
                self._insist(asked)

    def _channel(self, front: str) -> Channel:
        channel = self._channels.get(front)
        if channel is None or channel.is_broken:
            channel = self._channels[front] = Channel(self.plant.front_address(front))
        return channel

    def _end(self, asked: AskedRequest, outcome: str, details: str = "") -> None:
        world = self.plant.world
        asked.outcome = outcome
        asked.num_ends += 1
        self.num_open -= 1
        self.just_ended.append(asked)
        self.outcomes[outcome] += 1
        world.say(f"request {asked.number} to {asked.model}: {outcome} {details[:100]}")
        is_denied = outcome.startswith(("UNAUTHENTICATED", "PERMISSION_DENIED"))
        if asked.is_welcome is False and outcome == "answered":
            world.fail(f"request {asked.number} was answered, and who asked may not")
        keys = self.plant.keys
        if asked.is_welcome and is_denied and keys is not None and asked.caller not in keys.revoked:
            world.fail(f"request {asked.number} was denied, and who asked may: {details}")

    def _judge(
        self,
        asked: AskedRequest,
        call: WorldCall,
        response: pb.ModelInferResponse,
        came_ns: int,
        ended_ns: int,
    ) -> None:
        """Look whether an answer is right, and in time as it left."""
        world = self.plant.world
        if response.id != asked.id:
            world.fail(f"request {asked.number} got the answer of {response.id}")
        if response.raw_output_contents[0] not in self._right(asked):
            world.fail(f"request {asked.number} to {asked.model} got a wrong answer")
        if query_id := response.parameters["query_id"].string_param:
            if query_id in self._query_ids:
                world.fail(f"two answers of {asked.model} have the id {query_id}")
            self._query_ids.add(query_id)
            times = 2 if world.now_ns < self.insist_until_ns else 1
            for judge in [*asked.judges] * times:
                self.num_open += 1
                self.process.loop.create_task(self._tell(asked, query_id, judge))
        took_ns = ended_ns - asked.begun_ns
        # What the client's own network holds up is late by no fault of the server.
        if came_ns == 0 or call.was_held_up(came_ns):
            return
        if ended_ns - came_ns > asked.slo_ns + asked.slo_ns // 1000:
            world.fail(
                f"request {asked.number} was answered as a success {took_ns / 1e6:.3f} ms after it was"
                f" sent, and {(ended_ns - came_ns) / 1e6:.3f} ms after it came, of"
                f" {asked.slo_ns / 1e6:.0f} ms"
            )

    def _right(self, asked: AskedRequest) -> list[bytes]:
        row_bytes = len(asked.content) // asked.rows
        rows = [
            asked.content[begin : begin + row_bytes]
            for begin in range(0, len(asked.content), row_bytes)
        ]
        return [b"".join(map(spec.answer, rows)) for spec in self.versions[asked.model]]
