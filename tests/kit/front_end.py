"""A whole controller in the test's process, but for the workers' stream: real scheduler, runtime,
catalogue and front end on a port of their own, and a worker that is a script.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np

from clockwright.actions import Action, ActionError, Infer, LoadWeights, Result, StepTime
from clockwright.bulk import Buffer
from clockwright.tensors import DATATYPE_BYTES, TensorSpec
from clockwright.units import NS_PER_MS, NS_PER_S, ArchitectureId, GpuKind, ModelId, WorkerId
from controller.catalogue import Catalogue, Entry, name_of
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import ModelReady, WorkerJoined
from controller.front.control import ControlService
from controller.front.server import InferenceService
from controller.runtime import Runtime
from controller.selection.applications import Applications
from controller.selection.config import SelectionConfig
from controller.telemetry import Telemetry
from controller.worker_link import WorkerLinks

T = TypeVar("T")

WORKER = WorkerId("scripted")
BATCH_SIZES = (1, 2, 4)
# Above the real service, so that size limits can be tested without gigabytes.
MESSAGE_BYTES_MAX = 4 << 20
# A worker that a test holds back does not hang, however slow the machine is.
CONFIG = SchedulerConfig(action_timeout_ns=1000 * NS_PER_S)


@dataclass(frozen=True)
class Script:
    """A model that the scripted worker knows."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: Input bytes of one request to output bytes.
    run: Callable[[Sequence[Buffer]], list[Buffer]]
    #: What an EXEC is said to take beforehand.
    exec_ns: int = NS_PER_MS
    load_ns: int = NS_PER_MS


def _double(inputs: Sequence[Buffer]) -> list[Buffer]:
    return [(np.frombuffer(inputs[0], np.float32) * 2).tobytes()]


def _mixed(inputs: Sequence[Buffer]) -> list[Buffer]:
    a = np.frombuffer(inputs[0], np.int64).reshape(-1, 2)
    b = np.frombuffer(inputs[1], np.float32).reshape(-1, 2, 2)
    return [(a + 1).tobytes(), b.sum(axis=2, dtype=np.float32).tobytes()]


def _label(shift: int) -> Callable[[Sequence[Buffer]], list[Buffer]]:
    """Says the first number, or one that is `shift` off, and is 0.7 sure of it."""

    def run(inputs: Sequence[Buffer]) -> list[Buffer]:
        labels = np.frombuffer(inputs[0], np.float32).reshape(-1, 3)[:, 0].astype(np.int64)
        labels = (labels + shift) % 4
        chances = np.full((len(labels), 4), 0.1, np.float32)
        chances[np.arange(len(labels)), labels] = 0.7
        return [labels.tobytes(), chances.tobytes()]

    return run


X = TensorSpec("x", "FP32", (3,))
Y = TensorSpec("y", "FP32", (3,))
LABELLED = (TensorSpec("label", "INT64", ()), TensorSpec("probabilities", "FP32", (4,)))
SCRIPTS = {
    "double": Script((X,), (Y,), _double),
    "mixed": Script(
        (TensorSpec("a", "INT64", (2,)), TensorSpec("b", "FP32", (2, 2))),
        (TensorSpec("a_plus_1", "INT64", (2,)), TensorSpec("b_sum", "FP32", (2,))),
        _mixed,
    ),
    # 602 kB in.
    "image": Script(
        (TensorSpec("image", "FP32", (3, 224, 224)),),
        (TensorSpec("first", "FP32", (2,)),),
        lambda inputs: [bytes(inputs[0][:8])],
    ),
    # Classifiers: right, wrong, and those of which few fit into an SLO of seconds.
    **{
        name: Script((X,), LABELLED, _label(shift), exec_ns)
        for name, shift, exec_ns in (
            ("right", 0, NS_PER_MS),
            ("right-too", 0, NS_PER_MS),
            ("wrong", 1, NS_PER_MS),
            ("worse", 2, NS_PER_MS),
            ("long-1", 0, 2000 * NS_PER_MS),
            ("long-2", 0, 2000 * NS_PER_MS),
            ("long-3", 1, 2000 * NS_PER_MS),
        )
    },
    "cold": Script((X,), LABELLED, _label(0), load_ns=10_000 * NS_PER_MS),
    **{
        f"echo-{datatype}": Script(
            (TensorSpec("x", datatype, (2,)),), (TensorSpec("y", datatype, (2,)),), list
        )
        for datatype in DATATYPE_BYTES
    },
}


