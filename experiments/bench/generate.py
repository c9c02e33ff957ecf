"""Streams of tokens that have to come in time: how many are admitted, and whether every token of these comes.

`make bench NAME=bench-generate` writes `generate.json`; the parts:

* `modelled`: the product's scheduler, runtime and streams on virtual time, with modelled devices. Streams arrive at random, more
  than there is time for.
* `batching`: the same arrivals under continuous batching in arrival order, as servers for language models do it: a device adds
  waiting streams to its batch before each run, as far as the batch may grow, and nothing is refused. It is a loop of its own, with
  the same devices and times of a run, and without a scheduler, a network or a margin, so it has it easier. Where all streams fit,
  its first tokens come in half the time. A part of that is that it runs all streams of a device in one batch of any size, where
  ours has the sizes below: with each size to 15 and each fourth above, 112 ms in the median instead of 135, where it has 71.
* `live`: a server, one worker on a processor, and a client over gRPC, which measures. The network is a recurrent decoder.
  Streams come at a rate that it can do (`live_...`), and at multiples of what it does under far too many, or of that rate where
  it does less (`live_1.5_...`, of `live_capacity_per_s`).

`every_token` is the share of admitted streams whose tokens all came in time: the first within `ttft`, each next one within `tpot` of
the one before. `whole` got all their tokens, `broken_off` were admitted and lost a token, `refused_at_start` got none. `good_per_s` are
streams per second with every token in time.

    python -m experiments bench-generate --parts modelled --virtual-s 5
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from clockwright.client.client import AsyncClient
from clockwright.errors import RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from controller.core import Scheduler, SchedulerConfig
from controller.models.entry import Entry
from controller.models.stepped import StatePair
from controller.models.streamed import GenerateSettings, StreamPlan, StreamSettings, find_stream
from controller.port import ANSWERS, Answered, Ask, Refused, Streaming, Told
from controller.runtime import Runtime
from controller.stages.sequences.driven import DrivenStage
from controller.stages.sequences.stage import SequenceStage
from controller.telemetry.tables import Telemetry
from experiments.bench.step_stories import StoryModels
from experiments.bench.story_devices import RuntimeStage, StoryFleet
from experiments.bench.story_loop import StoryLoop
from experiments.live.asker import ask_at
from experiments.live.local_server import LocalServer
from experiments.study.bench import Findings, bench
from experiments.study.study import chosen

#: What a batch of one token each takes on a modelled device: a decoder of a billion parameters on a GPU of 2020, which reads its
#: weights once for all of them.
_EXEC_NS: Final = {
    1: 6_000_000,
    2: 6_100_000,
    4: 6_200_000,
    8: 6_400_000,
    16: 7_000_000,
    32: 8_200_000,
    64: 11_000_000,
}
_VOCABULARY: Final = 16
_IN: Final = (TensorSpec("ids", "INT64", (1,)), TensorSpec("state", "FP32", (1,)))
_OUT: Final = (TensorSpec("logits", "FP32", (_VOCABULARY,)), TensorSpec("stateN", "FP32", (1,)))
_ROW: Final[list[Buffer]] = [bytes(4 * _VOCABULARY), bytes(4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    #: What is measured.
    parts: tuple[str, ...] = ("modelled", "batching", "live")
    #: Modelled devices, for how long streams arrive, and how many as multiples of what there is time for.
    devices: int = 2
    virtual_s: float = 20.0
    loads: tuple[float, ...] = (0.8, 1.5)
    #: Tokens of a prompt, and the mean of an answer's, which is 4 at least.
    prompt: int = 8
    tokens: float = 48.0
    ttft_ms: float = 500.0
    tpot_ms: float = 40.0
    #: The live server: for how long streams arrive, how many in a second, and their times.
    seconds: float = 20.0
    live_rate: float = 20.0
    #: More rates, as multiples of what it can do, and for how long that is measured.
    live_loads: tuple[float, ...] = (1.5,)
    probe_s: float = 12.0
    live_ttft_ms: float = 3000.0
    live_tpot_ms: float = 200.0
    #: The live decoder: heavy enough that its lane is the limit, not this client.
    width: int = 1024
    depth: int = 16
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A stream of the workload."""

    at_ns: int
    tokens: int


