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
from experiments.gpu import live
from traces.arrivals import Poisson, Workload

#: The clients ask at this share of the paper's rates.
SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(live.Setting):
    """The server, its clients, and how long they ask."""

    seconds: float = 36.0
    pages: int = fig6.Setting().num_pages
    # A thousand instances are to answer; a few of the last to join are asked nothing, 13 in a thousand. The first is
    # Minor's.
    num_models: int = 1051
    num_parts: int = 4
    seed: int = 6

    @property
    def rehearsal_s(self) -> float:
        """A twelfth of all."""
        return self.seconds / 12

    @property
    def borders_ns(self) -> tuple[int, int, int]:
        """Until when Minor asks alone, until when Major's instances join one by one, and the end."""
        lead, ramp, end_state = (round(self.seconds * NS_PER_S / part) for part in (20, 2, 5))
        return lead, lead + ramp, lead + ramp + end_state

    @property
    def mix(self) -> Workload:
        """The end state's load, with other arrivals."""
        everybody = Poisson(
            models=range(self.num_models),
            rate_rps=SHARE * self.share * (fig6.MAJOR_RPS + fig6.MINOR_RPS),
            slo_ns=fig6.SLO_NS,
            end_ns=round(self.rehearsal_s * NS_PER_S),
            seed=self.seed + 1,
        )
        return Workload(models=self.model_ids, sources=(everybody,))

    @property
    def workloads(self) -> list[Workload]:
        """The one workload: Minor's and Major's requests."""
        num_major = self.num_models - 1
        lead_ns, ramp_end_ns, end_ns = self.borders_ns
        step_ns, rest_ns = divmod(ramp_end_ns - lead_ns, num_major)
        paper = fig6.Setting(
            num_models=num_major,
            step_ns=step_ns,
            lead_ns=lead_ns,
            end_state_ns=end_ns - ramp_end_ns + rest_ns,
            bucket_ns=1,
            seed=self.seed,
        )
        workload = fig6.case_of(paper, paper.policies[0]).workload
        return [replace(workload.scaled(SHARE * self.share), models=self.model_ids)]

    @property
    def stretches(self) -> list[live.Stretch]:
        """Lead, parts of the ramp and end state, each for Minor, for Major and for both."""
        lead_ns, ramp_end_ns, end_ns = self.borders_ns
        part_ns = (ramp_end_ns - lead_ns) // self.num_parts
        begins_ns = [lead_ns + part * part_ns for part in range(self.num_parts)]
        edges_ns = [0, *begins_ns, ramp_end_ns, end_ns]
        names = ["lead", *(f"ramp{part + 1}" for part in range(self.num_parts)), "end"]
        minor, *major = self.model_ids
        return [
            live.Stretch(
                key=f"{name}_{kind}",
                workload=0,
                begin_ns=begin_ns,
                end_ns=end_ns,
                model_ids=model_ids,
            )
            for name, begin_ns, end_ns in zip(names, edges_ns, edges_ns[1:], strict=False)
            for kind, model_ids in (
                ("minor", frozenset([minor])),
                ("major", frozenset(major)),
                ("both", None),
            )
        ]


STUDY = live.study("fig6", Setting())
