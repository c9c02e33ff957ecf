"""What several controllers of one directory cost and save: `cells.json`.

Part `live`: two controllers with modelled devices, a front that chooses, and one client at a rate. A model is moved from one
to the other while it is asked; then one of the two is killed.

* `move_lost`: requests that were not answered in time while the model moved; `kill_lost` those after the kill.
* `kill_recover_ms`: from the kill until the last answer that was lost or late was due; 0: none was.

Part `simulated`: four controllers in the simulator, one seed of 3 s per workload. `efficiency_4` is the smallest share, over
the workloads, of the answers in time that the same rule gives if it sees all controllers as they are at each request
(`NAME_perfect_pct`). So it says what old rows cost, and not how far the rule is from the best choice. For comparison, a front
that takes the controllers in turn (`NAME_blind_pct`), and one controller that has all workers (`NAME_pooled_pct`).

Part `picker`: two controllers of one and of three devices behind Envoy, which asks the picker for each call, or takes them
in turn: share of the requests that are answered in time, and by how many points the picker's is larger (`picker_gain_points`).
`experiments.live.envoy` says how to get Envoy.

    python -m experiments bench-cells --parts live simulated picker
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from clockwright.client.client import AsyncClient
from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.clockwork_paper import cases
from experiments.live.asker import AskedOnce, Asker
from experiments.live.envoy import envoy, need_envoy
from experiments.live.local_server import LocalServer
from experiments.simulator import Case
from experiments.simulator.cells import Knows, run_cells
from experiments.simulator.run import run
from experiments.study.bench import bench
from experiments.study.study import chosen
from modelzoo.build import write_model
from traces.arrivals import Bursty, Poisson, Source, Workload

_MODEL, _COLUMNS = "mlp", 16
_NUM_CELLS = 4
PARTS = ("live", "simulated", "picker")
#: Workers of each simulated controller.
_WORKERS = (2, 2, 2, 2)
_UNEVEN = (1, 2, 2, 3)
_CHOICES: dict[str, tuple[Knows, int]] = {
    "directory": ("directory", 1),
    "readers4": ("directory", 4),
    "perfect": ("moment", 1),
    "blind": ("nothing", 1),
}
_LOADS = ("steady", "tight", "bursts", "zoo", "over", "uneven")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    rate: float = 50.0
    slo_ms: float = 1000.0
    calm_s: float = 2.0
    #: The four devices behind Envoy run 80 requests per second.
    picker_rate: float = 60.0
    picker_seconds: float = 10.0
    picker_slo_ms: float = 500.0
    simulated_seconds: float = 3.0
    seed: int = 1
    loads: tuple[str, ...] = _LOADS
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        chosen("part", self.parts, PARTS)
        chosen("load", self.loads, _LOADS)


# --- live -----------------------------------------------------------------------------------------


def _asker(client: AsyncClient, rate: float, slo_ms: float, seed: int) -> Asker[AskedOnce]:
    """Ask for the model at random times of a mean rate."""
    random, row = np.random.default_rng(seed), np.ones((1, _COLUMNS), np.float32)

    async def ask(_: AskedOnce) -> None:
        await client.infer(_MODEL, {"input": row}, slo_ms=slo_ms)

    return Asker(AskedOnce, ask, lambda: float(random.exponential(1 / rate)))


def _write(folder: Path) -> Path:
    write_model("mlp-16-8-4", folder / _MODEL / "1" / "model.onnx")
    return folder


def _serve(
    stack: ExitStack, scratch: Path, name: str, device: str, *more: str, models: Path | None = None
) -> LocalServer:
    flags = ["--device", device, "--cells", f"file:{scratch}/cells", *more]
    flags += ["--cache-dir", f"{scratch}/{name}"]
    flags += [] if models is None else ["--models", str(models)]
    server = LocalServer(flags)
    stack.callback(server.stop)
    # With no model it says so at once.
    server.wait_for("ready: ")
    return server


def _front(stack: ExitStack, scratch: Path, command: str) -> str:
    served = LocalServer(["--cells", f"file:{scratch}/cells"], command=command)
    stack.callback(served.stop)
    return served.wait_for("listening on ").split()[-1]


def _move(scratch: Path, folder: Path, at: str, to: str) -> None:
    command = [sys.executable, "-m", "clockwright.cli", "cells", "move", str(folder)]
    flags = ["--cells", f"file:{scratch}/cells", "--server", at, "--to", to]
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)


async def _play_live(setting: Setting, scratch: Path, stack: ExitStack) -> dict[str, float]:
    models = _write(scratch / "models")
    one = await asyncio.to_thread(_serve, stack, scratch, "one", "modelled:5ms")
    two = await asyncio.to_thread(_serve, stack, scratch, "two", "modelled:5ms")
    address = await asyncio.to_thread(_front, stack, scratch, "front")
    folder = models / _MODEL
    add = [sys.executable, "-m", "clockwright.cli", "models", "add", str(folder), "--server"]
    await asyncio.to_thread(
        subprocess.run, [*add, one.address], check=True, stdout=subprocess.DEVNULL
    )
    async with (
        AsyncClient(address) as client,
        _asker(client, setting.rate, setting.slo_ms, setting.seed) as asker,
    ):
        await asyncio.sleep(setting.calm_s)
        began_s = time.monotonic()
        await asyncio.to_thread(_move, scratch, folder, one.address, two.address)
        await asyncio.sleep(setting.calm_s)
        # Both serve it, and then the one that most requests go to is killed.
        await asyncio.to_thread(
            subprocess.run, [*add, one.address], check=True, stdout=subprocess.DEVNULL
        )
        await asyncio.sleep(setting.calm_s)
        two.process.send_signal(signal.SIGKILL)
        # Its workers end with it.
        killed_s = time.monotonic()
        await asyncio.sleep(2 * setting.calm_s)
    _say_faults(asker.asked)
    slo_s = setting.slo_ms / 1000
    moving = [a for a in asker.asked if began_s - slo_s <= a.sent_s < killed_s - slo_s]
    after = [a for a in asker.asked if a.sent_s >= killed_s - slo_s]
    last_s = max((a.sent_s + slo_s for a in after if a.fault), default=killed_s)
    return {
        "move_requests": len(moving),
        "move_lost": sum(bool(a.fault) for a in moving),
        "kill_requests": len(after),
        "kill_lost": sum(bool(a.fault) for a in after),
        "kill_recover_ms": 1000 * (last_s - killed_s),
    }


def _say_faults(asked: Sequence[AskedOnce]) -> None:
    print(Counter(":".join(each.fault.split(":")[:2])[:100] for each in asked if each.fault))


def _live(setting: Setting) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        return asyncio.run(_play_live(setting, Path(scratch), stack))


# --- behind Envoy ---------------------------------------------------------------------------------


async def _ask_through(setting: Setting, address: str) -> tuple[int, int]:
    async with (
        AsyncClient(address) as client,
        _asker(client, setting.picker_rate, setting.picker_slo_ms, setting.seed) as asker,
    ):
        await asyncio.sleep(setting.picker_seconds)
    _say_faults(asker.asked)
    in_time = sum(
        not a.fault and 1000 * (a.done_s - a.sent_s) <= setting.picker_slo_ms for a in asker.asked
    )
    return in_time, len(asker.asked)


def _picker(setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        models = _write(scratch / "models")
        cells = [
            _serve(
                stack, scratch, f"of-{n}", "modelled:50ms", "--devices", str(n), models=models
            ).address
            for n in (1, 3)
        ]
        picker = _front(stack, scratch, "picker")
        for name, asked in (("picker", picker), ("in_turn", None)):
            with envoy(asked, cells) as address:
                in_time, num = asyncio.run(_ask_through(setting, address))
                found[f"picker_{name}_in_time_pct"] = 100 * in_time / num
    gain = found["picker_picker_in_time_pct"] - found["picker_in_turn_in_time_pct"]
    return found | {"picker_gain_points": gain}


# --- in the simulator -----------------------------------------------------------------------------


def _poisson(num: int, rate_rps: float, slo_ms: int, setting: Setting) -> Source:
    end_ns = round(setting.simulated_seconds * NS_PER_S)
    slo_ns = slo_ms * NS_PER_MS
    return Poisson(
        models=range(num), rate_rps=rate_rps, slo_ns=slo_ns, end_ns=end_ns, seed=setting.seed
    )


def _case(load: str, setting: Setting) -> Case:
    num = 60 if load == "zoo" else 15
    models = cases.zoo(num, 3) if load == "zoo" else cases.resnets(num)
    end_ns = round(setting.simulated_seconds * NS_PER_S)
    rates = {"steady": 5000, "tight": 3400, "zoo": 2000, "over": 8500, "uneven": 5000, "bursts": 0}
    source = _poisson(num, rates[load], 25 if load == "tight" else 100, setting)
    if load == "bursts":
        pause_ns = 300 * NS_PER_MS
        source = Bursty(
            models=range(num), rate_rps=5600, burst_ns=pause_ns, pause_ns=pause_ns,
            slo_ns=100 * NS_PER_MS, end_ns=end_ns, seed=setting.seed,
        )  # fmt: skip
    made = cases.case_of(models, seed=setting.seed, end_ns=end_ns, num_gpus=1)
    names = tuple(model.model_id for model in models)
    return replace(made, workload=Workload(models=names, sources=(source,)))


def _simulated(setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    shares = []
    for load in setting.loads:
        case = _case(load, setting)
        workers = _UNEVEN if load == "uneven" else _WORKERS
        pooled = run(replace(case, cluster=replace(case.cluster, num_workers=sum(workers))))
        chosen_by = {
            name: run_cells(case, workers, knows=knows, num_readers=readers)
            for name, (knows, readers) in _CHOICES.items()
        }
        for name, played in chosen_by.items():
            found[f"{load}_{name}_pct"] = 100 * played.in_time / played.arrived
        found[f"{load}_pooled_pct"] = 100 * pooled.summary.total().answered / pooled.num_requests
        found[f"{load}_tried_twice"] = chosen_by["directory"].tried_twice
        share = chosen_by["directory"].in_time / max(chosen_by["perfect"].in_time, 1)
        found[f"{load}_efficiency"] = share
        shares.append(share)
        print(load, {k: round(v, 3) for k, v in found.items() if k.startswith(load)}, flush=True)
    return {f"efficiency_{_NUM_CELLS}": min(shares), **found}


def measure(setting: Setting) -> dict[str, float]:
    """Measure the parts.

    Raises:
        ConfigError: there is no Envoy, which a part needs; nothing was measured.
    """
    if "picker" in setting.parts:
        need_envoy()
    figures: dict[str, float] = {}
    parts: dict[str, Callable[[Setting], dict[str, float]]] = {
        "live": _live,
        "simulated": _simulated,
        "picker": _picker,
    }
    for part in setting.parts:
        figures |= parts[part](setting)
    return figures


STUDY = bench("bench-cells", Setting(), measure)
