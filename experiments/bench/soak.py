"""Does a server that is changed all the time keep its size: an hour of churn, and what each process occupies.

`make bench NAME=bench-soak`, in an hour and a half. A real `clockwright up` with a front process and a state folder
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
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clockwright.client.client import Client, Feedback
from clockwright.client.operator import Operator
from clockwright.errors import RefusedError
from clockwright.v1 import control_pb2 as pb
from controller.telemetry.tables import CAPACITY
from experiments.live.live_run import LiveModel
from experiments.live.local_server import LocalServer, folders, free_ports, further_worker
from experiments.live.open_loop import Account, ClientLoad, OpenLoop, await_model, offer
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


#: What a process occupied, look by look: resident MiB, file handles, threads.
Looks = list[tuple[float, int, int]]


def measure(setting: Setting) -> Findings:
    """Fill, churn, and look."""
    with _server() as (server, controller):
        load = ClientLoad(
            address=server.address, models=_MODELS, slo_ms=100, seconds=setting.fill_s, rate=_FILL_RPS,
            seed=1,
        )  # fmt: skip
        offer(load)
        seconds = setting.settling_s + 60 * setting.minutes
        looks, turns, account = _soak(server, controller, seconds, setting.look_s)
    figures = figures_of(looks, setting.look_s, round(setting.settling_s / setting.look_s)) | {
        "soak_minutes": setting.minutes,
        "soak_turns": turns,
        "soak_requests": account.num_offered,
        "soak_unexplained_ends": account.others.total(),
        "soak_late_success": account.num_late_of_server,
        "soak_late_by_clock": account.num_late,
        "soak_p9999_ms": account.latency_ms(99.99),
    }
    columns = {
        name: dict(zip(("rss_mib", "handles", "threads"), zip(*seen, strict=True), strict=True))
        for name, seen in looks.items()
    }
    return Findings(figures, {"looks": columns, "unexplained_ends": dict(account.others)})


def figures_of(looks: Mapping[str, Looks], look_s: float, first: int = 0) -> dict[str, float]:
    """Slopes per hour, of each process and of all; by how much handles and threads rose from the first half to the second.

    Args:
        looks: by process.
        look_s: time between two.
        first: so many are left out, in which a process settles.
    """
    figures: dict[str, float] = {}
    slopes = []
    for name, all_seen in looks.items():
        seen = all_seen[first:]
        rss_mib, handles, threads = np.transpose(seen)
        hours = np.arange(len(seen)) * look_s / 3600
        slopes.append(float(np.polyfit(hours, rss_mib, 1)[0]))
        figures[f"soak_{name}_rss_slope_mib_per_h"] = slopes[-1]
        figures[f"soak_{name}_rss_mib"] = float(rss_mib[-1])
        half = len(seen) // 2
        for what, counts in (("handles", handles), ("threads", threads)):
            figures[f"soak_{name}_{what}_rise"] = int(max(counts[half:]) - max(counts[:half]))
    return figures | {"soak_rss_slope_mib_per_h": sum(slopes)}


@contextmanager
def _server() -> Iterator[tuple[LocalServer, str]]:
    """A server, and the address for workers."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in _MODELS:
            LiveModel(name=name, copies=1, batch_sizes=(1, 2, 4)).write(
                Path(scratch) / "models" / name
            )
        (port,) = free_ports(1)
        arguments = [
            *folders(scratch),
            *("--device", "modelled:1ms", "--fronts", "1"),
            *("--state", f"{scratch}/state", "--controller-port", str(port)),
        ]
        with LocalServer(arguments) as server:
            for name in _MODELS:
                await_model(server.address, name)
            yield server, f"127.0.0.1:{port}"


def _soak(
    server: LocalServer, controller: str, seconds: float, look_s: float
) -> tuple[dict[str, Looks], int, Account]:
    """Churn under a load; gives what was seen of each process, the number of turns, and the client's account."""
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
    looks: dict[str, Looks] = {name: [] for name in pids}
    over = threading.Event()

    def churn() -> int:
        with tempfile.TemporaryDirectory() as folder:
            for turn in itertools.count(1):
                _turn(server.address, controller, Path(folder), turn)
                if over.wait(_PAUSE_S):
                    break
        return turn

    with ThreadPoolExecutor(1) as pool, OpenLoop(load) as client:
        churning = pool.submit(churn)
        begin_s = time.monotonic()
        try:
            for number in range(1, int(seconds / look_s) + 1):
                time.sleep(max(begin_s + number * look_s - time.monotonic(), 0))
                for name, pid in pids.items():
                    process = Path(f"/proc/{pid}")
                    num_handles, num_threads = (
                        len(list((process / what).iterdir())) for what in ("fd", "task")
                    )
                    rss_mib = round(rss_bytes(pid) / 2**20, 2)
                    looks[name].append((rss_mib, num_handles, num_threads))
                if churning.done():
                    break
        finally:
            over.set()
        return looks, churning.result(), client.account()


def _turn(address: str, controller: str, folder: Path, number: int) -> None:
    """One turn of the churn: a model, an application, clients, and now and then a worker."""
    rows = np.zeros((1, 784), np.float32)
    name = f"added-{number % 7}"
    LiveModel(name=name, copies=1 + number % 3, batch_sizes=(1, 2)).write(folder / name)
    with Operator(address) as operator, Client(address) as client:
        operator.add_model(folder / name, name=name, replace=True)
        application = pb.Application(
            name="app",
            models=list(_MODELS),
            policy="thompson",
            combination="one",
            no_cache=number % 2 == 0,
        )
        operator.put_application(application, replace=True)
        for user in range(5):
            try:
                result = client.infer("app", rows, slo_ms=200, context=f"{number}-{user}")
            except RefusedError:
                continue
            client.feedback(Feedback(result.query_id, reward=1.0))
        for _ in range(20):
            with Client(address) as short:
                # Nothing can be in time in half a millisecond: the client gives it up, or it is refused.
                for model, slo_ms in (("steady", 50), ("further", 0.5)):
                    with suppress(RefusedError):
                        short.infer(model, rows, slo_ms=slo_ms)
        operator.remove_application("app")
        for info in operator.models():
            if info.model_id.startswith("added-"):
                operator.remove_model(info.model_id)
    if number % 30 == 0:
        _worker_comes_and_goes(controller, f"further-{number}")


def _worker_comes_and_goes(address: str, name: str) -> None:
    with (
        tempfile.TemporaryDirectory() as cache,
        Operator(address) as operator,
        further_worker(
            *(address, "--id", name, "--device", "modelled:1ms", "--cache-dir", cache), quiet=True
        ),
    ):
        while name not in {worker.worker_id for worker in operator.workers()}:
            time.sleep(0.2)
        operator.drain(name)


STUDY = bench("bench-soak", Setting(), measure, record="guard", part="soak")
