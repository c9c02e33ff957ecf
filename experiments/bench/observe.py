"""What it costs to be observed: a scrape of 4,000 models, and a request while all of it is counted.

The scrape: a controller in a process of its own, a worker of its own with a modelled device, and 4,000 models that
were asked once each, so that a thousand have names and histograms. Another process scrapes, and the controller's
loop counts its own processor time: in all, and the most in one turn, which is how long a request may have to wait
(`loop_stall_ms`). Without a scrape the same is counted, to say what of it is the loop's own.

The request: three `clockwright up` beside each other, asked in turns (`experiments.bench.request_cost`): everything off,
the same again, and everything on, which is scraped each second. Writes `observe.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import uvloop

from clockwright.channel import Access
from clockwright.process import freeze_garbage
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.app import Controller, running
from controller.config import ControllerConfig
from experiments.bench.request_cost import ServerBeside, cost_us, prepare, start_beside
from experiments.results_file import RESULTS, write_results

_MODEL, _COLUMNS = "small", 784
_MODELS: Final = {_MODEL: f"mlp-{_COLUMNS}-8-4"}
#: Everything off, twice; and everything on.
_VARIANTS: Final = {
    "off": (),
    "off_again": (),
    "on": ("--metrics-port", "0"),
}
# Requests to different models that are open at once.
_TOGETHER: Final = 100


# --- the scrape -----------------------------------------------------------------------------------


def measure_scrape(num_models: int, rounds: int) -> dict[str, float]:
    """Scrape a controller of many models.

    Returns:
        In ms: processor time of its loop in all and at most in one turn, with and without a scrape, and how long a
        scrape took; bytes of the page.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as scratch:
        server = context.Process(target=_serve, args=(theirs, Path(scratch), num_models, rounds))
        server.start()
        theirs.close()
        waited_ms: list[float] = []
        num_bytes = 0
        try:
            url = f"http://127.0.0.1:{ours.recv()}/metrics"
            while (told := ours.recv()) == "scrape":
                began_ns = time.perf_counter_ns()
                num_bytes = len(_read(url))
                waited_ms.append((time.perf_counter_ns() - began_ns) / NS_PER_MS)
                ours.send(None)
        finally:
            server.join()
    figures: dict[str, float] = told
    # Every other scrape was one with a loop that had nothing else to do.
    figures[f"metrics_scrape_wall_ms_{num_models}_models"] = statistics.median(waited_ms[::2])
    figures["page_bytes"] = num_bytes
    return figures


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        data: bytes = answer.read()
    return data


def _serve(pipe: Connection, scratch: Path, num_models: int, rounds: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(pipe, scratch, num_models, rounds))


async def _run(pipe: Connection, scratch: Path, num_models: int, rounds: int) -> None:
    flags = prepare(scratch, _MODELS)
    (scratch / "models" / _MODEL / "config.toml").write_text(f"copies = {num_models}\n")
    config = ControllerConfig(port=0, metrics_port=0, models_dir=scratch / "models")
    async with running(config) as controller:
        where = ["--controller", f"127.0.0.1:{controller.port}"]
        worker = subprocess.Popen(  # noqa: ASYNC220  nobody waits for the loop yet
            [sys.executable, "-m", "clockwright.cli", "worker", *where, *flags[2:]]
        )
        try:
            while not (controller.links.links and controller.catalogue.ready):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await _ask_each(controller)
            freeze_garbage()
            pipe.send(controller.metrics_port)
            pipe.send(await _measure(pipe, num_models, rounds))
        finally:
            worker.terminate()
            worker.wait()


async def _ask_each(controller: Controller) -> None:
    """Ask every model once."""
    runtime = controller.runtime
    models = controller.catalogue.models
    for begin in range(0, len(models), _TOGETHER):
        await asyncio.gather(
            *(
                runtime.submit(
                    model.model_id,
                    [bytes(4 * _COLUMNS)],
                    arrival_ns=runtime.clock(),
                    slo_ns=60 * NS_PER_S,
                )
                for model in models[begin : begin + _TOGETHER]
            )
        )


