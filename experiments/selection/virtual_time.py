"""The controller's shells on virtual time: an event loop whose clock jumps to the next event.

The simulator drives the scheduler alone; selection lives above it, in asyncio. Here the real runtime,
catalogue and applications run unchanged, between the simulator's workers and clients, as fast as the
processor can and with the same outcome on any machine. Work takes no time unless a worker says so.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from random import Random
from typing import Any, TypeVar

from typing_extensions import override

from clockwright.actions import Action, Infer, Result
from clockwright.bulk import Buffer
from clockwright.tensors import TensorSpec
from clockwright.units import NS_PER_S, ActionId, GpuKind, ModelId, WorkerId
from controller.catalogue import Catalogue, Entry
from controller.core.events import ModelReady, WorkerJoined
from controller.runtime import Runtime
from experiments.simulator.case import Case
from experiments.simulator.loop import NEVER_NS, Loop
from experiments.simulator.worker import Worker, simulated

T = TypeVar("T")

_BEGIN_NS = 1000 * NS_PER_S


class _Jumping(selectors.DefaultSelector):
    """Sets the clock to the next timer, where a loop would sleep until then."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = _BEGIN_NS

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("virtual time stands still: no timer is set and nothing is ready")
        ready = super().select(0)
        if not ready and timeout > 0:
            # Rounded up, or the loop finds its timer a moment away and asks again, for ever.
            self.now_ns += max(round(timeout * NS_PER_S), 0) + 1
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self.clock = _Jumping()
        super().__init__(self.clock)

    @override
    def time(self) -> float:
        return self.clock.now_ns / NS_PER_S

    @override
    def run_in_executor(  # type: ignore[override]
        self,
        executor: Executor | None,
        func: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        """Wait for the thread, or the machine would decide how far the clock gets meanwhile."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args) if executor is None else executor.submit(func, *args).result()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on virtual time."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work())


def now_ns() -> int:
    """The running loop's present: the clock to give to a `Runtime` that lives in it."""
    return round(asyncio.get_running_loop().time() * NS_PER_S)


class VirtualWorker:
    """One worker of the simulator behind a live runtime: what it says takes time, answers are at once.

    It lives on a heap of its own, which is played up to the event loop's present whenever that reaches
    the next thing to do.
    """

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        case: Case,
        index: int,
        answer: Callable[[ModelId, Buffer], list[Buffer]],
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> None:
        """Hold the cluster's models, as ones of these tensors.

        Args:
            runtime: where results go.
            catalogue: offers the models, by the ids that they have in the cluster.
            case: times, faults, seed. Its workload is not looked at.
            index: among the cluster's workers.
            answer: the outputs of one input of a model.
            inputs: of every model.
            outputs: likewise.
        """
        self._runtime = runtime
        self._catalogue = catalogue
        self._cluster = case.cluster
        self._answer = answer
        self._inputs = inputs
        self._outputs = outputs
        self._models = {model.model_id: model for model in case.cluster.models}
        #: The input of each request of every Infer under way.
        self._payloads: dict[ActionId, tuple[ModelId, Sequence[Buffer]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop = Loop()
        self._worker = Worker(
            WorkerId(f"worker-{index}"),
            case,
            index,
            0,
            simulated(case.cluster),
            self._loop,
            self._on_result,
            check=False,
        )

    def join(self) -> None:
        """Register."""
        worker_id = self._worker.worker_id
        joined = WorkerJoined(
            worker_id=worker_id, gpu_kind=GpuKind("simulated"), num_pages=self._cluster.num_pages
        )
        self._runtime.worker_joined(self, joined)
        self._catalogue.worker_joined(worker_id, self)

    def offer(self, model: Entry) -> None:
        """Take a model."""
        hosted = self._models[model.model_id]
        event = ModelReady(
            worker_id=self._worker.worker_id,
            model_id=hosted.model_id,
            architecture_id=hosted.architecture_id,
            num_pages=hosted.num_pages,
            load_ns=hosted.row.load_ns,
            exec_ns=hosted.row.exec_ns,
        )
        self._catalogue.model_ready(
            event,
            inputs=self._inputs,
            outputs=self._outputs,
            weights_bytes=hosted.row.weights_bytes,
        )

    def withdraw(self, model: Entry) -> None:
        """Do nothing: an offer is answered at once, so there is none to take back."""

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Put an action on the link."""
        if isinstance(action, Infer):
            self._payloads[action.action_id] = action.model_id, payload
        self._loop.run(now_ns())
        self._worker.send(action)
        self._arm()

    def withdraw_action(self, action_id: ActionId) -> None:
        """Tell the worker to drop an action that it has not begun."""
        self._loop.run(now_ns())
        self._worker.withdraw_action(action_id)
        self._arm()

    def forget_model(self, model_id: ModelId) -> None:
        """Tell the worker to drop a model."""
        self._loop.run(now_ns())
        self._worker.forget_model(model_id)
        self._arm()

    def close(self, reason: str) -> None:
        """Have it vanish."""
        self._worker.kill()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop.next_ns < NEVER_NS:
            at_s = self._loop.next_ns / NS_PER_S
            self._timer = asyncio.get_running_loop().call_at(at_s, self._play)

    def _play(self) -> None:
        self._loop.run(now_ns())
        self._arm()

    def _on_result(self, message: tuple[Worker, Result]) -> None:
        worker, result = message
        model_id, payload = self._payloads.pop(result.action_id, (ModelId(""), ()))
        outputs: list[Buffer] = []
        if not result.error:
            for row in payload:
                outputs += self._answer(model_id, row)
        # What it leads to may be sent here, and so it comes when the heap is not being played.
        asyncio.get_running_loop().call_soon(
            self._runtime.action_finished, worker.worker_id, result, outputs
        )


def poisson_ns(rate: float, seconds: float, rng: Random) -> list[int]:
    """Times of arrivals from 0, ascending."""
    times: list[int] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        times.append(round(at_s * NS_PER_S))
        at_s += rng.expovariate(rate)
    return times
