"""Workloads against a live server on this machine, and the telemetry that it left of each."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from clockwright.client.operator import Operator
from clockwright.units import NS_PER_MS, PAGE_BYTES, ModelId
from controller.core import SchedulerConfig
from experiments.live.local_server import LocalServer, folders
from experiments.simulator import Case, HostedModel
from experiments.study.sides import RunRows, reported_rows
from experiments.telemetry.tables import read_actions, read_requests
from modelzoo.build import write_model
from modelzoo.profile import Profile, ProfileRow, save_profile
from traces.arrivals import Workload
from traces.client_record import ClientRecord
from traces.replay import AskingStyle
from traces.replay import play as replay

#: This network stands for a model whose costs are modelled: its inputs are 3 kB and are not read.
STAND_IN = "mlp-784-128-10"
# Thousands of models are prepared before a server is ready.
_START_LIMIT_S = 1200.0
# The kernel deals connections out by chance: with so many for each front, no front is without.
_CONNECTIONS_EACH = 8


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
        write_model(self.architecture or STAND_IN, folder / "1" / "model.onnx")
        settings = f"copies = {self.copies}\nbatch_sizes = {list(self.batch_sizes)}\n"
        (folder / "config.toml").write_text(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A case, and the server that is started for it."""

    case: Case
    #: What is served, for people.
    what: str = ""
    #: As `--device` has it; empty: devices are modelled, by the rows of the case. Otherwise of a row only its name, that
    #: of a network of the model zoo, and its batch sizes count.
    device: str = ""
    #: A network that stands for those whose times are modelled.
    stand_in: str = STAND_IN
    #: Front processes, behind one port; 0: the controller serves clients itself.
    fronts: int = 0
    #: The folder in which telemetry stays; empty: it goes.
    telemetry: str = ""
    #: More of the command line, and variables of the process besides this one's.
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def models(self) -> list[LiveModel]:
        """The folders of its model repository."""
        copies = Counter(model.row.name for model in self.case.cluster.models)
        return [
            LiveModel(
                name=name,
                copies=copies[name],
                batch_sizes=tuple(row.exec_ns),
                architecture=name if self.device else self.stand_in,
            )
            for name, row in self.profile.rows.items()
        ]

    @property
    def profile(self) -> Profile:
        """What modelled devices run by."""
        rows = {model.row.name: model.row for model in self.case.cluster.models}
        noise = self.case.cluster.noise
        return Profile(name="case", rows=rows, noise=noise, seed=self.case.seed)

    @contextmanager
    def running(self, *more: str) -> Iterator[tuple[LocalServer, Path]]:
        """The server, and a folder for what is kept while it runs.

        Args:
            more: of its command line.

        Raises:
            RuntimeError: the server did not start.
        """
        with tempfile.TemporaryDirectory() as scratch:
            for model in self.models:
                model.write(Path(scratch) / "models" / model.name)
            save_profile(self.profile, Path(scratch) / "profile.json")
            cluster = self.case.cluster
            arguments = [
                *folders(scratch),
                *("--device", self.device or f"modelled:{scratch}/profile.json"),
                *("--pages", str(cluster.num_pages), *command_line(self.case.scheduler)),
                *(("--workers" if self.device else "--devices"), str(cluster.num_workers)),
                *(("--fronts", str(self.fronts)) if self.fronts else ()),
                *self.options,
                *more,
            ]
            with LocalServer(
                arguments, start_limit_s=_START_LIMIT_S, environment=self.environment
            ) as server:
                yield server, Path(scratch)


def hosted(row: ProfileRow, copies: int = 1) -> tuple[HostedModel, ...]:
    """Copies of a model, by the names that a server gives them."""
    ids = LiveModel(name=row.name, copies=copies, batch_sizes=()).model_ids
    return tuple(HostedModel(ModelId(model_id), row) for model_id in ids)


def unmeasured(name: str, batch_sizes: Sequence[int]) -> ProfileRow:
    """The row of a network of the model zoo that a real device runs: its costs are still unknown."""
    exec_ns = {size: NS_PER_MS * size for size in batch_sizes}
    return ProfileRow(name=name, weights_bytes=PAGE_BYTES, load_ns=NS_PER_MS, exec_ns=exec_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """One workload that was played."""

    #: The run as its client saw it.
    report: ClientRecord
    #: Telemetry of this workload alone.
    rows: RunRows

    @property
    def num_without_row(self) -> int:
        """Requests that were refused before the scheduler heard of them, as an entrance does it: they leave no row."""
        return self.report.num_requests - len(self.rows.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The workloads that one server played."""

    runs: list[LiveRun]
    #: By model, the costs that the worker reported before anything was played.
    rows: dict[str, ProfileRow]
    #: The scheduler's settings as the server reported them.
    policy: str


def play(workloads: Sequence[Workload], served: Served) -> Played:
    """Start a `clockwright up`, play workloads on it one after the other, stop it.

    Args:
        workloads: each begins when the last response of the one before is there.
        served: what it serves; prepared before anything is played.

    Raises:
        RuntimeError: the server did not start.
    """
    style = AskingStyle(connections=max(1, _CONNECTIONS_EACH * served.fronts))
    with tempfile.TemporaryDirectory() as scratch:
        telemetry = served.telemetry or scratch
        with served.running("--telemetry", telemetry) as (server, _):
            with Operator(server.address) as operator:
                rows, policy = reported_rows(operator), operator.status().policy
            reports = [replay(server.address, workload, style=style) for workload in workloads]
        requests = list(read_requests(Path(telemetry)))
        actions = list(read_actions(Path(telemetry)))
    begins_ns = [*(report.begin_ns for report in reports), math.inf]
    runs = []
    for report, (begin_ns, until_ns) in zip(reports, pairwise(begins_ns), strict=True):
        # By its end, which comes after its client has begun; a request's clock may start some ms before it was sent.
        mine = [row for row in requests if begin_ns <= row.departure_ns < until_ns]
        end_ns = max((row.departure_ns for row in mine), default=begin_ns)
        its = [row for row in actions if begin_ns <= row.sent_ns <= end_ns]
        runs.append(LiveRun(report=report, rows=RunRows(mine, its, report.begin_ns)))
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
