"""Decides which step each lane runs and when: windows, lanes, residency. No clock, no threads, no tensors.

Actions go in through `submit`. The shell (threads in a worker, a virtual clock in the simulator) asks each lane
for its `next_step`, runs it and reports it with `finish_step`. Results are kept until `take_results`. The worker
does not choose between actions: an action that cannot start inside its window is refused.

    LoadWeights   LOAD
    Infer         INPUT -> EXEC -> OUTPUT      (in an IO slot from the start of INPUT to the end of OUTPUT)
    EvictWeights  no lane: metadata only

Each lane runs one step at a time. LOAD and EXEC run in the order of `earliest_ns`, then of arrival, and respect
the action's window. INPUT starts as soon as a slot is free, OUTPUT at once. An Infer whose model is still being
loaded waits for the load until its own window closes, and other Infers pass it meanwhile: the controller sends
Infers before it knows the result of the LoadWeights.

Pages belong to a `_Residency`, not to a model. They return to the cache when the residency is evicted and no step
uses it. So an EvictWeights never waits for a running EXEC. A load that follows it waits for the pages, until its
window closes.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from clockwright.errors import ProtocolError
from clockwright.units import ActionId, ModelId, format_ns
from clockwright.wire.actions import (
    Action,
    ActionError,
    EvictWeights,
    Infer,
    LoadWeights,
    Result,
    StepTime,
)
from worker.core.io_pool import IoPool
from worker.core.model import LoadedModel
from worker.core.pages import PageCache


class Lane(enum.Enum):
    """An executor: steps on one lane never overlap."""

    LOAD = "load"
    INPUT = "input"
    EXEC = "exec"
    OUTPUT = "output"

    # Members are single objects. Enum's own hash is a Python function that hashes the name, and lanes
    # are looked up a dozen times per action.
    __hash__ = object.__hash__


# Iterating an enum or looking a member up costs as much as the work that is done with the lane.
_LANES = tuple(Lane)
_LOAD: Final = Lane.LOAD
_INPUT: Final = Lane.INPUT
_EXEC: Final = Lane.EXEC
_OUTPUT: Final = Lane.OUTPUT
_THROUGH: Final = (_INPUT, _EXEC, _OUTPUT)


M = TypeVar("M", bound=LoadedModel)


# Generic records are spelled out: mypyc cannot compile a generic dataclass (`make native`).
class Step(Generic[M]):
    """One thing to do now, on one lane."""

    __slots__ = ("action", "duration_ns", "io_offset", "lane", "model", "pages", "spared_ns")

    def __init__(
        self,
        lane: Lane,
        action: LoadWeights | Infer,
        model: M,
        pages: tuple[int, ...],
        io_offset: int,
    ) -> None:
        self.lane = lane
        self.action = action
        self.model = model
        #: The pages that hold the weights (LOAD, EXEC), in the order of the model's bytes.
        self.pages = pages
        #: The offset of the IO slot (INPUT, EXEC, OUTPUT).
        self.io_offset = io_offset
        #: How long the device itself was busy with the step. None until the device says so, which not all can.
        self.duration_ns: int | None = None
        #: As of `StepTime`.
        self.spared_ns = 0


@dataclass(slots=True)
class WaitUntil:
    """Nothing to do before this time, unless something else is submitted or finished."""

    time_ns: int


@dataclass(slots=True, eq=False)
class _Residency:
    """A model's stay in the weights cache, from the acceptance of its load to its eviction."""

    num_pages: int
    pages: tuple[int, ...] = ()
    loaded: bool = False
    evicted: bool = False
    #: The number of steps that read or write its pages now; two when an EXEC is queued behind another.
    num_users: int = 0


class _Entry(Generic[M]):
    """A model, its residency and its actions."""

    __slots__ = ("model", "num_pending", "removed", "residency")

    def __init__(self, model: M) -> None:
        self.model = model
        self.residency: _Residency | None = None
        self.num_pending = 0
        self.removed = False


class _Job(Generic[M]):
    """An action that is not answered yet."""

    __slots__ = (
        "abandoned",
        "action",
        "entry",
        "io_offset",
        "order",
        "queued_ahead",
        "residency",
        "result",
        "withdrawn",
    )

    def __init__(
        self, action: LoadWeights | Infer, entry: _Entry[M], seq: int, result: Result
    ) -> None:
        self.action = action
        self.entry = entry
        self.result = result
        #: The job's turn on LOAD and EXEC: `earliest_ns`, then arrival.
        self.order = action.earliest_ns, seq
        self.residency: _Residency | None = None
        self.io_offset: int | None = None
        self.abandoned = False
        #: The controller took the job back while its INPUT ran.
        self.withdrawn = False
        #: Whether the device got the job while another EXEC ran.
        self.queued_ahead = False


