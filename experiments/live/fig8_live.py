"""The paper's evaluation live: Figure 8's replay and the scale row on modelled GPUs, beside the simulator.

Everything but the GPUs is real: a `clockwright up` with its front, its controller and a worker process per GPU,
and the independent client of `open_loop`, all on two cores of this machine: the first for the controller's
process, the second for workers and client, unless the rehearsal shows that one of them would be full; then
all run where the kernel puts them. Workers model their devices
(`modelled:`), that is, they wait as long as Table 1 says. As in the paper's large runs, whose workers made up
the inputs, requests bring next to none: 4 bytes.

The two lines of the table, both of 4,026 models and an SLO of 100 ms:

* `gpus6`: the replay of Figure 8 (`azure_replay`), 4,860.6 r/s on 6 GPUs;
* `gpus20`: the paper's scale row, 6,174 r/s on 20 GPUs.

The trace is the generator's, or a file that `--trace` names. The stretch begins with a full hour; its rate is
scaled so that the measured part has the line's rate on average. Requests of the warm-up before it, in which
weights are loaded, do not count. A request's latency counts from when it was due, so what the client is late is
part of it, and is told besides. The client sends and reads every half millisecond.

The simulator is given the same requests and what was measured of the same server before: the processor time
that its controller takes per request, in a stretch of the same replay with other arrivals; and the delays of
links and lanes on an idle machine (`experiments.live.calibration`), less the controller's share of them. One
function (`figures_of_side`) sums up both sides.

    python -m experiments fig8_live --seconds 600
    python -m experiments fig8_live --seconds 20 --warmup 5 --lines gpus6 --directory /tmp/live

`--slower K` stretches all times of devices and SLOs K-fold and asks as much less often, for a machine that has
other work.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from controller.telemetry import OK, ActionRow, RequestRow
from experiments.clockwork_paper import azure_replay
from experiments.live.calibration import Calibration, calibrate, calibration_workloads
from experiments.live.live_run import LiveModel, command_line, play
from experiments.live.local_server import LocalServer
from experiments.live.open_loop import Account, ClientLoad, End, OpenLoop, write_schedule
from experiments.live.processor_time import cpu_ns, roles
from experiments.native import TARGET
from experiments.results_file import RESULTS, write_results
from experiments.simulator import Case, CpuCosts, Network
from experiments.study.compared import POLICIES, run_rows
from experiments.study.report import write_csv
from modelzoo.profile import Profile, save_profile
from traces.minutes import MinuteTrace

# A full hour, the trace's busiest minute, begins one minute after the generated trace.
_BEGIN_NS = azure_replay.NS_PER_MINUTE
# Far below an SLO, and above what 4,861 requests/s are apart.
_CLIENT_TICK_US = 500
# Its one input is of 4 bytes.
_STAND_IN, _SHAPE = "echo-1", (1, 1)
_START_LIMIT_S = 1200.0
# Beyond this part of a core, what has to run on it waits for it more than it runs.
_CORE_FULL = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A cluster and its rate."""

    name: str
    num_gpus: int
    rate_rps: float


