"""What it costs to be observed: a scrape of 4,000 models, a look at the dashboard, and a request while all of it is counted.

The scrape: a controller in a process of its own, a worker of its own with a modelled device, and 4,000 models that
were asked once each, so that a thousand have names and histograms. Another process scrapes, and the controller's
loop counts its own processor time: in all, and the most in one turn, which is how long a request may have to wait
(`loop_stall_ms`). `idle_ms` is what the loop takes in that time anyhow.

The dashboard: the same controller, of which 2,000 models were asked in the seconds before, as many as a look reads. A
viewer opens each page and stays for three looks; `dashboard_PAGE_ms` is what each took beyond what the loop does in
that time anyhow, and the most in one turn is `dashboard_stall_ms`.
Nobody looks: nothing of the dashboard runs, which tests/controller/test_dashboard.py holds.

The request: several `clockwright up` beside each other, asked in turns (`experiments.bench.request_cost`):

    off, off_again  everything off, twice: how far two equal servers are apart
    metrics         with metrics, which are scraped each second
    on              everything on: metrics, messages in JSON, and a collector for traces at the default share, so that
                    those requests are traced which come with a sampled context
    traced          the same, and one request of a hundred is traced besides

Explain has no switch. Of a request that is answered it keeps the name that its client gave it, and the requests
here have names, with all variants. Writes `observe.json`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import truediv
from pathlib import Path
from typing import Final

import grpc
import uvloop

from clockwright.channel import Access
from clockwright.process import freeze_garbage
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.app import Controller, running
from controller.config import ControllerConfig
from experiments.bench.request_cost import ServerBeside, asking, prepare, start_beside
from experiments.live.local_server import further_worker
from experiments.study.bench import bench

_MODEL, _COLUMNS = "small", 784
_MODELS: Final = {_MODEL: f"mlp-{_COLUMNS}-8-4"}
_METRICS: Final = "/metrics"
_COUNTING: Final = ("--metrics-port", "0")
_ON: Final = (*_COUNTING, "--log-format", "json", "--trace-to", "COLLECTOR")
_VARIANTS: Final = {
    "off": (),
    "off_again": (),
    "metrics": _COUNTING,
    "on": _ON,
    "traced": (*_ON, "--trace-share", "0.01"),
}
# How often each variant is asked in a round.
_TURNS: Final = 20
_COLLECTOR: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
#: Pages of the dashboard.
_VIEWS: Final = ("overview", "timeline", "pages", "model")
#: Models that are asked before each round of looks.
_NUM_ASKED: Final = 2000
#: Looks that a viewer stays for, of which one comes each second.
_LOOKS: Final = 3
# Requests to different models that are open at once.
_TOGETHER: Final = 100


# --- the scrape -----------------------------------------------------------------------------------


def measure_scrape(num_models: int, rounds: int) -> dict[str, float]:
    """Scrape a controller of many models.

    Returns:
        In ms: processor time of its loop with a scrape, without one, and at most in one turn; the same for looks at
        the dashboard; bytes of the page.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as scratch:
        server = context.Process(target=_serve, args=(theirs, Path(scratch), num_models, rounds))
        server.start()
        theirs.close()
        num_bytes = 0
        try:
            url = f"http://127.0.0.1:{ours.recv()}"
            while isinstance(told := ours.recv(), str):
                if told == _METRICS:
                    num_bytes = len(_read(url + told))
                else:
                    _look(url + told)
                ours.send(None)
        finally:
            server.join()
    figures: dict[str, float] = told
    return figures | {"page_bytes": num_bytes}


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        data: bytes = answer.read()
    return data


def _look(url: str) -> None:
    """Wait for looks at a page of the dashboard, and leave."""
    with urllib.request.urlopen(url) as answer:
        for _ in range(_LOOKS):
            answer.readline()
            answer.readline()  # The empty line behind it.


def _serve(pipe: Connection, scratch: Path, num_models: int, rounds: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(pipe, scratch, num_models, rounds))


async def _run(pipe: Connection, scratch: Path, num_models: int, rounds: int) -> None:
    flags = prepare(scratch, _MODELS)
    (scratch / "models" / _MODEL / "config.toml").write_text(f"copies = {num_models}\n")
    config = ControllerConfig(port=0, metrics_port=0, models_dir=scratch / "models")
    async with running(config) as controller:
        with further_worker(f"127.0.0.1:{controller.port}", "--id", "w", *flags[2:]):
            while not (controller.links.links and controller.catalogue.ready):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await _ask_each(controller)
            freeze_garbage()
            pipe.send(controller.metrics_port)
            pipe.send(await _measure(pipe, controller, rounds))


async def _ask_each(controller: Controller, num_models: int | None = None) -> None:
    """Ask every model once, or some."""
    runtime = controller.runtime
    inputs = [bytes(4 * _COLUMNS)]
    models = controller.catalogue.models[:num_models]
    for begin in range(0, len(models), _TOGETHER):
        asked = [
            runtime.submit(model.model_id, inputs, arrival_ns=runtime.clock(), slo_ns=60 * NS_PER_S)
            for model in models[begin : begin + _TOGETHER]
        ]
        await asyncio.gather(*asked)


