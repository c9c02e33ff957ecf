"""Loads on which scheduling policies are compared.

Every case of the paper's Figures 5 to 9 and of its scale table, in short and each at a steady state; and
cases of our own, where more is asked than can be served, of the GPU or of memory. Every scenario is a
value: by its name and a seed it gives the same requests to every policy. Requests with an SLO of an hour
are batch clients'.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product, starmap

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.clockwork_paper import azure_replay, fig5, fig6, fig7, fig9, scale
from experiments.clockwork_paper.cases import NOISE, closed, pressed, resnets, zoo
from experiments.policies.load import BATCH_SLO_NS, Load, alike, case_of, poisson, row_of
from experiments.policies.unseen import FAMILIES
from experiments.simulator import Case, WorkerKind, copies_of, slower_kind
from modelzoo.profile import Noise
from traces.arrivals import ClosedLoop

#: Noise of the Azure replay: none at all, and Figure 9's.
NOISE_MODELS = {
    model.name: model
    for model in (fig9.NoiseModel(name="exact", noise=Noise()), *fig9.NOISE_MODELS)
}

#: Symphony's example of a network that gains much by batches (arXiv 2308.07470): 1.053 b + 5.072 ms.
STEEP = row_of("steep", 8, {size: 1.053 * size + 5.072 for size in (1, 2, 4, 8, 16)})

# --- workloads ------------------------------------------------------------------------------------


def ramp(seed: int) -> Case:
    """Figure 6 in two minutes instead of an hour."""
    setting = fig6.Setting(
        step_ns=NS_PER_S // 40,
        lead_ns=10 * NS_PER_S,
        end_state_ns=20 * NS_PER_S,
        bucket_ns=10 * NS_PER_S,
        noise=NOISE,
        seed=seed,
    )
    return fig6.case_of(setting, "clockwork")


def shared(
    seed: int, *, num_batch: int, concurrency: int, multiple: float, seconds: float = 5
) -> Case:
    """Figure 7, right: 6 models at 200 r/s each on 6 GPUs, together with some with batch clients."""
    models = resnets(fig7.NUM_LS + num_batch)
    rate_rps, slo_ms = fig7.NUM_LS * fig7.LS_RPS, fig7.BASE_SLO_NS * multiple / NS_PER_MS
    source = poisson(range(fig7.NUM_LS), rate_rps, slo_ms, seconds, seed)
    loops = [
        ClosedLoop(model=i, concurrency=concurrency, slo_ns=BATCH_SLO_NS, end_ns=source.end_ns)
        for i in range(fig7.NUM_LS, len(models))
    ]
    return case_of(models, [source], seed, seconds, loops=loops, gpus=fig7.NUM_GPUS)


def azure(seed: int, *, rate: float, noise: str, warmup_s: int, measured_s: int) -> Case:
    """The workload of Figures 8 and 9 at a multiple of its rate.

    A quarter of what is measured lies before a full hour, whose first minute is the trace's busiest.
    """
    noise_model = NOISE_MODELS[noise]
    setting = azure_replay.Setting(
        rate_rps=rate * azure_replay.Setting().rate_rps,
        num_minutes=60,
        noise=noise_model.noise,
        seed=seed,
    )
    trace = azure_replay.generated(setting)
    case = azure_replay.case_of(setting, trace, SchedulerConfig())
    hour_ns = (-trace.first_minute % 60) * 60 * NS_PER_S
    begin_ns = hour_ns - measured_s * NS_PER_S // 4 - warmup_s * NS_PER_S
    duration_ns = (warmup_s + measured_s) * NS_PER_S
    return replace(
        case,
        workload=case.workload.sliced(begin_ns, begin_ns + duration_ns),
        duration_ns=duration_ns,
        network=noise_model.network,
        faults=noise_model.faults,
    )


def unlike(seed: int, *, rate_rps: int, seconds: float = 6) -> Case:
    """12 models on three GPUs and three that take 2.5 times as long, SLO 25 ms."""
    models = resnets(12)
    source = poisson(range(len(models)), rate_rps, 25, seconds, seed)
    case = case_of(models, [source], seed, seconds, gpus=6)
    kinds = (WorkerKind(), slower_kind("slower", [models[0].row], 2.5)) * 3
    return replace(case, cluster=replace(case.cluster, kinds=kinds))


def larger(seed: int, *, num_gpus: int, slo_ms: int, warmup_s: int, measured_s: int) -> Case:
    """A line of the scale table."""
    setting = scale.Setting(noise=NOISE, seed=seed)
    (size,) = (s for s in setting.sizes if s.num_gpus == num_gpus and not s.costs.charged)
    size = replace(size, warmup_ns=warmup_s * NS_PER_S, measured_ns=measured_s * NS_PER_S)
    return scale.case_of(setting, "clockwork", size, slo_ms)


# Parts of the unseen families on which single pieces are tried.
_TRIED = ("averse", "copies", "timers", "unforeseen", "unlike", "kinds")

# --- scenarios ------------------------------------------------------------------------------------


def _overload(name: str, num_models: int, rate_rps: int, slo_ms: int) -> Load:
    models = zoo(num_models, 7) if name == "zoo48" else resnets(num_models)
    key = f"{name}_r{rate_rps}_slo{slo_ms}"
    return alike(key, "overload", models, rate_rps, slo_ms, 6, begin_s=3, seconds=6)


def _left(num_models: int, rate_rps: int, multiple: float) -> Load:
    name = f"n{num_models}_r{rate_rps}_x{multiple:.3g}"
    slo_ms = fig7.BASE_SLO_NS * multiple / NS_PER_MS
    models = resnets(num_models)
    return alike(name, "fig7_left", models, rate_rps, slo_ms, 6, begin_s=2, seconds=6)


def _few(num_models: int, gpus: int, rps_per_gpu: int) -> Load:
    rate_rps, models = rps_per_gpu * gpus, copies_of(STEEP, num_models)
    name = f"n{num_models}_gpus{gpus}_r{rate_rps}"
    return alike(name, "few", models, rate_rps, 25, gpus, begin_s=3, seconds=6)


def _pressed(
    name: str, count: int, zipf: float, gpus: int, rate_rps: int, slo_ms: int, seconds: int
) -> Load:
    def case(seed: int) -> Case:
        return pressed(
            zoo(count, seed),
            seed,
            zipf=zipf,
            num_gpus=gpus,
            num_pages=1000,
            rate_rps=rate_rps,
            slo_ns=slo_ms * NS_PER_MS,
            duration_ns=(4 + seconds) * NS_PER_S,
        )

    return Load(f"{name}_slo{slo_ms}", "zoo", case, 4 * NS_PER_S, bound="memory")


def _closed(slo_ms: int) -> Load:
    case = partial(closed, slo_ms=slo_ms, duration_ns=5 * NS_PER_S)
    return Load(f"slo{slo_ms}", "fig5", case, 2 * NS_PER_S, bound="rate_inside")


def _shared(num_batch: int, concurrency: int, multiple: float) -> Load:
    name = f"m{num_batch}c{concurrency}" if num_batch else "m0"
    case = partial(shared, num_batch=num_batch, concurrency=concurrency, multiple=multiple)
    return Load(f"{name}_x{multiple:.3g}", "fig7_right", case, 2 * NS_PER_S)


def _azure(rate: float, noise: str, seconds: int) -> Load:
    # Six GPUs load 700 models a second.
    case = partial(azure, rate=rate, noise=noise, warmup_s=8, measured_s=seconds)
    return Load(f"x{rate:g}_{noise}", "azure", case, 8 * NS_PER_S)


def _larger(num_gpus: int, slo_ms: int, warmup_s: int, seconds: int) -> Load:
    case = partial(larger, num_gpus=num_gpus, slo_ms=slo_ms, warmup_s=warmup_s, measured_s=seconds)
    return Load(f"gpus{num_gpus}_slo{slo_ms}", "scale", case, warmup_s * NS_PER_S)


def full_memory(seed: int) -> Case:
    """Figure 6's end: 3,600 models on one GPU."""
    return pressed(
        resnets(3600),
        seed,
        zipf=0.0,
        num_gpus=1,
        num_pages=1937,  # 31 GB
        rate_rps=1000,
        slo_ns=100 * NS_PER_MS,
        duration_ns=10 * NS_PER_S,
    )


