"""How many requests one controller process answers in time, when fronts and workers are elsewhere.

The controller is real, and has a process with one core. This process has another core, and plays four fronts and
fifteen workers on the controller's sockets, as `clockwright front` and `clockwright worker` speak there. A front
sends four requests at a time, with 4 bytes of input each; a worker runs one Infer at a time, for 0.5 to 2 ms by
batch size, and has room for all models. Arrivals are Poisson, popularity is Zipf with exponent 0.9, and the SLO is 100 ms.

The rate rises by steps as long as every request of a step is answered in time. A step counts as passed as soon
as one of three tries passes it, since whoever else uses the machine can only make a try fail. The figure is
what was answered per second in the last step that passed: `fed_rps_15` and `fed_rps_4000` by models in use, and
with `_native` what `make native` compiled. Then it is asked three times as much for a while; `recovered_s` is how
long it takes until half of what it can do is answered in time again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import grpc
import uvloop

from clockwright import frames, wire
from clockwright.actions import ActionError, EvictWeights, Infer, LoadWeights, Result, StepTime
from clockwright.process import freeze_garbage, keep_big_blocks
from clockwright.units import NS_PER_MS, NS_PER_S, ActionId
from clockwright.v1 import front_pb2 as front_pb
from clockwright.v1 import worker_pb2 as pb
from controller.app import running
from controller.config import ControllerConfig
from controller.front import link_frames
from experiments.live.processor_time import cpu_ns
from experiments.native import ENVIRONMENT
from experiments.study.bench import Findings, bench, need_cores

SLO_NS = 100 * NS_PER_MS
NUM_FRONTS, NUM_WORKERS = 4, 15
REQUESTS_PER_MESSAGE = 4
#: EXEC by batch size.
EXEC_NS = {size: 500_000 + 100_000 * (size - 1) for size in (1, 2, 4, 8, 16)}
ZIPF = 0.9
NUM_MODELS = (15, 4000)

#: The least that each figure should be.
CALM_RPS = 200.0
FIRST_RPS, GROWTH = 10_000.0, 1.1
STEP_S, WARM_S = 2.0, 0.5
TRIES = 3
# Asked for so many times what it can do, and then watched for so long at most.
OVERLOAD, RECOVERY_STEP_S, RECOVERY_LIMIT_S = 3.0, 0.25, 10.0
_CALM_STEPS_MAX = 20
# Until every model is loaded somewhere, no request is in a hurry.
_PATIENCE_NS = 10 * NS_PER_S
# A machine that has other work takes its time to describe 4,000 models.
_JOIN_LIMIT_NS = 100 * NS_PER_S
# A message of a front leaves after so long, full or not.
_MESSAGE_WAITS_NS = NS_PER_MS
# A controller that leaves so many requests open is behind; more would fill the sockets both ways.
_OPEN_MAX = 10_000

_CONTROLLER_CORE, _PUMP_CORE = 0, 1
_MODEL = "fed"
_TENSOR = pb.TensorSpec(name="x", datatype="FP32", row_shape=[1])

_INPUTS: Final = (bytes(4),)
_LENGTHS: Final = (4,)

_ATTACH = "/clockwright.v1.FrontService/Attach"
_ATTACH_LIMIT_S = 10.0
# What the throttle of the controller's loop says, as a status.
_KEPT_OUT: Final[int] = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


# --- the controller's process ---------------------------------------------------------------------


async def serve(models: Path, num_models: int) -> None:
    """Be the controller, until the process is ended."""
    config = ControllerConfig(port=0, models_dir=models, shared_memory_bytes=0)
    async with running(config) as controller:
        print(controller.port, flush=True)
        while True:
            found = controller.runtime.statistics().models
            ready = [len(model.ready_on) == NUM_WORKERS for model in found]
            if len(ready) == num_models and all(ready):
                break
            await asyncio.sleep(0.2)
        freeze_garbage()
        print("ready", flush=True)
        await asyncio.Event().wait()


# --- the workers ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Worker:
    """One worker: what is due on its lanes."""

    sock: socket.socket
    reader: frames.FrameReader = field(default_factory=frames.FrameReader)
    exec_free_ns: int = 0
    load_free_ns: int = 0
    unsent: list[Any] = field(default_factory=list)


class _Control(threading.Thread):
    """The streams of all workers: registration, heartbeats and models."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.dialled: list[socket.socket] = []
        self._port = port

    def run(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            asyncio.run(self._run())

    async def _run(self) -> None:
        options = [("grpc.max_receive_message_length", -1)]
        channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options=options)
        async with channel:
            await asyncio.gather(
                *(self._attach(channel, f"w{number}") for number in range(NUM_WORKERS))
            )

    async def _attach(self, channel: Any, name: str) -> None:  # noqa: ANN401
        call = channel.stream_stream(wire.ATTACH_METHOD)()
        register = pb.Register(
            protocol_version=wire.PROTOCOL_VERSION,
            worker_id=name,
            device="pump",
            gpu_kind="pump",
            num_pages=max(NUM_MODELS) + 1,
            page_bytes=1 << 24,
            arena_bytes=1 << 24,
            host="here",
            pid=os.getpid(),
        )
        await call.write(pb.FromWorker(register=register).SerializeToString())
        outgoing: deque[bytes] = deque()
        deltas_ns: list[int] = []
        beating: asyncio.Task[None] | None = None
        writing = asyncio.Lock()
        async for data in call:
            now_ns = time.monotonic_ns()
            first = pb.ToWorker.FromString(data)
            for message in (first, *map(pb.ToWorker.FromString, first.next)):
                kind = message.WhichOneof("kind")
                if kind == "welcome":
                    self.dialled.append(_dial(message.welcome))
                    interval_s = message.welcome.heartbeat_interval_ms / 1e3
                    beats = self._beat(call, writing, deltas_ns, interval_s)
                    beating = asyncio.create_task(beats)
                elif kind == "heartbeat":
                    deltas_ns.append(now_ns - message.heartbeat.sent_ns)
                elif kind == "model_offer":
                    ready = _ready(message.model_offer.model_id)
                    outgoing.append(pb.FromWorker(model_ready=ready).SerializeToString())
            async with writing:
                while outgoing:
                    await call.write(wire.take_together(outgoing))
        if beating is not None:
            beating.cancel()

    async def _beat(
        self,
        call: Any,  # noqa: ANN401
        writing: asyncio.Lock,
        deltas_ns: list[int],
        interval_s: float,
    ) -> None:
        while True:
            beat = pb.Heartbeat(sent_ns=time.monotonic_ns())
            if deltas_ns:
                beat.min_delta_ns = min(deltas_ns)
            async with writing:
                await call.write(pb.FromWorker(heartbeat=beat).SerializeToString())
            await asyncio.sleep(interval_s)


