"""The paper's evaluation live: Figure 8's replay and the scale row on modelled GPUs, compared with the simulator.

Everything but the GPUs is real: a `clockwright up` with its front, its controller and one process with a worker
per GPU (`--devices`), and the independent client of `open_loop`, all on two cores of this machine: the first for the
controller's process, the second for workers and client, unless the rehearsal shows that one of them would be full;
then all run where the kernel puts them. Workers model their devices
(`modelled:`), that is, they wait as long as Table 1 says. As in the paper's large runs, whose workers made up
the inputs, requests bring next to none: 4 bytes.

The two lines of the table, both of 4,026 models and an SLO of 100 ms:

* `gpus6`: the replay of Figure 8 (`azure_replay`), 4,860.6 r/s on 6 GPUs;
* `gpus20`: the paper's scale row, 6,174 r/s on 20 GPUs.

The trace is the generator's. The stretch begins with a full hour; its rate is
scaled so that the measured part has the line's rate on average. Requests of the warm-up before it, in which
weights are loaded, do not count. A request's latency counts from when it was due, so what the client is late is
part of it, and is told besides. The client sends and reads every half millisecond.

The simulator is given the same requests and what was measured of the same server before: the processor time
that its controller takes per request, in a stretch of the same replay with other arrivals; and the delays of
links and lanes on an idle machine (`experiments.live.rehearsal`), less the controller's share of them. One
function (`experiments.study.sides.side_of`) sums up both sides.

    python -m experiments fig8_live --seconds 600
    python -m experiments fig8_live --seconds 20 --warmup 5 --lines gpus6 --directory /tmp/live

`--lines gpus20 --add` adds a line to the one that is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from experiments.clockwork_paper import azure_replay
from experiments.live.live_run import Played, Served, hosted, play
from experiments.live.local_server import LocalServer
from experiments.live.open_loop import Account, ClientLoad, OpenLoop, write_schedule
from experiments.live.processor_time import cpu_ns, roles
from experiments.live.rehearsal import MeasuredCase, measured, rehearsals
from experiments.native import ENVIRONMENT
from experiments.simulator import Case, CpuCosts
from experiments.study.beside import Beside, by_side, say
from experiments.study.compared import POLICIES
from experiments.study.sides import Side, side_of, simulated_record
from experiments.study.study import NO_COLUMN, Column, Study, chosen
from traces.client_record import ClientRecord
from traces.minutes import MinuteTrace

# A full hour, the trace's busiest minute, begins one minute after the generated trace.
_BEGIN_NS = azure_replay.NS_PER_MINUTE
# Far below an SLO, and above what 4,861 requests/s are apart.
_CLIENT_TICK_US = 500
# Its one input is of 4 bytes.
_STAND_IN, _SHAPE = "echo-1", (1, 1)
# Beyond this part of a core, what has to run on it waits for it more than it runs.
_CORE_FULL = 0.8

#: By line of the table: GPUs, and requests per second.
LINES = {"gpus6": (6, azure_replay.Setting().rate_rps), "gpus20": (20, 6174.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How long, and on what."""

    lines: tuple[str, ...] = tuple(LINES)
    policy: str = "edf_mh"
    #: Measured time of each line, and the time before it that does not count.
    seconds: float = 600.0
    warmup: float = 30.0
    #: Length of the stretch that the controller's cost is taken from, then of each closed loop of the calibration.
    calibration_s: float = 10.0
    closed_loop_s: float = 3.0
    #: Functions of the generated trace, and instances of each architecture.
    num_functions: int = 17_000
    num_copies: int = 66
    #: The server runs what `make native` made.
    native: bool = False
    #: Else the controller's process has the first core, its workers and the client share the second.
    unpinned: bool = False
    seed: int = 8

    def __post_init__(self) -> None:
        for name, least in (("seconds", 1), ("warmup", 0)):
            if not getattr(self, name) >= least:
                found = getattr(self, name)
                raise ConfigError(f"{name} is {found:g}, expected {least} or more")
        chosen("policy", (self.policy,), POLICIES)
        chosen("lines", self.lines, LINES)

    def replay(self, line: str, seed: int) -> azure_replay.Setting:
        """The replay of one line: its cluster, and arrivals drawn from `seed`."""
        num_gpus, rate_rps = LINES[line]
        return azure_replay.Setting(
            num_functions=self.num_functions,
            num_copies=self.num_copies,
            num_workers=num_gpus,
            rate_rps=rate_rps,
            num_minutes=2 + -(-round(self.warmup + self.seconds) // 60),
            seed=seed,
        )

    def minutes(self, line: str) -> MinuteTrace:
        """What is replayed."""
        return azure_replay.generated(self.replay(line, self.seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLine(Beside):
    """A line of the table, measured."""

    line: str
    live: Annotated[Side, Column(figure="{key}_{part}")]
    measured: MeasuredCase
    #: Controller and all else had a core each.
    pinned: Annotated[bool, NO_COLUMN]
    #: By process (`roles`, and the client): processor time per offered request in us, then its share of a core.
    cpu_us: dict[str, float]
    busy: dict[str, float]
    #: Requests by how they ended.
    ends: dict[str, dict[str, int]]
    remarks: list[str]
    load_averages: tuple[float, float]


# --- the case --------------------------------------------------------------------------------------


def case_of(setting: Setting, line: str, trace: MinuteTrace, *, seed: int, seconds: float) -> Case:
    """Describe so much of a line's replay: workload and cluster, with nothing charged."""
    replay = setting.replay(line, seed)
    case = azure_replay.case_of(replay, trace, POLICIES[setting.policy])
    length_ns = round(seconds * NS_PER_S)
    stretch = case.workload.sliced(_BEGIN_NS, _BEGIN_NS + length_ns)
    factor = replay.rate_rps * seconds / stretch.expected_requests()
    return replace(case, workload=stretch.scaled(factor), duration_ns=length_ns)


def served_of(setting: Setting, case: Case) -> Served:
    """The server of a line."""
    return Served(
        case=case,
        stand_in=_STAND_IN,
        environment=ENVIRONMENT if setting.native else {},
    )


# --- live ------------------------------------------------------------------------------------------


def ask_server(
    server: LocalServer, case: Case, scratch: Path, setting: Setting
) -> tuple[Account, dict[str, float]]:
    """Play a case to a server: the client's account, and each process's time over it in us."""
    write_schedule(scratch / "schedule.npy", case.workload)
    load = ClientLoad(
        address=server.address,
        models=case.workload.models,
        slo_ms=case.workload.sources[0].slo_ns // NS_PER_MS,
        seconds=case.duration_ns / NS_PER_S,
        schedule=str(scratch / "schedule.npy"),
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
    if setting.unpinned or len(cores) < 2:
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


def record_of(account: Account) -> ClientRecord:
    """The account of a client in which a request's time begins when it was due: the client's own lateness counts."""
    names: dict[str, int] = {}
    outcome = [
        names.setdefault("OK" if kind == "ok" else name, len(names)) for kind, name in account.ends
    ]
    zeros = np.zeros(len(outcome), np.int64)
    return ClientRecord(
        models=("",),
        outcomes=tuple(names),
        model=zeros,
        outcome=np.array(outcome, np.int64),
        is_open=zeros == 0,
        slo_ns=zeros + account.slo_ms * NS_PER_MS,
        due_ns=account.due_ns,
        sent_ns=account.sent_ns,
        departure_ns=account.done_ns,
        begin_ns=0,
    )


# --- all of it -------------------------------------------------------------------------------------


def calibrated(served: Served, setting: Setting) -> Played:
    """Play what the delays of links and lanes follow from, to one model on a worker that has nothing else to do."""
    case = served.case
    cluster = replace(case.cluster, models=hosted(case.cluster.models[0].row), num_workers=1)
    nothing = replace(case.workload, models=(), sources=())
    idle = replace(served, case=replace(case, cluster=cluster, workload=nothing))
    return play(rehearsals(idle, setting.closed_loop_s), idle)


def measure(setting: Setting, line: str) -> LiveLine:
    """Calibrate, play a line live, and simulate it."""
    load_before = os.getloadavg()[0]
    length_s, trace = setting.warmup + setting.seconds, setting.minutes(line)
    case = case_of(setting, line, trace, seed=setting.seed, seconds=length_s)
    seed, seconds = setting.seed + 1, setting.calibration_s
    rehearsal = case_of(setting, line, trace, seed=seed, seconds=seconds)
    served = served_of(setting, case)
    idle = calibrated(served, setting)
    with served.running() as (server, scratch):
        rehearsed, used_us = ask_server(server, rehearsal, scratch, setting)
        cost_ns = used_us["controller"] * NS_PER_US / max(rehearsed.num_offered, 1)
        pinned = not setting.unpinned and fits(used_us, seconds)
        setting = replace(setting, unpinned=not pinned)
        account, used_us = ask_server(server, case, scratch, setting)
    given = measured(served, idle.runs, idle.rows, CpuCosts(front_ns=round(cost_ns)))
    records = {"live": record_of(account), "simulated": simulated_record(given.case)}
    begin_ns, end_ns = round(setting.warmup * NS_PER_S), case.duration_ns
    return LiveLine(
        line=line,
        live=side_of(records["live"], begin_ns, end_ns),
        simulated=side_of(records["simulated"], begin_ns, end_ns),
        client_late_p99_ms=account.part(setting.warmup, length_s).lateness_ms(99),
        measured=given,
        pinned=pinned,
        cpu_us={role: us / max(account.num_offered, 1) for role, us in used_us.items()},
        busy={role: us / 1e6 / length_s for role, us in used_us.items()},
        ends={
            name: record.where(record.due_ns >= begin_ns).num_by_outcome
            for name, record in records.items()
        },
        remarks=account.remarks,
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


def figures_of(_setting: Setting, lines: Sequence[LiveLine]) -> dict[str, float]:
    """How far each line is from its simulation, and what each process took."""
    figures: dict[str, float] = {}
    for line in lines:
        if line.goodput_gap_pct is not None:
            figures[f"{line.line}_sim_gap_pct"] = line.goodput_gap_pct
        figures[f"{line.line}_cpu_us"] = sum(line.cpu_us.values())
        figures |= {f"{line.line}_{role}_us": us for role, us in line.cpu_us.items()}
        figures |= {f"{line.line}_{role}_busy": share for role, share in line.busy.items()}
    return figures


def extra(_setting: Setting, lines: Sequence[LiveLine]) -> dict[str, Any]:
    """How requests ended, and what the simulator was told."""
    return {
        **{
            name: {line.line: getattr(line, name) for line in lines}
            for name in ("ends", "pinned", "load_averages")
        },
        "costs": {line.line: asdict(line.measured.case.costs) for line in lines},
        "calibration": {line.line: line.measured.calibration.describe() for line in lines},
        "remarks": sorted({remark for line in lines for remark in line.remarks}),
    }


STUDY = Study(
    name="fig8_live",
    setting=Setting(),
    ask=lambda setting: (measure(setting, line) for line in setting.lines),
    key="{line}",
    figures=figures_of,
    tables={"": by_side},
    extra=extra,
    say=say,
)
