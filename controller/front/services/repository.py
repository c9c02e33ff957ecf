"""What clients ask of a server in addition to inference: health, metadata, the model repository."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from clockwright import __version__
from clockwright.errors import (
    BadRequestError,
    ModelError,
    NoRoomError,
    StoreError,
    UnknownModelError,
)
from clockwright.foreign import quote
from clockwright.units import NS_PER_MS, NS_PER_US, ModelId
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.tensors import TensorSpec
from controller.access.caller import Caller
from controller.front.admission.limits import AdmissionLimits
from controller.front.methods import INFERENCE, Method, bind
from controller.front.oip.statuses import Status, ToldStatusError
from controller.front.remote.backend import LocalBackend
from controller.front.services.adding import ModelAdder, is_too_long
from controller.front.services.health import HealthService
from controller.front.services.reflection import reflection_handlers
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry, ModelState, Pipeline
from controller.models.model_folder import CONFIG_BYTES_MAX
from controller.models.stepped import CONTROL_KINDS, IDLE_NS
from controller.models.triton_config import BACKEND, ENSEMBLE, MODEL_FILE, PLATFORM, data_type
from controller.runtime import Runtime
from controller.selection.applications import Applications

# Triton's clients look here before they use an extension. Only those that work are announced.
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "sequence",
    "statistics",
)
SHARED_MEMORY_EXTENSION = "system_shared_memory"

APPLICATION_PLATFORM = "clockwright_application"


@dataclass(eq=False)
class RepositoryService:
    """Answers from what there is in the controller."""

    runtime: Runtime
    catalogue: Catalogue
    backend: LocalBackend
    applications: Applications
    _: KW_ONLY
    adder: ModelAdder
    #: Shut when there is no memory for requests: then the server is not ready.
    door: AdmissionLimits
    client_shm: bool = False
    name: str = "clockwright"
    #: Fills in what the metrics count of a model; None: only telemetry's counts are known.
    fill_statistics: Callable[[ModelId, pb.ModelStatistics], None] | None = None

    def __post_init__(self) -> None:
        self.health = HealthService(self._is_serving)

    def handlers(self) -> dict[Method, Any]:
        """What answers the methods that are this service's."""
        return bind(INFERENCE, self) | self.health.handlers() | reflection_handlers()

    # --- health and metadata ------------------------------------------------------------------

    async def server_live(self, _: pb.ServerLiveRequest, _caller: Caller) -> Message:
        """Say that the process lives."""
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: pb.ServerReadyRequest, _caller: Caller) -> Message:
        """Say whether it serves."""
        return pb.ServerReadyResponse(ready=await self._is_serving())

    async def _is_serving(self) -> bool:
        return self.catalogue.ready and not self.runtime.draining and not self.door.is_shut

    async def model_ready(self, request: pb.ModelReadyRequest, _caller: Caller) -> Message:
        """Say whether a model or an application serves."""
        try:
            if application := self.backend.application(request.name, request.version):
                state = self.applications.state(application)
                return pb.ModelReadyResponse(ready=state is ModelState.READY)
            model = self.backend.model(request.name, request.version)
        except UnknownModelError:
            return pb.ModelReadyResponse(
                ready=False
            )  # Triton, too, answers so for an unknown model.
        return pb.ModelReadyResponse(ready=self.catalogue.state(model) is ModelState.READY)

    async def server_metadata(self, _: pb.ServerMetadataRequest, _caller: Caller) -> Message:
        """Say which extensions work."""
        extensions = [*EXTENSIONS]
        if self.client_shm:
            extensions.append(SHARED_MEMORY_EXTENSION)
        return pb.ServerMetadataResponse(name=self.name, version=__version__, extensions=extensions)

    async def model_metadata(self, request: pb.ModelMetadataRequest, _caller: Caller) -> Message:
        """Say what a model or an application takes and gives."""
        servable = self.backend.find(request.name, request.version).servable

        def tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
            shape = spec.shape(servable.stated_rows)
            return pb.ModelMetadataResponse.TensorMetadata(
                name=spec.name, datatype=spec.datatype, shape=shape
            )

        return pb.ModelMetadataResponse(
            name=servable.name,
            versions=[each.version for each in self.catalogue.versions(servable.name)]
            or [servable.version],
            platform=APPLICATION_PLATFORM
            if servable.has_contexts
            else ENSEMBLE
            if servable.is_pipeline
            else PLATFORM,
            inputs=map(tensor, servable.inputs),
            outputs=map(tensor, servable.outputs),
        )

    async def model_config(self, request: pb.ModelConfigRequest, _caller: Caller) -> Message:
        """Describe a model or an application as Triton's configurations do."""
        described = self.backend.find(request.name, request.version)
        servable, model = described.servable, described.subject
        tensors = (*servable.inputs, *servable.outputs)
        folder = model.folder if isinstance(model, Entry) else None
        claims = folder.triton.inputs if folder else ()
        formats = {each.name: each.format for each in claims}
        label_files = folder.settings.labels if folder else {}
        # Otherwise dims are whole shapes, as metadata have them.
        has_batch = all(spec.axis == 0 for spec in tensors)

        def tensor(spec: TensorSpec) -> dict[str, Any]:
            dims = spec.row_shape if has_batch else spec.shape(servable.stated_rows)
            return {"name": spec.name, "data_type": data_type(spec.datatype), "dims": dims}

        config = pb.ModelConfig(
            name=servable.name,
            platform=APPLICATION_PLATFORM,
            max_batch_size=servable.max_rows if has_batch else 0,
            input=[
                pb.ModelInput(**tensor(spec), format=formats.get(spec.name))
                for spec in servable.inputs
            ],
            output=[
                pb.ModelOutput(**tensor(spec), label_filename=label_files.get(spec.name))
                for spec in servable.outputs
            ],
        )
        parameters: dict[str, str] = {
            "slo_ms": f"{(servable.slo_ns or self.backend.default_slo_ns) / NS_PER_MS:g}"
        }
        if isinstance(model, Pipeline):
            config.platform = ENSEMBLE
            _fill_steps(config, model)
        elif isinstance(model, Entry):
            assert model.folder is not None
            config.platform, config.backend = PLATFORM, BACKEND
            config.default_model_filename = MODEL_FILE
            if model.folder.settings.container is not None:
                container = model.folder.settings.container
                config.platform, config.backend = "", "python" if container.load else "container"
                config.default_model_filename = container.file or ""
            if (served := model.folder.settings.versions) is None or not served.listed:
                config.version_policy.latest.num_versions = 1 if served is None else served.latest
            else:
                config.version_policy.specific.versions.extend(served.listed)
            config.response_cache.enable = model.is_cached
            config.instance_group.add(name=servable.name, count=len(model.ready_on))
            if has_batch and servable.max_rows > 1:
                sizes = {size for each in model.ready_on.values() for size in each}
                config.dynamic_batching.preferred_batch_size.extend(sorted(sizes))
            if (levels := model.folder.settings.priority) is not None:
                batching = config.dynamic_batching
                batching.priority_levels, batching.default_priority_level = levels
            if model.one_by_one:
                parameters["one_by_one"] = model.one_by_one
            if model.stream is not None:
                config.model_transaction_policy.decoupled = True
            elif model.is_stepped:
                _describe_steps(
                    model, config.sequence_batching, {s.name: tensor(s) for s in tensors}
                )
        for key, value in parameters.items():
            config.parameters[key].string_value = value
        return pb.ModelConfigResponse(config=config)

    async def model_statistics(
        self, request: pb.ModelStatisticsRequest, _caller: Caller
    ) -> Message:
        """Outcomes of the requests to one model, or to each; other methods report on applications."""
        models = self.catalogue.models
        if request.name:
            models = [self.backend.model(request.name, request.version)]
            if not request.version:
                models = self.catalogue.versions(request.name)
        response = pb.ModelStatisticsResponse()
        for model in models:
            told = response.model_stats.add(name=model.name, version=model.version)
            counts = self.runtime.telemetry.by_model.get(model.model_id)
            if counts is not None:
                told.inference_stats.success.count = counts.answered
                told.inference_stats.fail.count = counts.refusals.total()
            if self.fill_statistics is not None:
                self.fill_statistics(model.model_id, told)
        return response

    # --- the model repository -----------------------------------------------------------------

    async def repository_index(
        self, request: pb.RepositoryIndexRequest, _caller: Caller
    ) -> Message:
        """List models and applications."""
        index = pb.RepositoryIndexResponse()
        for model in self.catalogue.models:
            state = self.catalogue.state(model)
            index.models.add(
                name=model.name,
                version=model.version,
                state=state.value,
                reason=self.catalogue.reason(model),
            )
        for running in self.applications.all:
            index.models.add(
                name=running.application.name,
                version=running.version,
                state=self.applications.state(running).value,
                reason=self.applications.lacks(running),
            )
        if request.ready:
            ready = [model for model in index.models if model.state == ModelState.READY.value]
            return pb.RepositoryIndexResponse(models=ready)
        return index

    async def repository_model_load(
        self, request: pb.RepositoryModelLoadRequest, _caller: Caller
    ) -> Message:
        """Load a model from the models directory, or from files in the request."""
        name = _model_named(request)
        files: dict[str, bytes] = {}
        try:
            config, files = _read_load(request)
            if files:
                await self.adder.add(name, files, config)
            else:
                await self.catalogue.reload(name, config)
        except (BadRequestError, ModelError, NoRoomError, StoreError) as error:
            # Triton's clients look for the first words; and for code and words of what no disk can store.
            told = f"failed to load {quote(name)}: "
            if any(is_too_long(path) for path in files):
                told += f"failed to poll from model repository: {error}"
                raise ToldStatusError(Status(grpc.StatusCode.INTERNAL, told, ())) from None
            raise type(error)(f"{told}{error}") from None
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(
        self, request: pb.RepositoryModelUnloadRequest, _caller: Caller
    ) -> Message:
        """Remove a model."""
        await asyncio.shield(self.catalogue.remove(_model_named(request)))
        return pb.RepositoryModelUnloadResponse()


