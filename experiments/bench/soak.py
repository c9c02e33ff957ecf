"""Does a server that is changed all the time keep its size: an hour of churn, and what each process occupies.

`make bench-soak`, in an hour and a half. A real `clockwright up` with a front process and a state folder
answers a steady load, while models and applications are added, asked, taught, replaced and removed, clients come, give
requests up and go, and further workers join and are drained. Every half minute the memory, file handles and
threads of each process that lives throughout are noted; slopes are those of straight lines through what
was noted. Before that the server's tables of the last requests and actions are filled, for these grow to a bound
(`telemetry_capacity`; an action has more than one request, so twice as many requests are asked); and what is noted
in the first minutes of the churn, in which other bounded stores fill, is kept in the record and left out of the
slopes. `soak_late_success` counts answers after their SLO as `bench-restart` does: time for which the client's own loop
stood still does not count; `soak_late_by_clock` has them all. Writes part `soak` of `guard.json`.

    python -m experiments bench-soak --minutes 60
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clockwright.client import Client, Feedback, InferResult
from clockwright.errors import RefusedError
from clockwright.operator import Operator
from clockwright.v1 import control_pb2 as pb
from controller.telemetry import CAPACITY
from experiments.live.live_run import LiveModel
from experiments.live.local_server import LocalServer
from experiments.live.open_loop import Account, ClientLoad, OpenLoop, offer
from experiments.live.processor_time import roles, rss_bytes
from experiments.study.bench import Findings, bench

_FILL_RPS, _STEADY_RPS = 1000.0, 100.0
# Between two turns of the churn.
_PAUSE_S = 3.0
_MODELS = ("steady", "further")


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    #: Length of the churn whose slopes count.
    minutes: float = 60.0
    #: Length of the load before it, which fills the server's tables.
    fill_s: float = 2.2 * CAPACITY / _FILL_RPS
    #: Length of the churn before that one, in which what is bounded fills.
    settling_s: float = 1200.0
    #: Time between two looks at the processes.
    look_s: float = 30.0


@dataclass(slots=True)
class Occupied:
    """What a process occupied, look by look."""

    rss_mib: list[float] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def since(self, num_looks: int) -> Occupied:
        """Leave the first looks out."""
        return Occupied(
            self.rss_mib[num_looks:], self.handles[num_looks:], self.threads[num_looks:]
        )


def measure(setting: Setting) -> Findings:
    """Fill, churn, and look."""
    with _server() as (server, controller):
        load = ClientLoad(
            address=server.address, models=_MODELS, slo_ms=100, seconds=setting.fill_s, rate=_FILL_RPS,
            seed=1,
        )  # fmt: skip
        offer(load)
        seconds = setting.settling_s + 60 * setting.minutes
        sizes, turns, account = _soak(server, controller, seconds, setting.look_s)
    first = round(setting.settling_s / setting.look_s)
    settled = {name: size.since(first) for name, size in sizes.items()}
    figures = figures_of(settled, setting.look_s) | {
        "soak_minutes": setting.minutes,
        "soak_turns": turns,
        "soak_requests": account.num_offered,
        "soak_unexplained_ends": account.others.total(),
        "soak_late_success": account.num_late_of_server,
        "soak_late_by_clock": account.num_late,
    }
    looks = {name: _looks_of(size) for name, size in sizes.items()}
    return Findings(figures, {"looks": looks, "unexplained_ends": dict(account.others)})


def _looks_of(size: Occupied) -> dict[str, list[float]]:
    """The looks at a process as a record keeps them."""
    return {
        "rss_mib": [round(value, 2) for value in size.rss_mib],
        "handles": list(map(float, size.handles)),
        "threads": list(map(float, size.threads)),
    }


def figures_of(sizes: dict[str, Occupied], look_s: float) -> dict[str, float]:
    """Slopes per hour, of each process and of all; by how much handles and threads rose from the first half to the second."""
    figures: dict[str, float] = {}
    for name, size in sizes.items():
        hours = np.arange(len(size.rss_mib)) * look_s / 3600
        figures[f"soak_{name}_rss_slope_mib_per_h"] = float(np.polyfit(hours, size.rss_mib, 1)[0])
        figures[f"soak_{name}_rss_mib"] = size.rss_mib[-1]
        half = len(size.handles) // 2
        for what, counts in (("handles", size.handles), ("threads", size.threads)):
            figures[f"soak_{name}_{what}_rise"] = max(counts[half:]) - max(counts[:half])
    slopes = [figures[f"soak_{name}_rss_slope_mib_per_h"] for name in sizes]
    figures["soak_rss_slope_mib_per_h"] = sum(slopes)
    return figures


@contextmanager
def _server() -> Iterator[tuple[LocalServer, str]]:
    """A server, and the address for workers."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in _MODELS:
            LiveModel(name=name, copies=1, batch_sizes=(1, 2, 4)).write(
                Path(scratch) / "models" / name
            )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        arguments = [
            *("--models", f"{scratch}/models", "--device", "modelled:1ms", "--fronts", "1"),
            *("--cache-dir", f"{scratch}/cache", "--state", f"{scratch}/state"),
            *("--controller-port", str(port)),
        ]
        with LocalServer(arguments) as server:
            for name in _MODELS:
                warm = ClientLoad(
                    address=server.address, models=(name,), slo_ms=10_000, seconds=0, concurrency=1
                )
                offer(warm)
            yield server, f"127.0.0.1:{port}"


