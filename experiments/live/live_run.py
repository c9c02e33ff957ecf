"""Workloads against a live server on this machine, and the telemetry that it left of each."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clockwright.operator import Operator
from clockwright.units import NS_PER_MS
from controller.core import SchedulerConfig
from controller.telemetry import ActionRow, RequestRow
from experiments.live.local_server import LocalServer
from experiments.telemetry.tables import read_actions, read_requests
from modelzoo.build import write_model
from modelzoo.profile import Profile, ProfileRow, save_profile
from traces.arrivals import Workload
from traces.replay import ReplayReport, replay

# This network stands for a model whose costs are modelled: its inputs are 3 kB and nobody looks at them.
_STAND_IN = "mlp-784-128-10"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """A folder of the model repository."""

    #: With more than one copy, the models are NAME-0, NAME-1, ...
    name: str
    copies: int
    batch_sizes: tuple[int, ...]
    #: A name of the model zoo; None: any network, where a profile models its times.
    architecture: str | None = None

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Names of all copies on the server."""
        if self.copies == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.copies))

    def write(self, folder: Path) -> None:
        """Write the network and its settings into a folder."""
        write_model(self.architecture or _STAND_IN, folder / "1" / "model.onnx")
        settings = f"copies = {self.copies}\nbatch_sizes = {list(self.batch_sizes)}\n"
        (folder / "config.toml").write_text(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """One workload that was played."""

    #: The run as its client saw it.
    report: ReplayReport
    #: Rows of this workload alone. Its time 0 is `report.begin_ns` of them.
    requests: tuple[RequestRow, ...]
    actions: tuple[ActionRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The workloads that one server played."""

    runs: list[LiveRun]
    #: By model, the costs that the worker reported before anything was played.
    rows: dict[str, ProfileRow]
    #: The scheduler's settings as the server reported them.
    policy: str


def play(
    workloads: Sequence[Workload],
    *,
    models: Sequence[LiveModel],
    profile: Profile | None,
    num_pages: int,
    scheduler: SchedulerConfig | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Played:
    """Start a `clockwright up` with one worker, play workloads on it one after the other, stop it.

    Args:
        workloads: each begins when the last response of the one before is there.
        models: what it serves; prepared before anything is played.
        profile: profile of a modelled device; None: the processor, or the device in `options`, runs the models.
        num_pages: size of the weights cache.
        scheduler: policy and look-ahead, all that the command line has of it; None: the server's own.
        options: more of `clockwright up`; the last one given of a kind holds.
        environment: variables that the server has besides this process's.

    Raises:
        RuntimeError: the server did not start.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, telemetry = Path(scratch) / "models", Path(scratch) / "telemetry"
        for model in models:
            model.write(folder / model.name)
        device = "cpu"
        if profile is not None:
            save_profile(profile, Path(scratch) / "profile.json")
            device = f"modelled:{scratch}/profile.json"
        arguments = [
            *("--models", str(folder), "--telemetry", str(telemetry), "--device", device),
            *("--pages", str(num_pages), "--cache-dir", f"{scratch}/cache"),
            *command_line(scheduler or SchedulerConfig()),
            *options,
        ]
        with LocalServer(arguments, environment=environment) as server:
            with Operator(server.address) as operator:
                rows, policy = _rows(operator), operator.status().policy
            reports = [replay(server.address, workload) for workload in workloads]
        requests, actions = list(read_requests(telemetry)), list(read_actions(telemetry))
    runs = []
    for report in reports:
        # A request's clock may start some ms before it was sent, so rows are counted and not looked up.
        num_requests = report.num_open + report.num_closed
        mine, requests = requests[:num_requests], requests[num_requests:]
        end_ns = max((row.departure_ns for row in mine), default=report.begin_ns)
        its = [row for row in actions if report.begin_ns <= row.sent_ns <= end_ns]
        runs.append(LiveRun(report=report, requests=tuple(mine), actions=tuple(its)))
    return Played(runs=runs, rows=rows, policy=policy)


def command_line(scheduler: SchedulerConfig) -> tuple[str, ...]:
    """Spell a scheduler's settings as `clockwright up` reads them.

    Raises:
        ValueError: it has settings that the command line lacks.
    """
    said = SchedulerConfig(policy=scheduler.policy, lookahead_ns=scheduler.lookahead_ns)
    if said != scheduler:
        raise ValueError(f"scheduler is {scheduler}, expected no more than {said}")
    lookahead_ms = scheduler.lookahead_ns / NS_PER_MS
    return ("--policy", scheduler.policy, "--lookahead-ms", f"{lookahead_ms:g}")


def _rows(operator: Operator) -> dict[str, ProfileRow]:
    return {
        model.model_id: ProfileRow(
            name=model.model_id,
            weights_bytes=model.weights_bytes,
            load_ns=model.load_ns,
            exec_ns={batch.batch_size: batch.exec_ns for batch in model.exec},
        )
        for model in operator.models()
    }
