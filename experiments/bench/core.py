"""What one request costs the scheduler: CPU time inside `handle` and `next_wakeup_ns`, in us.

The simulator plays the events, and nothing but the core is timed. The cases:

* 15x1: 15 instances of ResNet50 on one GPU, all resident; 900 r/s, SLO 100 ms.
* 4026x6: 66 instances of each of 61 varieties of Table 1 on 6 GPUs of 1,376 pages; 4,860 r/s (the
  paper's Azure replay), Zipf popularity (exponent 1.2), SLO 100 ms.
* 4026x20: the same on 20 GPUs at 1.5 times the rate (the paper's scale table).
* 4026x20_cold: the same as soon as the models are there, with popularity so flat (exponent 0.9) that the
  caches hold a part of what is asked for, and loads are fought over.
* 8x500: 8 instances of ResNet50 on 500 GPUs, with some 60 copies of each; 125,000 r/s, SLO 100 ms.

Each case runs some virtual time unmeasured, but for 4026x20_cold until the caches are full. The mean is
all time in the core divided by the requests that arrived; p99.9 is over single calls, which is how long
a request can be held up by another's event.

That is a part of `make bench`. `bench-core --beside TREE` compares two trees on the very same events: each case is played once here and its
events are kept with their times; then each tree's scheduler hears them in processes of its own, the
trees by turns. Both have to answer with the same commands. `--native` compares what `make native`
made in each tree as well.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from time import thread_time_ns
from typing import Any

import numpy as np
from typing_extensions import override

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import Command, Event, RequestsArrived
from experiments.bench import core_replay
from experiments.simulator import Case, Cluster, HostedModel, Progress, Run, copies_of, run
from experiments.study.bench import Findings, bench
from experiments.study.study import chosen
from modelzoo.profile import Noise, load_profile
from traces.arrivals import Recorded, Workload

SLO_NS = 100 * NS_PER_MS
PAGES = 1376  # a V100's weights cache in the paper's configuration
REPEATS = 3
POLICIES = ("clockwork", "edf_mh")
# The aims of `edf_mh`, interpreted, are held against these figures.
AIMED_AT = {
    "4026x20": "core_us_4026x20_warm",
    "4026x20_cold": "core_us_4026x20_cold",
    "8x500": "core_us_8x500",
}
ROOT = Path(__file__).resolve().parents[2]


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

    def case_of(self, seed: int, policy: str = "clockwork") -> Case:
        """The case to simulate: Poisson arrivals, and EXECs that vary by 1 %."""
        generator = random.Random(seed)
        shuffled = list(range(len(self.models)))
        generator.shuffle(shuffled)
        weights = list(
            itertools.accumulate(rank**-self.zipf for rank in range(1, len(shuffled) + 1))
        )
        until_ns = int((self.warm_s + self.measured_s) * NS_PER_S)
        times_ns, asked, at_ns = [], [], 0
        while at_ns < until_ns:
            times_ns.append(at_ns)
            asked.append(shuffled[bisect(weights, generator.random() * weights[-1])])
            at_ns += int(generator.expovariate(self.rate_rps) * NS_PER_S)
        arrivals = Recorded(
            times_ns=np.array(times_ns, np.int64),
            models=np.array(asked, np.int64),
            slo_ns=SLO_NS,
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


def _resnet50() -> Setting:
    return Setting(
        models=copies_of(load_profile("table1").rows["resnet50_v1b"], 15),
        num_workers=1,
        rate_rps=900,
        zipf=0,
        warm_s=1,
        measured_s=10,
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


def _many_copies() -> Setting:
    return Setting(
        models=copies_of(load_profile("table1").rows["resnet50_v1b"], 8),
        num_workers=500,
        rate_rps=125_000,
        zipf=0,
        warm_s=0.5,
        measured_s=0.5,
    )


SETTINGS: dict[str, Callable[[], Setting]] = {
    "15x1": _resnet50,
    "4026x6": lambda: _zoo(6, 4860),
    "4026x20": lambda: _zoo(20, 7290),
    "4026x20_cold": lambda: _zoo(20, 7290, zipf=0.9, warm_s=1),
    "8x500": _many_copies,
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


class RecordedScheduler(Scheduler):
    """Keeps the events that it hears, in a form that another tree can build them from."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Keep nothing yet."""
        super().__init__(config)
        self.told: list[tuple[tuple[str, dict[str, Any]], int]] = []

    @override
    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        self.told.append((_plain(event), now_ns))
        return super().handle(event, now_ns=now_ns)


