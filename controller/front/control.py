"""`ControlService`: lets operators look at workers, models and applications, and change them."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import grpc

from clockwright import __version__
from clockwright.errors import BadRequestError, ClockwrightError, ConfigError, UnknownModelError
from clockwright.units import WorkerId
from clockwright.v1 import control_pb2 as pb
from clockwright.v1 import control_pb2_grpc as pb_grpc
from controller.catalogue import Catalogue, Entry, ModelState, name_of
from controller.core import ModelStatistics, Statistics, WorkerStatistics
from controller.front.http2_server import Http2Server
from controller.front.statuses import abort
from controller.model_folder import check_name
from controller.runtime import Runtime
from controller.selection.applications import Applications
from controller.selection.messages import application_info, read_application, read_feedback
from controller.telemetry import Counts
from controller.worker_link import WorkerLink, WorkerLinks

Context = grpc.aio.ServicerContext[Any, Any]

# Most files in a model's folder: generous for external data, small enough to list.
FILES_MAX = 10_000


class ControlService(pb_grpc.ControlServiceServicer):
    """Answers operators from the catalogue, the links, the scheduler's statistics and telemetry."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        links: WorkerLinks,
        applications: Applications,
        *,
        policy: str,
        default_slo_ns: int,
        spool: Path,
    ) -> None:
        """Serve one controller.

        Args:
            runtime: the controller's, like the next three.
            catalogue: knows the models.
            links: know the workers.
            applications: know the applications.
            policy: name of the scheduler's policy, for people.
            default_slo_ns: SLO of models that have none of their own.
            spool: a folder for the files of models that are added; they stay there.
        """
        self._runtime = runtime
        self._catalogue = catalogue
        self._links = links
        self._applications = applications
        self._policy = policy
        self._default_slo_ns = default_slo_ns
        self._spool = spool
        self._uploads = itertools.count(1)
        self._started_ns = runtime.clock()

    def mount(self, server: grpc.aio.Server | Http2Server) -> None:
        """Have a server serve this."""
        pb_grpc.add_ControlServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    # --- looking ------------------------------------------------------------------------------

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """Totals of the controller since it started."""
        models = self._catalogue.models
        total = self._runtime.telemetry.total
        states = [self._catalogue.state(model) for model in models]
        return pb.StatusResponse(
            version=__version__,
            policy=self._policy,
            uptime_ns=self._runtime.clock() - self._started_ns,
            ready=self._catalogue.ready and not self._runtime.draining,
            draining=self._runtime.draining,
            num_workers=sum(link.joined for link in self._links.links),
            num_models=len(models),
            num_models_ready=states.count(ModelState.READY),
            requests=total.requests + self._runtime.num_waiting,
            answered=total.answered,
            refusals=_refusals(total),
            cold_starts=total.cold_starts,
            waiting=self._runtime.num_waiting,
        )

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        """All workers, or the one that is named."""
        links = self._links.links
        if request.worker_id:
            links = [await self._link(request.worker_id, context, "ListWorkers")]
        statistics = {row.worker_id: row for row in self._runtime.statistics().workers}
        return pb.ListWorkersResponse(
            workers=[_worker_info(link, statistics.get(link.worker_id)) for link in links]
        )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """All models, or the one that is named."""
        models = self._catalogue.models
        if request.model_id:
            model = self._catalogue.find(request.model_id)
            if model is None:
                error = UnknownModelError(f"there is no model {request.model_id[:200]!r}")
                await abort(context, error, method="ListModels")
            models = [model]
        return pb.ListModelsResponse(models=self._model_infos(models))

    # --- doing --------------------------------------------------------------------------------

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: Context
    ) -> pb.DrainWorkerResponse:
        """Drain a worker; return once it has left."""
        link = await self._link(request.worker_id, context, "DrainWorker")
        link.drain()
        await link.left.wait()
        return pb.DrainWorkerResponse()

    async def AddModel(
        self, requests: AsyncIterator[pb.AddModelRequest], context: Context
    ) -> pb.AddModelResponse:
        """Add a model; return once a worker is ready for it. After an error nothing has changed."""
        directory = self._spool / str(next(self._uploads))
        try:
            name, replace = await _receive(requests, directory)
            if not replace and self._catalogue.find(name) is not None:
                await context.abort(
                    grpc.StatusCode.ALREADY_EXISTS, f"there is a model {name} already"
                )
            models = await self._catalogue.add(directory / name, replace=replace)
        except OSError as error:
            await _discard(directory)
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the controller cannot store the model: {error.strerror}",
            )
        except ClockwrightError as error:
            await _discard(directory)
            await abort(context, error, method="AddModel")
        except BaseException:
            await asyncio.shield(_discard(directory))
            raise
        return pb.AddModelResponse(models=self._model_infos(models))

    async def RemoveModel(
        self, request: pb.RemoveModelRequest, context: Context
    ) -> pb.RemoveModelResponse:
        """Remove a model. Requests that wait for it are refused; a batch that runs is finished."""
        try:
            self._catalogue.remove(request.model_id)
        except ClockwrightError as error:
            await abort(context, error, method="RemoveModel")
        return pb.RemoveModelResponse()

    # --- applications -------------------------------------------------------------------------

    async def PutApplication(
        self, request: pb.PutApplicationRequest, context: Context
    ) -> pb.PutApplicationResponse:
        """Add an application, or change one."""
        try:
            application = read_application(request.application)
            if self._applications.find(application.name) is not None and not request.replace:
                await context.abort(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"there is an application {application.name} already",
                )
            running = await asyncio.shield(
                self._applications.put(application, replace=request.replace)
            )
        except (
            ConfigError
        ) as error:  # Options of a policy are the caller's fault, not the process's.
            await abort(context, BadRequestError(str(error)), method="PutApplication")
        except ClockwrightError as error:
            await abort(context, error, method="PutApplication")
        info = await application_info(self._applications, running, "")
        return pb.PutApplicationResponse(application=info)

    async def RemoveApplication(
        self, request: pb.RemoveApplicationRequest, context: Context
    ) -> pb.RemoveApplicationResponse:
        """Remove an application with all it has learned."""
        try:
            await asyncio.shield(self._applications.remove(request.name))
        except ClockwrightError as error:
            await abort(context, error, method="RemoveApplication")
        return pb.RemoveApplicationResponse()

    async def ListApplications(
        self, request: pb.ListApplicationsRequest, context: Context
    ) -> pb.ListApplicationsResponse:
        """All applications, or the one that is named."""
        found = self._applications.all
        if request.name:
            running = self._applications.find(request.name)
            if running is None:
                error = UnknownModelError(f"there is no application {request.name[:200]!r}")
                await abort(context, error, method="ListApplications")
            found = [running]
        try:
            applications = [
                await application_info(self._applications, running, request.context)
                for running in found
            ]
        except ClockwrightError as error:
            await abort(context, error, method="ListApplications")
        cache = self._applications.cache_statistics()
        return pb.ListApplicationsResponse(
            applications=applications,
            cache_hits=cache.hits,
            cache_joins=cache.joins,
            cache_misses=cache.misses,
            cache_bytes=cache.num_bytes,
        )

    async def Feedback(self, request: pb.FeedbackRequest, context: Context) -> pb.FeedbackResponse:
        """Learn from feedback; the reply says what has changed."""
        try:
            results = await self._applications.feedback([read_feedback(i) for i in request.items])
        except ClockwrightError as error:
            await abort(context, error, method="Feedback")
        return pb.FeedbackResponse(
            outcomes=[
                pb.FeedbackOutcome(
                    query_id=result.query_id,
                    status=result.status.value,
                    losses=result.losses,
                    weights=result.weights,
                    message=result.message,
                )
                for result in results
            ]
        )

    async def EraseContext(
        self, request: pb.EraseContextRequest, context: Context
    ) -> pb.EraseContextResponse:
        """Have an application forget a user, session or tenant."""
        try:
            erased = await asyncio.shield(
                self._applications.erase(request.application, request.context)
            )
        except ClockwrightError as error:
            await abort(context, error, method="EraseContext")
        return pb.EraseContextResponse(erased=erased)

    # --- rows ---------------------------------------------------------------------------------

    async def _link(self, worker_id: str, context: Context, method: str) -> WorkerLink:
        link = self._links.find(WorkerId(worker_id))
        if link is None:
            known = ", ".join(link.worker_id for link in self._links.links[:10]) or "none"
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"{method}: there is no worker {worker_id[:200]!r}; connected: {known}",
            )
        return link

    def _model_infos(self, models: list[Entry]) -> list[pb.ModelInfo]:
        statistics: Statistics = self._runtime.statistics()
        rows = {row.model_id: row for row in statistics.models}
        return [self._model_info(model, rows.get(model.model_id)) for model in models]

    def _model_info(self, model: Entry, row: ModelStatistics | None) -> pb.ModelInfo:
        counts = self._runtime.telemetry.by_model.get(model.model_id, Counts())
        info = pb.ModelInfo(
            model_id=model.name,
            version=model.version,
            state=self._catalogue.state(model).value,
            reason=self._catalogue.reason(model),
            architecture_id=model.architecture_id or "",
            slo_ns=model.slo_ns or self._default_slo_ns,
            weights_bytes=model.weights_bytes,
            num_pages=model.num_pages,
            requests=counts.requests,
            answered=counts.answered,
            refusals=_refusals(counts),
            cold_starts=counts.cold_starts,
        )
        if row is not None:
            info.resident_on.extend(row.resident_on)
            info.waiting = row.num_waiting + row.num_sent
            info.load_ns = row.load_ns
            for batch_size, exec_ns in sorted(row.exec_ns.items()):
                info.exec.add(batch_size=batch_size, exec_ns=exec_ns)
        return info


