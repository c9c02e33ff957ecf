"""A load on which policies are compared, and how one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from experiments.clockwork_paper import cases
from experiments.clockwork_paper.cases import NOISE
from experiments.simulator import Case, HostedModel
from modelzoo.profile import Noise, ProfileRow, load_profile
from traces.arrivals import Bursty, ClosedLoop, Poisson, Recorded, Source

#: Requests with such an SLO are batch clients'.
BATCH_SLO_NS = 3600 * NS_PER_S
#: Networks of the paper's Table 1, and the one of its experiments with one kind of model.
ROWS = load_profile("table1").rows
RESNET = ROWS[cases.ARCHITECTURE]

#: Models that are asked at random, by position; requests per second of them all, and their SLO in ms.
Asked = tuple[Sequence[int], float, float]
#: A stretch of time: begin and end in seconds, and requests per second in it.
Stretch = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Load:
    """A load, not yet drawn: by its name and a seed it gives the same requests to every policy."""

    name: str
    #: Section of the table: one of the paper's figures, or what a family of unseen cases tries (`spikes`, `links`).
    group: str
    #: The case of a seed, under the default policy; the study that runs it replaces `case.scheduler`.
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
    #: `worth`: all, each request by its rows and its weight.
    compared: Literal["all", "innocent", "small", "worth"] = "all"

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
    tenants: Sequence[int] = (0,),
) -> Poisson:
    """Requests at random times, to all of these models alike."""
    return Poisson(
        models=models,
        rate_rps=rate_rps,
        slo_ns=ms(slo_ms),
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
    """Models on equal GPUs, and the clients that ask for them until the end."""
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


# --- models that are asked at random -------------------------------------------------------------


def asked_at_random(
    models: tuple[HostedModel, ...],
    *asked: Asked,
    seconds: float,
    seeds: tuple[int, int] = (1000, 1),
    bursts_ms: float = 0.0,
    gpus: int = 1,
    pages: int = 1376,
    noise: Noise = NOISE,
    **fields: Any,  # noqa: ANN401
) -> Callable[[int], Case]:
    """Describe groups of models, each asked by a Poisson process.

    Args:
        models: in the cluster.
        asked: the groups.
        seconds: length of the run.
        seeds: group n of a case with seed s draws from `seeds[0] * s + seeds[1] * n`.
        bursts_ms: mean length of bursts, in which all is asked, and of the pauses between; 0: no bursts.
        gpus: number of equal workers.
        pages: of each one's weights cache.
        noise: of LOADs and EXECs.
        fields: more of the case.
    """

    def source(seed: int, of: Sequence[int], rate_rps: float, slo_ms: float) -> Source:
        if not bursts_ms:
            return poisson(of, rate_rps, slo_ms, seconds, seed)
        return Bursty(
            models=of,
            rate_rps=2 * rate_rps,
            burst_ns=ms(bursts_ms),
            pause_ns=ms(bursts_ms),
            slo_ns=ms(slo_ms),
            end_ns=s(seconds),
            seed=seed,
        )

    def case(seed: int) -> Case:
        sources = [
            source(seeds[0] * seed + seeds[1] * number, *group)
            for number, group in enumerate(asked)
        ]
        made = case_of(models, sources, seed, seconds, gpus=gpus, pages=pages, noise=noise)
        return replace(made, **fields)

    return case


def alike(
    name: str,
    group: str,
    models: tuple[HostedModel, ...],
    rate_rps: float,
    slo_ms: float,
    gpus: int,
    *,
    fault: Mapping[str, Any] | None = None,
    faultless: bool = False,
    ways_ms: float = 0.0,
    begin_s: float = 0.0,
    seconds: float = 5.0,
    **others: Any,  # noqa: ANN401
) -> Load:
    """Equally popular models that are asked at random.

    Args:
        name: the load's.
        group: the load's.
        models: in the cluster.
        rate_rps: of all models together.
        slo_ms: of every request.
        gpus: number of equal workers.
        fault: fields of the case with the fault.
        faultless: the load is held against the same without the fault.
        ways_ms: what that lacks of the SLO.
        begin_s: requests before this are not counted.
        seconds: length of the run.
        others: as for `asked_at_random`.
    """

    def drawn(slo_ms: float, **fault: Any) -> Callable[[int], Case]:  # noqa: ANN401
        asked = (range(len(models)), rate_rps, slo_ms)
        return asked_at_random(
            models, asked, seconds=seconds, seeds=(1, 0), gpus=gpus, **others, **fault
        )

    without = drawn(slo_ms - ways_ms) if faultless else None
    return Load(name, group, drawn(slo_ms, **(fault or {})), s(begin_s), without=without)


# --- groups whose rates change --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Some models that are asked alike."""

    row: ProfileRow
    count: int
    stretches: Sequence[Stretch]
    slo_ms: float
    _: KW_ONLY
    #: Exponent of the models' popularity: 0 for equal ones.
    zipf: float = 0.0
    #: Each stretch has one model only, the next one in turn.
    moves: bool = False
    #: Whose requests these are; empty: of no tenant.
    tenant: str = ""

    def source(self, first: int, tenant: int, generator: np.random.Generator) -> Recorded:
        """Draw a Poisson process whose rate changes.

        Args:
            first: position of the first model.
            tenant: position of the tenant.
            generator: draws.
        """
        times: list[npt.NDArray[np.float64]] = []
        models: list[npt.NDArray[np.int64]] = []
        popularity = np.power(np.arange(1, self.count + 1, dtype=np.float64), -self.zipf)
        popularity /= popularity.sum()
        for turn, (begin_s, end_s, rate_rps) in enumerate(self.stretches):
            number = generator.poisson(rate_rps * (end_s - begin_s))
            times.append(np.sort(begin_s + (end_s - begin_s) * generator.random(number)))
            if self.moves:
                models.append(np.full(number, first + turn % self.count))
            else:
                models.append(first + generator.choice(self.count, size=number, p=popularity))
        end_s = max(end_s for _, end_s, _ in self.stretches)
        whose = (tenant,) * sum(map(len, models))
        found = recorded(np.concatenate(times), np.concatenate(models), self.slo_ms, end_s)
        return replace(found, tenants=whose)


