"""The worker's pure core: windows, lanes, residency, pages, IO slots."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from clockwright.errors import ProtocolError
from clockwright.units import ActionId, ModelId
from clockwright.wire.actions import ActionError, EvictWeights, Infer, LoadWeights, Result, StepTime
from worker.core.io_pool import IoPool
from worker.core.lanes import Core, Lane, Step, WaitUntil
from worker.core.model import LoadedModel

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
FOREVER = 1_000_000

NONE = ActionError.NONE


class LanesByHand:
    """A core, and shorthands to drive it by hand."""

    def __init__(self, *, num_pages: int = 4, io_bytes: int = 1024) -> None:
        self.core: Core[LoadedModel] = Core(num_pages=num_pages, io_bytes=io_bytes)
        self.last_id = 0

    def add(self, model_id: ModelId, *, num_pages: int = 2, io_bytes: int = 64) -> None:
        self.core.add_model(
            LoadedModel(
                model_id=model_id, num_pages=num_pages, io_bytes={1: io_bytes, 4: 4 * io_bytes}
            )
        )

    def _id(self) -> ActionId:
        self.last_id += 1
        return ActionId(self.last_id)

    def load(
        self, model_id: ModelId, *, now: int = 0, earliest: int = 0, latest: int = FOREVER
    ) -> int:
        action = LoadWeights(
            action_id=self._id(),
            model_id=model_id,
            earliest_ns=earliest,
            latest_ns=latest,
            expected_duration_ns=1,
        )
        self.core.submit(action, now_ns=now)
        return action.action_id

    def infer(
        self,
        model_id: ModelId,
        *,
        now: int = 0,
        earliest: int = 0,
        latest: int = FOREVER,
        batch_size: int = 1,
        rows: tuple[int, ...] = (1,),
    ) -> int:
        action = self._infer(model_id, earliest, latest, batch_size, rows)
        self.core.submit(action, now_ns=now)
        return action.action_id

    def through(
        self,
        model_id: ModelId,
        *,
        now: int = 0,
        earliest: int = 0,
        latest: int = FOREVER,
        batch_size: int = 1,
        rows: tuple[int, ...] = (1,),
    ) -> tuple[Infer, Step[LoadedModel] | None]:
        """Begin an Infer on all of its lanes, if that can be."""
        action = self._infer(model_id, earliest, latest, batch_size, rows)
        step = self.core.submit_through(action, now_ns=now)
        self.core.check()
        return action, step

    def finish_through(
        self, step: Step[LoadedModel], *times: StepTime, error: str | None = None
    ) -> None:
        self.core.finish_through(step, times, error)
        self.core.check()

    def _infer(
        self,
        model_id: ModelId,
        earliest: int,
        latest: int,
        batch_size: int,
        rows: tuple[int, ...],
    ) -> Infer:
        return Infer(
            action_id=self._id(),
            model_id=model_id,
            batch_size=batch_size,
            rows=rows,
            earliest_ns=earliest,
            latest_ns=latest,
            expected_duration_ns=1,
        )

    def evict(self, model_id: ModelId, *, now: int = 0) -> int:
        action = EvictWeights(action_id=self._id(), model_id=model_id)
        self.core.submit(action, now_ns=now)
        return action.action_id

    def start(self, lane: Lane, now: int = 0) -> Step[LoadedModel]:
        step = self.core.next_step(lane, now_ns=now)
        assert isinstance(step, Step), f"{lane} has {step}"
        return step

    def finish(
        self, step: Step[LoadedModel], *, begin: int = 0, end: int = 0, error: str | None = None
    ) -> None:
        self.core.finish_step(
            step, begin_ns=begin, end_ns=end, duration_ns=end - begin, error=error
        )
        self.core.check()

    def run(self, lane: Lane, now: int = 0) -> int:
        step = self.start(lane, now)
        self.finish(step, begin=now, end=now)
        return step.action.action_id

    def resident(self, model_id: ModelId, **kwargs: int) -> None:
        """Add a model, load it and forget the result."""
        self.add(model_id, **kwargs)
        self.load(model_id)
        self.run(Lane.LOAD)
        assert self.errors() == [ActionError.NONE]

    def results(self) -> list[Result]:
        self.core.check()
        return self.core.take_results()

    def errors(self) -> list[ActionError]:
        return [result.error for result in self.results()]


def test_a_load_and_an_infer_report_every_step() -> None:
    driver = LanesByHand()
    driver.add(A)
    load = driver.load(A, now=5)
    step = driver.start(Lane.LOAD, 10)
    assert len(step.pages) == 2
    driver.finish(step, begin=10, end=30)
    infer = driver.infer(A, now=40)
    for lane, begin in ((Lane.INPUT, 41), (Lane.EXEC, 50), (Lane.OUTPUT, 60)):
        driver.finish(driver.start(lane, begin), begin=begin, end=begin + 5)

    assert driver.results() == [
        Result(action_id=ActionId(load), received_ns=5, load=StepTime(10, 30, 20)),
        Result(
            action_id=ActionId(infer),
            received_ns=40,
            input=StepTime(41, 46, 5),
            exec=StepTime(50, 55, 5),
            output=StepTime(60, 65, 5),
        ),
    ]
    assert driver.core.num_pending == 0


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.EXEC])
def test_an_action_does_not_start_before_its_window_opens(lane: Lane) -> None:
    driver = LanesByHand()
    if lane is Lane.EXEC:
        driver.resident(A)
        driver.infer(A, earliest=100)
        driver.run(Lane.INPUT, 1)
    else:
        driver.add(A)
        driver.load(A, earliest=100)
    assert driver.core.next_step(lane, now_ns=99) == WaitUntil(100)
    driver.start(lane, 100)


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.INPUT, Lane.EXEC])
def test_an_action_starts_at_the_last_instant_of_its_window_and_not_after(lane: Lane) -> None:
    for now, late in ((200, False), (201, True)):
        driver = LanesByHand()
        if lane is Lane.LOAD:
            driver.add(A)
            driver.load(A, latest=200)
        else:
            driver.resident(A)
            driver.infer(A, latest=200)
            if lane is Lane.EXEC:
                driver.run(Lane.INPUT)
        step = driver.core.next_step(lane, now_ns=now)
        assert isinstance(step, Step) != late
        assert driver.errors() == ([ActionError.TOO_LATE] if late else [])


def test_a_load_that_is_too_late_leaves_the_model_loadable_again() -> None:
    driver = LanesByHand(num_pages=2)
    driver.add(A)
    driver.load(A, latest=10)
    assert driver.core.next_step(Lane.LOAD, now_ns=11) is None
    driver.load(A, now=12)
    driver.run(Lane.LOAD, 12)
    assert driver.errors() == [ActionError.TOO_LATE, ActionError.NONE]


def test_exec_goes_by_earliest_then_arrival_and_one_at_a_time() -> None:
    driver = LanesByHand()
    driver.resident(A)
    late, first, second = (driver.infer(A, earliest=e) for e in (20, 10, 10))
    for _ in range(3):
        driver.run(Lane.INPUT)
    step = driver.start(Lane.EXEC, 30)
    assert driver.core.next_step(Lane.EXEC, now_ns=30) is None
    driver.finish(step)
    order = [step.action.action_id, driver.run(Lane.EXEC, 30), driver.run(Lane.EXEC, 30)]
    assert order == [first, second, late]


def test_an_infer_waits_for_the_load_before_it_and_lets_others_pass() -> None:
    driver = LanesByHand()
    driver.resident(A)
    driver.add(B)
    driver.load(B)
    waiting = driver.infer(B, earliest=0, latest=500)
    ready = driver.infer(A, earliest=5)
    driver.run(Lane.INPUT)
    driver.run(Lane.INPUT)
    load = driver.start(Lane.LOAD)
    assert driver.run(Lane.EXEC, 10) == ready
    assert driver.core.next_step(Lane.EXEC, now_ns=10) == WaitUntil(501)
    driver.finish(load)
    assert driver.run(Lane.EXEC, 20) == waiting


def test_an_infer_whose_load_takes_too_long_is_refused_when_its_window_closes() -> None:
    driver = LanesByHand()
    driver.add(A)
    driver.load(A)
    driver.start(Lane.LOAD)
    driver.infer(A, latest=50)
    driver.run(Lane.INPUT)
    assert driver.core.next_step(Lane.EXEC, now_ns=51) is None
    (result,) = driver.results()
    assert (result.error, result.turn_ns) == (ActionError.TOO_LATE, 51)
    assert "weights to be loaded" in result.message


@pytest.mark.parametrize("how", ["fails", "is too late", "is evicted"])
def test_an_infer_whose_load_comes_to_nothing_is_not_resident(how: str) -> None:
    driver = LanesByHand()
    driver.add(A)
    driver.load(A, latest=10)
    driver.infer(A)
    driver.run(Lane.INPUT)
    if how == "fails":
        driver.finish(driver.start(Lane.LOAD), error="out of order")
    elif how == "is too late":
        driver.core.next_step(Lane.LOAD, now_ns=11)
    else:
        driver.evict(A)
    assert Lane.EXEC in driver.core.take_changed()
    assert driver.core.next_step(Lane.EXEC, now_ns=12) is None
    results = driver.results()
    assert results[-1].error is ActionError.NOT_RESIDENT
    assert len(results) == (3 if how == "is evicted" else 2)


def test_what_can_be_refused_at_once_is() -> None:
    driver = LanesByHand(num_pages=3)
    driver.load(A)
    driver.infer(A)
    driver.add(A)
    driver.add(B)
    driver.infer(A)
    driver.load(A)
    driver.load(A)
    driver.load(B)
    driver.infer(A, batch_size=2)
    driver.infer(A, batch_size=4, rows=(3, 2))
    driver.infer(A, rows=())
    driver.infer(A, batch_size=4, rows=(1, 0))
    assert driver.errors() == [
        ActionError.UNKNOWN_MODEL,
        ActionError.UNKNOWN_MODEL,
        ActionError.NOT_RESIDENT,
        ActionError.ALREADY_RESIDENT,
        ActionError.NO_PAGES,
        *[ActionError.BAD_INPUT] * 4,
    ]


def test_evicting_always_succeeds_even_what_is_not_there() -> None:
    driver = LanesByHand()
    driver.evict(A)
    driver.add(A)
    driver.evict(A)
    assert driver.errors() == [ActionError.NONE, ActionError.NONE]


def test_pages_evicted_under_a_running_exec_are_free_when_it_ends() -> None:
    driver = LanesByHand(num_pages=2)
    driver.resident(A)
    driver.add(B)
    driver.infer(A)
    driver.run(Lane.INPUT)
    running = driver.start(Lane.EXEC)
    driver.evict(A)
    # Accepted: by the time it may start, the pages can be there.
    driver.load(B, latest=100)
    assert driver.core.next_step(Lane.LOAD, now_ns=10) == WaitUntil(101)
    driver.core.take_changed()
    driver.finish(running)
    assert Lane.LOAD in driver.core.take_changed()
    assert set(driver.start(Lane.LOAD, 20).pages) == set(running.pages)


def test_a_load_evicted_while_it_runs_gives_its_pages_back_at_its_end() -> None:
    driver = LanesByHand(num_pages=2)
    driver.add(A)
    driver.load(A)
    running = driver.start(Lane.LOAD)
    driver.evict(A)
    again = driver.load(A, now=1)
    assert driver.core.next_step(Lane.LOAD, now_ns=1) is None
    driver.finish(running)
    assert driver.run(Lane.LOAD, 2) == again
    assert driver.errors() == [ActionError.NONE, ActionError.NOT_RESIDENT, ActionError.NONE]
    assert driver.core.resident() == [A]


def test_an_infer_waits_for_room_for_its_inputs() -> None:
    driver = LanesByHand(io_bytes=128)
    driver.resident(A, io_bytes=128)
    first, second = driver.infer(A), driver.infer(A)
    assert driver.run(Lane.INPUT) == first
    assert driver.core.next_step(Lane.INPUT, now_ns=0) == WaitUntil(FOREVER + 1)
    driver.run(Lane.EXEC)
    driver.core.take_changed()
    driver.run(Lane.OUTPUT)
    assert Lane.INPUT in driver.core.take_changed()
    assert driver.run(Lane.INPUT) == second


@pytest.mark.parametrize("lane", [Lane.INPUT, Lane.EXEC, Lane.OUTPUT])
def test_a_step_that_fails_ends_its_action_and_nothing_else(lane: Lane) -> None:
    driver = LanesByHand()
    driver.resident(A)
    driver.infer(A)
    for each in (Lane.INPUT, Lane.EXEC, Lane.OUTPUT):
        step = driver.start(each)
        if each is lane:
            driver.finish(step, error="burnt")
            break
        driver.finish(step)
    (result,) = driver.results()
    assert (result.error, result.message) == (ActionError.DEVICE, "burnt")
    assert driver.core.resident() == [A]
    assert driver.core.num_pending == 0


def test_a_removed_model_finishes_what_it_has_and_takes_nothing_new() -> None:
    driver = LanesByHand(num_pages=2)
    driver.resident(A)
    driver.infer(A)
    driver.core.remove_model(A)
    driver.infer(A)
    assert driver.errors() == [ActionError.UNKNOWN_MODEL]
    for lane in (Lane.INPUT, Lane.EXEC, Lane.OUTPUT):
        driver.run(lane)
    assert driver.errors() == [ActionError.NONE]
    driver.resident(B)


def test_an_action_id_in_use_breaks_the_protocol() -> None:
    driver = LanesByHand()
    driver.resident(A)
    driver.infer(A)
    driver.last_id -= 1
    with pytest.raises(ProtocolError, match="second time"):
        driver.infer(A)


def test_after_an_abandonment_running_steps_end_in_silence() -> None:
    driver = LanesByHand(num_pages=2)
    driver.resident(A)
    for _ in range(3):
        driver.infer(A)
    driver.run(Lane.INPUT)
    running = [driver.start(Lane.INPUT), driver.start(Lane.EXEC)]
    driver.core.abandon()
    driver.add(B)
    driver.load(B)
    for step in running:
        driver.finish(step)
    driver.run(Lane.LOAD)
    assert driver.errors() == [ActionError.NONE]
    assert driver.core.resident() == [B]


def test_an_exec_is_queued_behind_the_one_that_runs_if_its_window_holds_that_moment() -> None:
    driver = LanesByHand()
    driver.resident(A)
    early = driver.infer(A, earliest=0, latest=60)
    # Open by then, but the one that runs might end before that.
    opens_later = driver.infer(A, earliest=30, latest=90)
    closed_by_then = driver.infer(A, earliest=5, latest=40)
    fits = driver.infer(A, earliest=10, latest=60)
    for _ in range(4):
        driver.run(Lane.INPUT)
    assert driver.core.next_exec_ahead(now_ns=20, begin_ns=50) is None  # nothing runs
    runs = driver.start(Lane.EXEC, now=0)
    assert runs.action.action_id == early
    ahead = driver.core.next_exec_ahead(now_ns=20, begin_ns=50)
    assert ahead is not None
    assert ahead.action.action_id == fits
    assert driver.core.next_exec_ahead(now_ns=20, begin_ns=50) is None  # one is enough
    driver.core.check()
    driver.finish(runs, begin=0, end=50)
    # It runs now, so nothing else begins before it is finished; and what was passed over is judged then.
    assert driver.core.next_step(Lane.EXEC, now_ns=50) is None
    driver.finish(ahead, begin=50, end=65)
    assert driver.run(Lane.EXEC, now=65) == opens_later
    late = driver.results()
    assert [(r.action_id, r.error, r.turn_ns) for r in late] == [
        (closed_by_then, ActionError.TOO_LATE, 65)
    ]
    for _ in range(3):
        driver.run(Lane.OUTPUT, now=66)
    assert [result.action_id for result in driver.results()] == [early, fits, opens_later]


def test_an_exec_that_the_device_came_to_after_its_window_is_refused() -> None:
    driver = LanesByHand()
    driver.resident(A)
    driver.infer(A, latest=60)
    overrun = driver.infer(A, latest=60)
    driver.run(Lane.INPUT)
    driver.run(Lane.INPUT)
    runs = driver.start(Lane.EXEC)
    ahead = driver.core.next_exec_ahead(now_ns=20, begin_ns=50)
    assert ahead is not None
    driver.finish(runs, begin=0, end=61)
    driver.finish(ahead, begin=61, end=70)
    (result,) = driver.results()
    assert (result.action_id, result.error, result.exec) == (overrun, ActionError.TOO_LATE, None)
    assert result.turn_ns == 70
    # Its outputs go nowhere, and its slot is free.
    driver.run(Lane.OUTPUT)
    assert driver.core.next_step(Lane.OUTPUT, now_ns=99) is None
    driver.core.check()


def test_while_each_exec_is_queued_behind_another_those_that_cannot_run_are_refused() -> None:
    driver = LanesByHand(num_pages=6)
    for model_id in (A, B):
        driver.resident(model_id)
    driver.add(C)
    driver.load(C)  # and no more than that
    first = driver.infer(A)
    gone = driver.infer(B)
    expires = driver.infer(A, latest=25)
    not_loaded = driver.infer(C, latest=35)
    chain = [driver.infer(A, earliest=1) for _ in range(2)]
    waits = driver.infer(C, earliest=2)
    for _ in range(7):
        driver.run(Lane.INPUT)
    driver.evict(B)
    driver.results()

    runs = driver.start(Lane.EXEC)
    assert runs.action.action_id == first
    # The lane's `next_step` is never asked: something always runs.
    for now, begin, ahead_id, refused in (
        (10, 30, chain[0], [(gone, ActionError.NOT_RESIDENT)]),
        (26, 30, chain[1], [(expires, ActionError.TOO_LATE)]),
        (40, 50, None, [(not_loaded, ActionError.TOO_LATE)]),
    ):
        ahead = driver.core.next_exec_ahead(now_ns=now, begin_ns=begin)
        assert (ahead and ahead.action.action_id) == ahead_id
        assert [(r.action_id, r.error) for r in driver.results()] == refused
        driver.finish(runs, end=begin)
        if ahead is not None:
            runs = ahead
    driver.run(Lane.LOAD, 50)
    assert driver.run(Lane.EXEC, 51) == waits
    for _ in range(4):
        driver.run(Lane.OUTPUT, 60)
    assert driver.errors() == [ActionError.NONE] * 5


def test_evicted_pages_are_free_when_the_last_exec_that_reads_them_ends() -> None:
    driver = LanesByHand(num_pages=2)
    driver.resident(A)
    driver.add(B)
    for _ in range(2):
        driver.infer(A)
        driver.run(Lane.INPUT)
    runs = driver.start(Lane.EXEC)
    ahead = driver.core.next_exec_ahead(now_ns=0, begin_ns=1)
    assert ahead is not None
    driver.evict(A)
    driver.load(B)
    driver.finish(runs, end=1)
    assert isinstance(driver.core.next_step(Lane.LOAD, now_ns=1), WaitUntil)
    driver.finish(ahead, begin=1, end=2)
    assert sorted(driver.start(Lane.LOAD, now=2).pages) == [0, 1]


@pytest.mark.parametrize("waits_for", [Lane.LOAD, Lane.INPUT, Lane.EXEC])
def test_an_action_that_is_withdrawn_before_it_begins_gives_back_what_it_held(
    waits_for: Lane,
) -> None:
    driver = LanesByHand(num_pages=2, io_bytes=64)
    if waits_for is Lane.LOAD:
        driver.add(A)
        gone = driver.load(A)
    else:
        driver.resident(A)
        gone = driver.infer(A)
        if waits_for is Lane.EXEC:
            driver.run(Lane.INPUT)
    driver.core.withdraw(ActionId(gone))
    (result,) = driver.results()
    assert (result.action_id, result.error) == (gone, ActionError.WITHDRAWN)
    assert driver.core.num_pending == 0
    # The pages and the only slot serve the next ones.
    if waits_for is Lane.LOAD:
        driver.add(B)
        driver.load(B)
        driver.run(Lane.LOAD)
    else:
        driver.infer(A)
        for lane in (Lane.INPUT, Lane.EXEC, Lane.OUTPUT):
            driver.run(lane)
    assert driver.errors() == [ActionError.NONE]


@pytest.mark.parametrize("runs", [Lane.LOAD, Lane.EXEC, Lane.OUTPUT])
def test_an_action_that_is_withdrawn_after_it_began_reports_what_it_became(runs: Lane) -> None:
    driver = LanesByHand()
    if runs is Lane.LOAD:
        driver.add(A)
        action_id = driver.load(A)
        driver_lanes = [Lane.LOAD]
    else:
        driver.resident(A)
        action_id = driver.infer(A)
        driver_lanes = [Lane.INPUT, Lane.EXEC, Lane.OUTPUT]
    for lane in driver_lanes:
        step = driver.start(lane)
        if lane is runs:
            driver.core.withdraw(ActionId(action_id))
            driver.core.check()
        driver.finish(step)
    assert driver.errors() == [ActionError.NONE]
    assert driver.core.resident() == [A]


def test_an_action_that_is_withdrawn_while_its_inputs_are_copied_goes_when_they_are() -> None:
    driver = LanesByHand()
    driver.resident(A)
    gone = driver.infer(A)
    copying = driver.start(Lane.INPUT)
    driver.core.withdraw(ActionId(gone))
    assert driver.results() == []
    driver.finish(copying)
    assert driver.errors() == [ActionError.WITHDRAWN]
    assert driver.core.next_step(Lane.EXEC, now_ns=0) is None


def test_an_infer_whose_load_is_withdrawn_is_not_resident() -> None:
    driver = LanesByHand()
    driver.add(A)
    load = driver.load(A)
    driver.infer(A)
    driver.run(Lane.INPUT)
    driver.core.withdraw(ActionId(load))
    assert Lane.EXEC in driver.core.take_changed()
    assert driver.core.next_step(Lane.EXEC, now_ns=0) is None
    assert driver.errors() == [ActionError.WITHDRAWN, ActionError.NOT_RESIDENT]


def test_an_input_that_waited_behind_a_larger_one_starts_when_that_is_withdrawn() -> None:
    driver = LanesByHand(io_bytes=256)
    driver.resident(A)
    driver.infer(A)
    driver.run(Lane.INPUT)
    large = driver.infer(A, batch_size=4, rows=(4,))
    small = driver.infer(A)
    assert isinstance(driver.core.next_step(Lane.INPUT, now_ns=0), WaitUntil)
    driver.core.take_changed()
    driver.core.withdraw(ActionId(large))
    assert Lane.INPUT in driver.core.take_changed()
    assert driver.run(Lane.INPUT) == small


def test_withdrawing_what_is_answered_or_was_never_here_changes_nothing() -> None:
    driver = LanesByHand()
    driver.resident(A)
    driver.core.withdraw(ActionId(1))
    driver.core.withdraw(ActionId(99))
    assert driver.results() == []
    assert driver.core.resident() == [A]


THREE_TIMES = (StepTime(1, 2, 1), StepTime(2, 5, 3), StepTime(5, 6, 1))


def test_an_infer_goes_through_idle_lanes_at_once_and_reports_every_step() -> None:
    driver = LanesByHand()
    driver.resident(A)
    action, step = driver.through(A, now=1)
    assert step is not None
    for lane in (Lane.INPUT, Lane.EXEC, Lane.OUTPUT):
        assert driver.core.next_step(lane, now_ns=1) is None
    waiting = driver.infer(A, now=2)
    assert driver.through(A, now=2)[1] is None
    driver.finish_through(step, *THREE_TIMES)
    (result,) = driver.results()
    times = [result.input, result.exec, result.output]
    assert (result.action_id, result.error, times) == (action.action_id, NONE, [*THREE_TIMES])
    assert driver.core.take_changed() == [Lane.INPUT]
    assert driver.run(Lane.INPUT, 7) == waiting


@pytest.mark.parametrize("keeps", ["load", "window", "late", "rows", "unknown", "slot", "running"])
def test_an_infer_that_anything_keeps_does_not_go_through_at_once(keeps: str) -> None:
    driver = LanesByHand(io_bytes=64 if keeps == "slot" else 1024)
    driver.resident(A)
    driver.add(B)
    driver.load(B)
    cases: dict[str, dict[str, Any]] = {
        "load": {"model_id": B},
        "window": {"earliest": 11},
        "late": {"latest": 9},
        "rows": {"rows": (2,)},
        "unknown": {"model_id": ModelId("nobody")},
        "slot": {"batch_size": 4},
    }
    if keeps == "running":
        driver.infer(A)
        driver.run(Lane.INPUT)
        driver.start(Lane.EXEC)
    num_pending = driver.core.num_pending
    assert driver.through(**{"model_id": A, "now": 10, **cases.get(keeps, {})})[1] is None
    assert (driver.core.num_pending, driver.results()) == (num_pending, [])


def test_an_infer_that_went_through_fails_or_is_late_as_any_other() -> None:
    driver = LanesByHand()
    driver.resident(A)
    _, step = driver.through(A)
    assert step is not None
    driver.finish_through(step, *THREE_TIMES[:2], error="broke")
    _, step = driver.through(A, latest=1)
    assert step is not None
    driver.finish_through(step, THREE_TIMES[0])
    failed, late = driver.results()
    assert (failed.error, failed.message, failed.output) == (ActionError.DEVICE, "broke", None)
    assert (late.error, late.exec) == (ActionError.TOO_LATE, None)
    assert late.turn_ns == THREE_TIMES[0].end_ns


def test_an_infer_that_goes_through_survives_what_happens_meanwhile() -> None:
    driver = LanesByHand(num_pages=2)
    driver.resident(A)
    action, step = driver.through(A)
    assert step is not None
    driver.core.withdraw(action.action_id)
    driver.evict(A)
    driver.add(B)
    driver.load(B)
    # Its weights are read until it ends.
    assert isinstance(driver.core.next_step(Lane.LOAD, now_ns=0), WaitUntil)
    driver.finish_through(step, *THREE_TIMES)
    assert driver.errors() == [NONE, NONE]
    driver.run(Lane.LOAD)
    assert driver.errors() == [NONE]
    _, step = driver.through(B)
    assert step is not None
    driver.core.abandon()
    driver.finish_through(step, *THREE_TIMES)
    assert driver.errors() == []


@pytest.mark.seeds(20)
def test_any_sequence_answers_every_action_once_inside_its_window(seed: int) -> None:
    rng = random.Random(seed)
    driver = LanesByHand(num_pages=6, io_bytes=640)
    models = [ModelId(f"m{index}") for index in range(5)]
    for index, model_id in enumerate(models):
        driver.add(model_id, num_pages=1 + index % 3)
    running: dict[Lane, tuple[Step[LoadedModel], int]] = {}
    through: tuple[Step[LoadedModel], int] | None = None
    num_through = 0
    ahead: Step[LoadedModel] | None = None
    queued_ahead: set[int] = set()
    answers: dict[int, Result] = {}
    withdrawn: dict[int, bool] = {}
    windows: dict[int, tuple[int, int]] = {}
    now = 0

    def submit() -> None:
        nonlocal through, num_through
        earliest = now + rng.randrange(-5, 30)
        latest = earliest + rng.randrange(0, 60)
        model_id = rng.choice(models)
        act: Callable[..., int] = rng.choice([driver.infer, driver.infer, driver.load])
        if rng.random() < 0.2:
            windows[driver.evict(model_id, now=now)] = (0, 0)
            return
        if act == driver.infer and rng.random() < 0.7:
            action, step = driver.through(model_id, now=now, earliest=earliest, latest=latest)
            if step is not None:
                num_through += 1
                through = step, now
                windows[action.action_id] = (earliest, latest)
            else:
                driver.core.submit(action, now_ns=now)
                windows[action.action_id] = (earliest, latest)
        else:
            action_id = act(model_id, now=now, earliest=earliest, latest=latest)
            windows[action_id] = (earliest, latest)

    def collect() -> None:
        for result in driver.results():
            assert result.action_id not in answers
            answers[result.action_id] = result

    def withdraw() -> None:
        """Take any action back; it is known whether it has begun."""
        action_id = rng.randrange(max(1, driver.last_id - 5), driver.last_id + 2)
        begun = {
            step.action.action_id
            for step in (*(step for step, _ in running.values()), ahead)
            if step is not None and step.lane is not Lane.INPUT
        }
        if through is not None:
            begun.add(through[0].action.action_id)
        if action_id not in answers and action_id in windows and action_id not in withdrawn:
            withdrawn[action_id] = action_id in begun
        driver.core.withdraw(ActionId(action_id))
        driver.core.check()

    for turn in range(5000):
        if turn >= 2000 and driver.core.num_pending == 0:
            break
        now += rng.randrange(4)
        # Between two crowds the lanes are idle.
        if turn < 2000 and turn % 40 < 10:
            submit()
            if rng.random() < 0.3:
                withdraw()
        if through is not None and rng.random() < 0.5:
            (step, begin), through = through, None
            late = now > step.action.latest_ns
            times = [StepTime(begin, now, 1)] + ([] if late else [StepTime(now, now, 0)] * 2)
            driver.finish_through(step, *times)
        for lane in Lane:
            if lane in running and rng.random() < 0.5:
                step, begin = running.pop(lane)
                error = "broke" if rng.random() < 0.05 else None
                driver.finish(step, begin=begin, end=now, error=error)
                if lane is Lane.EXEC and ahead is not None:
                    running[lane], ahead = (ahead, now), None
            elif lane is Lane.EXEC and ahead is None:
                ahead = driver.core.next_exec_ahead(now_ns=now, begin_ns=now + rng.randrange(6))
                assert ahead is None or lane in running
                if ahead is not None:
                    queued_ahead.add(ahead.action.action_id)
                driver.core.check()
            due = driver.core.next_step(lane, now_ns=now)
            if isinstance(due, Step):
                assert lane not in running
                running[lane] = due, now
            elif isinstance(due, WaitUntil):
                assert due.time_ns > now
            collect()
    assert answers.keys() == windows.keys()
    assert queued_ahead
    assert num_through
    for action_id, (earliest, latest) in windows.items():
        answer = answers[action_id]
        for step_time in (answer.load, answer.exec):
            if step_time is None:
                continue
            assert earliest <= step_time.begin_ns
            # The device may come late to what was queued there; only what then breaks is answered so.
            broke_late = action_id in queued_ahead and answer.error is ActionError.DEVICE
            assert step_time.begin_ns <= latest or broke_late
        if answer.error is ActionError.WITHDRAWN:
            assert not withdrawn[action_id], "it had begun"
            assert answer.exec is None
            assert answer.load is None
    outcomes = {result.error for result in answers.values()}
    assert outcomes >= {
        ActionError.WITHDRAWN,
        ActionError.NONE,
        ActionError.TOO_LATE,
        ActionError.NO_PAGES,
        ActionError.NOT_RESIDENT,
        ActionError.ALREADY_RESIDENT,
    }


@pytest.mark.seeds(5)
def test_io_slots_never_overlap_and_leave_no_crumbs(seed: int) -> None:
    rng = random.Random(seed)
    pool = IoPool(4096)
    slots: list[int] = []
    for _ in range(500):
        if slots and rng.random() < 0.5:
            pool.release(slots.pop(rng.randrange(len(slots))))
        else:
            offset = pool.acquire(rng.randrange(700))
            if offset is not None:
                slots.append(offset)
        pool.check()
    for offset in slots:
        pool.release(offset)
    assert pool.acquire(4096) == 0


def test_when_a_controller_has_gone_models_and_loaded_weights_stay_and_actions_do_not() -> None:
    driver = LanesByHand()
    driver.resident(A)
    driver.add(B)
    driver.load(B)
    loading = driver.start(Lane.LOAD)
    driver.infer(A)
    driver.run(Lane.INPUT)
    running = driver.start(Lane.EXEC)
    driver.infer(A)
    driver.core.drop_actions()
    driver.core.check()
    # What was on its way is gone when its step ends.
    assert driver.core.resident() == [A]
    for step in (loading, running):
        driver.finish(step)
    driver.core.check()
    assert driver.core.resident() == [A]
    assert driver.core.num_pending == 0
    driver.load(B)
    driver.run(Lane.LOAD)
    driver.infer(A)
    for lane in (Lane.INPUT, Lane.EXEC, Lane.OUTPUT):
        driver.run(lane)
    assert driver.errors() == [ActionError.NONE] * 2
    assert driver.core.resident() == [A, B]
