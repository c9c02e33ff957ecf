"""The core's lanes as threads: LOAD, INPUT, EXEC, OUTPUT, around one lock.

A hop from thread to thread costs 20-30 us, as much as a small model. So a step need not run on its lane's own
thread. The thread that submits an Infer copies small inputs itself. If the lanes are idle and the device allows it,
this thread also runs a short EXEC. The thread that ran the EXEC copies small outputs when no other EXEC is due. A
short Infer on idle lanes goes through them all at once (`Core.submit_through`). Each lane still runs one step at a
time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic

from clockwright.process import freeze_garbage
from clockwright.units import NS_PER_S, ActionId, ModelId
from clockwright.wire.actions import Action, ActionError, Infer, Result, StepTime
from clockwright.wire.bulk import Buffer, total_bytes
from worker.core.lanes import Core, Lane, Step, WaitUntil
from worker.devices.device import Device, DeviceLostError, Launched, M, QueueingDevice
from worker.timing import SPIN_NS, bind_thread, tune_thread

# Below this a copy takes less time than waking another thread.
INLINE_BYTES = 128 * 1024

# As much as the processor copies in the time below. Where EXEC runs on the processor, too, who submits an
# action goes on with it: lanes' threads would take turns with it at the interpreter all the same, at
# 50 us and more for a request of 602 kB.
LONG_INLINE_BYTES = 2 << 20

# An EXEC that should take no longer may hold up the thread that submits actions.
SHORT_NS = 300_000

# Hand the next EXEC to the device this long before the running one should end. Long enough to wake, decide
# and launch (60 us at p99, measured with other threads running); no longer, because a queued EXEC cannot be taken
# back.
AHEAD_NS = 200_000
# Pauses between looks at whether the running EXEC has ended: close to its end, and before.
_POLL_NS, _LONG_POLL_NS = 20_000, 100_000

Outcome = tuple[Result, Sequence[Buffer]]

# To find an enum's member costs as much as what is done with it here.
_INPUT: Final = Lane.INPUT
_EXEC: Final = Lane.EXEC
_OUTPUT: Final = Lane.OUTPUT


class _UnderWay(Generic[M]):
    """An EXEC that was handed to a device with a queue."""

    def __init__(self, step: Step[M], begin_ns: int) -> None:
        self.step = step
        #: When the device got the EXEC, or when the EXEC before it ended if that was later.
        self.begin_ns = begin_ns
        self.launched: Launched | None = None
        self.failure: Exception | None = None

    def is_done(self) -> bool:
        """Whether the EXEC has ended, well or badly."""
        if self.launched is None:
            return True
        try:
            return self.launched.is_done()
        except Exception:  # `finish` meets the same exception and reports it
            return True

    def finish(self, device: QueueingDevice) -> int:
        """Wait for the end; returns its time."""
        if self.launched is not None:
            try:
                device.finish_exec(self.step, self.launched)
            except (
                Exception
            ) as problem:  # whatever a device raises fails the action, not the worker
                self.failure = problem
        return time.monotonic_ns()


class LaneThreads(Generic[M]):
    """Runs a device's lanes. All methods may be called from any thread."""

    #: As `SHORT_NS`.
    short_ns = SHORT_NS

    def __init__(
        self,
        device: Device[M],
        on_outcome: Callable[[Outcome], None],
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Make the lanes; `start` starts their threads.

        Args:
            device: runs the steps.
            on_outcome: called with each result, and for a successful Infer with its outputs, per request and per
                output, unless they lie in the room that was given for them. Called from any thread, with the lock
                held, so it must return at once.
            on_lost: called with the reason why the device is lost, after the action's result, in the same way.
        """
        self._device = device
        self._on_outcome = on_outcome
        self._on_lost = on_lost
        self._core: Core[M] = Core(num_pages=device.limits.num_pages, io_bytes=device.io_pool_bytes)
        self._lock = threading.Lock()
        self._wake = {lane: threading.Condition(self._lock) for lane in Lane}
        self._payloads: dict[ActionId, Sequence[Buffer]] = {}
        #: The payload of the INPUT step that runs. Taken together with the step, so that no later action's
        #: payload can slip in.
        self._input_payload: Sequence[Buffer] = ()
        #: Where outputs belong, for the actions whose sender says so; and that of the OUTPUT step that runs.
        self._rooms: dict[ActionId, memoryview] = {}
        self._output_room: memoryview | None = None
        self._exec_anywhere = device.exec_anywhere and not isinstance(device, QueueingDevice)
        self._inline_bytes = LONG_INLINE_BYTES if self._exec_anywhere else INLINE_BYTES
        self._stopping = False
        #: The device is lost: no step starts until `abandon` has dropped everything that waits.
        self._lost = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the lanes' threads."""
        for lane in Lane:
            thread = threading.Thread(
                target=self._serve, args=(lane,), name=lane.value, daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Let running steps end, forget everything else, and return when no thread is left."""
        self.abandon()
        with self._lock:
            self._stopping = True
            for condition in self._wake.values():
                condition.notify()
        # Join, because a kernel that still runs at interpreter exit would abort the process.
        for thread in self._threads:
            thread.join()

    def add_model(self, model: M) -> None:
        """Accept actions for a model."""
        with self._lock:
            self._core.add_model(model)
            self._after_change()
        freeze_garbage()

    def remove_model(self, model_id: ModelId) -> None:
        """Forget a model once its actions are done."""
        with self._lock:
            self._core.remove_model(model_id)
            self._after_change()

    def abandon(self) -> None:
        """Forget all models and actions, because no controller waits for them."""
        with self._lock:
            self._core.abandon()
            self._dropped()

    def drop_actions(self) -> bool:
        """Forget all actions, because the controller that sent them is gone.

        Returns whether the models are still there. A lost device has lost its models.
        """
        with self._lock:
            was_lost = self._lost
            if was_lost:
                self._core.abandon()
            else:
                self._core.drop_actions()
            self._dropped()
        return not was_lost

    def _dropped(self) -> None:
        self._payloads.clear()
        self._rooms.clear()
        self._lost = False
        self._after_change()

    def resident(self) -> list[ModelId]:
        """The models whose weights are loaded."""
        with self._lock:
            return self._core.resident()

    @property
    def num_pending(self) -> int:
        """The number of actions that are not answered."""
        with self._lock:
            return self._core.num_pending

    @property
    def is_running(self) -> bool:
        """Whether a step runs, even one that was submitted before `abandon`."""
        with self._lock:
            return self._core.is_running()

    def check(self) -> None:
        """Assert the core's invariants."""
        with self._lock:
            self._core.check()

    def submit(
        self,
        action: Action,
        payload: Sequence[Buffer] = (),
        room: memoryview | None = None,
        *,
        inline: bool = True,
    ) -> None:
        """Take an action in.

        Args:
            action: on this machine's monotonic clock.
            payload: an Infer's inputs, per request and per input; must stay as they are until the result.
            room: the memory for its outputs, one after the other. Nothing is written there after the result.
            inline: the calling thread may run its steps, and so wait for the device.

        Raises:
            ProtocolError: an unanswered action has the same id.
        """
        step = through = None
        with self._lock:
            now_ns = time.monotonic_ns()
            if isinstance(action, Infer):
                model = self._core.model(action.model_id)
                problem = model and model.payload_problem(action, payload)
                if problem:
                    self._on_outcome((_bad_input(action, problem, now_ns), []))
                    return
                small = inline and total_bytes(payload) <= self._inline_bytes
                if small and model is not None and self._is_short(action, model):
                    through = self._core.submit_through(action, now_ns=now_ns)
                if through is None:
                    begins = small and self._core.is_idle(_INPUT)
                    self._core.submit(action, now_ns=now_ns)
                    self._payloads[action.action_id] = payload
                    if room is not None:
                        self._rooms[action.action_id] = room
                    if begins:
                        step = self._take(_INPUT, now_ns)
            else:
                self._core.submit(action, now_ns=now_ns)
            if through is None:
                self._after_change()
        if through is not None:
            self._run_through(through, now_ns, payload, room)
        while step is not None:
            step = self._run(step)

    def withdraw(self, action_id: ActionId) -> None:
        """Drop an action if it has not begun. Its result is then `WITHDRAWN`."""
        with self._lock:
            self._core.withdraw(action_id)
            self._after_change()

    # --- threads --------------------------------------------------------------------------------

    def _serve(self, lane: Lane) -> None:
        device = self._device
        if lane is Lane.EXEC and device.exec_core is not None:
            bind_thread((device.exec_core,))
            tune_thread(alone=device.exec_core_is_own)
        else:
            tune_thread(waits=lane not in device.computing_lanes)
        if lane is Lane.EXEC and isinstance(self._device, QueueingDevice):
            self._serve_queue(self._device)
            return
        step: Step[M] | None = None
        while True:
            if step is None:
                step = self._wait_for_step(lane)
                if step is None:
                    return
            step = self._run(step, then=lane)

    def _wait_for_step(self, lane: Lane) -> Step[M] | None:
        """Block until the lane has a step. Returns None when the thread must end."""
        with self._lock:
            while not self._stopping:
                now_ns = time.monotonic_ns()
                due = self._next(lane, now_ns)
                self._after_change()
                if isinstance(due, Step):
                    return due
                if due is None:
                    self._wake[lane].wait()
                elif due.time_ns - now_ns > SPIN_NS:
                    self._wake[lane].wait((due.time_ns - now_ns - SPIN_NS) / 1e9)
                else:
                    self._spin_until(due)
            return None

    def _spin_until(self, due: WaitUntil) -> None:
        self._lock.release()
        try:
            while time.monotonic_ns() < due.time_ns:
                pass
        finally:
            self._lock.acquire()

    def _run(self, step: Step[M], *, then: Lane | None = None) -> Step[M] | None:
        """Run a step and report it. Returns the step to run next, on the lane `then` if it is given."""
        begin_ns = time.monotonic_ns()
        failure, outputs = self._carry_out(step)
        return self._report(step, begin_ns, time.monotonic_ns(), failure, outputs, then=then)

    def _carry_out(self, step: Step[M]) -> tuple[Exception | None, Sequence[Buffer] | None]:
        """Have the device run a step. Returns why it failed, and what an OUTPUT gave."""
        outputs: Sequence[Buffer] | None = None
        lane, device = step.lane, self._device
        try:
            if lane is _INPUT:
                device.run_input(step, self._input_payload)
            elif lane is _EXEC:
                device.run_exec(step)
            elif lane is _OUTPUT:
                room = self._output_room
                outputs = device.run_output(step, room)
                if room is not None:
                    outputs = ()
            else:
                device.run_load(step)
        except Exception as problem:  # whatever a device raises fails the action, not the worker
            return problem, None
        return None, outputs

    def _run_through(
        self,
        step: Step[M],
        now_ns: int,
        payload: Sequence[Buffer],
        room: memoryview | None,
    ) -> None:
        """Run a short Infer from its input to its output, and report it."""
        device = self._device
        failure: Exception | None = None
        outputs: Sequence[Buffer] = ()
        times: list[StepTime] = []
        begin_ns = now_ns
        try:
            step.lane = _INPUT
            device.run_input(step, payload)
            now_ns = time.monotonic_ns()
            times.append(_time_of(step, begin_ns, now_ns))
            if now_ns <= step.action.latest_ns:
                step.lane, begin_ns = _EXEC, now_ns
                device.run_exec(step)
                now_ns = time.monotonic_ns()
                times.append(_time_of(step, begin_ns, now_ns))
                step.lane, begin_ns = _OUTPUT, now_ns
                outputs = device.run_output(step, room)
                times.append(_time_of(step, begin_ns, time.monotonic_ns()))
                if room is not None:
                    outputs = ()
        except Exception as problem:  # whatever a device raises fails the action, not the worker
            failure = problem
            times.append(_time_of(step, begin_ns, time.monotonic_ns()))
        with self._lock:
            self._core.finish_through(step, times, self._words(failure))
            self._after_change(step, outputs)
            if isinstance(failure, DeviceLostError) and self._on_lost is not None:
                self._on_lost(str(failure))

    def _words(self, failure: Exception | None) -> str | None:
        """Say how a step failed, and note a lost device. Call it with the lock held."""
        if failure is None:
            return None
        if isinstance(failure, DeviceLostError):
            self._lost = True
            return str(failure)
        return f"{type(failure).__name__}: {failure}"

    def _report(
        self,
        step: Step[M],
        begin_ns: int,
        end_ns: int,
        failure: Exception | None,
        outputs: Sequence[Buffer] | None = None,
        *,
        then: Lane | None,
    ) -> Step[M] | None:
        """Tell the core that a step has ended. Returns what to run next on the lane `then`."""
        lane = step.lane
        with self._lock:
            self._finish(step, begin_ns, end_ns, failure)
            following: Step[M] | None = None
            if then is not None:
                following = self._take(then, end_ns)
            if following is None and lane is _EXEC and self._is_small_output(step):
                following = self._take(_OUTPUT, end_ns)
            self._after_change(step, outputs)
            if isinstance(failure, DeviceLostError) and self._on_lost is not None:
                self._on_lost(str(failure))
        return following

    def _finish(
        self, step: Step[M], begin_ns: int, end_ns: int, failure: Exception | None = None
    ) -> None:
        """Tell the core that a step has ended. Call it with the lock held, and then `_after_change`."""
        self._core.finish_step(
            step,
            begin_ns=begin_ns,
            end_ns=end_ns,
            duration_ns=step.duration_ns or end_ns - begin_ns,
            error=self._words(failure),
        )

    # --- EXEC on a device with a queue ------------------------------------------------------------

    def _serve_queue(self, device: QueueingDevice) -> None:
        """The EXEC lane of a device that can queue the next EXEC behind the running one."""
        step: Step[M] | None = None
        running: _UnderWay[M] | None = None
        while True:
            if running is None:
                step = step or self._wait_for_step(Lane.EXEC)
                if step is None:
                    return
                running = self._launch(device, step)
            ahead = self._launch_ahead(device, running)
            end_ns = running.finish(device)
            step = self._report(
                running.step,
                running.begin_ns,
                end_ns,
                running.failure,
                then=Lane.EXEC if ahead is None else None,
            )
            if step is not None and step.lane is Lane.OUTPUT:
                self._run(step)
                step = None
            running = ahead
            if running is not None:
                running.begin_ns = max(running.begin_ns, end_ns)

    def _launch(self, device: QueueingDevice, step: Step[M]) -> _UnderWay[M]:
        under_way = _UnderWay(step, time.monotonic_ns())
        try:
            under_way.launched = device.launch_exec(step)
        except Exception as problem:  # fails the action, not the worker
            under_way.failure = problem
        return under_way

    def _launch_ahead(self, device: QueueingDevice, running: _UnderWay[M]) -> _UnderWay[M] | None:
        """Shortly before an EXEC ends, hand the device the next one. Returns None if no EXEC was due by then."""
        end_ns = running.begin_ns + running.step.action.expected_duration_ns
        while not running.is_done():
            now_ns = time.monotonic_ns()
            nap_ns = _POLL_NS
            if now_ns >= end_ns - AHEAD_NS:
                with self._lock:
                    step = None
                    if not self._lost:
                        step = self._core.next_exec_ahead(
                            now_ns=now_ns, begin_ns=max(now_ns, end_ns)
                        )
                        self._after_change()
                if step is not None:
                    return self._launch(device, step)
            else:
                nap_ns = min(end_ns - AHEAD_NS - now_ns, _LONG_POLL_NS)
            time.sleep(nap_ns / NS_PER_S)
        return None

    def _next(self, lane: Lane, now_ns: int) -> Step[M] | WaitUntil | None:
        if self._lost:
            return None
        due = self._core.next_step(lane, now_ns=now_ns)
        if isinstance(due, Step):
            if lane is _INPUT:
                self._input_payload = self._payloads.pop(due.action.action_id)
            elif lane is _OUTPUT:
                self._output_room = self._rooms.pop(due.action.action_id, None)
        return due

    def _take(self, lane: Lane, now_ns: int) -> Step[M] | None:
        due = self._next(lane, now_ns)
        return due if isinstance(due, Step) else None

    def _is_short(self, action: Infer, model: M) -> bool:
        """Whether the thread that submits an Infer may run it to its end."""
        if not self._exec_anywhere or action.expected_duration_ns > self.short_ns or self._lost:
            return False
        layout = model.layouts.get(action.batch_size)
        return layout is not None and layout.outputs_bytes <= self._inline_bytes

    def _is_small_output(self, step: Step[M]) -> bool:
        assert isinstance(step.action, Infer)
        return step.model.layouts[step.action.batch_size].outputs_bytes <= self._inline_bytes

    def _after_change(
        self, finished: Step[M] | None = None, outputs: Sequence[Buffer] | None = None
    ) -> None:
        """Hand out results and wake lanes, after a step that ended, if one did. Call it with the lock held."""
        for result in self._core.take_results():
            self._payloads.pop(result.action_id, None)
            self._rooms.pop(result.action_id, None)
            own = finished is not None and finished.action.action_id == result.action_id
            self._on_outcome((result, outputs if own and outputs is not None else []))
        for lane in self._core.take_changed():
            self._rouse(lane)

    def _rouse(self, lane: Lane) -> None:
        """Have a lane look for its next step. Call it with the lock held."""
        self._wake[lane].notify()


def _time_of(step: Step[M], begin_ns: int, end_ns: int) -> StepTime:
    duration_ns, step.duration_ns = step.duration_ns, None
    return StepTime(begin_ns, end_ns, duration_ns or end_ns - begin_ns)


def _bad_input(action: Infer, problem: str, now_ns: int) -> Result:
    return Result(
        action_id=action.action_id,
        error=ActionError.BAD_INPUT,
        message=f"model {action.model_id!r}: {problem}",
        received_ns=now_ns,
    )