@dataclass(slots=True)
class StreamRecord:
    """A stream as its client saw it."""

    begin_ns: int
    tokens: int
    #: When its tokens came.
    came_ns: list[int] = field(default_factory=list)
    #: Why it ended without its last token; empty: it has them all.
    refusal: str = ""

    def is_good(self, ttft_ns: int, tpot_ns: int) -> bool:
        """Whether all its tokens came in time."""
        times = [self.begin_ns, *self.came_ns]
        gaps = np.diff(times)
        return (
            len(self.came_ns) == self.tokens
            and int(gaps[0]) <= ttft_ns
            and int(gaps[1:].max(initial=0)) <= tpot_ns
        )


def arrivals(
    random: Random, rate_per_s: float, seconds: float, mean_tokens: float
) -> list[Arrival]:
    """Draw streams that come at random, with lengths that have no memory either."""
    found, now_s = list[Arrival](), 0.0
    while (now_s := now_s + random.expovariate(rate_per_s)) < seconds:
        tokens = 4 + int(random.expovariate(1 / max(mean_tokens - 4, 1)))
        found.append(Arrival(round(now_s * NS_PER_S), tokens))
    return found


def figures_of(
    key: str, records: Sequence[StreamRecord], seconds: float, ttft_ms: float, tpot_ms: float
) -> dict[str, float]:
    """Count how streams ended."""
    ttft_ns, tpot_ns = round(ttft_ms * NS_PER_MS), round(tpot_ms * NS_PER_MS)
    refused = sum(bool(each.refusal) and not each.came_ns for each in records)
    broken = sum(bool(each.refusal) and bool(each.came_ns) for each in records)
    good = sum(each.is_good(ttft_ns, tpot_ns) for each in records)
    admitted = len(records) - refused
    firsts = [(each.came_ns[0] - each.begin_ns) / NS_PER_MS for each in records if each.came_ns]
    told = {
        f"{key}_streams": len(records),
        f"{key}_refused_at_start": refused,
        f"{key}_broken_off": broken,
        f"{key}_whole": admitted - broken,
        f"{key}_every_token": good / max(admitted, 1),
        f"{key}_good_per_s": good / seconds,
        f"{key}_first_token_p50_ms": float(np.percentile(firsts, 50)) if firsts else 0.0,
        f"{key}_first_token_p99_ms": float(np.percentile(firsts, 99)) if firsts else 0.0,
    }
    print(f"{key}: {told[f'{key}_every_token']:.5f} of {admitted} of {len(records)}", flush=True)
    return told


# --- modelled devices ---------------------------------------------------------------------------