def _worker_info(link: WorkerLink, row: WorkerStatistics | None) -> pb.WorkerInfo:
    register = link.register
    info = pb.WorkerInfo(
        worker_id=register.worker_id,
        device=register.device,
        gpu_kind=register.gpu_kind,
        host=register.host,
        pid=register.pid,
        state="DRAINING" if link.draining else "READY" if link.joined else "JOINING",
        num_pages=register.num_pages,
        page_bytes=register.page_bytes,
        clock_offset_us=(link.clock.offset_ns or 0) / 1000,
        round_trip_us=link.clock.round_trip_ns / 1000,
        models_refused=[
            f"{name_of(model)}: {reason}" for model, reason in sorted(link.refused.items())
        ],
        clock_mhz=link.card.clock_mhz,
        clock_mhz_max=link.card.clock_mhz_max,
        complaints=link.card.complaints,
    )
    if row is not None:
        info.num_free_pages = row.num_free_pages
        info.resident.extend(sorted(map(name_of, row.resident)))
        info.loading.extend(sorted(map(name_of, row.loading)))
        info.exec_backlog_ns = row.exec_backlog_ns
        info.load_backlog_ns = row.load_backlog_ns
        info.actions_in_flight = row.num_in_flight
    return info


def _refusals(counts: Counts) -> list[pb.RefusalCount]:
    return [
        pb.RefusalCount(reason=reason, count=count)
        for reason, count in sorted(counts.refusals.items())
    ]