async def _measure(pipe: Connection, num_models: int, rounds: int) -> dict[str, float]:
    used_ms: dict[str, list[float]] = {"scrape": [], "idle": []}
    stall_ms: dict[str, list[float]] = {"scrape": [], "idle": []}
    for number in range(-1, rounds):
        begins_s = time.monotonic()
        began_ns = time.thread_time_ns()
        await _scrape(pipe)
        used = time.thread_time_ns() - began_ns
        took_s = time.monotonic() - begins_s
        began_ns = time.thread_time_ns()
        await asyncio.sleep(took_s)
        idle = time.thread_time_ns() - began_ns
        worst = await _longest_turn(asyncio.create_task(_scrape(pipe)))
        worst_idle = await _longest_turn(asyncio.create_task(asyncio.sleep(took_s)))
        if number >= 0:  # What is done for the first time takes longer.
            for found, scraped, alone in (
                (used_ms, used, idle),
                (stall_ms, worst, worst_idle),
            ):
                found["scrape"].append(scraped / NS_PER_MS)
                found["idle"].append(alone / NS_PER_MS)
    return {
        f"metrics_scrape_ms_{num_models}_models": statistics.median(used_ms["scrape"]),
        "idle_ms": statistics.median(used_ms["idle"]),
        "loop_stall_ms": max(stall_ms["scrape"]),
        "loop_stall_median_ms": statistics.median(stall_ms["scrape"]),
        "loop_stall_idle_ms": max(stall_ms["idle"]),
    }


async def _scrape(pipe: Connection) -> None:
    """Have the other process scrape, and wait until it has."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.add_reader(pipe.fileno(), done.set_result, None)
    pipe.send("scrape")
    await done
    loop.remove_reader(pipe.fileno())
    pipe.recv()


async def _longest_turn(task: asyncio.Task[None]) -> int:
    """Most processor time of the loop between two looks, one in each of its turns, until a task is done."""
    worst_ns, last_ns = 0, time.thread_time_ns()
    while not task.done():
        await asyncio.sleep(0)
        now_ns = time.thread_time_ns()
        worst_ns, last_ns = max(worst_ns, now_ns - last_ns), now_ns
    return worst_ns


# --- the request ----------------------------------------------------------------------------------


def measure_requests(rounds: int, num_requests: int) -> dict[str, float]:
    """Ask all variants in turns.

    Returns:
        Processor time of the controller per request in us, by variant; and by how much it is that of `off` in the
        same round, in the middle of all rounds.
    """
    used_us: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
    rng = random.Random(1)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = prepare(scratch, _MODELS)
        servers = {
            variant: start_beside([*flags, *further], Access(), stack)
            for variant, further in _VARIANTS.items()
        }
        for number in range(-1, rounds):
            for variant in rng.sample(tuple(_VARIANTS), len(_VARIANTS)):
                with _scraping(servers[variant]):
                    used = cost_us(servers[variant], _MODEL, _COLUMNS, num_requests)
                if number >= 0:
                    used_us[variant].append(used)
    figures = {f"{name}_us": statistics.median(costs) for name, costs in used_us.items()}
    for name, costs in used_us.items():
        if name != "off":
            ratios = [cost / off for cost, off in zip(costs, used_us["off"], strict=True)]
            figures[f"{name}_ratio"] = statistics.median(ratios)
    return figures


@contextmanager
def _scraping(server: ServerBeside) -> Iterator[None]:
    """Scrape a server each second meanwhile, if it has metrics."""
    is_over = threading.Event()

    def scrape() -> None:
        while server.metrics and not is_over.is_set():
            _read(server.metrics)
            is_over.wait(1)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def produce(
    rounds: int, num_requests: int, num_models: int, directory: Path = RESULTS
) -> dict[str, float]:
    """Measure, and write `observe.json`."""
    figures = measure_scrape(num_models, rounds) | measure_requests(rounds, num_requests)
    command = f"python -m experiments bench-observe --rounds {rounds} --requests {num_requests}"
    write_results("observe", figures, command=command, directory=directory)
    return figures


def main() -> None:
    """Measure as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=4000, help="of each variant and round")
    parser.add_argument("--models", type=int, default=4000)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where the record goes")
    options = parser.parse_args()
    figures = produce(options.rounds, options.requests, options.models, options.directory)
    for key, figure in figures.items():
        print(f"{key:36} {figure:12.3f}")


if __name__ == "__main__":
    main()
