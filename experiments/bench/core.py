"""What one request costs the scheduler: CPU time inside `handle` and `next_wakeup_ns`, in us.

The simulator plays the events, and nothing but the core is timed. The cases:

* 15x1: 15 instances of ResNet50 on one GPU, all resident; 900 r/s, SLO 100 ms.
* 4026x6: 66 instances of each of 61 varieties of Table 1 on 6 GPUs of 1,376 pages; 4,860 r/s (the
  paper's Azure replay), Zipf popularity (exponent 1.2), SLO 100 ms.
* 4026x20: the same on 20 GPUs at 1.5 times the rate (the paper's scale table).
* 4026x20_cold: the same as soon as the models are there, with popularity so flat (exponent 0.9) that the
  caches hold a part of what is asked for, and loads are fought over.
* 8x500: 8 instances of ResNet50 on 500 GPUs, with some 60 copies of each; 125,000 r/s, SLO 100 ms.
* batch_60: one instance of ResNet50 on 60 GPUs; 2,000 r/s of batch clients, SLO 10 s. A batch has 1.3 requests, so there are
  two events for each. It runs some 500 lines under `edf_mh`, 15x1 some 430: what one costs with lanes to spare, for no
  number of workers. In Python, 30 us are 250 lines.

Each case runs some virtual time unmeasured, but for 4026x20_cold until the caches are full. The mean is
all time in the core divided by the requests that arrived; p99.9 is over single calls, which is how long
a request can be held up by another's event.

`make bench NAME=bench-serve` has the cases under `clockwork`; `bench-core` has `clockwork` and `edf_mh`, or others, in the same cases, by turns.
"""

from __future__ import annotations

import gc
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from statistics import median
from time import thread_time_ns

import numpy as np
from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import Command, Event
from controller.core.policies import POLICIES
from experiments.simulator import Case, Cluster, HostedModel, Progress, copies_of, run
from experiments.study.bench import bench
from experiments.study.study import chosen
from modelzoo.profile import Noise, load_profile
from traces.arrivals import Recorded, Workload

SLO_NS = 100 * NS_PER_MS
PAGES = 1376  # a V100's weights cache in the paper's configuration
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A case of the benchmark."""

    models: tuple[HostedModel, ...]
    num_workers: int
    rate_rps: float
    #: Zipf's exponent: the k-th most popular model is asked in proportion to k to the minus this.
    zipf: float
    #: Time before anything counts.
    warm_s: float
    measured_s: float
    slo_ns: int = SLO_NS

    def case_of(self, seed: int, policy: str = "clockwork") -> Case:
        """The case to simulate: Poisson arrivals, and EXECs that vary by 1 %."""
        generator = random.Random(seed)
        shuffled = list(range(len(self.models)))
        generator.shuffle(shuffled)
        weights = list(accumulate(rank**-self.zipf for rank in range(1, len(shuffled) + 1)))
        until_ns = int((self.warm_s + self.measured_s) * NS_PER_S)
        times_ns, asked, at_ns = [], [], 0
        while at_ns < until_ns:
            times_ns.append(at_ns)
            asked.append(shuffled[bisect(weights, generator.random() * weights[-1])])
            at_ns += int(generator.expovariate(self.rate_rps) * NS_PER_S)
        arrivals = Recorded(
            times_ns=np.array(times_ns, np.int64),
            models=np.array(asked, np.int64),
            slo_ns=self.slo_ns,
            end_ns=until_ns,
        )
        names = tuple(model.model_id for model in self.models)
        return Case(
            workload=Workload(models=names, sources=(arrivals,)),
            cluster=Cluster(
                models=self.models,
                num_workers=self.num_workers,
                num_pages=PAGES,
                noise=Noise(exec_sigma=0.01),
            ),
            duration_ns=until_ns,
            scheduler=SchedulerConfig(policy=policy),
            seed=seed,
        )


def table1_models(varieties: int, copies: int) -> tuple[HostedModel, ...]:
    """Instances of the first varieties of Table 1, in the table's order."""
    rows = list(load_profile("table1").rows.values())[:varieties]
    return tuple(model for row in rows for model in copies_of(row, copies))


def _resnet50(
    copies: int,
    num_workers: int,
    rate_rps: float,
    *,
    warm_s: float,
    measured_s: float,
    slo_ns: int = SLO_NS,
) -> Setting:
    return Setting(
        models=copies_of(load_profile("table1").rows["resnet50_v1b"], copies),
        num_workers=num_workers,
        rate_rps=rate_rps,
        zipf=0,
        warm_s=warm_s,
        measured_s=measured_s,
        slo_ns=slo_ns,
    )


def _zoo(num_workers: int, rate_rps: float, *, zipf: float = 1.2, warm_s: float = 10) -> Setting:
    return Setting(
        models=table1_models(61, 66),
        num_workers=num_workers,
        rate_rps=rate_rps,
        zipf=zipf,
        warm_s=warm_s,
        measured_s=4,
    )