def _describe_steps(
    model: Entry, batching: pb.ModelSequenceBatching, tensors: Mapping[str, Mapping[str, Any]]
) -> None:
    """Say which inputs are state, and which say where a step is, as Triton's configurations do."""
    settings = model.folder.settings.sequence if model.folder else None
    idle_ns = settings.idle_ns if settings is not None else IDLE_NS
    batching.max_sequence_idle_microseconds = idle_ns // NS_PER_US
    for pair in model.state:
        said = tensors[pair.input]
        batching.state.add(
            input_name=pair.input,
            output_name=pair.output,
            data_type=said["data_type"],
            dims=said["dims"],
        )
    for each in model.controls:
        control = batching.control_input.add(name=each.input).control.add(
            kind=CONTROL_KINDS[each.kind], data_type=tensors[each.input]["data_type"]
        )
        if each.kind != "id":
            control.fp32_false_true.extend(each.values)


def _fill_steps(config: pb.ModelConfig, pipeline: Pipeline) -> None:
    """Say of each stage what it takes and gives, with the names that tensors have in `[pipeline]`."""
    graph = pipeline.graph
    assert graph is not None
    for stage in graph.stages:
        step = config.ensemble_scheduling.step.add(
            model_name=stage.model, model_version=int(stage.version or -1)
        )
        for target, each in zip(stage.takes, stage.inputs, strict=True):
            before = "" if each.stage < 0 else f"{graph.stages[each.stage].name}."
            step.input_map[target.name] = before + each.source.name
        for given in stage.gives:
            step.output_map[given.name] = f"{stage.name}.{given.name}"
    # What clients get has its own name.
    for name, result in zip(pipeline.outputs, graph.results, strict=True):
        step = config.ensemble_scheduling.step[result.stage]
        step.output_map[result.source.name] = name.name


