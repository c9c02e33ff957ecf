"""Workloads as functions of their axes: what figures, scenarios and unseen families are made of."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from experiments.simulator import Case, Cluster, HostedModel, copies_of
from modelzoo.profile import Noise, load_profile
from traces.arrivals import ClosedLoop, Poisson, Source, TraceReplay, Workload

#: The figures' own noise.
NOISE = Noise(exec_sigma=0.003, load_sigma=0.003)

#: The network of the paper's experiments with one kind of model.
ARCHITECTURE = "resnet50_v1b"
#: Figure 5's models, and the clients of each.
NUM_MODELS = 15
CONCURRENCY = 16

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
    return copies_of(load_profile("table1").row_for(ARCHITECTURE), count)


def case_of(
    models: tuple[HostedModel, ...],
    sources: Iterable[Source] = (),
    *,
    seed: int,
    end_ns: int,
    loops: Iterable[ClosedLoop] = (),
    num_gpus: int = 1,
    num_pages: int = 1376,
    noise: Noise = NOISE,
    tenants: tuple[str, ...] = ("",),
) -> Case:
    """Models on equal GPUs, and the clients that ask for them until the end."""
    return Case(
        workload=Workload(
            models=tuple(model.model_id for model in models),
            tenants=tenants,
            sources=tuple(sources),
            closed_loops=tuple(loops),
        ),
        cluster=Cluster(models=models, num_workers=num_gpus, num_pages=num_pages, noise=noise),
        duration_ns=end_ns,
        seed=seed,
    )


def closed(
    seed: int,
    *,
    slo_ms: int,
    duration_ns: int,
    num_models: int = NUM_MODELS,
    concurrency: int = CONCURRENCY,
    noise: Noise = NOISE,
) -> Case:
    """Figure 5: copies of ResNet50 on one GPU, each with clients who ask again when they are answered."""
    models = resnets(num_models)
    loops = (
        ClosedLoop(
            model=model, concurrency=concurrency, slo_ns=slo_ms * NS_PER_MS, end_ns=duration_ns
        )
        for model in range(num_models)
    )
    return case_of(models, loops=loops, seed=seed, end_ns=duration_ns, noise=noise)


def poisson(
    models: tuple[HostedModel, ...],
    seed: int,
    *,
    num_gpus: int,
    rate_rps: float,
    slo_ns: int,
    duration_ns: int,
    noise: Noise = NOISE,
) -> Case:
    """Equally popular models, asked at random, together at a mean rate."""
    source = Poisson(
        rate_rps=rate_rps, models=range(len(models)), slo_ns=slo_ns, end_ns=duration_ns, seed=seed
    )
    return case_of(models, [source], seed=seed, end_ns=duration_ns, num_gpus=num_gpus, noise=noise)


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
    return case_of(
        models, [source], seed=seed, end_ns=duration_ns, num_gpus=num_gpus, num_pages=num_pages
    )
