"""Random stories of sequences: clients that start, step, cancel and leave, workers that are late, fail and vanish.

The stage is the product's own, on a virtual time. In half of the stories so are runtime and scheduler, with modelled devices that fail,
get slow, and are lost; in the others what is behind the stage answers, refuses and fails as it likes, more often than
any cluster. The model's state is a number that tells all inputs before it, so that each answer proves its history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, RequestId
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from controller.core import Scheduler
from controller.models.catalogue import generation_id
from controller.models.entry import Entry
from controller.models.model_folder import ModelFolder, ModelSettings
from controller.models.stepped import SequenceSettings, find_state
from controller.port import (
    STEP,
    Answered,
    Ask,
    AskedStep,
    Failed,
    PortStage,
    Refused,
    Sink,
    Told,
)
from controller.runtime import Runtime
from controller.stages.sequences.book import SequenceKey
from controller.stages.sequences.limits import SequenceConfig
from controller.stages.sequences.stage import SequenceStage
from controller.telemetry.tables import Telemetry
from experiments.bench.story_devices import RuntimeStage, StoryFleet
from experiments.bench.story_loop import StoryLoop

_PRIME, _FACTOR = 2_147_483_647, 1_000_003
_INPUTS = TensorSpec("x", "INT64", (1,)), TensorSpec("h", "INT64", (1,))
_OUTPUTS = TensorSpec("y", "INT64", (1,)), TensorSpec("hn", "INT64", (1,))
# Happenings of a story, which lasts no longer than that; no SLO is longer than a second.
_HAPPENINGS, _LENGTH_NS = 120, 60 * NS_PER_S
# What a batch takes on a device.
_EXEC_NS = {1: NS_PER_MS, 2: 3 * NS_PER_MS // 2, 4: 2 * NS_PER_MS}


def _history(state: int, number: int) -> int:
    return (state * _FACTOR + number + 1) % _PRIME


def _run(inputs: Sequence[Buffer]) -> Sequence[Buffer]:
    number, state = (int.from_bytes(tensor, "little") for tensor in inputs)
    return [_history(state, number).to_bytes(8, "little")] * 2


@dataclass(slots=True)
class _StepSent:
    """A step, and what came of it."""

    key: SequenceKey
    number: int
    step: AskedStep
    request_id: int = 0
    #: "" while it is open; "answered", "cancelled", a refusal's name, "unknown" (no such sequence).
    outcome: str = ""
    answer: int = 0
    steps: int = 0

    def told(self, _: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        assert not self.outcome, "told twice, or told when it was cancelled"
        if isinstance(told, Answered):
            self.outcome = "answered"
            assert len(outputs) <= 1, "state in an answer"
            self.answer = int.from_bytes(outputs[0], "little") if outputs else -1
            assert told.parameters is not None
            self.steps = int(told.parameters[STEP])
        elif isinstance(told, Refused):
            self.outcome = told.refusal.value
            self.steps = told.figures[STEP]
        else:
            assert isinstance(told, Failed)
            self.outcome = "unknown" if "START" in told.text else "failed"


class _Workers:
    """Runs steps, mostly."""

    def __init__(self, loop: StoryLoop, rng: Random, sent: dict[int, _StepSent]) -> None:
        self._loop, self._rng, self._sent = loop, rng, sent
        self._open: dict[RequestId, _StepSent] = {}
        self._numbers = count(1_000_000)
        self._last: dict[SequenceKey, int] = {}
        self._running: set[SequenceKey] = set()

    def ask(self, _: Entry, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        number = int.from_bytes(inputs[0], "little")
        step = self._sent[number]
        assert step.key not in self._running, "two steps of a sequence at once"
        assert number > self._last.get(step.key, -1), "a step overtook another"
        self._running.add(step.key)
        self._last[step.key] = number
        request_id = RequestId(next(self._numbers))
        self._open[request_id] = step
        rng, draw = self._rng, self._rng.random()
        due_ns = ask.arrival_ns + ask.slo_ns
        end_ns = self._loop.now_ns + rng.choice((0, 1, 5, 30)) * NS_PER_MS
        told: Told = Answered(end_ns)
        if end_ns > due_ns or draw < 0.05:
            told, end_ns = Refused(Refusal.LATE, {}), max(due_ns, self._loop.now_ns)
        elif draw < 0.15:
            lost = rng.choice((Refusal.WORKER_LOST, Refusal.OVERLOADED, Refusal.FAILED))
            told = Refused(lost, {})
        elif draw < 0.17:
            told = Failed(13, "no reason")
        self._loop.at(end_ns, self._end, request_id, told, _run(inputs), sink)
        return request_id

    def _end(
        self, request_id: RequestId, told: Told, outputs: Sequence[Buffer], sink: Sink
    ) -> None:
        step = self._open.pop(request_id, None)
        if step is not None:
            self._running.discard(step.key)
            sink.told(request_id, told, outputs if isinstance(told, Answered) else ())

    def withdraw(self, request_id: RequestId) -> None:
        step = self._open.pop(request_id, None)
        if step is not None:
            self._running.discard(step.key)


@dataclass(slots=True)
class StoryModels:
    """The models there are."""

    found: dict[str, Entry] = field(default_factory=dict)
    renewed: list[Callable[[], object]] = field(default_factory=list)
    generations: Counter[str] = field(default_factory=Counter)

    def watch(self, renewed: Callable[[], object]) -> None:
        """Do what the catalogue does."""
        self.renewed.append(renewed)

    def find(self, name: str, version: str = "") -> Entry | None:
        """Do what the catalogue does."""
        return self.found.get(name)

    def put(self, name: str, sequence: SequenceSettings) -> None:
        """Add a model, or replace it."""
        self.generations[name] += 1
        model_id = generation_id(name, self.generations[name])
        folder = ModelFolder(
            name=name, version="1", files=(), settings=ModelSettings(sequence=sequence)
        )
        entry = Entry(model_id, name, folder, inputs=_INPUTS, outputs=_OUTPUTS)
        entry.state, entry.controls = find_state({}, sequence, {}, _INPUTS, _OUTPUTS)
        self.found[name] = entry
        for renewed in self.renewed:
            renewed()


@dataclass(slots=True)
class StepStoryOutcome:
    """What came of a story."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    #: Answers that another history would have given, and what else is wrong, in words.
    crossed: int = 0
    violations: list[str] = field(default_factory=list)


