"""The Open Inference Protocol service, as Triton's and KServe's clients speak it, on either server.

Inference runs on raw bytes: tensors are cut out of the message and handed on as views, never parsed
or copied. A request's clock started when its bytes came, not when it is looked at: what waited longer
than its SLO is refused before its tensors are parsed, and an answer is judged as it is written.
Every method turns its errors into a status, so no message of a client can raise anything past it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from clockwright import __version__
from clockwright.bulk import Buffer, split_bulk
from clockwright.errors import (
    BadRequestError,
    NotAllowedError,
    Refusal,
    RefusedError,
    UnknownModelError,
)
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId, format_ns
from clockwright.v1 import inference_pb2 as pb
from controller.catalogue import Catalogue, Entry, ModelState
from controller.front.calls import AwaitedCall, Call
from controller.front.door import Door
from controller.front.explanation import explain
from controller.front.http2_server import STREAM_REQUESTS_MAX, Http2Server, StreamForm
from controller.front.methods import unary
from controller.front.oip import (
    CheckedRequest,
    Servable,
    encode_response,
    encode_stream_error,
    parse_request,
    peek_request,
    quote,
    read_request,
    wrap_for_stream,
)
from controller.front.regions import Regions, RegionSpan
from controller.front.statuses import Status, end, fail
from controller.front.templates import Templates
from controller.runtime import Answer, Runtime, late_error
from controller.selection.applications import Applications
from controller.selection.live_application import LiveApplication
from controller.selection.queries import Answered

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"

DEFAULT_SLO_NS = 100 * NS_PER_MS

# Triton's clients look here before they use an extension. Only those that work are announced.
EXTENSIONS = ("model_repository", "parameters")
SHARED_MEMORY_EXTENSION = "system_shared_memory"

# Triton's clients know ONNX models by this name.
PLATFORM = "onnxruntime_onnx"
APPLICATION_PLATFORM = "clockwright_application"

# Between the last look at the clock and the client's machine lie the kernel, and whoever takes the processor
# away: 20 to 40 us as a rule, a slice of the kernel's scheduler at times. An answer is charged this part of its
# SLO for it, or so long at most.
_WAY_BACK_PART = 20
_WAY_BACK_NS = 4 * NS_PER_MS

# A request that has waited for less is parsed and left to the scheduler.
_PEEK_AFTER_NS = 2 * NS_PER_MS


class _Served:
    """A request that was found right, while it is being served. It waits for its answer, and ends its call."""

    __slots__ = (
        "_asked",
        "_call",
        "_door",
        "_name",
        "_num_bytes",
        "_over",
        "_runtime",
        "_shared",
        "request_id",
    )

    def __init__(
        self,
        call: Call,
        name: str,
        asked: CheckedRequest,
        runtime: Runtime,
        door: Door,
        num_bytes: int,
        shared: Sequence[RegionSpan | None],
    ) -> None:
        self._call = call
        self._name = name
        self._asked = asked
        self._runtime = runtime
        self._door = door
        self._num_bytes = num_bytes
        # Where outputs belong that are not to be in the answer.
        self._shared = shared
        self._over = False
        #: The runtime's; 0 while it has not been asked.
        self.request_id = RequestId(0)

    def withdraw(self) -> None:
        """The client has given the request up."""
        if not self._over:
            self._end()
            self._runtime.withdraw(self.request_id)

    def done(self) -> bool:
        """Whether nobody waits any more."""
        return self._over

    def set_result(self, result: Answer | Answered) -> None:
        """Answer with the outputs of a model or an application."""
        self._end()
        call, asked = self._call, self._asked
        call.served(slow=False)
        parameters: dict[str, bool | int | str] | None = None
        try:
            if isinstance(result, Answer):
                if asked.explain:
                    parameters = explain(result, slo_source=asked.slo_source)
                expected_latency_ns = result.command.expected_departure_ns - call.arrival_ns
            else:
                # An application explains every answer: feedback needs the query id.
                parameters = result.parameters
                expected_latency_ns = asked.slo_ns
            for index, stretch in zip(asked.outputs, self._shared, strict=False):
                if stretch is not None:
                    stretch.write(result.outputs[index])
            message = encode_response(asked, result.outputs, parameters=parameters)
        except Exception as fault:
            # Nobody else would end the call.
            call.fail(fault)
            return
        slo_ns = asked.slo_ns
        latest_ns = call.arrival_ns + slo_ns - min(slo_ns // _WAY_BACK_PART, _WAY_BACK_NS)
        call.answer(message, latest_ns, functools.partial(self._late, expected_latency_ns))

    def set_exception(self, exception: Exception) -> None:
        """Answer with why there is no answer."""
        self._end()
        waited_ns = self._runtime.clock() - self._call.arrival_ns
        self._call.served(slow=waited_ns > self._asked.slo_ns / 2)
        self._call.fail(exception)

    def task_ended(self, task: asyncio.Task[Answer] | asyncio.Task[Answered]) -> None:
        """Answer with what became of a task that asked in this one's stead."""
        if task.cancelled():
            self._end()
        elif isinstance(error := task.exception(), Exception):
            self.set_exception(error)
        else:
            self.set_result(task.result())

    def _end(self) -> None:
        self._over = True
        # Else the two would keep each other, and the request's tensors, until the collector comes by.
        self._call.when_gone = None
        self._door.leave(self._num_bytes)

    def _late(self, expected_latency_ns: int, now_ns: int) -> Exception:
        """Make the error of an answer that was ready, but too late."""
        slo_ns = self._asked.slo_ns
        way_back_ns = min(slo_ns // _WAY_BACK_PART, _WAY_BACK_NS)
        return late_error(
            ModelId(self._name),
            slo_ns=slo_ns,
            latency_ns=now_ns - self._call.arrival_ns + way_back_ns,
            expected_latency_ns=expected_latency_ns,
        )


class InferenceService:
    """Answers clients: checks requests, asks the runtime, and says what became of them."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        *,
        door: Door,
        default_slo_ns: int = DEFAULT_SLO_NS,
        applications: Applications | None = None,
        regions: Regions | None = None,
        lag_ns: Callable[[], int] | None = None,
    ) -> None:
        """Answer from a catalogue through a runtime.

        Args:
            runtime: decides and answers.
            catalogue: knows the models.
            door: bounds what is open at once.
            default_slo_ns: SLO of requests that name no SLO, to models that have none.
            applications: know the applications, which clients ask like models; None: there are none.
            regions: clients' own shared memory; None: they may have none.
            lag_ns: how late the event loop is, for a server that does not know when a call came; None: it
                does.
        """
        self._runtime = runtime
        self._catalogue = catalogue
        self._door = door
        self._default_slo_ns = default_slo_ns
        self._applications = applications
        self._regions = regions
        self._lag_ns = lag_ns if lag_ns is not None else lambda: 0
        self._templates = Templates()

    def mount(self, server: grpc.aio.Server | Http2Server) -> None:
        """Have a server serve this."""
        methods = {
            "ServerLive": unary("ServerLive", pb.ServerLiveRequest, self._server_live),
            "ServerReady": unary("ServerReady", pb.ServerReadyRequest, self._server_ready),
            "ModelReady": unary("ModelReady", pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": unary(
                "ServerMetadata", pb.ServerMetadataRequest, self._server_metadata
            ),
            "ModelMetadata": unary("ModelMetadata", pb.ModelMetadataRequest, self._model_metadata),
            "RepositoryIndex": unary(
                "RepositoryIndex", pb.RepositoryIndexRequest, self._repository_index
            ),
            "RepositoryModelLoad": unary(
                "RepositoryModelLoad", pb.RepositoryModelLoadRequest, self._load
            ),
            "RepositoryModelUnload": unary(
                "RepositoryModelUnload", pb.RepositoryModelUnloadRequest, self._unload
            ),
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
            server.answer_directly(SERVICE, "ModelInfer", self.infer)
            form = StreamForm(wrap_for_stream, _error_in_stream)
            server.answer_directly(SERVICE, "ModelStreamInfer", self.infer, form)
        else:
            methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer_awaited)
            methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream_infer)
        health = {"Check": grpc.unary_unary_rpc_method_handler(self._health_check)}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, methods),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
            )
        )

    # --- inference ----------------------------------------------------------------------------

    def infer(self, call: Call, data: Buffer) -> None:
        """Serve a request; its call is answered sooner or later, and nothing is raised.

        Args:
            call: knows when the request came, and takes what there is to say.
            data: a serialised ModelInferRequest.
        """
        num_bytes = len(data)
        try:
            self._door.enter(num_bytes)
        except RefusedError as error:
            call.fail(error)
            return
        try:
            answerer, servable, asked = self._check(data, call.arrival_ns, call.timeout_ns)
            shared: Sequence[RegionSpan | None] = ()
            if asked.shared_inputs or asked.shared_outputs:
                shared = self._find_shared(asked)
                num_bytes += self._read_shared(asked)
            served = _Served(
                call, servable.name, asked, self._runtime, self._door, num_bytes, shared
            )
            self._begin(call, answerer, asked, served)
        except Exception as error:
            self._door.leave(num_bytes)
            if isinstance(error, RefusedError) and error.refusal is Refusal.LATE:
                # The loop alone was too slow for it.
                call.missed()
            call.fail(error)

    async def _infer_awaited(
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        lag_ns = self._lag_ns()
        remaining_s = context.time_remaining()
        timeout_ns = None if remaining_s is None else int(remaining_s * NS_PER_S) + lag_ns
        call = AwaitedCall("ModelInfer", self._runtime.clock() - lag_ns, timeout_ns)
        self.infer(call, data)
        await call.wait()
        answer = call.judge(self._runtime.clock())
        return end(context, answer) if isinstance(answer, Status) else b"".join(answer)

    async def _stream_infer(
        self,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Answer the requests of a stream of grpc.aio as their answers get ready; errors do not end it.

        The RPC deadline is the stream's, not a request's, so no SLO is taken from it.
        """
        writing = asyncio.Lock()
        room = asyncio.Semaphore(STREAM_REQUESTS_MAX)

        async def answer(data: bytes, arrival_ns: int) -> None:
            try:
                call = AwaitedCall("ModelStreamInfer", arrival_ns)
                self.infer(call, data)
                await call.wait()
                async with writing:
                    answer = call.judge(self._runtime.clock())
                    if isinstance(answer, Status):
                        message = _error_in_stream(answer.text, data)
                    else:
                        message = b"".join(wrap_for_stream(answer))
                    await context.write(message)
            finally:
                room.release()

        async with asyncio.TaskGroup() as tasks:
            async for data in requests:
                arrival_ns = self._runtime.clock() - self._lag_ns()
                await room.acquire()
                tasks.create_task(answer(data, arrival_ns))

    def _begin(
        self, call: Call, answerer: Entry | LiveApplication, asked: CheckedRequest, served: _Served
    ) -> None:
        """Have a request served.

        Raises:
            RefusedError: nobody can serve it.
        """
        arrival_ns = call.arrival_ns
        task: asyncio.Task[Answer] | asyncio.Task[Answered]
        if isinstance(answerer, LiveApplication):
            assert self._applications is not None
            task = asyncio.create_task(
                self._applications.answer(
                    answerer,
                    asked.inputs,
                    rows=asked.rows,
                    arrival_ns=arrival_ns,
                    slo_ns=asked.slo_ns,
                    context=asked.context,
                    tenant=asked.tenant,
                )
            )
        elif self._applications is not None and answerer.is_cached and not asked.explain:
            task = asyncio.create_task(
                self._applications.predict(
                    answerer.model_id,
                    asked.inputs,
                    rows=asked.rows,
                    arrival_ns=arrival_ns,
                    slo_ns=asked.slo_ns,
                    tenant=asked.tenant,
                )
            )
        else:
            served.request_id = self._runtime.ask(
                served,
                answerer.model_id,
                asked.inputs,
                rows=asked.rows,
                arrival_ns=arrival_ns,
                slo_ns=asked.slo_ns,
                tenant=asked.tenant,
            )
            call.when_gone = served.withdraw
            return
        task.add_done_callback(served.task_ended)
        call.when_gone = task.cancel

    def _check(
        self, data: Buffer, arrival_ns: int, timeout_ns: int | None
    ) -> tuple[Entry | LiveApplication, Servable, CheckedRequest]:
        """Find out who is to answer a request, and what is asked.

        Raises:
            RefusedError: it has waited for too long, or nobody can serve it.
            UnknownModelError: no such model or version.
            BadRequestError: the request does not fit its model.
        """
        waited_ns = self._runtime.clock() - arrival_ns
        rpc_remaining_s = None if timeout_ns is None else timeout_ns / NS_PER_S
        cut = self._templates.cut(data)
        template = None
        if cut is not None:
            template = self._templates.find(cut, generation=self._catalogue.generation)
        if cut is not None and template is not None:
            asked = template.fill(
                cut, rpc_remaining_s=rpc_remaining_s, default_slo_ns=self._default_slo_ns
            )
            if asked is not None:
                if waited_ns > asked.slo_ns:
                    self._refuse_late(template.servable.name, waited_ns, asked.slo_ns)
                return template.model, template.servable, asked
        if waited_ns > _PEEK_AFTER_NS:
            self._peek(data, waited_ns, timeout_ns)
        parsed = parse_request(data)
        message = parsed.message
        answerer, servable = self._servable(message.model_name, message.model_version)
        asked = read_request(
            parsed,
            servable,
            rpc_remaining_s=rpc_remaining_s,
            default_slo_ns=self._default_slo_ns,
        )
        # What an application takes changes with its models, which the catalogue does not know.
        # What lies in shared memory is looked up for each request.
        shared = asked.shared_inputs or asked.shared_outputs
        if cut is not None and not shared and not isinstance(answerer, LiveApplication):
            self._templates.add(cut, parsed, answerer, servable, asked)
        return answerer, servable, asked

    def _find_shared(self, asked: CheckedRequest) -> Sequence[RegionSpan | None]:
        """Find where outputs belong in clients' shared memory.

        Raises:
            NotAllowedError: clients may have none.
            UnknownRegionError: there is no such region.
            BadRequestError: the region is smaller.
        """
        regions = self._shared_memory()
        return [None if part is None else regions.find(part) for part in asked.shared_outputs]

    def _read_shared(self, asked: CheckedRequest) -> int:
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
                asked.inputs[index] = regions.read(part)
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
            slo_ns = timeout_ns if timeout_ns is not None else self._slo_ns(peeked.model_name)
        if waited_ns > slo_ns:
            self._refuse_late(peeked.model_name, waited_ns, slo_ns)

    def _refuse_late(self, name: str, waited_ns: int, slo_ns: int) -> None:
        if slo_ns <= _PEEK_AFTER_NS:
            return  # What no model could do anyway is for the scheduler to say, with its figures.
        self._runtime.telemetry.refused_at_door(Refusal.LATE)
        raise RefusedError(
            Refusal.LATE,
            f"model {quote(name)}: waited {format_ns(waited_ns)} before the controller"
            f" could look at it > SLO {format_ns(slo_ns)}",
            figures={"slo_ns": slo_ns, "waited_ns": waited_ns},
        )

    def _slo_ns(self, name: str) -> int:
        if self._applications is not None and (running := self._applications.find(name)):
            return running.application.slo_ns or self._default_slo_ns
        model = self._catalogue.find(name)
        slo_ns = model.slo_ns if model is not None else None
        return slo_ns if slo_ns is not None else self._default_slo_ns

    def _servable(self, name: str, version: str) -> tuple[Entry | LiveApplication, Servable]:
        """Find the model or application that a client names, and describe it for `read_request`.

        Raises:
            RefusedError: no worker has described it yet.
            UnknownModelError: no such model or version.
            BadRequestError: no name is given.
        """
        if running := self._application(name, version):
            assert self._applications is not None
            shape = self._applications.shape(running)
            if shape is None:
                raise self._no_models(running)
            return running, Servable(
                name=running.application.name,
                version=running.version,
                inputs=shape.inputs,
                outputs=shape.outputs,
                max_rows=self._applications.max_rows(running),
                slo_ns=running.application.slo_ns,
                has_contexts=True,
            )
        model = self._find(name, version)
        if not model.outputs:
            raise self._not_ready(model)
        assert model.folder is not None
        # While no worker has the model, the configured sizes stand in: the scheduler then refuses the
        # request in its own words.
        max_rows = model.largest_batch or model.folder.settings.batch_sizes[-1]
        return model, Servable(
            model.name, model.version, model.inputs, model.outputs, max_rows, model.slo_ns
        )

    def _application(self, name: str, version: str) -> LiveApplication | None:
        running = self._applications.find(name) if self._applications is not None else None
        if running is not None and version and version != running.version:
            raise UnknownModelError(
                f"application {name}: found version {quote(version)}, expected"
                f" {quote(running.version)}, which is served, or none"
            )
        return running

    def _no_models(self, running: LiveApplication) -> RefusedError:
        reasons = [f"{name}: {reason}" for name, reason in running.misfits.items()]
        return RefusedError(
            Refusal.NO_WORKER,
            f"application {running.application.name}: no worker has looked at a model that fits it yet"
            + (f" ({'; '.join(reasons)})" if reasons else ""),
        )

    def _find(self, name: str, version: str) -> Entry:
        if not name:
            raise BadRequestError("model_name: found none, expected the name of a model")
        model = self._catalogue.find(name)
        if model is None:
            copies = self._catalogue.find(f"{name}-0")
            hint = f"; its copies are called {name}-0, {name}-1, ..." if copies else ""
            raise UnknownModelError(f"there is no model {quote(name)}{hint}")
        if version and version != model.version:
            raise UnknownModelError(
                f"model {name}: found version {quote(version)}, expected {quote(model.version)}, which is"
                " served, or none"
            )
        return model

    def _not_ready(self, model: Entry) -> RefusedError:
        state = self._catalogue.state(model).value
        return RefusedError(
            Refusal.NO_WORKER,
            f"model {model.name} is {state}: {self._catalogue.reason(model)}",
        )

    # --- health and metadata ------------------------------------------------------------------

    async def _server_live(self, _: pb.ServerLiveRequest) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, _: pb.ServerReadyRequest) -> Message:
        return pb.ServerReadyResponse(ready=self._is_ready())

    def _is_ready(self) -> bool:
        return self._catalogue.ready and not self._runtime.draining

    async def _model_ready(self, request: pb.ModelReadyRequest) -> Message:
        try:
            if application := self._application(request.name, request.version):
                assert self._applications is not None
                state = self._applications.state(application)
                return pb.ModelReadyResponse(ready=state is ModelState.READY)
            model = self._find(request.name, request.version)
        except UnknownModelError:
            return pb.ModelReadyResponse(
                ready=False
            )  # Triton, too, answers so for an unknown model.
        return pb.ModelReadyResponse(ready=self._catalogue.state(model) is ModelState.READY)

    async def _server_metadata(self, _: pb.ServerMetadataRequest) -> Message:
        extensions = [*EXTENSIONS]
        if self._regions is not None:
            extensions.append(SHARED_MEMORY_EXTENSION)
        return pb.ServerMetadataResponse(
            name="clockwright", version=__version__, extensions=extensions
        )

    async def _model_metadata(self, request: pb.ModelMetadataRequest) -> Message:
        answerer, servable = self._servable(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=servable.name,
            versions=[servable.version],
            platform=APPLICATION_PLATFORM if isinstance(answerer, LiveApplication) else PLATFORM,
            inputs=[
                tensor(name=spec.name, datatype=spec.datatype, shape=[-1, *spec.row_shape])
                for spec in servable.inputs
            ],
            outputs=[
                tensor(name=spec.name, datatype=spec.datatype, shape=[-1, *spec.row_shape])
                for spec in servable.outputs
            ],
        )

    async def _health_check(
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        """Serve grpc.health.v1, which Kubernetes probes: a string in, an enum out, both in field 1."""
        try:
            _, names = split_bulk(data, 1)
            name = bytes(names[-1]).decode(errors="replace") if names else ""
            if name not in ("", SERVICE):
                raise UnknownModelError(f"there is no service {quote(name)}, expected {SERVICE}")
        except Exception as error:
            return fail(context, error, method="Check")
        return b"\x08\x01" if self._is_ready() else b"\x08\x02"

    # --- clients' shared memory ---------------------------------------------------------------

    async def _register(self, request: pb.SystemSharedMemoryRegisterRequest) -> Message:
        self._shared_memory().register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def _unregister(self, request: pb.SystemSharedMemoryUnregisterRequest) -> Message:
        self._shared_memory().unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _region_status(self, request: pb.SystemSharedMemoryStatusRequest) -> Message:
        status = pb.SystemSharedMemoryStatusResponse()
        for region in self._shared_memory().list(request.name):
            told = status.regions[region.name]
            told.name, told.key = region.name, region.key
            told.offset, told.byte_size = region.offset, region.num_bytes
        return status

    # --- the model repository -----------------------------------------------------------------

    async def _repository_index(self, request: pb.RepositoryIndexRequest) -> Message:
        index = pb.RepositoryIndexResponse()
        for model in self._catalogue.models:
            state = self._catalogue.state(model)
            if state is ModelState.READY or not request.ready:
                index.models.add(
                    name=model.name,
                    version=model.version,
                    state=state.value,
                    reason=self._catalogue.reason(model),
                )
        for running in self._applications.all if self._applications is not None else ():
            assert self._applications is not None
            state = self._applications.state(running)
            if state is ModelState.READY or not request.ready:
                index.models.add(
                    name=running.application.name,
                    version=running.version,
                    state=state.value,
                    reason="" if state is ModelState.READY else "none of its models is ready",
                )
        return index

    async def _load(self, request: pb.RepositoryModelLoadRequest) -> Message:
        if request.parameters:
            raise BadRequestError(
                f"parameter {quote(min(request.parameters))}: found, but loading takes models from the"
                " models directory as they are, expected no parameters"
            )
        await self._catalogue.reload(_model_named(request))
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: pb.RepositoryModelUnloadRequest) -> Message:
        await self._catalogue.remove(_model_named(request))
        return pb.RepositoryModelUnloadResponse()


def _error_in_stream(text: str, request: Buffer) -> bytes:
    """Make the message of a stream that answers a request with an error's text."""
    return encode_stream_error(text, request_id=peek_request(request).request_id)


def _model_named(
    request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest,
) -> str:
    """Find the model's name: Triton sends it in field 2, behind a repository, and KServe in field 1."""
    name = request.model_name or request.repository_name
    if not name:
        raise BadRequestError("model_name: found none, expected the name of a model")
    return name
