"""What it costs to be observed: a scrape of 4,000 models, a look at the dashboard, and a request while all of it is counted.

The scrape: a controller in this process, a worker of its own with a modelled device, and 4,000 models that
were asked once each, so that a thousand have names and histograms. Another process scrapes, and the controller's
loop counts its own processor time: in all, and the most in one turn, which is how long a request may have to wait
(`loop_stall_ms`). `idle_ms` is what the loop takes in that time anyhow.

The dashboard: the same controller, of which 2,000 models were asked in the seconds before, as many as a look reads. A
viewer opens each page and stays for three looks; `dashboard_PAGE_ms` is what each took beyond what the loop does in
that time anyhow, and the most in one turn is `dashboard_stall_ms`.
While no browser looks, nothing of the dashboard runs, which tests/controller/test_dashboard.py holds.

The request: several `clockwright up` side by side, asked in turns (`experiments.bench.request_cost`):

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
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import uvloop

from clockwright.process import freeze_garbage
from clockwright.units import NS_PER_MS, NS_PER_S, RequestId
from clockwright.wire.bulk import Buffer
from controller.port import Answered, Told
from controller.port import Ask as PortAsk
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig
from experiments.bench.request_cost import (
    Ask,
    ServerBeside,
    compare,
    infer_request,
    named,
    prepare,
    start_beside,
)
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


async def measure_scrape(num_models: int, rounds: int) -> dict[str, float]:
    """Scrape a controller of many models, in this loop.

    Returns:
        In ms: processor time of the loop with a scrape, without one, and at most in one turn; the same for looks at
        the dashboard; bytes of the page.
    """
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=context) as another,
    ):
        scratch = Path(folder)
        flags = prepare(scratch, _MODELS)
        (scratch / "models" / _MODEL / "config.toml").write_text(f"copies = {num_models}\n")
        config = ControllerConfig(port=0, metrics_port=0, models_dir=scratch / "models")
        async with running(config) as controller:
            with further_worker(f"127.0.0.1:{controller.port}", "--id", "w", *flags[2:]):
                while not (controller.links.links and controller.catalogue.ready):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                await _ask_each(controller)
                freeze_garbage()
                return await _measure(controller, another, rounds)


def _read(url: str) -> int:
    """Read a page, or wait for some looks at a live one and leave; gives the bytes of the page."""
    with urllib.request.urlopen(url) as answer:
        if _METRICS in url:
            return len(answer.read())
        for _ in range(_LOOKS):
            answer.readline()
            answer.readline()  # The empty line behind it.
    return 0


class _Heard:
    """Hears that its request is answered."""

    def __init__(self) -> None:
        self.is_told = asyncio.Event()

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        if not isinstance(told, Answered):
            raise RuntimeError(f"found {told}, expected an answer")
        self.is_told.set()


async def _ask_each(controller: Controller, num_models: int | None = None) -> None:
    """Ask every model once, or some."""
    runtime = controller.runtime
    inputs = [bytes(4 * _COLUMNS)]
    models = controller.catalogue.models[:num_models]
    for begin in range(0, len(models), _TOGETHER):
        sinks = [_Heard() for _ in models[begin : begin + _TOGETHER]]
        for model, sink in zip(models[begin:], sinks, strict=False):
            ask = PortAsk(0, 1, runtime.clock(), 60 * NS_PER_S)
            runtime.ask(model.model_id, ask, inputs, sink)
        for sink in sinks:
            await sink.is_told.wait()


async def _measure(controller: Controller, another: Executor, rounds: int) -> dict[str, float]:
    models = controller.catalogue.models
    loop = asyncio.get_running_loop()

    def ask(path: str) -> Awaitable[int]:
        return loop.run_in_executor(
            another, _read, f"http://127.0.0.1:{controller.metrics_port}{path}"
        )

    scrapes = [await _costs_ms(lambda: ask(_METRICS)) for _ in range(rounds + 1)]
    looks = []
    for _ in range(rounds + 1):
        row = {}
        for view in _VIEWS:
            await _ask_each(controller, _NUM_ASKED)
            query = f"?name={models[0].name}" if view == "model" else ""
            row[view] = await _costs_ms(partial(ask, f"/live/{view}{query}"))
        looks.append(row)
    # What is done for the first time takes longer.
    used_ms, idle_ms, stall_ms = zip(*scrapes[1:], strict=True)
    figures = {
        f"metrics_scrape_ms_{len(models)}_models": statistics.median(used_ms),
        "idle_ms": statistics.median(idle_ms),
        "loop_stall_ms": max(stall_ms),
        "page_bytes": await ask(_METRICS),
    }
    for view in _VIEWS:
        more_ms = (used_ms - idle_ms for used_ms, idle_ms, _ in (row[view] for row in looks[1:]))
        figures[f"dashboard_{view}_ms"] = statistics.median(more_ms) / _LOOKS
    figures["dashboard_stall_ms"] = max(
        stall_ms for row in looks[1:] for _, _, stall_ms in row.values()
    )
    return figures


async def _costs_ms(ask: Callable[[], Awaitable[int]]) -> tuple[float, float, float]:
    """Processor time of the loop while it is asked, while for as long it is not, and at most in one turn."""
    began_s, began_ns = time.monotonic(), time.thread_time_ns()
    await ask()
    asked_ns = time.thread_time_ns()
    await asyncio.sleep(time.monotonic() - began_s)
    idle_ns = time.thread_time_ns() - asked_ns
    stall_ns = await _longest_turn(asyncio.ensure_future(ask()))
    return (asked_ns - began_ns) / NS_PER_MS, idle_ns / NS_PER_MS, stall_ns / NS_PER_MS


async def _longest_turn(task: asyncio.Future[int]) -> int:
    """Most processor time of the loop between two looks, one in each of its turns, until a task is done."""
    worst_ns, last_ns = 0, time.thread_time_ns()
    while not task.done():
        await asyncio.sleep(0)
        now_ns = time.thread_time_ns()
        worst_ns, last_ns = max(worst_ns, now_ns - last_ns), now_ns
    return worst_ns


# --- the request ----------------------------------------------------------------------------------


async def measure_requests(rounds: int, seconds: float) -> dict[str, float]:
    """Ask all variants in turns; as `compare`, for so many seconds each in a round."""
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = prepare(scratch, _MODELS)
        collector = _collecting(stack)
        request = named(_MODEL, infer_request(_MODEL, (1, _COLUMNS)))
        asked: dict[str, tuple[ServerBeside, Sequence[Ask]]] = {}
        for variant, further in _VARIANTS.items():
            own = [collector if flag == "COLLECTOR" else flag for flag in further]
            server = start_beside([*flags, *own], stack)
            asked[variant] = server, await server.askers(request, stack)
            if server.metrics:
                stack.enter_context(_scraping(server))
        return await compare(asked, rounds, seconds)


def _collecting(stack: AsyncExitStack) -> str:
    """Take traces until the stack ends, as a collector of OpenTelemetry does; gives its address."""
    methods = {"Export": grpc.unary_unary_rpc_method_handler(lambda _, __: b"")}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_COLLECTOR, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(server.stop, None)
    return f"127.0.0.1:{port}"


@contextmanager
def _scraping(server: ServerBeside) -> Iterator[None]:
    """Scrape a server each second until the block ends."""
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.is_set():
            _read(server.metrics)
            is_over.wait(1)

    with ThreadPoolExecutor(1) as pool:
        scraping = pool.submit(scrape)
        try:
            yield
        finally:
            is_over.set()
            scraping.result()


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    rounds: int = 9
    #: For which each variant is asked in a round.
    seconds: float = 1.0
    models: int = 4000


def measure(setting: Setting) -> dict[str, float]:
    """Measure the scrape and the dashboard, then the request."""
    scraped = uvloop.run(measure_scrape(setting.models, setting.rounds))
    return scraped | uvloop.run(measure_requests(setting.rounds, setting.seconds))


STUDY = bench("bench-observe", Setting(), measure)
