"""`ControlService`: lets operators look at workers, models and applications, and change them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, BinaryIO, Final

from clockwright import __version__
from clockwright.errors import (
    BadRequestError,
    ConfigError,
    ModelError,
    NameTakenError,
    Refusal,
    RefusedError,
    UnknownModelError,
    UnknownRequestError,
    UnknownWorkerError,
)
from clockwright.foreign import check_name_length, quote
from clockwright.units import GpuKind, WorkerId
from clockwright.v1 import control_pb2 as pb
from clockwright.wire.bulk import check_fields, split_bulk
from controller.access.caller import Caller
from controller.access.quota_book import QuotaBook
from controller.core import ModelStatistics, WorkerStatistics
from controller.core.quotas import BOUNDS, OTHERS, Quota
from controller.front.admission.pressure import MemoryPressure, MemoryState
from controller.front.methods import CONTROL, CallStream, Method, bind
from controller.front.remote.front_link import FrontLink, FrontLinks
from controller.front.services.adding import FILES_MAX, ModelAdder
from controller.front.services.health import WATCHERS_MAX
from controller.front.services.recent import kind_info, recent_actions, recent_requests
from controller.front.services.request_report import explain_request
from controller.links.worker_link import WorkerLink, WorkerLinks
from controller.links.workers_wanted import WorkersWanted
from controller.models.catalogue import Catalogue, name_of
from controller.models.entry import Entry, ModelState
from controller.models.model_folder import check_name
from controller.models.uploads import Upload
from controller.runtime import Runtime
from controller.selection.applications import Applications
from controller.selection.messages import application_info, read_application, read_feedback
from controller.telemetry.tables import Counts

# What is made of feedback is made in slices, between which requests get their turn.
_FEEDBACK_SLICE = 256

_CONTENT_FIELD = 3

# Who watches the workers wanted hears so often that nothing has changed: its connection lives.
_RENEW_INTERVAL_S: Final = 10.0


@dataclass(eq=False)
class ControlService:
    """Answers operators from the catalogue, the links, the scheduler's statistics and telemetry."""

    runtime: Runtime
    catalogue: Catalogue
    links: WorkerLinks
    applications: Applications
    fronts: FrontLinks
    _: KW_ONLY
    policy: str
    default_slo_ns: int
    adder: ModelAdder
    quotas: QuotaBook
    memory: MemoryPressure
    wanted: WorkersWanted
    knows_callers: bool = False
    has_tls: bool = False

    def __post_init__(self) -> None:
        self._num_watchers = 0
        self._started_ns = self.runtime.clock()

    def handlers(self) -> dict[Method, Any]:
        """What answers the methods of the service."""
        return bind(CONTROL, self)

    # --- looking ------------------------------------------------------------------------------

    async def status(self, _: pb.StatusRequest, _caller: Caller) -> pb.StatusResponse:
        """Totals of the controller since it started."""
        models = self.catalogue.models
        total = self.runtime.telemetry.total
        states = [self.catalogue.state(model) for model in models]
        load = self.runtime.cluster_load()
        return pb.StatusResponse(
            version=__version__,
            policy=self.policy,
            uptime_ns=self.runtime.clock() - self._started_ns,
            ready=(
                self.catalogue.ready
                and not self.runtime.draining
                and self.memory.state is not MemoryState.ALL_REFUSED
            ),
            draining=self.runtime.draining,
            num_workers=sum(link.joined for link in self.links.links),
            num_models=len(models),
            num_models_ready=states.count(ModelState.READY),
            requests=total.requests + self.runtime.num_waiting,
            answered=total.answered,
            refusals=_reasons(total.refusals),
            counters=total.by_name(),
            waiting=self.runtime.num_waiting,
            kinds=[kind_info(kind) for kind in load.kinds],
            dropped_without_worker_rps=load.dropped_without_worker_rps,
            fronts=[_front_info(front, self.runtime.clock()) for front in self.fronts.links],
            memory_bytes=self.memory.used_bytes,
            memory_limit_bytes=self.memory.limit_bytes,
            memory_state=self.memory.state.value,
            knows_callers=self.knows_callers,
            has_tls=self.has_tls,
            denials=_reasons(
                {reason.value: count for reason, count in self.runtime.telemetry.denials.items()}
            ),
            recent=recent_requests(
                self.runtime.telemetry, since_ns=self._started_ns, now_ns=self.runtime.clock()
            ),
        )

    async def list_workers(
        self, request: pb.ListWorkersRequest, _caller: Caller
    ) -> pb.ListWorkersResponse:
        """All workers, or the one that is named."""
        links = self.links.links
        if request.worker_id:
            links = [self._link(request.worker_id)]
        statistics = {row.worker_id: row for row in self.runtime.statistics().workers}
        recent = recent_actions(
            self.runtime.telemetry,
            {link.worker_id: link.register.gpu_kind for link in self.links.links},
            since_ns=self._started_ns,
            now_ns=self.runtime.clock(),
        )
        response = pb.ListWorkersResponse()
        for link in links:
            info = _worker_info(link, statistics.get(link.worker_id))
            if (actions := recent.get(link.worker_id)) is not None:
                info.recent.CopyFrom(actions)
            response.workers.append(info)
        return response

    async def list_models(
        self, request: pb.ListModelsRequest, _caller: Caller
    ) -> pb.ListModelsResponse:
        """All models, or the one that is named."""
        models = self.catalogue.models
        if request.model_id:
            models = self.catalogue.versions(request.model_id)
            if not models:
                raise UnknownModelError(f"there is no model {quote(request.model_id)}")
        return pb.ListModelsResponse(models=self._model_infos(models))

    async def explain(self, request: pb.ExplainRequest, _caller: Caller) -> pb.ExplainResponse:
        """Explain the outcome of a request of any tenant."""
        return explain_request(self.runtime, request.request_id, lambda _: True)

    async def explain_own(self, request: pb.ExplainRequest, caller: Caller) -> pb.ExplainResponse:
        """Explain the outcome of a request of the caller's tenant."""
        own = caller.tenant
        if not own:
            # A tenant that a request only claims proves nothing.
            raise UnknownRequestError(
                "no request is known to be the caller's own: who has no tenant, which keys and tokens give, asks as an"
                " operator (Explain, v2/requests/ID)"
            )
        return explain_request(self.runtime, request.request_id, lambda tenant: tenant == own)

    # --- doing --------------------------------------------------------------------------------

    async def drain_worker(
        self, request: pb.DrainWorkerRequest, _caller: Caller
    ) -> pb.DrainWorkerResponse:
        """Drain a worker; return once it has left."""
        link = self._link(request.worker_id)
        is_asked = request.unless_last and link.joined and not link.draining
        if is_asked and (words := self.runtime.why_not_without(link.worker_id)):
            raise ModelError(words)
        link.drain()
        await link.left.wait()
        return pb.DrainWorkerResponse()

    async def watch_workers_wanted(self, stream: CallStream, _caller: Caller) -> None:
        """Tell how many workers the load needs, at once and at each change, until the client goes or the server."""
        data = await stream.read() or b""
        check_fields(data)
        pb.WatchWorkersWantedRequest.FromString(data)
        if self._num_watchers >= WATCHERS_MAX:
            text = f"found {WATCHERS_MAX} who watch the workers wanted, expected fewer"
            raise RefusedError(Refusal.OVERLOADED, text)
        self._num_watchers += 1
        wanted = self.wanted
        wanted.look()
        try:
            while not wanted.is_over:
                changed = asyncio.ensure_future(wanted.changed())
                await stream.write(wanted.told.SerializeToString())
                await asyncio.wait((changed,), timeout=_RENEW_INTERVAL_S)
                changed.cancel()
        finally:
            self._num_watchers -= 1

    async def release_worker(
        self, request: pb.ReleaseWorkerRequest, _caller: Caller
    ) -> pb.ReleaseWorkerResponse:
        """Drain the worker of a kind that is cheapest to lose, or a named one."""
        name = WorkerId(request.worker) if request.worker else None
        worker_id, words = self.wanted.release(GpuKind(request.gpu_kind), name)
        return pb.ReleaseWorkerResponse(worker=worker_id, reason=words)

    async def add_model(self, stream: CallStream, _caller: Caller) -> None:
        """Add a model; answer once a worker is ready for it. After an error nothing has changed."""
        async with self.adder.upload() as upload:
            name, replace = await self._receive(stream, upload)
            if not replace and self.catalogue.find(name) is not None:
                raise NameTakenError(f"there is a model {name} already")
            models = await self.catalogue.add(upload.folder / name, replace=replace, upload=upload)
            response = pb.AddModelResponse(models=self._model_infos(models))
        await stream.write(response.SerializeToString())

    async def _receive(self, messages: CallStream, upload: Upload) -> tuple[str, bool]:
        """Write the files of a model's folder.

        Returns the model's name, and whether it is to replace another. Raises ModelError if no model may have that
        name; BadRequestError if a path leads out of the folder, or there are no files; NoRoomError if uploads have
        their limit; ProtocolError if something is no message; DecodeError likewise; OSError if the disk cannot take the
        files.
        """
        name, replace, path, num_files = "", False, "", 0
        file: BinaryIO | None = None
        try:
            async for data in messages:
                header, contents = split_bulk(data, _CONTENT_FIELD)
                request = pb.AddModelRequest.FromString(header)
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
                    file = self.adder.create(upload, name, path)
                if file is None:
                    raise BadRequestError(
                        "path: expected in the message that begins a file, found none"
                    )
                for content in contents[-1:]:  # The last of a field counts.
                    await self.adder.write(upload, file, content)
        finally:
            if file is not None:
                file.close()
        if not name:
            raise BadRequestError("model_id: expected in the first message, found an empty stream")
        return name, replace

    async def remove_model(
        self, request: pb.RemoveModelRequest, _caller: Caller
    ) -> pb.RemoveModelResponse:
        """Remove a model. Requests that wait for it are refused; a batch that runs is finished."""
        await asyncio.shield(self.catalogue.remove(request.model_id))
        return pb.RemoveModelResponse()

    async def pin_model(self, request: pb.PinModelRequest, _caller: Caller) -> pb.PinModelResponse:
        """Pin a model, or let it go."""
        models = await asyncio.shield(self.catalogue.pin(request.model_id, pinned=request.pinned))
        return pb.PinModelResponse(models=self._model_infos(models))

    async def route_model(
        self, request: pb.RouteModelRequest, _caller: Caller
    ) -> pb.RouteModelResponse:
        """Change which versions of a model requests get, or take the last change back."""
        catalogue, name = self.catalogue, request.model_id
        maps = {each: dict(getattr(request, each)) for each in ("aliases", "traffic", "shadow")}
        if request.roll_back == any(maps.values()):
            raise BadRequestError(
                "expected either roll_back, or some of aliases, traffic and shadow"
            )
        change = catalogue.roll_back(name) if request.roll_back else catalogue.route(name, **maps)
        await asyncio.shield(change)
        return pb.RouteModelResponse(models=self._model_infos(catalogue.versions(name)))

    # --- applications -------------------------------------------------------------------------

    async def put_application(
        self, request: pb.PutApplicationRequest, _caller: Caller
    ) -> pb.PutApplicationResponse:
        """Add an application, or change one."""
        application = read_application(request.application)
        if self.applications.find(application.name) is not None and not request.replace:
            raise NameTakenError(f"there is an application {application.name} already")
        try:
            running = await asyncio.shield(
                self.applications.put(application, replace=request.replace)
            )
        except ConfigError as error:
            # Options of a policy are the caller's fault, not the process's.
            raise BadRequestError(str(error)) from None
        info = await application_info(self.applications, running, "")
        return pb.PutApplicationResponse(application=info)

    async def remove_application(
        self, request: pb.RemoveApplicationRequest, _caller: Caller
    ) -> pb.RemoveApplicationResponse:
        """Remove an application with all it has learned."""
        await asyncio.shield(self.applications.remove(request.name))
        return pb.RemoveApplicationResponse()

    async def list_applications(
        self, request: pb.ListApplicationsRequest, _caller: Caller
    ) -> pb.ListApplicationsResponse:
        """All applications, or the one that is named."""
        found = self.applications.all
        if request.name:
            running = self.applications.find(request.name)
            if running is None:
                raise UnknownModelError(f"there is no application {quote(request.name)}")
            found = [running]
        check_name_length("context", request.context)
        applications = [
            await application_info(self.applications, running, request.context) for running in found
        ]
        cache = self.applications.cache_statistics()
        return pb.ListApplicationsResponse(
            applications=applications,
            cache_hits=cache.hits,
            cache_joins=cache.joins,
            cache_misses=cache.misses,
            cache_bytes=cache.num_bytes,
        )

    async def feedback(self, request: pb.FeedbackRequest, caller: Caller) -> pb.FeedbackResponse:
        """Learn from feedback; the reply says what has changed."""
        items = []
        for index, item in enumerate(request.items, 1):
            items.append(read_feedback(item))
            if index % _FEEDBACK_SLICE == 0:
                await asyncio.sleep(0)
        response = pb.FeedbackResponse()
        for index, result in enumerate(
            await self.applications.feedback(items, asker=caller.owner), 1
        ):
            if index % _FEEDBACK_SLICE == 0:
                await asyncio.sleep(0)
            response.outcomes.add(
                query_id=result.query_id,
                status=result.status.value,
                losses=result.losses,
                weights=result.weights,
                message=result.message,
            )
        return response

    async def erase_context(
        self, request: pb.EraseContextRequest, _caller: Caller
    ) -> pb.EraseContextResponse:
        """Have an application forget a user, session or tenant."""
        check_name_length("context", request.context)
        erased = await asyncio.shield(self.applications.erase(request.application, request.context))
        return pb.EraseContextResponse(erased=erased)

    # --- quotas -------------------------------------------------------------------------------

    async def set_quota(self, request: pb.SetQuotaRequest, _caller: Caller) -> pb.SetQuotaResponse:
        """Give a tenant a quota, from the next request on."""
        try:
            quota = _read_quota(request.quota)
            await asyncio.shield(self.quotas.set(request.tenant, quota))
        except ConfigError as error:
            raise BadRequestError(str(error)) from None
        weights = {} if quota.weight == 1 else {request.tenant: quota.weight}
        return pb.SetQuotaResponse(remark=self.quotas.remark(weights))

    async def remove_quota(
        self, request: pb.RemoveQuotaRequest, _caller: Caller
    ) -> pb.RemoveQuotaResponse:
        """Take a tenant's quota away."""
        await asyncio.shield(self.quotas.remove(request.tenant))
        return pb.RemoveQuotaResponse()

    async def list_quotas(self, _: pb.ListQuotasRequest, _caller: Caller) -> pb.ListQuotasResponse:
        """All quotas, and what their tenants have now."""
        book = self.quotas
        response = pb.ListQuotasResponse(file="" if book.file is None else str(book.file))
        if (others := book.quotas.quotas.get(OTHERS)) is not None:
            response.quotas.add(tenant=OTHERS, quota=_quota_message(others))
        for tenant, use in book.uses():
            response.quotas.add(
                tenant=tenant,
                quota=_quota_message(use.quota),
                open_requests=use.num_open,
                open_bytes=use.num_bytes,
                admitted=use.num_admitted,
                refused=use.num_refused,
            )
        return response

    # --- rows ---------------------------------------------------------------------------------

    def _link(self, worker_id: str) -> WorkerLink:
        link = self.links.find(WorkerId(worker_id))
        if link is None:
            known = ", ".join(link.worker_id for link in self.links.links[:10]) or "none"
            raise UnknownWorkerError(f"there is no worker {quote(worker_id)}; connected: {known}")
        return link

    def _model_infos(self, models: list[Entry]) -> list[pb.ModelInfo]:
        statistics = self.runtime.statistics()
        rows = {row.model_id: row for row in statistics.models}
        return [self._model_info(model, rows.get(model.model_id)) for model in models]

    def _model_info(self, model: Entry, row: ModelStatistics | None) -> pb.ModelInfo:
        counts = self.runtime.telemetry.by_model.get(model.model_id, Counts())
        info = pb.ModelInfo(
            model_id=model.name,
            version=model.version,
            state=self.catalogue.state(model).value,
            reason=self.catalogue.reason(model),
            architecture_id=model.architecture_id or "",
            slo_ns=model.slo_ns or self.default_slo_ns,
            weights_bytes=model.weights_bytes,
            one_by_one=model.one_by_one,
            pinned=self.catalogue.is_pinned(model),
            num_pages=model.num_pages,
            requests=counts.requests,
            answered=counts.answered,
            refusals=_reasons(counts.refusals),
            counters=counts.by_name(),
            share=self.catalogue.shares(model.name).get(model.version, 0.0),
        )
        aliases = self.catalogue.routing(model.name).aliases
        info.aliases.extend(alias for alias in aliases if aliases[alias] == model.version)
        shadow = self.catalogue.shadow(model.name)
        if shadow is not None and shadow[0] is model:
            info.shadow = shadow[1]
        if row is not None:
            info.resident_on.extend(row.resident_on)
            info.waiting = row.num_waiting + row.num_sent
            info.load_ns = row.load_ns
            for batch_size, exec_ns in sorted(row.exec_ns.items()):
                info.exec.add(batch_size=batch_size, exec_ns=exec_ns)
        return info


