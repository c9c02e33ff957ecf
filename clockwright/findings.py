"""What is wrong with a running server, from its statistics alone: pure functions.

Each finding names the fault, its figures, and what to do. Causes come first: a slow worker or too few pages cause an
overload, so they come before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clockwright.v1 import control_pb2 as pb

#: A worker is slow if its EXECs take this many times as long as those of others of its kind, or as predicted. Noise
#: of a busy CPU stays below; the scheduler avoids a worker from three on.
SLOW_FACTOR = 1.5
# Fewer EXECs say nothing.
_INFERS_MIN = 5
# A smaller share of dropped requests is not reported.
_DROPPED_SHARE = 0.01
# Fewer refusals may be chance.
_REFUSED_MIN = 3
# A busier lane has no room for bursts.
_TARGET_BUSY = 0.8
# Lanes that load for more than this part of their time have little room left for models that come next.
_LOADING_BUSY = 0.5
# Fewer actions that came too late to be run may be chance.
_LATE_MIN = 5
# A finding names at most so many models.
_NAMES_SHOWN = 3
# Refusals of these kinds are not the caller's fault.
_OWN_FAULTS = frozenset(("COLD", "FAILED", "LATE", "OVERLOADED", "WORKER_LOST"))
# Refusals of these kinds mean that something is short.
_SHORTAGES = frozenset(("COLD", "OVERLOADED"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFinding:
    """Something that is wrong."""

    #: In one or two words: "overload", "slow worker", "too few pages", ...
    name: str
    #: Which, how much, and what to do; one line.
    words: str
    #: Whether requests are refused because of it now; otherwise it is a warning.
    harmful: bool = True
    #: Requests were refused because of it some seconds ago, and hardly any since: nothing is wrong now.
    past: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesAsked:
    """Pages that the models in use need."""

    #: Pages of all of them.
    num_pages: int
    #: Pages of the smallest one that was refused; 0: none was.
    num_least: int


def diagnose(
    status: pb.StatusResponse,
    workers: Sequence[pb.WorkerInfo],
    models: Sequence[pb.ModelInfo] = (),
    asked: PagesAsked | None = None,
) -> list[ClusterFinding]:
    """Find everything that is wrong, causes first, then what is past; the server is well if there is nothing else.

    `asked` says what the models need that were asked for lately; None: that is not known.
    """
    looks: list[Callable[[], list[ClusterFinding]]] = [
        lambda: not_serving(status, workers),
        lambda: slow_workers(workers, status),
        lambda: long_runs(status),
        lambda: too_few_pages(status, workers, asked),
        lambda: overload(status, workers),
        lambda: thin_links(status),
        lambda: unfit_models(models),
    ]
    found = [finding for look in looks for finding in look()]
    if not any(finding.harmful for finding in found):
        found = [*refusals(status), *found]
    return sorted(found, key=lambda finding: finding.past)


def well(status: pb.StatusResponse) -> str:
    """Describe a server without findings: its refusals have other reasons than a shortage."""
    recent = status.recent
    others = {row.reason: row.count for row in recent.refusals if row.reason not in _OWN_FAULTS}
    num = sum(others.values())
    if num <= _DROPPED_SHARE * recent.requests:
        return "nothing is short, requests are answered in time"
    reasons = ", ".join(f"{others[reason]} {reason}" for reason in sorted(others))
    return (
        f"nothing is short; {num / recent.requests:.0%} of the requests{_last(recent.over_ns)} were refused for other"
        f" reasons: {reasons}"
    )


def not_serving(
    status: pb.StatusResponse, workers: Sequence[pb.WorkerInfo]
) -> list[ClusterFinding]:
    """Find why no request is answered, or not all."""
    found = []
    if status.draining:
        found.append(
            ClusterFinding(name="draining", words="the server is shutting down: use another one")
        )
    elif not workers:
        found.append(
            ClusterFinding(
                name="no worker",
                words="no worker is connected; start one: clockwright worker --controller HOST:PORT",
            )
        )
    if status.memory_state not in ("", "AMPLE"):
        what = (
            "large requests are" if status.memory_state == "LARGE_REFUSED" else "all requests are"
        )
        found.append(
            ClusterFinding(
                name="short of memory",
                words=f"{status.memory_bytes >> 20} of {status.memory_limit_bytes >> 20} MiB: {what} refused; "
                "give the controller more memory, or lower --max-open-mib",
            )
        )
    if status.dropped_without_worker_rps:
        found.append(
            ClusterFinding(
                name="no worker for a model",
                words=f"{status.dropped_without_worker_rps:.1f} r/s dropped: no worker offers their model; "
                "clockwright models list says why",
            )
        )
    return found


def slow_workers(
    workers: Sequence[pb.WorkerInfo], status: pb.StatusResponse
) -> list[ClusterFinding]:
    """Find workers that are slower than others of their kind, or that the scheduler avoids."""
    harmful = _is_harmed(status)
    found = []
    for worker in workers:
        name = "slow worker"
        words = ""
        whole = [reason for reason in worker.suspended if f"worker {worker.worker_id} " in reason]
        if worker.complaints:
            words = f"its GPU is unwell: {worker.complaints[0]}"
        elif whole:
            words = f"avoided: {whole[0].partition(': ')[2]}"
        elif (times := times_slower(worker.recent)) >= SLOW_FACTOR:
            whose = (
                f"others' of {worker.gpu_kind}"
                if worker.recent.exec_over_others
                else "was predicted"
            )
            words = (
                f"its EXECs take {times:.1f} times as long as {whose}{_last(worker.recent.over_ns)}"
            )
        elif worker.suspended:
            name, words = "sick worker", f"avoided for {worker.suspended[0]}"
        if words:
            found.append(
                ClusterFinding(
                    name=name,
                    words=f"{worker.worker_id}: {words}; look at its host; {_draining(worker, workers, status)}",
                    harmful=harmful,
                )
            )
    return found


def long_runs(status: pb.StatusResponse) -> list[ClusterFinding]:
    """Find a model whose runs are longer than requests to other models can wait."""
    runs = status.recent.long_runs
    if not runs.refused or not _is_harmed(status):
        return []
    more = len(runs.others) - _NAMES_SHOWN
    others = ", ".join(runs.others[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return [
        ClusterFinding(
            name="long runs",
            words=f"a run of {runs.model_id} takes {runs.exec_ns / 1e6:.0f} ms, and {runs.refused} requests to {others} "
            f"with an SLO from {runs.slo_ns / 1e6:.0f} ms were refused meanwhile{_last(status.recent.over_ns)}; serve "
            f"{runs.model_id} on a server of its own or with smaller batch_sizes, or give the others a larger SLO",
        )
    ]


def too_few_pages(
    status: pb.StatusResponse,
    workers: Sequence[pb.WorkerInfo],
    asked: PagesAsked | None = None,
) -> list[ClusterFinding]:
    """Find kinds of workers whose caches are too small for the models that are asked."""
    found = []
    for kind in status.kinds:
        mine = [worker for worker in workers if worker.gpu_kind == kind.gpu_kind]
        harmful = _matters_now(kind.dropped_for_pages_rps, status)
        loading = _busy(kind, workers, "load_busy")
        if not harmful and (loading < _LOADING_BUSY or not kind.evictions_per_s):
            found += _past("too few pages", kind.dropped_for_pages_rps, "pages", kind, status)
            continue
        pages = sum(worker.num_pages for worker in mine)
        free = sum(worker.num_free_pages for worker in mine)
        enough = "give workers more --pages, or add one"
        if asked is not None and mine and asked.num_pages > pages:
            each = -(-asked.num_pages // len(mine))
            enough = (
                f"the models asked for need {asked.num_pages} pages: give each of {_workers(kind)} at least "
                f"--pages {each}, or add workers"
            )
        most_free = max((worker.num_free_pages for worker in mine), default=0)
        too_small = ""
        if asked is not None and most_free < asked.num_least:
            too_small = (
                f"; the {most_free} free ones of a worker are too few for the smallest model that was refused, "
                f"which needs {asked.num_least}"
            )
        much = (
            _how_many(kind.dropped_for_pages_rps, status)
            if harmful
            else f"nothing is refused for it yet, but loading takes {loading:.0%} of the time of {_workers(kind)}"
        )
        found.append(
            ClusterFinding(
                name="too few pages",
                words=f"{much}: models on {kind.gpu_kind} evict each other "
                f"({kind.evictions_per_s:.1f} evictions/s, {free} of {pages} pages free{too_small}); {enough}",
                harmful=harmful,
            )
        )
    return found


def overload(
    status: pb.StatusResponse, workers: Sequence[pb.WorkerInfo] = ()
) -> list[ClusterFinding]:
    """Find kinds of workers whose load exceeds their capacity."""
    found = []
    for kind in status.kinds:
        for dropped_rps, busy, what, want in (
            (kind.dropped_for_exec_rps, _busy(kind, workers, "exec_busy"), "EXEC", "EXEC time"),
            (
                kind.dropped_for_loads_rps,
                _busy(kind, workers, "load_busy"),
                "loading",
                "time to load",
            ),
        ):
            if not _matters_now(dropped_rps, status):
                found += _past("overload", dropped_rps, want, kind, status)
                continue
            late = sum(
                worker.recent.too_late for worker in workers if worker.gpu_kind == kind.gpu_kind
            )
            if what == "EXEC" and late >= _LATE_MIN and busy < _TARGET_BUSY:
                words = (
                    f"{_how_many(dropped_rps, status)}, though {_workers(kind)} only {busy:.0%} busy with {what}: "
                    f"{late} actions arrived too late to run, so controller or workers get too little CPU "
                    "time, or the network between them is slow; run clockwright doctor on their hosts"
                )
                found.append(ClusterFinding(name="late workers", words=words))
                continue
            more = f": {kind.wanted} are wanted" if kind.wanted > kind.num_workers else ""
            found.append(
                ClusterFinding(
                    name="overload",
                    words=f"{_how_many(dropped_rps, status)}, {_workers(kind)} {busy:.0%} busy with {what}; "
                    f"send less, or add workers{more}",
                )
            )
    return found


def thin_links(status: pb.StatusResponse) -> list[ClusterFinding]:
    """Find kinds of workers whose links are too slow for the load."""
    found = []
    for kind in status.kinds:
        if not _matters_now(kind.dropped_for_links_rps, status):
            found += _past("thin links", kind.dropped_for_links_rps, "links", kind, status)
            continue
        found.append(
            ClusterFinding(
                name="thin links",
                words=f"{_how_many(kind.dropped_for_links_rps, status)}: the links to {_workers(kind)} carry no more; "
                "bring them nearer, or add workers",
            )
        )
    return found


def unfit_models(models: Sequence[pb.ModelInfo]) -> list[ClusterFinding]:
    """Find models that cannot be served."""
    unfit = [model for model in models if model.state == "UNAVAILABLE"]
    if not unfit:
        return []
    more = f" and {len(unfit) - 1} more" if len(unfit) > 1 else ""
    return [
        ClusterFinding(
            name="unfit model",
            words=f"{unfit[0].model_id}{more}: {unfit[0].reason or 'unavailable'}",
            harmful=False,
        )
    ]


def refusals(status: pb.StatusResponse) -> list[ClusterFinding]:
    """Find requests that were refused for reasons that no other finding names."""
    recent = status.recent
    found = {row.reason: row.count for row in recent.refusals if row.reason in _OWN_FAULTS}
    num = sum(found.values())
    if not _is_harmed(status):
        return []
    reasons = ", ".join(f"{found[reason]} {reason}" for reason in sorted(found))
    return [
        ClusterFinding(
            name="refusals",
            words=f"{num} of the {recent.requests} requests of the last {recent.over_ns / 1e9:.1f} s were refused "
            f"({reasons}), and nothing is short for long; clockwright explain ID says why one was",
        )
    ]


def times_slower(recent: pb.RecentActions) -> float:
    """Factor by which EXECs take longer than those of others of the kind or, without others, than predicted.

    Returns 0 if too few ran.
    """
    if recent.infers < _INFERS_MIN:
        return 0.0
    return recent.exec_over_others or recent.exec_over_predicted


def _draining(
    worker: pb.WorkerInfo, workers: Sequence[pb.WorkerInfo], status: pb.StatusResponse
) -> str:
    """Say whether other workers can take over a worker's load, and the cost of draining it."""
    name = worker.worker_id
    others = [
        each
        for each in workers
        if each.gpu_kind == worker.gpu_kind and each.worker_id != name and not each.suspended
    ]
    if not others:
        return f"do not drain it: no other of {worker.gpu_kind} is well"
    num_execs = sum(each.recent.infers for each in workers)
    rps_per_exec = status.recent.answered / _seconds(status) / num_execs if num_execs else 0.0
    mine_rps = worker.recent.infers * rps_per_exec
    kinds = [kind for kind in status.kinds if kind.gpu_kind == worker.gpu_kind]
    over_ns = max((kind.over_ns for kind in kinds if _dropped_rps(kind)), default=0)
    if _own_refusals(status) or any(map(_dropped_rps, kinds)):
        when = _last(status.recent.over_ns if _own_refusals(status) else over_ns)
        return f"do not drain it before another is added: it answers {mine_rps:.1f} r/s, and requests were refused{when}"
    busy = sum(each.recent.exec_busy for each in others)
    room = max(_TARGET_BUSY * len(others) - busy, 0.0)
    needed = worker.recent.exec_busy / max(times_slower(worker.recent), 1.0)
    mean = busy / len(others)
    if needed > room or any(kind.exec_busy > _TARGET_BUSY for kind in kinds):
        left_rps = mine_rps * (1 - min(room / needed, 1.0)) if needed else 0.0
        return (
            f"do not drain it before another is added: the others are {mean:.0%} busy, and {left_rps:.1f} of its "
            f"{mine_rps:.1f} r/s would be too much for them"
        )
    return (
        f"to drain it is safe (clockwright drain {name}): the others are {mean:.0%} busy, and have room for its "
        f"{mine_rps:.1f} r/s"
    )


