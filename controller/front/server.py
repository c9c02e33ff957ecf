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
from dataclasses import replace

import grpc
from google.protobuf.message import Message

from clockwright.bulk import Buffer
from clockwright.errors import (
    BadRequestError,
    Denial,
    DeniedError,
    NotAllowedError,
    Refusal,
    RefusedError,
)
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, format_ns
from clockwright.v1 import inference_pb2 as pb
from controller.access.caller import CALLER
from controller.core.admission import way_back_of
from controller.front.backend import Answerer, Backend, ToldAnswer
from controller.front.calls import Call
from controller.front.door import Door
from controller.front.explanation import explain
from controller.front.http2_server import Http2Server, StreamForm
from controller.front.methods import unary
from controller.front.oip import (
    CheckedRequest,
    encode_response,
    encode_stream_error,
    parse_request,
    peek_request,
    quote,
    read_request,
    stated_slo_ns,
    wrap_for_stream,
)
from controller.front.regions import Regions, RegionSpan
from controller.front.rest import RestApp
from controller.front.templates import CutRequest, Templates, cut_request
from controller.front.tracing import Trace, Tracing
from controller.runtime import Answer, late_error
from controller.selection.queries import Answered

SERVICE = "inference.GRPCInferenceService"

# A request that has waited for less is parsed and left to the scheduler.
_PEEK_AFTER_NS = 2 * NS_PER_MS


class _Served:
    """A request while it is being served. It waits for its answer, and ends its call."""

    __slots__ = (
        "_answerer",
        "_asked",
        "_backend",
        "_begin",
        "_call",
        "_data",
        "_door",
        "_num_bytes",
        "_over",
        "_shared",
        "_shared_bytes",
        "_withdraw",
        "trace",
    )

    def __init__(
        self,
        call: Call,
        data: Buffer,
        begin: Callable[[_Served, Call, Buffer], None],
        backend: Backend,
        door: Door,
    ) -> None:
        self._call = call
        # Kept until the end: a front whose controller is gone begins again with the next.
        self._data = data
        self._begin = begin
        self._backend = backend
        self._door = door
        self._num_bytes = len(data)
        self._over = False
        self._asked: CheckedRequest | None = None
        self._answerer: Answerer | None = None
        self._withdraw: Callable[[], object] = _nothing
        # Bytes of inputs that were fetched from clients' shared memory, and where outputs belong there.
        self._shared_bytes = 0
        self._shared: Sequence[RegionSpan | None] = ()
        #: Follows it where it is traced.
        self.trace: Trace | None = None

    def begin(self) -> None:
        """Begin, for the first time or afresh."""
        self._door.shrink(self._shared_bytes)
        self._shared_bytes = 0
        try:
            self._begin(self, self._call, self._data)
        except Exception as error:
            self._end()
            if isinstance(error, RefusedError) and error.refusal is Refusal.LATE:
                # As a rule the loop was too slow for it; the throttle looks, too, whether the loop is ever idle.
                self._call.missed()
            elif isinstance(error, DeniedError):
                self._backend.denied(error.denial)
            if self.trace is not None:
                self.trace.failed(error, self._asked)
            self._call.fail(error)

    def shared(self, num_bytes: int, outputs: Sequence[RegionSpan | None]) -> None:
        """So many bytes of inputs were fetched from clients' shared memory, and outputs may belong there."""
        self._shared_bytes, self._shared = num_bytes, outputs

    def asked(self, asked: CheckedRequest, answerer: Answerer) -> None:
        """Ask what was found right.

        Raises:
            DeniedError: it names a tenant that is not its caller's.
        """
        tenant = self._call.caller.tenant
        if tenant is not None and asked.tenant != tenant:
            if asked.tenant:
                raise _not_his_tenant(asked.tenant, tenant)
            asked.tenant = tenant
        if self.trace is not None:
            # A copy: others who ask alike may share it, and are not traced.
            asked = replace(asked, traced=True)
        self._asked, self._answerer = asked, answerer
        self._withdraw = answerer.ask(self, asked, asked.inputs, self._call.arrival_ns)
        self._call.when_gone = self.withdraw

    def withdraw(self) -> None:
        """The client has given the request up."""
        if not self._over:
            self._end()
            self._withdraw()
            if self.trace is not None:
                self.trace.gone(self._asked)

    def done(self) -> bool:
        """Whether nobody waits any more."""
        return self._over

    def set_result(self, result: Answer | Answered | ToldAnswer) -> None:
        """Answer with the outputs of a model or an application."""
        asked, answerer = self._asked, self._answerer
        assert asked is not None
        assert answerer is not None
        self._end()
        call = self._call
        call.served(slow=False)
        parameters: dict[str, bool | int | str] | None = None
        try:
            if isinstance(result, Answer):
                if asked.explain:
                    parameters = explain(result, slo_source=asked.slo_source)
                expected_latency_ns = result.command.expected_departure_ns - call.arrival_ns
            elif isinstance(result, ToldAnswer):
                parameters = result.parameters
                if parameters is not None and "slo_source" in parameters:
                    # A model's, which an application's are not; it may be a trace alone that wants to know.
                    if asked.explain:
                        parameters["slo_source"] = asked.slo_source
                    else:
                        parameters = None
                expected_latency_ns = result.expected_departure_ns - call.arrival_ns
            else:
                # An application explains every answer: feedback needs the query id.
                parameters = result.parameters
                expected_latency_ns = asked.slo_ns
            if self._shared:
                for index, stretch in zip(asked.outputs, self._shared, strict=False):
                    if stretch is not None:
                        stretch.write(result.outputs[index])
            message = encode_response(asked, result.outputs, parameters=parameters)
        except Exception as fault:
            # Nobody else would end the call.
            call.fail(fault)
            return
        slo_ns = asked.slo_ns
        latest_ns = call.arrival_ns + slo_ns - way_back_of(slo_ns)
        late = functools.partial(
            _late, answerer.servable.name, slo_ns, call.arrival_ns, expected_latency_ns
        )
        call.answer(message, latest_ns, late)
        if self.trace is not None:
            self.trace.answered(result, asked)

    def set_exception(self, exception: Exception) -> None:
        """Answer with why there is no answer."""
        self._end()
        if self._asked is not None:
            waited_ns = self._backend.clock() - self._call.arrival_ns
            self._call.served(slow=waited_ns > self._asked.slo_ns / 2)
        if self.trace is not None:
            self.trace.failed(exception, self._asked)
        self._call.fail(exception)

    def _end(self) -> None:
        self._over = True
        # Else the two would keep each other, and the request's tensors, until the collector comes by.
        self._call.when_gone = None
        self._data = b""
        self._door.leave(self._num_bytes + self._shared_bytes)


