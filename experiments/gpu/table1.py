"""Table 1 for this card: weights, LOAD and EXEC of the paper's networks, next to its V100.

LOAD and EXEC are the worker's own steps: pages in random places, the gather, kernels, both copies. For
each network: LOAD, EXEC by batch size, and how much more a single EXEC takes than the same captured kernels
with their weights in place, where they are torch's; for LOAD, its share of what copying from locked memory
reaches. Device memory that is taken meanwhile is counted; it should be none.

An EXEC is measured as after another model's; how long it takes when its weights lie in the arena stands next to it.

For ResNet-50 at batch size 1, and for nothing else, the tail of 10,000 runs: of EXECs that each begin on an idle stream,
of EXECs that are handed over before the one ahead ends, as while a worker serves, and of the bare kernels.

Networks are measured in the paper's order of interest until time is up; those left out, or refused, are
named. What has been compiled stays in the cache folder, so a second run gets further. Within `make gpu` there
is time for a few; the whole table, in a folder of its own:

    .venv-gpu/bin/python -m experiments gpu-table1 --seconds 3000 --directory experiments/results/gpu/full
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clockwright.errors import ModelError
from clockwright.process import freeze_garbage
from experiments.gpu.hardware import (
    BareDevice,
    Room,
    about,
    arguments,
    median_us,
    open_accelerator,
    quantile,
    spread,
)
from experiments.gpu.probe import bare_kernel, copy
from experiments.results_file import write_results
from experiments.study.report import write_csv
from modelzoo.profile import load_profile
from worker.devices.accelerator import Accelerator
from worker.engines.choice import Way
from worker.timing import tune_process

MAIN = "resnet50_v1"
BATCH_SIZES = (1, 2, 4, 8, 16)
ROOM = Room(num_pages=128, arena_bytes=512 << 20, io_bytes=128 << 20, host_bytes=2 << 30)
_LOADS = 20
_COPIES = 50
# LOAD and EXEC in microseconds: our median and, with enough runs, our tails, next to the V100's.
_COLUMNS = ("model", "quantity", "unit", "ours", "ours_p99", "ours_p99.99", "v100")
# `make gpu` gives this part 35 s more than it tells it to take; the other batch sizes need some of them. The EXECs
# alone come first, for the case that it does not suffice.
_TAIL_GRACE_S = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One measurement."""

    names: tuple[str, ...]
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    room: Room = ROOM
    runs: int = 100
    #: Runs of the main network at batch size 1, and how long after the budget's end they may go on.
    tail_runs: int = 10_000
    tail_grace_s: float = _TAIL_GRACE_S
    main: str = MAIN


def order_of_interest() -> tuple[str, ...]:
    """Table 1's networks: the main one, then one of each family, then the rest."""
    names = list(load_profile("table1").rows)
    families: dict[str, str] = {}
    for name in names:
        families.setdefault(name.rstrip("0123456789")[:6], name)
    return tuple(dict.fromkeys([MAIN, *families.values(), *names]))


async def measure(
    accelerator: Accelerator,
    setting: Setting,
    *,
    until_s: float,
    measured: Callable[[dict[str, float], list[str]], None],
    cache_dir: Path | None = None,
) -> None:
    """Measure what there is time for, and try one network at least.

    Args:
        accelerator: the card.
        setting: what to measure.
        until_s: time on the monotonic clock after which no network begins.
        measured: told after each network: all figures so far by key, in microseconds unless they say
            otherwise, and the names left out so far.
        cache_dir: folder of compiled models; the user's by default.
    """
    bench = BareDevice(accelerator, setting.room, cache_dir=cache_dir)
    rng = random.Random(0)
    figures: dict[str, float] = {}
    try:
        copy_gbps = copy(accelerator, runs=min(setting.runs, _COPIES))["h2d_gbps"]
        left_out = list(setting.names)
        for index, name in enumerate(setting.names):
            if index and time.monotonic() > until_s:
                break
            try:
                figures |= await _measure_one(bench, accelerator, name, setting, rng, until_s)
            except ModelError as error:
                # One network's kernels may want too much working memory; the others may need less.
                print(f"{name:32} refused: {error}", flush=True)
                continue
            left_out.remove(name)
            load_gbps = figures[f"{name}_load_gbps"]
            figures[f"{name}_load_to_copy_ratio"] = load_gbps / copy_gbps
            measured(figures, list(left_out))
    finally:
        await bench.close()


