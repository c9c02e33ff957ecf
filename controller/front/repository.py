"""What clients ask of a server beside inference: health, metadata, the model repository."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from google.protobuf.message import Message

from clockwright import __version__
from clockwright.errors import BadRequestError, UnknownModelError
from clockwright.units import ModelId
from clockwright.v1 import inference_pb2 as pb
from controller.catalogue import Catalogue, ModelState
from controller.front.backend import LocalBackend
from controller.front.door import Door
from controller.front.health import HEALTH_SERVICE, HealthService
from controller.front.http2_server import Http2Server
from controller.front.methods import unary
from controller.front.oip import quote
from controller.front.reflection import reflection_handlers
from controller.front.rest import RestApp
from controller.front.server import SERVICE
from controller.runtime import Runtime
from controller.selection.applications import Applications

# Triton's clients look here before they use an extension. Only those that work are announced.
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_repository",
    "parameters",
    "statistics",
)
SHARED_MEMORY_EXTENSION = "system_shared_memory"

# Triton's clients know ONNX models by this name.
PLATFORM = "onnxruntime_onnx"
APPLICATION_PLATFORM = "clockwright_application"


class RepositoryService:
    """Answers from what there is in the controller."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        backend: LocalBackend,
        applications: Applications | None = None,
        *,
        door: Door,
        client_shm: bool = False,
        fill_statistics: Callable[[ModelId, pb.ModelStatistics], None] | None = None,
    ) -> None:
        """Serve one controller.

        Args:
            runtime: the controller's, like the others.
            catalogue: knows the models.
            backend: describes what a client names.
            applications: know the applications; None: there are none.
            door: is shut when there is no memory for requests.
            client_shm: clients may keep tensors in shared memory of theirs.
            fill_statistics: fills in what the metrics count of a model; None: nobody counts more than
                telemetry does.
        """
        self._runtime = runtime
        self._catalogue = catalogue
        self._backend = backend
        self._applications = applications
        self._door = door
        self._client_shm = client_shm
        self._fill_statistics = fill_statistics
        self.health = HealthService(self._is_serving)

    def mount(self, server: Http2Server | RestApp) -> None:
        """Have a server serve this."""
        methods = {
            "ServerLive": unary("ServerLive", pb.ServerLiveRequest, self._server_live),
            "ServerReady": unary("ServerReady", pb.ServerReadyRequest, self._server_ready),
            "ModelReady": unary("ModelReady", pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": unary(
                "ServerMetadata", pb.ServerMetadataRequest, self._server_metadata
            ),
            "ModelMetadata": unary("ModelMetadata", pb.ModelMetadataRequest, self._model_metadata),
            "ModelStatistics": unary(
                "ModelStatistics", pb.ModelStatisticsRequest, self._statistics
            ),
            "RepositoryIndex": unary(
                "RepositoryIndex", pb.RepositoryIndexRequest, self._repository_index
            ),
            "RepositoryModelLoad": unary(
                "RepositoryModelLoad", pb.RepositoryModelLoadRequest, self._load
            ),
            "RepositoryModelUnload": unary(
                "RepositoryModelUnload", pb.RepositoryModelUnloadRequest, self._unload
            ),
        }
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, methods),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, self.health.methods()),
                *reflection_handlers(),
            )
        )

    # --- health and metadata ------------------------------------------------------------------

    async def _server_live(self, _: pb.ServerLiveRequest) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, _: pb.ServerReadyRequest) -> Message:
        return pb.ServerReadyResponse(ready=await self._is_serving())

    async def _is_serving(self) -> bool:
        return self._catalogue.ready and not self._runtime.draining and not self._door.is_shut

    async def _model_ready(self, request: pb.ModelReadyRequest) -> Message:
        try:
            if application := self._backend.application(request.name, request.version):
                assert self._applications is not None
                state = self._applications.state(application)
                return pb.ModelReadyResponse(ready=state is ModelState.READY)
            model = self._backend.model(request.name, request.version)
        except UnknownModelError:
            return pb.ModelReadyResponse(
                ready=False
            )  # Triton, too, answers so for an unknown model.
        return pb.ModelReadyResponse(ready=self._catalogue.state(model) is ModelState.READY)

    async def _server_metadata(self, _: pb.ServerMetadataRequest) -> Message:
        extensions = [*EXTENSIONS]
        if self._client_shm:
            extensions.append(SHARED_MEMORY_EXTENSION)
        return pb.ServerMetadataResponse(
            name="clockwright", version=__version__, extensions=extensions
        )

    async def _model_metadata(self, request: pb.ModelMetadataRequest) -> Message:
        servable = self._backend.find(request.name, request.version).servable
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=servable.name,
            versions=[servable.version],
            platform=APPLICATION_PLATFORM if servable.has_contexts else PLATFORM,
            inputs=[
                tensor(name=spec.name, datatype=spec.datatype, shape=[-1, *spec.row_shape])
                for spec in servable.inputs
            ],
            outputs=[
                tensor(name=spec.name, datatype=spec.datatype, shape=[-1, *spec.row_shape])
                for spec in servable.outputs
            ],
        )

    async def _statistics(self, request: pb.ModelStatisticsRequest) -> Message:
        """What became of the requests to one model, or to each; applications are asked about elsewhere."""
        models = self._catalogue.models
        if request.name:
            models = [self._backend.model(request.name, request.version)]
        response = pb.ModelStatisticsResponse()
        for model in models:
            told = response.model_stats.add(name=model.name, version=model.version)
            counts = self._runtime.telemetry.by_model.get(model.model_id)
            if counts is not None:
                told.inference_stats.success.count = counts.answered
                told.inference_stats.fail.count = counts.refusals.total()
            if self._fill_statistics is not None:
                self._fill_statistics(model.model_id, told)
        return response

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
        await asyncio.shield(self._catalogue.remove(_model_named(request)))
        return pb.RepositoryModelUnloadResponse()


def _model_named(
    request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest,
) -> str:
    """Find the model's name: Triton sends it in field 2, behind a repository, and KServe in field 1."""
    name = request.model_name or request.repository_name
    if not name:
        raise BadRequestError("model_name: found none, expected the name of a model")
    return name