@dataclass
class ScriptedWorker:
    """Does at once what it is told, or when the test says so; lives in the controller's loop."""

    runtime: Runtime
    catalogue: Catalogue
    #: Keep Infer actions until `release`.
    hold: bool = False
    held: list[tuple[Infer, Sequence[Buffer]]] = field(default_factory=list)
    #: Models whose Infer actions are kept until `release`, ones that fail, and ones whose labels
    #: are all one off.
    slow: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    poisoned: set[str] = field(default_factory=set)
    #: All Infer actions so far.
    infers: list[Infer] = field(default_factory=list)

    def join(self) -> None:
        self.runtime.worker_joined(
            self, WorkerJoined(worker_id=WORKER, gpu_kind=GpuKind("scripted"), num_pages=1000)
        )
        self.catalogue.worker_joined(WORKER, self)

    def leave(self) -> None:
        self.catalogue.worker_left(WORKER)
        self.runtime.worker_lost(WORKER)

    def offer(self, model: Entry) -> None:
        script = SCRIPTS.get(model.name)
        if script is None:
            self.catalogue.model_refused(WORKER, model.model_id, "it is not in the script")
            return
        event = ModelReady(
            worker_id=WORKER,
            model_id=model.model_id,
            architecture_id=ArchitectureId(model.name),
            num_pages=1,
            load_ns=script.load_ns,
            exec_ns=dict.fromkeys(BATCH_SIZES, script.exec_ns),
        )
        self.catalogue.model_ready(
            event, inputs=script.inputs, outputs=script.outputs, weights_bytes=1
        )

    def withdraw(self, model: Entry) -> None:
        pass

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        if isinstance(action, Infer):
            self.infers.append(action)
            if self.hold or name_of(action.model_id) in self.slow:
                self.held.append((action, payload))
                return
        asyncio.get_running_loop().call_soon(self._finish, action, payload)

    def release(self) -> None:
        self.hold = False
        self.slow.clear()
        for action, payload in self.held:
            self._finish(action, payload)
        self.held.clear()

    def _finish(self, action: Action, payload: Sequence[Buffer]) -> None:
        now_ns = self.runtime.clock()
        # It takes no time but says it did: what it says is what the scheduler then predicts.
        name = name_of(action.model_id)
        step = StepTime(now_ns, now_ns, NS_PER_MS)
        result = Result(action_id=action.action_id, received_ns=now_ns)
        outputs: list[Buffer] = []
        if isinstance(action, LoadWeights):
            result.load = step
        elif isinstance(action, Infer):
            result.input = result.exec = result.output = step
            if name in self.failing:
                result.error, result.message = ActionError.DEVICE, "it does not feel like it"
            script = SCRIPTS[name]
            num_inputs = len(script.inputs)
            for first in range(0, len(payload), num_inputs):
                row = script.run(payload[first : first + num_inputs])
                if name in self.poisoned:
                    row[0] = (np.frombuffer(row[0], np.int64) + 1).tobytes()
                outputs += row
        self.runtime.action_finished(WORKER, result, outputs)

    def forget_model(self, model_id: ModelId) -> None:
        pass

    def close(self, reason: str) -> None:
        pass


@dataclass
class FrontEnd:
    """What a test needs of a running controller."""

    #: HOST:PORT; empty when it listens nowhere.
    address: str
    runtime: Runtime
    catalogue: Catalogue
    worker: ScriptedWorker
    applications: Applications
    links: WorkerLinks


@asynccontextmanager
async def controlling(
    directory: Path,
    selection: SelectionConfig | None = None,
    *,
    clock: Callable[[], int] = time.monotonic_ns,
) -> AsyncIterator[FrontEnd]:
    """Control every scripted model of a models directory made below `directory`; no port, no gRPC."""
    for name in SCRIPTS:
        version = directory / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "model.onnx").write_bytes(b"scripted")
    runtime = Runtime(Scheduler(CONFIG), Telemetry(), clock=clock)
    catalogue = Catalogue(runtime, directory)
    links = WorkerLinks(runtime, catalogue)
    worker = ScriptedWorker(runtime, catalogue)
    worker.join()
    await catalogue.scan()
    applications = Applications(runtime, catalogue, selection)
    await applications.restore()
    try:
        yield FrontEnd("", runtime, catalogue, worker, applications, links)
    finally:
        await applications.close()


@asynccontextmanager
async def serving(
    directory: Path,
    selection: SelectionConfig | None = None,
    *,
    clock: Callable[[], int] = time.monotonic_ns,
) -> AsyncIterator[FrontEnd]:
    """Do what `controlling` does, and listen on a port."""
    async with controlling(directory, selection, clock=clock) as front_end:
        runtime, catalogue = front_end.runtime, front_end.catalogue
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)])
        service = InferenceService(runtime, catalogue, applications=front_end.applications)
        server.add_generic_rpc_handlers(service.handlers())
        control = ControlService(
            runtime,
            catalogue,
            front_end.links,
            front_end.applications,
            policy="clockwork",
            default_slo_ns=100 * NS_PER_MS,
            spool=directory,
        )
        control.mount(server)
        front_end.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield front_end
        finally:
            await server.stop(grace=None)


class FrontEndInThread:
    """The same for clients that block: the controller's loop runs in a thread of its own."""

    def __init__(self, front_end: FrontEnd, loop: asyncio.AbstractEventLoop) -> None:
        self.address = front_end.address
        self.front_end = front_end
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the controller's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    def until(self, condition: Callable[[FrontEnd], bool]) -> None:
        """Wait until something is so; evaluated in the controller's loop."""
        self.run(until(lambda: condition(self.front_end)))

    def do(self, work: Callable[[FrontEnd], T]) -> T:
        """Call something in the controller's loop."""

        async def call() -> T:
            return work(self.front_end)

        return self.run(call())


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the event loop until something is so; pytest's timeout bounds the wait."""
    # What is waited for happens in code under test, which sets no events for tests.
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextmanager
def serving_in_thread(
    directory: Path, *, clock: Callable[[], int] = time.monotonic_ns
) -> Iterator[FrontEndInThread]:
    started: list[FrontEndInThread] = []
    ready = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(directory, clock=clock) as front_end:
            started.append(FrontEndInThread(front_end, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield started[0]
    finally:
        started[0].do(lambda _: stop.set())
        thread.join()