def _own_refusals(status: pb.StatusResponse, reasons: frozenset[str] = _OWN_FAULTS) -> int:
    """Recently refused requests, without those refused through the caller's fault."""
    return sum(row.count for row in status.recent.refusals if row.reason in reasons)


def _is_harmed(status: pb.StatusResponse) -> bool:
    """Whether refused requests are a noticeable part of all."""
    num = _own_refusals(status)
    return num >= _REFUSED_MIN and num > _DROPPED_SHARE * status.recent.requests


def _dropped_rps(kind: pb.KindInfo) -> float:
    return (
        kind.dropped_for_exec_rps
        + kind.dropped_for_loads_rps
        + kind.dropped_for_pages_rps
        + kind.dropped_for_links_rps
    )


def _refused_rps(
    dropped_rps: float, status: pb.StatusResponse, reasons: frozenset[str] = _OWN_FAULTS
) -> float:
    """The part of a cause in what was refused in the last seconds.

    What each kind fell short of looks back further. It says which part is whose, and the last seconds how much it is:
    so all figures of a page are about the same time.
    """
    all_rps = sum(map(_dropped_rps, status.kinds))
    if not all_rps:
        return 0.0
    return _own_refusals(status, reasons) / _seconds(status) * dropped_rps / all_rps


def _matters_now(dropped_rps: float, status: pb.StatusResponse) -> bool:
    """Whether requests that were dropped for a cause are a noticeable part of those of the last seconds.

    Late answers are no shortage: they were predicted to be in time.
    """
    return _refused_rps(dropped_rps, status, _SHORTAGES) > _least_rps(status)