class _StepStory:
    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.loop, self.models = StoryLoop(), StoryModels()
        self.sent: dict[int, _StepSent] = {}
        self.runtime = Runtime(Scheduler(), Telemetry(capacity=16), clock=lambda: self.loop.now_ns)
        config = SequenceConfig(
            sequences_max=rng.choice((3, 1000)), sequence_bytes=rng.choice((64, 1 << 20))
        )
        self.fleet: StoryFleet | None = None
        inner: PortStage[Entry] = _Workers(self.loop, rng, self.sent)
        if seed % 2:
            inner = RuntimeStage(self.runtime)
            self.fleet = StoryFleet(self.loop, self.runtime, _EXEC_NS, _run)
        self.stage: SequenceStage[Entry] = SequenceStage(inner, self.runtime, self.models, config)
        self.forgets = rng.random() < 0.3
        idle_ns = 50 * NS_PER_MS if self.forgets else 1000 * NS_PER_S
        self.settings = SequenceSettings(idle_ns, rng.choice((None, None, 2)))
        self.loop.at(self.loop.now_ns, self.begin)
        self.keys = [
            (rng.choice(("", "ann")), rng.choice(("", "t")), name, rng.choice((7, "7", 8)))
            for name in rng.choices(("a", "b"), k=rng.randint(1, 6))
        ]
        at_ns = self.loop.now_ns
        for _ in range(_HAPPENINGS):
            at_ns += rng.choice((0, 0, 1, 3, 20, 80 if self.forgets else 20)) * NS_PER_MS
            self.loop.at(at_ns, self.happen)

    def begin(self) -> None:
        for _ in range(2 if self.fleet is not None else 0):
            assert self.fleet is not None
            self.fleet.join()
        for name in ("a", "b"):
            self.put(name)

    def put(self, name: str) -> None:
        before = self.models.find(name)
        self.models.put(name, self.settings)
        if self.fleet is not None:
            self.fleet.add_model(self.models.found[name].model_id)
            if before is not None:
                self.fleet.remove_model(before.model_id)

    def trouble(self) -> None:
        """Something goes wrong with a device."""
        assert self.fleet is not None
        rng, devices = self.rng, self.fleet.devices
        what = rng.choice(("lost", "back", "fails", "slow", "fast"))
        if what == "back" and len(devices) < 3:
            self.fleet.join()
        elif devices:
            device = rng.choice(devices)
            if what == "lost":
                self.fleet.lose(device)
            elif what == "fails":
                device.fails = True
            elif what in ("slow", "fast"):
                device.slowness = 20.0 if what == "slow" else 1.0

    def happen(self) -> None:
        rng, draw = self.rng, self.rng.random()
        if draw < 0.02:
            self.put(rng.choice("ab"))
        elif draw > 0.9 and self.fleet is not None:
            self.trouble()
        elif draw < 0.12:
            number = rng.choice([*self.sent] or [0])
            step = self.sent.get(number)
            if step is not None and not step.outcome:
                step.outcome = "cancelled"
                self.stage.withdraw(RequestId(step.request_id))
        else:
            for _ in range(rng.choice((1, 1, 1, 2, 5, 90 if draw < 0.125 else 1))):
                self.send()
        assert not [*self.stage.book.check()], [*self.stage.book.check()]

    def send(self) -> None:
        rng = self.rng
        owner, tenant, name, sequence_id = rng.choice(self.keys)
        entry = self.models.found[name]
        number = len(self.sent)
        step = AskedStep(sequence_id, rng.random() < 0.25, rng.random() < 0.05)
        sent = _StepSent(SequenceKey(owner, tenant, entry.model_id, sequence_id), number, step)
        self.sent[number] = sent
        slo_ns = rng.choice((10, 40, 1000)) * NS_PER_MS
        ask = Ask(0, 1, self.loop.now_ns, slo_ns, tenant, owner=owner, step=step)
        inputs = [] if step.end and rng.random() < 0.2 else [number.to_bytes(8, "little")]
        if not inputs and step.start:
            inputs = [number.to_bytes(8, "little")]
        sent.request_id = self.stage.ask(entry, ask, inputs, sent)

    def judge(self, outcome: StepStoryOutcome) -> None:
        """Walk through the steps of each sequence as they were sent: what counts is what was answered."""
        states: dict[SequenceKey, tuple[int, int] | None] = {}
        for sent in self.sent.values():
            outcome.outcomes[sent.outcome or "never told"] += 1
            if not sent.outcome:
                outcome.violations.append(f"step {sent.number} was never told")
            state = states.get(sent.key)
            if sent.step.start:
                state = (0, 0) if sent.outcome == "answered" else None
            if sent.outcome == "answered":
                leaves = sent.answer == -1
                if state is None:
                    outcome.crossed += 1
                    continue
                value, steps = state
                expected = value if leaves else _history(value, sent.number)
                steps += not leaves
                outcome.crossed += not leaves and sent.answer != expected
                if sent.steps != steps:
                    outcome.violations.append(
                        f"step {sent.number}: told {sent.steps}, expected {steps}"
                    )
                state = None if sent.step.end else (expected, steps)
            elif sent.outcome == "unknown" and state is not None:
                replaced = sent.key.model_id not in {e.model_id for e in self.models.found.values()}
                if not (self.forgets or replaced):
                    outcome.violations.append(f"step {sent.number}: its sequence is lost")
                state = None
            states[sent.key] = state


def play(seed: int) -> StepStoryOutcome:
    """Play the story of a seed."""
    outcome = StepStoryOutcome(seed)
    story = _StepStory(seed)
    try:
        # A scheduler always has something to look after: what is open then is a fault.
        story.loop.play(story.loop.now_ns + _LENGTH_NS if story.fleet else None)
        story.judge(outcome)
    except Exception as error:
        # Nothing may fail in a story.
        outcome.violations.append(repr(error))
    outcome.ended = story.stage.book.ended
    return outcome