def _nothing() -> None:
    pass


def _late(
    name: str, slo_ns: int, arrival_ns: int, expected_latency_ns: int, now_ns: int
) -> Exception:
    """Make the error of an answer that was ready, but too late."""
    return late_error(
        ModelId(name),
        slo_ns=slo_ns,
        latency_ns=now_ns - arrival_ns + way_back_of(slo_ns),
        expected_latency_ns=expected_latency_ns,
    )


class InferenceService:
    """Answers clients: checks requests, asks a controller, and says what became of them."""

    def __init__(
        self,
        backend: Backend,
        *,
        door: Door,
        regions: Regions | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Serve for a controller.

        Args:
            backend: the controller.
            door: bounds what is open at once.
            regions: clients' own shared memory; None: they may have none.
            tracing: follows some requests; None: none are traced.
        """
        self._tracing = tracing
        self._backend = backend
        self._clock = backend.clock
        self._door = door
        self._regions = regions
        self._templates = Templates()

    def mount(self, server: Http2Server | RestApp) -> None:
        """Have a server serve this."""
        methods = {
            "SystemSharedMemoryRegister": unary(
                "SystemSharedMemoryRegister",
                pb.SystemSharedMemoryRegisterRequest,
                self._register,
                only_here=True,
            ),
            "SystemSharedMemoryUnregister": unary(
                "SystemSharedMemoryUnregister",
                pb.SystemSharedMemoryUnregisterRequest,
                self._unregister,
                only_here=True,
            ),
            "SystemSharedMemoryStatus": unary(
                "SystemSharedMemoryStatus",
                pb.SystemSharedMemoryStatusRequest,
                self._region_status,
                only_here=True,
            ),
        }
        if isinstance(server, Http2Server):
            server.answer_directly(SERVICE, "ModelInfer", self.infer, stated_slo_ns=_peek_slo_ns)
            form = StreamForm(wrap_for_stream, _error_in_stream)
            server.answer_directly(
                SERVICE, "ModelStreamInfer", self.infer, form, stated_slo_ns=_peek_slo_ns
            )
        else:
            server.answer_directly(self.infer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def infer(self, call: Call, data: Buffer) -> None:
        """Serve a request; its call is answered sooner or later, and nothing is raised.

        Args:
            call: knows when the request came, and takes what there is to say.
            data: a serialised ModelInferRequest.
        """
        try:
            self._door.enter(len(data))
        except RefusedError as error:
            call.fail(error)
            return
        served = _Served(call, data, self._begin, self._backend, self._door)
        if self._tracing is not None:
            served.trace = self._tracing.begin(call)
        served.begin()

    def _begin(self, served: _Served, call: Call, data: Buffer) -> None:
        """Check one request and have it served.

        Raises:
            RefusedError: it has waited for too long, or nobody can serve it.
            UnknownModelError: no such model or version.
            BadRequestError: the request does not fit its model.
            DeniedError: it names a tenant that is not its caller's.
        """
        backend = self._backend
        timeout_ns = call.timeout_ns
        waited_ns = self._clock() - call.arrival_ns
        rpc_remaining_s = None if timeout_ns is None else timeout_ns / NS_PER_S
        templates, generation = self._templates, backend.generation
        default_slo_ns = backend.default_slo_ns
        known = templates.known(
            data,
            generation=generation,
            rpc_remaining_s=rpc_remaining_s,
            default_slo_ns=default_slo_ns,
        )
        cut: CutRequest | None = None
        if known is None and (cut := cut_request(data)) is not None:
            template = templates.find(cut, generation=generation)
            if template is not None:
                filled = template.fill(
                    cut, rpc_remaining_s=rpc_remaining_s, default_slo_ns=default_slo_ns
                )
                known = None if filled is None else (filled, template.answerer)
        if known is not None:
            asked, answerer = known
            if waited_ns > asked.slo_ns:
                self._refuse_late(answerer.servable.name, waited_ns, asked.slo_ns)
            served.asked(asked, answerer)
            return
        if waited_ns > _PEEK_AFTER_NS:
            self._peek(data, waited_ns, timeout_ns)
        parsed = parse_request(data)
        message = parsed.message
        call.when_gone = served.withdraw
        until = functools.partial(self._until_ns, call, message)
        described = backend.describe(served, message.model_name, message.model_version, until)
        if described is None:
            return
        servable = described.servable
        asked = read_request(
            parsed,
            servable,
            rpc_remaining_s=rpc_remaining_s,
            default_slo_ns=default_slo_ns,
        )
        if servable.has_contexts:
            asked.owner = call.caller.owner
        if asked.shared_inputs or asked.shared_outputs:
            # What lies in shared memory is looked up for each request.
            owner = call.caller.owner
            outputs = self._find_shared(asked, owner)
            served.shared(self._read_shared(asked, owner), outputs)
        elif cut is not None and not servable.has_contexts and not asked.classes:
            # What an application takes changes with its models, which the catalogue does not know.
            templates.add(cut, parsed, described, asked)
        served.asked(asked, described)

    def _until_ns(self, call: Call, message: pb.ModelInferRequest) -> int:
        """Until when a request may wait for its model to be known."""
        if (stated := stated_slo_ns(message)) is not None:
            return call.arrival_ns + stated[0]
        if (timeout_ns := call.timeout_ns) is not None:
            return call.arrival_ns + timeout_ns
        slo_ns = self._backend.slo_ns(message.model_name)
        return call.arrival_ns + (slo_ns if slo_ns is not None else self._backend.default_slo_ns)

    def _find_shared(self, asked: CheckedRequest, owner: str) -> Sequence[RegionSpan | None]:
        """Find where outputs belong in clients' shared memory.

        Raises:
            NotAllowedError: clients may have none.
            UnknownRegionError: there is no such region.
            BadRequestError: the region is smaller.
        """
        regions = self._shared_memory()
        return [
            None if part is None else regions.find(part, owner=owner)
            for part in asked.shared_outputs
        ]

    def _read_shared(self, asked: CheckedRequest, owner: str) -> int:
        """Fetch inputs from clients' shared memory; returns how many bytes that are.

        Raises:
            RefusedError: there is no room for them.
            UnknownRegionError: there is no such region.
            BadRequestError: the region is smaller.
        """
        regions = self._shared_memory()
        num_bytes = sum(part.num_bytes for _, part in asked.shared_inputs)
        if num_bytes > regions.request_bytes_max:
            raise BadRequestError(
                f"found {num_bytes} bytes of inputs in shared memory, expected"
                f" {regions.request_bytes_max} at most, as of a message (--max-message-mib)"
            )
        self._door.grow(num_bytes)
        try:
            for index, part in asked.shared_inputs:
                asked.inputs[index] = regions.read(part, owner=owner)
        except BaseException:
            self._door.shrink(num_bytes)
            raise
        return num_bytes

    def _shared_memory(self) -> Regions:
        if self._regions is None:
            raise NotAllowedError(
                "clients may have no shared memory here: the server was started without --allow-client-shm"
            )
        return self._regions

    def _peek(self, data: Buffer, waited_ns: int, timeout_ns: int | None) -> None:
        """Refuse a request that waited longer than its SLO, without a look at its tensors."""
        peeked = peek_request(data)
        slo_ns = peeked.slo_ns
        if slo_ns is None:
            slo_ns = (
                timeout_ns if timeout_ns is not None else self._backend.slo_ns(peeked.model_name)
            )
        if slo_ns is not None and waited_ns > slo_ns:
            self._refuse_late(peeked.model_name, waited_ns, slo_ns)

    def _refuse_late(self, name: str, waited_ns: int, slo_ns: int) -> None:
        if slo_ns <= _PEEK_AFTER_NS:
            return  # What no model could do anyway is for the scheduler to say, with its figures.
        self._backend.refused_at_door(Refusal.LATE)
        raise RefusedError(
            Refusal.LATE,
            f"model {quote(name)}: waited {format_ns(waited_ns)} before the controller"
            f" could look at it > SLO {format_ns(slo_ns)}",
            figures={"slo_ns": slo_ns, "waited_ns": waited_ns},
        )

    # --- clients' shared memory ---------------------------------------------------------------

    async def _register(self, request: pb.SystemSharedMemoryRegisterRequest) -> Message:
        self._shared_memory().register(
            request.name,
            request.key,
            request.offset,
            request.byte_size,
            owner=CALLER.get().owner,
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def _unregister(self, request: pb.SystemSharedMemoryUnregisterRequest) -> Message:
        self._shared_memory().unregister(request.name, owner=CALLER.get().owner)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _region_status(self, request: pb.SystemSharedMemoryStatusRequest) -> Message:
        status = pb.SystemSharedMemoryStatusResponse()
        for region in self._shared_memory().list(request.name, owner=CALLER.get().owner):
            told = status.regions[region.name]
            told.name, told.key = region.name, region.key
            told.offset, told.byte_size = region.offset, region.num_bytes
        return status


def _peek_slo_ns(data: Buffer) -> int | None:
    return peek_request(data).slo_ns


def _not_his_tenant(found: str, tenant: str) -> DeniedError:
    expected = f"{quote(tenant)}, which is the caller's, or none" if tenant else "none"
    text = f"parameter tenant: found {quote(found)}, expected {expected}"
    return DeniedError(Denial.NOT_ALLOWED, text)


def _error_in_stream(text: str, request: Buffer) -> bytes:
    """Make the message of a stream that answers a request with an error's text."""
    return encode_stream_error(text, request_id=peek_request(request).request_id)