def _soak(
    server: LocalServer, controller: str, seconds: float, look_s: float
) -> tuple[dict[str, Occupied], int, Account]:
    load = ClientLoad(
        address=server.address, models=_MODELS, slo_ms=100, seconds=seconds, rate=_STEADY_RPS, seed=2,
        notes_standstill=True,
    )  # fmt: skip
    pids = {
        (name if len(found) == 1 else f"{name}{number}"): pid
        for name, found in roles(server.process.pid).items()
        if name != "other"
        for number, pid in enumerate(found)
    }
    sizes = {name: Occupied() for name in pids}
    over = threading.Event()
    turns = 0
    failures: list[BaseException] = []

    def churn() -> None:
        nonlocal turns
        try:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                for turns in itertools.count(1):
                    _turn(server.address, controller, folder, turns)
                    if over.wait(_PAUSE_S):
                        return
        except BaseException as error:
            failures.append(error)

    with OpenLoop(load) as client:
        churning = threading.Thread(target=churn)
        churning.start()
        begin_s = time.monotonic()
        for number in itertools.count(1):
            if number * look_s > seconds:
                break
            time.sleep(max(begin_s + number * look_s - time.monotonic(), 0))
            for name, pid in pids.items():
                _look(pid, sizes[name])
            if failures:
                break
        over.set()
        churning.join()
        if failures:
            raise failures[0]
        account = client.account()
    return sizes, turns, account


def _look(pid: int, size: Occupied) -> None:
    process = Path(f"/proc/{pid}")
    size.rss_mib.append(rss_bytes(pid) / 2**20)
    size.handles.append(len(list((process / "fd").iterdir())))
    size.threads.append(len(list((process / "task").iterdir())))


def _turn(address: str, controller: str, folder: Path, number: int) -> None:
    """One turn of the churn: a model, an application, clients, and now and then a worker."""
    rows = np.zeros((1, 784), np.float32)
    name = f"added-{number % 7}"
    LiveModel(name=name, copies=1 + number % 3, batch_sizes=(1, 2)).write(folder / name)
    with Operator(address) as operator, Client(address) as client:
        operator.add_model(folder / name, name=name, replace=True)
        operator.put_application(
            pb.Application(
                name="app",
                models=list(_MODELS),
                policy="thompson",
                combination="one",
                no_cache=number % 2 == 0,
            ),
            replace=True,
        )
        for user in range(5):
            result = _ask(client, "app", rows, slo_ms=200, context=f"{number}-{user}")
            if result is not None:
                client.feedback(Feedback(result.query_id, reward=1.0))
        for _ in range(20):
            with Client(address) as short:
                _ask(short, "steady", rows, slo_ms=50)
                # Nothing can be in time here: the client gives it up, or it is refused.
                _ask(short, "further", rows, slo_ms=0.5)
        operator.remove_application("app")
        for model in operator.models():
            if model.model_id.startswith("added-"):
                operator.remove_model(model.model_id)
    if number % 30 == 0:
        _worker_comes_and_goes(controller, f"further-{number}")


def _ask(
    client: Client, model: str, rows: NDArray[np.float32], *, slo_ms: float, context: str = ""
) -> InferResult | None:
    """An answer; None: refused."""
    try:
        return client.infer(model, rows, slo_ms=slo_ms, context=context)
    except RefusedError:
        return None


def _worker_comes_and_goes(address: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as cache, Operator(address) as operator:
        arguments = ["worker", "--controller", address, "--id", name, "--device", "modelled:1ms"]
        process = subprocess.Popen(
            [sys.executable, "-m", "clockwright.cli", *arguments, "--cache-dir", cache],
            stderr=subprocess.DEVNULL,
        )
        try:
            states: Counter[str] = Counter()
            while not states[name]:
                states = Counter(worker.worker_id for worker in operator.workers())
                time.sleep(0.2)
            operator.drain(name)
        finally:
            process.terminate()
            process.wait()


STUDY = bench("bench-soak", Setting(), measure, record="guard", part="soak")