def _plain(event: Event) -> tuple[str, dict[str, Any]]:
    named = {field.name: getattr(event, field.name) for field in fields(event)}
    if isinstance(event, RequestsArrived):
        named["requests"] = [_plain(request) for request in event.requests]
    if "exec_ns" in named:
        named["exec_ns"] = dict(named["exec_ns"])
    if "error" in named:
        named["error"] = int(named["error"])
    return type(event).__name__, named


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU time that a case cost the core."""

    us_per_request: float
    us_p999: float
    goodput_share: float


def run_case(setting: Setting, seed: int, policy: str = "clockwork") -> Costs:
    """Play one case, and time the core."""
    case = setting.case_of(seed, policy)
    scheduler = TimedScheduler(case.scheduler)
    costs_ns: list[int] = []

    def warm() -> None:
        scheduler.costs_ns = costs_ns

    num_requests, result = _play(setting, case, scheduler, warm)
    costs_ns.sort()
    total = result.summary.total()
    return Costs(
        us_per_request=sum(costs_ns) / num_requests / 1000,
        us_p999=costs_ns[int(len(costs_ns) * 0.999)] / 1000,
        goodput_share=total.answered / total.arrived,
    )


def _play(
    setting: Setting, case: Case, scheduler: Scheduler, warm: Callable[[], None]
) -> tuple[int, Run]:
    """Simulate; returns the requests that arrived after the warm-up, too."""
    arrived_before: list[int] = []

    def progress(progress: Progress) -> None:
        if not arrived_before and progress.simulated_ns >= setting.warm_s * NS_PER_S:
            arrived_before.append(progress.summary.total().arrived)
            gc.collect()
            gc.freeze()
            warm()

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
    return result.num_requests - arrived_before[0], result


def measure() -> dict[str, float]:
    """Run all cases `REPEATS` times; medians, with the spread of the means."""
    figures: dict[str, float] = {}
    for name, make in SETTINGS.items():
        setting = make()
        runs = [run_case(setting, seed) for seed in range(REPEATS)]
        means = [costs.us_per_request for costs in runs]
        figures[f"core_us_{name}"] = median(means)
        figures[f"core_us_{name}_min"] = min(means)
        figures[f"core_us_{name}_max"] = max(means)
        figures[f"core_us_p999_{name}"] = median(costs.us_p999 for costs in runs)
        figures[f"core_goodput_share_{name}"] = median(costs.goodput_share for costs in runs)
    return figures


def compare(
    beside: Path, *, names: Sequence[str] = tuple(SETTINGS), rounds: int = 5, native: bool = False
) -> dict[str, float]:
    """Compare this tree's core with another's on the same events.

    Args:
        beside: a checkout of the repository.
        names: the cases to play.
        rounds: how often each tree hears them.
        native: compare each tree's `build/native` as well.

    Returns:
        By case and policy: us of CPU time per request here and there (medians), and the ratio of this
        tree's to the other's, round by round (median, least, most).

    Raises:
        RuntimeError: the trees' commands differ.
    """
    trees = ROOT, beside.resolve()
    ways = {"": trees}
    if native:
        ways["_compiled"] = trees[0] / "build/native", trees[1] / "build/native"
    figures: dict[str, float] = {}
    for name, policy in itertools.product(names, POLICIES):
        setting = SETTINGS[name]()
        case = setting.case_of(0, policy)
        scheduler = RecordedScheduler(case.scheduler)
        first: list[int] = []
        num_requests, _ = _play(
            setting,
            case,
            scheduler,
            lambda told=scheduler.told, first=first: first.append(len(told)),  # type: ignore[misc]
        )
        with tempfile.NamedTemporaryFile(suffix=".events") as file:
            file.write(pickle.dumps((policy, first[0], scheduler.told)))
            file.flush()
            for way, (here, there) in ways.items():
                ratios = _compare(here, there, file.name, rounds, num_requests)
                figures |= {f"core_{part}_{name}_{policy}{way}": ratios[part] for part in ratios}
                if policy == "edf_mh" and not way and name in AIMED_AT:
                    figures[AIMED_AT[name]] = ratios["us"]
                print(f"{name:8} {policy:10} {way[1:] or 'interpreted':12}", end="")
                print(
                    *(f"{part} {figure:.3f}" for part, figure in ratios.items()),
                    sep=", ",
                    flush=True,
                )
    return figures


def _compare(
    here: Path, there: Path, stream: str, rounds: int, num_requests: int
) -> dict[str, float]:
    digests = [_replay(tree, stream, "--digest")["digest"] for tree in (here, there)]
    if digests[0] != digests[1]:
        raise RuntimeError(f"the commands of {here} and {there} differ")
    pairs = []
    for number in range(rounds):
        # The trees take turns at being second, because the second finds the processor as the first left it.
        order = (here, there) if number % 2 else (there, here)
        cpu_ns = {tree: _replay(tree, stream)["cpu_ns"] for tree in order}
        pairs.append((cpu_ns[here], cpu_ns[there]))
    ratios = [mine / other for mine, other in pairs]
    return {
        "us": median(mine for mine, _ in pairs) / num_requests / 1000,
        "us_beside": median(other for _, other in pairs) / num_requests / 1000,
        "ratio": median(ratios),
        # Other work on the machine can only add time, so the least is the truest.
        "ratio_of_least": min(mine for mine, _ in pairs) / min(other for _, other in pairs),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _replay(tree: Path, stream: str, *options: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-P", core_replay.__file__, stream, *options]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    if not Path(found["core"]).is_relative_to(tree):
        raise RuntimeError(f"expected the core of {tree}, found {found['core']}")
    return found


def _commit_of(tree: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short=12", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared with this tree, and where."""

    #: Another checkout.
    beside: str = field(default="", metadata={"said": "TREE"})
    #: Compare each tree's `build/native` as well.
    native: bool = False
    #: Times that each tree hears each case.
    rounds: int = 5
    cases: tuple[str, ...] = tuple(SETTINGS)

    def __post_init__(self) -> None:
        chosen("case", self.cases, SETTINGS)


def measure_beside(setting: Comparison) -> Findings:
    """Compare two trees.

    Raises:
        ConfigError: there is no other.
    """
    if not setting.beside:
        raise ConfigError("--beside: found nothing, expected the folder of another checkout")
    beside = Path(setting.beside)
    figures = compare(beside, names=setting.cases, rounds=setting.rounds, native=setting.native)
    return Findings(figures, {"beside": _commit_of(beside)})


STUDY = bench("bench-core", Comparison(), measure_beside)