def _model_named(
    request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest,
) -> str:
    """Find the model's name: Triton sends it in field 2, behind a repository, and KServe in field 1."""
    name = request.model_name or request.repository_name
    if not name:
        raise BadRequestError("model_name: found none, expected the name of a model")
    return name


def _read_load(request: pb.RepositoryModelLoadRequest) -> tuple[str, dict[str, bytes]]:
    """Read a load's parameters: a configuration as JSON, and files by their path in the model's folder.

    Raises BadRequestError if there are others, or one is not what it should be.
    """
    config, files = "", {}
    for key, value in sorted(request.parameters.items()):
        if key == "config":
            config = value.string_param
            if len(config) > CONFIG_BYTES_MAX:
                raise BadRequestError(
                    f"parameter config: found {len(config)} characters, expected {CONFIG_BYTES_MAX} at most"
                )
            if config and not config.lstrip().startswith("{"):
                raise BadRequestError(
                    f"parameter config: found {quote(config)}, expected a JSON object"
                )
        elif key.startswith("file:") and value.WhichOneof("parameter_choice") == "bytes_param":
            files[key.removeprefix("file:")] = value.bytes_param
        else:
            raise BadRequestError(
                f"parameter {quote(key)}: found, expected config (JSON) or file:VERSION/NAME (bytes)"
            )
    return config, files
