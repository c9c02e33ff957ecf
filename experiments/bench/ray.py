"""What it costs when a worker, an actor, a node or the keeper of a Ray cluster is lost under load: `ray.json`.

`make bench NAME=bench-ray`; needs a Python with Ray (`CLOCKWRIGHT_RAY_PYTHON`, see docs/beyond.md). A cluster of three nodes
on this machine: the head has the controller, two fronts and the keeper; the others a kind of modelled workers each. The
client of `bench-restart` asks by streams of both fronts, half of its requests with an SLO that outlasts any change, half with
100 ms, and counts `lost`, `double` and `late_success` as there.

The parts: `faults` kills a worker's process, an actor (whose worker drains), a node, which comes again, and the keeper, in
turn, so many times; `..._full_s` is the time from then until as many workers are ready as before, none of them the lost
one. Before and after a keeper's death as many short requests are to be answered. `scale` asks for more than a worker
can carry and then for less, says when the workers that are wanted are ready and when those that are not have left, and keeps
the goodput of each second. `sweep` runs a contest of policies here and as tasks of the cluster, and compares the outcomes.

    python -m experiments bench-ray --times 1 --parts faults --directory /tmp/ray
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clockwright.client.operator import Operator
from clockwright.errors import ClockwrightError
from engines.ray.environment import VARIABLE
from experiments.bench.restart import Inquiry, StreamClient, account
from experiments.live.ray_cluster import RayCluster, kinds_file, ray_cluster
from experiments.study.bench import Findings, bench
from experiments.study.study import chosen
from modelzoo.build import write_model

_LIMIT_S = 600.0
_LOOK_S = 0.1
_CONTEST = "fig7_left_n12_r600_x2.25"
FAULTS = ("worker", "actor", "node", "keeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the study, which tests make smaller."""

    #: How often each fault is injected.
    times: int = 3
    #: Requests per second, and more of them than a worker carries one by one: a batch takes it 20 ms.
    rate: float = 25.0
    more: float = 100.0
    #: How long before and after a keeper's death the requests are compared.
    beside_s: float = 5.0
    parts: tuple[str, ...] = ("faults", "scale", "sweep")

    def __post_init__(self) -> None:
        chosen("part", self.parts, PARTS)


@dataclass(slots=True)
class DeployedOnRay:
    """What `clockwright up --ray` has left behind."""

    cluster: RayCluster
    fronts: list[str]
    operator: Operator
    #: How long it took.
    up_s: float

    def workers(self) -> dict[str, str]:
        """Kinds of all workers that are ready, by name; none while the controller is away."""
        try:
            return {worker.worker_id: worker.gpu_kind for worker in self.operator.workers()}
        except ClockwrightError:
            return {}

    async def until(self, done: Callable[[Mapping[str, str]], bool]) -> float:
        """Wait for something of the workers; returns the time until then."""
        begin_s = time.monotonic()
        async with asyncio.timeout(_LIMIT_S):
            while not done(await asyncio.to_thread(self.workers)):  # noqa: ASYNC110  other processes
                await asyncio.sleep(_LOOK_S)
        return time.monotonic() - begin_s


@contextmanager
def deployed(kinds: Mapping[str, Mapping[str, object]], folder: Path) -> Iterator[DeployedOnRay]:
    """A cluster with a node for each kind, and everything started and ready there; stopped in order."""
    write_model("mlp-16-8-4", folder / "models" / "net" / "1" / "model.onnx")
    path = kinds_file(folder, kinds, models=folder / "models")
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_cluster())
        for kind in kinds:
            cluster.add(kind, **room_of(kind))
        begin_s = time.monotonic()
        done = cluster.clockwright(f"--kinds={path}")
        up_s = time.monotonic() - begin_s
        if done.returncode:
            raise RuntimeError(f"clockwright up --ray: {done.stdout}{done.stderr}")
        stack.callback(cluster.clockwright, "--stop")
        fronts = done.stdout.splitlines()[-1].partition("clients ask ")[2].split(", ")
        controller = cluster.said("controller-0")["address"]
        yield DeployedOnRay(cluster, fronts, stack.enter_context(Operator(controller)), up_s)


def room_of(kind: str) -> dict[str, float]:
    """The resources of a node for a kind."""
    return {f"clockwright_{kind}": 8}


async def played(
    setting: Setting, there: DeployedOnRay, play: Callable[[StreamClient], Awaitable[None]]
) -> StreamClient:
    """Play something under load; returns the client that has asked meanwhile."""
    client = StreamClient(there.fronts, setting.rate)
    running = asyncio.create_task(client.run())
    try:
        await client.calm()
        await play(client)
        await client.calm()
    finally:
        client.stop()
        await running
    return client


# --- the parts ------------------------------------------------------------------------------------