SETTINGS: dict[str, Callable[[], Setting]] = {
    "15x1": lambda: _resnet50(15, 1, 900, warm_s=1, measured_s=10),
    "4026x6": lambda: _zoo(6, 4860),
    "4026x20": lambda: _zoo(20, 7290),
    "4026x20_cold": lambda: _zoo(20, 7290, zipf=0.9, warm_s=1),
    "8x500": lambda: _resnet50(8, 500, 125_000, warm_s=0.5, measured_s=0.5),
    "batch_60": lambda: _resnet50(1, 60, 2000, warm_s=2, measured_s=4, slo_ns=10 * NS_PER_S),
}


class TimedScheduler(Scheduler):
    """Notes the CPU ns of its calls, because wall time counts other work on the processor, too.

    Each note contains one reading of the clock, some 0.2 us.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        """Note nothing yet."""
        super().__init__(config)
        #: CPU time of each event, the call of `next_wakeup_ns` after it included; None: not noted.
        self.costs_ns: list[int] | None = None

    @override
    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        begin_ns = thread_time_ns()
        commands = super().handle(event, now_ns=now_ns)
        cost_ns = thread_time_ns() - begin_ns
        if self.costs_ns is not None:
            self.costs_ns.append(cost_ns)
        return commands

    @override
    def next_wakeup_ns(self) -> int | None:
        begin_ns = thread_time_ns()
        wakeup_ns = super().next_wakeup_ns()
        cost_ns = thread_time_ns() - begin_ns
        if self.costs_ns:
            self.costs_ns[-1] += cost_ns
        return wakeup_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU time that a case cost the core."""

    us_per_request: float
    us_p999: float
    goodput_share: float


def run_case(setting: Setting, seed: int, policy: str = "clockwork") -> Costs:
    """Play one case, and time the core once it is warm."""
    case = setting.case_of(seed, policy)
    scheduler = TimedScheduler(case.scheduler)
    arrived_before: list[int] = []

    def progress(progress: Progress) -> None:
        if scheduler.costs_ns is None and progress.simulated_ns >= setting.warm_s * NS_PER_S:
            arrived_before.append(progress.summary.total().arrived)
            gc.collect()
            gc.freeze()
            scheduler.costs_ns = []

    gc.disable()
    try:
        result = run(
            case,
            make_scheduler=lambda _: scheduler,
            on_progress=progress,
            progress_ns=int(min(setting.warm_s, 1) * NS_PER_S),
        )
    finally:
        gc.enable()
    assert scheduler.costs_ns is not None, "the case ended before it was warm"
    costs_ns = sorted(scheduler.costs_ns)
    total = result.summary.total()
    return Costs(
        us_per_request=sum(costs_ns) / (result.num_requests - arrived_before[0]) / 1000,
        us_p999=costs_ns[int(len(costs_ns) * 0.999)] / 1000,
        goodput_share=total.answered / total.arrived,
    )


def figures_of(name: str, runs: Sequence[Costs]) -> dict[str, float]:
    """Medians of a case's runs, with the spread of the means."""
    means = [costs.us_per_request for costs in runs]
    return {
        f"core_us_{name}": median(means),
        f"core_us_{name}_min": min(means),
        f"core_us_{name}_max": max(means),
        f"core_us_p999_{name}": median(costs.us_p999 for costs in runs),
        f"core_goodput_share_{name}": median(costs.goodput_share for costs in runs),
    }


def measure() -> dict[str, float]:
    """Run all cases `REPEATS` times under `clockwork`."""
    figures: dict[str, float] = {}
    for name, make in SETTINGS.items():
        figures |= figures_of(name, [run_case(make(), seed) for seed in range(REPEATS)])
    return figures


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which policies are compared, and where."""

    seeds: tuple[int, ...] = tuple(range(REPEATS))
    policies: tuple[str, ...] = ("clockwork", "edf_mh")
    cases: tuple[str, ...] = tuple(SETTINGS)

    def __post_init__(self) -> None:
        chosen("case", self.cases, SETTINGS)
        chosen("policy", self.policies, POLICIES)


def compare(setting: Comparison) -> dict[str, float]:
    """Run each case under the policies by turns, because other work on the machine comes and goes."""
    figures: dict[str, float] = {}
    for name in setting.cases:
        runs: dict[str, list[Costs]] = {policy: [] for policy in setting.policies}
        for seed, policy in product(setting.seeds, setting.policies):
            runs[policy].append(run_case(SETTINGS[name](), seed, policy))
        for policy, costs in runs.items():
            figures |= figures_of(f"{name}_{policy}", costs)
    return figures


STUDY = bench("bench-core", Comparison(), compare)