async def _measure(pipe: Connection, controller: Controller, rounds: int) -> dict[str, float]:
    models = controller.catalogue.models
    scrapes = [await _costs_ms(pipe, _METRICS) for _ in range(rounds + 1)]
    looks = []
    for _ in range(rounds + 1):
        row = {}
        for view in _VIEWS:
            await _ask_each(controller, _NUM_ASKED)
            query = f"?name={models[0].name}" if view == "model" else ""
            row[view] = await _costs_ms(pipe, f"/live/{view}{query}")
        looks.append(row)
    # What is done for the first time takes longer.
    used_ms, idle_ms, stall_ms = zip(*scrapes[1:], strict=True)
    figures = {
        f"metrics_scrape_ms_{len(models)}_models": statistics.median(used_ms),
        "idle_ms": statistics.median(idle_ms),
        "loop_stall_ms": max(stall_ms),
    }
    for view in _VIEWS:
        more_ms = (used_ms - idle_ms for used_ms, idle_ms, _ in (row[view] for row in looks[1:]))
        figures[f"dashboard_{view}_ms"] = statistics.median(more_ms) / _LOOKS
    figures["dashboard_stall_ms"] = max(
        stall_ms for row in looks[1:] for _, _, stall_ms in row.values()
    )
    return figures


async def _costs_ms(pipe: Connection, path: str) -> tuple[float, float, float]:
    """Processor time of the loop while a path is asked for, while for as long none is, and at most in one turn."""
    began_s, began_ns = time.monotonic(), time.thread_time_ns()
    await _have_asked(pipe, path)
    asked_ns = time.thread_time_ns()
    await asyncio.sleep(time.monotonic() - began_s)
    idle_ns = time.thread_time_ns() - asked_ns
    stall_ns = await _longest_turn(asyncio.create_task(_have_asked(pipe, path)))
    return (asked_ns - began_ns) / NS_PER_MS, idle_ns / NS_PER_MS, stall_ns / NS_PER_MS


async def _have_asked(pipe: Connection, path: str) -> None:
    """Have the other process ask for a path, and wait until it has."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.add_reader(pipe.fileno(), done.set_result, None)
    pipe.send(path)
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
    """Ask all variants in turns, a little each time, because other load on the machine comes and goes.

    Args:
        rounds: after each of which there is a figure.
        num_requests: of each variant in a round.

    Returns:
        Processor time of the controller per request in us, by variant; and how many times that of `off` it is: the
        median over the turns of a round, in the middle of all rounds and at their quartiles.
    """
    rng = random.Random(1)
    used_us: list[dict[str, list[float]]] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = prepare(scratch, _MODELS)
        collector = _collecting(stack)
        ask: dict[str, Callable[[int], tuple[float, float]]] = {}
        for variant, further in _VARIANTS.items():
            own = [collector if flag == "COLLECTOR" else flag for flag in further]
            server = start_beside([*flags, *own], Access(), stack)
            ask[variant] = stack.enter_context(asking(server, _MODEL, _COLUMNS, named=True))
            if server.metrics:
                _scraping(server, stack)
        for _ in range(rounds + 1):
            costs_us: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
            for _ in range(_TURNS):
                for variant in rng.sample(tuple(_VARIANTS), len(_VARIANTS)):
                    costs_us[variant].append(ask[variant](max(1, num_requests // _TURNS))[0])
            used_us.append(costs_us)
    del used_us[0]  # What is new to a server is looked at longer.
    figures: dict[str, float] = {}
    for name in _VARIANTS:
        figures[f"{name}_us"] = statistics.median(us for costs in used_us for us in costs[name])
        if name != "off":
            ratios = [statistics.median(map(truediv, row[name], row["off"])) for row in used_us]
            figures[f"{name}_ratio"] = statistics.median(ratios)
            if len(ratios) > 1:
                lower, _, upper = statistics.quantiles(ratios, n=4)
                figures[f"{name}_ratio_lower_quartile"] = lower
                figures[f"{name}_ratio_upper_quartile"] = upper
    return figures


def _collecting(stack: ExitStack) -> str:
    """Take traces until the stack ends, as a collector of OpenTelemetry does; gives its address."""
    methods = {"Export": grpc.unary_unary_rpc_method_handler(lambda _, __: b"")}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_COLLECTOR, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(server.stop, None)
    return f"127.0.0.1:{port}"


def _scraping(server: ServerBeside, stack: ExitStack) -> None:
    """Scrape a server each second until the stack ends."""
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.is_set():
            _read(server.metrics)
            is_over.wait(1)

    thread = threading.Thread(target=scrape)
    thread.start()
    stack.callback(thread.join)
    stack.callback(is_over.set)


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    rounds: int = 9
    #: Asked of each variant in each round.
    requests: int = 4000
    models: int = 4000


def measure(setting: Setting) -> dict[str, float]:
    """Measure the scrape and the dashboard, then the request."""
    scraped = measure_scrape(setting.models, setting.rounds)
    return scraped | measure_requests(setting.rounds, setting.requests)


STUDY = bench("bench-observe", Setting(), measure)