class Core(Generic[M]):
    """The state of one worker. Not thread-safe; the shell holds one lock around it.

    It is long, and stays one class: the end of a step changes lanes, pages and IO slots together.
    """

    def __init__(self, *, num_pages: int, io_bytes: int) -> None:
        self._pages = PageCache(num_pages)
        self._io = IoPool(io_bytes)
        self._models: dict[ModelId, _Entry[M]] = {}
        self._jobs: dict[ActionId, _Job[M]] = {}
        self._load: list[_Job[M]] = []
        self._input: deque[_Job[M]] = deque()
        self._exec: list[_Job[M]] = []
        self._output: deque[_Job[M]] = deque()
        self._queues: dict[Lane, Sized] = {
            _LOAD: self._load,
            _INPUT: self._input,
            _EXEC: self._exec,
            _OUTPUT: self._output,
        }
        self._running: dict[Lane, _Job[M] | None] = dict.fromkeys(Lane)
        #: The EXEC that the device will begin when the running one ends.
        self._ahead: _Job[M] | None = None
        #: Every residency that holds or awaits pages.
        self._residencies: list[_Residency] = []
        #: The pages that all residencies that are not evicted need together.
        self._num_promised = 0
        self._results: list[Result] = []
        self._changed: set[Lane] = set()
        self._seq = 0

    # --- models ---------------------------------------------------------------------------------

    def add_model(self, model: M) -> None:
        """Accept actions for a model from now on; a model of the same id is removed first."""
        assert model.num_pages >= 1, f"model {model.model_id}: {model.num_pages} pages"
        self.remove_model(model.model_id)
        self._models[model.model_id] = _Entry(model)

    def remove_model(self, model_id: ModelId) -> None:
        """Accept no more actions for a model; forget the model when its actions are done."""
        entry = self._models.pop(model_id, None)
        if entry is not None:
            entry.removed = True
            if entry.num_pending == 0:
                self._evict(entry)

    def model(self, model_id: ModelId) -> M | None:
        """The model as added. Returns None if it is unknown or removed."""
        entry = self._models.get(model_id)
        return entry.model if entry else None

    def drop_actions(self) -> None:
        """Forget all actions without results, because the controller that sent them is gone.

        Running steps end as usual, but give no result. Models and loaded weights stay.
        """
        running = self._all_running()
        for job in list(self._jobs.values()):
            if job not in running:
                self._leave(job)
        for job in running:
            job.abandoned = True
        self._jobs.clear()
        for queue in (self._load, self._input, self._exec, self._output):
            queue.clear()
        for entry in self._models.values():
            if entry.residency is not None and not entry.residency.loaded:
                self._evict(entry)
        self._results.clear()

    def abandon(self) -> None:
        """Forget all models and actions without results."""
        self.drop_actions()
        for entry in self._models.values():
            entry.removed = True
            self._evict(entry)
        self._models.clear()

    # --- actions --------------------------------------------------------------------------------

    def submit(self, action: Action, *, now_ns: int) -> None:
        """Take an action in, and refuse it at once if it cannot run.

        Raises ProtocolError if an unanswered action has the same id.
        """
        if action.action_id in self._jobs:
            raise ProtocolError(f"action {action.action_id} is submitted a second time")
        result = Result(action_id=action.action_id, received_ns=now_ns)
        entry = self._models.get(action.model_id)
        if isinstance(action, EvictWeights):
            if entry is not None:
                self._evict(entry)
            self._results.append(result)
        elif entry is None:
            self._refuse(result, ActionError.UNKNOWN_MODEL, f"no model {action.model_id!r} here")
        elif isinstance(action, LoadWeights):
            self._submit_load(action, entry, result)
        else:
            self._submit_infer(action, entry, result)

    def _submit_load(self, action: LoadWeights, entry: _Entry[M], result: Result) -> None:
        if entry.residency is not None:
            state = "resident" if entry.residency.loaded else "being loaded"
            self._refuse(
                result,
                ActionError.ALREADY_RESIDENT,
                f"model {action.model_id!r} is {state} already",
            )
            return
        needed = entry.model.num_pages
        promised = self._num_promised
        if promised + needed > self._pages.num_pages:
            self._refuse(
                result,
                ActionError.NO_PAGES,
                f"model {action.model_id!r} needs {needed} pages, "
                f"{self._pages.num_pages - promised} of {self._pages.num_pages} are free",
            )
            return
        job = self._enter(action, entry, result)
        job.residency = entry.residency = _Residency(needed)
        self._residencies.append(job.residency)
        self._num_promised += needed
        insort(self._load, job, key=_order)
        self._changed.add(_LOAD)

    def _submit_infer(self, action: Infer, entry: _Entry[M], result: Result) -> None:
        model = entry.model
        if problem := _infer_problem(action, model.io_bytes):
            self._refuse(result, ActionError.BAD_INPUT, f"model {model.model_id!r}: {problem}")
        elif entry.residency is None:
            self._refuse_not_resident(result, model)
        else:
            self._input.append(self._enter(action, entry, result))
            self._changed.add(_INPUT)

    def submit_through(self, action: Infer, *, now_ns: int) -> Step[M] | None:
        """Begin an Infer on INPUT, EXEC and OUTPUT at once, if these lanes are idle.

        The shell reports only the last step, by `finish_through`: where an EXEC is short, reports of steps would cost
        more than the steps. Returns a step, to be run as INPUT, as EXEC and as OUTPUT. None if one of the lanes has
        work, or the action must wait or is refused; then nothing has changed.
        """
        entry = self._models.get(action.model_id)
        if entry is None or action.action_id in self._jobs:
            return None
        residency, running = entry.residency, self._running
        if (
            residency is None
            or not residency.loaded
            or self._input
            or self._exec
            or self._output
            or running[_INPUT] is not None
            or running[_EXEC] is not None
            or running[_OUTPUT] is not None
            or not action.earliest_ns <= now_ns <= action.latest_ns
            or _infer_problem(action, entry.model.io_bytes)
        ):
            return None
        io_offset = self._io.acquire(entry.model.io_bytes[action.batch_size])
        if io_offset is None:
            return None
        job = self._enter(action, entry, Result(action_id=action.action_id, received_ns=now_ns))
        job.io_offset, job.residency = io_offset, residency
        residency.num_users += 1
        running[_INPUT] = running[_OUTPUT] = job
        return self._start(_EXEC, job)

    def withdraw(self, action_id: ActionId) -> None:
        """Drop an action whose LOAD or EXEC has not begun, with `WITHDRAWN` as its result.

        An action that has begun ends as usual. An unknown action has been answered already: its result and this
        order crossed.
        """
        job = self._jobs.get(action_id)
        if job is None:
            return
        if job is self._running[_EXEC]:
            return
        if job is self._running[_INPUT]:
            job.withdrawn = True  # the slot stays taken while bytes are copied into it
        elif isinstance(job.action, LoadWeights):
            if job is not self._running[_LOAD]:
                self._load.remove(job)
                self._say_withdrawn(job)
                self._evict(job.entry)
                self._leave(job)
        elif job.result.input is None:
            self._input.remove(job)
            self._changed.add(_INPUT)  # the next one may need less room
            self._say_withdrawn(job)
            self._leave(job)
        elif job in self._exec:
            self._exec.remove(job)
            self._say_withdrawn(job)
            self._leave(job)

    # --- lanes ----------------------------------------------------------------------------------

    def next_step(self, lane: Lane, *, now_ns: int) -> Step[M] | WaitUntil | None:
        """Begin the next step of a lane.

        Returns a step, which counts as running and must be finished. Or the time until which to wait. Or None if the
        lane can do nothing until an action is submitted or a step finished, as while the lane runs a step.
        """
        if self._running[lane] is not None:
            return None
        if lane is _INPUT:
            return self._next_input(now_ns)
        if lane is _EXEC:
            return self._next_exec(now_ns)
        if lane is _OUTPUT:
            return self._start(lane, self._output.popleft()) if self._output else None
        return self._next_load(now_ns)

    def _next_load(self, now_ns: int) -> Step[M] | WaitUntil | None:
        while self._load:
            job = self._load[0]
            if now_ns > job.action.latest_ns:
                del self._load[0]
                self._refuse_late(job, now_ns, "to start its load")
                continue
            if now_ns < job.action.earliest_ns:
                return WaitUntil(job.action.earliest_ns)
            assert job.residency is not None
            pages = self._pages.acquire(job.residency.num_pages)
            if pages is None:  # the missing pages hold evicted weights that an EXEC still reads
                return WaitUntil(job.action.latest_ns + 1)
            job.residency.pages = pages
            job.residency.num_users += 1
            del self._load[0]
            return self._start(_LOAD, job)
        return None

    def _next_input(self, now_ns: int) -> Step[M] | WaitUntil | None:
        while self._input:
            job = self._input[0]
            assert isinstance(job.action, Infer)
            if now_ns > job.action.latest_ns:
                self._input.popleft()
                self._refuse_late(job, now_ns, "to start its input")
                continue
            job.io_offset = self._io.acquire(job.entry.model.io_bytes[job.action.batch_size])
            if job.io_offset is None:
                return WaitUntil(job.action.latest_ns + 1)
            self._input.popleft()
            return self._start(_INPUT, job)
        return None

    def _next_exec(self, now_ns: int) -> Step[M] | WaitUntil | None:
        due = self._take_exec(now_ns, begin_ns=now_ns)
        return self._start(_EXEC, due) if isinstance(due, _Job) else due

    def next_exec_ahead(self, *, now_ns: int, begin_ns: int) -> Step[M] | None:
        """Take an EXEC that the device begins by itself as soon as the running one ends.

        A queued EXEC cannot be taken back, and its start is uncertain. So its window must be open now and still be
        open at `begin_ns`. If it has closed when the EXEC begins, `finish_step` refuses the action: an action that
        succeeds did begin in its window. Actions that can no longer begin are refused here too, because the shell
        does not ask for `next_step` while each EXEC is queued after another.

        Args:
            now_ns: the time.
            begin_ns: when the running EXEC is expected to end.

        Returns:
            A step, to be finished after the running one. None if no EXEC may be queued, or one is queued already.
        """
        if self._running[_EXEC] is None or self._ahead is not None:
            return None
        job = self._take_exec(now_ns, begin_ns=begin_ns)
        if not isinstance(job, _Job):
            return None
        self._ahead = job
        job.queued_ahead = True
        return self._step(_EXEC, job)

    def _take_exec(self, now_ns: int, *, begin_ns: int) -> _Job[M] | WaitUntil | None:
        """Take the first EXEC that may begin at `begin_ns` from the queue; refuse those whose windows have closed."""
        wait_ns: int | None = None
        index = 0
        while index < len(self._exec):
            job = self._exec[index]
            residency = job.entry.residency
            if now_ns > job.action.latest_ns:
                del self._exec[index]
                why = (
                    "its weights to be loaded" if residency and not residency.loaded else "its turn"
                )
                job.result.turn_ns = now_ns
                self._refuse_late(job, now_ns, f"waiting for {why}")
            elif residency is None:
                del self._exec[index]
                self._refuse_not_resident(job.result, job.entry.model)
                self._leave(job)
            elif now_ns < job.action.earliest_ns:
                return WaitUntil(min(job.action.earliest_ns, wait_ns or job.action.earliest_ns))
            elif residency.loaded and begin_ns <= job.action.latest_ns:
                del self._exec[index]
                job.residency = residency
                residency.num_users += 1
                return job
            else:
                closes_ns = job.action.latest_ns + 1
                wait_ns = closes_ns if wait_ns is None else min(wait_ns, closes_ns)
                index += 1
        return None if wait_ns is None else WaitUntil(wait_ns)

    def finish_step(
        self,
        step: Step[M],
        *,
        begin_ns: int,
        end_ns: int,
        duration_ns: int,
        error: str | None = None,
    ) -> None:
        """Report a step that `next_step` or `next_exec_ahead` returned, with the device's words if it failed.

        The device was busy with it for `duration_ns`; its end was seen at `end_ns`.
        """
        lane = step.lane
        job = self._running[lane]
        assert job is not None
        assert job.action is step.action, f"{lane.value}: the step is not the one that runs"
        self._running[lane] = None
        self._changed.add(lane)
        if lane is _EXEC:
            self._running[lane], self._ahead = self._ahead, None
        time = StepTime(begin_ns, end_ns, duration_ns, step.spared_ns)
        if lane is _LOAD:
            job.result.load = time
            self._finish_load(job, error)
        else:
            self._finish_infer(lane, job, time, error)

    def finish_through(
        self, step: Step[M], times: Sequence[StepTime], error: str | None = None
    ) -> None:
        """Report the end of the step that `submit_through` returned.

        Args:
            step: the step.
            times: those of INPUT, EXEC and OUTPUT, up to the last that ran; of INPUT alone if EXEC's window closed
                before EXEC began.
            error: the device's words if the last of them failed.
        """
        running = self._running
        job = running[_EXEC]
        assert job is not None
        assert job.action is step.action, "the step is not the one that runs"
        assert isinstance(job.action, Infer)
        assert job.residency is not None
        running[_INPUT] = running[_EXEC] = running[_OUTPUT] = None
        self._changed.update(_THROUGH)
        residency, result = job.residency, job.result
        residency.num_users -= 1
        if residency.evicted and not residency.num_users:
            self._forget(residency)
        result.input = times[0]
        if len(times) > 1:
            result.exec = times[1]
        if len(times) > 2:
            result.output = times[2]
        if error is not None:
            self._say(job, ActionError.DEVICE, error)
        elif result.exec is None:
            result.turn_ns = times[0].end_ns
            self._refuse_late(job, times[0].end_ns, "waiting for its turn")
            return
        else:
            self._say(job)
        self._leave(job)

    def _finish_load(self, job: _Job[M], error: str | None) -> None:
        residency = job.residency
        assert residency is not None
        residency.num_users -= 1
        if residency.evicted:
            self._forget(residency)
            self._say(
                job,
                ActionError.NOT_RESIDENT,
                f"model {job.action.model_id!r} was evicted while it was loaded",
            )
        elif error is not None:
            self._evict(job.entry)
            self._say(job, ActionError.DEVICE, error)
        else:
            residency.loaded = True
            self._changed.add(_EXEC)
            self._say(job)
        self._leave(job)

    def _finish_infer(self, lane: Lane, job: _Job[M], time: StepTime, error: str | None) -> None:
        if lane is _INPUT:
            job.result.input = time
        elif lane is _OUTPUT:
            job.result.output = time
        else:
            assert job.residency is not None
            job.residency.num_users -= 1
            if job.residency.evicted and not job.residency.num_users:
                self._forget(job.residency)
            late_ns = time.begin_ns - job.action.latest_ns
            if job.queued_ahead and late_ns > 0 and error is None:
                job.result.turn_ns = time.end_ns
                self._say(
                    job,
                    ActionError.TOO_LATE,
                    f"{format_ns(late_ns)} too late when the EXEC before it ended",
                )
                self._leave(job)
                return
            job.result.exec = time
        if error is not None:
            self._say(job, ActionError.DEVICE, error)
        elif job.abandoned:
            pass
        elif job.withdrawn:
            self._say_withdrawn(job)
        elif lane is _INPUT:
            insort(self._exec, job, key=_order)
            self._changed.add(_EXEC)
            return
        elif lane is _EXEC:
            self._output.append(job)
            self._changed.add(_OUTPUT)
            return
        else:
            self._say(job)
        self._leave(job)

    def take_results(self) -> list[Result]:
        """Return the results since the last call, in order."""
        if not self._results:
            return []
        results, self._results = self._results, []
        return results

    def take_changed(self) -> list[Lane]:
        """Return the lanes with queued actions whose `next_step` may have changed."""
        changed = self._changed
        if not changed:
            return []
        lanes: list[Lane] = []
        running, queues = self._running, self._queues
        for lane in changed:
            if queues[lane] and running[lane] is None:
                lanes.append(lane)
        changed.clear()
        if len(lanes) > 1:
            lanes.sort(key=_LANES.index)  # a set has no order of its own
        return lanes

    def is_idle(self, lane: Lane) -> bool:
        """Whether a lane neither runs a step nor has one queued."""
        return self._running[lane] is None and not self._queues[lane]

    # --- what shells and people ask -------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """The number of actions that are not answered."""
        return len(self._jobs)

    def is_running(self) -> bool:
        """Whether any lane runs a step."""
        return any(job is not None for job in self._running.values())

    def resident(self) -> list[ModelId]:
        """The models whose weights are loaded, in the order in which they were added."""
        return [
            model_id
            for model_id, entry in self._models.items()
            if entry.residency is not None and entry.residency.loaded
        ]

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        held = [page for residency in self._residencies for page in residency.pages]
        assert len(held) == len(set(held)), "a page belongs to two residencies"
        assert len(held) + self._pages.num_free == self._pages.num_pages, "pages were lost"
        promised = sum(r.num_pages for r in self._residencies if not r.evicted)
        assert promised == self._num_promised, f"{self._num_promised} promised, found {promised}"
        assert promised <= self._pages.num_pages, "pages are oversubscribed"
        for residency in self._residencies:
            assert not residency.evicted or residency.num_users, "evicted pages are not free"
            if residency.loaded:
                assert len(residency.pages) == residency.num_pages
        self._io.check()
        running = self._all_running()
        slots = [j.io_offset for j in {*running, *self._jobs.values()} if j.io_offset is not None]
        assert len(slots) == len(set(slots)) == self._io.num_slots, "IO slots were lost"
        queued = [*self._load, *self._input, *self._exec, *self._output]
        waiting = {*queued, *(job for job in running if not job.abandoned)}
        assert len(waiting) == len(self._jobs), "an action is in no queue"

    def _all_running(self) -> list[_Job[M]]:
        return [job for job in (*self._running.values(), self._ahead) if job is not None]

    # --- inside ---------------------------------------------------------------------------------

    def _enter(self, action: LoadWeights | Infer, entry: _Entry[M], result: Result) -> _Job[M]:
        self._seq += 1
        job = _Job(action, entry, self._seq, result)
        self._jobs[action.action_id] = job
        entry.num_pending += 1
        return job

    def _start(self, lane: Lane, job: _Job[M]) -> Step[M]:
        self._running[lane] = job
        return self._step(lane, job)

    def _step(self, lane: Lane, job: _Job[M]) -> Step[M]:
        return Step(
            lane,
            job.action,
            job.entry.model,
            job.residency.pages if job.residency else (),
            job.io_offset or 0,
        )

    def _leave(self, job: _Job[M]) -> None:
        """Forget an answered or abandoned job, and free what it held."""
        if not job.abandoned:
            self._jobs.pop(job.action.action_id, None)
        if job.io_offset is not None:
            self._io.release(job.io_offset)
            job.io_offset = None
            self._changed.add(_INPUT)
        job.entry.num_pending -= 1
        if job.entry.removed and job.entry.num_pending == 0:
            self._evict(job.entry)

    def _evict(self, entry: _Entry[M]) -> None:
        residency, entry.residency = entry.residency, None
        if residency is None:
            return
        residency.evicted = True
        self._num_promised -= residency.num_pages
        self._changed.add(_EXEC)  # to refuse Infers that waited for the load
        if not residency.num_users:
            self._forget(residency)
        for index, job in enumerate(self._load):
            if job.residency is residency:
                del self._load[index]
                self._say(
                    job,
                    ActionError.NOT_RESIDENT,
                    f"model {job.action.model_id!r} was evicted before it was loaded",
                )
                self._leave(job)
                break

    def _forget(self, residency: _Residency) -> None:
        self._residencies.remove(residency)
        self._pages.release(residency.pages)
        residency.pages = ()
        self._changed.add(_LOAD)

    def _refuse_late(self, job: _Job[M], now_ns: int, what: str) -> None:
        late_ns = now_ns - job.action.latest_ns
        self._say(job, ActionError.TOO_LATE, f"{format_ns(late_ns)} too late {what}")
        if isinstance(job.action, LoadWeights):
            self._evict(job.entry)
        self._leave(job)

    def _refuse_not_resident(self, result: Result, model: M) -> None:
        self._refuse(
            result,
            ActionError.NOT_RESIDENT,
            f"model {model.model_id!r} is not in the weights cache",
        )

    def _say_withdrawn(self, job: _Job[M]) -> None:
        self._say(job, ActionError.WITHDRAWN, "taken back before it began")

    def _refuse(self, result: Result, error: ActionError, message: str) -> None:
        result.error = error
        result.message = message
        self._results.append(result)

    def _say(self, job: _Job[M], error: ActionError = ActionError.NONE, message: str = "") -> None:
        if not job.abandoned:
            self._refuse(job.result, error, message)


def _infer_problem(action: Infer, io_bytes: Mapping[int, int]) -> str:
    """Say what is wrong with an Infer's rows or batch size. Returns "" if they are right."""
    if action.batch_size not in io_bytes:
        sizes = ", ".join(map(str, io_bytes))
        return f"batch size {action.batch_size}, expected one of {sizes}"
    if not action.rows or min(action.rows) < 1 or sum(action.rows) > action.batch_size:
        return f"rows {list(action.rows)} in a batch of {action.batch_size}"
    return ""


def _order(job: _Job[M]) -> tuple[int, int]:
    return job.order
