"""Floods: one client asks for far more than its share, together with others that ask for little.

Who floods is told by the name: its tenant begins with `flood`, or, where requests carry no tenant, its models
do. All others are innocent, and their answers are held against what they get in `without`, the same load
without the flood. Rates are of ResNet50 on Table 1's GPU, which answers 380 r/s one by one and 980 r/s in
batches of 16.
"""

from __future__ import annotations

from functools import partial

from experiments.policies.load import RESNET, Load, case_of, hosted, ms, poisson, s
from experiments.simulator import Case
from traces.arrivals import Bursty, Source

_SECONDS = 4
#: Tenants of a client that makes up a new name for each request.
_NUM_NAMES = 4000


def _family(
    name: str,
    flood_rps: float,
    flood_slo_ms: float,
    *,
    innocents: tuple[int, float],
    slo_ms: float = 50,
    bursts_ms: tuple[int, int] | None = None,
    shared_models: int = 0,
    tenants: bool = True,
    flood_models: int = 1,
    flood_names: int = 1,
    gpus: int = 1,
    pages: int = 1376,
) -> Load:
    """A flood together with innocent tenants.

    Args:
        name: the family's.
        flood_rps: what the flood asks for.
        flood_slo_ms: its SLO.
        innocents: number of innocent tenants, each with a model of its own where none are shared; what each asks for.
        slo_ms: SLO of the innocent.
        bursts_ms: mean lengths of the flood's bursts and of the pauses between; None: there are no bursts.
        shared_models: models that all ask for, the flood too; 0: each has its own.
        tenants: requests carry tenants; else only models tell them apart.
        flood_models: models of the flood where none are shared.
        flood_names: tenants of the flood.
        gpus: number of workers.
        pages: of each.
    """
    num_innocent, innocent_rps = innocents

    def flood(models: range, whose: range | tuple[int, ...], seed: int) -> Source:
        if bursts_ms is None:
            return poisson(models, flood_rps, flood_slo_ms, _SECONDS, seed, tenants=whose)
        burst_ms, pause_ms = bursts_ms
        return Bursty(
            models=models,
            tenants=whose,
            rate_rps=flood_rps,
            burst_ns=ms(burst_ms),
            pause_ns=ms(pause_ms),
            slo_ns=ms(flood_slo_ms),
            end_ns=s(_SECONDS),
            seed=seed,
        )

    def case(seed: int, *, flooded: bool) -> Case:
        people = [f"innocent-{number}" for number in range(num_innocent)]
        if shared_models:
            names = [f"shared-{number}" for number in range(shared_models)]
            own, floods = [range(shared_models)] * num_innocent, range(shared_models)
        else:
            names = people + [f"flood-{number}" for number in range(flood_models)]
            own = [range(number, number + 1) for number in range(num_innocent)]
            floods = range(num_innocent, len(names))
        sources: list[Source] = [
            poisson(
                models,
                innocent_rps,
                slo_ms,
                _SECONDS,
                1000 * seed + number,
                tenants=(number + 1,) if tenants else (0,),
            )
            for number, models in enumerate(own)
        ]
        people += [f"flood-{number}" for number in range(flood_names)]
        if flooded:
            whose = range(num_innocent + 1, len(people) + 1) if tenants else (0,)
            sources.append(flood(floods, whose, 1000 * seed + 999))
        models = tuple(hosted(model, RESNET) for model in names)
        known = ("", *people) if tenants else ("",)
        return case_of(models, sources, seed, _SECONDS, gpus=gpus, pages=pages, tenants=known)

    without = partial(case, flooded=False)
    return Load(name, "flood", partial(case, flooded=True), without=without, compared="innocent")


_8x75, _8x60, _6x90, _6x70 = (
    partial(_family, innocents=innocents) for innocents in ((8, 75), (8, 60), (6, 90), (6, 70))
)

FAMILIES: tuple[Load, ...] = (
    # One model each, told apart by the model, by the tenant; then one model for all.
    _8x75("flood_model", 2500, 50, tenants=False),
    _8x75("flood_tenant", 2500, 50),
    _8x75("flood_shared", 2500, 50, shared_models=1),
    _family("flood_shared_3", 1800, 40, innocents=(5, 60), slo_ms=40, shared_models=3),
    # The flood's SLO is longer, or shorter: deadline order alone serves it last, or first.
    _8x75("flood_shared_patient", 2500, 250, shared_models=1),
    _8x75("flood_shared_urgent", 2500, 15, shared_models=1),
    _8x60("flood_urgent", 2500, 15),
    # It comes in bursts, each longer than the SLO, or shorter.
    _6x90("flood_bursts", 6000, 60, bursts_ms=(300, 400), slo_ms=60, shared_models=1),
    _6x70("flood_short_bursts", 9000, 60, bursts_ms=(30, 70), slo_ms=60, tenants=False),
    # Several GPUs.
    _family("flood_gpus", 7000, 50, innocents=(12, 120), shared_models=4, gpus=4),
    _family("flood_models_gpus", 5000, 50, innocents=(20, 50), flood_models=3, tenants=False, gpus=3),
    # What is asked cannot be in time: one by one takes 2.6 ms.
    _8x75("flood_hopeless", 4000, 2.5, shared_models=1),
    _8x60("flood_barely", 3000, 5, shared_models=1),
    # Cold models of one tenant: 600 where 160 fit, together with 40 that others ask for now and then.
    _family("flood_cold", 800, 100, innocents=(40, 5), slo_ms=100, flood_models=600, pages=1120),
    # A client that makes up a tenant for each request.
    _8x75("flood_names", 2500, 50, flood_names=_NUM_NAMES),
    _8x75("flood_names_shared", 2500, 50, shared_models=1, flood_names=_NUM_NAMES),
)  # fmt: skip