def _front_info(link: FrontLink, now_ns: int) -> pb.FrontInfo:
    return pb.FrontInfo(
        name=link.name,
        address=link.address,
        age_ns=now_ns - link.joined_ns,
        requests_open=link.asks.num_open,
        link_bytes=link.num_bytes,
        workers=sorted(worker.worker_id for worker in link.workers),
    )


def _read_quota(message: pb.Quota) -> Quota:
    """Read a quota, in whose message 0 stands for what is not bounded. Raises ConfigError if a bound cannot be."""
    bounds = {name: getattr(message, name) for name in BOUNDS}
    return Quota(**{name: value for name, value in bounds.items() if value})


def _quota_message(quota: Quota) -> pb.Quota:
    return pb.Quota(**{name: getattr(quota, name) for name in BOUNDS})


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
            f"{name_of(model)}: {reason}" for model, reason in sorted(link.models.refused.items())
        ],
        clock_mhz=link.card.clock_mhz,
        clock_mhz_max=link.card.clock_mhz_max,
        complaints=link.card.complaints,
        payload_address=link.payload_address,
    )
    if row is not None:
        info.num_free_pages = row.num_free_pages
        info.resident.extend(sorted(map(name_of, row.resident)))
        info.loading.extend(sorted(map(name_of, row.loading)))
        info.exec_backlog_ns = row.exec_backlog_ns
        info.load_backlog_ns = row.load_backlog_ns
        info.actions_in_flight = row.num_in_flight
        info.suspended.extend(
            f"{name_of(model)}: {words}" for model, words in sorted(row.suspended.items())
        )
    return info


def _reasons(counts: Mapping[str, int]) -> list[pb.RefusalCount]:
    return [pb.RefusalCount(reason=reason, count=counts[reason]) for reason in sorted(counts)]
