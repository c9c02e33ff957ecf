"""Figure 5 on the card: 15 x ResNet50, 16 closed-loop clients each, ever tighter SLOs, live and simulated.

The paper's workload (`experiments.clockwork_paper.fig5`) against a `clockwright up` on the card, one SLO after the
other, beside the simulator's prediction from what was measured on the same server before.
"""

from __future__ import annotations

from dataclasses import dataclass

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.clockwork_paper.fig5 import ARCHITECTURE, CONCURRENCY, NUM_MODELS
from experiments.gpu.hardware import CARD, Load, arguments
from experiments.gpu.live import Server, Stretch, produce, whole_ns
from experiments.live.live_run import LiveModel
from traces.arrivals import ClosedLoop, Workload

BATCH_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The server, its clients, and how long they ask."""

    server: Server
    concurrency: int = CONCURRENCY
    slos_ms: tuple[int, ...] = (10, 25, 50, 100, 250, 500)
    #: Each SLO's run: this much is left out, then `measured_ns` count.
    warmup_ns: int = NS_PER_S
    measured_ns: int = 3 * NS_PER_S
    #: Length of each rehearsal.
    rehearsal_s: float = 2.0

    def workload(self, slo_ms: int, end_ns: int) -> Workload:
        """All clients of all models."""
        loops = tuple(
            ClosedLoop(
                model=model, concurrency=self.concurrency, slo_ns=slo_ms * NS_PER_MS, end_ns=end_ns
            )
            for model in range(len(self.server.model_ids))
        )
        return Workload(models=self.server.model_ids, closed_loops=loops)

    @property
    def mix(self) -> Workload:
        """The load at the loosest SLO, where batches are largest."""
        return self.workload(max(self.slos_ms), round(self.rehearsal_s * NS_PER_S))

    @property
    def workloads(self) -> list[Workload]:
        """One workload per SLO."""
        end_ns = self.warmup_ns + self.measured_ns
        return [self.workload(slo_ms, end_ns) for slo_ms in self.slos_ms]

    @property
    def stretches(self) -> list[Stretch]:
        """Each SLO after its warm-up."""
        end_ns = self.warmup_ns + self.measured_ns
        return [
            Stretch(key=f"slo{slo_ms}", workload=index, begin_ns=self.warmup_ns, end_ns=end_ns)
            for index, slo_ms in enumerate(self.slos_ms)
        ]

    @property
    def seeds(self) -> tuple[int, ...]:
        """No seeds: closed-loop clients ask when they are answered."""
        return ()


def setting_of(device: str, seconds: float, load: Load = CARD) -> Setting:
    """The paper's setting, within so many seconds of load."""
    name = load.architecture or ARCHITECTURE
    models = LiveModel(name=name, copies=NUM_MODELS, batch_sizes=BATCH_SIZES, architecture=name)
    num_pages = load.num_pages or 8 * NUM_MODELS
    server = Server(device=device, models=(models,), num_pages=num_pages, host_mib=512)
    slos_ms = Setting(server=server).slos_ms
    rehearsal_s = seconds / 10
    each_s = (seconds - 3 * rehearsal_s) / len(slos_ms)
    return Setting(
        server=server,
        concurrency=max(round(CONCURRENCY * load.share), 1),
        warmup_ns=whole_ns(each_s / 4),
        measured_ns=whole_ns(each_s * 3 / 4),
        rehearsal_s=rehearsal_s,
    )


def main() -> None:
    """Produce it as `make gpu` asks."""
    options = arguments(__doc__.splitlines()[0], seconds=30.0, with_load=True)
    setting = setting_of(options.device, options.seconds, options.load)
    produce("fig5", setting, f"python -m experiments.gpu.fig5 {options.words}", options.results)


if __name__ == "__main__":
    main()
