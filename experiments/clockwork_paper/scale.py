"""The scale table of section 6.5, and past it: tighter SLOs on more GPUs.

The workload of Figure 8 from the generator (`azure_replay`) at 1.5 times its rate, which the paper gives as
6,174 r/s, on 10 workers of 2 GPUs each, here 20 workers; SLO 100 ms and 25 ms. Then on 150 GPUs, with the
rate grown in proportion: 46,305 r/s. The 4,026 models stay as they are: the paper's trace has no more of
them, so what grows is how often each is asked.

The paper replayed an hour. What is measured here is a stretch that begins with a full hour, the trace's
busiest minute, after a warm-up that fills the caches; the JSON has both lengths. The rate of a stretch
is not the mean of its hour, so the numbers to compare are shares of requests and latencies.

As in the paper's runs, tensors take no time on the network: its workers made up the inputs. Nor does the
controller take any, in the lines that can be compared with the paper's. Lines with `charged` in their
key charge the controller's one core for what it was measured to take, live
(`experiments.simulator.costs`): first at the same rates, which that core cannot decide, then at three
quarters of the rate that it can (`charged_within`). Each line names its bottleneck.

The bound is B1 on the requests of the stretch: GPU time alone. It knows neither memory nor PCIe, which
is what the tight SLO lacks time for: of the 61 architectures, some take 25 ms and more to be loaded.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.telemetry import OK, ActionRow, RequestRow
from experiments.clockwork_paper import azure_replay
from experiments.clockwork_paper.stretch import stretch_bound
from experiments.results_file import RESULTS
from experiments.simulator import Case, CpuCosts, bottleneck
from experiments.simulator.costs import measured, sources
from experiments.study.report import Comparison, colour_of, picture, write_csv, write_figure
from experiments.study.study import POLICIES, Study, from_command_line, run_rows

#: Rate at the end of section 6.5. Over an hour 1.8 % of the requests timed out and 361 were late.
_PAPER_RPS = 6174
PAPER = {
    "paper_gpus20_slo100_satisfaction_pct": 100.0,
    "paper_gpus20_slo100_late_per_million": 0.0,
    "paper_gpus20_slo100_p50_ms": 6.28,
    "paper_gpus20_slo100_p9999_ms": 49.92,
    "paper_gpus20_slo25_satisfaction_pct": 100 * 6060 / _PAPER_RPS,
    "paper_gpus20_slo25_late_per_million": 1e6 * 361 / (_PAPER_RPS * 3600),
    "paper_gpus20_slo25_p50_ms": 5.77,
    "paper_gpus20_slo25_p9999_ms": 21.60,
}
_TRACE = (
    "the paper's trace was never published; which models the busiest functions of a substitute ask for "
    "decides how long requests take and how many are cold"
)
_REASONS = {
    "satisfaction_pct": _TRACE,
    "p50_ms": f"{_TRACE}; and delays of network, hosts and kernel launches beyond 0.1 ms each way are "
    "not modelled",
    "p9999_ms": f"{_TRACE}; the stretch begins with a full hour, the busiest minute",
    "late_per_million": "lateness comes from durations and delays that no estimate foresees; here they "
    "are the setting's noise, in the paper those of its testbed",
}

# So much of what the core can decide is asked of it, on average of the hour; its busiest minute asks for
# a seventh more.
_CORE_SHARE = 0.75

#: Share of answered requests, in percent, at which latencies are kept; spread out towards the tail.
PERCENTILES = tuple(round(float(100 * (1 - 10**-nines)), 4) for nines in np.arange(0, 5.01, 0.1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A cluster, and how much of the replay it is measured on."""

    num_gpus: int
    #: Mean rate over the hour.
    rate_rps: float
    slos_ms: tuple[int, ...]
    warmup_ns: int
    measured_ns: int
    costs: CpuCosts = field(default_factory=CpuCosts)
    #: Ends the names of its figures.
    label: str = ""


