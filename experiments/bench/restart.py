"""What it costs when a process is killed or stopped under load: `guard.json`, part `restart`.

`make bench NAME=bench-restart`. Two controllers behind a lease, two workers with modelled devices and two fronts; a client asks
by streams of both fronts, 200 requests per second, half of them with an SLO that outlasts any change of
controllers, half with 100 ms. A request whose stream breaks is asked again at the other front, as gRPC's clients
do. Every request is counted by its id:

* `lost`: no end, or, with the long SLO, an end that is not its answer; a short SLO may be refused by name. Those
  `lost_by_name` were refused by name all the same: on a machine with other things to do the entrance keeps
  requests out while a loop waits for its processor.
* `double`: a second end on one stream.
* `late_success`: an answer that came after its SLO. Time for which the client's own event loop stood still between
  question and answer, or the machine let the client's other threads wait, does not count.

The parts: `faults` kills and stops each kind of process in turn, so many times; what was killed is started again, as
a supervisor does it. `back` kills a controller that has no standby, which is started again at once, and says what share of the
requests with the short SLO was late and refused in the seconds before that and after it was back (`bench-learned` asks
the same of a controller whose profiles were wrong).

    python -m experiments bench-restart --times 20
    python -m experiments bench-restart --times 1 --parts back --directory /tmp/restart
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import grpc

from clockwright.client.client import AsyncClient
from clockwright.errors import ClockwrightError
from clockwright.v1 import inference_pb2 as pb
from experiments.bench.live import infer_request
from experiments.live.local_server import off_fixed_ports
from experiments.live.processor_time import family
from experiments.live.standstill import TICK_S, Standstill
from experiments.study.bench import bench
from experiments.study.study import chosen
from modelzoo.build import write_model

T = TypeVar("T")

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_SLO_MS = {"short": 100, "long": 20_000}
_COLUMNS = 16
# A request that has no end by then has none.
_PATIENCE_S = 10.0
# A front that takes longer to connect is asked nothing meanwhile.
_CONNECT_S = 0.2
# How long a process is stopped; a leader, until it is followed.
_STOPPED_S = 1.5
# Between two faults.
_CALM_S = 1.0
_START_LIMIT_S = 120.0
TARGETS = ("controller", "worker", "front", "standby", "writer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    #: How often each process is killed, and how often stopped.
    times: int = 20
    rate: float = 200.0
    #: How long before and after each restart the requests are compared.
    beside_s: float = 5.0
    parts: tuple[str, ...] = ("faults", "back")

    def __post_init__(self) -> None:
        chosen("part", self.parts, PARTS)


# --- the client ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Inquiry:
    """One request, and what happened to it."""

    kind: str
    sent_s: float
    #: What ended it: `OK`, or the name of a refusal; empty: nothing yet.
    end: str = ""
    done_s: float = 0.0
    #: For how long the client had stood still, in all: when it was sent, and at its end.
    stood_before_s: float = 0.0
    stood_s: float = 0.0
    num_ends: int = 0
    #: Whether it was asked again because a stream broke.
    again: bool = False

    @property
    def deadline_s(self) -> float:
        """When an answer is late."""
        return self.sent_s + _SLO_MS[self.kind] / 1000

    @property
    def is_late(self) -> bool:
        """Whether it was answered after that."""
        late_s = self.done_s - self.deadline_s
        return self.end == "OK" and late_s > self.stood_s - self.stood_before_s


class StreamClient:
    """Asks at a rate by a stream per front, until it is told to stop."""

    def __init__(self, fronts: Sequence[str], rate: float) -> None:
        self.asked: list[Inquiry] = []
        #: Requests per second; may change.
        self.rate = rate
        self._fronts = fronts
        self._queues: dict[str, asyncio.Queue[int]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()
        self._standstill = Standstill()

    async def during(self, play: Callable[[StreamClient], Awaitable[None]]) -> None:
        """Ask while something is played, and then wait for what is open; before it and after it is calm."""
        running = asyncio.create_task(self.run())
        try:
            await self.calm()
            await play(self)
            await self.calm()
        finally:
            self.stop()
            await running

    async def run(self) -> None:
        """Ask, and then wait for what is open."""
        self._tasks.append(asyncio.create_task(self._tick()))
        for front in self._fronts:
            self._open(front)
        try:
            await self._ask()
            await self._ends_of(self.asked)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open(self, front: str) -> None:
        self._queues[front] = asyncio.Queue()
        self._tasks.append(asyncio.create_task(self._serve(front)))

    async def _ends_of(self, asked: Sequence[Inquiry]) -> None:
        """Wait until requests have ended, or have no end."""
        limit_s = time.monotonic() + _SLO_MS["long"] / 1000 + _PATIENCE_S
        # Each request has an end of its own.
        while time.monotonic() < limit_s and not all(each.end for each in asked):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """Ask nothing more."""
        self._stopped.set()

    def asked_between(self, begin_s: float, end_s: float) -> list[Inquiry]:
        """Give the requests with a short SLO that were made between two times."""
        return [
            each for each in self.asked if each.kind == "short" and begin_s <= each.sent_s < end_s
        ]

    async def next_answer(self) -> float:
        """Wait for the answer to a request that is yet to be asked; gives the time from now until it came."""
        first, begin_s = len(self.asked), time.monotonic()
        async with asyncio.timeout(_START_LIMIT_S):
            while True:
                await asyncio.sleep(TICK_S)
                done_s = [each.done_s for each in self.asked[first:] if each.end == "OK"]
                if done_s:
                    return min(done_s) - begin_s

    async def calm(self) -> None:
        """Wait until what was asked before has ended, and some requests after that were answered."""
        await self._ends_of(list(self.asked))
        await self.next_answer()
        await asyncio.sleep(_CALM_S)

    async def _tick(self) -> None:
        self._standstill = Standstill()
        while True:
            await asyncio.sleep(TICK_S)
            self._standstill.look()

    async def _ask(self) -> None:
        next_s, number = time.monotonic(), 0
        while not self._stopped.is_set():
            now_s = time.monotonic()
            while next_s <= now_s:
                next_s += 1 / self.rate
                kind = ("short", "long")[number % 2]
                self.asked.append(Inquiry(kind, now_s, stood_before_s=self._standstill.total_s))
                self._put(number)
                number += 1
            await asyncio.sleep(1 / self.rate)

    def _put(self, number: int, *, but: str = "") -> None:
        fronts = [front for front in self._queues if front != but] or list(self._queues)
        self._queues[fronts[(number // 2) % len(fronts)]].put_nowait(number)

    async def _serve(self, front: str) -> None:
        """Keep a stream to a front; whatever was on it when it broke is asked elsewhere."""
        queue = self._queues[front]
        while True:
            under_way: dict[int, None] = {}
            channel: Any
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 1000)]
            async with grpc.aio.insecure_channel(front, options=options) as channel:
                with suppress(grpc.aio.AioRpcError, TimeoutError):
                    # A front knows nothing of the time for which a request waited for a connection.
                    async with asyncio.timeout(_CONNECT_S):
                        await channel.channel_ready()
                    call = channel.stream_stream(_STREAM)()
                    writing = asyncio.create_task(self._write(call, queue, under_way))
                    try:
                        async for data in call:
                            message = pb.ModelStreamInferResponse.FromString(data)
                            number = int(message.infer_response.id)
                            under_way.pop(number, None)
                            words = message.error_message
                            self._end(self.asked[number], words.partition(":")[0] or "OK")
                    finally:
                        writing.cancel()
                        await asyncio.gather(writing, return_exceptions=True)
            for number in under_way:
                self.asked[number].again = True
                self._put(number, but=front)
            while not queue.empty():
                self._put(queue.get_nowait(), but=front)
            await asyncio.sleep(0.05)

    async def _write(
        self,
        call: Any,  # noqa: ANN401  grpc.aio's
        queue: asyncio.Queue[int],
        under_way: dict[int, None],
    ) -> None:
        """Write what is put into a queue, until the stream breaks: then nothing more is taken from the queue."""
        while True:
            number = await queue.get()
            asked = self.asked[number]
            remaining_ms = int(1000 * (asked.deadline_s - time.monotonic()))
            if remaining_ms < 1:
                self._end(asked, "DEADLINE")
                continue
            under_way[number] = None
            request = infer_request(
                "net", (1, _COLUMNS), slo_ms=remaining_ms, request_id=str(number)
            )
            await call.write(request)

    def _end(self, asked: Inquiry, end: str) -> None:
        asked.num_ends += 1
        if asked.num_ends == 1:
            asked.end, asked.done_s, asked.stood_s = end, time.monotonic(), self._standstill.total_s


def account(asked: Sequence[Inquiry]) -> dict[str, float]:
    """Count what a client saw."""
    return {
        "requests": len(asked),
        "answered": sum(each.end == "OK" for each in asked),
        "asked_again": sum(each.again for each in asked),
        "lost": sum(not each.end or (each.kind == "long" and each.end != "OK") for each in asked),
        "lost_by_name": sum(each.kind == "long" and each.end not in ("", "OK") for each in asked),
        "double": sum(each.num_ends > 1 for each in asked),
        "late_success": sum(each.is_late for each in asked),
    }


# --- processes -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Deployed:
    """A process of the deployment, and how to start it again where it was."""

    command: list[str]
    #: That was started last.
    popen: subprocess.Popen[str] = field(init=False)
    address: str = ""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens or stands by; a worker does neither."""
        name, *arguments = self.command
        flags = [] if name == "worker" else off_fixed_ports(name, arguments)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "clockwright.cli", name, *flags, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            # Packages are compiled to bytecode when they are installed.
            env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        )
        if name == "worker":
            return
        try:
            self._listen(name)
        except BaseException:
            self.end()
            raise

    def _listen(self, name: str) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith(("listening on ", "standing by on ")):
                self.address = line.split()[-1]
                port = self.address.rpartition(":")[2]
                self.command = [
                    f"--port={port}" if part == "--port=0" else part for part in self.command
                ]
                return
        raise RuntimeError(f"{name} ended with {self.popen.wait()}")

    def end(self) -> None:
        """Kill it, if it is there."""
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def start_again(self) -> None:
        """Start it again where it was, with the same flags."""
        self.end()
        self.start()

    async def ended(self) -> None:
        """Wait until it has ended."""
        await asyncio.to_thread(self.popen.wait, _START_LIMIT_S)


