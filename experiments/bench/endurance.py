"""Does a server stay as it was: overload for as long as one likes, and a neighbour who floods it.

`make bench NAME=bench-endurance`, in half an hour, on a machine with nothing else to do; the record is `endurance.json`. A real
`clockwright up` with modelled devices of exactly 10 ms per request, SLO 100 ms, and `open_loop` as the client.

* `overload`: the case of `experiments.bench.serve` at one and a half times and three times what the device can do, each for
  `--seconds`. Goodput, the time to a refusal and the memory of the server, by tenths of the run: `decay_pct` is
  how much less is answered in the last tenth than in the first.
* `neighbour`: own requests, a fifth of what a device can do, without and with a neighbour who asks ten times what
  a device can do, in turns. `apart`: each has a device, so that front and controller are all they share. `shared`:
  one device for both, each a tenant. There an own request waits for an execution of the neighbour's that runs, and
  for those that are due before it, so its latency may grow up to the SLO; what is promised is the answer in time.

    python -m experiments bench-endurance --seconds 600
    python -m experiments bench-endurance --seconds 10 --turns 1 --turn-seconds 5 --directory /tmp/endurance
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, PAGE_BYTES
from experiments.live.live_promises import served
from experiments.live.live_run import LiveModel
from experiments.live.local_server import LocalServer, further_worker
from experiments.live.open_loop import Account, ClientLoad, OpenLoop, await_model, offer
from experiments.live.processor_time import family, rss_bytes
from experiments.study.bench import bench
from experiments.study.study import chosen
from modelzoo.profile import Profile, ProfileRow, save_profile

_DEVICE_RPS = 100.0
_SLO_MS = 100
_TENTHS = 10
_NAMES = ["own", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    #: Length of each overload.
    seconds: float = 600.0
    multiples: tuple[float, ...] = (1.5, 3.0)
    #: Own requests alone, then together with the neighbour: so many times, each for so long.
    turns: int = 5
    turn_seconds: float = 20.0
    own_share: float = 0.2
    neighbour_multiple: float = 10.0
    parts: tuple[str, ...] = ("overload", "neighbour_apart", "neighbour_shared")
    seed: int = 0

    def __post_init__(self) -> None:
        chosen("part", self.parts, PARTS)
        if min(self.seconds, self.turns, self.turn_seconds) < 1:
            raise ConfigError("--seconds, --turns and --turn-seconds: expected 1 or more")


# --- overload --------------------------------------------------------------------------------------


def overload(setting: Setting) -> dict[str, float]:
    """Overload one server at one rate after the other."""
    figures: dict[str, float] = {}
    for number, multiple in enumerate(setting.multiples):
        with served("10ms", 1) as (server, models):
            load = ClientLoad(
                address=server.address, models=models, slo_ms=_SLO_MS, seconds=setting.seconds,
                rate=multiple * _DEVICE_RPS, seed=setting.seed + number,
            )  # fmt: skip
            account, rss_mib = _watched(load, server)
        for name, value in decay_of(account, rss_mib).items():
            figures[f"overload_x{multiple:g}_{name}"] = value
    return figures


def _watched(load: ClientLoad, server: LocalServer) -> tuple[Account, list[float]]:
    """Offer a load, and look at the server's memory at every tenth of it."""
    rss_mib = []
    with OpenLoop(load) as client:
        for _ in range(_TENTHS):
            time.sleep(load.seconds / _TENTHS)
            rss_mib.append(sum(map(rss_bytes, family(server.process.pid))) / 2**20)
        return client.account(), rss_mib


def decay_of(account: Account, rss_mib: Sequence[float]) -> dict[str, float]:
    """Name every number of an overload: the whole, and how it changed.

    Args:
        account: the client's.
        rss_mib: memory of the server after each tenth.
    """
    tenth_s = account.seconds / _TENTHS
    tenths = [account.part(n * tenth_s, (n + 1) * tenth_s) for n in range(_TENTHS)]
    first, last = tenths[0], tenths[-1]
    return {
        "offered_rps": account.num_offered / account.seconds,
        "goodput_rps": account.goodput_rps,
        "decay_pct": 100 * (1 - last.goodput_rps / max(first.goodput_rps, 1e-9)),
        "late_successes": account.num_late,
        "other_ends": sum(account.others.values()),
        "refusal_p50_ms_first_tenth": first.refusal_ms(50),
        "refusal_p50_ms_last_tenth": last.refusal_ms(50),
        # The first tenth warms up.
        "rss_growth_mib": rss_mib[-1] - rss_mib[1],
    }


