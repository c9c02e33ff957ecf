"""Workloads played on the card by a `clockwright up`, beside what the simulator says they should come to.

Separate runs on the same server measure what the simulator is told (`experiments.live.calibration`): the time
there and back, and the duration of each network's LOAD and EXEC. The simulator does not know that a front
end has a limited number of cores. Where the cores cannot carry the requests, the live run answers fewer, and
`exec_busy_pct` says that the card was not the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from controller.telemetry import OK, ActionRow, RequestRow, Telemetry
from experiments.gpu.hardware import about, open_accelerator
from experiments.live.calibration import calibrate, calibration_workloads, measured_row
from experiments.live.live_run import LiveModel, LiveRun, Played, play
from experiments.results_file import write_results
from experiments.simulator import Case, Cluster, HostedModel, Network, run, summarise
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Workload
from worker.config import default_cache_dir

_BUCKET_NS = NS_PER_S // 10
# Three rehearsals: one client, several clients, the mix.
_NUM_REHEARSALS = 3
# The simulator's seed.
_SEED = 1


def whole_ns(seconds: float) -> int:
    """Round to a time at which a stretch may begin or end: the nearest tenth of a second, one at least."""
    return max(round(seconds * NS_PER_S / _BUCKET_NS), 1) * _BUCKET_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server of one figure: its device, models and memory."""

    device: str
    models: tuple[LiveModel, ...]
    num_pages: int
    #: Host memory for weights, which models of one folder share.
    host_mib: int
    #: Folder of compiled models; None: the user's.
    cache_dir: Path | None = None

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Ids of all copies of all models."""
        return tuple(model_id for model in self.models for model_id in model.model_ids)

    def play(self, workloads: Sequence[Workload]) -> Played:
        """Start the server, play workloads one after the other, stop the server."""
        options = ["--device", self.device, "--host-mib", str(self.host_mib)]
        options += ["--cache-dir", str(self.cache_dir or default_cache_dir())]
        return play(
            workloads, models=self.models, profile=None, num_pages=self.num_pages, options=options
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchFigures:
    """Figures of a stretch of a run, live or simulated."""

    goodput_rps: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    refused_rps: float
    #: Share of the answered requests whose model was not resident when they came.
    cold_pct: float
    mean_batch_size: float
    exec_busy_pct: float
    load_busy_pct: float


def figures_of(
    requests: Iterable[RequestRow],
    actions: Iterable[ActionRow],
    *,
    origin_ns: int,
    begin_ns: int,
    end_ns: int,
) -> StretchFigures:
    """Sum telemetry rows up.

    Args:
        requests: all of the run.
        actions: all of the run.
        origin_ns: the workload's time 0 on the rows' clock.
        begin_ns: where the counted time begins, since `origin_ns`; the time before is warm-up.
        end_ns: where the counted time ends, since `origin_ns`.
    """
    summary = summarise(requests, actions, bucket_ns=_BUCKET_NS, num_workers=1, origin_ns=origin_ns)
    total = summary.total(begin_ns, end_ns)
    return StretchFigures(
        goodput_rps=summary.rate(total.answered, begin_ns, end_ns),
        p50_ms=total.latency_ns(50) / NS_PER_MS,
        p99_ms=total.latency_ns(99) / NS_PER_MS,
        max_ms=total.latency_ns_max / NS_PER_MS,
        refused_rps=summary.rate(total.num_refused, begin_ns, end_ns),
        cold_pct=100 * total.cold_answered / max(1, total.answered),
        mean_batch_size=total.mean_batch_size,
        exec_busy_pct=100 * summary.utilisation(total.exec_ns, begin_ns, end_ns),
        load_busy_pct=100 * summary.utilisation(total.load_ns, begin_ns, end_ns),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a run that has figures of its own."""

    key: str
    #: Index of the workload that the stretch is a part of.
    workload: int
    #: Since the workload's begin, rounded as `whole_ns` does.
    begin_ns: int
    end_ns: int
    #: Models whose requests and actions count; None: all.
    model_ids: frozenset[str] | None = None

    def figures(
        self, requests: Iterable[RequestRow], actions: Iterable[ActionRow], origin_ns: int
    ) -> StretchFigures:
        """Figures of the stretch; the rows' clock says `origin_ns` at the workload's time 0."""
        ids = self.model_ids
        return figures_of(
            (row for row in requests if ids is None or row.model_id in ids),
            (row for row in actions if ids is None or row.model_id in ids),
            origin_ns=origin_ns,
            begin_ns=self.begin_ns,
            end_ns=self.end_ns,
        )