@dataclass(slots=True)
class Deployment:
    """Controllers, workers and fronts in a folder."""

    folder: Path
    stack: ExitStack
    controllers: list[Deployed] = field(default_factory=list)
    workers: list[Deployed] = field(default_factory=list)
    fronts: list[Deployed] = field(default_factory=list)

    def add(self, processes: list[Deployed], *command: str) -> Deployed:
        """Start one more."""
        process = Deployed(list(command))
        self.stack.callback(process.end)
        processes.append(process)
        return process

    def add_worker(self, name: str) -> Deployed:
        """Start a worker, which does not compute and takes half a millisecond for it."""
        where = (f"--controller={self.addresses}", f"--cache-dir={self.folder}/cache")
        size = ("--device=modelled:500us", "--pages=4", "--arena-mib=16")
        return self.add(self.workers, "worker", f"--id={name}", *where, *size)

    def add_front(self) -> Deployed:
        """Start a front."""
        return self.add(self.fronts, "front", f"--controller={self.addresses}", "--port=0")

    @property
    def addresses(self) -> str:
        """Those of the controllers, as workers and fronts take them."""
        return ",".join(controller.address for controller in self.controllers)

    async def restore(self) -> int:
        """Start again each process that has ended by itself, and put the leader first; says how many had ended."""
        processes = (*self.controllers, *self.workers, *self.fronts)
        ended = [process for process in processes if process.popen.poll() is not None]
        for process in ended:
            await asyncio.to_thread(process.start_again)
        leads = {each.address: await _is_ready(each.address) for each in self.controllers}
        self.controllers.sort(key=lambda each: not leads[each.address])
        return len(ended)