LINES = (
    Line(name="gpus6", num_gpus=6, rate_rps=azure_replay.Setting().rate_rps),
    Line(name="gpus20", num_gpus=20, rate_rps=6174.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How long, and on what."""

    lines: tuple[Line, ...] = LINES
    policy: str = "edf_mh"
    #: Measured time of each line, and the time before it that does not count.
    seconds: float = 600.0
    warmup_s: float = 30.0
    #: Length of the stretch that the controller's cost is taken from, then of each closed loop of the calibration.
    calibration_s: float = 10.0
    closed_loop_s: float = 3.0
    #: Functions of the generated trace, and instances of each architecture.
    num_functions: int = 17_000
    num_copies: int = 66
    slower: int = 1
    #: The server runs what `make native` made.
    native: bool = False
    #: The controller's process has the first core, its workers and the client share the second.
    pinned: bool = True
    #: Front processes; 0: the controller is the front, too.
    fronts: int = 0
    connections: int = 4
    seed: int = 8

    @property
    def slo_ms(self) -> int:
        """The SLO of every request."""
        return 100 * self.slower

    @property
    def environment(self) -> dict[str, str]:
        """What a server's process needs besides this one's variables."""
        # With the safe path, nothing of the working folder comes before what is compiled.
        return {"PYTHONPATH": str(TARGET), "PYTHONSAFEPATH": "1"} if self.native else {}

    def replay(self, line: Line, seed: int) -> azure_replay.Setting:
        """The replay of one line: its cluster, and arrivals drawn from `seed`."""
        length_s = self.warmup_s + self.seconds
        return azure_replay.Setting(
            num_functions=self.num_functions,
            num_copies=self.num_copies,
            num_workers=line.num_gpus,
            rate_rps=line.rate_rps / self.slower,
            num_minutes=2 + -(-round(length_s) // 60),
            slo_ns=self.slo_ms * NS_PER_MS,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFigures:
    """One side of a line: live or simulated. Latencies are those of answers in time."""

    offered: int
    offered_rps: float
    goodput_rps: float
    goodput_pct: float
    #: Answers after the SLO, and requests that were given up because theirs would be.
    late_per_million: float
    refused_per_million: float
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLine:
    """A line of the table, measured."""

    line: Line
    live: SideFigures
    simulated: SideFigures
    costs: CpuCosts
    calibration: Calibration
    #: Controller and all else had a core each.
    pinned: bool
    #: By process (`roles`, and the client): processor time per offered request in us, then its share of a core.
    cpu_us: dict[str, float]
    busy: dict[str, float]
    #: Requests by how they ended.
    ends: dict[str, dict[str, int]]
    client_late_p50_ms: float
    client_late_p99_ms: float
    client_late_max_ms: float
    #: Live goodput of the first and of the last tenth of the measured time, in per cent of what was asked.
    first_tenth_pct: float
    last_tenth_pct: float
    remarks: tuple[str, ...]
    load_averages: tuple[float, float]

    @property
    def gap_pct(self) -> float:
        """How much more the simulator answers."""
        return 100 * (self.simulated.goodput_pct / max(self.live.goodput_pct, 1e-9) - 1)


# --- the case --------------------------------------------------------------------------------------


def case_of(setting: Setting, line: Line, trace: MinuteTrace, *, seed: int, seconds: float) -> Case:
    """Describe so much of a line's replay: workload and cluster, with nothing charged."""
    replay = setting.replay(line, seed)
    case = azure_replay.case_of(replay, trace, POLICIES[setting.policy])
    length_ns = round(seconds * NS_PER_S)
    stretch = case.workload.sliced(_BEGIN_NS, _BEGIN_NS + length_ns)
    factor = replay.rate_rps * seconds / stretch.expected_requests()
    models = tuple(
        replace(
            model,
            row=replace(
                model.row,
                load_ns=model.row.load_ns * setting.slower,
                exec_ns={size: ns * setting.slower for size, ns in model.row.exec_ns.items()},
            ),
        )
        for model in case.cluster.models
    )
    return replace(
        case,
        workload=stretch.scaled(factor),
        cluster=replace(case.cluster, models=models),
        duration_ns=length_ns,
    )


def live_models(case: Case) -> list[LiveModel]:
    """The folders of a model repository that hold the case's models."""
    copies: dict[str, int] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for model in case.cluster.models:
        copies[model.row.name] = copies.get(model.row.name, 0) + 1
        sizes[model.row.name] = tuple(model.row.exec_ns)
    return [
        LiveModel(name=name, copies=count, batch_sizes=sizes[name], architecture=_STAND_IN)
        for name, count in copies.items()
    ]


def profile_of(case: Case) -> Profile:
    """What the case's modelled devices run by."""
    rows = {model.row.name: model.row for model in case.cluster.models}
    return Profile(name="table1", rows=rows, noise=case.cluster.noise, seed=case.seed)


# --- live ------------------------------------------------------------------------------------------


@contextmanager
def serving(setting: Setting, case: Case) -> Iterator[tuple[LocalServer, Path]]:
    """A server with the case's cluster, and a folder for what is kept while it runs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "models"
        for model in live_models(case):
            model.write(folder / model.name)
        save_profile(profile_of(case), Path(scratch) / "profile.json")
        arguments = [
            *("--models", str(folder), "--device", f"modelled:{scratch}/profile.json"),
            *("--pages", str(case.cluster.num_pages), "--cache-dir", f"{scratch}/cache"),
            *("--workers", str(case.cluster.num_workers)),
            *command_line(case.scheduler),
        ]
        if setting.fronts:
            arguments += ["--fronts", str(setting.fronts)]
        with LocalServer(
            arguments, start_limit_s=_START_LIMIT_S, environment=setting.environment
        ) as server:
            yield server, Path(scratch)


def ask(
    server: LocalServer, case: Case, scratch: Path, setting: Setting
) -> tuple[Account, dict[str, float]]:
    """Play a case to a server: the client's account, and each process's time over it in us."""
    write_schedule(scratch / "schedule.npy", case.workload)
    load = ClientLoad(
        address=server.address,
        models=case.workload.models,
        slo_ms=setting.slo_ms,
        seconds=case.duration_ns / NS_PER_S,
        schedule=str(scratch / "schedule.npy"),
        connections=setting.connections,
        tick_us=_CLIENT_TICK_US,
        shape=_SHAPE,
    )
    pids = roles(server.process.pid)
    with _pinned(pids, setting), OpenLoop(load) as client:
        before_ns = {role: cpu_ns(some) for role, some in pids.items()}
        account = client.account()
        used_us = {
            role: (cpu_ns(some) - before_ns[role]) / NS_PER_US for role, some in pids.items()
        }
    return account, used_us | {"client": account.cpu_us * account.num_offered}


@contextmanager
def _pinned(pids: Mapping[str, Sequence[int]], setting: Setting) -> Iterator[None]:
    """Give the controller a core, and another to all else; a client that is started now keeps to that."""
    cores = sorted(os.sched_getaffinity(0))
    if not setting.pinned or setting.fronts or len(cores) < 2:
        yield
        return
    for role, some in pids.items():
        for pid in some:
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):  # the thread has ended meanwhile
                    os.sched_setaffinity(int(task.name), {cores[role != "controller"]})
    os.sched_setaffinity(0, {cores[1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def since_due(account: Account) -> Account:
    """The same with the client's own lateness counted as the server's."""
    return replace(account, sent_ns=account.due_ns)


# --- simulated -------------------------------------------------------------------------------------


def simulate(case: Case) -> Account:
    """Run a case on virtual time: the account of a client that is never late and has no way to go."""
    arrivals_ns: list[np.ndarray[Any, Any]] = []
    departures_ns: list[np.ndarray[Any, Any]] = []
    ends: list[End] = []

    def take(requests: Sequence[RequestRow], _actions: Sequence[ActionRow]) -> None:
        arrivals_ns.append(np.array([row.arrival_ns for row in requests], np.int64))
        departures_ns.append(np.array([row.departure_ns for row in requests], np.int64))
        ends.extend(_END_OF.setdefault(row.outcome, ("refused", row.outcome)) for row in requests)

    run_rows(case, take)
    due_ns, done_ns = np.concatenate(arrivals_ns), np.concatenate(departures_ns)
    order = np.argsort(due_ns, kind="stable")
    return Account(
        due_ns=due_ns[order],
        sent_ns=due_ns[order],
        done_ns=done_ns[order],
        ends=[ends[index] for index in order],
        slo_ms=case.workload.sources[0].slo_ns // NS_PER_MS,
        seconds=case.duration_ns / NS_PER_S,
    )


_END_OF: dict[str, End] = {OK: ("ok", "")}


def figures_of_side(account: Account, begin_s: float, end_s: float) -> SideFigures:
    """Sum up the requests that were due between two times."""
    part = account.part(begin_s, end_s)
    offered = max(part.num_offered, 1)
    in_time = part.num_ok - part.num_late
    late = part.num_late + part.refusals["LATE"]
    return SideFigures(
        offered=part.num_offered,
        offered_rps=part.num_offered / part.seconds,
        goodput_rps=part.goodput_rps,
        goodput_pct=100 * in_time / offered,
        late_per_million=1e6 * late / offered,
        refused_per_million=1e6 * (offered - in_time - late) / offered,
        p50_ms=part.latency_ms(50),
        p99_ms=part.latency_ms(99),
        max_ms=part.latency_ms(100),
    )


# --- all of it -------------------------------------------------------------------------------------


def calibrated(case: Case, setting: Setting) -> Calibration:
    """Measure the delays of links and lanes, with one model on one worker that has nothing else to do."""
    row = case.cluster.models[0].row
    model = LiveModel(
        name=row.name, copies=1, batch_sizes=tuple(row.exec_ns), architecture=_STAND_IN
    )
    played = play(
        calibration_workloads(row.name, setting.closed_loop_s),
        models=[model],
        profile=profile_of(case),
        num_pages=case.cluster.num_pages,
        scheduler=case.scheduler,
        environment=setting.environment,
    )
    return calibrate(*played.runs)


def beside(case: Case, calibration: Calibration, costs: CpuCosts) -> Case:
    """The case as measured: what the controller takes is charged, and is no delay of links any more."""
    down_ns = costs.front_ns + costs.request_ns + costs.action_ns
    return replace(
        case,
        costs=costs,
        cluster=replace(
            case.cluster, start_delay_ns=calibration.start_delay_ns, copy_bytes_per_s=1 << 60
        ),
        network=Network(
            delay_ns=0,
            down_samples_ns=tuple(max(0, ns - down_ns) for ns in calibration.down_samples_ns),
            up_samples_ns=tuple(max(0, ns - costs.result_ns) for ns in calibration.up_samples_ns),
        ),
    )


def measure(line: Line, setting: Setting, trace: MinuteTrace) -> LiveLine:
    """Calibrate, play a line live, and simulate it."""
    load_before = os.getloadavg()[0]
    length_s = setting.warmup_s + setting.seconds
    case = case_of(setting, line, trace, seed=setting.seed, seconds=length_s)
    calibration = calibrated(case, setting)
    with serving(setting, case) as (server, scratch):
        rehearsal = case_of(
            setting, line, trace, seed=setting.seed + 1, seconds=setting.calibration_s
        )
        rehearsed, used_us = ask(server, rehearsal, scratch, setting)
        cost_ns = used_us["controller"] * NS_PER_US / max(rehearsed.num_offered, 1)
        costs = CpuCosts(front_ns=round(cost_ns))
        setting = replace(setting, pinned=setting.pinned and fits(used_us, setting.calibration_s))
        account, used_us = ask(server, case, scratch, setting)
    begin_s, end_s = setting.warmup_s, length_s
    live = since_due(account)
    tenth_s = setting.seconds / 10
    simulated = simulate(beside(case, calibration, costs))
    measured = account.part(begin_s, end_s)
    return LiveLine(
        line=line,
        live=figures_of_side(live, begin_s, end_s),
        simulated=figures_of_side(simulated, begin_s, end_s),
        costs=costs,
        calibration=calibration,
        pinned=setting.pinned,
        cpu_us={role: us / max(account.num_offered, 1) for role, us in used_us.items()},
        busy={role: us / 1e6 / length_s for role, us in used_us.items()},
        ends={
            side: _ends(of.part(begin_s, end_s))
            for side, of in (("live", live), ("simulated", simulated))
        },
        client_late_p50_ms=measured.lateness_ms(50),
        client_late_p99_ms=measured.lateness_ms(99),
        client_late_max_ms=measured.lateness_ms(100),
        first_tenth_pct=figures_of_side(live, begin_s, begin_s + tenth_s).goodput_pct,
        last_tenth_pct=figures_of_side(live, end_s - tenth_s, end_s).goodput_pct,
        remarks=tuple(account.remarks),
        load_averages=(load_before, os.getloadavg()[0]),
    )


def fits(used_us: Mapping[str, float], seconds: float) -> bool:
    """Whether the controller has enough of one core, and all else of another.

    Args:
        used_us: processor time of each process.
        seconds: in which it was used.
    """
    controller_us = used_us["controller"]
    rest_us = sum(used_us.values()) - controller_us
    return max(controller_us, rest_us) <= _CORE_FULL * seconds * 1e6


def _ends(account: Account) -> dict[str, int]:
    return {"OK": account.num_ok, **account.refusals, **account.others}


def figures_of(lines: Sequence[LiveLine]) -> dict[str, float]:
    """Name every number; without a line's name, the worst of all lines."""
    figures: dict[str, float] = {
        "goodput_pct": min(line.live.goodput_pct for line in lines),
        "late_per_million": max(line.live.late_per_million for line in lines),
        "sim_gap_pct": max((line.gap_pct for line in lines), key=abs),
    }
    for line in lines:
        key = line.line.name
        for name, number in asdict(line.live).items():
            figures[f"{key}_{name}"] = number
        for name, number in asdict(line.simulated).items():
            figures[f"{key}_simulated_{name}"] = number
        figures |= {
            f"{key}_sim_gap_pct": line.gap_pct,
            f"{key}_p50_gap_pct": _gap_pct(line.simulated.p50_ms, line.live.p50_ms),
            f"{key}_p99_gap_pct": _gap_pct(line.simulated.p99_ms, line.live.p99_ms),
            f"{key}_cpu_us": sum(line.cpu_us.values()),
            f"{key}_client_late_p50_ms": line.client_late_p50_ms,
            f"{key}_client_late_p99_ms": line.client_late_p99_ms,
            f"{key}_client_late_max_ms": line.client_late_max_ms,
            f"{key}_first_tenth_pct": line.first_tenth_pct,
            f"{key}_last_tenth_pct": line.last_tenth_pct,
        }
        for role in line.cpu_us:
            figures[f"{key}_{role}_us"] = line.cpu_us[role]
            figures[f"{key}_{role}_busy"] = line.busy[role]
    return figures


def _gap_pct(simulated: float, live: float) -> float:
    return 100 * (simulated / live - 1) if live else 0.0


def produce(
    setting: Setting, trace: MinuteTrace | None = None, directory: Path = RESULTS
) -> list[LiveLine]:
    """Measure all lines and write `fig8_live.json` and `fig8_live.csv`.

    Args:
        setting: how long, and on what.
        trace: at least as long as the stretch and two minutes; None: the generator's.
        directory: where the files go.
    """
    lines = []
    for line in setting.lines:
        given = trace or azure_replay.generated(setting.replay(line, setting.seed))
        lines.append(measure(line, setting, given))
        _say(lines[-1])
        # After each line, because a later one may be cut off.
        write(lines, setting, directory, own_trace=trace is not None)
    return lines


def _say(line: LiveLine) -> None:
    for side, of in (("live", line.live), ("simulated", line.simulated)):
        print(
            f"{line.line.name} {side}: {of.goodput_rps:,.1f} of {of.offered_rps:,.1f} r/s in time "
            f"({of.goodput_pct:.3f} %), late {of.late_per_million:.0f} per million, p50 {of.p50_ms:.2f} ms, "
            f"p99 {of.p99_ms:.2f} ms; {line.ends[side]}",
            flush=True,
        )
    parts = ", ".join(f"{role} {us:.0f}" for role, us in line.cpu_us.items())
    print(
        f"{line.line.name}: gap {line.gap_pct:+.2f} %; us of processor time per request: {parts}; "
        f"client late {line.client_late_p50_ms:.2f} ms at the median, {line.client_late_p99_ms:.2f} ms at p99",
        flush=True,
    )


def write(lines: Sequence[LiveLine], setting: Setting, directory: Path, *, own_trace: bool) -> None:
    """Write the two files."""
    figures = figures_of(lines)
    columns = list(SideFigures.__dataclass_fields__)
    write_csv(
        directory / "fig8_live.csv",
        ["line", "side", *columns],
        [
            (line.line.name, side, *asdict(getattr(line, side)).values())
            for line in lines
            for side in ("live", "simulated")
        ],
    )
    write_results(
        "fig8_live",
        figures,
        command=_command(setting, own_trace=own_trace),
        seeds=[setting.seed, setting.seed + 1],
        extra={
            "ends": {line.line.name: line.ends for line in lines},
            "costs": {line.line.name: asdict(line.costs) for line in lines},
            "pinned": {line.line.name: line.pinned for line in lines},
            "calibration": {line.line.name: line.calibration.describe() for line in lines},
            "load_averages": {line.line.name: line.load_averages for line in lines},
            "remarks": sorted({remark for line in lines for remark in line.remarks}),
            "trace": "a file" if own_trace else "the generator",
            "compiled": setting.native,
            "setting": asdict(setting),
        },
        directory=directory,
    )


def _command(setting: Setting, *, own_trace: bool) -> str:
    command = (
        f"python -m experiments fig8_live --seconds {setting.seconds:g} "
        f"--warmup {setting.warmup_s:g} --lines {' '.join(line.name for line in setting.lines)} "
        f"--policy {setting.policy} --seed {setting.seed}"
    )
    for flag, number, usual in (("slower", setting.slower, 1), ("fronts", setting.fronts, 0)):
        if number != usual:
            command += f" --{flag} {number}"
    flags = {"unpinned": not setting.pinned, "native": setting.native, "trace FILE": own_trace}
    return command + "".join(f" --{flag}" for flag, given in flags.items() if given)


def main() -> None:
    """Measure as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    usual = Setting()
    names: Mapping[str, Line] = {line.name: line for line in LINES}
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="of each line")
    parser.add_argument("--warmup", type=float, default=usual.warmup_s, help="seconds before them")
    parser.add_argument("--lines", nargs="+", choices=names, default=list(names))
    parser.add_argument("--policy", choices=POLICIES, default=usual.policy)
    parser.add_argument("--trace", type=Path, help="invocations per minute, file or folder")
    parser.add_argument("--slower", type=int, default=1, help="on a machine with other work")
    parser.add_argument("--fronts", type=int, default=0, help="front processes; 0: none")
    parser.add_argument("--unpinned", action="store_true", help="processes may run on any core")
    parser.add_argument("--native", action="store_true", help="serve with what `make native` made")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="of what is written")
    options = parser.parse_args()
    for name, least in (("seconds", 1), ("warmup", 0), ("slower", 1), ("fronts", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: found {getattr(options, name)}, expected {least} or more")
    setting = Setting(
        lines=tuple(names[name] for name in options.lines),
        policy=options.policy,
        seconds=options.seconds,
        warmup_s=options.warmup,
        slower=options.slower,
        pinned=not options.unpinned,
        native=options.native,
        fronts=options.fronts,
        seed=options.seed,
    )
    trace = None
    if options.trace is not None:
        trace = azure_replay.recorded(setting.replay(LINES[0], setting.seed), options.trace)
    produce(setting, trace, options.directory)


if __name__ == "__main__":
    main()