def _ready(model_id: str) -> pb.ModelReady:
    return pb.ModelReady(
        model_id=model_id,
        architecture_id="fed",
        num_pages=1,
        weights_bytes=1000,
        inputs=[_TENSOR],
        outputs=[_TENSOR],
        load_ns=NS_PER_MS,
        batches=[pb.BatchProfile(batch_size=n, exec_ns=ns) for n, ns in EXEC_NS.items()],
    )


# --- the fronts -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Front:
    """One front: its socket, and what it knows of clocks."""

    sock: socket.socket
    reader: frames.FrameReader = field(default_factory=frames.FrameReader)
    least_delta_ns: int = 1 << 62
    #: The controller knows its clock.
    is_known: bool = False

    def beat(self) -> None:
        """Give a sign of life."""
        delta_ns = None if self.least_delta_ns >> 62 else self.least_delta_ns
        beat = link_frames.FrontBeat(time.monotonic_ns(), delta_ns, {}, {}, {}, ())
        _send_all(self.sock, b"".join(link_frames.encode(beat)))


def _dial_as_fronts(port: int) -> list[socket.socket]:
    """Connect so many fronts."""
    found = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        attach: Any = channel.unary_unary(
            _ATTACH,
            request_serializer=front_pb.AttachFrontRequest.SerializeToString,
            response_deserializer=front_pb.AttachFrontResponse.FromString,
        )
        for number in range(NUM_FRONTS):
            request = front_pb.AttachFrontRequest(
                protocol_version=wire.PROTOCOL_VERSION,
                host=f"front{number}",
                pid=os.getpid(),
                instance=f"front{number}",
            )
            found.append(_dial(attach(request, timeout=_ATTACH_LIMIT_S)))
    return found


