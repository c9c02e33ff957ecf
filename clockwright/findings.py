"""What is wrong with a running server, told from its statistics alone: pure functions of what operators can ask for.

Each finding names what is sick, the figures that say so, and what to do. The order is that of causes: a slow worker
makes an overload, and so do too few pages, so they are told first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clockwright.v1 import control_pb2 as pb

# A worker is slow if its EXECs take so many times what others of its kind take, or what was predicted. Noise of a
# busy processor stays below; the scheduler avoids a worker from three on.
_SLOW_FACTOR = 1.5
# Fewer EXECs say nothing.
_INFERS_MIN = 5
# Less than this share of the requests may be dropped without a word.
_DROPPED_SHARE = 0.01
# Fewer refusals may be chance.
_REFUSED_MIN = 3
# A refusal of these kinds is not its caller's doing.
_OWN_FAULTS = frozenset(("COLD", "FAILED", "LATE", "OVERLOADED", "WORKER_LOST"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFinding:
    """Something that is wrong."""

    #: In one or two words: "overload", "slow worker", "too few pages", ...
    name: str
    #: Which, how much, and what to do; one line.
    words: str


def diagnose(
    status: pb.StatusResponse,
    workers: Sequence[pb.WorkerInfo],
    models: Sequence[pb.ModelInfo] = (),
) -> list[ClusterFinding]:
    """Find everything that is wrong, causes first; empty: the server is well.

    Args:
        status: the server's totals.
        workers: all of them.
        models: all of them.
    """
    looks: list[Callable[[], list[ClusterFinding]]] = [
        lambda: not_serving(status, workers),
        lambda: slow_workers(workers),
        lambda: too_few_pages(status, workers),
        lambda: overload(status),
        lambda: thin_links(status),
        lambda: unfit_models(models),
    ]
    return [finding for look in looks for finding in look()] or refusals(status)


def not_serving(
    status: pb.StatusResponse, workers: Sequence[pb.WorkerInfo]
) -> list[ClusterFinding]:
    """Find why nobody is answered, or not everybody."""
    found = []
    if status.draining:
        found.append(ClusterFinding(name="draining", words="the server shuts down: ask elsewhere"))
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
                "give the controller more, or let less be open (--max-open-bytes)",
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


def slow_workers(workers: Sequence[pb.WorkerInfo]) -> list[ClusterFinding]:
    """Find workers that take longer than others of their kind, or that the scheduler avoids."""
    found = []
    for worker in workers:
        name = "slow worker"
        words = ""
        whole = [reason for reason in worker.suspended if f"worker {worker.worker_id} " in reason]
        if worker.complaints:
            words = f"its GPU is unwell: {worker.complaints[0]}"
        elif whole:
            words = f"avoided: {whole[0].partition(': ')[2]}"
        elif (times := _times_slower(worker)) >= _SLOW_FACTOR:
            whose = (
                f"others' of {worker.gpu_kind}"
                if worker.recent.exec_over_others
                else "was predicted"
            )
            words = f"its EXECs take {times:.1f} times as long as {whose}"
        elif worker.suspended:
            name, words = "sick worker", f"avoided for {worker.suspended[0]}"
        if words:
            found.append(
                ClusterFinding(
                    name=name,
                    words=f"{worker.worker_id}: {words}; look at its host, or clockwright drain {worker.worker_id}",
                )
            )
    return found


def too_few_pages(
    status: pb.StatusResponse, workers: Sequence[pb.WorkerInfo]
) -> list[ClusterFinding]:
    """Find kinds of workers whose caches are too small for the models that are asked."""
    found = []
    for kind in status.kinds:
        dropped_rps = kind.dropped_for_pages_rps
        if not _matters(dropped_rps, status):
            continue
        mine = [worker for worker in workers if worker.gpu_kind == kind.gpu_kind]
        pages = sum(worker.num_pages for worker in mine)
        free = sum(worker.num_free_pages for worker in mine)
        found.append(
            ClusterFinding(
                name="too few pages",
                words=f"{dropped_rps:.1f} r/s dropped: models on {kind.gpu_kind} push each other out "
                f"({kind.evictions_per_s:.1f} evictions/s, {free} of {pages} pages free); give workers more "
                "--pages, or add one",
            )
        )
    return found


def overload(status: pb.StatusResponse) -> list[ClusterFinding]:
    """Find kinds of workers that are asked for more than they can do."""
    found = []
    for kind in status.kinds:
        for dropped_rps, busy, what in (
            (kind.dropped_for_exec_rps, kind.exec_busy, "EXEC"),
            (kind.dropped_for_loads_rps, kind.load_busy, "loading"),
        ):
            if _matters(dropped_rps, status):
                more = f"; one more would answer {kind.one_more_rps:.1f} r/s" * (what == "EXEC")
                found.append(
                    ClusterFinding(
                        name="overload",
                        words=f"{dropped_rps:.1f} r/s dropped, {_workers(kind)} {busy:.0%} busy with {what}; "
                        f"send less, or add workers{more}",
                    )
                )
    return found


def thin_links(status: pb.StatusResponse) -> list[ClusterFinding]:
    """Find kinds of workers whose links carry less than is asked for."""
    return [
        ClusterFinding(
            name="thin links",
            words=f"{kind.dropped_for_links_rps:.1f} r/s dropped: the links to {_workers(kind)} carry no more; "
            "bring them nearer, or add workers",
        )
        for kind in status.kinds
        if _matters(kind.dropped_for_links_rps, status)
    ]


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
        )
    ]


def refusals(status: pb.StatusResponse) -> list[ClusterFinding]:
    """Find requests that were refused for no reason that any other finding names."""
    recent = status.recent
    found = {row.reason: row.count for row in recent.refusals if row.reason in _OWN_FAULTS}
    num = sum(found.values())
    if num < _REFUSED_MIN or num <= _DROPPED_SHARE * recent.requests:
        return []
    reasons = ", ".join(f"{found[reason]} {reason}" for reason in sorted(found))
    return [
        ClusterFinding(
            name="refusals",
            words=f"{num} of the {recent.requests} requests of the last {recent.over_ns / 1e9:.1f} s were refused "
            f"({reasons}), and nothing is short for long; clockwright explain ID says why one was",
        )
    ]


def _times_slower(worker: pb.WorkerInfo) -> float:
    """How many times longer its EXECs take than those of others of its kind, or, without others, than predicted."""
    if worker.recent.infers < _INFERS_MIN:
        return 0.0
    return worker.recent.exec_over_others or worker.recent.exec_over_predicted


def _matters(dropped_rps: float, status: pb.StatusResponse) -> bool:
    """Whether so many dropped requests are a noticeable part of all."""
    seconds = status.recent.over_ns / 1e9
    asked_rps = status.recent.requests / seconds if seconds else 0.0
    return dropped_rps > max(_DROPPED_SHARE * asked_rps, 0.1)


def _workers(kind: pb.KindInfo) -> str:
    return f"{kind.num_workers} worker{'s' * (kind.num_workers != 1)} of {kind.gpu_kind}"
