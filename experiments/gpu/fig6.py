"""Figure 6 on the card: a thousand instances of ResNet50, live and simulated.

The paper's workload (`experiments.clockwork_paper.fig6`), faster: one more of the Major instances every few
milliseconds instead of every second. All instances have the same weights, of which the host keeps one
copy; on the card each has pages of its own, as it would with others. The weights cache is the paper's, 201
instances. Rates are smaller than the paper's, because inputs come over gRPC here: in the paper's
experiment workers made them up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clockwright.units import NS_PER_S
from experiments.clockwork_paper import fig6
from experiments.clockwork_paper.cases import ARCHITECTURE
from experiments.gpu.hardware import CARD, Load, arguments
from experiments.gpu.live import Server, Stretch, produce, whole_ns
from experiments.live.live_run import LiveModel
from traces.arrivals import Poisson, Workload

# A thousand instances are to answer; a few of the last to join are asked nothing, 13 in a thousand.
NUM_MODELS = 1050
#: The clients ask at this share of the paper's rates.
SHARE = 0.4
BATCH_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The server, its clients, and how long they ask."""

    #: The first model is Minor's.
    server: Server
    share: float = SHARE
    #: Time with Minor alone, then with Major's instances joining one by one, then with all.
    lead_ns: int = 2 * NS_PER_S
    ramp_ns: int = 20 * NS_PER_S
    end_state_ns: int = 6 * NS_PER_S
    num_parts: int = 4
    #: Length of each rehearsal.
    rehearsal_s: float = 2.0
    seed: int = 6

    @property
    def mix(self) -> Workload:
        """The end state's load, with other arrivals."""
        everybody = Poisson(
            models=range(len(self.server.model_ids)),
            rate_rps=self.share * (fig6.MAJOR_RPS + fig6.MINOR_RPS),
            slo_ns=fig6.SLO_NS,
            end_ns=round(self.rehearsal_s * NS_PER_S),
            seed=self.seed + 1,
        )
        return Workload(models=self.server.model_ids, sources=(everybody,))

    @property
    def workloads(self) -> list[Workload]:
        """The one workload: Minor's and Major's requests."""
        num_major = len(self.server.model_ids) - 1
        paper = fig6.Setting(
            num_models=num_major,
            step_ns=self.ramp_ns // num_major,
            lead_ns=self.lead_ns,
            end_state_ns=self.end_state_ns + self.ramp_ns % num_major,
            bucket_ns=1,
            seed=self.seed,
        )
        workload = fig6.case_of(paper, paper.policies[0]).workload
        return [replace(workload.scaled(self.share), models=self.server.model_ids)]

    @property
    def end_ns(self) -> int:
        """End of the workload, since its begin."""
        return self.lead_ns + self.ramp_ns + self.end_state_ns

    @property
    def stretches(self) -> list[Stretch]:
        """Lead, parts of the ramp and end state, each for Minor, for Major and for both."""
        ramp_end_ns = self.lead_ns + self.ramp_ns
        borders = [
            self.lead_ns + whole_ns(part * self.ramp_ns / self.num_parts / NS_PER_S) * (part > 0)
            for part in range(self.num_parts)
        ]
        phases = [("lead", 0, self.lead_ns), ("end", ramp_end_ns, self.end_ns)]
        phases += [
            (f"ramp{part + 1}", begin_ns, end_ns)
            for part, (begin_ns, end_ns) in enumerate(
                zip(borders, [*borders[1:], ramp_end_ns], strict=True)
            )
        ]
        minor, *major = self.server.model_ids
        return [
            Stretch(
                key=f"{phase}_{kind}",
                workload=0,
                begin_ns=begin_ns,
                end_ns=end_ns,
                model_ids=model_ids,
            )
            for phase, begin_ns, end_ns in sorted(phases, key=lambda each: each[1])
            for kind, model_ids in (
                ("minor", frozenset([minor])),
                ("major", frozenset(major)),
                ("both", None),
            )
        ]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the workload and of the mix."""
        return self.seed, self.seed + 1


def setting_of(device: str, seconds: float, load: Load = CARD) -> Setting:
    """A thousand instances, within so many seconds of load."""
    name = load.architecture or ARCHITECTURE
    models = LiveModel(name=name, copies=NUM_MODELS + 1, batch_sizes=BATCH_SIZES, architecture=name)
    num_pages = load.num_pages or fig6.Setting().num_pages
    server = Server(device=device, models=(models,), num_pages=num_pages, host_mib=512)
    return Setting(
        server=server,
        share=SHARE * load.share,
        lead_ns=whole_ns(seconds / 20),
        ramp_ns=whole_ns(seconds / 2),
        end_state_ns=whole_ns(seconds / 5),
        rehearsal_s=seconds / 12,
    )


def main() -> None:
    """Produce it as `make gpu` asks."""
    options = arguments(__doc__.splitlines()[0], seconds=36.0, with_load=True)
    setting = setting_of(options.device, options.seconds, options.load)
    produce("fig6", setting, f"python -m experiments.gpu.fig6 {options.words}", options.results)


if __name__ == "__main__":
    main()