def scenarios() -> list[Load]:
    """All scenarios on which policies are compared."""
    seven = fig7.Setting()
    multiples = [fig7.GROWTH**stage for stage in range(seven.num_stages)]
    return [
        *map(_closed, fig5.Setting().slos_ms),
        Load("ramp", "fig6", ramp, 5 * NS_PER_S, bound=""),
        Load("end", "fig6", full_memory, 4 * NS_PER_S, bound=""),
        *starmap(_left, product(seven.nums_models, seven.rates_rps, multiples)),
        *(_shared(*mix, multiple) for mix, multiple in product(seven.scenarios, multiples)),
        # Three seeds of this length would show a late answer in 100,000.
        *(_azure(1, noise, 40) for noise in ("exact", "noisy")),
        _azure(1, "quiet", 12),
        *(_azure(rate, noise, 12) for rate in (1.5, 2) for noise in ("exact", "noisy")),
        *(_larger(20, slo_ms, 6, 8) for slo_ms in (100, 25)),
        *(_larger(150, slo_ms, 1, 2) for slo_ms in (100, 25)),
        *(_overload("n48", 48, rate, 25) for rate in (4288, 5514, 9190)),
        *(_overload("n196", 196, rate, 50) for rate in (5514, 9190)),
        _overload("n12", 12, 5514, 25),
        _overload("zoo48", 48, 3000, 50),
        _pressed("zoo600", 600, 0.8, 1, 600, 100, 8),
        _pressed("zoo600", 600, 0.8, 1, 600, 25, 8),
        _pressed("zoo1500", 1500, 1.1, 2, 2000, 100, 4),
    ]


def further_scenarios() -> list[Load]:
    """Scenarios for single pieces that matter nowhere else: few models on many GPUs, unlike GPUs; timers and others."""
    return [
        *(
            replace(family, group="unseen", bound="")
            for family in FAMILIES.values()
            if family.group in _TRIED or family.name.startswith("crowd_")
        ),
        # Full batches could answer 730 per GPU and second.
        *(_few(num_models, 8, rps) for num_models in (1, 2, 4, 8) for rps in (550, 625)),
        *(_few(num_models, 32, rps) for num_models in (1, 4) for rps in (600, 690)),
        # The bound assumes equal GPUs.
        *(
            Load(f"r{rps}", "unlike", partial(unlike, rate_rps=rps), 2 * NS_PER_S, bound="")
            for rps in (1000, 2500, 4500)
        ),
    ]


def named(key: str) -> Load:
    """The load with this key, of all scenarios and all families."""
    loads = (*scenarios(), *further_scenarios(), *FAMILIES.values())
    (load,) = (load for load in loads if load.key == key)
    return load
