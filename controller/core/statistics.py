"""A frozen picture of the scheduler's state, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from clockwright.units import NS_PER_MS, ArchitectureId, GpuKind, ModelId, WorkerId
from controller.core.admission import rows_due
from controller.core.books import Books, own_requests
from controller.core.capacity import KindStatistics
from controller.core.state import SENT, Model, WorkerState

_MOMENT_NS: Final = 2 * NS_PER_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """One GPU as the controller knows it."""

    worker_id: WorkerId
    gpu_kind: GpuKind
    draining: bool
    num_pages: int
    num_free_pages: int
    resident: tuple[ModelId, ...]
    loading: tuple[ModelId, ...]
    exec_backlog_ns: int
    load_backlog_ns: int
    num_in_flight: int
    #: Models that get nothing there because they failed, or the worker is slow or silent (health.py): why.
    suspended: dict[ModelId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """One model; estimates are of the first worker that has it."""

    model_id: ModelId
    num_waiting: int
    num_sent: int
    resident_on: tuple[WorkerId, ...]
    ready_on: tuple[WorkerId, ...]
    architecture_id: ArchitectureId | None
    num_pages: int
    load_ns: int
    exec_ns: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Everything at one moment."""

    num_waiting: int
    num_sent: int
    workers: tuple[WorkerStatistics, ...]
    models: tuple[ModelStatistics, ...]
    #: What each kind of worker lacks.
    kinds: tuple[KindStatistics, ...]
    #: Requests dropped per second because no worker offers their model.
    dropped_without_worker_rps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The work of one GPU, in numbers."""

    worker_id: WorkerId
    num_pages: int
    num_free_pages: int
    num_loading_pages: int
    exec_backlog_ns: int
    load_backlog_ns: int
    num_in_flight: int
    #: Models that get nothing there, and why.
    suspended: dict[ModelId, str]


#: A model, how many pages its weights take, and whether they are there already.
HeldPages = tuple[ModelId, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """The work of all workers. Cheap enough to be read often: it lists nothing by model."""

    workers: tuple[WorkerLoad, ...]
    kinds: tuple[KindStatistics, ...]
    dropped_without_worker_rps: float


# So many models with waiting requests say how much work waits: a look at each takes some microseconds.
_SAMPLE: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """How soon the lanes could begin a request, for who chooses among several controllers."""

    #: Time until a lane is free of what is sent and of what waits and is due earlier, by the SLOs that were asked for.
    waits_ns: tuple[int, ...]
    #: Workers that take work, and their free pages.
    num_workers: int
    num_free_pages: int


#: What one row of a model takes alone and in the best batch, and how long its weights take to load: 0, they are resident.
ModelTimes = tuple[int, float, int]


def outlook_of(books: Books, slos_ns: Sequence[int], now_ns: int) -> Outlook:
    """Predict how long requests with some SLOs would wait. Takes O(models + workers)."""
    workers = [worker for worker in books.workers.values() if not worker.draining]
    lanes = max(len(workers), 1)
    sent_ns = sum([worker.exec_lane.available_ns(now_ns) - now_ns for worker in workers])
    waiting = [model for model in books.models.values() if model.queue]
    step = 1 + len(waiting) // _SAMPLE
    looked_at = waiting[::step]
    scale = len(waiting) / max(len(looked_at), 1)
    waits_ns = []
    for slo_ns in slos_ns:
        work_ns = 0.0
        for model in looked_at:
            if model.fastest is not None:
                work_ns += rows_due(model, now_ns + slo_ns) * model.fastest.ns_per_row
        waits_ns.append(int((sent_ns + work_ns * scale) / lanes))
    return Outlook(
        waits_ns=tuple(waits_ns),
        num_workers=len(workers),
        num_free_pages=sum([worker.num_free_pages for worker in workers]),
    )


def model_times_of(books: Books) -> dict[ModelId, ModelTimes]:
    """What a row of each model takes that some worker could run. Takes O(models + copies)."""
    found: dict[ModelId, ModelTimes] = {}
    for model_id, model in books.models.items():
        fastest = model.fastest
        if fastest is not None:
            is_cold = not any([copy.resident for copy in model.copies.values()])
            load_ns = fastest.load_ns if is_cold else 0
            found[model_id] = fastest.exec_ns[0], fastest.ns_per_row, load_ns
    return found


def cluster_load_of(books: Books, now_ns: int) -> ClusterLoad:
    """Count what operators may see, but for models."""
    kinds, without_worker = books.shortages.statistics(
        now_ns, books.workers.values(), has_models=bool(books.models)
    )
    suspended = _suspended(books)
    return ClusterLoad(
        workers=tuple(
            WorkerLoad(
                worker_id=worker.worker_id,
                num_pages=worker.num_pages,
                num_free_pages=worker.num_free_pages,
                num_loading_pages=sum([copy.num_pages for copy in worker.loading.values()]),
                exec_backlog_ns=worker.exec_lane.available_ns(now_ns) - now_ns,
                load_backlog_ns=worker.load_lane.available_ns(now_ns) - now_ns,
                num_in_flight=len(worker.in_flight),
                suspended=suspended.get(worker, {}),
            )
            for worker in books.workers.values()
        ),
        kinds=kinds,
        dropped_without_worker_rps=without_worker,
    )


def snapshot(books: Books, now_ns: int) -> Statistics:
    """Copy out what operators may see."""
    model_rows = tuple(_model(model) for model in books.models.values())
    kinds, without_worker = books.shortages.statistics(
        now_ns, books.workers.values(), has_models=bool(books.models)
    )
    suspended = _suspended(books)
    return Statistics(
        num_waiting=sum(row.num_waiting for row in model_rows),
        num_sent=sum(row.num_sent for row in model_rows),
        workers=tuple(
            _worker(worker, suspended.get(worker, {}), now_ns) for worker in books.workers.values()
        ),
        models=model_rows,
        kinds=kinds,
        dropped_without_worker_rps=without_worker,
    )


def held_pages_of(books: Books) -> dict[WorkerId, list[HeldPages]]:
    """List what fills the pages of each worker; linear in copies."""
    return {
        worker.worker_id: [
            (copy.model.model_id, copy.num_pages, copy.resident) for copy in worker.copies.values()
        ]
        for worker in books.workers.values()
    }


def share_with_devices(books: Books, now_ns: int) -> float:
    """The part of the open requests whose Infers are still to end, and not within the next moment.

    No result of theirs waits to be read. An Infer is thought to be over once it is late, or once it and those before it can
    have been run in no time: what is predicted then is how late this process reads.
    """
    found = 0
    for worker in books.workers.values():
        exec_ns = 0
        for sent in worker.in_flight.values():
            if sent.requests:
                exec_ns += sent.action.expected_duration_ns
                if min(exec_ns, sent.expected_end_ns - now_ns) > _MOMENT_NS:
                    found += sum([request.phase is SENT for request in own_requests(sent)])
    return found / max(len(books.requests), 1)


def model_statistics_of(books: Books, model_id: ModelId) -> ModelStatistics | None:
    """Copy out what operators may see of one model; Returns None if the scheduler does not know it."""
    model = books.models.get(model_id)
    return None if model is None else _model(model)


def _suspended(books: Books) -> dict[WorkerState, dict[ModelId, str]]:
    suspended: dict[WorkerState, dict[ModelId, str]] = {}
    for model in books.suspended:
        for worker, suspension in model.suspended.items():
            suspended.setdefault(worker, {})[model.model_id] = suspension.words
    return suspended


def _worker(worker: WorkerState, suspended: dict[ModelId, str], now_ns: int) -> WorkerStatistics:
    copies = worker.copies.values()
    return WorkerStatistics(
        worker_id=worker.worker_id,
        gpu_kind=worker.gpu_kind,
        draining=worker.draining,
        num_pages=worker.num_pages,
        num_free_pages=worker.num_free_pages,
        resident=tuple(copy.model.model_id for copy in copies if copy.resident),
        loading=tuple(copy.model.model_id for copy in copies if not copy.resident),
        exec_backlog_ns=worker.exec_lane.available_ns(now_ns) - now_ns,
        load_backlog_ns=worker.load_lane.available_ns(now_ns) - now_ns,
        num_in_flight=len(worker.in_flight),
        suspended=suspended,
    )


def _model(model: Model) -> ModelStatistics:
    readiness = next(iter(model.ready.values()), None)
    estimates = readiness.estimates if readiness else None
    return ModelStatistics(
        model_id=model.model_id,
        num_waiting=len(model.queue),
        num_sent=model.num_sent,
        resident_on=tuple(w.worker_id for w, copy in model.copies.items() if copy.resident),
        ready_on=tuple(worker.worker_id for worker in model.ready),
        architecture_id=readiness.architecture_id if readiness else None,
        num_pages=readiness.num_pages if readiness else 0,
        load_ns=estimates.load_ns if estimates else 0,
        exec_ns=dict(zip(estimates.sizes, estimates.exec_ns, strict=True)) if estimates else {},
    )