async def _measure_one(
    bench: BareDevice,
    accelerator: Accelerator,
    name: str,
    setting: Setting,
    rng: random.Random,
    until_s: float,
) -> dict[str, float]:
    model = await bench.model(name, setting.batch_sizes)
    figures = {f"{name}_weights_mb": model.weights_bytes / 1e6}
    pages = rng.sample(range(setting.room.num_pages), model.num_pages)
    loads = [bench.load(model, pages) for _ in range(_LOADS)]
    figures |= spread(f"{name}_load", loads)
    figures[f"{name}_load_gbps"] = model.weights_bytes / (median_us(loads) * 1e3)
    taken = bench.device.num_allocations
    tails = {}
    for batch_size in model.exec_ns:
        step = bench.infer(model, pages, batch_size)
        key = f"{name}_b{batch_size}"
        with _as_in_a_worker():
            if name == setting.main and batch_size == 1:
                until_s += setting.tail_grace_s
                tails = {key: bench.execute(step, runs=setting.tail_runs, until_s=until_s)}
                tails[f"{key}_queued"] = bench.execute(
                    step, runs=setting.tail_runs, until_s=until_s, num_ahead=1
                )
                figures |= spread(key, tails[key])
            else:
                figures |= spread(key, bench.execute(step, runs=setting.runs, until_s=until_s))
            kept = bench.execute(step, runs=setting.runs, until_s=until_s, gathers=False)
        figures[f"{key}_kept_us_p50"] = median_us(kept)
    figures[f"{name}_memory_taken_while_running"] = float(bench.device.num_allocations - taken)
    folder, compiled = bench.folder(model)
    single = min(model.exec_ns)
    way = model.kernels[single].way
    kernel = bare_kernel(accelerator, folder, compiled, single, joined=way is not Way.TORCH_APART)
    runs = setting.tail_runs if tails else setting.runs
    bare = kernel.times_ns(accelerator.stream(), runs=runs, until_s=until_s)
    figures[f"{name}_bare_us_p50"] = median_us(bare)
    for key, times in ({**tails, f"{name}_bare": bare} if tails else {}).items():
        figures[f"{key}_us_p9999"] = quantile(times, 0.9999)
        figures[f"{key}_runs"] = float(len(times))
        figures[f"{key}_tail_ratio"] = quantile(times, 0.9999) / median_us(times)
    # onnxruntime's kernels have no bare form, and a ratio would compare one engine with the other.
    if way is (Way.TORCH_JOINED if kernel.joined else Way.TORCH_APART):
        paged_us = figures[f"{name}_b{single}_us_p50"]
        figures[f"{name}_paged_to_bare_ratio"] = paged_us / median_us(bare)
    return figures


@contextmanager
def _as_in_a_worker() -> Iterator[None]:
    """The garbage collector and the turns of threads as a worker has them."""
    before = gc.get_threshold(), sys.getswitchinterval()
    freeze_garbage()
    tune_process(num_devices=1)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before[0])
        sys.setswitchinterval(before[1])


def beside_the_paper(names: Sequence[str], figures: dict[str, float]) -> list[tuple[Any, ...]]:
    """Rows as `_COLUMNS` names them; None for a tail that was not measured."""
    table = load_profile("table1").rows
    rows: list[tuple[Any, ...]] = []
    for name in (each for each in names if each in table):
        if (weights_mb := figures.get(f"{name}_weights_mb")) is not None:
            of_paper = table[name].weights_bytes / 1e6
            rows.append((name, "weights", "MB", round(weights_mb, 1), None, None, of_paper))
        steps = [("LOAD", f"{name}_load", table[name].load_ns)]
        steps += [
            (f"EXEC {size}", f"{name}_b{size}", duration_ns)
            for size, duration_ns in table[name].exec_ns.items()
        ]
        for quantity, key, paper_ns in steps:
            found = [figures.get(f"{key}_us_{quantile}") for quantile in ("p50", "p99", "p9999")]
            if found[0] is not None:
                ours = [None if each is None else round(each, 1) for each in found]
                rows.append((name, quantity, "us", *ours, paper_ns / 1e3))
    return rows


def main() -> None:
    """Measure and write `table1.json` and `table1.csv`."""
    options = arguments(__doc__.splitlines()[0], seconds=200.0)
    accelerator = open_accelerator(options.device)
    hardware = about(accelerator)
    one = options.architecture
    setting = Setting(names=(one,), main=one) if one else Setting(names=order_of_interest())
    left_out = list(setting.names)

    def write(figures: dict[str, float], rest: list[str]) -> None:
        # Write after every network, because a time limit from outside may end the next one's compilation.
        rows = beside_the_paper(setting.names, figures)
        write_csv(options.directory / "table1.csv", _COLUMNS, rows)
        write_results(
            "table1",
            figures,
            command=f"python -m experiments gpu-table1 {options.words}",
            seeds=[0],
            extra={"hardware": hardware, "left_out": rest},
            directory=options.directory,
        )
        for name, quantity, unit, ours, *_, paper in (row for row in rows if row[0] in left_out):
            print(f"{name:32} {quantity:8} {unit:2} {ours:12.1f} {paper:12.1f}", flush=True)
        left_out[:] = rest

    print(f"{'model':32} {'':11} {'ours':>12} {'V100':>12}")
    until_s = time.monotonic() + options.seconds
    asyncio.run(measure(accelerator, setting, until_s=until_s, measured=write))
    if left_out:
        print(f"left out: {len(left_out)} of {len(setting.names)}: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
