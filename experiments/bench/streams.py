"""Voice streams in a beat of 32 ms: how many steps are in time, what a step costs, and whether states are ever crossed.

`make bench NAME=bench-streams` writes `streams.json`; the parts:

* `stories`: random stories of clients, workers and faults (`experiments.bench.step_stories`). `crossed` counts answers that
  another history would have given, and `violations` all else that breaks the contract.
* `modelled`: real scheduler, runtime and sequences on virtual time, with modelled devices that run batches one after the other. First it is
  found how many streams are admitted; then so many parts of them come at once. What is refused at the start asks nothing more.
* `live`: the same with a server, one worker on a processor, and a client over gRPC. The model is made heavy enough that its
  lane is the limit, not this client.
* `cost`: requests that carry their state in turn with steps that do not: bytes on the client's wire, and processor time of controller and
  worker, the least of some rounds; and the same of one sequence with states of several sizes, which travel with each step.

`in_time` is the share of the steps of admitted streams that were answered within 32 ms of when they were due; `jitter_p99_ms`
how much longer than the median the slowest hundredth took.

    python -m experiments bench-streams --parts stories --stories 1000
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from clockwright.client.client import AsyncClient
from clockwright.client.sequences import SequenceStep
from clockwright.errors import RefusedError
from clockwright.units import (
    NS_PER_MS,
    NS_PER_S,
    ModelId,
    RequestId,
)
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from controller.core import Scheduler, SchedulerConfig
from controller.models.entry import Entry
from controller.models.stepped import StatePair
from controller.port import Answered, Ask, AskedStep, Refused, Told
from controller.runtime import Runtime
from controller.stages.sequences.stage import SequenceStage
from controller.telemetry.tables import Telemetry
from experiments.bench.step_stories import StepStoryOutcome, StoryModels, play
from experiments.bench.story_devices import RuntimeStage, StoryFleet
from experiments.bench.story_loop import StoryLoop
from experiments.bench.voice_model import SAMPLES, WIDTH, write_keeper, write_voice
from experiments.live.local_server import LocalServer
from experiments.live.open_loop import ClientLoad, offer
from experiments.live.processor_time import cpu_ns, roles
from experiments.study.bench import Findings, bench
from experiments.study.study import chosen

_BEAT_NS: Final = 32 * NS_PER_MS
SHARES: Final = (0.5, 0.8, 1.1)
#: What a batch takes on a modelled device: a small recurrent network on a GPU of 2020.
_EXEC_NS: Final = {1: 300_000, 8: 360_000, 32: 600_000, 64: 930_000, 128: 1_600_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    #: What is measured: `stories`, `modelled`, `live`, `cost`; empty: all of that.
    parts: tuple[str, ...] = ()
    stories: int = 10_000
    #: Modelled devices, and for how long streams come. A second at three shares of some 13,000 streams is 900,000 steps,
    #: of 0.1 to 0.2 ms of this process each.
    devices: int = 6
    virtual_s: float = 1.0
    #: How long a live measurement lasts, and how often costs are measured.
    seconds: float = 10.0
    rounds: int = 5
    #: How many further matrices the live model has. Its steps run one by one, as silero's do, whose state has its rows
    #: in the second dimension. 200 streams are 6,250 steps per second: more than two cores can do where a step takes more
    #: than 320 us of controller and worker, whatever the model does.
    weight: int = 12


# --- stories ------------------------------------------------------------------------------------


def _stories(setting: Setting) -> dict[str, float]:
    ends: Counter[str] = Counter()
    crossed = violations = 0
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        outcomes: Iterator[StepStoryOutcome] = pool.imap_unordered(play, range(setting.stories), 20)
        for outcome in outcomes:
            ends += outcome.outcomes
            crossed += outcome.crossed
            violations += len(outcome.violations)
            if outcome.crossed or outcome.violations:
                print(f"seed {outcome.seed}: {outcome.crossed} crossed, {outcome.violations[:3]}")
    return {
        "stories": setting.stories,
        "stories_steps": ends.total(),
        "stories_answered": ends["answered"],
        "stories_crossed": crossed,
        "stories_violations": violations,
    }


# --- modelled devices ---------------------------------------------------------------------------

_IN: Final = (
    TensorSpec("input", "FP32", (1,)),
    TensorSpec("state", "FP32", (1,)),
)
_OUT: Final = (TensorSpec("output", "FP32", (1,)), TensorSpec("stateN", "FP32", (1,)))
_ROW: Final[list[Buffer]] = [bytes(4), bytes(4)]


class _Voice:
    """A stream of a client that sends a step in each beat."""

    def __init__(self, world: _Voices, number: int) -> None:
        self._world, self._number = world, number
        self.is_refused = False
        self._starts = True

    def step(self) -> None:
        """Send the next step."""
        world = self._world
        if self.is_refused or world.loop.now_ns >= world.end_ns:
            return
        now_ns = world.loop.now_ns
        step = AskedStep(self._number + 1, self._starts, every_ns=_BEAT_NS if self._starts else 0)
        world.sent += 1
        ask = Ask(0, 1, now_ns, _BEAT_NS, step=step)
        world.stage.ask(world.entry, ask, [bytes(4)], _Heard(self, world, now_ns, self._starts))
        self._starts = False
        world.loop.at(now_ns + _BEAT_NS, self.step)

    def begins_again(self) -> None:
        """Its first step was refused for another reason than its beat."""
        self._starts = True


class _Heard:
    """Takes the answer to a step."""

    __slots__ = ("_sent_ns", "_starts", "_voice", "_world")

    def __init__(self, voice: _Voice, world: _Voices, sent_ns: int, starts: bool) -> None:
        self._voice, self._world, self._sent_ns, self._starts = voice, world, sent_ns, starts

    def told(self, _: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        world = self._world
        if isinstance(told, Answered):
            world.latencies_ns.append(world.loop.now_ns - self._sent_ns)
        elif isinstance(told, Refused) and "load_permille_max" in told.figures:
            self._voice.is_refused = True
            world.refused += 1
            world.sent -= 1
        elif self._starts:
            self._voice.begins_again()


class _Voices:
    """Streams on modelled devices."""

    def __init__(self, devices: int) -> None:
        self.loop = loop = StoryLoop()
        config = SchedulerConfig()
        self.runtime = runtime = Runtime(
            Scheduler(config), Telemetry(capacity=16), clock=lambda: loop.now_ns
        )
        models = StoryModels()
        self.entry = entry = Entry(ModelId("voice"), "voice", None, inputs=_IN, outputs=_OUT)
        entry.state = (StatePair("state", "stateN", 1, 1),)
        models.found["voice"] = entry
        self.stage: SequenceStage[Entry] = SequenceStage(RuntimeStage(runtime), runtime, models)
        self._random = Random(0)
        self.latencies_ns: list[int] = []
        self.sent = self.refused = 0
        self.end_ns = 0

        fleet = StoryFleet(loop, runtime, _EXEC_NS, lambda _: _ROW)

        def begin() -> None:
            for _ in range(devices):
                fleet.join()
            fleet.add_model(entry.model_id)

        loop.at(loop.now_ns, begin)

    def run(self, streams: int, seconds: float) -> None:
        """Have so many streams come within the first beats, for so long."""
        begin_ns = self.loop.now_ns + NS_PER_S
        self.end_ns = begin_ns + round(seconds * NS_PER_S)
        for number in range(streams):
            at_ns = begin_ns + self._random.randrange(_BEAT_NS)
            self.loop.at(at_ns, _Voice(self, number).step)
        # Idle sequences and health checks would go on for a minute.
        self.loop.play(until_ns=self.end_ns + NS_PER_S)


def _admitted(devices: int) -> int:
    """How many streams are admitted if all come at once: so many more than there is time for that the last is refused."""
    most = math.ceil(devices * _BEAT_NS / min(ns / size for size, ns in _EXEC_NS.items()))
    voices = _Voices(devices)
    voices.run(most, 0.04)
    return most - voices.refused


def _modelled(setting: Setting) -> dict[str, float]:
    capacity = _admitted(setting.devices)
    found: dict[str, float] = {"modelled_streams_admitted": capacity}
    for share in SHARES:
        voices = _Voices(setting.devices)
        voices.run(streams := round(share * capacity), setting.virtual_s)
        key = f"modelled_{share:g}"
        latencies_ms = np.array(voices.latencies_ns) / NS_PER_MS
        found |= _figures(key, streams, voices.refused, voices.sent, latencies_ms)
        print(f"{key}: {found[f'{key}_in_time']:.5f} of {voices.sent} steps", flush=True)
    return found


def _figures(
    key: str,
    streams: int,
    refused: int,
    sent: int,
    latencies_ms: Any,  # noqa: ANN401  an array
) -> dict[str, float]:
    in_time = int((latencies_ms <= _BEAT_NS / NS_PER_MS).sum())
    p50, p99 = (float(np.percentile(latencies_ms, q)) if sent else 0.0 for q in (50, 99))
    return {
        f"{key}_streams": streams,
        f"{key}_refused_at_start": refused,
        f"{key}_steps": sent,
        f"{key}_in_time": in_time / max(sent, 1),
        f"{key}_p50_ms": p50,
        f"{key}_jitter_p99_ms": p99 - p50,
    }


# --- a server -----------------------------------------------------------------------------------


def _message(sequence: int, *, plain: bool = False, slo_ms: int = 32) -> bytes:
    """A request of a stream: a step, or with its state."""
    message = pb.ModelInferRequest(model_name="voice")
    message.parameters["slo_ms"].int64_param = slo_ms
    tensors = [("input", "FP32", [1, SAMPLES], bytes(4 * SAMPLES))]
    if plain:
        tensors.append(("state", "FP32", [2, 1, WIDTH], bytes(8 * WIDTH)))
    else:
        message.parameters["sequence_id"].int64_param = sequence
    tensors.append(("sr", "INT64", [], (16_000).to_bytes(8, "little")))
    for name, datatype, shape, content in tensors:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(content)
    return message.SerializeToString()


def _inputs() -> dict[str, Any]:
    return {"input": np.zeros((1, SAMPLES), np.float32), "sr": np.array(16_000)}


async def _start(address: str, streams: int, *, slo_ms: float, every_ms: float | None) -> list[int]:
    """Start so many streams, one after the other; returns those that are admitted."""
    admitted = []
    async with AsyncClient(address) as client:
        for number in range(1, streams + 1):
            step = SequenceStep(number, start=True, every_ms=every_ms)
            while number not in admitted:
                try:
                    await client.infer("voice", _inputs(), slo_ms=slo_ms, step=step)
                except RefusedError as error:
                    if "load_permille_max" in error.figures:
                        break
                else:
                    admitted.append(number)
    return admitted


async def _stop(address: str, streams: Sequence[int]) -> None:
    async with AsyncClient(address) as client:
        for number in streams:
            await client.infer("voice", {}, slo_ms=10_000, step=SequenceStep(number, end=True))


def _offer(
    server: LocalServer, streams: Sequence[int], seconds: float, *, plain: bool = False
) -> tuple[int, Any]:
    """Send the steps of streams in their beats. Returns how many, and the latencies of those answered, in ms."""
    random = np.random.default_rng(0)
    steps = int(seconds * NS_PER_S / _BEAT_NS)
    phases = random.integers(0, _BEAT_NS, len(streams))
    due_ns = (phases[:, None] + np.arange(steps) * _BEAT_NS).ravel()
    which = np.repeat(np.arange(len(streams)), steps)
    order = np.argsort(due_ns, kind="stable")
    with tempfile.TemporaryDirectory() as folder:
        schedule, messages = Path(folder) / "schedule", Path(folder) / "messages"
        with schedule.open("wb") as file:
            np.save(file, np.stack((due_ns[order], which[order])))
        messages.write_bytes(pickle.dumps([_message(each, plain=plain) for each in streams]))
        account = offer(
            ClientLoad(
                address=server.address,
                models=tuple(map(str, streams)),
                slo_ms=_BEAT_NS // NS_PER_MS,
                seconds=seconds,
                schedule=str(schedule),
                messages=str(messages),
            )
        )
    are_ok = np.array([end[0] == "ok" for end in account.ends], bool)
    if account.others:
        print(f"other ends: {account.others}")
    return len(due_ns), (account.done_ns - account.due_ns)[are_ok] / NS_PER_MS


def _live(setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_voice(Path(folder) / "voice", "batch_sizes = [1, 2, 4, 8, 16]\n", setting.weight)
        with LocalServer(["--models", folder]) as server:
            admitted = asyncio.run(_start(server.address, 1000, slo_ms=32, every_ms=32))
            asyncio.run(_stop(server.address, admitted))
            capacity = len(admitted)
            found["live_streams_admitted"] = capacity
            for share in SHARES:
                key, streams = f"live_{share:g}", round(share * capacity)
                admitted = asyncio.run(_start(server.address, streams, slo_ms=32, every_ms=32))
                sent, latencies_ms = _offer(server, admitted, setting.seconds)
                found |= _figures(key, streams, streams - len(admitted), sent, latencies_ms)
                asyncio.run(_stop(server.address, admitted))
                print(f"{key}: {found[f'{key}_in_time']:.4f} of {sent} steps", flush=True)
    return found


async def _step_cost(
    server: LocalServer, processes: dict[str, list[int]], steps: int
) -> dict[str, float]:
    """Run so many steps of a sequence. Returns what each took: time, and processor time of the processes."""
    inputs = {"input": np.zeros((1, 1), np.float32)}
    async with (
        AsyncClient(server.address) as client,
        client.sequence("keeper", slo_ms=10_000) as sequence,
    ):
        for _ in range(20):
            await sequence.step(inputs)
        before = {role: cpu_ns(pids) for role, pids in processes.items()}
        begin_ns = time.monotonic_ns()
        for _ in range(steps):
            await sequence.step(inputs)
        took = {"ms": (time.monotonic_ns() - begin_ns) / steps / NS_PER_MS}
    for role in ("controller", "worker"):
        took[f"{role}_us"] = (cpu_ns(processes[role]) - before[role]) / steps / 1000
    return took


def _sizes(setting: Setting) -> dict[str, float]:
    """What a step costs with states of several sizes."""
    found: dict[str, float] = {}
    for kib in (1, 64, 1024, 10_240):
        with tempfile.TemporaryDirectory() as folder:
            write_keeper(Path(folder) / "keeper", kib * 256)
            with LocalServer(["--models", folder]) as server:
                processes = roles(server.process.pid)
                for _ in range(setting.rounds):
                    took = asyncio.run(_step_cost(server, processes, 300 if kib < 10_000 else 50))
                    for name, value in took.items():
                        key = f"state_{kib}_kib_step_{name}"
                        found[key] = min(value, found.get(key, value))
    return found


def _cost(setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {
        "plain_request_bytes": len(_message(1, plain=True)),
        "step_request_bytes": len(_message(1)),
    }
    streams = range(1, 21)
    with tempfile.TemporaryDirectory() as folder:
        write_voice(Path(folder) / "voice", "batch_sizes = [1, 4, 16]\n")
        with LocalServer(["--models", folder]) as server:
            processes = roles(server.process.pid)
            asyncio.run(_start(server.address, len(streams), slo_ms=10_000, every_ms=None))
            for _ in range(setting.rounds):
                for name, plain in (("plain", True), ("step", False)):
                    before = {role: cpu_ns(pids) for role, pids in processes.items()}
                    sent, _ = _offer(server, streams, setting.seconds / 2, plain=plain)
                    for role in ("controller", "worker"):
                        used_us = (cpu_ns(processes[role]) - before[role]) / sent / 1000
                        key = f"{name}_{role}_us"
                        found[key] = min(used_us, found.get(key, used_us))
    return found | _sizes(setting)


def measure(setting: Setting) -> Findings:
    """Measure the parts."""
    figures: dict[str, float] = {}
    parts = {"stories": _stories, "modelled": _modelled, "live": _live, "cost": _cost}
    chosen("part", setting.parts, parts)
    for part in setting.parts or parts:
        figures |= parts[part](setting)
    broken = figures.get("stories_crossed", 0) + figures.get("stories_violations", 0)
    return Findings(figures, fault=f"{broken:g} broken" if broken else "")


STUDY = bench("bench-streams", Setting(), measure)
