"""What a live server promises, counted by a client that trusts no stamp of the server: `live_promises.json`.

`make bench NAME=live_promises`. A real `clockwright up`, a modelled device, and `open_loop` as the client; a row per case
in `live_promises.csv`. The parts:

* `device`: a device of exactly 2 ms per request limits what can be done. With 1 and 15 models, closed loops find
  how many answers per second it gives at best, and Poisson arrivals then come at 0.5, 0.9, 1.5 and 3 times
  that rate, with SLOs of 10, 50 and 100 ms.
* `flood`: twenty times what a device of 100 requests per second can do, for a minute, SLO 100 ms.
* `pause`: the controller stands still for 3 s (SIGSTOP) at 150 requests per second, SLO 100 ms.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from experiments.live.live_run import LiveModel
from experiments.live.local_server import LocalServer, folders
from experiments.live.open_loop import Account, ClientLoad, OpenLoop, await_model, offer
from experiments.study.study import Study, chosen

# The rate of the device that is flooded, and of all models there.
_FLOODED = "10ms"
_FLOODED_RPS = 100.0
PARTS = ("device", "flood", "pause")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    multiples: tuple[float, ...] = (0.5, 0.9, 1.5, 3.0)
    slos_ms: tuple[int, ...] = (10, 50, 100)
    num_models: tuple[int, ...] = (1, 15)
    device: str = "2ms"
    #: Requests under way in the closed loops, of which the best counts.
    concurrencies: tuple[int, ...] = (4, 16)
    seconds: float = 5.0
    flood_rps: float = 2000.0
    flood_seconds: float = 60.0
    pause_seconds: float = 3.0
    pause_rps: float = 150.0
    parts: tuple[str, ...] = PARTS
    seed: int = 0

    def __post_init__(self) -> None:
        chosen("part", self.parts, PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseCase:
    """The client's account of one case."""

    part: str
    num_models: int
    slo_ms: int
    #: Answers per second that are possible.
    capacity_rps: float
    multiple: float
    account: Account

    @property
    def goodput_share(self) -> float:
        """Goodput as a share of what was asked or can be done, whichever is less."""
        offered_rps = self.account.num_offered / self.account.seconds
        return self.account.goodput_rps / max(min(offered_rps, self.capacity_rps), 1e-9)

    @override
    def __str__(self) -> str:
        row = self.row()
        words = (
            f"{self.part} {self.num_models} models, SLO {self.slo_ms} ms, x{self.multiple:g} of "
            f"{self.capacity_rps:.0f}/s: in time {row['goodput_rps']:.1f}/s ({self.goodput_share:.3f}), "
            f"late {row['late_successes']}, refusals {row['refused']} after {row['refusal_p50_ms']:.1f} "
            f"and {row['refusal_p99_ms']:.1f} ms ({row['reasons']}), others {row['other_ends']} "
            f"{row['others']} client {row['client_cpu_us']:.0f} us, late {row['client_late_p99_ms']:.1f} ms"
        )
        return "\n  ".join((words, *self.account.remarks))

    def row(self) -> dict[str, Any]:
        """The case's line in the table."""
        return {
            "part": self.part,
            "models": self.num_models,
            "slo_ms": self.slo_ms,
            "capacity_rps": self.capacity_rps,
            "multiple": self.multiple,
            "goodput_share": self.goodput_share,
            **self.account.row(),
        }