def _dial(welcome: Any) -> socket.socket:  # noqa: ANN401  of a worker or a front
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(welcome.socket_path)
    sock.sendall(frames.greeting(welcome.token))
    sock.setblocking(False)
    return sock


# --- the pump -------------------------------------------------------------------------------------


@dataclass(slots=True)
class RateStep:
    """What came of one step."""

    num_asked: int = 0
    num_in_time: int = 0
    num_actions: int = 0
    #: So much was open that no more was asked.
    crowded: bool = False
    #: Processor time of the controller.
    cpu_ns: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    #: Requests by why they were refused.
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def passed(self) -> bool:
        """Whether every request was answered in time."""
        return self.num_in_time == self.num_asked and not self.crowded


class Pump:
    """Plays fronts and workers, on the controller's sockets."""

    def __init__(
        self, workers: Sequence[socket.socket], fronts: Sequence[socket.socket], num_models: int
    ) -> None:
        self._poller = select.epoll()
        self._takers: dict[int, Callable[[], None]] = {}
        self._workers = [_Worker(sock) for sock in workers]
        for worker in self._workers:
            self._register(worker.sock, lambda worker=worker: self._actions(worker))  # type: ignore[misc]
        self._fronts = [_Front(sock) for sock in fronts]
        for front in self._fronts:
            self._register(front.sock, lambda front=front: self._told(front))  # type: ignore[misc]
        self._turns = itertools.cycle(self._fronts)
        # The message that the next front will send, and when it got its first request; 0: it has none.
        self._waiting: list[tuple[object, ...]] = []
        self._since_ns = 0
        # Results that are due: time, order, worker, frame.
        self._due: list[tuple[int, int, _Worker, list[Any]]] = []
        self._order = itertools.count()
        self._num_models = num_models
        self._popularity = list(
            itertools.accumulate(rank**-ZIPF for rank in range(1, num_models + 1))
        )
        self._numbers = itertools.count(1)
        # Requests without an outcome: arrival and SLO.
        self._open: dict[int, tuple[int, int]] = {}
        self._step = RateStep()
        # What the controller calls each model.
        self._names: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._poller.close()
        for front in self._fronts:
            front.sock.close()
        for worker in self._workers:
            worker.sock.close()

    def join(self) -> None:
        """Let the controller know the fronts' clocks, and learn what it calls the models."""
        limit_ns = time.monotonic_ns() + _JOIN_LIMIT_NS
        for front in self._fronts:
            front.beat()
        self._turn_until(lambda: all(front.is_known for front in self._fronts), limit_ns)
        for model in range(self._num_models):
            message = link_frames.encode(link_frames.Describe(model, f"{_MODEL}-{model}", ""))
            _send_all(self._fronts[0].sock, b"".join(message))
            self._turn_until(lambda model=model: len(self._names) > model, limit_ns)  # type: ignore[misc]
        assert len(self._names) == self._num_models, f"{len(self._names)} models are described"

    def ask_each(self) -> None:
        """Have every model loaded somewhere: each is asked, a hundred at a time, until it is answered."""
        models = deque(range(self._num_models))
        while models:
            together = [models.popleft() for _ in range(min(len(models), 100))]
            self._step = RateStep()
            now_ns = time.monotonic_ns()
            for model in together:
                self._ask(model, now_ns, slo_ns=_PATIENCE_NS)
            self._turn_until(lambda: not self._open, now_ns + _PATIENCE_NS)
            self._open.clear()
            if self._step.num_in_time < len(together):
                models.extend(together)

    def run(self, rate_rps: float, seconds: float, seed: int) -> RateStep:
        """Ask at a rate for a while, and wait for what is open then."""
        generator = random.Random(seed)
        step = self._step = RateStep()
        begin_ns = time.monotonic_ns()
        end_ns = begin_ns + int(seconds * NS_PER_S)
        mean_ns = NS_PER_S / rate_rps
        popularity, total = self._popularity, self._popularity[-1]
        expovariate, draw = generator.expovariate, generator.random
        next_ns = float(begin_ns)
        while (now_ns := time.monotonic_ns()) < end_ns:
            if len(self._open) > _OPEN_MAX:
                step.crowded = True
                break
            while next_ns <= now_ns:
                self._ask(bisect(popularity, draw() * total), int(next_ns), slo_ns=SLO_NS)
                next_ns += expovariate(1) * mean_ns
            if self._since_ns and now_ns - self._since_ns > _MESSAGE_WAITS_NS:
                self._send_requests()
            self._turn(now_ns)
        self._turn_until(lambda: not self._open, time.monotonic_ns() + 2 * SLO_NS)
        self._open.clear()
        return step

    def _register(self, sock: socket.socket, taker: Callable[[], None]) -> None:
        self._poller.register(sock, select.EPOLLIN)
        self._takers[sock.fileno()] = taker

    def _turn_until(self, done: Callable[[], bool], end_ns: int) -> None:
        self._send_requests()
        while not done() and (now_ns := time.monotonic_ns()) < end_ns:
            self._turn(now_ns)

    def _turn(self, now_ns: int) -> None:
        for descriptor, _ in self._poller.poll(0):
            self._takers[descriptor]()
        due = self._due
        ended = []
        while due and due[0][0] <= now_ns:
            _, _, worker, frame = heapq.heappop(due)
            if not worker.unsent:
                ended.append(worker)
            worker.unsent += frame
        for worker in ended:
            _send_all(worker.sock, b"".join(worker.unsent))
            worker.unsent.clear()

    # --- as a front ---------------------------------------------------------------------------

    def _ask(self, model: int, arrival_ns: int, *, slo_ns: int) -> None:
        number = next(self._numbers)
        self._open[number] = arrival_ns, slo_ns
        self._step.num_asked += 1
        if not self._waiting:
            self._since_ns = time.monotonic_ns()
        name = self._names[model]
        # It needs no explanation, and has no tenant, context, owner or name; its input is in the payload.
        ask = (number, name, 1, arrival_ns, slo_ns, False, "", "", _LENGTHS, (), "", "")
        self._waiting.append(ask)
        if len(self._waiting) == REQUESTS_PER_MESSAGE:
            self._send_requests()

    def _send_requests(self) -> None:
        """Send what waits, as the next front."""
        if self._waiting:
            message = link_frames.encode_asks(self._waiting, _INPUTS * len(self._waiting))
            _send_all(next(self._turns).sock, b"".join(message))
            self._waiting.clear()
            self._since_ns = 0

    def _told(self, front: _Front) -> None:
        num_bytes = front.sock.recv_into(front.reader.room())
        if not num_bytes:
            raise RuntimeError("the controller hung up")
        now_ns = time.monotonic_ns()
        step, still_open = self._step, self._open
        for header, _ in front.reader.received(num_bytes):
            message = link_frames.decode_from_controller(header)
            if isinstance(message, link_frames.Told):
                for answered in message.answered:
                    found = still_open.pop(answered.ask_id, None)
                    if found is None:
                        continue
                    arrival_ns, slo_ns = found
                    latency_ns = now_ns - arrival_ns
                    if latency_ns <= slo_ns:
                        step.num_in_time += 1
                        step.latencies_ns.append(latency_ns)
                for refused in message.refused:
                    if still_open.pop(refused.ask_id, None) is not None:
                        step.refused[refused.refusal.value] += 1
                for failure in message.failed:
                    assert failure.code == _KEPT_OUT, failure.text
                    if still_open.pop(failure.ask_id, None) is not None:
                        step.refused["kept out"] += 1
                assert not message.stale, "a model changed"
            elif isinstance(message, link_frames.Beat):
                front.is_known = message.known
                front.least_delta_ns = min(front.least_delta_ns, now_ns - message.sent_ns)
                front.beat()
            elif isinstance(message, link_frames.Described):
                assert message.failure is None, message.failure.text
                self._names.append(message.number)

    # --- as a worker --------------------------------------------------------------------------

    def _actions(self, worker: _Worker) -> None:
        num_bytes = worker.sock.recv_into(worker.reader.room())
        if not num_bytes:
            raise RuntimeError("the controller has let a worker go")
        now_ns = time.monotonic_ns()
        for frame in worker.reader.received(num_bytes):
            order, _, _ = frames.decode_order(frame)
            if isinstance(order, Infer):
                self._step.num_actions += 1
                begin_ns = max(now_ns, order.earliest_ns, worker.exec_free_ns)
                if begin_ns > order.latest_ns:
                    self._finish(worker, _too_late(order.action_id, now_ns), now_ns)
                    continue
                end_ns = worker.exec_free_ns = begin_ns + EXEC_NS[order.batch_size]
                result = Result(
                    action_id=order.action_id,
                    received_ns=now_ns,
                    input=StepTime(now_ns, now_ns, 1),
                    exec=StepTime(begin_ns, end_ns, end_ns - begin_ns),
                    output=StepTime(end_ns, end_ns, 1),
                )
                self._finish(worker, result, end_ns, _INPUTS * len(order.rows))
            elif isinstance(order, LoadWeights):
                begin_ns = max(now_ns, order.earliest_ns, worker.load_free_ns)
                if begin_ns > order.latest_ns:
                    self._finish(worker, _too_late(order.action_id, now_ns), now_ns)
                    continue
                end_ns = worker.load_free_ns = begin_ns + NS_PER_MS
                result = Result(
                    action_id=order.action_id,
                    received_ns=now_ns,
                    load=StepTime(begin_ns, end_ns, end_ns - begin_ns),
                )
                self._finish(worker, result, end_ns)
            elif isinstance(order, EvictWeights):
                result = Result(action_id=order.action_id, received_ns=now_ns)
                self._finish(worker, result, now_ns)
            # What is to be withdrawn is on its lane already.

    def _finish(
        self, worker: _Worker, result: Result, at_ns: int, outputs: Sequence[bytes] = ()
    ) -> None:
        frame = frames.encode_result(result, outputs)
        heapq.heappush(self._due, (at_ns, next(self._order), worker, frame))


