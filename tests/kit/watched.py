"""A controller with a worker in a thread, for tests that look at it from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from clockwright.channel import Access
from clockwright.units import NS_PER_S, ModelId
from controller.access.config import AccessConfig
from controller.access.key_file import add_key
from controller.access.roles import Role
from controller.app import Controller, running
from controller.catalogue import ModelState
from controller.config import ControllerConfig
from controller.core import SchedulerConfig
from controller.runtime import NoAnswerError
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


def worker_of(controller: Controller, key: str) -> LoopbackWorker:
    """A worker that says of itself what it likes."""
    worker = LoopbackWorker(controller.port, access=Access(key=key))
    worker.register.gpu_kind = HOSTILE
    return worker


@contextmanager
def serving(folder: Path, *, worker_key: str = "", **changes: Any) -> Iterator[Served]:  # noqa: ANN401
    """A controller with two models, and a worker whose answers are what it is asked."""
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
            worker_of(controller, worker_key) as worker,
        ):
            catalogue = controller.catalogue
            while not all(  # noqa: ASYNC110  any condition, not one that signals
                catalogue.state(each) is ModelState.READY for each in catalogue.models
            ):
                await asyncio.sleep(0.005)
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


@contextmanager
def guarded(folder: Path) -> Iterator[tuple[Served, str, str]]:
    """A server that knows its callers; a key that may look, and one that may ask for answers only."""
    folder.mkdir()
    keys = folder / "keys"
    look, infer, work = (
        add_key(keys, role.value, frozenset({role}))
        for role in (Role.STATISTICS, Role.INFERENCE, Role.WORKER)
    )
    access = AccessConfig(keys_file=keys)
    with serving(folder / "models", access=access, worker_key=work) as served:
        yield served, look, infer
