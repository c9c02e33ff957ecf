"""Loads on which scheduling policies are compared.

Every case of the paper's Figures 5 to 9 and of its scale table, in short and each at a steady state; and
cases of our own, where more is asked than can be served, of the GPU or of memory. Every scenario is a
value: by its name and a seed it gives the same requests to every policy. Requests with an SLO of an hour
are batch clients'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.clockwork_paper import azure_replay, fig5, fig6, fig7, fig9, scale
from experiments.clockwork_paper.cases import NOISE, case_of, closed, poisson, pressed, resnets, zoo
from experiments.policies.unseen import averse, copies, mixtures, timers
from experiments.policies.unseen import unlike as unlike_kinds
from experiments.simulator import Case, HostedModel, WorkerKind, copies_of, slower_kind
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import ClosedLoop, Poisson

#: Noise of the Azure replay: none at all, and Figure 9's.
NOISE_MODELS = {
    model.name: model
    for model in (fig9.NoiseModel(name="exact", noise=Noise()), *fig9.NOISE_MODELS)
}

#: Symphony's example of a network that gains much by batches (arXiv 2308.07470): 1.053 b + 5.072 ms.
STEEP = ProfileRow(
    name="steep",
    weights_bytes=100_000_000,
    load_ns=8 * NS_PER_MS,
    exec_ns={size: 1_053_000 * size + 5_072_000 for size in (1, 2, 4, 8, 16)},
)

BATCH_SLO_NS = 3600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, not yet drawn."""

    name: str
    #: Section of the table: one of the paper's figures, or a group of our own cases.
    group: str
    case: Callable[[int], Case]
    begin_ns: int
    #: `density` (B1), `memory` (B3), `rate` (closed loops), or empty: none is known.
    bound: str = "density"

    @override
    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        """The scenario as the names of its figures spell it."""
        return f"{self.group}_{self.name}"


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
    seed: int, *, num_batch: int, concurrency: int, multiple: float, duration_ns: int
) -> Case:
    """Figure 7, right: 6 models at 200 r/s each on 6 GPUs, beside some with batch clients."""
    models = resnets(fig7.NUM_LS + num_batch)
    source = Poisson(
        models=range(fig7.NUM_LS),
        rate_rps=fig7.NUM_LS * fig7.LS_RPS,
        slo_ns=round(fig7.BASE_SLO_NS * multiple),
        end_ns=duration_ns,
        seed=seed,
    )
    loops = tuple(
        ClosedLoop(model=i, concurrency=concurrency, slo_ns=BATCH_SLO_NS, end_ns=duration_ns)
        for i in range(fig7.NUM_LS, len(models))
    )
    return case_of(
        models, [source], loops=loops, seed=seed, end_ns=duration_ns, num_gpus=fig7.NUM_GPUS
    )


def azure(
    seed: int, *, rate: float, noise_model: fig9.NoiseModel, warmup_ns: int, measured_ns: int
) -> Case:
    """The workload of Figures 8 and 9 at a multiple of its rate.

    A quarter of what is measured lies before a full hour, whose first minute is the trace's busiest.
    """
    setting = azure_replay.Setting(
        rate_rps=rate * azure_replay.Setting().rate_rps,
        num_minutes=60,
        noise=noise_model.noise,
        seed=seed,
    )
    trace = azure_replay.generated(setting)
    case = azure_replay.case_of(setting, trace, SchedulerConfig())
    hour_ns = (-trace.first_minute % 60) * 60 * NS_PER_S
    begin_ns = hour_ns - measured_ns // 4 - warmup_ns
    duration_ns = warmup_ns + measured_ns
    return replace(
        case,
        workload=case.workload.sliced(begin_ns, begin_ns + duration_ns),
        duration_ns=duration_ns,
        network=noise_model.network,
        faults=noise_model.faults,
    )


def unlike(seed: int, *, rate_rps: int, duration_ns: int) -> Case:
    """12 models on three GPUs and three that take 2.5 times as long, SLO 25 ms."""
    case = poisson(
        resnets(12),
        seed,
        num_gpus=6,
        rate_rps=rate_rps,
        slo_ns=25 * NS_PER_MS,
        duration_ns=duration_ns,
    )
    row = case.cluster.models[0].row
    kinds = (WorkerKind(), slower_kind("slower", [row], 2.5)) * 3
    return replace(case, cluster=replace(case.cluster, kinds=kinds))