async def _until(ask: Callable[[], Awaitable[T | None]]) -> T:
    """Ask again and again until the answer is yes, or something."""
    async with asyncio.timeout(_START_LIMIT_S):
        while not (answer := await ask()):  # noqa: ASYNC110  it is another process
            await asyncio.sleep(0.05)
    return answer


async def _is_ready(address: str) -> bool:
    """Whether a front or a leader says that all models are ready."""
    async with AsyncClient(address) as client:
        with suppress(ClockwrightError):
            return await client.is_ready()
    return False


def _writer_of(pid: int) -> int | None:
    """Find the telemetry writer of a controller; one that was killed has a successor soon."""
    for child in family(pid)[1:]:
        with suppress(FileNotFoundError):
            if b"telemetry_writer" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


Play = Callable[[StreamClient, Deployment], Awaitable[None]]


def played(setting: Setting, folder: Path, play: Play, *, lease: bool = False) -> dict[str, float]:
    """Play something under load.

    Args:
        setting: says how much is asked.
        folder: where the deployment keeps its files.
        play: what happens.
        lease: there are two controllers with a lease; otherwise only one.

    Returns:
        What a client saw meanwhile.
    """

    async def load(deployment: Deployment) -> StreamClient:
        for front in deployment.fronts:
            await _until(partial(_is_ready, front.address))
        client = StreamClient([front.address for front in deployment.fronts], setting.rate)
        await client.during(lambda client: play(client, deployment))
        return client

    write_model("mlp-16-8-4", folder / "models" / "net" / "1" / "model.onnx")
    flags = [f"--models={folder}/models", "--port=0", f"--state={folder}/state"]
    if lease:
        flags.append(f"--lease=file:{folder}/lease")
    with ExitStack() as stack:
        deployment = Deployment(folder, stack)
        for name in "ab" if lease else "a":
            deployment.add(
                deployment.controllers, "controller", *flags, f"--telemetry={folder}/{name}"
            )
        for name in ("w0", "w1"):
            deployment.add_worker(name)
            deployment.add_front()
        return account(asyncio.run(load(deployment)).asked)


