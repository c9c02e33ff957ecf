"""`make bench`: what serving costs and keeps, in `experiments/results/serve.json`.

The parts, each also a command of its own: `bench_core` (the scheduler per request, virtual time), `bench_worker`
(lateness, prediction and paging on the CPU), `bench_overload` (goodput at up to three times what the device can
do). What a request costs is `bench_live`'s.
"""

from __future__ import annotations

import time

from experiments.bench import core as bench_core
from experiments.bench import overload as bench_overload
from experiments.bench import worker as bench_worker
from experiments.results_file import write_results

# Seeds of the arrivals: those of `bench_core`, then those of `bench_overload`.
SEEDS = [*range(bench_core.REPEATS), *range(len(bench_overload.RATES))]


def main() -> None:
    """Run all parts, one after the other, and write the figures."""
    begin_s = time.monotonic()
    figures = bench_core.measure()
    figures |= bench_worker.measure_paging()
    figures |= bench_worker.measure_lateness()
    figures |= bench_overload.measure()
    figures["wall_s"] = round(time.monotonic() - begin_s, 1)
    path = write_results(
        "serve",
        figures,
        command="make bench",
        seeds=sorted(set(SEEDS)),
    )
    for key, figure in sorted(figures.items()):
        print(f"{key:50} {figure:12.3f}")
    print(path)


if __name__ == "__main__":
    main()
