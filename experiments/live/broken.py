"""What one broken worker costs a cluster: `broken.json`.

`make bench-broken`. A real controller and real worker processes; one of 2, or one of 4, fails every Infer after
0.2 ms, never ends one (its heartbeats go on), is stopped altogether, takes ten times as long, or fails every
load of weights. It does so from the start, or breaks down in mid-run. A share is the goodput beside
that of the same cluster without that worker: the same arrivals, right before and right after on the same
controller, counted from a second after the run's beginning or the fault's. Goodput is what the independent client
(`open_loop`) had in hand within the SLO.

`fast_fail_share`, `hang_share`, `slow_share` and `bad_load_share` are the smallest of their cases; `hang_share` is
of both ways to hang. `broken.csv` has a row per case.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from clockwright.operator import Operator
from clockwright.units import NS_PER_MS, PAGE_BYTES
from experiments.live.broken_worker import FAULTS
from experiments.live.live_run import LiveModel
from experiments.live.local_server import LocalServer
from experiments.live.open_loop import Account, ClientLoad, OpenLoop, offer
from experiments.study.aims import limit_of
from experiments.study.study import Study, chosen
from modelzoo.profile import Profile, ProfileRow, save_profile

#: The least share of the goodput without the broken worker.
AIM = limit_of("broken", "hang_share")

#: What is not counted: so long a cluster may take to see what is wrong.
_NOTICE_S = 1.0
#: When the worker breaks down, in mid-run.
_BREAKS_S = 0.5

_PROFILE = "profile.json"

#: In which figure a fault's cases stand.
_FIGURES = {
    "fast_fail": "fast_fail_share",
    "hang": "hang_share",
    "silent": "hang_share",
    "slow": "slow_share",
    "bad_load": "bad_load_share",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    policies: tuple[str, ...] = ("clockwork", "edf_mh")
    #: Workers, of which one breaks.
    clusters: tuple[int, ...] = (2, 4)
    faults: tuple[str, ...] = FAULTS
    num_models: int = 8
    #: Fewer than models, so that weights are loaded all the time.
    num_pages: int = 6
    exec_ms: int = 5
    load_ms: int = 2
    slo_ms: int = 50
    #: Share of what the healthy workers can carry.
    load: float = 0.8
    #: The same for the cases of a cluster that has too much to do, and their faults.
    overload: float = 1.1
    overloaded: tuple[str, ...] = ("fast_fail", "hang")
    #: How long is counted.
    seconds: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        chosen("fault", self.faults, FAULTS)

    @property
    def run_s(self) -> float:
        """How long requests are sent, in every run."""
        return _BREAKS_S + _NOTICE_S + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenCase:
    """A cluster with a broken worker, beside the same without it."""

    policy: str
    num_workers: int
    fault: str
    #: `start` or `mid-run`.
    since: str
    load: float
    goodput_rps: float
    #: Without the broken worker.
    healthy_rps: float
    #: What was counted, as the client saw it.
    account: Account = field(repr=False)

    @property
    def share(self) -> float:
        """What is left of the goodput."""
        return self.goodput_rps / max(self.healthy_rps, 1e-9)

    @override
    def __str__(self) -> str:
        row = self.row()
        short = "" if self.share >= AIM else f"  BELOW {AIM}"
        return (
            f"{self.policy} 1 of {self.num_workers} {self.fault} since {self.since}, load {self.load:g}: "
            f"{self.share:.3f} ({self.goodput_rps:.1f} of {self.healthy_rps:.1f}/s; {row['reasons']} "
            f"{row['others']} late {row['late_successes']}){short}"
        )

    def row(self) -> dict[str, Any]:
        """The case's line in the table."""
        account = self.account.row()
        return {
            "policy": self.policy,
            "workers": self.num_workers,
            "fault": self.fault,
            "since": self.since,
            "load": self.load,
            "share": self.share,
            "goodput_rps": self.goodput_rps,
            "healthy_rps": self.healthy_rps,
            **{key: account[key] for key in ("offered", "in_time", "late_successes", "refused")},
            **{
                key: account[key]
                for key in ("refusal_p50_ms", "refusal_p99_ms", "reasons", "others")
            },
        }


