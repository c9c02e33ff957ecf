"""What one request costs the scheduler: CPU time inside `handle` and `next_wakeup_ns`, in us.

Modelled devices in virtual time, so nothing but the core is timed. Three cases:

* 15x1: 15 instances of ResNet50 on one GPU, all resident; 900 r/s, SLO 100 ms.
* 4026x6: 66 instances of each of 61 varieties of Table 1 on 6 GPUs of 1,376 pages; 4,860 r/s (the
  paper's Azure replay), Zipf popularity (exponent 0.9), SLO 100 ms.
* 4026x20: the same on 20 GPUs at 1.5 times the rate (the paper's scale table).

Each case runs some virtual seconds unmeasured until the caches are full. The mean is all time in the
core divided by the requests that arrived; p99.9 is over single calls, which is how long a request can
be held up by another's event.
"""

from __future__ import annotations

import gc
import itertools
import random
from bisect import bisect
from collections.abc import Callable
from statistics import median

from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES, ArchitectureId, ModelId
from controller.core import Scheduler, SchedulerConfig
from experiments.virtual_cluster import ModelledModel, VirtualCluster
from modelzoo.profile import load_profile

SLO_NS = 100 * NS_PER_MS
PAGES = 1376  # a V100's weights cache in the paper's configuration
REPEATS = 3


def table1_models(varieties: int, copies: int) -> list[ModelledModel]:
    """Instances of the first varieties of Table 1, in the table's order."""
    rows = list(load_profile("table1").rows.values())[:varieties]
    return [
        ModelledModel(
            model_id=ModelId(f"{row.name}-{copy}"),
            architecture_id=ArchitectureId(row.name),
            num_pages=-(-row.weights_bytes // PAGE_BYTES),
            load_ns=row.load_ns,
            exec_ns=row.exec_ns,
        )
        for row in rows
        for copy in range(copies)
    ]


def resnet50_models(copies: int) -> list[ModelledModel]:
    """Instances of Table 1's resnet50_v1b."""
    row = load_profile("table1").rows["resnet50_v1b"]
    return [
        ModelledModel(
            model_id=ModelId(f"resnet50_v1b-{copy}"),
            architecture_id=ArchitectureId("resnet50_v1b"),
            num_pages=-(-row.weights_bytes // PAGE_BYTES),
            load_ns=row.load_ns,
            exec_ns=row.exec_ns,
        )
        for copy in range(copies)
    ]


def run_case(
    models: list[ModelledModel],
    num_workers: int,
    rate: float,
    *,
    zipf: float,
    warm_s: float,
    measured_s: float,
    seed: int,
    policy: str = "clockwork",
) -> tuple[float, float, float]:
    """Run one case; returns mean us per request, p99.9 us per call, goodput share."""
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    cluster = VirtualCluster(scheduler, seed=seed, exec_sigma=0.01)
    cluster.add_models(models)
    for index in range(num_workers):
        cluster.add_worker(f"gpu{index}", PAGES, models)
    generator = random.Random(seed)
    shuffled = models[:]
    generator.shuffle(shuffled)
    weights = list(itertools.accumulate(1 / rank**zipf for rank in range(1, len(models) + 1)))
    until_ns = int((warm_s + measured_s) * NS_PER_S)

    def arrive() -> None:
        if cluster.now_ns >= until_ns:
            return
        model = shuffled[bisect(weights, generator.random() * weights[-1])]
        cluster.request(model.model_id, SLO_NS)
        cluster.at(cluster.now_ns + int(generator.expovariate(rate) * NS_PER_S), arrive)

    cluster.at(0, arrive)
    cluster.run(int(warm_s * NS_PER_S))
    before = len(cluster.deadlines)
    gc.collect()
    gc.freeze()
    gc.disable()
    cluster.core_ns = 0
    costs: list[int] = []
    cluster.costs_ns = costs
    cluster.record_cost = True
    cluster.run(until_ns + NS_PER_S)
    gc.enable()
    gc.unfreeze()
    requests = len(cluster.deadlines) - before
    costs.sort()
    return (
        cluster.core_ns / requests / 1000,
        costs[int(len(costs) * 0.999)] / 1000,
        cluster.num_in_time() / len(cluster.deadlines),
    )


CASES: dict[str, Callable[[], tuple[list[ModelledModel], int, float, float, float, float]]] = {
    "15x1": lambda: (resnet50_models(15), 1, 900.0, 0.0, 1.0, 10.0),
    "4026x6": lambda: (table1_models(61, 66), 6, 4860.0, 1.2, 10.0, 4.0),
    "4026x20": lambda: (table1_models(61, 66), 20, 7290.0, 1.2, 10.0, 4.0),
}


def measure() -> dict[str, float]:
    """Run all cases `REPEATS` times; medians, with the spread of the means."""
    figures: dict[str, float] = {}
    for name, case in CASES.items():
        models, workers, rate, zipf, warm_s, measured_s = case()
        runs = [
            run_case(
                models,
                workers,
                rate,
                zipf=zipf,
                warm_s=warm_s,
                measured_s=measured_s,
                seed=seed,
            )
            for seed in range(REPEATS)
        ]
        figures[f"core_us_{name}"] = median(run[0] for run in runs)
        figures[f"core_us_{name}_min"] = min(run[0] for run in runs)
        figures[f"core_us_{name}_max"] = max(run[0] for run in runs)
        figures[f"core_us_p999_{name}"] = median(run[1] for run in runs)
        figures[f"core_goodput_share_{name}"] = median(run[2] for run in runs)
    return figures


if __name__ == "__main__":
    for key, value in measure().items():
        print(f"{key:32} {value:10.2f}")
