"""The Open Inference Protocol service, as Triton's and KServe's clients speak it, on grpc.aio.

Inference runs on raw bytes: tensors are cut out of the message and handed on as views, never parsed
or copied (measured, with the choice of grpc.aio over threads, by experiments/bench_frontend.py).
Every method turns its errors into a status, so no message of a client can raise anything past it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from clockwright import __version__
from clockwright.bulk import Buffer, split_bulk
from clockwright.errors import BadRequestError, Refusal, RefusedError, UnknownModelError
from clockwright.units import NS_PER_MS, ModelId
from clockwright.v1 import inference_pb2 as pb
from controller.catalogue import Catalogue, Entry, ModelState
from controller.front.explanation import explain
from controller.front.oip import (
    ParsedRequest,
    Servable,
    encode_response,
    encode_stream_error,
    parse_request,
    quote,
    read_request,
    wrap_for_stream,
)
from controller.front.statuses import fail, status_of
from controller.runtime import Runtime, late_error
from controller.selection.applications import Applications
from controller.selection.live_application import LiveApplication

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"

DEFAULT_SLO_NS = 100 * NS_PER_MS

# Triton's clients look here before they use an extension. Only those that work are announced.
EXTENSIONS = ("model_repository", "parameters")

# Triton's clients know ONNX models by this name.
PLATFORM = "onnxruntime_onnx"
APPLICATION_PLATFORM = "clockwright_application"

# A client that sends and never reads makes us hold this many answers at most; then its stream waits.
STREAM_REQUESTS_MAX = 1024

RequestT = TypeVar("RequestT", bound=Message)


class InferenceService:
    """Answers clients: checks requests, asks the runtime, and says what became of them."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        *,
        default_slo_ns: int = DEFAULT_SLO_NS,
        applications: Applications | None = None,
    ) -> None:
        """Answer from a catalogue through a runtime.

        Args:
            runtime: decides and answers.
            catalogue: knows the models.
            default_slo_ns: SLO of requests that name no SLO, to models that have none.
            applications: know the applications, which clients ask like models; None: there are none.
        """
        self._runtime = runtime
        self._catalogue = catalogue
        self._default_slo_ns = default_slo_ns
        self._applications = applications

    def handlers(self) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
        """Make the handlers that a grpc.aio server mounts."""
        unary = {
            "ServerLive": self._unary("ServerLive", pb.ServerLiveRequest, self._server_live),
            "ServerReady": self._unary("ServerReady", pb.ServerReadyRequest, self._server_ready),
            "ModelReady": self._unary("ModelReady", pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": self._unary(
                "ServerMetadata", pb.ServerMetadataRequest, self._server_metadata
            ),
            "ModelMetadata": self._unary(
                "ModelMetadata", pb.ModelMetadataRequest, self._model_metadata
            ),
            "RepositoryIndex": self._unary(
                "RepositoryIndex", pb.RepositoryIndexRequest, self._repository_index
            ),
            "RepositoryModelLoad": self._unary(
                "RepositoryModelLoad", pb.RepositoryModelLoadRequest, self._load
            ),
            "RepositoryModelUnload": self._unary(
                "RepositoryModelUnload", pb.RepositoryModelUnloadRequest, self._unload
            ),
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream_infer),
        }
        health = {"Check": grpc.unary_unary_rpc_method_handler(self._health_check)}
        return (
            grpc.method_handlers_generic_handler(SERVICE, unary),
            grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
        )

    # --- inference ----------------------------------------------------------------------------

    async def _infer(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        arrival_ns = self._runtime.clock()
        try:
            return await self._answer(parse_request(data), arrival_ns, context.time_remaining())
        except Exception as error:
            return fail(context, error, method="ModelInfer")

    async def _stream_infer(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Answer the requests of a stream as their answers get ready; errors do not end it.

        The RPC deadline is the stream's, not a request's, so no SLO is taken from it.
        """
        writing = asyncio.Lock()
        room = asyncio.Semaphore(STREAM_REQUESTS_MAX)

        async def answer(data: bytes, arrival_ns: int) -> None:
            try:
                message = await self._answer_in_stream(data, arrival_ns)
                async with writing:
                    await context.write(message)
            finally:
                room.release()

        async with asyncio.TaskGroup() as tasks:
            async for data in requests:
                arrival_ns = self._runtime.clock()
                await room.acquire()
                tasks.create_task(answer(data, arrival_ns))

    async def _answer_in_stream(self, data: bytes, arrival_ns: int) -> bytes:
        request_id = ""
        try:
            parsed = parse_request(data)
            request_id = parsed.message.id
            return wrap_for_stream(await self._answer(parsed, arrival_ns, None))
        except Exception as error:
            _, text = status_of(error, method="ModelStreamInfer")
            return encode_stream_error(text, request_id=request_id)

    async def _answer(
        self, request: ParsedRequest, arrival_ns: int, rpc_remaining_s: float | None
    ) -> bytes:
        """Serve one request; returns a serialised ModelInferResponse that is in time.

        Raises:
            RefusedError: there is no answer in time.
            UnknownModelError: no such model or version.
            BadRequestError: the request does not fit its model.
        """
        message = request.message
        answerer, servable = self._servable(message.model_name, message.model_version)
        asked = read_request(
            request,
            servable,
            rpc_remaining_s=rpc_remaining_s,
            default_slo_ns=self._default_slo_ns,
        )
        parameters: dict[str, bool | int | str] | None = None
        outputs: Sequence[Buffer]
        if isinstance(answerer, LiveApplication):
            assert self._applications is not None
            answered = await self._applications.answer(
                answerer,
                asked.inputs,
                rows=asked.rows,
                arrival_ns=arrival_ns,
                slo_ns=asked.slo_ns,
                context=asked.context,
                tenant=asked.tenant,
            )
            # An application explains every answer: feedback needs the query id.
            outputs, parameters = answered.outputs, answered.parameters
            expected_latency_ns = asked.slo_ns
        elif self._applications is not None and answerer.is_cached and not asked.explain:
            outputs = await self._applications.predict(
                answerer.model_id,
                asked.inputs,
                rows=asked.rows,
                arrival_ns=arrival_ns,
                slo_ns=asked.slo_ns,
                tenant=asked.tenant,
            )
            expected_latency_ns = asked.slo_ns
        else:
            answer = await self._runtime.submit(
                answerer.model_id,
                asked.inputs,
                rows=asked.rows,
                arrival_ns=arrival_ns,
                slo_ns=asked.slo_ns,
                tenant=asked.tenant,
            )
            outputs = answer.outputs
            if asked.explain:
                parameters = explain(answer, slo_source=asked.slo_source)
            expected_latency_ns = answer.command.expected_departure_ns - arrival_ns
        response = encode_response(servable, asked, outputs, parameters=parameters)
        latency_ns = self._runtime.clock() - arrival_ns
        if latency_ns > asked.slo_ns:
            raise late_error(
                ModelId(servable.name),
                slo_ns=asked.slo_ns,
                latency_ns=latency_ns,
                expected_latency_ns=expected_latency_ns,
            )
        return response

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

    def _unary(
        self,
        name: str,
        request_type: type[RequestT],
        behaviour: Callable[[RequestT], Awaitable[Message]],
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Make a handler that parses messages itself; gRPC's own hook logs a traceback for a bad one."""

        async def handle(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            try:
                return (await behaviour(request_type.FromString(data))).SerializeToString()
            except Exception as error:
                return fail(context, error, method=name)

        return grpc.unary_unary_rpc_method_handler(handle)

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
        return pb.ServerMetadataResponse(
            name="clockwright", version=__version__, extensions=EXTENSIONS
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
        self._catalogue.remove(_model_named(request))
        return pb.RepositoryModelUnloadResponse()


def _model_named(
    request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest,
) -> str:
    """Find the model's name: Triton sends it in field 2, behind a repository, and KServe in field 1."""
    name = request.model_name or request.repository_name
    if not name:
        raise BadRequestError("model_name: found none, expected the name of a model")
    return name
