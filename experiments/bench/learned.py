"""The first minute after a restart under load and the minute before, with what was learned and without: `guard.json`.

`make bench NAME=bench-learned`. A simulated device serves many models, each asked seldom, whose batches take now more
and now less time. Its profiles are right (`right_`), say half of what is true, as of a host that was idle when they
were measured (`half_`), or three times of it (`triple_`). After a minute of learning a second minute is measured
(`before`). Then another controller begins with the worker's profiles, and is asked for the same as in that minute, twice:
with what the first had learned (`learned`), and without (`unlearned`). Weights load in next to no time: over a restart
workers keep them.

Each figure is a share of all requests, over several such restarts: `late`, which means refused because the answer would
have come too late after all, and `refused` for any other reason. The same seed gives the same figures on every machine.

    python -m experiments bench-learned --restarts 2 --seconds 20 --directory /tmp/learned
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, PAGE_BYTES, ModelId
from controller.core import Scheduler
from controller.core.events import Recalled
from experiments.simulator import (
    Bucket,
    Case,
    Cluster,
    Faults,
    HostedModel,
    WrongProfile,
    production_scheduler,
    run,
)
from experiments.study.bench import bench
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Poisson, Workload

_SLO_NS = 100 * NS_PER_MS
# EXEC of the fastest model by batch size; the slowest takes nearly twice as long.
_EXEC_MS = ((1, 20), (2, 30), (4, 50))
#: How many times what is true the profiles say, by case.
PROFILES = {"right": 1.0, "half": 0.5, "triple": 3.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated, and how often."""

    models: int = 100
    rate_rps: float = 15.0
    #: What is compared, and what is learned from before.
    seconds: int = 60
    restarts: int = 8
    #: Log-normal noise of all durations, as in `Noise`.
    noise: float = 0.2
    seed: int = 1


def measure(setting: Setting) -> dict[str, float]:
    """Measure every case."""
    return {
        f"{case}_{name}_pct": value
        for case, exec_factor in PROFILES.items()
        for name, value in _compared(setting, exec_factor)
    }


def _compared(setting: Setting, exec_factor: float) -> Iterator[tuple[str, float]]:
    """Restart several times; gives each share with its name."""
    sums = {"before": Bucket(), "learned": Bucket(), "unlearned": Bucket()}
    for number in range(setting.restarts):
        first, second = _minutes(setting, setting.seed + 2 * number)
        begin_ns = second.begin_ns
        scheduler, seen = _played(_case(setting, exec_factor, first, second), Recalled(), begin_ns)
        sums["before"].merge(seen)
        times = [row for row in scheduler.learned_times() if row is not None]
        learned = Recalled(times=times, links=scheduler.learned_links())
        again = _case(setting, exec_factor, second)
        for name, recalled in (("learned", learned), ("unlearned", Recalled())):
            sums[name].merge(_played(again, recalled, begin_ns)[1])
    for name, seen in sums.items():
        late = seen.refused[Refusal.LATE.value]
        yield f"{name}_late", 100 * late / seen.arrived
        yield f"{name}_refused", 100 * (seen.num_refused - late) / seen.arrived


def _played(case: Case, recalled: Recalled, begin_ns: int) -> tuple[Scheduler, Bucket]:
    """Play a case with a scheduler that begins with something recalled; gives it, and what it was like from a time on."""
    made: list[Scheduler] = []

    def make(case: Case) -> Scheduler:
        scheduler = production_scheduler(case)
        scheduler.handle(recalled, now_ns=0)
        made.append(scheduler)
        return scheduler

    summary = run(case, make_scheduler=make).summary
    (scheduler,) = made
    return scheduler, summary.total(begin_ns)


def _minutes(setting: Setting, seed: int) -> list[Poisson]:
    """Make what is asked in two minutes, one after the other."""
    stretch_ns = setting.seconds * NS_PER_S
    return [
        Poisson(
            rate_rps=setting.rate_rps,
            models=range(setting.models),
            slo_ns=_SLO_NS,
            begin_ns=number * stretch_ns,
            end_ns=(number + 1) * stretch_ns,
            seed=seed + number,
        )
        for number in range(2)
    ]


def _case(setting: Setting, exec_factor: float, *asked: Poisson) -> Case:
    models = tuple(
        HostedModel(ModelId(row.name), row) for row in map(_row_of, range(setting.models))
    )
    return Case(
        workload=Workload(models=tuple(model.model_id for model in models), sources=asked),
        cluster=Cluster(models=models, noise=Noise(setting.noise, setting.noise)),
        duration_ns=asked[-1].end_ns,
        faults=Faults(wrong_profiles=(WrongProfile(exec_factor=exec_factor),)),
        seed=asked[-1].seed,
    )


def _row_of(number: int) -> ProfileRow:
    return ProfileRow(
        name=f"net-{number}",
        weights_bytes=PAGE_BYTES,
        load_ns=100 * NS_PER_US,
        exec_ns={size: (20 + number % 20) * ms * NS_PER_MS // 20 for size, ms in _EXEC_MS},
    )


STUDY = bench("bench-learned", Setting(), measure, record="guard", part="learned")
