"""What a family of unseen cases is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Required, TypedDict

from typing_extensions import Unpack, override

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.clockwork_paper.cases import NOISE, poisson
from experiments.simulator import Case, HostedModel
from modelzoo.profile import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A load, not yet drawn: by its name and a seed it gives the same requests to every policy."""

    name: str
    #: What the family tries: `spikes`, `links`, `flood`, ... Families of one part are in one module.
    part: str
    #: The case of a seed, under the default policy; whoever runs it replaces `case.scheduler`.
    case: Callable[[int], Case]
    #: The same load without the fault, where there is a fault; None: the family is held against its bound.
    #: Where the fault is what others ask, only whoever asks here is compared: tenants, or else models.
    without: Callable[[int], Case] | None = None
    #: The bound: `density` (B1), `memory` (B3), `residency` (B6), `rate` (closed loops), or empty: none is known.
    bound: str = "density"
    #: Requests that arrive before this are not counted: caches are cold at the start.
    begin_ns: int = 0
    #: Whose answers policies are compared by. Isolation gives to the small what the large would have made more
    #: of, so where it decides, the sum of all answers says nothing of whether it does what it is for.
    #: `innocent`: who asks in `without`, too. `small`: tenants, or else models, that ask for less than the mean.
    compared: Literal["all", "innocent", "small"] = "all"

    @override
    def __str__(self) -> str:
        return self.name


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


def case_of(models: tuple[HostedModel, ...], seed: int, load: RandomLoad) -> Case:
    """Draw a load."""
    return poisson(
        models,
        seed,
        num_gpus=load["gpus"],
        rate_rps=load["rate_rps"],
        slo_ns=round(load["slo_ms"] * NS_PER_MS),
        duration_ns=load.get("seconds", 5) * NS_PER_S,
        num_pages=load.get("pages", 1376),
        noise=load.get("noise", NOISE),
        bursts_ns=load.get("bursts_ms", 0) * NS_PER_MS,
    )


def at_random(
    name: str,
    part: str,
    models: tuple[HostedModel, ...],
    fault: Mapping[str, Any],
    sound: Mapping[str, Any] | None = None,
    *,
    begin_ns: int = 0,
    ways_ms: float = 0.0,
    **load: Unpack[RandomLoad],
) -> Family:
    """A family of models asked at random.

    Args:
        name: the family's.
        part: the family's.
        models: in the cluster.
        fault: fields of the case that are otherwise with the fault.
        sound: those fields without it; None: there is no case without.
        begin_ns: the family's.
        ways_ms: what the case without the fault lacks of the SLO.
        load: what is asked.
    """

    def without(seed: int) -> Case:
        shorter: RandomLoad = {**load, "slo_ms": load["slo_ms"] - ways_ms}
        return replace(case_of(models, seed, shorter), **(sound or {}))

    return Family(
        name=name,
        part=part,
        case=lambda seed: replace(case_of(models, seed, load), **fault),
        without=None if sound is None else without,
        begin_ns=begin_ns,
    )
