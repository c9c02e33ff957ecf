"""What front, controller and worker take of their processors per request and per action, live: `costs.json`.

`make bench NAME=bench-controller-costs`, in half a minute. A real `clockwright up` with a modelled device of 1 us, asked by closed loops
of the independent client (`open_loop`): first a model of batch size 1, so that every request is an action, then
one of sizes up to 16. The processor time of the controller's process is that of so many requests and so many
actions; both runs together tell the two apart. The simulator charges what is recorded here
(`experiments.simulator.costs`).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_US
from experiments.bench.live import instant_device
from experiments.live.live_run import LiveModel
from experiments.live.local_server import LocalServer, folders
from experiments.live.open_loop import ClientLoad, OpenLoop
from experiments.live.processor_time import cpu_ns, roles
from experiments.study.bench import Findings, bench
from experiments.telemetry.tables import read_actions

_SLO_MS = 1000
_WARM_S = 0.3
#: Requests under way, so many that the loop has work in every turn, as it has when its cost matters.
_CONCURRENCY = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    rounds: int = 3
    #: Length of each run.
    seconds: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A run of one model: processor time, and what it was for."""

    model: str
    controller_us: float
    worker_us: float
    num_requests: int
    num_actions: int


def sample(setting: Setting) -> list[Sample]:
    """Ask both models in turns, each so many times for so long."""
    models = (
        LiveModel(name="single", copies=1, batch_sizes=(1,)),
        LiveModel(name="batched", copies=1, batch_sizes=tuple(DEFAULT_BATCH_SIZES)),
    )
    runs: list[tuple[str, int, float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            model.write(Path(scratch) / "models" / model.name)
        telemetry = Path(scratch) / "telemetry"
        device = instant_device(Path(scratch))
        with LocalServer([*folders(scratch), *device, "--telemetry", str(telemetry)]) as server:
            pids = roles(server.process.pid)
            for _ in range(setting.rounds):
                for model in models:
                    for length_s in (_WARM_S, setting.seconds):
                        runs.append((model.name, *_ask(server, pids, model.name, length_s)))
        sizes = _actions_by_model(telemetry)
    samples = []
    for name, num_requests, controller_us, worker_us in runs:
        # A model's batches are of one kind in all of its runs.
        share = num_requests / sum(run[1] for run in runs if run[0] == name)
        samples.append(
            Sample(
                model=name,
                controller_us=controller_us,
                worker_us=worker_us,
                num_requests=num_requests,
                num_actions=round(sizes[name] * share),
            )
        )
    return [sample for sample, length in zip(samples, runs, strict=True) if length[1] > 0]


def _ask(
    server: LocalServer, pids: dict[str, list[int]], model: str, seconds: float
) -> tuple[int, float, float]:
    """Number of answers, and processor time of controller and worker in us."""
    load = ClientLoad(
        address=server.address, models=(model,), slo_ms=_SLO_MS, seconds=seconds,
        concurrency=_CONCURRENCY,
    )  # fmt: skip
    with OpenLoop(load) as client:
        before_ns = [cpu_ns(pids[role]) for role in ("controller", "worker")]
        account = client.account()
        after_ns = [cpu_ns(pids[role]) for role in ("controller", "worker")]
    controller_us, worker_us = (
        (after - before) / NS_PER_US for before, after in zip(before_ns, after_ns, strict=True)
    )
    return account.num_ok, controller_us, worker_us


def _actions_by_model(telemetry: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for action in read_actions(telemetry):
        if action.exec is not None:
            found[action.model_id] = found.get(action.model_id, 0) + 1
    return found


def figures_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Split the controller's time into what goes with requests and what goes with actions.

    Raises:
        ValueError: both models had as many requests in an action, so that nothing tells the two apart.
    """
    counts = np.array([(s.num_requests, s.num_actions) for s in samples], np.float64)
    times_us = np.array([s.controller_us for s in samples])
    per_action = {
        model: statistics.fmean(
            s.num_requests / max(s.num_actions, 1) for s in samples if s.model == model
        )
        for model in ("single", "batched")
    }
    if per_action["batched"] < 1.5 * per_action["single"]:
        raise ValueError(
            f"{per_action['batched']:.2f} requests in an action of model batched, {per_action['single']:.2f} "
            "of model single: expected at least half as many more"
        )
    # Each run counts alike: what a request takes in it, not how many there were.
    weights = 1 / counts[:, :1]
    (request_us, action_us), *_ = np.linalg.lstsq(counts * weights, times_us * weights[:, 0])
    worker_us = sum(s.worker_us for s in samples) / sum(s.num_actions for s in samples)
    return {
        "controller_request_us": float(request_us),
        "controller_action_us": float(action_us),
        "worker_action_us": worker_us,
        "single_us": _mean_us(samples, "single"),
        "batched_us": _mean_us(samples, "batched"),
        "single_requests_per_action": per_action["single"],
        "batched_requests_per_action": per_action["batched"],
    }


def _mean_us(samples: Sequence[Sample], model: str) -> float:
    return statistics.median(s.controller_us / s.num_requests for s in samples if s.model == model)


def measure(setting: Setting) -> Findings:
    """Ask, and split what was used."""
    samples = sample(setting)
    return Findings(figures_of(samples), {"samples": [asdict(each) for each in samples]})


STUDY = bench("bench-controller-costs", Setting(), measure, record="costs")
