"""Copies of ResNet50 that share one simulated GPU, asked at random for multiples of what it could answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.bounds import Cost, density_rate
from experiments.clockwork_paper.cases import poisson
from experiments.simulator import Case, copies_of
from modelzoo.profile import Noise, load_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class OneGpu:
    """What all studies of such a GPU set."""

    architecture: str = "resnet50_v1b"
    slo_ms: int = 100
    #: Requests that arrive before this are not counted.
    warmup_ns: int = 2 * NS_PER_S
    measured_ns: int = 8 * NS_PER_S
    noise: Noise = field(default_factory=lambda: Noise(exec_sigma=0.003, load_sigma=0.003))

    @property
    def slo_ns(self) -> int:
        """The SLO of every request."""
        return self.slo_ms * NS_PER_MS

    @property
    def capacity_rps(self) -> float:
        """Requests per second that the GPU could answer if every batch were the best one."""
        row = load_profile("table1").row_for(self.architecture)
        return density_rate([Cost(row.exec_ns)], slo_ns=self.slo_ns)

    def case(self, num_models: int, load: float, seed: int, **fields: Any) -> Case:  # noqa: ANN401
        """So many copies, asked by a Poisson process for a multiple of the capacity; `fields` are more of the case."""
        row = load_profile("table1").row_for(self.architecture)
        case = poisson(
            copies_of(row, num_models),
            seed,
            num_gpus=1,
            rate_rps=load * self.capacity_rps,
            slo_ns=self.slo_ns,
            duration_ns=self.warmup_ns + self.measured_ns,
            noise=self.noise,
        )
        return replace(case, **fields)
