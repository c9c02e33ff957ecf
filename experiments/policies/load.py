"""A load on which policies are compared, and how one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, Required, TypedDict

from typing_extensions import Unpack, override

from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from experiments.clockwork_paper import cases
from experiments.clockwork_paper.cases import NOISE
from experiments.simulator import Case, HostedModel
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import ClosedLoop, Poisson, Source

#: Requests with such an SLO are batch clients'.
BATCH_SLO_NS = 3600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Load:
    """A load, not yet drawn: by its name and a seed it gives the same requests to every policy."""

    name: str
    #: Section of the table: one of the paper's figures, or what a family of unseen cases tries (`spikes`, `links`).
    group: str
    #: The case of a seed, under the default policy; whoever runs it replaces `case.scheduler`.
    case: Callable[[int], Case]
    #: Requests that arrive before this are not counted: caches are cold at the start.
    begin_ns: int = 0
    _: KW_ONLY
    #: The bound: `density` (B1), `memory` (B3), `residency` (B6), `rate` (closed loops), `rate_inside` (the same of
    #: what begins and ends in the measured time), or empty: none is known.
    bound: str = "density"
    #: The same load without the fault, where there is a fault; None: the load is held against its bound.
    #: Where the fault is what others ask, only whoever asks here is compared: tenants, or else models.
    without: Callable[[int], Case] | None = None
    #: Whose answers policies are compared by. Isolation gives to the small what the large would have made more
    #: of, so where it decides, the sum of all answers says nothing of whether it does what it is for.
    #: `innocent`: whose name begins so. `small`: tenants, or else models, that ask for less than the mean.
    compared: Literal["all", "innocent", "small"] = "all"

    @override
    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        """The load as the names of its figures spell it."""
        return f"{self.group}_{self.name}"


# --- in the units of who reads them ---------------------------------------------------------------


def ms(duration_ms: float) -> int:
    """So many milliseconds in nanoseconds."""
    return round(duration_ms * NS_PER_MS)


def s(duration_s: float) -> int:
    """So many seconds in nanoseconds."""
    return round(duration_s * NS_PER_S)


def poisson(
    models: Sequence[int],
    rate_rps: float,
    slo_ms: float,
    end_s: float,
    seed: int,
    *,
    begin_s: float = 0.0,
    tenants: Sequence[int] = (0,),
) -> Poisson:
    """Requests at random times, to all of these models alike."""
    return Poisson(
        models=models,
        rate_rps=rate_rps,
        slo_ns=ms(slo_ms),
        begin_ns=s(begin_s),
        end_ns=s(end_s),
        seed=seed,
        tenants=tenants,
    )


def case_of(
    models: tuple[HostedModel, ...],
    sources: Iterable[Source],
    seed: int,
    seconds: float,
    *,
    gpus: int = 1,
    pages: int = 1376,
    noise: Noise = NOISE,
    loops: Iterable[ClosedLoop] = (),
    tenants: tuple[str, ...] = ("",),
) -> Case:
    """Models on equal GPUs, and whoever asks for them until the end."""
    return cases.case_of(
        models,
        sources,
        seed=seed,
        end_ns=s(seconds),
        loops=loops,
        num_gpus=gpus,
        num_pages=pages,
        noise=noise,
        tenants=tenants,
    )


def row_of(
    name: str, load_ms: float, exec_ms: Mapping[int, float], *, megabytes: float = 100, **sizes: int
) -> ProfileRow:
    """A network's profile, of LOAD, of EXEC by batch size, and of sizes in bytes as `ProfileRow` has them."""
    return ProfileRow(
        name=name,
        weights_bytes=int(megabytes * 1_000_000),
        load_ns=ms(load_ms),
        exec_ns={size: ms(duration_ms) for size, duration_ms in exec_ms.items()},
        **sizes,
    )


def power_ms(first_ms: float, exponent: float) -> dict[int, float]:
    """EXEC by batch size, where b rows take `first_ms` times b to the power of `exponent`."""
    return {size: first_ms * size**exponent for size in (1, 2, 4, 8, 16)}


def hosted(name: str, row: ProfileRow) -> HostedModel:
    """A model of its own name."""
    return HostedModel(ModelId(name), row)


# --- equally popular models -----------------------------------------------------------------------


class RandomLoad(TypedDict, total=False):
    """Equally popular models, asked at random."""

    #: Mean rate of all models together.
    rate_rps: Required[float]
    #: SLO of every request.
    slo_ms: Required[float]
    gpus: Required[int]
    #: Each GPU's weights cache: 1,376 if not said. With few, loads matter.
    pages: int
    #: Length of the run: 5 if not said.
    seconds: int
    #: The figures' own if not said.
    noise: Noise
    #: Mean length of bursts, and of the pauses between; a Poisson process if not said.
    bursts_ms: int


def _drawn(models: tuple[HostedModel, ...], seed: int, load: RandomLoad) -> Case:
    return cases.poisson(
        models,
        seed,
        num_gpus=load["gpus"],
        rate_rps=load["rate_rps"],
        slo_ns=ms(load["slo_ms"]),
        duration_ns=load.get("seconds", 5) * NS_PER_S,
        num_pages=load.get("pages", 1376),
        noise=load.get("noise", NOISE),
        bursts_ns=load.get("bursts_ms", 0) * NS_PER_MS,
    )


def at_random(
    name: str,
    group: str,
    models: tuple[HostedModel, ...],
    fault: Mapping[str, Any],
    sound: Mapping[str, Any] | None = None,
    *,
    begin_ns: int = 0,
    ways_ms: float = 0.0,
    **load: Unpack[RandomLoad],
) -> Load:
    """A family of models asked at random.

    Args:
        name: the family's.
        group: the family's.
        models: in the cluster.
        fault: fields of the case that are otherwise with the fault.
        sound: those fields without it; None: there is no case without.
        begin_ns: the family's.
        ways_ms: what the case without the fault lacks of the SLO.
        load: what is asked.
    """

    def without(seed: int) -> Case:
        shorter: RandomLoad = {**load, "slo_ms": load["slo_ms"] - ways_ms}
        return replace(_drawn(models, seed, shorter), **(sound or {}))

    return Load(
        name,
        group,
        lambda seed: replace(_drawn(models, seed, load), **fault),
        begin_ns,
        without=None if sound is None else without,
    )
