"""Modelled devices on a virtual time, behind the real runtime: they run batches one after the other, and may fail or be lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from typing import Final

from clockwright.units import (
    NS_PER_MS,
    ActionId,
    ArchitectureId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from clockwright.wire.actions import (
    Action,
    ActionError,
    EvictWeights,
    Infer,
    LoadWeights,
    Result,
    StepTime,
)
from clockwright.wire.bulk import Buffer
from controller.core.events import ModelAdded, ModelReady, ModelRemoved, WorkerJoined
from controller.models.entry import Entry
from controller.port import Ask, Sink
from controller.runtime import Runtime
from experiments.bench.story_loop import StoryLoop

#: One way to a device.
_LINK_NS: Final = NS_PER_MS // 20
_NOISE: Final = 0.01
# What a request brings: its input and its state.
_NUM_INPUTS: Final = 2

#: Makes the outputs of a request of its inputs.
Run = Callable[[Sequence[Buffer]], Sequence[Buffer]]


class RuntimeStage:
    """The last stage of the port: asks the runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def ask(self, subject: Entry, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        """Ask."""
        return self._runtime.ask(subject.model_id, ask, inputs, sink)

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel."""
        self._runtime.withdraw(request_id)


class StoryDevice:
    """A worker, and its link."""

    def __init__(
        self,
        loop: StoryLoop,
        runtime: Runtime,
        worker_id: WorkerId,
        exec_ns: Mapping[int, int],
        run: Run,
    ) -> None:
        self._loop, self._runtime = loop, runtime
        self.worker_id = worker_id
        self._exec_ns, self._run = exec_ns, run
        self._random = Random(worker_id)
        self._free_ns = 0
        #: Its next batch fails; everything takes so many times longer; it is lost.
        self.fails, self.slowness, self.is_lost = False, 1.0, False

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Take an action in."""
        self._loop.at(self._loop.now_ns + _LINK_NS, self._begin, action, list(payload))

    def _begin(self, action: Action, payload: list[Buffer]) -> None:
        if isinstance(action, EvictWeights):
            return
        now_ns = self._loop.now_ns
        result = Result(action_id=action.action_id, received_ns=now_ns)
        begin_ns = max(now_ns, action.earliest_ns)
        if isinstance(action, LoadWeights):
            result.load = StepTime(begin_ns, begin_ns + NS_PER_MS, NS_PER_MS)
            self._loop.at(begin_ns + NS_PER_MS, self._end, action, result, payload)
            return
        begin_ns = max(begin_ns, self._free_ns)
        if begin_ns > action.latest_ns:
            result.error = ActionError.TOO_LATE
            self._loop.at(now_ns, self._end, action, result, payload)
            return
        spread = self.slowness * self._random.lognormvariate(0, _NOISE)
        duration_ns = round(self._exec_ns[action.batch_size] * spread)
        self._free_ns = end_ns = begin_ns + duration_ns
        result.exec = StepTime(begin_ns, end_ns, duration_ns)
        result.input, result.output = StepTime(begin_ns, begin_ns, 0), StepTime(end_ns, end_ns, 0)
        if self.fails:
            self.fails, result.error, result.message = False, ActionError.DEVICE, "as it was told"
        self._loop.at(end_ns, self._end, action, result, payload)

    def _end(self, action: Action, result: Result, payload: list[Buffer]) -> None:
        outputs: list[Buffer] = []
        if isinstance(action, Infer) and result.error is ActionError.NONE:
            for first in range(0, len(payload), _NUM_INPUTS):
                outputs += self._run(payload[first : first + _NUM_INPUTS])
        self._loop.at(self._loop.now_ns + _LINK_NS, self._tell, result, outputs)

    def _tell(self, result: Result, outputs: list[Buffer]) -> None:
        if not self.is_lost:
            self._runtime.action_finished(self.worker_id, result, outputs)

    def look(self) -> None:
        """Results come by themselves."""

    def flush(self, *, now: bool) -> None:
        """All was sent."""

    def withdraw_action(self, action_id: ActionId) -> None:
        """What was sent runs."""

    def write_off(self, action_id: ActionId) -> None:
        """Its result may come all the same."""

    def forget_model(self, model_id: ModelId) -> None:
        """Nothing is kept of a model."""

    def close(self, reason: str) -> None:
        """The controller has given it up."""
        self.is_lost = True


class StoryFleet:
    """Devices that come and go, and the models that all of them have."""

    def __init__(
        self,
        loop: StoryLoop,
        runtime: Runtime,
        exec_ns: Mapping[int, int],
        run: Run,
    ) -> None:
        """Begin without devices and models; the rest are arguments of each `StoryDevice`."""
        self._runtime = runtime
        self._exec_ns = exec_ns
        self._loop, self._run = loop, run
        self._numbers = count()
        self._models: list[ModelId] = []
        self.devices: list[StoryDevice] = []

    def join(self) -> None:
        """One more device comes."""
        device = StoryDevice(
            self._loop,
            self._runtime,
            WorkerId(f"w{next(self._numbers)}"),
            self._exec_ns,
            self._run,
        )
        self.devices.append(device)
        self._runtime.worker_joined(
            device,
            WorkerJoined(worker_id=device.worker_id, gpu_kind=GpuKind("modelled"), num_pages=10),
        )
        for model_id in self._models:
            self._ready(device, model_id)

    def lose(self, device: StoryDevice) -> None:
        """A device is gone, with whatever it does."""
        self.devices.remove(device)
        device.is_lost = True
        self._runtime.worker_lost(device.worker_id)

    def add_model(self, model_id: ModelId) -> None:
        """All have one more model."""
        self._models.append(model_id)
        self._runtime.telemetry.add_model(model_id)
        self._runtime.tell(ModelAdded(model_id=model_id))
        for device in self.devices:
            self._ready(device, model_id)

    def remove_model(self, model_id: ModelId) -> None:
        """None has a model any more."""
        self._models.remove(model_id)
        self._runtime.tell(ModelRemoved(model_id=model_id))

    def _ready(self, device: StoryDevice, model_id: ModelId) -> None:
        self._runtime.tell(
            ModelReady(
                worker_id=device.worker_id,
                model_id=model_id,
                architecture_id=ArchitectureId("story"),
                num_pages=1,
                load_ns=NS_PER_MS,
                exec_ns=self._exec_ns,
            )
        )