def larger(seed: int, *, num_gpus: int, slo_ms: int, warmup_ns: int, measured_ns: int) -> Case:
    """A line of the scale table."""
    setting = scale.Setting(noise=NOISE, seed=seed)
    (size,) = (s for s in setting.sizes if s.num_gpus == num_gpus and not s.costs.charged)
    size = replace(size, warmup_ns=warmup_ns, measured_ns=measured_ns)
    return scale.case_of(setting, "clockwork", size, slo_ms)


# --- scenarios ------------------------------------------------------------------------------------


def _poisson(
    group: str,
    name: str,
    make: Callable[[], tuple[HostedModel, ...]],
    rate_rps: int,
    slo_ns: int,
    begin_s: int,
    *,
    gpus: int = 6,
) -> Scenario:
    """Six seconds of a Poisson process."""

    def case(seed: int) -> Case:
        return poisson(
            make(),
            seed,
            num_gpus=gpus,
            rate_rps=rate_rps,
            slo_ns=slo_ns,
            duration_ns=6 * NS_PER_S,
        )

    return Scenario(name, group, case, begin_s * NS_PER_S)


def _overload(name: str, num_models: int, rate_rps: int, slo_ms: int) -> Scenario:
    make = partial(zoo, num_models, 7) if name == "zoo48" else partial(resnets, num_models)
    name = f"{name}_r{rate_rps}_slo{slo_ms}"
    return _poisson("overload", name, make, rate_rps, slo_ms * NS_PER_MS, 3)


def _left(num_models: int, rate_rps: int, multiple: float) -> Scenario:
    name = f"n{num_models}_r{rate_rps}_x{multiple:.3g}"
    slo_ns = round(fig7.BASE_SLO_NS * multiple)
    return _poisson("fig7_left", name, partial(resnets, num_models), rate_rps, slo_ns, 2)


def _few(num_models: int, gpus: int, rps_per_gpu: int) -> Scenario:
    rate_rps, make = rps_per_gpu * gpus, partial(copies_of, STEEP, num_models)
    name = f"n{num_models}_gpus{gpus}_r{rate_rps}"
    return _poisson("few", name, make, rate_rps, 25 * NS_PER_MS, 3, gpus=gpus)


def _pressed(
    name: str, count: int, zipf: float, gpus: int, rate_rps: int, slo_ms: int, seconds: int
) -> Scenario:
    return Scenario(
        f"{name}_slo{slo_ms}",
        "zoo",
        lambda seed: pressed(
            zoo(count, seed),
            seed,
            zipf=zipf,
            num_gpus=gpus,
            num_pages=1000,
            rate_rps=rate_rps,
            slo_ns=slo_ms * NS_PER_MS,
            duration_ns=(4 + seconds) * NS_PER_S,
        ),
        4 * NS_PER_S,
        bound="memory",
    )


def _closed(slo_ms: int) -> Scenario:
    return Scenario(
        f"slo{slo_ms}",
        "fig5",
        lambda seed: closed(seed, slo_ms=slo_ms, duration_ns=5 * NS_PER_S),
        2 * NS_PER_S,
        bound="rate",
    )


def _shared(num_batch: int, concurrency: int, multiple: float) -> Scenario:
    name = f"m{num_batch}c{concurrency}" if num_batch else "m0"
    return Scenario(
        f"{name}_x{multiple:.3g}",
        "fig7_right",
        lambda seed: shared(
            seed,
            num_batch=num_batch,
            concurrency=concurrency,
            multiple=multiple,
            duration_ns=5 * NS_PER_S,
        ),
        2 * NS_PER_S,
    )


def _unlike(rate_rps: int) -> Scenario:
    # The bound assumes equal GPUs.
    return Scenario(
        f"r{rate_rps}",
        "unlike",
        lambda seed: unlike(seed, rate_rps=rate_rps, duration_ns=6 * NS_PER_S),
        2 * NS_PER_S,
        bound="",
    )