def _least_rps(status: pb.StatusResponse) -> float:
    return max(_DROPPED_SHARE * status.recent.requests / _seconds(status), 0.1)


def _how_many(dropped_rps: float, status: pb.StatusResponse) -> str:
    asked_rps = status.recent.requests / _seconds(status)
    refused_rps = _refused_rps(dropped_rps, status)
    return f"{refused_rps:.1f} of {asked_rps:.1f} r/s refused{_last(status.recent.over_ns)}"


def _past(
    name: str, dropped_rps: float, want: str, kind: pb.KindInfo, status: pb.StatusResponse
) -> list[ClusterFinding]:
    """Find what was short before the last seconds, if it was: a kind's rates look back further than those."""
    if dropped_rps <= _least_rps(status):
        return []
    since = "hardly any" if _own_refusals(status, _SHORTAGES) else "none"
    words = (
        f"{dropped_rps:.1f} r/s were refused for lack of {want} on {kind.gpu_kind}"
        f"{_last(kind.over_ns)}, {since}{_last(status.recent.over_ns)}"
    )
    return [ClusterFinding(name=name, words=words, harmful=False, past=True)]


def _last(over_ns: int) -> str:
    return f" in the last {over_ns / 1e9:.0f} s" if over_ns >= 1e9 else ""


def _seconds(status: pb.StatusResponse) -> float:
    return max(status.recent.over_ns, 1) / 1e9


def _busy(kind: pb.KindInfo, workers: Sequence[pb.WorkerInfo], lane: str) -> float:
    """How busy the lanes of a kind were in the last seconds, as the list of workers says."""
    mine = [worker for worker in workers if worker.gpu_kind == kind.gpu_kind]
    if not mine:
        return float(getattr(kind, lane))
    return sum(float(getattr(worker.recent, lane)) for worker in mine) / len(mine)


def _workers(kind: pb.KindInfo) -> str:
    return f"{kind.num_workers} worker{'s' * (kind.num_workers != 1)} of {kind.gpu_kind}"
