"""How many requests one controller process answers in time, when fronts and workers are elsewhere.

The controller is real, and has a process with one core. This process has another core, and plays four fronts and
fifteen workers on the controller's sockets, as `clockwright front` and `clockwright worker` speak there. A front
sends four requests at a time, with 4 bytes of input each; a worker runs one Infer at a time, for 0.5 to 2 ms by
batch size, and has room for all models. Arrivals are Poisson, popularity is Zipf with exponent 0.9, and the SLO is 100 ms.

The rate rises by steps as long as every request of a step is answered in time. A step counts as passed as soon
as one of three tries passes it, since other processes on the machine can only make a try fail. The figure is
what was answered per second in the last step that passed: `fed_rps_15` and `fed_rps_4000` by models in use, and
with `_native` what `make native` compiled.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import grpc
import msgspec
import uvloop

from clockwright.errors import Refusal
from clockwright.process import freeze_garbage, keep_big_blocks
from clockwright.units import NS_PER_MS, NS_PER_S, ActionId
from clockwright.wire import frames
from clockwright.wire import peer as wire
from clockwright.wire import worker_messages as pb
from clockwright.wire.actions import ActionError, EvictWeights, Infer, LoadWeights, Result, StepTime
from clockwright.wire.tensors import TensorSpec
from controller.front.remote import link_frames
from controller.port import Answered, Ask, Refused
from controller.process.app import running
from controller.process.config import ControllerConfig
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
_CALM_STEPS_MAX = 20
# Until every model is loaded somewhere, no request has a short deadline.
_PATIENCE_NS = 10 * NS_PER_S
# A machine that has other work takes its time to describe 4,000 models.
_JOIN_LIMIT_NS = 100 * NS_PER_S
# A message of a front leaves after so long, full or not.
_MESSAGE_WAITS_NS = NS_PER_MS
# A controller that leaves so many requests open is behind; more would fill the sockets both ways.
_OPEN_MAX = 10_000

_CONTROLLER_CORE, _PUMP_CORE = 0, 1
_MODEL = "fed"
_TENSOR = TensorSpec("x", "FP32", (1,))

_INPUTS: Final = (bytes(4),)
_LENGTHS: Final = (4,)

_ATTACH_LIMIT_S = 10.0


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
    """One worker: its connection, and what is due on its lanes."""

    sock: socket.socket
    reader: frames.FrameReader = field(default_factory=frames.FrameReader)
    exec_free_ns: int = 0
    load_free_ns: int = 0
    unsent: list[Any] = field(default_factory=list)
    least_delta_ns: int | None = None

    def receive(self) -> list[frames.Frame]:
        """Answer what has come but for actions, and return those."""
        num_bytes = self.sock.recv_into(self.reader.room())
        if not num_bytes:
            raise RuntimeError("the controller has let a worker go")
        now_ns = time.monotonic_ns()
        actions = []
        for frame in self.reader.received(num_bytes):
            if not pb.is_message(frame[0]):
                actions.append(frame)
                continue
            message = pb.decode_to_worker(frame)
            if isinstance(message, pb.Heartbeat):
                delta_ns = now_ns - message.sent_ns
                if self.least_delta_ns is None or delta_ns < self.least_delta_ns:
                    self.least_delta_ns = delta_ns
                self._say(pb.Heartbeat(time.monotonic_ns(), self.least_delta_ns))
            elif isinstance(message, pb.ModelOffer):
                self._say(_ready(message.model_id))
        return actions

    def _say(self, message: pb.FromWorker) -> None:
        _send_all(self.sock, b"".join(pb.frame(message)))


class _Joining(threading.Thread):
    """Answers the controller's offers until it has begun to measure."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        super().__init__(daemon=True)
        self._workers = {worker.sock: worker for worker in workers}
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            for sock in select.select(list(self._workers), (), (), 0.1)[0]:
                self._workers[sock].receive()

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _dial_as_workers(port: int) -> list[_Worker]:
    """Connect all workers."""
    return [
        _Worker(sock)
        for sock in _join(
            port,
            wire.WORKER_SERVICE,
            [
                pb.Register(
                    protocol_version=wire.PROTOCOL_VERSION,
                    worker_id=f"w{number}",
                    device="pump",
                    gpu_kind="pump",
                    num_pages=max(NUM_MODELS) + 1,
                    page_bytes=1 << 24,
                    arena_bytes=1 << 24,
                    host="here",
                    pid=os.getpid(),
                )
                for number in range(NUM_WORKERS)
            ],
        )
    ]