class _ModelledClient:
    """Takes the tokens of a stream."""

    def __init__(self, loop: StoryLoop, record: StreamRecord) -> None:
        self._loop, self._record = loop, record

    def told(self, _: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        if isinstance(told, Answered):
            self._record.came_ns.append(self._loop.now_ns)
        else:
            assert isinstance(told, Refused)
            assert (ANSWERS in told.figures) == bool(self._record.came_ns)
            self._record.refusal = told.refusal.value


def _entry() -> tuple[Entry, StreamPlan]:
    entry = Entry(ModelId("decoder"), "decoder", None, inputs=_IN, outputs=_OUT)
    entry.state = (StatePair("state", "stateN", 1, 1),)
    generate = GenerateSettings("ids", "logits", max_prompt=64)
    settings = StreamSettings(generate=generate)
    entry.stream = plan = find_stream(settings, entry.state, _IN, _OUT)
    assert plan is not None
    return entry, plan


def _modelled_run(setting: Setting, coming: Sequence[Arrival]) -> list[StreamRecord]:
    loop = StoryLoop()
    runtime = Runtime(
        Scheduler(SchedulerConfig()), Telemetry(capacity=16), clock=lambda: loop.now_ns
    )
    entry, plan = _entry()
    models = StoryModels()
    models.found["decoder"] = entry
    last = RuntimeStage(runtime)
    stage: DrivenStage[Entry] = DrivenStage(last, runtime, SequenceStage(last, runtime, models))
    prompt = np.ones((1, setting.prompt), np.int64)
    raw = plan.inputs[0].header(prompt.shape, prompt.nbytes) + prompt.tobytes()
    records: list[StreamRecord] = []

    fleet = StoryFleet(loop, runtime, _EXEC_NS, lambda _: _ROW)

    def join() -> None:
        for _ in range(setting.devices):
            fleet.join()
        fleet.add_model(entry.model_id)

    def begin(tokens: int) -> None:
        record = StreamRecord(loop.now_ns, tokens)
        records.append(record)
        streaming = Streaming(round(setting.tpot_ms * NS_PER_MS), tokens)
        ttft_ns = round(setting.ttft_ms * NS_PER_MS)
        ask = Ask(0, 1, loop.now_ns, ttft_ns, streaming=streaming)
        stage.ask(entry, ask, [raw], _ModelledClient(loop, record))

    loop.at(loop.now_ns, join)
    begin_ns = loop.now_ns + 2 * NS_PER_S
    for each in coming:
        loop.at(begin_ns + each.at_ns, begin, each.tokens)
    # Those that came last have long answers, perhaps.
    loop.play(until_ns=begin_ns + round((setting.virtual_s + 60) * NS_PER_S))
    return records


def _rate(setting: Setting) -> float:
    """Streams per second that the devices have time for, in the best batches."""
    steps_per_s = setting.devices / min(ns / size for size, ns in _EXEC_NS.items()) * NS_PER_S
    return steps_per_s / (setting.prompt - 1 + setting.tokens)


def _drawn(setting: Setting, load: float) -> list[Arrival]:
    random = Random(setting.seed)
    return arrivals(random, load * _rate(setting), setting.virtual_s, setting.tokens)


def _modelled(setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    for load in setting.loads:
        records = _modelled_run(setting, _drawn(setting, load))
        key = f"modelled_{load:g}"
        found |= figures_of(key, records, setting.virtual_s, setting.ttft_ms, setting.tpot_ms)
    return found


# --- continuous batching ------------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    record: StreamRecord
    prompt_left: int


def _batching_run(setting: Setting, coming: Sequence[Arrival]) -> list[StreamRecord]:
    """Run streams in arrival order; the next one goes to the device that is free first and has room.

    Only the times of runs are those of `_modelled_run`. What a scheduler has to leave for a network and for noise is free here.
    """
    records = [StreamRecord(each.at_ns, each.tokens) for each in coming]
    waiting = deque(records)
    most = max(_EXEC_NS)
    sizes, times = sorted(_EXEC_NS), [_EXEC_NS[size] for size in sorted(_EXEC_NS)]
    devices: list[list[_Running]] = [[] for _ in range(setting.devices)]
    free_ns = [0] * setting.devices
    while waiting or any(devices):
        number = min(range(setting.devices), key=free_ns.__getitem__)
        batch, now_ns = devices[number], free_ns[number]
        while waiting and waiting[0].begin_ns <= now_ns and len(batch) < most:
            # Its prompt is run token by token, as above.
            batch.append(_Running(waiting.popleft(), setting.prompt - 1))
        if not batch:
            others = [other for other in range(setting.devices) if devices[other]]
            soonest = [waiting[0].begin_ns] if waiting else []
            free_ns[number] = max(
                now_ns + 1, min(soonest + [free_ns[other] + 1 for other in others])
            )
            continue
        free_ns[number] = now_ns = now_ns + round(float(np.interp(len(batch), sizes, times)))
        for each in batch:
            if each.prompt_left:
                each.prompt_left -= 1
            else:
                each.record.came_ns.append(now_ns)
        devices[number] = [each for each in batch if len(each.record.came_ns) < each.record.tokens]
    return records


def _batching(setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    for load in setting.loads:
        records = _batching_run(setting, _drawn(setting, load))
        key = f"batching_{load:g}"
        found |= figures_of(key, records, setting.virtual_s, setting.ttft_ms, setting.tpot_ms)
    return found


# --- a server -----------------------------------------------------------------------------------

_DECODER: Final = """
decoder (int64[n,1] ids, float[n,WIDTH] state) => (float[n,256] logits, float[n,WIDTH] stateN)
<float[256,WIDTH] words, float[WIDTH,WIDTH] w, float[WIDTH,WIDTH] u, float[WIDTH,256] out, int64[1] one> {
    word = Gather <axis = 0> (words, ids)
    x = Squeeze (word, one)
    wx = MatMul (x, w)
    uh = MatMul (state, u)
    m0 = Add (wx, uh)
    EXTRA
    stateN = Tanh (mDEPTH)
    logits = MatMul (stateN, out)
}"""

_CONFIG: Final = """
batch_sizes = [1, 4, 16, 64]
[stream]
max_steps = 1000
[stream.generate]
tokens = "ids"
logits = "logits"
"""


def write_decoder(folder: Path, width: int, depth: int) -> None:
    """Write the folder of a recurrent decoder, which multiplies its state so many times more."""
    more = "".join(f"t{n} = Tanh (m{n})\n m{n + 1} = MatMul (t{n}, u)\n" for n in range(depth))
    text = _DECODER.replace("EXTRA", more).replace("DEPTH", str(depth)).replace("WIDTH", str(width))
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    random = np.random.default_rng(0)
    for value in model.graph.value_info:
        shape = [each.dim_value for each in value.type.tensor_type.shape.dim]
        filled: Any = np.ones(shape, np.int64)
        if value.name != "one":
            filled = random.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(filled, value.name))
    del model.graph.value_info[:]
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.toml").write_text(_CONFIG)


async def _ask_live(setting: Setting, client: AsyncClient, tokens: int) -> StreamRecord:
    record = StreamRecord(time.monotonic_ns(), tokens)
    prompt = {"ids": np.ones((1, setting.prompt), np.int64)}
    try:
        async for _ in client.stream(
            "decoder",
            prompt,
            ttft_ms=setting.live_ttft_ms,
            tpot_ms=setting.live_tpot_ms,
            max_steps=tokens,
        ):
            record.came_ns.append(time.monotonic_ns())
    except RefusedError as error:
        record.refusal = error.refusal.value
    return record


async def _live_run(setting: Setting, address: str, rate_per_s: float) -> list[StreamRecord]:
    coming = arrivals(Random(setting.seed), rate_per_s, setting.seconds, setting.tokens)
    async with AsyncClient(address) as client:
        await _ask_live(setting, client, 4)
        times_s = (each.at_ns / NS_PER_S for each in coming)
        return await ask_at(times_s, lambda n: _ask_live(setting, client, coming[n].tokens))


def _live_capacity(setting: Setting, address: str) -> float:
    """Streams per second under far too many, by the tokens of the second half of a while.

    In the first half come prompts: under such a load they take nearly all the time that they have.
    """
    many = replace(setting, seconds=setting.probe_s)
    records = asyncio.run(_live_run(many, address, 5 * setting.live_rate))
    end_ns = records[0].begin_ns + round(setting.probe_s * NS_PER_S)
    begin_ns = end_ns - round(setting.probe_s / 2 * NS_PER_S)
    came = sum(begin_ns <= at_ns < end_ns for each in records for at_ns in each.came_ns)
    return came / setting.tokens / (setting.probe_s / 2)


def _live(setting: Setting) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        write_decoder(Path(folder) / "decoder", setting.width, setting.depth)
        with LocalServer(["--models", folder]) as server:

            def play(key: str, rate_per_s: float) -> dict[str, float]:
                records = asyncio.run(_live_run(setting, server.address, rate_per_s))
                return figures_of(
                    key, records, setting.seconds, setting.live_ttft_ms, setting.live_tpot_ms
                )

            found = play("live", setting.live_rate)
            capacity = max(_live_capacity(setting, server.address), setting.live_rate)
            found["live_capacity_per_s"] = capacity
            for load in setting.live_loads:
                found |= play(f"live_{load:g}", load * capacity)
    return found


def measure(setting: Setting) -> Findings:
    """Measure the parts."""
    figures: dict[str, float] = {}
    parts = {"modelled": _modelled, "batching": _batching, "live": _live}
    chosen("part", setting.parts, parts)
    for part in setting.parts:
        figures |= parts[part](setting)
    return Findings(figures)


STUDY = bench("bench-generate", Setting(), measure)