def _azure(rate: float, noise: str, seconds: int) -> Scenario:
    # Six GPUs load 700 models a second.
    warmup_ns = 8 * NS_PER_S
    return Scenario(
        f"x{rate:g}_{noise}",
        "azure",
        lambda seed: azure(
            seed,
            rate=rate,
            noise_model=NOISE_MODELS[noise],
            warmup_ns=warmup_ns,
            measured_ns=seconds * NS_PER_S,
        ),
        warmup_ns,
    )


def _larger(num_gpus: int, slo_ms: int, warmup_s: int, seconds: int) -> Scenario:
    return Scenario(
        f"gpus{num_gpus}_slo{slo_ms}",
        "scale",
        lambda seed: larger(
            seed,
            num_gpus=num_gpus,
            slo_ms=slo_ms,
            warmup_ns=warmup_s * NS_PER_S,
            measured_ns=seconds * NS_PER_S,
        ),
        warmup_s * NS_PER_S,
    )


def scenarios() -> list[Scenario]:
    """All scenarios on which policies are compared."""
    seven = fig7.Setting()
    multiples = [fig7.GROWTH**stage for stage in range(seven.num_stages)]
    return [
        *(_closed(slo_ms) for slo_ms in fig5.Setting().slos_ms),
        Scenario("ramp", "fig6", ramp, 5 * NS_PER_S, bound=""),
        Scenario(
            "end",
            "fig6",
            lambda seed: pressed(
                resnets(3600),
                seed,
                zipf=0.0,
                num_gpus=1,
                num_pages=1937,  # 31 GB
                rate_rps=1000,
                slo_ns=100 * NS_PER_MS,
                duration_ns=10 * NS_PER_S,
            ),
            4 * NS_PER_S,
            bound="",
        ),
        *(
            _left(num_models, rate_rps, multiple)
            for num_models in seven.nums_models
            for rate_rps in seven.rates_rps
            for multiple in multiples
        ),
        *(
            _shared(num_batch, concurrency, multiple)
            for num_batch, concurrency in seven.scenarios
            for multiple in multiples
        ),
        # Three seeds of this length would show a late answer in 100,000.
        *(_azure(1, noise, 40) for noise in ("exact", "noisy")),
        _azure(1, "quiet", 12),
        *(_azure(rate, noise, 12) for rate in (1.5, 2) for noise in ("exact", "noisy")),
        *(_larger(20, slo_ms, 6, 8) for slo_ms in (100, 25)),
        *(_larger(150, slo_ms, 1, 2) for slo_ms in (100, 25)),
        *(_overload("n48", 48, rate, 25) for rate in (4288, 5514, 9190)),
        *(_overload("n196", 196, rate, 50) for rate in (5514, 9190)),
        *(_overload("n12", 12, rate, 25) for rate in (5514,)),
        _overload("zoo48", 48, 3000, 50),
        _pressed("zoo600", 600, 0.8, 1, 600, 100, 8),
        _pressed("zoo600", 600, 0.8, 1, 600, 25, 8),
        _pressed("zoo1500", 1500, 1.1, 2, 2000, 100, 4),
    ]


def further_scenarios() -> list[Scenario]:
    """Scenarios for single pieces that matter nowhere else: few models on many GPUs, unlike GPUs; timers and others."""
    families = (
        *averse.FAMILIES,
        *copies.FAMILIES,
        *mixtures.CROWDS,
        *timers.FAMILIES,
        *unlike_kinds.FAMILIES,
    )
    return [
        *(Scenario(f.name, "unseen", f.case, f.begin_ns, bound="") for f in families),
        # Full batches could answer 730 per GPU and second.
        *(_few(num_models, 8, rps) for num_models in (1, 2, 4, 8) for rps in (550, 625)),
        *(_few(num_models, 32, rps) for num_models in (1, 4) for rps in (600, 690)),
        *(_unlike(rate_rps) for rate_rps in (1000, 2500, 4500)),
    ]


def named(key: str) -> Scenario:
    """The scenario with this key."""
    (scenario,) = (s for s in (*scenarios(), *further_scenarios()) if s.key == key)
    return scenario
