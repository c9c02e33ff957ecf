"""Steps that now and then take many times as long as they should: a pause of the host, a retry of the device.

The fault touches one step in a hundred or fewer. `without` is the same load where none is slow, so a family's
share says what the fault costs beyond the answers that the slow steps themselves delay.
"""

from __future__ import annotations

from typing_extensions import Unpack

from experiments.policies.load import Load, RandomLoad, at_random
from experiments.simulator import Faults, copies_of
from modelzoo.profile import Noise, load_profile

_ROWS = load_profile("table1").rows


def _spiked(
    name: str,
    share: float,
    factor: float,
    *,
    models: int = 24,
    row: str = "resnet50_v1b",
    **load: Unpack[RandomLoad],
) -> Load:
    """Equal models; a share of LOADs and EXECs takes `factor` times as long as usual."""
    faulty, sound = (
        {"faults": Faults(slow_probability=slow, slow_factor=factor)} for slow in (share, 0.0)
    )
    load.setdefault("noise", Noise(exec_sigma=0.02, load_sigma=0.02))
    return at_random(name, "spikes", copies_of(_ROWS[row], models), faulty, sound, **load)


FAMILIES: tuple[Load, ...] = (
    # Busy, the queue fills batches of all sizes: the sizes that one slow EXEC takes away are missed at once.
    _spiked("spikes_busy", 0.003, 10, rate_rps=2400, slo_ms=50, gpus=4),
    _spiked("spikes_x5", 0.01, 5, rate_rps=1500, slo_ms=30, gpus=3),
    _spiked("spikes_x50", 0.001, 50, rate_rps=1800, slo_ms=40, gpus=4),
    _spiked("spikes_often", 0.02, 10, rate_rps=1200, slo_ms=60, gpus=4),
    # Below the factor at which an estimate leaves a measurement out.
    _spiked("spikes_x2", 0.02, 2.5, rate_rps=1500, slo_ms=25, gpus=3),
    # Overload for as long as it takes to lose every size.
    _spiked("spikes_overload", 0.001, 20, rate_rps=1900, slo_ms=50, gpus=2, models=12, seconds=10),
    # Little work and little time: one slow EXEC rules the only size out that is ever run.
    _spiked("spikes_tight", 0.003, 10, rate_rps=700, slo_ms=12, gpus=4),
    _spiked("spikes_light", 0.001, 50, rate_rps=150, slo_ms=9, gpus=1, models=2, seconds=20),
    _spiked(
        "spikes_many_gpus", 0.005, 20, row="resnet18_v1b",
        rate_rps=3000, slo_ms=20, gpus=12, models=60, seconds=4,
    ),
    # Half of the models fit: loads are slow too.
    _spiked(
        "spikes_loads", 0.01, 8, rate_rps=300, slo_ms=60, gpus=2, models=60, pages=105, seconds=8
    ),
    _spiked("spikes_bursts", 0.004, 20, rate_rps=1200, slo_ms=40, gpus=4, bursts_ms=150),
)  # fmt: skip
