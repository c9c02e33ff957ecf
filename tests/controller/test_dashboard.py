"""The dashboard: what it tells, to whom, and what it costs whoever does not look."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from clockwright.units import NS_PER_S, ModelId
from controller.app import Controller, running
from controller.catalogue import ModelState
from controller.config import ControllerConfig
from controller.core import SchedulerConfig
from controller.runtime import NoAnswerError
from tests.kit.browser import chromium
from tests.kit.scripted_worker import LoopbackWorker

T = TypeVar("T")

#: What a page made of HTML would run, and what would change its looks.
HOSTILE = '<img src=x onerror="document.title=1"><b>bold</b>'
ROW = bytes(16)


class Served:
    """A controller with a worker, in a thread."""

    def __init__(
        self, controller: Controller, worker: LoopbackWorker, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.controller = controller
        self.worker = worker
        self._loop = loop
        self.url = f"http://127.0.0.1:{controller.metrics_port}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def ask(self, name: str, *, slo_ns: int = 30 * NS_PER_S, times: int = 1) -> list[str]:
        """Ask a model; gives "OK" or the refusals' names."""
        return self.run(self._ask(name, slo_ns, times))

    async def _ask(self, name: str, slo_ns: int, times: int) -> list[str]:
        model = self.controller.catalogue.find(name)
        assert model is not None
        return [await self._outcome(model.model_id, slo_ns) for _ in range(times)]

    async def _outcome(self, model_id: ModelId, slo_ns: int) -> str:
        runtime = self.controller.runtime
        try:
            await runtime.submit(model_id, [ROW], arrival_ns=runtime.clock(), slo_ns=slo_ns)
        except NoAnswerError as error:
            return error.refusal.value
        return "OK"


def worker_of(controller: Controller) -> LoopbackWorker:
    """A worker that says of itself what it likes."""
    worker = LoopbackWorker(controller.port)
    worker.register.gpu_kind = HOSTILE
    return worker


@contextmanager
def serving(folder: Path, **changes: Any) -> Iterator[Served]:  # noqa: ANN401
    """A controller with two models, one of which the worker's answers to are asked for."""
    for name in ("alpha", "beta"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(b"onnx")
    started: list[Served] = []
    ready, over = threading.Event(), threading.Event()

    async def main() -> None:
        values: dict[str, Any] = {
            "port": 0,
            "metrics_port": 0,
            "models_dir": folder,
            "heartbeat_interval_ms": 20,
            "scheduler": SchedulerConfig(action_timeout_ns=1000 * NS_PER_S),
        }
        config = ControllerConfig(**{**values, **changes})
        async with (
            running(config) as controller,
            worker_of(controller) as worker,
        ):
            catalogue = controller.catalogue
            while not all(catalogue.state(each) is ModelState.READY for each in catalogue.models):
                await asyncio.sleep(0.005)  # noqa: ASYNC110  any condition, not one that signals
            started.append(Served(controller, worker, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(over.wait)

    def run() -> None:
        try:
            asyncio.run(main())
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait()
        yield started[0]
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("models")) as served:
        yield served


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own tab, in which nothing goes wrong."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(60_000)
    wrong: list[str] = []

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            wrong.append(message.text)

    page.on("console", said)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert wrong == []


def test_a_browser_shows_how_the_whole_is_and_every_name_as_text(
    server: Served, page: Page
) -> None:
    page.goto(server.url)
    expect(page.locator("#finding")).to_have_text("IDLE")
    assert server.ask("alpha", times=5) == ["OK"] * 5
    expect(page.locator("#finding")).to_have_text("WELL")
    expect(page.get_by_role("img", name="answered in time")).to_have_accessible_name(
        "Requests per second: asked for, and answered in time: 5.0 asked for, 5.0 answered in time"
    )
    expect(page.get_by_role("link", name="alpha", exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
    assert page.title() == "Overview - Clockwright"
    assert page.locator("main b, main img").count() == page.locator(".legend b").count()