def _ready(model_id: str) -> pb.ReadyModel:
    return pb.ReadyModel(
        model_id=model_id,
        architecture_id="fed",
        num_pages=1,
        weights_bytes=1000,
        inputs=(_TENSOR,),
        outputs=(_TENSOR,),
        load_ns=NS_PER_MS,
        batches=tuple(pb.BatchProfile(*each) for each in EXEC_NS.items()),
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
    names = [f"front{number}" for number in range(NUM_FRONTS)]
    registers = [
        wire.FrontRegister(wire.PROTOCOL_VERSION, name, os.getpid(), instance=name)
        for name in names
    ]
    return _join(port, wire.FRONT_SERVICE, registers)


def _join(port: int, service: str, registers: Sequence[msgspec.Struct]) -> list[socket.socket]:
    found = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        attach: Any = channel.unary_unary(
            f"/{service}/{wire.ATTACH}", request_serializer=bytes, response_deserializer=bytes
        )
        for register in registers:
            answer = attach(wire.encode(register), timeout=_ATTACH_LIMIT_S)
            welcome = msgspec.msgpack.decode(answer, type=wire.Welcome)
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(welcome.socket_path)
            sock.sendall(frames.greeting(welcome.token))
            sock.setblocking(False)
            found.append(sock)
    return found


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
        self, workers: Sequence[_Worker], fronts: Sequence[socket.socket], num_models: int
    ) -> None:
        self._poller = select.epoll()
        self._takers: dict[int, Callable[[], None]] = {}
        self._workers = workers
        for worker in self._workers:
            self._register(worker.sock, lambda worker=worker: self._actions(worker))  # type: ignore[misc]
        self._fronts = [_Front(sock) for sock in fronts]
        for front in self._fronts:
            self._register(front.sock, lambda front=front: self._told(front))  # type: ignore[misc]
        self._turns = itertools.cycle(self._fronts)
        # The message that the next front will send, and when it got its first request; 0: it has none.
        self._waiting: list[Ask] = []
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
        # Its input is in the payload.
        ask = Ask(self._names[model], 1, arrival_ns, slo_ns, ask_id=number, lengths=_LENGTHS)
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
            if isinstance(message, link_frames.Answers):
                for told in message.told:
                    found = still_open.pop(told.ask_id, None)
                    if found is None:
                        continue
                    arrival_ns, slo_ns = found
                    latency_ns = now_ns - arrival_ns
                    if isinstance(told, Refused):
                        # The entrance of the controller's loop says it in words.
                        kept_out = told.message and told.refusal is Refusal.OVERLOADED
                        step.refused["kept out" if kept_out else told.refusal.value] += 1
                    elif not isinstance(told, Answered):
                        raise RuntimeError(f"found {told}, expected an answer or a refusal")
                    elif latency_ns <= slo_ns:
                        step.num_in_time += 1
                        step.latencies_ns.append(latency_ns)
            elif isinstance(message, link_frames.Beat):
                front.is_known = message.known
                front.least_delta_ns = min(front.least_delta_ns, now_ns - message.sent_ns)
                front.beat()
            elif isinstance(message, link_frames.Described):
                assert message.failure is None, message.failure.text
                self._names.append(message.number)

    # --- as a worker --------------------------------------------------------------------------

    def _actions(self, worker: _Worker) -> None:
        now_ns = time.monotonic_ns()
        for frame in worker.receive():
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
    """A client that asks at a rate."""

    def run(self, rate_rps: float, seconds: float, seed: int, /) -> RateStep:
        """Ask for a while, and say the outcome."""


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
        (folder / "1" / "model.onnx").write_bytes(b"not read")
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
            workers = _dial_as_workers(port)
            joining = _Joining(workers)
            joining.start()
            process.stdout.readline()
            joining.stop()
            with Pump(workers, _dial_as_fronts(port), num_models) as pump:
                pump.join()
                yield pump, process.pid
        finally:
            os.sched_setaffinity(0, cores)
            process.kill()
            process.wait()
            process.stdout.close()


def measure_fed(num_models: int, environment: Mapping[str, str]) -> dict[str, float]:
    """Feed a controller with so many models; the figures of its last step that passed."""
    with fed(num_models, environment) as (pump, pid):
        pump.ask_each()
        freeze_garbage()
        rate_rps, step = climb(pump, lambda: cpu_ns([pid]), _show)
    latencies_ns = sorted(step.latencies_ns)
    return {
        "fed_rps": step.num_in_time / STEP_S,
        "offered_rps": rate_rps,
        "actions_rps": step.num_actions / STEP_S,
        "cpu_us": step.cpu_ns / step.num_in_time / 1e3,
        "p50_ms": latencies_ns[len(latencies_ns) // 2] / NS_PER_MS,
        "p99_ms": latencies_ns[int(len(latencies_ns) * 0.99)] / NS_PER_MS,
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
