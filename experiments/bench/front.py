"""What is left of a server's goodput when its own process is the limit: `front.json`.

`make bench NAME=bench-front`. The server has one core and the client another. The device takes next to no time, so that the
server's own process is the limit. The client is `flood.c`, an open loop of Poisson arrivals that costs some microseconds
per request; it obeys the server's windows and counts from the time at which a request is due. The capacity is the
highest rate at which 95 % are answered inside an SLO of 100 ms. Then requests come at multiples of it. A search ends too
low where a standstill of the host fails one of its steps, so each repeat has a search of its own, and medians count.

Servers: this one over 1, 8 and 64 connections; a bare sync server of grpcio, which answers everything; and mosec with a
bound of 64, where `--mosec` names a Python that has it. `late_success` counts answers that took longer than the SLO from
the client's send to its kernel, and `client_late` those that only took longer from when they were due to be sent until the
client looked. `late_kept` says of how many of the former the client's kernel kept the request at first. In addition, 63
connections that ask for half of the capacity, alone and next to one that asks for twice the capacity.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_US, PAGE_BYTES
from experiments.bench.live import bare_server, mosec_server
from experiments.live.live_run import LiveModel
from experiments.live.local_server import LocalServer, folders
from experiments.live.open_loop import ClientLoad, await_model
from experiments.live.open_loop_client import request_bytes
from experiments.study.study import Study, chosen
from modelzoo.profile import Profile, ProfileRow, save_profile

SERVERS = ("ours", "grpcio", "mosec")
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_BATCH_SIZES = (1, 2, 4, 8, 16)
# Where the first search for a capacity begins.
_FIRST_RPS = 200.0
# HTTP/1.1 has one request at a time on a connection.
_MOSEC_CONNECTIONS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    servers: tuple[str, ...] = SERVERS
    connections: tuple[int, ...] = (1, 8, 64)
    slos_ms: tuple[int, ...] = (10, 50, 100)
    multiples: tuple[float, ...] = (0.8, 0.9, 1.2, 1.5, 2.0, 3.0)
    seconds: float = 2.0
    repeats: int = 5
    #: One connection floods, next to so many that behave; 0: that is left out.
    behaving: int = 63
    #: A Python that has mosec; empty: mosec is left out.
    mosec: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        chosen("server", self.servers, SERVERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontCase:
    """The outcome of one client's requests."""

    server: str
    #: `all`, or where one floods: `alone`, `behaving` and `flooding`.
    who: str
    connections: int
    slo_ms: int
    multiple: float
    repeat: int
    #: The highest rate with 95 % inside 100 ms, over as many connections, as this repeat found it.
    capacity_rps: float
    seconds: float
    offered: int
    #: Answers inside the SLO; after it; and those that were after it because the client itself sent or read late.
    ok: int
    late: int
    client_late: int = 0
    #: Answers after the SLO, which `late` counts, to requests that the client's kernel kept at first.
    late_kept: int = 0
    refused: int
    #: Requests that the client gave up before it could send them, and those that were never answered.
    given_up: int
    unanswered: int
    ok_ms_p50: float
    ok_ms_p99: float
    refusal_ms_p50: float
    refusal_ms_p99: float
    #: How late the client itself was at worst.
    client_late_ms: float
    client_cpu_s: float

    @property
    def share(self) -> float:
        """Goodput as a share of the capacity."""
        return self.ok / self.seconds / self.capacity_rps

    @property
    def answered(self) -> float:
        """Answers inside the SLO as a share of what was asked."""
        return self.ok / max(self.offered, 1)

    def __str__(self) -> str:
        return (
            f"{self.server} {self.who} over {self.connections}, SLO {self.slo_ms} ms, x{self.multiple:g} of"
            f" {self.capacity_rps:.0f}/s: in time {self.share:.3f} of the capacity, {self.answered:.3f} of"
            f" what was asked, late {self.late}, refusals {self.refused} after {self.refusal_ms_p50:.2f} and"
            f" {self.refusal_ms_p99:.2f} ms, given up {self.given_up}, unanswered {self.unanswered};"
            f" client late {self.client_late_ms:.1f} ms"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodedServer:
    """A server that runs, and how it is asked."""

    name: str
    port: int
    #: As `flood` has it.
    path: str
    #: Makes the message for an SLO in ms.
    message: Callable[[int], bytes]
    folder: Path
    program: Path
    #: So many connections at least are needed for an open loop.
    connections_least: int = 0
    messages: dict[int, Path] = field(default_factory=dict)

    def offer(
        self, offers: Sequence[tuple[float, int]], slo_ms: int, seconds: float, seed: int
    ) -> list[dict[str, Any]]:
        """Ask at rates over so many connections each; returns the accounts."""
        if slo_ms not in self.messages:
            self.messages[slo_ms] = self.folder / f"message-{slo_ms}"
            self.messages[slo_ms].write_bytes(self.message(slo_ms))
        rates = ",".join(
            f"{rate:.3f}:{max(number, self.connections_least)}" for rate, number in offers
        )
        command = [str(self.program), str(self.port), str(self.messages[slo_ms]), self.path, rates]
        command += [str(seconds), str(slo_ms * 1000), str(seed + 1), "1000"]
        with _cores(server=False):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"flood ended with {done.returncode}: {done.stderr[-500:]}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def capacity_rps(self, connections: int, seconds: float, near_rps: float) -> float:
        """The highest rate with 95 % inside 100 ms, to 4 %: in two of three runs, since one standstill of the host fails a run.

        It is sought from half of `near_rps` on.
        """

        def runs_well(rate: float, seed: int) -> bool:
            (found,) = self.offer([(rate, connections)], 100, seconds, seed)
            return bool(found["ok"] >= 0.95 * found["offered"])

        def carries(rate: float) -> bool:
            first, second = (runs_well(rate, round(rate) + number) for number in range(2))
            return first if first == second else runs_well(rate, round(rate) + 2)

        low, high = near_rps / 2, near_rps
        while carries(high):
            low, high = high, 2 * high
        while high / low > 1.04:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if carries(middle) else (low, middle)
        return low


def build(folder: Path) -> Path:
    """Compile the client.

    Raises:
        ConfigError: there is no compiler.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise ConfigError("no C compiler (cc, or what CC names), which the client of `front` needs")
    program = folder / "flood"
    source = Path(__file__).with_name("flood.c")
    subprocess.run([compiler, "-O2", "-o", str(program), str(source), "-lm"], check=True)
    return program


@contextmanager
def _cores(server: bool) -> Iterator[None]:
    """Have what starts in the block run on the server's core, or on the client's."""
    before = os.sched_getaffinity(0)
    first, *others = sorted(before)
    os.sched_setaffinity(0, {first} if server else set(others) or {first})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _ours(folder: Path, program: Path) -> Iterator[FloodedServer]:
    net = LiveModel(name="net", copies=1, batch_sizes=_BATCH_SIZES)
    net.write(folder / "models" / net.name)
    # A run takes 1 us, and 60 ns for each row.
    exec_ns = {size: NS_PER_US + 60 * size for size in _BATCH_SIZES}
    row = ProfileRow(name="*", weights_bytes=PAGE_BYTES, load_ns=NS_PER_MS, exec_ns=exec_ns)
    save_profile(Profile("fast", {row.name: row}), folder / "profile.json")
    arguments = [*folders(folder), "--device", f"modelled:{folder}/profile.json"]
    with _cores(server=True):
        server = LocalServer(arguments, environment={"XDG_STATE_HOME": str(folder)})
    with server:
        await_model(server.address, net.name)
        yield FloodedServer(
            name="ours", port=int(server.address.rpartition(":")[2]), path=_INFER, folder=folder,
            program=program, message=_message(net.name),
        )  # fmt: skip


@contextmanager
def _on_servers_core(serving: AbstractContextManager[tuple[str, int]]) -> Iterator[int]:
    """Start a server on its core; its port."""
    with ExitStack() as stack:
        with _cores(server=True):
            address, _ = stack.enter_context(serving)
        yield int(address.rpartition(":")[2])


@contextmanager
def _grpcio(folder: Path, program: Path) -> Iterator[FloodedServer]:
    with _on_servers_core(bare_server("sync")) as port:
        yield FloodedServer(
            name="grpcio", port=port, path=_INFER, folder=folder, program=program, message=_message("small"),
        )  # fmt: skip


def _message(model: str) -> Callable[[int], bytes]:
    def of(slo_ms: int) -> bytes:
        load = ClientLoad(address="", models=(model,), slo_ms=slo_ms, seconds=0)
        return request_bytes(model, load)

    return of


@contextmanager
def _mosec(python: str, folder: Path, program: Path) -> Iterator[FloodedServer]:
    with _on_servers_core(mosec_server(python, folder)) as port:
        yield FloodedServer(
            name="mosec", port=port, path="http1:/inference", folder=folder, program=program,
            message=lambda _: bytes(3136), connections_least=_MOSEC_CONNECTIONS,
        )  # fmt: skip


def _asked(
    target: FloodedServer, connections: Sequence[int], setting: Setting
) -> Iterator[FrontCase]:
    for number in connections:
        capacity_rps = _FIRST_RPS
        for repeat in range(setting.repeats):
            capacity_rps = target.capacity_rps(number, setting.seconds, capacity_rps)
            for slo_ms in setting.slos_ms:
                for multiple in setting.multiples:
                    seed = setting.seed + 1000 * repeat + slo_ms
                    offers = [(multiple * capacity_rps, number)]
                    (found,) = target.offer(offers, slo_ms, setting.seconds, seed)
                    yield FrontCase(
                        server=target.name, who="all", connections=number, slo_ms=slo_ms,
                        multiple=multiple, repeat=repeat, capacity_rps=capacity_rps,
                        seconds=setting.seconds, **found,
                    )  # fmt: skip
            if setting.behaving and target.name == "ours" and number == max(connections):
                yield from _flooded(target, capacity_rps, setting, repeat)


def _flooded(
    target: FloodedServer, capacity_rps: float, setting: Setting, repeat: int
) -> Iterator[FrontCase]:
    """Connections that behave, alone and next to one that floods the server."""
    behaving = (0.5 * capacity_rps, setting.behaving)
    for slo_ms in setting.slos_ms:
        for who, offers in (
            (("alone",), [behaving]),
            (("behaving", "flooding"), [behaving, (2 * capacity_rps, 1)]),
        ):
            seed = setting.seed + 1000 * repeat + slo_ms
            accounts = target.offer(offers, slo_ms, setting.seconds, seed)
            for name, (rate, number), found in zip(who, offers, accounts, strict=True):
                yield FrontCase(
                    server=target.name, who=name, connections=number, slo_ms=slo_ms,
                    multiple=rate / capacity_rps, repeat=repeat, capacity_rps=capacity_rps,
                    seconds=setting.seconds, **found,
                )  # fmt: skip


def measure(setting: Setting) -> Iterator[FrontCase]:
    """Ask all servers."""
    for name in setting.servers:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            program = build(folder)
            if name == "ours":
                with _ours(folder, program) as target:
                    yield from _asked(target, setting.connections, setting)
            elif name == "grpcio":
                with _grpcio(folder, program) as target:
                    yield from _asked(target, (8,), setting)
            elif setting.mosec:
                with _mosec(setting.mosec, folder, program) as target:
                    yield from _asked(target, (8,), setting)
            else:
                print("mosec is left out: --mosec names no Python that has it", file=sys.stderr)


def figures_of(cases: Sequence[FrontCase]) -> dict[str, float]:
    """The numbers that are quoted: medians of the repeats; without a number of connections, the worst of them."""
    figures: dict[str, float] = {}
    groups: dict[tuple[str, int, int, float], list[FrontCase]] = {}
    for case in cases:
        if case.who == "all":
            key = (case.server, case.connections, case.slo_ms, case.multiple)
            groups.setdefault(key, []).append(case)
    worst: dict[str, float] = {}
    refusal_ms, refusal_shares, losses = [], [], [0.0]
    for (server, connections, slo_ms, multiple), found in groups.items():
        capacities_rps = [case.capacity_rps for case in found]
        figures[f"{server}_c{connections}_capacity_rps"] = statistics.median(capacities_rps)
        spread = max(capacities_rps) / min(capacities_rps)
        figures[f"{server}_c{connections}_capacity_spread"] = spread
        share = statistics.median(case.share for case in found)
        figures[f"{server}_c{connections}_slo{slo_ms}_share_x{multiple:g}"] = share
        if server != "ours":
            continue
        name = f"slo{slo_ms}_share_x{multiple:g}"
        worst[name] = min(share, worst.get(name, share))
        if multiple < 1:
            losses.append(1 - statistics.median(case.answered for case in found))
        elif any(case.refused for case in found):
            refusal_ms.append(statistics.median(case.refusal_ms_p50 for case in found))
            p99_ms = statistics.median(case.refusal_ms_p99 for case in found)
            refusal_shares.append(p99_ms / slo_ms)
    figures |= worst
    ours = [case for case in cases if case.server == "ours"]
    figures |= {
        "refusal_ms_p50": statistics.median(refusal_ms or [0.0]),
        "refusal_slo_share_p99": statistics.median(refusal_shares or [0.0]),
        "below_capacity_loss": max(losses),
        "late_success": sum(case.late for case in ours),
        "late_kept": sum(case.late_kept for case in ours),
        "client_late": sum(case.client_late for case in ours),
        "requests": sum(case.offered for case in cases),
        "client_late_ms_worst": max(case.client_late_ms for case in cases),
    }
    for slo_ms in sorted({case.slo_ms for case in ours if case.who == "behaving"}):
        alone, beside = (
            statistics.median(c.answered for c in ours if (c.who, c.slo_ms) == (who, slo_ms))
            for who in ("alone", "behaving")
        )
        figures[f"slo{slo_ms}_behaving_share"] = beside / max(alone, 1e-9)
    return figures


STUDY = Study(
    name="front",
    command="bench-front",
    setting=Setting(),
    ask=measure,
    key="",
    figures=lambda _, cases: figures_of(cases),
)