def _too_late(action_id: ActionId, now_ns: int) -> Result:
    return Result(action_id=action_id, error=ActionError.TOO_LATE, received_ns=now_ns)


def _send_all(sock: socket.socket, data: bytes) -> None:
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            select.select((), (sock,), ())


# --- all of it ------------------------------------------------------------------------------------


class Feeder(Protocol):
    """Whoever can ask at a rate."""

    def run(self, rate_rps: float, seconds: float, seed: int, /) -> RateStep:
        """Ask for a while, and say what came of it."""


def climb(
    pump: Feeder, cpu_ns: Callable[[], int], show: Callable[[float, RateStep], None]
) -> tuple[float, RateStep]:
    """Raise the rate until a step fails; returns the last that passed, and its rate.

    Where already the first step fails, the rate is halved until one passes.

    Raises:
        RuntimeError: none does, at `CALM_RPS` or more.
    """
    seeds = itertools.count(1)
    rate_rps, best = FIRST_RPS, None
    while True:
        for _ in range(TRIES):
            _calm(pump, seeds)
            pump.run(rate_rps, WARM_S, next(seeds))
            before_ns = cpu_ns()
            step = pump.run(rate_rps, STEP_S, next(seeds))
            step.cpu_ns = cpu_ns() - before_ns
            show(rate_rps, step)
            if step.passed:
                break
        if not step.passed:
            if best is not None:
                return best
            if rate_rps < 2 * CALM_RPS:
                raise RuntimeError(f"{rate_rps:.0f} requests/s: not all were answered in time")
            rate_rps /= 2
            continue
        best = rate_rps, step
        rate_rps *= GROWTH


