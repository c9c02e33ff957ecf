"""Is a remedy right that the controller states for a refusal? Each of 1,000 is tried.

A simulated cluster of two GPUs serves more models than have room, and gets more than it can do: all of the time a
little of what nobody could answer, seconds of overload, and short crowds. 1,000 of the refusals are drawn. For each of
them the run is played again with the remedy that was stated when it was refused, and with nothing else changed:

* with the further workers that it names, from the beginning on;
* with its model pinned, where the controller said that this would do as well;
* with that one request's SLO as long as it says. The process forks at the moment that the request arrives, and the
  child plays on until the request is answered or refused: some tenths of a simulated second.

A second cluster is asked for more models than it can load, each alike, with SLOs that leave no time to wait for a
load: nearly all that it refuses is cold. Of those refusals some are tried likewise (`cold_...`).

Other requests keep their SLOs and come when they came. A refusal without a remedy counts as one whose remedy is
wrong. Run `python -m experiments bench-explain`; the same seed gives the same figures on every machine.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId
from controller.core import Scheduler
from controller.core.events import RefuseRequest, RequestArrived
from controller.core.remedies import Remedy
from experiments.bounds import Cost, density_rate
from experiments.simulator import Case, Cluster, copies_of, run
from experiments.study.bench import bench
from modelzoo.profile import Noise, load_profile
from traces.arrivals import Poisson, Source, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated, and how much of it is tried."""

    architecture: str = "resnet50_v1b"
    num_workers: int = 2
    #: Asked most of the time, and seldom. All of them together have no room.
    num_busy: int = 30
    num_rare: int = 300
    num_pages: int = 700
    slo_ms: int = 100
    #: Below what the model and the way to it take on an idle GPU.
    tight_slo_ms: float = 3.0
    duration_ns: int = 30 * NS_PER_S
    #: Multiples of what the GPUs can do: always, in seconds of overload, and in crowds that pass.
    calm: float = 0.5
    overload: float = 1.5
    crowd: float = 2.0
    num_tried: int = 1000
    #: The second cluster: models, pages, what is asked of all, how long, and the SLO.
    cold_models: int = 400
    cold_pages: int = 300
    cold_rps: float = 150.0
    cold_duration_ns: int = 15 * NS_PER_S
    cold_slo_ms: int = 15
    cold_num_tried: int = 300
    cold_num_pinned: int = 60
    noise: Noise = field(default_factory=lambda: Noise(exec_sigma=0.003, load_sigma=0.003))
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Stated:
    """One refusal, and what the controller stated."""

    request_id: RequestId
    model_id: ModelId
    refusal: Refusal
    slo_ns: int
    remedy: Remedy
    #: To pin its model would have done as well.
    pinning: bool = False


