"""Inference by the Open Inference Protocol, as Triton's and KServe's clients speak it.

Inference runs on raw bytes: tensors are cut out of the message and handed on as views, never parsed
or copied. A request's clock started when its bytes came, not when it is looked at: what waited longer
than its SLO is refused before its tensors are parsed, and an answer is judged as it is written.
Every method turns its errors into a status, so no message of a client can raise anything past it.

Who decides and answers is a `Backend`: the controller of this process, or one elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import grpc
from google.protobuf.message import Message

from clockwright.errors import (
    BadRequestError,
    Denial,
    DeniedError,
    NotAllowedError,
    Refusal,
    RefusedError,
    UnknownModelError,
    UnknownRegionError,
)
from clockwright.foreign import quote
from clockwright.units import NO_REQUEST, NS_PER_S, SLO_NS_MAX, ModelId, RequestId, format_ns
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import Buffer
from controller.access.caller import Caller
from controller.core.admission import way_back_of
from controller.front.admission.entrance import YOUNG_NS
from controller.front.admission.limits import AdmissionLimits
from controller.front.http.calls import Call, Directly, StreamForm
from controller.front.methods import INFERENCE, Method, bind
from controller.front.oip.classes import RISING
from controller.front.oip.explanation import explain
from controller.front.oip.json_form import JsonRequest
from controller.front.oip.protocol import (
    CheckedRequest,
    PeekedRequest,
    Servable,
    check_decision,
    check_texts,
    context_of,
    encode_empty_final,
    encode_response,
    encode_stream_error,
    final_mark,
    leave_work_ahead,
    parse_request,
    peek_request,
    read_request,
    stated_slo_ns,
    unpack_outputs,
    wrap_for_stream,
)
from controller.front.oip.refusals import NoAnswerError, error_of
from controller.front.oip.regions import Regions, RegionSpan
from controller.front.oip.statuses import ToldStatusError, told_error
from controller.front.remote.backend import Backend
from controller.front.services.early_refusals import EarlyRefusals
from controller.front.services.templates import CutRequest, Templates, cut_request
from controller.front.services.tracing import Trace, Tracing
from controller.port import STEP, Answered, Ask, Failed, Refused, Stale, Told
from controller.runtime import late_figures
from controller.selection.core.buckets import bucket, share_at

_NOTHING_PEEKED = (b"", PeekedRequest())
_SEQUENCE = "sequence_id"
# Clients' messages have some lengths; with more of them all are forgotten.
_PEEKED_MAX = 1024


class _Several:
    """How far a request with several answers is (`CheckedRequest.streaming`); others have none."""

    __slots__ = ("due_ns", "num_given", "since_ns")

    def __init__(self, since_ns: int, due_ns: int) -> None:
        #: When the answer before the next was given, or the request came; and when the next is due.
        self.since_ns = since_ns
        self.due_ns = due_ns
        self.num_given = 0

    def next(self, now_ns: int, slo_ns: int) -> None:
        """An answer is given, and the next is due so long after it."""
        self.num_given += 1
        self.since_ns, self.due_ns = now_ns, now_ns + slo_ns


class ServedRequest:
    """A request while it is being served: the sink of its answer, which ends its call."""

    __slots__ = (
        "_asked",
        "_call",
        "_data",
        "_name",
        "_num_bytes",
        "_over",
        "_request_id",
        "_servable",
        "_service",
        "_several",
        "_shared",
        "_shared_bytes",
        "draws_version",
        "trace",
    )

    def __init__(
        self, service: InferenceService, call: Call, data: Buffer | JsonRequest, num_bytes: int
    ) -> None:
        self._service = service
        self._call = call
        # Kept until the end: a front whose controller is gone begins again with the next.
        self._data = data
        self._num_bytes = num_bytes
        #: It names no version, and one was drawn for it.
        self._over = self.draws_version = False
        self._asked: CheckedRequest | None = None
        self._servable: Servable | None = None
        self._name = ""
        self._request_id = NO_REQUEST
        # Bytes of inputs that were fetched from clients' shared memory, and where outputs belong there.
        self._shared_bytes = 0
        self._shared: Sequence[RegionSpan | None] = ()
        #: Follows it where it is traced.
        self.trace: Trace | None = None

    def begin(self) -> None:
        """Begin, for the first time or afresh."""
        self._service.door.shrink(self._shared_bytes)
        self._shared_bytes = 0
        try:
            self._service.start(self, self._call, self._data)
        except Exception as error:
            if isinstance(error, DeniedError):
                self._service.backend.denied(error.denial)
            self._fail(error)

    def shared(self, num_bytes: int, outputs: Sequence[RegionSpan | None]) -> None:
        """So many bytes of inputs were fetched from clients' shared memory, and outputs may belong there."""
        self._shared_bytes, self._shared = num_bytes, outputs

    def ask(self, asked: CheckedRequest, described: Any) -> None:  # noqa: ANN401  it is the backend's
        """Ask what was found right.

        Raises DeniedError if it names a tenant that is not its caller's; BadRequestError if it cannot be decided within
        the time that it names, or leaves no time for what is ahead.
        """
        call = self._call
        tenant = call.caller.tenant
        if tenant is not None and asked.tenant != tenant:
            if asked.tenant:
                raise _not_his_tenant(asked.tenant, tenant)
            asked.tenant = tenant
        if asked.work_ahead_ns or asked.decide_within_ns or asked.weight < 1.0:
            self._service.refine(asked, described.servable)
        servable: Servable = described.servable
        servable = servable if asked.step is None else servable.stepped(asked.step)
        self._asked, self._servable, self._name = asked, servable, servable.name
        ask = Ask(
            described.number,
            asked.rows,
            call.arrival_ns,
            asked.slo_ns,
            asked.tenant,
            asked.request_id,
            asked.context,
            call.caller.owner if servable.has_contexts or asked.step is not None else "",
            asked.explain,
            self.trace is not None,
            asked.decide_within_ns,
            asked.weight,
            asked.work_ahead_ns,
            step=asked.step,
        )
        if asked.streaming is not None:
            self._check_several(asked, described.servable)
            ask.streaming = asked.streaming
        request_id = self._service.backend.ask(described, ask, asked.inputs, self)
        if not self._over:
            self._request_id = request_id
            call.when_gone = self.withdraw

    def _check_several(self, asked: CheckedRequest, servable: Servable) -> None:
        call = self._call
        if not call.takes_several:
            # Triton's words, for who looks for them.
            raise BadRequestError(
                f"ModelInfer RPC doesn't support models with decoupled transaction policy: model"
                f" {quote(servable.name)} answers up to {servable.max_steps} times; ask it with Client.stream, over"
                " ModelStreamInfer, or in REST with POST .../generate_stream or .../generate"
            )
        if asked.shared_outputs:
            raise BadRequestError(
                f"model {quote(servable.name)}: found outputs that belong in shared memory, expected none, where one"
                " answer would overwrite the other"
            )
        self._several = _Several(call.arrival_ns, call.arrival_ns + asked.slo_ns)

    def withdraw(self) -> None:
        """The client has given the request up."""
        if not self._over:
            self._end()
            self._service.backend.withdraw(self._request_id)
            if self.trace is not None:
                self.trace.gone(self._asked)

    def done(self) -> bool:
        """Whether the client has stopped waiting."""
        return self._over

    def is_step(self) -> bool:
        """Whether it was asked as a step of a sequence."""
        return self._asked is not None and self._asked.step is not None

    @property
    def due_ns(self) -> int:
        """When the next of several answers is due."""
        return self._several.due_ns

    @property
    def _num_given(self) -> int:
        several = getattr(self, "_several", None)
        return 0 if several is None else several.num_given

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Answer with the outputs of a model or an application, or with the reason why they are missing."""
        if self._over:
            return
        if isinstance(told, Answered):
            self._answer(told, outputs)
        elif not self._num_given and (
            isinstance(told, Stale) or (self.draws_version and _is_unknown(told))
        ):
            # A version that was drawn may have gone before this front hears of it.
            self.begin()
        else:
            try:
                error = self._error_of(told)
            except Exception as fault:
                # No other code would end the call.
                error = fault
            self._fail(error)

    def _error_of(self, told: Refused | Failed | Stale) -> Exception:
        if isinstance(told, Stale):
            words = f"after {self._num_given} answers of {quote(self._name)} the controller was lost, and with it the"
            return RefusedError(Refusal.NO_WORKER, f"{words} state; ask again from the beginning")
        if not isinstance(told, Refused):
            return told_error(told)
        # It is not read yet where a front has waited for the model's description in vain.
        asked, data = self._asked, self._data
        if (
            asked is not None
            and self.trace is None
            and not isinstance(data, JsonRequest)
            and not self._num_given
        ):
            service = self._service
            kept = service.early_refusals.refused(data, asked, told, service.backend.clock())
            if kept is not None:
                return kept
        return error_of(told, self._name)

    def _answer(self, told: Answered, outputs: Sequence[Buffer]) -> None:
        data, asked = self._data, self._asked
        assert asked is not None
        call = self._call
        # An application explains every answer: feedback needs the query id.
        parameters = told.parameters
        try:
            if asked.explain and told.course is not None:
                explained = explain(told.course, slo_ns=asked.slo_ns, slo_source=asked.slo_source)
                parameters = {**explained, **(parameters or {})}
            if not asked.answer_header:
                assert self._servable is not None
                outputs = unpack_outputs(asked, self._servable, outputs)
            if self._shared:
                for index, stretch in zip(asked.outputs, self._shared, strict=False):
                    if stretch is not None:
                        stretch.write(outputs[index])
            if isinstance(data, JsonRequest):
                message: Sequence[Buffer] = ()
                assert self._servable is not None
                data.answer = asked, self._servable, outputs, parameters or {}
            else:
                message = encode_response(asked, outputs, parameters=parameters)
        except Exception as fault:
            # No other code would end the call.
            self.withdraw()
            call.fail(fault)
            return
        if asked.streaming is not None:
            self._give(told, asked, message)
            return
        self._end()
        due_ns = call.arrival_ns + asked.slo_ns
        late = functools.partial(_late, self._name, asked.slo_ns, due_ns, told)
        call.answer(message, due_ns - way_back_of(asked.slo_ns), late)
        if self.trace is not None:
            self.trace.answered(told, asked)

    def _give(self, told: Answered, asked: CheckedRequest, message: Sequence[Buffer]) -> None:
        """Give one of several answers, which is due so long after the one before."""
        call, several, servable = self._call, self._several, self._servable
        assert asked.streaming is not None
        assert servable is not None
        if servable.varies:
            asked.answer_header = b""  # The next may have other sizes.
        slo_ns = several.due_ns - several.since_ns
        late = functools.partial(_late, self._name, slo_ns, several.due_ns, told)
        latest_ns = several.due_ns - way_back_of(slo_ns)
        several.next(self._service.backend.clock(), asked.streaming.next_ns)
        is_last = not (told.more or asked.empty_final)
        if message:
            message = (*message, final_mark(is_last=is_last))
        if told.more:
            call.give(message, latest_ns, late)
            return
        self._end()
        if not is_last:
            call.give(message, latest_ns, late)
            message, latest_ns = (encode_empty_final(asked, servable),), latest_ns + SLO_NS_MAX
        call.answer(message, latest_ns, late)
        if self.trace is not None:
            self.trace.answered(told, asked)

    def _fail(self, error: Exception) -> None:
        self._end()
        if _is_clients_fault(error):
            self._service.backend.bad_request()
        if self.trace is not None:
            self.trace.failed(error, self._asked)
        self._call.fail(error)

    def _end(self) -> None:
        self._over = True
        # Else the two would keep each other, and the request's tensors, until the collector comes by.
        self._call.when_gone = None
        self._data = b""
        self._service.door.leave(self._num_bytes + self._shared_bytes)


def _is_clients_fault(error: Exception) -> bool:
    """Whether a request can never be served: it is malformed, or names something that does not exist."""
    if isinstance(error, ToldStatusError):
        return error.status.code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
        )
    return isinstance(error, BadRequestError | UnknownModelError | UnknownRegionError)


def _is_unknown(told: Told) -> bool:
    return isinstance(told, Failed) and told.code == grpc.StatusCode.NOT_FOUND.value[0]


def _late(name: str, slo_ns: int, due_ns: int, told: Answered, now_ns: int) -> Exception:
    """Make the error of an answer that was ready, but too late. A step of a sequence counts all the same."""
    # No method: a call that kept its request would keep the answer's memory until the next collection of garbage.
    arrival_ns = due_ns - slo_ns
    latency_ns = now_ns - arrival_ns + way_back_of(slo_ns)
    figures = late_figures(slo_ns, latency_ns, told.expected_departure_ns - arrival_ns)
    if told.parameters is not None and STEP in told.parameters:
        figures[STEP] = int(told.parameters[STEP])
    return NoAnswerError(Refusal.LATE, ModelId(name), figures)


class InferenceService:
    """Answers clients: checks requests, asks a controller, and returns the outcome."""

    def __init__(
        self,
        backend: Backend[Any],
        *,
        door: AdmissionLimits,
        regions: Regions | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Serve for a controller; without regions clients may have no shared memory, without tracing none are traced."""
        #: The controller, and what bounds what is open at once.
        self.backend = backend
        self.door = door
        self._tracing = tracing
        self._regions = regions
        #: Draws the version of requests without a context, where the traffic has several; and whose class rises.
        self._random: Callable[[], float] = Random().random
        self._templates = Templates()
        #: Finds requests that the scheduler would refuse.
        self.early_refusals = EarlyRefusals(backend, self._templates)
        # What was found at the beginning of messages, by length, of the last that was looked at; and that beginning.
        self._peeked: dict[int, tuple[bytes, PeekedRequest]] = {}

    def handlers(self) -> dict[Method, Any]:
        """What answers the methods that are this service's."""
        return bind(INFERENCE, self)

    @property
    def model_infer(self) -> Directly:
        """Answers a call with one request."""
        return Directly(
            self.infer,
            slo_ns=self.slo_ns,
            malformed=self.backend.bad_request,
            early_refusals=self.early_refusals if self._tracing is None else None,
        )

    @property
    def model_stream_infer(self) -> Directly:
        """Answers a call with a stream of requests."""
        form = StreamForm(wrap_for_stream, _error_in_stream)
        return Directly(self.infer, form, self.slo_ns)

    def infer(self, call: Call, data: Buffer | JsonRequest) -> None:
        """Serve a request; its call is answered sooner or later, and nothing is raised.

        Args:
            call: knows when the request came, and takes what there is to say.
            data: a serialised ModelInferRequest; or what REST has read, which is given its answer before the call is.
        """
        num_bytes = len(data)
        try:
            self.door.enter(num_bytes)
        except RefusedError as error:
            call.fail(error)
            return
        served = ServedRequest(self, call, data, num_bytes)
        if self._tracing is not None:
            served.trace = self._tracing.begin(call)
        served.begin()

    def start(self, served: ServedRequest, call: Call, data: Buffer | JsonRequest) -> None:
        """Check one request and have it served.

        Raises RefusedError if it has waited for too long, or no worker can serve it; UnknownModelError if there is no
        such model or version; BadRequestError if the request does not fit its model; DeniedError if it names a tenant
        that is not its caller's.
        """
        backend = self.backend
        timeout_ns = call.timeout_ns
        rpc_remaining_s = None if timeout_ns is None else timeout_ns / NS_PER_S
        templates, generation = self._templates, backend.generation
        version, default_slo_ns = "", backend.default_slo_ns
        cut: CutRequest | None = None
        known: tuple[CheckedRequest, Any] | None = None
        if isinstance(data, JsonRequest):
            self._check_age(data, call)
            if data.key is not None:
                cut = CutRequest(data.key, data.message.id.encode(), None, data.raw)
        else:
            known = templates.known(
                data,
                generation=generation,
                rpc_remaining_s=rpc_remaining_s,
                default_slo_ns=default_slo_ns,
            )
            cut = cut_request(data) if known is None else None
        if cut is not None:
            template = templates.find(cut, generation=generation)
            if template is not None and template.described.servable.traffic:
                user = cut.context or _user_of_sequence(cut.sequence or b"")
                if isinstance(data, JsonRequest):
                    user = _user_of(data.message)
                version = self._draw(template.described.servable, user)
                template = templates.find(cut.of(version), generation=generation)
            if template is not None:
                filled = template.fill(
                    cut, rpc_remaining_s=rpc_remaining_s, default_slo_ns=default_slo_ns
                )
                known = None if filled is None else (filled, template.described)
        if known is not None:
            served.ask(*known)
            return
        parsed = data.parsed() if isinstance(data, JsonRequest) else parse_request(data)
        message = parsed.message
        call.when_gone = served.withdraw
        until = functools.partial(self._until_ns, call, message)
        described = backend.describe(served, message.model_name, message.model_version, until)
        if described is not None and described.servable.traffic:
            served.draws_version = True
            if not version:
                version = self._draw(described.servable, _user_of(message))
                if context_of(message) and cut is not None and cut.context is None:
                    cut = None  # The next request's version depends on its context, which is not cut out.
                elif cut is not None:
                    templates.share_out(cut, described)
                    cut.of(version)
            described = backend.describe(served, message.model_name, version, until)
        if described is None:
            return
        servable = described.servable
        if isinstance(data, JsonRequest):
            parsed = data.parsed(servable)
        asked = read_request(
            parsed,
            servable,
            rpc_remaining_s=rpc_remaining_s,
            default_slo_ns=default_slo_ns,
        )
        if asked.shared_inputs or asked.shared_outputs:
            # What lies in shared memory is looked up for each request.
            owner = call.caller.owner
            outputs = self._find_shared(asked, owner)
            served.shared(self._read_shared(asked, servable, owner), outputs)
        elif cut is not None and not asked.classes and asked.streaming is None:
            templates.add(cut, parsed, described, asked)
        served.ask(asked, described)

    def _draw(self, servable: Servable, user: bytes) -> str:
        """Draw the version of a request that names none; the same user gets the same at every front."""
        context = user.decode(errors="replace")
        position = bucket(servable.name, context) if context else self._random()
        return share_at(position, servable.traffic)

    def refine(self, asked: CheckedRequest, servable: Servable) -> None:
        """Do for a request what only those need that say more than their SLO.

        Raises:
            BadRequestError: it cannot be decided within the time that it names, or leaves no time for what is ahead.
        """
        if asked.work_ahead_ns:
            leave_work_ahead(asked)
        if asked.decide_within_ns:
            check_decision(asked, servable)
        if asked.weight < 1.0 and servable.levels is not None and self._random() < RISING:
            asked.weight = 1.0

    def _until_ns(self, call: Call, message: pb.ModelInferRequest) -> int:
        """Until when a request may wait for its model to be known."""
        if (stated := stated_slo_ns(message)) is not None:
            return call.arrival_ns + stated[0]
        if (timeout_ns := call.timeout_ns) is not None:
            return call.arrival_ns + timeout_ns
        slo_ns = self.backend.slo_ns(message.model_name)
        return call.arrival_ns + (slo_ns if slo_ns is not None else self.backend.default_slo_ns)

    def _find_shared(self, asked: CheckedRequest, owner: str) -> Sequence[RegionSpan | None]:
        """Find where outputs belong in clients' shared memory.

        Raises NotAllowedError if clients may have none; UnknownRegionError if there is no such region; BadRequestError
        if the region is smaller.
        """
        regions = self._shared_memory()
        return [
            None if part is None else regions.find(part, owner=owner)
            for part in asked.shared_outputs
        ]

    def _read_shared(self, asked: CheckedRequest, servable: Servable, owner: str) -> int:
        """Fetch inputs from clients' shared memory; returns how many bytes that are.

        Raises RefusedError if there is no room for them; UnknownRegionError if there is no such region; BadRequestError
        if the region is smaller, or holds no such tensor.
        """
        regions = self._shared_memory()
        num_bytes = sum(part.num_bytes for _, part in asked.shared_inputs)
        if num_bytes > regions.request_bytes_max:
            raise BadRequestError(
                f"found {num_bytes} bytes of inputs in shared memory, expected"
                f" {regions.request_bytes_max} at most, as of a message (--max-message-mib)"
            )
        self.door.grow(num_bytes)
        try:
            for index, part in asked.shared_inputs:
                found = regions.read(part, owner=owner)
                header = asked.inputs[index]
                asked.inputs[index] = tensor = b"".join((header, found)) if header else found
                if (spec := servable.inputs[index]).datatype == "BYTES":
                    check_texts(spec, tensor, asked.rows, servable.largest_batch)
        except BaseException:
            self.door.shrink(num_bytes)
            raise
        return num_bytes

    def _shared_memory(self) -> Regions:
        if self._regions is None:
            raise NotAllowedError(
                "clients may have no shared memory here: the server was started without --allow-client-shm"
            )
        return self._regions

    def slo_ns(self, data: Buffer, timeout_ns: int | None, begin: int, end: int) -> tuple[int, int]:
        """Find the SLO of a serialised request without a look at its tensors, and how many bytes of it were looked at.

        It lies in `data` from `begin` to `end`, well-formed or not; the time limit is its call's.
        """
        num_bytes = end - begin
        start, peeked = self._peeked.get(num_bytes, _NOTHING_PEEKED)
        if not start or data[begin : begin + len(start)] != start:
            message = data[begin:end]
            peeked = peek_request(message)
            if len(self._peeked) >= _PEEKED_MAX:
                self._peeked.clear()
            self._peeked[num_bytes] = bytes(message[: peeked.num_bytes]), peeked
        return self._slo_ns(peeked, timeout_ns), peeked.num_bytes

    def _slo_ns(self, peeked: PeekedRequest, timeout_ns: int | None) -> int:
        if peeked.slo_ns is not None:
            return peeked.slo_ns
        if timeout_ns is not None:
            return timeout_ns
        slo_ns = self.backend.slo_ns(peeked.model_name)
        return self.backend.default_slo_ns if slo_ns is None else slo_ns

    def _check_age(self, data: JsonRequest, call: Call) -> None:
        """Refuse a request of REST that was past its SLO before its tensors were looked at."""
        waited_ns = self.backend.clock() - call.arrival_ns
        if waited_ns <= YOUNG_NS:
            return
        peeked = data.peek()
        slo_ns = self._slo_ns(peeked, call.timeout_ns)
        if waited_ns > slo_ns > YOUNG_NS:
            self.backend.refused_at_door(Refusal.LATE)
            raise RefusedError(
                Refusal.LATE,
                f"model {quote(peeked.model_name)}: waited {format_ns(waited_ns)} before the controller"
                f" could look at it > SLO {format_ns(slo_ns)}",
                figures={"slo_ns": slo_ns, "waited_ns": waited_ns},
            )

    # --- clients' shared memory ---------------------------------------------------------------

    async def system_shared_memory_register(
        self, request: pb.SystemSharedMemoryRegisterRequest, caller: Caller
    ) -> Message:
        """Register a region of a client's memory."""
        self._shared_memory().register(
            request.name,
            request.key,
            request.offset,
            request.byte_size,
            owner=caller.owner,
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, caller: Caller
    ) -> Message:
        """Forget one of the client's regions, or all."""
        self._shared_memory().unregister(request.name, owner=caller.owner)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def system_shared_memory_status(
        self, request: pb.SystemSharedMemoryStatusRequest, caller: Caller
    ) -> Message:
        """List one of the client's regions, or all."""
        status = pb.SystemSharedMemoryStatusResponse()
        for region in self._shared_memory().list(request.name, owner=caller.owner):
            told = status.regions[region.name]
            told.name, told.key = region.name, region.key
            told.offset, told.byte_size = region.offset, region.num_bytes
        return status

    async def cuda_shared_memory_unregister(
        self, _: pb.CudaSharedMemoryUnregisterRequest, _caller: Caller
    ) -> Message:
        """Forget regions of a kind that there is not."""
        return pb.CudaSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(
        self, _: pb.CudaSharedMemoryStatusRequest, _caller: Caller
    ) -> Message:
        """List regions of a kind that there is not."""
        return pb.CudaSharedMemoryStatusResponse()


def _not_his_tenant(found: str, tenant: str) -> DeniedError:
    expected = f"{quote(tenant)}, which is the caller's, or none" if tenant else "none"
    text = f"parameter tenant: found {quote(found)}, expected {expected}"
    return DeniedError(Denial.NOT_ALLOWED, text)


def _error_in_stream(text: str, status: str, request: Buffer) -> bytes:
    """Make the message of a stream that answers a request with an error's text."""
    return encode_stream_error(text, status, request_id=peek_request(request).request_id)


def _user_of(message: pb.ModelInferRequest) -> bytes:
    """Whose requests get the same version: those of a context, or the steps of a sequence; empty: each is drawn alone."""
    context = context_of(message).encode()
    if context or _SEQUENCE not in message.parameters:
        return context
    return _user_of_sequence(message.parameters[_SEQUENCE].SerializeToString())


def _user_of_sequence(parameter: bytes) -> bytes:
    """Find what stands for a sequence, of its serialised id; empty: the id is 0 or empty, which names no sequence."""
    # Without the field's tag: an int64 and a uint64 of one value are one sequence.
    return parameter[1:] if parameter[1:] != b"\0" else b""
