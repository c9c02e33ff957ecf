"""Floods: one client asks for far more than its share, beside others that ask for little.

Who floods is told by the name: its tenant begins with `flood`, or, where requests carry no tenant, its models
do. All others are innocent, and their answers are held against what they get in `without`, the same load
without the flood. Rates are of ResNet50 on Table 1's GPU, which answers 380 r/s one by one and 980 r/s in
batches of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from experiments.policies.load import Load, case_of, hosted, ms, poisson, s
from experiments.simulator import Case
from modelzoo.profile import load_profile
from traces.arrivals import Bursty, Source

_RESNET50 = load_profile("table1").row_for("resnet50_v1b")
_SECONDS = 4
#: Tenants of a client that makes up a new name for each request.
_NUM_NAMES = 4000

#: Makes the flood: from the positions of its models, of its tenants, and a seed.
Flood = Callable[[Sequence[int], Sequence[int], int], Source]


def _steady(rate_rps: float, slo_ms: float) -> Flood:
    """Requests at random times."""
    return lambda models, tenants, seed: poisson(
        models, rate_rps, slo_ms, _SECONDS, seed, tenants=tenants
    )


def _in_bursts(rate_rps: float, slo_ms: float, burst_ms: int, pause_ms: int) -> Flood:
    """Requests in bursts, and none between them."""
    return lambda models, tenants, seed: Bursty(
        models=models,
        tenants=tenants,
        rate_rps=rate_rps,
        burst_ns=ms(burst_ms),
        pause_ns=ms(pause_ms),
        slo_ns=ms(slo_ms),
        end_ns=s(_SECONDS),
        seed=seed,
    )


def _family(
    name: str,
    flood: Flood,
    *,
    num_innocent: int,
    innocent_rps: float,
    slo_ms: float = 50,
    shared_models: int = 0,
    tenants: bool = True,
    flood_models: int = 1,
    flood_names: int = 1,
    num_workers: int = 1,
    num_pages: int = 1376,
) -> Load:
    """A flood beside innocent tenants.

    Args:
        name: the family's.
        flood: its requests.
        num_innocent: tenants, each with a model of its own where none are shared.
        innocent_rps: what each of them asks for.
        slo_ms: SLO of the innocent.
        shared_models: models that all ask for, the flood too; 0: each has its own.
        tenants: requests carry tenants; else only models tell them apart.
        flood_models: models of the flood where none are shared.
        flood_names: tenants of the flood.
        num_workers: GPUs.
        num_pages: pages of each.
    """

    def case(seed: int, *, flooded: bool) -> Case:
        people = [f"innocent-{number}" for number in range(num_innocent)]
        if shared_models:
            names = [f"shared-{number}" for number in range(shared_models)]
            own = [range(shared_models)] * num_innocent
            floods = range(shared_models)
        else:
            names = people + [f"flood-{number}" for number in range(flood_models)]
            own = [range(number, number + 1) for number in range(num_innocent)]
            floods = range(num_innocent, len(names))
        sources: list[Source] = [
            poisson(
                own[number],
                innocent_rps,
                slo_ms,
                _SECONDS,
                1000 * seed + number,
                tenants=(number + 1,) if tenants else (0,),
            )
            for number in range(num_innocent)
        ]
        people += [f"flood-{number}" for number in range(flood_names)]
        if flooded:
            who = range(num_innocent + 1, len(people) + 1) if tenants else (0,)
            sources.append(flood(floods, who, 1000 * seed + 999))
        return case_of(
            tuple(hosted(model, _RESNET50) for model in names),
            sources,
            seed,
            _SECONDS,
            gpus=num_workers,
            pages=num_pages,
            tenants=("", *people) if tenants else ("",),
        )

    return Load(
        name,
        "flood",
        partial(case, flooded=True),
        without=partial(case, flooded=False),
        compared="innocent",
    )


# By the number of innocents and what each of them asks for.
_8x75, _8x60, _6x90, _6x70 = (
    partial(_family, num_innocent=number, innocent_rps=rate_rps)
    for number, rate_rps in ((8, 75), (8, 60), (6, 90), (6, 70))
)

FAMILIES: tuple[Load, ...] = (
    # One model each, told apart by the model, by the tenant; then one model for all.
    _8x75("flood_model", _steady(2500, 50), tenants=False),
    _8x75("flood_tenant", _steady(2500, 50)),
    _8x75("flood_shared", _steady(2500, 50), shared_models=1),
    _family(
        "flood_shared_3", _steady(1800, 40), num_innocent=5, innocent_rps=60, slo_ms=40,
        shared_models=3,
    ),
    # The flood's SLO is longer, or shorter: deadline order alone serves it last, or first.
    _8x75("flood_shared_patient", _steady(2500, 250), shared_models=1),
    _8x75("flood_shared_urgent", _steady(2500, 15), shared_models=1),
    _8x60("flood_urgent", _steady(2500, 15)),
    # It comes in bursts, each longer than the SLO, or shorter.
    _6x90("flood_bursts", _in_bursts(6000, 60, 300, 400), slo_ms=60, shared_models=1),
    _6x70("flood_short_bursts", _in_bursts(9000, 60, 30, 70), slo_ms=60, tenants=False),
    # Several GPUs.
    _family(
        "flood_gpus", _steady(7000, 50), num_innocent=12, innocent_rps=120, shared_models=4,
        num_workers=4,
    ),
    _family(
        "flood_models_gpus", _steady(5000, 50), num_innocent=20, innocent_rps=50, flood_models=3,
        tenants=False, num_workers=3,
    ),
    # What is asked cannot be in time: one by one takes 2.6 ms.
    _8x75("flood_hopeless", _steady(4000, 2.5), shared_models=1),
    _8x60("flood_barely", _steady(3000, 5), shared_models=1),
    # Cold models of one tenant: 600 where 160 fit, beside 40 that others ask for now and then.
    _family(
        "flood_cold", _steady(800, 100), num_innocent=40, innocent_rps=5, slo_ms=100,
        flood_models=600, num_pages=1120,
    ),
    # A client that makes up a tenant for each request.
    _8x75("flood_names", _steady(2500, 50), flood_names=_NUM_NAMES),
    _8x75("flood_names_shared", _steady(2500, 50), shared_models=1, flood_names=_NUM_NAMES),
)  # fmt: skip
