"""What it costs when a worker, an actor, a node or the keeper of a Ray cluster is lost under load: `ray.json`.

`make bench NAME=bench-ray`; needs a Python with Ray (`CLOCKWRIGHT_RAY_PYTHON`, see docs/beyond.md). A cluster of three nodes
on this machine: the head has the controller, two fronts and the keeper; the others a kind of modelled workers each. The
client of `bench-restart` asks by streams of both fronts, half of its requests with an SLO that outlasts any change, half with
100 ms, and counts `lost`, `double` and `late_success` as there.

The parts: `faults` kills a worker's process, an actor (whose worker drains), a node, which comes again, and the keeper, in
turn, so many times; `..._full_s` is the time from then until as many workers serve as before, none of them the lost
one. Before and after a keeper's death as many short requests are to be answered. `scale` asks for more than a worker
can carry and then for less, and says when the workers that are wanted serve and when those that are not have left. `sweep`
runs a contest of policies here and as tasks of the cluster, and compares the outcomes. A row of the table is a second of
`faults` or `scale`: what was asked then, how much of it was answered in time, the workers, and what happened.

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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from clockwright.client.operator import Operator
from clockwright.errors import ClockwrightError
from engines.ray.environment import VARIABLE
from experiments.bench.restart import Inquiry, StreamClient, account
from experiments.live.ray_cluster import RayCluster, kinds_file, ray_cluster
from experiments.study.bench import Findings, bench
from experiments.study.pictures import COLOURS, LINES, Curve, Panel, ticks
from experiments.study.study import Row, StudyRecord, chosen
from modelzoo.build import write_model

_LIMIT_S = 600.0
_LOOK_S = 0.1
# An actor is removed after its worker has left.
_REMOVED_S = 30.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSeen:
    """Workers at a time, as the controller says."""

    at_s: float
    #: Names of those that are connected and do not leave; one that has no model yet is one of them.
    names: frozenset[str]
    #: By kind, how many serve.
    ready: Mapping[str, int]
    #: Workers of all kinds that are wanted, and those that leave.
    wanted: int
    draining: int

    @property
    def num_ready(self) -> int:
        """How many serve."""
        return sum(self.ready.values())


@dataclass(slots=True)
class DeployedOnRay:
    """What `clockwright up --ray` has left behind."""

    cluster: RayCluster
    fronts: list[str]
    operator: Operator
    #: How long it took.
    up_s: float
    #: What was seen of the workers, again and again; nothing while the controller is away.
    seen: list[WorkersSeen] = field(default_factory=list)
    #: What happened, and when.
    marks: list[tuple[float, str]] = field(default_factory=list)

    def look(self) -> None:
        """Ask what workers there are now, and keep it."""
        with suppress(ClockwrightError):
            workers = self.operator.workers()
            # Asked later, so that a worker that is not among the names is not counted.
            kinds = self.operator.workers_wanted()
            self.seen.append(
                WorkersSeen(
                    at_s=time.monotonic(),
                    names=frozenset(each.worker_id for each in workers if each.state == "READY"),
                    ready={kind.gpu_kind: kind.ready for kind in kinds},
                    wanted=sum(kind.wanted for kind in kinds),
                    draining=sum(kind.draining for kind in kinds),
                )
            )

    def mark(self, what: str) -> None:
        """Something happens now."""
        self.marks.append((time.monotonic(), what))

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(_LOOK_S)

    async def until(self, done: Callable[[WorkersSeen], bool]) -> float:
        """Wait until something is seen; returns the time until then."""
        begin_s = time.monotonic()
        async with asyncio.timeout(_LIMIT_S):
            while not (self.seen and done(self.seen[-1])):  # noqa: ASYNC110  other processes
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
    watching = asyncio.create_task(there.watch())
    try:
        await client.during(play)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return client


# --- the parts ------------------------------------------------------------------------------------


def faults(setting: Setting, folder: Path) -> Findings:
    """Inject each fault so many times."""
    kinds = {
        "fast": {"device": "500us", "min": 1, "max": 1},
        "slow": {"device": "1ms", "min": 1, "max": 1},
    }
    full_s: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    short: dict[str, list[Inquiry]] = {"before": [], "after": []}
    with deployed(kinds, folder) as there:
        cluster = there.cluster
        placed = sum(
            cluster.said(f"worker-{kind}-0")["node"] == cluster.nodes[kind] for kind in kinds
        )

        async def play(client: StreamClient) -> None:
            await there.until(lambda now: now.num_ready == len(kinds))
            for _ in range(setting.times):
                for fault in FAULTS:
                    await asyncio.sleep(setting.beside_s)
                    begin_s = time.monotonic()
                    there.mark(f"{fault} lost")
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
    return Findings(figures, rows=by_second("faults", client.asked, there.seen, there.marks))


async def inject(there: DeployedOnRay, fault: str) -> float:
    """Lose something; returns how long it took until all was as before."""
    cluster = there.cluster
    before = there.seen[-1].ready
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
    await there.until(lambda now: lost["worker"] not in now.names and now.ready == before)
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
            await asyncio.sleep(setting.beside_s)
            there.mark("more asked")
            client.rate = setting.more
            took_s["scale_out_s"] = await there.until(lambda now: now.num_ready == 3)
            print(f"more asked: 3 workers serve after {took_s['scale_out_s']:.1f} s", flush=True)
            await client.calm()
            there.mark("less asked")
            client.rate = setting.rate
            took_s["scale_in_s"] = await there.until(
                lambda now: (now.num_ready, now.draining) == (1, 0)
            )
            print(f"less asked: one is left after {took_s['scale_in_s']:.1f} s", flush=True)
            await asyncio.sleep(setting.beside_s)

        client = asyncio.run(played(setting, there, play))
        left = others_left(there.cluster)
    counted = account(client.asked)
    figures = {
        "scale_requests": counted["requests"],
        "scale_answered_pct": 100 * counted["answered"] / counted["requests"],
        # More is asked than one worker carries, so that some are refused by name.
        "scale_lost": counted["lost"] - counted["lost_by_name"],
        "scale_late_success": counted["late_success"],
    }
    rows = by_second("scale", client.asked, there.seen, there.marks)
    return Findings(figures | took_s | {"scale_actors_left": left}, rows=rows)


def others_left(cluster: RayCluster) -> int:
    """How many actors of workers there are but one, after the time that it takes to remove them."""
    limit_s = time.monotonic() + _REMOVED_S
    while True:
        actors: Mapping[str, object] = cluster.said("keeper")["actors"]
        left = sum(name.startswith("worker-") for name in actors) - 1
        if left <= 0 or time.monotonic() > limit_s:
            return left
        time.sleep(_LOOK_S)


def by_second(
    part: str,
    asked: Sequence[Inquiry],
    seen: Sequence[WorkersSeen],
    marks: Sequence[tuple[float, str]],
) -> list[Row]:
    """A row for each second: its requests, those that were answered in time, the workers at its end, what happened."""
    begin_s = asked[0].sent_s
    seconds: dict[int, list[Inquiry]] = {}
    for each in asked:
        seconds.setdefault(int(each.sent_s - begin_s), []).append(each)
    at_end = {int(each.at_s - begin_s): each for each in seen}
    happened: dict[int, list[str]] = {}
    for at_s, what in marks:
        happened.setdefault(int(at_s - begin_s), []).append(what)
    rows: list[Row] = []
    ready, wanted = 0, 0
    for second in range(max(seconds) + 1):
        if found := at_end.get(second):
            ready, wanted = found.num_ready, found.wanted
        those = seconds.get(second, [])
        rows.append(
            {
                "part": part,
                "second": second,
                "asked": len(those),
                "goodput": sum(each.end == "OK" and not each.is_late for each in those),
                "ready": ready,
                "wanted": wanted,
                "what": ", ".join(happened.get(second, [])),
            }
        )
    return rows


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
    rows: list[Row] = []
    for part in setting.parts:
        with tempfile.TemporaryDirectory(prefix="clockwright-") as scratch:
            found = PARTS[part](setting, Path(scratch))
        figures |= found.figures
        rows += found.rows
    return Findings(figures, rows=rows)


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """For each part that was measured: what was asked and answered in each second, and the workers."""
    titles = {
        "faults": ("What is lost costs few answers", "Workers come again by themselves"),
        "scale": ("More workers answer more", "Workers come and go as many as are wanted"),
    }
    found: list[list[Panel]] = []
    for part, (answers, workers) in titles.items():
        # The last second is not a whole one.
        rows = [row for row in recorded.rows if row["part"] == part][:-1]
        if not rows:
            continue
        curves = [
            Curve(
                x=[row["second"] for row in rows],
                y=[row[column] for row in rows],
                label=column,
                colour=COLOURS[place % 2],
                line=LINES[place % 2],
            )
            for place, column in enumerate(("asked", "goodput", "wanted", "ready"))
        ]
        marks = {float(row["second"]): row["what"] for row in rows if row["what"]}
        most = max(max(curve.y) for curve in curves[2:])
        found += [
            [Panel(title=answers, x="time, s", y="requests, r/s", curves=curves[:2], marks=marks)],
            [
                Panel(
                    title=workers,
                    x="time, s",
                    y="number of workers",
                    curves=curves[2:],
                    marks=marks,
                    y_ticks=ticks(range(int(most) + 1)),
                )
            ],
        ]
    return found


STUDY = bench(
    "bench-ray",
    Setting(),
    measure,
    title="Workers on Ray: some are lost under load, and some come and go with it.",
    panels=panels,
)