def case_of(setting: Setting) -> Case:
    """Two GPUs that are asked for more than they can do, at times."""
    row = load_profile("table1").row_for(setting.architecture)
    models = copies_of(row, setting.num_busy + setting.num_rare)
    busy = tuple(range(setting.num_busy))
    rare = tuple(range(setting.num_busy, len(models)))
    slo_ns = setting.slo_ms * NS_PER_MS
    capacity_rps = setting.num_workers * density_rate([Cost(row.exec_ns)], slo_ns=slo_ns)
    end_ns = setting.duration_ns
    sources: list[Source] = []

    def ask(asked: tuple[int, ...], rate: float, begin_ns: int, until_ns: int, of_ns: int) -> None:
        sources.append(
            Poisson(
                models=asked,
                rate_rps=rate * capacity_rps,
                slo_ns=of_ns,
                begin_ns=begin_ns,
                end_ns=until_ns,
                seed=1000 * setting.seed + len(sources),
            )
        )

    ask(busy, setting.calm, 0, end_ns, slo_ns)
    ask(rare, setting.calm / 40, 0, end_ns, slo_ns)
    ask(busy, setting.calm / 100, 0, end_ns, int(setting.tight_slo_ms * NS_PER_MS))
    ask(rare, setting.calm / 100, 0, end_ns, slo_ns // 5)
    more = setting.overload - setting.calm
    ask(busy, more, end_ns // 3, end_ns * 2 // 3, slo_ns)
    for second in range(2, end_ns // NS_PER_S, 3):
        if not end_ns // 3 <= second * NS_PER_S < end_ns * 2 // 3:
            begin_ns = second * NS_PER_S
            ask(busy[:5], setting.crowd, begin_ns, begin_ns + NS_PER_S // 5, slo_ns)
    return Case(
        workload=Workload(models=tuple(model.model_id for model in models), sources=tuple(sources)),
        cluster=Cluster(
            models=models,
            num_workers=setting.num_workers,
            num_pages=setting.num_pages,
            noise=setting.noise,
        ),
        duration_ns=end_ns,
        seed=setting.seed,
    )


def cold_case_of(setting: Setting) -> Case:
    """Two GPUs that are asked for more models than they can load."""
    row = load_profile("table1").row_for(setting.architecture)
    models = copies_of(row, setting.cold_models)
    end_ns = setting.cold_duration_ns
    source = Poisson(
        models=tuple(range(len(models))),
        rate_rps=setting.cold_rps,
        slo_ns=setting.cold_slo_ms * NS_PER_MS,
        end_ns=end_ns,
        seed=1000 * setting.seed,
    )
    return Case(
        workload=Workload(models=tuple(model.model_id for model in models), sources=(source,)),
        cluster=Cluster(
            models=models,
            num_workers=setting.num_workers,
            num_pages=setting.cold_pages,
            noise=setting.noise,
        ),
        duration_ns=end_ns,
        seed=setting.seed,
    )


class _Listen:
    """Hears of every refusal, and has it explained."""

    def __init__(self) -> None:
        self.refused_: list[Stated] = []

    def arrived(self, request: RequestArrived) -> None:
        """Let it come."""

    def refused(self, request: RequestArrived, command: RefuseRequest, by: Scheduler) -> None:
        """Ask what would have let it succeed."""
        obstacles = by.obstacles(request, command)
        self.refused_.append(
            Stated(
                request.request_id,
                request.model_id,
                command.refusal,
                request.slo_ns,
                obstacles.remedy,
                obstacles.pinning,
            )
        )

    def over(self, request: RequestArrived, refusal: Refusal | None) -> None:
        """Hear what was heard already."""


class _Try:
    """Gives some requests the SLO that would have let them succeed, and hears whether it did."""

    def __init__(self, tried: Mapping[RequestId, Remedy]) -> None:
        self.ends: dict[RequestId, Refusal | None] = {}
        self._tried = tried
        # In a child: who was given another SLO, and where to say what became of it.
        self._followed: tuple[RequestId, int] | None = None

    def arrived(self, request: RequestArrived) -> None:
        """Go on twice where this request is to have another SLO."""
        remedy = self._tried.get(request.request_id)
        if remedy is None or not remedy.slo_ns or self._followed is not None:
            return
        read, write = os.pipe()
        child = os.fork()
        if not child:
            self._followed = request.request_id, write
            request.slo_ns = remedy.slo_ns
            return
        os.close(write)
        with os.fdopen(read) as told:
            end = told.read()
        os.waitpid(child, 0)
        self.ends[request.request_id] = Refusal(end) if end != "OK" else None

    def refused(self, request: RequestArrived, command: RefuseRequest, by: Scheduler) -> None:
        """Ask nothing."""

    def over(self, request: RequestArrived, refusal: Refusal | None) -> None:
        """Note it, or say it and be gone."""
        request_id = request.request_id
        if self._followed is not None:
            if request_id == self._followed[0]:
                os.write(self._followed[1], b"OK" if refusal is None else refusal.value.encode())
                os._exit(0)
        elif request_id in self._tried:
            self.ends.setdefault(request_id, refusal)


def refusals(case: Case) -> tuple[list[Stated], int]:
    """Run a case; gives its refusals, and the number of its requests."""
    listen = _Listen()
    done = run(case, watch=listen)
    return listen.refused_, done.num_requests


def try_remedies(
    case: Case, chosen: list[Stated], say: Callable[[str], object] = print
) -> dict[RequestId, Refusal | None]:
    """Play a case again with the remedy of each refusal.

    Returns:
        What became of each request: None: it succeeded.
    """
    ends: dict[RequestId, Refusal | None] = {}
    for more in sorted({refused.remedy.more_workers for refused in chosen}):
        tried = {
            refused.request_id: refused.remedy
            for refused in chosen
            if refused.remedy.more_workers == more
        }
        num_workers = case.cluster.num_workers + more
        attempt = _Try(tried)
        cluster = replace(case.cluster, num_workers=num_workers)
        run(replace(case, cluster=cluster), watch=attempt)
        ends |= attempt.ends
        right = sum(end is None for end in attempt.ends.values())
        say(f"{num_workers} workers: {right} of {len(tried)} right")
    return ends


def try_pinning(case: Case, chosen: list[Stated]) -> dict[RequestId, Refusal | None]:
    """Play a case again with a model pinned, for each model of some refusals.

    Returns:
        What became of each request: None: it succeeded.
    """
    ends: dict[RequestId, Refusal | None] = {}
    for model_id in sorted({refused.model_id for refused in chosen}):
        attempt = _Try({each.request_id: Remedy() for each in chosen if each.model_id == model_id})
        run(case, watch=attempt, pinned=[model_id])
        ends |= attempt.ends
    return ends


def kind_of(remedy: Remedy) -> str:
    """Name what a remedy is made of."""
    parts = [("slo", remedy.slo_ns), ("workers", remedy.more_workers)]
    return "_and_".join(name for name, value in parts if value) or "none"


def figures_of(
    num_requests: int,
    found: list[Stated],
    chosen: list[Stated],
    ends: Mapping[RequestId, Refusal | None],
) -> dict[str, float]:
    """Name every number."""
    right = {each.request_id for each in chosen if ends.get(each.request_id, each) is None}
    figures: dict[str, float] = {
        "requests": num_requests,
        "refused": len(found),
        "tried": len(chosen),
        "remedy_right_share": len(right) / len(chosen),
        "remedy_stated_share": sum(bool(each.remedy) for each in chosen) / len(chosen),
        "more_workers_max": max(each.remedy.more_workers for each in chosen),
    }
    kinds = Counter(kind_of(each.remedy) for each in chosen)
    reasons = Counter(each.refusal.value.lower() for each in chosen)
    for name, number in sorted(kinds.items()):
        figures[f"tried_{name}"] = number
        if name != "none":
            hits = sum(kind_of(each.remedy) == name and each.request_id in right for each in chosen)
            figures[f"right_share_{name}"] = hits / number
    for name, number in sorted(reasons.items()):
        figures[f"tried_of_{name}"] = number
        hits = sum(
            each.refusal.value.lower() == name and each.request_id in right for each in chosen
        )
        figures[f"right_share_of_{name}"] = hits / number
    longer = sorted(each.remedy.slo_ns / each.slo_ns for each in chosen if each.remedy.slo_ns)
    if longer:
        figures["slo_factor_p50"] = longer[len(longer) // 2]
        figures["slo_factor_max"] = longer[-1]
    return figures


def with_less(chosen: list[Stated]) -> list[Stated]:
    """Take one of the workers out of each remedy that names some."""
    return [
        replace(each, remedy=replace(each.remedy, more_workers=each.remedy.more_workers - 1))
        for each in chosen
        if each.remedy.more_workers
    ]


def measure(setting: Setting) -> dict[str, float]:
    """Simulate both clusters, draw refusals, and try their remedies."""
    figures = measure_case(case_of(setting), setting.num_tried)
    cold_case = cold_case_of(setting)
    cold = measure_case(cold_case, setting.cold_num_tried)
    cold |= measure_pinning(cold_case, setting.cold_num_pinned)
    return figures | {f"cold_{name}": value for name, value in cold.items()}


def measure_pinning(case: Case, num_tried: int) -> dict[str, float]:
    """Pin the models of some refusals of which the controller said that it would help."""
    found, _ = refusals(case)
    stated = [each for each in found if each.pinning]
    drawn = random.Random(f"pin {case.seed}").sample(stated, min(num_tried, len(stated)))
    ends = try_pinning(case, drawn)
    right = sum(end is None for end in ends.values())
    return {
        "pinning_stated_share": len(stated) / max(len(found), 1),
        "tried_pinning": len(drawn),
        "right_share_pinning": right / max(len(drawn), 1),
    }


def measure_case(case: Case, num_tried: int) -> dict[str, float]:
    """Try the remedies of so many refusals of a run; then how many of their workers were too many."""
    found, num_requests = refusals(case)
    drawn = random.Random(f"explain {case.seed}").sample(found, min(num_tried, len(found)))
    figures = figures_of(num_requests, found, drawn, try_remedies(case, drawn))
    less = with_less(drawn)
    if less:
        ends = try_remedies(case, less)
        enough = sum(ends.get(each.request_id, each) is None for each in less)
        figures["right_share_with_a_worker_less"] = enough / len(less)
    return figures


STUDY = bench("bench-explain", Setting(), measure)