class Setting(Protocol):
    """What a figure sets: the server, the requests, and which parts of the run count."""

    @property
    def server(self) -> Server:
        """The server on which every workload is played."""

    @property
    def rehearsal_s(self) -> float:
        """Length of the rehearsals with one client alone and with several."""

    @property
    def mix(self) -> Workload:
        """The measured load with other arrivals: beside others, EXEC and LOAD take longer than alone."""

    @property
    def workloads(self) -> Sequence[Workload]:
        """The workloads that are measured."""

    @property
    def stretches(self) -> Sequence[Stretch]:
        """The stretches that have figures."""

    @property
    def seeds(self) -> Sequence[int]:
        """Seeds of the workloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredServer:
    """A server as the simulator models it, from measurements."""

    cluster: Cluster
    network: Network
    #: The measurements in words and numbers, for people.
    about: dict[str, object]

    def case(self, workload: Workload) -> Case:
        """Describe a workload on the measured server."""
        return Case(
            workload=workload,
            cluster=self.cluster,
            network=self.network,
            duration_ns=workload.end_ns,
            seed=_SEED,
        )


def measured(
    server: Server, runs: Sequence[LiveRun], rows: Mapping[str, ProfileRow]
) -> MeasuredServer:
    """Take the simulator's parameters from what was played before anything that counts.

    Args:
        server: the server that played them.
        runs: the rehearsals with one client, several clients, and the mix.
        rows: by model, the durations that the worker reported before.

    Raises:
        ValueError: too little was answered to tell.
    """
    alone, crowd, mix = runs
    calibration = calibrate(alone, crowd)
    hosted: list[HostedModel] = []
    noises: list[Noise] = []
    for model in server.models:
        ids = set(model.model_ids)
        reported = replace(rows[model.model_ids[0]], name=model.name)
        # A network that runs again and again finds more in the card's caches than a network among others.
        told = [_only(ids, each) for each in (mix, crowd, alone)]
        chosen = [each for each in told if any(action.exec for action in each.actions)][:1]
        row, noise = measured_row(reported, chosen) if chosen else (reported, Noise())
        noises.append(noise)
        hosted += [HostedModel(ModelId(model_id), row) for model_id in model.model_ids]
    noise = Noise(exec_sigma=sum(each.exec_sigma for each in noises) / len(noises))
    rows_given = {each.row.name: asdict(each.row) for each in hosted}
    return MeasuredServer(
        cluster=Cluster(
            models=tuple(hosted),
            num_pages=server.num_pages,
            # Calibrated durations contain the copies, so a copy takes no time of its own.
            copy_bytes_per_s=1 << 60,
            start_delay_ns=calibration.start_delay_ns,
            noise=noise,
        ),
        network=calibration.network(),
        about={
            "calibration": calibration.describe(),
            "rows": rows_given,
            "exec_sigma": noise.exec_sigma,
        },
    )


def _only(model_ids: set[str], each: LiveRun) -> LiveRun:
    """A run with the actions of some models alone."""
    actions = tuple(action for action in each.actions if action.model_id in model_ids)
    return replace(each, actions=actions)


def compare(setting: Setting, played: Played) -> tuple[dict[str, float], dict[str, object]]:
    """Put what was played beside its simulation.

    Returns:
        Figures by key, and what else is to be kept.
    """
    first, runs = played.runs[:_NUM_REHEARSALS], played.runs[_NUM_REHEARSALS:]
    answered = {row.model_id for run in runs for row in run.requests if row.outcome == OK}
    figures = {
        "num_instances": float(len(setting.server.model_ids)),
        "num_instances_answered": float(len(answered)),
    }
    given: MeasuredServer | None = None
    try:
        given = measured(setting.server, first, played.rows)
        extra = given.about
    except ValueError as error:
        extra = {"not_simulated": str(error)}
    for index, (workload, live) in enumerate(zip(setting.workloads, runs, strict=True)):
        figures[f"client{index}_late_ms_p99"] = live.report.lateness_ns_p99 / NS_PER_MS
        telemetry = Telemetry(capacity=10_000_000)
        if given is not None:
            run(given.case(workload), telemetry=telemetry)
        for stretch in setting.stretches:
            if stretch.workload == index:
                found = stretch.figures(live.requests, live.actions, live.report.begin_ns)
                simulated = stretch.figures(telemetry.requests, telemetry.actions, 0)
                figures |= _beside(stretch.key, found, simulated if given else None)
    gaps = [value for key, value in figures.items() if key.endswith("_goodput_gap_pct")]
    if gaps:
        figures["worst_goodput_gap_pct"] = max(gaps, key=abs)
    return figures, extra


def _beside(key: str, live: StretchFigures, simulated: StretchFigures | None) -> dict[str, float]:
    """Name the numbers of both, and how far the simulated goodput is off."""
    named = {f"{key}_live_{name}": value for name, value in asdict(live).items()}
    words = f"{key:16} live {live.goodput_rps:8.1f} r/s, p99 {live.p99_ms:7.1f} ms"
    if simulated is not None:
        named |= {f"{key}_simulated_{name}": value for name, value in asdict(simulated).items()}
        words += f"; simulated {simulated.goodput_rps:8.1f} r/s, p99 {simulated.p99_ms:7.1f} ms"
        if live.goodput_rps:
            gap_pct = 100 * (simulated.goodput_rps / live.goodput_rps - 1)
            named[f"{key}_goodput_gap_pct"] = gap_pct
            words += f" ({gap_pct:+.1f} %)"
    print(words, flush=True)
    return named


def produce(name: str, setting: Setting, command: str, directory: Path) -> dict[str, float]:
    """Rehearse, play, simulate and write `NAME.json`."""
    server = setting.server
    alone_and_crowd = calibration_workloads(server.model_ids[0], setting.rehearsal_s)
    played = server.play([*alone_and_crowd, setting.mix, *setting.workloads])
    figures, extra = compare(setting, played)
    write_results(
        name,
        figures,
        command=command,
        seeds=[_SEED, *setting.seeds],
        # The hardware is asked afterwards, because the worker had the card to itself.
        extra={"hardware": about(open_accelerator(server.device)), **extra},
        directory=directory,
    )
    return figures