class BreakingCluster:
    """A controller with all its workers but the one that breaks."""

    def __init__(
        self, address: str, policy: str, num_workers: int, setting: Setting, scratch: Path
    ) -> None:
        self.policy, self.num_workers = policy, num_workers
        self._address, self._setting, self._scratch = address, setting, scratch
        self._num_attached = 0

    def _load(self, load: float) -> ClientLoad:
        setting = self._setting
        names = tuple(f"net-{index}" for index in range(setting.num_models))
        return ClientLoad(
            address=self._address, models=names, slo_ms=setting.slo_ms, seed=setting.seed,
            rate=load * (self.num_workers - 1) * 1000 / setting.exec_ms, seconds=setting.run_s,
        )  # fmt: skip

    def healthy(self, load: float) -> Account:
        """A run without the worker."""
        return offer(self._load(load))

    def broken(self, fault: str, since: str, load: float) -> Account:
        """A run with the worker."""
        with (
            self._worker(fault, broken=since == "start") as process,
            OpenLoop(self._load(load)) as client,
        ):
            if since != "start":
                time.sleep(_BREAKS_S)
                process.send_signal(_signal_of(fault))
            account = client.account()
        with Operator(self._address) as operator:
            while operator.status().num_workers >= self.num_workers:
                time.sleep(0.02)
        return account

    @contextmanager
    def _worker(self, fault: str, *, broken: bool) -> Iterator[subprocess.Popen[str]]:
        self._num_attached += 1
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "experiments.live.broken_worker"),
                *("--controller", self._address, "--id", f"broken-{self._num_attached}"),
                *("--fault", fault, "--profile", str(self._scratch / _PROFILE)),
                *("--pages", str(self._setting.num_pages)),
                *("--cache-dir", str(self._scratch / "cache")),
                *(["--broken"] if broken else []),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            for _ in range(self._setting.num_models):
                if not process.stdout.readline():
                    raise RuntimeError(f"the worker ended with {process.wait()}")
            # The last model's word is on its way to the controller.
            time.sleep(0.1)
            if broken and fault == "silent":
                process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def running(policy: str, num_workers: int, setting: Setting) -> Iterator[BreakingCluster]:
    """Start a cluster without the worker that breaks."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        net = LiveModel(name="net", copies=setting.num_models, batch_sizes=(1,))
        net.write(scratch / "models" / net.name)
        row = ProfileRow(
            name="*",
            weights_bytes=PAGE_BYTES,
            load_ns=setting.load_ms * NS_PER_MS,
            exec_ns={1: setting.exec_ms * NS_PER_MS},
        )
        save_profile(Profile(name="steady", rows={"*": row}), scratch / _PROFILE)
        arguments = [
            *("--models", str(scratch / "models"), "--device", f"modelled:{scratch / _PROFILE}"),
            *("--cache-dir", str(scratch / "cache"), "--pages", str(setting.num_pages)),
            *("--policy", policy, "--workers", str(num_workers - 1)),
        ]
        with LocalServer(arguments) as server:
            cluster = BreakingCluster(server.address, policy, num_workers, setting, scratch)
            cluster.healthy(setting.load)  # Weights are where they are wanted from now on.
            yield cluster


def _signal_of(fault: str) -> signal.Signals:
    return signal.SIGSTOP if fault == "silent" else signal.SIGUSR1


def measure(setting: Setting) -> Iterator[BrokenCase]:
    """Run every case."""
    for policy in setting.policies:
        for num_workers in setting.clusters:
            with running(policy, num_workers, setting) as cluster:
                yield from _cases(cluster, setting)


def _cases(cluster: BreakingCluster, setting: Setting) -> Iterator[BrokenCase]:
    smallest = cluster.num_workers == min(setting.clusters)
    # A fault from the start, and too much for the healthy ones: two workers show it as well as four.
    sinces = ("start", "mid-run") if smallest else ("mid-run",)
    runs = [(setting.load, [(fault, since) for since in sinces]) for fault in setting.faults]
    if smallest and setting.overloaded:
        runs.append((setting.overload, [(fault, "mid-run") for fault in setting.overloaded]))
    before: Account | None = None
    before_load = 0.0
    for load, faults in runs:
        if before is None or load != before_load:
            before, before_load = cluster.healthy(load), load
        accounts = [(*fault, cluster.broken(*fault, load)) for fault in faults]
        after = cluster.healthy(load)
        for fault, since, account in accounts:
            begin_s = _NOTICE_S + (0.0 if since == "start" else _BREAKS_S)
            counted, *healthy = (
                run.part(begin_s, setting.run_s) for run in (account, before, after)
            )
            yield BrokenCase(
                policy=cluster.policy, num_workers=cluster.num_workers, fault=fault, since=since,
                load=load, goodput_rps=counted.goodput_rps, account=counted,
                healthy_rps=sum(run.goodput_rps for run in healthy) / len(healthy),
            )  # fmt: skip
        before = after


def figures_of(cases: Sequence[BrokenCase]) -> dict[str, float]:
    """The smallest share of each kind of fault, and of each case by itself."""
    figures: dict[str, float] = {}
    for case in cases:
        key = _FIGURES[case.fault]
        figures[key] = min(figures.get(key, case.share), case.share)
    for case in cases:
        name = f"{case.policy}_1of{case.num_workers}_{case.fault}_{case.since}_x{case.load:g}"
        figures[f"{name.replace('-', '_')}_share"] = case.share
    figures["late_successes"] = sum(case.account.num_late for case in cases)
    return figures


STUDY = Study(
    name="broken",
    setting=Setting(),
    ask=measure,
    key="",
    figures=lambda _, cases: figures_of(cases),
    tables={"": lambda _, cases: (case.row() for case in cases)},
)