def faults(setting: Setting, folder: Path) -> Findings:
    """Inject each fault so many times."""
    kinds = {
        "fast": {"device": "500us", "min": 1, "max": 2},
        "slow": {"device": "1ms", "min": 1, "max": 2},
    }
    full_s: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    short: dict[str, list[Inquiry]] = {"before": [], "after": []}
    with deployed(kinds, folder) as there:
        cluster = there.cluster
        placed = sum(
            cluster.said(f"worker-{kind}-0")["node"] == cluster.nodes[kind] for kind in kinds
        )

        async def play(client: StreamClient) -> None:
            for _ in range(setting.times):
                for fault in FAULTS:
                    await asyncio.sleep(setting.beside_s)
                    begin_s = time.monotonic()
                    full_s[fault].append(await inject(there, fault))
                    print(f"{fault}: all as before after {full_s[fault][-1]:.1f} s", flush=True)
                    if fault == "keeper":
                        await asyncio.sleep(setting.beside_s)
                        short["before"] += client.asked_between(begin_s - setting.beside_s, begin_s)
                        short["after"] += client.asked_between(begin_s, begin_s + setting.beside_s)
                    await client.calm()

        client = asyncio.run(played(setting, there, play))
    answered = {
        when: 100 * sum(each.end == "OK" for each in asked) / len(asked)
        for when, asked in short.items()
    }
    figures = account(client.asked) | {
        "up_s": there.up_s,
        "placed_by_kind": placed,
        "faults": sum(map(len, full_s.values())),
        **{f"{fault}_full_s": max(took) for fault, took in full_s.items() if fault != "keeper"},
        "keeper_back_s": max(full_s["keeper"]),
        **{f"keeper_{when}_answered_pct": share for when, share in answered.items()},
    }
    return Findings(figures)


async def inject(there: DeployedOnRay, fault: str) -> float:
    """Lose something; returns how long it took until all was as before."""
    cluster = there.cluster
    before = there.workers()
    actor = "worker-slow-0"
    lost = cluster.said(actor)
    begin_s = time.monotonic()
    if fault == "worker":
        os.kill(lost["pid"], signal.SIGKILL)
    elif fault == "actor":
        await asyncio.to_thread(cluster.kill, actor)
    elif fault == "keeper":
        await asyncio.to_thread(cluster.kill, "keeper")
        # It hears of its controller again.
        while (await asyncio.to_thread(cluster.said, "keeper"))["wanted"] is None:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - begin_s
    else:
        await asyncio.to_thread(cluster.remove, "slow")
        await asyncio.to_thread(partial(cluster.add, "slow", **room_of("slow")))
    await there.until(
        lambda now: lost["worker"] not in now and Counter(now.values()) == Counter(before.values())
    )
    return time.monotonic() - begin_s


def scale(setting: Setting, folder: Path) -> Findings:
    """Ask for more, and for less again."""
    kinds = {"batch": {"device": "20ms", "min": 1, "max": 3}}
    took_s: dict[str, float] = {}
    # In larger batches, one worker would do.
    config = folder / "models" / "net" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("batch_sizes = [1]\n")
    with deployed(kinds, folder) as there:

        async def play(client: StreamClient) -> None:
            client.rate = setting.more
            took_s["scale_out_s"] = await there.until(lambda now: len(now) == 3)
            await client.calm()
            client.rate = setting.rate
            took_s["scale_in_s"] = await there.until(lambda now: len(now) == 1)

        client = asyncio.run(played(setting, there, play))
        gone = there.cluster.said("keeper")["actors"].keys() - {"worker-batch-0"}
    counted = account(client.asked)
    figures = {
        "scale_requests": counted["requests"],
        "scale_answered_pct": 100 * counted["answered"] / counted["requests"],
        # More is asked than one worker carries, so that some are refused by name.
        "scale_lost": counted["lost"] - counted["lost_by_name"],
        "scale_late_success": counted["late_success"],
    }
    left = sum(name.startswith("worker-") for name in gone)
    return Findings(
        figures | took_s | {"scale_actors_left": left},
        {"goodput_by_second": by_second(client.asked)},
    )


def by_second(asked: Sequence[Inquiry]) -> list[dict[str, float]]:
    """Requests of each second, and the share of them that were answered in time, by kind of SLO."""
    begin_s = asked[0].sent_s
    seconds: dict[int, list[Inquiry]] = {}
    for each in asked:
        seconds.setdefault(int(each.sent_s - begin_s), []).append(each)
    return [
        {
            "second": second,
            "asked": len(those),
            "goodput": sum(each.end == "OK" and not each.is_late for each in those),
        }
        for second, those in sorted(seconds.items())
    ]


def sweep(_setting: Setting, folder: Path) -> Findings:
    """Run a contest here and there, by the same command."""
    words = [sys.executable, "-m", "experiments", "edf_mh", "--seeds", "1", "2", "--only", _CONTEST]
    took_s: dict[str, float] = {}
    tables: dict[str, bytes] = {}

    def run(where: str, *more: str, **variables: str) -> None:
        begin_s = time.monotonic()
        subprocess.run(
            [*words, f"--directory={folder / where}", *more],
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        took_s[f"sweep_{where}_s"] = time.monotonic() - begin_s
        tables[where] = (folder / where / "edf_mh.csv").read_bytes()

    run("local", "--processes=1")
    with ray_cluster() as cluster:
        cluster.add("more")
        run("ray", f"--ray={cluster.address}", **{VARIABLE: str(cluster.python)})
    rows = tables["local"].count(b"\n") - 1
    return Findings(took_s | {"sweep_rows": rows, "sweep_equal": tables["local"] == tables["ray"]})


PARTS: Mapping[str, Callable[[Setting, Path], Findings]] = {
    "faults": faults,
    "scale": scale,
    "sweep": sweep,
}


def measure(setting: Setting) -> Findings:
    """Measure the parts that are asked for."""
    figures: dict[str, float] = {}
    extra: dict[str, object] = {}
    for part in setting.parts:
        with tempfile.TemporaryDirectory(prefix="clockwright-") as scratch:
            found = PARTS[part](setting, Path(scratch))
        figures |= found.figures
        extra |= found.extra
    return Findings(figures, extra)


STUDY = bench("bench-ray", Setting(), measure)
