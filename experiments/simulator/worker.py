"""A production worker core on virtual time: steps take what the profile says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from clockwright.units import ActionId, ModelId, WorkerId
from clockwright.wire.actions import Action, EvictWeights, Infer, Result
from experiments.simulator.case import Case, WorkerClock
from experiments.simulator.clock import HEARTBEAT_NS, Heartbeats
from experiments.simulator.loop import Loop
from experiments.simulator.model import SimulatedModel
from experiments.simulator.network import VirtualLink
from worker.core.lanes import Core, Lane, Step

# To look a member up in its enum takes ten times as long as a global.
_LOAD: Final = Lane.LOAD
_INPUT: Final = Lane.INPUT
_EXEC: Final = Lane.EXEC
_DEVICE_LANES: Final = (_LOAD, _EXEC)


class Worker:
    """One connection of one worker, from registration to loss.

    All public times are virtual, which is the controller's clock. Inside, the core lives on the
    worker's own.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        case: Case,
        index: int,
        incarnation: int,
        models: list[SimulatedModel],
        loop: Loop,
        on_result: Callable[[tuple[Worker, Result]], None],
        *,
        check: bool,
    ) -> None:
        """Start with an empty weights cache.

        It is at `index` among the cluster's workers, and holds all `models` in host memory, as its kind has them; with
        each `incarnation` it draws other random numbers. `on_result` is told when a result reaches the controller, in
        whose clock it is then. The core's invariants are asserted after every change where `check` says so.
        """
        self.worker_id = worker_id
        self.index = index
        self.alive = True
        self._loop = loop
        self._on_result = on_result
        self._check = check
        seed = f"{case.seed} {worker_id} {incarnation}"
        network, faults = case.network.of(index), case.faults
        self._down = VirtualLink(network, faults, random.Random(f"down {seed}"))
        self._up = VirtualLink(network, faults, random.Random(f"up {seed}"), up=True)
        self._load_time = _Duration(case, case.cluster.noise.load_sigma, f"load {seed}")
        self._exec_time = _Duration(case, case.cluster.noise.exec_sigma, f"exec {seed}")
        self._core: Core[SimulatedModel] = Core(
            num_pages=case.cluster.pages_of_worker(index), io_bytes=case.cluster.io_pool_bytes
        )
        for model in models:
            self._core.add_model(model)
        self._start_delay_ns = case.cluster.start_delay_ns
        #: When each lane has to be looked at again, on the worker's clock.
        self._wakes: dict[Lane, int] = {}
        #: Output bytes of Infers whose OUTPUT has begun, kept if bytes take time on the link.
        self._counts_bytes = bool(network.bytes_per_s or network.up_bytes_per_s)
        self._output_bytes: dict[ActionId, int] = {}
        self._clock: WorkerClock | None = None
        if faults.clocks:
            self._clock = faults.clocks[index]
            self._heartbeats = Heartbeats(self._clock, network, random.Random(f"beat {seed}"))
            self._heartbeats.settle(loop.now_ns)
            loop.at(loop.now_ns + HEARTBEAT_NS, self._beat, None)

    # --- the controller's end --------------------------------------------------------------------

    def send(self, action: Action) -> None:
        """Put an action on the link."""
        num_bytes = 0
        if self._counts_bytes and isinstance(action, Infer):
            model = self._core.model(action.model_id)
            num_bytes = sum(action.rows) * model.input_bytes if model else 0
        arrives_ns = self._down.send(self._loop.now_ns, num_bytes)
        if arrives_ns is None:
            return
        if self._clock is not None and not isinstance(action, EvictWeights):
            offset_ns = self._heartbeats.sync.offset_ns
            assert offset_ns is not None
            action = replace(
                action,
                earliest_ns=action.earliest_ns + offset_ns,
                latest_ns=action.latest_ns + offset_ns,
            )
        self._loop.at(arrives_ns, self._receive, action)

    def withdraw_action(self, action_id: ActionId) -> None:
        """Tell the worker to drop an action that it has not begun."""
        arrives_ns = self._down.send(self._loop.now_ns, 0)
        if arrives_ns is not None:
            self._loop.at(arrives_ns, self._withdraw, action_id)

    def forget_model(self, model_id: ModelId) -> None:
        """Tell the worker to drop a model."""
        arrives_ns = self._down.send(self._loop.now_ns, 0)
        if arrives_ns is not None:
            self._loop.at(arrives_ns, self._remove, model_id)

    @property
    def link_busy_ns(self) -> int:
        """How long tensors have taken the wires of its link, both ways together."""
        return self._down.busy_ns + self._up.busy_ns

    def kill(self) -> None:
        """Vanish: do nothing, and send nothing, from now on."""
        self.alive = False

    def _deliver(self, result: Result) -> None:
        if self._clock is not None:
            offset_ns = self._heartbeats.sync.offset_ns
            assert offset_ns is not None
            result.received_ns -= offset_ns
            for step in (result.load, result.input, result.exec, result.output):
                if step is not None:
                    step.begin_ns -= offset_ns
                    step.end_ns -= offset_ns
        self._on_result((self, result))

    def _beat(self, _: None) -> None:
        if self.alive:
            self._heartbeats.beat(self._loop.now_ns)
            self._loop.at(self._loop.now_ns + HEARTBEAT_NS, self._beat, None)

    # --- the worker's end -----------------------------------------------------------------------

    def _local_ns(self) -> int:
        now_ns = self._loop.now_ns
        return now_ns if self._clock is None else self._clock.local_ns(now_ns)

    def _receive(self, action: Action) -> None:
        if self.alive:
            now_ns = self._local_ns()
            self._core.submit(action, now_ns=now_ns)
            self._advance(now_ns)

    def _withdraw(self, action_id: ActionId) -> None:
        if self.alive:
            self._core.withdraw(action_id)
            self._advance(self._local_ns())

    def _remove(self, model_id: ModelId) -> None:
        if self.alive:
            self._core.remove_model(model_id)
            self._advance(self._local_ns())

    def _advance(self, now_ns: int) -> None:
        """Ask every lane that may have something new to do, and hand out results."""
        core = self._core
        while lanes := core.take_changed():
            for lane in lanes:
                self._look(lane, now_ns)
        for result in core.take_results():
            self._report(result)
        if self._check:
            core.check()

    def _look(self, lane: Lane, now_ns: int) -> None:
        due = self._core.next_step(lane, now_ns=now_ns)
        if due is None:
            return
        if isinstance(due, Step):
            if self._wakes:
                self._wakes.pop(lane, None)
            duration_ns = self._duration_ns(due)
            if duration_ns:
                begin_ns = now_ns
                if self._start_delay_ns and due.lane in _DEVICE_LANES:
                    begin_ns += self._start_delay_ns
                    duration_ns += self._start_delay_ns
                self._loop.at(self._loop.now_ns + duration_ns, self._finish, (due, begin_ns))
            else:
                self._core.finish_step(due, begin_ns=now_ns, end_ns=now_ns, duration_ns=0)
        elif self._wakes.get(lane) != due.time_ns:
            self._wakes[lane] = due.time_ns
            clock = self._clock
            time_ns = due.time_ns if clock is None else clock.time_ns(due.time_ns)
            self._loop.at(time_ns, self._wake, (lane, due.time_ns))

    def _wake(self, wake: tuple[Lane, int]) -> None:
        lane, time_ns = wake
        if self.alive and self._wakes.get(lane) == time_ns:
            del self._wakes[lane]
            now_ns = self._local_ns()
            self._look(lane, now_ns)
            self._advance(now_ns)

    def _finish(self, running: tuple[Step[SimulatedModel], int]) -> None:
        if not self.alive:
            return
        step, begin_ns = running
        end_ns = self._loop.now_ns if self._clock is None else self._local_ns()
        self._core.finish_step(
            step, begin_ns=begin_ns, end_ns=end_ns, duration_ns=end_ns - begin_ns
        )
        self._advance(end_ns)

    def _duration_ns(self, step: Step[SimulatedModel]) -> int:
        lane, model, action = step.lane, step.model, step.action
        if lane is _LOAD:
            return self._load_time.draw(model.load_ns)
        assert isinstance(action, Infer)
        if lane is _EXEC:
            size = action.batch_size
            return self._exec_time.draw(model.exec_ns[size], model.exec_samples_ns.get(size))
        rows = sum(action.rows)
        if lane is _INPUT:
            return model.input_ns[rows]
        if self._counts_bytes:
            self._output_bytes[action.action_id] = rows * model.output_bytes
        return model.output_ns[rows]

    def _report(self, result: Result) -> None:
        num_bytes = self._output_bytes.pop(result.action_id, 0) if self._counts_bytes else 0
        arrives_ns = self._up.send(self._loop.now_ns, num_bytes)
        if arrives_ns is not None:
            self._loop.at(arrives_ns, self._deliver, result)


class _Duration:
    """Draws how long one lane's steps take: one of what was measured, or log-normal noise, and now and then a slow one."""

    __slots__ = ("_noise", "_sigma", "_slow", "_slow_factor", "_slow_probability")

    def __init__(self, case: Case, sigma: float, seed: str) -> None:
        self._sigma = sigma
        self._slow_probability = case.faults.slow_probability
        self._slow_factor = case.faults.slow_factor
        # Two generators, so that faults leave the noise as it was.
        self._noise = random.Random(seed)
        self._slow = random.Random(f"slow {seed}")

    def draw(self, duration_ns: int, samples_ns: Sequence[int] | None = None) -> int:
        if samples_ns:
            duration_ns = self._noise.choice(samples_ns)
        elif self._sigma:
            duration_ns = round(duration_ns * self._noise.lognormvariate(0.0, self._sigma))
        if self._slow_probability and self._slow.random() < self._slow_probability:
            duration_ns = round(duration_ns * self._slow_factor)
        return duration_ns
