"""Is a remedy right that the controller states for a refusal? Each of 1,000 is tried.

A simulated cluster of two GPUs serves more models than have room, and gets more than it can do: all of the time a
little of what no policy could answer, seconds of overload, and short crowds. 1,000 of the refusals are drawn. For each of
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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

_ARCHITECTURE = "resnet50_v1b"
_NOISE = Noise(exec_sigma=0.003, load_sigma=0.003)
_SLO_NS = 100 * NS_PER_MS
# Below what the model and the way to it take on an idle GPU.
_TIGHT_SLO_NS = 3 * NS_PER_MS
_COLD_SLO_NS = 15 * NS_PER_MS
# Multiples of what the GPUs can do: always, in seconds of overload, and in crowds that pass.
_CALM, _OVERLOAD, _CROWD = 0.5, 1.5, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated, and how much of it is tried."""

    num_workers: int = 2
    #: Asked most of the time, and seldom. All of them together have no room.
    num_busy: int = 30
    num_rare: int = 300
    num_pages: int = 700
    duration_ns: int = 30 * NS_PER_S
    num_tried: int = 1000
    #: The second cluster: models, pages, what is asked of all, and how long.
    cold_models: int = 400
    cold_pages: int = 300
    cold_rps: float = 150.0
    cold_duration_ns: int = 15 * NS_PER_S
    cold_num_tried: int = 300
    cold_num_pinned: int = 60
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
    busy = tuple(range(setting.num_busy))
    rare = tuple(range(setting.num_busy, setting.num_busy + setting.num_rare))
    row = load_profile("table1").row_for(_ARCHITECTURE)
    capacity_rps = setting.num_workers * density_rate([Cost(row.exec_ns)], slo_ns=_SLO_NS)
    end_ns = setting.duration_ns
    crowded = [
        (busy[:5], _CROWD, begin_ns, begin_ns + NS_PER_S // 5, _SLO_NS)
        for begin_ns in range(2 * NS_PER_S, end_ns // NS_PER_S * NS_PER_S, 3 * NS_PER_S)
        if not end_ns // 3 <= begin_ns < end_ns * 2 // 3
    ]
    asked = [
        (busy, _CALM, 0, end_ns, _SLO_NS),
        (rare, _CALM / 40, 0, end_ns, _SLO_NS),
        (busy, _CALM / 100, 0, end_ns, _TIGHT_SLO_NS),
        (rare, _CALM / 100, 0, end_ns, _SLO_NS // 5),
        (busy, _OVERLOAD - _CALM, end_ns // 3, end_ns * 2 // 3, _SLO_NS),
        *crowded,
    ]
    sources = [
        Poisson(
            models=models,
            rate_rps=rate * capacity_rps,
            slo_ns=slo_ns,
            begin_ns=begin_ns,
            end_ns=until_ns,
            seed=1000 * setting.seed + number,
        )
        for number, (models, rate, begin_ns, until_ns, slo_ns) in enumerate(asked)
    ]
    return _case(setting, len(busy + rare), setting.num_pages, sources, end_ns)


def cold_case_of(setting: Setting) -> Case:
    """Two GPUs that are asked for more models than they can load."""
    source = Poisson(
        models=tuple(range(setting.cold_models)),
        rate_rps=setting.cold_rps,
        slo_ns=_COLD_SLO_NS,
        end_ns=setting.cold_duration_ns,
        seed=1000 * setting.seed,
    )
    return _case(
        setting, setting.cold_models, setting.cold_pages, [source], setting.cold_duration_ns
    )


def _case(
    setting: Setting, num_models: int, num_pages: int, sources: Sequence[Source], duration_ns: int
) -> Case:
    models = copies_of(load_profile("table1").row_for(_ARCHITECTURE), num_models)
    return Case(
        workload=Workload(models=tuple(model.model_id for model in models), sources=tuple(sources)),
        cluster=Cluster(
            models=models, num_workers=setting.num_workers, num_pages=num_pages, noise=_NOISE
        ),
        duration_ns=duration_ns,
        seed=setting.seed,
    )


class Listen:
    """Hears of every refusal, and has it explained."""

    def __init__(self) -> None:
        self.stated: list[Stated] = []

    def arrived(self, request: RequestArrived) -> None:
        """Let it come."""

    def refused(self, request: RequestArrived, command: RefuseRequest, by: Scheduler) -> None:
        """Ask what would have let it succeed."""
        obstacles = by.obstacles(request, command)
        stated = Stated(
            request.request_id,
            request.model_id,
            command.refusal,
            request.slo_ns,
            obstacles.remedy,
            obstacles.pinning,
        )
        self.stated.append(stated)

    def over(self, request: RequestArrived, refusal: Refusal | None) -> None:
        """Hear what was heard already."""


class _Try:
    """Gives some requests the SLO that would have let them succeed, and hears whether it did."""

    def __init__(self, tried: Mapping[RequestId, Remedy]) -> None:
        self.ends: dict[RequestId, Refusal | None] = {}
        self._tried = tried
        # In a child: who was given another SLO, and where to say what happened to it.
        self._followed: tuple[RequestId, int] | None = None

    def arrived(self, request: RequestArrived) -> None:
        # The run goes on twice where this request is to have another SLO.
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
        pass

    def over(self, request: RequestArrived, refusal: Refusal | None) -> None:
        request_id = request.request_id
        if self._followed is not None:
            if request_id == self._followed[0]:
                os.write(self._followed[1], b"OK" if refusal is None else refusal.value.encode())
                os._exit(0)
        elif request_id in self._tried:
            self.ends.setdefault(request_id, refusal)


def refusals(case: Case) -> tuple[list[Stated], int]:
    """Run a case; gives its refusals, and the number of its requests."""
    listen = Listen()
    done = run(case, watch=listen)
    return listen.stated, done.num_requests


#: What happened to requests; None: they succeeded.
Ends = Mapping[RequestId, Refusal | None]


def try_remedies(case: Case, chosen: Sequence[Stated]) -> Ends:
    """Play a case again with the remedy of each refusal."""
    ends: dict[RequestId, Refusal | None] = {}
    for more in sorted({each.remedy.more_workers for each in chosen}):
        tried = {
            each.request_id: each.remedy for each in chosen if each.remedy.more_workers == more
        }
        attempt = _Try(tried)
        num_workers = case.cluster.num_workers + more
        cluster = replace(case.cluster, num_workers=num_workers)
        run(replace(case, cluster=cluster), watch=attempt)
        ends |= attempt.ends
        right = sum(end is None for end in attempt.ends.values())
        print(f"{num_workers} workers: {right} of {len(tried)} right")
    return ends


def try_pinning(case: Case, chosen: Sequence[Stated]) -> Ends:
    """Play a case again with a model pinned, for each model of some refusals."""
    ends: dict[RequestId, Refusal | None] = {}
    for model_id in sorted({each.model_id for each in chosen}):
        attempt = _Try({each.request_id: Remedy() for each in chosen if each.model_id == model_id})
        run(case, watch=attempt, pinned=[model_id])
        ends |= attempt.ends
    return ends


def kind_of(stated: Stated) -> str:
    """Name what its remedy is made of."""
    parts = [("slo", stated.remedy.slo_ns), ("workers", stated.remedy.more_workers)]
    return "_and_".join(name for name, value in parts if value) or "none"


def _right(chosen: Sequence[Stated], ends: Ends) -> list[Stated]:
    return [each for each in chosen if ends.get(each.request_id, each) is None]


def figures_of(
    num_requests: int, found: Sequence[Stated], chosen: Sequence[Stated], ends: Ends
) -> dict[str, float]:
    """Name every number."""
    right = _right(chosen, ends)
    figures: dict[str, float] = {
        "requests": num_requests,
        "refused": len(found),
        "tried": len(chosen),
        "remedy_right_share": len(right) / len(chosen),
        "remedy_stated_share": sum(bool(each.remedy) for each in chosen) / len(chosen),
        "more_workers_max": max(each.remedy.more_workers for each in chosen),
    }
    for name_of in (kind_of, lambda each: f"of_{each.refusal.value.lower()}"):
        hits = Counter(map(name_of, right))
        for name, number in sorted(Counter(map(name_of, chosen)).items()):
            figures[f"tried_{name}"] = number
            figures[f"right_share_{name}"] = hits[name] / number
    longer = sorted(each.remedy.slo_ns / each.slo_ns for each in chosen if each.remedy.slo_ns)
    if longer:
        figures["slo_factor_p50"] = longer[len(longer) // 2]
        figures["slo_factor_max"] = longer[-1]
    return figures


def with_less(chosen: Sequence[Stated]) -> list[Stated]:
    """Take one of the workers out of each remedy that names some."""
    return [
        replace(each, remedy=replace(each.remedy, more_workers=each.remedy.more_workers - 1))
        for each in chosen
        if each.remedy.more_workers
    ]


def measure_case(case: Case, num_tried: int, num_pinned: int = 0) -> dict[str, float]:
    """Try the remedies of refusals of a run, then one worker less, and pin models where that would help.

    Args:
        case: what is run.
        num_tried: whose remedies are tried.
        num_pinned: whose models are pinned; 0: pinning is not asked about.
    """
    found, num_requests = refusals(case)
    drawn = random.Random(f"explain {case.seed}").sample(found, min(num_tried, len(found)))
    figures = figures_of(num_requests, found, drawn, try_remedies(case, drawn))
    less = with_less(drawn)
    if less:
        enough = len(_right(less, try_remedies(case, less)))
        figures["right_share_with_a_worker_less"] = enough / len(less)
    if num_pinned:
        stated = [each for each in found if each.pinning]
        drawn = random.Random(f"pin {case.seed}").sample(stated, min(num_pinned, len(stated)))
        right = len(_right(drawn, try_pinning(case, drawn)))
        figures["pinning_stated_share"] = len(stated) / max(len(found), 1)
        figures["tried_pinning"] = len(drawn)
        figures["right_share_pinning"] = right / max(len(drawn), 1)
    return figures


def measure(setting: Setting) -> dict[str, float]:
    """Simulate both clusters, draw refusals, and try their remedies."""
    figures = measure_case(case_of(setting), setting.num_tried)
    cold = measure_case(cold_case_of(setting), setting.cold_num_tried, setting.cold_num_pinned)
    return figures | {f"cold_{name}": value for name, value in cold.items()}


STUDY = bench("bench-explain", Setting(), measure)
