"""Steps that now and then take many times as long as they should: a pause of the host, a retry of the device.

The fault touches one step in a hundred or fewer. `without` is the same load where none is slow, so a family's
share says what the fault costs beyond the answers that the slow steps themselves delay.
"""

from __future__ import annotations

from dataclasses import replace

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.policies.loads import poisson
from experiments.policies.unseen.family import Family
from experiments.simulator import Case, Faults, copies_of
from modelzoo.profile import Noise, load_profile

_ROWS = load_profile("table1").rows


def _spiked(
    name: str,
    *,
    rate_rps: float,
    slo_ms: float,
    share: float,
    factor: float,
    num_workers: int,
    num_models: int = 24,
    row: str = "resnet50_v1b",
    seconds: int = 5,
    sigma: float = 0.02,
    num_pages: int = 1376,
    bursts_ms: int = 0,
) -> Family:
    """A family of equal models.

    Args:
        name: the family's.
        rate_rps: mean rate of all models together.
        slo_ms: of every request.
        share: of LOADs and EXECs that are slow.
        factor: how many times as long as usual a slow one takes.
        num_workers: GPUs.
        num_models: copies of the row.
        row: of Table 1.
        seconds: length of the run.
        sigma: usual noise of EXECs and LOADs.
        num_pages: of each GPU's weights cache; with few, loads and their spikes matter.
        bursts_ms: mean length of bursts, and of the pauses between; 0: a Poisson process.
    """

    def case(seed: int, slow_share: float) -> Case:
        load = poisson(
            copies_of(_ROWS[row], num_models),
            seed,
            num_gpus=num_workers,
            rate_rps=rate_rps,
            slo_ns=round(slo_ms * NS_PER_MS),
            duration_ns=seconds * NS_PER_S,
            num_pages=num_pages,
            noise=Noise(exec_sigma=sigma, load_sigma=sigma),
            bursts_ns=bursts_ms * NS_PER_MS,
        )
        return replace(load, faults=Faults(slow_probability=slow_share, slow_factor=factor))

    return Family(
        name=name,
        part="spikes",
        case=lambda seed: case(seed, share),
        without=lambda seed: case(seed, 0.0),
    )


FAMILIES: tuple[Family, ...] = (
    # Busy, the queue fills batches of all sizes: the sizes that one slow EXEC takes away are missed at once.
    _spiked("spikes_busy", rate_rps=2400, slo_ms=50, share=0.003, factor=10, num_workers=4),
    _spiked("spikes_x5", rate_rps=1500, slo_ms=30, share=0.01, factor=5, num_workers=3),
    _spiked("spikes_x50", rate_rps=1800, slo_ms=40, share=0.001, factor=50, num_workers=4),
    _spiked("spikes_often", rate_rps=1200, slo_ms=60, share=0.02, factor=10, num_workers=4),
    # Below the factor at which an estimate leaves a measurement out.
    _spiked("spikes_x2", rate_rps=1500, slo_ms=25, share=0.02, factor=2.5, num_workers=3),
    # Overload for as long as it takes to lose every size.
    _spiked(
        "spikes_overload",
        rate_rps=1900,
        slo_ms=50,
        share=0.001,
        factor=20,
        num_workers=2,
        num_models=12,
        seconds=10,
    ),
    # Little work and little time: one slow EXEC rules the only size out that is ever run.
    _spiked("spikes_tight", rate_rps=700, slo_ms=12, share=0.003, factor=10, num_workers=4),
    _spiked(
        "spikes_light",
        rate_rps=150,
        slo_ms=9,
        share=0.001,
        factor=50,
        num_workers=1,
        num_models=2,
        seconds=20,
    ),
    _spiked(
        "spikes_many_gpus",
        rate_rps=3000,
        slo_ms=20,
        share=0.005,
        factor=20,
        num_workers=12,
        num_models=60,
        seconds=4,
        row="resnet18_v1b",
    ),
    # Half of the models fit: loads are slow too.
    _spiked(
        "spikes_loads",
        rate_rps=300,
        slo_ms=60,
        share=0.01,
        factor=8,
        num_workers=2,
        num_models=60,
        num_pages=105,
        seconds=8,
    ),
    _spiked(
        "spikes_bursts",
        rate_rps=1200,
        slo_ms=40,
        share=0.004,
        factor=20,
        num_workers=4,
        bursts_ms=150,
    ),
)