# --- the neighbour ---------------------------------------------------------------------------------


@contextmanager
def neighbours(*, apart: bool) -> Iterator[str]:
    """A server with the models `own` and `other`, on a device for each or on one; gives its address."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        for name in _NAMES:
            model = LiveModel(name=name, copies=1, batch_sizes=(1,))
            model.write(Path(scratch) / "models" / name)
        devices: list[list[str]] = []
        for held in [[name] for name in _NAMES] if apart else [_NAMES]:
            rows = {
                name: ProfileRow(
                    name=name,
                    weights_bytes=PAGE_BYTES,
                    load_ns=NS_PER_MS,
                    exec_ns={1: 10 * NS_PER_MS},
                )
                for name in held
            }
            path = Path(scratch) / f"{held[0]}.json"
            save_profile(Profile(name=path.stem, rows=rows), path)
            devices.append(["--device", f"modelled:{path}", "--cache-dir", f"{scratch}/cache"])
        server = stack.enter_context(LocalServer(["--models", f"{scratch}/models", *devices[0]]))
        for more in devices[1:]:
            stack.enter_context(further_worker(server.address, "--id", "more", *more))
        for name in _NAMES:
            await_model(server.address, name)
        yield server.address


def neighbour(setting: Setting, *, apart: bool) -> dict[str, float]:
    """Own requests without and with the neighbour, in turns."""
    accounts: dict[str, list[Account]] = {"alone": [], "beside": [], "flood": []}
    with neighbours(apart=apart) as address:
        for turn in range(setting.turns):
            # The same arrivals without and with the neighbour.
            own = ClientLoad(
                address=address, models=("own",), slo_ms=_SLO_MS, seconds=setting.turn_seconds,
                rate=setting.own_share * _DEVICE_RPS, seed=setting.seed + turn, tenant="own",
            )  # fmt: skip
            rate = setting.neighbour_multiple * _DEVICE_RPS
            flood = replace(own, models=("other",), tenant="other", rate=rate)
            accounts["alone"].append(offer(own))
            with OpenLoop(flood) as flooding, OpenLoop(own) as asking:
                accounts["beside"].append(asking.account())
                accounts["flood"].append(flooding.account())
    return neighbour_figures(accounts)


def neighbour_figures(accounts: Mapping[str, Sequence[Account]]) -> dict[str, float]:
    """Name every number; medians over the turns, and the ratio of a turn's two p99.

    Args:
        accounts: those of own requests without and with the neighbour, and the neighbour's, one for each turn.
    """
    figures: dict[str, float] = {}
    for name, found in accounts.items():
        in_time = (100 * (each.num_ok - each.num_late) / max(each.num_offered, 1) for each in found)
        figures[f"{name}_in_time_pct"] = statistics.median(in_time)
        figures[f"{name}_p99_ms"] = statistics.median(each.latency_ms(99) for each in found)
        figures[f"{name}_goodput_rps"] = statistics.median(each.goodput_rps for each in found)
    ratios = (
        beside.latency_ms(99) / max(alone.latency_ms(99), 1e-9)
        for alone, beside in zip(accounts["alone"], accounts["beside"], strict=True)
    )
    return figures | {"p99_ratio": statistics.median(ratios)}


# --- all of it -------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[Setting], dict[str, float]]] = {
    "overload": overload,
    "neighbour_apart": lambda setting: neighbour(setting, apart=True),
    "neighbour_shared": lambda setting: neighbour(setting, apart=False),
}


def measure(setting: Setting) -> dict[str, float]:
    """Measure the parts that are asked for."""
    figures: dict[str, float] = {}
    for part in setting.parts:
        start = "" if part == "overload" else f"{part}_"
        figures |= {f"{start}{name}": value for name, value in PARTS[part](setting).items()}
    return figures


STUDY = bench("bench-endurance", Setting(), measure)
