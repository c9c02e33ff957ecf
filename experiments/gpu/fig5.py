"""Figure 5 on the card: 15 x ResNet50, 16 closed-loop clients each, ever tighter SLOs, live and simulated.

The paper's workload (`experiments.clockwork_paper.fig5`) against a `clockwright up` on the card, one SLO after the
other, compared with the simulator's prediction from what was measured on the same server before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clockwright.units import NS_PER_S
from experiments.clockwork_paper.cases import CONCURRENCY, NUM_MODELS, closed
from experiments.gpu import live
from traces.arrivals import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(live.Setting):
    """The server, its clients, and how long they ask."""

    pages: int = 8 * NUM_MODELS
    num_models: int = NUM_MODELS
    concurrency: int = CONCURRENCY
    slos_ms: tuple[int, ...] = (10, 25, 50, 100, 250, 500)

    @property
    def rehearsal_s(self) -> float:
        """A tenth of all."""
        return self.seconds / 10

    @property
    def each_ns(self) -> int:
        """Length of each SLO's run, of which the first quarter is left out."""
        return round((self.seconds - 3 * self.rehearsal_s) / len(self.slos_ms) * NS_PER_S)

    def _workload(self, slo_ms: int, end_ns: int) -> Workload:
        """All clients of all models."""
        case = closed(
            self.seed,
            slo_ms=slo_ms,
            duration_ns=end_ns,
            num_models=self.num_models,
            concurrency=max(round(self.concurrency * self.share), 1),
        )
        return replace(case.workload, models=self.model_ids)

    @property
    def mix(self) -> Workload:
        """The load at the loosest SLO, where batches are largest."""
        return self._workload(max(self.slos_ms), round(self.rehearsal_s * NS_PER_S))

    @property
    def workloads(self) -> list[Workload]:
        """One workload per SLO."""
        return [self._workload(slo_ms, self.each_ns) for slo_ms in self.slos_ms]

    @property
    def stretches(self) -> list[live.Stretch]:
        """Each SLO after its warm-up."""
        begin_ns, end_ns = self.each_ns // 4, self.each_ns
        return [
            live.Stretch(key=f"slo{slo_ms}", workload=index, begin_ns=begin_ns, end_ns=end_ns)
            for index, slo_ms in enumerate(self.slos_ms)
        ]


STUDY = live.study("fig5", Setting())