def recovered_after_s(pump: Feeder, rate_rps: float) -> float:
    """Overload a controller that answers so many requests per second, and then ask half of that.

    Returns:
        After how many seconds all is in time again, by steps; `RECOVERY_LIMIT_S`: not before that.
    """
    pump.run(OVERLOAD * rate_rps, STEP_S, 1)
    num_steps = round(RECOVERY_LIMIT_S / RECOVERY_STEP_S)
    for number in range(num_steps):
        if pump.run(rate_rps / 2, RECOVERY_STEP_S, number + 2).passed:
            return number * RECOVERY_STEP_S
    return RECOVERY_LIMIT_S


def _calm(pump: Feeder, seeds: Iterator[int]) -> None:
    """Wait until nothing is left of an overload before."""
    for _ in range(_CALM_STEPS_MAX):
        if pump.run(CALM_RPS, WARM_S, next(seeds)).passed:
            return


@contextmanager
def fed(num_models: int, environment: Mapping[str, str]) -> Iterator[tuple[Pump, int]]:
    """Start a controller with so many models, on a core of its own if there are two; gives its pump and its pid.

    Args:
        num_models: all of one architecture; each of the workers has all of them.
        environment: variables of the controller's process, besides those of this one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "models" / _MODEL
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").write_bytes(b"nobody reads it")
        (folder / "config.toml").write_text(f"copies = {num_models}\n")
        command = [sys.executable, "-m", "experiments.bench.controller"]
        command += [str(folder.parent), str(num_models)]
        cores = os.sched_getaffinity(0)
        if len(cores) > 1:
            os.sched_setaffinity(0, {_CONTROLLER_CORE})
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        if len(cores) > 1:
            os.sched_setaffinity(0, {_PUMP_CORE})
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            control = _Control(port)
            control.start()
            process.stdout.readline()
            with Pump(control.dialled, _dial_as_fronts(port), num_models) as pump:
                pump.join()
                yield pump, process.pid
        finally:
            os.sched_setaffinity(0, cores)
            process.kill()
            process.wait()
            process.stdout.close()
            control.join()


def measure_fed(num_models: int, environment: Mapping[str, str]) -> dict[str, float]:
    """Feed a controller with so many models; the figures of its last step that passed."""
    with fed(num_models, environment) as (pump, pid):
        pump.ask_each()
        freeze_garbage()
        rate_rps, step = climb(pump, lambda: cpu_ns([pid]), _show)
        recovered_s = recovered_after_s(pump, rate_rps)
    latencies_ns = sorted(step.latencies_ns)
    return {
        "fed_rps": step.num_in_time / STEP_S,
        "offered_rps": rate_rps,
        "actions_rps": step.num_actions / STEP_S,
        "cpu_us": step.cpu_ns / step.num_in_time / 1e3,
        "p50_ms": latencies_ns[len(latencies_ns) // 2] / NS_PER_MS,
        "p99_ms": latencies_ns[int(len(latencies_ns) * 0.99)] / NS_PER_MS,
        "recovered_s": recovered_s,
    }


def _show(rate_rps: float, step: RateStep) -> None:
    latencies_ns = sorted(step.latencies_ns) or [0]
    print(
        f"{rate_rps:8.0f}/s: {step.num_asked - step.num_in_time} of {step.num_asked} not in time,"
        f" {step.num_actions} actions,"
        f" {step.cpu_ns / max(step.num_in_time, 1) / 1e3:.1f} us,"
        f" {dict(step.refused)} p99 {latencies_ns[int(len(latencies_ns) * 0.99)] / NS_PER_MS:.1f} ms",
        flush=True,
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    #: Measure `build/native`, too.
    native: bool = False


def measure(setting: Setting) -> Findings:
    """Feed controllers of few models and of many."""
    need_cores(2)
    keep_big_blocks()
    trees: dict[str, Mapping[str, str]] = {"": {}}
    if setting.native:
        trees["_native"] = ENVIRONMENT
    figures = {
        f"{key}_{num_models}{suffix}": round(value, 3)
        for suffix, environment in trees.items()
        for num_models in NUM_MODELS
        for key, value in measure_fed(num_models, environment).items()
    }
    extra = {"num_fronts": NUM_FRONTS, "num_workers": NUM_WORKERS, "zipf": ZIPF, "step_s": STEP_S}
    return Findings(figures, extra)


STUDY = bench("bench-controller", Setting(), measure)

if __name__ == "__main__":  # The controller, in its own process.
    keep_big_blocks()
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
