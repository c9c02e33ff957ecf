"""What it costs when a process is killed, stopped or replaced under load: `guard.json`, part `restart`.

`make bench-restart`. Two controllers behind a lease, two workers with modelled devices and two fronts; a client asks
by streams of both fronts, 200 requests per second, half of them with an SLO that outlasts any change of
controllers, half with 100 ms. A request whose stream breaks is asked again at the other front, as gRPC's clients
do. Every request is counted by its id:

* `lost`: no end, or, with the long SLO, an end that is not its answer; a short SLO may be refused by name. Those
  `lost_by_name` were refused by name all the same: on a machine with other things to do the throttle keeps requests
  out while a loop waits for its processor.
* `double`: a second end on one stream.
* `late_success`: an answer that came after its SLO. Time for which the client's own event loop stood still between
  question and answer, or the machine let the client's other threads wait, does not count.

The parts: `faults` kills and stops each kind of process in turn, so many times; what was killed is started again, as
a supervisor does it. `back` kills a controller that has no standby, which is started again at once. `upgrade`
replaces every process of an earlier revision (`git archive`) by this one's, one at a time.

    python -m experiments bench-restart --times 20
    python -m experiments bench-restart --times 1 --parts back --directory /tmp/restart
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from clockwright.v1 import control_pb2
from clockwright.v1 import inference_pb2 as pb
from experiments.live.local_server import off_fixed_ports
from experiments.live.standstill import TICK_S, Standstill
from experiments.study.bench import bench
from experiments.study.study import chosen
from modelzoo.build import write_model

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_WORKERS = "/clockwright.v1.ControlService/ListWorkers"
_READY = "/inference.GRPCInferenceService/ServerReady"
_SLO_MS = {"short": 100, "long": 20_000}
_INPUT = np.ones((1, 16), np.float32)
# A request that has no end by then has none.
_PATIENCE_S = 10.0
# A front that takes longer to connect is asked nothing meanwhile.
_CONNECT_S = 0.2
# How long a process is stopped; a leader, until it is followed.
_STOPPED_S = 1.5
# Between two faults.
_CALM_S = 1.0
_START_LIMIT_S = 120.0
#: The last revision whose processes could only be replaced with a pause.
PREVIOUS = "9ef805e"
TARGETS = ("controller", "worker", "front", "standby", "writer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    #: How often each process is killed, and how often stopped.
    times: int = 20
    rate: float = 200.0
    targets: tuple[str, ...] = TARGETS
    #: The revision that is replaced.
    previous: str = PREVIOUS
    parts: tuple[str, ...] = ("faults", "back", "upgrade")

    def __post_init__(self) -> None:
        chosen("target", self.targets, TARGETS)
        chosen("part", self.parts, PARTS)


# --- the client ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Inquiry:
    """One request, and what became of it."""

    kind: str
    sent_s: float
    #: What ended it: `OK`, or the name of a refusal; empty: nothing yet.
    end: str = ""
    done_s: float = 0.0
    #: For how long the client had stood still, in all: when it was sent, and at its end.
    stood_before_s: float = 0.0
    stood_s: float = 0.0
    num_ends: int = 0
    #: How often it was asked again because a stream broke.
    num_again: int = 0

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
        self._rate = rate
        self._queues: dict[str, asyncio.Queue[int]] = {front: asyncio.Queue() for front in fronts}
        self._stopped = asyncio.Event()
        self._standstill = Standstill()

    async def run(self) -> None:
        """Ask, and then wait for what is open."""
        streams = [asyncio.create_task(self._serve(front)) for front in list(self._queues)]
        ticking = asyncio.create_task(self._tick())
        try:
            await self._ask()
            deadline_s = time.monotonic() + _PATIENCE_S + _SLO_MS["long"] / 1000
            # Each request has an end of its own.
            while time.monotonic() < deadline_s and not self._is_quiet():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        finally:
            for task in (*streams, ticking):
                task.cancel()
            await asyncio.gather(*streams, ticking, return_exceptions=True)

    def _is_quiet(self) -> bool:
        return all(each.end for each in self.asked)

    def stop(self) -> None:
        """Ask nothing more."""
        self._stopped.set()

    def move(self, old: str, new: str) -> None:
        """A front was replaced by one elsewhere. The old one's stream ends with it."""
        self._queues[new] = asyncio.Queue()
        self._moved = asyncio.create_task(self._serve(new))
        self._queues.pop(old)

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
        before = list(self.asked)
        while not all(each.end for each in before):
            if time.monotonic() > before[-1].deadline_s + _PATIENCE_S:
                break
            await asyncio.sleep(0.02)
        await self.next_answer()
        await asyncio.sleep(_CALM_S)

    async def _tick(self) -> None:
        self._standstill = Standstill()
        while True:
            await asyncio.sleep(TICK_S)
            self._standstill.look()

    async def _ask(self) -> None:
        begin_s, number = time.monotonic(), 0
        while not self._stopped.is_set():
            now_s = time.monotonic()
            while begin_s + number / self._rate <= now_s:
                kind = ("short", "long")[number % 2]
                self.asked.append(Inquiry(kind, now_s, stood_before_s=self._standstill.total_s))
                self._put(number)
                number += 1
            await asyncio.sleep(1 / self._rate)

    def _put(self, number: int, *, but: str = "") -> None:
        fronts = [front for front in self._queues if front != but] or list(self._queues)
        self._queues[fronts[(number // 2) % len(fronts)]].put_nowait(number)

    async def _serve(self, front: str) -> None:
        """Keep a stream to a front; whatever was on it when it broke is asked elsewhere."""
        queue = self._queues[front]
        while self._queues.get(front) is queue or not queue.empty():
            under_way: dict[int, None] = {}
            channel: Any
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 1000)]
            async with grpc.aio.insecure_channel(front, options=options) as channel:
                with suppress(grpc.aio.AioRpcError, TimeoutError):
                    # A front knows nothing of the time for which a request waited for a connection.
                    async with asyncio.timeout(_CONNECT_S):
                        await channel.channel_ready()
                    await self._talk(channel.stream_stream(_STREAM)(), queue, under_way)
            for number in under_way:
                self.asked[number].num_again += 1
                self._put(number, but=front)
            while not queue.empty():
                self._put(queue.get_nowait(), but=front)
            await asyncio.sleep(0.05)

    async def _talk(
        self,
        call: Any,  # noqa: ANN401  grpc.aio's
        queue: asyncio.Queue[int],
        under_way: dict[int, None],
    ) -> None:
        writing = asyncio.create_task(self._write(call, queue, under_way))
        try:
            async for message in call:
                self._take(pb.ModelStreamInferResponse.FromString(message), under_way)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

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
            tensor = pb.ModelInferRequest.InferInputTensor(
                name="input", datatype="FP32", shape=_INPUT.shape
            )
            request = pb.ModelInferRequest(
                id=str(number),
                model_name="net",
                inputs=[tensor],
                raw_input_contents=[_INPUT.tobytes()],
                parameters={"slo_ms": pb.InferParameter(int64_param=remaining_ms)},
            )
            await call.write(request.SerializeToString())

    def _take(self, message: pb.ModelStreamInferResponse, under_way: dict[int, None]) -> None:
        number = int(message.infer_response.id)
        under_way.pop(number, None)
        words = message.error_message
        self._end(self.asked[number], words.partition(":")[0] if words else "OK")

    def _end(self, asked: Inquiry, end: str) -> None:
        asked.num_ends += 1
        if asked.num_ends == 1:
            asked.end, asked.done_s, asked.stood_s = end, time.monotonic(), self._standstill.total_s


def account(asked: Sequence[Inquiry]) -> dict[str, float]:
    """Count what a client saw."""
    return {
        "requests": len(asked),
        "answered": sum(each.end == "OK" for each in asked),
        "asked_again": sum(bool(each.num_again) for each in asked),
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
    folder: Path | None = None
    popen: subprocess.Popen[str] | None = None
    address: str = ""

    def start(self) -> None:
        """Start it, and wait until it listens or stands by; a worker does neither."""
        self._close()
        name, *arguments = self.command
        # Releases of before know no such flags.
        is_ours = self.folder is None and name != "worker"
        flags = off_fixed_ports(name, arguments) if is_ours else []
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "clockwright.cli", name, *flags, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            # Packages are compiled to bytecode when they are installed.
            env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
            # Where the modules are that Python finds first.
            cwd=self.folder,
        )
        if self.command[0] == "worker":
            return
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith(("listening on ", "standing by on ")):
                self.address = line.split()[-1]
                port = self.address.rpartition(":")[2]
                self.command = [
                    f"--port={port}" if part == "--port=0" else part for part in self.command
                ]
                return
        raise RuntimeError(f"{self.command[0]} ended with {self.popen.wait()}")

    @property
    def pid(self) -> int:
        """Its number, of the process that was started last."""
        assert self.popen is not None
        return self.popen.pid

    def send(self, number: int) -> None:
        """Send it a signal, if it is there."""
        assert self.popen is not None
        self.popen.send_signal(number)

    def end(self) -> None:
        """Kill it."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()
            self._close()

    def _close(self) -> None:
        if self.popen is not None and self.popen.stdout is not None:
            self.popen.stdout.close()


@dataclass(slots=True)
class Deployment:
    """Controllers, workers and fronts in a folder."""

    folder: Path
    stack: ExitStack
    #: Where the first processes' modules are; None: here.
    source: Path | None = None
    controllers: list[Deployed] = field(default_factory=list)
    workers: list[Deployed] = field(default_factory=list)
    fronts: list[Deployed] = field(default_factory=list)

    def __post_init__(self) -> None:
        write_model("mlp-16-8-4", self.folder / "models" / "net" / "1" / "model.onnx")

    def add(self, processes: list[Deployed], *command: str, source: Path | None = None) -> Deployed:
        """Start one more."""
        process = Deployed(list(command), folder=source or self.source)
        self.stack.callback(process.end)
        process.start()
        processes.append(process)
        return process

    def add_controller(self, name: str, *, lease: bool, source: Path | None = None) -> Deployed:
        """Start a controller, with a lease or as the only one."""
        flags = [f"--models={self.folder}/models", "--port=0", f"--telemetry={self.folder}/{name}"]
        if lease:
            flags += [f"--lease=file:{self.folder}/lease"]
        if lease or source is None:
            flags += [f"--state={self.folder}/state"]
        return self.add(self.controllers, "controller", *flags, source=source)

    def add_worker(self, name: str, source: Path | None = None) -> Deployed:
        """Start a worker, which does not compute and takes half a millisecond for it."""
        return self.add(
            self.workers,
            *(
                "worker",
                f"--controller={self.addresses}",
                f"--id={name}",
                "--device=modelled:500us",
            ),
            *("--pages=4", "--arena-mib=16", f"--cache-dir={self.folder}/cache"),
            source=source,
        )

    def add_front(self, source: Path | None = None) -> Deployed:
        """Start a front."""
        command = ("front", f"--controller={self.addresses}", "--port=0")
        return self.add(self.fronts, *command, source=source)

    @property
    def addresses(self) -> str:
        """Those of the controllers, as workers and fronts take them."""
        return ",".join(controller.address for controller in self.controllers)

    async def until_ready(self) -> None:
        """Wait until every front says that all models are ready."""
        for front in self.fronts:
            channel: Any
            async with grpc.aio.insecure_channel(front.address) as channel:
                ready = channel.unary_unary(_READY)
                async with asyncio.timeout(_START_LIMIT_S):
                    while not await _says_ready(ready):  # noqa: ASYNC110  it is another process
                        await asyncio.sleep(0.05)

    async def until_joined(self, name: str) -> None:
        """Wait until the only controller lists a worker."""
        channel: Any
        async with grpc.aio.insecure_channel(self.addresses) as channel:
            listing = channel.unary_unary(_WORKERS)
            async with asyncio.timeout(_START_LIMIT_S):
                while name not in await _workers(listing):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    async def restore(self) -> int:
        """Start again whoever has ended by itself, and put the leader first; says how many had ended."""
        ended = [
            process
            for process in (*self.controllers, *self.workers, *self.fronts)
            if process.popen is not None and process.popen.poll() is not None
        ]
        for process in ended:
            await asyncio.to_thread(process.start)
        for controller in list(self.controllers):
            channel: Any
            async with grpc.aio.insecure_channel(controller.address) as channel:
                if await _says_ready(channel.unary_unary(_READY)):
                    self.controllers.remove(controller)
                    self.controllers.insert(0, controller)
        return len(ended)

    async def writer(self) -> int:
        """Find the telemetry writer of the controller that leads; one that was killed has a successor soon."""
        async with asyncio.timeout(_START_LIMIT_S):
            while (pid := _writer_of(self.controllers[0].pid)) is None:  # noqa: ASYNC110
                await asyncio.sleep(_CALM_S)
        return pid


def _writer_of(pid: int) -> int | None:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError):
            if b"telemetry_writer" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


async def _says_ready(ready: Callable[[bytes], Any]) -> bool:
    with suppress(grpc.aio.AioRpcError):
        return bool(pb.ServerReadyResponse.FromString(await ready(b"")).ready)
    return False


async def _workers(listing: Callable[[bytes], Any]) -> list[str]:
    listed = control_pb2.ListWorkersResponse.FromString(await listing(b""))
    return [worker.worker_id for worker in listed.workers]


async def _loaded(
    deployment: Deployment, setting: Setting, play: Callable[[StreamClient], Any]
) -> StreamClient:
    """Play something under load."""
    await deployment.until_ready()
    client = StreamClient([front.address for front in deployment.fronts], setting.rate)
    running = asyncio.create_task(client.run())
    try:
        await client.calm()
        await play(client)
        await client.calm()
    finally:
        client.stop()
        await running
    return client


# --- the parts -------------------------------------------------------------------------------------


def faults(setting: Setting, folder: Path) -> dict[str, float]:
    """Kill and stop each process so many times."""
    takeovers: dict[str, list[float]] = {"killed": [], "stopped": []}
    ended: list[int] = []

    async def play(client: StreamClient, deployment: Deployment) -> None:
        for _ in range(setting.times):
            for target in setting.targets:
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    ended.append(await deployment.restore())
                    took_s = await _fault(client, deployment, target, number)
                    if target == "controller":
                        name = "killed" if number == signal.SIGKILL else "stopped"
                        takeovers[name].append(took_s)
                    await client.calm()

    with ExitStack() as stack:
        deployment = Deployment(folder, stack)
        deployment.add_controller("a", lease=True)
        deployment.add_controller("b", lease=True)
        for index in range(2):
            deployment.add_worker(f"w{index}")
            deployment.add_front()
        client = asyncio.run(_loaded(deployment, setting, lambda client: play(client, deployment)))
    figures = account(client.asked) | {"ended_by_themselves": sum(ended)}
    for name, took_s in takeovers.items():
        if took_s:
            figures[f"takeover_{name}_s"] = max(took_s)
    longest_s = [max(took_s) for took_s in takeovers.values() if took_s]
    if longest_s:
        figures["standby_takeover_s"] = max(longest_s)
    return figures


async def _fault(client: StreamClient, deployment: Deployment, target: str, number: int) -> float:
    """Do one thing to one process, and put things right; gives the time until an answer came."""
    if target == "writer":
        pid = await deployment.writer()
        os.kill(pid, number)
        took_s = await client.next_answer()
        if number == signal.SIGSTOP:
            await asyncio.sleep(_STOPPED_S)
            os.kill(pid, signal.SIGCONT)
        return took_s
    processes = {
        "controller": deployment.controllers[:1],
        "standby": deployment.controllers[1:],
        "worker": deployment.workers[:1],
        "front": deployment.fronts[:1],
    }[target]
    process = processes[0]
    process.send(number)
    took_s = await client.next_answer()
    if target == "controller":
        # A leader that was stopped is ended by its successor, and started again like one that was killed.
        await _ended(process)
        deployment.controllers.reverse()
    elif number == signal.SIGSTOP:
        await asyncio.sleep(_STOPPED_S)
        process.send(signal.SIGCONT)
        return took_s
    else:
        await _ended(process)
    await asyncio.to_thread(process.start)
    return took_s


async def _ended(process: Deployed) -> None:
    assert process.popen is not None
    await asyncio.to_thread(process.popen.wait, _START_LIMIT_S)


def back(setting: Setting, folder: Path) -> dict[str, float]:
    """Kill the only controller, and start it again at once."""
    took_s: list[float] = []

    async def play(client: StreamClient, deployment: Deployment) -> None:
        controller = deployment.controllers[0]
        for _ in range(setting.times):
            controller.send(signal.SIGKILL)
            starting = asyncio.create_task(_start_again(controller))
            took_s.append(await client.next_answer())
            await starting
            await client.calm()

    with ExitStack() as stack:
        deployment = Deployment(folder, stack)
        deployment.add_controller("a", lease=False)
        for index in range(2):
            deployment.add_worker(f"w{index}")
            deployment.add_front()
        client = asyncio.run(_loaded(deployment, setting, lambda client: play(client, deployment)))
    figures = {f"back_{name}": figure for name, figure in account(client.asked).items()}
    return figures | {"controller_back_s": max(took_s)}


async def _start_again(process: Deployed) -> None:
    await _ended(process)
    await asyncio.to_thread(process.start)


def upgrade(setting: Setting, folder: Path) -> dict[str, float]:
    """Replace every process of an earlier revision, one at a time."""
    source = _source_of(setting.previous, folder / "previous")

    async def play(client: StreamClient, deployment: Deployment) -> None:
        # Fronts hold requests and workers wait while one controller follows the other.
        old = deployment.controllers.pop()
        old.send(signal.SIGTERM)
        await _ended(old)
        new = Deployed([*old.command, f"--state={folder}/state"])
        deployment.stack.callback(new.end)
        await asyncio.to_thread(new.start)
        deployment.controllers.append(new)
        await client.calm()
        # Each worker leaves when another has come for it.
        for worker in list(deployment.workers):
            name = f"new-{worker.pid}"
            await asyncio.to_thread(deployment.add_worker, name)
            await deployment.until_joined(name)
            await client.calm()
            worker.send(signal.SIGTERM)
            await _ended(worker)
            await client.calm()
        for front in list(deployment.fronts):
            successor = await asyncio.to_thread(deployment.add_front)
            client.move(front.address, successor.address)
            await client.calm()
            front.send(signal.SIGTERM)
            await _ended(front)
            await client.calm()

    with ExitStack() as stack:
        deployment = Deployment(folder, stack)
        deployment.add_controller("a", lease=False, source=source)
        for index in range(2):
            deployment.add_worker(f"w{index}", source=source)
            deployment.add_front(source=source)
        client = asyncio.run(_loaded(deployment, setting, lambda client: play(client, deployment)))
    return {f"upgrade_{name}": figure for name, figure in account(client.asked).items()}


def _source_of(revision: str, folder: Path) -> Path:
    """Unpack the modules of a revision; a copy that does not know it cannot play this part."""
    root = Path(__file__).resolve().parents[2]
    archive = folder.with_suffix(".tar")
    subprocess.run(["git", "archive", "--output", str(archive), revision], cwd=root, check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder


# --- all of it -------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[Setting, Path], dict[str, float]]] = {
    "faults": faults,
    "back": back,
    "upgrade": upgrade,
}


def measure(setting: Setting) -> dict[str, float]:
    """Measure the parts that are asked for."""
    figures: dict[str, float] = {}
    for part in setting.parts:
        with tempfile.TemporaryDirectory(prefix="clockwright-") as scratch:
            figures |= PARTS[part](setting, Path(scratch))
    return figures


STUDY = bench("bench-restart", Setting(), measure, record="guard", part="restart")