@contextmanager
def served(device: str, num_models: int) -> Iterator[tuple[LocalServer, tuple[str, ...]]]:
    """A server with so many models of batch size 1, whose weights are loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        net = LiveModel(name="net", copies=num_models, batch_sizes=(1,))
        net.write(Path(scratch) / "models" / net.name)
        with LocalServer([*folders(scratch), "--device", f"modelled:{device}"]) as server:
            for model in net.model_ids:
                await_model(server.address, model)
            yield server, net.model_ids


def capacity_rps(load: ClientLoad, concurrencies: Sequence[int]) -> float:
    """The most answers in time per second that a load of no rate gets, as any of some closed loops."""
    loops = (replace(load, concurrency=number) for number in concurrencies)
    return max(offer(loop).goodput_rps for loop in loops)


def measure_limited(setting: Setting, num_models: int) -> Iterator[PromiseCase]:
    """Cases of `device` with so many models."""
    with served(setting.device, num_models) as (server, models):
        load = ClientLoad(
            address=server.address, models=models, slo_ms=100, seconds=setting.seconds
        )
        brief = replace(load, seconds=min(1.5, setting.seconds))
        best_rps = capacity_rps(brief, setting.concurrencies)
        load = replace(load, seed=setting.seed)
        for slo_ms in setting.slos_ms:
            for multiple in setting.multiples:
                asked = replace(load, slo_ms=slo_ms, rate=multiple * best_rps)
                yield _case("device", asked, best_rps, multiple)


def measure_flood(setting: Setting) -> Iterator[PromiseCase]:
    """Twenty times what the device can do."""
    with served(_FLOODED, 1) as (server, models):
        load = ClientLoad(
            address=server.address, models=models, slo_ms=100, seconds=setting.flood_seconds,
            rate=setting.flood_rps, seed=setting.seed,
        )  # fmt: skip
        multiple = setting.flood_rps / _FLOODED_RPS
        yield _case("flood", load, _FLOODED_RPS, multiple)


def measure_pause(setting: Setting) -> Iterator[PromiseCase]:
    """A controller that stands still."""

    def stop() -> None:
        time.sleep(setting.seconds / 2)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            time.sleep(setting.pause_seconds)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)

    with served(setting.device, 1) as (server, models):
        load = ClientLoad(
            address=server.address, models=models, slo_ms=100, rate=setting.pause_rps,
            seconds=setting.seconds + setting.pause_seconds, seed=setting.seed,
        )  # fmt: skip
        yield _case("pause", load, setting.pause_rps, 1.0, meanwhile=stop)


def _case(
    part: str,
    load: ClientLoad,
    capacity_rps: float,
    multiple: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> PromiseCase:
    """What happened to a load while something else was done."""
    with OpenLoop(load) as client:
        meanwhile()
        account = client.account()
    return PromiseCase(
        part=part, num_models=len(load.models), slo_ms=load.slo_ms, capacity_rps=capacity_rps,
        multiple=multiple, account=account,
    )  # fmt: skip


def measure(setting: Setting) -> Iterator[PromiseCase]:
    """Measure the parts that are asked for."""
    if "device" in setting.parts:
        for num_models in setting.num_models:
            yield from measure_limited(setting, num_models)
    if "flood" in setting.parts:
        yield from measure_flood(setting)
    if "pause" in setting.parts:
        yield from measure_pause(setting)


def figures_of(cases: Sequence[PromiseCase]) -> dict[str, float]:
    """The numbers that are quoted; of many cases, the median and the worst."""
    answers = sum(case.account.num_ok for case in cases)

    def per_million(count: int) -> float:
        return 1e6 * count / max(answers, 1)

    figures: dict[str, float] = {
        "late_success_per_million": per_million(sum(case.account.num_late for case in cases)),
        "late_kept_per_million": per_million(sum(case.account.num_late_kept for case in cases)),
        "requests": sum(case.account.num_offered for case in cases),
        "other_ends": sum(sum(case.account.others.values()) for case in cases),
    }
    # What was refused during the pause was heard after it, whatever the server did.
    refusing = [case for case in cases if case.part != "pause" and case.account.refusals]
    for percent in (50, 99):
        times = [(case.account.refusal_ms(percent), case.slo_ms) for case in refusing]
        if times:
            figures[f"refusal_ms_p{percent}"] = statistics.median(ms for ms, _ in times)
            shares = [ms / slo_ms for ms, slo_ms in times]
            figures[f"refusal_slo_share_p{percent}"] = statistics.median(shares)
            figures[f"refusal_slo_share_p{percent}_worst"] = max(shares)
    limited = [case for case in cases if case.part == "device"]
    for num_models in sorted({case.num_models for case in limited}):
        found = [case for case in limited if case.num_models == num_models]
        figures[f"device_{num_models}_capacity_rps"] = found[0].capacity_rps
        for multiple in sorted({case.multiple for case in found}):
            shares = [case.goodput_share for case in found if case.multiple == multiple]
            figures[f"device_{num_models}_x{multiple:g}_goodput_share_worst"] = min(shares)
    for account in (case.account for case in cases if case.part == "flood"):
        figures["goodput_20x_share"] = account.goodput_rps / _FLOODED_RPS
        figures["flood_refusal_ms_p50"] = account.refusal_ms(50)
        figures["flood_refusal_ms_p99"] = account.refusal_ms(99)
    if paused := [case for case in cases if case.part == "pause"]:
        figures["pause_late_successes"] = sum(case.account.num_late for case in paused)
    return figures


def extra(_setting: Setting, cases: Sequence[PromiseCase]) -> dict[str, Any]:
    """What the client remarked."""
    return {
        "remarks": sorted({remark for case in cases for remark in case.account.remarks}),
        "kernel_stamps": all(case.account.kernel_stamps for case in cases),
    }


STUDY = Study(
    name="live_promises",
    setting=Setting(),
    ask=measure,
    key="",
    figures=lambda _, cases: figures_of(cases),
    tables={"": lambda _, cases: (case.row() for case in cases)},
    extra=extra,
)