# --- the parts -------------------------------------------------------------------------------------


def faults(setting: Setting, folder: Path) -> dict[str, float]:
    """Kill and stop each process so many times."""
    takeovers_s: dict[int, list[float]] = {signal.SIGKILL: [], signal.SIGSTOP: []}
    ended: list[int] = []

    async def play(client: StreamClient, deployment: Deployment) -> None:
        for _, target, number in product(range(setting.times), TARGETS, takeovers_s):
            ended.append(await deployment.restore())
            took_s = await _fault(client, deployment, target, number)
            if target == "controller":
                takeovers_s[number].append(took_s)
            await client.calm()

    figures = played(setting, folder, play, lease=True)
    killed_s, stopped_s = map(max, takeovers_s.values())
    return figures | {
        "ended_by_themselves": sum(ended),
        "takeover_killed_s": killed_s,
        "takeover_stopped_s": stopped_s,
        "standby_takeover_s": max(killed_s, stopped_s),
    }


async def _fault(client: StreamClient, deployment: Deployment, target: str, number: int) -> float:
    """Do one thing to one process, and put things right; gives the time until an answer came."""
    leader, standby = deployment.controllers
    process = {
        "controller": leader,
        "standby": standby,
        "worker": deployment.workers[0],
        "front": deployment.fronts[0],
    }.get(target)
    if process is not None:
        pid = process.popen.pid
    else:
        pid = await _until(partial(asyncio.to_thread, _writer_of, leader.popen.pid))
    os.kill(pid, number)
    took_s = await client.next_answer()
    # A leader that was stopped is ended by its successor, and started again like one that was killed.
    if number == signal.SIGSTOP and process is not leader:
        await asyncio.sleep(_STOPPED_S)
        os.kill(pid, signal.SIGCONT)
    elif process is not None:
        await process.ended()
        await asyncio.to_thread(process.start_again)
    return took_s


def back(setting: Setting, folder: Path) -> dict[str, float]:
    """Kill the only controller, and start it again at once."""
    took_s: list[float] = []
    beside: dict[str, list[Inquiry]] = {"before": [], "after": []}

    async def play(client: StreamClient, deployment: Deployment) -> None:
        (controller,) = deployment.controllers
        for _ in range(setting.times):
            await asyncio.sleep(setting.beside_s)
            killed_s = time.monotonic()
            controller.popen.kill()
            starting = asyncio.create_task(asyncio.to_thread(controller.start_again))
            took_s.append(await client.next_answer())
            await starting
            await asyncio.sleep(setting.beside_s)
            await client.calm()
            # What was open when the controller was killed belongs to neither.
            begins_s = (
                killed_s - setting.beside_s - _SLO_MS["short"] / 1000,
                killed_s + took_s[-1],
            )
            for seen, begin_s in zip(beside.values(), begins_s, strict=True):
                seen += client.asked_between(begin_s, begin_s + setting.beside_s)

    figures = played(setting, folder, play)
    return {f"back_{name}": figure for name, figure in figures.items()} | {
        "controller_back_s": max(took_s),
        **{f"back_{name}": value for when in beside for name, value in ends(when, beside[when])},
    }


def ends(when: str, asked: Sequence[Inquiry]) -> Iterator[tuple[str, float]]:
    """Give the shares of requests that were refused as late, and for any other reason, in percent."""
    late = sum(each.end == "LATE" for each in asked)
    refused = sum(each.end not in ("OK", "LATE") for each in asked)
    yield f"{when}_late_pct", 100 * late / max(len(asked), 1)
    yield f"{when}_refused_pct", 100 * refused / max(len(asked), 1)


# --- all of it -------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[Setting, Path], dict[str, float]]] = {
    "faults": faults,
    "back": back,
}


def measure(setting: Setting) -> dict[str, float]:
    """Measure the parts that are asked for."""
    figures: dict[str, float] = {}
    for part in setting.parts:
        with tempfile.TemporaryDirectory(prefix="clockwright-") as scratch:
            figures |= PARTS[part](setting, Path(scratch))
    return figures


STUDY = bench("bench-restart", Setting(), measure, record="guard", part="restart")
