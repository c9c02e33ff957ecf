"""The card under a mixed load of hundreds of instances: how late, how predictable, and nothing allocated.

`live`: behind a controller, requests over gRPC. From the telemetry's action rows (`experiments.gpu.lateness`): how late
EXEC and LOAD began, how far their durations and their ends were from what the controller had predicted.

`lanes`: the worker's lanes alone, in this process, driven as fast as they go: how often device memory was
taken meanwhile, which is to be never, and how much of it was free after and before.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S, ActionId, ModelId
from clockwright.wire.actions import Action, ActionError, EvictWeights, Infer, LoadWeights
from controller.telemetry.tables import OK
from experiments.gpu.hardware import BareDevice, Room, about, open_accelerator
from experiments.gpu.lateness import action_figures
from experiments.gpu.live import CardSetting
from experiments.live.live_run import LiveRun, play
from experiments.study.bench import Findings, bench
from traces.arrivals import Poisson, Workload
from worker.devices.accelerator import Accelerator
from worker.devices.gpu import TorchModel
from worker.lane_threads import LaneThreads, Outcome

_SLO_NS = 100 * NS_PER_MS
_LATEST_NS = 1 << 62
# Actions that the lanes are given at a time: the EXEC that runs, EXECs queued behind it, and LOADs.
_IN_FLIGHT = 4


# Copies of each network, and requests per second of them all.
_NETWORKS = {
    "resnet50_v1": (150, 120.0),
    "resnet18_v1": (100, 120.0),
    "mobilenet0.25": (50, 60.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(CardSetting):
    """The server, its clients, and how long they ask: three quarters of all with a controller, then without."""

    seconds: float = 20.0
    #: Empty: three networks, half of whose instances are resident at a time.
    architecture: str = ""
    pages: int = 700
    num_models: int = 300
    host_mib: int = 1024
    #: Memory of a device without a controller for kernels, and for inputs and outputs.
    arena_mib: int = 192
    io_mib: int = 128

    @property
    @override
    def copies(self) -> dict[str, int]:
        if self.architecture:
            return {self.architecture: self.num_models}
        return {name: count for name, (count, _) in _NETWORKS.items()}

    @property
    def workload(self) -> Workload:
        """Poisson arrivals, all copies of a model alike."""
        rates_rps = [rate_rps for _, rate_rps in _NETWORKS.values()]
        sources, first = [], 0
        for number, count in enumerate(self.copies.values()):
            rate_rps = sum(rates_rps) if self.architecture else rates_rps[number]
            sources.append(
                Poisson(
                    models=range(first, first + count),
                    rate_rps=rate_rps * self.share,
                    slo_ns=_SLO_NS,
                    end_ns=round(self.seconds * 3 / 4 * NS_PER_S),
                    seed=self.seed + number,
                )
            )
            first += count
        return Workload(models=self.model_ids, sources=tuple(sources))

    @property
    def room(self) -> Room:
        """Memory for the measurement without a controller."""
        sizes = (self.arena_mib << 20, self.io_mib << 20, self.host_mib << 20)
        return Room(self.pages, *sizes)


def live_figures(setting: Setting, run: LiveRun) -> dict[str, float]:
    """Figures of the workload served over gRPC."""
    answered = sum(request.outcome == OK for request in run.rows.requests)
    return {
        "live_num_instances": float(len(setting.model_ids)),
        "live_goodput_pct": 100 * answered / max(1, run.report.num_requests),
        "live_num_without_row": float(run.num_without_row),
        "live_client_late_ms_p99": run.report.lateness_ns_p99 / NS_PER_MS,
        **{f"live_{key}": value for key, value in action_figures(run.rows.actions).items()},
    }


async def lanes(setting: Setting, accelerator: Accelerator) -> dict[str, float]:
    """Drive the lanes of a worker in this process: one LOAD or Infer after the other, models at random."""
    cache_dir = Path(setting.cache_dir) if setting.cache_dir else None
    bench = BareDevice(accelerator, setting.room, cache_dir=cache_dir)
    prepared = [
        await bench.model(model.architecture or model.name, model.batch_sizes)
        for model in setting.served.models
    ]
    models = [
        replace(each, model_id=ModelId(model_id))
        for each, model in zip(prepared, setting.served.models, strict=True)
        for model_id in model.model_ids
    ]
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    runtime = LaneThreads(bench.device, outcomes.put)
    runtime.start()
    for model in models:
        runtime.add_model(model)
    try:
        taken, free = bench.device.num_allocations, accelerator.free_bytes()
        until_s = time.monotonic() + setting.seconds / 4
        done = await asyncio.to_thread(
            _drive, runtime, models, outcomes, setting.pages, setting.seed, until_s
        )
        taken = bench.device.num_allocations - taken
        still_free = accelerator.free_bytes()
    finally:
        await asyncio.to_thread(runtime.stop)
        await bench.close()
    figures = {
        "lanes_num_instances": float(len(models)),
        **{f"lanes_num_{kind}": float(count) for kind, count in sorted(done.items())},
        "lanes_memory_taken_while_serving": float(taken),
    }
    if free is not None and still_free is not None:
        # Free memory counts every user of the card, and so onnxruntime, which torch's counter cannot see.
        figures["lanes_free_bytes_change"] = float(still_free - free)
    return figures


def _drive(
    runtime: LaneThreads[TorchModel],
    models: Sequence[TorchModel],
    outcomes: queue.SimpleQueue[Outcome],
    num_pages: int,
    seed: int,
    until_s: float,
) -> dict[str, int]:
    """Keep the lanes busy; returns how many actions of each kind were done.

    Raises:
        RuntimeError: an action failed.
    """
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    #: Actions without a result, and their models.
    waiting: dict[ActionId, ModelId] = {}
    #: Resident models, the longest unused first.
    resident: dict[ModelId, TorchModel] = {}
    window = {"earliest_ns": 0, "latest_ns": _LATEST_NS, "expected_duration_ns": 1}

    def submit(action: Action, payload: Sequence[bytes] = ()) -> None:
        waiting[action.action_id] = action.model_id
        done[type(action).__name__] += 1
        runtime.submit(action, payload)

    def hear() -> None:
        result, _ = outcomes.get()
        if result.error is not ActionError.NONE:
            raise RuntimeError(f"action {result.action_id}: {result.error.name}, {result.message}")
        del waiting[result.action_id]

    ids = map(ActionId, itertools.count())
    while time.monotonic() < until_s or not done:
        model = rng.choice(models)
        name = model.model_id
        if name not in resident:
            held = sum(each.num_pages for each in resident.values())
            while held + model.num_pages > num_pages:
                unused = resident.pop(next(iter(resident)))
                held -= unused.num_pages
                while unused.model_id in waiting.values():
                    hear()
                submit(EvictWeights(action_id=next(ids), model_id=unused.model_id))
            submit(LoadWeights(action_id=next(ids), model_id=name, **window))
        resident[name] = resident.pop(name, model)
        size = rng.choice(list(model.exec_ns))
        infer = Infer(action_id=next(ids), model_id=name, batch_size=size, rows=(size,), **window)
        submit(infer, [bytes(spec.batch_bytes(size)) for spec in model.inputs])
        while len(waiting) > _IN_FLIGHT:
            hear()
    while waiting:
        hear()
    return dict(done)


def measure(setting: Setting) -> Findings:
    """Measure both parts, and ask the hardware when the worker has gone."""
    (run,) = play([setting.workload], setting.served).runs
    figures = live_figures(setting, run)
    accelerator = open_accelerator(setting.device)
    hardware = about(accelerator)
    return Findings(
        figures | asyncio.run(lanes(setting, accelerator)), extra={"hardware": hardware}
    )


STUDY = bench("gpu-serve", Setting(), measure, record="serve", folder="gpu")
