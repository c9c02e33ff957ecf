"""A controller with a worker in a thread, for tests that look at it from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from clockwright import Client, Feedback
from clockwright.client.channel import Access
from clockwright.client.operator import Operator
from clockwright.units import NS_PER_S, ModelId
from clockwright.v1 import control_pb2
from clockwright.wire import worker_messages as pb
from clockwright.wire.actions import Action, Infer
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from controller.access.config import AccessConfig
from controller.access.key_file import add_key
from controller.access.roles import Role
from controller.core import SchedulerConfig
from controller.front.oip.refusals import NoAnswerError
from controller.models.entry import ModelState
from controller.port import Ask
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig
from tests.kit.asking import submit
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
            await submit(runtime, model_id, [ROW], Ask(0, 1, runtime.clock(), slo_ns))
        except NoAnswerError as error:
            return error.refusal.value
        return "OK"


def worker_of(controller: Controller, key: str) -> LoopbackWorker:
    """A worker that says of itself what it likes."""
    worker = LoopbackWorker(controller.port, access=Access(key=key))
    worker.register.gpu_kind = HOSTILE
    return worker


@contextmanager
def serving(
    folder: Path,
    *,
    worker_key: str = "",
    worker_of: Callable[[Controller, str], LoopbackWorker] = worker_of,
    **changes: Any,  # noqa: ANN401
) -> Iterator[Served]:
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


class LabellingWorker(LoopbackWorker):
    """Both models give a label: alpha the first number that it is asked, and beta one more."""

    @override
    def description(self, model_id: str, **changes: object) -> pb.ReadyModel:
        label = TensorSpec("label", "INT64", ())
        return super().description(model_id, outputs=(label,), **changes)

    @override
    async def answer(self, action: Action, payload: Sequence[Buffer]) -> None:
        if isinstance(action, Infer):
            shift = int(action.model_id.startswith("beta"))
            payload = [
                (np.frombuffer(each, np.float32)[:1].astype(np.int64) + shift).tobytes()
                for each in payload
            ]
        await super().answer(action, payload)


@contextmanager
def taught(folder: Path) -> Iterator[Served]:
    """A server with an application of both models; ann's answers show that alpha is right, bob's that beta is.

    Each has asked three times, and a fourth time without a word on the answer.
    """
    with serving(
        folder, worker_of=lambda controller, _: LabellingWorker(controller.port)
    ) as served:
        address = f"127.0.0.1:{served.controller.port}"
        row = np.zeros((1, 4), np.float32)
        with Operator(address) as operator, Client(address) as client:
            operator.put_application(
                control_pb2.Application(name="app", models=["alpha", "beta"], no_cache=True)
            )
            # In turn: who comes new begins with what everybody before him has shown.
            for context, label in (("ann", 0), ("bob", 1)) * 3:
                result = client.infer("app", row, slo_ms=30_000, context=context)
                assert set(result.explanation["models"].split(",")) == {"alpha", "beta"}
                (outcome,) = client.feedback(Feedback(result.query_id, label=label))
                assert outcome.status == "APPLIED"
            # Both models answer, and whom the user believes more is heard.
            assert client.infer("app", row, slo_ms=30_000, context="ann").outputs["label"] == [0]
            assert client.infer("app", row, slo_ms=30_000, context="bob").outputs["label"] == [1]
        yield served