async def _receive(
    requests: AsyncIterator[pb.AddModelRequest], directory: Path
) -> tuple[str, bool]:
    """Write the files of a model's folder below `directory`.

    Returns:
        The model's name, and whether it is to replace another.

    Raises:
        ModelError: no model may have that name.
        BadRequestError: a path leads out of the folder, or there are no files.
        OSError: the disk cannot take the files.
    """
    name, replace, path, num_files = "", False, "", 0
    file: BinaryIO | None = None
    try:
        async for request in requests:
            if not name:
                check_name(request.model_id)
                name, replace = request.model_id, request.replace
            if request.path and request.path != path:
                path = request.path
                num_files += 1
                if num_files > FILES_MAX:
                    raise BadRequestError(f"path: more than {FILES_MAX} files")
                if file is not None:
                    file.close()
                file = _create(directory / name, path)
            if file is None:
                raise BadRequestError(
                    "path: expected in the message that begins a file, found none"
                )
            await asyncio.to_thread(file.write, request.content)
    finally:
        if file is not None:
            file.close()
    if not name:
        raise BadRequestError("model_id: expected in the first message, found an empty stream")
    return name, replace


def _create(folder: Path, path: str) -> BinaryIO:
    relative = PurePosixPath(path)
    if (
        relative.is_absolute()
        or ".." in relative.parts
        or not relative.parts
        or "\\" in path
        or not path.isprintable()
    ):
        raise BadRequestError(f"path: found {path[:200]!r}, expected one inside the model's folder")
    target = folder / relative
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.open("xb")
    except (FileExistsError, NotADirectoryError):
        raise BadRequestError(f"path: {path[:200]!r} was sent before") from None


async def _discard(directory: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