def recorded(
    times_s: npt.NDArray[np.float64], models: npt.NDArray[np.integer], slo_ms: float, end_s: float
) -> Recorded:
    """Requests at these times, in seconds, each for the model at its position."""
    times_ns = (times_s * NS_PER_S).astype(np.int64)
    return Recorded(times_ns=times_ns, models=models, slo_ns=ms(slo_ms), end_ns=s(end_s))


def mixture(
    name: str,
    *groups: Group,
    group: str = "mixtures",
    gpus: int = 1,
    begin_s: float = 0.5,
    shared: bool = False,
    compared: Literal["all", "small", "worth"] = "all",
    bound: str = "density",
    fields: Mapping[str, Any] | None = None,
    **cluster: Any,  # noqa: ANN401
) -> Load:
    """Put groups side by side.

    Args:
        name: the load's.
        groups: the groups.
        group: the load's.
        gpus: number of equal workers.
        begin_s: requests before this are not counted, for caches are cold at the start.
        shared: all groups ask for the models of the first.
        compared: as in `Load`.
        bound: as in `Load`.
        fields: more of the case.
        cluster: as for `case_of`.
    """

    def case(seed: int) -> Case:
        models: list[HostedModel] = []
        sources: list[Source] = []
        tenants = sorted({each.tenant for each in groups} | {""})
        for number, each in enumerate(groups):
            first = 0 if shared else len(models)
            if not shared or not number:
                models += [hosted(f"{number}-{index}", each.row) for index in range(each.count)]
            generator = np.random.default_rng((seed, number))
            sources.append(each.source(first, tenants.index(each.tenant), generator))
        seconds = max(source.end_ns for source in sources) / NS_PER_S
        whose = tuple(tenants)
        made = case_of(tuple(models), sources, seed, seconds, gpus=gpus, tenants=whose, **cluster)
        return replace(made, **(fields or {}))

    return Load(name, group, case, s(begin_s), compared=compared, bound=bound)
