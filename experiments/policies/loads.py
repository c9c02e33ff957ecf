"""Models and open-loop requests that scenarios and unseen families are made of."""

from __future__ import annotations

import numpy as np

from clockwright.units import NS_PER_S, ModelId
from experiments.clockwork_paper import fig5
from experiments.simulator import Case, Cluster, HostedModel, copies_of
from modelzoo.profile import Noise, load_profile
from traces.arrivals import Bursty, Poisson, Source, TraceReplay, Workload

#: The figures' own noise.
NOISE = Noise(exec_sigma=0.003, load_sigma=0.003)

_MINUTE_NS = 60 * NS_PER_S
# Counts of a replay are whole numbers; scaled by this, the rare models keep their rates.
_COUNT_SCALE = 0.01


def zoo(count: int, seed: int) -> tuple[HostedModel, ...]:
    """Models of Table 1, drawn with replacement."""
    rows = list(load_profile("table1").rows.values())
    picks = np.random.default_rng(seed).integers(len(rows), size=count)
    return tuple(HostedModel(ModelId(f"m{i}"), rows[pick]) for i, pick in enumerate(picks))


def resnets(count: int) -> tuple[HostedModel, ...]:
    """Copies of the paper's ResNet50."""
    return copies_of(load_profile("table1").row_for(fig5.ARCHITECTURE), count)


def poisson(
    models: tuple[HostedModel, ...],
    seed: int,
    *,
    num_gpus: int,
    rate_rps: float,
    slo_ns: int,
    duration_ns: int,
    num_pages: int = 1376,
    noise: Noise = NOISE,
    bursts_ns: int = 0,
) -> Case:
    """Equally popular models, asked at random.

    Args:
        models: the models.
        seed: of the arrivals, and of the noise.
        num_gpus: number of GPUs.
        rate_rps: mean rate of all models together.
        slo_ns: of every request.
        duration_ns: arrivals end here.
        num_pages: of each GPU's weights cache.
        noise: of EXECs and LOADs.
        bursts_ns: mean length of bursts, in which all is asked, and of the pauses between; 0: there are none.
    """
    source: Source
    if bursts_ns:
        source = Bursty(
            models=range(len(models)),
            rate_rps=2 * rate_rps,
            burst_ns=bursts_ns,
            pause_ns=bursts_ns,
            slo_ns=slo_ns,
            end_ns=duration_ns,
            seed=seed,
        )
    else:
        source = Poisson(
            models=range(len(models)),
            rate_rps=rate_rps,
            slo_ns=slo_ns,
            end_ns=duration_ns,
            seed=seed,
        )
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=(source,)),
        cluster=Cluster(models=models, num_workers=num_gpus, num_pages=num_pages, noise=noise),
        duration_ns=duration_ns,
        seed=seed,
    )


def pressed(
    models: tuple[HostedModel, ...],
    seed: int,
    *,
    zipf: float,
    num_gpus: int,
    num_pages: int,
    rate_rps: float,
    slo_ns: int,
    duration_ns: int,
) -> Case:
    """More models than memory holds, with Zipf popularity, dealt out at random."""
    popularity = 1.0 / np.arange(1, len(models) + 1) ** zipf
    popularity /= popularity.sum()
    popularity = np.random.default_rng(seed + 100).permutation(popularity)
    per_minute = np.rint(popularity * rate_rps * 60 / _COUNT_SCALE).astype(np.int32)
    source = TraceReplay(
        counts=np.repeat(per_minute[:, None], -(-duration_ns // _MINUTE_NS), axis=1),
        models=np.arange(len(models)),
        slo_ns=slo_ns,
        seed=seed,
        scale=_COUNT_SCALE,
    )
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=(source,)),
        cluster=Cluster(models=models, num_workers=num_gpus, num_pages=num_pages, noise=NOISE),
        duration_ns=duration_ns,
        seed=seed,
    )
