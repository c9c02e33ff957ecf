"""Lanes that run, with shorthands to ask them for actions and to wait for results."""

from __future__ import annotations

import contextlib
import queue
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clockwright.units import NS_PER_MS, NS_PER_S, ActionId, ModelId
from clockwright.wire.actions import Action, ActionError, EvictWeights, Infer, LoadWeights, Result
from clockwright.wire.bulk import Buffer
from worker.action_thread import ActionThread
from worker.devices.device import Device, TimedDevice
from worker.lane_threads import LaneThreads, Outcome
from worker.lane_timers import LaneTimers


@dataclass
class RunningLanes:
    """Running lanes, and shorthands."""

    lanes: LaneThreads[Any]
    outcomes: queue.SimpleQueue[Outcome]
    last_id: int = 0
    answers: dict[int, Outcome] = field(default_factory=dict)

    def submit(self, action: Action, *payload: bytes) -> int:
        self.lanes.submit(action, payload)
        return action.action_id

    def window(
        self, opens_in_ns: int = 0, width_ns: int = 60 * NS_PER_S, expected_ns: int = NS_PER_MS
    ) -> dict[str, int]:
        earliest = time.monotonic_ns() + opens_in_ns
        return {
            "earliest_ns": earliest,
            "latest_ns": earliest + width_ns,
            "expected_duration_ns": expected_ns,
        }

    def next_id(self) -> ActionId:
        self.last_id += 1
        return ActionId(self.last_id)

    def load(self, model_id: str, **window: int) -> int:
        return self.submit(
            LoadWeights(
                action_id=self.next_id(), model_id=ModelId(model_id), **self.window(**window)
            )
        )

    def evict(self, model_id: str) -> int:
        return self.submit(EvictWeights(action_id=self.next_id(), model_id=ModelId(model_id)))

    def infer(
        self,
        model_id: str,
        *payload: bytes,
        rows: tuple[int, ...] = (1,),
        batch_size: int = 1,
        **window: int,
    ) -> int:
        return self.submit(
            Infer(
                action_id=self.next_id(),
                model_id=ModelId(model_id),
                batch_size=batch_size,
                rows=rows,
                **self.window(**window),
            ),
            *payload,
        )

    def answer(self, action_id: int) -> Outcome:
        while action_id not in self.answers:
            outcome = self.outcomes.get(timeout=60)
            assert outcome[0].action_id not in self.answers
            self.answers[outcome[0].action_id] = outcome
        return self.answers[action_id]

    def result(self, action_id: int) -> Result:
        return self.answer(action_id)[0]

    def ok(self, action_id: int) -> Sequence[Buffer]:
        result, outputs = self.answer(action_id)
        assert result.error is ActionError.NONE, result.message
        return outputs


@contextlib.contextmanager
def running(device: Device[Any]) -> Iterator[RunningLanes]:
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    with contextlib.closing(ActionThread()) as actions:
        lanes: LaneThreads[Any] = (
            LaneTimers(device, outcomes.put, actions)
            if isinstance(device, TimedDevice)
            else LaneThreads(device, outcomes.put)
        )
        lanes.start()
        try:
            yield RunningLanes(lanes, outcomes)
            lanes.check()
        finally:
            lanes.stop()


def load_run_and_evict_at_random(
    device: Device[Any],
    models: Sequence[Any],
    rng: random.Random,
    input_bytes: bytes,
    expected: Mapping[str, bytes],
    *,
    most_s: float,
) -> None:
    """Whatever is evicted while it runs, loads or waits: an answer is that of the right weights, or none is given."""
    infers: dict[int, str] = {}
    with running(device) as harness:
        for model in models:
            harness.lanes.add_model(model)
        for _ in range(200):
            # Without waiting for anything: what is evicted may be running, loading or queued.
            name = rng.choice(models).model_id
            match rng.randrange(4):
                case 0:
                    harness.evict(name)
                case 1:
                    harness.load(name)
                case _:
                    infers[harness.infer(name, input_bytes)] = name
            if rng.random() < 0.3:
                time.sleep(rng.random() * most_s)
        # However fast or slow all this was: this one runs.
        for model in models:
            harness.evict(model.model_id)
        harness.load("m0")
        infers[harness.infer("m0", input_bytes)] = "m0"
        outcomes = [(name, *harness.answer(infer)) for infer, name in infers.items()]
    answered = [(name, outputs) for name, result, outputs in outcomes if not result.error]
    assert answered == [(name, [expected[name]]) for name, _ in answered]
    assert answered[-1][0] == "m0"
    errors = {result.error for _, result, _ in outcomes}
    assert errors <= {ActionError.NONE, ActionError.NOT_RESIDENT}
