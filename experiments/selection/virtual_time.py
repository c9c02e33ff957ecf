"""The controller's shells on virtual time: an event loop whose clock jumps to the next event.

The simulator drives the scheduler alone; selection lives above it, in asyncio. Here the real runtime,
catalogue and applications run unchanged, between modelled workers and clients, as fast as the
processor can and with the same outcome on any machine. Work takes no time unless a worker says so.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from typing_extensions import override

from clockwright.actions import Action, ActionError, Infer, LoadWeights, Result, StepTime
from clockwright.bulk import Buffer
from clockwright.tensors import TensorSpec
from clockwright.units import NS_PER_MS, NS_PER_S, ArchitectureId, GpuKind, ModelId, WorkerId
from controller.catalogue import Catalogue, Entry
from controller.core.events import ModelReady, WorkerJoined
from controller.runtime import Runtime

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


@dataclass(frozen=True, slots=True)
class ModelledTimes:
    """Durations of a modelled worker's actions."""

    load_ns: int = 2 * NS_PER_MS
    #: Duration of an EXEC by batch size.
    exec_ns: Mapping[int, int] = field(
        default_factory=lambda: {1: NS_PER_MS, 4: 2 * NS_PER_MS, 16: 5 * NS_PER_MS}
    )
    #: Standard deviation of an EXEC's duration, as a share of it.
    noise: float = 0.02
    #: Injected stragglers: this share of EXECs takes `straggling_factor` times as long; nobody can predict it.
    straggling: float = 0.01
    straggling_factor: float = 30.0


class ModelledWorker:
    """One worker behind a link without delay: two lanes, answers from a table."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        worker_id: WorkerId,
        costs: ModelledTimes,
        answer: Callable[[str, Buffer], list[Buffer]],
        rng: Random,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> None:
        """Take every model, as one of these tensors; answer one input with `answer(model, input)`."""
        self._runtime = runtime
        self._catalogue = catalogue
        self._worker_id = worker_id
        self._costs = costs
        self._answer = answer
        self._rng = rng
        self._inputs = inputs
        self._outputs = outputs
        self._free_ns = {LoadWeights: 0, Infer: 0}

    def join(self, num_pages: int = 1000) -> None:
        """Register."""
        self._runtime.worker_joined(
            self,
            WorkerJoined(
                worker_id=self._worker_id, gpu_kind=GpuKind("modelled"), num_pages=num_pages
            ),
        )
        self._catalogue.worker_joined(self._worker_id, self)

    def offer(self, model: Entry) -> None:
        """Take a model."""
        event = ModelReady(
            worker_id=self._worker_id,
            model_id=model.model_id,
            # Each model has a graph of its own, as different forests have, so they share no measurements.
            architecture_id=ArchitectureId(model.name),
            num_pages=1,
            load_ns=self._costs.load_ns,
            exec_ns=self._costs.exec_ns,
        )
        self._catalogue.model_ready(
            event, inputs=self._inputs, outputs=self._outputs, weights_bytes=1
        )

    def withdraw(self, model: Entry) -> None:
        """Do nothing: an offer is answered at once, so there is none to take back."""

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Put an action on its lane; an EvictWeights is done at once."""
        at_ns = now_ns()
        if not isinstance(action, Infer | LoadWeights):
            asyncio.get_running_loop().call_soon(
                self._finish, Result(action_id=action.action_id, received_ns=at_ns), []
            )
            return
        begin_ns = max(at_ns, self._free_ns[type(action)], action.earliest_ns)
        result = Result(action_id=action.action_id, received_ns=at_ns)
        outputs: list[Buffer] = []
        end_ns = begin_ns
        if begin_ns > action.latest_ns:
            result.error = ActionError.TOO_LATE
        else:
            duration_ns = self._duration_ns(action)
            end_ns = begin_ns + duration_ns
            step = StepTime(begin_ns, end_ns, duration_ns)
            if isinstance(action, Infer):
                result.input = result.exec = result.output = step
                for row in payload:
                    outputs += self._answer(action.model_id, row)
            else:
                result.load = step
        self._free_ns[type(action)] = end_ns
        loop = asyncio.get_running_loop()
        loop.call_at(end_ns / NS_PER_S, self._finish, result, outputs)

    def _duration_ns(self, action: Infer | LoadWeights) -> int:
        if isinstance(action, LoadWeights):
            return self._costs.load_ns
        factor = max(self._rng.gauss(1.0, self._costs.noise), 0.5)
        if self._rng.random() < self._costs.straggling:
            factor *= self._costs.straggling_factor
        return round(self._costs.exec_ns[action.batch_size] * factor)

    def _finish(self, result: Result, outputs: list[Buffer]) -> None:
        self._runtime.action_finished(self._worker_id, result, outputs)

    def forget_model(self, model_id: ModelId) -> None:
        """Do nothing, because nothing is kept."""

    def close(self, reason: str) -> None:
        """Do nothing, because nothing is open."""


def poisson_ns(rate: float, seconds: float, rng: Random) -> list[int]:
    """Times of arrivals from 0, ascending."""
    times: list[int] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        times.append(round(at_s * NS_PER_S))
        at_s += rng.expovariate(rate)
    return times