def _sizes() -> tuple[Size, ...]:
    small = Size(
        num_gpus=20,
        rate_rps=_PAPER_RPS,
        slos_ms=(100, 25),
        warmup_ns=30 * NS_PER_S,
        measured_ns=60 * NS_PER_S,
    )
    large = Size(
        num_gpus=150,
        rate_rps=_PAPER_RPS * 150 / 20,
        slos_ms=(100, 25),
        warmup_ns=5 * NS_PER_S,
        measured_ns=10 * NS_PER_S,
    )
    costs = measured()
    # What waits for the core grows from the first second on, so little of it says all.
    charged = replace(large, slos_ms=(25,), measured_ns=5 * NS_PER_S, costs=costs, label="_charged")
    within_rps = _CORE_SHARE * costs.requests_per_s(1)
    return (
        small,
        large,
        replace(charged, num_gpus=small.num_gpus, rate_rps=small.rate_rps),
        charged,
        replace(small, rate_rps=within_rps, costs=costs, label="_charged_within"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Study):
    """How much is simulated."""

    sizes: tuple[Size, ...] = field(default_factory=_sizes)
    #: Length of the whole trace, which begins one minute before a full hour.
    num_minutes: int = 60
    num_functions: int = 17_000
    num_copies: int = 66
    seed: int = 10

    def replay(self, size: Size, slo_ms: int) -> azure_replay.Setting:
        """The replay of one size: its workload and its cluster."""
        return azure_replay.Setting(
            num_functions=self.num_functions,
            num_copies=self.num_copies,
            num_workers=size.num_gpus,
            rate_rps=size.rate_rps,
            num_minutes=self.num_minutes,
            slo_ns=slo_ms * NS_PER_MS,
            noise=self.noise,
            costs=size.costs,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleResult:
    """One policy on one cluster at one SLO, over the requests that arrived in the stretch."""

    policy: str
    num_gpus: int
    slo_ms: int
    measured_ns: int
    arrived: int
    answered: int
    bound: int
    #: Refused requests by outcome.
    refused: dict[str, int]
    cold: int
    #: Mean size of the batches that answered the requests.
    mean_batch_size: float
    #: Latency of the answered requests at each of `PERCENTILES`.
    latency_ms: tuple[float, ...]
    latency_max_ms: float
    #: Time from arrival to refusal.
    refusal_p50_ms: float
    refusal_p99_ms: float
    #: By part, as `Summary.utilisations`.
    busy: dict[str, float]
    #: Ends the names of its figures, as that of its `Size`.
    label: str = ""

    @property
    def case_key(self) -> str:
        """The case as the names of its figures spell it."""
        return f"gpus{self.num_gpus}_slo{self.slo_ms}{self.label}"

    @property
    def bottleneck(self) -> str:
        """The part that is busiest."""
        return bottleneck(self.busy)[0]

    def percentile_ms(self, percentile: float) -> float:
        """Latency of the answered requests at the nearest of `PERCENTILES`."""
        nearest = min(PERCENTILES, key=lambda other: abs(other - percentile))
        return self.latency_ms[PERCENTILES.index(nearest)]


def case_of(setting: Setting, policy: str, size: Size, slo_ms: int) -> Case:
    """Describe one run; the stretch begins when its warm-up ends, with the full hour."""
    replay = setting.replay(size, slo_ms)
    trace = azure_replay.generated(replay)
    case = azure_replay.case_of(replay, trace, POLICIES[policy])
    hour_ns = (-trace.first_minute % 60) * azure_replay.NS_PER_MINUTE
    workload = case.workload.sliced(hour_ns - size.warmup_ns, hour_ns + size.measured_ns)
    return replace(case, workload=workload, duration_ns=size.warmup_ns + size.measured_ns)


def measure(setting: Setting, policy: str, size: Size, slo_ms: int, bound: int) -> ScaleResult:
    """Simulate one policy on one cluster at one SLO.

    Args:
        setting: how much is simulated.
        policy: its name.
        size: the cluster.
        slo_ms: the SLO of every request.
        bound: answers at most, as `bound_of` gives it; the same for all policies.
    """
    case = case_of(setting, policy, size, slo_ms)
    outcomes: Counter[str] = Counter()
    cold = 0
    latencies_ns, batch_sizes, refusals_ns = array("q"), array("q"), array("q")

    def take(requests: Sequence[RequestRow], _actions: Sequence[ActionRow]) -> None:
        nonlocal cold
        for row in requests:
            if row.arrival_ns < size.warmup_ns:
                continue
            outcomes[row.outcome] += 1
            if row.outcome == OK:
                cold += row.cold
                latencies_ns.append(row.departure_ns - row.arrival_ns)
                batch_sizes.append(row.batch_size)
            else:
                refusals_ns.append(row.departure_ns - row.arrival_ns)

    result = run_rows(case, take)
    # With an overloaded core there may be no answer, or with a loose SLO no refusal.
    refusal_p50_ms, refusal_p99_ms = np.percentile(refusals_ns or [0], (50, 99)) / NS_PER_MS
    latencies_ms = np.array(latencies_ns or [0], np.int64) / NS_PER_MS
    answered = outcomes.pop(OK, 0)
    return ScaleResult(
        policy=policy,
        num_gpus=size.num_gpus,
        slo_ms=slo_ms,
        measured_ns=size.measured_ns,
        arrived=answered + outcomes.total(),
        answered=answered,
        bound=bound,
        refused=dict(sorted(outcomes.items())),
        cold=cold,
        mean_batch_size=float(np.mean(batch_sizes or [0])),
        latency_ms=tuple(np.percentile(latencies_ms, PERCENTILES, method="inverted_cdf").tolist()),
        latency_max_ms=float(latencies_ms.max()),
        refusal_p50_ms=float(refusal_p50_ms),
        refusal_p99_ms=float(refusal_p99_ms),
        busy=result.summary.utilisations(size.warmup_ns, case.duration_ns),
        label=size.label,
    )


def bound_of(setting: Setting, size: Size, slo_ms: int) -> int:
    """Answers at most to the requests of the stretch."""
    case = case_of(setting, setting.policies[0], size, slo_ms)
    return stretch_bound(case, size.warmup_ns, case.duration_ns)[0]


def figures_of(results: Sequence[ScaleResult]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    for result in results:
        seconds = result.measured_ns / NS_PER_S
        key = f"{result.policy}_{result.case_key}"
        late = result.refused.get(Refusal.LATE.value, 0)
        figures |= {
            f"{key}_goodput_rps": result.answered / seconds,
            f"{key}_satisfaction_pct": 100 * result.answered / result.arrived,
            f"{key}_bound_share_pct": 100 * result.answered / result.bound,
            f"{key}_late_per_million": 1e6 * late / result.arrived,
            f"{key}_refused_per_million": 1e6
            * (sum(result.refused.values()) - late)
            / result.arrived,
            f"{key}_cold_pct": 100 * result.cold / max(1, result.answered),
            f"{key}_mean_batch_size": result.mean_batch_size,
            f"{key}_p50_ms": result.percentile_ms(50),
            f"{key}_p9999_ms": result.percentile_ms(99.99),
            f"{key}_max_ms": result.latency_max_ms,
            f"{key}_exec_busy_pct": 100 * result.busy["EXEC"],
            f"{key}_load_busy_pct": 100 * result.busy["PCIe"],
            f"{key}_front_busy_pct": 100 * result.busy["front"],
            f"{key}_controller_busy_pct": 100 * result.busy["controller"],
            f"{key}_refusal_p50_ms": result.refusal_p50_ms,
            f"{key}_refusal_p99_ms": result.refusal_p99_ms,
            f"bound_{result.case_key}_goodput_rps": result.bound / seconds,
            f"bound_{result.case_key}_satisfaction_pct": 100 * result.bound / result.arrived,
            f"offered_{result.case_key}_rps": result.arrived / seconds,
        }
    return figures | PAPER


def comparisons(results: Sequence[ScaleResult]) -> list[Comparison]:
    """Every number of the paper that is not zero, beside ours."""
    return [
        Comparison(
            key=key.replace("paper", policy, 1),
            paper_key=key,
            reason=_REASONS[key.split("_", 3)[3]],
        )
        for policy in dict.fromkeys(result.policy for result in results if not result.label)
        for key, number in PAPER.items()
        if number
    ]


def produce(setting: Setting, directory: Path = RESULTS) -> list[ScaleResult]:
    """Measure everything and write `scale.json`, `scale.csv` and `scale.png`."""
    results = []
    for size in setting.sizes:
        for slo_ms in size.slos_ms:
            bound = bound_of(setting, size, slo_ms)
            for policy in setting.policies:
                result = measure(setting, policy, size, slo_ms, bound)
                results.append(result)
                refused = ", ".join(f"{n} {reason}" for reason, n in result.refused.items())
                print(
                    f"{policy} on {size.num_gpus} GPUs, SLO {slo_ms} ms: {result.answered} of "
                    f"{result.arrived} in time, at most {bound}; refused: {refused or 'none'}; "
                    f"bottleneck: {result.bottleneck}",
                    flush=True,
                )
    figures = figures_of(results)
    figures["core_rps"] = measured().requests_per_s(1)
    first = f"{_key(results[0])}_"
    metrics = [key[len(first) :] for key in figures_of(results[:1]) if key.startswith(first)]
    write_csv(
        directory / "scale.csv",
        ["policy", "num_gpus", "slo_ms", "measured_s", *metrics, "costs", "bottleneck"],
        [
            (
                result.policy,
                result.num_gpus,
                result.slo_ms,
                result.measured_ns / NS_PER_S,
                *(figures[f"{_key(result)}_{metric}"] for metric in metrics),
                result.label.lstrip("_") or "none",
                result.bottleneck,
            )
            for result in results
        ],
    )
    draw(results, directory / "scale.png")
    write_figure(
        "scale",
        figures,
        comparisons(results),
        setting,
        directory=directory,
        extra={
            "bottleneck": {_key(result): result.bottleneck for result in results},
            "costs": {**asdict(measured()), "sources": sources()},
        },
    )
    return results


def _key(result: ScaleResult) -> str:
    return f"{result.policy}_{result.case_key}"


def draw(results: Sequence[ScaleResult], target: Path) -> None:
    """Latency of answered requests, the tail stretched, a panel for each line of the table."""
    # A rate that the core cannot decide leaves nothing to be seen.
    shown = [result for result in results if result.label != "_charged"]
    cases = {result.case_key: result for result in shown}
    nines = [-float(np.log10(1 - percentile / 100)) for percentile in PERCENTILES]
    with picture(target, 1, len(cases), size=(3.6 * len(cases), 3.6)) as grid:
        for panel, (case_key, case) in zip(grid[0], cases.items(), strict=True):
            num_gpus, slo_ms = case.num_gpus, case.slo_ms
            for result in shown:
                if result.case_key != case_key:
                    continue
                share = 100 * result.answered / result.arrived
                panel.plot(
                    result.latency_ms,
                    nines,
                    color=colour_of(result.policy),
                    label=f"{result.policy}: {share:.2f} % in time",
                )
            for percentile, name, label in (
                (50, "p50", "paper: 50 and 99.99 %"),
                (99.99, "p9999", None),
            ):
                paper_ms = PAPER.get(f"paper_gpus{num_gpus}_slo{slo_ms}_{name}_ms")
                if paper_ms is not None and not case.label:
                    panel.plot(paper_ms, -np.log10(1 - percentile / 100), "kx", label=label)
            panel.axvline(slo_ms, color="grey", lw=0.8)
            panel.set_xlim(0, 1.05 * slo_ms)
            panel.set_yticks(range(6), ["0", "90", "99", "99.9", "99.99", "99.999"])
            charged = "controller charged" if case.label else "controller takes no time"
            rate_rps = case.arrived * NS_PER_S / case.measured_ns
            panel.set_title(
                f"{num_gpus} GPUs, SLO {slo_ms} ms,\n{rate_rps:,.0f} r/s, {charged}",
                fontsize="medium",
            )
            panel.set_xlabel("latency of answers, ms")
            panel.legend(fontsize="x-small", loc="lower right")
        grid[0, 0].set_ylabel("percentile")


def main() -> None:
    """Produce the table."""
    produce(from_command_line("The scale table of the paper, and past it.", Setting()))


if __name__ == "__main__":
    main()
